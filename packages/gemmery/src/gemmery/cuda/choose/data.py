"""What was measured: the tiles of all families of kernels; of those with wgmma, thresholds and winners by card."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from gemmery.cuda.device import Device
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


class Instance(NamedTuple):
    """What a kernel with wgmma is compiled for. `speed` is that of its products, in percent, where there is no model.

    `known` says which products the model may choose it for: "all"; "straddle", those whose rows straddle lines of L2;
    "whole", those whose rows do not, or whose C has at most 64 rows; "measured", none but those in the table; "fitted",
    those that `Residuals` are for.
    """

    bm: int  # rows and columns of C of a tile
    bn: int
    stages: int
    cm: int  # blocks of a cluster along m, which share columns of B, and along n, which share rows of A
    cn: int
    known: Literal["all", "straddle", "whole", "measured", "fitted"] = "all"
    speed: int = 100
    boxed: bool = True  # False: timed with k adjacent in B alone, where B comes in no boxes of 64 columns


SizeClass = tuple[int, int, str, int, int, int, bool]  # by `choose.size_class`
Winner = tuple[int, int, int, int, int, int]  # bm, bn, stages, cm, cn, splits


class Residuals(NamedTuple):
    """What measured times are to the model's, as logarithms: sums of these for a product and a tile (`cost.residual`).

    Fitted by least squares to tiles of 1,490 products on an H200 (benchmarks/tuning/survey-nvidia-h200.jsonl, runs 4,
    5, 10 to 12, 14, 15): k adjacent in A and B, of 16 bits; taken where rows straddle lines. On run 17, of 200 other
    products, 95.5 % of the choices reach 0.95 of PyTorch. Tiles that are named here may be chosen for such products.
    """

    classes: tuple[tuple[float, ...], ...]  # for each kind of tile, of each feature of a product
    tiles: Mapping[tuple[int, ...], float]  # by bm, bn, stages, cm, cn, splits
    rows: int = 512
    sides: range = range(256, 8193)
    near: float = 1.3  # times the least by the model, up to which a tile may be chosen


def residuals(path: Path) -> Residuals:
    """Read the residuals of a card."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    tiles = {tuple(map(int, name.split(","))): value for name, value in stored["tiles"].items()}
    return Residuals(tuple(map(tuple, stored["classes"])), MappingProxyType(tiles))


_ALONE = (
    *((64, 32, 8), (64, 32, 16), (64, 64, 8), (64, 64, 12), (64, 96, 8), (64, 128, 6)),
    *((128, 64, 8), (128, 96, 6), (128, 128, 6)),
)
_SPLIT = frozenset((*tile, 1, 1, splits) for tile in _ALONE for splits in (2, 4, 8) if tile[1] % (8 * splits) == 0)


