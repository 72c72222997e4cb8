"""Views of the memory of any array."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.arrays import pytorch
from gemmery.arrays.views import View, check, contiguous, library, no_memory, only_on_devices
from gemmery.dtypes import Array
from gemmery.errors import DeviceError, DTypeError, GemmeryError, LayoutError

SHORT: dict[object, str] = {}  # NumPy's element types seen so far -> gemmery's names
for _row in dtypes.BY_NAME.values():
    if _row.stored == _row.numpy:
        SHORT[np.dtype(_row.numpy)] = _row.name


def view(array: object) -> View:
    """Return the memory of any array on the CPU or on a CUDA device.

    Arrays in a foreign byte order, and objects that only NumPy can convert, are copied; a copy is not writable. The
    stream of a CUDA array is the current one of its library, or the one named by `__cuda_array_interface__`.

    >>> view(np.zeros((2, 3), np.float32)).strides
    (12, 4)

    Raises DTypeError for an element type that is not supported, DeviceError for other kinds of devices, and LayoutError
    for arrays that are more than their memory (masked, sparse, tracked by autograd) or that have none.
    """
    if type(array) is np.ndarray:
        return numpy_view(array)
    if library(array, "torch", "Tensor") is not None:
        return pytorch.view(array)
    if isinstance(array, np.ndarray):
        return numpy_view(_plain(array))
    if library(array, "cupy", "ndarray") is not None:
        return cupy_view(array)
    try:
        return _exported(array)
    except (GemmeryError, MemoryError):
        raise
    except Exception as error:  # an object's own methods may raise anything, or return what no protocol allows
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise LayoutError(
            f"{type(array).__name__} does not export its memory correctly ({reason}): pass a NumPy array of its numbers"
        ) from error


def unchanged(**views: View | None) -> None:
    """Raise LayoutError if the memory of an array is not where these views, by the names of arguments, have it.

    Reading an argument may run its own code (`__array__`, `__float__`), which may resize another argument.
    """
    for name, z in views.items():
        x = z.owner if z is not None and isinstance(z.owner, View) else z  # that of an operand which is repeated
        owner: Any = None if x is None else x.owner
        if type(owner) is np.ndarray:
            now: tuple[Any, ...] = address(owner), owner.shape, owner.strides
        else:
            now = (owner.data_ptr(),) if library(owner, "torch", "Tensor") is not None else ()
        if x is not None and now != x[: len(now)]:
            raise LayoutError(f"{name} was resized while another argument was read: pass that one as an array")


def _exported(array: object) -> View:
    """The memory of an object that offers it by one of the protocols, or of NumPy's array of it."""
    if isinstance(array, type):
        raise DTypeError(f"an operand is the class {array.__name__}, not an array: pass an instance")
    if library(array, "torch.fx", "Proxy") is not None:
        raise LayoutError(
            "torch.fx is tracing, and it cannot record products of gemmery: call gemmery outside of it, or use "
            "torch.matmul inside"
        )
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        from gemmery.arrays import dlpack

        return dlpack.read(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _cuda_view(array)
    _refuse_own_arithmetic(array)
    if hasattr(array, "__array_interface__"):
        plain = _as_array(array, array)
        read = numpy_view(plain)
        return read._replace(writable=False) if plain.base is None else read  # NumPy copies its own scalars
    try:
        buffer = memoryview(array)  # type: ignore[arg-type]
    except TypeError:  # no buffer: NumPy makes a copy
        return numpy_view(_as_array(array, array))._replace(writable=False)
    plain = _as_array(buffer, array)
    if plain.flags.owndata and plain.size:  # NumPy allocates where a buffer's pointer is null
        raise no_memory(f"the buffer of a {type(array).__name__}")
    return numpy_view(plain)


def _refuse_own_arithmetic(array: object) -> None:
    """Raise for an object whose product differs from the product of the array that NumPy makes of it."""
    if hasattr(array, "nnz") and (hasattr(array, "toarray") or hasattr(array, "todense")):
        dense = "toarray" if hasattr(array, "toarray") else "todense"
        raise LayoutError(
            f"{type(array).__name__} is sparse, and gemmery multiplies dense arrays: pass x.{dense}(), or use a @ b"
        )
    if hasattr(type(array), "__array_ufunc__") and not isinstance(array, np.generic):
        raise LayoutError(
            f"{type(array).__name__} defines its own arithmetic (__array_ufunc__): pass a plain array, x.to_numpy() in "
            "pandas and xarray or np.asarray(x)"
        )


def _as_array(memory: object, array: object) -> Array:
    """Convert an object, or the buffer of one, with NumPy; the error names the object's type."""
    try:
        return np.asarray(memory)
    except (TypeError, ValueError, BufferError, NotImplementedError) as error:
        reason = str(error).partition(". ")[0].rstrip(".")
        raise LayoutError(f"NumPy cannot make an array of a {type(array).__name__}: {reason}") from error


def _plain(array: Array) -> Array:
    """Return a subclass of ndarray as a plain array, unless it is more than its memory."""
    if isinstance(array, np.ma.MaskedArray):
        raise LayoutError(f"{type(array).__name__}: gemmery ignores masks; pass x.filled(0)")
    if type(array).__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise LayoutError(f"{type(array).__name__} defines its own arithmetic (__array_ufunc__): pass np.asarray(x)")
    return np.asarray(array)


def numpy_view(array: Array) -> View:
    """Return the memory of a plain NumPy array, or of its copy in the byte order of this machine."""
    name = SHORT.get(array.dtype)
    if name is None:
        if array.dtype.kind in _WORDS or array.dtype.type is np.void:  # types of ml_dtypes have kind "V" too
            raise _unsupported(array)
        name = dtypes.get(array.dtype.name).name
        if name in dtypes.FLOAT8:
            raise only_on_devices(array.dtype.name)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="), order="C")  # as compiled code copies it
            array.flags.writeable = False
        SHORT[array.dtype] = name
    pointer = address(array)
    if not pointer and array.size:
        raise no_memory(f"an array of shape {array.shape}")
    return View(pointer, array.shape, array.strides, name, "cpu", 0, array.flags.writeable, array)


_WORDS = {"U": "text", "S": "bytes", "T": "text", "M": "dates", "m": "durations", "O": "Python objects"}


def _unsupported(array: Array) -> DTypeError:
    """Return the error for an array of no numbers in words; NumPy's own names are "str32" or "void96"."""
    dtype = array.dtype
    if dtype.names is not None:
        what = f"an array of records with the fields {', '.join(dtype.names)}; pass one of them, x[{dtype.names[0]!r}]"
    elif dtype.kind == "V":
        what = f"an array of elements of {dtype.itemsize} raw bytes each"
    elif array.ndim == 0:
        return DTypeError(f"an operand is a {type(array.item()).__name__}; pass an array of {dtypes.supported()}")
    else:
        what = f"an array of {_WORDS[dtype.kind]}"
    return DTypeError(f"an operand is {what}; gemmery multiplies {dtypes.supported()}: convert with astype first")


def address(array: Array) -> int:
    """Return the address of the first element: 0.15 us from the array object's field, 0.9 us with `array.ctypes`."""
    if _FIELD_IS_KNOWN:
        return ctypes.c_void_p.from_address(id(array) + _DATA_FIELD).value or 0
    return array.ctypes.data


_DATA_FIELD = 2 * ctypes.sizeof(ctypes.c_void_p)  # after the two words of PyObject; numpy/ndarraytypes.h
_PROBE = np.zeros(3)[1:]
_FIELD_IS_KNOWN = (
    sys.implementation.name == "cpython"
    and object.__basicsize__ == _DATA_FIELD
    and ctypes.c_void_p.from_address(id(_PROBE) + _DATA_FIELD).value == _PROBE.ctypes.data
)


def cupy_view(array: Any) -> View:
    """Return the memory of a CuPy array."""
    if not array.data.ptr and array.size:
        raise no_memory(f"a CuPy array of shape {array.shape}")
    device, name = array.device.id, SHORT.get(array.dtype) or dtypes.get(array.dtype.name).name
    stream = sys.modules["cupy"].cuda.get_current_stream(device).ptr
    return View(array.data.ptr, array.shape, array.strides, name, f"cuda:{device}", stream, True, array)


def _cuda_view(array: Any) -> View:
    """Return the memory that `__cuda_array_interface__` describes; source: version 3 of it in Numba's documentation."""
    fields = array.__cuda_array_interface__
    called = f"the __cuda_array_interface__ of {type(array).__name__}"
    if fields.get("mask") is not None:
        raise LayoutError(
            f"{type(array).__name__}: gemmery ignores the mask in its __cuda_array_interface__; pass it without"
        )
    stored = np.dtype(fields["typestr"])
    if stored.kind == "V":
        raise DTypeError(
            f"typestr {fields['typestr']!r} names no element type: offer bfloat16 and 8-bit floating-point "
            "types through __dlpack__"
        )
    if not stored.isnative:
        raise LayoutError(f"typestr {fields['typestr']!r} is in a foreign byte order: convert the array first")
    row, shape = dtypes.get(stored.name), tuple(fields["shape"])
    pointer, read_only = fields["data"]
    stream, steps = fields.get("stream"), fields.get("strides")
    if stream == 0:
        raise DeviceError(
            "stream 0 in __cuda_array_interface__ is ambiguous and not allowed: use 1 for the legacy default stream, 2 "
            "for the per-thread one, a handle, or None"
        )
    strides = contiguous(shape, row.size) if steps is None else tuple(steps)
    check(called, shape, strides)
    if not pointer and 0 not in shape:
        raise no_memory(f"{called}, of shape {shape},")
    handle = 0 if stream in (None, 1) else int(stream)  # the driver calls the legacy default stream 0
    return View(int(pointer or 0), shape, strides, row.name, "cuda", handle, not read_only, array)
