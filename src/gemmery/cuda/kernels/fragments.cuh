// A warp's part of a product by mma.sync: fragments of A and B from shared memory, their products, and the sums into C.
// Which lane holds which element: NVIDIA, PTX ISA, "Matrix Fragments for mma.m16n8k16" and "mma.m16n8k8".
#pragma once
#include "epilogue.cuh"
#include "swizzle.cuh"
#include "tiling.cuh"

template <class T> constexpr int MMA_K = 32 / int(sizeof(T));  // the k of one product: 32 bytes of a row

// A warp's reads of a tile for one product along k: SIDES sides in steps of 16. Four registers hold 16 rows of A, or
// two times 8 columns of B, in the order that mma expects.
template <class T, class Tile, bool IS_A, int SIDES> struct Fragments {
  static constexpr int STEP_BYTES = 16 * Tile::CHUNKS * 16;  // 16 rows further
  static constexpr bool BY_WORD = sizeof(T) == 4 && !Tile::K_ADJACENT;  // ldmatrix transposes 16-bit elements only
  unsigned of[SIDES / 16][4];

  // This lane's first byte, as an offset in the tile.
  static __device__ __forceinline__ unsigned start(int first_side) {
    int lane = threadIdx.x % 32;
    if constexpr (BY_WORD) {
      int side = first_side + lane / 4;
      return Tile::at(lane % 4, side / Tile::PER_CHUNK) + side % Tile::PER_CHUNK * 4;
    }
    bool by_16 = IS_A == Tile::K_ADJACENT;  // true if the second matrix is 8 rows further, else one chunk
    int row = by_16 ? lane % 16 : lane % 8 + lane / 16 * 8, chunk = by_16 ? lane / 16 : lane / 8 % 2;
    return Tile::K_ADJACENT ? Tile::at(first_side + row, chunk) : Tile::at(row, first_side / Tile::PER_CHUNK + chunk);
  }

  // Group `group` of k of the tile at `stage`. A step along a row is an XOR of the chunk's position, whatever the row's
  // key: from one group of k to the next ^1 ^3 ^1 ^3 in units of 32 bytes.
  __device__ __forceinline__ void read(unsigned start, unsigned stage, int group) {
#pragma unroll
    for (int i = 0; i < SIDES / 16; ++i) {
      if constexpr (BY_WORD) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          int half = IS_A ? r / 2 : r % 2, eight = IS_A ? r % 2 : r / 2;  // of k, and of the sides
          unsigned side = (start ^ (4 * i + 2 * eight) * 16) + stage;
          of[i][r] = ptx::ld_shared_b32(side + (8 * group + 4 * half) * Tile::CHUNKS * 16);
        }
      } else if constexpr (Tile::K_ADJACENT) {
        ptx::ldmatrix_x4(of[i], (start ^ group * 32) + stage + i * STEP_BYTES);
      } else {
        ptx::ldmatrix_x4_trans(of[i], (start ^ i * 32) + stage + group * STEP_BYTES);
      }
    }
    if constexpr (sizeof(T) == 4) {  // mma would truncate the remaining bits
#pragma unroll
      for (int i = 0; i < SIDES / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) of[i][r] = ptx::cvt_rna_tf32_f32(of[i][r]);
      }
    }
  }
};

__device__ __forceinline__ void mma(f16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  ptx::mma_m16n8k16_f16(d, a, b0, b1);
}
__device__ __forceinline__ void mma(bf16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  ptx::mma_m16n8k16_bf16(d, a, b0, b1);
}
__device__ __forceinline__ void mma(tf32, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  ptx::mma_m16n8k8_tf32(d, a, b0, b1);
}

