// A warp's part of a product by wmma: only the instructions know which lane holds which element of a fragment.
#pragma once
#include "epilogue.cuh"
#include "load.cuh"

// Parts of the instructions' names.
struct OperandA { static constexpr const char text[] = "a"; };
struct OperandB { static constexpr const char text[] = "b"; };
struct RowMajor { static constexpr const char text[] = "row"; };
struct ColMajor { static constexpr const char text[] = "col"; };
template <bool ROWS> struct MajorOf { using Name = RowMajor; };
template <> struct MajorOf<false> { using Name = ColMajor; };

// A float rounded to tf32 on construction: the tensor cores would truncate it.
struct Rounded {
  float value;
  Rounded() = default;
  __device__ __forceinline__ Rounded(float x) : value(__uint_as_float(ptx::cvt_rna_tf32_f32(__float_as_uint(x)))) {}
};

// Elements are stored in shared memory unchanged.
template <> __device__ __forceinline__ f16 widen<f16>(f16 x) { return x; }
template <> __device__ __forceinline__ bf16 widen<bf16>(bf16 x) { return x; }

// The shape that each type uses here, its type in shared memory, and the registers of a fragment.
template <class T> struct Fragments;
template <> struct Fragments<double> {
  using Stored = double; using Registers = double[1]; using Sums = double[2];
  static constexpr int M = 8, N = 8, K = 4;
  struct Shape { static constexpr const char text[] = "m8n8k4"; };
  struct Type { static constexpr const char text[] = "f64"; };
  struct Types { static constexpr const char text[] = "m8n8k4.f64.f64.f64.f64"; };
};
template <> struct Fragments<f16> {
  using Stored = f16; using Registers = unsigned[8]; using Sums = float[8];
  static constexpr int M = 16, N = 16, K = 16;
  struct Shape { static constexpr const char text[] = "m16n16k16"; };
  struct Type { static constexpr const char text[] = "f16"; };
  struct Types { static constexpr const char text[] = "m16n16k16.f32.f32"; };
};
template <> struct Fragments<bf16> {
  using Stored = bf16; using Registers = unsigned[4]; using Sums = float[8];
  static constexpr int M = 16, N = 16, K = 16;
  struct Shape { static constexpr const char text[] = "m16n16k16"; };
  struct Type { static constexpr const char text[] = "bf16"; };
  struct Types { static constexpr const char text[] = "m16n16k16.f32.bf16.bf16.f32"; };
};
template <> struct Fragments<tf32> {
  using Stored = Rounded; using Registers = unsigned[4]; using Sums = float[8];
  static constexpr int M = 16, N = 16, K = 8;
  struct Shape { static constexpr const char text[] = "m16n16k8"; };
  struct Type { static constexpr const char text[] = "tf32"; };
  struct Types { static constexpr const char text[] = "m16n16k8.f32.tf32.tf32.f32"; };
};

// A tile of the operand in the order of memory, with rows padded by 16 or 32 bytes, so that the rows of a fragment are
// on different banks: 8 rows of 16 bytes, or 4 of 32 in f64 and in tf32 along the sides.
template <class S, bool IS_A, int SIDE, int BK, Layout LAYOUT> struct Padded {
  static constexpr Layout ADJACENT = LAYOUT == COL ? COL : ROW;
  using Matrix = typename MajorOf<IS_A == (ADJACENT == ROW)>::Name;
  static constexpr int PAD = (sizeof(S) + (ADJACENT == COL) > 4 ? 32 : 16) / int(sizeof(S));
  static constexpr int STRIDE = (ADJACENT == COL ? SIDE : BK) + PAD;
  static constexpr int SIZE = STRIDE * (ADJACENT == COL ? BK : SIDE), SPAN = 1;
  static __device__ constexpr int apart(int sides, int ks) {
    return ADJACENT == COL ? ks * STRIDE + sides : sides * STRIDE + ks;
  }
  static __device__ __forceinline__ int at(int side, int k) { return apart(side, k); }
};

