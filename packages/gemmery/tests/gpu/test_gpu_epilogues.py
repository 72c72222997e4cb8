"""Functions after products on a device, with PyTorch's tensors, against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery.api import finished_on_device
from gemmery.api.device_call import table
from random_functions import check, function

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
]

import gemmery.torch  # noqa: E402

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
SHAPES = [(300, 520, 136), (65, 67, 24), (1, 512, 256), (16, 264, 512), (257, 1000, 64), (7, 33, 2000)]


def wide(x):
    return x.double().cpu().numpy()


def tensors(shape, dtype, weights, seed, transposed):
    """Return A, the weights and operands of each kind; products are sums of small whole numbers."""
    m, n, k = shape
    torch.manual_seed(seed)
    whole = lambda *sides: torch.randint(-2, 3, sides, device="cuda").to(TYPES[dtype])  # noqa: E731
    a = whole(m, k)
    bs = [whole(n, k).T if transposed else whole(k, n) for _ in range(weights)]
    kinds = [TYPES[each] for each in ("bf16", "f32", "f16")]
    rows = torch.randn(m, n + 3 * (seed % 2), device="cuda").to(kinds[seed % 3])[:, :n]
    operands = {"x0": rows, "x1": torch.randn(n, device="cuda"), "x2": torch.randn(m, 1, device="cuda"), "x3": 0.75}
    return a, bs, operands


def run(shape, dtype, out, seed, *, weights=1, statistics=False, outputs=1, transposed=True):
    a, bs, operands = tensors(shape, dtype, weights, seed, transposed)
    f = function(seed, weights, statistics, outputs)
    named = {"dtype": {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}.get(out)} if out != dtype else {}
    names = {each.name for each in f.graph(weights).operands}
    bound = {name: value for name, value in operands.items() if name in f.parameters}
    result = gm.matmul(a, tuple(bs) if weights == 2 else bs[0], epilogue=f(**bound), **named)
    results = [wide(each) for each in (result if outputs > 1 else (result,))]
    numbers = {name: wide(x) if isinstance(x, torch.Tensor) else x for name, x in operands.items() if name in names}
    totals = [wide(a) @ wide(b) for b in bs]
    check(results, f.graph(weights), totals, numbers, out, 2.0**-53 if out == "f64" else 2.0**-24)


TYPES_OF = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32"), ("f32", "f32"), ("f64", "f64")]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("dtype", "out"), TYPES_OF)
def test_random_functions(dtype, out, seed):
    run(SHAPES[seed % 6], dtype, out, seed, outputs=1 + seed % 3 // 2, transposed=seed % 4 > 0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("dtype", "out"), [("bf16", "bf16"), ("f16", "f32"), ("f32", "f32")])
def test_random_functions_of_two_weights(dtype, out, seed):
    run(SHAPES[seed % 6], dtype, out, seed, weights=2, transposed=seed % 4 > 0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("out", ["bf16", "f32"])
def test_random_statistics_of_rows(out, seed):
    run(SHAPES[seed % 6], "bf16", out, seed, statistics=True, outputs=1 + seed % 2)


@pytest.mark.parametrize("m", [1, 8, 16, 64, 512])
def test_swiglu(m):
    """Of tiles for every number of rows."""
    torch.manual_seed(m)
    x = torch.randint(-2, 3, (m, 1024), device="cuda").bfloat16()
    gate, up = (torch.randint(-2, 3, (1536, 1024), device="cuda").bfloat16() for _ in range(2))
    c, d = (wide(x) @ wide(w).T for w in (gate, up))
    result = wide(gm.matmul(x, (gate.T, up.T), epilogue=lambda c, d: gm.silu(c / 64) * d))
    value = c / 64 / (1 + np.exp(-c / 64)) * d
    assert (np.abs(result - value) <= 2.0**-7 * np.abs(value) + 1e-3).all()


def test_rows_as_codes():
    """Codes of e4m3 and a factor for each row."""
    x, w = (torch.randn(sides, device="cuda").bfloat16() for sides in ((200, 256), (512, 256)))

    def codes(c):
        top = gm.row_maximum(np.absolute(c)) / 448.0
        return gm.cast(c / top, "float8_e4m3"), top

    q, s = gm.matmul(x, w.T, epilogue=gm.epilogue(codes), dtype="float32")
    assert q.dtype == torch.float8_e4m3fn
    assert s.shape == (200, 1)
    c = wide(x) @ wide(w).T
    top = np.abs(c).max(1, keepdims=True) / 448
    assert (np.abs(wide(s) - top) <= 1e-5 * top).all()
    assert (np.abs(wide(q) * top - c) <= 2.0**-4 * np.abs(c) * 1.001 + top * 2.0**-9).all()


def test_batches_and_out():
    x, w = torch.randn(3, 40, 64, device="cuda").bfloat16(), torch.randn(64, 96, device="cuda").bfloat16()
    r = torch.randn(3, 1, 96, device="cuda")
    out = torch.empty(3, 40, 96, device="cuda", dtype=torch.bfloat16)
    f = gm.epilogue(lambda c, r: gm.where(gm.row_index(c) > 7, c + r, c))
    assert gm.matmul(x, w, out, epilogue=f(r=r)) is out
    c = wide(x) @ wide(w)
    value = np.where(np.arange(40)[None, :, None] > 7, c + wide(r), c)
    assert (np.abs(wide(out) - value) <= 2.0**-7 * np.abs(value) + 1e-2).all()
    plain = gm.matmul(x, w, epilogue=lambda c: c * 2.0)
    assert (np.abs(wide(plain) - 2 * c) <= 2.0**-7 * np.abs(c) + 1e-2).all()


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients(recompute):
    """Of a layer whose gradient is a pass over sums that were kept, or an epilogue of a product."""
    torch.manual_seed(1)
    layer = gemmery.torch.fused(lambda c, bias, r: r + torch.nn.functional.silu(c + bias), recompute=recompute)
    x, w, r = (torch.randn(sides, device="cuda").bfloat16() for sides in ((130, 64), (96, 64), (130, 96)))
    bias, grad = torch.randn(96, device="cuda").bfloat16(), torch.randn(130, 96, device="cuda").bfloat16()
    for _ in range(2):  # the second time by calls seen before
        inputs = [z.clone().requires_grad_() for z in (x, w, bias, r)]
        layer(inputs[0], inputs[1].T, bias=inputs[2], r=inputs[3]).backward(grad)
    exact = [z.double().requires_grad_() for z in (x, w, bias, r)]
    (exact[3] + torch.nn.functional.silu(exact[0] @ exact[1].T + exact[2])).backward(grad.double())
    for own, right in zip(inputs, exact, strict=True):
        error = (own.grad.double() - right.grad).norm() / right.grad.norm()
        assert float(error) <= 2.0**-6


ONE = gm.epilogue(lambda c, r, v, s: (s * (c + v) + r, c - v))
TWO = gm.epilogue(lambda c, d, r, v, s: (s * gm.silu(c) * d + r + v, c - d))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("f", [ONE, TWO], ids=["one weight", "two weights"])
def test_calls_seen_before(f, dtype, monkeypatch):
    """They have the bits of the slow path, for other tensors, a tensor that is passed twice, and a negative zero."""
    torch.manual_seed(3)
    new = lambda *sides: torch.randn(sides, device="cuda").to(TYPES[dtype])  # noqa: E731

    def call(r=None, s=0.5):
        x, w = new(136, 128), tuple(new(128, 128).T for _ in f.parameters[:-3])
        r = {None: new(136, 128), "x": x}[r]
        return lambda: gm.matmul(x, w if len(w) > 1 else w[0], epilogue=f(r=r, v=torch.ones(128, device="cuda"), s=s))

    def slow(each):
        table.forget()
        return each()

    def same(found, right):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, right, strict=True))

    calls = [call(), call(), call(r="x"), call(s=0.0), call(s=-0.0)]
    right = [slow(each) for each in calls]
    table.forget()
    for each, expected in zip((*calls, *reversed(calls)), (*right, *reversed(right)), strict=True):
        same(each(), expected)
    if f is ONE or dtype == "bf16":  # one launch does it
        monkeypatch.setattr(finished_on_device, "product", lambda *_: pytest.fail("the slow path was taken"))
    for each, expected in zip(calls, right, strict=True):
        same(each(), expected)
    x, w = new(136, 128).requires_grad_(), new(128, 128).T
    monkeypatch.undo()
    with pytest.raises(gm.errors.LayoutError, match="requires grad"):
        gm.matmul(x, (w, w) if f is TWO else w, epilogue=f(r=x.detach(), v=1.0, s=0.5))
