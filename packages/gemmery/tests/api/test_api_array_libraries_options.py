"""The fast path for products with options, with a stand-in for PyTorch and for the launches."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import gemmery as gm
from gemmery.api import array_libraries
from gemmery.api.device_call import CheckedCall, KnownOptions, OperandScales, table
from gemmery.arrays import View
from gemmery.cuda import ordered
from gemmery.keywords import Options


class OnDevice:
    """A stand-in for a tensor on a device, with what the path reads."""

    layout = "strided"

    def __init__(self, pointer, shape=(3, 3), dtype="float32", **state):
        self.pointer, self.shape, self.dtype, self.version = pointer, shape, dtype, 0
        self.requires_grad, self.neg = state.get("requires_grad", False), state.get("neg", False)

    def data_ptr(self):
        if self.pointer is None:
            raise RuntimeError("no memory")
        return self.pointer

    def get_device(self):
        return 0

    def stride(self):
        return (3, 1)[-len(self.shape) :]

    def is_neg(self):
        return self.neg

    def copy_(self, other):
        self.copied = other

    def to(self, dtype):
        return OnDevice(self.pointer + 1, self.shape, dtype)

    def new_empty_strided(self, shape, strides, dtype):
        return OnDevice(1 << (21 if dtype == "uint8" else 20), shape, dtype)


class Launches:
    """Launches that keep their arguments."""

    ordinal = 3

    def __init__(self, workspace=0, kept=(False, False)):
        self.workspace, self.kept, self.calls = workspace, kept, []

    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.fixture
def torch(monkeypatch):
    table.forget()
    c = SimpleNamespace(
        _is_tracing=lambda: False,
        _len_torch_dispatch_stack=lambda: 0,
        _are_functorch_transforms_active=lambda: False,
        _cuda_getCurrentRawStream=lambda _: 7,
    )
    graph = SimpleNamespace(increment_version=lambda x: setattr(x, "version", x.version + 1))
    return SimpleNamespace(
        _C=c,
        Tensor=OnDevice,
        nn=SimpleNamespace(Parameter=OnDevice),
        uint8="uint8",
        strided="strided",
        is_grad_enabled=lambda: True,
        autograd=SimpleNamespace(forward_ad=SimpleNamespace(_current_level=-1), graph=graph),
    )


def known(torch, options, out=None, run=None, parts=(0, 0), name="matmul", c=None, c_bytes=0, is_grouped=False):
    """Let the path know a call with tensors at 1024 and 2048."""
    library, run = array_libraries.Torch(torch), run or Launches()
    key = array_libraries.key_of(library, OnDevice(1024), OnDevice(2048), out, name, options, parts, c)
    others = [z for z in map((options or {}).get, ("bias", "scale_a", "scale_b")) if isinstance(z, OnDevice)]
    more = KnownOptions(
        ((-12, 36),) * (len(others) + (c is not None)),
        "float32",
        (0.5, 0.0),
        c is not None and not is_grouped,
        c_bytes,
        is_grouped,
    )
    served = SimpleNamespace(countdown=0, run=run)
    call = array_libraries.KnownCall(served, (3, 3), (3, 1), "bfloat16", -36, 36, -36, 36, more)
    table.calls[key] = call
    return run


def path(torch):
    """The fast path of matmul with these options."""
    multiply = array_libraries.Torch(torch).multiply
    return lambda a, b, out, options, *parts: multiply(a, b, out, "matmul", None, options, *parts)


def test_a_call_is_remembered_for_others_like_it(torch, monkeypatch):
    torch.bfloat16, torch.float32, torch.float64 = "bfloat16", "float32", "float64"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(array_libraries, "PATHS", {})
    monkeypatch.setattr(array_libraries, "_libraries", {})
    run, out = Launches(), OnDevice(4096)
    target = View(4096, (3, 3), (6, 2), "bf16", "cuda:0", owner=out)
    served = SimpleNamespace(countdown=0, run=run, form=SimpleNamespace(runs=1))
    options = {"bias": row(64), "scale_b": row(96)}
    x, y = (View(at, (3, 3), (12, 4), "f32", "cuda:0", owner=OnDevice(at)) for at in (1024, 2048))
    bias, scale = (View(pointer, (3,), (4,), "f32", "cuda:0") for pointer in (64, 96))
    asked, scales = Options(alpha=2.0, beta=0.0), OperandScales("outer", 1.0, None, scale)
    call = CheckedCall(x, y, target, asked, bias=bias, scales=scales)
    for result in (None, out):
        array_libraries.remember("matmul", call, result is None, options, served)
    assert len(table.calls) == 2
    path = array_libraries.PATHS[OnDevice]
    new = path(OnDevice(8192), OnDevice(2048), None, "matmul", None, {"bias": row(640), "scale_b": row(960)})
    assert (new.dtype, new.shape) == ("bfloat16", (3, 3))
    assert path(OnDevice(8192), OnDevice(2048), out, "matmul", None, options) is out
    assert [call[:5] for call in run.calls] == [(8192, 2048, 1 << 20, 7, 640), (8192, 2048, 4096, 7, 64)]
    assert path(OnDevice(4096 + 16), OnDevice(2048), out, "matmul", None, options) is None
    assert path(OnDevice(4096 + 18), OnDevice(2048), out, "matmul", None, options) is None  # at another alignment
    plain = call._replace(options=Options(alpha=1.0, beta=0.0))
    array_libraries.remember("matmul", plain, True, {"bias": 1.0}, served)
    assert len(table.calls) == 2


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_call_is_remembered_with_its_c_or_offsets(torch, monkeypatch, is_grouped):
    torch.float32 = "float32"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(array_libraries, "PATHS", {})
    monkeypatch.setattr(array_libraries, "_libraries", {})
    copies = []
    monkeypatch.setattr(ordered, "copy", lambda *asked: copies.append(asked[:3]))
    run, out, c = Launches(), OnDevice(4096), OnDevice(8192)
    x, y, old, target = (
        View(at, (3, 3), (12, 4), "f32", "cuda:0", owner=array)
        for at, array in ((1024, OnDevice(1024)), (2048, OnDevice(2048)), (8192, c), (4096, out))
    )
    served = SimpleNamespace(countdown=0, run=run, form=SimpleNamespace(runs=1))
    name = "grouped_matmul" if is_grouped else "gemm"
    asked = Options() if is_grouped else Options(alpha=2.0, beta=3.0, old=c)
    call = CheckedCall(x, y, target, asked, **{"offsets" if is_grouped else "old": old})
    array_libraries.remember(name, call, False, {}, served)
    scalars, other = None if is_grouped else (2.0, 5.0), OnDevice(16384)
    multiply = array_libraries.PATHS[OnDevice]
    assert multiply(OnDevice(1024), OnDevice(2048), out, name, scalars, None, (0, 0), other) is out
    assert run.calls == [(1024, 2048, 4096, 7, 0, 0, scalars or (1, 0), (0, 0, 16384) if is_grouped else ())]
    assert copies == ([] if is_grouped else [(16384, 4096, 36)])
    assert multiply(OnDevice(1024), OnDevice(2048), out, name, scalars) is None


def row(pointer, **fields):
    return OnDevice(pointer, (3,), **fields)


def test_matmul_asks_this_path_first(monkeypatch):
    asked = []

    def path(*arguments):
        asked.append(arguments)
        return "result"

    monkeypatch.setitem(array_libraries.PATHS, OnDevice, path)
    a, b = OnDevice(1024), OnDevice(2048)
    assert gm.matmul(a, b, scale_a=2.0, bias=b, batch_invariant=True) == "result"
    assert asked == [(a, b, None, "matmul", None, {"bias": b, "scale_a": 2.0, "batch_invariant": True})]
    assert gm.matmul(a, b, a) == "result"
    assert asked[1][:5] == (a, b, a, "matmul", None)
    assert asked[1][5:] in ((), (None,))  # by the compiled entry or without
    gm.matmul(a, b, bias=None, batch_invariant=False)
    gm.matmul(a, b, casting="same_kind")
    gm.matmul(a, b, dtype="float32", casting="same_kind")
    assert [call[5:] for call in asked[2:]] == [(None,), (None,), ({"dtype": "float32"},)]
    with pytest.raises(TypeError, match="'activate'"):
        gm.matmul(a, b, activate=None)


def test_addresses_of_bias_and_factors_reach_the_launch(torch):
    multiply = path(torch)
    options = {"bias": row(64), "activation": "relu", "scale_a": row(96), "scale_b": 0.5}
    run = known(torch, options)
    result = multiply(OnDevice(4096), OnDevice(8192), None, options | {"bias": row(128), "scale_a": row(160)})
    assert (result.dtype, result.shape) == ("bfloat16", (3, 3))
    assert run.calls == [(4096, 8192, 1 << 20, 7, 128, 0, (0.5, 0.0), (160, 0, 0))]
    run = known(torch, {"scale_b": row(96)}, run=Launches(workspace=64))
    multiply(OnDevice(1024), OnDevice(2048), None, {"scale_b": row(96)})
    assert run.calls == [(1024, 2048, 1 << 20, 7, 0, 1 << 21, (0.5, 0.0), (0, 96, 0))]


def test_a_product_without_options_is_served_too(torch):
    run = known(torch, {})
    path(torch)(OnDevice(1024), OnDevice(2048), None, {})
    assert run.calls == [(1024, 2048, 1 << 20, 7, 0, 0, (0.5, 0.0), ())]


@pytest.mark.parametrize("kept", [(False, True), (False, False)])
def test_addresses_of_parts_reach_the_launch_that_reads_them(torch, kept):
    options, multiply = {"precision": "f32_tensor"}, path(torch)
    run = known(torch, options, run=Launches(kept=kept), parts=(512, 256))
    assert multiply(OnDevice(1024), OnDevice(2048), None, options) is None  # the arrays themselves
    assert multiply(OnDevice(1024), OnDevice(2048), None, options, (0, 256)) is None
    assert multiply(OnDevice(1024), OnDevice(2048), None, options, (768, 128)) is not None
    assert [call[7] for call in run.calls] == [(0, 128, 0) if any(kept) else ()]


def test_a_bias_of_another_type_is_converted_at_each_call(torch):
    options = {"bias": row(64, dtype="bfloat16")}
    run = known(torch, options)
    path(torch)(OnDevice(1024), OnDevice(2048), None, options)
    assert run.calls[0][4] == 65


@pytest.mark.parametrize("beta", [1.0, 0.0])
def test_what_beta_multiplies_is_copied_into_the_result(torch, beta):
    c, out = OnDevice(8192), OnDevice(4096)
    multiply = array_libraries.Torch(torch).multiply
    for target in (None, out):
        run = known(torch, None, target, name="gemm", c=c)
        result = multiply(OnDevice(1024), OnDevice(2048), target, "gemm", (2.0, beta), None, (0, 0), c)
        assert getattr(result, "copied", None) is (c if beta else None)
        assert run.calls == [(1024, 2048, result.pointer, 7, 0, 0, (2.0, beta), ())]


def test_a_c_that_lies_as_the_result_is_copied_by_the_driver(torch, monkeypatch):
    c, copies = OnDevice(8192), []
    monkeypatch.setattr(ordered, "copy", lambda *asked: copies.append(asked))
    multiply = array_libraries.Torch(torch).multiply
    run = known(torch, None, name="gemm", c=c, c_bytes=36)
    assert not hasattr(multiply(OnDevice(1024), OnDevice(2048), None, "gemm", (2.0, 1.0), None, (0, 0), c), "copied")
    assert copies == [(8192, 1 << 20, 36, 7, 3)]
    assert len(run.calls) == 1


def test_offsets_of_groups_reach_the_launch(torch):
    multiply, ends = array_libraries.Torch(torch).multiply, OnDevice(8192, (3,), "int32")
    for options, factors in ((None, (0, 0)), ({"bias": row(64), "scale_b": row(96)}, (0, 96))):
        run = known(torch, options, name="grouped_matmul", c=ends, is_grouped=True)
        other = OnDevice(16384, (3,), "int32")
        result = multiply(OnDevice(1024), OnDevice(2048), None, "grouped_matmul", None, options, (0, 0), other)
        start = 64 if options else 0
        assert run.calls == [(1024, 2048, 1 << 20, 7, start, 0, (0.5, 0.0), (*factors, 16384))]
        assert not hasattr(result, "copied")
    assert multiply(OnDevice(1024), OnDevice(2048), None, "grouped_matmul", None, None, (0, 0), [1, 2, 3]) is None


def test_what_beta_multiplies_is_not_copied_onto_itself_nor_over_its_own_part(torch):
    out, multiply = OnDevice(4096), array_libraries.Torch(torch).multiply
    run = known(torch, None, out, name="gemm", c=OnDevice(4096))
    operands = OnDevice(1024), OnDevice(2048), out, "gemm", (2.0, 1.0), None, (0, 0)
    assert multiply(*operands, OnDevice(4096)) is out
    assert not hasattr(out, "copied")
    assert multiply(*operands, OnDevice(4096 - 16)) is None
    assert multiply(*operands, object()) is None
    assert len(run.calls) == 1


def test_out_is_returned_and_counted_as_written(torch):
    out, options = OnDevice(4096), {"activation": "gelu"}
    run = known(torch, options, out)
    assert path(torch)(OnDevice(1024), OnDevice(2048), out, options) is out
    assert (out.version, run.calls[0][2]) == (1, 4096)


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "silu"},
        {"scale_b": 2.0},
        {"scale_a": OnDevice(96, (3, 1))},
        {"bias": row(64, dtype="float16")},
        {"bias": 1.0},
        {"batch_invariant": False},
        {"batch_invariant": 1},
        {"dtype": "float32"},
        {"dtype": []},
        {"precision": "tf32"},
        {"threads": 1},
        {"scale_b": "big"},
        {"bias": row(0)},
        {"bias": row(None)},
        {"bias": row(64, requires_grad=True)},
        {"scale_a": row(96, neg=True)},
    ],
)
def test_other_calls_are_left_to_the_slow_path(torch, change):
    options = {"bias": row(64), "activation": "relu", "scale_a": row(96), "scale_b": 0.5, "batch_invariant": True}
    run, multiply = known(torch, options), path(torch)
    assert multiply(OnDevice(1024), OnDevice(2048), None, options | change) is None
    assert run.calls == []
    assert multiply(OnDevice(1024), OnDevice(2048), None, options) is not None


def test_an_out_that_overlaps_what_is_read_is_left_to_the_slow_path(torch):
    options, multiply = {"bias": row(64)}, path(torch)
    run = known(torch, options, OnDevice(4096))
    for a, b, bias in ((4096 + 16, 2048, 64), (1024, 4096 - 32, 64), (1024, 2048, 4096)):
        assert multiply(OnDevice(a), OnDevice(b), OnDevice(4096), {"bias": row(bias)}) is None
    assert run.calls == []
    assert multiply(OnDevice(1024), OnDevice(2048), OnDevice(4096), options) is not None


def test_arrays_that_are_no_tensors_are_left_to_the_slow_path(torch):
    known(torch, {})
    multiply = path(torch)
    assert multiply(OnDevice(1024), object(), None, {}) is None
    assert multiply(OnDevice(1024), OnDevice(2048), object(), {}) is None


def test_states_of_pytorch_are_left_to_the_slow_path(torch):
    known(torch, {})
    torch._C._is_tracing = lambda: True
    assert path(torch)(OnDevice(1024), OnDevice(2048), None, {}) is None


def test_a_precision_alone_takes_the_way_of_a_plain_product(torch, monkeypatch):
    """It chooses launches, which then need nothing more; with another option, or the other name, it has its own key."""
    torch.float32, asked = "float32", []
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(array_libraries, "PATHS", {})
    monkeypatch.setattr(array_libraries, "_libraries", {})
    run, options = Launches(), {"precision": "f32_tensor"}
    x, y, z = (View(at, (3, 3), (12, 4), "f32", "cuda:0", owner=OnDevice(at)) for at in (1024, 2048, 4096))
    served = SimpleNamespace(countdown=0, run=run, form=SimpleNamespace(runs=1))
    array_libraries.remember("matmul", CheckedCall(x, y, z, Options(**options)), False, options, served)
    (known_call,) = table.calls.values()
    assert known_call.options is None
    monkeypatch.setattr("gemmery.api.products.multiply", lambda *_, **given: asked.append(given))
    a, b, c = OnDevice(1024), OnDevice(2048), z.owner
    matmul = sys.modules["gemmery.api.products"].matmul
    assert matmul(a, b, c, **options) is c
    assert run.calls == [(1024, 2048, 4096, 7, 0, 0, None)]
    for other in ({"precision": "tf32"}, {**options, "batch_invariant": True}, {}):
        matmul(a, b, c, **other)
    assert asked == [{"precision": "tf32"}, {**options, "batch_invariant": True}, {}]
    assert len(run.calls) == 1
