// Idea: float64 by tensor cores for int8. Operands are scaled to integers, whose residues modulo COUNT coprime numbers
// fit bytes; products of residues and their sums are exact. This launch puts each element together from its residues,
// up to 118 bits, by the Chinese remainder theorem, and rounds it. Ozaki, Uchino and Imamura, 2025.
// Parent: mma_f64, whose tensor cores multiply float64 itself, which is thirty times slower.
// Measured on an H200: 73 TFLOP/s at n = 4096 and 83 at 8192, 1.31 and 1.46 of cuBLAS; with 14 moduli 75 and 89.
#include "epilogue.cuh"
#include "load.cuh"
#include "ozaki.cuh"

// The sum of residues times w, less the multiple of M that leaves it between -M / 2 and M / 2. Sums of limbs are below
// 2^52, and exact; so is the difference of each.
template <int COUNT> struct Together {
  double sums[3] = {};

  template <int I> __device__ __forceinline__ void add(unsigned residue) {
    constexpr Remainders<COUNT> OF;
    constexpr double W[3] = {double(OF.w[I].of[0]), double(OF.w[I].of[1]), double(OF.w[I].of[2])};
    const double byte = __dadd_rn(__hiloint2double(0x43300000, int(residue)), -0x1p52);  // faster than a conversion
#pragma unroll
    for (int limb = 0; limb < 3; ++limb) sums[limb] = __fma_rn(byte, W[limb], sums[limb]);
  }

  // The two high limbs together are a sum and what its rounding lost; the lost part joins the low limb.
  __device__ __forceinline__ double value() const {
    constexpr Remainders<COUNT> OF;
    constexpr double M[3] = {double(OF.all.of[0]), double(OF.all.of[1]), double(OF.all.of[2])};
    constexpr double SHARE = 1 / (M[2] + M[1] * 0x1p-40), WHOLE = 0x1.8p52;
    const double multiple = __dadd_rn(__fma_rn(sums[2], SHARE, WHOLE), -WHOLE);
    double left[3];
#pragma unroll
    for (int limb = 0; limb < 3; ++limb) left[limb] = __fma_rn(multiple, -M[limb], sums[limb]);
    const double high = __fma_rn(left[2], 0x1p40, left[1]);
    const double lost = __dadd_rn(__fma_rn(left[2], 0x1p40, -high), left[1]);
    return __fma_rn(high, 0x1p40, __fma_rn(lost, 0x1p40, left[0]));
  }
};

template <int COUNT, int I = 0>
__device__ __forceinline__ void add_residues(Together<COUNT> (&of)[4], const unsigned (&words)[COUNT]) {
  if constexpr (I < COUNT) {
#pragma unroll
    for (int e = 0; e < 4; ++e) of[e].template add<I>(words[I] >> 8 * e & 255);
    add_residues<COUNT, I + 1>(of, words);
  }
}

// Takes four sums at a time: two columns of two rows that are 8 apart.
template <class T, class Out, int EPILOGUE, int COUNT, int BM, int BN>
__global__ void __launch_bounds__(256, EPILOGUE & ACTIVATION ? 2 : 3)
    ozaki_int8(const __grid_constant__ TmaProduct<T, Out> tma) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const Product<T, Out>& p = tma.product;
  const OzakiWork<COUNT, BM, BN> work(p);
  if (*work.status) return;
  constexpr unsigned WORDS = BM * BN / 4, THREADS = BM * 2;  // of a tile; of those that multiplied it
  const unsigned across = (p.n + BN - 1) / BN, down = (p.m + BM - 1) / BM;
  const long long all = 1LL * across * down * p.batch * WORDS;
  const bool pairs = p.c_col == 1 && (reinterpret_cast<unsigned long long>(p.c) / 8 | p.c_row | p.c_batch) % 2 == 0;
#pragma unroll 1
  for (long long index = blockIdx.x * 256LL + threadIdx.x; index < all; index += gridDim.x * 256LL) {
    const unsigned tile = unsigned(index / WORDS), word = unsigned(index % WORDS);
    const unsigned thread = word / 4 % THREADS, lane = thread % 32;
    const int batch = int(tile / across / down);
    const int row = int(tile / across % down * BM + thread / 32 * 16 + lane / 4);
    const int column = int(tile % across * BN + (word / 4 / THREADS * 4 + word % 4) * 8 + lane % 4 * 2);
    if (row >= p.m || column >= p.n) continue;
    const unsigned* from = reinterpret_cast<const unsigned*>(work.sums) + 1LL * tile * COUNT * WORDS + word;
    unsigned words[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) words[i] = from[i * WORDS];
    Together<COUNT> of[4];
    add_residues<COUNT>(of, words);
    const int* of_rows = work.of[0].exponents + (p.a_batch ? batch : 0) * 1LL * p.m;
    const int* of_columns = work.of[1].exponents + (p.b_batch ? batch : 0) * 1LL * p.n;
    const bool wide = column + 1 < p.n;
    const int t[2] = {of_columns[column], of_columns[column + wide]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half;
      if (i >= p.m) continue;
      double values[2];
      Out* c = p.c_at(batch, i, column);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int e = -of_rows[i] - t[x];
        const double value = of[2 * half + x].value() * power_of_two_f64(e / 2) * power_of_two_f64(e - e / 2);
        if (x == 0 || wide) values[x] = finished<EPILOGUE>(p, c + x * p.c_col, i, column + x, value);
      }
      if (pairs && wide) {
        *reinterpret_cast<Chunk<Out, 2>*>(c) = {values[0], values[1]};
      } else {
        c[0] = values[0];
        if (wide) c[p.c_col] = values[1];
      }
    }
  }
}
