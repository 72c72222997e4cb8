"""Offsets of the fields of Python and NumPy objects that compiled code reads, and a check that they are right.

Sources: CPython's `PyObject` and `PyTupleObject`; NumPy's `PyArrayObject_fields` and `PyArray_Descr`
(numpy/ndarraytypes.h of NumPy 2).
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

import numpy as np

from gemmery import keywords

# In a PyObject, a PyArrayObject and a tuple of a 64-bit build with the GIL.
TYPE, DATA, NDIM, SHAPE, STRIDES, DESCR, FLAGS = 8, 16, 24, 32, 40, 56, 64
FIRST_SLOT = 16  # of an object of a class with __slots__
TUPLE_SIZE, TUPLE_ITEMS, DICT_SIZE = 16, 24, 16
# In a PyArray_Descr: eight bytes of kind, character, byte order, flags and type number, which identify an element type.
# The address of the object does not: an unpickled array has a dtype object of its own, which dies with the array.
ELEMENT, SIZE, METADATA = 24, 40, 56
WRITEABLE = 0x400  # in FLAGS

FLOAT_VALUE = 16  # of a float, a complex and NumPy's float64 and float32
C_CONTIGUOUS, F_CONTIGUOUS = 1, 2  # in FLAGS

KEYWORDS = tuple(map(sys.intern, ("out", "alpha", "beta", "c", "y", *keywords.OPTIONS)))
ACTIVATIONS = tuple(map(sys.intern, keywords.ACTIVATIONS))
SEMIRINGS = tuple(map(sys.intern, keywords.SEMIRINGS[:3]))  # those of a kernel
_DOUBLES: tuple[Any, ...] = (0.1, np.float64(0.2), 0.3 + 0.4j)
_SINGLE = np.float32(0.5)
# The variable of the context in which NumPy keeps np.errstate, and its value for all="ignore".
_UMATH: Any = getattr(np, "_core", None) and np._core.umath  # type: ignore[attr-defined]
ERROR_STATE: tuple[object, ...] = ()
if hasattr(_UMATH, "_extobj_contextvar"):
    ERROR_STATE = (_UMATH._extobj_contextvar, _UMATH._make_extobj(all="ignore"))
# PyArray_NewFromDescr, _NewCopy, _CopyInto, _FromArray and _Return in NumPy's table of C functions, which only grows.
_FUNCTIONS = (94, 85, 50, 109, 76)


def element(dtype: np.dtype[Any]) -> int:
    """Return the eight bytes of a dtype object that identify its element type."""
    return _word(id(dtype) + ELEMENT)


def numpy_functions() -> list[int]:
    """Return the addresses of PyArray_NewFromDescr, _NewCopy, _CopyInto, _FromArray and _Return.

    They are in the capsule that extension modules import.
    """
    capsule = np._core._multiarray_umath._ARRAY_API  # type: ignore[attr-defined]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = (ctypes.c_void_p * (max(_FUNCTIONS) + 1)).from_address(pointer(capsule, None))
    return [table[index] or 0 for index in _FUNCTIONS]


def known() -> bool:
    """Return True if this interpreter and this NumPy have every field at its offset, in live objects."""
    x = np.zeros((3, 5), np.float32)[:, ::2]
    at = id(x)
    pair = (ctypes.c_int64 * 2).from_address
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    return (
        object.__basicsize__ == DATA
        and len(ERROR_STATE) == 2
        and _word(id(keywords.OPTIONS) + DICT_SIZE) == len(keywords.OPTIONS)
        and _word(at + TYPE) == id(np.ndarray)
        and _word(at + DATA) == x.ctypes.data
        and ctypes.c_int32.from_address(at + NDIM).value == 2
        and _word(at + STRIDES) == _word(at + SHAPE) + 16  # NumPy keeps them together: so these are their addresses
        and tuple(pair(_word(at + SHAPE))) == x.shape
        and tuple(pair(_word(at + STRIDES))) == x.strides
        and _word(at + DESCR) == id(x.dtype)
        and ctypes.c_int32.from_address(at + FLAGS).value == x.flags.num
        and x.flags.num & (WRITEABLE | C_CONTIGUOUS | F_CONTIGUOUS) == WRITEABLE
        and all(ctypes.c_double.from_address(id(x) + FLOAT_VALUE).value == x.real for x in _DOUBLES)
        and ctypes.c_double.from_address(id(_DOUBLES[-1]) + FLOAT_VALUE + 8).value == _DOUBLES[-1].imag
        and ctypes.c_float.from_address(id(_SINGLE) + FLOAT_VALUE).value == _SINGLE
        and _word(id(_DOUBLES[0]) + TYPE) == id(float)
        and _word(id(KEYWORDS) + TUPLE_SIZE) == len(KEYWORDS)
        and pair(id(KEYWORDS) + TUPLE_ITEMS)[:] == [*map(id, KEYWORDS[:2])]
        and all(_is_known(np.dtype(spelling)) for spelling in (np.float32, ">i2", np.longlong, np.complex64))
        and _has_metadata(np.dtype(np.float64, metadata={"": 0}))
    )


def _is_known(dtype: np.dtype[Any]) -> bool:
    kind, char, order, _flags, number = struct.unpack("=cccci", ctypes.string_at(id(dtype) + ELEMENT, 8))
    fields = (*(letter.decode("latin-1") for letter in (kind, char, order)), number)
    others = (_word(id(dtype) + SIZE), _word(id(dtype) + METADATA))
    return fields == (dtype.kind, dtype.char, dtype.byteorder, dtype.num) and others == (dtype.itemsize, 0)


def _has_metadata(dtype: np.dtype[Any]) -> bool:
    metadata = _word(id(dtype) + METADATA)
    return metadata != 0 and _word(metadata + TYPE) == id(dict)


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
