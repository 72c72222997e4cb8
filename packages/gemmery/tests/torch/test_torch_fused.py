"""gemmery.torch.fused: values and gradients of random epilogues against PyTorch's own, in float64."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gemmery as gm  # noqa: E402
import gemmery.torch  # noqa: E402
from gemmery.epilogues.random_epilogues import random_epilogue  # noqa: E402

F = torch.nn.functional


def tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(float(x), dtype=torch.float64)


def of_tensors(function):
    return lambda *x: function(*torch.broadcast_tensors(*map(tensor, x)))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        if name == "float8_e4m3":
            return x.clamp(-448, 448).to(torch.float32).to(torch.float8_e4m3fn).to(x.dtype)
        return x.to(getattr(torch, name)).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Library:
    exp, log, tanh, sqrt = (staticmethod(of_tensors(f)) for f in (torch.exp, torch.log, torch.tanh, torch.sqrt))
    minimum, maximum = staticmethod(of_tensors(torch.minimum)), staticmethod(of_tensors(torch.maximum))


def functions(m, n):
    """The functions of an epilogue's text, of PyTorch."""
    rows, columns = torch.arange(m, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    single = {"erf": torch.erf, "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu,
              "relu": torch.relu, "rint": torch.round, "abs": torch.abs, "minimum": torch.minimum}  # fmt: skip
    return {
        **{name: of_tensors(function) for name, function in single.items()},
        "np": Library,
        "cast": lambda x, name: Rounded.apply(tensor(x), name),
        "where": lambda condition, x, y: torch.where(condition, tensor(x), tensor(y)),
        "row_sum": lambda x: x.sum(-1, keepdim=True),
        "row_sum_of_squares": lambda x: (x * x).sum(-1, keepdim=True),
        "row_maximum": lambda x: x.amax(-1, keepdim=True),
        "row_log_sum_exp": lambda x: torch.logsumexp(x, -1, keepdim=True),
        "row_index": lambda x: rows.expand(m, n),
        "column_index": lambda x: columns.expand(m, n),
    }


@pytest.mark.parametrize("seed", range(60))
def test_random_epilogues_have_the_gradients_of_pytorch(seed):
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    m, n, k = (int(side) for side in draw.integers(1, 12, 3))
    names, sums = ["p", "q"][: int(draw.integers(0, 3))], int(draw.choice([1, 1, 2]))
    text, epilogue = random_epilogue(draw, names, sums)
    x = torch.randn(m, k, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(k, n, dtype=torch.float64, requires_grad=True) for _ in range(sums)]
    shapes = [(), (n,), (m, 1), (m, n), (1, n)]
    operands = {
        name: torch.randn(shapes[int(draw.integers(5))], dtype=torch.float64).requires_grad_() for name in names
    }
    layer = gemmery.torch.fused(epilogue, recompute=bool(seed % 2))
    results = layer(x, tuple(weights) if sums > 1 else weights[0], **operands)
    results = results if isinstance(results, tuple) else (results,)
    expected = eval(text, functions(m, n))(*[x @ w for w in weights], *operands.values())
    expected = [y.expand_as(result) for y, result in zip(expected, results, strict=True)]
    leaves = [x, *weights, *operands.values()]
    gradients = [torch.randn_like(result) for result in results]
    have = torch.autograd.grad(results, leaves, gradients, allow_unused=True)
    want = torch.autograd.grad(expected, leaves, gradients, allow_unused=True)
    pairs = [*zip(results, expected, strict=True), *zip(have, want, strict=True)]
    if "float8" not in text:  # what PyTorch records is the function in parts
        recorded = torch.autograd.grad(layer(x, tuple(weights) if sums > 1 else weights[0], **operands), leaves,
                                       gradients, allow_unused=True, create_graph=True)  # fmt: skip
        pairs += zip(recorded, want, strict=True)
    for pair in pairs:
        got, right = (torch.zeros(()) if z is None else z for z in pair)
        assert (got - right).abs().max() <= 1e-10 * max(1, right.detach().abs().max()), text


def test_a_linear_epilogue_keeps_no_sums():
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    layer = gemmery.torch.fused(lambda c, r, s: r + s * c)
    y = layer(x, w, r=torch.randn(5, 3), s=0.5)
    assert [tuple(kept.shape) for kept in y.grad_fn.next_functions[0][0].saved_tensors] == [(5, 4), (4, 3), (5, 3)]
    y.sum().backward()
    assert torch.allclose(x.grad, 0.5 * torch.ones(5, 3) @ w.detach().T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_batches_of_rows_and_narrow_types(dtype):
    dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8).to(dtype).requires_grad_()
    w, b = torch.randn(8, 6).to(dtype).requires_grad_(), torch.randn(6).to(dtype).requires_grad_()
    r = torch.randn(2, 5, 6).to(dtype).requires_grad_()

    @gemmery.torch.fused
    def layer(c, b, r):
        return r + F.silu(c + b)

    y = layer(x, w, b=b, r=r)
    wide = [z.detach().double().requires_grad_() for z in (x, w, b, r)]
    right = wide[3] + F.silu(wide[0] @ wide[1] + wide[2])
    g = torch.randn_like(y)
    have = torch.autograd.grad(y, (x, w, b, r), g)
    want = torch.autograd.grad(right, wide, g.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]
    assert (y.double() - right).abs().max() <= tolerance
    for z, v in zip(have, want, strict=True):
        assert z.dtype == dtype
        assert (z.double() - v).abs().max() <= tolerance * max(1, v.abs().max())


def test_torch_compile_calls_it_as_it_is():
    layer = gemmery.torch.fused(lambda c, b: gm.gelu(c + b))
    x, w, b = torch.randn(4, 8), torch.randn(8, 6, requires_grad=True), torch.randn(6)
    compiled = torch.compile(lambda x: layer(x * 2, w, b=b) + 1, backend="eager")
    assert torch.allclose(compiled(x), F.gelu(2 * x @ w + b) + 1, atol=1e-5)


def test_operands_may_have_the_names_of_gradients_and_sums():
    layer = gemmery.torch.fused(lambda c, gradient0, sum0: c * c * gradient0 + sum0)
    x, w, p, q = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (4, 5), (5,), (5,)))
    grads = torch.autograd.grad(layer(x, w, gradient0=p, sum0=q).sum(), (x, w, p, q))
    wanted = torch.autograd.grad(((x @ w) ** 2 * p + q).sum(), (x, w, p, q))
    assert all(torch.allclose(a, b) for a, b in zip(grads, wanted, strict=True))


