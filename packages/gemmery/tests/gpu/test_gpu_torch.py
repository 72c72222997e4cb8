"""gemmery.torch's operators on a CUDA device: values, gradients, graphs, streams, torch.compile, autocast and vmap."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
]

import gemmery.torch  # noqa: E402
from gemmery.errors import DeviceError  # noqa: E402

functional = torch.nn.functional
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ACTIVATIONS = {None: lambda x: x, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


def draw(*shape, dtype=torch.float32, seed=0, grad=False):
    numbers = torch.Generator("cuda").manual_seed(sum(shape) + seed)
    made = torch.randn(shape, generator=numbers, device="cuda", dtype=torch.float64)
    return made.to(dtype).requires_grad_(grad)


def close(result, expected, k, size):
    """Whether a result of sums of k products of magnitude `size` in all is near a float64 `expected`."""
    assert result.shape == expected.shape
    unit = ROUNDOFF[result.dtype]
    tolerance = 4 * (k + 8) * min(unit, 2.0**-24) * size + 4 * unit * (1 + expected.abs()) + 1e-6 * (unit > 2.0**-50)
    return bool(((result.double() - expected).abs() <= tolerance).all())


def extent(x, weight):
    return float((x.detach().abs().double() @ weight.detach().abs().double()).max()) + 4


def near(gradient, exact):
    """Whether a gradient, of a gradient that was rounded to the element type before, is near the exact one."""
    error = (gradient.double() - exact).norm() / exact.norm()
    return gradient.shape == exact.shape and bool(error <= 16 * ROUNDOFF[gradient.dtype])


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layer", [gemmery.torch.linear, torch.ops.gemmery.linear])
def test_a_layer_and_its_gradients(dtype, activation, layer):
    inputs = [draw(2, 65, 72, dtype=dtype, grad=True), draw(136, 72, dtype=dtype, grad=True), draw(136, dtype=dtype)]
    result = layer(*inputs, activation)
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    before = functional.linear(*exact)
    expected = ACTIVATIONS[activation](before)
    assert result.dtype == dtype
    assert close(result, expected, 72, extent(exact[0], exact[1].T))
    grad = draw(2, 65, 136, dtype=dtype, seed=3)
    if activation == "relu":  # near 0 rounding decides on which side a sum lies
        grad = grad * (before.abs() > 0.1)
    gradients = torch.autograd.grad(result, inputs[:2], grad)
    of_exact = torch.autograd.grad(expected, exact[:2], grad.double())
    for one, other in zip(gradients, of_exact, strict=True):
        assert near(one, other)


@pytest.mark.parametrize(("left", "right"), [((65, 72), (72, 40)), ((3, 65, 72), (72, 40)), ((3, 65, 72), (3, 72, 40))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_matmul_in_every_layout(left, right, dtype):
    for turned in (False, True):
        a, b = draw(*left, dtype=dtype), draw(*right, dtype=dtype)
        if turned:
            a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
        a, b = a.requires_grad_(), b.requires_grad_()
        exact = [x.detach().double().requires_grad_() for x in (a, b)]
        result, expected = gemmery.torch.matmul(a, b), exact[0] @ exact[1]
        assert close(result, expected, 72, extent(*exact))
        grad = draw(*result.shape, dtype=dtype, seed=1)
        for one, other in zip(
            torch.autograd.grad(result, (a, b), grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
        ):
            assert close(one, other, 200, 300.0)


def test_tf32_in_both_passes():
    a, b = draw(130, 256, grad=True), draw(256, 64, grad=True)
    result = gemmery.torch.matmul(a, b, precision="tf32")
    expected = a.detach().double() @ b.detach().double()
    bound = 2.0**-9 * extent(a.detach(), b.detach())
    assert bool(((result - expected).abs() <= bound).all())
    result.sum().backward()
    assert bool(((a.grad - b.detach().double().sum(1)).abs() <= 2.0**-9 * float(b.detach().abs().sum(1).max())).all())


def samples():
    packed, scales = gemmery.torch.quantize(draw(24, 32), 4, 8)
    return {
        "matmul": (draw(2, 16, 32, grad=True), draw(32, 24, grad=True)),
        "linear": (draw(16, 32, grad=True), draw(24, 32, grad=True), draw(24, grad=True), "silu"),
        "quantized_linear": (draw(16, 32, grad=True), packed, scales, draw(24, grad=True), "relu"),
        "grouped_mm": (
            draw(16, 32, grad=True),
            draw(3, 32, 24, grad=True),
            torch.tensor([4, 4, 16], dtype=torch.int32, device="cuda"),
        ),
    }


@pytest.mark.parametrize("name", ["matmul", "linear", "quantized_linear", "grouped_mm"])
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.gemmery, name).default, samples()[name], rtol=1e-4, atol=1e-4)


def captured(step):
    """A graph of a step, and what the step returned, after warm-up on a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    return graph, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_of_all_operators_is_replayed_with_new_numbers(dtype):
    x, weight, bias = draw(32, 64, dtype=dtype), draw(64, 64, dtype=dtype), draw(64, dtype=dtype)
    packed, scales = gemmery.torch.quantize(draw(64, 64, dtype=dtype), 8, 32)
    experts, offs = draw(3, 64, 64, dtype=dtype), torch.tensor([8, 20, 32], dtype=torch.int32, device="cuda")

    def step():
        hidden = gemmery.torch.linear(x, weight, bias, "gelu")
        hidden = gemmery.torch.quantized_linear(hidden, packed, scales) * 0.1
        if dtype is torch.bfloat16 and torch.cuda.get_device_capability() == (9, 0):  # offsets stay on the device
            hidden = gemmery.torch.grouped_mm(hidden, experts, offs)
        return gemmery.torch.matmul(hidden, weight)

    with torch.no_grad():
        graph, result = captured(step)
        for seed in range(3):
            x.copy_(draw(32, 64, dtype=dtype, seed=seed))
            graph.replay()
            expected = step()
            assert bool(((result - expected).abs() <= 0.02 * expected.abs().max()).all())


