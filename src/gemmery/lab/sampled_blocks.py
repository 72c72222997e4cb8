"""Run the blocks of one multiprocessor on the emulator, and predict the time of the whole launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmery.cuda.device import Device
from gemmery.cuda.occupancy import occupancy
from gemmery.cuda.pipes import Pipes, clocks_of
from gemmery.emulator import spinning
from gemmery.emulator.lockstep import LockStep
from gemmery.emulator.lower import LoweredKernel
from gemmery.emulator.machine import LaunchConfig
from gemmery.emulator.memory import Global
from gemmery.emulator.op import Indices
from gemmery.emulator.pace.multiprocessor import Pace, Paced
from gemmery.errors import EmulationError
from gemmery.ladder.prediction import LaunchShape

LEAST_L1 = 16 << 10  # bytes that shared memory leaves
RESERVED = 1024  # bytes of shared memory of each block that the system takes


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
