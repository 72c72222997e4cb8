"""The arrays that an instruction may access, as far as the registers of its address tell.

An address is a parameter or the address of a variable plus offsets, so 64-bit registers are traced to their
definitions, in any order of instructions. A pointer that is loaded from memory or assembled from halves may point
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gemmery.errors import EmulationError
from gemmery_emulator.hopper import tensormap
from gemmery_emulator.instructions import makers, written
from gemmery_emulator.memory import Global
from gemmery_emulator.op import STORED
from gemmery_emulator.ptx import Address, Immediate, Instruction, Operand, PtxKernel, Register, Symbol, Vector
from gemmery_emulator.ptx.scopes import SIZES

Origins = frozenset[tuple[str, int] | str]  # ("pointer", offset of a parameter), ("parameter", ...), a variable's name
Makers = dict[str, list[Instruction]]  # of each register
ANYWHERE = "anywhere"
LOADS = frozenset(("ld", "ldu", "ldmatrix"))
STORES = frozenset(("st", "stmatrix", "atom", "red", "wmma.store"))
_FOLLOWED = frozenset(("mov", "cvta", "add", "sub", "and", "or", "xor", "min", "max"))
_NEVER = frozenset(
    ("mul", "shl", "shr", "cvt", "div", "rem", "neg", "not", "abs", "popc", "clz", "fma", "createpolicy")
)
_UPDATES = {
    **{name: f"atomic{name.title()}()" for name in ("add", "sub", "min", "max", "and", "or", "xor")},
    **dict.fromkeys(("fma", "mad"), "atomicAdd()"),
}
_MOST = 4096  # bytes of parameters, as far as an address is followed: a loop that moves it ends there
_FAR = 64  # registers between a store and the load that it depends on


@dataclass(frozen=True)
class Reach:
    """The instructions that access arrays which the kernel also writes, and the arrays that each may access."""

    followed: tuple[bool, ...]  # by instruction
    arrays: tuple[frozenset[str] | None, ...]  # names of allocations; None for any
    nulls: frozenset[int]  # instructions whose address comes from a null pointer


def reach(kernel: PtxKernel, memory: Global, parameters: bytes) -> Reach:
    """The reach of a launch's instructions."""
    origins = _origins(kernel)
    arrays: list[frozenset[str] | None] = [frozenset()] * len(kernel.instructions)
    nulls: set[int] = set()
    written: set[str] = set()
    everything = False
    reaching = _reaching(kernel)
    for index, place in reaching.items():
        whence = _of(place.base, origins)
        if place.coordinates:
            names, null = _of_tensors(whence, memory, parameters), False
        else:
            names, null = _arrays(whence, kernel, memory, parameters)
        arrays[index] = names
        if null:
            nulls.add(index)
        opcode = kernel.instructions[index].opcode
        if opcode.name in STORES or (opcode.is_bulk and "bulk_group" in opcode.modifiers):
            everything |= names is None
            written |= names or set()
    followed = [False] * len(arrays)
    for index in reaching:
        some = arrays[index]
        followed[index] = everything or some is None or not written.isdisjoint(some)
    return Reach(tuple(followed), tuple(arrays), frozenset(nulls))


@lru_cache(maxsize=64)
def _reaching(kernel: PtxKernel) -> Mapping[int, Address]:
    """The instructions that may access global memory, with their operands."""
    places = ((index, reached(instruction)) for index, instruction in enumerate(kernel.instructions))
    return {index: place for index, place in places if place is not None}


def reached(instruction: Instruction) -> Address | None:
    """The operand of a load, store, copy or atomic that may be in global memory; None if there is none."""
    opcode = instruction.opcode
    if opcode.family not in ("ld", "ldu", "st", "atom", "red", "cp", "wmma"):
        return None
    if opcode.space and "global" not in opcode.modifiers:
        return None
    places = [operand for operand in instruction.operands if isinstance(operand, Address)]
    if opcode.family == "cp":
        places = places[:1] if "bulk_group" in opcode.modifiers else places[1:2]
    return places[0] if places else None


def _of_tensors(origins: Origins, memory: Global, parameters: bytes) -> frozenset[str] | None:
    """The allocations of the tensors whose maps are parameters; None for any."""
    names: set[str] = set()
    for origin in origins:
        if not isinstance(origin, tuple) or origin[0] != "parameter":
            return None
        data = parameters[origin[1] : origin[1] + tensormap.BYTES]
        try:
            start = tensormap.decoded(data.ljust(tensormap.BYTES, b"\0")).address
        except EmulationError:  # the copy itself refuses the map
            return None
        names |= {each.name for each in memory.allocations if each.start <= start <= each.stop}
    return frozenset(names) or None


