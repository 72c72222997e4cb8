"""Inline device functions into their callers; parameters and results become registers.

A function that may call itself, also by others, stands once behind the kernel. Before each call of it the registers of
a function around it that it may reach are saved, after it they are restored; a register tells where it returns to.

NVIDIA, Parallel Thread Execution ISA 9.0, "Parameter State Space" and "Control Flow Instructions: call".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator import device_launch
from gemmery_emulator.instructions import opcode
from gemmery_emulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Label,
    Opcode,
    Operand,
    Register,
    Symbol,
    Variable,
    Vector,
    names_of,
)
from gemmery_emulator.ptx.body import NAME, SWITCH, Body, case, reachable, signature
from gemmery_emulator.ptx.recursion import Recursion
from gemmery_emulator.ptx.scopes import SINK, SIZES

DEEPEST = 64  # nested calls
FRAME = Register("%frame", "u64")  # bytes of the stack below the present call
LONGEST = 1 << 18  # instructions of a kernel after inlining
PASSED = ("vprintf", "malloc", "free", *device_launch.CALLS)  # functions outside the text that get their parameters
WAY_OUT = "mark the function __forceinline__"


@dataclass(frozen=True)
class DeviceFunction:
    """A .func: its body, and the registers or .param variables that hold its results and parameters."""

    name: str
    body: Body
    results: tuple[Operand, ...]
    parameters: tuple[Operand, ...]

    @property
    def signature(self) -> str:
        """The sizes of its results and parameters."""
        return signature(*(map(self._size, group) for group in (self.results, self.parameters)))

    def _size(self, operand: Operand) -> int:
        if isinstance(operand, Symbol):
            return self.body.scope.memory[operand.name].size
        return SIZES.get(operand.type, 0) if isinstance(operand, Register) else 0


class Functions(NamedTuple):
    """The functions of a module."""

    defined: Mapping[str, DeviceFunction]
    pointed: Mapping[str, int]  # the addresses of those whose address is used

    def called(self, instruction: Instruction) -> list[str]:
        """Return the functions that an instruction may call, without those that the text does not define."""
        if instruction.opcode.name == NAME:
            known = {name: self.defined[name].signature for name in self.pointed if name in self.defined}
            return reachable(instruction.opcode, known)
        return [name for name in (_callee(instruction),) if name in self.defined]


def expand(body: Body, own: Collection[str], functions: Functions) -> None:
    """Inline all calls of a kernel's body, recursively; `own` are the kernel's parameters.

    Calls of functions that the text does not define remain, as an instruction "call vprintf". Raises EmulationError
    for parameters that are read in other parts than they were written in.
    """
    if not any(instruction.opcode.family == "call" for instruction in body.instructions):
        return
    reached: dict[str, DeviceFunction] = {}
    _collect(body, functions, reached)
    recursion = Recursion({name: function.body for name, function in reached.items()}, functions.called)
    _reach(body, functions, (), dict.fromkeys(recursion.names, 0))
    for name in recursion.names:
        _reach(reached[name].body, functions, (name,), dict.fromkeys(recursion.names, 0))
    bodies = [body, *(function.body for function in reached.values())]
    slots: dict[str, dict[int, int]] = {
        name: {}
        for callee in bodies
        for name, variable in callee.scope.memory.items()
        if variable.space == "param" and (callee is not body or name not in own)
    }
    for callee in bodies:
        for instruction in callee.instructions:
            _find_slots(instruction, slots)
    expansion = _Expansion(functions, slots, body.scope.types, recursion)
    expansion.put(body.instructions, body.labels, "", None)
    expansion.put_recursive(body.instructions[-1])
    body.instructions, body.labels = expansion.instructions, expansion.labels
    for callee in bodies[1:]:
        body.scope.types.update(callee.scope.types)
        body.scope.memory.update(
            {
                name: variable
                for name, variable in callee.scope.memory.items()
                if variable.space != "param" and name not in recursion.local
            }
        )
        body.scope.used.update(callee.scope.used)
    if recursion.size:
        body.scope.memory[_STACK] = Variable(_STACK, "local", 0, recursion.size * (recursion.most + 1), 16)


def _collect(body: Body, functions: Functions, reached: dict[str, DeviceFunction]) -> None:
    """Collect all functions reached from a body."""
    bodies = [body]
    while bodies:
        for instruction in bodies.pop().instructions:
            for name in functions.called(instruction):
                if name not in reached:
                    reached[name] = functions.defined[name]
                    bodies.append(reached[name].body)


def _reach(body: Body, functions: Functions, chain: tuple[str, ...], sizes: dict[str, int]) -> int:
    """The number of instructions of a body after inlining; `sizes` has those of functions that are known."""
    if len(chain) > DEEPEST:
        raise EmulationError(f"calls are nested more than {DEEPEST} deep, down to {chain[-1]}: use a loop")
    size = len(body.instructions)
    for instruction, name in [(each, name) for each in body.instructions for name in functions.called(each)]:
        if name not in sizes:
            sizes[name] = _reach(functions.defined[name].body, functions, (*chain, name), sizes)
        size += sizes[name]
        if size > LONGEST:
            raise EmulationError(
                f"{_where(instruction)}: with the functions that it calls, the kernel has more than {LONGEST:,} "
                "instructions: every call copies its function; use a loop of calls"
            )
    return size


def _find_slots(instruction: Instruction, slots: dict[str, dict[int, int]]) -> None:
    """Record the parts of parameters that an instruction reads or writes: variable -> offset -> bytes."""
    for operand in instruction.operands:
        if isinstance(operand, Symbol) and operand.name in slots:
            raise EmulationError(f"{_where(instruction)}: taking the address of a parameter is not modeled; {WAY_OUT}")
        if not isinstance(operand, Address) or not isinstance(operand.base, Symbol) or operand.base.name not in slots:
            continue
        known, width = slots[operand.base.name], _width(instruction)
        for i in range(len(_values(instruction))):
            first = operand.base.offset + i * width
            if any(at != first and at < first + width and first < at + known[at] for at in known):
                raise EmulationError(
                    f"{_where(instruction)}: accesses to overlapping parts of a parameter are not modeled; {WAY_OUT}"
                )
            known[first] = max(width, known.get(first, 0))  # a char is passed as an int, which is wider


def _width(instruction: Instruction) -> int:
    width = SIZES.get(instruction.opcode.type)
    if width is None or len(instruction.operands) < 2 or instruction.opcode.name not in ("ld", "st"):
        raise EmulationError(f"{_where(instruction)}: parameters are read by ld and written by st, with a type")
    return width


def _values(instruction: Instruction) -> tuple[Operand, ...]:
    """The registers of an ld.param or st.param."""
    value = instruction.operands[0 if instruction.opcode.name == "ld" else 1]
    return value.elements if isinstance(value, Vector) else (value,)


_BITS = {"pred": 1} | {name: 8 * size for name, size in SIZES.items()}


def _callee(instruction: Instruction) -> str:
    """The function that an instruction calls; "" if it is no call."""
    return instruction.opcode.modifiers[0] if instruction.opcode.name == "call" else ""


def _where(instruction: Instruction) -> str:
    return f"PTX line {instruction.ptx_line}: {instruction.text}"


class _Expansion:
    """The instructions of a kernel during inlining."""

    def __init__(
        self,
        functions: Functions,
        slots: dict[str, dict[int, int]],
        registers: dict[str, str],
        recursion: Recursion,
    ) -> None:
        self.functions, self.slots, self.registers, self.recursion = functions, slots, registers, recursion
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.calls = 0
        self.around = ""  # the function around the instruction that may call itself
        self.back: dict[str, list[Label]] = {name: [] for name in recursion.names}  # where each returns to

    def put(self, instructions: list[Instruction], labels: Mapping[str, int], suffix: str, end: str | None) -> None:
        """Append a body; its labels get a suffix, and its returns branch to the label `end`, unless it is None."""
        begins, local = [], self.recursion.local
        last = instructions[-1] if instructions else None
        for instruction in instructions:
            begins.append(len(self.instructions))
            name = _callee(instruction)
            if instruction.opcode.name == NAME:
                self._call_through(instruction)
            elif name in self.functions.defined:
                self._call(instruction, self.functions.defined[name])
            elif name:
                # A failed assert() ends the launch.
                what = opcode("trap") if name == "__assertfail" else instruction.opcode
                operands = self._passed(instruction) if name in PASSED else ()
                self.instructions.append(replace(instruction, opcode=what, operands=operands))
            elif end is not None and instruction.opcode.name == "ret":
                if instruction is last and instruction.guard is None:
                    continue
                self.instructions.append(replace(instruction, opcode=opcode("bra"), operands=(Label(end),)))
            elif (memory := self._slot_memory(instruction)) is not None:
                # Replace an ld.param or st.param by moves, one for each value.
                width = _width(instruction)
                sign = "s" if instruction.opcode.type.startswith("s") else "u"
                for i, value in enumerate(_values(instruction)):
                    slot = self._slot(memory.name, memory.offset + i * width)
                    if instruction.opcode.name == "st":
                        self._move(instruction, slot, value, 8 * width, "u")
                    elif isinstance(value, Register) and value.type:
                        self._move(instruction, value, slot, 8 * width, sign)
            elif any(isinstance(operand, Symbol) and operand.name in local for operand in instruction.operands):
                self._frame_address(instruction)
            elif suffix and instruction.opcode.name in ("bra", "brx"):
                moved = tuple(_renamed(operand, suffix) for operand in instruction.operands)
                self.instructions.append(replace(instruction, operands=moved))
            else:
                self.instructions.append(instruction)
        begins.append(len(self.instructions))
        self.labels |= {name + suffix: begins[index] for name, index in labels.items()}

    def _call(self, instruction: Instruction, function: DeviceFunction) -> None:
        self.calls += 1
        suffix = f"@{self.calls}"
        end = f"{function.name}{suffix}"
        results, passed, *_ = instruction.operands
        assert isinstance(results, Vector)
        assert isinstance(passed, Vector)
        if len(passed.elements) != len(function.parameters) or len(results.elements) != len(function.results):
            raise EmulationError(
                f"{_where(instruction)}: {function.name} is called with other parameters: pass as many as declared"
            )
        plain = self._unguarded(instruction, end)
        recursive = function.name in self.recursion.names
        saved = self._save(plain, function) if recursive else None
        for formal, actual in zip(function.parameters, passed.elements, strict=True):
            self._pass(plain, formal, actual)
        if saved is not None:
            self._leave(plain, function, saved, f"return{suffix}")
        else:
            self.put(function.body.instructions, function.body.labels, suffix, f"return{suffix}")
            self.labels[f"return{suffix}"] = len(self.instructions)
        for actual, formal in zip(results.elements, function.results, strict=True):
            self._pass(plain, actual, formal)
        self.labels[end] = len(self.instructions)

    def _save(self, call: Instruction, function: DeviceFunction) -> Vector:
        """Append a call.save of what the call of a function that may call itself destroys; returns the registers."""
        preserved: dict[str, Register] = {}
        if self.recursion.meets(function.name, self.around):
            own = self.functions.defined[self.around]
            for each in own.body.instructions:
                names = names_of((*each.operands, *([each.guard] if each.guard else ())))
                preserved |= {name: Register(name, own.body.scope.types[name]) for name in names if name != SINK.name}
            for formal in own.parameters:
                if isinstance(formal, Symbol):
                    slots = [self._slot(formal.name, offset) for offset in self.slots[formal.name]]
                    preserved |= {each.name: each for each in slots}
            back = self._returns(self.around)
            preserved[back.name] = back
        saved, most = Vector(tuple(preserved.values())), Immediate(self.recursion.most)
        what = Opcode("call.save", (function.name,), (), "call.save", "call", "")
        self.instructions.append(replace(call, opcode=what, operands=(saved, most)))
        return saved

    def _leave(self, call: Instruction, function: DeviceFunction, saved: Vector, back: str) -> None:
        """Branch to a function that may call itself, and restore the registers where it returns to."""
        number, size = Immediate(len(self.back[function.name])), self.recursion.size
        self.back[function.name].append(Label(back))
        self._move(call, self._returns(function.name), number)
        frame = [(text, (FRAME, FRAME, Immediate(size))) for text in ("add.u64", "sub.u64") if size]
        self.registers[FRAME.name] = FRAME.type
        add, sub = [replace(call, opcode=opcode(text), operands=each) for text, each in frame] or (None, None)
        self.instructions += [add] if add else []
        self.instructions.append(replace(call, opcode=opcode("bra"), operands=(Label(_entry(function.name)),)))
        self.labels[back] = len(self.instructions)
        self.instructions += [sub] if sub else []
        what = Opcode("call.restore", (function.name,), (), "call.restore", "call", "")
        self.instructions.append(replace(call, opcode=what, operands=(saved,)))

    def _returns(self, name: str) -> Register:
        """The register that tells where a function returns to."""
        register = Register(f"%return.{name}", "u32")
        self.registers[register.name] = register.type
        return register

    def put_recursive(self, last: Instruction) -> None:
        """Append the functions that may call themselves, each once, behind the kernel, which ends with `last`."""
        if self.recursion.names and (last.opcode.name not in ("ret", "exit", "bra") or last.guard is not None):
            self.instructions.append(replace(last, opcode=opcode("ret"), operands=(), guard=None, negated=False))
        switches = []
        for name in self.recursion.names:
            self.around, body = name, self.functions.defined[name].body
            self.labels[_entry(name)] = len(self.instructions)
            self.put(body.instructions, body.labels, f"@{name}", f"return@{name}")
            self.labels[f"return@{name}"] = len(self.instructions)
            switches.append((name, len(self.instructions)))
            end = replace(body.instructions[-1], guard=None, negated=False)
            self.instructions.append(replace(end, opcode=opcode("brx.idx"), operands=()))
        for name, at in switches:
            operands = (self._returns(name), Vector(tuple(self.back[name])))
            self.instructions[at] = replace(self.instructions[at], operands=operands)

    def _frame_address(self, instruction: Instruction) -> None:
        """Append the address of a local variable in the frame of the present call."""
        target, source = instruction.operands[0], instruction.operands[-1]
        if instruction.opcode.name != "mov" or not isinstance(target, Register) or not isinstance(source, Symbol):
            raise EmulationError(
                f"{_where(instruction)}: a local variable of a function that calls itself has its address by mov"
            )
        offset = self.recursion.local[source.name].offset + source.offset
        self.instructions.append(replace(instruction, operands=(target, Symbol(_STACK, offset))))
        self.instructions.append(replace(instruction, opcode=opcode("add.u64"), operands=(target, target, FRAME)))

    def _unguarded(self, call: Instruction, end: str) -> Instruction:
        """Return a call without its guard; threads for which the guard is false branch to the label `end`."""
        if call.guard is not None:
            skip = replace(call, opcode=opcode("bra"), operands=(Label(end),), negated=not call.negated)
            self.instructions.append(skip)
        return replace(call, guard=None, negated=False)

    def _call_through(self, instruction: Instruction) -> None:
        """Branch to a copy of each function whose address the pointer may hold; trap if it holds another."""
        self.calls += 1
        suffix = f"@{self.calls}"
        end, other = f"end{suffix}", f"other{suffix}"
        plain = self._unguarded(instruction, end)
        names = self.functions.called(instruction)
        places = {int(case(np.uint64(self.functions.pointed[name]))): name for name in names}
        table = [places.get(place, other) for place in range(max(places, default=-1) + 1)]
        labels = Vector(tuple(Label(name if name == other else f"to {name}{suffix}") for name in (*table, other)))
        self.instructions.append(replace(plain, opcode=opcode(SWITCH), operands=(instruction.operands[2], labels)))
        leave = replace(plain, opcode=opcode("bra"), operands=(Label(end),))
        for name in names:
            self.labels[f"to {name}{suffix}"] = len(self.instructions)
            self._call(plain, self.functions.defined[name])
            self.instructions.append(leave)
        self.labels[other] = len(self.instructions)
        self.instructions.append(replace(plain, opcode=opcode("trap"), operands=()))
        self.labels[end] = len(self.instructions)

    def _passed(self, call: Instruction) -> tuple[Operand, ...]:
        """The results and parameters, as registers, of a call that remains."""
        results, passed = ([*each.elements] for each in call.operands if isinstance(each, Vector))
        size = 4 if _callee(call) == "vprintf" else 8  # of a result that nobody reads
        registers: list[Operand] = []
        for operand in (*(results or [SINK]), *passed):
            if isinstance(operand, Symbol):
                self._whole(operand.name, size)
                registers += [self._slot(operand.name, offset) for offset in sorted(self.slots[operand.name])]
            else:
                registers.append(operand)
        return tuple(registers)

    def _slot_memory(self, instruction: Instruction) -> Symbol | None:
        for operand in instruction.operands:
            if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.name in self.slots:
                return operand.base
        return None

    def _slot(self, name: str, offset: int) -> Register:
        """The register that holds a part of a parameter."""
        register = Register(f"{name}+{offset}", f"b{max(16, 8 * self.slots[name][offset])}")
        self.registers[register.name] = register.type
        return register

    def _pass(self, call: Instruction, to: Operand, source: Operand) -> None:
        """Move what the caller passed into the function's parameter; for .param variables move all parts."""
        if isinstance(to, Symbol) and isinstance(source, Symbol):
            for offset, width in self.slots[source.name].items():
                known = self.slots[to.name]
                if offset in known:
                    self._move(call, self._slot(to.name, offset), self._slot(source.name, offset))
                elif any(at < offset + width and offset < at + known[at] for at in known):
                    raise EmulationError(
                        f"{_where(call)}: {to.name} is read in other parts than it was written in; {WAY_OUT}"
                    )
            return
        if isinstance(to, Symbol):
            to = self._whole(to.name)
        if isinstance(source, Symbol):
            source = self._whole(source.name)
        if isinstance(to, Register) and to.type:
            self._move(call, to, source)

    def _whole(self, name: str, size: int = 4) -> Register:
        self.slots[name].setdefault(0, size)
        return self._slot(name, 0)

    def _move(self, origin: Instruction, to: Register, source: Operand, bits: int = 0, sign: str = "u") -> None:
        """Append to = source; `bits` limits it to the lowest bits of the source."""
        wide = _BITS[to.type]
        stored = _BITS[source.type] if isinstance(source, Register) else wide
        text = "mov.pred" if to.type == "pred" else f"mov.b{wide}"
        if isinstance(source, Register) and (stored != wide or 0 < bits < wide):
            part = stored if stored > wide else bits or stored
            text = f"cvt.{sign}{wide}.{sign}{part}"
        self.instructions.append(replace(origin, opcode=opcode(text), operands=(to, source)))


_STACK = "%stack"  # the local variable that holds the frames


def _entry(name: str) -> str:
    """The label of a function that may call itself."""
    return f"begin {name}"


def _renamed(operand: Operand, suffix: str) -> Operand:
    """A label, or the labels of a table, with the suffix of one call."""
    if isinstance(operand, Label):
        return Label(operand.name + suffix)
    if isinstance(operand, Vector):
        return Vector(tuple(_renamed(element, suffix) for element in operand.elements))
    return operand
