// Idea: float32 on tensor cores, as two halves: three products with the accuracy of float32, where one of tf32 is wrong
// from the fourth digit. High times high is summed on CUDA cores every 64 of k; the two corrections, 2^-11 of it, stay
// in tensor cores to the end. Tensor cores cut sums towards zero: over a long k that becomes a bias, which ends with
// every sum that CUDA cores take over and round.
// Parent: wgmma_epilogue, whose sums tensor cores keep to the end.
// Measured on an H200: 206 TFLOP/s at n = 4096 and 230 at 8192 with the pre-pass, 4.0 and 4.5 times cuBLAS in float32.
#include "split.cuh"
#include "wgmma_epilogue.cu"

// Brings 64 of k of all parts, a stage for each.
template <class Tiles, int PARTS> struct PartsProducer : Producer<Tiles> {
  using Producer<Tiles>::Producer;
  template <class P> __device__ __forceinline__ void bring_tile(const P& p, Tile tile, int steps) {
    const int batch = p.product.batch, a_apart = p.product.a_batch ? batch : 1, b_apart = p.product.b_batch ? batch : 1;
    const int a_first = (p.product.a_batch ? tile.batch : 0) + (p.a_scale ? first_kept(PARTS) * a_apart : 0);
    const int b_first = (p.product.b_batch ? tile.batch : 0) + (p.b_scale ? first_kept(PARTS) * b_apart : 0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll 1
      for (int part = 0; part < PARTS; ++part) {
        const unsigned to = this->ring + this->now.stage * Tiles::STAGE, barrier = this->full + 8 * this->now.stage;
        ptx::mbarrier_try_wait_parity(this->empty + 8 * this->now.stage, this->now.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(barrier, stage_bytes<Tiles>(p));
        bring<true, Tiles::BM, 1>(to, p.a, step * Tiles::BK, tile.row, a_first + part * a_apart, barrier);
        bring<true, Tiles::BN, 1>(to + Tiles::A_BYTES, p.b, step * Tiles::BK, tile.col, b_first + part * b_apart,
                                  barrier);
        this->now.next();
      }
    }
  }
};

__device__ __forceinline__ float scaled_by(float x, int e) {
  return e >= -126 && e <= 127 ? x * power_of_two(e) : ldexpf(x, e);
}

// A consumer that sums on CUDA cores, in `sums`, what tensor cores have summed over 64 of k or less.
template <class Tiles, int PARTS> struct PartsConsumer : Consumer<Tiles> {
  static_assert(Tiles::BLOCKS == 1 && Tiles::STAGES % PARTS == 0, "a thread has several sets of sums of 64 rows");
  using Consumer<Tiles>::Consumer;
  static constexpr int SUMS = Tiles::BN / 2;
  using Sums = float[SUMS];

  // The parts of a step lie in stages that follow each other.
  __device__ __forceinline__ void wait_for(int part) {
    ptx::mbarrier_try_wait_parity(this->full + 8 * (this->now.stage + part), this->now.parity);
  }
  __device__ __forceinline__ void release_all(int first) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) this->release(first + part);
  }
  __device__ __forceinline__ void next_step() {
    this->before = this->now.stage;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) this->now.next();
  }

  // COUNT products of 16 of k, from the one numbered `first` of a step on, of a part of A with one of B.
  template <int COUNT>
  __device__ __forceinline__ void multiply_parts(Sums& to, int a_part, int b_part, int first, bool adds) {
    unsigned a = this->a + (this->now.stage + a_part) * (Tiles::STAGE >> 4);
    unsigned b = this->b + (this->now.stage + b_part) * (Tiles::STAGE >> 4);
    ptx::computed_here(a);  // 48 descriptors computed in advance would have no registers
    ptx::computed_here(b);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      ptx::wgmma_mma_async<typename Tiles::Types>(to, whole_descriptor(a + (first + i) * NEXT_K<true>),
                                                  whole_descriptor(b + (first + i) * NEXT_K<true>), adds || i > 0);
    }
  }

  __device__ __forceinline__ void end() const {}  // after all tiles

  // Takes the scales of rows and columns back; `at` is the warp's place.
  template <class Scaled>
  __device__ __forceinline__ void unscale_by(const SplitWork& work, Where at, int top, Scaled scaled_sum) {
    const int lane = threadIdx.x % 32;
    const Split &a = work.of[0], &b = work.of[1];
    const unsigned* largest = a.largest + (a.matrices > 1 ? at.batch : 0) * a.sides;
    int rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = exponent_of(largest[min(at.row + lane / 4 + 8 * half, a.sides - 1)]) - top;
    }
    largest = b.largest + (b.matrices > 1 ? at.batch : 0) * b.sides;
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) {
      const int column = at.column + i / 2 * 8 + lane % 4 * 2 + i % 2;
      const int of_column = exponent_of(largest[min(column, b.sides - 1)]) - top;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = i / 2 * 4 + half * 2 + i % 2;
        this->sums[0][place] = scaled_sum(place, rows[half] + of_column);
      }
    }
  }
  __device__ __forceinline__ void unscale(const SplitWork& work, Where at, int top) {
    unscale_by(work, at, top, [&](int i, int e) { return scaled_by(this->sums[0][i], e); });
  }
};

