// Every PTX instruction used by the kernels, as a function with its name in the PTX ISA.
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

// One of the barriers 1 to 15 of a block, for some of its threads: whole warps.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- mbarriers in shared memory, sm_90 ----
// A phase ends when all arrivals that it expects, and all bytes, have come; its parity is 0, then 1, then 0.

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After it, copies and other blocks of the cluster see barriers that this thread has initialised.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and BYTES more that this phase expects.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// At a barrier of any block of the cluster, an address from mapa. Its scope and that of waits stay the
// default: .release.cluster and .acquire.cluster would order more than these hand over.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Tries until the phase of this parity has ended.
__device__ __forceinline__ void mbarrier_try_wait_parity(unsigned barrier, unsigned parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra.uni ended; "
      "bra.uni again; ended: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- clusters of blocks, sm_90 ----

__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same address in another block's shared memory.
__device__ __forceinline__ unsigned mapa(unsigned shared, unsigned rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}

__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- tensor copies, sm_90: boxes of a matrix that a map describes. x counts along rows of memory, z matrices ----

__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_load(unsigned shared, const void* map, int x, int y, int z,
                                                          unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(shared), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// To the same address in each block of `blocks`, a bit for each; each one's barrier counts the bytes.
__device__ __forceinline__ void cp_async_bulk_tensor_load_multicast(unsigned shared, const void* map, int x, int y,
                                                                    int z, unsigned barrier, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_store(const void* map, int x, int y, int z, unsigned shared) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(shared)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but PENDING of this thread's latest groups have read their shared memory.
template <int PENDING> __device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Lets copies and wgmma see what this thread has stored in shared memory.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements, the reverse of ldmatrix_x4. sm_90.
__device__ __forceinline__ void stmatrix_x4(unsigned shared, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void st_shared_v2(unsigned shared, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void st_shared_v2(unsigned shared, int x, int y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(x), "r"(y) : "memory");
}

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

// 1 / x and 2^x of the special function unit, to about 2 u; subnormal results are 0.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- warpgroups, sm_90a: 128 threads that multiply together, and the registers of each ----

template <int COUNT> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Before the first product on sums that other instructions have written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups of products are under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// wgmma_mma_async<Types>(d, a, b, adds): d = A B, or += where `adds`, of 64 x N x 32 bytes of k in shared memory, by
// descriptors. Types::text is the part of the name behind N, Types::signs what stands behind the predicate. A thread
// has N / 2 sums: there are overloads for multiples of 32, and for 112 and 144.
#define D4(l, i) l(d[i]), l(d[i + 1]), l(d[i + 2]), l(d[i + 3])
#define D16(l, i) D4(l, i), D4(l, i + 4), D4(l, i + 8), D4(l, i + 12)
#define D32(l, i) D16(l, i), D16(l, i + 16)
#define D48(l, i) D32(l, i), D16(l, i + 32)
#define D56(l, i) D48(l, i), D4(l, i + 48), D4(l, i + 52)
#define D64(l, i) D32(l, i), D32(l, i + 32)
#define D72(l, i) D64(l, i), D4(l, i + 64), D4(l, i + 68)
#define D80(l, i) D64(l, i), D16(l, i + 64)
#define D96(l, i) D64(l, i), D32(l, i + 64)
#define D112(l, i) D96(l, i), D16(l, i + 96)
#define D128(l, i) D64(l, i), D64(l, i + 64)
#define N16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define N32 N16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define N48 N32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define N56 N48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define N64 N48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define N72 N64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define N80 N64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define N96 N80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define N112 N96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define N128 N112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(S, letter, n, count, a_at, b_at, adds_at, text_at, signs_at)                                      \
  template <class Types>                                                                                         \
  __device__ __forceinline__ void wgmma_mma_async(S(&d)[count], unsigned long long a, unsigned long long b,      \
                                                  int adds) {                                                    \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" n "%"       \
                 text_at " {" N##count "}, %" a_at ", %" b_at ", p%" signs_at "; }"                              \
                 : D##count(letter, 0)                                                                           \
                 : "l"(a), "l"(b), "r"(adds), "C"(Types::text), "C"(Types::signs));                              \
  }
WGMMA(float, "+f", "32", 16, "16", "17", "18", "19", "20");
WGMMA(int, "+r", "32", 16, "16", "17", "18", "19", "20");
WGMMA(float, "+f", "64", 32, "32", "33", "34", "35", "36");
WGMMA(int, "+r", "64", 32, "32", "33", "34", "35", "36");
WGMMA(float, "+f", "96", 48, "48", "49", "50", "51", "52");
WGMMA(int, "+r", "96", 48, "48", "49", "50", "51", "52");
WGMMA(float, "+f", "112", 56, "56", "57", "58", "59", "60");
WGMMA(int, "+r", "112", 56, "56", "57", "58", "59", "60");
WGMMA(float, "+f", "128", 64, "64", "65", "66", "67", "68");
WGMMA(int, "+r", "128", 64, "64", "65", "66", "67", "68");
WGMMA(float, "+f", "144", 72, "72", "73", "74", "75", "76");
WGMMA(int, "+r", "144", 72, "72", "73", "74", "75", "76");
WGMMA(float, "+f", "160", 80, "80", "81", "82", "83", "84");
WGMMA(int, "+r", "160", 80, "80", "81", "82", "83", "84");
WGMMA(float, "+f", "192", 96, "96", "97", "98", "99", "100");
WGMMA(int, "+r", "192", 96, "96", "97", "98", "99", "100");
WGMMA(float, "+f", "224", 112, "112", "113", "114", "115", "116");
WGMMA(int, "+r", "224", 112, "112", "113", "114", "115", "116");
WGMMA(float, "+f", "256", 128, "128", "129", "130", "131", "132");
WGMMA(int, "+r", "256", 128, "128", "129", "130", "131", "132");
#undef WGMMA

// No instruction: what follows reads sums after the wait before it, not earlier.
template <int COUNT> __device__ __forceinline__ void wgmma_read_anew(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// 16 bytes to the shared memory of a block of the cluster, an address from mapa. sm_90.
__device__ __forceinline__ void st_shared_cluster_v4(unsigned there, float x, float y, float z, float w) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

__device__ __forceinline__ void st_shared_cluster_v4(unsigned there, int x, int y, int z, int w) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(there), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

__device__ __forceinline__ void ld_shared_v4(float (&x)[4], unsigned shared) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ld_shared_v4(int (&x)[4], unsigned shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// ---- more of tensor copies, sm_90 ----

// Brings a box into L2; its contents need not be final yet.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const void* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

}  // namespace ptx