class CardLimits(NamedTuple):
    """The thresholds of the choice for one card."""

    residuals: Residuals | None = None
    fours: int = 30  # clusters of 4 that run at a time
    # k from which a split may pay, for products of at most so many tiles of 128 x 64 a multiprocessor; the tiles whose
    # k blocks of a cluster share, and their number.
    split_depth: int = 1024
    split_tiles: int = 2
    split: frozenset[tuple[int, ...]] = _SPLIT
    # Rounds of tiles from which a narrower band is faster: 16384 squared by 1.9 %. Rows of a band: there, and otherwise
    # by the side of the square of C that a round covers.
    many_rounds: int = 40
    narrow_band: int = 8
    bands: tuple[tuple[float, int], ...] = ((14, 16), (11, 12), (0, 8))
    # k from which FEW rows are known to gain from tiles of their own.
    few_depth: int = 512
    # Columns up to which winners of at most FEW rows, timed on an H100, are this card's. An H200 takes 118 us
    # for 2 x 28672 x 8192 by that, and 112 by the model's choice (benchmarks/tuning/survey-nvidia-h200.jsonl).
    few_columns: int = 1 << 31
    # Where rows straddle, 256 by 192 that share A are the fastest for some sizes. In more rounds they vary: at n = 4040
    # they take 225 us where 128 by 256 takes 184, at 5400 583 us where 256 by 160 takes 431 (H100,
    # benchmarks/tuning/straddling-nvidia-h100.jsonl). Other tiles for such rows, most of them in clusters of 8, were
    # timed in few rounds alone. By rows of a tile; 0 stands for all others.
    straddling_rounds: Mapping[int, int] = MappingProxyType({256: 2, 0: 4})
    # Rows of C up to which tiles "whole" are fast where rows straddle, too: there 64 by 64 was faster than 64 by 32 at
    # each of 48 sizes: at n = 600 5.1 us, not 8.0 (H100).
    whole_rows: int = 64
    # A copy takes five times as long for a row beyond the edge as for one of the matrix. With pairs of 64 rows that do
    # not overlap, 66 rows by 4096 with k = 8192 take 36.5 us, 100 27.4 and 116 22.0; with 128 by 32, 21.2, 22.4, 22.8.
    # Smaller sides were not timed; where rows straddle lines, pairs are faster. Pairs that overlap were not timed here.
    uneven: range = range(65, 112)
    uneven_side: int = 4096
    # Lines of each column of B that L2 is asked for while the launches before end, by rows of a tile. Of 4 to 32 lines,
    # these were the fastest on an H100: by 4096 x 4096, 1 and 8 rows take 5 and 6 % less time, 64 4 %, 128 2 %. On an
    # H200, whose memory is faster, 8 lines are for every tile: of 4 to 24, 1 to 128 rows lose up to 1 % with 4 and 2 %
    # with 12. A wider tile of 8 rows than 32 columns asks for as many in all: 112 columns are as fast with 2 to 6 of
    # 2 to 8.
    lines_ahead: Mapping[int, int] = MappingProxyType({8: 12, 64: 8, 128: 4})
    ahead_columns: int = 32
    # Bytes of k and elements of C up to which the next launch begins at once: products of about 20 us. Large tiles gain
    # if it begins late (see lets_next_begin in wgmma_specialized.cu), brief products lose: on an H200 n = 1024 takes
    # 5.87 us where it took 5.35, and 2048 in int8 15.8 where it took 14.9. On an H100 n = 1024 gains.
    brief: tuple[int, int] = (2048, -1)
    # Rows of C up to which no tile of C' = B' A' was timed, and beyond which none for rows that straddle: up to there
    # 343 x 8112 x 6448 takes 52 us so, and 70 by others (benchmarks/tuning/survey-nvidia-h200.jsonl).
    least_swapped: int = 64
    most_straddling: int = 512
    # Tiles that gain from rows of A and C that are 8 apart.
    apart: tuple[tuple[int, int], ...] = ((192, 192), (64, 128))
    # Rows of C, in tiles of 128 rows of float32 in parts, and rounds of tiles of so many columns, from which two blocks
    # of a cluster share them: less of the power that limits them.
    sharing_rows: int = 16
    sharing_rounds: Mapping[int, int] = MappingProxyType({128: 6, 96: 16})
    # One row by a B of adjacent rows, for which gemv_vectorized adds up parts of k in a second launch: the least n and
    # k, and the largest k, the columns and the columns for each k that tiles multiply in less time. At n = 4096,
    # k = 1024 it takes 5.7 us, and tiles 4.2. Of 48 sizes of n and k, 512 to 128256, in bf16 on an H200, this misses
    # two, where tiles take 0.97 and 0.96 of its time.
    one_row: int = 512
    one_row_columns: tuple[tuple[int, Container[int], int], ...] = (
        (512, range(4097, 1 << 31), 32),
        (1536, range(2049, 12289), 32),
        (3072, range(4096, 12289), 1 << 31),
        (4096, (4096, 8192), 1 << 31),
    )


