"""What offsets, shapes and bias of grouped products must be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.options import check_activation, check_bias, dtype_name
from gemmery.api.promote import promoted, widened
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, view
from gemmery.errors import ArgumentError, DTypeError, ShapeError
from gemmery.keywords import Options


def stacked_shape(x: View, y: View, offsets: View) -> Ints:
    """Return the shape of the result of a stack. Raises ShapeError and DTypeError."""
    if len(x.shape) != 2 or len(y.shape) != 3:
        raise ShapeError(
            f"grouped_matmul with offsets multiplies a of shape (rows, k) by b of shape (groups, k, n) (got shapes "
            f"{x.shape} and {y.shape}); pass lists of matrices without offsets for products of different shapes"
        )
    groups = y.shape[0]
    if offsets.shape != (groups,):
        raise ShapeError(
            f"offsets has shape {offsets.shape}, and b has {groups} matrices; pass the end of each group's rows: shape "
            f"({groups},)"
        )
    if dtypes.get(offsets.dtype).kind not in "iu" and groups:
        raise DTypeError(f"offsets are {dtypes.get(offsets.dtype).numpy}, and row numbers are integers; pass int32")
    return result_shape(x.shape, y.shape[1:])


def host_ends(offsets: Any, rows: int) -> list[int]:
    """Return offsets in the memory of the host as a list. Raises ArgumentError for an order that no groups have."""
    ends: list[int] = np.asarray(offsets).tolist()
    for group, (start, end) in enumerate(pairwise((0, *ends))):
        if not start <= end <= rows:
            raise ArgumentError(
                f"offsets[{group}] is {end}, and must be from {start}, its first row, to {rows}, the rows of a; "
                "offsets are the ends of groups, np.cumsum(sizes), and not their sizes"
            )
    return ends


def result_type(x: View, y: View, shape: Ints, terms: Options) -> str:
    """Return the element type of the result. Raises for a dtype, bias or activation that `matmul` would refuse."""
    common = promoted(x.dtype, y.dtype)
    result = common if terms.dtype is None else widened(common, dtype_name(terms.dtype))
    if terms.activation is not None:
        check_activation(terms.activation, result)
    if terms.bias is not None:
        bias = view(terms.bias)
        arrays.together(a=x, bias=bias)
        check_group_bias(bias, y.shape[0], shape[1], result)
    return result


def check_group_bias(bias: View, groups: int, n: int, result: str) -> None:
    """Raise ShapeError or DTypeError unless this is a bias for `groups` groups of n columns."""
    if len(bias.shape) == 2:
        if bias.shape != (groups, n):
            raise ShapeError(
                f"bias has shape {bias.shape}; it must be one number, one for each column: shape ({n},), or one for "
                f"each column of each group: shape ({groups}, {n})"
            )
        bias = bias._replace(shape=(n,), strides=bias.strides[1:])
    check_bias(bias, n, result)
