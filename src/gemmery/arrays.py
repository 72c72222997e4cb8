"""Any array as a View of its memory, and results of the kind that was given.

What is read without a copy: NumPy arrays, CPU tensors of PyTorch, and whatever offers `__dlpack__`, the buffer
protocol or `__array_interface__`. Everything else NumPy can make an array of (nested lists, `__array__`) is copied.
What is given back has the kind of the first operand that is not a plain NumPy array or list:

| operand | result |
| --- | --- |
| NumPy array, list, buffer other than a memoryview | NumPy array |
| subclass of a NumPy array | what its `__array_wrap__` makes of the array |
| PyTorch tensor | PyTorch tensor |
| memoryview | memoryview |
| `__dlpack__` and `__array_namespace__` | that namespace's `from_dlpack` of the array |
| `__dlpack__` alone | NumPy array, which offers DLPack and the buffer protocol |
"""

from __future__ import annotations

import ctypes
import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from gemmery import dtypes
from gemmery.errors import DeviceError, DTypeError, LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


class View(NamedTuple):
    """Memory of an array: where it starts, its shape, its strides in bytes (any sign, 0 for broadcasting).

    A named tuple because a product makes three: 0.3 us each, against 0.9 us for a frozen dataclass.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # gemmery's name: "f32"
    device: str = "cpu"
    stream: int = 0
    writable: bool = True
    owner: object = None  # keeps the memory alive


_SHORT: dict[object, str] = {}  # NumPy and PyTorch element types seen so far -> gemmery's name
for _row in dtypes.BY_NAME.values():
    if _row.name != "bf16":
        _SHORT[np.dtype(_row.numpy)] = _row.name


def view(obj: object) -> View:
    """The memory of any array on the CPU.

    Arrays in a foreign byte order, and what only NumPy can make an array of, are copied; a copy is not writable.

    >>> view(np.zeros((2, 3), np.float32)).strides
    (12, 4)

    Raises DTypeError for an element type that is not served, DeviceError for memory that is not the CPU's and
    LayoutError for arrays whose memory is not all there is to them (masked, sparse, tracked by autograd).
    """
    if type(obj) is np.ndarray:
        return _numpy_view(obj)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _torch_view(obj, torch)
    if isinstance(obj, np.ndarray):
        return _numpy_view(_plain(obj))
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _dlpack_view(obj)
    if hasattr(obj, "__cuda_array_interface__"):
        raise _elsewhere("cuda")
    if hasattr(obj, "__array_interface__"):
        return _numpy_view(np.asarray(obj))
    try:
        return _numpy_view(np.asarray(memoryview(obj)))  # type: ignore[arg-type]
    except TypeError:  # no buffer: NumPy makes an array of it, which is not the object's own memory
        return _numpy_view(np.asarray(obj))._replace(writable=False)


def kind(*operands: object) -> object:
    """The operand whose kind the result takes: the first that is neither a plain NumPy array nor a list."""
    for obj in operands:
        if type(obj) is not np.ndarray and not isinstance(obj, list | tuple):
            return obj
    return operands[0]


def empty(like: object, shape: tuple[int, ...], dtype: str) -> tuple[Any, View]:
    """Uninitialised memory for a result of the kind of `like`, C-contiguous, and its View; `wrap` finishes it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        tensor = torch.empty(shape, dtype=getattr(torch, dtypes.get(dtype).numpy))
        return tensor, _torch_view(tensor, torch)
    own = like.dtype if isinstance(like, np.ndarray) else None
    if _SHORT.get(own) != dtype:
        own = numpy_dtype(dtype)  # else the operand's: NumPy has two names for int64, and gives back the one it got
    array = np.empty(shape, own)
    return array, _numpy_view(array)


def scratch(shape: tuple[int, ...], dtype: str) -> View:
    """Uninitialised C-contiguous memory that nobody else sees."""
    memory = np.empty(shape, np.uint16 if dtype == "bf16" else dtypes.get(dtype).numpy)
    return View(memory.ctypes.data, shape, memory.strides, dtype, owner=memory)


