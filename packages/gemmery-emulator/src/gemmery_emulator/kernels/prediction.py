"""The predicted time of a launch on a card, of anyone's kernel too, from the blocks of one multiprocessor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gemmery import display
from gemmery.cuda.device import WARP, Device
from gemmery.cuda.pipes import DISPATCHED, LAUNCH, NEXT, OVERLAPPED, PIPES, USABLE, Pipes, clocks_of, pipes_of
from gemmery.cuda.roofline import occupancy
from gemmery.errors import EmulationError
from gemmery_emulator.findings.orders import orders
from gemmery_emulator.hopper.cluster import in_order
from gemmery_emulator.lockstep import LIMIT, LockStep
from gemmery_emulator.lower import LoweredKernel
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.memory import Global
from gemmery_emulator.op import Indices
from gemmery_emulator.pace import UNITS, Pace, Paced, shares
from gemmery_emulator.pace.clocks import QUARTERS
from gemmery_emulator.pace.demand import KINDS
from gemmery_emulator.pace.register_banks import bank_conflicts, code_of
from gemmery_emulator.pace.warp_timeline import WarpTimeline
from gemmery_emulator.ptx import Line
from gemmery_emulator.run import EmulatedRun

FEW_WARPS = 12  # of a multiprocessor; below it instructions of a warp that depend on each other are not hidden
TENSOR = ("tensor", "tensor_tf32", "tensor_8")  # kinds of instructions of tensor cores
ROUNDS = 2  # of blocks that are followed; the later ones take as long as the last of them
# Of what later blocks load again and L2 has no room for, the share that misses. simt_naive on an H200 misses L2 with
# 26 % of its sectors at n = 4096 in f32 and 16 % at 2048 in f64: blocks side by side ask for the same.
LOST = 0.4
TOGETHER = 2  # loads that a warp waits for together, one of A and one of B: it waits where either misses
WAIT = "griddepcontrol.wait"
# Warps that meet at barriers do not hide all of what L1 takes behind what issue, integers or tensor cores take: this
# share of the shorter one shows. It adds to the waits where one block is alone on a multiprocessor and brings tiles to
# shared memory through registers; of more blocks, no less than the two together shows, and of more than `MANY` warps
# less: how many of them ask for the one unit at a time and not for the other varies by their square root. With cp.async
# issue is hidden (simt_pipelined in f32), and all is while tensor cores take longest. The share was chosen by tiles in
# bf16 and f32 of blocks alone, on an H200 at n = 1024.
IN_STEP, SHOWN, MANY = 8, 0.35, 16  # warps of a block, the share, and warps of a multiprocessor
# Of the clocks by which banks of registers are late, the share that no queue of operands hides: chosen by the tiles of
# threads in f32 and bf16 on an H200, whose f16 is held out.
CONFLICT = 0.25
MEETS = 4  # exponent of the mean of memory and multiprocessors: gemv_warp in f32 and gemv_quantized, n = 4096, an H200
UNKNOWN = 64  # registers of a thread of a kernel that is PTX
MOST_LANES = 128  # of multiply-adds: a pipe of half as many issues one in two clocks, in which banks give twice as much
LEAST_L1 = 16 << 10  # bytes that shared memory leaves
RESERVED = 1024  # bytes of shared memory of each block that the system takes


@dataclass(frozen=True)
class LaunchShape:
    """A launch, and how much of a multiprocessor its blocks take."""

    blocks: int
    threads: int  # of a block
    resident: int  # blocks that a multiprocessor runs at once
    cluster: int = 1
    bytes: float = float("inf")  # of all arrays
    lines: tuple[Line, ...] = ()  # of each instruction
    overlaps: bool = False  # whether it lets the next launch begin before it ends
    ahead: bool = False  # whether it brings its first loads to L2 before it waits for the launch before
    conflicts: float | None = None  # of its multiply-adds' registers: clocks each, by `bank_conflicts`
    copies: bool = False  # whether it copies to shared memory past registers
    hot: bool = False  # whether all that it loads is in L2, because launches before have written it

    def clocks(self, device: Device, pipes: Pipes) -> dict[str, float]:
        """Return the clocks of a multiprocessor for one of each kind of what the launch asks for."""
        in_step = self.blocks <= device.sms * self.resident
        clocks = clocks_of(device, pipes, min(self.blocks, device.sms), in_step=in_step)
        if self.conflicts is not None:
            clocks["operands"] = CONFLICT * self.conflicts / QUARTERS
        return clocks


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a kernel on a card."""

    card: str
    seconds: float
    bound: str  # the longest of the terms
    terms: Mapping[
        str, float
    ]  # seconds, if nothing else took time: units of a multiprocessor, "memory", "waits", "launch"
    lines: Mapping[str, float] = field(default_factory=dict)  # by line of the source, the share of what bounds it
    doubts: tuple[str, ...] = ()  # what the prediction does not take into account
    fits: str = ""  # registers of a thread, and what a multiprocessor runs at once

    def __str__(self) -> str:
        """The time, what bounds it, and the lines that take most of it."""
        parts = [f"predicted on {self.card}: {self.seconds * 1e6:,.4g} us, bound by {self.bound}"]
        longest = sorted(self.terms.items(), key=lambda term: -term[1])[:5]
        parts.append(", ".join(f"{name} {seconds * 1e6:,.4g} us" for name, seconds in longest if seconds))
        parts += [f"{line}: {share:.0%}" for line, share in self.largest()]
        return "\n".join([*parts, *(f"not taken into account: {doubt}" for doubt in self.doubts)])

    def largest(self, count: int = 5) -> list[tuple[str, float]]:
        """Return the lines with the largest shares of what bounds the time."""
        return sorted(self.lines.items(), key=lambda item: -item[1])[:count]

    def _repr_html_(self) -> str:
        return display.preformatted(str(self))

    def __add__(self, other: Prediction) -> Prediction:
        """Add a launch that follows; what bounds the longer one bounds both."""
        terms = {name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in {**self.terms, **other.terms}}
        longer = self if self.seconds > other.seconds else other
        doubts = tuple(dict.fromkeys(self.doubts + other.doubts))
        return Prediction(self.card, self.seconds + other.seconds, longer.bound, terms, longer.lines, doubts)


