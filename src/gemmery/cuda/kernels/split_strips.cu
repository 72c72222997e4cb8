// Idea: where sides are adjacent and not k, the largest element of a side is known after all of k was read, and whole
// lines hold elements of many sides. So some blocks measure tiles, and others split those that were measured a while
// ago: what is read twice is in L2 the second time. Blocks start in the order of their numbers, and wait for lower ones
// alone. Twice the traffic of L2 costs less than a cluster that holds all k of 64 bytes of each line, and waits for it.
#include "split_parts.cu"

constexpr int STRIP_DEEP = 128;  // of k of a tile; SPLIT_THREADS threads have 8 of k of 4 sides each
// Tiles from one that is measured to one that is split: those that are being measured, and no more than L2 holds.
constexpr int STRIP_LAG = 300;

// A tile: 64 sides of a matrix by STRIP_DEEP of k. Four sides are adjacent, aligned, and inside or all of them outside.
struct StripTile {
  const Split& x;
  int matrix, side, k;

  // Four sides of one k, zeros beyond the ends; the LAST time, L2 need not keep them.
  template <bool LAST> __device__ __forceinline__ float4 four(const float* from, int side, int k) const {
    const float4* place = reinterpret_cast<const float4*>(from);
    if (side >= x.sides || k >= x.depth) return {};
    return LAST ? __ldcs(place) : *place;
  }
  __device__ __forceinline__ const float* at(int side, int k) const {
    return x.from + matrix * x.batch_step + side * x.side_step + k * x.k_step;
  }

  // Raises the largest magnitudes of its sides; a warp reads 64 adjacent elements of two k at a time.
  __device__ __forceinline__ void measure(unsigned* status, unsigned (*shared)[STRIP]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int own = side + lane % 16 * 4, first = k + warp * 2 + lane / 16;
    const float* from = at(own, first);
    float4 v[STRIP_DEEP / 16];
#pragma unroll
    for (int i = 0; i < STRIP_DEEP / 16; ++i) {
      v[i] = four<false>(from, own, first + 16 * i);
      from += 16 * x.k_step;
    }
    unsigned most[4] = {};
#pragma unroll
    for (int i = 0; i < STRIP_DEEP / 16; ++i) {
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
    if (threadIdx.x < STRIP && side + int(threadIdx.x) < x.sides) {
      unsigned all = 0;
#pragma unroll
      for (int w = 0; w < SPLIT_THREADS / 32; ++w) all = max(all, shared[w][threadIdx.x]);
      atomicMax(x.largest + 1LL * matrix * x.sides + side + threadIdx.x, all);
      if (!finite(all)) atomicOr(status, unsigned(NOT_FINITE));
      __threadfence();
    }
    __syncthreads();
  }

  // A warp has 16 sides by 64 of k, of which eight lanes write 128 adjacent bytes of a side.
  template <class Scheme> __device__ __forceinline__ void split() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int own = side + warp % 4 * 16 + lane % 4 * 4, first = k + warp / 4 * 64 + lane / 4 * 8;
    if (first >= x.depth) return;
    const float* from = at(own, first);
    float v[4][8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float4 sides = four<true>(from, own, first + e);
      from += x.k_step;
      v[0][e] = sides.x, v[1][e] = sides.y, v[2][e] = sides.z, v[3][e] = sides.w;
    }
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (own + s >= x.sides) break;
      const long long place = 1LL * matrix * x.sides + own + s;
      const Scale scale(Scheme::TOP - exponent_of(__ldcg(x.largest + place)));  // other blocks have written it
      split_eight<Scheme, true>(v[s], scale, x, place, first);
    }
  }
};

// The OPERANDS whose sides are adjacent. Those not ASKED_FOR were measured for another scheme.
template <class T, class Out, class Scheme, bool ASKED_FOR, int OPERANDS>
__global__ void __launch_bounds__(SPLIT_THREADS, 4) split_strips(const TmaProduct<T, Out> p) {
  __shared__ unsigned shared[SPLIT_THREADS / 32][STRIP];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
  if (!ASKED_FOR && *work.status != INEXACT) return;
  const int deep = (p.product.k + STRIP_DEEP - 1) / STRIP_DEEP;
  const int a = OPERANDS & 1 ? work.of[0].strips() : 0, strips = a + (OPERANDS & 2 ? work.of[1].strips() : 0);
  const int lag = min(max(STRIP_LAG, deep), strips * deep);
  const bool splits = !ASKED_FOR || blockIdx.x % 2;
  const int index = ASKED_FOR ? int(blockIdx.x / 2) - (splits ? lag : 0) : blockIdx.x, strip = index / deep;
  if (index < 0 || strip >= strips) return;
  Split x = work.of[0];
  if (strip >= a) x = work.of[1];
  const int within = strip < a ? strip : strip - a, each = (x.sides + STRIP - 1) / STRIP, matrix = within / each;
  const StripTile tile = {x, matrix, (within - matrix * each) * STRIP, (index - strip * deep) * STRIP_DEEP};
  if (!splits) {
    tile.measure(work.status, shared);
    if (threadIdx.x == 0) atomicAdd(work.measured + strip, 1u);
    return;
  }
  if (ASKED_FOR) {
    if (threadIdx.x == 0) {
      while (*static_cast<volatile unsigned*>(work.measured + strip) < unsigned(deep)) {}
      __threadfence();
    }
    __syncthreads();
  }
  tile.split<Scheme>();
}
