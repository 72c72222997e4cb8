// Products of warpgroups: the tile of a block, the ring in which it comes, and the sums of a warpgroup.
#pragma once
#include "descriptor.cuh"
#include "epilogue.cuh"
#include "load.cuh"
#include "pipeline.cuh"
#include "tile.cuh"
#include "tma.cuh"

// The texts of wgmma.mma_async: shape and types, and what stands behind the predicate: signs of A and B, and for 16-bit
// types whether they are transposed, which is where their sides are adjacent and not k.
template <class T> struct WgmmaName;
template <> struct WgmmaName<f16> { static constexpr const char text[] = "k16.f32.f16.f16"; };
template <> struct WgmmaName<bf16> { static constexpr const char text[] = "k16.f32.bf16.bf16"; };
template <> struct WgmmaName<tf32> { static constexpr const char text[] = "k8.f32.tf32.tf32"; };
template <> struct WgmmaName<e4m3> { static constexpr const char text[] = "k32.f32.e4m3.e4m3"; };
template <> struct WgmmaName<e5m2> { static constexpr const char text[] = "k32.f32.e5m2.e5m2"; };
template <> struct WgmmaName<e4m3e5m2> { static constexpr const char text[] = "k32.f32.e4m3.e5m2"; };
template <> struct WgmmaName<e5m2e4m3> { static constexpr const char text[] = "k32.f32.e5m2.e4m3"; };
template <> struct WgmmaName<i8> { static constexpr const char text[] = "k32.s32.s8.s8"; };

template <int BYTES, bool A_K_MAJOR, bool B_K_MAJOR> struct WgmmaSigns {
  static_assert(A_K_MAJOR && B_K_MAJOR, "only 16-bit operands may be adjacent along their sides");
  static constexpr const char signs[] = ", 1, 1";
};
template <> struct WgmmaSigns<2, true, true> { static constexpr const char signs[] = ", 1, 1, 0, 0"; };
template <> struct WgmmaSigns<2, true, false> { static constexpr const char signs[] = ", 1, 1, 0, 1"; };
template <> struct WgmmaSigns<2, false, true> { static constexpr const char signs[] = ", 1, 1, 1, 0"; };
template <> struct WgmmaSigns<2, false, false> { static constexpr const char signs[] = ", 1, 1, 1, 1"; };
struct NoSigns { static constexpr const char signs[] = ""; };

template <class T, bool A_K, bool B_K> struct WgmmaTypes : WgmmaName<T>, WgmmaSigns<int(sizeof(T)), A_K, B_K> {};
template <> struct WgmmaTypes<i8, true, true> : WgmmaName<i8>, NoSigns {};

// Of products whose A is in registers, which has no layout.
template <bool B_K_MAJOR> struct RegisterSigns { static constexpr const char signs[] = ", 1, 1, 0"; };
template <> struct RegisterSigns<false> { static constexpr const char signs[] = ", 1, 1, 1"; };
template <class T, bool B_K> struct RegisterTypes : WgmmaName<T>, RegisterSigns<B_K> {};
template <> struct RegisterTypes<e4m3, true> : WgmmaName<e4m3>, WgmmaSigns<1, true, true> {};
template <> struct RegisterTypes<tf32, true> : WgmmaName<tf32>, WgmmaSigns<4, true, true> {};
template <> struct RegisterTypes<i8, true> : WgmmaName<i8>, NoSigns {};

// The warpgroups that multiply a tile; of their warps, the columns of a piece of C, and the pieces in shared memory.
template <int COUNT, int WIDE = 32, int PIECES = 2> struct Consumers {
  static constexpr int WARPGROUPS = COUNT, COLUMNS = WIDE, BUFFERS = PIECES;
};

// A block computes M x N of C from a ring of STAGES, each 128 bytes of k of A and of B. ROWS x COLUMNS blocks of a
// cluster share them: a row of the cluster its rows of A, a column its columns of B.
template <class Element, Layout A_LAYOUT, Layout B_LAYOUT, int M, int N, int DEPTH, class Consuming, int ROWS = 1,
          int COLUMNS = 1, bool IS_APART = false, bool IS_SWAPPED = false>
