"""gemmery.torch.quantized_linear: values, parts of a weight on the CPU, gradients, vmap, torch.compile and autocast."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gemmery.torch  # noqa: E402
from gemmery.errors import ArgumentError, DTypeError, ShapeError  # noqa: E402
from gemmery.torch import arranged, quantization  # noqa: E402
from gemmery.torch.quantization import dequantize  # noqa: E402

functional = torch.nn.functional
OPERATOR = torch.ops.gemmery.quantized_linear
ACTIVATIONS = {None: lambda x: x, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
GROUP = 4


def draw(*shape, dtype=torch.float64, seed=0, grad=False):
    numbers = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype).requires_grad_(grad)


def weight_of(packed, scales):
    """The weight by the definition of the format, in float64."""
    levels = packed.double()
    if packed.dtype == torch.uint8:
        levels = torch.tensor(
            [[half - 8.0 for byte in row for half in (byte % 16, byte // 16)] for row in packed.tolist()]
        )
    return levels.double() * scales.double().repeat_interleave(levels.shape[1] // scales.shape[1], 1)


def close(result, expected, tolerance=1e-12):
    return result.shape == expected.shape and bool(((result.double() - expected).abs() <= tolerance).all())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_whole_and_in_parts(bits, activation, monkeypatch):
    packed, scales = gemmery.torch.quantize(draw(40, 24), bits, GROUP)
    x, bias = draw(2, 5, 24), draw(40)
    expected = ACTIVATIONS[activation](functional.linear(x, weight_of(packed, scales), bias))
    for part in (1 << 20, 10 * 24 * 8):  # bytes: all rows of the weight; 10 of its 40
        monkeypatch.setattr(quantization, "_PART", part)
        for layer in (gemmery.torch.quantized_linear, OPERATOR):
            assert close(layer(x, packed, scales, bias, activation), expected)
        with pytest.raises(ShapeError, match="bias has shape"):
            OPERATOR(x, packed, scales, draw(41))
        with pytest.raises(ShapeError, match="must be equal"):
            OPERATOR(x[..., 1:], packed, scales)
    assert OPERATOR(x[:0], packed, scales).shape == (0, 5, 40)


@pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)]
)
def test_types_of_input_and_factors(dtype, unit):
    packed, scales = gemmery.torch.quantize(draw(9, 24, dtype=dtype), 8, GROUP)
    x = draw(3, 24, dtype=dtype)
    result, weight = gemmery.torch.quantized_linear(x, packed, scales), weight_of(packed, scales)
    assert result.dtype == dtype
    assert close(result, x.double() @ weight.T, 2 * unit * float((x.double().abs() @ weight.abs().T).max()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_input_factors_and_bias(activation):
    packed, scales = gemmery.torch.quantize(draw(5, 8), 4, GROUP)
    x, bias = draw(2, 3, 8, grad=True), draw(5, grad=True)
    for layer in (gemmery.torch.quantized_linear, OPERATOR):
        one = lambda x, scales, bias: layer(x, packed, scales, bias, activation)  # noqa: B023, E731
        inputs = (x, scales.clone().requires_grad_(), bias)
        assert torch.autograd.gradcheck(one, inputs, fast_mode=True, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(one, inputs, fast_mode=True)


def test_opcheck():
    packed, scales = gemmery.torch.quantize(draw(5, 8), 4, GROUP)
    torch.library.opcheck(OPERATOR.default, (draw(3, 8, grad=True), packed, scales, draw(5, grad=True), "silu"))


@pytest.mark.parametrize("dims", [(1, None, None, None), (0, 0, 0, 0), (None, 0, None, None), (0, None, 2, None)])
@pytest.mark.parametrize("bits", [8, 4])
def test_vmap(dims, bits):
    formats = [gemmery.torch.quantize(draw(5, 8, seed=i), bits, GROUP) for i in range(3)]
    samples = ([draw(2, 8, seed=i) for i in range(3)], *zip(*formats, strict=True), [draw(5, seed=i) for i in range(3)])
    inputs = [items[0] if dim is None else torch.stack(items, dim) for items, dim in zip(samples, dims, strict=True)]
    each = [[items[0]] * 3 if dim is None else items for items, dim in zip(samples, dims, strict=True)]
    expected = [functional.linear(x, weight_of(p, s), b).relu() for x, p, s, b in zip(*each, strict=True)]
    layer = lambda *inputs: gemmery.torch.quantized_linear(*inputs, "relu")  # noqa: E731
    assert close(torch.func.vmap(layer, dims)(*inputs), torch.stack(expected))


def test_gradients_of_each_example():
    packed, scales = gemmery.torch.quantize(draw(5, 8), 4, GROUP)

    def gradient(layer):
        return torch.func.vmap(torch.func.grad(lambda scales, x: layer(scales, x).sin().sum()), (None, 0))

    each = gradient(lambda scales, x: gemmery.torch.quantized_linear(x, packed, scales))(scales, draw(3, 2, 8))
    levels = weight_of(packed, torch.ones_like(scales))
    plain = gradient(lambda scales, x: x @ (levels * scales.repeat_interleave(GROUP, 1)).T)
    assert close(each, plain(scales, draw(3, 2, 8)))


def test_compiled_as_one_graph_and_autocast():
    packed, scales = gemmery.torch.quantize(draw(5, 8, dtype=torch.float32), 4, GROUP)
    layer = lambda x: gemmery.torch.quantized_linear(x, packed, scales, None, "gelu")  # noqa: E731
    x = draw(3, 8, dtype=torch.float32, grad=True)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x.detach())
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, layer(x.detach().bfloat16()))


def test_tensors_that_are_no_packed_weight_are_refused():
    packed, scales = gemmery.torch.quantize(draw(6, 8), 8, GROUP)
    for layer in (gemmery.torch.quantized_linear, OPERATOR):
        with pytest.raises(DTypeError, match=r"gemmery\.torch\.quantize"):
            layer(draw(3, 8), packed.int(), scales)
        with pytest.raises(ShapeError, match="factors"):
            layer(draw(3, 8), packed, scales[:5])
        for factors in (scales.repeat(1, 2)[:, :3], scales[:, :0], scales[0, 0]):
            with pytest.raises(ShapeError, match="equally wide"):
                layer(draw(3, 8), packed, factors)
        with pytest.raises(ShapeError, match="equally wide"):
            layer(draw(3, 8), packed[0, 0], scales)
        for dtype in (torch.int32, torch.bool, torch.float8_e4m3fn):
            with pytest.raises(DTypeError, match="convert the input"):
                layer(draw(3, 8).to(dtype), packed, scales)
            with pytest.raises(DTypeError, match="convert the input"):
                layer(*(x.to("meta") for x in (draw(3, 8).to(dtype), packed, scales)))
        with pytest.raises(ArgumentError, match="relu, gelu, silu"):
            layer(draw(3, 8), packed, scales, None, "tanh")


def test_a_weight_is_unpacked_alike_for_all():
    packed, scales = gemmery.torch.quantize(draw(6, 8), 4, GROUP)
    assert torch.equal(dequantize(packed, scales, 4, torch.float64), weight_of(packed, scales))


class OnDevice:
    """What `quantized_layer` sees of a tensor on a CUDA device, in the memory of an emulated one."""

    is_cuda = True

    def __init__(self, card, tensor, array=None):
        words = torch.uint8 if tensor.itemsize == 1 else torch.int16
        self.tensor, self.card, self.shape, self.ndim = tensor, card, tensor.shape, tensor.ndim
        self.dtype, self.numel, self.stride = tensor.dtype, tensor.numel, tensor.stride
        self.is_floating_point, self.is_neg, self.is_inference = tensor.is_floating_point, tensor.is_neg, lambda: True
        self.element_size, self.is_contiguous = tensor.element_size, tensor.is_contiguous
        name = "uint8" if tensor.itemsize == 1 else "f16"
        self.array = array or card.put(tensor.view(words).numpy().view("u1" if name == "uint8" else "f2"), name)

    def get_device(self):
        return int(self.array.memory.device.partition(":")[2])

    def data_ptr(self):
        return self.array.memory.pointer

    def contiguous(self):
        return self

    def new_empty(self, shape):
        return OnDevice(self.card, torch.empty(shape, dtype=self.dtype), self.card.empty(shape, "f16"))


@pytest.mark.parametrize("kernel", ["gemv_quantized", "wgmma_quantized"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_kernel_reads_packed_weights_on_a_device(bits, kernel, monkeypatch):
    pytest.importorskip("cuda.bindings")
    from emulated_card import installed
    from gemmery.cuda.weights import Format, arrange

    card, form = installed(monkeypatch), Format(40, 256, f"int{bits}", 128, "f16")
    monkeypatch.setattr(arranged, "stream_of", lambda device: 0)
    packed, scales = gemmery.torch.quantize(draw(40, 256, dtype=torch.float16), bits, 128)
    codes = packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).reshape(40, 256)
    whole = OnDevice(card, arrange(form, codes.view(torch.uint8), scales.view(torch.int16)))
    held = form, whole if kernel == "wgmma_quantized" else None
    monkeypatch.setattr(arranged, "_hold", lambda packed, scales, state: (None, state, *held))
    x = draw(2, 3, 256, dtype=torch.float16)
    for _ in range(2):  # the second launch is known
        result = quantization.quantized_layer(*(OnDevice(card, z) for z in (x, packed, scales)), None, "relu")
        exact, size = x.double() @ weight_of(packed, scales).T, x.double().abs() @ weight_of(packed, scales).abs().T
        rounded = 2.0**-11 * (kernel == "wgmma_quantized")  # each weight
        tolerance = ((2.5 * 256 + 4) * 2.0**-24 + rounded) * size + 2.0**-11 * exact.abs()
        numbers = torch.tensor(result.array.numbers.astype("f8"))
        assert bool(((numbers - exact.relu()).abs() <= tolerance).all())
    assert card.launched == [kernel] * 2
    assert card.findings == []
