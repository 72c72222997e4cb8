"""Instructions that access memory, and moves between registers: ld, st, cp.async, ldmatrix, mov, cvta.

PTX ISA 9.0, "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery.emulator import atomics, matrices, modifiers, printing, reach
from gemmery.emulator.copies import Copies
from gemmery.emulator.hopper import cluster, mbarrier, transfers, wgmma
from gemmery.emulator.machine import Machine
from gemmery.emulator.memory import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW
from gemmery.emulator.modifiers import Spelled
from gemmery.emulator.op import NUMPY, STORED, Mask
from gemmery.emulator.ptx import Immediate, Instruction, Memory, Not, Operand, Register, Vector
from gemmery.emulator.steps import Lowering, Read, Step, refused
from gemmery.errors import EmulationError

WINDOWS = {"shared": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAMETER_WINDOW}
MOVED = frozenset(("pred", "f32", "f64", *(f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64))))


def _spelled(instruction: Instruction) -> Spelled:
    """Read the opcode of a load or store, and check the number of operands."""
    found = modifiers.access(instruction.opcode)
    if found is None or len(instruction.operands) != 2 + found.policy:
        raise refused(instruction)
    return found


def _elements(instruction: Instruction, operand: Operand, spelled: Spelled) -> tuple[Operand, ...]:
    """Return the registers of a vector, or the single one of a scalar."""
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != spelled.count:
        raise refused(instruction, f"{len(elements)} registers:")
    return elements


def _load(lowering: Lowering, index: int) -> Step:
    instruction = lowering.kernel.instructions[index]
    spelled = _spelled(instruction)
    target, source = instruction.operands[:2]
    if not isinstance(source, Memory):
        raise refused(instruction)
    writes = [lowering.write(one, spelled.kind, instruction) for one in _elements(instruction, target, spelled)]
    address, dtype = lowering.address(source, instruction), NUMPY[spelled.kind]
    space, count, width = spelled.space, spelled.count, spelled.width

    def step(machine: Machine, mask: Mask) -> None:
        values = reach.load(machine, index, space, address(machine.registers), mask, dtype, count, width)
        for write, value in zip(writes, values, strict=True):
            if write is not None:
                write(machine.registers, mask, value)

    return step


def _store(lowering: Lowering, index: int) -> Step:
    instruction = lowering.kernel.instructions[index]
    spelled = _spelled(instruction)
    target, source = instruction.operands[:2]
    if not isinstance(target, Memory):
        raise refused(instruction)
    reads = [lowering.read(one, spelled.kind, instruction) for one in _elements(instruction, source, spelled)]
    address, dtype = lowering.address(target, instruction), NUMPY[spelled.kind]
    space, width = spelled.space, spelled.width

    def step(machine: Machine, mask: Mask) -> None:
        held = machine.registers
        reach.store(machine, index, space, address(held), mask, [read(held) for read in reads], dtype, width)

    return step


def _move(lowering: Lowering, index: int) -> Step:
    """mov, which also packs and unpacks registers."""
    instruction = lowering.kernel.instructions[index]
    kind = instruction.opcode.type
    if (
        instruction.opcode.modifiers
        or instruction.opcode.types != (kind,)
        or kind not in MOVED
        or len(instruction.operands) != 2
    ):
        raise refused(instruction)
    target, source = instruction.operands
    if (isinstance(target, Vector) or isinstance(source, Vector)) and kind[0] != "b":
        raise refused(instruction, f"a register of {kind} in parts:")
    if isinstance(target, Vector):
        return _taken_apart(lowering, instruction, kind, target)
    if isinstance(source, Vector):
        return _put_together(lowering, instruction, kind, source)
    read, write = lowering.read(source, kind, instruction), lowering.write(target, kind, instruction)

    def step(machine: Machine, mask: Mask) -> None:
        if write is not None:
            write(machine.registers, mask, read(machine.registers))

    return step


def _parts(instruction: Instruction, kind: str, parts: Vector) -> tuple[str, list[Any]]:
    """Return the type of each part of a packed register, and the shift of each part in bits."""
    count = len(parts.elements)
    bits = 8 * np.dtype(NUMPY[kind]).itemsize // count
    registers = [one for one in parts.elements if isinstance(one, Register) and one.name != "_"]
    if bits not in (8, 16, 32) or any(8 * np.dtype(STORED[one.type]).itemsize != bits for one in registers):
        raise refused(instruction, f"{count} parts:")
    whole = np.dtype(NUMPY[kind]).type
    return f"b{bits}", [whole(bits * place) for place in range(count)]


def _taken_apart(lowering: Lowering, instruction: Instruction, kind: str, targets: Vector) -> Step:
    part, shifts = _parts(instruction, kind, targets)
    read = lowering.read(instruction.operands[1], kind, instruction)
    writes = [lowering.write(one, part, instruction) for one in targets.elements]

    def step(machine: Machine, mask: Mask) -> None:
        whole = read(machine.registers)
        for write, shift in zip(writes, shifts, strict=True):
            if write is not None:
                write(machine.registers, mask, (whole >> shift).astype(NUMPY[part]))

    return step


def _put_together(lowering: Lowering, instruction: Instruction, kind: str, sources: Vector) -> Step:
    part, shifts = _parts(instruction, kind, sources)
    reads = [lowering.read(one, part, instruction) for one in sources.elements]
    write = lowering.write(instruction.operands[0], kind, instruction)

    def step(machine: Machine, mask: Mask) -> None:
        held = machine.registers
        whole = reads[0](held).astype(NUMPY[kind])
        for read, shift in zip(reads[1:], shifts[1:], strict=True):
            whole = whole | (read(held).astype(NUMPY[kind]) << shift)
        if write is not None:
            write(held, mask, whole)

    return step


def _convert_address(lowering: Lowering, index: int) -> Step:
    """cvta and cvta.to: convert between addresses of a space and generic ones."""
    instruction = lowering.kernel.instructions[index]
    *to, space = instruction.opcode.modifiers or ("",)
    if to not in ([], ["to"]) or space not in modifiers.SPACES or instruction.opcode.types != ("u64",):
        raise refused(instruction)
    window = WINDOWS.get(modifiers.SPACES[space], 0)
    read = lowering.read(instruction.operands[1], "u64", instruction)
    write = lowering.write(instruction.operands[0], "u64", instruction)
    away = np.uint64(window)

    def step(machine: Machine, mask: Mask) -> None:
        value = read(machine.registers)
        if window:
            value = value - away if to else value + away
        if write is not None:
            write(machine.registers, mask, value)

    return step


def _is_in_space(lowering: Lowering, index: int) -> Step:
    """isspacep: test whether a generic address is in a space."""
    instruction = lowering.kernel.instructions[index]
    space = instruction.opcode.space
    if len(instruction.opcode.modifiers) > 1 or space not in ("global", "shared", "shared::cluster", "local"):
        raise refused(instruction)
    read = lowering.read(instruction.operands[1], "s64", instruction)
    write = lowering.write(instruction.operands[0], "pred", instruction)
    peers = SHARED_WINDOW + (1 << cluster.RANK_AT)  # addresses from mapa, including the block's own memory
    bounds = {
        "global": (0, SHARED_WINDOW),
        "shared": (SHARED_WINDOW, peers),
        "shared::cluster": (SHARED_WINDOW, LOCAL_WINDOW),
        "local": (LOCAL_WINDOW, PARAMETER_WINDOW),
    }
    low, high = bounds[space]

    def step(machine: Machine, mask: Mask) -> None:
        value = read(machine.registers)
        if write is not None:
            write(machine.registers, mask, (value >= low) & (value < high))

    return step


def _policy(lowering: Lowering, index: int) -> Step:
    """createpolicy: caches are not modelled, so every policy is 0."""
    instruction = lowering.kernel.instructions[index]
    if modifiers.POLICIES.fullmatch(str(instruction.opcode)) is None:
        raise refused(instruction)
    write = lowering.write(instruction.operands[0], "b64", instruction)

    def step(machine: Machine, mask: Mask) -> None:
        if write is not None:
            write(machine.registers, mask, np.uint64(0))

    return step


def _call(lowering: Lowering, index: int) -> Step:
    """A call of a function outside the text: printf, or an error when a thread reaches it."""
    instruction = lowering.kernel.instructions[index]
    (name,) = instruction.opcode.modifiers
    if name == "vprintf":
        return printing.handler(lowering, index)
    error = EmulationError(
        f"a call of {name} ({instruction.line}) is not modelled: remove it for the emulator, for "
        "example with #ifndef EMULATED and options=('-DEMULATED',)"
    )

    def step(machine: Machine, mask: Mask) -> None:
        raise error

    return step


def _nothing(lowering: Lowering, index: int) -> Step:
    """Ordering instructions and hints, which do nothing here: lock step keeps the order."""
    instruction = lowering.kernel.instructions[index]
    if modifiers.WITHOUT_EFFECT.fullmatch(str(instruction.opcode)) is None:
        raise refused(instruction)
    return lambda machine, mask: None


def _fence(lowering: Lowering, index: int) -> Step:
    """Fences, which do nothing here: lock step keeps the order. Observers are told of those for shared memory."""
    instruction = lowering.kernel.instructions[index]
    if modifiers.FENCES.fullmatch(str(instruction.opcode)) is None:
        raise refused(instruction)
    words = instruction.opcode.modifiers
    elsewhere = {"alias", "tensormap::generic", "mbarrier_init"}
    if not elsewhere.isdisjoint(words) or words == ("proxy", "async", "global"):
        return lambda machine, mask: None

    def step(machine: Machine, mask: Mask) -> None:
        for observer in machine.observers:
            observer.fenced(machine, index, mask)

    return step


def _copy(lowering: Lowering, index: int) -> Step:
    """cp.async with its groups and waits."""
    instruction = lowering.kernel.instructions[index]
    if instruction.opcode.is_bulk:
        return transfers.handler(lowering, index)
    if instruction.opcode.name == "cp.async.mbarrier.arrive":
        return mbarrier.copies_arrive(lowering, index)
    match str(instruction.opcode), instruction.operands:
        case "cp.async.commit_group", ():
            return lambda machine, mask: machine.unit(Copies).commit(mask)
        case "cp.async.wait_all", ():
            return lambda machine, mask: machine.unit(Copies).wait_all(mask)
        case "cp.async.wait_group", (Immediate(pending),):
            return lambda machine, mask: machine.unit(Copies).wait(mask, pending)
        case _:
            return _copied(lowering, instruction, index)


def _copied(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    said = modifiers.copy(instruction.opcode)
    if said is None:
        raise refused(instruction)
    match instruction.operands[: len(instruction.operands) - ("policy" in said)]:
        case Memory() as target, Memory() as source, Immediate(width), *more if len(more) < 2:
            pass
        case _:
            raise refused(instruction)
    if width not in ((16,) if said["cache"] == "cg" else (4, 8, 16)):
        raise refused(instruction, f"{width} bytes:")
    to, out_of = lowering.address(target, instruction), lowering.address(source, instruction)
    # The fourth operand is the number of bytes to read (the rest is zeros), or a predicate: true reads nothing.
    extra: Read | None = None
    ignored = False
    match more:
        case [Not() | Register(type="pred") as predicate]:
            extra, ignored = lowering.read(predicate, "pred", instruction), True
        case [Immediate(count)] if count > width:
            raise refused(instruction, f"{count} of {width} bytes:")
        case [Immediate() | Register() as some] if not (isinstance(some, Register) and STORED[some.type] != "u4"):
            extra = lowering.read(some, "u32", instruction)
        case [_]:
            raise refused(instruction)

    def step(machine: Machine, mask: Mask) -> None:
        held = machine.registers
        taken = None
        if extra is not None:
            taken = np.where(extra(held), 0, width) if ignored else extra(held).astype(np.int64)
        reach.copy(machine, index, to(held), out_of(held), mask, width, taken)

    return step


Handler = Callable[[Lowering, int], Step]
HANDLERS: dict[str, Handler] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "mov": _move,
    "cvta": _convert_address,
    "cp": _copy,
    "atom": atomics.lower,
    "red": atomics.lower,
    "isspacep": _is_in_space,
    "createpolicy": _policy,
    "call": _call,
    "ldmatrix": matrices.load_matrix,
    "stmatrix": matrices.store_matrix,
    "wmma": matrices.warp_matrix,
    "wgmma": wgmma.handler,
    "mbarrier": mbarrier.handler,
    "barrier": cluster.barrier,
    "mapa": cluster.map_address,
    "getctarank": cluster.rank_of,
    "setmaxnreg": wgmma.registers_of,
    "prefetch": _nothing,
    "prefetchu": _nothing,
    "applypriority": _nothing,
    "pmevent": _nothing,
    "membar": _fence,
    "fence": _fence,
    "griddepcontrol": _nothing,
    "nanosleep": _nothing,
}
