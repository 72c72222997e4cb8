"""Results for callers whose arrays belong to no library that could allocate one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.arrays import View, contiguous, dlpack
from gemmery.cuda import ordered
from gemmery.errors import DeviceError, DTypeError


class DeviceArray:
    """A C-contiguous array on a CUDA device; `cupy.asarray`, `torch.as_tensor` and `from_dlpack` accept it.

    It has `shape`, `dtype` ("float32") and `device`, and supports `__cuda_array_interface__` (but bfloat16 has no name
    there) and `__dlpack__`; both order the reader's stream after the product's. Deleting it waits for the
    whole device, because the streams that used it may no longer exist.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, ordinal: int, stream: int) -> None:
        self.shape = shape
        self.dtype = dtypes.get(dtype).numpy
        self.device = f"cuda:{ordinal}"
        self._name, self._ordinal, self._stream = dtype, ordinal, stream
        self._mark: ordered.Mark | None = None
        self._pointer = ordered.allocate(math.prod(shape) * dtypes.get(dtype).size, stream, ordinal)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype!r}, device={self.device!r})"

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        pointer = getattr(self, "_pointer", 0)
        if pointer and not ending():  # the driver frees what a process leaves
            with suppress(DeviceError):  # a failed context frees nothing
                ordered.free_after_all(pointer, self._ordinal)

    def finished(self) -> None:
        """Record that nothing after the work now on its stream writes it; the stream is not used after this."""
        self._mark = ordered.Mark(self._stream, self._ordinal)

    def _readable_on(self, stream: int) -> None:
        if self._mark is not None:
            self._mark.before(stream)

    @property
    def view(self) -> View:
        """A View of its memory."""
        strides = contiguous(self.shape, dtypes.get(self._name).size)
        return View(self._pointer, self.shape, strides, self._name, self.device, self._stream, True, self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._name == "bf16":
            raise DTypeError("__cuda_array_interface__ cannot describe bfloat16: use from_dlpack")
        self._readable_on(0)
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self._pointer, False),
            "strides": None,
            "stream": 1,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._ordinal

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        if stream != -1:
            self._readable_on(0 if stream in (None, 1) else int(stream))
        return dlpack.capsule(self.view, 2, self._ordinal, versioned=max_version is not None and max_version[0] >= 1)
