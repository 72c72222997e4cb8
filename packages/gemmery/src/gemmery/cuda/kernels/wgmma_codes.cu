// Idea: many tokens, whose codes have 8 bits, and weights of 4: tensor cores multiply 8-bit types twice as fast as
// halves, and every level of 4 bits is one of e4m3 and of int8. Weights become those in registers, as one logical
// instruction a level's sign and one multiply-add a pair of fours; of int8, 16 times a level is its high half word as
// it lies. A group's factor ends a sum of 128 of k, which CUDA cores add in f32, while the other warpgroup multiplies.
// Parent: wgmma_quantized, whose tokens are halves, and weights become such. Measured on an H200:
// docs/findings/quantized_products.md.
#include "wgmma_quantized.cu"

// Two warpgroups of 64 rows of W each by TOKENS rows of x. A chunk is 64 x 128 levels, then a factor in f32 for each
// row.
template <class X, int N, int DEPTH, int SIZE> struct CodeTiles {
  using T = X;
  using S = Accumulator<X>;
  static constexpr bool GROUPED = false;
  static constexpr int TOKENS = N, STAGES = DEPTH, WARPGROUPS = 2, ROWS = 128, BAND = 4, PITCH = 64 * SIZE + 16;
  static constexpr int CHUNK = 4096 + 256, X_BYTES = TOKENS * 128, W_BYTES = 2 * CHUNK;
  static constexpr int RING = STAGES * (X_BYTES + W_BYTES), STAGING = WARPGROUPS * TOKENS * PITCH;
};

// Four levels, of the low or the high half of a word's bytes, as elements of wgmma: of e4m3, whose bits 0 to 15 are as
// many 2^-9, the sign, and what to add to it: a negative level is one less than it says.
template <class T> __device__ __forceinline__ unsigned fours(unsigned word, int half) {
  if constexpr (SameAs<T, i8>::value) return (half ? word : word << 4) & 0xf0f0f0f0;
  const unsigned size = (half ? word >> 4 : word) & 0x07070707, sign = word >> (half ? 7 : 3) & 0x01010101;
  return sign * 129 + size;
}

// The value of a sum of 128 products.
__device__ __forceinline__ float value_of(float part) { return part; }
// An integer below 2^22 in the fraction of 1.5 x 2^23: two instructions at full rate, where a conversion has 1/8 of it.
__device__ __forceinline__ float value_of(int part) { return __int_as_float(part + 0x4B400000) - 12582912.0f; }