// The tiles of a block, if the status of the operands is that which this product is for.
template <int EPILOGUE, class Tiles, class Scheme, class PartsOf, class T, class Out>
__device__ __forceinline__ void split_product(const TmaProduct<T, Out>& p, const char* shared, unsigned status) {
  using P = Pieces<Tiles, Out>;
  Pipeline<Tiles, P::BYTES> pipe(shared, p);
  const int steps = PartsOf::steps(p.product.k);
  Bands<Tiles> order(p, pipe.place);
  pipe.wait_for_launches_before();
  const SplitWork work(p.product);
  if (*work.status != status) return;
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    if (threadIdx.x == 0) {
      PartsProducer<Tiles, Scheme::PARTS> producer(pipe);
      for (; order.more(); order.next()) producer.bring_tile(p, order.tile, steps);
    }
  } else {
    pipe.begin_consumer();
    clear_absent<Tiles>(p, pipe.ring, pipe.warpgroup - 1);
    PartsOf consumer(pipe);
    const int warp = threadIdx.x / 32 - 4;
    Staging<P> staging(pipe.ring + Tiles::RING, warp);
    for (; order.more(); order.next()) {
      const Where at = {order.tile.batch, order.tile.row + warp * 16, order.tile.col};
      consumer.multiply_tile(steps);
      consumer.unscale(work, at, Scheme::TOP);
      store_pieces<EPILOGUE>(staging, consumer, p, at, shared, pipe.ring);
    }
    consumer.end();
    if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
  }
}

template <class Tiles> struct TwoPartsConsumer : PartsConsumer<Tiles, 2> {
  using Base = PartsConsumer<Tiles, 2>;
  using Base::Base;
  typename Base::Sums corrections;

  static __device__ __forceinline__ int steps(int k) { return (k + Tiles::BK - 1) / Tiles::BK; }

  // While the corrections of a step are under way, its high products are added.
  __device__ __forceinline__ void multiply_step(typename Base::Sums& high, bool begins) {
    this->wait_for(0);
    ptx::wgmma_fence();
    this->template multiply_parts<4>(high, 0, 0, 0, false);
    ptx::wgmma_commit_group();
    this->wait_for(1);
    ptx::wgmma_fence();
    this->template multiply_parts<4>(corrections, 0, 1, 0, !begins);
    this->template multiply_parts<4>(corrections, 1, 0, 0, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_read_anew(high);
    if (!begins) this->release_all(this->before);
#pragma unroll
    for (int i = 0; i < Base::SUMS; ++i) this->sums[0][i] = begins ? high[i] : this->sums[0][i] + high[i];
    this->next_step();
  }

  __device__ __forceinline__ void multiply_tile(int steps) {
    typename Base::Sums high;
    multiply_step(high, true);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) multiply_step(high, false);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_read_anew(corrections);
    this->release_all(this->before);
#pragma unroll
    for (int i = 0; i < Base::SUMS; ++i) this->sums[0][i] = multiply_add(corrections[i], 0x1p-11f, this->sums[0][i]);
  }
};

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_fp16x3(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  split_product<EPILOGUE, Tiles, TwoParts, TwoPartsConsumer<Tiles>>(p, shared, 0);
}
