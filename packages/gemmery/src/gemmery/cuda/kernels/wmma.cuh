// A block's product by wmma: only the instructions know which lane holds which element of a fragment.
#pragma once
#include "epilogue.cuh"
#include "load.cuh"
#include "tiling.cuh"

// Parts of the instructions' names.
struct OperandA { static constexpr const char text[] = "a"; };
struct OperandB { static constexpr const char text[] = "b"; };
struct RowMajor { static constexpr const char text[] = "row"; };
struct ColMajor { static constexpr const char text[] = "col"; };
template <bool ROWS> struct MajorOf { using Name = RowMajor; };
template <> struct MajorOf<false> { using Name = ColMajor; };

// For each type, by the rung that multiplies it: the shape of its instruction, its type in shared memory, and the
// registers of a fragment and of sums.
template <class T> struct WmmaFragment;

// A tile of the operand in the order of memory, with rows padded by 16 or 32 bytes, so that the rows of a fragment are
// on different banks: 8 rows of 16 bytes, or 4 of 32 in f64 and in tf32 along the sides.
template <class S, bool IS_A, int SIDE, int BK, Layout LAYOUT> struct PaddedRows {
  static constexpr Layout ORDER = LAYOUT == COL ? COL : ROW;
  using Matrix = typename MajorOf<IS_A == (ORDER == ROW)>::Name;
  static constexpr int PAD = (sizeof(S) + (ORDER == COL) > 4 ? 32 : 16) / int(sizeof(S));
  static constexpr int STRIDE = (ORDER == COL ? SIDE : BK) + PAD;
  static constexpr int SIZE = STRIDE * (ORDER == COL ? BK : SIDE), SPAN = 1;
  static __device__ constexpr int distance(int sides, int ks) {
    return ORDER == COL ? ks * STRIDE + sides : sides * STRIDE + ks;
  }
  static __device__ __forceinline__ int at(int side, int k) { return distance(side, k); }
};

