// Idea: a block stays on its multiprocessor and takes one tile after another, so the producer brings the first stages
// of the next tile while the consumers store this one. The order of tiles is then the program's: bands of rows, so that
// the tiles under way at a time are nearly a square of C and share rows of A and columns of B in L2.
// Parent: wgmma_specialized, a block of which ends with its tile, and the next one begins with an empty ring.
// Measured: not yet.
#include "wgmma_specialized.cu"

// The tiles of a block (of a cluster: one for each of its blocks): every gridDim.x-th, matrix after matrix, in bands of
// p.band rows of tiles, down each column of a band.
template <class Tiles> struct Bands {
  static constexpr bool GROUPED = false;
  int rows, columns, index, stride, count, band, m, n;
  Tile tile;

  template <class P, class Place>
  __device__ __forceinline__ Bands(const P& p, const Place& place)
      : rows((p.product.m + Tiles::BM * Tiles::CM - 1) / (Tiles::BM * Tiles::CM)),
        columns((p.product.n + Tiles::BN * Tiles::CN - 1) / (Tiles::BN * Tiles::CN)),
        index(blockIdx.x / place.BLOCKS), stride(gridDim.x / place.BLOCKS), count(rows * columns * p.product.batch),
        band(p.band), m(place.m), n(place.n) {
    find();
  }

  __device__ __forceinline__ bool more() const { return index < count; }
  static __device__ __forceinline__ bool passes(int) { return false; }  // every warpgroup has rows of each tile
  __device__ __forceinline__ void next() {
    index += stride;
    if (more()) find();
  }

  __device__ __forceinline__ void find() {
    int of_batch = index % (rows * columns), first = of_batch / (band * columns) * band;
    int within = of_batch % (band * columns), height = min(rows - first, band);
    tile = {index / (rows * columns), ((first + within % height) * Tiles::CM + m) * Tiles::BM,
            (within / height * Tiles::CN + n) * Tiles::BN};
  }
};

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_persistent(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  specialized<EPILOGUE, Tiles, Bands<Tiles>>(p, shared);
}
