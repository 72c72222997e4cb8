// Idea: residues are multiplied modulus by modulus by int8 tensor cores, as one batch. Sums of a tile are reduced in
// registers, from 32 bits to bytes, and stored as they lie there: the launch that reads them knows where each is.
#include "ozaki.cuh"
#include "wgmma_persistent.cu"

// Brings tiles of residues: matrices of a batch follow each other within a modulus.
template <class Tiles> struct ResiduesProducer : Producer<Tiles> {
  using Producer<Tiles>::Producer;
  template <class P> __device__ __forceinline__ void bring_tile(const P& p, Tile tile, int steps) {
    const int index = tile.batch / p.product.batch;
    const int of_a = p.product.a_batch ? tile.batch : index, of_b = p.product.b_batch ? tile.batch : index;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const unsigned to = this->ring + this->now.stage * Tiles::STAGE, barrier = this->full + 8 * this->now.stage;
      ptx::mbarrier_try_wait_parity(this->empty + 8 * this->now.stage, this->now.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(barrier, stage_bytes<Tiles>(p));
      bring<true, Tiles::BM, 1>(to, p.a, step * Tiles::BK, tile.row, of_a, barrier);
      bring<true, Tiles::BN, 1>(to + Tiles::A_BYTES, p.b, step * Tiles::BK, tile.col, of_b, barrier);
      this->now.next();
    }
  }
};

// The sums of a thread as bytes.
template <class Tiles> __device__ __forceinline__ void reduce_sums(const Warpgroup<Tiles>& of, int p, uint4* to) {
  constexpr int WORDS = Tiles::BLOCKS * Tiles::WN / 8;
  const int inverse = inverse_of(p);
  const int* sums = of.sums[0];
#pragma unroll
  for (int chunk = 0; chunk < WORDS / 4; ++chunk) {
    unsigned words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      unsigned r[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) r[e] = byte_of(sums[(chunk * 4 + word) * 4 + e], p, inverse);
      words[word] = __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
    }
    to[chunk * Tiles::WARPGROUPS * 128] = {words[0], words[1], words[2], words[3]};
  }
}

// What the order of tiles reads of an argument: a batch of all moduli.
struct AllModuli {
  struct { int m, n, batch; } product;
  int band;
};

template <class T, class Out, class Tiles, int COUNT>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    ozaki_product(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  static_assert(Tiles::BLOCKS == 1 && Tiles::WN % 32 == 0, "a thread stores 16 bytes at a time");
  Pipeline<Tiles> pipe(shared, p);
  const int steps = (p.product.k + Tiles::BK - 1) / Tiles::BK;
  const AllModuli all = {{p.product.m, p.product.n, p.product.batch * COUNT}, p.band};
  Bands<Tiles> order(all, pipe.place);
  pipe.wait_for_launches_before();
  const OzakiWork<COUNT, Tiles::BM, Tiles::BN> work(p.product);
  if (*work.status) return;
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    if (threadIdx.x == 0) {
      ResiduesProducer<Tiles> producer(pipe);
      for (; order.more(); order.next()) producer.bring_tile(p, order.tile, steps);
    }
  } else {
    pipe.begin_consumer(p);
    Consumer<Tiles> consumer(pipe);
    for (; order.more(); order.next()) {
      consumer.multiply_tile(steps);
      const int index = order.tile.batch / p.product.batch, matrix = order.tile.batch % p.product.batch;
      const int row = matrix * order.rows() + order.tile.row / Tiles::BM, column = order.tile.col / Tiles::BN;
      const long long tile = 1LL * row * order.columns() + column;
      unsigned char* to = work.sums + (tile * COUNT + index) * (Tiles::BM * Tiles::BN);
      reduce_sums<Tiles>(consumer, modulus(index), reinterpret_cast<uint4*>(to) + threadIdx.x - 128);
    }
  }
}