def test_operands_may_have_the_names_of_what_is_multiplied():
    layer = gemmery.torch.fused(lambda c, x, weight, self: c * x + weight * self)
    a, b, x, weight = (torch.randn(s, requires_grad=True) for s in ((3, 4), (4, 5), (3, 5), (5,)))
    total = layer(a, b, x=x, weight=weight, self=2)
    assert torch.allclose(total, a @ b * x + weight * 2, atol=1e-5)
    assert torch.allclose(torch.autograd.grad(total.sum(), x)[0], a @ b, atol=1e-5)


def test_operands_broadcast_over_a_batch():
    layer, x, w = gemmery.torch.fused(lambda c, b: c + b), torch.ones(2, 3, 4), torch.ones(4, 5)
    for shape in ((3, 1), (3, 5), (1, 5), (1, 1, 5), (2, 1, 1)):
        b = torch.randn(shape)
        assert torch.equal(layer(x, w, b=b), 4 + b.expand(2, 3, 5))
    with pytest.raises(gm.ShapeError, match=r"\(6, 5\)"):
        layer(x, w, b=torch.ones(6, 5))
    with pytest.raises(gm.ArgumentError, match="row_index"):
        gemmery.torch.fused(lambda c: c + gm.row_index(c))(x, w)


def test_wrong_calls_are_refused():
    x, w = torch.ones(2, 3), torch.ones(3, 4)
    with pytest.raises(gm.ArgumentError, match="no value for its operand 'b'"):
        gemmery.torch.fused(lambda c, b: c + b)(x, w)
    for wrong in ((x, torch.ones(2, 3, 4)), (x, [w]), (np.ones((2, 3)), w), (torch.tensor(1.0), w)):
        with pytest.raises(gm.ArgumentError, match="multiplies tensors"):
            gemmery.torch.fused(lambda c: c)(*wrong)
    with pytest.raises(gm.ArgumentError, match="no operand 'd'"):
        gemmery.torch.fused(lambda c, b: c + b)(x, w, d=1)


def gated(c, b, r):
    """A function with a branch, a statistic and a condition."""
    return gm.where(c > r, F.silu(c + b), gm.maximum(c * r, b)) + gm.row_sum(c * c) * 0.1


def gated_in_torch(x, weight, b, r):
    """The same by PyTorch alone."""
    c = x @ weight
    return torch.where(c > r, F.silu(c + b), torch.maximum(c * r, b)) + (c * c).sum(-1, keepdim=True) * 0.1


