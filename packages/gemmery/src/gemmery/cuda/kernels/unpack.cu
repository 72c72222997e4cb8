// Idea: a matrix of 8 or 4 bits an element becomes one of Out; a thread writes 8 elements at a time, and reads the 8 or
// 4 bytes they come from. An element is a code, less a zero point, times the factor of its GROUP, in float32, rounded
// once more. Factors are of T; of MXFP4 and NVFP4 bytes, and NVFP4 has one more for the matrix, in the place of a bias.
// Not a product: products of more rows than gemv_quantized takes read the matrix that this writes to B's workspace.
#include "load.cuh"

enum Format { INT8, INT4, FLOAT8_E4M3, MXFP4, NVFP4 };

// Codes of e4m3, and of e2m1 in the low half of a byte, have exponents 8 and 14 below those of float16.
__device__ __forceinline__ float from_e4m3(unsigned code) {
  float value = ptx::cvt_f32_f16((unsigned short)((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256;
  return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000) : value;
}
__device__ __forceinline__ float from_e2m1(unsigned code) {
  return ptx::cvt_f32_f16((unsigned short)((code & 8) << 12 | (code & 7) << 9)) * 16384;
}
__device__ __forceinline__ float from_e8m0(unsigned code) {
  return __uint_as_float(code == 0xff ? 0x7fc00000 : code == 0 ? 1u << 22 : code << 23);
}

// 8 codes as they are packed.
template <Format FORMAT> struct alignas(FORMAT == INT8 || FORMAT == FLOAT8_E4M3 ? 8 : 4) Codes {
  static constexpr int BITS = FORMAT == INT8 || FORMAT == FLOAT8_E4M3 ? 8 : 4;
  unsigned words[BITS / 4];
  __device__ __forceinline__ float of(int i) const {
    unsigned code = BITS == 8 ? words[i / 4] >> i % 4 * 8 & 255 : words[0] >> i * 4 & 15;
    if constexpr (FORMAT == INT8) return float(int(static_cast<signed char>(code)));
    if constexpr (FORMAT == INT4) return float(int(code));
    return FORMAT == FLOAT8_E4M3 ? from_e4m3(code) : from_e2m1(code);
  }
};

template <class T, class Out, int EPILOGUE, Format FORMAT, bool ZEROS, int GROUP, int EACH>
__global__ void unpack(const Product<T, Out> p) {
  const auto* codes = reinterpret_cast<const Codes<FORMAT>*>(p.b);
  const T* factors = static_cast<const T*>(p.workspace);
  const auto* bytes = static_cast<const unsigned char*>(p.workspace);
  long long pieces = p.m * (long long)p.n / 8, first = blockIdx.x * (long long)EACH * blockDim.x + threadIdx.x;
  Codes<FORMAT> read[EACH];
  float factor[EACH], zero[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    long long piece = first + e * blockDim.x, group = piece * 8 / GROUP;
    if (piece >= pieces) continue;
    read[e] = codes[piece];
    zero[e] = ZEROS ? widen<float>(p.a[group]) : FORMAT == INT4 ? 8 : 0;
    if constexpr (FORMAT == MXFP4) {
      factor[e] = from_e8m0(bytes[group]);
    } else if constexpr (FORMAT == NVFP4) {
      factor[e] = __fmul_rn(from_e4m3(bytes[group]), *p.bias);
    } else {
      factor[e] = widen<float>(factors[group]);
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    long long piece = first + e * blockDim.x;
    if (piece >= pieces) continue;
    Chunk<Out, 8> written;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // __fmul_rn: the difference and the product stay two roundings
      written.of[i] = narrow<Out>(__fmul_rn(read[e].of(i) - zero[e], factor[e]));
    }
    reinterpret_cast<Chunk<Out, 8>*>(p.c)[piece] = written;
  }
}
