"""Tensors without plain memory of their own, and products while PyTorch records or transforms operations."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import gemmery as gm
from gemmery.api import array_libraries
from gemmery.api.device_call import table
from gemmery.errors import LayoutError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning"),  # MaskedTensor, nested tensors
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
ONES = torch.ones(3, 3)


def freed(*shape, storage=0):
    """A tensor whose storage was given back, as FSDP does, or cut to some bytes."""
    x = torch.ones(*shape)
    x.untyped_storage().resize_(storage)
    return x


def cut():
    """A view that begins behind the start of its storage, and ends behind its end."""
    x = torch.ones(8)
    view = x[4:]
    x.untyped_storage().resize_(24)
    return view


@pytest.mark.parametrize(
    "call",
    [
        lambda: gm.matmul(freed(3, 3), ONES),
        lambda: gm.matmul(ONES, freed(3, 3)),
        lambda: gm.matmul(ONES, freed(3)),
        lambda: gm.matmul(ONES, ONES, out=freed(3, 3)),
        lambda: gm.matmul(np.ones((3, 3)), np.ones((3, 3)), out=freed(3, 3)),
        lambda: gm.matmul(ONES, ONES, bias=freed(3)),
        lambda: gm.gemm(1.0, ONES, ONES, 1.0, freed(3, 3)),
        lambda: gm.gemv(freed(3, 3), ONES[0]),
        lambda: gm.explain(freed(3, 3), ONES),
        lambda: gm.matmul(freed(64, 64, storage=64), torch.ones(64, 64)),
        lambda: gm.matmul(cut(), torch.ones(4)),
    ],
)
def test_a_tensor_without_its_storage_is_refused(call):
    with pytest.raises(gm.LayoutError, match=r"needs \d+ bytes of storage and has \d+.*FSDP"):
        call()


def test_a_tensor_without_elements_needs_no_storage():
    assert gm.matmul(freed(0, 3), torch.ones(3, 2)).shape == (0, 2)
    assert torch.equal(gm.matmul(freed(2, 0), freed(0, 3)), torch.zeros(2, 3))
    assert gm.matmul(freed(5, storage=8)[:2], torch.ones(2)) >= 0


class Wrapped(torch.Tensor):
    """A subclass that has no memory of its own, as DTensor."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_):
        raise AssertionError


def masked():
    from torch.masked import masked_tensor

    return masked_tensor(ONES, ONES > 0)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3, 3)


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 3), ONES], layout=layout)


def uninitialized():
    return torch.nn.UninitializedParameter(requires_grad=False)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (masked, gm.LayoutError, "MaskedTensor defines its own arithmetic"),
        (fake, gm.LayoutError, "FakeTensor defines its own arithmetic"),
        (lambda: Wrapped(ONES), gm.LayoutError, "Wrapped defines its own arithmetic"),
        (lambda: nested(torch.strided), gm.LayoutError, r"nested tensor.*x\.unbind\(\)"),
        (lambda: nested(torch.jagged), gm.LayoutError, r"nested tensor.*x\.unbind\(\)"),
        (lambda: torch._efficientzerotensor((3, 3)), gm.LayoutError, "null pointer"),
        (ONES.to_mkldnn, gm.LayoutError, "_mkldnn.*to_dense"),
        (lambda: torch.quantize_per_tensor(ONES, 0.1, 0, torch.quint8), gm.DTypeError, r"quint8.*x\.dequantize\(\)"),
        (lambda: ONES.to("meta"), gm.DeviceError, "'meta' has no memory"),
        (uninitialized, gm.LayoutError, "UninitializedParameter"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_tensors_that_are_not_their_memory_are_refused_by_name(make, error, words):
    for operands in ((make(), ONES), (ONES, make())):
        with pytest.raises(error, match=words):
            gm.matmul(*operands)
    with pytest.raises(error, match=words):
        gm.matmul(ONES, ONES, out=make())


def test_a_subclass_without_its_own_arithmetic_is_multiplied():
    class Named(torch.Tensor):
        pass

    x = ONES.as_subclass(Named)
    assert torch.equal(gm.matmul(x, torch.nn.Buffer(ONES)), torch.full((3, 3), 3.0))


def of_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return gm.matmul(torch.ones(3, 3), torch.ones(3, 3))


def of_constants_by_functionalize():
    return torch.func.functionalize(lambda x: gm.matmul(ONES, ONES) + x)(ONES)


def by_make_fx():
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: gm.matmul(x, ONES))(ONES)