// Tiles in bands of as many tiles of tokens as p.band: those under way share W and x.
template <class Tiles> struct CodeOrder {
  int across, down, band, index = blockIdx.x;
  template <class P> __device__ __forceinline__ explicit CodeOrder(const P& p)
      : across((p.product.m + Tiles::TOKENS - 1) / Tiles::TOKENS), down((p.product.n + Tiles::ROWS - 1) / Tiles::ROWS),
        band(p.band) {}
  __device__ __forceinline__ bool more() const { return index < across * down; }
  __device__ __forceinline__ void next() { index += gridDim.x; }
  // Its first chunk of W, and its first token.
  __device__ __forceinline__ SharedSpot spot(int tokens) const {
    const int first = index / (band * down) * band, within = index - first * down, height = min(across - first, band);
    return {0, within / height * 2, (first + within % height) * Tiles::TOKENS, tokens};
  }
};

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(384, 1) wgmma_codes(const __grid_constant__ TmaProduct<T, Out> p) {
  constexpr int STAGES = Tiles::STAGES, TOKENS = Tiles::TOKENS, W_AT = STAGES * Tiles::X_BYTES;
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = ptx::shared_address(shared);
  const unsigned full = base + Tiles::RING + Tiles::STAGING, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, steps = (p.product.k + 127) / 128;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.a);
    init_ring<STAGES>(full, empty, Tiles::WARPGROUPS * 4);
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  CodeOrder<Tiles> order(p);
  Ring<STAGES> now;
  if (warp < 4) {
    ptx::setmaxnreg_dec<40>();
    if (warp == 0 && ptx::elect_sync()) {
      for (; order.more(); order.next()) {
        const SharedSpot spot = order.spot(p.product.m);
        const long long first = (long long)(spot.part / Tiles::BAND) * steps * Tiles::BAND + spot.part % Tiles::BAND;
        const char* from = reinterpret_cast<const char*>(p.product.b) + first * Tiles::CHUNK;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          const unsigned barrier = full + 8 * now.stage;
          ptx::mbarrier_try_wait_parity(empty + 8 * now.stage, now.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(barrier, Tiles::X_BYTES + Tiles::W_BYTES);
          ptx::cp_async_bulk_load(base + W_AT + now.stage * Tiles::W_BYTES, from, Tiles::W_BYTES, barrier);
          ptx::cp_async_bulk_tensor_load(base + now.stage * Tiles::X_BYTES, &p.a, step * 128, spot.token, 0, barrier);
          from += Tiles::BAND * Tiles::CHUNK;
          now.next();
        }
      }
    }
    return;
  }
  ptx::setmaxnreg_inc<232>();
  const int group = warp / 4 - 1, thread = threadIdx.x % 128, row = thread / 32 * 16 + lane / 4 * 2;
  const unsigned weights = base + W_AT + group * Tiles::CHUNK + thread * 16;
  const unsigned factors = base + W_AT + group * Tiles::CHUNK + 4096 + row * 4, x = descriptor<true>(base);
  float sums[TOKENS / 2];
  typename Tiles::S part[TOKENS / 2];
  unsigned a[4][4], coming[4][4];
  float of_rows[2], next_of_rows[2];
  auto bring = [&](unsigned(&to)[4][4], float(&of)[2]) {  // of the stage that comes next
    ptx::mbarrier_try_wait_parity(full + 8 * now.stage, now.parity);
    unsigned words[2][4], bits[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::ld_shared_v4(words[i], weights + now.stage * Tiles::W_BYTES + i * 2048);
    ptx::ld_shared_v2(bits[0], bits[1], factors + now.stage * Tiles::W_BYTES);
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i / 4][i % 4] = fours<T>(words[i / 8][i % 8 / 2], i % 2);
    of[0] = __int_as_float(bits[0]);
    of[1] = __int_as_float(bits[1]);
  };
  for (; order.more(); order.next()) {
    const SharedSpot spot = order.spot(p.product.m);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0;
    bring(a, of_rows);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const unsigned at = x + now.stage * (Tiles::X_BYTES >> 4);
      const int before = now.stage;
      ptx::wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::wgmma_mma_async<RegisterTypes<T, true>>(part, a[j], whole_descriptor(at + j * NEXT_K<true>), j > 0);
      }
      ptx::wgmma_commit_group();
      now.next();
      if (step + 1 < steps) bring(coming, next_of_rows);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_read_anew(part);
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * before);
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) sums[i] = multiply_add(value_of(part[i]), of_rows[i / 2 % 2], sums[i]);
#pragma unroll
      for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = coming[i / 4][i % 4];
      of_rows[0] = next_of_rows[0];
      of_rows[1] = next_of_rows[1];
    }
    auto scaled = [&](int j, int e, int i) {
      const int token = min(spot.token + j * 8 + lane % 4 * 2 + e, p.product.m - 1);
      const float of_token = p.a_scale ? p.a_scale[token * p.a_scale_row] : 1.0f;
      return sums[4 * j + e + 2 * i] * of_token;
    };
    ptx::bar_sync(1 + group, 128);  // all have copied out what was there before
    store_block<EPILOGUE, Tiles>(p.product, scaled, shared + Tiles::RING + group * TOKENS * Tiles::PITCH, 1 + group,
                                  (spot.part + group) * 64, spot);
  }
}
