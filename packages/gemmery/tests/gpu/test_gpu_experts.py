"""Experts on a GPU: groups along k, gradients in graphs, experts of few bits in one launch, codes by levels."""

from __future__ import annotations

from itertools import pairwise

import pytest

import gemmery as gm
from gemmery.cuda import driver

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
]

ENDS = {
    "one each": [1, 2, 3, 4],
    "empty ones": [0, 0, 700, 700],
    "uneven": [1, 130, 1500, 2000],
    "rows of no group": [64, 64, 129, 1003],
    "whole blocks": [128, 640, 640, 1920],
}


@pytest.fixture(autouse=True)
def _on_hopper():
    if driver.device(0).capability != 90:
        pytest.skip("only devices of compute capability 9.0 have the kernels")


def numbers(*shape, dtype=torch.bfloat16, seed=0):
    """Small whole numbers, whose sums float32 holds exactly in any order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, device="cuda").to(dtype)


def on_device(ends):
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def along_k(a, b, ends):
    """The products of the groups in float64."""
    parts = [a[:, start:end].double() @ b[start:end].double() for start, end in pairwise([0, *ends])]
    return torch.stack(parts)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n"), [(256, 128), (136, 1000), (8, 520), (71, 33)])
def test_groups_along_k(ends, dtype, m, n):
    total = ends[-1] + 37
    for a in (numbers(total, m, dtype=dtype).T, numbers(m, total, dtype=dtype)):
        b = numbers(total, n, dtype=dtype, seed=1)
        want = along_k(a, b, ends)
        for offsets in (on_device(ends), ends):
            out = torch.full_like(want, 999).to(dtype)
            assert gm.grouped_matmul(a, b, offsets=offsets, out=out) is out
            assert torch.equal(out, want.to(dtype)), (out.double() - want).abs().max()


def test_nan_stays_in_its_group_and_many_groups():
    ends = torch.randint(0, 90, (200,), generator=torch.Generator().manual_seed(3)).cumsum(0).tolist()
    a, b = numbers(ends[-1], 192), numbers(ends[-1], 264, seed=1)
    want = along_k(a.T, b, ends)
    a[ends[50] : ends[51]] = float("nan")
    b[ends[100] : ends[101]] = float("inf")
    result = gm.grouped_matmul(a.T, b, offsets=on_device(ends))
    keep = [group for group in range(200) if group not in (51, 101)]
    assert torch.equal(result[keep], want[keep].bfloat16())


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_factors_of_128_of_k(ends):
    total = -(-ends[-1] // 128) * 128 + 128
    a = numbers(200, total, dtype=torch.float32).to(torch.float8_e4m3fn)
    b = numbers(136, total, dtype=torch.float32, seed=1).to(torch.float8_e4m3fn).T
    rows, blocks = (
        torch.exp2(numbers(*s, dtype=torch.float32, seed=2)) for s in ((200, total // 128), (total // 128, 2))
    )
    wide_a = a.double() * rows.double().repeat_interleave(128, 1)
    wide_b = b.double() * blocks.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :136]
    result = gm.grouped_matmul(a, b, offsets=on_device(ends), scale_a=rows, scale_b=blocks, dtype=torch.float32)
    want, size = along_k(wide_a, wide_b, ends), along_k(wide_a.abs(), wide_b.abs(), ends)
    assert ((result.double() - want).abs() <= 2.0**-10 * size).all()


def test_gradients_of_experts_in_a_graph():
    """Forward and backward pass, replayed with other offsets: the host reads none."""
    from gemmery.torch import grouped_mm

    x, w, ends = numbers(2000, 256), numbers(4, 136, 256, seed=1), on_device(ENDS["uneven"])
    x.requires_grad_(), w.requires_grad_()
    grad = numbers(2000, 136, seed=2)
    inputs = x, w
    for _ in range(2):
        torch.autograd.grad(grouped_mm(x, w.mT, ends), inputs, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        grads = torch.autograd.grad(grouped_mm(x, w.mT, ends), inputs, grad)
    for each in ENDS.values():
        ends.copy_(on_device(each))
        graph.replay()
        assert torch.equal(grads[1], along_k(grad.T, x, each).bfloat16())


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(("format_", "group"), [("int4", 128), ("int4", 32), ("int8", None), ("mxfp4", 32)])
def test_experts_of_few_bits(ends, format_, group):
    x, w = numbers(ends[-1] + 5, 512), torch.randn(4, 512, 264, device="cuda")
    experts = gm.quantize(w, format_, group, **({} if format_ == "mxfp4" else {"dtype": torch.bfloat16}))
    wide = experts.dequantize(torch.float32)
    bias = numbers(4, 264, seed=3)
    for invariant in (False, True):
        out = torch.full((len(x), 264), 999.0, dtype=torch.bfloat16, device="cuda")
        options = {"bias": bias, "out": out, "batch_invariant": invariant}
        assert gm.grouped_matmul(x, experts, offsets=on_device(ends), **options) is out
        for group_, (start, end) in enumerate(pairwise([0, *ends])):
            want = x[start:end].double() @ wide[group_].double() + bias[group_].double()
            size = x[start:end].double().abs() @ wide[group_].double().abs() + 4
            assert ((out[start:end].double() - want).abs() <= 2.0**-8 * size).all()
        assert (out[ends[-1] :] == 999).all()


def test_experts_of_few_bits_in_a_graph(monkeypatch):
    """Nothing is expanded; a graph is replayed with other offsets."""
    x, experts = numbers(2000, 256), gm.quantize(numbers(4, 256, 136, seed=1), "int4", 128)
    ends, wide = on_device(ENDS["uneven"]), experts.dequantize(torch.float32)
    monkeypatch.setattr("gemmery.api.quantized_products.device_weight", None)
    out = torch.empty(2000, 136, dtype=torch.bfloat16, device="cuda")
    gm.grouped_matmul(x, experts, offsets=ends, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gm.grouped_matmul(x, experts, offsets=ends, out=out)
    for each in ENDS.values():
        ends.copy_(on_device(each))
        graph.replay()
        for group, (start, end) in enumerate(pairwise([0, *each])):
            want, size = (
                x[start:end].double() @ wide[group].double(),
                x[start:end].double().abs() @ wide[group].double().abs(),
            )
            assert ((out[start:end].double() - want).abs() <= 2.0**-8 * size).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 264, 256), (700, 1000, 1024), (1024, 4096, 512)])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
def test_codes_by_levels(dtype, m, n, k, result, monkeypatch):
    experts = gm.quantize(torch.randn(k, n, device="cuda"), "int4", 128)
    x = (torch.randn(m, k, device="cuda") * 30).clamp(-120, 120).round().to(dtype)
    factors = torch.rand(m, device="cuda") + 0.5
    monkeypatch.setattr("gemmery.api.quantized_products.device_weight", None)
    got = gm.matmul(x, experts, scale_a=factors, dtype=result)
    wide, values = experts.dequantize(torch.float32).double(), x.double() * factors.double()[:, None]
    want, size = values @ wide, values.abs() @ wide.abs()
    assert got.dtype is result
    assert ((got.double() - want).abs() <= 2.0**-8 * want.abs() + 2.0**-11 * size).all()
