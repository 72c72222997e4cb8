// Idea: where sides are adjacent and not k, the largest element of a side is known after all of k was read, and whole
// lines hold elements of many sides. So some blocks measure tiles, and others split those that were measured a while
// ago: what is read twice is in L2 the second time. Blocks start in the order of their numbers, and wait for lower ones
// alone. They ask for a tile before they wait: only its scales depend on other blocks. L2 is the busiest, so whole
// lines are read, and a tile is turned in shared memory. That costs less than a cluster that holds all k of 64 bytes of
// each line, and waits for it.
// Parent: split_slabs of split_parts.cu, in clusters, which stays for 1024 of k and less.
// Measured, no k adjacent, two parts: 0.82 of the bandwidth of a copy at n = 4096 on an H100, 0.90 at 8192 and 16384;
// on an H200, whose memory is faster but whose L2 is not, 0.77, 0.83 and 0.82.
#include "split_parts.cu"

// A tile: 64 sides of a matrix by STRIP_DEEP of k. Four sides are adjacent, aligned, and inside or all of them outside.
struct StripTile {
  const Split& x;
  int matrix, side, k;

  // Eight times four sides: a warp reads 64 adjacent elements of two k at a time. Zeros beyond the ends. The LAST time,
  // L2 need not keep them. The first time, the launch before may not have ended: L1 may hold what was there earlier, so
  // it is bypassed.
  template <bool LAST> __device__ __forceinline__ void load(float4 (&v)[8]) const {
    const int own = side + threadIdx.x % 16 * 4, first = k + threadIdx.x / 16;
    const float* from = x.from + matrix * x.batch_step + own * x.side_step + first * x.k_step;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = {};
      if (own < x.sides && first + 16 * i < x.depth) {
        const float4* place = reinterpret_cast<const float4*>(from);
        v[i] = LAST ? __ldcs(place) : __ldcg(place);
      }
      from += 16 * x.k_step;
    }
  }

  // Raises the largest magnitudes of its sides. The operands are final already, see split_begin.
  __device__ __forceinline__ void measure(unsigned* status, unsigned* measured, unsigned (*shared)[STRIP]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float4 v[8];
    load<false>(v);
    ptx::griddepcontrol_wait();
    unsigned most[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      most[0] = max(most[0], magnitude(v[i].x));
      most[1] = max(most[1], magnitude(v[i].y));
      most[2] = max(most[2], magnitude(v[i].z));
      most[3] = max(most[3], magnitude(v[i].w));
    }
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      most[s] = max(most[s], __shfl_xor_sync(~0u, most[s], 16));
      if (lane < 16) shared[warp][lane * 4 + s] = most[s];
    }
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int of = lane; of < STRIP; of += 32) {
      unsigned all = 0;
#pragma unroll
      for (int w = 0; w < SPLIT_THREADS / 32; ++w) all = max(all, shared[w][of]);
      if (side + of >= x.sides) continue;
      atomicMax(x.largest + 1LL * matrix * x.sides + side + of, all);
      if (!finite(all)) atomicOr(status, unsigned(NOT_FINITE));
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(measured, 1u);
  }

  // Where shared memory has four sides of a k. A warp reads those of a k and of the one 8 further together: they change
  // places in turn, so that no two are in one bank.
  static __device__ __forceinline__ int place(int k, int four) { return k * (STRIP / 4) + (four ^ k / 8 % 2 * 4); }

  // Turns the tile in shared memory: a warp then has 16 sides by 64 of k, of which eight lanes write 128 adjacent bytes
  // of a side. It asks for the tile before it calls `wait`, which returns when the largest of its sides are known.
  template <class Scheme, class Wait>
  __device__ __forceinline__ void split(float4* turned, const Wait& wait) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, four = warp % 4 * 4 + lane % 4;
    const int within = warp / 4 * 64 + lane / 4 * 8, own = side + four * 4, first = k + within;
    const bool inside = own < x.sides && first < x.depth;
    const long long at = 1LL * matrix * x.sides + own;
    float4 v[8];
    load<true>(v);
    wait();
    uint4 largest = {};
    if (inside) largest = __ldcg(reinterpret_cast<const uint4*>(x.largest + at));  // other blocks have written it
#pragma unroll
    for (int i = 0; i < 8; ++i) turned[place(threadIdx.x / 16 + 16 * i, threadIdx.x % 16)] = v[i];
    __syncthreads();
    if (!inside) return;
    const unsigned of_side[4] = {largest.x, largest.y, largest.z, largest.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = turned[place(within + e, four)];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      float eight[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) eight[e] = s == 0 ? v[e].x : s == 1 ? v[e].y : s == 2 ? v[e].z : v[e].w;
      split_eight<Scheme, true>(eight, Scale(Scheme::TOP - exponent_of(of_side[s])), x, at + s, first);
    }
  }
};

// The OPERANDS whose sides are adjacent. Those not ASKED_FOR were measured for another scheme. There are LAG tiles from
// one that is measured to one that is split: those that are being measured, and no more than L2 holds.
template <class T, class Out, class Scheme, bool ASKED_FOR, int OPERANDS, int LAG>
__global__ void __launch_bounds__(SPLIT_THREADS, 4) split_strips(const TmaProduct<T, Out> p) {
  __shared__ union {
    unsigned largest[SPLIT_THREADS / 32][STRIP];  // of each warp
    float4 turned[STRIP_DEEP * STRIP / 4];
  } shared;
  ptx::griddepcontrol_launch_dependents();
  const bool splits = !ASKED_FOR || blockIdx.x % 2;
  if (splits) ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
  if (!ASKED_FOR && *work.status != INEXACT) return;
  const int deep = (p.product.k + STRIP_DEEP - 1) / STRIP_DEEP;
  const int a = OPERANDS & 1 ? work.of[0].strips() : 0, strips = a + (OPERANDS & 2 ? work.of[1].strips() : 0);
  const int lag = min(max(LAG, deep), strips * deep);
  const int index = ASKED_FOR ? int(blockIdx.x / 2) - (splits ? lag : 0) : blockIdx.x, strip = index / deep;
  if (index < 0 || strip >= strips) return;
  Split x = work.of[0];
  if (strip >= a) x = work.of[1];
  const int within = strip < a ? strip : strip - a, each = (x.sides + STRIP - 1) / STRIP, matrix = within / each;
  const StripTile tile = {x, matrix, (within - matrix * each) * STRIP, (index - strip * deep) * STRIP_DEEP};
  if (!splits) {
    tile.measure(work.status, work.measured + strip, shared.largest);
    return;
  }
  tile.split<Scheme>(shared.turned, [&] {
    if (!ASKED_FOR) return;
    if (threadIdx.x == 0) {
      while (*static_cast<volatile unsigned*>(work.measured + strip) < unsigned(deep)) {}
      __threadfence();
    }
    __syncthreads();
  });
}
