// Idea: operands are split once, before the product, and not by each block that reads them. A row whose elements of k
// are adjacent stays in a block's registers until its largest element is known, and leaves in parts. Of other operands
// the blocks of a cluster share all k of a few sides, and tell each other their largest elements. Either way an operand
// is read once.
#include "cluster.cuh"
#include "load.cuh"
#include "split.cuh"

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

// Writes the parts of eight adjacent scaled elements; what is left after one is split further, exactly. L2 need not
// keep what STREAMS.
template <class Scheme, bool STREAMS>
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
    if constexpr (STREAMS) {
      __stcs(reinterpret_cast<uint4*>(to + part * apart), make_uint4(eight[0], eight[1], eight[2], eight[3]));
    } else {
      ptx::st_global_v4(to + part * apart, eight[0], eight[1], eight[2], eight[3]);
    }
  }
}

// Scales eight elements and keeps the weak ones of TwoParts in mind.
template <class Scheme, bool STREAMS = false>
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
  write_parts<Scheme, STREAMS>(scaled, x.parts + side * x.pitch() + k, x.count() * x.pitch());
}

// What later launches lower or raise. A launch that follows this one, or split_rows, finds the operands as they are to
// be read, before it waits: this one has waited for all that came before.
template <class T, class Out> __global__ void split_begin(const TmaProduct<T, Out> p) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const SplitWork work(p.product);
  const long long index = blockIdx.x * 1LL * SPLIT_THREADS + threadIdx.x;
  if (index == 0) *work.status = 0;
  if (index < work.strips_of(p.product)) work.measured[index] = 0;
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
  __shared__ Split of[2];  // registers have no room for them
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const SplitWork work(p.product);
  if (!ASKED_FOR && *work.status != INEXACT) return;
  if (threadIdx.x < 2) of[threadIdx.x] = threadIdx.x == 0 ? work.of[0] : work.of[1];
  __syncthreads();
  const long long a = OPERANDS & 1 ? of[0].count() : 0, rows = a + (OPERANDS & 2 ? of[1].count() : 0);
  constexpr int AT_A_TIME = SPLIT_THREADS / 32 / WARPS;
  for (long long row = blockIdx.x * 1LL * AT_A_TIME + threadIdx.x / (32 * WARPS); row < rows;
       row += 1LL * gridDim.x * AT_A_TIME) {
    const int operand = row < a ? 0 : 1;
    split_row<Scheme, WARPS, EIGHTS>(of[operand], operand ? row - a : row, work.status, shared);
  }
}

// ---- operands whose elements of k are not adjacent, or too many for registers: by slabs of a few sides ----

