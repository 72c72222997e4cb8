"""Which basic blocks are compiled: those that have run for as long as LLVM takes, at once if that is done.

Compiled code is in the cache of compiled kernels, by its text.
"""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import dataclass
from functools import cached_property
from math import inf

from gemmery.banks import WARP
from gemmery.cpu import jit, target
from gemmery_emulator.findings.races import INDEX_AT, UNDER_WAY
from gemmery_emulator.kernels.native import frames, runtime
from gemmery_emulator.kernels.native.block_functions import module
from gemmery_emulator.kernels.native.frames import Record
from gemmery_emulator.kernels.native.translation import CopyGroup, Translation
from gemmery_emulator.lower import Block, LoweredKernel
from gemmery_emulator.ptx import Immediate

# The part of a block's instructions that may be without code: each takes NumPy longer than a whole short block;
# and where all blocks are compiled.
FEW, SOME = 1 / 32, 1 / 4
# What decides when a block is compiled, in seconds: NumPy's time for an instruction and for one of its threads, and
# LLVM's for a module and for an instruction. What decides which way a chunk runs, until both are measured: the least
# that NumPy takes for an instruction that computes, the same for an access, and what a chunk and a call cost at first.
USUAL, USUAL_THREAD = 10e-6, 1.5e-9
STEP, THREAD = 2e-6, 0.25e-9
ACCESS, ACCESS_THREAD = 20e-6, 5e-9
MODULE, INSTRUCTION = 10e-3, 0.25e-3
CHUNK, CHUNK_THREAD = 0.3e-3, 20e-9
NEAR = 0.85  # of NumPy's time, up to which compiled blocks are no gain: not all of their cost is measured
SURELY = 0.25  # of that least, which NumPy surely takes
CALL, CALL_THREAD = 30e-6, 2e-9
PAUSE = 64  # blocks that NumPy executes after several calls that came to nothing, then twice as many each time
SOON, OFTEN = 5e-3, 2  # seconds before blocks are chosen, which were executed so often


ALWAYS = 1 << 20  # in place of a warp's lanes, for blocks whose threads run together alone
MEETING = ("bar.sync", "barrier.sync", "barrier.sync.aligned")


@dataclass
class Ways:
    """What chunks of a kernel took both ways, in seconds for each second that is estimated for blocks with code.

    Each way is tried twice, because the first time is slower; NumPy only where it may win.
    """

    by_numpy: float = inf
    compiled: float = inf
    fixed: float = inf  # seconds of a chunk before and after its compiled blocks
    tries: tuple[int, int] = 0, 0
    work: float = 0.0  # of the latest chunk
    unwatched: bytes | None = None  # the parameters of a launch that NumPy runs, and need not be watched

    def prefers_compiled(self, work: float, threads: int) -> bool:
        """Whether so much work is faster by compiled blocks, as far as is known."""
        numpys, compiled = self.tries
        if compiled < 2:
            return CHUNK + CHUNK_THREAD * threads < work * (self.by_numpy if numpys else 1.0)
        least = SURELY if not numpys else self.by_numpy / 2 if numpys == 1 else self.by_numpy
        return self.fixed + self.compiled * work < NEAR * work * least

    def forget(self) -> None:
        """Forget what compiled blocks took, because there are more of them now."""
        self.compiled = self.fixed = inf
        self.tries, self.unwatched = (self.tries[0], 0), None

    def ran(self, seconds: float, numpys: float, compiled: float, fixed: float, late: float) -> None:
        """Note what a chunk took, with so much work of either way, `late` of it by NumPy though there was code."""
        self.work = numpys + compiled
        if numpys and not compiled and self.tries[0] < 2:
            self.by_numpy, self.tries = min(self.by_numpy, seconds / numpys), (self.tries[0] + 1, self.tries[1])
        elif compiled and late < compiled / 8 and self.tries[1] < 2:  # the least of many would seem faster
            self.fixed, self.tries = min(self.fixed, fixed), (self.tries[0], self.tries[1] + 1)
            self.compiled = min(self.compiled, max(seconds - fixed, 0.0) / self.work)

    def settle(self, parameters: bytes, threads: int) -> None:
        """Note whether launches with these parameters need no watching."""
        waits = self.tries[0] < 2 or self.prefers_compiled(self.work, threads)
        self.unwatched = None if waits else parameters


