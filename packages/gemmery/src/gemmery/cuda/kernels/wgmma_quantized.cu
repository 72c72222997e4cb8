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
#include "quantized_tiles.cuh"
#include "staged.cuh"

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
  static __device__ __forceinline__ float4 sum(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
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
  constexpr int LISTENERS = CONSUMERS + 64;
  // Barriers; 1 to LINES are of the ways of a line, those behind of one's first.
  constexpr int READY = 15, ALL = 14, TOLD = 13;
  extern __shared__ __align__(1024) char shared[];
  const unsigned base = ptx::shared_address(shared), full = base + Tiles::BEHIND, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int2* table = reinterpret_cast<int2*>(shared + Tiles::TABLE);
  auto share_of = [&](const int2* table) {
    if constexpr (Tiles::GROUPED) return Experts<Tiles>(p, table);
    else return Share<Tiles>(p);
  };

  if (warp >= CONSUMERS / 32) {
    ptx::setmaxnreg_dec<Tiles::PRODUCER>();
    Ring<STAGES> now;
    if (warp == CONSUMERS / 32) {
      ShareOf<Tiles> share = share_of(nullptr);
      QuantizedProducer<Tiles> producer(p, share, base, full);
      // W of experts is asked for as if each had tokens for a tile; not where some have none for certain.
      int early = min(share.count(), Tiles::GROUPED ? STAGES : 2);
      if (Tiles::GROUPED && p.product.m < p.product.batch) early = 0;
      if (ptx::elect_sync()) {  // the first copies are on their way before the others hear that there are barriers
        constexpr int AT_FIRST = Tiles::GROUPED ? STAGES : 2;
        for (int i = 0; i < AT_FIRST; ++i) ptx::mbarrier_init(full + 8 * i, 2);
        ptx::fence_mbarrier_init();
#pragma unroll 1
        for (int i = 0; i < early; ++i) {
          producer.bring_w(now.stage);
          now.next();
        }
        for (int i = AT_FIRST; i < STAGES; ++i) ptx::mbarrier_init(full + 8 * i, 2);
        for (int i = 0; i < STAGES; ++i) ptx::mbarrier_init(empty + 8 * i, LINES * 4);
        ptx::fence_mbarrier_init();
      }
      __syncwarp();
      if constexpr (Tiles::GROUPED) {
        ptx::bar_sync(TOLD, 64);
        if (table[p.product.batch].x) {
          share = share_of(table);
          if (ptx::elect_sync()) producer.drop(early);
          early = 0;
          now = {};
          producer.start_w();
        }
      }
      ptx::bar_arrive(READY, LISTENERS);
      const int count = share.count();
      if (ptx::elect_sync()) {  // the same lane
#pragma unroll 1
        for (int i = early; i < count; ++i) {
          if (i >= STAGES) ptx::mbarrier_try_wait_parity(empty + 8 * now.stage, now.parity ^ 1);
          producer.bring_w(now.stage);
          now.next();
        }
      }
    } else if (warp == CONSUMERS / 32 + 1) {
      if (ptx::elect_sync()) ptx::prefetch_tensormap(&p.a);
      ShareOf<Tiles> share = share_of(nullptr);
      if constexpr (Tiles::GROUPED) {
        if (Tiles::EARLY) ptx::griddepcontrol_wait();
        Experts<Tiles>::tell(p, table);
        ptx::bar_sync(TOLD, 64);
        if (table[p.product.batch].x) share = share_of(table); else share.table = table;
      }
      ptx::bar_sync(READY, LISTENERS);
      QuantizedProducer<Tiles> producer(p, share, base, full);
      const int count = share.count();
      if (ptx::elect_sync()) {
        if (Tiles::EARLY && !Tiles::GROUPED) ptx::griddepcontrol_wait();
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
  const ShareOf<Tiles> share = share_of(table);
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
  unsigned parity = Tiles::GROUPED ? table[p.product.batch].x : 0;  // a phase has passed where W was asked for in vain
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
    const SharedSpot spot = share.at(tile);  // of experts a search of 500 cycles: once, where registers hold it
    const int count = Tiles::GROUPED ? spot.end - spot.token : TOKENS;
    float row_factors[BLOCKS][2];
    auto where = [&] { return Tiles::TIGHT ? share.at(tile) : spot; };
    auto fetch_factors = [&] {
      const SharedSpot spot = where();
      const char* w = reinterpret_cast<const char*>(p.product.b);
      if (Tiles::GROUPED) w += spot.group * whole_bytes<Tiles>(p.product);
      const float* of_rows = reinterpret_cast<const float*>(w + chunk_bytes<Tiles>(p.product));
      // Three chunks may end behind the last band.
      const int last = (p.product.n - 1) / (64 * Tiles::BAND) * Tiles::BAND + Tiles::BAND - BLOCKS;
      of_rows += min(spot.part + line * BLOCKS, last) * 64 + thread / 32 * 16 + lane / 4 * 2;
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; ++i) row_factors[i / 2][i % 2] = of_rows[i / 2 * 64 + i % 2];
    };
    if (!Tiles::TIGHT) fetch_factors();  // from memory, which takes 1000 cycles and more
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
    // The last block that comes adds up the parts of all, in the order of k, pair after pair. Of two, whose order gives
    // the same bits, it adds the other's to its own, and waits for it where that is at its end too.
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
          const float4* from[Tiles::AT_ONCE];
#pragma unroll
          for (int i = 0; i < Tiles::AT_ONCE; ++i) {
            const int other = min(block + i, last);
            from[i] = parts + (2LL * other + share.second_of(other, tile)) * SLOT;
          }
#pragma unroll
          for (int q = 0; q < QUADS; ++q) {
            float4 more[Tiles::AT_ONCE] = {};
#pragma unroll
            for (int i = 0; i < Tiles::AT_ONCE; ++i) {
              if (block + i <= last) more[i] = __ldcg(from[i] + q * 128);
            }
#pragma unroll
            for (int i = 0; i < Tiles::AT_ONCE; i += 2) {
              if constexpr (Tiles::AT_ONCE > 1) {
                if (block + i + 1 <= last) more[i] = Q::sum(more[i], more[i + 1]);
              }
              if (block + i <= last) Q::add(sums, q, more[i]);
            }
          }
        }
      }
    }
    if (mine) {
      if (Tiles::TIGHT) fetch_factors();
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const int part = line * BLOCKS + block;
        const SharedSpot spot = where();
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
