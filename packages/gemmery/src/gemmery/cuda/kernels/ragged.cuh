// Stages whose k is not all of one product, as where groups follow each other along k: what is outside becomes zeros,
// in A and in B, since a group's NaN times another's 0 would be NaN.
#pragma once
#include "ptx_hopper.cuh"

// The tiles of a kernel with such stages.
template <class Tiles> struct RaggedTiles : Tiles { static constexpr bool RAGGED = true; };

// The first `count` of a word's bytes, none or all for others.
__device__ __forceinline__ unsigned first_bytes(int count) {
  return count <= 0 ? 0 : count >= 4 ? ~0u : (1u << 8 * count) - 1;
}

// Clears what is not from `low` to `high` of a stage's k in SIDES rows or columns of an operand, as bring() of tma.cuh
// leaves them, by all threads that multiply.
template <class Tiles, bool K_MAJOR, int SIDES>
__device__ __forceinline__ void clear_outside(unsigned at, int low, int high) {
  constexpr int SIZE = int(sizeof(typename Tiles::T)), EACH = 16 / SIZE;
  constexpr int ROWS = K_MAJOR ? SIDES : (SIDES + 63) / 64 * 64;
#pragma unroll 1
  for (int chunk = threadIdx.x - 128; chunk < ROWS * 8; chunk += Tiles::WARPGROUPS * 128) {
    const unsigned there = at + chunk * 16;
    if constexpr (K_MAJOR) {
      const int k = (chunk / 8 ^ chunk) % 8 * EACH, from = (low - k) * SIZE, to = (high - k) * SIZE;
      if (from <= 0 && to >= 16) continue;
      unsigned x[4];
      ptx::ld_shared_v4(x, there);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] &= first_bytes(to - 4 * i) & ~first_bytes(from - 4 * i);
      ptx::st_shared_v4(there, {x[0], x[1], x[2], x[3]});
    } else {
      const int k = chunk / 8 % 64;  // a row of 128 bytes has one k
      if (k < low || k >= high) ptx::st_shared_v4(there, {0, 0, 0, 0});
    }
  }
}

// A consumer clears what is outside in a stage that has come; where nothing is inside, the producer has brought zeros.
template <class Tiles, class C> __device__ __forceinline__ void keep_inside(C& consumer, int stage) {
  const int low = consumer.low, high = consumer.high;
  if ((low > 0 || high < Tiles::BK) && high > 0) {
    const unsigned rows = (consumer.a & 0x3FFF) << 4;  // of the descriptor: where this warpgroup's rows begin
    const unsigned at = rows - Tiles::row_of(threadIdx.x / 128 - 1) * 128 + stage * Tiles::STAGE;
    clear_outside<Tiles, Tiles::A_K_MAJOR, Tiles::BM>(at, low, high);
    clear_outside<Tiles, Tiles::B_K_MAJOR, Tiles::BN>(at + Tiles::A_BYTES, low, high);
    ptx::fence_proxy_async();
    ptx::bar_sync(1, Tiles::WARPGROUPS * 128);
  }
  consumer.low -= Tiles::BK;
  consumer.high -= Tiles::BK;
}