def by_export():
    class Model(torch.nn.Module):
        def forward(self, x):
            return gm.matmul(x, ONES)

    return torch.export.export(Model(), (ONES,), strict=False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torch.jit.trace(lambda x: gm.matmul(x, ONES), ONES), r"torch\.jit\.trace cannot record"),
        (lambda: torch.jit.trace(lambda x: gm.gemv(x, ONES[0]), ONES), r"torch\.jit\.trace cannot record"),
        (lambda: torch.func.functionalize(lambda x: gm.matmul(x, ONES))(ONES), r"torch\.func.*functionalize"),
        (of_constants_by_functionalize, r"torch\.func.*functionalize"),
        (lambda: torch.vmap(lambda x: gm.matmul(x, ONES))(torch.ones(2, 3, 3)), r"torch\.func.*vmap"),
        (lambda: torch.func.grad(lambda x: gm.matmul(x, ONES).sum())(ONES), r"torch\.func.*grad"),
        (lambda: torch.func.jvp(lambda x: gm.matmul(x, ONES), (ONES,), (ONES,)), r"torch\.func"),
        (of_fake_tensors, "FakeTensorMode.* cannot see"),
        (by_make_fx, "ProxyTorchDispatchMode.* cannot see"),
        (by_export, "FakeTensorMode.* cannot see"),
    ],
)
def test_a_product_that_pytorch_would_not_see_is_refused(call, words):
    with pytest.raises(gm.LayoutError, match=rf"{words}.*or use torch\.matmul inside"):
        call()
    assert torch.equal(gm.matmul(ONES, ONES), torch.full((3, 3), 3.0))  # afterwards it is as before


def test_a_tangent_of_forward_mode_is_not_dropped():
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        with pytest.raises(gm.LayoutError, match="tangent of forward-mode"):
            gm.matmul(forward.make_dual(ONES, ONES), ONES)
        assert torch.equal(gm.matmul(ONES, ONES), torch.full((3, 3), 3.0))