def _arrays(
    origins: Origins, kernel: PtxKernel, memory: Global, parameters: bytes
) -> tuple[frozenset[str] | None, bool]:
    """The allocations that origins name, None for any; and whether the only origin is a null pointer."""
    names, null, own = set(), False, False
    for origin in origins:
        if isinstance(origin, tuple) and origin[0] == "pointer":
            if not 0 <= origin[1] <= len(parameters) - 8:
                return None, False
            value = int.from_bytes(parameters[origin[1] : origin[1] + 8], "little")
            null |= value == 0
            names |= {each.name for each in memory.allocations if each.start <= value <= each.stop}
        elif isinstance(origin, str) and origin in kernel.variables:
            own |= kernel.variables[origin].space not in ("global", "const")
            names |= {origin} - {name for name, each in kernel.variables.items() if each.space in ("shared", "local")}
        else:
            return None, False
    if names or own or null:
        return frozenset(names), null and not names and not own
    return None, False


def _of(base: Operand, origins: Mapping[str, Origins]) -> Origins:
    if isinstance(base, Register):
        return origins.get(base.name, frozenset())
    return frozenset((base.name,)) if isinstance(base, Symbol) else frozenset()


@lru_cache(maxsize=64)
def _origins(kernel: PtxKernel) -> Mapping[str, Origins]:
    """The origins of each 64-bit register."""
    offsets = {parameter.name: parameter.offset for parameter in kernel.parameters}
    wide = [each for each in kernel.instructions if any(STORED.get(target.type) == "u8" for target in written(each))]
    origins: dict[str, Origins] = {}
    grown = True
    while grown:
        grown = False
        for instruction in wide:
            result = _result(instruction, origins, offsets)
            if not result:
                continue
            for place, register in enumerate(written(instruction)):
                element = result
                if place:  # in a later element of a vector parameters advance by 8 bytes
                    element = frozenset((o[0], o[1] + 8 * place) if isinstance(o, tuple) else o for o in result)
                known = origins.get(register.name, frozenset())
                if not element <= known:
                    origins[register.name] = known | element
                    grown = True
    return origins


def _result(instruction: Instruction, known: Mapping[str, Origins], offsets: Mapping[str, int]) -> Origins:
    """The origins of a 64-bit result."""
    name = instruction.opcode.name
    if name == "ld" and instruction.opcode.space == "param":
        return _parameter(instruction.operands[1], known, offsets)
    if name in _FOLLOWED or name in ("mad", "selp"):
        if isinstance(instruction.operands[-1], Vector):
            return frozenset((ANYWHERE,))
        sources = instruction.operands[3:] if name == "mad" else instruction.operands[1:]
        origins: set[tuple[str, int] | str] = set()
        for each in sources:
            if isinstance(each, Symbol) and each.name in offsets:
                origins.add(("parameter", offsets[each.name] + each.offset))
            else:
                origins |= _of(each, known)
        return _advanced(frozenset(origins), name, sources)
    return frozenset() if name in _NEVER else frozenset((ANYWHERE,))


def _advanced(origins: Origins, name: str, sources: Sequence[Operand]) -> Origins:
    """Origins after an instruction with these sources: the address of a parameter moves with what is added to it."""
    if name in ("mov", "cvta") or not any(isinstance(origin, tuple) and origin[0] == "parameter" for origin in origins):
        return origins
    bits = (source.bits for source in sources if isinstance(source, Immediate))
    steps = [(each + (1 << 63)) % (1 << 64) - (1 << 63) for each in bits]  # with their signs
    if name != "add" or len(steps) != 1 or len(origins) > 1:
        return frozenset((ANYWHERE,))
    ((kind, offset),) = ((origin[0], origin[1]) for origin in origins if isinstance(origin, tuple))
    moved = offset + steps[0]
    return frozenset(((kind, moved),)) if abs(moved) <= _MOST else frozenset((ANYWHERE,))