def contiguous(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The strides in bytes of a C-contiguous array."""
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def wrap(like: object, result: Any) -> Any:
    """The array or tensor that `empty` made as an object of the kind of `like`; no dimensions make a NumPy scalar."""
    if type(result) is not np.ndarray:
        return result
    if type(like) is not np.ndarray:
        if isinstance(like, np.ndarray):
            return like.__array_wrap__(result)
        if isinstance(like, memoryview):
            return memoryview(result)  # type: ignore[arg-type]
        if hasattr(like, "__dlpack__") and hasattr(like, "__array_namespace__"):
            return like.__array_namespace__().from_dlpack(result)
    return result if result.ndim else result[()]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy element type of gemmery's `name`; bfloat16 is ml_dtypes', which whoever uses it has imported."""
    if name != "bf16":
        return np.dtype(dtypes.get(name).numpy)
    extra = sys.modules.get("ml_dtypes")
    if extra is None:
        raise DTypeError("NumPy has no bfloat16 of its own: import ml_dtypes, or ask for dtype='float32'")
    found: np.dtype[Any] = np.dtype(extra.bfloat16)
    return found


def converted(source: View, dtype: str) -> View:
    """`source` copied to C-contiguous memory of another element type; rounds to nearest, ties to even."""
    values = np.ascontiguousarray(_cast(source, dtype))
    return View(values.ctypes.data, source.shape, values.strides, dtype, owner=values)


def store(source: View, target: View) -> None:
    """Copy `source` into the memory of `target`, of the same shape and any element type."""
    _raw(target)[...] = _cast(source, target.dtype)


def same(x: View, y: View) -> bool:
    """True when x and y are the same elements of the same memory."""
    return x[:4] == y[:4]


def overlap(x: View, y: View) -> bool:
    """True when the memory that x and y span has a byte in common."""
    x_below, x_above = _reach(x.shape, x.strides, x.dtype)
    y_below, y_above = _reach(y.shape, y.strides, y.dtype)
    return x.pointer + x_below < y.pointer + y_above and y.pointer + y_below < x.pointer + x_above


def repeats(x: View) -> bool:
    """True unless each element of x plainly has memory of its own: no stride within a smaller dimension's span."""
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
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """The bytes spanned, from the first element's address on: the lowest, and one past the highest."""
    if 0 in shape:
        return 0, 0
    spans = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + dtypes.get(dtype).size


class _Memory:
    """A View as NumPy's array interface."""

    def __init__(self, source: View, typestr: str) -> None:
        self.owner = source.owner
        self.__array_interface__ = {
            "data": (source.pointer, False),
            "shape": source.shape,
            "strides": source.strides,
            "typestr": typestr,
            "version": 3,
        }


def _raw(source: View) -> Array:
    """The memory of `source` as a NumPy array without a copy; bfloat16 as its 16 bits."""
    stored = "uint16" if source.dtype == "bf16" else dtypes.get(source.dtype).numpy
    return np.asarray(_Memory(source, np.dtype(stored).str))


def _cast(source: View, dtype: str) -> Array:
    """The elements of `source` as `dtype`; bfloat16, the upper half of a float32, as its 16 bits."""
    values = _raw(source)
    if source.dtype == dtype:
        return values
    with np.errstate(all="ignore"):
        if source.dtype == "bf16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if dtype != "bf16":
            return values.astype(np.dtype(dtypes.get(dtype).numpy))
        single = values.astype(np.float32)
    bits = single.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), (bits >> np.uint32(16)) | np.uint32(0x40), nearest).astype(np.uint16)


def _elsewhere(device: str) -> DeviceError:
    return DeviceError(
        f"an operand is on the device {device!r}: this version multiplies on the CPU, CUDA arrives later in it; "
        "move the operand first: .cpu() in PyTorch, .get() in CuPy"
    )


