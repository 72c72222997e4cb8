// Idea: three levels, block tile -> warp tile -> thread tile. The lanes of a warp are close together in C, so a warp
// reads WM + WN elements of shared memory per step of k, and pairs of lanes that read the same share a wavefront.
// Parent: simt_padded, where a warp spans the whole width of the block's tile.
// Measured on an H200 at n = 4096: a little faster in f32; a tie in f64, where one block takes the multiprocessor's
// registers and waits for each tile. A 16-byte read alone takes 2 cycles if pairs of lanes agree, and 4 if they do
// not.
#include "simt_padded.cu"

// Each warp takes WM x WN of the block's tile, and its lanes strips of that, of one element where SINGLE. A lane shares
// its rows with lane ^ 1 and its columns with lane ^ 2: 16-byte reads where such pairs agree take half the wavefronts.
template <class Tiles, int WM, int WN, class S, bool SINGLE = false> struct WarpTiling {
  static constexpr int TALL = SINGLE ? 1 : strip<S, Tiles::TM>(), WIDE = SINGLE ? 1 : strip<S, Tiles::TN>();
  static constexpr int DOWN = WM / Tiles::TM, ACROSS = WN / Tiles::TN;              // lanes of a warp
  static constexpr int ROWS_APART = DOWN * TALL, COLUMNS_APART = ACROSS * WIDE;
  static constexpr bool PAIRED = DOWN > 1 && ACROSS > 1;
  int row, column;

  __device__ __forceinline__ WarpTiling() {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int y = PAIRED ? lane / 4 / (ACROSS / 2) * 2 + lane / 2 % 2 : lane / ACROSS;
    int x = PAIRED ? lane / 4 % (ACROSS / 2) * 2 + lane % 2 : lane % ACROSS;
    row = warp / (Tiles::BN / WN) * WM + y * TALL;
    column = warp % (Tiles::BN / WN) * WN + x * WIDE;
  }
};

template <class T, class Out, int EPILOGUE, class Access, class Tiles, int WM, int WN, int BLOCKS>
__global__ void __launch_bounds__(Tiles::THREADS, BLOCKS) simt_warptile(const Product<T, Out> p) {
  using TileA = PaddedTile<Tiles::BM, Tiles::BK, Access::A>;
  using TileB = PaddedTile<Tiles::BN, Tiles::BK, transposed(Access::B)>;
  multiply_in_registers<EPILOGUE, Access, Tiles, TileA, TileB, WarpTiling<Tiles, WM, WN, Sum<T, Out>>>(p);
}
