// Idea: weights stay in their 4 or 8 bits until they are in registers. 64 rows of W are the M side of wgmma, its A
// operand, which may come from registers; tokens are the N side, from shared memory, so that few of them cost few
// cycles. WAYS warpgroups share the same rows and have a part of k each: small tiles fill all multiprocessors, and sums
// are exchanged once, at the end. One thread loads W as one piece of adjacent bytes a step.
// Parent: wgmma_specialized, whose operands have 16 bits in shared memory; gemv_quantized, whose mma.sync has at most
// 64 rows of x and unpacks W in every warp that multiplies it.
// Measured on an H200: docs/findings/quantized_products.md.
#include "descriptor.cuh"
#include "epilogue.cuh"
#include "levels.cuh"
#include "pipeline.cuh"
#include "shares.cuh"
#include "staged.cuh"

// WARPGROUPS of BLOCKS x 64 rows of W each, of which WAYS share rows, and one more for the producer. RESIDENT blocks on
// a multiprocessor. DEEP: one copy loads 128 of k of the tokens; not so where k is no multiple of 64. EARLY: the launch
// before may not have ended when this one begins, and W is asked for before it has; not so where it is of a GROUP, one
// of several W, that ends where the launch before may say. STAYS: a block may have many tiles. TURNS: parts of k whose
// sums one consumer adds up as those of so many ways, so that bits are the same.
template <class T, class Of, int N, int COUNT, int EACH, int SHARING, int DEPTH, int AT_A_TIME, bool IS_DEEP,
          bool IS_EARLY, bool IS_STAYING, bool HAS_GROUPS, int ALONE, int INSIDE>
struct QuantizedTiles {
  using L = Of;
  static constexpr bool GROUPED = HAS_GROUPS, STAYS = IS_STAYING;
  static constexpr int TOKENS = N, WARPGROUPS = COUNT, BLOCKS = EACH, WAYS = SHARING, STAGES = DEPTH;
  static constexpr int RESIDENT = AT_A_TIME, STEP = 128, TURNS = ALONE, SHARES = INSIDE;
  static constexpr bool DEEP = IS_DEEP, EARLY = IS_EARLY;
  static constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + 128;
  // Of what the block was launched with: a setmaxnreg that asks for more than the others gave back waits for ever.
  static constexpr int LAUNCHED = 65536 / RESIDENT / THREADS / 8 * 8, PRODUCER = 32;
  static constexpr int EACH_MAY = (LAUNCHED * (WARPGROUPS + 1) - PRODUCER) / WARPGROUPS / 8 * 8;
  static constexpr int CONSUMER = EACH_MAY < 232 ? EACH_MAY : 232;
  static constexpr int LINES = WARPGROUPS / WAYS, PARTS = LINES * BLOCKS, ROWS = PARTS * 64;
  static constexpr int BAND = 4;  // chunks of 64 rows that lie together for each step of k
  static constexpr int X_BYTES = TOKENS * STEP * 2, W_BYTES = PARTS * L::CHUNK;
  static constexpr int SUMS = BLOCKS * TOKENS / 2, QUADS = SUMS / 4, EXCHANGED = SUMS * 128 * 4;
  static constexpr int RING = STAGES * (X_BYTES + W_BYTES), KEPT = (SHARES > 1) * LINES * EXCHANGED;
  // Of operands that are unpacked in turn; with many tokens four consumers have registers for one, and overlap anyway.
  static constexpr int ONE_FROM = WARPGROUPS == 4 ? (GROUPED ? 64 : 72) : WARPGROUPS == 3 && STAYS ? 112 : 192;
  static constexpr int SETS = TOKENS >= ONE_FROM ? 1 : 2;
  static constexpr int PITCH = 144;  // bytes of a token's 64 results, and 16 so that a warp's are in all banks
  // Results and what ways exchange have the ring; or, where the block fills it for the next tile meanwhile, room of
  // their own.
  static constexpr int STAGED = PARTS * TOKENS * PITCH, STAGED_AT = STAYS ? RING + KEPT : 0;
  static constexpr int EXCHANGE = STAGED_AT + STAGED, EXCHANGE_END = EXCHANGE + (WAYS - 1) * LINES * EXCHANGED;
  static constexpr int BEHIND = EXCHANGE_END > RING + KEPT ? EXCHANGE_END : RING + KEPT;
  // Whether the last of two blocks keeps its part: with few tokens a second trip to L2 costs more than the bytes.
  static constexpr bool PAIRS = !GROUPED && TOKENS > 32 && TOKENS < 256;
  static constexpr int AT_ONCE = QUADS > 4 ? 1 : QUADS > 2 ? 2 : 4;  // parts of a tile that are read together
  static constexpr int TABLE = BEHIND + (16 * STAGES + 4 * LINES + 7) / 8 * 8;  // of groups
  // Whether what a block needs of a step is one piece. Of three chunks it is in two bands every other time.
  static constexpr bool ONE_PIECE = BAND % PARTS == 0;
  static_assert(PARTS <= BAND && WARPGROUPS % WAYS == 0, "what a block needs of a step is in two bands at most");
  static_assert(TURNS * SHARES == 1 || WAYS == 1, "parts have a consumer each, or one has all");
  static_assert(STAGES % WAYS == 0 && STAGES >= 2 * WAYS, "a consumer else waits for a stage that it holds");
};

