"""Packing buffers, kept between calls: fresh pages cost more than small products."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, c_char

_KEPT = 64  # buffers kept; each is at most what the largest product so far needed
_free: list[tuple[int, int, mmap.mmap]] = []


@contextmanager
def borrowed(size: int) -> Iterator[int]:
    """The address of at least `size` bytes, page-aligned, for this caller alone. Safe from many threads at once."""
    if not size:
        yield 0
        return
    try:
        taken = _free.pop()
    except IndexError:
        taken = (0, 0, None)  # type: ignore[assignment]
    if taken[0] < size:
        pages = mmap.mmap(-1, size)
        taken = (size, addressof(c_char.from_buffer(pages)), pages)
    try:
        yield taken[1]
    finally:
        if len(_free) < _KEPT:
            _free.append(taken)
