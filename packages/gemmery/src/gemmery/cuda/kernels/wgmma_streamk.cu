// Idea: rounds of whole tiles leave multiprocessors idle in the last one. Where its tiles are few, the SPLITS blocks of
// a cluster share each of them: a block multiplies a part of k, sends its sums to the others through their shared
// memory, and finishes a part of the columns. A product of a few tiles has such a round only; then the blocks of a
// cluster may have CM x CN tiles, and share operands as well.
// Parent: wgmma_epilogue, a block of which always finishes whole tiles.
// Measured on an H200, bf16, 128 x 4096 x 14336: 1.04 of cuBLAS with halves of k, where whole tiles reach 0.92.
#include "wgmma_epilogue.cu"

// How many of `count` tiles stay whole. If LEFT are left after whole rounds, clusters take ceil(LEFT / clusters) turns,
// each 1 / SPLITS of a round; if those are a round or more, all tiles stay whole.
template <int SPLITS> __device__ __forceinline__ int whole_tiles(int count) {
  const int left = count % gridDim.x, clusters = gridDim.x / SPLITS;
  return left > (SPLITS - 1) * clusters ? count : count - left;
}

// Every stride-th tile of the order, up to `end`.
template <class Tiles> struct Turns : Bands<Tiles, true> {
  static constexpr bool LAST = false;
  int end, stride;

  template <class P, class Place>
  __device__ __forceinline__ Turns(const P& p, const Place& place, int first, int end, int stride)
      : Bands<Tiles, true>(p, place), end(end), stride(stride) {
    this->index = first;
    if (more()) this->find();
  }
  __device__ __forceinline__ bool more() const { return this->index < end; }
  __device__ __forceinline__ void next() {
    this->index += stride;
    if (more()) this->find();
  }
};

// Tiles that SPLITS blocks share, or layers of a cluster whose blocks share operands.
template <class Tiles, int SPLITS> struct Layered : Tiles { static constexpr int LAYERS = SPLITS; };

// Where the sums of a cluster's blocks meet: each thread sends its sums of a block's columns to the same thread of that
// block, and finishes those it receives. Where they fit the staging buffers of C they lie there (APART), and a block
// may send them as soon as its own products have ended. Else they lie in the ring, when all blocks have read it.
template <class Tiles, class P, int SPLITS> struct Meeting {
  using S = typename Tiles::S;
  static constexpr int LAYER = Tiles::CM * Tiles::CN, COLUMNS = (Tiles::BN / 8 + SPLITS - 1) / SPLITS * 8;  // at most
  static constexpr int OWN = COLUMNS / 2, THREADS = Tiles::WARPGROUPS * 128;
  static constexpr int FOUR = THREADS * 16, PART = Tiles::BLOCKS * OWN / 4 * FOUR;  // bytes of four sums of all threads
  static constexpr bool APART = SPLITS * PART <= P::BYTES;
  static_assert(SPLITS * PART <= Tiles::RING, "the parts of a block's columns fit its ring");

  // All threads of the cluster: what they did before is done.
  static __device__ __forceinline__ void arrive() {
    __syncwarp();
    ptx::barrier_cluster_arrive();
  }
  static __device__ __forceinline__ void wait() {
    __syncwarp();
    ptx::barrier_cluster_wait();
  }

  using Sums = S[Tiles::BLOCKS][Tiles::BN / 2];
  static __device__ __forceinline__ void send(const Sums& sums, unsigned place, int rank, int within) {
#pragma unroll
    for (int to = 0; to < SPLITS; ++to) {
      const unsigned there = ptx::mapa(place + rank * PART + threadIdx.x % THREADS * 16, to * LAYER + within);
#pragma unroll
      for (int i = 0; i < Tiles::BLOCKS * OWN; i += 4) {
        if (to * OWN + i % OWN >= Tiles::BN / 2) continue;
        const S* x = sums[i / OWN] + to * OWN + i % OWN;
        ptx::st_shared_cluster_v4(there + i / 4 * FOUR, x[0], x[1], x[2], x[3]);
      }
    }
  }

  // Adds up in the order of k, four sums at a time: two columns of two rows, to C from registers. `at` is the warp's
  // place in the block's columns. What may happen to a sum is long, so there is one copy of it.
  template <int EPILOGUE, class T, class Out>
  static __device__ __forceinline__ void finish(unsigned place, const TmaProduct<T, Out>& p, Where at, int rank) {
    const unsigned here = place + threadIdx.x % THREADS * 16;
    const int lane = threadIdx.x % 32;
#pragma unroll(EPILOGUE ? 1 : 4)
    for (int i = 0; i < Tiles::BLOCKS * OWN; i += 4) {
      if (SPLITS * COLUMNS > Tiles::BN && rank * OWN + i % OWN >= Tiles::BN / 2) continue;
      S sum[4], part[4];
      ptx::ld_shared_v4(sum, here + i / 4 * FOUR);
#pragma unroll
      for (int of = 1; of < SPLITS; ++of) {
        ptx::ld_shared_v4(part, here + of * PART + i / 4 * FOUR);
#pragma unroll
        for (int x = 0; x < 4; ++x) sum[x] += part[x];
      }
      typename Select<IsWhole<Out>::value, S, float>::type v[4] = {sum[0], sum[1], sum[2], sum[3]};
      const Where four = {at.batch, at.row + i / OWN * 64, at.column + i % OWN * 2};
      if (Tiles::SWAPPED && four.column < at.own) continue;
      if constexpr (EPILOGUE != PLAIN) finish_piece<EPILOGUE, false>(v, p, four);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Chunk<Out, 2> pair = {narrow<Out>(v[2 * half]), narrow<Out>(v[2 * half + 1])};
        store_pair(p, pair, {at.batch, four.row + lane / 4 + half * 8, four.column + lane % 4 * 2});
      }
    }
  }

  template <class T, class Out>
  static __device__ __forceinline__ void store_pair(const TmaProduct<T, Out>& p, const Chunk<Out, 2>& pair, Where at) {
    const bool second = at.column + 1 < p.product.n;
    if (at.row >= p.product.m || at.column >= p.product.n) return;
    Out* c = p.product.c_at(at.batch, at.row, at.column);
    if (p.mapped && second && !Tiles::SWAPPED) {  // what tensor copies can write is aligned
      *reinterpret_cast<Chunk<Out, 2>*>(c) = pair;
    } else {
      c[0] = pair.of[0];
      if (second) c[p.product.c_col] = pair.of[1];
    }
  }
};

