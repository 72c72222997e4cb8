"""Basic blocks of a kernel as functions: all instructions for a vector of threads, then for the next vector.

A function is cut at its accesses. Up to an access it computes, and writes the registers that others may read and the
addresses; then block_accesses.py checks these, and the data moves. At an access that does not pass, and at an
instruction without code, the function returns with the number of the instruction, for Python to execute it; it can be
entered again behind each of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from gemmery.banks import WARP
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, element_of, mangle, vector
from gemmery_emulator.kernels.native.block_operations import TYPES, emit, flipped, gathered, lanes, splat
from gemmery_emulator.kernels.native.frames import ACCESS, CONTEXT, EXTENDED, LANES, WORD, FrameFields
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
from gemmery_emulator.op import NUMPY, STORED
from gemmery_emulator.ptx import Address, Immediate, Not, Operand, Register, Special, Symbol
from gemmery_emulator.steps import constant


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
        self._block, self._instructions = block, program.kernel.instructions
        last = block.last - bool(block.way)
        forms = translation.forms
        cuts = [index for index in range(block.first, last) if not isinstance(forms[index], Compute | BlockParameter)]
        params = (("ptr", "ctx"), ("ptr", "mask"), ("i64", "start"))
        with module.function(f"block_{number}", *params, returns="i64") as f:
            self._f, self._fields = f, FrameFields(f, f["ctx"], CONTEXT)
            f._slots.append(f"  %context_registers = getelementptr i8, ptr %ctx, i64 {self._at('registers')}")
            f._slots.append("  %registers = load ptr, ptr %context_registers, align 8")
            entries = [block.first, *(index + 1 for index in cuts)]
            targets = " ".join(f"i64 {entry}, label %from{entry}" for entry in entries)
            f.line(f"switch i64 %start, label %from{block.first} [ {targets} ]")
            bounds = [*cuts, last]
            self._extended = dict[int, str]()  # the registers whose addresses are in memory, and where
            for start, stop in zip(entries, bounds, strict=True):
                if start != block.first:
                    f.line(f"br label %from{start}")
                f._label(f"from{start}")
                form = forms[stop] if stop < last else None
                self._compute(range(start, stop), form, stop == last)
                if stop == last:
                    f.ret(f.index(0))
                elif isinstance(form, WarpExchange):
                    self._exchange(form)
                elif form is None:
                    self._fields.leave(stop + 1)
                else:
                    self._call(stop)
                    if isinstance(form, Move):
                        self._move(form)
                self._forget(range(stop, min(stop + 1, last)))

    def _forget(self, indices: range) -> None:
        """Forget the addresses from registers that instructions write."""
        for index in indices:
            for slot in self._translation.written(index):
                self._extended.pop(slot, None)

    def _at(self, name: str) -> int:
        return WORD * CONTEXT.index(name)

    def _call(self, index: int) -> None:
        """Call the function of an access, which checks and counts it."""
        f, fields = self._f, self._fields
        record = fields.pointer("access") + WORD * len(ACCESS) * self._translation.number[index]
        form = self._translation.forms[index]
        slot, narrow = (self._translation.address_slot(form, size) for size in "84")
        own = "own_addresses" if narrow is None else self._extended[narrow]
        f.store(fields.pointer(own) if slot is None else self.pointer(slot), fields.at("addresses"), 8)
        passed = f.result_of(f.load("ptr", record, 8), "i64", f["ctx"], record, f["mask"])
        with f.if_(passed.differs(0)):
            self._fields.leave(index + 1)

    def _move(self, move: Move) -> None:
        """Move the data of an access that has passed."""
        f, fields, element = self._f, self._fields, TYPES[NUMPY[move.kind]]
        addresses = fields.pointer("addresses")
        memory, bases = fields.pointer(move.space if move.space == "shared" else "memory"), fields.pointer("bases")
        with self._group() as group:
            wide = lanes("i64")
            at = f.load(wide, addresses + group.t * WORD) + self._translation.offset(move)
            if move.space == "shared":
                at = at + f.load(wide, bases + group.t * WORD)
            for number, operand in enumerate(move.elements):
                places = f.emit(lanes("ptr"), f"getelementptr i8, {memory}, {at + number * SIZES[element]}")
                if move.stores:
                    _scatter(f, group.read(operand, move.kind), places, group.mask)
                else:
                    group.write(operand, move.kind, gathered(f, lanes(element), places, group.mask))
            group.finish()

    def _exchange(self, form: WarpExchange) -> None:
        """Let the lanes of each warp exchange what they hold."""
        f = self._f
        with self._group() as group:
            passed = group.pointer("own_addresses") + (group.t & -WARP) * _passed_size(form)
            values = [group.read(*source) for source in form.sources]
            results: Any = form.emit(f, passed, group.t, *values)
            results = results if isinstance(results, tuple) else (results,)
            for target, result in zip(form.targets, results, strict=False):
                group.write(*target, result)
            group.finish()

    def _compute(self, indices: range, form: InstructionForm | None, ends: bool) -> None:
        """Compute up to an access, with what that needs, or up to the end, with whom the branch takes."""
        f, block = self._f, self._block
        guard = self._instructions[block.last - 1].guard if ends and block.way in ("branch", "exit") else None
        self._forget(indices)
        narrow = self._translation.address_slot(form, "4")
        extended = narrow is not None and narrow not in self._extended
        if narrow is not None and extended:
            free = [name for name in EXTENDED if name not in self._extended.values()]
            self._extended[narrow] = free[0] if free else self._extended.pop(next(iter(self._extended)))
        ready = form is None or isinstance(form, CopyGroup) or self._translation.address_slot(form) is not None
        ready = ready or (narrow is not None and not extended)
        if not indices and guard is None and ready:
            return
        with self._group() as group:
            for index in indices:
                self.instruction(group, self._translation.forms[index])
            if narrow is None:
                self._hand_over(group, form)
            elif extended:
                addresses = f.convert("sext", group.of(narrow, "u4"), "i64")
                f.store(addresses, group.pointer(self._extended[narrow]) + group.at(WORD))
            if guard is not None:
                goes = group.read(guard, "pred")
                if self._instructions[block.last - 1].negated:
                    goes = flipped(f, goes)
                f.store(f.convert("zext", goes, "i8"), group.pointer("goes") + group.t)
            group.finish(self._translation.private(indices))

    def instruction(self, group: _Group, form: InstructionForm | None) -> None:
        f = self._f
        if isinstance(form, BlockParameter):
            element = TYPES[NUMPY[form.kind]]
            for number, operand in enumerate(form.elements):
                at = group.pointer("parameters") + (form.offset + number * SIZES[element])
                group.write(operand, form.kind, f.broadcast(f.load(element, at), LANES))
            return
        assert isinstance(form, Compute)
        results: Any = form.emit(f, *(group.number(*source) for source in form.sources))
        results = results if isinstance(results, tuple) else (results,)
        for (target, kind), result in zip(form.targets, results, strict=False):
            group.write(target, kind, result if isinstance(result, Value) else splat(f, result, NUMPY[kind]))

    def _hand_over(self, group: _Group, form: InstructionForm | None) -> None:
        """Store what an access or an exchange takes: addresses, who reads, or what each lane holds."""
        f = self._f
        moves = (form,) if isinstance(form, Move) else form.ends[::-1] if isinstance(form, AsyncCopy) else ()
        moves = () if self._translation.address_slot(form) is not None else moves
        for move, name in zip(moves, ("own_addresses", "sources"), strict=False):
            f.store(group.address(move.place), group.pointer(name) + group.at(WORD))
        if isinstance(form, AsyncCopy):
            reads = f.const(lanes("i8"), 1)  # 0 for nothing, 3 for some bytes
            if form.size is not None:
                size = group.read(*form.size)
                if form.size[1] == "pred":
                    reads = f.convert("zext", flipped(f, size), "i8")
                else:
                    whole = emit(f, "icmp uge", lanes("i1"), size, f.const(size.type, form.ends[0].width))
                    reads = f.select(size.equals(0), f.zero(reads.type), f.select(whole, reads, f.const(reads.type, 3)))
            f.store(reads, group.pointer("reads") + group.t)
        elif isinstance(form, WarpExchange):
            value = group.read(*form.passed)
            value = f.convert("zext", value, "i8") if form.passed[1] == "pred" else value
            f.store(value, group.pointer("own_addresses") + group.at(_passed_size(form)))

    def _group(self) -> _Group:
        return _Group(self._translation, self._f, self)

    def pointer(self, slot: int) -> Value:
        """Load the address of a register's values."""
        return self._f.load("ptr", Value(self._f, "ptr", "%registers") + WORD * slot, 8)