// All k of 4 ACROSS sides, by the threads of BLOCKS blocks. A thread has 8 of k of 4 sides in registers, and reads what
// is beyond them twice.
template <int BLOCKS, int ACROSS, int WARPS, bool WHOLE> struct Slab {
  static constexpr int SIDES = 4 * ACROSS;
  static constexpr int DEEP = 32 / ACROSS * 8, STEP = BLOCKS * WARPS * DEEP;  // of k: of a warp, of all
  using Clustered = Cluster<BLOCKS, 1>;
  struct Largest {
    unsigned of_warps[WARPS][SIDES], of_blocks[BLOCKS][SIDES];
  };

  const Split& x;
  long long matrix;
  int side, first;  // this thread's first side, and its first k

  static __device__ __forceinline__ long long count(const Split& x) {
    return 1LL * x.matrices * ((x.sides + SIDES - 1) / SIDES);
  }

  __device__ __forceinline__ Slab(const Split& x, long long index, int rank) : x(x) {
    const int down = (x.sides + SIDES - 1) / SIDES, lane = threadIdx.x % 32;
    matrix = index / down;
    side = int(index % down) * SIDES + lane % ACROSS * 4;
    first = (rank * WARPS + threadIdx.x / 32) * DEEP + lane / ACROSS * 8;
  }

  // Zeros beyond the ends.
  __device__ __forceinline__ void load(float (&v)[4][8], int k) const {
    const float* from = x.from + matrix * x.batch_step + side * x.side_step + k * x.k_step;
    if constexpr (WHOLE) {  // what is read is inside, or all of it outside
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        Chunk<float, 4> four = {};
        if (side < x.sides && k + e < x.depth) four = *reinterpret_cast<const Chunk<float, 4>*>(from);
        from += x.k_step;
#pragma unroll
        for (int s = 0; s < 4; ++s) v[s][e] = four.of[s];
      }
    } else {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const float* at = from + s * x.side_step;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          v[s][e] = side + s < x.sides && k + e < x.depth ? *at : 0;
          at += x.k_step;
        }
      }
    }
  }

  // The largest magnitude of each of this thread's sides, in all threads of the cluster.
  __device__ __forceinline__ void share(unsigned (&most)[4], Largest& shared, int rank) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int apart = ACROSS; apart < 32; apart *= 2) most[s] = max(most[s], __shfl_xor_sync(~0u, most[s], apart));
      if (lane < ACROSS) shared.of_warps[warp][4 * lane + s] = most[s];
    }
    __syncthreads();
    if (BLOCKS > 1) ptx::barrier_cluster_wait();  // the others have begun: their shared memory can be written
    if (threadIdx.x < BLOCKS * ACROSS) {
      const int place = threadIdx.x % ACROSS * 4, to = threadIdx.x / ACROSS;
      unsigned of_block[4] = {};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
#pragma unroll
        for (int s = 0; s < 4; ++s) of_block[s] = max(of_block[s], shared.of_warps[w][place + s]);
      }
      const unsigned there = ptx::shared_address(&shared.of_blocks[rank][place]);
      ptx::st_shared_cluster_v4(ptx::mapa(there, to), int(of_block[0]), int(of_block[1]), int(of_block[2]),
                                int(of_block[3]));
    }
    Clustered::sync();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int s = 0; s < 4; ++s) most[s] = max(most[s], shared.of_blocks[b][lane % ACROSS * 4 + s]);
    }
  }

  // What is beyond the first STEP of k is read first, so that the first stays in registers.
  template <class Scheme>
  __device__ __forceinline__ void split(unsigned* status, Largest& shared, int rank) const {
    unsigned most[4] = {};
    float v[4][8];
#pragma unroll 1
    for (int i = (x.depth - 1) / STEP; i >= 0; --i) {
      load(v, first + i * STEP);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int e = 0; e < 8; ++e) most[s] = max(most[s], magnitude(v[s][e]));
      }
    }
    share(most, shared, rank);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (rank == 0 && threadIdx.x < ACROSS && side + s < x.sides) {
        x.largest[matrix * x.sides + side + s] = most[s];
        if (!finite(most[s])) atomicOr(status, unsigned(NOT_FINITE));
      }
    }
#pragma unroll 1
    for (int k = first; k < x.depth; k += STEP) {
      if (k > first) load(v, k);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        if (side + s >= x.sides) break;
        const Scale scale(Scheme::TOP - exponent_of(most[s]));
        split_eight<Scheme>(v[s], scale, x, matrix * x.sides + side + s, k);
      }
    }
  }
};

// The OPERANDS of which no row stays in a block's registers. WHOLE: four sides are adjacent, aligned, and inside.
template <class T, class Out, class Scheme, bool ASKED_FOR, int OPERANDS, bool WHOLE, int BLOCKS, int ACROSS,
          int WARPS>
__global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(32 * WARPS, (WHOLE ? 24 : 16) / WARPS)
    split_slabs(const TmaProduct<T, Out> p) {
  using S = Slab<BLOCKS, ACROSS, WARPS, WHOLE>;
  __shared__ __align__(16) typename S::Largest shared;
  __shared__ Split of[2];  // registers have no room for them
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
  if (!ASKED_FOR && *work.status != INEXACT) return;
  if (threadIdx.x < 2) of[threadIdx.x] = threadIdx.x == 0 ? work.of[0] : work.of[1];
  __syncthreads();
  const long long a = OPERANDS & 1 ? S::count(of[0]) : 0, slabs = a + (OPERANDS & 2 ? S::count(of[1]) : 0);
  const long long index = blockIdx.x / BLOCKS;
  if (index < slabs) {  // of an operand that all products share there are fewer
    if (BLOCKS > 1) ptx::barrier_cluster_arrive();
    const int rank = blockIdx.x % BLOCKS;
    S(of[index < a ? 0 : 1], index < a ? index : index - a, rank).template split<Scheme>(work.status, shared, rank);
  }
}

// The guard alone, where nobody multiplies.
template <class T, class Out> __global__ void split_guard(const TmaProduct<T, Out> p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  guard(SplitWork(p.product), p.product);
}
