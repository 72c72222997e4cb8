"""Basic blocks of a kernel as functions: all instructions for a vector of threads, then for the next vector.

A function is cut at its accesses. Up to an access it computes, and writes the registers that others may read and the
addresses; then block_accesses.py checks these, and the data moves. At an access that does not pass, and at an
instruction without code, the function returns with the number of the instruction, for Python to execute it; it can be
entered again behind each of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from gemmery.banks import WARP
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, element_of, mangle, vector
from gemmery_emulator.kernels.native.block_operations import TYPES, TracedLanes, gathered, lanes, value_of
from gemmery_emulator.kernels.native.frames import ACCESS, ADDRESSES, CONTEXT, ENTRY, IN_ROWS, LANES, WORD, FrameFields
from gemmery_emulator.kernels.native.translation import (
    AsyncCopy,
    BlockParameter,
    Compute,
    CopyGroup,
    InstructionForm,
    Move,
    Translation,
    WarpExchange,
)
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ptx import Operand, Register


def module(translation: Translation, blocks: Iterable[int]) -> Module:
    """Return the code of some blocks, as functions with their numbers."""
    blocks_module = Module(translation.target)
    for number in blocks:
        _Function(translation, blocks_module, number)
    return blocks_module


def memory_type(stored: str) -> str:
    """Return the type in which a register is kept in memory: a flag takes a byte."""
    return "i8" if stored == "?" else TYPES[stored]


def _scatter(f: Function, new: Value, places: Value, mask: Value) -> None:
    """Store a value at each address of a vector whose mask bit is set."""
    name = f"llvm.masked.scatter.{mangle(new.type)}.v{LANES}p0"
    f.module.declare(f"declare void @{name}({new.type}, {places.type}, i32, {mask.type})")
    f.line(f"call void @{name}({new}, {places}, i32 {SIZES[element_of(new.type)]}, {mask})")


class _Function:
    """The function of a block."""

    def __init__(self, translation: Translation, module: Module, number: int) -> None:
        self._translation = translation
        program = translation.program
        block = program.blocks[number]
        self._block = block
        last = block.last - bool(block.way)
        forms = translation.forms
        cuts = [index for index in range(block.first, last) if not isinstance(forms[index], Compute | BlockParameter)]
        params = (("ptr", "ctx"), ("ptr", "mask"), ("i64", "start"))
        with module.function(f"block_{number}", *params, returns="i64") as f:
            self._f, self._fields = f, FrameFields(f, f["ctx"], CONTEXT)
            f._slots.append(f"  %context_registers = getelementptr i8, ptr %ctx, i64 {self._at('registers')}")
            f._slots.append("  %registers = load ptr, ptr %context_registers, align 8")
            self._passed = f.var(f.index(0))  # whether the access before has passed, and its data are not moved yet
            entries = [block.first, *(index + 1 for index in cuts)]
            targets = " ".join(f"i64 {entry}, label %from{entry}" for entry in entries)
            f.line(f"switch i64 %start, label %from{block.first} [ {targets} ]")
            bounds = [*cuts, last]
            self._at_hand = dict[Operand, str]()  # the bases of addresses that are in memory, and where
            for start, stop in zip(entries, bounds, strict=True):
                if start != block.first:
                    f.line(f"br label %from{start}")
                f._label(f"from{start}")
                form, before = forms[stop] if stop < last else None, forms[start - 1] if start > block.first else None
                moves = before if isinstance(before, Move) else None
                self._compute(range(start, stop), form, moves, stop == last)
                if stop == last:
                    f.ret(f.index(0))
                elif isinstance(form, WarpExchange):
                    self._exchange(form)
                elif form is None:
                    self._fields.leave(stop + 1)
                else:
                    self._call(stop)

    def _forget(self, indices: range) -> None:
        """Forget the addresses from registers that instructions write."""
        written = {slot for index in indices for slot in self._translation.written(index)}
        for base in [*self._at_hand]:
            if isinstance(base, Register) and self._translation.program.slots[base.name] in written:
                del self._at_hand[base]

    def _in_place(self, form: InstructionForm | None) -> int | None:
        """Return the register that has the addresses of an access, but for its offset, if one does."""
        base = form.place.base if isinstance(form, Move) else None
        slot = self._translation.program.slots[base.name] if isinstance(base, Register) else None
        return slot if slot is not None and self._translation.stored[slot][1:] == "8" else None

    def _at(self, name: str) -> int:
        return WORD * CONTEXT.index(name)

    def _call(self, index: int) -> None:
        """Call the function of an access, which checks and counts it."""
        f, fields = self._f, self._fields
        record = fields.pointer("access") + WORD * len(ACCESS) * self._translation.number[index]
        form = self._translation.forms[index]
        slot = self._in_place(form)
        own = self._at_hand[form.place.base] if isinstance(form, Move) and slot is None else ADDRESSES[0]
        f.store(fields.pointer(own) if slot is None else self.pointer(slot), fields.at("addresses"), 8)
        passed = f.result_of(f.load("ptr", record, 8), "i64", f["ctx"], record, f["mask"])
        with f.if_(passed.differs(0)):
            self._fields.leave(index + 1)
        self._passed.value = 1

    def _move(self, group: _Group, index: int, move: Move) -> None:
        """Move the data of the access before, unless Python has executed it."""
        f, fields, element = self._f, self._fields, TYPES[NUMPY[move.kind]]
        type_, stored = lanes(element), [value_of(f, read(group.registers), NUMPY[move.kind]) for read in move.reads]
        kinds = {slot: self._translation.stored[slot] for slot in self._translation.written(index)}
        loaded = {slot: f.var(f.zero(lanes(TYPES[kind]))) for slot, kind in kinds.items()}
        base, names = group.pointer(move.space.replace("global", "memory")), ("addresses", "bases", "found", "entries")
        addresses, bases, entry_of_warp, entries = map(group.pointer, names)
        values = [f.var(f.zero(type_)) for _ in move.writes]
        with f.if_(self._passed.value.differs(0)):
            t, memory = group.t, base + move.offset
            if move.space == "shared":
                memory = memory + fields.word(bases, t & -WARP)
            first, in_rows = fields.word(addresses, t), f.index(0)
            if len(stored or values) == 1:
                in_rows = fields.word(entries, fields.word(entry_of_warp, t >> 5) * ENTRY + IN_ROWS)
            with f.if_(fields.both(in_rows.differs(0), first.differs(fields.word(addresses, t + 1)))):
                for value in values:
                    value.value = f.load(type_, memory + first)
                for new in stored:
                    f.store(new, memory + first)
            with f.else_():
                at = f.load(lanes("i64"), addresses + t * WORD)
                places = [
                    f.emit(lanes("ptr"), f"getelementptr i8, {memory}, {at + number * SIZES[element]}")
                    for number in range(len(stored or values))
                ]
                for new, place in zip(stored, places, strict=False):
                    _scatter(f, new, place, group.mask)
                for value, place in zip(values, places, strict=False):
                    with f.if_(in_rows.differs(0)):
                        value.value = f.broadcast(f.load(element, memory + first), LANES)
                    with f.else_():
                        value.value = gathered(f, type_, place, group.mask)
            for write, value in zip(move.writes, values, strict=True):
                write(group.registers, None, TracedLanes(f, value.value, np.dtype(NUMPY[move.kind])))
            for slot, var in loaded.items():
                var.value = group.of(slot)
                del group._values[slot]
        with f.else_():
            for slot, var in loaded.items():
                var.value = group.of(slot)
        for slot, var in loaded.items():
            group[slot] = TracedLanes(f, var.value, np.dtype(kinds[slot]))

    def _exchange(self, form: WarpExchange) -> None:
        """Let the lanes of each warp exchange what they hold."""
        f = self._f
        with self._group() as group:
            passed = group.pointer(ADDRESSES[0]) + (group.t & -WARP) * _passed_size(form)
            results = form.emit(f, passed, group.t, *(read(group.registers) for read in form.sources))
            for write, result in zip(form.targets, results, strict=False):
                write(group.registers, None, result)
            group.finish()

    def _compute(self, indices: range, form: InstructionForm | None, moves: Move | None, ends: bool) -> None:
        """Compute up to an access, with what that needs, or up to the end, with whom the branch takes; at first it may
        be that the access before still `moves` its data.
        """
        f, block = self._f, self._block
        guard = block.guard if ends and block.way in ("branch", "exit") else None
        self._forget(range(max(indices.start - 1, block.first), indices.stop))
        ready = form is None or isinstance(form, CopyGroup) or self._in_place(form) is not None
        ready = ready or (isinstance(form, Move) and form.place.base in self._at_hand)
        if isinstance(form, Move) and not ready:
            free = [name for name in ADDRESSES[1:] if name not in self._at_hand.values()]
            self._at_hand[form.place.base] = free[0] if free else self._at_hand.pop(next(iter(self._at_hand)))
        if not indices and guard is None and moves is None and ready:
            return
        with self._group() as group:
            if moves is not None:
                self._move(group, indices.start - 1, moves)
            for index in indices:
                self.instruction(group, self._translation.forms[index])
            if not ready:
                self._hand_over(group, form)
            if guard is not None:
                goes = value_of(f, guard(group.registers), "?")
                f.store(f.convert("zext", goes, "i8"), group.pointer("goes") + group.t)
            group.finish(self._translation.private(range(indices.start - (moves is not None), indices.stop)))

    def instruction(self, group: _Group, form: InstructionForm | None) -> None:
        f = self._f
        if isinstance(form, BlockParameter):
            element, dtype = TYPES[NUMPY[form.kind]], np.dtype(NUMPY[form.kind])
            for number, write in enumerate(form.writes):
                at = group.pointer("parameters") + (form.offset + number * SIZES[element])
                write(group.registers, None, TracedLanes(f, f.broadcast(f.load(element, at), LANES), dtype))
            return
        assert isinstance(form, Compute)
        form.step(group, None)

    def _hand_over(self, group: _Group, form: InstructionForm | None) -> None:
        """Store what an access or an exchange takes: addresses, who reads, or what each lane holds."""
        f = self._f
        moves = (form,) if isinstance(form, Move) else form.ends[::-1] if isinstance(form, AsyncCopy) else ()
        own = self._at_hand[form.place.base] if isinstance(form, Move) else ADDRESSES[0]
        for move, name in zip(moves, (own, "sources"), strict=False):
            f.store(value_of(f, move.address(group.registers), "i8"), group.pointer(name) + group.at(WORD))
        if isinstance(form, AsyncCopy):
            reads: Any = np.uint8(1)  # 0 for nothing, 3 for some bytes
            if form.size is not None:
                size = form.size(group.registers)
                some = np.where(size >= form.ends[0].width, np.uint8(1), np.uint8(3))
                reads = np.where(size, np.uint8(0), reads) if form.skips else np.where(size == 0, np.uint8(0), some)
            f.store(value_of(f, reads, "u1"), group.pointer("reads") + group.t)
        elif isinstance(form, WarpExchange):
            value = value_of(f, form.passed(group.registers), NUMPY[form.kind])
            value = f.convert("zext", value, "i8") if form.kind == "pred" else value
            f.store(value, group.pointer(ADDRESSES[0]) + group.at(_passed_size(form)))

    def _group(self) -> _Group:
        return _Group(self._translation, self._f, self)

    def pointer(self, slot: int) -> Value:
        """Load the address of a register's values."""
        return self._f.load("ptr", Value(self._f, "ptr", "%registers") + WORD * slot, 8)


