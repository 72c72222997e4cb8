"""Wrong versions of the kernels for matrix-vector products."""

from __future__ import annotations

from mutant import of

VECTOR, LONG = (72, 1, 203), (9, 1, 2056)
AS_COLUMNS = ("row", "col", "row")

GEMV = (
    *of(
        "gemv_thread",
        ("gemv_thread.cu", "if (r >= g.results) return;", "if (r > g.results) return;", "a result too many"),
        shape=VECTOR,
    ),
    *of(
        "gemv_thread",
        (
            "gemv.cuh",
            "p.b_col, p.b_row, p.a_col",
            "p.b_row, p.b_col, p.a_col",
            "the steps along and across W exchanged",
        ),
        shape=(1, 72, 203),
    ),
    *of(
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
    *of(
        "gemv_thread_smem",
        ("gemv_thread_smem.cu", "k < TILE && k < g.k - first; ++k", "k < TILE; ++k", "beyond the end of x"),
        config={"tile": 512},
        shape=VECTOR,
    ),
    *of(
        "gemv_warp",
        ("gemv_warp.cu", "k < g.k; k += LANES", "k < g.k; k += 32", "elements are passed over"),
        config={"r": 2},
        shape=VECTOR,
    ),
    *of(
        "gemv_warp",
        ("gemv_warp.cu", "if (lane == 0 && r < g.results)", "if (r < g.results)", "every lane stores"),
        config={"r": 2},
        shape=VECTOR,
        survives="after an XOR reduction all lanes hold the same sum, and store the same",
    ),
    *of(
        "gemv_warp",
        ("gemv_warp.cu", "if (lane == 0 && r < g.results)", "if (lane == 0)", "results beyond the last"),
        config={"r": 2},
        shape=(73, 1, 203),
    ),
    *of(
        "gemv_warp",
        ("gemv_warp.cu", "offset = LANES / 2", "offset = LANES / 4", "half of the lanes are not added"),
        config={"r": 2},
        shape=VECTOR,
    ),
    *of(
        "gemv_vectorized",
        ("gemv_vectorized.cu", "first + s * team >= chunks", "first + s * team > chunks", "a chunk beyond the end"),
        config={"team": 32, "steps": 2},
        shape=(72, 1, 237),
    ),
    *of(
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
    *of(
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
    *of(
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
    *of(
        "gemv_vectorized",
        (
            "gemv_columns.cu",
            "  }\n  __syncthreads();\n}",
            "  }\n}",
            "sums of warps are read before they are stored",
        ),
        ("gemv_columns.cu", "[lane * VEC + v] = sums[v]", "[lane * VEC] = sums[v]", "sums of neighbors at one place"),
        shape=(1, 72, 200),
    ),
    *of(
        "gemv_vectorized",
        ("gemv_cluster.cu", "&of_block[rank][e]", "&of_block[0][e]", "parts of k at one place"),
        ("gemv_cluster.cu", "int part = rank * parts + ", "int part = ", "the same part of k in each block"),
        (
            "gemv_cluster.cu",
            "    __syncwarp();\n    ptx::barrier_cluster_arrive();\n    ptx::barrier_cluster_wait();\n",
            "",
            "sums are added before they have come",
        ),
        config={"split": 4},
        shape=(1, 72, 200),
    ),
    *of(
        "gemv_vectorized",
        ("gemv_finish.cu", "sums[part + lane]", "sums[part]", "one part of k for all"),
        config={"split": 4},
        shape=VECTOR,
    ),
    *of(
        "gemv_quantized",
        (
            "gemv_quantized.cu",
            "    __syncthreads();\n    finish",
            "    finish",
            "sums of warps read before they are stored",
        ),
        ("gemv_quantized.cu", "ahead + distance[i], inside", "ahead, inside", "one row of W for all eights"),
        ("gemv_quantized.cu", "sum += of_warp[warp * SUMS + e]", "sum = of_warp[warp * SUMS + e]", "one warp's sum"),
        ("gemv_quantized.cu", "if (row >= p.n || i >= p.m) continue;", "", "results beyond the last"),
        ("gemv_quantized.cu", "k_of(step) < p.k)", "true)", "beyond the end of k"),
        config={"warps": 4, "steps": 2},
        shape=(5, 45, 328),
        name="f16",
        layouts=AS_COLUMNS,
    ),
    *of(
        "gemv_quantized",
        ("gemv_quantized.cu", "8 * e * step : 0", "8 * e * step : 8 * e * step", "rows beyond the last are read"),
        config={"warps": 4},
        shape=(3, 41, 64),
        name="f16",
        layouts=AS_COLUMNS,
    ),
    *of(
        "gemv_quantized",
        ("gemv_quantized.cu", "k + 2 * i + 1 < end", "k + 2 * i < end", "an element beyond the end of k"),
        shape=(3, 20, 43),
        name="f16",
    ),
    *of(
        "gemv_quantized",
        ("gemv_quantized.cu", "if (INSIDE || k < end)", "if (INSIDE || k <= end)", "x beyond the end of k"),
        shape=(1, 20, 40),
        name="f16",
        layouts=AS_COLUMNS,
    ),
)
