// Loads an operand from global memory into a tile in shared memory.
#pragma once
#include "tile.cuh"

// N adjacent elements moved by one access, aligned to at most 16 bytes.
template <class T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Chunk { T of[N]; };

// The part of an operand that a block reads: `sides` rows of A, or columns of B, by all of k. In ROW the elements of
// one side are adjacent, as in a row-major A; a row-major B is COL.
template <class T> struct Panel {
  const T* origin;
  long long side_step, k_step;
  int sides, depth;
};

template <class T, class Out>
__device__ __forceinline__ Panel<typename OperandsOf<T>::A> panel_of_a(const Product<T, Out>& p, Tile tile) {
  return {p.a_at(tile.batch, tile.row, 0), p.a_row, p.a_col, p.m - tile.row, p.k};
}

template <class T, class Out>
__device__ __forceinline__ Panel<typename OperandsOf<T>::B> panel_of_b(const Product<T, Out>& p, Tile tile) {
  return {p.b_at(tile.batch, 0, tile.col), p.b_col, p.b_row, p.n - tile.col, p.k};
}

__device__ constexpr Layout transposed(Layout layout) { return layout == ROW ? COL : layout == COL ? ROW : ANY; }

// The position of element (side, k) of a tile in shared memory, which of its neighbors are adjacent there, and the
// distance of elements whose sides differ by multiples of SPAN.
template <int SIDE, int BK> struct SideMajor {
  static constexpr int SIZE = SIDE * BK, SPAN = 1;
  static constexpr Layout ORDER = ROW;
  static __device__ constexpr int distance(int sides, int ks) { return sides * BK + ks; }
  static __device__ __forceinline__ int at(int side, int k) { return distance(side, k); }
};

template <int SIDE, int BK> struct KMajor {
  static constexpr int SIZE = SIDE * BK, SPAN = 1;
  static constexpr Layout ORDER = COL;
  static __device__ constexpr int distance(int sides, int ks) { return ks * SIDE + sides; }
  static __device__ __forceinline__ int at(int side, int k) { return distance(side, k); }
};

// How the threads of a block share the loading of a tile of SIDE by BK, tile after tile along k. Lanes follow memory
// order: along k in ROW, in pieces of LINE bytes (a sector, so that other lanes are on other sides), and along sides
// otherwise. Every chunk is completely inside the operand or completely outside: VEC divides the side it runs along. A
// thread's further chunks are at constant distances from its first: down the sides, then along k.
template <class T, Layout LAYOUT, int VEC, int SIDE, int BK, int THREADS, int LINE = 32> struct Load {
  static constexpr Layout ORDER = LAYOUT;
  static constexpr int WIDTH = VEC, SECTOR = LINE / (VEC * int(sizeof(T))), LONGEST = BK / VEC;
  static constexpr int PIECE = LAYOUT != ROW || SECTOR < 1 ? 1 : LONGEST < SECTOR ? LONGEST : SECTOR;
  static constexpr int TALL = LAYOUT == ROW ? 1 : VEC, DEEP = LAYOUT == ROW ? VEC * PIECE : 1;  // of a chunk, a piece
  static constexpr int LAYER = SIDE / TALL * PIECE, CHUNKS = SIDE * BK / VEC;  // a layer has one piece per side
  static constexpr int EACH = (CHUNKS + THREADS - 1) / THREADS, AGAIN = LAYER > THREADS ? LAYER / THREADS : 1;
  static constexpr int LAYERS = LAYER > THREADS ? 1 : THREADS / LAYER;
  static_assert(LAYER % THREADS == 0 || THREADS % LAYER == 0, "threads and sides do not fit");

  Chunk<T, VEC> chunks[EACH];
  const T* next;  // this thread's first chunk of the next tile
  int sides, depth;  // what is left of the operand from that chunk on

  __device__ __forceinline__ explicit Load(const Panel<T>& panel) {
    sides = panel.sides - side();
    depth = panel.depth - k();
    next = panel.origin + offset(panel, side(), k());
  }
  static __device__ __forceinline__ int side() { return threadIdx.x % LAYER / PIECE * TALL; }
  static __device__ __forceinline__ int k() {
    return threadIdx.x / LAYER * DEEP + (LAYOUT == ROW ? threadIdx.x % PIECE * VEC : 0);
  }
  static constexpr __device__ int side_of(int e) { return e % AGAIN * (THREADS / PIECE * TALL); }
  static constexpr __device__ int k_of(int e) { return e / AGAIN * LAYERS * DEEP; }
  static __device__ __forceinline__ long long offset(const Panel<T>& panel, int side, int k) {
    return (LAYOUT == COL ? side : side * panel.side_step) + (LAYOUT == ROW ? k : k * panel.k_step);
  }
  static __device__ __forceinline__ bool has(int e) {
    return EACH * THREADS == CHUNKS || e + 1 < EACH || threadIdx.x + e * THREADS < CHUNKS;
  }
  __device__ __forceinline__ bool inside(int e) const { return side_of(e) < sides && k_of(e) < depth && has(e); }
  __device__ __forceinline__ void advance(const Panel<T>& panel) {
    next += LAYOUT == ROW ? BK : BK * panel.k_step;
    depth -= BK;
  }

  // This thread's chunks of the next tile, with zeros outside the operand.
  __device__ __forceinline__ void fetch(const Panel<T>& panel) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      chunks[e] = Chunk<T, VEC>{};
      const T* from = next + offset(panel, side_of(e), k_of(e));
      if (inside(e)) chunks[e] = *reinterpret_cast<const Chunk<T, VEC>*>(from);
    }
    advance(panel);
  }

  // The same chunks copied to shared memory without passing through registers.
  template <class Arrangement, class S> __device__ __forceinline__ void copy(const Panel<T>& panel, S* tile) {
    static_assert(VEC == 1 || Arrangement::ORDER == LAYOUT, "cp.async does not transpose");
    static_assert(sizeof(S) == sizeof(T), "nor widen");
    S* to = first<Arrangement>(tile);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (!has(e)) break;
      const T* from = next + offset(panel, side_of(e), k_of(e));
      ptx::cp_async<VEC * int(sizeof(T))>(to + Arrangement::distance(side_of(e), k_of(e)), from, inside(e));
    }
    advance(panel);
  }

  // Into shared memory: whole chunks if adjacent elements stay adjacent, else element by element.
  template <class Arrangement, class S> __device__ __forceinline__ void put(S* tile) const {
    S* to = first<Arrangement>(tile);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (!has(e)) break;
      Chunk<S, VEC> wide;
#pragma unroll
      for (int v = 0; v < VEC; ++v) wide.of[v] = widen<S>(chunks[e].of[v]);
      if constexpr (Arrangement::ORDER == LAYOUT) {
        *reinterpret_cast<Chunk<S, VEC>*>(to + Arrangement::distance(side_of(e), k_of(e))) = wide;
      } else {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          bool along = LAYOUT == ROW;
          to[Arrangement::distance(side_of(e) + (along ? 0 : v), k_of(e) + (along ? v : 0))] = wide.of[v];
        }
      }
    }
  }
  template <class Arrangement, class S> static __device__ __forceinline__ S* first(S* tile) {
    static_assert(AGAIN == 1 || side_of(1) % Arrangement::SPAN == 0, "chunks break the XOR");
    return tile + Arrangement::at(side(), k());
  }
};