// A warp's WM x WN sums as fragments, and two sets of fragments of A and B: one is loaded while the other is used.
template <class T, int WM, int WN> struct WmmaWarp {
  using Fragment = WmmaFragment<T>;
  using Stored = typename Fragment::Stored;
  static constexpr int TALL = WM / Fragment::M, WIDE = WN / Fragment::N;
  static constexpr int PATCH_STRIDE = WN + 4, PATCH = Fragment::M * PATCH_STRIDE;  // shared memory for store
  typename Fragment::Registers a[2][TALL], b[2][WIDE];
  typename Fragment::Sums sums[TALL][WIDE] = {};

  // Step `step` of k of a tile's rows from `row` on, and of columns from `column` on.
  template <class TileA, class TileB>
  __device__ __forceinline__ void read(const Stored* tiles, int row, int column, int step) {
    const Stored* b_tile = tiles + TileA::SIZE;
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
      ptx::wmma_load<OperandA, typename TileA::Matrix, typename Fragment::Shape, typename Fragment::Type>(
          a[step % 2][i], ptx::shared_address(tiles + TileA::at(row + i * Fragment::M, step * Fragment::K)),
          TileA::STRIDE);
    }
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      ptx::wmma_load<OperandB, typename TileB::Matrix, typename Fragment::Shape, typename Fragment::Type>(
          b[step % 2][j], ptx::shared_address(b_tile + TileB::at(column + j * Fragment::N, step * Fragment::K)),
          TileB::STRIDE);
    }
  }

  template <class MatrixA, class MatrixB> __device__ __forceinline__ void multiply(int step) {
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        ptx::wmma_mma<MatrixA, MatrixB, typename Fragment::Types>(sums[i][j], a[step % 2][i], b[step % 2][j]);
      }
    }
  }

  // Stores in C from (row, column) on, Fragment::M rows at a time through the warp's own patch of shared memory.
  template <int EPILOGUE, int VEC, class S, class Out>
  __device__ __forceinline__ void store(const Product<T, Out>& p, int batch, int row, int column, S* patch) {
    constexpr int STRIPS = Fragment::M * WN / VEC;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < TALL; ++y) {
#pragma unroll
      for (int x = 0; x < WIDE; ++x) {
        ptx::wmma_store<typename Fragment::Shape>(ptx::shared_address(patch + x * Fragment::N), sums[y][x],
                                                  PATCH_STRIDE);
      }
      __syncwarp();
#pragma unroll 4
      for (int strip = lane; strip < STRIPS; strip += 32) {
        int within = strip / (WN / VEC), across = strip % (WN / VEC) * VEC;
        int i = row + y * Fragment::M + within, j = column + across;
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

// A block: tiles of A and of B, one after the other in shared memory, the loads that fill them through registers, and
// the part of a warp. Two of each tile take turns: `now` is read while `next` is filled.
template <class T, class Access, class Tiles> struct WmmaBlock {
  using Warp = WmmaWarp<T, Tiles::WM, Tiles::WN>;
  using Stored = typename Warp::Stored;
  using TileA = PaddedRows<Stored, true, Tiles::BM, Tiles::BK, Access::A>;
  using TileB = PaddedRows<Stored, false, Tiles::BN, Tiles::BK, transposed(Access::B)>;
  static constexpr int LINE = 128, SIZE = TileA::SIZE + TileB::SIZE, STEPS = Tiles::BK / WmmaFragment<T>::K;
  static_assert(STEPS % 2 == 0, "the two sets of fragments take turns");

  Warp warp;
  Tile tile;
  Panel<T> a_panel, b_panel;
  Load<T, Access::A, Access::A_VEC, Tiles::BM, Tiles::BK, Tiles::THREADS, LINE> a_load;
  Load<T, transposed(Access::B), Access::B_VEC, Tiles::BN, Tiles::BK, Tiles::THREADS, LINE> b_load;

  template <class Out>
  __device__ __forceinline__ explicit WmmaBlock(const Product<T, Out>& p)
      : WmmaBlock(p, tile_of_block<Tiles::BM, Tiles::BN>(p)) {}

  // Loads the first tiles, and returns their place.
  __device__ __forceinline__ Stored* begin() {
    extern __shared__ __align__(128) char memory[];
    fetch();
    put(reinterpret_cast<Stored*>(memory));
    return reinterpret_cast<Stored*>(memory);
  }

  // Loads the tiles that follow, and stores them: then they are read, and those before them are filled.
  __device__ __forceinline__ void fetch() {
    a_load.fetch(a_panel);
    b_load.fetch(b_panel);
  }
  __device__ __forceinline__ void put(Stored*& now, Stored*& next) const {
    put(next);
    Stored* done = now;
    now = next;
    next = done;
  }

  __device__ __forceinline__ void read(const Stored* tiles, int step) {
    warp.template read<TileA, TileB>(tiles, Tiles::row(), Tiles::column(), step);
  }
  __device__ __forceinline__ void multiply(int step) {
    warp.template multiply<typename TileA::Matrix, typename TileB::Matrix>(step);
  }

  template <int EPILOGUE, class Out> __device__ __forceinline__ void store(const Product<T, Out>& p) {
    extern __shared__ __align__(128) char memory[];
    warp.template store<EPILOGUE, Access::C_VEC>(
        p, tile.batch, tile.row + Tiles::row(), tile.col + Tiles::column(),
        reinterpret_cast<Sum<T, Out>*>(memory) + threadIdx.x / 32 * Warp::PATCH);
  }

 private:
  template <class Out>
  __device__ __forceinline__ WmmaBlock(const Product<T, Out>& p, Tile tile)
      : WmmaBlock(tile, panel_of_a(p, tile), panel_of_b(p, tile)) {}

  __device__ __forceinline__ WmmaBlock(Tile tile, const Panel<T>& a, const Panel<T>& b)
      : tile(tile), a_panel(a), b_panel(b), a_load(a), b_load(b) {}

  __device__ __forceinline__ void put(Stored* tiles) const {
    a_load.template put<TileA>(tiles);
    b_load.template put<TileB>(tiles + TileA::SIZE);
    __syncthreads();
  }
};
