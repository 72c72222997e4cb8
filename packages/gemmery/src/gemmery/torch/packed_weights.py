"""The operator `gemmery::quantized_linear`: a layer whose weight has 8 or 4 bits an element.

On a CUDA device a kernel multiplies few rows by the packed weight. Other products compute the weight in the input's
type: on a CUDA device the whole of it, by a kernel for half precision, on the CPU for few rows of input a part after
the other, each of which is still in cache for its product.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmery import api
from gemmery.api.device_call import keep, table
from gemmery.api.options import epilogue_name
from gemmery.api.prepared import prepare_packed, prepare_unpacking
from gemmery.arrays import View, view
from gemmery.cpu import threads
from gemmery.cpu.packed_levels import PackedLevels
from gemmery.cuda.launch import Ready
from gemmery.errors import DeviceError, DTypeError, ShapeError
from gemmery.keywords import ACTIVATIONS
from gemmery.ladder.gemv_quantized import MOST_ROWS, step
from gemmery.torch.eager import multiply
from gemmery.torch.gradients import Formula, batched_linear, before_activation, rows
from gemmery.torch.operators import define, layer, linear
from gemmery.torch.quantization import check_input, dequantize

BITS = {torch.int8: 8, torch.uint8: 4}  # of an element, by the type of the packed tensor
_PART = 1 << 20  # bytes of the weight that are computed at a time
_FEW = 64  # rows of the input; with more, a product of the whole weight takes longer than to compute it
_HALVES = {torch.float16: "f16", torch.bfloat16: "bf16"}
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # PyTorch for the CPU alone has none


def weight_format(packed: Any, scales: Any) -> tuple[int, Any]:
    """Return bits and columns of a group. Raises DTypeError and ShapeError for tensors that are no packed weight."""
    if packed.dtype not in BITS or not scales.is_floating_point():
        raise DTypeError(
            f"packed is {packed.dtype} and scales are {scales.dtype}: 8-bit weights are int8, 4-bit weights uint8 with "
            "two columns a byte, and factors are floating-point numbers, as gemmery.torch.quantize returns them"
        )
    bits = BITS[packed.dtype]
    matrices = packed.ndim == scales.ndim == 2 and packed.shape[0] == scales.shape[0]
    columns, groups = (packed.shape[-1] * 8 // bits, scales.shape[-1]) if matrices else (0, 0)
    if not matrices or (columns % groups if groups else columns):
        raise ShapeError(
            f"packed has shape {tuple(packed.shape)} and scales {tuple(scales.shape)}: pass n rows of {8 // bits} "
            "columns an element, and n rows of factors, one for each group of columns, all groups equally wide"
        )
    return bits, columns // groups if groups else 1


def unpacked(packed: Any, scales: Any, dtype: torch.dtype) -> Any:
    """Return the weight, (n, k) or a batch of them."""
    bits = BITS[packed.dtype]
    return dequantize(packed, scales, bits, packed.shape[-1] * 8 // bits // max(1, scales.shape[-1]), dtype)


def reads_packed(input: Any, scales: Any, bits: int, group: int) -> bool:  # noqa: A002
    """Return True for tensors that a kernel of a CUDA device, of sm_80 or more, multiplies by the packed weight."""
    few = input.ndim > 0 and input.numel() <= MOST_ROWS * input.shape[-1]
    return few and input.dtype in _HALVES and scales.dtype is input.dtype and group % step(bits) == 0


def _by_kernel(input: Any, packed: Any, scales: Any, bias: Any, activation: str | None) -> Any:  # noqa: A002
    """Return the layer by the kernel that reads packed weights; None where there is none for these tensors."""
    x, device = input.contiguous(), input.get_device()
    p, q, start = x.data_ptr(), packed.data_ptr(), 0
    key = (
        *(
            "packed",
            x.shape,
            packed.shape,
            scales.shape,
            packed.stride(),
            scales.stride(),
            x.dtype,
            packed.dtype,
            scales.dtype,
        ),
        *(device, packed.get_device(), scales.get_device(), (p | q) & 15, activation),
        None if bias is None else (bias.shape, bias.get_device()),
    )
    known = table.calls.get(key) or keep(table.calls, key, _prepare(x, packed, scales, bias, activation))
    if isinstance(known, str) or input.is_neg():
        return None
    run, shape = known
    if bias is not None:
        bias = bias.float().contiguous()
        start = bias.data_ptr()
    result = x.new_empty(shape)
    run(p, q, result.data_ptr(), _stream_of(device), start, scales.data_ptr())
    return result


def _prepare(
    x: Any, packed: Any, scales: Any, bias: Any, activation: str | None
) -> tuple[Ready, tuple[int, ...]] | str:
    """Return the launch for tensors like these and the shape of its result, or why there is none."""
    bits, _ = weight_format(packed, scales)
    (n, columns), device = packed.shape, x.get_device()
    k = columns * 8 // bits
    if x.shape[-1:] != (k,) or not 0 < x.numel() <= MOST_ROWS * k or activation not in (None, *ACTIVATIONS):
        return "a kernel multiplies few rows of as many columns as the weight, with relu, gelu or silu"
    if x.dtype not in _HALVES or scales.dtype is not x.dtype or (bias is not None and bias.shape != (n,)):
        return "a kernel multiplies half precision, with factors of the same type and a bias for each column"
    if any(z is not None and z.get_device() != device for z in (packed, scales, bias)):
        return "the tensors are on several devices"
    where, dtype, rows = f"cuda:{device}", _HALVES[x.dtype], x.numel() // k
    run = prepare_packed(
        View(x.data_ptr() & 15, (rows, k), (2 * k, 2), dtype, where),
        View(packed.data_ptr() & 15, (n, columns), packed.stride(), "uint8", where),
        View(0, tuple(scales.shape), tuple(2 * each for each in scales.stride()), dtype, where),
        View(0, (rows, n), (2 * n, 2), dtype, where),
        bits,
        epilogue_name(bias, activation),
    )
    return run if isinstance(run, str) else (run, (*x.shape[:-1], n))


def _whole(packed: Any, scales: Any, dtype: torch.dtype) -> Any:
    """Return the weight of tensors with memory: on a CUDA device by a kernel where one unpacks these."""
    if packed.is_cuda and packed.ndim == 2 and dtype in _HALVES and scales.dtype is dtype and not scales.is_neg():
        device, bits = packed.get_device(), BITS[packed.dtype]
        p, where, name = packed.data_ptr(), f"cuda:{device}", _HALVES[dtype]
        run = prepare_unpacking(
            View(p & 15, tuple(packed.shape), packed.stride(), "uint8", where),
            View(0, tuple(scales.shape), tuple(2 * each for each in scales.stride()), name, where),
            name,
            bits,
        )
        if not isinstance(run, str) and scales.get_device() == device:
            weight = scales.new_empty((packed.shape[0], packed.shape[1] * 8 // bits))
            run(p, p, weight.data_ptr(), _stream_of(device), 0, scales.data_ptr())
            return weight
    return unpacked(packed, scales, dtype)


def panels(packed: Any, scales: Any) -> PackedLevels:
    """Return a weight on the CPU in panels. Raises DeviceError for one elsewhere."""
    if not packed.is_cpu:
        raise DeviceError(f"the weight is on {packed.device}, and panels are for the CPU: call layer.cpu() first")
    levels = unpacked(packed, torch.ones_like(scales), torch.float32).to(torch.int8)
    return PackedLevels(levels.numpy(), scales.float().numpy(), BITS[packed.dtype])


def reads_panels(input: Any) -> bool:  # noqa: A002
    """Return True for a few rows of a type that products by panels have."""
    few = input.ndim > 0 and 0 < input.numel() <= _FEW * input.shape[-1]
    return few and input.dtype in (*_HALVES, torch.float32)


def by_panels(input: Any, weight: PackedLevels, bias: Any, activation: str | None) -> Any:  # noqa: A002
    """Return activation(input @ weight.T + bias) by panels, where `reads_panels` and PyTorch watches nothing."""
    if input.shape[-1] != weight.k:
        raise ShapeError(f"input has shape {tuple(input.shape)}, and the weight {weight.k} columns; they must be equal")
    result = input.new_empty((*input.shape[:-1], weight.n))
    x, c = view(input.reshape(1, -1, weight.k)), view(result.view(1, -1, weight.n))
    row = None if bias is None else view(bias.detach().float())
    weight.multiply(x, c, row, activation or "", threads.get())
    return result


def quantized_layer(
    input: Any,  # noqa: A002
    packed: Any,
    scales: Any,
    bias: Any = None,
    activation: Any = None,
    precision: str | None = None,
) -> Any:
    """Return activation(input @ weight.T + bias) for tensors with memory."""
    if input.is_cuda and precision is None:
        result = _by_kernel(input, packed, scales, bias, activation)
        if result is not None:
            return result
    bits, _ = weight_format(packed, scales)
    n, k = packed.shape[0], packed.shape[1] * 8 // bits
    part = max(1, _PART // max(1, k * input.element_size()))
    few = input.numel() <= _FEW * k and input.shape[-1:] == (k,) and (bias is None or bias.shape == (n,))
    if not input.is_cpu or not few or n <= part or precision is not None:
        return layer(input, _whole(packed, scales, input.dtype), bias, activation, precision)
    result = input.new_empty((*input.shape[:-1], n))
    for start in range(0, n, part):
        of = slice(start, start + part)
        weight, product = unpacked(packed[of], scales[of], input.dtype), result[..., of]
        api.matmul(input, weight.t(), product, bias=None if bias is None else bias[of], activation=activation)
    return result


def _fake(input: Any, packed: Any, scales: Any, *options: Any) -> Any:  # noqa: A002
    bits, _ = weight_format(packed, scales)
    check_input(input.dtype)
    weight = input.new_empty((packed.shape[0], packed.shape[1] * 8 // bits))
    return linear(input, weight, *options)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, packed, scales, bias, ctx.activation, ctx.precision = inputs
    again = bias if ctx.activation in ("gelu", "silu") else None
    ctx.save_for_backward(x, packed, scales, again, output if ctx.activation == "relu" else None)
    ctx.bias_shape = None if bias is None else bias.shape


def _backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """Return the gradients of input, factors and bias; levels have none."""
    x, packed, scales, bias, output = ctx.saved_tensors
    weight = unpacked(packed, scales, x.dtype)
    grad = before_activation(ctx, grad, output, lambda: linear(x, weight, bias, None, ctx.precision))
    grad_x = grad_scales = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = multiply(grad, weight, ctx.precision)
    if ctx.needs_input_grad[2]:
        levels = unpacked(packed, torch.ones_like(scales), x.dtype)
        of_levels = multiply(rows(grad).mT, rows(x), ctx.precision) * levels
        grad_scales = of_levels.unflatten(-1, (scales.shape[-1], -1)).sum(-1).to(scales.dtype)
    if ctx.needs_input_grad[3]:
        grad_bias = grad.sum_to_size(ctx.bias_shape)
    return grad_x, None, grad_scales, grad_bias, None, None


def _batch(
    info: Any,
    dims: tuple[Any, ...],
    input: Any,  # noqa: A002
    packed: Any,
    scales: Any,
    bias: Any = None,
    activation: str | None = None,
    precision: str | None = None,
) -> tuple[Any, int]:
    """Return a batch of layers: one product, of the rows of all inputs or of the weights of all."""
    of_input, of_packed, of_scales, of_bias = (*dims, None)[:4]
    if of_packed is None and of_scales is None and of_bias is None:
        x = input.movedim(of_input, 0)
        return torch.ops.gemmery.quantized_linear(x, packed, scales, bias, activation, precision), 0
    if of_packed is not None:
        packed = packed.movedim(of_packed, 0)
    if of_scales is not None:
        scales = scales.movedim(of_scales, 0)
    if of_scales is None and of_packed is not None:
        scales = scales.expand(packed.shape[0], *scales.shape)
    if of_packed is None and of_scales is not None:
        packed = packed.expand(scales.shape[0], *packed.shape)
    dim = None if of_packed is None and of_scales is None else 0
    weight = unpacked(packed, scales, input.dtype)
    return batched_linear(info, (of_input, dim, of_bias), input, weight, bias, activation, precision)


def _forward(operator: Any, inputs: tuple[Any, ...]) -> Any:
    x, packed, scales, *rest = inputs
    return linear(x, unpacked(packed, scales, x.dtype), *rest)


QUANTIZED_LINEAR = Formula(_keep, _backward, _forward)

quantized_linear = define(
    "quantized_linear(Tensor input, Tensor packed, Tensor scales, Tensor? bias=None, str? activation=None, "
    "str? precision=None) -> Tensor",
    quantized_layer,
    _fake,
    QUANTIZED_LINEAR,
    _batch,
)
