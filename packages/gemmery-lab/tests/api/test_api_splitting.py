"""Operands that are split once, before their products: on a device of the emulator, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from emulated_card import installed
from gemmery.api import device_call
from gemmery.arrange import arrange
from gemmery.arrays import View, contiguous

pytestmark = pytest.mark.sampled(5)

pytest.importorskip("cuda.bindings")
M, N, K = 40, 24, 136


@pytest.fixture(scope="module")
def module_card():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemmery.dispatch.cuda.parts_pay", lambda *_, **__: True)  # a small one is left to CUDA cores
        yield installed(patch)


@pytest.fixture
def card(module_card):
    module_card.launched.clear()
    module_card.findings.clear()
    module_card.memory.restart()
    yield module_card
    assert module_card.findings == []


def drawn(card, *shape, by_columns=False, seed=0):
    numbers = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
    return card.put(np.swapaxes(numbers, -1, -2), "f32").T if by_columns else card.put(numbers, "f32")


def multiplied(card, a, b, shape, by_columns=False, **options):
    """The elements of the product, in memory of the card."""
    out = card.empty((*shape[:-2], shape[-1], shape[-2]), "f32").T if by_columns else card.empty(shape, "f32")
    gm.matmul(a, b, out, **options)
    return np.array(out.numbers)


def split_and_not(card, a, b, which, shape, by_columns=False, **options):
    """The product of split operands and that of the arrays; the kernels of the first have run last."""
    wanted = multiplied(card, a, b, shape, by_columns, **options)
    x, y = (gm.split(z, side) if side in which else z for z, side in ((a, "a"), (b, "b")))
    card.launched.clear()
    return multiplied(card, x, y, shape, by_columns, **options), wanted


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "which", "by_columns"),
    [("f32_tensor", "b", False), ("f32_strict", "ab", True), ("f32_plus", "a", False)],
)
def test_bits_are_those_of_the_array_itself(card, name, which, by_columns):
    a, b = drawn(card, M, K), drawn(card, K, N, by_columns=by_columns)
    split, wanted = split_and_not(card, a, b, which, (M, N), by_columns, precision=name)
    assert np.array_equal(split, wanted)
    assert card.launched[0] == "split_prepared"
    assert card.launched[-1].startswith("split_")


def test_operands_that_are_split_by_strips(card, monkeypatch):
    monkeypatch.setattr("gemmery.ladder.float32_pre_pass._SLABS_TO", 0)
    a, b = drawn(card, 44, 140, by_columns=True), drawn(card, 140, 28)
    for name in ("f32_tensor", "f32_strict"):
        split, wanted = split_and_not(card, a, b, "ab", (44, 28), precision=name)
        assert np.array_equal(split, wanted)


def test_the_device_still_chooses(card):
    """Halves, three bfloat16 where elements are small, CUDA cores for Inf: the last kernel that writes C decides."""
    for planted, which in ((1e-30, "a"), (np.inf, "b")):
        a, b = drawn(card, M, K), drawn(card, K, N)
        (a if which == "a" else b).numbers[3, 5] = planted
        split, wanted = split_and_not(card, a, b, which, (M, N), precision="f32_tensor")
        assert np.array_equal(split, wanted, equal_nan=True)


def test_one_operand_serves_other_products(card):
    """A small element of the other operand changes the parts that are taken, not those that are kept."""
    b = drawn(card, K, N)
    kept = gm.split(b)
    for seed in (1, 2):
        a = drawn(card, M, K, seed=seed)
        a.numbers[7, 7] *= 1e-30 if seed == 1 else 1
        wanted = multiplied(card, a, b, (M, N), precision="f32_tensor")
        assert np.array_equal(multiplied(card, a, kept, (M, N), precision="f32_tensor"), wanted)


@pytest.mark.many
@pytest.mark.parametrize(
    ("a", "b", "which", "uses"),
    [
        ((3, M, K), (3, K, N), "b", True),
        ((3, M, K), (K, N), "a", True),  # the batch becomes rows
        ((2, 3, M, K), (3, K, N), "b", True),  # one launch for each matrix of A's first side
        ((2, 1, M, K), (3, K, N), "a", False),  # a row of A is read by each of three products, in another order
    ],
)
def test_batches(card, a, b, which, uses):
    shape = (*np.broadcast_shapes(a[:-2], b[:-2]), *a[-2:-1], N)
    x, y = drawn(card, *a), drawn(card, *b)
    split, wanted = split_and_not(card, x, y, which, shape, precision="f32_strict")
    assert np.array_equal(split, wanted)
    assert ("split_prepared" in card.launched) == uses


def test_steps_after_the_product(card):
    a, b, bias = drawn(card, M, K), drawn(card, K, N), drawn(card, N)
    split, wanted = split_and_not(card, a, b, "b", (M, N), precision="f32_tensor", bias=bias, activation="relu")
    assert np.array_equal(split, wanted)
    c = [drawn(card, M, N) for _ in range(2)]
    for each, z in zip(c, (b, gm.split(b)), strict=True):
        gm.gemm(0.5, a, z, -2.0, each, out=each, precision="f32_tensor")
    assert np.array_equal(c[0].numbers, c[1].numbers)


def test_what_cuda_cores_multiply_reads_the_array(card, monkeypatch):
    a, b = drawn(card, M, 8), drawn(card, 8, N)
    split, wanted = split_and_not(card, a, b, "b", (M, N), precision="f32_strict")
    assert np.array_equal(split, wanted)
    assert "split_prepared" not in card.launched
    empty = gm.split(card.empty((K, 0), "f32"))
    assert (empty.nbytes, empty.shape) == (0, (K, 0))


def test_the_memory_of_parts(card):
    kept = gm.split(drawn(card, K, N))
    assert kept.nbytes == 10 * N * 192 + 256 + 768 + 256  # k is 192; what scales columns, what is small, the status
    assert repr(kept) == f"SplitOperand(shape=({K}, {N}), operand='b', nbytes={kept.nbytes})"


def test_errors(card):
    a, b = drawn(card, M, K), drawn(card, K, N)
    kept = gm.split(b)
    for precision in (None, "tf32"):
        with pytest.raises(gm.ArgumentError, match=r"parts are for 'f32_tensor'.*or the array itself"):
            gm.matmul(a, kept, precision=precision)
    with pytest.raises(gm.ArgumentError, match=r"a was split as operand='b'.*gm.split\(a, operand='a'\)"):
        gm.matmul(kept, b, precision="f32_tensor")
    with pytest.raises(gm.ShapeError, match="last dimension of the first is 135"):
        gm.matmul(drawn(card, M, K - 1), kept, precision="f32_tensor")
    with pytest.raises(gm.ArgumentError, match="must be 'a', the left operand"):
        gm.split(b, "c")
    with pytest.raises(gm.DTypeError, match="takes float32, not f16"):
        gm.split(card.put(np.ones((8, 8)), "f16"))
    with pytest.raises(gm.ShapeError, match="two sides"):
        gm.split(drawn(card, K))
    with pytest.raises(gm.DeviceError, match="on the CPU float32 is multiplied as it is"):
        gm.split(np.ones((8, 8), np.float32))
    with pytest.raises(gm.DeviceError):
        gm.matmul(np.ones((M, K), np.float32), kept, precision="f32_tensor")


def test_a_default_precision_is_enough(card):
    a, b = drawn(card, M, K), drawn(card, K, N)
    wanted = multiplied(card, a, b, (M, N), precision="f32_strict")
    gm.set_float32_precision("f32_strict")
    try:
        assert np.array_equal(multiplied(card, a, gm.split(b), (M, N)), wanted)
    finally:
        gm.set_float32_precision(None)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 5), (4, 5), (1, 2, 1, 5)])
def test_only_the_order_of_memory_is_walked(shape):
    """Of every broadcast of A, the operand counts exactly if the kernel's flat places are those of its own rows."""
    b = View(0, shape, contiguous(shape, 4), "f32")
    count, step = device_call.distinct(b, "b")
    own = [place // shape[-1] * step + place % shape[-1] * 4 for place in range(count * shape[-1])]
    for left in ((), (1,), (3,), (2, 1), (2, 3), (7, 1, 1), (7, 2, 3)):
        try:
            batch = np.broadcast_shapes(left, shape[:-2])
        except ValueError:
            continue
        x, c = (*left, 6, shape[-2]), (*batch, 6, shape[-1])
        form = arrange(x, contiguous(x, 4), b.shape, b.strides, c, contiguous(c, 4), 4)
        matrices = form.batch if form.b[0] else 1
        read = [place // form.n * form.b[0] + place % form.n * form.b[2] for place in range(matrices * form.n)]
        starts = {start for _, start, _ in form.offsets()}
        assert device_call.walks_parts(form, "b", b) == (read == own and starts == {0}), left
