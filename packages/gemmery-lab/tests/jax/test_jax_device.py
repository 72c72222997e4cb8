"""The handler of gemmery.jax for CUDA devices, called as XLA calls it: also on a card whose launches are emulated."""

from __future__ import annotations

import ctypes
from hashlib import blake2b

import numpy as np
import pytest

from emulated_card import ORDINAL, installed
from gemmery import dtypes
from gemmery.api import on_device
from gemmery.api.device_call import table
from gemmery.cuda import ordered
from gemmery.keywords import PRECISIONS

pytest.importorskip("jax", reason="JAX is not installed")

from gemmery.jax import handler  # after the skip
from gemmery.jax.handler import A_TRANSPOSED, B_TRANSPOSED, StaticProduct


class Frame:
    """A call of XLA on a CUDA device, and the functions of XLA that its handler uses."""

    def __init__(self, a, b, c, transposed=0, precision=""):
        self.errors, self.owners = [], []
        callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        create, get = callback(self.create), callback(self.stream)
        self.owners += [create, get]
        functions = [ctypes.cast(function, ctypes.c_void_p).value for function in (create, get)]
        api = self.words(*[0] * 6, functions[0], 0, 0, 0, functions[1])
        operands = [
            self.words(48, 0, dtypes.get(name).xla, address, len(shape), self.words(*shape))
            for address, shape, name in (a, b, c)
        ]
        product = StaticProduct(a[1], b[1], a[2], c[2], transposed, precision)
        scalars = [self.words(self.words(0, self.words(x))) for x in (product.key, product.form)]
        values = self.words(*(ctypes.c_int64.from_address(scalar).value for scalar in scalars))
        args, results = self.words(*operands[:2]), self.words(operands[2])
        self.address = self.words(
            168, 0, api, 777, 3, *(40, 0, 2, 0, args), *(40, 0, 1, 0, results), *(48, 0, 2, 0, 0, values), 0
        )

    def words(self, *values):
        block = (ctypes.c_int64 * len(values))(*values)
        self.owners.append(block)
        return ctypes.addressof(block)

    def create(self, arguments):
        message, code = (ctypes.c_int64.from_address(arguments + at).value for at in (16, 24))
        self.errors.append((ctypes.string_at(message).decode(), code))
        return 4242

    def stream(self, arguments):
        words = (ctypes.c_int64 * 4).from_address(arguments)
        assert words[2] == 777  # the context
        words[3] = 888


@pytest.fixture(autouse=True)
def _no_launch_known_from_other_tests():
    table.forget()


def test_the_handler_of_devices_launches_on_the_stream_of_xla(monkeypatch):
    launched = []
    monkeypatch.setattr(ordered, "where", lambda pointer: 3)
    monkeypatch.setattr(on_device, "write", lambda *views: launched.append(views))
    call = Frame((4096, (2, 7, 5), "bf16"), (8192, (7, 4), "bf16"), (16384, (2, 5, 4), "f32"), A_TRANSPOSED)
    assert handler.handle(call.address) == 0
    ((x, y, c, precision),) = launched
    assert [z.pointer for z in (x, y, c)] == [4096, 8192, 16384]
    assert (x.shape, x.strides, x.dtype) == ((2, 5, 7), (70, 2, 10), "bf16")
    assert (y.shape, y.strides, y.dtype) == ((7, 4), (8, 2), "bf16")
    assert (c.shape, c.strides, c.dtype) == ((2, 5, 4), (80, 16, 4), "f32")
    assert {(z.device, z.stream) for z in (x, y, c)} == {("cuda:3", 888)}
    assert precision is None


def test_the_handler_of_devices_returns_errors_to_xla(monkeypatch):
    monkeypatch.setattr(ordered, "where", lambda pointer: 0)
    call = Frame((4096, (2, 2), "f32"), (8192, (2, 2), "f32"), (16384, (2, 2), "f16"))
    assert handler.handle(call.address) == 4242
    ((message, code),) = call.errors
    assert "DTypeError: dtype='float16' cannot represent every float32 value" in message
    assert code == 13


