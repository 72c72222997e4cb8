// Tiles in shared memory whose 16-byte chunks are permuted, so that neither copies into them nor ldmatrix have bank
// conflicts.
#pragma once
#include "load.cuh"

// A tile of SIDES rows of A, or columns of B, by BK of k. It has a row per side if the operand is contiguous in k
// (K_ADJACENT), else a row per k. Chunk c of row r is stored at c ^ r % 8 if a row fills the 32 banks, so that the 8
// rows of one matrix of ldmatrix are on 8 different groups of four banks; shorter rows share a key.
template <class T, int SIDES, int BK, bool ALONG_K> struct SwizzledTile {
  static constexpr bool K_ADJACENT = ALONG_K;
  static constexpr int ROWS = K_ADJACENT ? SIDES : BK, WIDTH = K_ADJACENT ? BK : SIDES;  // rows, and elements per row
  static constexpr int PER_CHUNK = 16 / int(sizeof(T)), CHUNKS = WIDTH / PER_CHUNK, BYTES = ROWS * CHUNKS * 16;
  static constexpr int SPAN = CHUNKS < 8 ? CHUNKS : 8;  // chunks that are permuted among themselves
  static_assert(CHUNKS % SPAN == 0 && 8 % SPAN == 0 && BYTES % 128 == 0, "the XOR must stay within a row");

  // ldmatrix cannot transpose 32-bit elements: lanes read two chunks of each of four rows.
  static __device__ __forceinline__ int key(int row) {
    return sizeof(T) == 4 && !K_ADJACENT ? row % 4 * 2 % SPAN : row / (8 / SPAN) % SPAN;
  }
  static __device__ __forceinline__ unsigned at(int row, int chunk) {
    return (row * CHUNKS + (chunk ^ key(row))) * 16;
  }
};

// A thread's share of copying a panel's tiles one after the other, in pieces of VEC elements. A piece is completely
// inside or completely outside the panel unless it is RAGGED.
template <class T, class Tile, int VEC, bool RAGGED, int THREADS> struct TileCopy {
  static constexpr int ROW_PIECES = Tile::WIDTH / VEC, PIECES = Tile::ROWS * ROW_PIECES;
  static constexpr int EACH = (PIECES + THREADS - 1) / THREADS, PIECE_BYTES = VEC * int(sizeof(T));
  static_assert((THREADS & (THREADS - 1)) == 0 && (ROW_PIECES & (ROW_PIECES - 1)) == 0, "powers of two");

  const T* origin;  // this thread's first element
  long long row_step, column_step, k_step;
  int rows, columns;  // what is left of the panel from there on; one of them shrinks
  unsigned first;     // position of the first piece in the tile

  __device__ __forceinline__ TileCopy(const Panel<T>& panel)
      : row_step(Tile::K_ADJACENT ? panel.side_step : panel.k_step),
        column_step(VEC > 1 ? 1 : Tile::K_ADJACENT ? panel.k_step : panel.side_step),
        k_step(panel.k_step) {
    int row = threadIdx.x / ROW_PIECES, column = threadIdx.x % ROW_PIECES * VEC;
    rows = (Tile::K_ADJACENT ? panel.sides : panel.depth) - row;
    columns = (Tile::K_ADJACENT ? panel.depth : panel.sides) - column;
    origin = panel.origin + row * row_step + column * column_step;
    first = Tile::at(row, column / Tile::PER_CHUNK) + column % Tile::PER_CHUNK * int(sizeof(T));
  }

  __device__ __forceinline__ void advance(int bk) {
    origin += bk * k_step;
    (Tile::K_ADJACENT ? columns : rows) -= bk;
  }

  // Piece e, counted from the first. Sides are powers of two: these offsets and the first piece's row and column have
  // no bit in common, so XOR adds them.
  static __device__ constexpr int row_of(int e) { return e * THREADS / ROW_PIECES; }
  static __device__ constexpr int column_of(int e) { return e * THREADS % ROW_PIECES * VEC; }
  static __device__ __forceinline__ bool exists(int e) {
    return PIECES % THREADS == 0 || int(threadIdx.x) + e * THREADS < PIECES;
  }
  __device__ __forceinline__ unsigned offset(int e) const {
    return first ^ Tile::at(row_of(e), column_of(e) / Tile::PER_CHUNK);
  }
  __device__ __forceinline__ const T* address(int e) const {
    return origin + row_of(e) * row_step + column_of(e) * column_step;
  }
  __device__ __forceinline__ bool inside(int e) const { return rows > row_of(e) && columns > column_of(e); }
  __device__ __forceinline__ int count(int e) const { return inside(e) ? min(columns - column_of(e), VEC) : 0; }

  // Part `part` of `parts` of a tile by cp.async, bypassing registers, while the threads do other work.
  __device__ __forceinline__ void start(unsigned tile, int part = 0, int parts = 1) const {
    static_assert(!RAGGED, "cp.async moves whole pieces");
#pragma unroll
    for (int e = EACH * part / parts; e < EACH * (part + 1) / parts; ++e) {
      if (exists(e)) ptx::cp_async<PIECE_BYTES>(tile + offset(e), address(e), inside(e));
    }
  }

  // Through registers, as many pieces at a time as fit in 16 of them.
  __device__ __forceinline__ void copy(char* tile) const {
    constexpr int COUNT = PIECE_BYTES < 4 ? 16 : 64 / PIECE_BYTES;
#pragma unroll
    for (int e = 0; e < EACH; e += COUNT) {
      Chunk<T, VEC> pieces[COUNT];
#pragma unroll
      for (int h = 0; h < COUNT; ++h) {
        if (e + h < EACH && exists(e + h)) pieces[h] = fetched(e + h);
      }
#pragma unroll
      for (int h = 0; h < COUNT; ++h) {
        if (e + h < EACH && exists(e + h)) *reinterpret_cast<Chunk<T, VEC>*>(tile + offset(e + h)) = pieces[h];
      }
    }
  }

 private:
  __device__ __forceinline__ Chunk<T, VEC> fetched(int e) const {
    const T* from = address(e);
    Chunk<T, VEC> piece = {};
    if constexpr (RAGGED) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        if (v < count(e)) piece.of[v] = from[v];
      }
    } else if (inside(e)) {
      piece = *reinterpret_cast<const Chunk<T, VEC>*>(from);
    }
    return piece;
  }
};
