"""The tiles of every family of kernels, with the speed of each, and the choice of one for a product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gemmery.problem import Config
from gemmery.tuples import NamedTuple


class Tiling(NamedTuple):
    """How a block shares its part of C; 0 for what a family does not have or computes itself.

    `speed` is that of a multiprocessor that runs nothing else, in percent of the family's fastest.
    """

    bm: int  # rows and columns of C per block, and the step along k
    bn: int
    bk: int
    wm: int  # rows and columns per warp
    wn: int
    tm: int  # rows and columns per thread
    tn: int
    stages: int  # tiles of A and B in shared memory
    blocks: int  # per multiprocessor
    speed: int


# By the name of the rung, "mma_general".
# fmt: off
#               bm   bn  bk  wm   wn  tm  tn stages blocks speed
SIMT_PIPELINED = {  # by the bytes of a sum
    4: (
        Tiling(128, 256, 16, 32, 128, 16,  8,     3,     0,  100),
        Tiling(128, 128,  8, 64,  32,  8,  8,     3,     0,   95),
        Tiling( 64,  64, 16, 32,  32,  8,  4,     3,     0,   75),
        Tiling( 32,  32, 16, 32,  16,  4,  4,     3,     0,   45),
    ),
    8: (
        Tiling( 64, 128,  8, 32,  64,  8,  8,     3,     0,  100),
        Tiling( 64,  64,  8, 32,  32,  8,  4,     3,     0,   85),
        Tiling( 32,  32, 16, 32,  16,  4,  4,     3,     0,   60),
    ),
}
MMA_F64 = (  # speeds on an H200
    Tiling(    128, 128, 16, 64,  32,  0,  0,     3,     1,  100),
    Tiling(     64,  64, 16, 32,  32,  0,  0,     3,     3,   94),
    Tiling(     32,  64, 32, 16,  32,  0,  0,     3,     3,   80),
    Tiling(     32,  32, 32, 16,  16,  0,  0,     4,     4,   81),
)
MMA_PIPELINED = (  # it computes bk and stages; speeds of f16 on an H200
    Tiling(    256, 128,  0, 64,  64,  0,  0,     0,     0,  100),
    Tiling(    128, 256,  0, 64,  64,  0,  0,     0,     0,  100),
    Tiling(    128, 128,  0, 64,  64,  0,  0,     0,     0,   90),
    Tiling(     64, 128,  0, 32,  64,  0,  0,     0,     0,   68),
    Tiling(     64,  64,  0, 32,  32,  0,  0,     0,     0,   42),
    Tiling(     64,  32,  0, 32,  16,  0,  0,     0,     0,   25),
)
MMA_GENERAL = (  # the first serves every product
    Tiling(     64,  64, 64, 32,  16,  0,  0,     4,     0,   45),
    Tiling(    128, 128, 64, 64,  32,  0,  0,     3,     0,  100),
)
SIMT_GENERAL = (  # the first serves every product, and is the only one for f64
    Tiling(     32,  32, 16, 16,  16,  4,  2,     3,     0,   50),
    Tiling(     64,  64, 16, 32,  32,  8,  4,     3,     0,   80),
    Tiling(    128, 128,  8, 64,  32,  8,  8,     3,     0,  100),
)
# fmt: on


def share(tile: Tiling, m: int, n: int, batch: int, sms: int, splits: int = 1) -> int:
    """Return the elements of C that the busiest multiprocessor computes, each of them over one of `splits` parts of k.

    >>> share(MMA_PIPELINED[2], 1024, 1024, 1, 132)
    16384
    """
    blocks = -(-m // tile.bm) * -(-n // tile.bn) * batch * splits
    return -(-blocks // sms) * tile.bm * tile.bn


def quickest(tiles: Iterable[Tiling], m: int, n: int, batch: int, sms: int) -> Tiling:
    """Return the tile with which the busiest multiprocessor finishes first."""
    return min(tiles, key=lambda tile: share(tile, m, n, batch, sms) / tile.speed)


def complete(config: Config, choices: Mapping[str, int]) -> dict[str, int]:
    """Return the config with every 0 replaced by the choice for its key, if there is one.

    >>> complete({"bm": 0, "bn": 64, "blocks": 0}, {"bm": 128, "bn": 128})
    {'bm': 128, 'bn': 64, 'blocks': 0}
    """
    return {key: value or choices.get(key, 0) for key, value in config.items()}