struct WgmmaTiles {
  using Consumers = Consuming;
  using T = Element;
  using S = Accumulator<T>;
  static constexpr bool A_K_MAJOR = A_LAYOUT != COL, B_K_MAJOR = B_LAYOUT == COL;
  using Types = WgmmaTypes<T, A_K_MAJOR, B_K_MAJOR>;
  static constexpr int BM = M, BN = N, BK = 128 / int(sizeof(T)), STAGES = DEPTH, CM = ROWS, CN = COLUMNS;
  // Two warpgroups take halves of the rows; of 192 rows, which have no such halves, halves of the columns. Where
  // columns are adjacent those begin within a box of 64: then three take 64 rows each.
  static constexpr int WARPGROUPS = Consumers::WARPGROUPS;
  static constexpr bool BESIDE = BM == 192 && WARPGROUPS == 2;
  // Of 8 rows, which are all that C has, 64 are multiplied; the others are the same ones, and are not stored.
  static constexpr int ROWS_MULTIPLIED = BM == 8 ? 64 : BM;
  static constexpr int BLOCKS = ROWS_MULTIPLIED / 64 / (BESIDE ? 1 : WARPGROUPS);  // of 64 rows x WN
  static constexpr int WN = BESIDE ? BN / 2 : BN;
  // Of two matrices B, a tile has the same columns of both beside each other: a thread then has both sums of an
  // element.
  static constexpr int MATRICES = Function::SUMS, WIDE = BN / MATRICES, OWN = WN / MATRICES;  // columns of C
  // Columns that the second half of every other tile has less, where such tiles cover C: with 375 eights of columns, as
  // n = 3000 has, a block then multiplies 24 and 23 of them in place of 24 twice.
  static constexpr int NARROWER = BESIDE && BN == 192 ? 8 : 0;
  // Rows of A that straddle lines of L2 cost twice as much there. But if rows have a multiple of 16 bytes, every eighth
  // begins at the same place of a line. A tile whose rows are APART has such rows, of one of eight matrices of a batch,
  // and its k begins so much in front of 0 that boxes of A begin at lines: 3000 squared takes 75.6 us, not 81.7.
  static constexpr bool APART = IS_APART;
  // The product is C' = B' A', whose elements are adjacent along columns: rows of C, in multiples of 8, are columns of
  // wgmma. 520 rows then need four tiles of 136, in place of five of 128.
  static constexpr bool SWAPPED = IS_SWAPPED;
  // Threads of which one hands a stage back: a warpgroup's, which multiplies as one, or a warp's, if warps load A.
  static constexpr int TOGETHER = APART ? 32 : 128, RELEASES = WARPGROUPS * (128 / TOGETHER);
  static constexpr int LAYERS = 1;    // of a cluster, which share k
  static constexpr int PRODUCTS = 4;  // of a stage, 32 bytes of k each
  static constexpr bool RAGGED = false;  // whether stages may hold k of other products, which is then cleared
  static constexpr int A_BYTES = BM * 128, B_BYTES = (B_K_MAJOR ? BN : (BN + 63) / 64 * 64) * 128;
  static constexpr int STAGE = A_BYTES + B_BYTES, RING = STAGES * STAGE;
  static_assert(ROWS_MULTIPLIED == 64 * BLOCKS * (BESIDE ? 1 : WARPGROUPS), "wgmma has 64 rows");
  static_assert(BN % 8 == 0 && BN <= 256, "wgmma has 8 to 256 columns");
  static_assert(!BESIDE || WN % 8 == 0, "the second half of the columns begins at a row of B's tile");
  static_assert(MATRICES == 1 || (!BESIDE && CM == 1 && !SWAPPED), "the halves of a tile are of one B each");

  // Where the part of a warpgroup begins in the tile, counted from 0.
  static __device__ __forceinline__ int row_of(int warpgroup) { return BESIDE ? 0 : warpgroup * BLOCKS * 64; }
  static __device__ __forceinline__ int column_of(int warpgroup) { return BESIDE ? warpgroup * WN : 0; }

  // Bytes of k in front of 0 with which boxes of A begin, so that they are whole lines.
  template <class P> static __device__ __forceinline__ int place_of(const P& p, Tile tile) {
    if constexpr (!APART) return 0;
    return int(reinterpret_cast<unsigned long long>(p.product.a_at(tile.batch, 0, 0)) % 128);
  }

  // Whether boxes of A begin half a product late: those of B begin with a product.
  template <class P> static __device__ __forceinline__ bool is_late(const P& p, Tile tile) {
    return place_of(p, tile) % 32 != 0;
  }

  // Elements of k in front of 0 with which products begin, a whole number of products: every product has the elements
  // that it has in other tiles, and in front of 0, as beyond the end, zeros arrive.
  template <class P> static __device__ __forceinline__ int early(const P& p, Tile tile) {
    return (place_of(p, tile) + 16) / 32 * (32 / int(sizeof(T)));
  }
};

// A number as an argument of a lambda.
template <int NUMBER> struct Constant { static constexpr int value = NUMBER; };

// The elements of k of a tile, with those in front of 0.
template <class Tiles, class P> __device__ __forceinline__ int depth_of(const P& p, Tile tile) {
  return p.product.k + Tiles::early(p, tile);
}