// Bytes of the chunks of a W, which its rows' factors follow, and of both.
template <class Tiles, class P> __device__ __forceinline__ long long chunk_bytes(const P& p) {
  const long long bands = (p.n + 64 * Tiles::BAND - 1) / (64 * Tiles::BAND);
  return bands * ((p.k + 127) / 128) * Tiles::BAND * Tiles::L::CHUNK;
}
template <class Tiles, class P> __device__ __forceinline__ long long whole_bytes(const P& p) {
  return chunk_bytes<Tiles>(p) + (p.n + 64 * Tiles::BAND - 1) / (64 * Tiles::BAND) * (256LL * Tiles::BAND);
}

// Where the i-th of so many parts of a count begins.
template <int PARTS> __device__ __forceinline__ int part_of(int count, int i) {
  return i * (count / PARTS) + min(i, count % PARTS);
}

// The steps of a tile in the order in which its consumers take them: the first of each part, the second of each.
template <int PARTS> struct Walk {
  int step, part, each, longer, count, left;

  __device__ __forceinline__ void set(int begin, int stop) {
    step = begin, part = 0, left = count = stop - begin;
    each = count / PARTS, longer = count % PARTS;
  }
  __device__ __forceinline__ bool next() {  // false after the last one
    step += each + (part < longer);
    if (++part == PARTS) part = 0, step -= count - 1;
    return --left > 0;
  }
};

template <class Tiles> using ShareOf = typename Select<Tiles::GROUPED, Experts<Tiles>, Share<Tiles>>::type;