H100 = CardLimits()
H200 = H100._replace(  # 344 x 2560 x 9728 takes 37 us by halves of k of tiles of 128 by 128, and 31 by 128 by 64
    split=frozenset(name for name in H100.split if name[:2] != (128, 128)) | {(152, 64, 7, 1, 1, 5)},
    lines_ahead=MappingProxyType({8: 8, 64: 8, 128: 8}),
    brief=(2048, 1 << 22),
    few_columns=16384,
    residuals=residuals(Path(__file__).with_name("residuals.json")),
    least_swapped=8,
    fours=29,  # 30 take 1.33 times as long as 29 (docs/findings/tile_model.md)
)
FAST_MEMORY = 4000  # GB/s from which a card is like an H200


def card(device: Device) -> CardLimits:
    """Return the thresholds for a device: those of the card whose memory is most like its own."""
    return H200 if device.bandwidth > FAST_MEMORY else H100


# Elements of a tile with factors, all of whose sums stay in registers while the next tile is multiplied: 4096 x 24576
# with k = 1536 takes 243 us, and by 256 x 192, of which most are stored in front of it, 283. Rounds of these from which
# a grid of all multiprocessors gains, with so small a k: there 251 us with 128.
MOST_FACTORED, MANY_FACTORED, SHALLOW_FACTORED = 128 * 256, 10, 2048
FEW = 8  # rows of C that are a size class of their own, and tiles of as many rows
# The tile for two weights and up to 64 rows where all tiles are one round: 16 x 14336 x 4096 takes 59.8 us, and in two
# rounds of 64 x 128 64.5 (benchmarks/epilogues.py --cases tune).
PAIRED_FEW = Instance(64, 256, 4, 1, 1)
# The tiles for up to 8 and 64 rows where two blocks of each multiprocessor have one: 16 x 14336 x 4096 takes 57.8 us,
# and 59.2 by 64 x 256; 4 rows 57.7 and 61.3. Where some multiprocessors have one block these lose: 24 x 11128 x 8192
# takes 104 us, and 90 (docs/findings/functions_on_a_gpu.md).
PAIRED_TWICE = MappingProxyType({FEW: Instance(8, 112, 6, 1, 1), 64: Instance(64, 112, 4, 1, 1)})
# Of many rows, in place of 128 x 256: 4096 x 14336 x 4096 takes 1424 us, and 1457 by the larger tile in the same run.
PAIRED = Instance(128, 128, 6, 1, 1)
# Elements of C from which, and columns up to which, blocks exchange numbers of rows. That beats a pass over sums in
# memory for 2048 x 4096 and 4096 x 4096, not for 512 x 4096 and 8192 x 8192 (docs/findings/functions_on_a_gpu.md).
MANY_EXCHANGED, WIDEST_EXCHANGED = 1 << 23, 4096
# Tiles of columns up to which a kernel follows an index of rows: each loads all rows anew, and loads by threads take
# longer than tensor copies. With 6 to 8 tiles 0.96 to 1.00 of the time with a copy, with 11 to 16 1.05 to 1.25
# (docs/findings/experts.md).
MOST_GATHERED = 8
# Products of a batch of which a block streams many, and their sides.
MANY, SMALL = 8, 32
# Tiles of 16-bit elements for batches of products with sides up to BATCHED, all columns of one: memory limits these,
# and with 4 stages and not 6 an H200 reaches 1.05 of its rate: 2000 of 128 x 128 take 48.7 us, not 52.1, 1000 of 192 x
# 192 54.8, not 63.0 (benchmarks/tuning/dense-nvidia-h200.jsonl). Rounds of tiles from which that was timed.
BATCHED, BATCHED_ROUNDS = 256, 2
BATCHED_TILES = (
    *(Instance(64, 64, 3, 1, 1), Instance(64, 128, 4, 1, 1), Instance(64, 192, 4, 1, 1), Instance(64, 256, 4, 1, 1)),
)
BATCHED_TALL = Instance(128, 128, 4, 1, 1)  # up to 96 rows, of which two of 64 would lack half of one

