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

from gemmery.errors import ArgumentError, ShapeError, brief

BITS = (8, 4)


def check_format(bits: Any, group: Any) -> None:
    """Raise ArgumentError unless weights can have so many bits and groups so many columns."""
    if bits not in BITS or isinstance(bits, bool):
        raise ArgumentError(f"bits={brief(bits)}: weights have 8 or 4 bits; pass one of them")
    if not isinstance(group, int) or group < 1 or (bits == 4 and group % 2):
        even = "even, because two columns share a byte" if bits == 4 else "at least 1"
        raise ArgumentError(f"group={brief(group)}: a group is a number of columns, {even}; 128 is usual")


def quantize(weight: Tensor, bits: int, group: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return a weight of shape (n, k) as levels of so many bits and the factors of groups of columns.

    >>> packed, scales = quantize(torch.tensor([[7.0, -3.0, 0.0, 14.0]]), bits=4, group=2)
    >>> packed, scales
    (tensor([[ 95, 248]], dtype=torch.uint8), tensor([[1., 2.]]))

    The factor of a group is its largest magnitude by 127 or by 7. It is rounded to `dtype`, the weight's element type
    unless another is passed, before the levels are computed. A group that has an infinity or a NaN has no other numbers
    afterwards.

    Raises ArgumentError for `bits` or `group` that no weight can have, ShapeError if `group` does not divide k.
    """
    check_format(bits, group)
    rows, columns = weight.shape
    if columns % group:
        raise ShapeError(f"group={group} does not divide the {columns} columns of the weight: pass one that does")
    top = 2 ** (bits - 1) - 1
    groups = weight.detach().float().reshape(rows, columns // group, group)
    scales = (groups.abs().amax(-1) / top).to(dtype or weight.dtype)
    steps = scales.float()[..., None]
    levels = torch.where(steps > 0, groups / steps, 0).nan_to_num().round().clamp(-top, top)
    levels = levels.reshape(rows, columns).to(torch.int8)
    return (levels if bits == 8 else _in_pairs(levels)), scales


def dequantize(packed: Tensor, scales: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """Return the weight that levels and factors stand for, each element rounded once to `dtype` if it is theirs.

    >>> dequantize(*quantize(torch.tensor([[7.0, -3.0, 0.0, 14.0]]), 4, 2), 4, 2, torch.float32)
    tensor([[ 7., -3.,  0., 14.]])
    """
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


def _in_pairs(levels: Tensor) -> Tensor:
    """Two levels of 4 bits a byte, each plus 8."""
    halves = (levels + 8).to(torch.uint8)
    return halves[:, 0::2] | halves[:, 1::2] << 4
