// Idea: warps of different work. A producer, one thread of the first warpgroup, only asks for tiles, as far ahead as
// the ring has empty stages; the other warpgroups, the consumers, only multiply. They meet at mbarriers, never all
// together: `full` says that a stage has come, `empty` that all consumers have read it. setmaxnreg hands the producer's
// registers to the consumers, so that 128 x 256 sums of f32 fit.
// Parent: wgmma_tma, whose threads all wait for each other at every stage.
// Measured on an H200, bf16, n = 4096: 638 TFLOP/s, 1.4 times its parent, 0.89 of cuBLAS.
#include "cluster.cuh"
#include "ragged.cuh"
#include "wgmma.cuh"

constexpr int HALF_OF_ALL = 66;  // of the 132 multiprocessors of an H100 or H200

// Of 512 for one thread of each warpgroup: 232 for each of two consumers, 160 for each of three.
constexpr int producer_registers(int consumers) { return consumers == 3 ? 32 : 40; }
constexpr int consumer_registers(int consumers) { return consumers == 3 ? 160 : 232; }

// The ring in shared memory, its barriers behind it and behind STAGING bytes for C, and the block's place in a cluster.
template <class Tiles, int STAGING = 0> struct Pipeline {
  static constexpr int THREADS = (Tiles::WARPGROUPS + 1) * 128;
  // Two blocks of 64 rows that share B multiply a stage in less time than a thread takes to ask for one by two copies,
  // each in a loop over lanes, and so does a block of 8 rows: elected, it asks sooner, and 1 row by 2048 with k = 8192
  // takes 14.2 us, not 16.1 (H100). Larger tiles gain nothing (docs/findings/elected_producer.md).
  static constexpr bool ELECTS = Tiles::BM == 8 || (Tiles::BM == 64 && Tiles::CM * Tiles::CN > 1);
  Cluster<Tiles::CM, Tiles::CN, Tiles::LAYERS> place;
  unsigned ring, full, empty;
  int warpgroup;  // 0: the producer's

  // Whether the next launch may begin at once. Its blocks then come to multiprocessors as these become free, which
  // scatters neighboring tiles over the chip: fewer of their copies are served together on the way from L2. That costs
  // large tiles time; small ones are soon over, and gain more from the early begin. So do launches that leave
  // half of the multiprocessors free, and those that are brief. The largest tiles have no registers to decide.
  template <class P> static __device__ __forceinline__ bool lets_next_begin(const P& p) {
    constexpr int AREA = Tiles::BM * Tiles::BN;
    return AREA <= 4096 || AREA > 36864 || gridDim.x <= HALF_OF_ALL || p.ahead < 0;
  }

  // After it, barriers are ready in all blocks of the cluster. The launches before may not have ended. If `early`, the
  // next launch may begin; else it may when the caller says so, or when this one ends. A stage has come when so many
  // `producers` have said so.
  template <class P>
  __device__ __forceinline__ Pipeline(const char* shared, const P& p, bool early = true, int producers = 1)
      : ring(ptx::shared_address(shared)), full(ring + Tiles::RING + STAGING), empty(full + 8 * Tiles::STAGES),
        warpgroup(__shfl_sync(~0u, threadIdx.x / 128, 0)) {
    if (threadIdx.x == 0) {
      ptx::prefetch_tensormap(&p.a);
      ptx::prefetch_tensormap(&p.b);
      init_ring<Tiles::STAGES>(full, empty, Tiles::RELEASES * place.LISTENERS, producers);
    }
    place.sync();
    if (early) ptx::griddepcontrol_launch_dependents();
  }

  // After it, the launches before have ended: until then nothing of theirs may be read, and nothing written. What needs
  // only the argument, such as the place of the first tile, comes before it.
  static __device__ __forceinline__ void wait_for_launches_before() { ptx::griddepcontrol_wait(); }

  // Whether this thread is the producer, in the first warpgroup.
  static __device__ __forceinline__ bool brings() {
    if constexpr (ELECTS) return __shfl_sync(~0u, threadIdx.x / 32, 0) == 0 && ptx::elect_sync();
    return threadIdx.x == 0;
  }

  // The first statement of each role, on its own path: ptxas ignores it where the paths have met before (C7507).
  static __device__ __forceinline__ void begin_producer() {
    if constexpr (Tiles::WARPGROUPS > 1) ptx::setmaxnreg_dec<producer_registers(Tiles::WARPGROUPS)>();
  }
  static __device__ __forceinline__ void begin_consumer() {
    if constexpr (Tiles::WARPGROUPS > 1) ptx::setmaxnreg_inc<consumer_registers(Tiles::WARPGROUPS)>();
  }
  template <class P> __device__ __forceinline__ void begin_consumer(const P& p) const {
    begin_consumer();
    clear_absent<Tiles>(p, ring, warpgroup - 1);
  }

  // Others may still hand stages back to this block.
  __device__ __forceinline__ void end() const {
    if constexpr (Tiles::CM * Tiles::CN > 1) {
      __syncwarp();
      place.sync();
    }
  }
};

