"""device_memory(): arrays that keep their addresses over the launches of a program on the emulator."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gemmery.errors import ArgumentError
from gemmery_emulator.arguments import ALIGNED, memory_of


class DeviceMemory:
    """The arrays of a program; every launch sees all of them, each at its own address."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []
        self._ended = False

    def array(self, values: ArrayLike, dtype: Any = None) -> NDArray[Any]:
        """Return a copy of an array that lies in this memory; a launch reads and writes it in place."""
        if self._ended:
            raise ArgumentError("array(): this device memory has ended: make its arrays inside the with block")
        try:
            copied = np.array(values, dtype, order="C")
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"array(): NumPy makes no array of this ({error}); pass numbers") from None
        if copied.dtype.hasobject:
            raise ArgumentError("array(): this holds Python objects, but a kernel needs numbers; pass numbers")
        room = np.zeros(copied.nbytes + ALIGNED, np.uint8)
        start = -room.ctypes.data % ALIGNED
        placed = room[start : start + copied.nbytes].view(copied.dtype).reshape(copied.shape)
        placed[...] = copied
        self._arrays.append(placed)
        return placed

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        """Return an array of zeros in this memory."""
        try:
            zeros = np.zeros(shape, dtype)
        except (TypeError, ValueError, MemoryError) as error:
            raise ArgumentError(
                f"zeros(): shape={shape!r} and dtype={dtype!r} make no array ({error}); "
                "pass whole numbers >= 0 that fit in memory"
            ) from None
        return self.array(zeros)

    def address(self, array: NDArray[Any], offset: int = 0) -> np.uint64:
        """Return the address of an array that `array` returned, to be stored in another one; `offset` is in bytes."""
        arrays = self.by_name()
        for name, known in arrays.items():
            if known is array:
                return np.uint64(memory_of(arrays).address(name) + offset)
        raise ArgumentError("address(): this array is not in device memory; pass one that memory.array returned")

    def by_name(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, in the order of their addresses."""
        return {f"device array {place}": array for place, array in enumerate(self._arrays)}

    def end(self) -> None:
        """Take no more arrays."""
        self._ended = True


_CURRENT: ContextVar[DeviceMemory | None] = ContextVar("device memory", default=None)


@contextmanager
def device_memory() -> Iterator[DeviceMemory]:
    """Keep arrays at their addresses over several launches of `gemmery.emulate`, as a program on a device does.

    A kernel may follow pointers that are stored in these arrays, by the host or by an earlier kernel.

    >>> import numpy as np, gemmery as gm
    >>> code = "__global__ void follow(float** table, int n) { table[n][threadIdx.x] += 1; }"
    >>> with gm.device_memory() as memory:
    ...     x = memory.zeros(4)
    ...     table = memory.array([memory.address(x)])
    ...     for _ in range(3):
    ...         run = gm.emulate(code, "follow", 1, 4, [table, 0])
    >>> x.tolist(), run.findings
    ([3.0, 3.0, 3.0, 3.0], ())

    Arrays made later do not move those made before. Launches inside of another `with device_memory()` see only the
    arrays of that one. After the block the arrays remain, but their addresses do not.
    """
    memory = DeviceMemory()
    token = _CURRENT.set(memory)
    try:
        yield memory
    finally:
        memory.end()
        _CURRENT.reset(token)


def resident() -> dict[str, NDArray[Any]]:
    """The arrays in device memory by name, in the order of their addresses."""
    memory = _CURRENT.get()
    return {} if memory is None else memory.by_name()
