"""Float32 on tensor cores in parts, on a device of sm_90: bits, errors of whole matrices, the guard's choice."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda import driver
from gemmery.ladder import float32_parts
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gpu_operands import built, matrices, place, problem, run
from split_rules import U, chain, enough, expected, three_parts

NAMES = ("split_fp16x3", "split_bf16x6", "split_paired")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(
        bool(driver.missing()) or driver.find("cuda:0").capability != 90, reason="needs a device of sm_90"
    ),
]
BOUNDS = {
    "split_fp16x3": float32_parts.two_parts,
    "split_bf16x6": float32_parts.three_parts,
    "split_paired": float32_parts.pairs,
}


def of_kind(kind, m, n, k, seed=0):
    """Operands of one of the kinds that differ in how errors arise."""
    draw = np.random.default_rng(seed)
    a, b = draw.standard_normal((m, k)), draw.standard_normal((k, n))
    if kind == "uniform":
        a, b = draw.random((m, k)), draw.random((k, n))
    elif kind == "wide":
        a, b = a * np.exp(4 * draw.standard_normal((m, k))), b * np.exp(4 * draw.standard_normal((k, n)))
    elif kind == "rows":
        a, b = np.ldexp(a, draw.integers(-40, 41, (m, 1))), np.ldexp(b, draw.integers(-40, 41, (1, n)))
    elif kind in ("graded", "steep"):
        powers = draw.integers(-1, 2, k) * (16 if kind == "graded" else 30)
        a, b = np.ldexp(a, powers[None]), np.ldexp(b, -powers[:, None])
    elif kind == "cut":  # products just below what a sum that begins with 1 keeps
        a, b = np.full((m, k), 2.0**-12) * (1 + draw.random((m, k)) / 8), np.full((k, n), 2.0**-13)
        a[:, 0], b[0] = 1, 1
    elif kind == "integers":
        a, b = draw.integers(-(2**20), 2**20, (m, k)), draw.integers(-(2**20), 2**20, (k, n))
    elif kind == "canceling":
        half = k // 2
        a[:, half : 2 * half], b[half : 2 * half] = -a[:, :half], b[:half] * (1 + 2.0**-20)
    return a.astype(np.float32), b.astype(np.float32)


KINDS = ("normal", "uniform", "wide", "rows", "graded", "steep", "cut", "integers", "canceling")


def multiplied(name, a, b, layouts=("row", "row", "row"), config=None):
    """A B by a rung on the device."""
    x, y = place(a[None], "f32", layouts[0]), place(b[None], "f32", layouts[1])
    c = place(np.full((1, a.shape[0], b.shape[1]), np.nan, np.float32), "f32", layouts[2])
    kernel = built(find(CUDA, name), problem(x, y, c), config)
    kernel(x.view(), y.view(), c.view())
    driver.synchronize()
    return c.result()[0]


@pytest.mark.parametrize("k", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4096, 16_400])
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_the_rules(name, k):
    for kind in KINDS if k in (65, 1000) else ("normal", "steep"):
        a, b = of_kind(kind, 64, 64, k)
        assert np.array_equal(multiplied(name, a, b), expected(name, a, b)), kind


@pytest.mark.parametrize(
    "layouts", [("odd", "col", "row"), ("col", "padded", "col"), ("strided", "reversed col", "row")]
)
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_layouts_and_tiles(name, layouts):
    """C by columns is the transposed product: the parts of its left operand are those of B."""
    a, b = of_kind("normal", 300, 200, 328)
    left, right = a[:64], b[:, :64]
    wanted = expected(name, right.T, left.T).T if layouts[2] == "col" else expected(name, left, right)
    for bm in (0, 64, 128):
        c = multiplied(name, a, b, layouts, {"bm": bm})
        assert np.array_equal(c[:64, :64], wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_element_of_large_products_keeps_the_bound(name, kind):
    for m, n, k in ((1024, 1024, 1024), (1024, 1000, 200), (520, 1024, 4104)):
        a, b = of_kind(kind, m, n, k)
        wide = a.astype(np.float64), b.astype(np.float64)
        allowed = BOUNDS[name](k) * U * (abs(wide[0]) @ abs(wide[1]))
        assert (abs(multiplied(name, a, b) - wide[0] @ wide[1]) <= allowed + 2.0**-149).all(), (m, n, k)


def test_random_products_keep_the_bound():
    draw = np.random.default_rng(1)
    for number in range(300):
        name, kind = NAMES[number % 3], KINDS[draw.integers(len(KINDS))]
        m, n, k = (int(2 ** draw.uniform(0, 9)) for _ in range(3))
        a, b = of_kind(kind, m, n, k, number)
        wide = a.astype(np.float64), b.astype(np.float64)
        allowed = BOUNDS[name](k) * U * (abs(wide[0]) @ abs(wide[1]))
        assert (abs(multiplied(name, a, b) - wide[0] @ wide[1]) <= allowed + 2.0**-149).all(), (name, kind, m, n, k)


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_chooses_by_the_guard(kind):
    a, b = of_kind(kind, 64, 64, 256)
    wide = a.astype(np.float64), b.astype(np.float64)
    c = multiplied("split_fp16x3", a, b)
    assert np.array_equal(c, expected("split_fp16x3", a, b))
    if not enough(*wide).all():
        assert np.array_equal(c, three_parts(*wide))


@pytest.mark.parametrize("planted", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite(name, planted):
    """The sums are those of CUDA cores, in every element."""
    a, b = of_kind("normal", 100, 72, 200)
    a[7, 9] = planted
    wanted = chain(a.astype(np.float64), b.astype(np.float64))
    assert np.array_equal(multiplied(name, a, b), wanted, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_each_time(name):
    """Also of launches that overlap, into one C after the other."""
    a, b, first = matrices((1000, 1100, 1032), "f32", "f32")
    others = [matrices((1000, 1100, 1032), "f32", "f32")[2] for _ in range(6)]
    kernel = built(find(CUDA, name), problem(a, b, first))
    for c in (first, *others):
        kernel(a.view(), b.view(), c.view())
    driver.synchronize()
    bits = first.result().tobytes()
    assert all(c.result().tobytes() == bits for c in others)


@pytest.mark.parametrize("name", NAMES)
def test_batches_that_share_an_operand(name):
    for shared in ((True, False), (False, True)):
        assert run(find(CUDA, name), *matrices((100, 72, 200), "f32", "f32", batch=5, shared=shared))


@pytest.mark.parametrize("precision", ["f32_tensor", "f32_strict", "f32_plus"])
@pytest.mark.parametrize("kind", ["normal", "wide", "infinite"])
def test_operands_that_are_split_before(precision, kind):
    """The bits of the arrays themselves, by any method that the device chooses, into C by rows and by columns."""
    torch = pytest.importorskip("torch")
    host = of_kind("normal" if kind == "infinite" else kind, 300, 520, 1000)
    if kind == "infinite":
        host[1][7, 9] = np.inf
    a, b = (torch.from_numpy(x).cuda() for x in host)
    options = {"precision": precision, "batch_invariant": precision == "f32_tensor"}  # it is not left to CUDA cores
    wanted = gm.matmul(a, b, **options)
    for x, y in ((a, gm.split(b)), (gm.split(a, "a"), b), (gm.split(a, "a"), gm.split(b.T.contiguous().T))):
        by_columns = torch.empty_strided((300, 520), (1, 300), device="cuda")
        gm.matmul(x, y, out=by_columns, **options)
        for _ in range(2):  # the second time by the short path
            assert torch.equal(gm.matmul(x, y, **options).nan_to_num(), wanted.nan_to_num())
        assert torch.equal(by_columns.nan_to_num(), gm.matmul(a, b, out=by_columns.clone(), **options).nan_to_num())


def test_a_graph_of_a_split_operand():
    torch = pytest.importorskip("torch")
    a, b = torch.randn(256, 512, device="cuda"), torch.randn(512, 384, device="cuda")
    kept, c = gm.split(b), torch.empty(256, 384, device="cuda")
    gm.matmul(a, kept, out=c, precision="f32_strict")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gm.matmul(a, kept, out=c, precision="f32_strict")
    a.normal_()
    graph.replay()
    assert torch.equal(c, gm.matmul(a, b, precision="f32_strict"))
