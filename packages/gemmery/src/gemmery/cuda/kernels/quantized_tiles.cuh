// Tiles of a product by weights of few bits, and the thread that brings their steps into a ring of shared memory.
#pragma once
#include "shares.cuh"
#include "types.cuh"

// WARPGROUPS of BLOCKS x 64 rows of W each, of which WAYS share rows, and one more for the producer. RESIDENT blocks on
// a multiprocessor. DEEP: one copy loads 128 of k of the tokens; not so where k is no multiple of 64. EARLY: the launch
// before may not have ended when this one begins, and W is asked for before it has; where it is of a GROUP, one of
// several W, that ends where the launch before may say, as if each had tokens for one tile. STAYS: a block may have
// many tiles. TURNS: parts of k whose sums one consumer adds up as those of so many ways, so that bits are the same.
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
  // Of operands that are unpacked in turn; with many tokens consumers have registers for one, and overlap anyway.
  static constexpr int ONE_OF_FOUR = !GROUPED ? 72 : WAYS > 1 ? 48 : 64;
  static constexpr int ONE_OF_THREE = TURNS > 1 ? 104 : STAYS ? 112 : 192;
  static constexpr int ONE_FROM = WARPGROUPS == 4 ? ONE_OF_FOUR : WARPGROUPS == 3 ? ONE_OF_THREE : 192;
  static constexpr int SETS = TOKENS >= ONE_FROM ? 1 : 2;
  static constexpr bool TIGHT = GROUPED && TOKENS > 48;  // no register is left for what comes last
  static constexpr int PITCH = 144;  // bytes of a token's 64 results, and 16 so that a warp's are in all banks
  // Results and what ways exchange have the ring; or, where the block fills it for the next tile meanwhile, room of
  // their own.
  static constexpr int STAGED = PARTS * TOKENS * PITCH, STAGED_AT = STAYS ? RING + KEPT : 0;
  static constexpr int EXCHANGE = STAGED_AT + STAGED, EXCHANGE_END = EXCHANGE + (WAYS - 1) * LINES * EXCHANGED;
  static constexpr int BEHIND = EXCHANGE_END > RING + KEPT ? EXCHANGE_END : RING + KEPT;
  // Whether the last of two blocks keeps its part: with few tokens a second trip to L2 costs more than the bytes.
  static constexpr bool PAIRS = !GROUPED && TOKENS > 32 && TOKENS < 256;
  static constexpr int AT_ONCE = GROUPED && QUADS > 4 ? 1 : QUADS > 2 ? 2 : 4;  // parts of a tile, read together
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
    start_w();
    start_x();
  }
  __device__ __forceinline__ void start_w() {
    w_tile = share.first;
    enter();
  }
  __device__ __forceinline__ void start_x() {
    x_tile = share.first;
    of_x.set(share.begin(x_tile), share.stop(x_tile));
    token = share.at(x_tile).token;
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
  // Waits for stages that are not wanted, and ends the first phase of all.
  __device__ __forceinline__ void drop(int asked) {
#pragma unroll 1
    for (int i = 0; i < Tiles::STAGES; ++i) {
      ptx::mbarrier_arrive(full + 8 * i);
      if (i >= asked) ptx::mbarrier_arrive(full + 8 * i);
      ptx::mbarrier_try_wait_parity(full + 8 * i, 0);
    }
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