// The sums of a warp: 16 x 8 elements of C in four registers. Lane l holds columns 2 (l % 4) and the next, in rows
// l / 4 and l / 4 + 8.
template <class T, int WM, int WN> struct WarpSums {
  float of[WM / 16][WN / 8][4] = {};

  template <class A, class B> __device__ __forceinline__ void multiply(const A& a, const B& b) {
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < WN / 8; ++j) {
        mma(T(), of[i][j], a.of[i], b.of[j / 2][j % 2 * 2], b.of[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  // VEC divides p.n. Four lanes hold adjacent parts of a row, 8 bytes in f32 and 4 in half precision, and exchange them
  // so that each has 16.
  template <int EPILOGUE, int VEC, class Out>
  __device__ __forceinline__ void store(const Product<T, Out>& p, int batch, int row, int column) const {
    constexpr int PAIRS = VEC == 8 && WN % 32 == 0 ? 4 : 1;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < WM / 8; ++i) {
      int y = row + i * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < WN / 8; j += PAIRS) {
        Chunk<Out, 2> pairs[PAIRS];
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) {
          const float* sums = of[i / 2][j + k] + i % 2 * 2;
          pairs[k] = finished_pair<EPILOGUE>(p, batch, y, column + (j + k) * 8 + lane % 4 * 2, sums);
        }
        if constexpr (PAIRS == 4) {
          exchange(reinterpret_cast<unsigned(&)[4]>(pairs));
          put<8>(p, batch, y, column + (j + lane % 4) * 8, reinterpret_cast<Chunk<Out, 8>&>(pairs));
        } else {
          put<(VEC > 2 ? 2 : VEC)>(p, batch, y, column + j * 8 + lane % 4 * 2, pairs[0]);
        }
      }
    }
  }

 private:
  template <int EPILOGUE, class Out>
  static __device__ __forceinline__ Chunk<Out, 2> finished_pair(const Product<T, Out>& p, int batch, int y, int x,
                                                                const float* sums) {
    Chunk<Out, 2> pair = {};
    if (EPILOGUE == PLAIN || (y < p.m && x < p.n)) {
      Out* c = p.c_at(batch, y, x);
      pair.of[0] = finished<EPILOGUE>(p, c, y, x, sums[0]);
      if (EPILOGUE == PLAIN || x + 1 < p.n) pair.of[1] = finished<EPILOGUE>(p, c + p.c_col, y, x + 1, sums[1]);
    }
    return pair;
  }

  // Word w of lane l of four becomes word l of lane w.
  static __device__ __forceinline__ void exchange(unsigned (&word)[4]) {
    int lane = threadIdx.x;
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      bool high = lane & offset;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (w & offset) continue;
        unsigned sent = high ? word[w] : word[w + offset];
        (high ? word[w] : word[w + offset]) = __shfl_xor_sync(0xffffffff, sent, offset);
      }
    }
  }

  template <int WIDTH, int COUNT, class Out>
  static __device__ __forceinline__ void put(const Product<T, Out>& p, int batch, int y, int x,
                                             const Chunk<Out, COUNT>& values) {
    if (y >= p.m) return;
    Out* c = p.c_at(batch, y, x);
    if constexpr (WIDTH == COUNT) {
      if (x < p.n) *reinterpret_cast<Chunk<Out, COUNT>*>(c) = values;
    } else {
#pragma unroll
      for (int v = 0; v < COUNT; ++v) {
        if (x + v < p.n) c[v * p.c_col] = values.of[v];
      }
    }
  }
};

// The types of a block's tiles, of their copies, and of its warps' fragments.
template <class T, class Access, class Tiles, bool RAGGED = false> struct MmaBlock {
  static constexpr int GROUPS = Tiles::BK / MMA_K<T>;
  using TileA = SwizzledTile<T, Tiles::BM, Tiles::BK, Access::A != COL>;
  using TileB = SwizzledTile<T, Tiles::BN, Tiles::BK, Access::B == COL>;
  using CopyA = TileCopy<T, TileA, Access::A_VEC, RAGGED, Tiles::THREADS>;
  using CopyB = TileCopy<T, TileB, Access::B_VEC, RAGGED, Tiles::THREADS>;
  using FragmentsA = Fragments<T, TileA, true, Tiles::WM>;
  using FragmentsB = Fragments<T, TileB, false, Tiles::WN>;
  using Sums = WarpSums<T, Tiles::WM, Tiles::WN>;
};
