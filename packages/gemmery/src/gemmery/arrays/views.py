"""The memory of an array: address, shape and strides, and what follows from them."""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Any

from gemmery import dtypes
from gemmery.arrange import Arrangement
from gemmery.errors import DeviceError, DTypeError, LayoutError
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple


class View(NamedTuple):
    """The memory of an array; strides are in bytes, of any sign, and 0 for broadcast dimensions.

    A product creates three views: a named tuple takes 0.3 us, a frozen dataclass 0.9 us.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # gemmery's name: "f32"
    device: str = "cpu"  # or "cuda:0"; "cuda" when the array does not name the device
    stream: int = 0  # handle of the CUDA stream that may use the memory without waiting
    writable: bool = True
    owner: object = None  # keeps the memory alive: the array, Lent, or the View that this one repeats

    @property
    def array(self) -> Any:
        """The array whose memory this is."""
        return self.owner.array if type(self.owner) is Lent else self.owner

    @property
    def ordinal(self) -> int:
        """The number of its CUDA device."""
        return int(self.device.partition(":")[2])


class Lent(NamedTuple):
    """An array that exports its memory, and the capsule that it made for this."""

    array: object
    capsule: object


def operands(form: Arrangement, problem: Problem, a: int = 0, b: int = 0, c: int = 0) -> tuple[View, View, View]:
    """Return A, B and C as a kernel takes them, at these addresses."""
    batch, m, n, k = form.batch, form.m, form.n, form.k
    return (
        View(a, (batch, m, k), form.a, problem.dtype),
        View(b, (batch, k, n), form.b, problem.b_dtype or problem.dtype),
        View(c, (batch, m, n), form.c, problem.out),
    )


def library(array: object, module: str, name: str) -> Any:
    """Return an imported module if `array` is an instance of its class `name`, else None.

    >>> library(1, "torch", "Tensor") is None
    True

    Another thread may be importing the module: it is in `sys.modules` then, without its classes.
    """
    imported = sys.modules.get(module)
    return imported if isinstance(array, getattr(imported, name, ())) else None


def contiguous(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def once_converted(x: View, dtype: str) -> View:
    """Return x with the strides that it has after conversion to `dtype`."""
    if x.dtype == dtype:
        return x
    return x._replace(dtype=dtype, strides=contiguous(x.shape, dtypes.get(dtype).size))


def same(x: View, y: View) -> bool:
    """Return True if x and y are the same elements of the same memory."""
    return x[:4] == y[:4]


def overlap(x: View, y: View) -> bool:
    """Return True if the memory ranges of x and y overlap."""
    x_below, x_above = reach(x.shape, x.strides, x.dtype)
    y_below, y_above = reach(y.shape, y.strides, y.dtype)
    return x.pointer + x_below < y.pointer + y_above and y.pointer + y_below < x.pointer + x_above


def repeats(x: View) -> bool:
    """Return False if no two elements of x can share memory: each stride exceeds the span of smaller dimensions."""
    return _repeats(x.shape, x.strides, x.dtype)


@lru_cache(maxsize=1024)
def _repeats(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> bool:
    if 0 in shape:
        return False
    span = dtypes.get(dtype).size
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < span:
            return True
        span += stride * (length - 1)
    return False


@lru_cache(maxsize=1024)
def reach(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Return the lowest byte and one past the highest byte, as offsets from the address of the first element."""
    if 0 in shape:
        return 0, 0
    spans = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + dtypes.get(dtype).size


def elsewhere(device: str) -> DeviceError:
    """Return the error for memory of a device that gemmery does not support."""
    return DeviceError(
        f"an operand is on the device {device!r}: gemmery multiplies on the CPU and on CUDA devices; "
        "move the operand first, in PyTorch with x.cpu()"
    )


def only_on_devices(long: str) -> DTypeError:
    """Return the error for an operand in CPU memory of an element type that only devices multiply."""
    return DTypeError(
        f"{long} on the CPU: only CUDA devices of compute capability 9.0 multiply it; move the operand to one, or "
        "convert with astype(float32), in PyTorch with x.float()"
    )


def check(what: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raise LayoutError unless a shape and strides in bytes from another library are those of an array."""
    if len(shape) > MOST_DIMENSIONS:
        raise LayoutError(f"{what} has {len(shape)} dimensions: at most {MOST_DIMENSIONS} are supported")
    if any(not 0 <= n < _MOST for n in shape) or len(strides) != len(shape) or any(abs(s) >= _MOST for s in strides):
        raise LayoutError(
            f"{what} has the shape {shape} and strides of {strides} bytes: it needs dimensions that are not negative, "
            "and a stride of less than 2**63 bytes for each"
        )


MOST_DIMENSIONS = 64  # of a NumPy array
_MOST = 2**63


def no_memory(what: str) -> LayoutError:
    """Return the error for an array that has elements and a null pointer."""
    return LayoutError(f"{what} has a null pointer: its memory was never allocated, or has been freed")


def together(**operands: View | None) -> None:
    """Raise DeviceError unless all operands are on one device."""
    (first, view), *others = [(name, x) for name, x in operands.items() if x is not None]
    for name, x in others:
        if x.device != view.device:
            raise DeviceError(
                f"{first} is on {view.device} and {name} on {x.device}: all operands must be on one device; move one "
                "with x.to(device) in PyTorch, cupy.asarray(x) or x.get() in CuPy"
            )


def alignment(pointer: int, steps: tuple[int, ...]) -> int:
    """Return the largest power of two, at most 16, that divides an address and all steps from it.

    >>> alignment(4096, (400, 1600)), alignment(4096, (12, 4000)), alignment(4098, ())
    (16, 4, 2)
    """
    return math.gcd(16, pointer, *steps)
