"""Grouped products on a CUDA device."""

from __future__ import annotations

from typing import Any

from gemmery import dtypes
from gemmery.api.groups import host_ends
from gemmery.arrays import View
from gemmery.cuda import driver
from gemmery.errors import DeviceError, DTypeError


def ends(offsets: Any, where: View, x: View) -> list[int]:
    """Return the ends of the groups, copied from the device if they are there: then the host waits for its stream."""
    rows = x.shape[0]
    if where.device == "cpu":
        return host_ends(offsets, rows)
    if where.dtype != "i32":
        raise DTypeError(
            f"offsets are {dtypes.get(where.dtype).numpy} on {where.device}, and kernels read int32; convert them, in "
            "PyTorch with offsets.int()"
        )
    if where.stream and driver.captures(where.stream):
        raise DeviceError(
            "a CUDA graph captures this stream, and no kernel of this product reads offsets on the device; pass them "
            "as a list, which the graph keeps"
        )
    return clamped(offsets.tolist(), rows)


def clamped(ends_: list[int], rows: int) -> list[int]:
    """Return ends as kernels use them: at least the one before, at most the number of rows.

    >>> clamped([3, 1, 9, -1], 5)
    [3, 3, 5, 5]
    """
    result, last = [], 0
    for end in ends_:
        last = max(last, min(end, rows))
        result.append(last)
    return result
