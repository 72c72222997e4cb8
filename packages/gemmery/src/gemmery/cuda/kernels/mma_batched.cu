// Idea: a warp multiplies a whole small product on tensor cores, from a block's part of the batch in shared memory.
// Parents: simt_batched, for how matrices come and go, and mma_ldmatrix, for fragments. Lines are padded, not swizzled:
// those of so small matrices are shorter than the 128 bytes that an XOR needs.
// Measured on an H200: 20,000 of 16 x 16 and 32 x 32 take 1.2 and 1.1 of the time of a copy in f16, in f64 1.01 and
// 1.04.
#include "batched.cuh"
#include "mma.cuh"

// A warp's products of half precision, 16 x 8 x 16 at a time. x[r] of 16 sides by 16 of k are four 8 x 8 matrices in
// the order that mma expects: the second is 8 sides further in A, and 8 of k in B. Lines are sides where k is adjacent,
// else steps of k.
template <class T, int M, int N> struct BatchSums {
  static constexpr int DEEP = 16, PADDED = 32, PAD = 16;
  float of[M / 16][N / 8][4] = {};

  template <bool IS_A, bool K_ADJACENT, int PITCH>
  static __device__ __forceinline__ void read(unsigned (&x)[4], const char* matrix, int side, int k) {
    constexpr bool BY_LINES = IS_A == K_ADJACENT;  // true if the second matrix is 8 lines further, else one piece
    int lane = threadIdx.x % 32, line = K_ADJACENT ? side : k, piece = (K_ADJACENT ? k : side) * 2;
    line += BY_LINES ? lane % 16 : lane % 8 + lane / 16 * 8;
    unsigned from = ptx::shared_address(matrix) + line * PITCH + piece + (BY_LINES ? lane / 16 : lane / 8 % 2) * 16;
    if constexpr (K_ADJACENT) {
      ptx::ldmatrix_x4(x, from);
    } else {
      ptx::ldmatrix_x4_trans(x, from);
    }
  }

  template <bool A_ROWS, bool B_ROWS, int A_PITCH, int B_PITCH>
  __device__ __forceinline__ void add(const char* a_tile, const char* b_tile, int k) {
    unsigned a[M / 16][4], b[N / 16][4];
#pragma unroll
    for (int i = 0; i < M / 16; ++i) read<true, A_ROWS, A_PITCH>(a[i], a_tile, 16 * i, k);
#pragma unroll
    for (int j = 0; j < N / 16; ++j) read<false, !B_ROWS, B_PITCH>(b[j], b_tile, 16 * j, k);
#pragma unroll
    for (int i = 0; i < M / 16; ++i) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j) mma(T(), of[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
};

// Of float64: 16 x 8 x 4, or two of 8 x 8 x 4 before sm_90. With two pieces between lines four of them are on different
// banks.
template <int M, int N> struct BatchSums<double, M, N> {
  static constexpr int DEEP = 4, PADDED = 32, PAD = 32;
  double of[M / 16][N / 8][4] = {};

  template <bool K_ADJACENT, int PITCH>
  static __device__ __forceinline__ double read(const char* matrix, int side, int k) {
    side += threadIdx.x % 32 / 4, k += threadIdx.x % 4;
    return *reinterpret_cast<const double*>(matrix + (K_ADJACENT ? side * PITCH + k * 8 : k * PITCH + side * 8));
  }

  template <bool A_ROWS, bool B_ROWS, int A_PITCH, int B_PITCH>
  __device__ __forceinline__ void add(const char* a_tile, const char* b_tile, int k) {
    double a[M / 16][2], b[N / 8];
#pragma unroll
    for (int i = 0; i < M / 8; ++i) a[i / 2][i % 2] = read<A_ROWS, A_PITCH>(a_tile, 8 * i, k);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) b[j] = read<!B_ROWS, B_PITCH>(b_tile, 8 * j, k);
#pragma unroll
    for (int i = 0; i < M / 16; ++i) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
#if __CUDA_ARCH__ >= 900
        ptx::mma_m16n8k4_f64(of[i][j], a[i], b[j]);
#else
        ptx::mma_m8n8k4_f64(of[i][j][0], of[i][j][1], a[i][0], b[j]);
        ptx::mma_m8n8k4_f64(of[i][j][2], of[i][j][3], a[i][1], b[j]);
#endif
      }
    }
  }
};

template <class T, class Out, int EPILOGUE, Layout A_LAYOUT, Layout B_LAYOUT, class Sides, int PRODUCTS>
__global__ void __launch_bounds__(32 * PRODUCTS) mma_batched(const Product<T, Out> p) {
  constexpr int M = Sides::M, N = Sides::N, K = Sides::K;
  using Sums = BatchSums<T, M, N>;
  using Block =
      BatchBlock<T, Out, A_LAYOUT, B_LAYOUT, Sides, PRODUCTS, 32 * PRODUCTS, Sums::PADDED, Sums::PAD>;
  extern __shared__ __align__(128) char shared[];
  Block block(p, shared);
  block.load(p);

  int product = threadIdx.x / 32, row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  if (product < block.products) {
    const char *a_tile = block.a(product), *b_tile = block.b(product);
    Sums sums;
#pragma unroll
    for (int k = 0; k < K; k += Sums::DEEP) {
      sums.template add<A_LAYOUT != COL, B_LAYOUT != COL, Block::A::PITCH, Block::B::PITCH>(a_tile, b_tile, k);
    }
    char* c_tile = block.c(product);
#pragma unroll
    for (int i = 0; i < M / 8; ++i) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        Out out[2];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          out[v] = block.template finish<EPILOGUE>(p, product, 8 * i + row, 8 * j + column + v,
                                                    sums.of[i / 2][j][i % 2 * 2 + v]);
        }
        Block::C::write(c_tile, 8 * i + row, 8 * j + column, out);
      }
    }
  }
  block.store(p);
}
