"""Instructions that reach memory, and moves between registers: ld, st, cp.async, ldmatrix, mov, cvta.

PTX ISA 9.0, sections 9.7.9 (data movement) and 9.7.14 (matrices).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmery.emulator import atomics, matrices
from gemmery.emulator.hopper import cluster, mbarrier, transfers, wgmma
from gemmery.emulator.lower import Lowering, Read, Step, refused
from gemmery.emulator.memory import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW
from gemmery.emulator.op import NUMPY, Mask
from gemmery.emulator.ptx import Instruction, Memory, Vector
from gemmery.errors import EmulationError

if TYPE_CHECKING:
    from gemmery.emulator.simt import Machine

SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared::cluster",
    "local": "local",
    "const": "global",
    "param": "param",
    "param::entry": "param",
}
WINDOWS = {"shared": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAMETER_WINDOW}
# What an access may say that changes no value and no count here: caches are not modelled.
_ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "mmio", "cta", "cluster", "gpu", "sys", "unified")
_CACHES = ("nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt")
_EVICTIONS = tuple(f"L{level}::evict_{when}" for level in (1, 2) for when in ("normal", "unchanged", "first", "last"))
_FETCHES = ("L1::no_allocate", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint")
HINTS = frozenset((*_ORDERS, *_CACHES, *_EVICTIONS, *_FETCHES))
COUNTS = {"v2": 2, "v4": 4, "v8": 8}


def _spelled(instruction: Instruction) -> tuple[str, int, str]:
    """Space ("" for generic), number of elements and type of a load or store; refuses any other word."""
    _, *words, kind = instruction.opcode.split(".")
    space, count = "", 1
    for word in words:
        if word in SPACES:
            space = SPACES[word]
        elif word in COUNTS:
            count = COUNTS[word]
        elif word not in HINTS:
            raise refused(instruction)
    if kind not in NUMPY or kind == "pred":
        raise refused(instruction)
    return space, count, kind


def _load(lowering: Lowering, index: int) -> Step:
    instruction = lowering.kernel.instructions[index]
    space, count, kind = _spelled(instruction)
    target, source = instruction.operands[0], instruction.operands[1]
    if not isinstance(source, Memory):
        raise refused(instruction)
    targets = target.elements if isinstance(target, Vector) else (target,)
    writes = [lowering.write(one, kind, instruction) for one in targets]
    address, dtype = lowering.address(source, instruction), NUMPY[kind]
    width = np.dtype(dtype).itemsize * count

    def step(machine: Machine, mask: Mask) -> None:
        values = machine.load(index, space, address(machine.registers), mask, dtype, count, width)
        for write, value in zip(writes, values, strict=True):
            if write is not None:
                write(machine.registers, mask, value)

    return step


def _store(lowering: Lowering, index: int) -> Step:
    instruction = lowering.kernel.instructions[index]
    space, count, kind = _spelled(instruction)
    target, source = instruction.operands[0], instruction.operands[1]
    if not isinstance(target, Memory) or space == "param":
        raise refused(instruction)
    sources = source.elements if isinstance(source, Vector) else (source,)
    reads = [lowering.read(one, kind, instruction) for one in sources]
    address, dtype = lowering.address(target, instruction), NUMPY[kind]
    width = np.dtype(dtype).itemsize * count

    def step(machine: Machine, mask: Mask) -> None:
        held = machine.registers
        machine.store(index, space, address(held), mask, [read(held) for read in reads], dtype, width)

    return step


def _move(lowering: Lowering, index: int) -> Step:
    """mov, which also takes registers apart and puts them together."""
    instruction = lowering.kernel.instructions[index]
    _, *words = instruction.opcode.split(".")
    kind = words[-1] if words else ""
    if len(words) != 1 or (kind not in NUMPY and kind != "b128"):
        raise refused(instruction)
    target, source = instruction.operands
    if isinstance(target, Vector):
        return _taken_apart(lowering, instruction, kind)
    if isinstance(source, Vector):
        return _put_together(lowering, instruction, kind)
    read, write = lowering.read(source, kind, instruction), lowering.write(target, kind, instruction)

    def step(machine: Machine, mask: Mask) -> None:
        if write is not None:
            write(machine.registers, mask, read(machine.registers))

    return step


def _parts(instruction: Instruction, kind: str, count: int) -> tuple[str, list[Any]]:
    """The type of each part of a packed register, and by how many bits each is shifted."""
    bits = 8 * np.dtype(NUMPY[kind]).itemsize // count
    if bits not in (8, 16, 32):
        raise refused(instruction)
    whole = np.dtype(NUMPY[kind]).type
    return f"b{bits}", [whole(bits * place) for place in range(count)]


def _taken_apart(lowering: Lowering, instruction: Instruction, kind: str) -> Step:
    targets = instruction.operands[0].elements  # type: ignore[union-attr]
    kind = f"b{8 * np.dtype(NUMPY[kind]).itemsize}"
    part, shifts = _parts(instruction, kind, len(targets))
    read = lowering.read(instruction.operands[1], kind, instruction)
    writes = [lowering.write(one, part, instruction) for one in targets]

    def step(machine: Machine, mask: Mask) -> None:
        whole = read(machine.registers)
        for write, shift in zip(writes, shifts, strict=True):
            if write is not None:
                write(machine.registers, mask, (whole >> shift).astype(NUMPY[part]))

    return step


def _put_together(lowering: Lowering, instruction: Instruction, kind: str) -> Step:
    sources = instruction.operands[1].elements  # type: ignore[union-attr]
    kind = f"b{8 * np.dtype(NUMPY[kind]).itemsize}"
    part, shifts = _parts(instruction, kind, len(sources))
    reads = [lowering.read(one, part, instruction) for one in sources]
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
    """cvta and cvta.to: between a space's addresses and generic ones."""
    instruction = lowering.kernel.instructions[index]
    _, *words, kind = instruction.opcode.split(".")
    to = words[0] == "to" if words else False
    space = SPACES.get(words[-1], "") if words else ""
    if kind not in ("u64", "u32") or not space or len(words) != 1 + to:
        raise refused(instruction)
    window = WINDOWS.get(space, 0)
    read = lowering.read(instruction.operands[1], kind, instruction)
    write = lowering.write(instruction.operands[0], kind, instruction)
    away = np.dtype(NUMPY[kind]).type(window & (1 << 64 if kind == "u64" else 1 << 32) - 1)

    def step(machine: Machine, mask: Mask) -> None:
        value = read(machine.registers)
        if window:
            value = value - away if to else value + away
        if write is not None:
            write(machine.registers, mask, value)

    return step


