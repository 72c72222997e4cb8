// From an operand in global memory into a tile in shared memory.
#pragma once
#include "tile.cuh"

// N neighbours that one access moves; at most 16 bytes are asked to be aligned.
template <class T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Chunk { T of[N]; };

// What a block reads of an operand: `sides` rows of A, or columns of B, by all of k. In ROW neighbours of one side are
// adjacent, as in a row-major A; a row-major B is COL.
template <class T> struct Panel {
  const T* origin;
  long long side_step, k_step;
  int sides, depth;
};

template <class T, class Out> __device__ __forceinline__ Panel<T> panel_of_a(const Product<T, Out>& p, Tile tile) {
  return {p.a_at(tile.batch, tile.row, 0), p.a_row, p.a_col, p.m - tile.row, p.k};
}

template <class T, class Out> __device__ __forceinline__ Panel<T> panel_of_b(const Product<T, Out>& p, Tile tile) {
  return {p.b_at(tile.batch, 0, tile.col), p.b_col, p.b_row, p.n - tile.col, p.k};
}

__device__ constexpr Layout transposed(Layout layout) { return layout == ROW ? COL : layout == COL ? ROW : ANY; }

// Where element (side, k) of a tile lies in shared memory, and which of its neighbours are adjacent there.
template <int SIDE, int BK> struct SideMajor {
  static constexpr int SIZE = SIDE * BK;
  static constexpr Layout ADJACENT = ROW;
  static __device__ __forceinline__ int at(int side, int k) { return side * BK + k; }
};

template <int SIDE, int BK, int PAD = 0> struct KMajor {
  static constexpr int SIZE = (SIDE + PAD) * BK;
  static constexpr Layout ADJACENT = COL;
  static __device__ __forceinline__ int at(int side, int k) { return k * (SIDE + PAD) + side; }
};

// How the threads of a block share the loading of a tile of SIDE by BK. Lanes follow the memory: along k in ROW, and
// there in pieces of LINE bytes (one sector, so that the other lanes are on other sides); along the sides otherwise.
// Every chunk lies wholly inside the operand or wholly outside: the host's VEC divides the side it runs along.
template <class T, Layout LAYOUT, int VEC, int SIDE, int BK, int THREADS, int LINE = 32> struct Load {
  static constexpr int CHUNKS = SIDE * BK / VEC, EACH = (CHUNKS + THREADS - 1) / THREADS;
  static constexpr int SECTOR = LINE / (VEC * int(sizeof(T))), ROW_CHUNKS = BK / VEC;
  static constexpr int PIECE = SECTOR < 1 ? 1 : ROW_CHUNKS % SECTOR ? ROW_CHUNKS : SECTOR;  // chunks of a side together

  static constexpr Layout LIES = LAYOUT;
  static constexpr int WIDTH = VEC;

  Chunk<T, VEC> held[EACH];

  static __device__ __forceinline__ int side_of(int chunk) {
    if constexpr (LAYOUT == ROW) return chunk / PIECE % SIDE;
    return chunk % (SIDE / VEC) * VEC;
  }
  static __device__ __forceinline__ int k_of(int chunk) {
    if constexpr (LAYOUT == ROW) return (chunk / (PIECE * SIDE) * PIECE + chunk % PIECE) * VEC;
    return chunk / (SIDE / VEC);
  }
  static __device__ __forceinline__ const T* address(const Panel<T>& panel, int side, int k) {
    return panel.origin + (LAYOUT == COL ? side : side * panel.side_step) + (LAYOUT == ROW ? k : k * panel.k_step);
  }

  // The chunks of this thread from the tile that begins at k0, zeros outside of the operand.
  __device__ __forceinline__ void fetch(const Panel<T>& panel, int k0) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      int chunk = threadIdx.x + e * THREADS, side = side_of(chunk), k = k0 + k_of(chunk);
      bool inside = side < panel.sides && k < panel.depth && (CHUNKS % THREADS == 0 || chunk < CHUNKS);
      held[e] = Chunk<T, VEC>{};
      if (inside) held[e] = *reinterpret_cast<const Chunk<T, VEC>*>(address(panel, side, k));
    }
  }

  // The same chunks straight into shared memory, without passing through registers.
  template <class Arrangement> static __device__ __forceinline__ void copy(const Panel<T>& panel, int k0, T* tile) {
    static_assert(VEC == 1 || Arrangement::ADJACENT == LAYOUT, "cp.async does not transpose");
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      int chunk = threadIdx.x + e * THREADS, side = side_of(chunk), k = k_of(chunk);
      if (CHUNKS % THREADS != 0 && chunk >= CHUNKS) break;
      bool inside = side < panel.sides && k0 + k < panel.depth;
      const T* from = inside ? address(panel, side, k0 + k) : panel.origin;
      ptx::cp_async<VEC * int(sizeof(T))>(tile + Arrangement::at(side, k), from, inside);
    }
  }

  // Into shared memory: whole chunks where neighbours stay neighbours, else element by element.
  template <class Arrangement, class S> __device__ __forceinline__ void put(S* tile) const {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      int chunk = threadIdx.x + e * THREADS, side = side_of(chunk), k = k_of(chunk);
      if (CHUNKS % THREADS != 0 && chunk >= CHUNKS) break;
      Chunk<S, VEC> wide;
#pragma unroll
      for (int v = 0; v < VEC; ++v) wide.of[v] = widen<S>(held[e].of[v]);
      if constexpr (Arrangement::ADJACENT == LAYOUT) {
        *reinterpret_cast<Chunk<S, VEC>*>(tile + Arrangement::at(side, k)) = wide;
      } else {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          tile[LAYOUT == ROW ? Arrangement::at(side, k + v) : Arrangement::at(side + v, k)] = wide.of[v];
        }
      }
    }
  }
};

// KMajor without a pad, for what lies along k in memory: the XOR sends the chunks that one PIECE takes of k to different
// parts of the banks. It keeps strips of 16 bytes whole.
template <class S, int SIDE, int BK, class Loaded> struct Swizzled {
  static constexpr int SIZE = SIDE * BK, BANKS = 128 / int(sizeof(S)), STRIP = 16 / int(sizeof(S));
  static constexpr Layout ADJACENT = COL;
  static constexpr int SPAN = SIDE % BANKS ? SIDE & -SIDE : BANKS;
  static constexpr int PART = BANKS / Loaded::PIECE > STRIP ? BANKS / Loaded::PIECE : STRIP;
  static __device__ __forceinline__ int at(int side, int k) {
    if constexpr (Loaded::LIES != ROW) return k * SIDE + side;
    return k * SIDE + (side ^ k / Loaded::WIDTH % Loaded::PIECE * PART % SPAN);
  }
};
