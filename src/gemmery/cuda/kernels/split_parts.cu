// Idea: operands are split once, before the product, and not by each block that reads them. A row whose elements of k
// are adjacent is read once: it stays in registers until its largest element is known, and leaves in parts. Other
// operands are read twice, for the largest elements and to be transposed in shared memory.
// The second half of the file says whether two parts will do; if not, three are made.
#include "load.cuh"
#include "split.cuh"

constexpr int SPLIT_THREADS = 256;

// x 2^s in two steps: s has more values than float32 has exponents.
struct Scale {
  float first, second;
  __device__ __forceinline__ explicit Scale(int s) : first(power_of_two(s / 2)), second(power_of_two(s - s / 2)) {}
  __device__ __forceinline__ float of(float x) const { return x * first * second; }
};

__device__ __forceinline__ unsigned rounded_pair(float low, float high, f16) {
  return ptx::cvt_rn_f16x2_f32(low, high);
}
__device__ __forceinline__ unsigned rounded_pair(float low, float high, bf16) {
  return ptx::cvt_rn_bf16x2_f32(low, high);
}

// Writes the parts of eight adjacent scaled elements; what is left after one is split further, exactly.
template <class Scheme>
__device__ __forceinline__ void write_parts(float (&x)[8], unsigned short* to, long long apart) {
  using E = typename Scheme::Element;
#pragma unroll
  for (int part = 0; part < Scheme::PARTS; ++part) {
    unsigned eight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      eight[i] = rounded_pair(x[2 * i], x[2 * i + 1], E{});
      if (part + 1 == Scheme::PARTS) continue;
      x[2 * i] = (x[2 * i] - widen<float>(E{(unsigned short)eight[i]})) * float(1 << Scheme::SHIFT);
      x[2 * i + 1] = (x[2 * i + 1] - widen<float>(E{(unsigned short)(eight[i] >> 16)})) * float(1 << Scheme::SHIFT);
    }
    ptx::st_global_v4(to + part * apart, eight[0], eight[1], eight[2], eight[3]);
  }
}

// Scales eight elements and keeps the weak ones of TwoParts in mind.
template <class Scheme>
__device__ __forceinline__ void split_eight(const float (&v)[8], const Scale& scale, const Split& x, long long side,
                                            int k) {
  float scaled[8];
  bool weak = false;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    scaled[e] = scale.of(v[e]);
    weak |= magnitude(scaled[e]) < WEAK && v[e] != 0;
  }
  if (Scheme::PARTS == 2 && weak) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (magnitude(scaled[e]) < WEAK && v[e] != 0) atomicMin(x.smallest + k + e, magnitude(scaled[e]));
    }
  }
  write_parts<Scheme>(scaled, x.parts + side * x.pitch() + k, x.count() * x.pitch());
}

// What later launches lower or raise.
template <class T, class Out> __global__ void split_begin(const TmaProduct<T, Out> p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
  const long long index = blockIdx.x * 1LL * SPLIT_THREADS + threadIdx.x;
  if (index == 0) *work.status = 0;
#pragma unroll
  for (int operand = 0; operand < 2; ++operand) {
    const Split& x = work.of[operand];
    if (index < x.depth) x.smallest[index] = WEAK;
    if (index < x.count()) x.largest[index] = 0;
  }
}

// The largest of WARPS warps, in all their threads.
template <int WARPS> __device__ __forceinline__ unsigned largest_of(unsigned x, unsigned* shared) {
  x = __reduce_max_sync(~0u, x);
  if constexpr (WARPS > 1) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = __reduce_max_sync(~0u, shared[threadIdx.x % WARPS]);
    __syncthreads();
  }
  return x;
}

// A row of at most WARPS x EIGHTS x 256 adjacent elements, by WARPS warps.
template <class Scheme, int WARPS, int EIGHTS>
__device__ __forceinline__ void split_row(const Split& x, long long side, unsigned* status, unsigned* shared) {
  const float* from = x.row(side);
  const int first = threadIdx.x % (WARPS * 32) * 8;
  const bool aligned = reinterpret_cast<unsigned long long>(from) % 16 == 0;
  float v[EIGHTS][8];
#pragma unroll
  for (int i = 0; i < EIGHTS; ++i) {
    const int k = first + i * WARPS * 256;
    if (aligned && k + 8 <= x.depth) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto four = reinterpret_cast<const Chunk<float, 4>*>(from + k)[half];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[i][4 * half + e] = four.of[e];
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) v[i][e] = k + e < x.depth ? from[k + e] : 0;
    }
  }
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) most = max(most, magnitude(v[i][e]));
  }
  most = largest_of<WARPS>(most, shared);
  if (first == 0) {
    x.largest[side] = most;
    if (!finite(most)) atomicOr(status, unsigned(NOT_FINITE));
  }
  const Scale scale(Scheme::TOP - exponent_of(most));
#pragma unroll
  for (int i = 0; i < EIGHTS; ++i) {
    const int k = first + i * WARPS * 256;
    if (k < x.depth) split_eight<Scheme>(v[i], scale, x, side, k);
  }
}

