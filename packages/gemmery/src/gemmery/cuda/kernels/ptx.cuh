// PTX instructions as functions with their names in the PTX ISA; those that sm_90 added are in ptx_hopper.cuh.
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

// sm_80 has the instruction; before it, integer arithmetic rounds the upper half.
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

// An address in shared memory, as ldmatrix and cp.async expect it.
__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return unsigned(__cvta_generic_to_shared(shared));
}

// BYTES (4, 8 or 16) from global to shared memory, or zeros without reading: by a predicate, since a size operand takes
// four more instructions. 16 bytes bypass L1.
template <int BYTES> __device__ __forceinline__ void cp_async(unsigned shared, const void* global, bool inside) {
  if constexpr (BYTES == 16) {
    asm volatile("{ .reg .pred out; setp.eq.s32 out, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, out; }"
                 :
                 : "r"(shared), "l"(global), "r"(int(inside))
                 : "memory");
  } else {
    asm volatile("{ .reg .pred out; setp.eq.s32 out, %3, 0; cp.async.ca.shared.global [%0], [%1], %2, out; }"
                 :
                 : "r"(shared), "l"(global), "n"(BYTES), "r"(int(inside))
                 : "memory");
  }
}

template <int BYTES> __device__ __forceinline__ void cp_async(void* shared, const void* global, bool inside) {
  cp_async<BYTES>(shared_address(shared), global, inside);
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are in flight.
template <int PENDING> __device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- matrices of 8 x 8 from shared memory, and products of a warp ----

// Four 8 x 8 matrices of 16-bit elements: lane l passes the address of row l % 8 of matrix l / 8, and receives from
// each the elements 2 (l % 4) and the next of row l / 4 (with .trans, of column l / 4). sm_75.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&d)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&d)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ unsigned ld_shared_b32(unsigned shared) {
  unsigned x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

// d = a b + d on a 16 x 16 and a 16 x 8 (in tf32 a 16 x 8 and an 8 x 8) matrix, summed in f32. sm_80.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The nearest tf32, ties away from zero. sm_80.
__device__ __forceinline__ unsigned cvt_rna_tf32_f32(unsigned x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
  return y;
}

// ---- matrix instructions in f64 ----
// Lane g * 4 + t of the warp holds row g (and row g + 8) of A and column g of B, both at k = t, and columns 2 t and
// 2 t + 1 of the sums of its rows.

// sm_80. Rows x columns x k = 8 x 8 x 4.
__device__ __forceinline__ void mma_m8n8k4_f64(double& c0, double& c1, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c0), "+d"(c1)
      : "d"(a), "d"(b));
}

// sm_90. c: the sums of row g, then those of row g + 8.
__device__ __forceinline__ void mma_m16n8k4_f64(double (&c)[4], const double (&a)[2], double b) {
  asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(b));
}

// ---- fragments of a warp: f16 from sm_70 on, the rest from sm_80 on ----
// The ISA does not define which lane holds what. Name is a type whose `text` is part of the instruction's name; strides
// count elements. TYPES of a product: "m16n16k16.f32.f32".

template <class Operand, class Layout, class Shape, class Type>
__device__ __forceinline__ void wmma_load(double (&x)[1], unsigned shared, int stride) {
  asm volatile("wmma.load.%3.sync.aligned.%4.%5.shared.%6 {%0}, [%1], %2;"
               : "=d"(x[0])
               : "r"(shared), "r"(stride), "C"(Operand::text), "C"(Layout::text), "C"(Shape::text), "C"(Type::text)
               : "memory");
}

template <class Operand, class Layout, class Shape, class Type>
__device__ __forceinline__ void wmma_load(unsigned (&x)[4], unsigned shared, int stride) {
  asm volatile("wmma.load.%6.sync.aligned.%7.%8.shared.%9 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared), "r"(stride), "C"(Operand::text), "C"(Layout::text), "C"(Shape::text), "C"(Type::text)
               : "memory");
}

template <class Operand, class Layout, class Shape, class Type>
__device__ __forceinline__ void wmma_load(unsigned (&x)[8], unsigned shared, int stride) {
  asm volatile("wmma.load.%10.sync.aligned.%11.%12.shared.%13 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]), "=r"(x[4]), "=r"(x[5]), "=r"(x[6]), "=r"(x[7])
               : "r"(shared), "r"(stride), "C"(Operand::text), "C"(Layout::text), "C"(Shape::text), "C"(Type::text)
               : "memory");
}

template <class LayoutA, class LayoutB, class Types>
__device__ __forceinline__ void wmma_mma(double (&d)[2], const double (&a)[1], const double (&b)[1]) {
  asm("wmma.mma.sync.aligned.%4.%5.%6 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d[0]), "+d"(d[1])
      : "d"(a[0]), "d"(b[0]), "C"(LayoutA::text), "C"(LayoutB::text), "C"(Types::text));
}