@pytest.mark.parametrize(
    "write",
    [
        lambda out: gm.matmul(ONES, ONES, out=out),
        lambda out: gm.matmul(out, ONES, out=out),
        lambda out: gm.gemm(1.0, ONES, ONES, 0.5, out, out=out),
        lambda out: gm.gemv(ONES, ONES[0], out=out[0]),
        lambda out: gm.matmul(np.ones((3, 3), np.float32), np.ones((3, 3), np.float32), out=out),
        lambda out: gm.matmul(ONES, ONES, bias=ONES[0], out=out),
    ],
)
def test_autograd_sees_that_out_was_written(write):
    weights, x = torch.ones(3, 3), torch.ones(3, 3, requires_grad=True)
    y = x * weights
    write(weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_tensor_of_inference_mode_is_written():
    with torch.inference_mode():
        out = torch.zeros(3, 3)
        assert torch.equal(gm.matmul(ONES, ONES, out=out), torch.full((3, 3), 3.0))


class OnDevice:
    """A stand-in for a tensor on a device, with what the fast path reads."""

    is_cuda, dtype, shape, requires_grad, layout = True, "f32", (3, 3), False, "strided"

    def __init__(self, pointer):
        self.pointer, self.version = pointer, 0

    data_ptr = lambda self: self.pointer  # noqa: E731
    get_device = is_neg = lambda _: 0
    stride = lambda _: (3, 1)  # noqa: E731
    new_empty_strided = lambda *_, dtype: OnDevice(4096)  # noqa: E731


@pytest.fixture
def fast_path(monkeypatch):
    """The fast path for a stand-in of PyTorch, operands that it knows, the stand-in's state and the launches."""
    state = SimpleNamespace(tracing=False, modes=0, transforms=False)
    guards = SimpleNamespace(_empty_strided_cuda=lambda *_: OnDevice(8192))
    state.current = 1
    c = SimpleNamespace(
        _dynamo=SimpleNamespace(guards=guards),
        _cuda_getDevice=lambda: state.current,
        _is_tracing=lambda: state.tracing,
        _len_torch_dispatch_stack=lambda: state.modes,
        _are_functorch_transforms_active=lambda: state.transforms,
        _cuda_getCurrentRawStream=lambda _: 7,
    )
    state.forward_ad = SimpleNamespace(_current_level=-1)
    graph = SimpleNamespace(increment_version=lambda x: setattr(x, "version", x.version + 1))
    stand_in = SimpleNamespace(
        _C=c,
        Tensor=OnDevice,
        nn=SimpleNamespace(Parameter=OnDevice),
        uint8=None,
        strided="strided",
        is_grad_enabled=lambda: True,
        autograd=SimpleNamespace(forward_ad=state.forward_ad, graph=graph),
    )
    a, b, out, launches = OnDevice(1024), OnDevice(2048), OnDevice(3072), []
    table.forget()

    def launch(*pointers):
        launches.append(pointers[:3])

    launch.workspace = 0
    served = SimpleNamespace(countdown=0, run=launch)
    call = array_libraries.KnownCall(served, (3, 3), (3, 1), "float32", -36, 36, -36, 36)
    library = array_libraries.Torch(stand_in)
    for target in (None, out):
        table.calls[array_libraries.key_of(library, a, b, target, "matmul", None)] = call
    path = library.multiply

    def multiply(a, b, out):
        return path(a, b, out, "matmul", None)

    return multiply, (a, b, out), state, launches


def test_the_fast_path_tells_autograd_too(fast_path):
    multiply, (a, b, out), _, launches = fast_path
    assert multiply(a, b, out) is out
    assert out.version == 1
    assert multiply(a, b, None).pointer == 4096
    assert launches == [(1024, 2048, 3072), (1024, 2048, 4096)]
    assert a.version == b.version == 0


def test_the_fast_path_allocates_directly_on_the_current_device_alone(fast_path):
    multiply, (a, b, _), state, launches = fast_path
    for state.current in (1, 0):
        multiply(a, b, None)
    assert [launched[2] for launched in launches] == [4096, 8192]


def test_the_fast_path_leaves_errors_to_the_slow_one(fast_path):
    multiply, (a, b, out), state, launches = fast_path
    for tensors in ((OnDevice(0), b, None), (a, OnDevice(0), None), (a, b, OnDevice(0))):
        assert multiply(*tensors) is None
    for name in ("tracing", "modes", "transforms"):
        setattr(state, name, 1)
        assert multiply(a, b, out) is multiply(a, b, None) is None
        setattr(state, name, 0)
    state.forward_ad._current_level = 0
    assert multiply(a, b, out) is None
    assert launches == []


@pytest.mark.parametrize(
    ("alpha", "beta", "c", "asked"),
    [
        (1.0, 0.0, None, ("plain gemm", None, None, (0, 0), None)),
        (1.0, 0.0, "out", ("plain gemm", None, None, (0, 0), None)),
        (0.5, 0.0, None, ("gemm", (0.5, 0.0), None, (0, 0), None)),
        (0.5, 2.0, "out", ("gemm", (0.5, 2.0), None, (0, 0), None)),
        (1, 0, None, ("plain gemm", None, None, (0, 0), None)),
        (1, 1, "out", ("gemm", (1, 1), None, (0, 0), None)),
        (0.5, 2.0, None, None),  # c is missing
        (0.5, float("nan"), None, None),
        (0.0, 0.0, "out", None),
        (1e39, 0.0, None, None),
        ("1", 0, None, None),
    ],
)
def test_a_gemm_into_out_is_asked_for_on_the_fast_path(monkeypatch, alpha, beta, c, asked):
    monkeypatch.setitem(array_libraries.PATHS, OnDevice, lambda _a, _b, out, *rest: "new" if out is None else rest)
    a, out = OnDevice(1024), OnDevice(2048)
    assert array_libraries.scaled(a, a, out if c else None, out, "gemm", alpha, beta, {}) == asked
    if asked and not beta:
        assert array_libraries.scaled(a, a, None, None, "gemm", alpha, beta, {}) == "new"
        assert gm.gemm(alpha, a, a, out=out) == asked
    elif asked:
        other = OnDevice(4096)
        assert gm.gemm(alpha, a, a, beta, other, out=out) == (*asked[:-1], other)
        assert gm.gemm(alpha, a, a, beta, out, out=out) == asked


def test_a_result_that_no_tensor_can_hold_is_refused():
    one = torch.ones(1, 1)
    for length in (2**24, 2**40):  # more than an address counts, and more bytes than 64 bits count
        with pytest.raises(MemoryError, match=r"no memory for a float32 tensor of shape"):
            gm.matmul(one.expand(length, 1), one.expand(1, length))
    deep = one.expand((1,) * 70 + (1, 1))
    assert gm.matmul(deep, one).ndim == 72
    with pytest.raises(gm.GemmeryError, match="too large"):
        gm.matmul(deep.to(torch.int32), one)


def test_symbolic_tracing_is_refused_by_name():
    with pytest.raises(gm.LayoutError, match=r"torch\.fx is tracing.*torch\.matmul"):
        torch.fx.symbolic_trace(lambda x: gm.matmul(x, x))


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_scalar_that_requires_grad_is_refused_like_an_operand(name):
    two = torch.tensor(2.0, requires_grad=True)

    def product():
        return gm.gemm(two, ONES, ONES) if name == "alpha" else gm.gemm(1, ONES, ONES, two, ONES)

    with pytest.raises(gm.LayoutError, match="requires grad"):
        product()
    with torch.no_grad():
        assert torch.equal(product(), torch.full((3, 3), 6.0 if name == "alpha" else 5.0))


def test_an_inference_tensor_is_written_in_inference_mode_alone():
    """As by PyTorch: it has no version, by which autograd would notice. The 100 calls reach the compiled entry."""
    a, b = torch.ones(5, 6), torch.ones(6, 7)
    with torch.inference_mode():
        out = torch.zeros(5, 7)
    for _ in range(100):
        gm.matmul(a, b, out=torch.zeros(5, 7))
        with pytest.raises(LayoutError, match="cannot be written"):
            gm.matmul(a, b, out=out)
    assert not out.any()
    with torch.inference_mode():
        for _ in range(100):
            assert gm.matmul(a, b, out=out) is out
    assert bool((out == 6).all())
    assert torch.equal(gm.matmul(out, out.T), torch.full((5, 5), 252.0))
