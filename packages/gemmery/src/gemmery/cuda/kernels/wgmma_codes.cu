// Idea: many tokens, whose codes have 8 bits, and weights of 4: tensor cores multiply 8-bit types twice as fast as
// halves, and every level of 4 bits is one of e4m3 and of int8. Three warps make those of what one copy brings, and put
// them in shared memory as a tensor copy would: of e4m3, whose bits 0 to 15 are as many 2^-9, by one multiply-add for
// four levels; of int8, 16 times a level is the high half of its byte. A group's factor ends a sum of 128 of k, which
// CUDA cores add in f32 while the products of the next 128 are under way.
// Parent: wgmma_quantized, whose tokens are halves, and weights become such in registers.
// Measured on an H200: docs/findings/experts.md.
#include "wgmma_quantized.cu"

// 128 rows of W, two warpgroups with 64 each, by TOKENS rows of x. A chunk is 64 x 128 levels, then a factor in f32 for
// each row. A stage is tokens, levels of 8 bits, and factors; PIECES of W wait to become such.
template <class X, int N, int DEPTH, int SIZE> struct CodeTiles {
  using T = X;
  using S = Accumulator<X>;
  static constexpr bool GROUPED = false;
  static constexpr int TOKENS = N, STAGES = DEPTH, WARPGROUPS = 2, ROWS = 128, BAND = 4, PITCH = 64 * SIZE + 16;
  static constexpr int PIECES = 3, CHUNK = 4096 + 256, W_BYTES = 2 * CHUNK, UNPACKERS = 3;
  static constexpr int X_BYTES = TOKENS * 128, A_BYTES = ROWS * 128, FACTOR_BYTES = ROWS * 4;
  static constexpr int A_AT = STAGES * X_BYTES, FACTORS_AT = A_AT + STAGES * A_BYTES;
  static constexpr int PIECES_AT = FACTORS_AT + STAGES * FACTOR_BYTES, STAGED_AT = PIECES_AT + PIECES * W_BYTES;
  static constexpr int BARRIERS_AT = STAGED_AT + WARPGROUPS * TOKENS * PITCH;
};

// Four levels, of the low or the high halves of a word's bytes. Of e4m3 a level is its sign and what to add to it: a
// negative one is one less than that says.
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
  __device__ __forceinline__ Spot spot(int tokens) const {
    const int first = index / (band * down) * band, within = index - first * down, height = min(across - first, band);
    return {0, within / height * 2, (first + within % height) * Tiles::TOKENS, tokens};
  }
};

