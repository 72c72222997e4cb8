"""What was measured of weights of few bits: the variants of their kernel, and what these cost on a card."""

from __future__ import annotations

from gemmery.cuda.choose.data import FAST_MEMORY
from gemmery.cuda.device import Device
from gemmery.tuples import NamedTuple


class QuantizedTile(NamedTuple):
    """A variant of the kernel for weights of few bits; `stages` are the most that it may have."""

    tokens: int
    warpgroups: int  # that multiply
    blocks: int  # of 64 rows of W of each
    ways: int  # warpgroups that share rows, and take the steps of k in turn
    stages: int
    resident: int  # blocks on a multiprocessor


# Six warpgroups in three ways, clusters, and two blocks of 64 rows of a warpgroup, gained nothing
# (docs/findings/quantized_products.md).
QUANTIZED = (
    *(QuantizedTile(tokens, 4, 1, 4, 24, 1) for tokens in (8, 16, 24, 32, 48, 56, 64, 72)),  # 80 spill
    *(QuantizedTile(tokens, 4, 1, 2, 8, 1) for tokens in (8, 16, 24, 32, 48, 56, 64, 72, 80, 96)),
    *(QuantizedTile(tokens, 4, 1, 1, 8, 1) for tokens in (8, 16, 24, 32, 48, 64, 72, 80, 96)),
    *(QuantizedTile(tokens, 3, 1, 1, 8, 1) for tokens in range(72, 129, 8)),  # where 128 and 256 rows leave a round
    *(QuantizedTile(tokens, 2, 1, 2, 8, 2) for tokens in (8, 16, 24, 32)),
    *(QuantizedTile(tokens, 2, 1, 1, 8, 1) for tokens in (64, *range(80, 161, 8), 176, 192, 208, 256)),
)


GROUPED = (16, 24, 32, 48, 64, 80, 96)  # tokens of tiles of groups that have a W each, by four warpgroups


class QuantizedCosts(NamedTuple):
    """The model of these variants for one card, in cycles of a multiprocessor at 1.75 GHz and bytes in one of them all.

    Fitted to times of 438 products on an H200, `tiles`, `hard`, `fit` and `losers` in
    benchmarks/tuning/quantized-nvidia-h200.jsonl: the choice takes at most 5 % longer than the fastest for 95 %, and
    0.7 % longer on average.
    """

    memory: float = 2940  # bytes
    anew: float = 1.204  # times the bytes of W, where blocks are at other places of k
    l2: float = 5870
    product: float = 16.8  # more than half a cycle for each token, of wgmma with A in registers beside unpacking
    issue: float = 216  # of a chunk
    harder: float = 1.02  # times that, of formats with more instructions than those of 4 bits in bf16
    turn: float = 201  # of one consumer, for a step
    bring: float = 312  # of the thread that asks for a step
    free: float = 0.574  # of that, for the steps of the first ring
    latency: float = 2650  # from there until it has come
    # Stages of a ring that wait to be handed back, where no consumers take turns: of a free choice, and in an order.
    pending: tuple[float, float] = (2, 1)
    ahead: float = 0.246  # of the first ring's steps, which come while the launch before ends
    start: tuple[float, float] = (0, 600)  # of a launch, by blocks on a multiprocessor
    end: float = 3540  # of a block
    next: float = 481  # from a tile of a block to its next one
    store: float = 15.1  # bytes of results in a cycle
    cut: float = 5920  # of a block with parts of two tiles, beside one
    split: float = 603  # waiting for the blocks that share a tile
    part: float = 415  # of each of their parts
    exchange: float = 19.5  # bytes in a cycle of the sums that they write and read
    inside: float = 400  # the same of those that wait in shared memory, in one block
    # Rows and k from and up to which it takes less time to expand the weight first: 8192 rows by 14336 x 4096 take 1640
    # us by this kernel, 1510 by cuBLAS, and 41 to expand. With k = 28672 this kernel is the faster one.
    expanded_rows: int = 4096
    expanded_depth: int = 8192


_H200_QUANTIZED = QuantizedCosts()
_H100_QUANTIZED = QuantizedCosts(memory=1820)  # 0.7 of the bytes in a second; not timed


def quantized_costs(device: Device) -> QuantizedCosts:
    """Return the costs for a device: those of the card whose memory is most like its own."""
    return _H200_QUANTIZED if device.bandwidth > FAST_MEMORY else _H100_QUANTIZED