def _plain(array: Array) -> Array:
    """A subclass of ndarray as what it is in memory, where that is all there is to it."""
    name = type(array).__name__
    if isinstance(array, np.ma.MaskedArray):
        raise LayoutError(f"{name}: the mask would be ignored; fill it first: x.filled(0)")
    if type(array).__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise LayoutError(f"{name} multiplies in its own way (__array_ufunc__): pass np.asarray(x) for its numbers")
    return np.asarray(array)


def _numpy_view(array: Array) -> View:
    name = _SHORT.get(array.dtype)
    if name is None:
        name = dtypes.get(array.dtype.name).name
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
            array.flags.writeable = False
        _SHORT[array.dtype] = name
    return View(_address(array), array.shape, array.strides, name, "cpu", 0, array.flags.writeable, array)


def _address(array: Array) -> int:
    """Where the first element lies: 0.15 us by the field of the array object, 0.9 us by `array.ctypes`."""
    if _FIELD_IS_KNOWN:
        return ctypes.c_void_p.from_address(id(array) + _DATA_FIELD).value or 0
    return array.ctypes.data


_DATA_FIELD = 2 * ctypes.sizeof(ctypes.c_void_p)  # behind PyObject's two words, in numpy/ndarraytypes.h
_PROBE = np.zeros(3)[1:]
_FIELD_IS_KNOWN = (
    sys.implementation.name == "cpython"
    and object.__basicsize__ == _DATA_FIELD
    and ctypes.c_void_p.from_address(id(_PROBE) + _DATA_FIELD).value == _PROBE.ctypes.data
)


def _torch_view(tensor: Any, torch: Any) -> View:
    if not tensor.is_cpu:
        raise _elsewhere(tensor.device.type)
    if tensor.layout is not torch.strided:
        raise LayoutError(f"a tensor of layout {tensor.layout}: make it dense first with x.to_dense()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise LayoutError("the tensor requires grad, and gemmery records none: pass x.detach(), or use torch.no_grad()")
    name = _SHORT.get(tensor.dtype)
    if name is None:
        name = _SHORT[tensor.dtype] = dtypes.get(str(tensor.dtype).removeprefix("torch.")).name
    writable = True
    if tensor.is_conj() or tensor.is_neg():  # lazily negated: the memory holds the other sign
        tensor, writable = tensor.resolve_conj().resolve_neg(), False
    size = tensor.element_size()
    strides = tuple([size * s for s in tensor.stride()])
    return View(tensor.data_ptr(), tuple(tensor.shape), strides, name, "cpu", 0, writable, tensor)


class _DLTensor(ctypes.Structure):
    """dlpack.h, DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    """dlpack.h, DLManagedTensorVersioned; before version 1 the tensor came first and alone."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_DLPACK_CPU = 1
_DLPACK_READ_ONLY = 1
_DLPACK_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_DEVICES = {2: "cuda", 3: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda", 14: "oneapi"}


def _dlpack_view(obj: Any) -> View:
    """The memory behind `__dlpack__`, read from its capsule: NumPy's own reader knows no bfloat16.

    The capsule is kept, not consumed: dropping it gives the memory back. Before DLPack 1 a capsule could not say
    that it is read-only, so such memory is not written.
    """
    device = int(obj.__dlpack_device__()[0])
    if device != _DLPACK_CPU:
        raise _elsewhere(_DLPACK_DEVICES.get(device, f"DLPack type {device}"))
    try:
        capsule = obj.__dlpack__(max_version=(1, 0))
    except TypeError:
        capsule = obj.__dlpack__()
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        tensor, writable = managed.tensor, not managed.flags & _DLPACK_READ_ONLY
    else:
        tensor, writable = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
    kind_name = _DLPACK_CODES.get(tensor.code, f"DLPack type {tensor.code} of ")
    row = dtypes.get(f"{kind_name}{tensor.bits}" + (f" in {tensor.lanes} lanes" if tensor.lanes != 1 else ""))
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(row.size * step for step in tensor.strides[: tensor.ndim])
    else:
        strides = contiguous(shape, row.size)
    address = (tensor.data or 0) + tensor.byte_offset
    return View(address, shape, strides, row.name, "cpu", 0, writable, (capsule, obj))
