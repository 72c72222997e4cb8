// Idea: rows of A that other devices send come while one launch multiplies. It begins with the tiles of the device's
// own rows, goes on upward and around, the order in which pieces come, and waits for the flag of a piece when it gets
// there: no second launch, and no wave of tiles that ends before its rows are there.
// Parent: wgmma_epilogue, by which it takes two launches, each with a last wave of few tiles. Two H200, bf16, over the
// product alone: 1.03 where two launches take 1.13 (4,096 rows of 14,336 x 4,096), 1.05 for 1.06 (2,048 rows). In pairs
// of blocks that share columns of B, each with a tile of the own rows first, 1.51 (512 rows), by larger tiles 1.77.
#include "wgmma_epilogue.cu"

template <class T, class Out> struct Gathered : TmaProduct<T, Out> {
  TensorMap own;    // of the device's own rows, which lie elsewhere; `offsets` are the flags, one for each piece of A
  int begin, each;  // the first of the own rows, and how many each device has: a multiple of the rows of a tile
  unsigned long long limit;  // nanoseconds that it waits for rows
};

template <class Tiles> struct Arriving : Bands<Tiles> {
  const int begin, each;
  unsigned there = 0;  // a bit for each piece that is known to have come

  template <class P, class Place>
  __device__ __forceinline__ Arriving(const P& p, const Place& place)
      : Bands<Tiles>(p, place), begin(p.begin), each(p.each) { turn(); }
  __device__ __forceinline__ void find() {
    Bands<Tiles>::find();
    turn();
  }
  __device__ __forceinline__ void next() {
    this->index += gridDim.x / Bands<Tiles>::CLUSTER;
    if (this->more()) find();
  }
  __device__ __forceinline__ void turn() {
    const int row = begin + each - Tiles::BM - this->tile.row;
    this->tile.row = row < 0 ? row + this->m : row;
  }
  __device__ __forceinline__ bool is_own() const { return unsigned(this->tile.row - begin) < unsigned(each); }

  // By the thread that loads the tile: its rows have come, and tensor copies see them.
  template <class P> __device__ __forceinline__ void wait(const P& p) {
    const int piece = this->tile.row / each;
    if (there >> piece & 1) return;
    const unsigned long long start = ptx::globaltimer();
    while (ptx::ld_acquire_sys(p.offsets + piece) == 0) {
      if (ptx::globaltimer() - start > p.limit) ptx::trap();
    }
    ptx::fence_proxy_async_global();
    there |= 1u << piece;
  }
};

// A product whose A is the own rows.
template <class P> struct OwnRows {
  const TensorMap &a, &b;
  const decltype(P::product)& product;
  __device__ __forceinline__ explicit OwnRows(const P& p) : a(p.own), b(p.b), product(p.product) {}
};

template <int EPILOGUE, class Tiles, class T, class Out>
__device__ __forceinline__ void gathered(const Gathered<T, Out>& p, char* shared) {
  using P = Pieces<Tiles, Out>;
  static_assert(Tiles::CN == 1 && !Tiles::APART && Tiles::A_K_MAJOR, "no block copies rows of A for another");
  Pipeline<Tiles, P::BYTES> pipe(shared, p, false);
  const Steps k = steps_of<Tiles>(p.product.k, P::STEPS);
  Arriving<Tiles> order(p, pipe.place);
  pipe.wait_for_launches_before();
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    if (pipe.brings()) {
      Producer<Tiles> producer(pipe);
      for (; order.more(); order.next()) {
        const Tile tile = order.tile;
        if (order.is_own()) {
          producer.bring_tile(OwnRows<Gathered<T, Out>>(p), {0, tile.row - p.begin, tile.col}, k.first, k.steps);
        } else {
          order.wait(p);
          producer.bring_tile(p, tile, k.first, k.steps);
        }
      }
    }
  } else {
    pipe.begin_consumer(p);
    consume<EPILOGUE, Tiles>(p, pipe, order, k.steps, shared);
  }
  pipe.end();
}

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_gathered(const __grid_constant__ Gathered<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  gathered<EPILOGUE, Tiles>(p, shared);
}

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __cluster_dims__(Tiles::CM, 1, 1) __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_gathered_cluster(const __grid_constant__ Gathered<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  gathered<EPILOGUE, Tiles>(p, shared);
}
