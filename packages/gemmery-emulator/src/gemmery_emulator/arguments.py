"""Copy NumPy arrays to the memory of a launch, and pack a kernel's parameters; arrays that keep their addresses.

A tuple is a struct by value, which may hold pointers. A list is an array in device memory, passed as its address.
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gemmery.errors import ArgumentError, LayoutError, brief
from gemmery_emulator import specials, symbols
from gemmery_emulator.heap import takes_memory
from gemmery_emulator.hopper.tensormap import BYTES, TensorMap
from gemmery_emulator.memory import LIMIT, TIMES, Global, Heap, same_bytes
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ptx import Parameter, PtxKernel, Special
from gemmery_emulator.textures import Texture

Arrays = Mapping[str, NDArray[Any]]
SHOWN = 40  # the longest value, in characters, that an error message repeats
ALIGNED = 16  # bytes of the widest access, which is also its alignment


@dataclass(frozen=True)
class BoundArguments:
    """The arguments of a launch: global memory, the bytes of the kernel's parameters, and the caller's arrays."""

    memory: Global
    parameters: bytes
    arrays: Arrays

    def write_back(self) -> None:
        """Copy the results from global memory to the arrays.

        Raises LayoutError, and writes nothing, if the kernel wrote to a read-only array.
        """
        results = {name: self.memory.bytes(name) for name in self.arrays}
        for name, array in self.arrays.items():
            if not array.flags.writeable and not same_bytes(_bytes(array), results[name]):
                raise LayoutError(f"{name} is read-only, but the kernel writes to it: pass a writable copy")
        for name, array in self.arrays.items():
            if array.flags.writeable:
                _bytes(array)[:] = results[name]


def memory_of(arrays: Arrays, kernels: Sequence[PtxKernel] = (), scratch: Mapping[str, int] | None = None) -> Global:
    """Make global memory with a copy of each array, `scratch` bytes of zeros by name, and the kernels' variables.

    The address of an array modulo 16 bytes is the same as on the host, so that misaligned arrays stay misaligned.
    """
    every = (item for kernel in kernels for item in kernel.variables.items())
    variables = {name: variable for name, variable in every if variable.space in ("global", "const")}
    sizes = {name: array.nbytes for name, array in arrays.items()}
    beside = {name: array.ctypes.data % ALIGNED for name, array in arrays.items()}
    takes = any(map(takes_memory, kernels))
    sizes |= {**(scratch or {}), **{name: variable.size for name, variable in variables.items()}}
    memory = Global(sizes, beside, TIMES * LIMIT if takes else 0)
    memory.heap = Heap(memory.behind) if takes else None
    for name, array in arrays.items():
        memory.bytes(name)[:] = _bytes(array)
    for name, variable in variables.items():
        if variable.data:
            memory.bytes(name)[:] = np.frombuffer(variable.data, np.uint8)
        for at, pointed, offset in variable.pointers:
            if pointed in variables:
                address = np.array([memory.address(pointed) + offset], np.uint64)
                memory.bytes(name)[at : at + 8] = address.view(np.uint8)
    return memory


def bound(
    kernel: PtxKernel, args: Sequence[Any], variables: Arrays | None = None, resident: Arrays | None = None
) -> BoundArguments:
    """Check a kernel's arguments against its parameters, and set the module's variables to arrays.

    `resident` arrays come first in memory, so that they have the same addresses in each launch.

    An array is passed as its address, None as a null pointer, a TensorMap or a Texture as itself, bytes or a tuple of
    members as a struct, a list as the address of an array of its elements. A number is a NumPy scalar of the
    parameter's size, or a Python number that fits its type. Raises ArgumentError, and LayoutError for an array with
    gaps.
    """
    declared = kernel.parameters
    if len(args) != len(declared):
        listed = ", ".join(_described(parameter) for parameter in declared)
        count = f"{len(args)} argument{'s' * (len(args) != 1)}"
        raise ArgumentError(f"{count}: kernel {kernel.name} takes {len(declared)} ({listed}); pass one for each")
    arrays: dict[str, NDArray[Any]] = {**(resident or {})}
    parts = [part for place, value in enumerate(args) for part in inside_of(value, f"argument {place}")]
    parts.sort(key=lambda part: not part[0].removeprefix("argument ").isdecimal())  # the arguments first
    names = {
        name: _place(name, part if isinstance(part, np.ndarray) else _spanned(part.array), arrays, resident or {})
        for name, part in parts
        if isinstance(part, np.ndarray | TensorMap | Texture)
    }
    lists = {name: part for name, part in parts if isinstance(part, list)}
    maps = {
        f"descriptor of argument {place}": BYTES
        for place, (value, parameter) in enumerate(zip(args, declared, strict=True))
        if isinstance(value, TensorMap | Texture) and _is_pointer(parameter)
    }
    symbols.check_elements(kernel.name, args)
    tables = {name: len(content(elements, name, lambda _: 0)) for name, elements in lists.items()}
    memory = memory_of(arrays, (kernel,), {**maps, **tables, **_workspace(kernel)})

    def address_of(name: str) -> int:
        known, offset = names.get(name, (name, 0))
        return memory.address(known) + offset

    for name, elements in lists.items():
        memory.bytes(name)[:] = np.frombuffer(content(elements, name, address_of), np.uint8)
    parameters = bytearray(max((parameter.offset + parameter.size for parameter in declared), default=0))
    for place, (value, parameter) in enumerate(zip(args, declared, strict=True)):
        name, argument, address = f"argument {place}", value, None
        if isinstance(value, tuple):
            argument = struct(value, name, address_of)[0]
        elif isinstance(value, TensorMap | Texture):
            argument = value.encoded(address_of(name))
            if f"descriptor of {name}" in maps:
                memory.bytes(f"descriptor of {name}")[:] = np.frombuffer(argument, np.uint8)
                argument, address = None, memory.address(f"descriptor of {name}")
        elif isinstance(value, np.ndarray | list):
            address = address_of(name)
        parameters[parameter.offset : parameter.offset + parameter.size] = _packed(place, argument, parameter, address)
    for name, array in (variables or {}).items():
        memory.bytes(name)[:] = _bytes(_variable(kernel, name, array))
    return BoundArguments(memory, bytes(parameters), {**arrays, **(variables or {})})


def _workspace(kernel: PtxKernel) -> dict[str, int]:
    """The name and bytes of the workspace that a cooperative launch has, for a kernel that asks for its address."""
    operands = (operand for each in kernel.instructions if each.opcode.name == "mov" for operand in each.operands[1:])
    asks = Special(specials.WORKSPACE_AT[0]), Special(specials.WORKSPACE_AT[1])
    return {specials.WORKSPACE: 8} if any(operand in asks for operand in operands) else {}


def _variable(kernel: PtxKernel, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Check the array for a __device__ or __constant__ variable."""
    variables_here = kernel.variables.values()
    known = {variable.name: variable.size for variable in variables_here if variable.space in ("global", "const")}
    if name not in known:
        raise ArgumentError(
            f"variable {name!r}: this module has {', '.join(known) or 'none'}; "
            "a variable in a namespace goes by its symbol, and the compiler removes one that no kernel uses"
        )
    _checked(f"variable {name}", array)
    if array.nbytes != known[name]:
        raise ArgumentError(
            f"variable {name} has {known[name]} bytes, but the array has {array.nbytes}: pass an array of that size"
        )
    return array


