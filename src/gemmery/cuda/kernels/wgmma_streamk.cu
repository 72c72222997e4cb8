// Idea: rounds of whole tiles leave multiprocessors idle in the last one. Where its tiles are few, the SPLITS blocks of
// a cluster share each of them: a block multiplies a part of k, sends its sums to the others through their shared
// memory, and finishes a part of the columns. A product of a few tiles has such a round only.
// Parent: wgmma_persistent, a block of which always finishes whole tiles.
// Measured: not yet.
#include "wgmma_persistent.cu"

// The tiles of a block: whole ones in turn, then those that the blocks of its cluster share. If LEFT tiles are left
// after whole rounds, clusters take ceil(LEFT / clusters) turns, each a part of a round; if those are SPLITS or more,
// the tiles stay whole.
template <class Tiles, int SPLITS> struct Shares : Bands<Tiles> {
  int whole;
  bool shared = false;  // whether the cluster has the tile

  template <class P, class Place>
  __device__ __forceinline__ Shares(const P& p, const Place& place) : Bands<Tiles>(p, place) {
    const int left = this->count % gridDim.x, clusters = gridDim.x / SPLITS;
    whole = left > (SPLITS - 1) * clusters ? this->count : this->count - left;
    share();
  }
  __device__ __forceinline__ void next() {
    this->index += this->stride;
    share();
  }
  __device__ __forceinline__ void share() {
    if (!shared && this->index >= whole) {
      shared = true;
      this->index = whole + blockIdx.x / SPLITS;
      this->stride = gridDim.x / SPLITS;
    }
    if (this->more()) this->find();
  }
  // Its steps of k, of `all`, which are at least SPLITS.
  __device__ __forceinline__ Steps steps(Steps all, int rank) const {
    if (!shared) return all;
    const int from = all.steps * rank / SPLITS, to = all.steps * (rank + 1) / SPLITS;
    return {all.first + from, to - from};
  }
};

// The columns that a block finishes of a tile it shares.
template <class Tiles, int SPLITS> struct Slice : Tiles { static constexpr int BN = Tiles::BN / SPLITS; };

// Adds up the sums of a cluster's blocks in the order of k: each thread sends its sums of a block's columns to the same
// thread of that block, and adds up those it receives. They lie in the ring, which no copy and no product may use.
template <class Tiles, int SPLITS> struct Meeting {
  using S = typename Tiles::S;
  static constexpr int OWN = Tiles::BN / 2 / SPLITS, THREADS = Tiles::WARPGROUPS * 128;
  static constexpr int FOUR = THREADS * 16, PART = Tiles::BLOCKS * OWN / 4 * FOUR;  // bytes of four sums of all threads
  static_assert(OWN % 4 == 0 && SPLITS * PART <= Tiles::RING, "the parts of a block's columns fit its ring");

  static __device__ __forceinline__ void send(const S (&sums)[Tiles::BLOCKS][Tiles::BN / 2], unsigned ring, int rank) {
#pragma unroll
    for (int to = 0; to < SPLITS; ++to) {
      const unsigned there = ptx::mapa(ring + rank * PART + threadIdx.x % THREADS * 16, to);
#pragma unroll
      for (int i = 0; i < Tiles::BLOCKS * OWN; i += 4) {
        const S* x = sums[i / OWN] + to * OWN + i % OWN;
        ptx::st_shared_cluster_v4(there + i / 4 * FOUR, x[0], x[1], x[2], x[3]);
      }
    }
  }

  static __device__ __forceinline__ void add(S (&own)[Tiles::BLOCKS][OWN], unsigned ring) {
    const unsigned here = ring + threadIdx.x % THREADS * 16;
#pragma unroll
    for (int i = 0; i < Tiles::BLOCKS * OWN; i += 4) {
      S sum[4], part[4];
      ptx::ld_shared_v4(sum, here + i / 4 * FOUR);
#pragma unroll
      for (int of = 1; of < SPLITS; ++of) {
        ptx::ld_shared_v4(part, here + of * PART + i / 4 * FOUR);
#pragma unroll
        for (int x = 0; x < 4; ++x) sum[x] += part[x];
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) own[i / OWN][i % OWN + x] = sum[x];
    }
  }
};

template <class T, class Out, int EPILOGUE, class Tiles, int SPLITS>
__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
wgmma_streamk(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  Pipeline<Tiles> pipe(shared, p);
  const Steps all = steps_of<Tiles>(p.product.k, SPLITS);
  const int rank = ptx::cluster_ctarank();
  Shares<Tiles, SPLITS> order(p, pipe.place);
  pipe.wait_for_launches_before();
  bool met = false;
  auto meet = [] {  // all threads of the cluster
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  };
  if (pipe.warpgroup == 0) {
    if constexpr (Tiles::WARPGROUPS == 2) ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    Producer<Tiles> producer(pipe);
    for (; order.more(); order.next()) {
      if (met) meet();  // all sums have been read: the ring may be filled again
      const Steps k = order.steps(all, rank);
      if (threadIdx.x == 0) producer.bring_tile(p, order.tile, k.first, k.steps);
      if (order.shared) {
        meet();
        meet();
        met = true;
      }
    }
  } else {
    if constexpr (Tiles::WARPGROUPS == 2) ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer<Tiles> consumer(pipe);
    for (; order.more(); order.next()) {
      if (met) meet();
      consumer.multiply_tile(order.steps(all, rank).steps);
      int row = order.tile.row + (pipe.warpgroup - 1) * Tiles::BLOCKS * 64;
      if (!order.shared) {
        consumer.template store<EPILOGUE>(p.product, order.tile.batch, row, order.tile.col);
        continue;
      }
      Warpgroup<Slice<Tiles, SPLITS>> own(pipe.ring, 0);
      meet();  // all stages have been read
      Meeting<Tiles, SPLITS>::send(consumer.sums, pipe.ring, rank);
      meet();
      Meeting<Tiles, SPLITS>::add(own.sums, pipe.ring);
      own.template store<EPILOGUE>(p.product, order.tile.batch, row, order.tile.col + rank * Slice<Tiles, SPLITS>::BN);
      met = true;
    }
  }
}
