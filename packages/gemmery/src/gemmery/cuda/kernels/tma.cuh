// Tensor copies (TMA): the argument of kernels that use them, and how a block brings a tile of an operand.
#pragma once
#include "product.cuh"
#include "ptx_hopper.cuh"

// A CUtensorMap: a matrix's address, sides, strides, and the box that one copy moves. Kernels only hand it on.
struct alignas(64) TensorMap { unsigned char bytes[128]; };

// A product with the maps of its operands. cuda/launch.py packs the same fields at the same places.
template <class T, class Out> struct TmaProduct {
  Product<T, Out> product;
  const float* a_scale;  // factors of rows of A and columns of B, or of blocks of them; null where there are none
  const float* b_scale;
  const int* offsets;    // where groups end, of a grouped product
  long long a_scale_row, a_scale_k, b_scale_k, b_scale_col;  // in elements; 0: the same factor for all
  int activation;        // the bits RELU, GELU, SILU of an EPILOGUE
  int mapped;            // 1: C is written by tensor copies; 0: by ordinary stores, of any strides
  int ahead;             // lines of each column of B that L2 is asked for while the launches before end; 0: none;
                         // -1: none, and the next launch may begin at once
  int band;              // rows of tiles in a band of the order in which they are taken
  TensorMap a, b, c;
};
static_assert(sizeof(TmaProduct<f16, f16>) == 640 && sizeof(Product<f16, f16>) == 152, "as packed");

// SIDES rows of A or columns of B, by 128 bytes of k, lie in shared memory as BOXES of rows of 128 bytes: where k is
// adjacent in memory, as one with a row for each side; else as one for EACH sides, with a row for each of so many k.
// Each of the SHARERS blocks that need them copies a part of the rows of every box; where parts would not be multiples
// of 8 rows, the blocks take TURNS at copying whole ones.
template <bool K_MAJOR, int SIDES, int SHARERS, int EACH = 64> struct Boxes {
  static constexpr bool TURNS = K_MAJOR && SIDES % (8 * SHARERS) != 0;
  static constexpr int COUNT = K_MAJOR ? 1 : (SIDES + EACH - 1) / EACH;
  static constexpr int PART = (K_MAJOR ? SIDES : EACH) / (TURNS ? 1 : SHARERS);
  static_assert(PART % 8 == 0, "the swizzle repeats after 8 rows");

  // Where the part `slice` of a box begins in the matrix.
  static __device__ __forceinline__ int x(int k, int side, int box) { return K_MAJOR ? k : side + EACH * box; }
  static __device__ __forceinline__ int y(int k, int side, int slice) { return (K_MAJOR ? side : k) + slice * PART; }
};

// Copies the part `slice` of them to shared memory, of all blocks of the mask where there are SHARERS; the boxes begin
// at `to`, swizzled by 128 bytes. Beyond the edges there are zeros.
template <bool K_MAJOR, int SIDES, int SHARERS, int EACH = 64>
__device__ __forceinline__ void bring(unsigned to, const TensorMap& map, int k, int side, int batch, unsigned barrier,
                                      int slice = 0, unsigned short mask = 0, int turn = 0) {
  using B = Boxes<K_MAJOR, SIDES, SHARERS, EACH>;
  if constexpr (B::TURNS) {
    if (turn % SHARERS != slice) return;
    slice = 0;
  }
  to += slice * B::PART * 128;
#pragma unroll
  for (int box = 0; box < B::COUNT; ++box) {
    int x = B::x(k, side, box), y = B::y(k, side, slice);
    if constexpr (SHARERS == 1) {
      ptx::cp_async_bulk_tensor_load(to + 128 * EACH * box, &map, x, y, batch, barrier);
    } else {
      ptx::cp_async_bulk_tensor_load_multicast(to + 128 * EACH * box, &map, x, y, batch, barrier, mask);
    }
  }
}

// Brings the same boxes into L2 only; their contents need not be final yet.
template <bool K_MAJOR, int SIDES, int SHARERS>
__device__ __forceinline__ void prefetch(const TensorMap& map, int k, int side, int batch, int slice) {
  using B = Boxes<K_MAJOR, SIDES, SHARERS>;
  if (B::TURNS && slice > 0) return;
#pragma unroll
  for (int box = 0; box < B::COUNT; ++box) {
    ptx::cp_async_bulk_prefetch_tensor(&map, B::x(k, side, box), B::y(k, side, slice), batch);
  }
}
