// Idea: a matrix of 8 or 4 bits an element becomes one of T; a thread writes 16 bytes at a time, and reads the 8 or 4
// they come from. An element is a level times the factor of its GROUP, rounded once.
// Not a product: products of more rows than gemv_quantized takes read the matrix that this writes to B's workspace.
#include "load.cuh"

// 8 levels as they are packed.
template <int BITS> struct alignas(BITS) Levels {
  unsigned words[BITS / 4];
  __device__ __forceinline__ float of(int i) const {
    if constexpr (BITS == 8) return float(int(static_cast<signed char>(words[i / 4] >> i % 4 * 8)));
    return float(int(words[0] >> i * 4 & 15) - 8);  // stored plus 8
  }
};

template <class T, class Out, int EPILOGUE, int BITS, int GROUP, int EACH>
__global__ void unpack(const Product<T, Out> p) {
  const auto* levels = reinterpret_cast<const Levels<BITS>*>(p.b);
  const T* factors = static_cast<const T*>(p.workspace);
  long long pieces = p.m * (long long)p.n / 8, first = blockIdx.x * (long long)EACH * blockDim.x + threadIdx.x;
  Levels<BITS> read[EACH];
  float factor[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    long long piece = first + e * blockDim.x;
    if (piece >= pieces) continue;
    read[e] = levels[piece];
    factor[e] = widen<float>(factors[piece * 8 / GROUP]);
  }
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    long long piece = first + e * blockDim.x;
    if (piece >= pieces) continue;
    Chunk<Out, 8> written;
#pragma unroll
    for (int i = 0; i < 8; ++i) written.of[i] = narrow<Out>(read[e].of(i) * factor[e]);
    reinterpret_cast<Chunk<Out, 8>*>(p.c)[piece] = written;
  }
}
