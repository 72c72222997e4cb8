"""NumPy arrays in the memory of a launch, and a kernel's parameters made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator.memory import Global
from gemmery.emulator.op import NUMPY
from gemmery.emulator.ptx import Kernel, Parameter
from gemmery.errors import ArgumentError, LayoutError

Arrays = Mapping[str, NDArray[Any]]
ALIGNED = 16  # bytes of the widest access, which must begin at a multiple of them


@dataclass(frozen=True)
class Bound:
    """Arguments of a launch: their memory, the bytes that a kernel reads as its parameters, the arrays behind them."""

    memory: Global
    parameters: bytes
    arrays: Arrays

    def write_back(self) -> None:
        """Give the arrays what the kernel left in its memory.

        Raises LayoutError for an array that is read-only and was written; the others are as the kernel left them.
        """
        for name, array in self.arrays.items():
            left = self.memory.bytes(name)
            if array.flags.writeable:
                _bytes(array)[:] = left
            elif not np.array_equal(_bytes(array), left):
                raise LayoutError(f"{name} is read-only, and the kernel writes it: pass a writable copy")


def memory_of(arrays: Arrays, kernels: Sequence[Kernel] = (), scratch: Mapping[str, int] | None = None) -> Global:
    """Global memory with a copy of each array, with `scratch` bytes of zeros by name and the kernels' variables.

    An array is as far from a multiple of 16 bytes as it is on the host: what is misaligned there is so here.
    """
    variables = {
        one.name: one for kernel in kernels for one in kernel.variables.values() if one.space in ("global", "const")
    }
    sizes = {name: array.nbytes for name, array in arrays.items()}
    beside = {name: array.ctypes.data % ALIGNED for name, array in arrays.items()}
    memory = Global({**sizes, **(scratch or {}), **{name: one.size for name, one in variables.items()}}, beside)
    for name, array in arrays.items():
        memory.bytes(name)[:] = _bytes(array)
    for name, one in variables.items():
        if one.data:
            memory.bytes(name)[:] = np.frombuffer(one.data, np.uint8)
    return memory


def bound(kernel: Kernel, args: Sequence[Any]) -> Bound:
    """The arguments of a kernel, checked against its parameters.

    An array stands for its address, None for a null pointer, bytes for a struct; a number is a NumPy scalar of the
    parameter's size, or a Python one that fits its type. Raises ArgumentError, LayoutError for an array with gaps.
    """
    wanted = kernel.parameters
    if len(args) != len(wanted):
        listed = ", ".join(f"{one.type} of {one.size} bytes" for one in wanted)
        raise ArgumentError(
            f"{len(args)} arguments: kernel {kernel.name} takes {len(wanted)} ({listed}); give one for each"
        )
    names: dict[int, str] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for place, value in enumerate(args):
        if isinstance(value, np.ndarray):
            names[place] = _named(place, value, arrays)
    memory = memory_of(arrays, (kernel,))
    parameters = bytearray(max((one.offset + one.size for one in wanted), default=0))
    for place, (value, one) in enumerate(zip(args, wanted, strict=True)):
        address = memory.address(names[place]) if place in names else None
        parameters[one.offset : one.offset + one.size] = _packed(place, value, one, address)
    return Bound(memory, bytes(parameters), arrays)


def _named(place: int, array: NDArray[Any], arrays: dict[str, NDArray[Any]]) -> str:
    """The name an array goes by; an array that was given before keeps its first one."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise LayoutError(
            f"argument {place} has strides {array.strides} for shape {array.shape}: a kernel is given an address, so "
            "memory without gaps is needed; pass numpy.ascontiguousarray of it, or the array it is a view of"
        )
    if array.dtype.hasobject:
        raise ArgumentError(f"argument {place} holds Python objects: a kernel needs numbers; convert it with astype")
    for name, other in arrays.items():
        if other.ctypes.data == array.ctypes.data and other.nbytes == array.nbytes:
            return name
        if np.may_share_memory(other, array):
            raise LayoutError(f"argument {place} overlaps {name}: pass one array and an offset, or a copy")
    name = f"argument {place}"
    arrays[name] = array
    return name


def _packed(place: int, value: Any, parameter: Parameter, address: int | None) -> bytes:
    """One parameter's bytes."""
    pointer = parameter.size == 8 and NUMPY.get(parameter.type, "f")[0] in "ui"
    if address is not None or value is None:
        if not pointer:
            raise _mismatch(place, value, parameter, "pass a number")
        return (address or 0).to_bytes(8, "little")
    if isinstance(value, bytes | bytearray):
        if len(value) != parameter.size:
            raise _mismatch(place, f"{len(value)} bytes", parameter, "pass as many bytes")
        return bytes(value)
    kind = np.dtype(NUMPY[parameter.type]) if parameter.type in NUMPY else None
    if kind is None or parameter.size != kind.itemsize:
        raise _mismatch(place, value, parameter, "pass its bytes")
    if isinstance(value, np.generic):
        if value.dtype.itemsize != parameter.size or (kind.kind == "f") != (value.dtype.kind == "f"):
            same = f"numpy.{kind.name}"
            raise _mismatch(place, f"{value!r} of {value.dtype}", parameter, f"pass a {same}")
        return bytes(value.tobytes())
    if isinstance(value, bool | int) and kind.kind in "iu":
        if not -(1 << 8 * kind.itemsize - 1) <= value < 1 << 8 * kind.itemsize:
            raise _mismatch(place, value, parameter, "it does not fit")
        return (value % (1 << 8 * kind.itemsize)).to_bytes(kind.itemsize, "little")
    if isinstance(value, float | int) and kind.kind == "f":
        return bytes(np.array(value, kind).tobytes())
    raise _mismatch(place, repr(value), parameter, f"pass a numpy.{kind.name}, or an array for an address")


def _mismatch(place: int, value: object, parameter: Parameter, way_out: str) -> ArgumentError:
    return ArgumentError(
        f"argument {place} is {value}: the kernel reads {parameter.size} bytes of type {parameter.type}; {way_out}"
    )


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The memory of a contiguous array, in its order."""
    flat = array.reshape(-1, order="C" if array.flags.c_contiguous else "F")
    return flat.view(np.uint8)
