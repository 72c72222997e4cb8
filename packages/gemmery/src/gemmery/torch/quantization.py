"""Weights as small integers: each group of neighboring columns of a row has a factor of its own.

A weight of n rows and k columns becomes two tensors:

| bits | packed | levels |
| --- | --- | --- |
| 8 | int8 (n, k) | -127 to 127 |
| 4 | uint8 (n, k / 2): an even column in the low half of a byte, the next in the high half, each plus 8 | -7 to 7 |

and `scales` (n, k / group), of the weight's element type. An element is its level times the factor of its group, so it
differs from the weight by at most half the factor, and by the rounding of this product to the type in which it is used.

The operator `gemmery::quantized_linear` multiplies by them. On Hopper a kernel multiplies any number of rows in half
precision by a copy of the weight that is arranged for it, made in the first call and kept beside the packed tensor: see
`gemmery.torch.arranged`. On other CUDA devices one multiplies few rows by the packed weight. Other products compute the
weight in the input's type: on a CUDA device the whole of it, by a kernel for half precision, on the CPU for few rows of
input a part after the other, each of which is still in cache for its product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemmery import api, dtypes
from gemmery.api.codes import Parts, decoded, encoded, levels
from gemmery.api.device_call import keep, table
from gemmery.api.options import epilogue_name
from gemmery.api.packed import prepare_packed, prepare_unpacking
from gemmery.arrays import View, view
from gemmery.cpu import threads
from gemmery.cpu.packed_levels import PackedLevels
from gemmery.cuda.launch import Ready
from gemmery.errors import ArgumentError, DeviceError, DTypeError, LayoutError, ShapeError, brief
from gemmery.keywords import ACTIVATIONS
from gemmery.ladder.gemv import MOST_ROWS, step
from gemmery.torch import arranged
from gemmery.torch.gradients import Formula, batched_linear, before_activation, keep_layer, multiply, rows
from gemmery.torch.operators import define, layer, linear, repeated

FORMAT = {8: "int8", 4: "int4"}  # of gm.quantize
BITS = {torch.int8: 8, torch.uint8: 4}  # of an element, by the type of the packed tensor
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of weights, and of factors


def check_format(bits: Any, group: Any) -> None:
    """Raise ArgumentError unless weights can have so many bits and groups so many columns."""
    if not isinstance(bits, int) or bits not in BITS.values():
        raise ArgumentError(f"bits={brief(bits)}: weights have 8 or 4 bits; pass one of them")
    if not isinstance(group, int) or isinstance(group, bool) or group < 1 or (bits == 4 and group % 2):
        even = "even, because two columns share a byte" if bits == 4 else "at least 1"
        raise ArgumentError(f"group={brief(group)}: a group is a number of columns, {even}; 128 is usual")


def check_factors(dtype: Any) -> None:
    """Raise DTypeError unless factors can have this element type."""
    if dtype not in DTYPES:
        raise DTypeError(
            f"dtype={brief(dtype)}: weights that are quantized, and their factors, are {', '.join(map(str, DTYPES))}; "
            "pass one of them"
        )


def check_input(dtype: torch.dtype) -> None:
    """Raise DTypeError unless weights can be computed in the element type of an input."""
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
        raise DTypeError(
            f"input is {dtype}, and a quantized weight is computed in the input's type, which must have fractions and "
            "at least 16 bits: convert the input, for example with input.float()"
        )


def _check_weight(weight: Any) -> None:
    """Raise ArgumentError, ShapeError, LayoutError or DTypeError unless a weight can be quantized."""
    if not isinstance(weight, Tensor):
        raise ArgumentError(f"weight is {brief(weight)}, and no tensor: pass torch.as_tensor(weight)")
    if weight.ndim != 2:
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}; what is quantized is (out_features, in_features): pass one matrix"
        )
    if weight.layout is not torch.strided:
        raise LayoutError(f"a weight of layout {weight.layout} is not dense: pass weight.to_dense()")
    if weight.dtype not in DTYPES:
        raise DTypeError(
            f"weight is {weight.dtype}, and {', '.join(map(str, DTYPES))} are quantized: convert it to one of them"
        )


def quantize(weight: Tensor, bits: int, group: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return a weight of shape (n, k) as levels of so many bits and the factors of groups of columns.

    >>> packed, scales = quantize(torch.tensor([[7.0, -3.0, 0.0, 14.0]]), bits=4, group=2)
    >>> packed, scales
    (tensor([[ 95, 248]], dtype=torch.uint8), tensor([[1., 2.]]))

    The factor of a group is its largest magnitude by 127 or by 7. It is rounded to `dtype`, the weight's element type
    unless another is passed, before the levels are computed. A group that has an infinity or a NaN has no other numbers
    afterwards.

    Raises ArgumentError for `bits` or `group` that no weight can have and for what is no tensor, ShapeError if the
    weight is not a matrix or `group` does not divide k, DTypeError for a weight or a `dtype` other than float64,
    float32, float16 and bfloat16, LayoutError for a weight that is not dense.
    """
    check_format(bits, group)
    _check_weight(weight)
    dtype = weight.dtype if dtype is None else dtype
    check_factors(dtype)
    columns = weight.shape[1]
    if columns % group:
        raise ShapeError(f"group={group} does not divide the {columns} columns of the weight: pass one that does")
    parts = encoded(weight.detach(), FORMAT[bits], group, dtypes.get(str(dtype).removeprefix("torch.")).name)
    return parts.packed, parts.scales