# The tiles of other families, by the name of the rung, "mma_general".
# fmt: off
#               bm   bn  bk  wm   wn  tm  tn stages blocks speed
SIMT_PIPELINED = {  # by the bytes of a sum
    4: (
        Tiling(128, 256, 16, 32, 128, 16,  8,     3,     0,  100),
        Tiling(128, 128,  8, 64,  32,  8,  8,     3,     0,   95),
        Tiling( 64,  64, 16, 32,  32,  8,  4,     3,     0,   75),
        Tiling( 32,  32, 16, 32,  16,  4,  4,     3,     0,   58),  # 512 to 1536 squared, dense-nvidia-h200.jsonl
        Tiling( 64, 128, 16, 32,  64,  8,  8,     3,     3,   89),  # 692 x 3864 x 1968; the same file, run 8
    ),
    8: (
        Tiling( 64, 128,  8, 32,  64,  8,  8,     3,     0,  100),
        Tiling( 64,  64,  8, 32,  32,  8,  4,     3,     0,   85),
        Tiling( 32,  32, 16, 32,  16,  4,  4,     3,     0,   60),
    ),
    16: (
        Tiling( 64,  64,  8, 16,  32,  4,  4,     3,     0,  100),
        Tiling( 32,  32,  8, 32,  16,  4,  4,     3,     0,   80),
    ),
}
# Semirings, which have two instructions for a multiply-add: tiles are smaller, since there is more time to load them.
# min_plus at n = 4096 takes 5865 us by the first, 6554 by the first of SIMT_PIPELINED.
SIMT_SEMIRINGS = (
    Tiling(128, 128, 16, 64,  32,  8,  8,     3,     0,  100),
    SIMT_PIPELINED[4][2],
    SIMT_PIPELINED[4][3]._replace(speed=45),
)
# f32 with k adjacent in A and B, on an H200 (benchmarks/rung_configs.py columns). By the first, for so many rows or
# more, B is copied to rows of n before; the third and the fourth read pieces of four k.
PACKED_ROWS = 2048
SIMT_ALONG_K = (
    Tiling(128, 256, 16, 32, 128, 16,  8,     3,     0,  102),
    Tiling(128, 128, 16, 64,  32,  8,  8,     2,     0,   92),
    Tiling(128,  64, 16, 32,  32,  8,  4,     3,     1,   85),
    Tiling( 32,  32, 16, 32,  16,  4,  4,     4,     6,   78),
)
# f32 with few tiles, whose k blocks may share: of a B by rows, and by columns with k in pieces of four, and without.
SIMT_SHARED = {
    "rows": (
        Tiling(128, 128,  8, 64,  32,  8,  8,     3,     2,  107),
        Tiling( 64, 128, 16, 32,  64,  8,  8,     3,     3,  113),
        Tiling( 64,  64, 16, 32,  32,  8,  4,     3,     5,  102),
        Tiling( 32, 128, 16, 32,  64,  8,  8,     3,     7,  110),
        Tiling( 32,  64, 16, 32,  32,  8,  4,     4,    10,  112),
        Tiling( 32,  32, 16, 32,  16,  4,  4,     3,    14,  102),
        Tiling( 16, 128, 16, 16,  64,  4,  8,     4,    10,  116),
        Tiling( 16,  64, 16, 16,  32,  4,  4,     4,    14,  122),
        Tiling(128, 256, 16, 32, 128, 16,  8,     3,     1,  109),
    ),
    "pieces": (
        Tiling(128, 128, 16, 64,  32,  8,  8,     3,     1,   88),
        Tiling(128,  64, 16, 64,  32,  8,  8,     3,     2,   93),
        Tiling( 64,  64, 16, 32,  64,  8,  8,     3,     4,   94),
        Tiling( 64,  64, 16, 32,  32,  8,  4,     3,     2,   85),
        Tiling( 32, 128, 16, 32,  64,  8,  8,     3,     4,   94),
        Tiling( 32,  64, 16, 32,  32,  8,  4,     4,     5,   87),
        Tiling( 32,  32, 16, 32,  16,  4,  4,     3,     8,   78),
        Tiling( 16,  64, 16, 16,  32,  4,  4,     4,     8,   83),
    ),
    "elements": (
        Tiling(128, 128,  8, 64,  32,  8,  8,     3,     2,   96),
        Tiling( 64,  64, 16, 32,  32,  8,  4,     3,     5,   88),
        Tiling( 32,  32, 16, 32,  16,  4,  4,     3,    14,   74),
        Tiling( 16, 128, 16, 16,  64,  4,  8,     4,    10,   68),
        Tiling( 16,  64, 16, 16,  32,  4,  4,     4,    14,   49),
    ),
}
SIMT_PACKED = SIMT_SHARED["rows"][1], SIMT_SHARED["rows"][-1]  # of a B whose k is adjacent, copied to rows of n before
# Where k has no such pieces: tiles are transposed on their way through registers, 4 elements to a load at most.
SIMT_BY_ELEMENTS = (
    Tiling(128, 128, 16, 64,  32,  8,  8,     2,     0,  100),
    Tiling( 64,  64, 16, 32,  32,  8,  4,     2,     0,   80),
    Tiling( 32,  32, 16, 32,  16,  4,  4,     3,     0,   50),
)
# Speeds on an H200 (python benchmarks/rung_configs.py doubles); three times a power of two where k is adjacent alone.
MMA_F64 = (
    Tiling(    128, 128, 16, 64,  32,  0,  0,     3,     1,  100),
    Tiling(     96, 128, 16, 48,  32,  0,  0,     4,     1,   98),
    Tiling(     96,  96, 16, 48,  24,  0,  0,     4,     1,   98),
    Tiling(     96,  64, 16, 48,  32,  0,  0,     3,     2,   97),
    Tiling(     64,  64, 16, 32,  32,  0,  0,     3,     3,   92),
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
MMA_SPLITS = (1, 2, 4, 8, 16)  # of k, with the tiles above
MMA_GENERAL = (  # the first serves every product
    Tiling(     64,  64, 64, 32,  16,  0,  0,     4,     0,   45),
    Tiling(    128, 128, 64, 64,  32,  0,  0,     3,     0,  100),
)
SIMT_GENERAL = (  # the first serves every product, and is the only one for f64
    Tiling(     32,  32, 16, 16,  16,  4,  2,     3,     0,   50),
    Tiling(     64,  64, 16, 32,  32,  8,  4,     3,     0,   80),
    Tiling(    128, 128,  8, 64,  32,  8,  8,     3,     0,  100),
)

#            bm   bn stages cm cn known
_TILES = (
    Instance(128, 256,    4, 1, 1),
    Instance(256, 192,    3, 1, 1),
    Instance(256, 160,    4, 1, 2),
    Instance(256, 160,    3, 1, 2),  # where boxes of B are wider
    Instance(256, 128,    4, 1, 1, "measured"),
    Instance(192, 192,    4, 2, 1),
    Instance(128, 224,    4, 1, 1),
    Instance(128, 256,    4, 2, 1),
    Instance(128, 224,    4, 2, 1),
    Instance(128, 192,    4, 2, 1),
    Instance(128, 160,    5, 1, 1, boxed=False),
    Instance(128, 144,    5, 1, 1, boxed=False),
    Instance(128, 128,    6, 1, 1),
    Instance(128, 112,    6, 1, 1),
    Instance(128, 128,    6, 2, 1),
    Instance(128,  96,    6, 1, 1),
    Instance( 64, 128,    8, 2, 1),
    Instance( 64, 128,    6, 1, 1, "measured"),  # whose k blocks share
    Instance(128,  64,    8, 1, 1),
    Instance(128,  32,    9, 1, 1),  # where tiles of 64 rows do not suit
    Instance(256, 192,    3, 1, 2, "straddle"),
    Instance( 64, 160,    6, 2, 1, "straddle"),
    Instance(128, 192,    4, 4, 2, "straddle"),  # clusters of 8 ask L2 for each row once for 2 or 4 of their blocks
    Instance(128, 160,    5, 2, 4, "straddle", boxed=False),
    Instance(128, 128,    6, 4, 2, "straddle"),
    Instance(128, 112,    6, 2, 4, "straddle"),
    Instance(128,  96,    6, 2, 4, "straddle"),
    Instance( 64,  96,    8, 2, 4, "straddle"),
    Instance( 64,  96,    8, 4, 1, "straddle"),
    Instance( 64,  64,    8, 2, 4, "straddle"),
    Instance( 64,  64,    8, 4, 2, "straddle"),
    Instance( 64,  64,   12, 2, 4, "straddle"),
    Instance(160,  64,    6, 2, 4, "straddle"),  # this one and the next: of C' = B' A', as those from 224 by 128 on
    Instance( 80,  64,   10, 2, 2, "straddle"),
    Instance( 64,  96,    8, 1, 1),
    Instance( 64,  96,    8, 2, 1),
    Instance( 64,  64,   12, 1, 1),
    Instance( 64,  64,    8, 1, 1),
    Instance( 64,  64,   12, 2, 1),
    Instance( 64,  32,    8, 1, 1, "whole"),
    Instance( 64,  32,   16, 1, 1, "whole"),
    Instance(224, 128,    4, 1, 1),  # this one and those up to 80 by 64: of C' = B' A'
    Instance(208, 128,    4, 1, 1),
    Instance(176, 128,    5, 1, 1),
    Instance(152, 128,    5, 1, 1),
    Instance(144, 256,    4, 1, 1),
    Instance(136, 256,    4, 1, 1),
    Instance(136, 128,    6, 1, 1),
    Instance(112, 128,    6, 1, 1),
    Instance(176, 128,    5, 2, 1),
    Instance(136, 128,    6, 2, 1),
    Instance(200,  64,    6, 1, 1),
    Instance(152,  64,    7, 1, 1),
    Instance( 80,  64,   10, 1, 1),
    Instance(  8,  32,   24, 1, 1, boxed=False),  # 64 rows are multiplied
    Instance(  8,  64,   12, 1, 1, boxed=False),
    Instance(  8,  96,   10, 1, 1, boxed=False),
    Instance(  8, 112,    8, 1, 1, boxed=False),
)
# fmt: on
# Beside these, tiles that only residuals name. Most are of C' = B' A' with few rows; blocks beside each other share
# rows of A, where few tiles below each other could share columns of B.
_NAMES = residuals(Path(__file__).with_name("residuals.json")).tiles
_FITTED = dict.fromkeys(Instance(bm, bn, stages, cm, cn, "fitted") for bm, bn, stages, cm, cn, _ in _NAMES)
INSTANCES = (*_TILES, *(each for each in _FITTED if each[:5] not in {tile[:5] for tile in _TILES}))
# Of products of 32 bits whose B, by rows, is multiplied from registers; speeds at n = 4096 (dense-nvidia-h200.jsonl).
TURNED = (
    *(Instance(256, 128, 4, 1, 1), Instance(128, 128, 6, 1, 1, speed=88)),
    *(Instance(128, 64, 8, 1, 1, speed=57), Instance(64, 64, 8, 1, 1, speed=33)),
)
HALVES = Instance(128, 128, 6, 1, 1)  # which two blocks share where the library would not split k
# One warpgroup adds parts while nobody multiplies, 64 columns read A twice as often.
SCALED = (
    *(Instance(128, 128, 6, 1, 1), Instance(128, 64, 8, 1, 1, speed=85)),
    *(Instance(64, 128, 8, 1, 1, speed=70), Instance(64, 64, 8, 1, 1, speed=60)),
)
# A thread has three sets of sums of two parts, four of a pair.
PARTS = (Instance(128, 128, 6, 1, 1), Instance(64, 128, 6, 1, 1, speed=80), Instance(64, 64, 6, 1, 1, speed=65))
PAIRED_PARTS = (Instance(128, 96, 6, 1, 1), Instance(64, 96, 6, 1, 1, speed=80), Instance(64, 64, 6, 1, 1, speed=65))
RESIDUES = (Instance(128, 256, 4, 1, 1), Instance(128, 128, 6, 1, 1, speed=85))
# Whole numbers by their bytes: two blocks of a cluster share columns of B. Sums of 64 bits leave room for half a tile;
# on an H200 4096^3 of int64 takes 3.79 ms so, and 4.70 without clusters, of int32 1.10 and 1.11 (types_on_gpu.py).
DIGITS = (Instance(128, 256, 4, 1, 1), Instance(128, 128, 6, 1, 1, speed=83), Instance(128, 256, 4, 2, 1, speed=99))
DIGITS_WIDE = (Instance(128, 128, 6, 2, 1), Instance(128, 128, 6, 1, 1, speed=80))
# About 200 KB each; speeds fitted together with the constants of `cost.grouped_cycles`.
GROUPS = (Instance(128, 256, 4, 1, 1), Instance(128, 128, 6, 1, 1, speed=93), Instance(128, 64, 8, 1, 1, speed=80))


class SimtCosts(NamedTuple):
    """The model of SIMT_SHARED, in cycles of a multiprocessor.

    It and the speeds there are fitted together, by benchmarks/fit_float32_tiles.py.
    """

    idle: float = 0.3193  # warps beside which a scheduler waits as long as it multiplies
    memory: float = 2893  # bytes in a cycle, of all multiprocessors
    l2: float = 30.63  # of one
    fill: float = 1669  # of a ring
    sum: float = 0.3478  # of an element of each of their sums
    wait: float = 466.7  # of a step for the next one, whatever there is to do
    copy: float = 3.884  # of a warp's copy to shared memory
    start: float = 2198  # of a launch among others
    pack: float = 4726  # of a launch that copies B to rows of n
    copied: float = 1830  # bytes in a cycle that it reads and writes
    launch: float = 4000  # that adds them up where there are no clusters; not timed


SIMT_COSTS, SIMT_STEP, SIMT_SPLITS = SimtCosts(), 16, (1, 2, 3, 4, 5, 6, 7, 8)
# Elements of C for each multiprocessor up to which these are chosen, and those of MANY_AREA elements or more.
FEW_TILES, MANY_TILES, MANY_AREA = 128 * 128, 4 * 128 * 128, 64 * 128
# The k from which they are. Below, they gain 1 to 2 us, which a stream of calls hides, and the first call of a shape on
# Hopper takes 0.74 ms, not 0.06 (benchmarks/tuning/float32-tiles-nvidia-h200.jsonl, run 5).
SHARED_DEPTH = 128


def winners(path: Path) -> dict[int, dict[SizeClass, Winner]]:
    """Read what benchmarks/tune_wgmma.py writes: winners, the kinds of products that they suit, and their sizes."""
    devices = json.loads(path.read_text(encoding="utf-8"))
    return {
        int(sms): {
            (size, out, layout, *sides, straddles): tuple(winner)
            for winner, kinds, sizes in rows
            for size, out, layouts, straddles in kinds
            for layout in layouts.split()
            for sides in sizes
        }
        for sms, rows in devices.items()
    }


WINNERS = winners(Path(__file__).with_name("winners.json"))  # by the multiprocessors of a device