template <class LayoutA, class LayoutB, class Types>
__device__ __forceinline__ void wmma_mma(float (&d)[8], const unsigned (&a)[4], const unsigned (&b)[4]) {
  asm("wmma.mma.sync.aligned.%16.%17.%18 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, {%12, %13, %14, %15}, "
      "{%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "C"(LayoutA::text),
        "C"(LayoutB::text), "C"(Types::text));
}

template <class LayoutA, class LayoutB, class Types>
__device__ __forceinline__ void wmma_mma(float (&d)[8], const unsigned (&a)[8], const unsigned (&b)[8]) {
  asm("wmma.mma.sync.aligned.%24.%25.%26 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]),
        "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]), "C"(LayoutA::text), "C"(LayoutB::text),
        "C"(Types::text));
}

template <class Shape> __device__ __forceinline__ void wmma_store(unsigned shared, const double (&d)[2], int stride) {
  asm volatile("wmma.store.d.sync.aligned.row.%4.shared.f64 [%0], {%1, %2}, %3;" ::"r"(shared), "d"(d[0]), "d"(d[1]),
               "r"(stride), "C"(Shape::text)
               : "memory");
}

template <class Shape> __device__ __forceinline__ void wmma_store(unsigned shared, const float (&d)[8], int stride) {
  asm volatile("wmma.store.d.sync.aligned.row.%10.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"r"(shared),
               "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]), "f"(d[4]), "f"(d[5]), "f"(d[6]), "f"(d[7]), "r"(stride),
               "C"(Shape::text)
               : "memory");
}

// ---- no instruction ----

// After it the compiler assumes nothing about memory: values in registers are written before and read again after.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// ---- launches that start before the previous one on the stream has ended, sm_90 ----

// Lets the next launch start; it waits for the end of this one before it accesses memory.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous launches have ended and all their writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- loads of data used once ----

// Prefetches a line of memory into L2; its contents need not be final yet.
__device__ __forceinline__ void prefetch_global_L2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// 16 bytes, bypassing L1. sm_70.
template <class X> __device__ __forceinline__ X ld_global_no_allocate(const X* from) {
  static_assert(sizeof(X) == 16, "one access");
  unsigned words[4];
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
  X x;
  memcpy(&x, words, sizeof x);
  return x;
}

__device__ __forceinline__ void st_shared_v4(unsigned shared, const unsigned (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// ---- conversions to pairs, and functions of the special function unit ----

// Two floats rounded to 16 bits; `low` is the first in memory. sm_80 (f16x2: sm_53).
__device__ __forceinline__ unsigned cvt_rn_f16x2_f32(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ unsigned cvt_rn_bf16x2_f32(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Two floats as codes of e5m2 and of e4m3, the largest number beyond it. sm_89.
__device__ __forceinline__ unsigned cvt_rn_satfinite_e5m2x2_f32(float low, float high) {
  unsigned short both;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ unsigned cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

// 1 / x and 2^x of the special function unit, to about 2 u; subnormal results are 0.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger one; NaN if one is NaN. sm_80.
__device__ __forceinline__ float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- barriers of some threads ----

// One of the barriers 1 to 15 of a block, for some of its threads: whole warps.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts for those that wait there, and goes on.
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- packed weights ----

__device__ __forceinline__ unsigned ld_shared_u16(unsigned shared) {
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ void ld_shared_v2(unsigned& x, unsigned& y, unsigned shared) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(shared) : "memory");
}

// Adds one and returns what was there. What threads wrote before a barrier with this one is seen by who finds the sum,
// and by threads behind a barrier with it. sm_70.
__device__ __forceinline__ unsigned atom_add_acq_rel(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The same for who acquires the sum, without an answer to wait for.
__device__ __forceinline__ void red_add_release(unsigned* counter, unsigned more) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(more) : "memory");
}

// A word that other blocks read and write meanwhile, which says nothing of other memory. sm_70.
__device__ __forceinline__ unsigned ld_relaxed(const unsigned* from) {
  unsigned x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void st_relaxed(unsigned* to, unsigned x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

template <class Word> __device__ __forceinline__ void ld_shared_v4(Word (&x)[4], unsigned shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// x y + z on pairs of 16-bit elements. sm_80 (f16x2: sm_53).
__device__ __forceinline__ unsigned fma_rn_f16x2(unsigned x, unsigned y, unsigned z) {
  unsigned sums;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(x), "r"(y), "r"(z));
  return sums;
}

__device__ __forceinline__ unsigned fma_rn_bf16x2(unsigned x, unsigned y, unsigned z) {
  unsigned sums;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(x), "r"(y), "r"(z));
  return sums;
}

// Both halves the low half of x, or the high one: products may take it without an instruction.
__device__ __forceinline__ unsigned twice(unsigned x, bool high) {
  unsigned pair;
  if (high) asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(pair) : "r"(x));
  else asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(pair) : "r"(x));
  return pair;
}

// 16 bytes at an aligned address, by one store: of a struct's words the compiler makes four.
__device__ __forceinline__ void st_global_v4(void* to, unsigned x, unsigned y, unsigned z, unsigned w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

}  // namespace ptx
