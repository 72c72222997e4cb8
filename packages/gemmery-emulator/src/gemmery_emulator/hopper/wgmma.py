"""Instructions of a warpgroup, which is four consecutive warps of a block: wgmma and setmaxnreg.

PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions", and "Miscellaneous Instructions: setmaxnreg".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from gemmery_emulator.exact import added as tensor_sums
from gemmery_emulator.hopper.bulk import ROWS, RegisterMatrix, SharedTile
from gemmery_emulator.hopper.products import THREADS, Products, WarpgroupProduct, WgmmaShape, lanes_of, shape_of
from gemmery_emulator.machine import Machine, active, report_misuse
from gemmery_emulator.op import Indices, Mask
from gemmery_emulator.ptx import Immediate, Instruction, Register, Vector, names_of
from gemmery_emulator.steps import Handler, Lower, Lowering, Read, Step, only_constant, refused

_REGISTERS = 65536  # of a multiprocessor
_ALONE = "executes a warpgroup's instruction without the rest of the warpgroup: all 128 threads must take part"


def _calling(does: Callable[[Products, Indices], None]) -> Lower:
    return lambda _, __, index: lambda machine, mask: does(machine.unit(Products), _groups(machine, index, mask))


def _wait(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    pending = only_constant(instruction)
    return lambda machine, mask: machine.unit(Products).wait(index, _groups(machine, index, mask), pending)


def _multiply(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    shape = shape_of(instruction.opcode)
    if shape is None:
        raise refused(instruction)
    sums, a, b, *rest = instruction.operands
    if not isinstance(sums, Vector) or len(sums.elements) != shape.registers:
        raise refused(instruction, f"{shape.registers} registers of sums are needed:")
    kind = shape.sums if shape.sums != "f16" else "b32"
    slots = []
    for register in sums.elements:
        if not isinstance(register, Register):
            raise refused(instruction)
        lowering.write(register, kind, instruction)
        slots.append(lowering.slots[register.name])
    adds = lowering.read(rest[0], "pred", instruction) if rest else lambda _: np.True_
    constants = [register.bits if isinstance(register, Immediate) else None for register in rest[1:]]
    in_registers = isinstance(a, Vector)
    signs, by_rows = _constants(instruction, shape, constants, in_registers)
    of_a = a.elements if isinstance(a, Vector) else ()
    reads = [lowering.read(register, "b32", instruction) for register in of_a]
    slots_a = tuple(lowering.slots[each.name] for each in of_a if isinstance(each, Register))
    if len(slots_a) < len(of_a):
        raise refused(instruction)
    read_a = None if in_registers else lowering.read(a, "s64", instruction)
    read_b = lowering.read(b, "s64", instruction)
    core = lowering.faster.get(tensor_sums, tensor_sums)

    def step(machine: Machine, mask: Mask) -> None:
        groups = _groups(machine, index, mask)
        if not len(groups):
            return
        registers = machine.registers
        lanes = lanes_of(groups)
        side_a: SharedTile | RegisterMatrix
        if read_a is not None:
            side_a = SharedTile(machine.spread(read_a(registers))[groups], ROWS, by_rows=by_rows[0])
        else:
            side_a = RegisterMatrix(tuple(machine.spread(read(registers))[lanes] for read in reads), slots_a)
        side_b = SharedTile(machine.spread(read_b(registers))[groups], shape.n, by_rows=by_rows[1])
        added = np.asarray(machine.spread(adds(registers))[groups])
        batch = np.zeros(0, np.int64)
        product = WarpgroupProduct(index, shape, tuple(slots), groups, side_a, side_b, added, signs, batch, core)
        machine.unit(Products).add(product)

    return step


def checked_sums(lowering: Lowering, first: int, steps: Sequence[Step]) -> list[Step]:
    """The steps of a basic block, with a report of registers that a product under way will write.

    Between two instructions of warpgroups nothing changes, so the first use of such registers looks at all of them.
    """
    checked, at, later = list(steps), 0, dict[int, int]()
    for place in reversed(range(len(steps) if lowering.sums else 0)):
        instruction = lowering.kernel.instructions[first + place]
        names = lowering.sums.intersection(names_of(instruction.operands))
        uses = {lowering.slots[name]: first + place for name in names}
        if instruction.opcode.family == "wgmma":
            later = {}
        elif uses and instruction.guard is not None:
            read = lowering.read(instruction.guard, "pred", instruction)
            checked[place] = partial(_looking, checked[place], uses, read, instruction.negated)
        elif uses:
            if later:
                checked[at] = steps[at]
            at, later = place, later | uses
            checked[at] = partial(_looking, steps[at], later, None, False)
    return checked


def _looking(
    step: Step, uses: Mapping[int, int], guard: Read | None, negated: bool, machine: Machine, mask: Mask
) -> None:
    some = mask
    if guard is not None:
        some = np.broadcast_to(guard(machine.registers) ^ negated, (machine.threads,))
        some = some if mask is None else some & mask
    machine.unit(Products).used(uses, some)
    step(machine, mask)


def _constants(
    instruction: Instruction, shape: WgmmaShape, constants: list[int | None], in_registers: bool
) -> tuple[int, tuple[bool, bool]]:
    """Return the sign of the product, and which operands are contiguous along their rows."""
    signed = 2 if shape.sums != "s32" else 0
    layouts = (1 if in_registers else 2) if shape.a in ("f16", "bf16") else 0
    if len(constants) != signed + layouts:
        raise refused(instruction, f"{len(constants)} constants behind the predicate:")
    sign = 1
    for constant in constants[:signed]:
        if constant not in (1, -1, 0xFFFFFFFF):
            raise refused(instruction, "a scale other than 1 and -1:")
        sign *= 1 if constant == 1 else -1
    by_rows = [False, False, *(constant == 1 for constant in constants[signed:])]
    return sign, (by_rows[-2], by_rows[-1])


def _groups(machine: Machine, index: int, mask: Mask) -> Indices:
    """Return the first threads of the warpgroups that execute an instruction."""
    each, own = machine.block_threads, machine.launch.block_threads
    whole = each // THREADS
    starts = (np.arange(machine.blocks)[:, None] * each + np.arange(whole) * THREADS).ravel()
    some = np.ones(machine.threads, bool) if mask is None else mask
    complete = some[lanes_of(starts)].all(axis=1) if whole else np.zeros(0, bool)
    if int(complete.sum()) * THREADS != int(np.count_nonzero(some)) or own % 32:
        apart = some.copy()
        apart[lanes_of(starts[complete])] = False
        report_misuse(machine, index, np.flatnonzero(apart), _ALONE)
    return starts[complete]


class RegisterShares:
    """The registers for each thread that the warps of a chunk of blocks have asked for.

    PTX asks for the same instruction in all warps of a warpgroup: here for as many with the same numbers, because
    Triton writes one for each role of a warp.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine, self._warps = machine, machine.block_threads // 32
        groups = -(-self._warps // 4)
        self._asked = np.zeros((machine.blocks, groups), np.int64)  # by whole warpgroups; 0: not yet
        # By warp: what it asked for last, how often it has, and the latest instruction.
        self._counts, self._turns, self._index = np.zeros((3, machine.blocks, groups, 4), np.int64)
        machine.at_end.append(self._finish)

    def ask(self, index: int, mask: Mask, count: int, launched: int) -> None:
        """Report warpgroups that wait for ever: all have asked, and for more than the block was launched with."""
        blocks, warps = np.divmod(np.unique(active(self._machine, mask) // 32), self._warps)
        place = blocks, warps // 4, warps % 4
        self._counts[place], self._index[place] = count, index
        self._turns[place] += 1
        groups = np.unique(np.stack(place[:2]), axis=1)
        blocks, own = groups[:, (np.ptp(self._turns[*groups], axis=1) == 0)]
        threads = blocks * self._machine.block_threads + own * THREADS
        apart = np.ptp(self._counts[blocks, own], axis=1) != 0
        what = f"asks for {count} registers, and other warps of its warpgroup for another number: ask for the same"
        report_misuse(self._machine, index, threads[apart], what)
        self._asked[blocks, own] = count
        counts = self._asked[blocks]
        short = (counts > 0).all(axis=1) & (counts.sum(axis=1) > launched * counts.shape[1])
        if short.any():
            what = (
                f"waits for ever: its block's warpgroups ask for {int(counts[short][0].sum())} registers, and it was "
                f"launched with {launched} for each thread of {counts.shape[1]} warpgroups: ask for less in setmaxnreg"
            )
            report_misuse(self._machine, index, threads[short], what)

    def _finish(self) -> None:
        """Report warps that have asked without the others of their warpgroup, when all threads have ended."""
        alone = self._turns > self._turns.min(axis=2, keepdims=True)
        for index in np.unique(self._index[alone]).tolist():
            blocks, groups, warps = np.nonzero(alone & (self._index == index))
            threads = blocks * self._machine.block_threads + groups * THREADS + warps * 32
            report_misuse(self._machine, index, threads, _ALONE)


def _registers(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """setmaxnreg: a number that the hardware refuses is an error, and so are more than a launch has.

    Compilers give a kernel with this instruction all the registers that its bounds allow, a multiple of 8.
    """
    count, limits = only_constant(instruction), lowering.kernel.limits
    if count % 8 or not 24 <= count <= 256:
        raise refused(instruction, "a number of registers that is not a multiple of 8 from 24 to 256:")
    threads = int(np.prod(limits.get("maxntid", limits.get("reqntid", ()))))
    if threads < THREADS:  # no bounds
        return lambda machine, mask: None
    launched = min(256, _REGISTERS // (limits.get("minnctapersm", (1,))[0] or 1) // threads // 8 * 8)
    return lambda machine, mask: machine.unit(RegisterShares).ask(index, mask, count, launched)


def _of_groups(step: Lower, name: str) -> Handler:
    """An instruction for which a whole warpgroup waits."""
    spelled = re.compile(rf"wgmma\.{name}\.sync\.aligned")
    return Handler(step=step, spelled=spelled, kind=f"wgmma.{name}", lanes="warpgroup")


TABLE = {
    "wgmma.fence": _of_groups(_calling(Products.fence), "fence"),
    "wgmma.commit_group": _of_groups(_calling(Products.commit), "commit_group"),
    "wgmma.wait_group": _of_groups(_wait, "wait_group"),
    "wgmma.mma_async": Handler(step=_multiply, lanes="warpgroup"),
    "setmaxnreg": Handler(
        step=_registers, spelled=re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32"), lanes="warp"
    ),
}