def _place(name: str, array: NDArray[Any], arrays: dict[str, NDArray[Any]], resident: Arrays) -> tuple[str, int]:
    """Return the name of an array and an offset: one that is passed twice keeps its first name, and a view of one in
    device memory has that one's.
    """
    _checked(name, array)
    for known, other in arrays.items():
        offset = array.ctypes.data - other.ctypes.data
        if offset == 0 and other.nbytes == array.nbytes:
            return known, 0
        if known in resident and array.nbytes and 0 <= offset <= other.nbytes - array.nbytes:
            return known, offset
        if np.may_share_memory(other, array):
            raise LayoutError(f"{name} overlaps {known}: pass one array and an offset, or a copy")
    arrays[name] = array
    return name, 0


def _spanned(array: NDArray[Any]) -> NDArray[Any]:
    """Return the memory from the first to the last element of a tensor map's array, with its gaps."""
    if array.flags.c_contiguous:
        return array
    size = sum((length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
    first = array[(0,) * (array.ndim - 1)].view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (size,), (1,), writeable=array.flags.writeable)


def _checked(name: str, array: NDArray[Any]) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"{name} is {brief(array)}: pass a NumPy array")
    if isinstance(array, np.ma.MaskedArray):
        raise LayoutError(f"{name} is a MaskedArray: kernels ignore masks; pass x.filled(0)")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise LayoutError(
            f"{name} has strides {array.strides} for shape {array.shape}: a kernel gets only an address, so the "
            "memory must have no gaps; pass numpy.ascontiguousarray of it, or the array that it is a view of"
        )
    if array.dtype.hasobject:
        raise ArgumentError(f"{name} holds Python objects, but a kernel needs numbers: convert it with astype")
    if array.dtype.kind == "U":
        raise ArgumentError(f"{name} holds text ({array.dtype}), but a kernel needs numbers: pass its bytes as int8")
    if not array.dtype.isnative:
        raise LayoutError(f"{name} has the non-native byte order {array.dtype.str}: convert it with astype")