class Native:
    """The compiled blocks of a kernel, for all its launches."""

    def __init__(self, program: LoweredKernel) -> None:
        self.program, self.target = program, target.host()
        self.translation = Translation(program, self.target)
        self.code: dict[int, int] = {}  # the address of each compiled block
        self.counts = [0] * len(program.blocks)
        self._spent, self._cost = 0.0, 0.0
        self._chosen: tuple[int, ...] = ()
        self.fit = self._fitting(FEW)
        self.lengths = [block.last - block.first for block in program.blocks]
        ends = enumerate(program.blocks)
        self._loops = [range(to, at + 1) for at, block in ends for to in block.targets if to <= at]
        accesses = [
            sum(block.first <= index < block.last for index in self.translation.number) for block in program.blocks
        ]
        self._accesses = accesses
        self.ways: dict[int, Ways] = {}  # by the threads of a chunk
        self.busy = 0.0  # seconds spent on compiling
        self.eager = False  # whether all blocks were compiled before they ran

    @cached_property
    def tables(self) -> tuple[Record, Record]:
        """The blocks and the accesses of the kernel, as compiled code reads them."""
        program, translation, functions = self.program, self.translation, turns()
        blocks = Record(frames.BLOCK, max(len(program.blocks), 1))
        accesses = Record(frames.ACCESS, max(len(translation.records), 1))
        barriers = [block.barrier for block in program.blocks if block.barrier is not None]
        plain = all(each.count is None and not each.arrives for each in barriers)
        for number, block in enumerate(program.blocks):
            lanes = 0 if block.gathering is None else WARP if block.gathering.threads == WARP else ALWAYS
            fields = {"first": block.first, "last": block.last, "gathers": lanes, "way": self._way(block, plain)}
            if fields["way"] == frames.BRANCHES:
                fields |= {"target": block.targets[0], "guarded": block.guard is not None}
            for name, value in fields.items():
                blocks.set(name, value, number)
        for number, (index, form) in enumerate(translation.records):
            if isinstance(form, CopyGroup):
                fields = {"call": functions["group"], "stores": form.commits, "pending": form.pending}
            else:
                fields = {
                    "call": functions["copy" if form.what else "access"], "shared": form.space == "shared",
                    "mark": index << INDEX_AT | (UNDER_WAY if form.what else 0), "stores": form.stores,
                    "width": form.width, "latest": frames.ENTRIES, "offset": form.offset,
                    "number": number + 1, "paired": bool(form.what) and form.stores,
                }  # fmt: skip
            for name, value in fields.items():
                accesses.set(name, value, number)
        return blocks, accesses

    def _way(self, block: Block, plain: bool) -> int:
        """Return how a block ends; `plain` if each barrier of the kernel is one of all threads that wait."""
        if block.way in ("", "branch", "exit"):
            return frames.BRANCHES if block.way else frames.FOLLOWS
        instruction, barrier = self.program.kernel.instructions[block.last - 1], block.barrier
        meets = plain and barrier is not None and barrier.members is None and instruction.opcode.spelling in MEETING
        constant = len(instruction.operands) == 1 and isinstance(instruction.operands[0], Immediate)
        return frames.MEETS if meets and constant else frames.ELSEWHERE

    def _fitting(self, few: float) -> list[bool]:
        """Return whether each block has code for all but this part of its instructions."""
        return [self.translation.share(block) >= 1 - few and not block.waits for block in self.program.blocks]

    def seconds(self, at: int, threads: int) -> float:
        """Return about what NumPy needs for a block."""
        accesses = self._accesses[at]
        others = self.lengths[at] - accesses
        return others * (STEP + THREAD * threads) + accesses * (ACCESS + ACCESS_THREAD * threads)

    def executed(self, at: int, threads: int) -> bool:
        """Note that NumPy executes a block; True if blocks were compiled because of that."""
        if at in self.code or self.eager or not self.fit[at]:
            return False
        self.counts[at] += 1
        self._spent += self.lengths[at] * (USUAL + USUAL_THREAD * threads)
        if not self._chosen and self._spent < SOON:
            return False
        begun = time.thread_time()
        self._choose()
        compiles = bool(self._chosen) and self._spent >= self._cost
        if compiles:
            self._compile(self._chosen)
            self._spent, self._chosen = 0.0, ()
        self.busy += time.thread_time() - begun
        return compiles

    def compile_all(self) -> None:
        """Compile every block that has code, before it runs."""
        if not self.eager:
            self.eager, self.fit = True, self._fitting(SOME)
            self._compile(tuple(each for each, fits in enumerate(self.fit) if fits and each not in self.code))

    def uncoded(self) -> str:
        """Return why blocks have no code, in words; "" where all have."""
        forms, instructions = self.translation.forms, self.program.kernel.instructions
        blocks = [block for block, fits in zip(self.program.blocks, self.fit, strict=True) if not fits]
        indices = (index for block in blocks for index in range(block.first, block.last - bool(block.way)))
        names = dict.fromkeys(instructions[index].opcode.spelling for index in indices if forms[index] is None)
        reason = f"{len(blocks)} of its {len(self.fit)} basic blocks have too many without code: {', '.join(names)}"
        return reason if blocks else ""

    def _choose(self) -> None:
        """Choose the blocks in loops; to compile them once that has been as long as it takes, at once if it is done."""
        if self._chosen:
            return
        often = {each for each, count in enumerate(self.counts) if self.fit[each] and count >= OFTEN}
        for each in sorted(often):
            around = sorted((loop for loop in self._loops if each in loop), key=len)
            often.update(*around[:1])
        self._chosen = tuple(each for each in sorted(often) if self.fit[each] and each not in self.code)
        if not self._chosen:
            self._spent = 0.0
            return
        self._cost = MODULE + INSTRUCTION * sum(self.lengths[each] for each in self._chosen)
        if jit.keeps(self.target) and jit.stored(self.target, _name(self._text(self._chosen))):
            self._cost = 0.0

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _text(self, blocks: tuple[int, ...]) -> str:
        return str(module(self.translation, blocks))

    def _compile(self, blocks: tuple[int, ...]) -> None:
        """Compile blocks, or load them from the cache."""
        if not blocks:
            return
        for ways in self.ways.values():
            ways.forget()
        text = self._text(blocks)
        functions = jit.load(self.target, _name(text), lambda: text)
        self.code |= {int(each.partition("_")[2]): address for each, address in functions.items()}


def _name(text: str) -> str:
    return f"emulated blocks {hashlib.sha256(text.encode()).hexdigest()}"


@functools.cache
def turns() -> dict[str, int]:
    """Return the addresses of `run`, `access`, `copy` and `group`."""
    host = target.host()
    text = str(runtime.module(host))
    return jit.load(host, f"turns of {_name(text)}", lambda: text)
