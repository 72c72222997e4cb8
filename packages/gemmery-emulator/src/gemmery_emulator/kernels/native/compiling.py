"""Which basic blocks are compiled: those that have run for as long as LLVM takes, at once if that is done.

Compiled code is in the cache of compiled kernels, by its text.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from gemmery.cpu import jit, target
from gemmery_emulator.kernels.native import runtime
from gemmery_emulator.kernels.native.block_functions import module
from gemmery_emulator.kernels.native.translation import Translation
from gemmery_emulator.lower import LoweredKernel

# The part of a block's instructions that may be without code: each takes NumPy longer than a whole short block;
# and where all blocks are compiled.
FEW, SOME = 1 / 32, 1 / 4
# What decides when a block is compiled, in seconds: NumPy's time for an instruction and for one of its threads, and
# LLVM's for a module and for an instruction. What decides whether a chunk is prepared: the least that NumPy takes
# for an instruction that computes, the same for an access, and the cost of preparing; docs/findings/emulator_speed.md.
USUAL, USUAL_THREAD = 10e-6, 1.5e-9
STEP, THREAD = 2e-6, 0.25e-9
ACCESS, ACCESS_THREAD = 20e-6, 5e-9
MODULE, INSTRUCTION = 30e-3, 0.8e-3
CHUNK, CHUNK_THREAD = 0.3e-3, 20e-9
PAUSE = 64  # blocks that NumPy executes after several calls that came to nothing, then twice as many each time
SOON, OFTEN = 5e-3, 3  # seconds before blocks are chosen, which were executed so often


class Native:
    """The compiled blocks of a kernel, for all its launches."""

    def __init__(self, program: LoweredKernel) -> None:
        self.program, self.target = program, target.host()
        self.translation = Translation(program, self.target)
        self.code: dict[int, int] = {}  # the address of each compiled block
        self.counts = [0] * len(program.blocks)
        self._spent, self._cost = 0.0, 0.0
        self._chosen: list[int] = []
        self.fit = self._fitting(FEW)
        self.lengths = [block.last - block.first for block in program.blocks]
        accesses = [
            sum(block.first <= index < block.last for index in self.translation.number) for block in program.blocks
        ]
        self._accesses = accesses
        self.pause = PAUSE
        self.latest = 0.0  # what NumPy needs, or would have needed, for the blocks of the latest chunk that have code
        self.eager = False  # whether all blocks were compiled before they ran

    def _fitting(self, few: float) -> list[bool]:
        """Return whether each block has code for all but this part of its instructions."""
        return [self.translation.share(block) >= 1 - few and not block.waits for block in self.program.blocks]

    def seconds(self, at: int, threads: int) -> float:
        """Return about what NumPy needs for a block."""
        accesses = self._accesses[at]
        others = self.lengths[at] - accesses
        return others * (STEP + THREAD * threads) + accesses * (ACCESS + ACCESS_THREAD * threads)

    def worth(self, spent: float, threads: int) -> bool:
        """Whether to prepare a chunk for compiled code, in whose blocks NumPy has spent so much."""
        return self.eager or max(spent, self.latest) > CHUNK + CHUNK_THREAD * threads

    def executed(self, at: int, threads: int) -> bool:
        """Note that NumPy executes a block; True if blocks were compiled because of that."""
        if at in self.code or self.eager or not self.fit[at]:
            return False
        self.counts[at] += 1
        self._spent += self.lengths[at] * (USUAL + USUAL_THREAD * threads)
        if not self._chosen and self._spent > SOON:
            self._choose()
        if not self._chosen or self._spent < self._cost:
            return False
        self._compile(self._chosen)
        self._spent, self._chosen = 0.0, []
        return True

    def compile_all(self) -> None:
        """Compile every block that has code, before it runs."""
        if not self.eager:
            self.eager, self.fit = True, self._fitting(SOME)
            self._compile([each for each, fits in enumerate(self.fit) if fits and each not in self.code])

    def _choose(self) -> None:
        """Choose the blocks in loops; to compile them once that has been as long as it takes, at once if it is done."""
        often = [each for each, count in enumerate(self.counts) if self.fit[each] and count >= OFTEN]
        self._chosen = [each for each in often if each not in self.code]
        if not self._chosen:
            self._spent = 0.0
            return
        self._cost = MODULE + INSTRUCTION * sum(self.lengths[each] for each in self._chosen)
        if jit.keeps(self.target) and jit.stored(self.target, _name(self._text(self._chosen))):
            self._cost = 0.0

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _compiled_text(self, blocks: tuple[int, ...]) -> str:
        return str(module(self.translation, blocks))

    def _text(self, blocks: Sequence[int]) -> str:
        return self._compiled_text(tuple(blocks))

    def _compile(self, blocks: Sequence[int]) -> None:
        """Compile blocks, or load them from the cache."""
        if not blocks:
            return
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