def test_a_training_step_is_captured():
    x, weight, bias = draw(32, 64), draw(48, 64, grad=True), draw(48, grad=True)

    def step():
        loss = gemmery.torch.linear(x, weight, bias, "silu").square().sum()
        return torch.autograd.grad(loss, (weight, bias))

    graph, gradients = captured(step)
    x.copy_(draw(32, 64, seed=9))
    graph.replay()
    loss = functional.silu(functional.linear(x.double(), weight.double(), bias.double())).square().sum()
    for one, other in zip(gradients, torch.autograd.grad(loss, (weight, bias)), strict=True):
        assert bool(((one.double() - other).abs() <= 1e-3 * (1 + other.abs())).all())


def test_an_operator_runs_on_the_current_stream():
    a, stream = draw(512, 512), torch.cuda.Stream()
    expected = a.double() @ a.double()
    for multiply in (
        gemmery.torch.matmul,
        torch.ops.gemmery.matmul,
    ):  # compiled before, which takes longer than to wait
        multiply(a, a)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        late = a.clone()
        results = [gemmery.torch.matmul(late, late), torch.ops.gemmery.matmul(late, late)]
    assert not stream.query()
    stream.synchronize()
    for result in results:
        assert close(result, expected, 512, extent(a, a))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_as_one_graph(backend):
    if backend == "inductor":
        pytest.importorskip("triton", reason="Triton is not installed")
    weight, bias = draw(48, 64, grad=True), draw(48, grad=True)
    packed, scales = gemmery.torch.quantize(draw(64, 48), 4, 8)

    def network(x):
        hidden = gemmery.torch.linear(x, weight, bias, "gelu")
        return gemmery.torch.quantized_linear(hidden, packed, scales) + gemmery.torch.matmul(hidden, weight)

    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend=backend)
    for rows in (16, 33):
        x = draw(rows, 64, grad=True)
        result, expected = compiled(x), network(x)
        assert bool(((result - expected).abs() <= 1e-4 * (1 + expected.abs().max())).all())
        gradients = [torch.autograd.grad(y.sum(), (x, weight, bias)) for y in (result, expected)]
        for one, other in zip(*gradients, strict=True):
            assert bool(((one - other).abs() <= 1e-4 * (1 + other.abs().max())).all())


