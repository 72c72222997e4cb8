"""float8 and int8 products, factors of operands and batch invariance, on CUDA tensors of PyTorch.

Most values are small whole numbers and the factors powers of two, so that sums are exact and results must be equal to
the rounded product in float64.
"""

from __future__ import annotations

import pytest

import gemmery as gm
from gemmery.api import on_device
from gemmery.api.device_call import table
from gemmery.cuda import driver

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="float8, int8 and factors need a device of compute capability 9.0",
    ),
]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SHAPES = [
    (1, 1, 1), (64, 48, 32), (128, 128, 128), (1, 300, 200), (200, 1, 300), (77, 129, 65), (300, 260, 1000),
    *((70, 90, k) for k in (0, 1, 8, 63, 64)),
]  # fmt: skip
LAYOUTS = ("TN", "NN", "TT", "NT")  # T: k is adjacent in A; N: k is adjacent in B


def whole(shape, name, seed=0, most=2):
    """Whole numbers from -most to most of an element type."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randint(-most, most + 1, shape, generator=generator, device="cuda")
    return x.to(getattr(torch, name))


def normal(shape, name, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, name))


def powers(shape, seed=0):
    """Factors 0.25, 0.5, ... 4 in float32."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.exp2(torch.randint(-2, 3, shape, generator=generator, device="cuda").float())


def operands(m, n, k, name, layout="TN", make=whole):
    a = make((m, k), name, 1) if layout[0] == "T" else make((k, m), name, 1).T
    b = make((n, k), name, 2).T if layout[1] == "N" else make((k, n), name, 2)
    return a, b


def exact(result, expected):
    """`result` is the float64 `expected`, rounded to its element type."""
    assert result.shape == expected.shape
    assert torch.equal(result, expected.to(result.dtype))


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("name", FLOAT8)
def test_products_of_float8(name, m, n, k):
    for layout in LAYOUTS:
        a, b = operands(m, n, k, name, layout)
        expected = a.double() @ b.double()
        result = gm.matmul(a, b)
        assert result.dtype == torch.bfloat16
        exact(result, expected)
        for option in ("float16", "float32", torch.bfloat16):
            exact(gm.matmul(a, b, dtype=option), expected)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float32)
        assert gm.matmul(a, b, out=out) is out
        exact(out, expected)


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_keeps_the_bound_of_its_sums(name):
    """A step adds 32 products to a sum, all cut 13 bits below the largest."""
    for m, n, k in ((256, 192, 512), (100, 130, 4096)):
        a, b = operands(m, n, k, name, make=normal)
        x, y = a.double(), b.double()
        cut = 2.0**-13 * (k + k / 32 + 1)
        allowed = cut * (x.abs() @ y.abs()) + 2.0**-8 * (x @ y).abs()
        wrong = ~((gm.matmul(a, b).double() - x @ y).abs() <= allowed)
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements"


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_int8_into_int32_is_exact(m, n, k):
    for layout in LAYOUTS:
        a, b = operands(m, n, k, "int8", layout, make=lambda shape, name, seed: whole(shape, name, seed, 127))
        expected = (a.cpu().long() @ b.cpu().long()).int().cuda()
        result = gm.matmul(a, b, dtype="int32")
        assert result.dtype == torch.int32
        assert torch.equal(result, expected)
        out = torch.full_like(result, -7)
        assert gm.matmul(a, b, out=out) is out
        assert torch.equal(out, expected)