class _Group:
    """The code for a vector of threads, in a loop over all of them, left out where none is active."""

    def __init__(self, translation: Translation, f: Function, function: _Function) -> None:
        self._translation, self._f, self._function = translation, f, function
        self.registers: Any = self  # for steps
        self._values: dict[int, Value] = {}  # by slot
        self._written: list[int] = []
        self._ahead = list[str]()  # what comes before the loop
        self._pointers: dict[int | str, Value] = {}

    def __enter__(self) -> _Group:
        f = self._f
        threads, self._start = self._function._fields.get("threads"), len(f._lines)
        self._loop = f.loop(0, threads, LANES)
        self.t = self._loop.__enter__()
        flags = f.load(vector(LANES, "i8"), f["mask"] + self.t)
        self.mask = f.emit(vector(LANES, "i1"), f"icmp ne {flags}, zeroinitializer")
        self._some = f.if_(f.bitcast(self.mask, f"i{LANES}").differs(0))
        self._some.__enter__()
        return self

    def __exit__(self, *rest: Any) -> None:
        self._some.__exit__(None, None, None)
        self._loop.__exit__(None, None, None)
        self._f._lines[self._start : self._start] = self._ahead

    def pointer(self, of: int | str) -> Value:
        """Return the address of a register's values, or one of the launch, loaded once for all threads."""
        if of not in self._pointers:
            self._f._lines, lines = self._ahead, self._f._lines
            load = self._function._fields.pointer if isinstance(of, str) else self._function.pointer
            self._pointers[of] = load(of)  # type: ignore[arg-type]
            self._f._lines = lines
        return self._pointers[of]

    def at(self, size: int) -> Value:
        """Return the offset of the threads' values of so many bytes."""
        return self.t * size

    def of(self, slot: int) -> Value:
        """Return the values of a register."""
        f, stored = self._f, self._translation.stored[slot]
        if slot not in self._values and slot in self._translation.uniform:  # cheaper computed again than loaded
            written = [*self._written]
            self._function.instruction(self, self._translation.forms[self._translation.uniform[slot]])
            self._written = written
        if slot not in self._values:
            values = f.load(lanes(memory_type(stored)), self.pointer(slot) + self.at(SIZES[memory_type(stored)]))
            self._values[slot] = values.differs(0) if stored == "?" else values
        return self._values[slot]

    def __getitem__(self, slot: int) -> TracedLanes:
        return TracedLanes(self._f, self.of(slot), np.dtype(self._translation.stored[slot]))

    def __setitem__(self, slot: int, values: Any) -> None:
        self._values[slot] = value_of(self._f, values, self._translation.stored[slot])
        if slot not in self._written:
            self._written.append(slot)

    def finish(self, private: Container[int] = ()) -> None:
        """Keep the values of the active threads, but for registers that nobody else reads.

        Where only this block has a register, nobody reads what the other threads have in it.
        """
        f, stored_lanes = self._f, []
        for slot in self._written:
            if slot in private:
                continue
            stored = self._translation.stored[slot]
            place = self.pointer(slot) + self.at(SIZES[memory_type(stored)])
            value = self._values[slot]
            value = f.convert("zext", value, "i8") if stored == "?" else value
            stored_lanes.append((place, value, slot in self._translation.rows))
        for place, value, alone in stored_lanes:
            f.store(value if alone else f.select(self.mask, value, f.load(value.type, place)), place)


def _passed_size(form: WarpExchange) -> int:
    """Return the bytes of what a lane holds."""
    return SIZES[memory_type(NUMPY[form.kind])]
