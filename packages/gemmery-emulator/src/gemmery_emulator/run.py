"""Run a launch on the machine, one chunk of blocks after the other, and collect the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from gemmery import display
from gemmery.errors import EmulationError
from gemmery_emulator.arguments import BoundArguments
from gemmery_emulator.counters import Counters
from gemmery_emulator.counters.counts import Counts, Frames, Lines, MemoryTraffic, SharedTraffic
from gemmery_emulator.device_launch import DEEPEST, Launches, launches
from gemmery_emulator.findings import Finding, Findings
from gemmery_emulator.findings.orders import orders
from gemmery_emulator.hopper import cluster
from gemmery_emulator.lockstep import LockStep
from gemmery_emulator.lower import LoweredKernel
from gemmery_emulator.machine import LaunchConfig, Observer
from gemmery_emulator.memory import Global
from gemmery_emulator.ptx import Line, PtxKernel
from gemmery_emulator.trace import Trace

# glibc maps allocations of 128 KiB and more anew each time, until one of this size is freed: from then on it keeps
# freed memory. Without that, every 8-byte register gets new pages, which costs 2 to 9 times as much.
KEPT = (1 << 25) - (1 << 13)
CHUNK = 1 << 14  # threads in lock step: a 4-byte register takes 64 KiB, so that several fit in a core's L2
ALONE = 1 << 11  # threads in a random order: a step is of one warp, and costs as much as the threads of the chunk
TOGETHER = 1 << 17  # threads of blocks that may wait for each other, which a device with room for them runs together

# Called before each chunk with the blocks that have run and those of the grid, so that a long launch can be announced.
progress: ContextVar[Callable[[int, int], None] | None] = ContextVar("progress", default=None)

Place = TypeVar("Place", Line, Frames)


@dataclass(frozen=True)
class Drawable:
    """What pictures of a run are drawn from."""

    trace: Trace
    texts: Mapping[str, str]  # the source, by the name in its lines
    steps: Mapping[str, tuple[int, int]]  # bytes between rows and between columns of the matrices among its arguments


@dataclass(frozen=True)
class Rerun:
    """What it takes to run blocks of a launch once more, on a copy of the arrays as they are then."""

    program: LoweredKernel
    bind: Callable[[], BoundArguments]
    # On an architecture: registers of a thread, bytes of static shared memory, and the machine code.
    resources: Callable[[str], tuple[int, int, bytes]]


@dataclass(frozen=True, repr=False, eq=False)
class EmulatedRun:
    """The result of a launch: its counts, as a profiler shows them, and the faults found in it.

    `merged` counts accesses as ptxas merges them, `as_ptx` as they are in the PTX; the other attributes are the merged
    ones, unless the run had merge=False.
    """

    kernel: str
    launch: LaunchConfig
    counted: Callable[[bool], Counts]  # merged or not; when first read, for it takes part of a small run's time
    findings: tuple[Finding, ...] = ()
    merging: bool = True
    left_out: tuple[str, ...] = ()  # of the source, because the kernel does not need it: "main() (line 40)"
    drawable: Drawable | None = None  # None with check=False
    rerun: Rerun | None = None  # None for a rung
    warnings: tuple[Finding, ...] = ()  # what need not be a fault, as of threads that store one value in no order
    unwritten: Mapping[str, int] = field(default_factory=dict)  # bytes that no thread wrote of arrays only written

    @cached_property
    def merged(self) -> Counts:
        """All counts, of accesses as ptxas merges them."""
        return self.counted(True)

    @cached_property
    def as_ptx(self) -> Counts:
        """All counts, of accesses as they are in the PTX."""
        return self.counted(False)

    @property
    def counts(self) -> Counts:
        """All counts, merged unless the run had merge=False."""
        return self.merged if self.merging else self.as_ptx

    @property
    def shared(self) -> SharedTraffic:
        """Wavefronts and bank conflicts of shared memory."""
        return self.counts.shared

    @property
    def global_(self) -> MemoryTraffic:
        """Requests and sectors of global memory."""
        return self.counts.global_

    @property
    def local(self) -> MemoryTraffic:
        """Requests and sectors of local memory, which each thread has for itself."""
        return self.counts.local

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-add is two."""
        return self.counts.flops

    @property
    def instructions(self) -> Counter[str]:
        """Instructions executed by warps, by kind."""
        return self.counts.instructions

    @property
    def branches(self) -> int:
        """Conditional branches executed by warps."""
        return self.counts.branches

    @property
    def divergent_branches(self) -> int:
        """Conditional branches at which the threads of a warp diverge."""
        return self.counts.divergent_branches

    @property
    def lines(self) -> Lines:
        """All counts by source line; a line's text is a key, too: `lines["kernel.cu:9"]`."""
        return self.counts.lines

    @property
    def frames(self) -> Mapping[Frames, Counts]:
        """All counts by source line and the lines inlined into it, outermost first."""
        return self.counts.frames

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte of global memory traffic."""
        return self.counts.intensity

    def __repr__(self) -> str:
        """One line, as a failed assertion shows it."""
        conflicts, count = self.shared.bank_conflicts, len(self.findings)
        return f"<Run of {self.kernel}: {conflicts:,} bank conflicts, {count} finding{'s' * (count != 1)}>"

    def __str__(self) -> str:
        """The counts as a table, the lines with bank conflicts, the findings."""
        return "\n".join(_table(self))

    def _repr_html_(self) -> str:
        """The same, as a notebook displays it."""
        return display.preformatted(str(self))

    def __add__(self, other: EmulatedRun) -> EmulatedRun:
        """Add the counts and findings of two launches; the name is that of the second."""
        sums = {True: _together(self.merged, other.merged), False: _together(self.as_ptx, other.as_ptx)}
        return EmulatedRun(
            other.kernel,
            other.launch,
            sums.__getitem__,
            self.findings + other.findings,
            self.merging and other.merging,
            other.left_out,
            other.drawable,
            warnings=self.warnings + other.warnings,
        )


def _table(run: EmulatedRun) -> Iterator[str]:
    grid, block = (" x ".join(map(str, sides)) for sides in (run.launch.grid, run.launch.block))
    yield f"{run.kernel}: grid {grid}, block {block}"
    yield f"{'':16} {'requests':>12} {'sectors':>12} {'bytes used':>12}"
    for name, memory in (("global", run.global_), ("local", run.local)):
        for way, traffic in (("loads", memory.loads), ("stores", memory.stores), ("atomics", memory.atomics)):
            if traffic.requests:
                yield f"{f'{name} {way}':16} {traffic.requests:12,} {traffic.sectors:12,} {traffic.used:12,}"
    shared = run.shared
    if shared.requests:
        yield f"{'':16} {'requests':>12} {'wavefronts':>12} {'ideal':>12} {'conflicts':>12}"
    for way, banked in (("loads", shared.loads), ("stores", shared.stores), ("atomics", shared.atomics)):
        if banked.requests:
            served = (banked.requests, banked.wavefronts, banked.wavefronts_ideal, banked.bank_conflicts)
            yield " ".join([f"{f'shared {way}':16}", *(f"{value:12,}" for value in served)])
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in run.instructions.most_common(8))
    yield f"warps' instructions: {kinds}"
    yield f"flops {run.flops:,}; branches {run.branches:,}, divergent {run.divergent_branches:,}"
    for line, counts in run.lines.items():
        if counts.shared.bank_conflicts:
            yield f"{line}: {counts.shared.bank_conflicts:,} bank conflicts"
    if run.left_out:
        yield f"not compiled, because the kernel does not need it: {', '.join(run.left_out)}"
    yield from map(str, run.findings or ("no findings",))
    yield from (f"warning: {warning}" for warning in run.warnings)


def _together(first: Counts, other: Counts) -> Counts:
    return replace(
        first + other, lines=Lines(_merged(first.lines, other.lines)), frames=_merged(first.frames, other.frames)
    )


def _merged(first: Mapping[Place, Counts], other: Mapping[Place, Counts]) -> Mapping[Place, Counts]:
    total = dict(first)
    for place, counts in other.items():
        total[place] = total[place] + counts if place in total else counts
    return total


def emulated(
    program: LoweredKernel,
    launch: LaunchConfig,
    memory: Global,
    *,
    check: bool = True,
    merge: bool = True,
    observers: Sequence[Observer] = (),
    depth: int = 0,
    **options: Any,
) -> EmulatedRun:
    """Run a kernel and those that it launches, with all counters, and with `check` with all findings.

    `options` are those of `run`; `depth` counts the launches around this one.
    """
    if depth > DEEPEST:
        raise EmulationError(f"{program.kernel.name} is launched at depth {depth}: at most {DEEPEST}, as on a device")
    counters = Counters(program.kernel, program.merges)
    findings = Findings() if check else None
    children: list[EmulatedRun] = []
    own, around = None, memory.launches
    if launches(program.kernel) and program.sibling is not None:
        own = memory.launches = Launches(program.sibling)

    def start(tail: bool = False) -> None:
        """Run the children that may start."""
        assert own is not None
        ready = [each for each in own.waiting if tail or not each.is_tail]
        own.waiting = [] if tail else [each for each in own.waiting if each.is_tail]
        for each in ready:
            child = own.program(each.kernel)
            children.append(emulated(child, each.launch, memory, check=check, merge=merge, depth=depth + 1, **options))

    every = (counters, *((findings,) if findings else ()), *observers)
    run(program, launch, memory, every, between=start if own else None, **options)
    if own is not None:
        start(tail=True)
    memory.launches = around
    faults, warnings = (findings.sorted(), findings.warnings()) if findings else ((), ())
    unwritten = findings.unwritten if findings else {}
    counted = counters.counts
    name = program.kernel.name
    whole = EmulatedRun(name, launch, counted, faults, merge, warnings=warnings, unwritten=unwritten)
    for child in reversed(children):
        whole = child + whole
    return replace(whole, findings=tuple(dict.fromkeys(whole.findings)))  # children often have the same ones


def run(
    program: LoweredKernel,
    launch: LaunchConfig,
    memory: Global,
    observers: Sequence[Observer] = (),
    *,
    chunk: int = 0,
    seed: int | None = None,
    between: Callable[[], None] | None = None,
    **limits: Any,
) -> None:
    """Run a kernel over its grid; `memory` holds its arrays and is written.

    `seed` shuffles the order of blocks, and within a chunk lets warps run one after the other from barrier to
    barrier in another order: a result that depends on the order is a race. `chunk` is the number of threads that run
    together; 0 for as many as suit the kernel. Of the `limits`, `max_steps` is the number of basic blocks (instructions
    up to the next branch or barrier) that a chunk may execute, `seconds` the processor time that it may take;
    EmulationError beyond them. Without a seed the first `ahead` threads of each block run whenever they can, before the
    others. `between` is called after each chunk.
    """
    order = None if seed is None else np.random.default_rng(seed)
    padded = -(-launch.block_threads // 32) * 32
    chunk = chunk or _chunk(program.kernel, launch.blocks * padded, seed is not None)
    step = max(chunk // padded // launch.together, 1) * launch.together
    np.empty(KEPT, np.uint8)
    announce = progress.get()
    with np.errstate(all="ignore"):
        for number, ids in enumerate(cluster.in_order(launch, step, order)):
            if announce is not None:
                announce(number * step, launch.blocks)
            LockStep(program, launch, memory, ids, observers, order, **limits).run()
            if between is not None:
                between()


def _chunk(kernel: PtxKernel, threads: int, shuffled: bool) -> int:
    """The threads that run together, of as many in the grid: more of a kernel whose blocks may wait for each other."""
    if threads <= (ALONE if shuffled else CHUNK):
        return CHUNK
    order = orders(kernel)
    if threads > CHUNK and order.hands_over:
        return TOGETHER
    return CHUNK if not shuffled or (order.atomic | order.volatile).any() else ALONE
