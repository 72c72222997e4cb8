"""A launch on the machine, chunk of blocks by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemmery.emulator.events import Observer
from gemmery.emulator.lower import Program
from gemmery.emulator.memory import Global
from gemmery.emulator.simt import Launch, Machine

CHUNK = 1 << 14  # threads in lock step: a 4-byte register of them is 64 KiB, so that several stay in a core's L2


def run(
    program: Program,
    launch: Launch,
    memory: Global,
    observers: Sequence[Observer] = (),
    *,
    chunk: int = CHUNK,
    seed: int | None = None,
) -> None:
    """Run a kernel over its grid; `memory` holds its arrays and is written.

    `seed` shuffles the order of blocks, and within a chunk lets warps run one after the other from barrier to
    barrier in an order of its own: a result that depends on it is a race.
    """
    order = None if seed is None else np.random.default_rng(seed)
    ids = np.arange(launch.blocks) if order is None else order.permutation(launch.blocks)
    padded = -(-launch.block_threads // 32) * 32
    cluster = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    step = max(chunk // padded // cluster, 1) * cluster
    with np.errstate(all="ignore"):
        for first in range(0, launch.blocks, step):
            Machine(program, launch, memory, ids[first : first + step], observers, order).run()