// What one thread does for a block: bring stages, each as soon as it is empty.
template <class Tiles> struct Producer {
  Ring<Tiles::STAGES> now;
  unsigned ring, full, empty;
  int m, n;  // in the cluster
  unsigned short row_mask, column_mask;

  template <class Pipe>
  __device__ __forceinline__ Producer(const Pipe& pipe)
      : ring(pipe.ring), full(pipe.full), empty(pipe.empty), m(pipe.place.m), n(pipe.place.n),
        row_mask(pipe.place.row_mask()), column_mask(pipe.place.column_mask()) {}

  template <class P> __device__ __forceinline__ void bring_tile(const P& p, Tile tile, int first, int steps) {
#pragma unroll 1
    for (int step = first; step < first + steps; ++step) {
      unsigned to = ring + now.stage * Tiles::STAGE, barrier = full + 8 * now.stage;
      ptx::mbarrier_try_wait_parity(empty + 8 * now.stage, now.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(barrier, stage_bytes<Tiles>(p));
      bring_a<Tiles>(p, to, tile, step, barrier, n, row_mask);
      bring_b<Tiles>(p, to, tile, step, barrier, m, column_mask);
      now.next();
    }
  }
};

// What a consumer does with stages: wait, multiply, hand back. Where paths of the program meet, no product may be under
// way that is not on the other path, or ptxas waits for each product (its message C7519): finish() ends them all.
template <class Tiles> struct Consumer : Warpgroup<Tiles> {
  Ring<Tiles::STAGES> now;
  FirstProduct<Tiles> first;  // of a late tile
  unsigned full, released;
  int before = 0;  // the stage whose products may be under way
  int low = 0, high = 0;  // of k, from the current stage on, where stages are RAGGED: what belongs to the tile
  bool releases;   // one thread of those TOGETHER for each producer that copies here

  template <class Pipe>
  __device__ __forceinline__ Consumer(const Pipe& pipe)
      : Warpgroup<Tiles>(pipe.ring, pipe.warpgroup - 1), first(pipe.ring, pipe.warpgroup - 1), full(pipe.full),
        released(pipe.place.barrier_of(pipe.empty, threadIdx.x % Tiles::TOGETHER)),
        releases(threadIdx.x % Tiles::TOGETHER < pipe.place.LISTENERS) {}

  __device__ __forceinline__ void release(int stage) const {
    if (!releases) return;
    if constexpr (Tiles::CM * Tiles::CN > 1) {
      ptx::mbarrier_arrive_cluster(released + 8 * stage);
    } else {
      ptx::mbarrier_arrive(released + 8 * stage);
    }
  }

  // The first of the stage's products is a group of its own: while it is under way, those of the stage before end, and
  // it is handed back early. PARTS is less where the rest of the stage is zeros. A stage that begins forgets what the
  // sums hold, unless it keeps that. Of a late tile, the half of the first product that is in the stage before is
  // loaded before this stage has come.
  template <int PARTS = Tiles::PRODUCTS, int COLUMNS = Tiles::WN, bool LATE = false>
  __device__ __forceinline__ void multiply_stage(bool begins, bool keeps = false) {
    const int first_part = LATE && begins ? 1 : 0;  // the very first one of a late tile is in front of k
    if (LATE && !begins) {
      ptx::wgmma_wait_group<1>();  // the registers of the last first product are free
      first.load(0, before, 7);
    }
    ptx::mbarrier_try_wait_parity(full + 8 * now.stage, now.parity);
    if constexpr (Tiles::RAGGED) keep_inside<Tiles>(*this, now.stage);
    if (LATE && !begins) first.load(1, now.stage, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int part = first_part; part < PARTS; ++part) {
      const bool adds = keeps || !(begins && part == first_part);
      if constexpr (LATE) {
        if (part == 0) this->template multiply_first<COLUMNS>(first, now.stage, adds);
      }
      if (!LATE || part > 0) this->template multiply<COLUMNS>(now.stage, part, adds, LATE);
      if (part == first_part) {
        ptx::wgmma_commit_group();
        if (!begins) {
          ptx::wgmma_wait_group<1>();
          release(before);
        }
      }
    }
    if (PARTS > 1) ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void next_stage() {
    before = now.stage;
    now.next();
  }

  __device__ __forceinline__ void finish() {
    ptx::wgmma_wait_group<0>();
    release(before);
#pragma unroll
    for (int block = 0; block < Tiles::BLOCKS; ++block) ptx::wgmma_read_anew(this->sums[block]);
  }

  // Hands the stages of a tile back of which this warpgroup needs nothing.
  __device__ __forceinline__ void pass_tile(int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_try_wait_parity(full + 8 * now.stage, now.parity);
      release(now.stage);
      now.next();
    }
  }

  __device__ __forceinline__ void multiply_tile(int steps) {
    multiply_stage(true);
    next_stage();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      multiply_stage(false);
      next_stage();
    }
    finish();
  }
};

