// Every PTX instruction that the kernels name, as a function called what the PTX ISA calls it.
// Reference: NVIDIA, Parallel Thread Execution ISA 9.0.
#pragma once

namespace ptx {

// ---- conversions ----

__device__ __forceinline__ float cvt_f32_f16(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ __forceinline__ unsigned short cvt_rn_f16_f32(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// Before sm_80, which has the instruction, the upper half is rounded by integers.
__device__ __forceinline__ unsigned short cvt_rn_bf16_f32(float x) {
#if __CUDA_ARCH__ >= 800
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  unsigned bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#endif
}

}  // namespace ptx
