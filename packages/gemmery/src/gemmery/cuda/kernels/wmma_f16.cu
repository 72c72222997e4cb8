// Idea: wmma_f64 in half precision and in tf32: a fragment is 16 x 16 x 16, in tf32 16 x 16 x 8, with 8 to 16 times
// the work per instruction. Products are exact, sums are f32. tf32 elements are rounded before they are stored.
// Parent: wmma_f64. Multiplying a tile takes less time than loading the next one, so two blocks in turn gain more than
// reading fragments of the next tile ahead.
// Measured on an H200 at n = 4096: 0.31 of cuBLAS's speed in f16, less when reading ahead and in tf32.
#include "wmma.cuh"

// A float rounded to tf32 on construction: the tensor cores would truncate it.
struct Rounded {
  float value;
  Rounded() = default;
  __device__ __forceinline__ Rounded(float x) : value(__uint_as_float(ptx::cvt_rna_tf32_f32(__float_as_uint(x)))) {}
};

// Elements are stored in shared memory unchanged.
template <> __device__ __forceinline__ f16 widen<f16>(f16 x) { return x; }
template <> __device__ __forceinline__ bf16 widen<bf16>(bf16 x) { return x; }

template <> struct WmmaFragment<f16> {
  using Stored = f16;
  using Registers = unsigned[8];
  using Sums = float[8];
  static constexpr int M = 16, N = 16, K = 16;
  struct Shape { static constexpr const char text[] = "m16n16k16"; };
  struct Type { static constexpr const char text[] = "f16"; };
  struct Types { static constexpr const char text[] = "m16n16k16.f32.f32"; };
};
template <> struct WmmaFragment<bf16> {
  using Stored = bf16;
  using Registers = unsigned[4];
  using Sums = float[8];
  static constexpr int M = 16, N = 16, K = 16;
  struct Shape { static constexpr const char text[] = "m16n16k16"; };
  struct Type { static constexpr const char text[] = "bf16"; };
  struct Types { static constexpr const char text[] = "m16n16k16.f32.bf16.bf16.f32"; };
};
template <> struct WmmaFragment<tf32> {
  using Stored = Rounded;
  using Registers = unsigned[4];
  using Sums = float[8];
  static constexpr int M = 16, N = 16, K = 8;
  struct Shape { static constexpr const char text[] = "m16n16k8"; };
  struct Type { static constexpr const char text[] = "tf32"; };
  struct Types { static constexpr const char text[] = "m16n16k8.f32.tf32.tf32.f32"; };
};

template <class T, class Out, int EPILOGUE, class Access, class Tiles, int BLOCKS>
__global__ void __launch_bounds__(Tiles::THREADS, BLOCKS) wmma_f16(const Product<T, Out> p) {
  WmmaBlock<T, Access, Tiles> block(p);
  auto *now = block.begin(), *next = now + block.SIZE;  // tiles of A and B: to read, and to fill
  for (int k0 = 0; k0 < p.k; k0 += Tiles::BK) {
    block.fetch();
    block.read(now, 0);
#pragma unroll
    for (int step = 0; step < block.STEPS; ++step) {
      if (step + 1 < block.STEPS) block.read(now, step + 1);
      block.multiply(step);
    }
    block.put(now, next);
  }
  block.template store<EPILOGUE>(p);
}
