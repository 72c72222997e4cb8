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

// ---- asynchronous copies, sm_80 ----

// BYTES (4, 8 or 16) from global into shared memory, or zeros, and then nothing is read. 16 bytes pass by L1.
template <int BYTES> __device__ __forceinline__ void cp_async(void* shared, const void* global, bool inside) {
  unsigned to = unsigned(__cvta_generic_to_shared(shared));
  int size = inside ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES), "r"(size)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most PENDING of this thread's latest groups are still under way.
template <int PENDING> __device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- no instruction ----

// After it the compiler knows nothing of what memory holds: what it keeps in registers is written before, read after.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace ptx