@pytest.mark.parametrize("transposed", range(4))
@pytest.mark.parametrize("precision", ["", *PRECISIONS])
def test_the_handler_of_devices_computes_with_the_precision_of_the_call(monkeypatch, precision, transposed):
    launched = []
    monkeypatch.setattr(ordered, "where", lambda pointer: 3)
    monkeypatch.setattr(on_device, "write", lambda *views: launched.append(views))
    name = "f64" if precision == "f64_normwise" else "f32"
    call = Frame((4096, (5, 5), name), (8192, (5, 5), name), (16384, (5, 5), name), transposed, precision)
    assert handler.handle(call.address) == 0, call.errors
    ((x, y, _, requested),) = launched
    assert requested == (precision or None)
    assert [z.strides[0] == dtypes.get(name).size for z in (x, y)] == [bool(transposed & 1), bool(transposed & 2)]


def test_products_of_different_precision_have_different_keys_and_others_the_key_of_before():
    plain = StaticProduct((5, 5), (5, 5), "f32", "f32", 0)
    keys = [plain._replace(precision=precision).key for precision in ("", *PRECISIONS)]
    assert len(set(keys)) == len(keys)
    whole = repr(((5, 5), (5, 5), "f32", "f32", 0)).encode()
    assert plain.key == int.from_bytes(blake2b(whole, digest_size=8).digest(), "little", signed=True)


@pytest.fixture
def card(monkeypatch):
    pytest.importorskip("cuda.bindings", reason="NVIDIA's bindings are not installed")
    monkeypatch.setattr(ordered, "where", lambda pointer: ORDINAL)
    return installed(monkeypatch)


@pytest.mark.parametrize("transposed", [0, A_TRANSPOSED, A_TRANSPOSED | B_TRANSPOSED])
@pytest.mark.parametrize(("dtype", "out"), [("f32", "f32"), ("bf16", "f32")])
def test_products_on_an_emulated_card(card, dtype, out, transposed):
    """Small whole numbers, whose sums are exact in any order."""
    draw = np.random.default_rng(1)
    a, b = draw.integers(-3, 4, (2, 1, 16, 24)), draw.integers(-3, 4, (3, 24, 8))
    x = card.put(a.swapaxes(-1, -2) if transposed & A_TRANSPOSED else a, dtype)
    y = card.put(b.swapaxes(-1, -2) if transposed & B_TRANSPOSED else b, dtype)
    c = card.empty((2, 3, 16, 8), out)
    call = Frame(*((z.memory.pointer, z.memory.shape, z.dtype) for z in (x, y, c)), transposed)
    assert handler.handle(call.address) == 0, call.errors
    assert np.array_equal(c.numbers, a @ b)
    assert card.launched
    assert card.findings == []


def test_a_known_product_is_launched_again_without_a_plan(card, monkeypatch):
    draw = np.random.default_rng(1)
    written = []
    write = on_device.write
    monkeypatch.setattr(on_device, "write", lambda *views: written.append(views) or write(*views))
    for count in (1, 1, 2):  # another batch is another product
        a, b = draw.integers(-3, 4, (count, 16, 24)), draw.integers(-3, 4, (24, 8))
        x, y = card.put(a, "f32"), card.put(b, "f32")
        for _ in range(3):
            c = card.empty((count, 16, 8), "f32")
            call = Frame(*((z.memory.pointer, z.memory.shape, z.dtype) for z in (x, y, c)))
            assert handler.handle(call.address) == 0, call.errors
            assert np.array_equal(c.numbers, a @ b)
    assert len(written) == 2


def test_a_question_about_the_handler_is_answered_with_the_version_of_the_header():
    metadata = (ctypes.c_int64 * 6)()
    extension = (ctypes.c_int64 * 4)(32, 1, 0, ctypes.addressof(metadata))
    question = (ctypes.c_int64 * 22)(168, ctypes.addressof(extension))
    assert handler.handle(ctypes.addressof(question)) == 0
    assert metadata[3] == handler.minor_version() << 32
