"""Memory outside Python's heap: pages that stay for the life of the process, and packing buffers kept between calls."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_KEPT = 64  # buffers kept; each is at most what the largest product so far needed
_free: list[tuple[int, int, mmap.mmap | None]] = []  # size and address


def pages(size: int) -> int:
    """The address of `size` zero bytes, page-aligned, never given back: code in them may run until the process ends.

    A forked child gets a copy, never the parent's own pages.
    """
    found = _private(max(size, 1))
    forever(found)
    return _address(found)


def forever(thing: object) -> None:
    """Keep an object when the interpreter ends, which frees what modules hold while threads still use it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@contextmanager
def borrowed(size: int) -> Iterator[int]:
    """The address of at least `size` bytes, page-aligned, for this caller alone. Safe from many threads at once."""
    try:
        taken = _free.pop()
    except IndexError:
        taken = (0, 0, None)
    if taken[0] < size:
        found = _private(size)
        taken = (size, _address(found), found)
    try:
        yield taken[1]
    finally:
        if len(_free) < _KEPT:
            _free.append(taken)


def _private(size: int) -> mmap.mmap:
    """Fresh pages that a fork copies; Python's default is pages that parent and child share."""
    return mmap.mmap(-1, size) if sys.platform == "win32" else mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANON)


def _address(found: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(found))
