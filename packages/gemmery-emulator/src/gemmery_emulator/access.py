"""Loads, stores and moves between registers: ld, ldu, st, mov, cvta, isspacep; cp.async, and the groups of copies.

PTX ISA 9.0, "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmery_emulator import reach
from gemmery_emulator.machine import Machine
from gemmery_emulator.memory import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW
from gemmery_emulator.op import FETCHES, LENGTHS, NUMPY, POLICY, SCOPES, SPACES, STORED, Kinds, Mask, sort_by_kind
from gemmery_emulator.ptx import Address, Immediate, Instruction, Not, Opcode, Register, Vector
from gemmery_emulator.reach import Copies
from gemmery_emulator.steps import Handler, Lowering, Read, Step, lane_step, on_unit, only_constant, refused

WINDOWS = {"shared": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAMETER_WINDOW}
_TYPES = (*(f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)), "f32", "f64")
_EVICTIONS = ("evict_normal", "evict_unchanged", "evict_first", "evict_last")
_MOVED: Kinds = {"type": _TYPES, "length": LENGTHS}
_SHARED: Kinds = {
    **_MOVED,
    "mmio": ("mmio",),
    "scope": SCOPES,
    "L1": (*(f"L1::{when}" for when in _EVICTIONS), "L1::no_allocate"),
    "L2": tuple(f"L2::{when}" for when in _EVICTIONS),
    "policy": (POLICY,),
}
ACCESSES: Mapping[str, Kinds] = {
    "ld": {
        **_SHARED,
        "space": SPACES,
        "order": ("weak", "volatile", "relaxed", "acquire"),
        "cache": ("ca", "cg", "cs", "lu", "cv"),
        "read-only": ("nc",),
        "fetch": FETCHES,
    },
    "st": {
        **_SHARED,
        "space": tuple(name for name, space in SPACES.items() if space != "param" and name != "const"),
        "order": ("weak", "volatile", "relaxed", "release"),
        "cache": ("wb", "cg", "cs", "wt"),
    },
    "ldu": {**_MOVED, "space": ("global",)},
}


@dataclass(frozen=True)
class Spelled:
    """A load or store, read from its opcode."""

    space: str  # "" for generic
    count: int  # elements
    kind: str  # of each, a PTX type
    policy: bool  # whether a cache policy follows the operands

    @property
    def width(self) -> int:
        """Bytes per thread."""
        return np.dtype(NUMPY[self.kind]).itemsize * self.count


def read(opcode: Opcode) -> Spelled | None:
    """Read the opcode of ld, ldu or st; returns None if ptxas refuses it, or it is not modeled.

    >>> from gemmery_emulator.instructions import opcode
    >>> read(opcode("ld.global.nc.v4.f32"))
    Spelled(space='global', count=4, kind='f32', policy=False)
    >>> read(opcode("ld.shared.nc.f32")) is None
    True
    """
    words = sort_by_kind((*opcode.modifiers, *opcode.types), ACCESSES[opcode.name])
    if words is None or "type" not in words:
        return None
    space = words.get("space", "")
    spelled = Spelled(SPACES.get(space, ""), LENGTHS.get(words.get("length", ""), 1), words["type"], "policy" in words)
    together = _in_order(words, space) and _cached(words, space) and _narrow(words, spelled)
    return spelled if together else None


def _in_order(words: Mapping[str, str], space: str) -> bool:
    """Memory order: it needs a scope and memory that other threads see, and excludes cache operations."""
    order = words.get("order", "weak")
    if (order in ("weak", "volatile")) == ("scope" in words):
        return False
    if "mmio" in words and (order, words.get("scope", "")) != ("relaxed", "sys"):
        return False
    outside = space not in ("const", "local", "param", "param::entry") or (space, order) == ("local", "volatile")
    return order == "weak" or (outside and "cache" not in words)


def _cached(words: Mapping[str, str], space: str) -> bool:
    """Caches: hints need global memory, and .nc global memory that nothing writes."""
    if "read-only" in words and (space != "global" or "order" in words or words.get("cache") in ("cv", "lu")):
        return False
    if "cache" in words and "L1" in words:
        return False
    return space in ("", "global") or not {"L1", "L2", "fetch", "policy"} & set(words)


def _narrow(words: Mapping[str, str], spelled: Spelled) -> bool:
    """Sizes: at most 16 bytes, or on sm_100 32 bytes of global memory in words of 4 or 8; .L2:: needs the latter."""
    each = spelled.width // spelled.count
    wide = spelled.width == 32 and each >= 4 and spelled.space in ("", "global") and spelled.count > 2
    return wide or (spelled.width <= 16 and "L2" not in words)


def _access(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """ld, ldu and st."""
    spelled, loads = read(instruction.opcode), instruction.opcode.name != "st"
    if spelled is None or len(instruction.operands) != 2 + spelled.policy:
        raise refused(instruction)
    data, place = instruction.operands[:2] if loads else instruction.operands[1::-1]
    elements = lowering.flat((data,))
    if len(elements) != spelled.count:
        raise refused(instruction, f"{len(elements)} registers:")
    writes = [lowering.write(element, spelled.kind, instruction) for element in elements if loads]
    reads = [lowering.read(element, spelled.kind, instruction) for element in elements if not loads]
    address, dtype = lowering.address(place, instruction), NUMPY[spelled.kind]
    space, count, width = spelled.space, spelled.count, spelled.width

    def load(machine: Machine, mask: Mask) -> None:
        values = reach.load(machine, index, space, address(machine.registers), mask, dtype, count, width)
        for write, value in zip(writes, values, strict=True):
            write(machine.registers, mask, value)

    def store(machine: Machine, mask: Mask) -> None:
        registers = machine.registers
        values = [read(registers) for read in reads]
        reach.store(machine, index, space, address(registers), mask, values, dtype, width)

    return load if loads else store


def _move(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """mov, which also packs and unpacks registers."""
    kind = instruction.opcode.type
    if instruction.opcode.modifiers or instruction.opcode.types != (kind,) or kind not in ("pred", *_TYPES):
        raise refused(instruction)
    target, source = instruction.operands
    if (isinstance(target, Vector) or isinstance(source, Vector)) and kind[0] != "b":
        raise refused(instruction, f"a register of {kind} in parts:")
    if isinstance(target, Vector):
        return _unpack(lowering, instruction, kind, target)
    if isinstance(source, Vector):
        return _pack(lowering, instruction, kind, source)
    read, write = lowering.read(source, kind, instruction), lowering.write(target, kind, instruction)
    return lane_step(lambda value: value, [read], [write])


def _parts(instruction: Instruction, kind: str, parts: Vector) -> tuple[str, list[Any]]:
    """Return the type of each part of a packed register, and the shift of each part in bits."""
    count = len(parts.elements)
    bits = 8 * np.dtype(NUMPY[kind]).itemsize // count
    registers = [part for part in parts.elements if isinstance(part, Register) and part.name != "_"]
    if bits not in (8, 16, 32) or any(8 * np.dtype(STORED[part.type]).itemsize != bits for part in registers):
        raise refused(instruction, f"{count} parts:")
    whole = np.dtype(NUMPY[kind]).type
    return f"b{bits}", [whole(bits * place) for place in range(count)]


def _unpack(lowering: Lowering, instruction: Instruction, kind: str, targets: Vector) -> Step:
    part, shifts = _parts(instruction, kind, targets)
    read = lowering.read(instruction.operands[1], kind, instruction)
    writes = [lowering.write(target, part, instruction) for target in targets.elements]
    return lane_step(lambda whole: [(whole >> at).astype(NUMPY[part]) for at in shifts], [read], writes, several=True)


def _pack(lowering: Lowering, instruction: Instruction, kind: str, sources: Vector) -> Step:
    part, shifts = _parts(instruction, kind, sources)
    reads = [lowering.read(source, part, instruction) for source in sources.elements]
    write = lowering.write(instruction.operands[0], kind, instruction)

    def packed(first: Any, *others: Any) -> Any:
        whole = first.astype(NUMPY[kind])
        for value, shift in zip(others, shifts[1:], strict=True):
            whole = whole | (value.astype(NUMPY[kind]) << shift)
        return whole

    return lane_step(packed, reads, [write])


def _convert_address(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """cvta and cvta.to: convert between addresses of a space and generic ones."""
    *to, space = instruction.opcode.modifiers or ("",)
    if to not in ([], ["to"]) or space not in SPACES or instruction.opcode.types != ("u64",):
        raise refused(instruction)
    window = WINDOWS.get(SPACES[space], 0)
    read = lowering.read(instruction.operands[1], "u64", instruction)
    write = lowering.write(instruction.operands[0], "u64", instruction)
    away = np.uint64(-window % (1 << 64) if to else window)  # modulo 2^64
    return lane_step((lambda value: value + away) if window else (lambda value: value), [read], [write])


def _is_in_space(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """isspacep: test whether a generic address is in a space."""
    space = instruction.opcode.space
    if len(instruction.opcode.modifiers) > 1 or space not in ("global", "shared", "shared::cluster", "local"):
        raise refused(instruction)
    read = lowering.read(instruction.operands[1], "s64", instruction)
    write = lowering.write(instruction.operands[0], "pred", instruction)
    bounds = {
        "global": (0, SHARED_WINDOW),
        "shared": (SHARED_WINDOW, reach.PEERS_WINDOW),
        "shared::cluster": (SHARED_WINDOW, LOCAL_WINDOW),  # addresses from mapa, including the block's own memory
        "local": (LOCAL_WINDOW, PARAMETER_WINDOW),
    }
    low, high = bounds[space]
    return lane_step(lambda value: (value >= low) & (value < high), [read], [write])


_MODIFIERS: Kinds = {"space": ("shared", "shared::cta"), "cache": ("ca", "cg"), "fetch": FETCHES, "policy": (POLICY,)}


def read_copy(opcode: Opcode) -> dict[str, str] | None:
    """Read the opcode of cp.async from global to shared memory, by kind; returns None if ptxas refuses it.

    >>> from gemmery_emulator.instructions import opcode
    >>> read_copy(opcode("cp.async.cg.shared.global.L2::128B"))
    {'cache': 'cg', 'space': 'shared', 'fetch': 'L2::128B'}
    """
    spaces = [word for word in opcode.modifiers if word in SPACES]
    words = sort_by_kind([word for word in opcode.modifiers if word != "global"], _MODIFIERS)
    if words is None or opcode.types or "cache" not in words or spaces[1:] != ["global"] or "space" not in words:
        return None
    return words


def _wait(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    pending = only_constant(instruction)
    return lambda machine, mask: machine.unit(Copies).wait(mask, pending)


def _copy(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """cp.async of 4, 8 or 16 bytes."""
    words = read_copy(instruction.opcode)
    if words is None:
        raise refused(instruction)
    match instruction.operands[: len(instruction.operands) - ("policy" in words)]:
        case Address() as target, Address() as source, Immediate(width), *fourth if len(fourth) < 2:
            pass
        case _:
            raise refused(instruction)
    if width not in ((16,) if words["cache"] == "cg" else (4, 8, 16)):
        raise refused(instruction, f"{width} bytes:")
    to, out_of = lowering.address(target, instruction), lowering.address(source, instruction)
    # The fourth operand is the number of bytes to read (the rest is zeros), or a predicate: true reads nothing.
    extra: Read | None = None
    ignored = False
    match fourth:
        case [Not() | Register(type="pred") as predicate]:
            extra, ignored = lowering.read(predicate, "pred", instruction), True
        case [Immediate(count)] if count > width:
            raise refused(instruction, f"{count} of {width} bytes:")
        case [Immediate() | Register() as size] if not (isinstance(size, Register) and STORED[size.type] != "u4"):
            extra = lowering.read(size, "u32", instruction)
        case [_]:
            raise refused(instruction)

    def step(machine: Machine, mask: Mask) -> None:
        registers = machine.registers
        size = None
        if extra is not None:
            size = np.where(extra(registers), 0, width) if ignored else extra(registers).astype(np.int64)
        reach.copy(machine, index, to(registers), out_of(registers), mask, width, size)

    return step


_GROUPS = (
    ("cp.async.commit_group", 0, on_unit(Copies, Copies.commit)),
    ("cp.async.wait_group", 1, _wait),
    ("cp.async.wait_all", 0, on_unit(Copies, Copies.wait_all)),
)
TABLE = {
    # Parameters and constants do not count as loads: the hardware reads them from their own cache.
    "ld": Handler(step=_access, count=lambda op: (f"ld.{op.space}" if op.space in ("param", "const") else "ld", 1)),
    "ldu": Handler(step=_access),
    "st": Handler(step=_access),
    "mov": Handler(step=_move, operands=(2,), effect=False),
    "cvta": Handler(step=_convert_address, effect=False),
    "isspacep": Handler(step=_is_in_space, effect=False),
    "cp.async": Handler(step=_copy, kind="cp.async", orders=True),
    **{
        name: Handler(step=step, spelled=re.compile(re.escape(name)), operands=(count,), kind=name, orders=True)
        for name, count, step in _GROUPS
    },
}
