"""Wrong versions of the ladder's kernels, each made by one edit that tests must detect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SMALL = {"bm": 32, "bn": 32, "bk": 8, "tm": 4, "tn": 4}
WIDE = {"bm": 32, "bn": 64, "bk": 8, "tm": 4, "tn": 8}
WARPS = {"bm": 64, "bn": 64, "bk": 8, "wm": 32, "wn": 32, "tm": 4, "tn": 8}
RING = {"bm": 32, "bn": 32, "bk": 8, "wm": 32, "wn": 16, "tm": 4, "tn": 4, "stages": 3}
F64 = {"bm": 32, "bn": 64, "bk": 16, "wm": 16, "wn": 32}
F64_RING = {"bm": 32, "bn": 32, "bk": 16, "wm": 16, "wn": 16, "stages": 3, "blocks": 1}
F16 = {"bm": 32, "bn": 64, "bk": 32, "wm": 32, "wn": 32}
MMA = {"bm": 64, "bn": 32, "bk": 32, "wm": 32, "wn": 16}
MMA_RING = {**MMA, "stages": 3, "splits": 1}


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs once in `file` of kernels/, becomes `new`; `rung` runs it."""

    rung: str
    file: str
    old: str
    new: str
    why: str  # what is wrong
    config: Mapping[str, int] = field(default_factory=dict)
    shape: tuple[int, int, int] = (40, 45, 43)  # m, n, k
    name: str = "f32"  # element type
    layouts: tuple[str, str, str] = ("row", "row", "row")
    batch: int = 1
    survives: str = ""  # why no run can distinguish it from the kernel

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


VECTOR, LONG = (72, 1, 203), (9, 1, 2056)
EVEN = (40, 48, 40)


def _of(rung: str, *rows: tuple[str, str, str, str], **problem: Any) -> tuple[Mutant, ...]:
    """Return mutants of a rung by file, old text, new text and reason; all for one problem."""
    return tuple(Mutant(rung, *row, **problem) for row in rows)