def dequantize(packed: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the weight that levels and factors stand for, (n, k) or a batch of them, in `dtype`, as factors are too.

    >>> dequantize(*quantize(torch.tensor([[7.0, -3.0, 0.0, 14.0]]), 4, 2), 4, torch.float32)
    tensor([[ 7., -3.,  0., 14.]])
    """
    check_input(dtype)
    if dtype.is_complex:
        return dequantize(packed, scales, bits, dtype.to_real()).to(dtype)
    weight: Tensor = decoded(
        Parts(packed, scales.to(dtype)), FORMAT[bits], dtypes.get(str(dtype).removeprefix("torch.")).name
    )
    return weight


# ---- the operator ----

_PART = 1 << 20  # bytes of the weight that are computed at a time
_FEW = 64  # rows of the input; with more, a product of the whole weight takes longer than to compute it
_HALVES = {torch.float16: "f16", torch.bfloat16: "bf16"}


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


def _weight(packed: Any, scales: Any, dtype: torch.dtype) -> Any:
    return dequantize(packed, scales, BITS[packed.dtype], dtype)


def reads_packed(input: Any, scales: Any, bits: int, group: int) -> bool:  # noqa: A002
    """Return True for tensors that a kernel of a CUDA device, of sm_80 or more, multiplies by the packed weight."""
    few = input.ndim > 0 and input.numel() <= MOST_ROWS * input.shape[-1]
    return few and input.dtype in _HALVES and scales.dtype is input.dtype and group % step(bits) == 0


def _by_kernel(input: Any, packed: Any, scales: Any, bias: Any, activation: str | None) -> Any:  # noqa: A002
    """Return the layer by the kernel that reads packed weights; None where there is none for these tensors."""
    x, device = input.contiguous(), input.get_device()
    p, q, start = x.data_ptr(), packed.data_ptr(), 0
    key = (
        *("packed", x.shape, packed.shape, scales.shape, packed.stride(), scales.stride()),
        *(x.dtype, packed.dtype, scales.dtype, device, packed.get_device(), scales.get_device(), (p | q) & 15),
        *(activation, None if bias is None else (bias.shape, bias.get_device())),
    )
    known = table.calls.get(key) or keep(table.calls, key, _prepare(x, packed, scales, bias, activation))
    if isinstance(known, str) or input.is_neg():
        return None
    run, shape = known
    if bias is not None:
        bias = bias.float().contiguous()
        start = bias.data_ptr()
    result = x.new_empty(shape)
    run(p, q, result.data_ptr(), arranged.stream_of(device), start, scales.data_ptr())
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
            *(None, None, name, FORMAT[bits]),
        )
        if not isinstance(run, str) and scales.get_device() == device:
            weight = scales.new_empty((packed.shape[0], packed.shape[1] * 8 // bits))
            run(0, p, weight.data_ptr(), arranged.stream_of(device), 0, scales.data_ptr())
            return weight
    return _weight(packed, scales, dtype)


def panels(packed: Any, scales: Any) -> PackedLevels:
    """Return a weight on the CPU in panels. Raises DeviceError for one elsewhere."""
    if not packed.is_cpu:
        raise DeviceError(f"the weight is on {packed.device}, and panels are for the CPU: call layer.cpu() first")
    exact = levels(Parts(packed.numpy(), scales.float().numpy()), FORMAT[BITS[packed.dtype]])
    assert exact is not None  # without zero points
    return PackedLevels(*exact)


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
        result = arranged.layer(input, packed, scales, bias, activation)
        if result is None:
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
        weight, product = _weight(packed[of], scales[of], input.dtype), result[..., of]
        api.matmul(input, weight.t(), product, bias=None if bias is None else bias[of], activation=activation)
    return result


def _fake(input: Any, packed: Any, scales: Any, *options: Any) -> Any:  # noqa: A002
    bits, _ = weight_format(packed, scales)
    check_input(input.dtype)
    weight = input.new_empty((packed.shape[0], packed.shape[1] * 8 // bits))
    return linear(input, weight, *options)


def _backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """Return the gradients of input, factors and bias; levels have none."""
    x, packed, scales, bias, output = ctx.saved_tensors
    weight = _weight(packed, scales, x.dtype)
    grad = before_activation(ctx, grad, output, x, weight, bias)
    grad_x = grad_scales = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = multiply(grad, weight, ctx.precision)
    if ctx.needs_input_grad[2]:
        levels = dequantize(packed, torch.ones_like(scales), BITS[packed.dtype], x.dtype)
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
    dim = None if of_packed is None and of_scales is None else 0
    if dim is None and of_bias is None:
        x = input.movedim(of_input, 0)
        return torch.ops.gemmery.quantized_linear(x, packed, scales, bias, activation, precision), 0
    if dim == 0:
        packed, scales = (repeated(x, at, info.batch_size) for x, at in ((packed, of_packed), (scales, of_scales)))
    weight = _weight(packed, scales, input.dtype)
    return batched_linear(info, (of_input, dim, of_bias), input, weight, bias, activation, precision)


QUANTIZED_LINEAR = Formula(
    keep_layer,
    _backward,
    lambda _, inputs: linear(inputs[0], _weight(inputs[1], inputs[2], inputs[0].dtype), *inputs[3:]),
)

quantized_linear = define(
    "quantized_linear(Tensor input, Tensor packed, Tensor scales, Tensor? bias=None, str? activation=None, "
    "str? precision=None) -> Tensor",
    quantized_layer,
    _fake,
    QUANTIZED_LINEAR,
    _batch,
)