// What one thread does for W and another for the tokens: bring steps, each as soon as a stage is empty. One for both
// takes 332 cycles a step.
template <class Tiles> struct QuantizedProducer {
  const ShareOf<Tiles>& share;
  const char* w;
  const long long each;  // bytes of a group's
  const int bands;
  const char* from;  // of W: the first piece of the tile
  long long behind;  // from that to the piece in the next band
  int size;          // of the first piece
  unsigned ring, full;
  int w_tile, x_tile, token;
  Walk<Tiles::WAYS> of_w, of_x;

  template <class P>
  __device__ __forceinline__ QuantizedProducer(const P& p, const ShareOf<Tiles>& share, unsigned ring, unsigned full)
      : share(share), w(reinterpret_cast<const char*>(p.product.b)),
        each(Tiles::GROUPED ? whole_bytes<Tiles>(p.product) : 0),
        bands((p.product.n + 64 * Tiles::BAND - 1) / (64 * Tiles::BAND)), ring(ring), full(full) {
    w_tile = x_tile = share.first;
    of_x.set(share.begin(x_tile), share.stop(x_tile));
    token = share.at(x_tile).token;
    enter();
  }
  __device__ __forceinline__ void enter() {
    const SharedSpot spot = share.at(w_tile);
    long long band = spot.part / Tiles::BAND;
    from = w + spot.group * each;
    from += (band * share.steps * Tiles::BAND + spot.part % Tiles::BAND) * Tiles::L::CHUNK;
    if constexpr (!Tiles::ONE_PIECE) {
      const int within = spot.part % Tiles::BAND, chunks = Tiles::BAND - within;
      size = min(chunks, Tiles::PARTS) * Tiles::L::CHUNK;
      // Behind the last band there is none: rows that no one needs have weights of its first ones.
      behind = ((band + 1 < bands ? share.steps * Tiles::BAND : 0) - within) * (long long)Tiles::L::CHUNK;
    }
    of_w.set(share.begin(w_tile), share.stop(w_tile));
  }
  __device__ __forceinline__ void bring_w(int stage) {
    ptx::mbarrier_arrive_expect_tx(full + 8 * stage, Tiles::W_BYTES);
    const char* piece = from + of_w.step * (long long)(Tiles::BAND * Tiles::L::CHUNK);
    const unsigned to = ring + Tiles::STAGES * Tiles::X_BYTES + stage * Tiles::W_BYTES;
    if constexpr (Tiles::ONE_PIECE) {
      ptx::cp_async_bulk_load(to, piece, Tiles::W_BYTES, full + 8 * stage);
    } else {
      ptx::cp_async_bulk_load(to, piece, size, full + 8 * stage);
      if (size < Tiles::W_BYTES) {
        ptx::cp_async_bulk_load(to + size, piece + behind, Tiles::W_BYTES - size, full + 8 * stage);
      }
    }
    if (!of_w.next()) {
      ++w_tile;
      enter();
    }
  }
  template <class P> __device__ __forceinline__ void bring_x(const P& p, int stage) {
    const unsigned to = ring + stage * Tiles::X_BYTES, barrier = full + 8 * stage;
    const int x_step = of_x.step;
    ptx::mbarrier_arrive_expect_tx(barrier, Tiles::X_BYTES);
    if constexpr (Tiles::DEEP) {
      ptx::cp_async_bulk_tensor_load(to, &p.a, 0, token, 2 * x_step, barrier);
    } else {
      ptx::cp_async_bulk_tensor_load(to, &p.a, x_step * Tiles::STEP, token, 0, barrier);
      ptx::cp_async_bulk_tensor_load(to + Tiles::X_BYTES / 2, &p.a, x_step * Tiles::STEP + 64, token, 0, barrier);
    }
    if (!of_x.next()) {
      token = share.at(++x_tile).token;
      of_x.set(share.begin(x_tile), share.stop(x_tile));
    }
  }
};

// Places of float4 of sums: q-th of a thread, of its tile's blocks.
template <class Tiles> struct Quads {
  using Sums = float (&)[Tiles::BLOCKS][Tiles::TOKENS / 2];
  static __device__ __forceinline__ float* of(Sums sums, int q) {
    return sums[q / (Tiles::TOKENS / 8)] + q % (Tiles::TOKENS / 8) * 4;
  }
  static __device__ __forceinline__ void add(Sums sums, int q, float4 more) {
    float* s = of(sums, q);
    s[0] += more.x, s[1] += more.y, s[2] += more.z, s[3] += more.w;
  }
  static __device__ __forceinline__ void clear(Sums sums, int q) {
    float* s = of(sums, q);
    s[0] = s[1] = s[2] = s[3] = 0;
  }
  static __device__ __forceinline__ float4 get(Sums sums, int q) {
    const float* s = of(sums, q);
    return make_float4(s[0], s[1], s[2], s[3]);
  }
};

template <int N> struct Width { static constexpr int value = N; };

// f of the narrowest of some widths of a product that holds so many tokens, MOST or fewer: a group may have few.
template <int MOST, class F> __device__ __forceinline__ void narrowest(int tokens, F f) {
  constexpr int LESS = MOST > 96 ? 96 : MOST > 16 ? (MOST - 1) / 16 * 16 : 8;
  if constexpr (LESS < MOST) {
    if (tokens <= LESS) return narrowest<LESS>(tokens, f);
  }
  f(Width<MOST>());
}

template <class Out> __device__ __forceinline__ unsigned pair_of(float low, float high) {
  if constexpr (SameAs<Out, bf16>::value) return ptx::cvt_rn_bf16x2_f32(low, high);
  return ptx::cvt_rn_f16x2_f32(low, high);
}