// The rows of the OPERANDS (bit 0: A, bit 1: B) whose elements of k are adjacent. With three parts, only where two
// will not do; unless they are ASKED for.
template <class T, class Out, class Scheme, bool ASKED_FOR, int OPERANDS, int WARPS, int EIGHTS>
__global__ void __launch_bounds__(SPLIT_THREADS, EIGHTS == 8 ? 2 : 4) split_rows(const TmaProduct<T, Out> p) {
  __shared__ unsigned shared[8];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
  if (!ASKED_FOR && *work.status != INEXACT) return;
  const long long a = OPERANDS & 1 ? work.of[0].count() : 0, rows = a + (OPERANDS & 2 ? work.of[1].count() : 0);
  constexpr int AT_A_TIME = SPLIT_THREADS / 32 / WARPS;
  for (long long row = blockIdx.x * 1LL * AT_A_TIME + threadIdx.x / (32 * WARPS); row < rows;
       row += 1LL * gridDim.x * AT_A_TIME) {
    if (row < a) {
      split_row<Scheme, WARPS, EIGHTS>(work.of[0], row, work.status, shared);
    } else {
      split_row<Scheme, WARPS, EIGHTS>(work.of[1], row - a, work.status, shared);
    }
  }
}

// ---- operands whose elements of k are not adjacent, or too many for registers: by tiles of 64 sides by 64 of k ----

// A thread's elements of a tile: 16, in steps of 4 sides, or of 4 of k where sides are adjacent.
struct TilePlace {
  long long matrix;
  int side, k;
  bool by_k;
  __device__ __forceinline__ TilePlace(const Split& x, long long index) {
    const int across = (x.depth + 63) / 64, down = (x.sides + 63) / 64;
    by_k = llabs(x.k_step) < llabs(x.side_step);
    k = int(index % across) * 64;
    side = int(index / across % down) * 64;
    matrix = index / across / down;
  }
  static __device__ __forceinline__ long long count(const Split& x) {
    return (x.depth + 63) / 64 * 1LL * ((x.sides + 63) / 64) * x.matrices;
  }
  __device__ __forceinline__ int inner() const { return threadIdx.x % 64; }
  __device__ __forceinline__ int outer(int i) const { return threadIdx.x / 64 + 4 * i; }
  __device__ __forceinline__ float load(const Split& x, int i) const {
    const int s = side + (by_k ? outer(i) : inner()), kk = k + (by_k ? inner() : outer(i));
    return s < x.sides && kk < x.depth ? x.from[matrix * x.batch_step + s * x.side_step + kk * x.k_step] : 0;
  }
};

// The largest elements of all sides.
template <class T, class Out, int OPERANDS>
__global__ void __launch_bounds__(SPLIT_THREADS, 6) split_largest(const TmaProduct<T, Out> p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
#pragma unroll
  for (int operand = 0; operand < 2; ++operand) {
    if (!(OPERANDS >> operand & 1)) continue;
    const Split& x = work.of[operand];
#pragma unroll 1
    for (long long index = blockIdx.x; index < TilePlace::count(x); index += gridDim.x) {
      const TilePlace at(x, index);
      unsigned most[16], all = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) most[i] = magnitude(at.load(x, i));
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (at.by_k) most[i] = __reduce_max_sync(~0u, most[i]);
        all = max(all, most[i]);
      }
      unsigned* to = x.largest + at.matrix * x.sides + at.side;
      if (!at.by_k) {
        if (at.side + at.inner() < x.sides && all) atomicMax(to + at.inner(), all);
      } else if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (at.side + at.outer(i) < x.sides && most[i]) atomicMax(to + at.outer(i), most[i]);
        }
      }
      if (!finite(all)) atomicOr(work.status, unsigned(NOT_FINITE));
    }
  }
}

template <class T, class Out, class Scheme, bool ASKED_FOR, int OPERANDS>
__global__ void __launch_bounds__(SPLIT_THREADS, 4) split_tiles(const TmaProduct<T, Out> p) {
  __shared__ float tile[64][65];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
  if (!ASKED_FOR && *work.status != INEXACT) return;
#pragma unroll
  for (int operand = 0; operand < 2; ++operand) {
    if (!(OPERANDS >> operand & 1)) continue;
    const Split& x = work.of[operand];
#pragma unroll 1
    for (long long index = blockIdx.x; index < TilePlace::count(x); index += gridDim.x) {
      const TilePlace at(x, index);
      float v[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] = at.load(x, i);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (at.by_k) tile[at.outer(i)][at.inner()] = v[i]; else tile[at.inner()][at.outer(i)] = v[i];
      }
      // Pieces of 8 of k: those of 32 sides, then those of the others. What scales them comes with the tile.
      const int k = threadIdx.x % 8 * 8;
      const long long row = at.matrix * x.sides + at.side + threadIdx.x / 8;
      unsigned most[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        most[i] = at.side + int(threadIdx.x) / 8 + 32 * i < x.sides ? x.largest[row + 32 * i] : 0;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int side = threadIdx.x / 8 + 32 * i;
        if (at.side + side >= x.sides || at.k + k >= x.depth) continue;
        float eight[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) eight[e] = tile[side][k + e];
        split_eight<Scheme>(eight, Scale(Scheme::TOP - exponent_of(most[i])), x, row + 32 * i, at.k + k);
      }
      __syncthreads();
    }
  }
}

// Whether TwoParts keep the bound of float32 for each element: the smallest ones of each k tell.
template <class T, class Out> __global__ void split_guard(const TmaProduct<T, Out> p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
  const int k = blockIdx.x * SPLIT_THREADS + threadIdx.x;
  if (k >= p.product.k) return;
  const double a = __uint_as_float(work.of[0].smallest[k]), b = __uint_as_float(work.of[1].smallest[k]);
  const double depth = p.product.k;  // a b and what it is compared with must not be rounded to float32
  const bool enough = a >= 0x1p-9 / depth && b >= 0x1p-9 / depth && a * b >= 0x1p-23 / depth;
  if (!enough) atomicOr(work.status, unsigned(INEXACT));
}