// Where the rows (columns) begin that a block of a cluster copies: those of the first tile where all of its own are
// beyond the edge. Copies of such rows are slow, and its partners would wait.
template <class Tiles> __device__ __forceinline__ int inside(int side, int end) {
  return Tiles::CM * Tiles::CN == 1 || side < end ? side : 0;
}

// Brings a block's slice of A, or of B, for 128 bytes of k to a stage; `slice` counts the blocks that share it.
template <class Tiles, class P>
__device__ __forceinline__ void bring_a(const P& p, unsigned stage, Tile tile, int step, unsigned barrier,
                                        int slice = 0, unsigned short mask = 0) {
  const int k = step * Tiles::BK - Tiles::place_of(p, tile) / int(sizeof(typename Tiles::T));
  bring<Tiles::A_K_MAJOR, Tiles::BM, Tiles::CN, Tiles::BK>(stage, p.a, k, inside<Tiles>(tile.row, p.product.m),
                                                           p.product.a_batch ? tile.batch : 0, barrier, slice, mask);
}

// Rows of the tiles of an A that has fewer rows than a tile, and columns of B, which their boxes do not have either: a
// copy takes five times as long for a row beyond the edge as for one of the matrix. `operand_boxes` of ladder/wgmma.py
// has the same rule.
template <class Tiles, class P> __device__ __forceinline__ int absent_rows(const P& p) {
  return Tiles::A_K_MAJOR && Tiles::CN == 1 ? max(Tiles::BM - p.product.m, 0) : 0;
}
template <class Tiles, class P> __device__ __forceinline__ int absent_columns(const P& p) {
  constexpr bool WHOLE = Tiles::CM == 1 || Boxes<Tiles::B_K_MAJOR, Tiles::BN, Tiles::CM>::TURNS;
  return Tiles::B_K_MAJOR && WHOLE && Tiles::MATRICES == 1 ? max(Tiles::BN - p.product.n, 0) : 0;
}

// The bytes that copies bring to a stage.
template <class Tiles, class P> __device__ __forceinline__ int stage_bytes(const P& p) {
  return Tiles::STAGE - 128 * (absent_rows<Tiles>(p) + absent_columns<Tiles>(p));
}

