"""gemmery.torch's operators: values, gradients, torch.compile, vmap, autocast, and PyTorch's own check of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gemmery as gm  # noqa: E402
import gemmery.torch  # noqa: E402
from gemmery.errors import ArgumentError, DeviceError, DTypeError, LayoutError, ShapeError  # noqa: E402

functional = torch.nn.functional
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ACTIVATIONS = {None: lambda x: x, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


def draw(*shape, dtype=torch.float64, seed=0, grad=False):
    numbers = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype).requires_grad_(grad)


def close(result, expected, k, dtype=torch.float64, size=8.0):
    """Whether `result`, of sums of k products, is within the bound of a float64 `expected`."""
    assert result.shape == expected.shape
    unit = ROUNDOFF[dtype]
    tolerance = 2 * (k + 4) * min(unit, 2.0**-24) * size + 2 * unit * (1 + expected.abs())
    return bool(((result.double() - expected).abs() <= tolerance).all())


SHAPES = [
    ((3, 4), (4, 5)),
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (3, 4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((0, 4), (4, 3)),
    ((3, 0), (0, 3)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_gradients_of_matmul(left, right):
    a, b = draw(*left, grad=True), draw(*right, grad=True)
    for multiply in (gemmery.torch.matmul, torch.ops.gemmery.matmul):
        assert torch.autograd.gradcheck(multiply, (a, b))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_linear_of_both_orders(activation):
    x, weight, bias = draw(2, 3, 4, grad=True), draw(5, 4, grad=True), draw(5, grad=True)
    for layer in (gemmery.torch.linear, torch.ops.gemmery.linear):
        assert torch.autograd.gradcheck(lambda *inputs: layer(*inputs, activation), (x, weight, bias))  # noqa: B023
        one = lambda *inputs: layer(*inputs, activation)  # noqa: B023, E731
        plain = ACTIVATIONS[activation](functional.linear(x, weight, bias))
        both = [
            torch.autograd.grad(y.sin().sum(), (x, weight, bias), create_graph=True)
            for y in (one(x, weight, bias), plain)
        ]
        assert all(close(*pair, 10) for pair in zip(*both, strict=True))
        assert torch.autograd.gradgradcheck(one, (x[0].detach().requires_grad_(), weight, bias), fast_mode=True)


def test_complex_gradients():
    a, b = (draw(3, 4).to(torch.complex128) * (1 + 2j), draw(4, 5).to(torch.complex128) * (2 - 1j))
    assert torch.autograd.gradcheck(gemmery.torch.matmul, (a.requires_grad_(), b.requires_grad_()))
    assert torch.autograd.gradcheck(gemmery.torch.linear, (a, b.detach().T.requires_grad_()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_of_every_type(dtype, activation):
    x, weight, bias = draw(7, 33, dtype=dtype), draw(17, 33, dtype=dtype), draw(17, dtype=dtype)
    before = x.double() @ weight.double().T + bias.double()
    expected, size = ACTIVATIONS[activation](before), float((x.abs().double() @ weight.abs().double().T).max()) + 4
    for layer in (gemmery.torch.linear, torch.ops.gemmery.linear):
        result = layer(x, weight, bias, activation)
        assert result.dtype == dtype
        assert close(result, expected, 33, dtype, size)
    assert close(gemmery.torch.matmul(x, weight.T), x.double() @ weight.double().T, 33, dtype, size)


SAMPLES = [
    ("matmul", ((3, 4), (4, 5))),
    ("matmul", ((2, 3, 4), (4,))),
    ("linear", ((2, 3, 4), (5, 4), (5,), "gelu")),
    ("linear", ((4,), (5, 4), None, "relu")),
]


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_opcheck(name, sample):
    inputs = [draw(*x, grad=True) if isinstance(x, tuple) else x for x in sample]
    torch.library.opcheck(getattr(torch.ops.gemmery, name).default, inputs)


def test_compiled_as_one_graph_with_dynamic_shapes():
    def network(x, weight, bias):
        hidden = gemmery.torch.linear(x, weight, bias, "gelu")
        return gemmery.torch.matmul(hidden, weight).relu()

    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend="aot_eager")
    weight, bias = draw(6, 4, grad=True), draw(6, grad=True)
    for rows in (3, 5):
        x = draw(rows, 4, grad=True)
        expected = (functional.gelu(functional.linear(x, weight, bias)) @ weight).relu()
        result = compiled(x, weight, bias)
        assert close(result, expected, 10)
        for inputs in zip(*(torch.autograd.grad(y.sum(), (x, weight, bias)) for y in (result, expected)), strict=True):
            assert close(*inputs, 10)
    with torch.no_grad():
        assert close(compiled(x, weight, bias), expected, 10)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_inside_compiled_autograd(activation):
    x, weight, bias = draw(3, 4, grad=True), draw(5, 4, grad=True), draw(5, grad=True)
    for layer in (gemmery.torch.linear, torch.ops.gemmery.linear):
        expected = torch.autograd.grad(layer(x, weight, bias, activation).sum(), (x, weight, bias))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            layer(x, weight, bias, activation).sum().backward()
        assert all(torch.equal(z.grad, own) for z, own in zip((x, weight, bias), expected, strict=True))
        for z in (x, weight, bias):
            z.grad = None


BATCHES = [
    ((6, 3, 4), (4, 5), (0, None)),
    ((3, 4, 6), (4, 5), (2, None)),
    ((3, 4), (6, 4, 5), (None, 0)),
    ((3, 4), (4, 6), (None, 1)),
    ((6, 4), (6, 4), (0, 0)),
    ((4, 6), (6, 4, 5), (1, 0)),
    ((6, 3, 4), (6, 4), (0, 0)),
    ((2, 6, 3, 4), (4, 5, 6), (1, 2)),
    ((6, 3, 4), (2, 6, 4, 5), (0, 1)),
    ((6, 4), (2, 4, 5), (0, None)),
]


@pytest.mark.parametrize(("left", "right", "dims"), BATCHES)
def test_vmap_of_matmul_is_one_product(left, right, dims, monkeypatch):
    a, b = draw(*left), draw(*right)
    items = [[x] * 6 if dim is None else x.unbind(dim) for x, dim in zip((a, b), dims, strict=True)]
    expected = torch.stack([x @ y for x, y in zip(*items, strict=True)])
    calls, multiply = [], gm.api.matmul
    monkeypatch.setattr(gm.api, "matmul", lambda *operands: calls.append(0) or multiply(*operands))
    result = torch.func.vmap(gemmery.torch.matmul, dims)(a, b)
    assert close(result, expected, 4)
    assert len(calls) == 1


@pytest.mark.parametrize("dims", [(0, None, None), (0, 0, 0), (None, 0, None), (None, None, 0), (1, 2, 1)])
def test_vmap_of_linear(dims):
    x, weight, bias = (
        draw(*item) if dim is None else torch.stack([draw(*item, seed=i) for i in range(6)], dim)
        for item, dim in zip(((3, 4), (5, 4), (5,)), dims, strict=True)
    )
    items = [[z] * 6 if dim is None else z.unbind(dim) for z, dim in zip((x, weight, bias), dims, strict=True)]
    expected = torch.stack([functional.silu(functional.linear(*item)) for item in zip(*items, strict=True)])
    layer = lambda *inputs: gemmery.torch.linear(*inputs, "silu")  # noqa: E731
    assert close(torch.func.vmap(layer, dims)(x, weight, bias), expected, 4)


def test_gradients_of_each_example():
    weight, x = draw(5, 4), draw(6, 3, 4)

    def loss(layer):
        return lambda weight, x: layer(x, weight, None).square().sum()

    each, expected = (
        torch.func.vmap(torch.func.grad(loss(layer)), (None, 0))(weight, x)
        for layer in (gemmery.torch.linear, functional.linear)
    )
    assert close(each, expected, 12, size=100.0)


def test_second_derivatives_by_transforms_of_transforms():
    weight, x = draw(2, 4), draw(3, 4)
    transforms = torch.func.jacrev(torch.func.jacrev(lambda layer, weight: layer(x, weight, None).sin().sum(), 1), 1)
    for activation in ("relu", "silu"):
        layer = lambda *inputs: gemmery.torch.linear(*inputs, activation)  # noqa: B023, E731
        plain = lambda *inputs: ACTIVATIONS[activation](functional.linear(*inputs))  # noqa: B023, E731
        assert close(transforms(layer, weight), transforms(plain, weight), 4, size=50.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_mode_and_batches_of_gradients(activation):
    x, weight, bias = draw(3, 4, grad=True), draw(2, 4, grad=True), draw(2, grad=True)
    layer = lambda *inputs: gemmery.torch.linear(*inputs, activation)  # noqa: E731
    modes = {"check_forward_ad": True, "check_batched_grad": True, "fast_mode": False}
    assert torch.autograd.gradcheck(layer, (x, weight, bias), **modes)
    plain = lambda *inputs: ACTIVATIONS[activation](functional.linear(*inputs))  # noqa: E731
    for transform in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacfwd(f))):
        mixed, expected = (transform(lambda w: f(x, w, bias).sin().sum())(weight.detach()) for f in (layer, plain))  # noqa: B023
        assert close(mixed, expected, 4, size=50.0)


def test_forward_mode_of_matmul_keeps_gradients():
    a, b = draw(2, 3, 4, grad=True), draw(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, a.detach() + 1)
        result = torch.autograd.forward_ad.unpack_dual(gemmery.torch.matmul(dual, b))
        assert close(result.tangent.detach(), (a.detach() + 1) @ b, 4)
        assert close(torch.autograd.grad(result.primal.sum(), a)[0], b.expand(2, 3, 4), 4)


def test_a_linearised_product():
    """It is traced in forward mode, below autograd."""
    a, b, change = draw(3, 4), draw(4, 5), draw(3, 4, seed=1)
    for activation in (None, "gelu"):
        result, move = torch.func.linearize(lambda a: gemmery.torch.linear(a, b.T, None, activation), a)  # noqa: B023
        plain = lambda a: ACTIVATIONS[activation](a @ b)  # noqa: B023, E731
        assert close(result, plain(a), 4)
        assert close(move(change), torch.func.jvp(plain, (a,), (change,))[1], 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    x, weight, bias = draw(3, 4, dtype=torch.float32), draw(5, 4, dtype=torch.float32, grad=True), draw(5)
    bias = bias.float()
    with torch.autocast("cpu", dtype=dtype):
        result = gemmery.torch.linear(x, weight, bias)
        assert gemmery.torch.matmul(x.double(), x.double().T).dtype == torch.float64
        assert gemmery.torch.matmul(x, x.T).dtype == dtype
    assert result.dtype == dtype
    assert close(
        result.detach(), functional.linear(x.double(), weight.detach().double(), bias.double()), 4, dtype, 40.0
    )
    result.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_errors_of_the_library_pass():
    x, weight = draw(3, 4), draw(5, 4)
    for layer in (gemmery.torch.linear, torch.ops.gemmery.linear):
        with pytest.raises(ShapeError, match="must be equal"):
            layer(x, weight.T)
        with pytest.raises(ShapeError, match=r"\(out_features, in_features\)"):
            layer(x, weight[None])
        with pytest.raises(ArgumentError, match="relu, gelu, silu"):
            layer(x, weight, None, "tanh")
        with pytest.raises(DTypeError, match="one element type"):
            layer(x, weight.float())
        with pytest.raises(LayoutError, match="not dense"):
            gemmery.torch.matmul(x.to_sparse(), weight.T)
    with pytest.raises(ShapeError, match="must be equal"):
        torch.ops.gemmery.matmul(torch.empty(3, 4, device="meta"), torch.empty(3, 4, device="meta"))
    with pytest.raises(ShapeError, match="do not broadcast"):
        torch.ops.gemmery.matmul(torch.empty(2, 3, 4, device="meta"), torch.empty(3, 4, 4, device="meta"))
    with pytest.raises(ArgumentError, match="CUDA device only"):
        gemmery.torch.matmul(x, x.T, precision="tf32")


@pytest.mark.parametrize("value", [None, 2, "x", [[1.0]], np.ones((4, 4))])
def test_an_argument_that_is_no_tensor_is_named(value):
    x, packed = draw(4, 4), gemmery.torch.quantize(draw(4, 4), 8, 4)
    calls = {
        "matmul": (x, x),
        "linear": (x, x, draw(4)),
        "quantized_linear": (x, *packed, draw(4)),
        "grouped_mm": (x, x[None], torch.tensor([4])),
    }
    for function, arguments in calls.items():
        for position in range(len(arguments) - (value is None and "linear" in function)):
            inputs = [*arguments[:position], value, *arguments[position + 1 :]]
            with pytest.raises(ArgumentError, match=rf"\w+ is .*, and gemmery\.torch\.{function} takes tensors"):
                getattr(gemmery.torch, function)(*inputs)


def test_objects_in_the_place_of_tensors_are_passed_on():
    traced = torch.fx.symbolic_trace(lambda a, b: gemmery.torch.matmul(a, b).mT)
    assert close(traced(draw(3, 4), draw(4, 5)), (draw(3, 4) @ draw(4, 5)).T, 4)


def test_two_types_of_float8_are_refused_with_a_way_out():
    a, b = draw(3, 4).to(torch.float8_e4m3fn), draw(4, 5).to(torch.float8_e5m2)
    with pytest.raises(DTypeError, match=r"convert both to torch\.float16"):
        gemmery.torch.matmul(a, b)
    with pytest.raises(DTypeError, match="the type of the other") as error:
        gemmery.torch.matmul(a, b.half())
    assert "gemmery.matmul" not in str(error.value)  # which refuses them too


def test_transforms_refuse_what_the_function_refuses():
    x, weights = draw(3, 4), draw(2, 5, 4)
    each = torch.func.vmap(gemmery.torch.linear, (None, 0, None, None))
    moved = lambda *rest: torch.func.jvp(lambda x: gemmery.torch.linear(x, *rest), (x,), (x,))  # noqa: E731
    for refused in (lambda: each(x, weights, None, "tanh"), lambda: moved(weights[0], None, "tanh")):
        with pytest.raises(ArgumentError, match="relu, gelu, silu"):
            refused()
    for refused in (lambda: each(x, weights[None], None, None), lambda: moved(weights)):
        with pytest.raises(ShapeError, match=r"\(out_features, in_features\)"):
            refused()


def test_tensors_without_memory_give_one():
    x, weight, bias = draw(2, 3, 4).to("meta"), draw(5, 4).to("meta").requires_grad_(), draw(5).to("meta")
    packed, offs = gemmery.torch.quantize(weight, 8, 4), torch.tensor([1, 3]).to("meta")
    for result in (
        gemmery.torch.linear(x, weight, bias, "gelu"),
        gemmery.torch.matmul(x, weight.T),
        gemmery.torch.quantized_linear(x, *packed, bias),
        gemmery.torch.grouped_mm(x[0], weight.T.expand(2, 4, 5), offs)[None].expand(2, 3, 5),
    ):
        assert (result.shape, result.device.type, result.dtype) == ((2, 3, 5), "meta", x.dtype)
    gemmery.torch.linear(x, weight, bias).sum().backward()
    assert weight.grad.shape == weight.shape
    with pytest.raises(DeviceError, match="has no memory"):
        gemmery.torch.linear(x, draw(5, 4))


def test_the_example_of_the_document_runs():
    names: dict[str, object] = {}
    document = (Path(__file__).parents[4] / "docs" / "pytorch.md").read_text()
    exec(document.partition("```python\n")[2].partition("```")[0], names)
    assert names["each"].shape == (5, 3, 32)
    exact = names["weight"].detach().double().requires_grad_()
    functional.gelu(functional.linear(names["x"].double(), exact)).sum().backward()
    assert close(names["weight"].grad, exact.grad, 64, torch.float32, 100.0)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import gemmery
try:
    import gemmery.torch
except gemmery.InstallError as error:
    print(type(error).__name__, error.name, error)
"""


@pytest.mark.process
def test_without_pytorch_the_error_says_how_to_install_it():
    result = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("InstallError torch gemmery.torch needs PyTorch: run pip install torch")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]),
        lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
        lambda: torch.ones(4, 4).to_sparse(),
    ],
    ids=["nested", "jagged", "sparse"],
)
def test_tensors_without_one_shape_are_refused_by_name(make):
    x, ones = make(), torch.ones(4, 4)
    fused = gemmery.torch.fused(gm.relu)
    for name, call in {
        "input|a": lambda: gemmery.torch.linear(x, ones),
        "weight|b": lambda: gemmery.torch.linear(ones, x),
        "bias": lambda: gemmery.torch.linear(ones, ones, x),
        "a": lambda: gemmery.torch.matmul(x, ones),
        "x": lambda: fused(x, ones),
        "weight": lambda: fused(ones, x),
    }.items():
        with pytest.raises(LayoutError, match=rf"^({name})(:| is) .*(unbind|to_dense)\(\)"):
            call()
