"""Memory outside Python's heap: pages that stay for the life of the process, and packing buffers kept between calls."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_KEPT = 64  # buffers kept; each is at most as large as the largest product so far needed
_free: list[tuple[int, int, mmap.mmap | None]] = []  # size and address


def pages(size: int) -> int:
    """Return the address of `size` zero bytes, page-aligned, that are never freed; a forked child gets a copy.

    Raises MemoryError where there are none.
    """
    block = fresh(max(size, 1))
    forever(block)
    return address(block)


def fresh(size: int, large: bool = False) -> mmap.mmap:
    """Return `size` zero bytes in pages of their own, which are freed with the object; a forked child gets a copy.

    `large` asks for large pages, where the system has them. Raises MemoryError where there are none.
    """
    try:  # Python's default is pages that parent and child share
        new = mmap.mmap(-1, size) if sys.platform == "win32" else mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for a buffer of {size} bytes: {error}") from error
    if large and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            new.madvise(mmap.MADV_HUGEPAGE)
    return new


def address(block: mmap.mmap) -> int:
    """Return the address of a block of pages."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def forever(thing: object) -> None:
    """Keep an object alive even when the interpreter ends: compiled code and other threads still use it then."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@contextmanager
def borrowed(size: int) -> Iterator[int]:
    """Lend the address of at least `size` bytes, page-aligned, to one caller. Safe from many threads at once.

    Raises MemoryError where there are none.
    """
    try:
        buffer = _free.pop()
    except IndexError:
        buffer = (0, 0, None)
    if buffer[0] < size:
        block = fresh(size)
        buffer = (size, address(block), block)
    try:
        yield buffer[1]
    finally:
        if len(_free) < _KEPT:
            _free.append(buffer)