def test_compiled_for_graphs():
    pytest.importorskip("triton", reason="Triton is not installed")
    weight, bias = draw(64, 64, dtype=torch.bfloat16), draw(64, dtype=torch.bfloat16)
    packed, scales = gemmery.torch.quantize(draw(64, 64, dtype=torch.bfloat16), 8, 32)

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def network(x):
        return gemmery.torch.quantized_linear(gemmery.torch.linear(x, weight, bias, "relu"), packed, scales)

    with torch.no_grad():
        for seed in range(4):
            x = draw(8, 64, dtype=torch.bfloat16, seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            result = network(x).clone()
            hidden = gemmery.torch.linear(x, weight, bias, "relu")
            expected = gemmery.torch.quantized_linear(hidden, packed, scales)
            assert bool(((result - expected).abs() <= 0.02 * expected.abs().max()).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    x, weight, bias = draw(32, 64), draw(48, 64, grad=True), draw(48)
    packed, scales = gemmery.torch.quantize(draw(48, 64), 8, 32)
    with torch.autocast("cuda", dtype=dtype):
        results = [gemmery.torch.linear(x, weight, bias), gemmery.torch.quantized_linear(x, packed, scales, bias)]
        assert gemmery.torch.matmul(x.double(), weight.double().T).dtype == torch.float64
    assert [result.dtype for result in results] == [dtype, dtype]
    expected = functional.linear(x.to(dtype).double(), weight.detach().to(dtype).double(), bias.to(dtype).double())
    assert close(results[0].detach(), expected, 64, extent(x, weight.detach().T))
    results[0].float().sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (2, 1)])
def test_vmap(dims):
    a, b = (
        draw(*shape) if dim is None else torch.stack([draw(*shape, seed=i) for i in range(5)], dim)
        for shape, dim in zip(((32, 40), (40, 48)), dims, strict=True)
    )
    items = [[x] * 5 if dim is None else x.unbind(dim) for x, dim in zip((a, b), dims, strict=True)]
    expected = torch.stack([x.double() @ y.double() for x, y in zip(*items, strict=True)])
    assert close(torch.func.vmap(gemmery.torch.matmul, dims)(a, b), expected, 40, 100.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [(16, 16, 64), (10, 30, 50)])
def test_groups_and_their_gradients(dtype, ends):
    a, b = draw(64, 40, dtype=dtype, grad=True), draw(3, 40, 48, dtype=dtype, grad=True)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    result = gemmery.torch.grouped_mm(a, b, offs)[: ends[-1]]
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    pieces = [exact[0][start:end] @ exact[1][group] for group, (start, end) in enumerate(pairwise((0, *ends)))]
    expected = torch.cat(pieces)
    assert close(result, expected, 40, 60.0)
    gradients = torch.autograd.grad(result.sum(), (a, b))
    for one, other in zip(gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert close(one, other, 48, 60.0)


def test_the_gradient_of_matrices_in_a_graph_reads_offsets_of_the_host_or_of_the_device():
    a, grad = draw(64, 40, dtype=torch.bfloat16), draw(64, 48, dtype=torch.bfloat16)
    ends = torch.tensor([16, 16, 64], dtype=torch.int32)
    exact = torch.ops.gemmery.grouped_mm_weights(a, grad, ends.cuda()).double()
    for where in (ends, ends.cuda())[: 1 + (torch.cuda.get_device_capability() == (9, 0))]:
        graph, result = captured(lambda where=where: torch.ops.gemmery.grouped_mm_weights(a, grad, where))
        graph.replay()
        assert near(result, exact)


def test_second_derivatives():
    x, weight = draw(5, 8, dtype=torch.float64), draw(3, 8, dtype=torch.float64)

    def hessian(layer):
        return torch.func.hessian(lambda weight: layer(x, weight).square().sin().sum())(weight)

    exact = hessian(lambda x, weight: functional.silu(functional.linear(x, weight)))
    assert near(hessian(lambda x, weight: gemmery.torch.linear(x, weight, None, "silu")), exact)


def test_experts_are_trained_in_a_compiled_step():
    pytest.importorskip("triton", reason="Triton is not installed")
    a, b = draw(64, 40, dtype=torch.bfloat16), draw(3, 40, 48, dtype=torch.bfloat16, grad=True)
    offs = torch.tensor([16, 16, 64], dtype=torch.int32, device="cuda")
    step = lambda a, b, offs: gemmery.torch.grouped_mm(a, b, offs).float().square().sum()  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    exact = torch.autograd.grad(step(a, b, offs), b)[0].double()
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert near(torch.autograd.grad(compiled(a, b, offs), b)[0].clone(), exact)


def test_operands_on_different_devices_are_refused():
    with pytest.raises(DeviceError):
        gemmery.torch.matmul(draw(4, 4), torch.ones(4, 4))
