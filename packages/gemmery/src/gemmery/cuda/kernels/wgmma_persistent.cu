// Idea: a block stays on its multiprocessor and takes one tile after another, so the producer brings the first stages
// of the next tile while the consumers store this one. The order of tiles is then the program's: bands of rows, so that
// the tiles under way at a time are nearly a square of C and share rows of A and columns of B in L2.
// Parent: wgmma_specialized, a block of which ends with its tile, and the next one begins with an empty ring.
// Measured on an H200, bf16, n = 4096: 624 TFLOP/s, as fast as its parent (1.02 in pairs): sums stored from registers
// still hold the tensor cores up.
#include "wgmma_specialized.cu"

// The tiles of a block (of a cluster: one for each of its blocks): every gridDim.x-th, matrix after matrix, in bands of
// p.band rows of tiles, down each column of a band. Bands of rows that are APART go on from matrix to matrix. Where
// every other tile may be NARROWER, it is so in turns along a band and from one band to the next, since a block often
// has the same columns of the next band; unless rows of C begin at sectors of 32 bytes, and tiles would not.
//
// The last tiles may OVERLAP those above them, whose rows they leave to these: a copy takes five times as long for a
// row beyond the edge as for one of the matrix. 264 rows by 4096 squared take 19.7 us, not 36.3 (H100).
template <class Tiles, bool OVERLAP = false> struct Bands {
  static constexpr bool GROUPED = false, LAST = true;  // LAST: a block has no tiles but these
  static constexpr int CLUSTER = Tiles::CM * Tiles::CN;
  static constexpr bool OVERLAPS = OVERLAP && Tiles::A_K_MAJOR && !Tiles::APART && !Tiles::BESIDE && Tiles::BM >= 64;
  static constexpr int ALIKE = Tiles::BLOCKS == 1 ? 16 : 64 * Tiles::BLOCKS;  // rows that one warp has, or none of
  static constexpr bool OVERLAPS_BESIDE = OVERLAP && Tiles::SWAPPED && Tiles::B_K_MAJOR;  // by whole pieces of 32
  const int m, n, batch, band;  // of the argument, which costs no registers
  const long long row_bytes;
  int index;
  Tile tile;
  int own = 0;         // the first row of a tile that OVERLAPS that is not another's
  int own_column = 0;  // and its first column
  bool narrow = false;

  template <class P, class Place>
  __device__ __forceinline__ Bands(const P& p, const Place&)
      : m(p.product.m), n(p.product.n), batch(p.product.batch), band(p.band),
        row_bytes(row_bytes_of(p)), index(blockIdx.x / CLUSTER) {
    find();
  }

  template <class P> static __device__ __forceinline__ long long row_bytes_of(const P& p) {
    if constexpr (Tiles::NARROWER > 0) return p.product.c_row * int(sizeof(*p.product.c)); else return 0;
  }
  __device__ __forceinline__ int rows() const { return (m + Tiles::BM * Tiles::CM - 1) / (Tiles::BM * Tiles::CM); }
  __device__ __forceinline__ int columns() const {
    return (n + Tiles::WIDE * Tiles::CN - 1) / (Tiles::WIDE * Tiles::CN);
  }
  __device__ __forceinline__ bool more() const { return index < rows() * columns() * batch; }
  static __device__ __forceinline__ bool passes(int) { return false; }  // every warpgroup has rows of each tile
  __device__ __forceinline__ void next() {
    index += gridDim.x / CLUSTER;
    if (more()) find();
  }

  // A division takes about 70 cycles, and the first copy waits for those of the first tile.
  __device__ __forceinline__ void find() {
    const unsigned down = Tiles::APART ? rows() * batch : rows(), across = columns(), each = down * across;
    const unsigned of_band = band * across;
    unsigned within = index, matrix = 0;
    if (!Tiles::APART && batch > 1) {
      matrix = within / each;
      within -= matrix * each;
    }
    unsigned bands = within / of_band, first = bands * band, height = min(down - first, unsigned(band));
    within -= bands * of_band;
    unsigned column = within / height, row = first + within - column * height;
    if (Tiles::APART) {
      // Every other matrix may have late tiles. A block often has the same row of all bands: it gets both kinds.
      if (rows() == 1 && band % 2 == 0) row ^= bands % 2;
      matrix = row / rows();
      row -= matrix * rows();
    }
    const Cluster<Tiles::CM, Tiles::CN, Tiles::LAYERS> place;
    tile = {int(matrix), int((row * Tiles::CM + place.m) * Tiles::BM),
            int((column * Tiles::CN + place.n) * Tiles::WIDE)};
    if constexpr (OVERLAPS) {
      own = tile.row;
      if (own > 0 && own < m) tile.row -= max(own + Tiles::BM - m, 0) / ALIKE * ALIKE;
    }
    if constexpr (OVERLAPS_BESIDE) {
      own_column = tile.col;
      const int beyond = max(own_column + Tiles::BN - n, 0);
      if (own_column > 0 && own_column < n) tile.col -= min(beyond / 32 * 32, Tiles::BN - 32);  // the last piece is own
    }
    if constexpr (Tiles::NARROWER > 0) {
      const bool covers = int(across * Tiles::BN - (across + 1) / 2 * Tiles::NARROWER) >= n && row_bytes % 32;
      narrow = covers && (column + bands) % 2;
      if (covers) tile.col -= (column + bands % 2) / 2 * Tiles::NARROWER;  // so many on its left are narrow
    }
  }
};

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_persistent(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  specialized<EPILOGUE, Tiles, Bands<Tiles>>(p, shared);
}
