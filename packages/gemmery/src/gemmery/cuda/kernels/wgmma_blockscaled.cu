// Idea: factors for every 128 of k keep the range of 8-bit types. Tensor cores sum 128 of k; CUDA cores multiply that
// part by the factors of its row of A and of its 128 x 128 of B, and add it to a sum in f32, which also ends what
// tensor cores cut off: they add 8-bit products with 13 bits of fraction. A warpgroup has two parts: while it adds one,
// the products of the other are under way. Four threads share what they load of the factors.
// Parent: wgmma_epilogue, whose factors are those of whole rows and columns, applied to the finished sum.
// Measured on an H200, e4m3: 1,320 TFLOP/s at n = 4096 and 1,370 at 8192. Where each thread loads all its factors,
// 1,090 and 1,130: of the 128 bytes a cycle of shared memory, wgmma and copies need 160 at full speed, and loads share
// them.
#include "wgmma_epilogue.cu"

// The factors of 128 of k: those of a thread's two rows, and that of the block of B.
struct Factors { float upper, lower, block; };

__device__ const float ONE = 1;  // the factor of products without any

// Where the factors of a tile are. The four threads of two rows read those of four parts of k, one part each, and pass
// them on: each reading all of them took 136 cycles beside the 640 in which shared memory serves wgmma and copies.
struct BlockScales {
  const float *upper = &ONE, *lower = &ONE, *block = &ONE;
  long long a_step = 0, b_step = 0;
  int part = threadIdx.x % 4, last;

  // `at` is the warp's place, `first` the number of 128 of k with which it begins. Rows beyond the last one are not
  // stored; they have its factors.
  template <class P>
  __device__ __forceinline__ BlockScales(const P& p, Where at, int steps, int first = 0) : last(steps - 1) {
    if (!p.a_scale) return;
    const int row = at.row + threadIdx.x % 32 / 4;
    a_step = p.a_scale_k;
    b_step = p.b_scale_k;
    upper = p.a_scale + min(row, p.product.m - 1) * p.a_scale_row + first * a_step;
    lower = p.a_scale + min(row + 8, p.product.m - 1) * p.a_scale_row + first * a_step;
    block = p.b_scale + at.column / 128 * p.b_scale_col + first * b_step;
  }
  // Those of the thread's next part; after the last one, its again: a jump would end what is under way.
  __device__ __forceinline__ Factors next() {
    const int now = min(part, last);
    part += 4;
    return {upper[now * a_step], lower[now * a_step], block[now * b_step]};
  }
};

// A consumer whose sums are those of parts of k.
template <class Tiles> struct ScaledConsumer : Consumer<Tiles> {
  static_assert(Tiles::BK == 128 && Tiles::BLOCKS == 1 && 128 % Tiles::BN == 0, "a part of a thread has two factors");
  using Consumer<Tiles>::Consumer;
  using Part = float[Tiles::BN / 2];

  // Where it KEEPS what is inside, nothing else may be under way.
  template <bool KEEPS = false> __device__ __forceinline__ void multiply_part(Part& part) {
    ptx::mbarrier_try_wait_parity(this->full + 8 * this->now.stage, this->now.parity);
    if constexpr (KEEPS) keep_inside<Tiles>(*this, this->now.stage);
    const unsigned at = this->now.stage * (Tiles::STAGE >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tiles::PRODUCTS; ++i) {
      const unsigned k = at + i * NEXT_K<true>;
      ptx::wgmma_mma_async<typename Tiles::Types>(part, whole_descriptor(this->a + k), whole_descriptor(this->b + k),
                                                  i > 0);
    }
    ptx::wgmma_commit_group();
  }

  Factors coming;  // of four parts that are not added yet, loaded while the four before them are
  float upper, lower;

  // The products of the part, the one with number `of` in its four, have ended.
  __device__ __forceinline__ void add(Part& part, int of, BlockScales& scales) {
    ptx::wgmma_read_anew(part);
    this->release(this->before);
    if (of == 0) {
      upper = coming.upper * coming.block;
      lower = coming.lower * coming.block;
      coming = scales.next();
    }
    const int lane = (threadIdx.x & 28) + of;
    const float of_upper = __shfl_sync(~0u, upper, lane), of_lower = __shfl_sync(~0u, lower, lane);
#pragma unroll
    for (int i = 0; i < Tiles::BN / 2; ++i) {
      this->sums[0][i] = multiply_add(part[i], i & 2 ? of_lower : of_upper, this->sums[0][i]);
    }
  }

  // TOGETHER parts, from number `first` of their four on. Where paths of the program meet, as at the end, no product is
  // under way.
  template <int TOGETHER> __device__ __forceinline__ void multiply_parts(int first, BlockScales& scales) {
    Part parts[2];
    multiply_part<Tiles::RAGGED && TOGETHER == 1>(parts[0]);
    this->next_stage();
#pragma unroll
    for (int i = 1; i < TOGETHER; ++i) {
      multiply_part(parts[i % 2]);
      ptx::wgmma_wait_group<1>();
      add(parts[(i - 1) % 2], (i - 1) % 4, scales);
      this->next_stage();
    }
    ptx::wgmma_wait_group<0>();
    add(parts[(TOGETHER - 1) % 2], TOGETHER > 1 ? (TOGETHER - 1) % 4 : first, scales);
  }

  // As many parts together as are left; after them, nothing is under way for the time of a product.
  template <int TOGETHER> __device__ __forceinline__ void multiply_all(BlockScales& scales, int& steps, int alone = 0) {
#pragma unroll 1
    for (int first = 0; steps - alone >= TOGETHER; steps -= TOGETHER, ++first) {
      multiply_parts<TOGETHER>(first % 4, scales);
      if (TOGETHER == 1) continue;
      this->low -= Tiles::BK * TOGETHER;
      this->high -= Tiles::BK * TOGETHER;
    }
  }

  // The last steps of a tile, so many, are taken ALONE.
  __device__ __forceinline__ void multiply_tile(BlockScales scales, int steps, int alone = 0) {
    if (steps) coming = scales.next();
    this->clear();
    multiply_all<16>(scales, steps, alone);
    multiply_all<4>(scales, steps, alone);
    multiply_all<1>(scales, steps);
  }
};

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_blockscaled(const __grid_constant__ TmaProduct<T, Out> p) {
  using P = Pieces<Tiles, Out>;
  extern __shared__ __align__(1024) char shared[];
  Pipeline<Tiles, P::BYTES> pipe(shared, p);
  const int steps = (p.product.k + Tiles::BK - 1) / Tiles::BK;
  Bands<Tiles> order(p, pipe.place);
  pipe.wait_for_launches_before();
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    if (threadIdx.x == 0) {
      Producer<Tiles> producer(pipe);
      for (; order.more(); order.next()) producer.bring_tile(p, order.tile, 0, steps);
    }
  } else {
    pipe.begin_consumer(p);
    ScaledConsumer<Tiles> consumer(pipe);
    const int warp = threadIdx.x / 32 - 4;
    Staging<P> staging(pipe.ring + Tiles::RING, warp);
    for (; order.more(); order.next()) {
      const Where at = {order.tile.batch, order.tile.row + warp * 16, order.tile.col};
      consumer.multiply_tile(BlockScales(p, at, steps), steps);
      store_pieces<EPILOGUE>(staging, consumer, p, at, shared, pipe.ring);
    }
    if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
  }
}
