"""The predicted time of a launch on a card, of anyone's kernel, from the blocks of one multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gemmery.cuda.device import WARP, Device
from gemmery.cuda.occupancy import occupancy
from gemmery.cuda.pipes import Pipes, clocks_of, pipes_of
from gemmery.emulator import spinning
from gemmery.emulator.findings.orders import orders
from gemmery.emulator.lockstep import LockStep
from gemmery.emulator.lower import LoweredKernel
from gemmery.emulator.machine import LaunchConfig
from gemmery.emulator.memory import Global
from gemmery.emulator.op import Indices
from gemmery.emulator.pace.multiprocessor import Pace, Paced
from gemmery.emulator.run import EmulatedRun
from gemmery.errors import EmulationError
from gemmery.ladder.rung_counts import LaunchShape, Prediction, predict_launch

UNKNOWN = 64  # registers of a thread of a kernel that is PTX
LEAST_L1 = 16 << 10  # bytes that shared memory leaves
RESERVED = 1024  # bytes of shared memory of each block that the system takes


def predicted_run(run: EmulatedRun, card: str) -> Prediction:
    """Predict the time of a run's launch on a card.

    Raises DeviceError for a card whose latencies are not known, CompileError for a kernel that does not compile for it,
    and EmulationError where the blocks of one multiprocessor do not run alone, or use tensor memory.
    """
    device, pipes = pipes_of(card)
    if run.rerun is None:
        raise EmulationError(f"{run.kernel} cannot run again: predict the time of a run of gm.emulate() itself")
    if orders(run.rerun.program.kernel).tensor_memory:
        raise EmulationError(
            f"{run.kernel} uses tensor memory (tcgen05), which {card} does not have: times are not predicted for sm_100"
        )
    registers, static = run.rerun.resources(device.arch)
    arguments = run.rerun.bind()
    launch = replace(run.launch, parameters=arguments.parameters)
    sampled = SampledLaunch(run.rerun.program, launch, registers or UNKNOWN, static + launch.shared)
    shape = sampled.shape(device, float(sum(each.size for each in arguments.memory.allocations)))
    try:
        paced = sampled.sample(device, pipes, arguments.memory, shape)
    except EmulationError as error:
        raise EmulationError(
            f"the time of {run.kernel} cannot be predicted from the blocks of one multiprocessor: {error}"
        ) from None
    prediction = predict_launch(device, pipes, shape, [paced])
    doubts = prediction.doubts
    if not registers:
        doubts += (f"the registers of a thread: the kernel is PTX, and {UNKNOWN} are assumed",)
    if orders(run.rerun.program.kernel).hands_over:
        doubts += ("blocks that wait for each other in global memory",)
    warps = shape.resident * -(-shape.threads // WARP)
    fits = f"{shape.resident} blocks, {warps} warps, on a multiprocessor"
    return replace(prediction, doubts=doubts, fits=f"{registers} registers a thread; {fits}" if registers else fits)


@dataclass(frozen=True)
class SampledLaunch:
    """A kernel with its launch, ready to be sampled on a card."""

    program: LoweredKernel
    launch: LaunchConfig
    registers: int  # of a thread
    shared: int  # bytes of a block, static and dynamic
    max_steps: int = spinning.LIMIT

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
        x, y, z = self.launch.cluster
        lines = tuple(each.line for each in self.program.kernel.instructions)
        return LaunchShape(self.launch.blocks, self.launch.block_threads, full.blocks, x * y * z, size, lines)

    def sample(self, device: Device, pipes: Pipes, memory: Global, shape: LaunchShape) -> Paced:
        """Run the blocks that one multiprocessor begins with.

        Raises EmulationError for blocks that wait for others.
        """
        cache = max(LEAST_L1, pipes.l1 - shape.resident * (self.shared + RESERVED))
        pace = Pace(self.program.merges, clocks_of(device, pipes), pipes.latencies.by_kind, cache)
        numbers = _numbers(self.launch, shape, device.sms)
        with np.errstate(all="ignore"):
            LockStep(self.program, self.launch, memory, numbers, (pace,), max_steps=self.max_steps).run()
        return pace.paced


def _numbers(launch: LaunchConfig, shape: LaunchShape, sms: int) -> Indices:
    """The blocks of one multiprocessor, which get them in turn; of a cluster all of its blocks."""
    if shape.cluster == 1:
        return np.arange(min(shape.resident, -(-shape.blocks // sms)), dtype=np.int64) * sms
    (gx, gy, _), (x, y, z) = launch.grid, launch.cluster
    layer, row, column = np.meshgrid(np.arange(z), np.arange(y), np.arange(x), indexing="ij")
    return np.asarray((column + gx * (row + gy * layer)).ravel(), np.int64)