// Results of one block of 64 rows of W, for the tokens of a tile. A thread has rows r, r + 1 for two tokens of each 8;
// `scaled` gives its sum of the token 8 j + 2 (lane % 4) + e and row r + i, with all factors.
// They leave through shared memory, `stage`, in whole lines.
template <int EPILOGUE, class Tiles, class T, class Out, class Scaled>
__device__ __forceinline__ void store_block(const Product<T, Out>& p, Scaled scaled, char* stage, int barrier,
                                            int rows, SharedSpot spot) {
  constexpr int PITCH = Tiles::PITCH, TOKENS = Tiles::TOKENS, SIZE = int(sizeof(Out)), PIECES = 4 * SIZE;
  const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4 * 2;
  const int token = spot.token, count = min(spot.end - token, TOKENS), wide = min(p.n - rows, 64);
  float bias[2] = {};
  const long long first_bias = Tiles::GROUPED ? spot.group * p.bias_row : 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (EPILOGUE & BIAS) bias[i] = row + i < wide ? p.bias[first_bias + (rows + row + i) * p.bias_col] : 0;
  }
  auto result = [&](int j, int e, int i) {
    return activate<EPILOGUE, Approximate<Out>>(scaled(j, e, i) + bias[i]);
  };
  char* to = stage + lane % 4 * 2 * PITCH + row * SIZE;