// What a warp of the UNPACKERS does with a piece: 16 bytes of it are 32 of k of a row, 16 in the low halves of bytes.
template <class Tiles> __device__ __forceinline__ void unpack_piece(unsigned from, unsigned to, unsigned factors) {
  const int thread = threadIdx.x - 32;
#pragma unroll 2
  for (int unit = thread; unit < 512; unit += 32 * Tiles::UNPACKERS) {
    const int chunk = unit / 256, part = unit % 256 / 64;
    unsigned words[4], levels[4];
    ptx::ld_shared_v4(words, from + chunk * Tiles::CHUNK + unit % 256 * 16);
    const unsigned row = to + (chunk * 64 + unit % 64) * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) levels[j] = fours<typename Tiles::T>(words[j], half);
      ptx::st_shared_v4(row + ((2 * part + half ^ unit % 8) << 4), levels);
    }
  }
  if (thread < 32) {
    unsigned bits[4];
    ptx::ld_shared_v4(bits, from + thread / 16 * Tiles::CHUNK + 4096 + thread % 16 * 16);
    ptx::st_shared_v4(factors + thread * 16, bits);
  }
}

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(384, 1) wgmma_codes(const __grid_constant__ TmaProduct<T, Out> p) {
  constexpr int STAGES = Tiles::STAGES, PIECES = Tiles::PIECES, TOKENS = Tiles::TOKENS;
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = ptx::shared_address(shared), full = base + Tiles::BARRIERS_AT, empty = full + 8 * STAGES;
  const unsigned come = empty + 8 * STAGES, unpacked = come + 8 * PIECES;  // of pieces
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, steps = (p.product.k + 127) / 128;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.a);
    for (int i = 0; i < STAGES; ++i) {
      ptx::mbarrier_init(full + 8 * i, 1 + Tiles::UNPACKERS);
      ptx::mbarrier_init(empty + 8 * i, Tiles::WARPGROUPS * 4);
    }
    init_ring<PIECES>(come, unpacked, Tiles::UNPACKERS);
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  CodeOrder<Tiles> order(p);
  Ring<STAGES> now;
  if (warp < 4) {
    ptx::setmaxnreg_dec<40>();
    Ring<PIECES> piece;
    if (warp == 0 && ptx::elect_sync()) {
      for (; order.more(); order.next()) {
        const Spot spot = order.spot(p.product.m);
        const long long first = (long long)(spot.part / Tiles::BAND) * steps * Tiles::BAND + spot.part % Tiles::BAND;
        const char* from = reinterpret_cast<const char*>(p.product.b) + first * Tiles::CHUNK;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          const unsigned barrier = full + 8 * now.stage;
          ptx::mbarrier_try_wait_parity(unpacked + 8 * piece.stage, piece.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(come + 8 * piece.stage, Tiles::W_BYTES);
          ptx::cp_async_bulk_load(base + Tiles::PIECES_AT + piece.stage * Tiles::W_BYTES, from, Tiles::W_BYTES,
                                  come + 8 * piece.stage);
          ptx::mbarrier_try_wait_parity(empty + 8 * now.stage, now.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(barrier, Tiles::X_BYTES);
          ptx::cp_async_bulk_tensor_load(base + now.stage * Tiles::X_BYTES, &p.a, step * 128, spot.token, 0, barrier);
          from += Tiles::BAND * Tiles::CHUNK;
          piece.next();
          now.next();
        }
      }
    } else if (warp > 0) {
      for (; order.more(); order.next()) {
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          ptx::mbarrier_try_wait_parity(come + 8 * piece.stage, piece.parity);
          ptx::mbarrier_try_wait_parity(empty + 8 * now.stage, now.parity ^ 1);
          unpack_piece<Tiles>(base + Tiles::PIECES_AT + piece.stage * Tiles::W_BYTES,
                              base + Tiles::A_AT + now.stage * Tiles::A_BYTES,
                              base + Tiles::FACTORS_AT + now.stage * Tiles::FACTOR_BYTES);
          ptx::fence_proxy_async();  // tensor cores see what was stored
          __syncwarp();
          if (lane == 0) {
            ptx::mbarrier_arrive(full + 8 * now.stage);
            ptx::mbarrier_arrive(unpacked + 8 * piece.stage);
          }
          piece.next();
          now.next();
        }
      }
    }
    return;
  }
  ptx::setmaxnreg_inc<232>();
  const int group = warp / 4 - 1, row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4 * 2;
  const unsigned x = descriptor<true>(base), a = descriptor<true>(base + Tiles::A_AT + group * 8192);
  const unsigned factors = base + Tiles::FACTORS_AT + row * 4;
  float sums[TOKENS / 2];
  typename Tiles::S parts[2][TOKENS / 2];
  unsigned of_rows[2][2];
  auto multiply = [&](int i) {
    ptx::mbarrier_try_wait_parity(full + 8 * now.stage, now.parity);
    ptx::ld_shared_v2(of_rows[i][0], of_rows[i][1], factors + now.stage * Tiles::FACTOR_BYTES);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned at = a + now.stage * (Tiles::A_BYTES >> 4) + j * NEXT_K<true>;
      const unsigned of_x = x + now.stage * (Tiles::X_BYTES >> 4) + j * NEXT_K<true>;
      ptx::wgmma_mma_async<WgmmaTypes<T, true, true>>(parts[i], whole_descriptor(at), whole_descriptor(of_x), j > 0);
    }
    ptx::wgmma_commit_group();
    now.next();
  };
  int done = 0;  // the stage whose products end next
  auto add = [&](int i) {
    ptx::wgmma_read_anew(parts[i]);
    if (lane == 0) ptx::mbarrier_arrive(empty + 8 * done);
    if (++done == STAGES) done = 0;
    const float factor[2] = {__int_as_float(of_rows[i][0]), __int_as_float(of_rows[i][1])};
#pragma unroll
    for (int j = 0; j < TOKENS / 2; ++j) sums[j] = multiply_add(value_of(parts[i][j]), factor[j / 2 % 2], sums[j]);
  };
  for (; order.more(); order.next()) {
    const Spot spot = order.spot(p.product.m);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0;
    int left = steps;
    // TOGETHER parts of k; where paths of the program meet, no product is under way.
    auto all = [&](auto together) {
      constexpr int TOGETHER = decltype(together)::value;
#pragma unroll 1
      for (; left >= TOGETHER; left -= TOGETHER) {
        multiply(0);
#pragma unroll
        for (int i = 1; i < TOGETHER; ++i) {
          multiply(i % 2);
          ptx::wgmma_wait_group<1>();
          add((i - 1) % 2);
        }
        ptx::wgmma_wait_group<0>();
        add((TOGETHER - 1) % 2);
      }
    };
    all(Constant<16>{});
    all(Constant<4>{});
    all(Constant<1>{});
    auto scaled = [&](int j, int e, int i) {
      const int token = min(spot.token + j * 8 + lane % 4 * 2 + e, p.product.m - 1);
      const float of_token = p.a_scale ? p.a_scale[token * p.a_scale_row] : 1.0f;
      return sums[4 * j + e + 2 * i] * of_token;
    };
    ptx::bar_sync(1 + group, 128);  // all have copied out what was there before
    store_block<EPILOGUE, Tiles>(p.product, scaled, shared + Tiles::STAGED_AT + group * TOKENS * Tiles::PITCH, true,
                                 1 + group, (spot.part + group) * 64, spot);
  }
}