// A tile begins at step `first` of k and has `steps`, at least `least`. Beyond k, zeros arrive; where k is 0 that is so
// from step 1 on.
struct Steps { int first, steps; };
template <class Tiles> __device__ __forceinline__ Steps steps_of(int k, int least = 1) {
  return {k == 0, max((k + Tiles::BK - 1) / Tiles::BK, least)};
}

// All tiles of a block, in an order that both roles walk through by themselves. `finish` takes the sums of a warpgroup;
// `early` as a Pipeline has it.
template <class Tiles, class Order, template <class> class Consuming = Consumer, class P, class Finish>
__device__ __forceinline__ void all_tiles(const P& p, const char* shared, bool early, Finish finish) {
  Pipeline<Tiles> pipe(shared, p, early);
  const Steps k = steps_of<Tiles>(p.product.k);
  Order order(p, pipe.place);
  pipe.wait_for_launches_before();
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    if (threadIdx.x == 0) {
      Producer<Tiles> producer(pipe);
      for (; order.more(); order.next()) producer.bring_tile(p, order.tile, k.first, k.steps);
    }
  } else {
    pipe.begin_consumer(p);
    Consuming<Tiles> consumer(pipe);
    for (; order.more(); order.next()) {
      consumer.multiply_tile(k.steps);
      finish(consumer, order, pipe.warpgroup - 1);
    }
  }
  pipe.end();
}

// Sums go to C from registers.
template <int EPILOGUE, class Tiles, class Order, template <class> class Consuming = Consumer, class T, class Out>
__device__ __forceinline__ void specialized(const TmaProduct<T, Out>& p, const char* shared, bool early = true) {
  all_tiles<Tiles, Order, Consuming>(p, shared, early, [&](const Consuming<Tiles>& sums, const Order& order, int i) {
    const int row = order.tile.row + Tiles::row_of(i), column = order.tile.col + Tiles::column_of(i);
    sums.template store<EPILOGUE>(p.product, order.tile.batch, row, column);
  });
}

// The order of a block that has one tile.
template <class Tiles> struct OneTile {
  Tile tile;
  bool open = true;
  template <class P, class Place>
  __device__ __forceinline__ OneTile(const P& p, const Place&) : tile(tile_of_block<Tiles::BM, Tiles::BN>(p.product)) {}
  __device__ __forceinline__ bool more() const { return open; }
  __device__ __forceinline__ void next() { open = false; }
};

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_specialized(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  specialized<EPILOGUE, Tiles, OneTile<Tiles>>(p, shared);
}