#pragma unroll
  for (int i = 0; i < TOKENS / 4; ++i) {
    const float first = result(i / 2, i % 2, 0), second = result(i / 2, i % 2, 1);
    char* here = to + (i / 2 * 8 + i % 2) * PITCH;
    if constexpr (SIZE == 2) *reinterpret_cast<unsigned*>(here) = pair_of<Out>(first, second);
    else *reinterpret_cast<float2*>(here) = make_float2(first, second);
  }
  ptx::bar_sync(barrier, 128);
  if (wide == 64 && (reinterpret_cast<unsigned long long>(p.c) | p.c_row * SIZE) % 16 == 0) {
#pragma unroll 4
    for (int at = thread; at < count * PIECES; at += 128) {
      *reinterpret_cast<uint4*>(p.c_at(0, token + at / PIECES, rows + at % PIECES * (16 / SIZE))) =
          *reinterpret_cast<const uint4*>(stage + at / PIECES * PITCH + at % PIECES * 16);
    }
  } else {
#pragma unroll 1
    for (int at = thread; at < count * 64; at += 128) {
      if (at % 64 < wide) {
        *p.c_at(0, token + at / 64, rows + at % 64) = reinterpret_cast<const Out*>(stage + at / 64 * PITCH)[at % 64];
      }
    }
  }
}

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::RESIDENT)
    wgmma_quantized(const __grid_constant__ TmaProduct<T, Out> p) {
  using L = typename Tiles::L;
  using Q = Quads<Tiles>;
  constexpr int TOKENS = Tiles::TOKENS, BLOCKS = Tiles::BLOCKS, WAYS = Tiles::WAYS, LINES = Tiles::LINES;
  constexpr int STAGES = Tiles::STAGES, CONSUMERS = Tiles::CONSUMERS, QUADS = Tiles::QUADS, SUMS = Tiles::SUMS;
  constexpr bool ALONE = Tiles::GROUPED;  // one thread brings both: another knows too late where groups end
  constexpr int LISTENERS = CONSUMERS + (ALONE ? 32 : 64);
  constexpr int READY = 15, ALL = 14;  // barriers; 1 to LINES are of the ways of a line, those behind of one's first
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = ptx::shared_address(shared), full = base + Tiles::BEHIND, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  auto share_of = [&] {
    if constexpr (Tiles::GROUPED) {
      return Experts<Tiles>(p, reinterpret_cast<const int2*>(shared + Tiles::TABLE));
    } else {
      return Share<Tiles>(p);
    }
  };

  if (warp >= CONSUMERS / 32) {
    ptx::setmaxnreg_dec<Tiles::PRODUCER>();
    Ring<STAGES> now;
    if (warp == CONSUMERS / 32) {
      if constexpr (Tiles::GROUPED) {
        if (Tiles::EARLY) ptx::griddepcontrol_wait();
        Experts<Tiles>::tell(p, reinterpret_cast<int2*>(shared + Tiles::TABLE));
        __syncwarp();
      }
      const ShareOf<Tiles> share = share_of();
      QuantizedProducer<Tiles> producer(p, share, base, full);
      const int count = share.count(), early = min(count, 2);
      if (ptx::elect_sync()) {  // the first copies are on their way before the others hear that there are barriers
        ptx::prefetch_tensormap(&p.a);
        for (int i = 0; i < 2; ++i) ptx::mbarrier_init(full + 8 * i, 2);
        ptx::fence_mbarrier_init();
#pragma unroll 1
        for (int i = 0; i < early; ++i) {
          producer.bring_w(i);
          if (ALONE) producer.bring_x(p, i);
        }
        for (int i = 2; i < STAGES; ++i) ptx::mbarrier_init(full + 8 * i, 2);
        for (int i = 0; i < STAGES; ++i) ptx::mbarrier_init(empty + 8 * i, LINES * 4);
        ptx::fence_mbarrier_init();
      }
      __syncwarp();
      ptx::bar_arrive(READY, LISTENERS);
      if (ptx::elect_sync()) {  // the same lane
        now.stage = early;
#pragma unroll 1
        for (int i = early; i < count; ++i) {
          if (i >= STAGES) ptx::mbarrier_try_wait_parity(empty + 8 * now.stage, now.parity ^ 1);
          producer.bring_w(now.stage);
          if (ALONE) producer.bring_x(p, now.stage);
          now.next();
        }
      }
    } else if (!ALONE && warp == CONSUMERS / 32 + 1) {
      ptx::bar_sync(READY, LISTENERS);
      const ShareOf<Tiles> share = share_of();
      QuantizedProducer<Tiles> producer(p, share, base, full);
      const int count = share.count();
      if (ptx::elect_sync()) {
        if (Tiles::EARLY) ptx::griddepcontrol_wait();
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          if (i >= STAGES) ptx::mbarrier_try_wait_parity(empty + 8 * now.stage, now.parity ^ 1);
          producer.bring_x(p, now.stage);
          now.next();
        }
      }
    }
    return;
  }

  ptx::setmaxnreg_inc<Tiles::CONSUMER>();
  ptx::bar_sync(READY, LISTENERS);
  if (Tiles::EARLY) ptx::griddepcontrol_launch_dependents();
  const ShareOf<Tiles> share = share_of();
  const int group = warp / 4, line = group % LINES, way = group / LINES, thread = threadIdx.x % 128;
  const unsigned first_x = descriptor<true>(base);
  const unsigned chunks = base + STAGES * Tiles::X_BYTES + line * BLOCKS * L::CHUNK;
  unsigned weights = chunks + thread * 16;
  unsigned factors = chunks + L::factors_at(thread), zeros = chunks + L::zeros_at(thread);
  ptx::computed_here(weights);  // else they are computed anew in each step
  ptx::computed_here(factors);
  ptx::computed_here(zeros);
  float sums[BLOCKS][TOKENS / 2];
  unsigned a[Tiles::SETS][4][4];
  L levels[BLOCKS];
  int stage = way;
  unsigned parity = 0;
  auto fetch = [&] {
    ptx::mbarrier_try_wait_parity(full + 8 * stage, parity);
    const unsigned at = stage * Tiles::W_BYTES;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const unsigned of = at + block * L::CHUNK;
      levels[block].fetch(weights + of, factors + of, zeros + of);
    }
  };
  // All lanes have read the stage: the products that took its weights, which a warp waits for as a whole, have ended. A
  // __syncwarp here would say so, but between products under way ptxas then lets each end before the next (C7513).
  auto release = [&](int of) {
    if (lane == 0) ptx::mbarrier_arrive(empty + 8 * of);
  };

  int turn = way;  // steps until one is this consumer's
