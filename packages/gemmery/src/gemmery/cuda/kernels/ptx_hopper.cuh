// The PTX instructions that Hopper brought, as functions with their names in the PTX ISA; the others are in ptx.cuh.
// Reference: NVIDIA, Parallel Thread Execution ISA 9.0.
#pragma once
#include "ptx.cuh"

namespace ptx {

// ---- mbarriers in shared memory, sm_90 ----
// A phase ends when all arrivals that it expects, and all bytes, have come; its parity is 0, then 1, then 0.

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After it, copies and other blocks of the cluster see barriers that this thread has initialized.
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

// One of the arrivals that this phase expects, when all cp.async of this thread so far have been written. sm_80.
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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

// To the shared memory of a block of the cluster, an address from mapa. sm_90.
__device__ __forceinline__ void st_shared_cluster(unsigned there, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
__device__ __forceinline__ void st_shared_cluster(unsigned there, double x) {
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"(x) : "memory");
}

// The same for 16 bytes.
__device__ __forceinline__ void st_shared_cluster_v4(unsigned there, float x, float y, float z, float w) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

__device__ __forceinline__ void st_shared_cluster_v4(unsigned there, int x, int y, int z, int w) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(there), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
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

// Adjacent bytes, a multiple of 16.
__device__ __forceinline__ void cp_async_bulk_load(unsigned shared, const void* from, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Brings a box into L2; its contents need not be final yet.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const void* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
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

// Lets copies see what this thread has seen of global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Ends the launch with an error.
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// Nanoseconds, which count on in steps of a microsecond or less.
__device__ __forceinline__ unsigned long long globaltimer() {
  unsigned long long x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x));
  return x;
}

// A flag that another device writes: what was written before it is seen after it.
__device__ __forceinline__ int ld_acquire_sys(const int* flag) {
  int x;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
  return x;
}

// ---- parts of a tile in shared memory ----

// Four 8 x 8 matrices of 16-bit elements, the reverse of ldmatrix_x4. sm_90.
__device__ __forceinline__ void stmatrix_x4(unsigned shared, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The same for matrices whose rows are columns of the registers', the reverse of ldmatrix_x4_trans. sm_90.
__device__ __forceinline__ void stmatrix_x4_trans(unsigned shared, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void st_shared_v2(unsigned shared, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void st_shared_v2(unsigned shared, int x, int y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void ld_shared_v4(float (&x)[4], unsigned shared) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(shared)
               : "memory");
}

// ---- warpgroups, sm_90a: 128 threads that multiply together, and the registers of each ----

template <int COUNT> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// No instruction: x is computed before it, and what is computed from x after it.
__device__ __forceinline__ void computed_here(unsigned& x) { asm volatile("" : "+r"(x)); }

// Before the first product on sums that other instructions have written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups of products are under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// wgmma_mma_async<Types>(d, a, b, adds): d = A B, or += where `adds`, of 64 x N x 32 bytes of k in shared memory, by
// descriptors. Types::text is the part of the name behind N, Types::signs what stands behind the predicate. A thread
// has N / 2 sums: there are overloads for multiples of 32, and for 48, 56, 72 ...
#define D4(l, i) l(d[i]), l(d[i + 1]), l(d[i + 2]), l(d[i + 3])
#define D8(l, i) D4(l, i), D4(l, i + 4)
#define D12(l, i) D8(l, i), D4(l, i + 8)
#define D16(l, i) D4(l, i), D4(l, i + 4), D4(l, i + 8), D4(l, i + 12)
#define D24(l, i) D16(l, i), D8(l, i + 16)
#define D28(l, i) D24(l, i), D4(l, i + 24)
#define D32(l, i) D16(l, i), D16(l, i + 16)
#define D36(l, i) D32(l, i), D4(l, i + 32)
#define D40(l, i) D32(l, i), D8(l, i + 32)
#define D44(l, i) D32(l, i), D4(l, i + 32), D4(l, i + 36), D4(l, i + 40)
#define D48(l, i) D32(l, i), D16(l, i + 32)
#define D52(l, i) D48(l, i), D4(l, i + 48)
#define D56(l, i) D48(l, i), D4(l, i + 48), D4(l, i + 52)
#define D60(l, i) D48(l, i), D12(l, i + 48)
#define D64(l, i) D32(l, i), D32(l, i + 32)
#define D68(l, i) D64(l, i), D4(l, i + 64)
#define D72(l, i) D64(l, i), D4(l, i + 64), D4(l, i + 68)
#define D76(l, i) D72(l, i), D4(l, i + 72)
#define D80(l, i) D64(l, i), D16(l, i + 64)
#define D88(l, i) D80(l, i), D4(l, i + 80), D4(l, i + 84)
#define D96(l, i) D64(l, i), D32(l, i + 64)
#define D100(l, i) D96(l, i), D4(l, i + 96)
#define D104(l, i) D96(l, i), D4(l, i + 96), D4(l, i + 100)
#define D112(l, i) D96(l, i), D16(l, i + 96)
#define D128(l, i) D64(l, i), D64(l, i + 64)
#define N4 "%0, %1, %2, %3"
#define N8 N4 ", %4, %5, %6, %7"
#define N12 N8 ", %8, %9, %10, %11"
#define N16 N12 ", %12, %13, %14, %15"
#define N24 N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define N28 N24 ", %24, %25, %26, %27"
#define N32 N24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define N36 N32 ", %32, %33, %34, %35"
#define N40 N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define N44 N40 ", %40, %41, %42, %43"
#define N48 N32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define N52 N48 ", %48, %49, %50, %51"
#define N56 N48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define N60 N56 ", %56, %57, %58, %59"
#define N64 N48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define N68 N64 ", %64, %65, %66, %67"
#define N72 N64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define N76 N72 ", %72, %73, %74, %75"
#define N80 N64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define N88 N80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define N96 N80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define N100 N96 ", %96, %97, %98, %99"
#define N104 N96 ", %96, %97, %98, %99, %100, %101, %102, %103"
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
WGMMA(float, "+f", "48", 24, "24", "25", "26", "27", "28");
WGMMA(float, "+f", "56", 28, "28", "29", "30", "31", "32");
WGMMA(float, "+f", "64", 32, "32", "33", "34", "35", "36");
WGMMA(int, "+r", "64", 32, "32", "33", "34", "35", "36");
WGMMA(float, "+f", "72", 36, "36", "37", "38", "39", "40");
WGMMA(float, "+f", "80", 40, "40", "41", "42", "43", "44");
WGMMA(float, "+f", "88", 44, "44", "45", "46", "47", "48");
WGMMA(float, "+f", "96", 48, "48", "49", "50", "51", "52");
WGMMA(int, "+r", "96", 48, "48", "49", "50", "51", "52");
WGMMA(float, "+f", "104", 52, "52", "53", "54", "55", "56");
WGMMA(float, "+f", "112", 56, "56", "57", "58", "59", "60");
WGMMA(int, "+r", "112", 56, "56", "57", "58", "59", "60");
WGMMA(float, "+f", "120", 60, "60", "61", "62", "63", "64");
WGMMA(float, "+f", "128", 64, "64", "65", "66", "67", "68");
WGMMA(int, "+r", "128", 64, "64", "65", "66", "67", "68");
WGMMA(float, "+f", "136", 68, "68", "69", "70", "71", "72");
WGMMA(float, "+f", "144", 72, "72", "73", "74", "75", "76");
WGMMA(int, "+r", "144", 72, "72", "73", "74", "75", "76");
WGMMA(float, "+f", "152", 76, "76", "77", "78", "79", "80");
WGMMA(float, "+f", "160", 80, "80", "81", "82", "83", "84");
WGMMA(int, "+r", "160", 80, "80", "81", "82", "83", "84");
WGMMA(float, "+f", "176", 88, "88", "89", "90", "91", "92");
WGMMA(float, "+f", "192", 96, "96", "97", "98", "99", "100");
WGMMA(int, "+r", "192", 96, "96", "97", "98", "99", "100");
WGMMA(float, "+f", "200", 100, "100", "101", "102", "103", "104");
WGMMA(float, "+f", "208", 104, "104", "105", "106", "107", "108");
WGMMA(float, "+f", "224", 112, "112", "113", "114", "115", "116");
WGMMA(int, "+r", "224", 112, "112", "113", "114", "115", "116");
WGMMA(float, "+f", "256", 128, "128", "129", "130", "131", "132");
WGMMA(int, "+r", "256", 128, "128", "129", "130", "131", "132");
#undef WGMMA

// Two of the matrices of ldmatrix_x4; lanes 0 to 15 pass addresses.
__device__ __forceinline__ void ldmatrix_x2(unsigned& x, unsigned& y, unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(shared) : "memory");
}

// wgmma_mma_async with A in registers: a warp has 32 bytes of k of its 16 rows, as ldmatrix_x4 loads them.
#define WGMMA(S, letter, n, count, a0_at, a1_at, a2_at, a3_at, b_at, adds_at, text_at, signs_at)              \
  template <class Types>                                                                                         \
  __device__ __forceinline__ void wgmma_mma_async(S(&d)[count], const unsigned(&a)[4], unsigned long long b,     \
                                                  int adds) {                                                    \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" n "%"       \
                 text_at " {" N##count "}, {%" a0_at ", %" a1_at ", %" a2_at ", %" a3_at "}, %" b_at ", p%"      \
                 signs_at "; }"                                                                                  \
                 : D##count(letter, 0)                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "C"(Types::text),              \
                   "C"(Types::signs));                                                                           \
  }
WGMMA(float, "+f", "8", 4, "4", "5", "6", "7", "8", "9", "10", "11");
WGMMA(float, "+f", "16", 8, "8", "9", "10", "11", "12", "13", "14", "15");
WGMMA(float, "+f", "24", 12, "12", "13", "14", "15", "16", "17", "18", "19");
WGMMA(float, "+f", "32", 16, "16", "17", "18", "19", "20", "21", "22", "23");
WGMMA(float, "+f", "48", 24, "24", "25", "26", "27", "28", "29", "30", "31");
WGMMA(float, "+f", "56", 28, "28", "29", "30", "31", "32", "33", "34", "35");
WGMMA(float, "+f", "64", 32, "32", "33", "34", "35", "36", "37", "38", "39");
WGMMA(float, "+f", "72", 36, "36", "37", "38", "39", "40", "41", "42", "43");
WGMMA(float, "+f", "80", 40, "40", "41", "42", "43", "44", "45", "46", "47");
WGMMA(float, "+f", "88", 44, "44", "45", "46", "47", "48", "49", "50", "51");
WGMMA(float, "+f", "96", 48, "48", "49", "50", "51", "52", "53", "54", "55");
WGMMA(float, "+f", "104", 52, "52", "53", "54", "55", "56", "57", "58", "59");
WGMMA(float, "+f", "112", 56, "56", "57", "58", "59", "60", "61", "62", "63");
WGMMA(float, "+f", "120", 60, "60", "61", "62", "63", "64", "65", "66", "67");
WGMMA(float, "+f", "128", 64, "64", "65", "66", "67", "68", "69", "70", "71");
WGMMA(int, "+r", "128", 64, "64", "65", "66", "67", "68", "69", "70", "71");
WGMMA(float, "+f", "136", 68, "68", "69", "70", "71", "72", "73", "74", "75");
WGMMA(float, "+f", "144", 72, "72", "73", "74", "75", "76", "77", "78", "79");
WGMMA(float, "+f", "152", 76, "76", "77", "78", "79", "80", "81", "82", "83");
WGMMA(float, "+f", "160", 80, "80", "81", "82", "83", "84", "85", "86", "87");
WGMMA(float, "+f", "176", 88, "88", "89", "90", "91", "92", "93", "94", "95");
WGMMA(float, "+f", "192", 96, "96", "97", "98", "99", "100", "101", "102", "103");
WGMMA(float, "+f", "208", 104, "104", "105", "106", "107", "108", "109", "110", "111");
WGMMA(float, "+f", "224", 112, "112", "113", "114", "115", "116", "117", "118", "119");
WGMMA(float, "+f", "256", 128, "128", "129", "130", "131", "132", "133", "134", "135");
#undef WGMMA

// No instruction: what follows reads sums after the wait before it, not earlier.
template <int COUNT> __device__ __forceinline__ void wgmma_read_anew(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT> __device__ __forceinline__ void wgmma_read_anew(int (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// True in one lane of a whole warp. ptxas knows that it is one: where a test of threadIdx.x picks the thread, it puts a
// loop over the warp's lanes around each tensor copy.
__device__ __forceinline__ bool elect_sync() {
  unsigned elected;
  asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one; }" : "=r"(elected));
  return elected;
}

}  // namespace ptx
