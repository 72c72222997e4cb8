// Idea: whole numbers of 8 to 64 bits by tensor cores for int8, bit for bit. Operands are split into signed bytes;
// products of digits i and j count 256^(i + j), and those from C's size on are multiples of what C drops. Sums of one i
// + j follow each other in one accumulator of 32 bits. Up to 32 bits that may wrap: from the highest on, it is shifted
// by 8 bits and goes on adding, 10 products for int32. For int64, with 36, sums of one i + j stay exact: they are added
// to 64 bits, which are shifted in its place.
// Parent: wgmma_persistent, whose tiles have one product.
#include "digits.cuh"
#include "wgmma_persistent.cu"

// The products of digits of a tile, from the highest i + j that counts down to 0.
template <int OF_A, int OF_B, int DIGITS> struct Pairs {
  static constexpr int FIRST = DIGITS - 1 < OF_A + OF_B - 2 ? DIGITS - 1 : OF_A + OF_B - 2;
  int sum = FIRST, i = least(FIRST);

  static __device__ __forceinline__ constexpr int least(int sum) { return sum < OF_B ? 0 : sum - OF_B + 1; }
  static __device__ __forceinline__ constexpr int most(int sum) { return sum < OF_A ? sum : OF_A - 1; }
  __device__ __forceinline__ bool more() const { return sum >= 0; }
  __device__ __forceinline__ int j() const { return sum - i; }
  __device__ __forceinline__ bool ends() const { return i == most(sum); }  // the last one of its i + j
  __device__ __forceinline__ void next() {
    if (!ends()) {
      ++i;
    } else {
      i = least(--sum);
    }
  }
};

// Brings the tiles of digits; matrices of a batch follow each other within a digit.
template <class Tiles, class Order> struct DigitsProducer : Producer<Tiles> {
  using Producer<Tiles>::Producer;
  template <class P> __device__ __forceinline__ void bring_tile(const P& p, Tile tile, int steps) {
    const int a_count = p.product.a_batch ? p.product.batch : 1, b_count = p.product.b_batch ? p.product.batch : 1;
    const int a_matrix = p.product.a_batch ? tile.batch : 0, b_matrix = p.product.b_batch ? tile.batch : 0;
#pragma unroll 1
    for (Order pair; pair.more(); pair.next()) {
      const int of_a = pair.i * a_count + a_matrix, of_b = pair.j() * b_count + b_matrix;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const unsigned to = this->ring + this->now.stage * Tiles::STAGE, barrier = this->full + 8 * this->now.stage;
        ptx::mbarrier_try_wait_parity(this->empty + 8 * this->now.stage, this->now.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(barrier, stage_bytes<Tiles>(p));
        bring<true, Tiles::BM, Tiles::CN>(to, p.a, step * Tiles::BK, tile.row, of_a, barrier, this->n, this->row_mask);
        bring<true, Tiles::BN, Tiles::CM>(to + Tiles::A_BYTES, p.b, step * Tiles::BK, tile.col, of_b, barrier, this->m,
                                          this->column_mask);
        this->now.next();
      }
    }
  }
};

// Multiplies a tile of digits; `exact` is how many products of digits one sum of 32 bits holds.
template <class Tiles, class W, class Order> struct DigitsConsumer : Consumer<Tiles> {
  static constexpr bool WIDE = sizeof(W) == 8;
  using Consumer<Tiles>::Consumer;
  W wide[WIDE ? Tiles::BLOCKS : 1][WIDE ? Tiles::WN / 2 : 1];

  __device__ __forceinline__ void multiply_pair(int steps, bool forgets) {
    this->multiply_stage(true, !forgets);
    this->next_stage();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      this->multiply_stage(false);
      this->next_stage();
    }
    this->finish();
  }

  __device__ __forceinline__ void multiply_tile(int steps, int exact) {
    if constexpr (WIDE) {
#pragma unroll
      for (int block = 0; block < Tiles::BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < Tiles::WN / 2; ++i) wide[block][i] = 0;
      }
    }
    int held = 0;  // products of digits in the sums
#pragma unroll 1
    for (Order pair; pair.more(); pair.next()) {
      multiply_pair(steps, held == 0);
      ++held;
      const bool ends = pair.ends();
      const bool shifts = ends && pair.sum > 0;
      if constexpr (WIDE) {
        if (!ends && held < exact) continue;
#pragma unroll
        for (int block = 0; block < Tiles::BLOCKS; ++block) {
#pragma unroll
          for (int i = 0; i < Tiles::WN / 2; ++i) {
            wide[block][i] += W(i64(this->sums[block][i]));
            if (shifts) wide[block][i] <<= 8;
          }
        }
        held = 0;
      } else if (shifts) {
#pragma unroll
        for (int block = 0; block < Tiles::BLOCKS; ++block) {
#pragma unroll
          for (int i = 0; i < Tiles::WN / 2; ++i) this->sums[block][i] = int(u32(this->sums[block][i]) << 8);
        }
      }
    }
  }
};

template <class T, class Out, int EPILOGUE, class Tiles, int OF_A, int OF_B>
__global__ void __cluster_dims__(Tiles::CM * Tiles::CN, 1, 1) __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_digits(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  using W = typename Select<(sizeof(Out) < 8), u32, u64>::type;
  using PairsOf = Pairs<OF_A, OF_B, int(sizeof(Out))>;
  Pipeline<Tiles> pipe(shared, p);
  const int steps = (p.product.k + Tiles::BK - 1) / Tiles::BK;
  Bands<Tiles> order(p, pipe.place);
  pipe.wait_for_launches_before();
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    if (threadIdx.x == 0) {
      DigitsProducer<Tiles, PairsOf> producer(pipe);
      for (; order.more(); order.next()) producer.bring_tile(p, order.tile, steps);
    }
  } else {
    pipe.begin_consumer(p);
    DigitsConsumer<Tiles, W, PairsOf> consumer(pipe);
    const int exact = max(MOST_DIGITS / p.product.k, 1);
    for (; order.more(); order.next()) {
      consumer.multiply_tile(steps, exact);
      const int row = order.tile.row + Tiles::row_of(pipe.warpgroup - 1);
      const int column = order.tile.col + Tiles::column_of(pipe.warpgroup - 1);
      if constexpr (sizeof(Out) < 8) {
        consumer.template store<EPILOGUE>(p.product, order.tile.batch, row, column);
      } else {
        consumer.template store_of<EPILOGUE>(consumer.wide, p.product, order.tile.batch, row, column);
      }
    }
  }
  pipe.end();
}
