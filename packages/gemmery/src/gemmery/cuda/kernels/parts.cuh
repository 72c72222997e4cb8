// Products of operands that lie in the workspace in parts: what all schemes share.
#pragma once
#include "split.cuh"
#include "staged.cuh"

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
        bring<true, Tiles::BM, Tiles::CN>(to, p.a, step * Tiles::BK, tile.row, a_first + part * a_apart, barrier,
                                          this->n, this->row_mask);
        bring<true, Tiles::BN, Tiles::CM>(to + Tiles::A_BYTES, p.b, step * Tiles::BK, tile.col,
                                          b_first + part * b_apart, barrier, this->m, this->column_mask);
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

// The tiles of a block.
template <int EPILOGUE, class Tiles, class Scheme, class PartsOf, class T, class Out, class Pipe, class Order>
__device__ __forceinline__ void multiply_tiles(const TmaProduct<T, Out>& p, const SplitWork& work, Pipe& pipe,
                                               Order& order, const char* shared) {
  const int steps = PartsOf::steps(p.product.k);
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    if (threadIdx.x == 0) {
      PartsProducer<Tiles, Scheme::PARTS> producer(pipe);
      for (; order.more(); order.next()) producer.bring_tile(p, order.tile, steps);
    }
  } else {
    pipe.begin_consumer(p);
    PartsOf consumer(pipe);
    const int warp = threadIdx.x / 32 - 4;
    Staging<Pieces<Tiles, Out>> staging(pipe.ring + Tiles::RING, warp);
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

// The product, by `multiply(work, pipe, order, status)`, unless an operand has Inf or NaN.
template <class Tiles, class T, class Out, class Multiply>
__device__ __forceinline__ void split_product(const TmaProduct<T, Out>& p, const char* shared, Multiply multiply) {
  Pipeline<Tiles, Pieces<Tiles, Out>::BYTES> pipe(shared, p);
  Bands<Tiles> order(p, pipe.place);
  pipe.wait_for_launches_before();
  const SplitWork work(p.product);
  const unsigned status = *work.status;
  if (!(status & NOT_FINITE)) multiply(work, pipe, order, status);
  pipe.end();
}
