// A producer of whole warps, for operands whose rows straddle lines of L2: a tensor copy of 128 bytes of such a row
// touches two of them, and L2 takes up to 2.6 times as long. Threads ask for each line once, and write its chunks of 16
// bytes where tensor copies would have: a line has the end of one stage and the beginning of the next.
#pragma once
#include "pipeline.cuh"
#include "wgmma.cuh"

// Of SIDES rows of A or columns of B, those of a thread: every sixteenth, of each a chunk of a line.
template <int SIDES> struct Lines {
  const char* at;   // its chunk of the line with k = 0, of the first row
  long long apart;  // bytes
  int rows;         // from its first one to the edge
  int chunk;        // along k; below 0: of line l, it is in the stage before the l-th
  unsigned to;      // where it lies in a stage

  template <class T>
  __device__ __forceinline__ Lines(const T* side, long long pitch, int sides, unsigned to)
      : apart(16 * pitch * int(sizeof(T))) {
    const int row = threadIdx.x / 8, lane = threadIdx.x % 8;
    const char* from = reinterpret_cast<const char*>(side + row * pitch);
    chunk = lane - int(reinterpret_cast<unsigned long long>(from) / 16 % 8);  // the same 16 rows further
    at = from + chunk * 16;
    rows = sides - row;
    this->to = to + row * 128 + ((chunk ^ row) & 7) * 16;
  }

  // Chunks from k = `depth` on, and rows beyond the edge, become zeros; those that are not of the tile's stages stay.
  __device__ __forceinline__ void bring(int line, int first, int last, int depth, unsigned before, unsigned now) const {
    const int k = chunk + 8 * line;
    if (k < 8 * first || k >= 8 * last) return;
    const char* from = at + line * 128LL;
    unsigned there = (chunk < 0 ? before : now) + to;
#pragma unroll
    for (int i = 0; i < (SIDES + 15) / 16; ++i) {
      if (SIDES % 16 == 0 || i < SIDES / 16 || threadIdx.x / 8 < SIDES % 16) {
        ptx::cp_async<16>(there + i * 2048, from, k < depth && i * 16 < rows);
      }
      from += apart;
    }
  }
};

template <class Tiles> struct LineProducer {
  // Stages that are asked for and not handed over. A consumer hands a stage back when the next one has come.
  static constexpr int AHEAD = Tiles::STAGES - 2;
  static_assert(Tiles::A_K_MAJOR && Tiles::B_K_MAJOR && Tiles::CM * Tiles::CN == 1 && !Tiles::APART, "whole rows of k");
  Ring<Tiles::STAGES> now, whole;
  unsigned ring, full, empty, last;
  int ahead = 0;

  template <class Pipe>
  __device__ __forceinline__ LineProducer(const Pipe& pipe)
      : ring(pipe.ring), full(pipe.full), empty(pipe.empty), last(pipe.ring) {}

  // A stage has come when the line after its own has.
  template <int PENDING> __device__ __forceinline__ void hand_over() {
    ptx::cp_async_wait_group<PENDING>();
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(full + 8 * whole.stage);
    whole.next();
    --ahead;
  }

  // All stages but those whose last line the next tile's first one comes with, or finish().
  template <class P> __device__ __forceinline__ void bring_tile(const P& p, Tile tile, int first, int steps) {
    const auto& x = p.product;
    const Lines<Tiles::BM> a(x.a_at(tile.batch, tile.row, 0), x.a_row, x.m - tile.row, 0);
    const Lines<Tiles::BN> b(x.b_at(tile.batch, 0, tile.col), x.b_col, x.n - tile.col, Tiles::A_BYTES);
    const int end = first + steps, depth = x.k * int(sizeof(typename Tiles::T)) / 16;
#pragma unroll 1
    for (int line = first; line <= end; ++line) {
      const unsigned to = ring + now.stage * Tiles::STAGE;
      if (line < end) ptx::mbarrier_try_wait_parity(empty + 8 * now.stage, now.parity ^ 1);
      a.bring(line, first, end, depth, last, to);
      b.bring(line, first, end, depth, last, to);
      if (line == end) break;
      ptx::cp_async_commit_group();
      if (++ahead > AHEAD) hand_over<AHEAD - 1>();
      last = to;
      now.next();
    }
  }

  template <int LEFT = AHEAD> __device__ __forceinline__ void finish() {
    if constexpr (LEFT == AHEAD) ptx::cp_async_commit_group();
    if constexpr (LEFT > 0) {
      if (ahead >= LEFT) hand_over<LEFT - 1>();
      finish<LEFT - 1>();
    }
  }
};