class _Group:
    """The code for a vector of threads, in a loop over all of them, left out where none is active."""

    def __init__(self, translation: Translation, f: Function, function: _Function) -> None:
        self._translation, self._f, self._function = translation, f, function
        self._values: dict[int, dict[str, Value]] = {}  # by slot and NumPy type
        self._written: list[int] = []
        self._ahead = list[str]()  # what comes before the loop
        self._pointers: dict[int | str, Value] = {}
        self._offsets: dict[int, Value] = {}

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
        if size not in self._offsets:
            self._offsets[size] = self.t * size
        return self._offsets[size]

    def of(self, slot: int, dtype: str) -> Value:
        """Return the values of a register as a NumPy type."""
        f, stored = self._f, self._translation.stored[slot]
        known = self._values.setdefault(slot, {})
        if not known and slot in self._translation.uniform:  # cheaper computed again than loaded
            written = [*self._written]
            self._function.instruction(self, self._translation.forms[self._translation.uniform[slot]])
            self._written, known = written, self._values[slot]
        if not known:
            stored_lanes = f.load(lanes(memory_type(stored)), self.pointer(slot) + self.at(SIZES[memory_type(stored)]))
            known[stored] = (
                emit(f, "icmp ne", lanes("i1"), stored_lanes, f.zero(stored_lanes.type))
                if stored == "?"
                else stored_lanes
            )
        if dtype not in known:
            known[dtype] = viewed(f, known[stored], stored, dtype)
        return known[dtype]

    def number(self, operand: Operand, kind: str) -> Any:
        """Return a constant as NumPy's number, and the values of any other operand."""
        if isinstance(operand, Immediate):
            return constant(operand.bits, operand.type, NUMPY[kind])
        return self.read(operand, kind)

    def read(self, operand: Operand, kind: str) -> Value:
        """Return the values of an operand as a PTX type."""
        f, dtype, program = self._f, NUMPY[kind], self._translation.program
        match operand:
            case Immediate(bits, type_):
                return splat(f, constant(bits, type_, dtype), dtype)
            case Register(name):
                return self.of(program.slots[name], dtype)
            case Not(register):
                return flipped(f, self.read(register, "pred"))
            case Special(name):
                return self.of(program.provided[name], dtype)
            case Symbol(name, offset):
                if name in self._translation.parameters:
                    return f.const(lanes(TYPES[dtype]), self._translation.parameters[name] + offset)
                return self.of(program.provided[name], dtype) + offset
        raise AssertionError(operand)

    def address(self, place: Address) -> Value:
        """Return the addresses in brackets."""
        f, base = self._f, place.base
        if isinstance(base, Register) and STORED[base.type] == "u4":
            narrow = self.of(self._translation.program.slots[base.name], "u4")
            return f.convert("sext", narrow + place.offset, "i64")
        return (
            self.read(base, "s64") + place.offset
            if isinstance(base, Register)
            else (self.read(base, "u64") + place.offset)
        )

    def write(self, operand: Operand, kind: str, value: Value) -> None:
        """Write values of a PTX type to a register."""
        assert isinstance(operand, Register)
        if operand.name == "_":
            return
        slot, dtype = self._translation.program.slots[operand.name], NUMPY[kind]
        stored = self._translation.stored[slot]
        known = {stored: viewed(self._f, value, dtype, stored)}
        if stored != dtype and stored[1:] == dtype[1:]:
            known[dtype] = value
        self._values[slot] = known
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
            value = self._values[slot][stored]
            value = f.convert("zext", value, "i8") if stored == "?" else value
            stored_lanes.append((place, value, slot in self._translation.rows))
        for place, value, alone in stored_lanes:
            f.store(value if alone else f.select(self.mask, value, f.load(value.type, place)), place)


def viewed(f: Function, value: Value, stored: str, dtype: str) -> Value:
    """Return values that are kept as one NumPy type as another: the same bits, truncated or extended."""
    if stored == dtype or TYPES[stored] == TYPES[dtype]:
        return value
    if stored[1] == dtype[1]:
        return f.bitcast(value, lanes(TYPES[dtype]))
    if stored[0] == "f":
        value = f.bitcast(value, lanes(f"i{8 * int(stored[1])}"))
    narrower = int(dtype[1]) < int(stored[1])
    how = "trunc" if narrower else "sext" if stored[0] == "i" else "zext"
    value = f.convert(how, value, f"i{8 * int(dtype[1])}")
    return f.bitcast(value, lanes(TYPES[dtype]))


def _passed_size(form: WarpExchange) -> int:
    """Return the bytes of what a lane holds."""
    return SIZES[memory_type(NUMPY[form.passed[1]])]
