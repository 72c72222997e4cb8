"""Textures and surfaces of one and two dimensions: tex, suld and sust.

PTX ISA 9.0, "Texture Instructions" and "Surface Instructions"; CUDA C++ Programming Guide, "Texture Fetching".
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.errors import ArgumentError, LayoutError, brief
from gemmery_emulator.hopper.tensormap import BYTES
from gemmery_emulator.machine import Machine, active, report_misuse
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.ptx import Address, Instruction, Opcode, Vector
from gemmery_emulator.steps import Handler, Lowering, Step, refused

FILTERS, ADDRESSES = ("nearest", "linear"), ("clamp", "border", "wrap", "mirror")
KINDS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32")
_MAGIC = b"gemmery texture\0"
_FORMAT = struct.Struct("<16sQ8I")
_WEIGHTS = 256  # steps of a linear filter's weight
_LENGTHS = {"": 1, "v2": 2, "v4": 4}


@dataclass(frozen=True)
class Texture:
    """An array for a kernel's texture or surface object, made by `texture`."""

    array: NDArray[Any]
    channels: int
    filter: str
    address: str
    normalized: bool
    unit: bool

    def encoded(self, address: int) -> bytes:
        """Return the bytes of the texture object, for an array at an address."""
        numbers = FILTERS.index(self.filter), ADDRESSES.index(self.address), self.normalized, self.unit
        kind = KINDS.index(self.array.dtype.name)
        return _FORMAT.pack(_MAGIC, address, *self._sides, kind, self.channels, *numbers).ljust(BYTES, b"\0")

    @property
    def _sides(self) -> tuple[int, int]:
        """Width and height."""
        height, width = (1, *self.array.shape[: self.array.ndim - (self.channels > 1)])[-2:]
        return width, height

    @property
    def _elements(self) -> NDArray[Any]:
        """The memory of its elements, (height * width, channels)."""
        return self.array.reshape(-1, self.channels)

    def fetch(self, coordinates: list[NDArray[Any]]) -> NDArray[Any]:
        """Return what is read at x (and y) of each thread: (threads, 4) numbers; those of absent channels are zeros."""
        if coordinates[0].dtype.kind != "f":
            return self._read(coordinates, border=True)  # tex1Dfetch(), which is for linear memory alone
        places = [
            self._scaled(values.astype(np.float64), side)
            for values, side in zip(coordinates, self._sides, strict=False)
        ]
        if self.filter == "nearest":
            return self._read([np.floor(place).astype(np.int64) for place in places])
        total = np.zeros((len(places[0]), 4))
        low = [np.floor(place - 0.5).astype(np.int64) for place in places]
        weights = [
            np.rint((place - 0.5 - least) * _WEIGHTS) / _WEIGHTS for place, least in zip(places, low, strict=True)
        ]
        for corner in product((0, 1), repeat=len(places)):
            values = self._read([least + step for least, step in zip(low, corner, strict=True)])
            share = np.prod([w if step else 1 - w for w, step in zip(weights, corner, strict=True)], axis=0)
            total += values * share[:, None]
        return total.astype(np.float32)

    def _scaled(self, values: NDArray[np.float64], side: int) -> NDArray[np.float64]:
        """Return coordinates in elements; wrapped and mirrored ones are then inside."""
        values = np.where(np.isfinite(values), values, 0)
        if self.address in ("wrap", "mirror"):
            whole = np.floor(values)
            values = values - whole
            if self.address == "mirror":
                values = np.where(whole % 2 == 0, values, 1 - values)
        return np.clip(values * side if self.normalized else values, -(2.0**40), 2.0**40)

    def _located(self, places: Sequence[Indices], wraps: bool = False) -> tuple[Indices, Flags]:
        """Return the element at each place, or the nearest one, and whether the place is inside."""
        element, inside = np.zeros(len(places[0]), np.int64), np.ones(len(places[0]), bool)
        for place, side, stride in zip(places, self._sides, (1, self._sides[0]), strict=False):
            inside &= (place >= 0) & (place < side)
            element += (place % side if wraps else np.clip(place, 0, side - 1)) * stride
        return element, inside

    def _read(self, places: list[Indices], border: bool = False) -> NDArray[Any]:
        index, inside = self._located(places, self.address == "wrap")
        values = self._elements[index]
        if border or self.address == "border":
            values = np.where(inside[:, None], values, 0)
        if self.unit:
            values = np.maximum(values.astype(np.float32) / np.float32(np.iinfo(values.dtype).max), np.float32(-1))
        wide = np.zeros((len(index), 4), np.float32 if values.dtype.kind == "f" else np.int64)
        wide[:, : self.channels] = values
        return wide

    def surface(
        self, machine: Machine, index: int, threads: Indices, places: list[Indices], width: int, outside: str
    ) -> tuple[NDArray[np.uint8], Indices]:
        """Return the bytes of the elements, and the one of each thread whose x is a byte; -1 if it accesses none."""
        elements = self._elements.view(np.uint8)
        size = elements.shape[1]
        if size != width:
            what = f"accesses {width} bytes of a surface whose elements have {size}: use the type of its elements"
            report_misuse(machine, index, threads, what)
            return elements, np.full(len(threads), -1)
        odd = places[0] % width != 0
        what = f"names a byte x that is no multiple of {width}, the size of an element: multiply x by it"
        report_misuse(machine, index, threads[odd], what)
        element, inside = self._located((places[0] // width, *places[1:]))
        if outside == "trap":
            sides = " x ".join(map(str, self._sides))
            what = f"is outside a surface of {sides} elements: a device ends the launch here"
            report_misuse(machine, index, threads[~inside], what)
        return elements, element if outside == "clamp" else np.where(inside, element, -1)


def texture(
    array: Any,
    *,
    channels: int = 1,
    filter: str = "nearest",  # noqa: A002  the word of CUDA's cudaTextureDesc
    address: str = "clamp",
    normalized: bool = False,
    unit: bool = False,
) -> Texture:
    """Make a texture or surface of an array of one or two dimensions, for the arguments of `gm.emulate`.

    It fits a parameter `cudaTextureObject_t` or `cudaSurfaceObject_t`. With `channels` 2 or 4 the last axis holds the
    parts of a float2 or a uchar4. `filter` is "nearest" or "linear"; `address`, for coordinates outside, is
    "clamp", "border", "wrap" or "mirror", the last two with `normalized` coordinates, which go from 0 to 1. `unit`
    reads integers of 8 and 16 bits as numbers from 0 or -1 to 1. A surface is written in place.

    >>> image = np.zeros((480, 640), np.float32)
    >>> texture(image, filter="linear").address
    'clamp'

    Raises ArgumentError and LayoutError for what CUDA would refuse.
    """
    if not isinstance(array, np.ndarray) or array.dtype.name not in KINDS:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError(f"texture of {kind}: pass a NumPy array of {', '.join(KINDS)}")
    if not array.flags.c_contiguous or not array.dtype.isnative:
        raise LayoutError(f"texture of strides {array.strides}: pass numpy.ascontiguousarray of the array")
    if channels not in (1, 2, 4) or (channels > 1 and array.shape[-1:] != (channels,)):
        raise ArgumentError(
            f"channels={brief(channels)}, shape {array.shape}: 1, or 2 or 4 with a last axis of that length"
        )
    if array.ndim - (channels > 1) not in (1, 2) or not array.size:
        raise ArgumentError(f"texture of shape {array.shape}, {channels} channels: one or two dimensions, not empty")
    if filter not in FILTERS or address not in ADDRESSES:
        raise ArgumentError(f"filter={brief(filter)}, address={brief(address)}: one of {FILTERS}, and of {ADDRESSES}")
    if address in ("wrap", "mirror") and not normalized:
        raise ArgumentError(f"address={address!r}: it needs normalized=True")
    flags: list[object] = [normalized, unit]
    if not all(isinstance(flag, bool) for flag in flags):
        raise ArgumentError(f"normalized={brief(normalized)}, unit={brief(unit)}: pass True or False")
    if unit and array.dtype.name not in KINDS[:4]:
        raise ArgumentError(f"unit=True: only integers of 8 and 16 bits can be read so, and this is {array.dtype}")
    if filter == "linear" and array.dtype.kind != "f" and not unit:
        raise ArgumentError(
            f"filter='linear' of {array.dtype}: only floats can be filtered, or integers with unit=True"
        )
    return Texture(array, channels, filter, address, normalized, unit)


def decoded(machine: Machine, handle: int) -> Texture | None:
    """Read a texture object, as an array in the launch's memory; None if there is none at this address."""
    data = machine.memory.data[handle : handle + _FORMAT.size].tobytes() if handle >= 0 else b""
    if len(data) < _FORMAT.size or not data.startswith(_MAGIC):
        return None
    _, start, width, height, kind, channels, filter_, address, normalized, unit = _FORMAT.unpack(data)
    dtype = np.dtype(KINDS[kind])
    memory = machine.memory.data[start : start + width * height * channels * dtype.itemsize]
    array = memory.view(dtype).reshape(height, width, *((channels,) if channels > 1 else ()))
    return Texture(array, channels, FILTERS[filter_], ADDRESSES[address], normalized, unit)


def _sides(opcode: Opcode) -> int:
    """The dimensions of a texture instruction, 0 if it is not modeled."""
    return {"1d": 1, "2d": 2}.get(opcode.modifiers[0] if opcode.modifiers else "", 0)


def _tex(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """tex and tex.level, whose level is ignored: there is only one."""
    opcode = instruction.opcode
    registers, place, *_ = instruction.operands
    sides = _sides(opcode)
    if not sides or opcode.modifiers[1:] != ("v4",) or len(opcode.types) != 2:
        raise refused(instruction)
    if not isinstance(registers, Vector) or not isinstance(place, Address) or len(place.coordinates) != sides:
        raise refused(instruction)
    result, kind = opcode.types
    handle = lowering.address(place, instruction)
    reads = [lowering.read(each, kind, instruction) for each in place.coordinates]
    writes = [lowering.write(each, result, instruction) for each in registers.elements]
    dtype = {"f32": np.float32, "u32": np.uint32, "s32": np.int32}[result]

    def step(machine: Machine, mask: Mask) -> None:
        coordinates = [machine.spread(read(machine.registers)) for read in reads]
        values = np.zeros((machine.threads, 4), dtype)
        for texture_, threads in _by_object(machine, index, machine.spread(handle(machine.registers)), mask):
            fetched = texture_.fetch([each[threads] for each in coordinates])
            if (fetched.dtype.kind == "f") != (result == "f32"):  # the bits of the other kind of numbers
                fetched = fetched.astype(np.int32 if result == "f32" else np.float32).view(dtype)
            values[threads] = fetched.astype(dtype)
        for write, value in zip(writes, values.T, strict=True):
            write(machine.registers, mask, np.ascontiguousarray(value))

    return step


def _surface(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """suld.b and sust.b, which name x in bytes."""
    opcode, loads = instruction.opcode, instruction.opcode.family == "suld"
    sides, words = _sides(opcode), opcode.modifiers[1:]
    count = _LENGTHS.get(words[0], 0) if len(words) == 2 else 1
    outside = words[-1] if words else ""
    place, registers = instruction.operands[::-1] if loads else instruction.operands
    if not sides or not count or outside not in ("trap", "clamp", "zero") or not isinstance(place, Address):
        raise refused(instruction)
    elements = registers.elements if isinstance(registers, Vector) else (registers,)
    if len(place.coordinates) != sides or len(elements) != count:
        raise refused(instruction)
    kind, size = opcode.type, int(opcode.type[1:]) // 8
    dtype = np.dtype(f"u{size}")
    handle = lowering.address(place, instruction)
    reads = [lowering.read(each, "s32", instruction) for each in place.coordinates]
    writes = [lowering.write(each, kind, instruction) for each in elements] if loads else []
    values = [] if loads else [lowering.read(each, kind, instruction) for each in elements]

    def step(machine: Machine, mask: Mask) -> None:
        coordinates = [machine.spread(read(machine.registers)) for read in reads]
        results = np.zeros((machine.threads, count), dtype)
        for each, value in enumerate(values):
            results[:, each] = machine.spread(value(machine.registers)).view(dtype)
        for surface, threads in _by_object(machine, index, machine.spread(handle(machine.registers)), mask):
            places = [place[threads].astype(np.int64) for place in coordinates]
            elements, at = surface.surface(machine, index, threads, places, size * count, outside)
            some = at >= 0
            if not some.any():
                continue
            if loads:
                results[threads[some]] = elements[at[some]].view(dtype)
            else:
                elements[at[some]] = results[threads[some]].view(np.uint8)
        for write, column in zip(writes, results.T, strict=False):
            write(machine.registers, mask, np.ascontiguousarray(column))

    return step


def _by_object(machine: Machine, index: int, handles: NDArray[Any], mask: Mask) -> list[tuple[Texture, Indices]]:
    """The active threads of each texture object; those of no object are reported."""
    some = active(machine, mask)
    groups = []
    for handle in np.unique(handles[some]).tolist():
        threads, object_ = some[handles[some] == handle], decoded(machine, handle)
        if object_ is None:
            what = f"{handle:#x} is no texture or surface: pass gemmery.texture(array)"
            report_misuse(machine, index, threads, what)
        else:
            groups.append((object_, threads))
    return groups


TABLE = {
    "tex": Handler(step=_tex),
    "tex.level": Handler(step=_tex),
    "suld.b": Handler(step=_surface),
    "sust.b": Handler(step=_surface, writes=False),
}