#pragma unroll 1
  for (int tile = share.first; tile < share.last; ++tile) {
    const int begin = share.begin(tile), stop = share.stop(tile);
    int next = begin + turn;
    const bool parted = way == 0 && stop - begin < share.steps;
    auto counter = [&] { return reinterpret_cast<unsigned*>(const_cast<int*>(p.offsets)) + tile * LINES + line; };
    unsigned rank = 0;  // of the blocks of this tile
    auto come = [&] {
      if (!Tiles::PAIRS || !parted || thread > 0) return;
      if (Tiles::EARLY) ptx::griddepcontrol_wait();
      rank = atomicAdd(counter(), 1u);
    };
    const int count = Tiles::GROUPED ? share.at(tile).end - share.at(tile).token : TOKENS;
    float row_factors[BLOCKS][2];
    auto fetch_factors = [&] {
      const SharedSpot spot = share.at(tile);
      const char* w = reinterpret_cast<const char*>(p.product.b);
      if (Tiles::GROUPED) w += spot.group * whole_bytes<Tiles>(p.product);
      const float* of_rows = reinterpret_cast<const float*>(w + chunk_bytes<Tiles>(p.product));
      // Three chunks may end behind the last band.
      const int last = (p.product.n - 1) / (64 * Tiles::BAND) * Tiles::BAND + Tiles::BAND - BLOCKS;
      of_rows += min(spot.part + line * BLOCKS, last) * 64 + thread / 32 * 16 + lane / 4 * 2;
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; ++i) row_factors[i / 2][i % 2] = of_rows[i / 2 * 64 + i % 2];
    };
    if (!Tiles::GROUPED) fetch_factors();  // now, since they come from memory, where there are registers for them
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0;
    float total[Tiles::TURNS > 1 ? SUMS : 1] = {};
    if (next < stop) {
      int before = -1;
      fetch();
#pragma unroll 1
      for (int inside = 0; inside < Tiles::SHARES; ++inside) {
        const int from = begin + inside * (stop - begin) / Tiles::SHARES;
        const int count_of = begin + (inside + 1) * (stop - begin) / Tiles::SHARES - from;
#pragma unroll 1
        for (int part = 1; part <= Tiles::TURNS; ++part) {
          const int end = from + part_of<Tiles::TURNS>(count_of, part);
#pragma unroll 1
          for (; next < end; next += WAYS) {
            const unsigned x = first_x + stage * (Tiles::X_BYTES >> 4);
#pragma unroll
            for (int piece = 0; piece < 2 * BLOCKS; ++piece) {
              const int block = piece % BLOCKS, half = piece / BLOCKS;
              ptx::wgmma_wait_group<Tiles::SETS - 1>();  // those that read these operands have ended
              if (piece == 1 && before >= 0) release(before);
              levels[block].unpack(a[piece % Tiles::SETS], half);
              narrowest<TOKENS>(count, [&](auto width) {
                using Sums = float(&)[decltype(width)::value / 2];
                ptx::wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                  const unsigned at = x + half * (Tiles::X_BYTES >> 5) + j * NEXT_K<true>;
                  ptx::wgmma_mma_async<RegisterTypes<T, true>>(
                      reinterpret_cast<Sums>(sums[block]), a[piece % Tiles::SETS][j], whole_descriptor(at), 1);
                }
                ptx::wgmma_commit_group();  // in each branch, as the fence: outside ptxas adds its own
              });
            }
            before = stage;
            if ((stage += WAYS) >= STAGES) stage -= STAGES, parity ^= 1;
            if (next + WAYS < stop) fetch();
          }
          if constexpr (Tiles::TURNS > 1) {
            ptx::wgmma_wait_group<0>();
#pragma unroll
            for (int i = 0; i < SUMS; ++i) {
              float& sum = sums[i / (TOKENS / 2)][i % (TOKENS / 2)];
              total[i] += sum;
              sum = part < Tiles::TURNS ? 0 : total[i];
              if (Tiles::SHARES > 1 && part == Tiles::TURNS) total[i] = 0;
            }
          }
        }
        if constexpr (Tiles::SHARES > 1) {  // what a block would add up waits behind the ring: no register is left
          ptx::wgmma_wait_group<0>();
          float4* kept = reinterpret_cast<float4*>(shared + Tiles::RING) + line * QUADS * 128 + thread;
#pragma unroll
          for (int q = 0; q < QUADS; ++q) {
            if (inside > 0) Q::add(sums, q, kept[q * 128]);
            if (inside < Tiles::SHARES - 1) {
              kept[q * 128] = Q::get(sums, q);
              Q::clear(sums, q);
            }
          }
        }
      }
      come();  // the answer takes 700 cycles, which the last products hide
      ptx::wgmma_wait_group<0>();
      release(before);
    } else {
      come();
    }
    turn = next - stop;
    if (Tiles::EARLY) ptx::griddepcontrol_wait();
    if (!Tiles::STAYS) ptx::bar_sync(ALL, CONSUMERS);  // nothing comes into the stages any more

    bool mine = way == 0;  // to write
    if constexpr (WAYS > 1) {  // the first adds up the others' sums, in their order
      if (tile != share.first) ptx::bar_sync(1 + line, WAYS * 128);
      float4* exchanged = reinterpret_cast<float4*>(shared + Tiles::EXCHANGE) + line * QUADS * 128 + thread;
      if (way > 0) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) exchanged[((way - 1) * LINES * QUADS + q) * 128] = Q::get(sums, q);
      }
      ptx::bar_sync(1 + line, WAYS * 128);
      if (way == 0) {
#pragma unroll
        for (int other = 0; other < WAYS - 1; ++other) {
#pragma unroll
          for (int q = 0; q < QUADS; ++q) Q::add(sums, q, exchanged[(other * LINES * QUADS + q) * 128]);
        }
      }
    }
    // The last block that comes adds up the parts of all, in the order of k. Of two, whose order gives the same bits,
    // it adds the other's to its own, and waits for it where that is at its end too.
    if (parted) {
      constexpr int SLOT = LINES * QUADS * 128, DONE = 1 << 16;
      float4* parts = static_cast<float4*>(p.product.workspace) + line * QUADS * 128 + thread;
      int one = share.first_block(tile), last = share.last_block(tile);
      volatile unsigned* flag = reinterpret_cast<volatile unsigned*>(shared + Tiles::BEHIND + 16 * STAGES) + line;
      const bool pair = Tiles::PAIRS && last == one + 1;
      auto is_last = [&] {
        if (thread == 0) *flag = rank % DONE;
        ptx::bar_sync(1 + LINES + line, 128);
        return *flag == unsigned(last - one);
      };
      mine = Tiles::PAIRS && is_last();
      if (!(mine && pair)) {
        float4* to = parts + (2LL * blockIdx.x + (tile != share.first)) * SLOT;
#pragma unroll
        for (int q = 0; q < QUADS; ++q) __stcg(to + q * 128, Q::get(sums, q));
        ptx::bar_sync(1 + LINES + line, 128);
        if (Tiles::PAIRS) {
          if (thread == 0) ptx::red_add_release(counter(), DONE);
        } else {
          if (thread == 0) rank = ptx::atom_add_acq_rel(counter());
          mine = is_last();
        }
      }
      if (mine) {
        if (thread == 0) {
          const int written = !Tiles::PAIRS ? 0 : pair ? 1 : last - one + 1;
          while (written && ptx::ld_acquire_sys(reinterpret_cast<const int*>(counter())) / DONE < written) {}
          *counter() = 0;
        }
        if (Tiles::PAIRS) ptx::bar_sync(1 + LINES + line, 128);
        if (pair) {
          one = last = one + last - int(blockIdx.x);
        } else {
#pragma unroll
          for (int i = 0; i < SUMS; ++i) sums[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0;
        }
#pragma unroll 1
        for (int block = one; block <= last; block += Tiles::AT_ONCE) {
          float4 more[Tiles::AT_ONCE][QUADS];
#pragma unroll
          for (int i = 0; i < Tiles::AT_ONCE; ++i) {
            const int other = min(block + i, last);
            const float4* from = parts + (2LL * other + share.second_of(other, tile)) * SLOT;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) more[i][q] = __ldcg(from + q * 128);
          }
#pragma unroll
          for (int i = 0; i < Tiles::AT_ONCE; ++i) {
            if (block + i <= last) {
#pragma unroll
              for (int q = 0; q < QUADS; ++q) Q::add(sums, q, more[i][q]);
            }
          }
        }
      }
    }
    if (mine) {
      if (Tiles::GROUPED) fetch_factors();
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const int part = line * BLOCKS + block;
        const SharedSpot spot = share.at(tile);
        auto scaled = [&](int j, int e, int i) {
          return sums[block][4 * j + e + 2 * i] * (L::UNSCALE * row_factors[block][i]);
        };
        if (Tiles::STAYS && block == 0) ptx::bar_sync(1 + LINES + line, 128);  // all have copied out what was there
        char* rows = shared + Tiles::STAGED_AT + part * TOKENS * Tiles::PITCH;
        store_block<EPILOGUE, Tiles>(p.product, scaled, rows, 1 + LINES + line, (spot.part + part) * 64, spot);
      }
    }
    if (!Tiles::STAYS) break;
  }
}