def test_int8_into_int32_wraps():
    a = torch.full((64, 2**18), -128, dtype=torch.int8, device="cuda")
    assert torch.equal(gm.matmul(a, a.T, dtype="int32"), torch.zeros(64, 64, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_int8_with_factors(name):
    a, b = operands(130, 70, 200, "int8")
    rows, columns = powers((130,), 1), powers((70,), 2)
    expected = (a.double() @ b.double()) * rows.double()[:, None] * columns.double()
    exact(gm.matmul(a, b, dtype=name, scale_a=rows, scale_b=columns), expected)
    exact(gm.matmul(a, b, dtype=name), a.double() @ b.double())
    exact(gm.matmul(a, b, dtype=name, scale_a=0.25), (a.double() @ b.double()) / 4)


@pytest.mark.parametrize("name", [*FLOAT8, "float16", "bfloat16", "int8"])
def test_factors_of_operands_rows_and_columns(name):
    m, n, k = 130, 72, 96
    a, b = operands(m, n, k, name)
    plain = a.double() @ b.double()
    for shape_a, shape_b in (((), (1,)), ((m,), (n,)), ((m, 1), (1, n)), ((1, 1), (n,)), ((m,), None), (None, (1, n))):
        s = None if shape_a is None else powers(shape_a, 3)
        t = None if shape_b is None else powers(shape_b, 4)
        expected = plain.clone()
        if s is not None:
            expected *= s.double() if s.numel() == 1 else s.double().reshape(m, 1)
        if t is not None:
            expected *= t.double() if t.numel() == 1 else t.double().reshape(1, n)
        exact(gm.matmul(a, b, scale_a=s, scale_b=t, dtype="float32"), expected)
        exact(gm.matmul(a, b, scale_a=s, scale_b=t, dtype="float32", out=torch.empty(n, m, device="cuda").T), expected)
        if name != "int8":
            bias = whole((n,), "float32", 5)
            result = gm.matmul(a, b, scale_a=s, scale_b=t, dtype="float32", bias=bias, activation="relu")
            exact(result, (expected + bias.double()).relu())
    exact(
        gm.matmul(a, b, scale_a=0.5, scale_b=powers((n,), 4), dtype="float32"), plain * 0.5 * powers((n,), 4).double()
    )
    strided = powers((2 * n,), 6)[::2]
    exact(gm.matmul(a, b, scale_b=strided, dtype="float32"), plain * strided.double())


@pytest.mark.parametrize("name", FLOAT8)
def test_factors_of_blocks(name):
    for m, n, k in ((128, 128, 128), (200, 300, 512), (1, 129, 257), (70, 64, 100), (256, 512, 1024)):
        a, b = operands(m, n, k, name)
        pieces, columns = -(-k // 128), -(-n // 128)
        s, t = powers((m, pieces), 1), powers((columns, pieces), 2).T  # as stored beside weights of (n, k)
        wide_s = s.double().repeat_interleave(128, 1)[:, :k]
        wide_t = t.double().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
        expected = (a.double() * wide_s) @ (b.double() * wide_t)
        exact(gm.matmul(a, b, scale_a=s, scale_b=t, dtype="float32"), expected)
        exact(gm.matmul(a, b, scale_a=s, scale_b=t), expected)
        exact(gm.matmul(a, b, scale_a=s.T.contiguous().T, scale_b=t.contiguous(), dtype="float32"), expected)
        turned = torch.empty(n, m, device="cuda").T
        assert gm.matmul(a, b, scale_a=s, scale_b=t, out=turned) is turned
        exact(turned, expected)


def test_batches_of_float8_with_one_factor_each():
    a, b = whole((5, 70, 96), "float8_e4m3fn", 1), whole((96, 48), "float8_e4m3fn", 2)
    factor = torch.tensor(0.5, device="cuda")
    exact(gm.matmul(a, b, scale_a=factor), (a.double() @ b.double()) / 2)
    c = whole((5, 96, 48), "float8_e4m3fn", 3)
    exact(gm.matmul(a, c, scale_a=factor, scale_b=2.0), a.double() @ c.double())


def test_gemm_of_float8():
    a, b = operands(130, 72, 96, "float8_e4m3fn")
    c = whole((130, 72), "bfloat16", 3)
    product = a.double() @ b.double()
    exact(gm.gemm(2.0, a, b), 2 * product)
    exact(gm.gemm(0.5, a, b, 2.0, c), product / 2 + 2 * c.double())
    assert gm.gemm(1.0, a, b, 1.0, c, out=c) is c


def test_a_call_that_comes_back_is_served_by_the_fast_path(monkeypatch):
    a, b = operands(128, 64, 256, "float8_e4m3fn")
    plain = a.double() @ b.double()
    table.forget()
    bias = whole((64,), "bfloat16", 5)
    for seed in range(3):
        rows = powers((128,), seed)
        exact(gm.matmul(a, b, scale_a=rows, bias=bias), plain * rows.double()[:, None] + bias.double())
        exact(gm.matmul(a, b), plain)
        exact(gm.matmul(a, b, scale_b=0.5, activation="relu"), (plain / 2).relu())
        x = torch.empty(128, 64, device="cuda", dtype=torch.float16)
        assert gm.matmul(a, b, scale_a=rows, out=x) is x
        exact(x, plain * rows.double()[:, None])
    assert len(table.calls) == 4
    half = a.half()
    for _ in range(2):
        exact(gm.matmul(half, b.half(), dtype="float32", batch_invariant=True), plain)
    assert len(table.calls) == 5
    monkeypatch.setattr(on_device, "product", None)
    exact(gm.matmul(a, b, scale_a=rows, bias=bias), plain * rows.double()[:, None] + bias.double())
    exact(gm.matmul(a, b), plain)
    exact(gm.matmul(a, b, scale_b=0.5, activation="relu"), (plain / 2).relu())
    monkeypatch.undo()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gm.matmul(a, b, scale_a=rows, bias=bias)
        gm.matmul(a, b, scale_a=0.25)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_captures_factors():
    a, b = operands(128, 64, 256, "float8_e4m3fn")
    rows = powers((128,), 1)
    out = torch.empty(128, 64, device="cuda", dtype=torch.bfloat16)
    gm.matmul(a, b, scale_a=rows, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gm.matmul(a, b, scale_a=rows, out=out)
    for seed in (7, 8):
        rows.copy_(powers((128,), seed))
        graph.replay()
        torch.cuda.synchronize()
        exact(out, (a.double() @ b.double()) * rows.double()[:, None])


def test_explain_knows_products_of_eight_bits():
    a, b = operands(128, 256, 512, "float8_e4m3fn")
    explained = gm.explain(a, b, scale_a=powers((128,)), bias=1.0)
    assert (explained.problem.dtype, explained.problem.out, explained.problem.scales) == ("e4m3", "bf16", "outer")
    assert "e4m3 -> bf16" in str(explained)
    assert explained.peak_gflops > 0


ROWS = (1, 7, 64, 128, 1000, 4096)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("float16", {}),
        ("bfloat16", {}),
        ("bfloat16", {"dtype": "float32"}),
        ("float32", {}),
        ("float32", {"precision": "tf32"}),
        ("float64", {}),
        ("float8_e4m3fn", {}),
        ("float8_e5m2", {"scale_a": 0.5}),
        ("int8", {"dtype": "int32"}),
    ],
)
def test_a_row_does_not_depend_on_the_other_rows(name, options):
    make = whole if name == "int8" else normal
    for n, k in ((512, 2048), (256, 500), (1000, 1000), (1, 1024), (48, 4096), (14336, 4096)):
        a, b = make((max(ROWS), k), name, 1), make((n, k), name, 2).T
        every = gm.matmul(a, b, batch_invariant=True, **options)
        for rows in ROWS:
            some = gm.matmul(a[:rows], b, batch_invariant=True, **options)
            assert torch.equal(some, every[:rows]), (n, k, rows)
        vector = gm.matmul(a[5], b, batch_invariant=True, **options)
        assert torch.equal(vector, every[5])