def predict_launch(
    device: Device,
    pipes: Pipes,
    shape: LaunchShape,
    samples: Sequence[Paced],
    beyond: float = 0.0,
    *,
    follows: bool = False,
) -> Prediction:
    """Predict a launch from one sample of its blocks, or from two with loops of different lengths.

    With two, `beyond` is how far the loops of the launch are from the first, in steps from the first to the second.
    `follows` says that another launch comes directly before.
    """
    first, last = samples[0], samples[-1]
    running = last.blocks
    amounts = np.maximum(first.amounts + (last.amounts - first.amounts) * beyond, 0) / running
    clocks = shape.clocks(device, pipes)
    by_unit = shares(clocks)
    units = by_unit @ amounts.sum(axis=0)  # clocks of one block
    each = -(-shape.blocks // device.sms)  # blocks of the busiest multiprocessor
    rounds = max(each / shape.resident, 1.0)
    simulated = max(first.clocks(rounds) * (1 - beyond) + last.clocks(rounds) * beyond, 0.0)

    def seconds(clocks: float) -> float:
        """The time of all blocks of a multiprocessor, of which one takes so many clocks of a unit."""
        return clocks * each / (device.clock * 1e9)

    moved = sum(
        min((start + (end - start) * beyond) / running * shape.blocks, shape.bytes)
        for start, end in ((first.written, last.written), (first.loaded, last.loaded))[: 1 if shape.hot else 2]
    )
    terms = {name: seconds(float(clocks)) for name, clocks in zip(UNITS, units, strict=True)}
    longest = max(terms, key=lambda name: terms[name])
    kinds = amounts.sum(axis=0)
    if kinds[KINDS.index("barrier")] and longest != "tensor":
        l1 = max(time for name, time in terms.items() if name.startswith("L1"))
        other = max(terms["tensor"], 0.0 if shape.copies else max(terms["issue"], terms["integer"]))
        warps = -(-shape.threads // WARP)
        least_shown = SHOWN * min(l1, other) * min(MANY / (running * warps), 1.0) ** 0.5
        if running == 1 and warps <= IN_STEP and not shape.copies:
            simulated += least_shown * device.clock * 1e9
        elif longest in ("issue", "integer") or longest.startswith("L1"):
            simulated = max(simulated, (max(l1, other) + least_shown) * device.clock * 1e9)
    tensor = (float(kinds[KINDS.index(name)]) * clocks[name] * pipes.tensor for name in TENSOR)  # at their peak
    cooled = pipes.heat * seconds(sum(tensor)) * shape.blocks / (each * device.sms)  # idle multiprocessors leave power
    # What longer loops hide better, such as the end of a tile, they hide no more of than the samples do.
    per_block = by_unit[list(UNITS).index(longest)]
    least = min(sample.clocks(rounds) - each * float(per_block @ sample.amounts.sum(axis=0)) / running
                for sample in samples)  # fmt: skip
    simulated = max(simulated, least + terms[longest] * device.clock * 1e9)
    waiting = max(simulated / (device.clock * 1e9) - terms[longest], 0.0)
    if shape.ahead:  # in a series, memory is waited for while the launch before ends
        waiting = max(waiting - (pipes.latencies.memory - pipes.latencies.l2) / (device.clock * 1e9), 0.0)
    memory = moved / (device.bandwidth * 1e9 * USABLE)
    launch = NEXT if follows else OVERLAPPED if shape.overlaps else LAUNCH
    busy = terms[longest] + waiting
    # L2 has a clock of its own: only what tensor cores take longer than it makes the launch longer.
    busy += max(terms["tensor"] + cooled - max(terms["tensor"], terms["L2"], terms["L2 stores"]), 0.0)
    # Memory and multiprocessors are two stages: the shorter one is hidden but for the first turn of the first block,
    # and where both take about as long each waits for the other at times.
    turns = 1 + max(first.turns + (last.turns - first.turns) * beyond, 0.0)
    together = max((busy**MEETS + memory**MEETS) ** (1 / MEETS), max(busy, memory) + min(busy, memory) / (each * turns))
    total = max(launch + together, DISPATCHED * shape.blocks)
    terms |= {"memory": memory, "waits": waiting, "launch": launch}
    bound = max(terms, key=lambda name: terms[name])
    shared_out = {"memory": "L2", "launch": longest}.get(bound, bound)  # what is told apart by line
    lines = _lines(shape, by_unit, amounts, shared_out, last)
    return Prediction(device.name, total, bound, terms, lines, _doubts(shape, last, device))


def _lines(
    shape: LaunchShape, by_unit: NDArray[np.float64], amounts: NDArray[np.float64], bound: str, sample: Paced
) -> dict[str, float]:
    """The share of each line in what a launch is bound by."""
    clocks = sample.waits if bound == "waits" else amounts @ by_unit[list(UNITS).index(bound)]
    total = float(clocks.sum())
    sums: dict[str, float] = {}
    for line, each in zip(shape.lines, clocks, strict=False):
        if each:
            sums[str(line)] = sums.get(str(line), 0.0) + float(each) / total
    return sums


def _doubts(shape: LaunchShape, sample: Paced, device: Device) -> tuple[str, ...]:
    kinds = sample.amounts.sum(axis=0)
    warps = sample.blocks * -(-shape.threads // WARP)
    doubts = {
        f"few warps: {warps} on a multiprocessor, so that dependent instructions wait": warps < FEW_WARPS,
        f"the size of the L2 cache: {shape.bytes / 2**20:,.0f} MiB of arrays, {device.l2 >> 20} MiB of L2":
            device.l2 < shape.bytes < float("inf"),
        "contention of atomics": kinds[KINDS.index("atomics")] > 0,
        "local memory, to which registers are spilled": sample.spills,
    }  # fmt: skip
    return tuple(doubt for doubt, applies in doubts.items() if applies)


def predicted_run(run: EmulatedRun, card: str) -> Prediction:
    """Predict the time of a run's launch on a card.

    Raises DeviceError for a card whose latencies are not known, CompileError for a kernel that does not compile for it,
    and EmulationError where the blocks of one multiprocessor do not run alone, or use tensor memory.
    """
    device, pipes = pipes_of(card)
    sampled, shape, paced = _sampled(run, device, pipes)
    prediction = predict_launch(device, pipes, shape, [paced])
    doubts = prediction.doubts
    if sampled.assumed:
        doubts += (f"the registers of a thread: the kernel is PTX, and {UNKNOWN} are assumed",)
    if orders(sampled.program.kernel).hands_over:
        doubts += ("blocks that wait for each other in global memory",)
    warps = shape.resident * -(-shape.threads // WARP)
    fits = f"{shape.resident} blocks, {warps} warps, on a multiprocessor"
    fits = fits if sampled.assumed else f"{sampled.registers} registers a thread; {fits}"
    return replace(prediction, doubts=doubts, fits=fits)


def predicted_longer(first: EmulatedRun, last: EmulatedRun, card: str, beyond: float, size: float) -> Prediction:
    """Predict a launch like that of two runs, with longer loops: so far `beyond` the first, in steps to the last.

    `size` is the bytes of its arrays. Raises what `predicted_run` raises.
    """
    device, pipes = pipes_of(card)
    (_, shape, shorter), (_, _, longer) = (_sampled(run, device, pipes, size=size) for run in (first, last))
    return predict_launch(device, pipes, shape, [shorter, longer], beyond)


def warp_timeline(run: EmulatedRun, card: str) -> WarpTimeline:
    """Return what each warp does of the blocks with which a multiprocessor of a card begins.

    Raises what `predicted_run` raises.
    """
    device, pipes = pipes_of(card)
    sampled, shape, paced = _sampled(run, device, pipes, spans=True)
    each = -(-sampled.launch.block_threads // WARP)
    lines = tuple(map(str, shape.lines))
    return WarpTimeline(run.kernel, card, device.clock, paced.rounds[0], each, paced.spans, lines)


def _sampled(
    run: EmulatedRun, device: Device, pipes: Pipes, *, size: float = 0.0, spans: bool = False
) -> tuple[SampledLaunch, LaunchShape, Paced]:
    """Run the first blocks of a run's launch once more; `size` is the bytes of all arrays, if not those of the run."""
    if run.rerun is None:
        raise EmulationError(f"{run.kernel} cannot run again: predict the time of a run of gm.emulate() itself")
    if orders(run.rerun.program.kernel).tensor_memory:
        raise EmulationError(
            f"{run.kernel} uses tensor memory (tcgen05), whose times are not predicted: name a kernel without it"
        )
    registers, static, cubin = run.rerun.resources(device.arch)
    arguments = run.rerun.bind()
    launch = replace(run.launch, parameters=arguments.parameters)
    sampled = SampledLaunch(
        run.rerun.program, launch, registers or UNKNOWN, static + launch.shared, assumed=not registers,
        cubin=cubin,
    )  # fmt: skip
    shape = sampled.shape(device, size or float(sum(each.size for each in arguments.memory.allocations)))
    try:
        return sampled, shape, sampled.sample(device, pipes, arguments.memory, shape, spans=spans)
    except EmulationError as error:
        raise EmulationError(
            f"the time of {run.kernel} cannot be predicted from the blocks of one multiprocessor: {error}"
        ) from None


@dataclass(frozen=True)
class SampledLaunch:
    """A kernel with its launch, ready to be sampled on a card."""

    program: LoweredKernel
    launch: LaunchConfig
    registers: int  # of a thread
    shared: int  # bytes of a block, static and dynamic
    max_steps: int = LIMIT
    assumed: bool = False  # whether the registers are
    cubin: bytes = b""  # its machine code, if that is known

    def shape(self, device: Device, size: float) -> LaunchShape:
        """Return how the launch fills a device; `size` is the bytes of all arrays.

        Raises EmulationError if not one block fits.
        """
        full = occupancy(device, self.launch.block_threads, self.registers, self.shared, self.launch.blocks)
        if not full.blocks:
            raise EmulationError(
                f"no block fits on a multiprocessor of {device.name}: {self.launch.block_threads} threads of "
                f"{self.registers} registers, {self.shared} bytes of shared memory; name another card"
            )
        instructions = self.program.kernel.instructions
        lines = tuple(each.line for each in instructions)
        spellings = [each.opcode.spelling for each in instructions]
        overlaps = "griddepcontrol.launch_dependents" in spellings
        before = spellings[: spellings.index(WAIT)] if WAIT in spellings else []
        ahead = overlaps and any("prefetch" in each and "L2" in each for each in before)
        launch = self.launch
        code = code_of(self.cubin, self.program.kernel.name)
        conflicts = bank_conflicts(code, MOST_LANES // PIPES[device.capability].fma)
        return LaunchShape(
            launch.blocks, launch.block_threads, full.blocks, launch.together, size, lines, overlaps, ahead, conflicts,
            any(each.startswith("cp.async") for each in spellings),
        )  # fmt: skip

    def sample(self, device: Device, pipes: Pipes, memory: Global, shape: LaunchShape, *, spans: bool = False) -> Paced:
        """Run the blocks that one multiprocessor begins with; `spans` keeps what each warp does, of one round.

        Raises EmulationError for blocks that wait for others.
        """
        cache = max(LEAST_L1, pipes.l1 - shape.resident * (self.shared + RESERVED))
        rounds = 1 if spans else min(ROUNDS, -(-shape.blocks // (device.sms * shape.resident)))
        at_once = min(shape.resident * device.sms, shape.blocks)

        def new(loaded: float) -> float:
            """The share of new bytes: of what later blocks load L2 still has a part."""
            if shape.hot or not loaded or shape.bytes == float("inf"):
                return float(not shape.hot)
            first = min(1.0, shape.bytes / (shape.blocks / at_once * min(shape.bytes, loaded * at_once)))
            lost = LOST * max(0.0, 1 - device.l2 / shape.bytes)
            return first + (1 - first) * (1 - (1 - lost) ** TOGETHER)

        limits = device.limits
        tight = self.registers * limits.warps_sm * WARP <= limits.registers_sm

        pace = Pace(
            self.program.merges, shape.clocks(device, pipes), pipes.latencies.by_kind, cache,
            rounds=rounds, spans=spans, new=new, tight=tight,
        )  # fmt: skip
        numbers = _numbers(self.launch, shape, device.sms)
        with np.errstate(all="ignore"):
            LockStep(self.program, self.launch, memory, numbers, (pace,), max_steps=self.max_steps).run()
        return pace.paced


def _numbers(launch: LaunchConfig, shape: LaunchShape, sms: int) -> Indices:
    """The blocks of one multiprocessor, which get them in turn; of a cluster all of its blocks."""
    if shape.cluster == 1:
        return np.arange(min(shape.resident, -(-shape.blocks // sms)), dtype=np.int64) * sms
    return next(in_order(launch, shape.cluster))
