"""The frame that XLA passes to a handler, read from Python; the offsets are those of `cpu/xla.py`."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import jax

from gemmery.cpu import xla
from gemmery.errors import DeviceError
from gemmery.jax.static import StaticProduct

DTYPES = {  # XLA_FFI_DataType -> gemmery's name
    2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "f16", 11: "f32", 12: "f64", 15: "complex64", 16: "bf16", 18: "complex128",
}  # fmt: skip
_CONTEXT = 24
_STREAM_GET, _STREAM_BYTES, _STREAM = 80, 32, 24
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def _word(at: int) -> int:
    return ctypes.c_int64.from_address(at).value


@functools.cache
def minor_version() -> int:
    """Return the minor version of the interface of this JAX, whose major version is 0.

    Raises DeviceError for another major version.
    """
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (int(re.findall(rf"#define XLA_FFI_API_{name} (\d+)", text)[0]) for name in ("MAJOR", "MINOR"))
    if major:
        raise DeviceError(f"version {major}.{minor} of XLA's interface is not supported: gemmery.jax knows version 0")
    return minor


def answered(frame: int) -> bool:
    """Answer a question about the handler's version; return False if the frame is a call."""
    extension = _word(frame + xla.EXTENSION)
    if not extension or ctypes.c_int32.from_address(extension + xla.EXTENSION_TYPE).value != xla.METADATA_TYPE:
        return False
    metadata = _word(extension + xla.METADATA)
    ctypes.c_int32.from_address(metadata + xla.MAJOR).value = 0
    ctypes.c_int32.from_address(metadata + xla.MINOR).value = minor_version()
    return True


def key(frame: int) -> int:
    """Return the key of the product that a call is for."""
    return _word(_word(_word(_word(frame + xla.ATTRIBUTES)) + xla.SCALAR_VALUE))


def product(frame: int) -> StaticProduct:
    """Return the product that a call is for."""
    a, b, c = _buffers(frame)
    attributes = _word(frame + xla.ATTRIBUTES)
    form = _word(_word(_word(attributes + 8) + xla.SCALAR_VALUE))
    return StaticProduct(_dims(a), _dims(b), _element(a), _element(c), 0).of_form(form)


def addresses(frame: int) -> tuple[int, int, int]:
    """Return the addresses of A, B and C."""
    a, b, c = (_word(buffer + xla.BUFFER_DATA) for buffer in _buffers(frame))
    return a, b, c


def stream(frame: int) -> int:
    """Return the CUDA stream of a call. Raises DeviceError where XLA has none."""
    arguments = (ctypes.c_int64 * (_STREAM_BYTES // 8))(_STREAM_BYTES, 0, _word(frame + _CONTEXT))
    if _FUNCTION(_word(_word(frame + xla.API) + _STREAM_GET))(ctypes.addressof(arguments)):
        raise DeviceError("XLA has no stream for a product on a CUDA device")
    return arguments[_STREAM // 8]


def failed(frame: int, message: str) -> int:
    """Return an error of XLA."""
    text = ctypes.create_string_buffer(message.encode())
    arguments = (ctypes.c_int64 * 4)(xla.ERROR_BYTES, 0, ctypes.addressof(text), xla.INTERNAL)
    error: int = _FUNCTION(_word(_word(frame + xla.API) + xla.ERROR_CREATE))(ctypes.addressof(arguments)) or 0
    return error


def _buffers(frame: int) -> tuple[int, int, int]:
    operands, results = _word(frame + xla.ARGS), _word(frame + xla.RESULTS)
    return _word(operands), _word(operands + 8), _word(results)


def _dims(buffer: int) -> tuple[int, ...]:
    at = _word(buffer + xla.BUFFER_DIMS)
    return tuple(_word(at + 8 * i) for i in range(_word(buffer + xla.BUFFER_RANK)))


def _element(buffer: int) -> str:
    return DTYPES[ctypes.c_int32.from_address(buffer + xla.BUFFER_DTYPE).value]