def _is_pointer(parameter: Parameter) -> bool:
    return parameter.size == 8 and parameter.type in ("u64", "s64", "b64")


def _described(parameter: Parameter) -> str:
    """Describe a parameter.

    >>> _described(Parameter("x", "u64", 0, 8)), _described(Parameter("y", "b8", 0, 12))
    ('8 bytes of type u64, a pointer or a whole number', 'a struct of 12 bytes')
    """
    kind = np.dtype(NUMPY.get(parameter.type, "u1"))
    if kind.itemsize != parameter.size:
        return f"a struct of {parameter.size} bytes"
    also = ", a pointer or a whole number" if _is_pointer(parameter) else ""
    return f"{parameter.size} byte{'s' if parameter.size > 1 else ''} of type {parameter.type}{also}"


def _packed(place: int, value: Any, parameter: Parameter, address: int | None) -> bytes:
    """Return one parameter's bytes."""
    kind, size = np.dtype(NUMPY.get(parameter.type, "u1")), parameter.size
    if isinstance(value, bytes | bytearray):
        if len(value) != size:
            raise _mismatch(place, f"{len(value)} bytes", parameter, f"pass {size} bytes")
        return bytes(value)
    if address is not None or value is None:
        if not _is_pointer(parameter):
            kind_of = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
            described = "None" if value is None else f"{kind_of}, which is passed as its address"
            raise _mismatch(place, described, parameter)
        return (address or 0).to_bytes(8, "little")
    if isinstance(value, np.generic):
        alike = size != kind.itemsize or (kind.kind == "f") == (value.dtype.kind == "f")
        if value.dtype.itemsize != size or value.dtype.hasobject or not alike:
            raise _mismatch(place, f"{value} of type {value.dtype}", parameter)
        return value.tobytes()
    if size == kind.itemsize:
        if isinstance(value, bool | int) and kind.kind in "iu":
            if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
                raise _mismatch(place, value, parameter, f"pass a number of {8 * size} bits")
            return (value % (1 << 8 * size)).to_bytes(size, "little")
        if isinstance(value, float | int) and kind.kind == "f":
            return np.array(value, kind).tobytes()
    described = f"{value!r} of type " if len(repr(value)) <= SHOWN else "of type "
    raise _mismatch(place, f"{described}{type(value).__name__}", parameter)


