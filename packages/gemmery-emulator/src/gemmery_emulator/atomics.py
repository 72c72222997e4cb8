"""atom and red: threads that update one address take turns, in the order of their numbers.

PTX ISA 9.0, "Parallel Synchronization and Communication Instructions": atom, red. A device does not fix the order,
so a sum of floats may differ in its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from gemmery.dtypes import Array
from gemmery_emulator import reach
from gemmery_emulator.machine import Machine
from gemmery_emulator.op import LENGTHS, NUMPY, POLICY, SCOPES, SPACES, Kinds, Mask, sort_by_kind
from gemmery_emulator.ops import floating, integer, logic
from gemmery_emulator.ptx import Instruction, Opcode
from gemmery_emulator.steps import Handler, Lowering, Step, Write, drop, refused

Change = Callable[..., Any]  # old values and operands -> new values

_BITS = ("b32", "b64")
HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_CHANGED: Kinds = {
    "type": (*(f"{kind}{bits}" for kind in "bus" for bits in (32, 64)), "b16", "f32", "f64", *HALVES),
    "operation": ("add", "min", "max", "and", "or", "xor", "inc", "dec"),
    "order": ("relaxed", "release"),
    "scope": SCOPES,
    "space": ("global", "shared", "shared::cta", "shared::cluster"),
    "noftz": ("noftz",),
    "length": LENGTHS,
    "policy": (POLICY,),
}
_MODIFIERS: Mapping[str, Kinds] = {
    "red": _CHANGED,
    "atom": {
        **_CHANGED,
        "operation": (*_CHANGED["operation"], "exch", "cas"),
        "order": ("relaxed", "acquire", "release", "acq_rel"),
    },
}


# The function of each operation and type, mostly that of the instruction that computes it; half precision keeps
# subnormals.
CHANGES: dict[tuple[str, str], Change] = {
    **{("add", kind): integer.TABLE[f"add.{kind}"].meaning for kind in ("u32", "s32", "u64")},
    **{(name, kind): integer.TABLE[f"{name}.{kind}"].meaning for name in ("min", "max") for kind in integer.WORDS},
    **{(name, kind): logic.TABLE[f"{name}.{kind}"].meaning for name in ("and", "or", "xor") for kind in _BITS},
    **{("exch", kind): lambda old, new: new for kind in _BITS},
    **{("cas", kind): lambda old, expected, new: np.where(old == expected, new, old) for kind in (*_BITS, "b16")},
    ("inc", "u32"): lambda old, last: np.where(old >= last, 0, old + 1).astype(np.uint32),
    ("dec", "u32"): lambda old, last: np.where((old == 0) | (old > last), last, old - 1),
    **{
        ("add", kind): floating.TABLE[f"add.{'rn.' * (kind[0] == 'b')}{kind}"].meaning
        for kind in ("f32", "f64", *HALVES)
    },
    **{(name, kind): floating.TABLE[f"{name}.{kind}"].meaning for name in ("min", "max") for kind in HALVES},
}


def _read(opcode: Opcode) -> dict[str, str] | None:
    """Read the opcode of atom or red, by kind; returns None if ptxas refuses it.

    >>> from gemmery_emulator.instructions import opcode
    >>> _read(opcode("red.global.add.v2.f32"))
    {'space': 'global', 'operation': 'add', 'length': 'v2', 'type': 'f32'}
    >>> _read(opcode("red.exch.b32")) is None
    True
    """
    words = sort_by_kind((*opcode.modifiers, *opcode.types), _MODIFIERS[opcode.name])
    if words is None or "operation" not in words or "type" not in words:
        return None
    operation, kind, outside = words["operation"], words["type"], words.get("space", "global") == "global"
    halves = kind in HALVES
    most = {"f32": 4, "f16x2": 4, "bf16x2": 4, "f16": 8, "bf16": 8}.get(kind, 0)
    length = LENGTHS.get(words.get("length", ""), 1)
    if halves != ("noftz" in words) or (not outside and "policy" in words):
        return None
    if length == 1:
        return None if halves and operation != "add" else words
    return words if outside and length <= most and (halves or operation == "add") else None


def _step(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """The step of an atom or red."""
    words = _read(instruction.opcode)
    change = CHANGES.get((words["operation"], words["type"])) if words else None
    if words is None or change is None:
        raise refused(instruction)
    name, kind, operation = instruction.opcode.name, words["type"], words["operation"]
    space = SPACES.get(words.get("space", ""), "")
    count = LENGTHS.get(words.get("length", ""), 1)
    operands = list(instruction.operands[: len(instruction.operands) - ("policy" in words)])
    target = operands.pop(0) if name == "atom" else None
    address = lowering.address(operands[0], instruction)
    reads = [[lowering.read(element, kind, instruction) for element in lowering.flat((part,))] for part in operands[1:]]
    if any(len(part) != count for part in reads) or len(reads) != (2 if operation == "cas" else 1):
        raise refused(instruction, f"{len(operands)} operands:")
    writes: list[Write] = [drop] * count
    if target is not None:
        writes = [lowering.write(element, kind, instruction) for element in lowering.flat((target,))]
    size = np.dtype(NUMPY[kind]).itemsize
    running: Callable[..., Array] | None = None  # the first value of an address and its operands -> all values in turn
    if isinstance(change, np.ufunc):
        running = partial(change.accumulate, dtype=NUMPY[kind])  # 32 bits stay 32
    elif operation == "exch":
        running = np.asarray

    def step(machine: Machine, mask: Mask) -> None:
        registers = machine.registers
        values = [[machine.spread(read(registers)) for read in part] for part in reads]
        every = address(registers)
        for where, addresses, there in reach.placed(machine, space, every, mask):
            checked, some, _ = reach.checked(machine, index, where, name, addresses, there, size * count)
            if some is not None and not np.count_nonzero(some):
                continue
            memory = reach.memory_of(machine, where)
            places, view = (machine.spread(checked) + memory.base) // size, memory.view(NUMPY[kind], 1)
            for place in range(count):
                old = changed(view, places + place, some, change, running, [part[place] for part in values])
                writes[place](registers, some, old)

    return step


def changed(
    view: Array,
    index: Array,
    mask: Mask,
    change: Change,
    running: Callable[[Array], Array] | None,
    operands: list[Array],
) -> Array:
    """Update the element of each thread in turn; return the old values."""
    before = np.zeros(len(index), view.dtype)
    threads = np.arange(len(index)) if mask is None else mask.nonzero()[0]
    places = index[threads]
    order = places.argsort(kind="stable")
    ordered = places[order]
    last = (ordered[1:] != ordered[:-1]).nonzero()[0]  # of each place but the greatest, in this order
    first = np.concatenate([[0], last + 1])
    lengths = np.append(first[1:], len(order)) - first
    if running is not None and len(first) < lengths.max(initial=0):  # few addresses: all turns of each at once
        for some in np.split(threads[order], first[1:]):
            place = index[some[0]]
            values = running(np.concatenate([view[place : place + 1], operands[0][some]]))
            before[some], view[place] = values[:-1], values[-1]
        return before
    turn = np.empty(len(order), np.int64)
    turn[order] = np.arange(len(order)) - np.repeat(first, lengths)
    for number in range(int(lengths.max(initial=0))):
        now = threads[turn == number]
        old = view[index[now]]
        before[now] = old
        view[index[now]] = change(old, *(part[now] for part in operands))
    return before


TABLE = {"atom": Handler(step=_step), "red": Handler(step=_step)}