// Makes what is absent zeros in all stages, once, by all warpgroups that multiply, while the first stages come.
template <class Tiles, class P> __device__ __forceinline__ void clear_absent(const P& p, unsigned ring, int warpgroup) {
  constexpr int THREADS = Tiles::WARPGROUPS * 128;
  if (stage_bytes<Tiles>(p) == Tiles::STAGE) return;
  auto clear = [&](unsigned rows, int count, int absent) {  // the last ones of `count`
    for (int chunk = (count - absent) * 8 + warpgroup * 128 + threadIdx.x % 128; chunk < count * 8; chunk += THREADS) {
      ptx::st_shared_v4(rows + chunk * 16, {0, 0, 0, 0});
    }
  };
#pragma unroll 1
  for (int stage = 0; stage < Tiles::STAGES; ++stage) {
    const unsigned begin = ring + stage * Tiles::STAGE;
    clear(begin, Tiles::BM, absent_rows<Tiles>(p));
    clear(begin + Tiles::A_BYTES, Tiles::BN, absent_columns<Tiles>(p));
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(1, THREADS);
}

template <class Tiles, class P>
__device__ __forceinline__ void bring_b(const P& p, unsigned stage, Tile tile, int step, unsigned barrier,
                                        int slice = 0, unsigned short mask = 0) {
  const int k = step * Tiles::BK - Tiles::early(p, tile);
  bring<Tiles::B_K_MAJOR, Tiles::WIDE, Tiles::CM>(stage + Tiles::A_BYTES, p.b, k,
                                                  inside<Tiles>(tile.col, p.product.n),
                                                  p.product.b_batch ? tile.batch : 0, barrier, slice, mask, step);
  if constexpr (Tiles::MATRICES == 2) {
    bring<Tiles::B_K_MAJOR, Tiles::WIDE, 1>(stage + Tiles::A_BYTES + Tiles::WIDE * 128, operands_of(p).second, k,
                                            tile.col, 0, barrier);
  }
}

// The A of the first product of a stage, in registers, for tiles that are late (`is_late`): it has the last 16 bytes of
// the stage before and the first 16 of its own, which no descriptor says.
template <class Tiles> struct FirstProduct {
  unsigned a[Tiles::BLOCKS][4];
  unsigned rows;  // where chunk 0 of this lane's row of the first stage lies

  __device__ __forceinline__ FirstProduct(unsigned ring, int warpgroup) {
    const int row = Tiles::row_of(warpgroup) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
    rows = ring + row * 128 + row % 8 * 16;
  }

  // Loads a chunk of 16 bytes of each row to a half of the registers; chunks are swizzled as bring() leaves them.
  __device__ __forceinline__ void load(int half, int stage, int chunk) {
#pragma unroll
    for (int block = 0; block < Tiles::BLOCKS; ++block) {
      ptx::ldmatrix_x2(a[block][2 * half], a[block][2 * half + 1],
                       (rows + stage * Tiles::STAGE ^ chunk * 16) + block * 8192);
    }
  }
};

// The sums of a warpgroup, BLOCKS of 64 x WN, and the descriptors of its operands in the first stage of a ring.
// Nothing may look at sums as bits: the compiler would hold them as integers through the loop over k, with copies
// between products, and ptxas would let each product end before the next begins (its message C7514).
template <class Tiles> struct Warpgroup {
  typename Tiles::S sums[Tiles::BLOCKS][Tiles::WN / 2];
  unsigned a, b;

  __device__ __forceinline__ Warpgroup(unsigned ring, int warpgroup)
      : a(descriptor<Tiles::A_K_MAJOR>(ring + Tiles::row_of(warpgroup) * 128)),
        b(descriptor<Tiles::B_K_MAJOR>(ring + Tiles::A_BYTES + Tiles::column_of(warpgroup) * 128)) {}

  // One of the PRODUCTS of a stage, of the first COLUMNS; without `adds`, what the sums hold is forgotten. Boxes of A
  // that are `late` begin half a product after those of B.
  template <int COLUMNS = Tiles::WN>
  __device__ __forceinline__ void multiply(int stage, int part, bool adds, bool late = false) {
    using Sums = typename Tiles::S(&)[COLUMNS / 2];
    unsigned at = stage * (Tiles::STAGE >> 4);
#pragma unroll
    for (int block = 0; block < Tiles::BLOCKS; ++block) {
      unsigned rows = a + at + part * NEXT_K<Tiles::A_K_MAJOR> + block * (8192 >> 4) - late;
      ptx::wgmma_mma_async<typename Tiles::Types>(reinterpret_cast<Sums>(sums[block]),
                                                  whole_descriptor<(Tiles::BM > 8)>(rows),
                                                  whole_descriptor(b + at + part * NEXT_K<Tiles::B_K_MAJOR>), adds);
    }
  }

  // The first product of a stage, whose A is in registers.
  template <int COLUMNS>
  __device__ __forceinline__ void multiply_first(const FirstProduct<Tiles>& first, int stage, bool adds) {
    using Types = RegisterTypes<typename Tiles::T, Tiles::B_K_MAJOR>;
    using Sums = typename Tiles::S(&)[COLUMNS / 2];
#pragma unroll
    for (int block = 0; block < Tiles::BLOCKS; ++block) {
      ptx::wgmma_mma_async<Types>(reinterpret_cast<Sums>(sums[block]), first.a[block],
                                  whole_descriptor(b + stage * (Tiles::STAGE >> 4)), adds);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int block = 0; block < Tiles::BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < Tiles::WN / 2; ++i) sums[block][i] = 0;
    }
  }

  // From registers to C, two columns at a time: lane l of warp w has, of 8 columns, 2 (l % 4) and the next of the rows
  // 16 w + l / 4 and 8 further. `row` and `column` are the warpgroup's first ones.
  template <int EPILOGUE, class T, class Out>
  __device__ __forceinline__ void store(const Product<T, Out>& p, int batch, int row, int column) const {
    store_of<EPILOGUE>(sums, p, batch, row, column);
  }

  // The same of other sums, of which a thread has the same places.
  template <int EPILOGUE, class Sums, class T, class Out>
  static __device__ __forceinline__ void store_of(const Sums& sums, const Product<T, Out>& p, int batch, int row,
                                                  int column) {
    row += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    column += threadIdx.x % 4 * 2;
    bool pairs = p.c_col == 1 &&
                 (reinterpret_cast<unsigned long long>(p.c) | p.c_row * sizeof(Out) | p.c_batch * sizeof(Out)) %
                         (2 * sizeof(Out)) == 0;
#pragma unroll
    for (int block = 0; block < Tiles::BLOCKS; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int i = row + block * 64 + half * 8;
        if (i >= p.m) continue;
        Out* c = p.c_at(batch, i, column);
#pragma unroll
        for (int eight = 0; eight < Tiles::WN / 8; ++eight) {
          int j = column + eight * 8;
          Out pair[2];
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            if (j + x < p.n) {
              auto sum = sums[block][4 * eight + 2 * half + x];
              pair[x] = finished<EPILOGUE>(p, c + (eight * 8 + x) * p.c_col, i, j + x, sum);
            }
          }
          if (pairs && j + 1 < p.n) {
            *reinterpret_cast<Chunk<Out, 2>*>(c + eight * 8) = {pair[0], pair[1]};
          } else {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
              if (j + x < p.n) c[(eight * 8 + x) * p.c_col] = pair[x];
            }
          }
        }
      }
    }
  }
};