def _mismatch(place: int, argument: object, parameter: Parameter, way_out: str = "") -> ArgumentError:
    kind, size = np.dtype(NUMPY.get(parameter.type, "u1")), parameter.size
    whole, pointer = "a whole number, or " * (kind.kind in "iu"), ", or an array for an address"
    by_type = f"pass {whole}a numpy.{kind.name}{pointer * (size == 8 and kind.kind != 'f')}"
    by_size = f"pass {size} bytes, or a NumPy scalar of that size"
    way_out = way_out or (by_type if size == kind.itemsize else by_size)
    return ArgumentError(f"argument {place} is {argument}, but the kernel reads {_described(parameter)}: {way_out}")


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the memory of a contiguous array as bytes, in its order."""
    return array.reshape(-1, order="C" if array.flags.c_contiguous else "F").view(np.uint8)


AddressOf = Callable[[str], int]  # of a name
POINTER = 8  # bytes


def inside_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a value and all that is inside a tuple or list, at any depth, with their names.

    >>> list(inside_of((1, [2]), "argument 0"))
    [('argument 0', (1, [2])), ('argument 0.0', 1), ('argument 0.1', [2]), ('argument 0.1[0]', 2)]
    """
    yield name, value
    for place, part in enumerate(value if isinstance(value, tuple | list) else ()):
        yield from inside_of(part, f"{name}.{place}" if isinstance(value, tuple) else f"{name}[{place}]")


def content(value: list[Any], name: str, address: AddressOf) -> bytes:
    """Return the bytes of an array whose elements are pointers or structs of one size."""
    for place, part in enumerate(value):
        if not (part is None or isinstance(part, np.ndarray | tuple | list)):
            raise ArgumentError(
                f"{name}[{place}] is {part!r}: a list is an array of pointers or structs, so pass arrays and tuples in "
                "it, or instead of it a NumPy array of numbers"
            )
    elements = [_member(part, f"{name}[{place}]", address)[0] for place, part in enumerate(value)]
    if len({len(element) for element in elements}) > 1:
        sizes = ", ".join(str(len(element)) for element in elements)
        raise ArgumentError(f"{name} is a list whose elements have {sizes} bytes: pass elements of one type")
    return b"".join(elements)


def struct(value: tuple[Any, ...], name: str, address: AddressOf) -> tuple[bytes, int]:
    """Return the bytes of a struct, its members where a C++ compiler puts them, and its alignment."""
    packed, most = bytearray(), 1
    for place, part in enumerate(value):
        member, alignment = _member(part, f"{name}.{place}", address)
        packed += bytes(-len(packed) % alignment) + member
        most = max(most, alignment)
    return bytes(packed) + bytes(-len(packed) % most), most


def _member(value: Any, name: str, address: AddressOf) -> tuple[bytes, int]:
    """Return the bytes and the alignment of a member of a struct or of an element."""
    if isinstance(value, tuple):
        return struct(value, name, address)
    if value is None:
        return bytes(POINTER), POINTER
    if isinstance(value, np.ndarray | list):
        return address(name).to_bytes(POINTER, "little"), POINTER
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.kind != "U":
        return value.tobytes(), value.dtype.alignment
    if isinstance(value, bytes | bytearray):
        return bytes(value), 1
    raise ArgumentError(
        f"{name} is {value!r}, whose size and alignment in a struct are not known: pass a NumPy scalar, such as "
        "numpy.int32(4), an array or a list for a pointer, a tuple for a struct, or bytes"
    )


class DeviceMemory:
    """The arrays of a program; every launch sees all of them, each at its own address."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []
        self.ended = False

    def array(self, values: ArrayLike, dtype: Any = None) -> NDArray[Any]:
        """Return a copy of an array that lies in this memory; a launch reads and writes it in place."""
        if self.ended:
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
        memory.ended = True
        _CURRENT.reset(token)


def resident() -> dict[str, NDArray[Any]]:
    """The arrays in device memory by name, in the order of their addresses."""
    memory = _CURRENT.get()
    return {} if memory is None else memory.by_name()