MUTANTS = (
    *_of(
        "simt_single_block",
        ("simt_single_block.cu", "p.b_at(batch, 0, j)", "p.b_at(batch, 0, i)", "a row's index for a column"),
        ("simt_single_block.cu", "k < p.k", "k <= p.k", "one step of k too many"),
        shape=(7, 5, 9),
    ),
    *_of(
        "simt_naive",
        ("simt_naive.cu", "if (j >= p.n) return;", "if (j > p.n) return;", "a column too many"),
        ("simt_single_block.cu", "a += p.a_col", "a += p.a_row", "down a column of A"),
        ("simt_naive.cu", "i < p.m;", "i < p.m - 1;", "the last row is left out"),
    ),
    *_of(
        "simt_uncoalesced",
        ("simt_uncoalesced.cu", "(p, batch, i, j)", "(p, batch, j, i)", "rows and columns exchanged"),
    ),
    *_of(
        "simt_uncoalesced",
        (
            "simt_uncoalesced.cu",
            "batch += gridDim.z",
            "batch += gridDim.z + 1",
            "the step over a grid that ends at 65535 in z",
        ),
        survives="every batch below 65536 has a block of its own, which takes no second step",
    ),
    *_of(
        "simt_linear",
        ("simt_linear.cu", "  *sum = 0;\n", "", "sums begin with what is in C"),
        ("simt_linear.cu", "j = id % p.n", "j = id % p.m", "columns counted by rows"),
    ),
    *_of(
        "simt_packed",
        (
            "simt_packed.cu",
            "to.depth % to.rows * BLOCK + y",
            "to.depth % to.rows * BLOCK + x",
            "a block of A copied by its diagonal",
        ),
        (
            "simt_packed.cu",
            "i < p.m && k < p.k ? *p.a_at(batch, i, k) : T{0}",
            "i < p.m ? *p.a_at(batch, i, k) : T{0}",
            "no zeros beyond the end of k",
        ),
        (
            "simt_packed.cu",
            "COLUMNS ? SIZE : of.columns * SIZE",
            "COLUMNS ? of.columns * SIZE : SIZE",
            "the steps of the two layouts exchanged",
        ),
    ),
    *_of(
        "simt_smem",
        ("simt_smem.cu", "__syncthreads();\n#pragma", "\n#pragma", "no barrier before the tiles are read"),
        ("simt_smem.cu", "__syncthreads();\n  }", "\n  }", "no barrier before the next tiles"),
        (
            "simt_smem.cu",
            "multiply_add(a[y][k], b[k][x], sum)",
            "multiply_add(a[y][k], b[x][k], sum)",
            "B's tile read as its transpose",
        ),
        ("simt_smem.cu", "if (i < p.m && j < p.n)", "if (i < p.m)", "columns beyond the edge are stored"),
        ("simt_smem.cu", "a[TILE][TILE]", "a[TILE][TILE - 1]", "rows of a tile that overlap"),
        ("tile.cuh", "i < p.m && k < p.k ?", "i < p.m && k <= p.k ?", "one column of A beyond the edge"),
        ("tile.cuh", "within / height * BN", "within % height * BN", "a block on another's tile"),
    ),
    *_of(
        "simt_smem_transposed",
        ("simt_smem_transposed.cu", "chunk ^ (row / (8 / ORDERS) % ORDERS)", "chunk", "no swizzle"),
        (
            "simt_smem_transposed.cu",
            "(row / (8 / ORDERS) % ORDERS)",
            "(row / (8 / ORDERS) % ORDERS / 2)",
            "a swizzle of half as many orders",
        ),
        ("simt_smem_transposed.cu", "(t >> 2 & 2)", "(t >> 2 & 1)", "two threads on one row"),
        ("simt_smem_transposed.cu", "__syncthreads();\n#pragma", "\n#pragma", "no barrier before the tiles are read"),
        ("simt_smem_transposed.cu", "__syncthreads();\n  }", "\n  }", "no barrier before the next tiles"),
    ),
    *_of(
        "simt_threadtile",
        ("registers.cuh", "__syncthreads();\n    multiply", "\n    multiply", "no barrier before the tiles are read"),
        config=SMALL,
    ),
    *_of(
        "simt_padded",
        ("registers.cuh", "__syncthreads();\n  }", "\n  }", "no barrier before the next tiles"),
        config=SMALL,
    ),
    *_of(
        "simt_threadtile",
        ("registers.cuh", "if (row >= p.m) continue;", "if (row > p.m) continue;", "a row too many"),
        config=SMALL,
    ),
    *_of(
        "simt_vectorized",
        ("registers.cuh", "if (column >= p.n) continue;", "if (column > p.n) continue;", "a column too many"),
        config=SMALL,
        shape=EVEN,
    ),
    *_of(
        "simt_vectorized",
        (
            "simt_threadtile.cu",
            "% Tiles::ACROSS * Tiles::TN;",
            "% Tiles::ACROSS * Tiles::TM;",
            "tiles of threads that overlap",
        ),
        config=WIDE,
        shape=EVEN,
    ),
    *_of(
        "simt_threadtile",
        (
            "load.cuh",
            "side_of(e) < sides && k_of(e) < depth",
            "side_of(e) <= sides && k_of(e) < depth",
            "a row beyond the edge is read",
        ),
        ("load.cuh", "    depth -= BK;\n", "", "what is left of k is not counted down"),
        config=SMALL,
    ),
    *_of(
        "simt_vectorized",
        ("load.cuh", "e / AGAIN * LAYERS * DEEP", "e / AGAIN * DEEP", "layers of a tile on each other"),
        config={**SMALL, "bk": 32},
        shape=EVEN,
    ),
    *_of(
        "simt_padded",
        ("simt_padded.cu", "OPERAND == ROW ? SIDE + 4 : SIDE", "SIDE", "no pad"),
        config=SMALL,
        shape=EVEN,
    ),
    *_of(
        "simt_padded",
        (
            "simt_padded.cu",
            "ROWS_APART = Tiles::DOWN * TALL",
            "ROWS_APART = Tiles::DOWN * WIDE",
            "strips of rows as far apart as columns",
        ),
        config={**SMALL, "tm": 8, "tn": 2},
        shape=EVEN,
    ),
    *_of(
        "simt_swizzled",
        ("simt_swizzled.cu", "(side ^ k / Load::WIDTH % Load::PIECE * PART % SPAN)", "side", "no swizzle"),
        (
            "simt_swizzled.cu",
            "Load::PIECE * PART % SPAN",
            "Load::PIECE * (PART / 8) % SPAN",
            "a swizzle that takes strips apart",
        ),
        config=SMALL,
        shape=EVEN,
    ),
    *_of(
        "simt_warptile",
        (
            "simt_warptile.cu",
            "warp / (Tiles::BN / WN) * WM",
            "warp / (Tiles::BN / WN) * (WM / 2)",
            "warps whose rows overlap",
        ),
        config=WARPS,
        shape=(64, 48, 40),
    ),
    *_of(
        "simt_warptile",
        ("simt_warptile.cu", "lane / 2 % 2 :", "lane % 2 :", "two lanes on one strip"),
        (
            "registers.cuh",
            "sums[i][j] = multiply_add(a[i], b[j], sums[i][j])",
            "sums[i][j] = multiply_add(a[j % TM], b[j], sums[i][j])",
            "the wrong fragment",
        ),
        config=WARPS,
        shape=EVEN,
    ),
    *_of(
        "simt_pipelined",
        (
            "simt_pipelined.cu",
            "wait_group<STAGES - 2>",
            "wait_group<STAGES - 1>",
            "the tile that is read next may be under way",
        ),
        ("simt_pipelined.cu", "    __syncthreads();\n", "", "no barrier when a tile has arrived"),
        (
            "simt_pipelined.cu",
            "free = STAGES - 1;  //",
            "free = STAGES - 2;  //",
            "the stage after is filled while it is read",
        ),
        ("simt_pipelined.cu", "? 1 - STAGES : 1;", "? 2 - STAGES : 1;", "the ring turns to its second stage"),
        config=RING,
        shape=EVEN,
    ),
    *_of(
        "simt_pipelined",
        ("simt_pipelined.cu", "    __syncthreads();\n", "", "no barrier when a tile has been stored"),
        (
            "simt_pipelined.cu",
            "finish(ring + now * STAGE);",
            "finish(ring + (now ^ 1) * STAGE);",
            "the tile is stored where this one is read",
        ),
        config={**RING, "stages": 2},
        shape=EVEN,
    ),
    *_of(
        "wmma_f64",
        ("wmma_f64.cu", "  __syncthreads();\n", "", "sums are stored over tiles that others read"),
        config=F64,
        shape=(40, 48, 24),
        name="f64",
    ),
    *_of(
        "wmma_f64",
        ("wmma.cuh", "    __syncthreads();\n", "", "no barrier when a tile has been stored"),
        ("wmma.cuh", "      __syncwarp();\n#pragma", "#pragma", "lanes read sums before all are stored"),
        ("wmma.cuh", "      __syncwarp();\n    }", "    }", "the next sums are stored while lanes read these"),
        (
            "wmma.cuh",
            "step * Fragment::K)),\n          TileB::STRIDE",
            "step * Fragment::K)),\n          TileA::STRIDE",
            "A's stride for B",
        ),
        config=F64,
        shape=EVEN,
        name="f64",
    ),
    *_of(
        "wmma_f16",
        ("wmma_f16.cu", "block.read(now, step + 1)", "block.read(now, step)", "the same fragments again"),
        config=F16,
        shape=EVEN,
        name="f16",
    ),
    *_of(
        "wmma_f16",
        ("wmma.cuh", "    put(next);", "    put(now);", "the tile is stored where this one is read"),
        config=F16,
        shape=(40, 48, 72),
        name="f16",
    ),
    *_of(
        "wmma_f16",
        ("wmma.cuh", "row + y * Fragment::M + within", "row + y * Fragment::N / 2 + within", "rows of C on each other"),
        config=F16,
        shape=EVEN,
        name="f16",
    ),
    *_of(
        "mma_f64",
        ("mma_f64.cu", "wait_group<AHEAD - 1>", "wait_group<AHEAD>", "the tile that is read next may be under way"),
        ("mma_f64.cu", "    __syncthreads();\n", "", "no barrier when a tile has arrived"),
        ("mma_f64.cu", "(chunk ^ row % 4 * 2)", "chunk", "no swizzle"),
        ("mma_f64.cu", "(chunk ^ row % 4 * 2)", "(chunk ^ row % 4)", "a swizzle shifted by one"),
        (
            "mma_f64.cu",
            "free = now;",
            "free = now == AHEAD ? 0 : now + 1;",
            "the tile after is filled while it is read",
        ),
        (
            "mma_f64.cu",
            "4 * step + t);\n#pragma unroll\n    for (int j",
            "4 * step + g % 4);\n#pragma unroll\n    for (int j",
            "a fragment of A by the wrong lanes",
        ),
        ("mma_f64.cu", "x / 2 * 8 + 2 * t", "x / 2 * 8 + t", "columns of C on each other"),
        config=F64_RING,
        shape=EVEN,
        name="f64",
    ),
    *_of(
        "mma_ldmatrix",
        ("mma_ldmatrix.cu", "__syncthreads();\n#pragma", "\n#pragma", "no barrier before the tiles are read"),
        ("mma_ldmatrix.cu", "__syncthreads();\n  }", "\n  }", "no barrier before the next tiles"),
        ("swizzle.cuh", "row / (8 / SPAN) % SPAN;", "0;", "no swizzle"),
        ("swizzle.cuh", "row / (8 / SPAN) % SPAN;", "row % SPAN;", "a swizzle shifted by one"),
        config=MMA,
        shape=EVEN,
        name="f16",
    ),
    *_of(
        "mma_ldmatrix",
        ("swizzle.cuh", "return first ^ Tile::at", "return first + Tile::at", "a sum where bits overlap"),
        config={**F16, "bn": 32, "bk": 64},
        shape=EVEN,
        name="f16",
    ),
    *_of(
        "mma_ldmatrix",
        ("swizzle.cuh", "rows > row_of(e) &&", "rows >= row_of(e) &&", "a row beyond the edge is read"),
        config=MMA,
        shape=EVEN,
        name="f16",
    ),
    *_of(
        "mma_ldmatrix",
        ("mma_ldmatrix.cu", "lane % 8 + lane / 16 * 8", "lane % 16", "rows of a fragment of B exchanged"),
        config=MMA,
        shape=EVEN,
        name="f16",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "mma_ldmatrix",
        ("mma.cuh", "b.of[j / 2][j % 2 * 2 + 1]", "b.of[j / 2][j % 2 * 2]", "half of a fragment twice"),
        ("mma.cuh", "row + i * 8 + lane / 4", "row + i * 8 + lane / 8", "rows of C on each other"),
        config=MMA,
        shape=EVEN,
        name="f16",
    ),
    *_of(
        "mma_ldmatrix",
        (
            "mma.cuh",
            "sent = high ? word[w] : word[w + offset]",
            "sent = high ? word[w + offset] : word[w]",
            "lanes exchange the wrong words",
        ),
        config={**F16, "bm": 64},
        shape=EVEN,
        name="f16",
    ),
    *_of(
        "mma_general",
        ("mma_general.cu", "wait_group<STAGES - 2>", "wait_group<STAGES - 1>", "the tile may be under way"),
        (
            "mma_general.cu",
            "      __syncthreads();  // the tile has arrived",
            "      // the tile has arrived",
            "no barrier when a tile has arrived",
        ),
        ("mma_general.cu", "across > 2 * word", "across >= 2 * word", "a word beyond each row is copied"),
        config={"tile": 64},
        shape=(40, 46, 206),
        name="f16",
    ),
    *_of(
        "mma_general",
        (
            "mma_general.cu",
            "left > e * DOWN && across",
            "left >= e * DOWN && across",
            "a row beyond the last is copied",
        ),
        ("mma_general.cu", "tile + (row * 8 + (chunk ^ row % 8))", "tile + (row * 8 + chunk)", "chunks lie elsewhere"),
        (
            "mma_general.cu",
            "sums.multiply(a[group % 2], b[",
            "sums.multiply(a[0], b[",
            "the fragments of another step of k",
        ),
        config={"tile": 64},
        shape=(40, 48, 136),
        name="f16",
    ),
    *_of(
        "mma_general",
        ("mma_general.cu", "2 * word < count ? from", "2 * word <= count ? from", "an element beyond each row is read"),
        (
            "mma_general.cu",
            "piece == 2) copy.put(free)",
            "piece == 2 && k) copy.put(free)",
            "a tile stays in registers",
        ),
        config={"tile": 64},
        shape=(40, 45, 203),
        name="f16",
    ),
    *_of(
        "mma_general",
        ("mma_general.cu", "from += 64 - 64 / DOWN * down;", "from += 64;", "further sides from the wrong step of k"),
        config={"tile": 128},
        shape=(104, 136, 72),
        name="f16",
        layouts=("col", "row", "row"),
    ),
    *_of(
        "simt_general",
        ("simt_general.cu", "wait_group<STAGES - 2>", "wait_group<STAGES - 1>", "the next tile may be under way"),
        (
            "simt_general.cu",
            "      __syncthreads();  // the next tile has arrived",
            "      // the next tile has arrived",
            "no barrier when a tile has arrived",
        ),
        ("simt_general.cu", "left > 0);", "left >= 0);", "a line beyond the last is copied"),
        (
            "simt_general.cu",
            "outer_product(a[1], b[1]",
            "outer_product(a[0], b[1]",
            "the next tile's fragment is multiplied",
        ),
        ("simt_general.cu", "step = BK * panel.k_step", "step = BK", "the next tile of B along its rows"),
        config={"tile": 32},
        shape=(40, 45, 75),
    ),
    *_of(
        "simt_general",
        ("general.cuh", "c += THREADS / ACROSS * p.c_row;", "c += THREADS / ACROSS;", "rows of C are stored elsewhere"),
        ("general.cuh", "if (j + v < p.n) c[", "c[", "columns beyond the last are stored"),
        ("simt_general.cu", "odd % 16 == 0", "true", "chunks that are not aligned"),
        config={"tile": 32},
        shape=(40, 45, 43),
        layouts=("row", "row", "row"),
    ),
    *_of(
        "mma_pipelined",
        (
            "mma_pipelined.cu",
            "        ptx::cp_async_wait_group<STAGES - 2>",
            "        ptx::cp_async_wait_group<STAGES - 1>",
            "the tile that is read next may be under way",
        ),
        config=MMA_RING,
        shape=(40, 48, 136),
        name="f16",
    ),
    *_of(
        "mma_pipelined",
        ("mma_pipelined.cu", "  __syncthreads();\n  a[0]", "  a[0]", "no barrier when the first tile has arrived"),
        config=MMA_RING,
        shape=EVEN,
        name="f16",
    ),
    *_of(
        "mma_pipelined",
        ("mma_pipelined.cu", "        __syncthreads();\n", "", "no barrier when a tile has arrived"),
        (
            "mma_pipelined.cu",
            "free = (STAGES - 1) * STAGE",
            "free = (STAGES - 2) * STAGE",
            "the tile after is filled while it is read",
        ),
        config=MMA_RING,
        shape=(40, 48, 136),
        name="f16",
    ),
    *_of(
        "mma_pipelined",
        ("mma_pipelined.cu", "i < SPLITS;", "i < SPLITS - 1;", "a part of k is left out"),
        config={**MMA, "stages": 3, "splits": 2},
        shape=(40, 48, 136),
        name="f16",
    ),
    *_of(
        "mma_pipelined",
        (
            "packed.cuh",
            "if (column + v < columns)",
            "if (column + v <= columns)",
            "an element beyond each row is packed",
        ),
        config=MMA_RING,
        name="f16",
    ),
    *_of(
        "wgmma_tma",
        (
            "wgmma_tma.cu",
            "    ptx::mbarrier_try_wait_parity(full + 8 * now.stage, now.parity);\n",
            "    ptx::mbarrier_try_wait_parity(full + 8 * now.stage, 0);\n",
            "a wrong parity after the first round",
        ),
        ("wgmma_tma.cu", "wgmma_wait_group<0>", "wgmma_wait_group<1>", "a stage is filled while products read it"),
        ("wgmma_tma.cu", "    __syncthreads();  // both", "    // both", "a stage is filled while others read it"),
        (
            "wgmma_tma.cu",
            "mbarrier_arrive_expect_tx(barrier, Tiles::STAGE)",
            "mbarrier_arrive_expect_tx(barrier, Tiles::A_BYTES)",
            "a barrier that does not wait for B",
        ),
        ("descriptor.cuh", "ROWS = 1024 >> 4", "ROWS = 512 >> 4", "8 rows at the wrong distance"),
        ("descriptor.cuh", "SWIZZLE_128 = 1;", "SWIZZLE_128 = 2;", "a swizzle of 64 bytes"),
        ("descriptor.cuh", "K_MAJOR ? 32 : 2048", "K_MAJOR ? 64 : 2048", "every other 32 bytes of k"),
        ("wgmma.cuh", "threadIdx.x % 128 / 32 * 16", "threadIdx.x % 128 / 32 * 8", "rows of C on each other"),
        config={"bm": 128, "bn": 64, "stages": 2},
        shape=(104, 72, 328),
        name="f16",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "wgmma_tma",
        ("descriptor.cuh", "8192 >> 4", "4096 >> 4", "the next 64 columns at the wrong distance"),
        ("tma.cuh", "side + 64 * box", "side + 32 * box", "boxes of columns that overlap"),
        config={"bm": 128, "bn": 128, "stages": 2},
        shape=(104, 136, 72),
        name="f16",
        layouts=("col", "row", "row"),
    ),
    *_of(
        "wgmma_specialized",
        (
            "wgmma_specialized.cu",
            "empty + 8 * now.stage, now.parity ^ 1",
            "empty + 8 * now.stage, now.parity",
            "a wrong parity of the producer",
        ),
        (
            "wgmma_specialized.cu",
            "full + 8 * now.stage, now.parity);\n    ptx::wgmma_fence",
            "full + 8 * now.stage, now.parity ^ 1);\n    ptx::wgmma_fence",
            "a wrong parity of the consumers",
        ),
        (
            "wgmma_specialized.cu",
            "wgmma_wait_group<1>",
            "wgmma_wait_group<2>",
            "a stage is handed back while it is read",
        ),
        (
            "wgmma_specialized.cu",
            "    ptx::wgmma_wait_group<0>();\n    release",
            "    release",
            "sums are stored while products write them",
        ),
        ("wgmma_specialized.cu", "          release(before);\n", "", "stages are not handed back"),
        ("wgmma_specialized.cu", "    ptx::wgmma_fence();\n", "", "no fence before the first product of a stage"),
        (
            "wgmma_specialized.cu",
            "barrier, m, column_mask",
            "barrier, 1, column_mask",
            "B in the place of the next slice",
        ),
        ("pipeline.cuh", "parity ^= 1", "parity ^= 0", "a parity that does not turn"),
        (
            "pipeline.cuh",
            "mbarrier_init(empty + 8 * stage, consumers)",
            "mbarrier_init(empty + 8 * stage, 1)",
            "a stage that one consumer hands back for all",
        ),
        config={"bm": 128, "bn": 64, "stages": 2},
        shape=(104, 72, 328),
        name="f16",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "wgmma_persistent",
        (
            "wgmma_persistent.cu",
            "gridDim.x / CLUSTER;\n    if",
            "gridDim.x / CLUSTER + 1;\n    if",
            "tiles are passed over",
        ),
        (
            "wgmma_persistent.cu",
            "first = bands * band",
            "first = bands",
            "bands that overlap",
        ),
        config={"bm": 64, "bn": 32, "stages": 2, "band": 4},
        shape=(520, 552, 72),
        name="f16",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "wgmma_cluster",
        ("cluster.cuh", "mask |= 1u << (i + CM * n)", "mask |= 1u << (i + CM * n + 1)", "a copy to the wrong blocks"),
        (
            "cluster.cuh",
            "    if (below >= m) ++below;  // itself is in the row\n",
            "",
            "a block that hands back to itself twice",
        ),
        (
            "wgmma_specialized.cu",
            "      __syncwarp();\n      place.sync();",
            "      __syncwarp();",
            "a block that ends while others use its memory",
        ),
        (
            "wgmma_specialized.cu",
            "Tiles::WARPGROUPS * place.LISTENERS",
            "Tiles::WARPGROUPS",
            "a stage that one block hands back for all",
        ),
        config={"bm": 128, "bn": 64, "stages": 2, "cm": 2, "cn": 1, "band": 4},
        shape=(232, 72, 328),
        name="f16",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "wgmma_cluster",
        ("tma.cuh", "to += slice * B::PART", "to += slice * B::PART / 2", "slices of a box on each other"),
        ("tma.cuh", "+ slice * PART; }", "; }", "the same slice of a box twice"),
        config={"bm": 128, "bn": 96, "stages": 2, "cm": 2, "cn": 1, "band": 4},
        shape=(232, 72, 72),
        name="f16",
        layouts=("row", "row", "row"),
    ),
    *_of(
        "wgmma_grouped",
        ("wgmma_grouped.cu", "      first = next_first;\n", "", "tiles counted from the first group on"),
        (
            "wgmma_grouped.cu",
            "within / height * Tiles::BN",
            "within % height * Tiles::BN",
            "the columns of another tile",
        ),
        ("wgmma_grouped.cu", "tile.row + 63) / 64", "tile.row) / 64", "the last rows are not brought"),
        ("wgmma_grouped.cu", "blocks * 8192 + Tiles::B_BYTES", "Tiles::STAGE", "rows are awaited that nobody brings"),
        ("wgmma_grouped.cu", "this->now.parity ^ 1", "this->now.parity", "a producer that waits for the wrong phase"),
        (
            "wgmma_specialized.cu",
            "      release(now.stage);\n      now.next();",
            "      now.next();",
            "a warpgroup without rows that hands nothing back",
        ),
        (
            "wgmma_specialized.cu",
            "parity(full + 8 * now.stage, now.parity);\n      release(now.stage);",
            "parity(full + 8 * now.stage, now.parity ^ 1);\n      release(now.stage);",
            "a warpgroup without rows that runs ahead",
        ),
        config={"bn": 64, "stages": 2, "blocks": 2},
        shape=(168, 136, 200),
        name="f16",
        layouts=("row", "col", "row"),
        batch=3,
    ),
    *_of(
        "wgmma_streamk",
        (
            "wgmma_streamk.cu",
            "(rank + 1) / SPLITS - first",
            "(rank + 1) / SPLITS - first - 1",
            "a step of each part is left out",
        ),
        (
            "wgmma_streamk.cu",
            "whole + blockIdx.x / SPLITS",
            "whole + blockIdx.x",
            "blocks of a cluster at different tiles",
        ),
        (
            "wgmma_streamk.cu",
            "count, gridDim.x / SPLITS",
            "count, gridDim.x",
            "shared tiles are left out",
        ),
        ("wgmma_streamk.cu", "place + rank * PART", "place + to * PART", "parts that overwrite each other"),
        ("wgmma_streamk.cu", "to * OWN + i % OWN", "rank * OWN + i % OWN", "the columns of another block"),
        ("wgmma_streamk.cu", "int of = 1;", "int of = 2;", "the second part is left out"),
        ("wgmma_streamk.cu", "here + of * PART", "here + PART", "the second part for all others"),
        (
            "wgmma_streamk.cu",
            "rest.tile.col + rank * M",
            "rest.tile.col + 0 * M",
            "all finish the same columns",
        ),
        ("wgmma_streamk.cu", "% Tiles::STAGES;", "* 0;", "shared tiles begin at the first stage of the ring"),
        ("wgmma_streamk.cu", "/ Tiles::STAGES % 2;", "* 0;", "a wrong parity where shared tiles begin"),
        config={"bm": 64, "bn": 32, "stages": 3, "splits": 4, "blocks": 8},
        shape=(200, 72, 264),
        name="f16",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "wgmma_blockscaled",
        ("wgmma_blockscaled.cu", "i > 0);", "true);", "a part begins with what the last one held"),
        (
            "wgmma_blockscaled.cu",
            "wgmma_wait_group<1>",
            "wgmma_wait_group<2>",
            "a part is added while products change it",
        ),
        ("wgmma_blockscaled.cu", "add(parts[(i - 1) % 2]", "add(parts[i % 2]", "the other part is added"),
        ("wgmma_blockscaled.cu", "    this->release(this->before);\n", "", "stages are never handed back"),
        ("wgmma_blockscaled.cu", "    this->clear();\n", "", "sums begin with those of the tile before"),
        ("wgmma_blockscaled.cu", "step + TOGETHER <= steps", "step + TOGETHER - 1 <= steps", "more parts than k has"),
        config={"bm": 64, "bn": 64, "stages": 3, "blocks": 2},
        shape=(104, 136, 784),
        name="e4m3",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "wgmma_epilogue",
        (
            "staged.cuh",
            "lane % 16 * P::ROW + ((lane / 16 ^ key(lane % 16)) << 4)",
            "lane % 16 * P::ROW + (lane / 16 << 4)",
            "pieces without a swizzle",
        ),
        ("staged.cuh", "P::ROW == 128 ? row % 8", "P::ROW == 128 ? row % 4", "a swizzle shifted by one"),
        ("staged.cuh", "      ptx::fence_proxy_async();\n", "", "no fence before a copy reads what was staged"),
        (
            "staged.cuh",
            "wait_group_read<P::BUFFERS - 1>();\n",
            "wait_group_read<P::BUFFERS>();\n",
            "a piece is staged over one that is still copied out",
        ),
        ("staged.cuh", "      buffer = other - buffer;\n", "", "one buffer for all pieces"),
        ("wgmma_epilogue.cu", "      before = at;\n", "", "the tile is stored in the place of another"),
        (
            "wgmma_epilogue.cu",
            "piece < P::COUNT; ++piece) store(",
            "piece < P::COUNT - 1; ++piece) store(",
            "the last tile lacks a piece",
        ),
        config={"bm": 128, "bn": 64, "stages": 2, "cm": 1, "cn": 1, "band": 4, "blocks": 1},
        shape=(232, 72, 328),
        name="f16",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "wgmma_epilogue",
        (
            "staged.cuh",
            "(column * SIZE ^ key(row) << 4)",
            "column * SIZE",
            "chunks read where they do not lie",
        ),
        ("staged.cuh", "min(16, end - at.row)", "16", "rows beyond the last are stored"),
        config={"bm": 128, "bn": 64, "stages": 2, "cm": 1, "cn": 1, "band": 4, "blocks": 1},
        shape=(104, 71, 72),
        name="f16",
        layouts=("row", "col", "row"),
    ),
    *_of(
        "wgmma_epilogue",
        ("wgmma_pack.cu", "shift & 8 ? words[w + 2]", "shift & 8 ? words[w + 1]", "a row shifted by 4 bytes for 8"),
        ("wgmma_pack.cu", "row < x.sides ? x.depth : 0", "x.depth", "rows beyond the last"),
        ("wgmma_pack.cu", "  __syncthreads();  // all is in the tile\n", "", "words are read before they are written"),
        ("wgmma_pack.cu", "next -= parts;", "next = blockIdx.x + 1;", "the first part of A is left out"),
        config={"bm": 64, "bn": 32, "stages": 2, "cm": 1, "cn": 1, "band": 4, "blocks": 2},
        shape=(40, 27, 131),
        name="bf16",
        layouts=("row", "row", "row"),
    ),
    *_of(
        "gemv_thread",
        ("gemv_thread.cu", "if (r >= g.results) return;", "if (r > g.results) return;", "a result too many"),
        shape=VECTOR,
    ),
    *_of(
        "gemv_thread",
        (
            "gemv.cuh",
            "p.b_col, p.b_row, p.a_col",
            "p.b_row, p.b_col, p.a_col",
            "the steps along and across W exchanged",
        ),
        shape=(1, 72, 203),
    ),
    *_of(
        "gemv_thread_smem",
        (
            "gemv_thread_smem.cu",
            "  __syncthreads();  // the previous tile has been read\n",
            "",
            "x is stored while it is read",
        ),
        (
            "gemv_thread_smem.cu",
            "(first + k) * g.x_step]);\n  }\n  __syncthreads();",
            "(first + k) * g.x_step]);\n  }",
            "x is read before it is stored",
        ),
        config={"tile": 512},
        shape=LONG,
    ),
    *_of(
        "gemv_thread_smem",
        ("gemv_thread_smem.cu", "k < TILE && k < g.k - first; ++k", "k < TILE; ++k", "beyond the end of x"),
        config={"tile": 512},
        shape=VECTOR,
    ),
    *_of(
        "gemv_warp",
        ("gemv_warp.cu", "k < g.k; k += LANES", "k < g.k; k += 32", "elements are passed over"),
        config={"r": 2},
        shape=VECTOR,
    ),
    *_of(
        "gemv_warp",
        ("gemv_warp.cu", "if (lane == 0 && r < g.results)", "if (r < g.results)", "every lane stores"),
        config={"r": 2},
        shape=VECTOR,
        survives="after an XOR reduction all lanes hold the same sum, and store the same",
    ),
    *_of(
        "gemv_warp",
        ("gemv_warp.cu", "if (lane == 0 && r < g.results)", "if (lane == 0)", "results beyond the last"),
        config={"r": 2},
        shape=(73, 1, 203),
    ),
    *_of(
        "gemv_warp",
        ("gemv_warp.cu", "offset = LANES / 2", "offset = LANES / 4", "half of the lanes are not added"),
        config={"r": 2},
        shape=VECTOR,
    ),
    *_of(
        "gemv_vectorized",
        ("gemv_vectorized.cu", "first + s * team >= chunks", "first + s * team > chunks", "a chunk beyond the end"),
        config={"team": 32, "steps": 2},
        shape=(72, 1, 237),
    ),
    *_of(
        "gemv_vectorized",
        (
            "gemv_vectorized.cu",
            "k = chunks * VEC + member; k < g.k",
            "k = chunks * VEC + member; k <= g.k",
            "an element beyond the end",
        ),
        config={"team": 8},
        shape=(9, 1, 206),
        name="f16",
    ),
    *_of(
        "gemv_vectorized",
        (
            "gemv_vectorized.cu",
            "    __syncthreads();\n    mine = 0;",
            "    mine = 0;",
            "sums of warps are read before they are stored",
        ),
        config={"team": 64},
        shape=LONG,
    ),
    *_of(
        "gemv_vectorized",
        (
            "gemv_vectorized.cu",
            "    __syncthreads();  // the previous batch has been read\n",
            "",
            "the barrier between matrices of a batch",
        ),
        config={"team": 64},
        shape=LONG,
        survives="every batch below 65536 has a block of its own",
    ),
    *_of(
        "gemv_vectorized",
        (
            "gemv_columns.cu",
            "    __syncthreads();\n    for",
            "    for",
            "sums of warps are read before they are stored",
        ),
        ("gemv_columns.cu", "[lane * VEC + v] = sums[v]", "[lane * VEC] = sums[v]", "sums of neighbours at one place"),
        shape=(1, 72, 200),
    ),
    *_of(
        "gemv_vectorized",
        ("gemv_finish.cu", "sums[part + lane]", "sums[part]", "one part of k for all"),
        config={"split": 4},
        shape=VECTOR,
    ),
)