def _is_in_space(lowering: Lowering, index: int) -> Step:
    """isspacep: whether a generic address lies in a space."""
    instruction = lowering.kernel.instructions[index]
    space = SPACES.get(instruction.opcode.partition(".")[2], "")
    if space not in ("global", "shared", "shared::cluster", "local"):
        raise refused(instruction)
    read = lowering.read(instruction.operands[1], "s64", instruction)
    write = lowering.write(instruction.operands[0], "pred", instruction)
    peers = SHARED_WINDOW + (1 << cluster.RANK_AT)  # as mapa gives them, the block's own memory among them
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
    """createpolicy: how caches treat an access is not modelled, so every policy is 0."""
    instruction = lowering.kernel.instructions[index]
    write = lowering.write(instruction.operands[0], "b64", instruction)

    def step(machine: Machine, mask: Mask) -> None:
        if write is not None:
            write(machine.registers, mask, np.uint64(0))

    return step


CALLED = {"vprintf": "printf"}  # what C++ calls a function of the device's runtime


def _call(lowering: Lowering, index: int) -> Step:
    """A function outside of the text, such as printf: an error when it is reached, not before."""
    instruction = lowering.kernel.instructions[index]
    name = instruction.opcode.removeprefix("call ")
    error = EmulationError(
        f"a call of {CALLED.get(name, name)} ({instruction.line}) is not modelled: leave it out where the kernel is "
        "emulated, for example with options=('-DEMULATED',) and #ifndef EMULATED"
    )

    def step(machine: Machine, mask: Mask) -> None:
        raise error

    return step


def _nothing(lowering: Lowering, index: int) -> Step:
    """Instructions that order or hint: the lock step keeps every order already."""
    return lambda machine, mask: None


def _fence(lowering: Lowering, index: int) -> Step:
    """Fences order nothing in lock step; observers are told of those between threads and the units beside them."""
    if not lowering.kernel.instructions[index].opcode.startswith("fence.proxy.async"):
        return _nothing(lowering, index)

    def step(machine: Machine, mask: Mask) -> None:
        for observer in machine.observers:
            observer.fenced(machine, index, mask)

    return step


def _copy(lowering: Lowering, index: int) -> Step:
    """cp.async, its groups and its waits."""
    instruction = lowering.kernel.instructions[index]
    words = instruction.opcode.split(".")[2:]
    if "bulk" in instruction.opcode.split("."):
        return transfers.handler(lowering, index)
    if words[:1] == ["mbarrier"]:
        return mbarrier.copies_arrive(lowering, index)
    if words[:1] == ["commit_group"]:
        return lambda machine, mask: machine.copies.commit(mask, machine.threads)
    if words[:1] == ["wait_all"]:
        return lambda machine, mask: machine.copies.wait_all(machine, mask)
    if words[:1] == ["wait_group"]:
        pending = instruction.operands[0].bits  # type: ignore[union-attr]
        return lambda machine, mask: machine.copies.wait(machine, mask, pending)
    rest = [word for word in words if not word.startswith("L2::")]
    if rest not in (["ca", "shared", "global"], ["cg", "shared", "global"], *_OTHER_SPELLINGS):
        raise refused(instruction)
    return _copied(lowering, instruction, index)


_OTHER_SPELLINGS = (["ca", "shared::cta", "global"], ["cg", "shared::cta", "global"])


def _copied(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    target, source, size, *more = instruction.operands
    if not (isinstance(target, Memory) and isinstance(source, Memory)) or len(more) > 1:
        raise refused(instruction)
    width = size.bits  # type: ignore[union-attr]
    if width not in (4, 8, 16):
        raise refused(instruction)
    to, out_of = lowering.address(target, instruction), lowering.address(source, instruction)
    # The fourth operand is how many bytes are read (the rest is zeros), or a predicate: true reads none.
    kind = getattr(more[0], "type", "") if more else ""
    ignored = more and (kind == "pred" or hasattr(more[0], "register"))
    extra: Read | None = lowering.read(more[0], "pred" if ignored else "u32", instruction) if more else None

    def step(machine: Machine, mask: Mask) -> None:
        held = machine.registers
        taken = None
        if extra is not None:
            taken = np.where(extra(held), 0, width) if ignored else extra(held).astype(np.int64)
        machine.copy(index, to(held), out_of(held), mask, width, taken)

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
    "membar": _nothing,
    "fence": _fence,
    "griddepcontrol": _nothing,
    "nanosleep": _nothing,
}
