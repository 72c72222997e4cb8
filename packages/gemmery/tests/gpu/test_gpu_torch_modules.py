"""Layers on a GPU: values, moves between devices, gradients, CUDA graphs of whole steps, compiled steps."""

from __future__ import annotations

import copy

import pytest

from gemmery import tiers
from gemmery.cuda import driver

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

from torch import nn  # noqa: E402 # of the package that may be missing

from gemmery.torch import linear, quantization, quantize, quantized_linear, replace_linear  # noqa: E402
from gemmery.torch.quantization import dequantize  # noqa: E402

ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
BITS = pytest.mark.parametrize("bits", [None, 8, 4])


def block(bits, dtype=torch.bfloat16):
    """A gate, an activation and a layer back, as in a decoder."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 640, bias=False), nn.SiLU(), nn.Linear(640, 256)).to("cuda", dtype)
    replace_linear(model, bits)
    return model


@BITS
@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_a_layer_is_within_the_bound(bits, dtype, rows):
    layer = block(bits, dtype)[2]
    x = torch.randn(1, rows, 640, device="cuda", dtype=dtype)
    with torch.no_grad():
        result, weight = layer(x), layer.weight.double()
    exact, size = x.double() @ weight.T + layer.bias.double(), x.double().abs() @ weight.abs().T + layer.bias.abs()
    assert result.dtype is dtype
    tolerance = (2.5 * 640 + 4) * 2.0**-24 * size + 2 * ROUNDOFF[dtype] * exact.abs()
    if bits:  # `weight` is rounded to its type, and the kernel's is not
        tolerance += ROUNDOFF[dtype] * size
    assert bool(((result.double() - exact).abs() <= tolerance).all())


@BITS
def test_a_model_moves_to_the_cpu_and_back(bits):
    model = block(bits, torch.float32)
    x = torch.randn(3, 256, device="cuda")
    with torch.no_grad():
        there = model(x)
        here = model.cpu()(x.cpu())
        assert torch.allclose(there.cpu(), here, rtol=1e-4, atol=1e-4)
        assert torch.allclose(model.cuda()(x), there, rtol=1e-4, atol=1e-4)


def test_tf32_is_for_float32_on_a_gpu_alone():
    layer = nn.Linear(256, 64, device="cuda")
    replace_linear(layer, precision="tf32")
    x = torch.randn(64, 256, device="cuda")
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    size = x.double().abs() @ layer.weight.double().abs().T
    with torch.no_grad():
        assert bool(((layer(x) - exact).abs() <= size * 2.0**-9 + 1e-6).all())
        layer.bfloat16()(x.bfloat16())
        layer.float().cpu()(x.cpu())


def test_gradients_are_those_of_nn_linear():
    plain = nn.Linear(256, 64, device="cuda")
    layer = copy.deepcopy(plain)
    replace_linear(layer)
    x = torch.randn(33, 256, device="cuda")
    for model in (plain, layer):
        model(x).square().sum().backward()
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


@BITS
@pytest.mark.parametrize("rows", [1, 40])
def test_a_graph_holds_a_whole_step(bits, rows):
    model = block(bits)
    x = torch.randn(1, rows, 256, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(4):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    tiers.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = model(x)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(y, model(x))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (8, 128), (4, 128), (4, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 9, 16, 31, 64])
def test_a_kernel_reads_packed_weights(rows, dtype, bits, group, activation):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernel needs compute capability 8.0")
    torch.manual_seed(rows)
    x, bias = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((rows, 1280), (1000,)))
    packed, scales = quantize(torch.randn(1000, 1280, device="cuda", dtype=dtype), bits, group)
    weight = dequantize(packed, scales, bits, torch.float64)
    exact = x.double() @ weight.T + bias.double()
    size = x.double().abs() @ weight.abs().T + bias.double().abs()
    tolerance = (2.5 * 1280 + 4) * 2.0**-24 * size + ROUNDOFF[dtype] * exact.abs()
    rounded = tolerance + ROUNDOFF[dtype] * size  # the kernel for arranged weights rounds each weight to its type
    if activation:  # whose slope is at most 1.1
        exact, tolerance, rounded = torch.nn.functional.silu(exact), 1.2 * tolerance, 1.2 * rounded
    by_kernel = quantization._by_kernel(x, packed, scales, bias, activation)
    assert bool(((by_kernel.double() - exact).abs() <= tolerance).all())
    result = quantized_linear(x, packed, scales, bias, activation)
    assert bool(((result.double() - exact).abs() <= rounded).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(8, 8), (8, 120), (4, 24), (4, 240)])
def test_a_kernel_unpacks_weights_for_many_rows(bits, group, dtype):
    packed, scales = quantize(torch.randn(1111, 1200, device="cuda", dtype=dtype), bits, group)
    weight = quantization._whole(packed, scales, dtype)
    assert torch.equal(weight, dequantize(packed, scales, bits, dtype))
    x = torch.randn(65, 1200, device="cuda", dtype=dtype)
    assert torch.equal(quantized_linear(x, packed, scales), linear(x, weight))


def test_packed_weights_that_no_kernel_reads_are_computed_first():
    x = torch.randn(3, 1280, device="cuda", dtype=torch.bfloat16)
    packed, scales = quantize(torch.randn(96, 1280, device="cuda", dtype=torch.bfloat16), 8, 64)
    expected = x.double() @ dequantize(packed, scales, 8, torch.float64).T
    for factors, part in (
        (scales.float(), x),
        (scales, x.t().contiguous().t()),
        (scales, x[:, None].expand(3, 30, 1280)),
    ):
        result = quantized_linear(part, packed, factors).double()
        close = expected if part.ndim == 2 else expected[:, None]
        assert bool(((result - close).abs() <= 0.02 * expected.abs().max()).all())
    memory = torch.empty(96 * 1280 + 1, device="cuda", dtype=torch.int8)[1:].view(96, 1280).copy_(packed)
    assert bool(((quantized_linear(x, memory, scales) - expected).abs() <= 0.02 * expected.abs().max()).all())


@BITS
def test_a_compiled_step_is_one_graph(bits):
    model = block(bits)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
            y = compiled(x).clone()
            assert torch.allclose(y, model(x), rtol=0.03, atol=0.03)
