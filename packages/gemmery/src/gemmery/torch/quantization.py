"""Weights as small integers: each group of neighbouring columns of a row has a factor of its own.

A weight of n rows and k columns becomes two tensors:

| bits | packed | levels |
| --- | --- | --- |
| 8 | int8 (n, k) | -127 to 127 |
| 4 | uint8 (n, k / 2): an even column in the low half of a byte, the next in the high half, each plus 8 | -7 to 7 |

and `scales` (n, k / group), of the weight's element type. An element is its level times the factor of its group, so it
differs from the weight by at most half the factor, and by the rounding of this product to the type in which it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemmery.errors import ArgumentError, DTypeError, LayoutError, ShapeError, brief

BITS = (8, 4)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of weights, and of factors


def check_format(bits: Any, group: Any) -> None:
    """Raise ArgumentError unless weights can have so many bits and groups so many columns."""
    if not isinstance(bits, int) or bits not in BITS:
        raise ArgumentError(f"bits={brief(bits)}: weights have 8 or 4 bits; pass one of them")
    if not isinstance(group, int) or isinstance(group, bool) or group < 1 or (bits == 4 and group % 2):
        even = "even, because two columns share a byte" if bits == 4 else "at least 1"
        raise ArgumentError(f"group={brief(group)}: a group is a number of columns, {even}; 128 is usual")


def check_factors(dtype: Any) -> None:
    """Raise DTypeError unless factors can have this element type."""
    if dtype not in DTYPES:
        raise DTypeError(
            f"dtype={brief(dtype)}: weights that are quantised, and their factors, are {', '.join(map(str, DTYPES))}; "
            "pass one of them"
        )


def check_input(dtype: torch.dtype) -> None:
    """Raise DTypeError unless weights can be computed in the element type of an input."""
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
        raise DTypeError(
            f"input is {dtype}, and a quantised weight is computed in the input's type, which must have fractions and "
            "at least 16 bits: convert the input, for example with input.float()"
        )


def _check_weight(weight: Any) -> None:
    """Raise ArgumentError, ShapeError, LayoutError or DTypeError unless a weight can be quantised."""
    if not isinstance(weight, Tensor):
        raise ArgumentError(f"weight is {brief(weight)}, and no tensor: pass torch.as_tensor(weight)")
    if weight.ndim != 2:
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}; what is quantised is (out_features, in_features): pass one matrix"
        )
    if weight.layout is not torch.strided:
        raise LayoutError(f"a weight of layout {weight.layout} is not dense: pass weight.to_dense()")
    if weight.dtype not in DTYPES:
        raise DTypeError(
            f"weight is {weight.dtype}, and {', '.join(map(str, DTYPES))} are quantised: convert it to one of them"
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
    rows, columns = weight.shape
    if columns % group:
        raise ShapeError(f"group={group} does not divide the {columns} columns of the weight: pass one that does")
    top = 2 ** (bits - 1) - 1
    wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
    groups = weight.detach().to(wide).reshape(rows, columns // group, group)
    scales = _rounded(groups.abs().amax(-1), top, dtype)
    steps = scales.to(wide)[..., None]
    levels = torch.where(steps > 0, groups / steps, 0).nan_to_num().round().clamp(-top, top)
    levels = levels.reshape(rows, columns).to(torch.int8)
    if bits == 8:
        return levels, scales
    halves = (levels + 8).to(torch.uint8)
    return halves[:, 0::2] | halves[:, 1::2] << 4, scales


def dequantize(packed: Tensor, scales: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """Return the weight that levels and factors stand for, each element rounded once to `dtype` if it is theirs.

    >>> dequantize(*quantize(torch.tensor([[7.0, -3.0, 0.0, 14.0]]), 4, 2), 4, 2, torch.float32)
    tensor([[ 7., -3.,  0., 14.]])
    """
    check_input(dtype)
    factors = scales.to(dtype)[..., None]
    groups = (*scales.shape, group)
    if bits == 8 and packed.is_cuda:
        return (packed.reshape(groups) * factors).flatten(-2)  # one kernel, which converts as it reads
    if bits == 8:
        weight = packed.to(dtype, memory_format=torch.contiguous_format)
    else:
        weight = scales.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)
        weight[..., 0::2] = packed & 15
        weight[..., 1::2] = packed >> 4
        weight -= 8
    weight.view(groups).mul_(factors)
    return weight


def _rounded(largest: Tensor, top: int, dtype: torch.dtype) -> Tensor:
    """Return factors in `dtype`, subnormal ones rounded up: rounded down, `top` of them would not reach the weight.

    float16 has subnormal factors for every group below 0.0077. `top` times the factor of a finite group is finite.
    """
    limits, scales = torch.finfo(dtype), largest / top
    most = limits.max / top * (1 - limits.eps)
    scales = torch.where(largest <= limits.max, scales.clamp(max=most), scales)
    half_a_step = limits.smallest_normal * limits.eps / 2
    return torch.where((scales > 0) & (scales < limits.smallest_normal), scales + half_a_step, scales).to(dtype)