template <class T, class Out, int EPILOGUE, class Whole, int SPLITS>
__global__ void __cluster_dims__(Whole::CM * Whole::CN * SPLITS, 1, 1) __launch_bounds__(Pipeline<Whole>::THREADS, 1)
    wgmma_streamk(const __grid_constant__ TmaProduct<T, Out> p) {
  using Tiles = Layered<Whole, SPLITS>;
  using P = Pieces<Tiles, Out>;
  using M = Meeting<Tiles, P, SPLITS>;
  extern __shared__ __align__(1024) char shared[];
  Pipeline<Tiles, P::BYTES> pipe(shared, p);
  const Steps k = steps_of<Tiles>(p.product.k, P::STEPS);
  const Steps all = steps_of<Tiles>(p.product.k, SPLITS);
  constexpr int CLUSTER = M::LAYER * SPLITS;
  const int within = ptx::cluster_ctarank() % M::LAYER, rank = ptx::cluster_ctarank() / M::LAYER;
  const int first = all.steps * rank / SPLITS;
  const Steps part = {all.first + first, all.steps * (rank + 1) / SPLITS - first};
  constexpr int HIGH = Tiles::BM * Tiles::CM, WIDE = Tiles::BN * Tiles::CN;
  const int rows = (p.product.m + HIGH - 1) / HIGH, columns = (p.product.n + WIDE - 1) / WIDE;
  const int count = rows * columns * p.product.batch, whole = M::LAYER > 1 ? 0 : whole_tiles<SPLITS>(count);
  Turns<Tiles> order(p, pipe.place, blockIdx.x, whole, gridDim.x);  // whole tiles; then those of the cluster
  Turns<Tiles> rest(p, pipe.place, whole + blockIdx.x / CLUSTER, count, gridDim.x / CLUSTER);
  if (threadIdx.x == 0) {
    if (order.more()) prefetch_short<Tiles>(p, pipe.place, order.tile, k);
    else prefetch_short<Tiles>(p, pipe.place, rest.tile, part);
  }
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    pipe.wait_for_launches_before();
    Producer<Tiles> producer(pipe);
    if (threadIdx.x == 0) {
      for (; order.more(); order.next()) producer.bring_tile(p, order.tile, k.first, k.steps);
    }
    for (bool again = false; rest.more(); rest.next(), again = true) {
      if (M::APART || again) M::arrive();
      if (!M::APART && again) M::wait();  // all have read the sums of the tile before: the ring may be filled again
      if (threadIdx.x == 0) producer.bring_tile(p, rest.tile, part.first, part.steps);
      if (!M::APART) M::arrive();
      M::wait();
      M::arrive();
      M::wait();
    }
  } else {
    pipe.begin_consumer(p);
    pipe.wait_for_launches_before();
    const int stages = whole / gridDim.x * k.steps;  // that are behind it where tiles are shared
    consume<EPILOGUE, Tiles>(p, pipe, order, k.steps, shared);
    Consumer<Tiles> consumer(pipe);
    consumer.now.stage = stages % Tiles::STAGES;
    consumer.now.parity = stages / Tiles::STAGES % 2;
    const unsigned place = M::APART ? pipe.ring + Tiles::RING : pipe.ring;
    for (bool again = false; rest.more(); rest.next(), again = true) {
      if (again) ptx::fence_proxy_async();  // copies may overwrite what other blocks have sent
      if (M::APART || again) M::arrive();
      if (!M::APART && again) M::wait();
      consumer.multiply_tile(part.steps);
      if (!M::APART) M::arrive();
      M::wait();  // the place is free in all blocks
      M::send(consumer.sums, place, rank, within);
      M::arrive();
      M::wait();
      const int warp = threadIdx.x / 32 - 4, column = rest.tile.col + rank * M::COLUMNS;
      const int row = rest.tile.row + warp / 4 * Tiles::BLOCKS * 64 + warp % 4 * 16;
      if (row < rest.own) continue;  // another tile's
      M::template finish<EPILOGUE>(place, p, {rest.tile.batch, row, column, rest.own_column}, rank);
    }
  }
}