def _parameter(place: Operand, known: Mapping[str, Origins], offsets: Mapping[str, int]) -> Origins:
    assert isinstance(place, Address)
    if isinstance(place.base, Symbol):
        return frozenset((("pointer", offsets.get(place.base.name, 0) + place.base.offset + place.offset),))
    of = _of(place.base, known)
    if len(of) == 1:
        (origin,) = of
        if isinstance(origin, tuple) and origin[0] == "parameter":
            return frozenset((("pointer", origin[1] + place.offset),))
    return frozenset((ANYWHERE,)) if of else frozenset()


# ---- reads of an update ----


def retried(kernel: PtxKernel) -> frozenset[int]:
    """Loads from the address of an atom.cas of the same size: a stale value only costs another turn."""
    if not any("cas" in instruction.opcode.modifiers for instruction in kernel.instructions):
        return frozenset()
    makers, every = _makers(kernel), kernel.instructions
    atomics = (each for each in every if each.opcode.name == "atom" and "cas" in each.opcode.modifiers)
    swapped = {(_place(each.operands[1], makers), SIZES[each.opcode.type]) for each in atomics}
    loads = ((index, each) for index, each in enumerate(every) if each.opcode.name == "ld")
    return frozenset(at for at, ld in loads if (_place(ld.operands[1], makers), SIZES[ld.opcode.type]) in swapped)


def update(kernel: PtxKernel, index: int, other: int) -> str:
    """The atomic to use instead if two instructions are the load and the store of one update; "" if they are not.

    For `x += 1` it is "atomicAdd()".
    """
    if kernel.instructions[index].line != kernel.instructions[other].line:
        return ""
    makers = _makers(kernel)
    atomics = [_update(kernel, at, makers) for at in (index, other)]
    return atomics[0] if all(atomics) else ""


def _makers(kernel: PtxKernel) -> Makers:
    every = makers(kernel).items()
    return {name: [kernel.instructions[index] for index in indices] for name, indices in every}


def _place(operand: Operand, makers: Makers) -> Operand:
    """An address by the register or symbol that it was copied from, so equal addresses compare equal."""
    while isinstance(operand, Address) and isinstance(operand.base, Register):
        definitions = makers.get(operand.base.name, [])
        if len(definitions) != 1 or definitions[0].opcode.name not in ("mov", "cvta"):
            return operand
        source = definitions[0].operands[1]
        if not isinstance(source, Register | Symbol):
            return operand
        operand = Address(source, operand.offset)
    return operand


def _update(kernel: PtxKernel, index: int, makers: Makers) -> str:
    """The atomic that replaces a load, or a store, and its counterpart at the same address; "" if there is none."""
    instruction = kernel.instructions[index]
    if instruction.opcode.name in LOADS:
        place = _place(instruction.operands[1], makers)
        stores = (
            at
            for at, each in enumerate(kernel.instructions)
            if each.opcode.name == "st" and _place(each.operands[0], makers) == place
        )
        return next((atomic for store in stores if (atomic := _update(kernel, store, makers))), "")
    if instruction.opcode.name != "st" or not isinstance(instruction.operands[1], Register):
        return ""
    return _depends(instruction.operands[1], _place(instruction.operands[0], makers), makers)


def _kind(instruction: Instruction, makers: Makers, place: Operand) -> str:
    """The operation of an instruction; "" for moves, "product" if a multiply-add multiplies the loaded value."""
    name = instruction.opcode.family
    if name in ("mov", "cvt", "cvta"):
        return ""
    if name in ("fma", "mad"):
        added = makers.get(instruction.operands[3].name, []) if isinstance(instruction.operands[3], Register) else []
        loads = [each for each in added if each.opcode.name in LOADS]
        return name if any(_place(each.operands[1], makers) == place for each in loads) else "product"
    return name


def _depends(value: Register, place: Operand, makers: Makers) -> str:
    """The atomic that computes a value from the one loaded from an address; "" if it does not depend on it."""
    traced: set[str] = set()
    waiting, last = [value.name], ""
    while waiting and len(traced) < _FAR:
        name = waiting.pop(0)
        if name in traced:
            continue
        traced.add(name)
        for instruction in makers.get(name, []):
            if instruction.opcode.name in LOADS:
                if _place(instruction.operands[1], makers) == place:
                    return _UPDATES.get(last, "atomicCAS() in a loop")
                continue
            last = last or _kind(instruction, makers, place)
            waiting += [each.name for each in instruction.operands[1:] if isinstance(each, Register)]
    return ""
