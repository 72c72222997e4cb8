"""Wrong versions of the kernels for CUDA cores."""

from __future__ import annotations

from mutant import EVEN, of

SMALL = {"bm": 32, "bn": 32, "bk": 8, "tm": 4, "tn": 4}
WIDE = {"bm": 32, "bn": 64, "bk": 8, "tm": 4, "tn": 8}
WARPS = {"bm": 64, "bn": 64, "bk": 8, "wm": 32, "wn": 32, "tm": 4, "tn": 8}
RING = {"bm": 32, "bn": 32, "bk": 8, "wm": 32, "wn": 16, "tm": 4, "tn": 4, "stages": 3}

SIMT = (
    *of(
        "simt_single_block",
        ("simt_single_block.cu", "p.b_at(batch, 0, j)", "p.b_at(batch, 0, i)", "a row's index for a column"),
        ("simt_single_block.cu", "k < p.k", "k <= p.k", "one step of k too many"),
        shape=(7, 5, 9),
    ),
    *of(
        "simt_naive",
        ("simt_naive.cu", "if (j >= p.n) return;", "if (j > p.n) return;", "a column too many"),
        ("simt_single_block.cu", "a += p.a_col", "a += p.a_row", "down a column of A"),
        ("simt_naive.cu", "i < p.m;", "i < p.m - 1;", "the last row is left out"),
    ),
    *of(
        "simt_uncoalesced",
        ("simt_uncoalesced.cu", "(p, batch, i, j)", "(p, batch, j, i)", "rows and columns exchanged"),
    ),
    *of(
        "simt_uncoalesced",
        (
            "simt_uncoalesced.cu",
            "batch += gridDim.z",
            "batch += gridDim.z + 1",
            "the step over a grid that ends at 65535 in z",
        ),
        survives="every batch below 65536 has a block of its own, which takes no second step",
    ),
    *of(
        "simt_linear",
        ("simt_linear.cu", "  *sum = 0;\n", "", "sums begin with what is in C"),
        ("simt_linear.cu", "j = id % p.n", "j = id % p.m", "columns counted by rows"),
    ),
    *of(
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
    *of(
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
    *of(
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
    *of(
        "simt_threadtile",
        ("registers.cuh", "__syncthreads();\n    multiply", "\n    multiply", "no barrier before the tiles are read"),
        config=SMALL,
    ),
    *of(
        "simt_padded",
        ("registers.cuh", "__syncthreads();\n  }", "\n  }", "no barrier before the next tiles"),
        config=SMALL,
    ),
    *of(
        "simt_threadtile",
        ("registers.cuh", "if (row >= p.m) continue;", "if (row > p.m) continue;", "a row too many"),
        config=SMALL,
    ),
    *of(
        "simt_vectorized",
        ("registers.cuh", "if (column >= p.n) continue;", "if (column > p.n) continue;", "a column too many"),
        config=SMALL,
        shape=EVEN,
    ),
    *of(
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
    *of(
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
    *of(
        "simt_vectorized",
        ("load.cuh", "e / AGAIN * LAYERS * DEEP", "e / AGAIN * DEEP", "layers of a tile on each other"),
        config={**SMALL, "bk": 32},
        shape=EVEN,
    ),
    *of(
        "simt_padded",
        ("simt_padded.cu", "OPERAND == ROW ? SIDE + 4 : SIDE", "SIDE", "no pad"),
        config=SMALL,
        shape=EVEN,
    ),
    *of(
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
    *of(
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
    *of(
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
    *of(
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
    *of(
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
    *of(
        "simt_pipelined",
        ("simt_pipelined.cu", "    __syncthreads();\n", "", "no barrier when a tile has been stored"),
        (
            "simt_pipelined.cu",
            "put(ring + (1 - now) * STAGE);",
            "put(ring + now * STAGE);",
            "the tile is stored where this one is read",
        ),
        config={**RING, "stages": 2},
        shape=EVEN,
    ),
    *of(
        "simt_batched",
        (
            "batched.cuh",
            "_group<0>();\n    __syncthreads();\n",
            "_group<0>();\n",
            "matrices are read before they have come",
        ),
        (
            "batched.cuh",
            "    __syncthreads();\n    BatchOperand<C",
            "    BatchOperand<C",
            "C leaves before it is complete",
        ),
        ("batched.cuh", "int(min((long long)PRODUCTS, p.batch - first))", "PRODUCTS", "products beyond the last"),
        ("batched.cuh", "element + Lines::PIECE <= elements", "element < elements", "a piece beyond the last matrix"),
        (
            "batched.cuh",
            "rest += elements / Lines::PIECE * Lines::PIECE",
            "rest += elements",
            "less than a piece is left out",
        ),
        ("simt_batched.cu", "row + i * ROWS_APART", "row + i", "rows of other threads"),
        config={"products": 4, "tm": 7},
        shape=(14, 3, 5),
        batch=5,
    ),
    *of(
        "mma_batched",
        ("mma_batched.cu", "line += BY_LINES ? lane % 16", "line += BY_LINES ? lane % 8", "8 lines twice"),
        ("mma_batched.cu", "bool BY_LINES = IS_A ==", "bool BY_LINES = IS_A !=", "the order of A's matrices in B"),
        ("mma_batched.cu", "8 * j + column, out", "8 * j, out", "pairs of sums at one place"),
        config={"products": 2},
        shape=(16, 32, 16),
        name="f16",
        batch=5,
    ),
    *of(
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
    *of(
        "simt_general",
        ("general.cuh", "c += THREADS / ACROSS * p.c_row;", "c += THREADS / ACROSS;", "rows of C are stored elsewhere"),
        ("general.cuh", "if (j + v < p.n) c[", "c[", "columns beyond the last are stored"),
        ("simt_general.cu", "odd % 16 == 0", "true", "chunks that are not aligned"),
        config={"tile": 32},
        shape=(40, 45, 43),
        layouts=("row", "row", "row"),
    ),
)