// A warp's WM x WN sums as fragments, and two sets of fragments of A and B: one is loaded while the other is used.
template <class T, int WM, int WN> struct WarpTile {
  using F = Fragments<T>;
  using Stored = typename F::Stored;
  static constexpr int TALL = WM / F::M, WIDE = WN / F::N;
  static constexpr int PATCH_STRIDE = WN + 4, PATCH = F::M * PATCH_STRIDE;  // shared memory for store
  typename F::Registers a[2][TALL], b[2][WIDE];
  typename F::Sums sums[TALL][WIDE] = {};

  // Step `step` of k of a tile's rows from `row` on, and of columns from `column` on.
  template <class TileA, class TileB>
  __device__ __forceinline__ void read(const Stored* tiles, int row, int column, int step) {
    const Stored* b_tile = tiles + TileA::SIZE;
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
      ptx::wmma_load<OperandA, typename TileA::Matrix, typename F::Shape, typename F::Type>(
          a[step % 2][i], ptx::shared_address(tiles + TileA::at(row + i * F::M, step * F::K)), TileA::STRIDE);
    }
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      ptx::wmma_load<OperandB, typename TileB::Matrix, typename F::Shape, typename F::Type>(
          b[step % 2][j], ptx::shared_address(b_tile + TileB::at(column + j * F::N, step * F::K)), TileB::STRIDE);
    }
  }

  template <class MatrixA, class MatrixB> __device__ __forceinline__ void multiply(int step) {
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        ptx::wmma_mma<MatrixA, MatrixB, typename F::Types>(sums[i][j], a[step % 2][i], b[step % 2][j]);
      }
    }
  }

  // Stores in C from (row, column) on, F::M rows at a time through the warp's own patch of shared memory.
  template <int EPILOGUE, int VEC, class S, class Out>
  __device__ __forceinline__ void store(const Product<T, Out>& p, int batch, int row, int column, S* patch) {
    constexpr int STRIPS = F::M * WN / VEC;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < TALL; ++y) {
#pragma unroll
      for (int x = 0; x < WIDE; ++x) {
        ptx::wmma_store<typename F::Shape>(ptx::shared_address(patch + x * F::N), sums[y][x], PATCH_STRIDE);
      }
      __syncwarp();
#pragma unroll 4
      for (int strip = lane; strip < STRIPS; strip += 32) {
        int within = strip / (WN / VEC), across = strip % (WN / VEC) * VEC;
        int i = row + y * F::M + within, j = column + across;
        if (i >= p.m || j >= p.n) continue;
        Out* c = p.c_at(batch, i, j);
        Chunk<Out, VEC> out;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          out.of[v] = finished<EPILOGUE>(p, c + v, i, j + v, patch[within * PATCH_STRIDE + across + v]);
        }
        *reinterpret_cast<Chunk<Out, VEC>*>(c) = out;
      }
      __syncwarp();
    }
  }
};

// Shared by the kernels: tiles of A and of B, one after the other in shared memory, and the loads that fill them
// through registers.
template <class T, Layout A, Layout B, int A_VEC, int B_VEC, int BM, int BN, int BK, int WM, int WN> struct WmmaBlock {
  using Warp = WarpTile<T, WM, WN>;
  using Stored = typename Warp::Stored;
  using TileA = Padded<Stored, true, BM, BK, A>;
  using TileB = Padded<Stored, false, BN, BK, transposed(B)>;
  static constexpr int THREADS = BM / WM * (BN / WN) * 32, LINE = 128, SIZE = TileA::SIZE + TileB::SIZE;
  static constexpr int STEPS = BK / Fragments<T>::K;
  static_assert(STEPS % 2 == 0, "the two sets of fragments take turns");

  Panel<T> a_panel, b_panel;
  Load<T, A, A_VEC, BM, BK, THREADS, LINE> a_load;
  Load<T, transposed(B), B_VEC, BN, BK, THREADS, LINE> b_load;

  __device__ __forceinline__ WmmaBlock(const Panel<T>& a, const Panel<T>& b)
      : a_panel(a), b_panel(b), a_load(a), b_load(b) {}

  __device__ __forceinline__ void fetch() {
    a_load.fetch(a_panel);
    b_load.fetch(b_panel);
  }
  __device__ __forceinline__ void put(Stored* tiles) const {
    a_load.template put<TileA>(tiles);
    b_load.template put<TileB>(tiles + TileA::SIZE);
    __syncthreads();
  }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int row() { return warp() / (BN / WN) * WM; }
  static __device__ __forceinline__ int column() { return warp() % (BN / WN) * WN; }

  static __device__ __forceinline__ void read(Warp& part, const Stored* tiles, int step) {
    part.template read<TileA, TileB>(tiles, row(), column(), step);
  }
  static __device__ __forceinline__ void multiply(Warp& part, int step) {
    part.template multiply<typename TileA::Matrix, typename TileB::Matrix>(step);
  }
};
