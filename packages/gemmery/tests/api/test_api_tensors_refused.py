"""Tensors that only PyTorch can multiply are refused, although the compiled entry has met products like theirs."""

import pytest

import gemmery as gm
from tensors import meet, parameter, same, torch, values

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def freed():
    x = torch.ones(8, 8)
    x.untyped_storage().resize_(0)
    return x


class Named(torch.Tensor):
    """A subclass without arithmetic of its own."""


def masked():
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(8, 8), torch.ones(8, 8) > 0)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(8, 8)


REFUSED = {
    "requires_grad": (parameter, gm.LayoutError, "requires grad"),
    "computed": (lambda: parameter() * 2, gm.LayoutError, "requires grad"),
    "masked": (masked, gm.LayoutError, "MaskedTensor"),
    "fake": (fake, gm.LayoutError, "FakeTensor"),
    "freed": (freed, gm.LayoutError, "needs 256 bytes of storage and has 0"),
    "zero": (lambda: torch._efficientzerotensor((8, 8)), gm.LayoutError, "null pointer"),
    "meta": (lambda: torch.ones(8, 8, device="meta"), gm.DeviceError, "'meta' has no memory"),
    "mkldnn": (lambda: torch.ones(8, 8).to_mkldnn(), gm.LayoutError, "to_dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.quint8), gm.DTypeError, "quint8"),
}  # fmt: skip
CALLS = {
    "matmul": lambda a, b, x: gm.matmul(a, b),
    "vector": lambda a, b, x: gm.matmul(a, x),
    "out": lambda a, b, x: gm.matmul(b, b, out=a),
    "gemm": lambda a, b, x: gm.gemm(2.0, b, a),
    "beta": lambda a, b, x: gm.gemm(2.0, b, b, 0.5, a),
    "gemv": lambda a, b, x: gm.gemv(a, x),
    "relu": lambda a, b, x: gm.matmul(b, a, activation="relu"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("refused", REFUSED)
def test_a_tensor_that_is_refused_is_refused_after_plain_ones(refused, call):
    make, error, words = REFUSED[refused]
    b, x = values(8, 8), values(8)
    meet(lambda: CALLS[call](values(8, 8), b, x))
    with pytest.raises(error, match=words):
        CALLS[call](make(), b, x)
    meet(lambda: CALLS[call](values(8, 8), b, x))


def test_a_bias_that_is_refused_is_refused_after_plain_ones():
    a = values(8, 8)
    meet(lambda: gm.matmul(a, a, bias=a[0]))
    with pytest.raises(gm.LayoutError, match="requires grad"):
        gm.matmul(a, a, bias=parameter()[0])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("transform", ["vmap", "functionalize", "grad", "jvp", "trace", "modes", "constants"])
def test_products_are_refused_while_pytorch_records_after_plain_ones(transform, call):
    b, x = values(8, 8), values(8)
    ones = torch.ones(8, 8)

    def product(a):
        return CALLS[call](a, b, x)

    def recorded():
        if transform == "vmap":
            torch.vmap(product)(torch.ones(2, 8, 8))
        if transform == "functionalize":
            torch.func.functionalize(product)(ones)
        if transform == "grad":
            torch.func.grad(lambda a: product(a).sum())(ones)
        if transform == "jvp":
            torch.func.jvp(product, (ones,), (ones,))
        if transform == "trace":
            torch.jit.trace(product, ones)
        if transform == "constants":
            torch.func.functionalize(lambda a: product(ones) + a)(ones)
        if transform == "modes":
            from torch.utils._python_dispatch import TorchDispatchMode

            with TorchDispatchMode():
                product(ones)

    meet(lambda: product(ones.clone()))
    with pytest.raises(gm.LayoutError, match=r"use torch\.matmul inside"):
        recorded()
    meet(lambda: product(ones.clone()))


def test_a_tangent_is_not_dropped_after_plain_tensors():
    import torch.autograd.forward_ad as forward

    a = values(8, 8)
    meet(lambda: gm.matmul(a, a))
    with forward.dual_level():
        with pytest.raises(gm.LayoutError, match="tangent of forward-mode"):
            gm.matmul(forward.make_dual(a, a), a)
        assert same(gm.matmul(a, a), a @ a)


def test_conjugate_and_negative_tensors_are_multiplied_as_they_are():
    z = torch.complex(values(8, 8), values(8, 8, seed=1))
    meet(lambda: gm.matmul(z, z))
    assert same(gm.matmul(z.conj(), z), z.conj().resolve_conj() @ z)
    assert same(gm.matmul(z, z.mH), z @ z.mH.resolve_conj())
    x = values(8, 8)
    meet(lambda: gm.matmul(x, x))
    assert same(gm.matmul(z.conj().imag, x), -z.imag @ x)


def test_a_subclass_gives_what_it_gave_before():
    a = values(8, 8)
    meet(lambda: gm.matmul(a, a))
    assert same(gm.matmul(a.as_subclass(Named), a), a @ a)


def test_wrong_shapes_are_refused_after_right_ones():
    a, x = values(8, 8), values(8)
    meet(lambda: gm.matmul(a, a))
    meet(lambda: gm.matmul(a, a, out=torch.zeros(8, 8)))
    for call in (
        lambda: gm.matmul(a, values(7, 8)),
        lambda: gm.matmul(a, a, out=torch.zeros(8, 7)),
        lambda: gm.gemm(1.0, a, x),
        lambda: gm.gemv(a, a),
        lambda: gm.matmul(a, a, bias=values(7)),
    ):
        with pytest.raises(gm.ShapeError):
            call()
    with pytest.raises(gm.LayoutError, match="share memory"):
        gm.matmul(a, a, out=torch.zeros(1, 8).expand(8, 8))
