// Idea: mma.sync takes its fragments from shared memory by ldmatrix, 16 bytes per lane, from tiles stored so that no
// bank is used twice: lane l of a warp stores its 16 bytes at column (l % 8) ^ (l / 8), where l / 8 is the row, and
// stepping through k in groups of 32 bytes is ^1 ^3 ^1 ^3.
// Parent: wmma_f16, whose fragments are loaded as the compiler chooses.
// Measured on an H200, n = 4096, f16: shared memory takes the fewest wavefronts possible. It is no faster than its
// parent, which meanwhile loads the next tile into registers: here each tile is waited for.
#include "mma.cuh"
#include "swizzle.cuh"

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

template <class T, class Out, int EPILOGUE, class Access, bool RAGGED, class Tiles>
__global__ void __launch_bounds__(Tiles::THREADS) mma_ldmatrix(const Product<T, Out> p) {
  using Block = MmaBlock<T, Access, Tiles, RAGGED>;
  extern __shared__ __align__(1024) char tiles[];
  Tile tile = tile_of_block<Tiles::BM, Tiles::BN>(p);
  typename Block::CopyA a_copy(panel_of_a(p, tile));
  typename Block::CopyB b_copy(panel_of_b(p, tile));
  typename Block::FragmentsA a;
  typename Block::FragmentsB b;
  typename Block::Sums sums;
  unsigned start = ptx::shared_address(tiles), a_start = start + a.start(Tiles::row()),
           b_start = start + Block::TileA::BYTES + b.start(Tiles::column());
  for (int k0 = 0; k0 < p.k; k0 += Tiles::BK) {
    a_copy.copy(tiles);
    b_copy.copy(tiles + Block::TileA::BYTES);
    a_copy.advance(Tiles::BK);
    b_copy.advance(Tiles::BK);
    __syncthreads();
#pragma unroll
    for (int group = 0; group < Block::GROUPS; ++group) {
      a.read(a_start, 0, group);
      b.read(b_start, 0, group);
      sums.multiply(a, b);
    }
    __syncthreads();
  }
  sums.template store<EPILOGUE, Access::C_VEC>(p, tile.batch, tile.row + Tiles::row(), tile.col + Tiles::column());
}