def test_transforms_of_torch_func_see_through_it():
    layer = gemmery.torch.fused(gated)
    x, weight, b, r = (torch.randn(s, dtype=torch.float64) for s in ((4, 2, 3), (3, 5), (5,), (2, 1)))

    def ours(x, weight):
        return layer(x, weight, b=b, r=r)

    def theirs(x, weight):
        return gated_in_torch(x, weight, b, r)

    def assert_alike(transform, *inputs):
        for own, other in zip(transform(ours)(*inputs), transform(theirs)(*inputs), strict=True):
            assert torch.allclose(own, other, rtol=1e-10, atol=1e-10)

    assert_alike(lambda f: torch.vmap(f, (0, None)), x, weight)
    assert_alike(lambda f: torch.func.grad(lambda x, w: f(x, w).sum(), (0, 1)), x[0], weight)
    assert_alike(lambda f: torch.vmap(torch.func.hessian(lambda x, w: f(x, w).sum()), (0, None)), x, weight)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, weight.sin())
        assert_alike(lambda f: lambda *z: torch.autograd.forward_ad.unpack_dual(f(*z)), x[0], dual)


def test_second_derivatives_are_those_of_pytorch():
    layer = gemmery.torch.fused(gated)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (3, 5), (5,), (2, 1))]
    seconds = []
    for result in (layer(*inputs[:2], b=inputs[2], r=inputs[3]), gated_in_torch(*inputs)):
        firsts = torch.autograd.grad(result.sin().sum(), inputs, create_graph=True)
        seconds.append([*firsts, *torch.autograd.grad(sum(g.cos().sum() for g in firsts), inputs)])
    for own, other in zip(*seconds, strict=True):
        assert torch.allclose(own, other, rtol=1e-9, atol=1e-9)


def test_second_derivatives_of_two_weights_and_two_outputs():
    layer = gemmery.torch.fused(lambda c, d, s: (F.silu(c) * d * s, d))
    x, v, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (3, 4), (3, 4)))
    y, z = layer(x, (v, w), s=0.5)
    firsts = torch.autograd.grad((y * z).sum(), (x, v, w), create_graph=True)
    wanted = torch.autograd.grad((F.silu(x @ v) * (x @ w) ** 2 * 0.5).sum(), (x, v, w), create_graph=True)
    for own, other in zip(firsts, wanted, strict=True):
        assert torch.allclose(own, other, rtol=1e-9, atol=1e-9)
    seconds, of_wanted = (torch.autograd.grad(sum(g.sum() for g in each), (x, v, w)) for each in (firsts, wanted))
    assert all(torch.allclose(own, other, rtol=1e-9, atol=1e-9) for own, other in zip(seconds, of_wanted, strict=True))


def test_recorded_gradients_of_inputs_that_come_from_one_another():
    layer = gemmery.torch.fused(lambda c, r: F.silu(c) * r)
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4, 4)))
    for rows, weight, r in ((x, w, x.sin()), (x, x.mT @ x, x[:, :1]), (x * w.sum(), w, w[0])):
        firsts, wanted = (
            torch.autograd.grad(result.sum(), (x, w), create_graph=True, allow_unused=True, materialize_grads=True)
            for result in (layer(rows, weight, r=r), F.silu(rows @ weight) * r)
        )
        for own, other in zip(firsts, wanted, strict=True):
            assert torch.allclose(own, other, rtol=1e-9, atol=1e-9)


def test_a_function_without_a_derivative_has_none_recorded():
    layer = gemmery.torch.fused(lambda c, r: gm.where(c > 0, 1.0, r))
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    result = layer(x, weight, r=torch.ones(5))
    assert torch.autograd.grad(result.sum(), x, create_graph=True, allow_unused=True) == (None,)


@pytest.mark.parametrize(
    ("dtype", "r", "words"),
    [
        (torch.float32, np.ones(5, np.float32), "need a tensor or a number"),
        (torch.float32, 1j, "computes real numbers"),
        (torch.float32, 10**400, "beyond float64"),
        (torch.float32, torch.ones(7), r"operand 'r' has shape \(7,\), and the product \(3, 5\)"),
        (torch.complex64, 1.0, "need a product of floats, not torch.complex64"),
    ],
    ids=["array", "complex number", "large number", "shape", "complex product"],
)
def test_operands_that_have_no_derivatives_are_refused(dtype, r, words):
    x, weight = torch.ones(3, 4, dtype=dtype), torch.ones(4, 5, dtype=dtype)
    layer = gemmery.torch.fused(lambda c, r: F.silu(c) * r)
    with pytest.raises(gm.GemmeryError, match=words):
        torch.func.jvp(lambda x: layer(x, weight, r=r), (x,), (x,))


def test_codes_of_8_bits_have_no_second_derivatives():
    layer = gemmery.torch.fused(lambda c: gm.cast(c, "float8_e4m3"))
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, 2)
    with pytest.raises(gm.ArgumentError, match="have no derivatives; leave the cast out"):
        torch.func.jacrev(lambda x: layer(x, weight))(x)
