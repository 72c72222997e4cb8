"""Memory that ends where unreadable memory begins: what reads past an operand dies."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np


def at_page_end(values: np.ndarray) -> np.ndarray:
    """A copy with an unreadable page after its last byte."""
    page = mmap.PAGESIZE
    size = -(-values.nbytes // page) * page
    pages = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0):
        raise OSError("mprotect failed")
    copy = np.frombuffer(pages, values.dtype, values.size, size - values.nbytes).reshape(values.shape)
    copy[...] = values
    return copy


def survives(call: Callable[[], object]) -> bool:
    """True when a forked child comes back from the call; False when it dies."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0
