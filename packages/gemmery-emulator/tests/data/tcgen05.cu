// Kernels of tensor memory and its products. What differs between tests is an argument, so that each compiles once.

typedef unsigned u32;
typedef unsigned long long u64;

__device__ u32 place(const void* p) { return u32(__cvta_generic_to_shared(p)); }

__device__ void wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
}

__device__ void init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}

template <int group>
__device__ void alloc(u32 to, u32 columns) {
  if (group == 1)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns) : "memory");
  else
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns) : "memory");
}

template <int group>
__device__ void relinquish() {
  if (group == 1) asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  else asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
}

template <int group>
__device__ void dealloc(u32 at, u32 columns) {
  if (group == 1) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(at), "r"(columns));
  else asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(at), "r"(columns));
}

__device__ u32 load(u32 at) {
  u32 x;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(x) : "r"(at));
  return x;
}

__device__ void store(u32 at, u32 x) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(at), "r"(x) : "memory");
}

__device__ void wait_loads() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
__device__ void wait_stores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
__device__ void before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ void after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
__device__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define MMA(group, kind)                                                                                        \
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::" group ".kind::" kind             \
               " [%0], %1, %2, %3, p; }" ::"r"(to), "l"(a), "l"(b), "r"(shape), "r"(adds) : "memory")
#define MMA_OF_MEMORY(kind)                                                                                     \
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::1.kind::" kind                     \
               " [%0], [%1], %2, %3, {0, 0, 0, 0}, p; }" ::"r"(to), "r"(a), "l"(b), "r"(shape), "r"(adds) : "memory")

__device__ void multiply(u32 to, u64 a, u64 b, u32 shape, u32 kind, u32 adds) {
  if (kind == 0) MMA("1", "f16");
  else if (kind == 1) MMA("1", "tf32");
  else if (kind == 2) MMA("1", "f8f6f4");
  else if (kind == 3) MMA("1", "i8");
  else MMA("2", "f16");
}

__device__ void multiply_memory(u32 to, u32 a, u64 b, u32 shape, u32 kind, u32 adds) {
  if (kind == 0) MMA_OF_MEMORY("f16");
  else if (kind == 1) MMA_OF_MEMORY("tf32");
  else if (kind == 2) MMA_OF_MEMORY("f8f6f4");
  else MMA_OF_MEMORY("i8");
}

__device__ void commit(u32 barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ void commit_to(u32 barrier, unsigned short blocks) {
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
               ::"r"(barrier), "h"(blocks) : "memory");
}

__device__ void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- one product: bytes of two tiles, 128 lanes of the sums before and after ----

struct Product {
  u64 a, b;  // descriptors
  u32 shape, kind, columns, adds;
  u32 in_memory;  // columns of A in tensor memory, in `first`; 0 if it is in shared memory
};

template <int group>
__device__ void product_of(const u32* tiles, u32 words, const u32* sums, const u32* first, u32* out, Product p) {
  extern __shared__ __align__(1024) u32 shared[];
  __shared__ __align__(8) u64 memory;
  __shared__ u32 address;
  u32 done = place(&memory), i = threadIdx.x, lane = (i / 32 * 32) << 16, rank = blockIdx.x;
  p.a += place(shared) >> 4, p.b += place(shared) >> 4;
  if (i < 32) alloc<group>(place(&address), 512);
  if (i < 32) relinquish<group>();
  if (i == 0) init(done);
  for (u32 word = i; word < words; word += blockDim.x) shared[word] = tiles[rank * words + word];
  proxy_fence();
  __syncthreads();
  u32 at = address;
  for (u32 c = 0; c < p.columns; c++) store(at + lane + c, sums[(rank * 128 + i) * p.columns + c]);
  for (u32 c = 0; c < p.in_memory; c++) store(at + lane + 256 + c, first[i * p.in_memory + c]);
  wait_stores();
  before_sync();
  if (group == 2) meet();
  __syncthreads();
  after_sync();
  if (i == 0 && rank == 0) {
    if (group == 2) {
      multiply(at, p.a, p.b, p.shape, 4, p.adds);
      commit_to(done, 3);
    } else if (p.in_memory) {
      multiply_memory(at, at + 256, p.b, p.shape, p.kind, p.adds);
      commit(done);
    } else {
      multiply(at, p.a, p.b, p.shape, p.kind, p.adds);
      commit(done);
    }
  }
  wait(done, 0);
  after_sync();
  for (u32 c = 0; c < p.columns; c++) out[(rank * 128 + i) * p.columns + c] = load(at + lane + c);
  wait_loads();
  before_sync();
  if (group == 2) meet();
  __syncthreads();
  if (i < 32) dealloc<group>(at, 512);
}

extern "C" __global__ void product(const u32* tiles, u32 words, const u32* sums, const u32* first, u32* out, Product p) {
  product_of<1>(tiles, words, sums, first, out, p);
}

extern "C" __global__ void __cluster_dims__(2) pair(const u32* tiles, u32 words, const u32* sums, const u32* first,
                                                    u32* out, Product p) {
  product_of<2>(tiles, words, sums, first, out, p);
}

// ---- the registers of each shape ----

#define SHAPE(number, shape, count, registers, ...)                                                              \
  if (which == number) {                                                                                         \
    u32 x[8] = {};                                                                                               \
    asm volatile("tcgen05.ld.sync.aligned." shape " {" registers "}, [%" #count "]" __VA_ARGS__ ";"              \
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]), "=r"(x[4]), "=r"(x[5]), "=r"(x[6]), "=r"(x[7]) \
                 : "r"(at + lane));                                                                              \
    wait_loads();                                                                                                \
    for (u32 r = 0; r < 8; r++) out[i * 8 + r] = x[r];                                                           \
    asm volatile("tcgen05.st.sync.aligned." STORED shape " [%0]" __VA_ARGS__ ", {%1, %2, %3, %4, %5, %6, %7, %8};" \
                 ::"r"(at + lane + 32), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]),         \
                 "r"(x[6]), "r"(x[7]) : "memory");                                                               \
    wait_stores();                                                                                               \
  }
#define EIGHT "%0, %1, %2, %3, %4, %5, %6, %7"
#define STORED ""

// Column c of lane l holds 64 l + c; each shape loads 8 registers, and stores them 32 columns further.
extern "C" __global__ void shapes(u32 which, u32 half, u32* out, u32* after) {
  __shared__ u32 address;
  u32 i = threadIdx.x, lane = (i / 32 * 32) << 16;
  if (i < 32) alloc<1>(place(&address), 64);
  __syncthreads();
  u32 at = address;
  for (u32 c = 0; c < 64; c++) store(at + lane + c, c < 32 ? 64 * i + c : 0);
  wait_stores();
  lane += half << 16;
  SHAPE(0, "32x32b.x8.b32", 8, EIGHT)
  SHAPE(1, "16x64b.x8.b32", 8, EIGHT)
  SHAPE(2, "16x128b.x4.b32", 8, EIGHT)
  SHAPE(3, "16x256b.x2.b32", 8, EIGHT)
  SHAPE(4, "16x32bx2.x8.b32", 8, EIGHT, ", 16")
  lane -= half << 16;
  for (u32 c = 0; c < 32; c++) after[i * 32 + c] = load(at + lane + 32 + c);
  wait_loads();
  __syncthreads();
  if (i < 32) dealloc<1>(at, 64);
}

// Lanes of other warps are other places: warp 1 stores while warp 0 has not waited for its load.
extern "C" __global__ void quarters(u32* out) {
  __shared__ u32 address;
  u32 i = threadIdx.x, lane = (i / 32 * 32) << 16, x = 0;
  if (i < 32) alloc<1>(place(&address), 32);
  __syncthreads();
  u32 at = address + lane;
  store(at, i);
  wait_stores();
  if (i < 32) x = load(at);
  if (i / 32 == 1) {
    store(at, 2 * i);
    wait_stores();
    x = load(at);
  }
  __syncthreads();
  if (i < 64) wait_loads();
  out[i] = x;
  __syncthreads();
  if (i < 32) dealloc<1>(address, 32);
}

// Registers of two columns of 16 bits.
extern "C" __global__ void packed(u32* out, u32* after) {
  __shared__ u32 address;
  u32 i = threadIdx.x, lane = (i / 32 * 32) << 16, x, y;
  if (i < 32) alloc<1>(place(&address), 32);
  __syncthreads();
  u32 at = address + lane;
  asm volatile("tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%0], {%1, %2};" ::"r"(at), "r"(i << 16 | 7), "r"(9));
  wait_stores();
  for (u32 c = 0; c < 4; c++) after[4 * i + c] = load(at + c);
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(at));
  wait_loads();
  out[2 * i] = x, out[2 * i + 1] = y;
  __syncthreads();
  if (i < 32) dealloc<1>(address, 32);
}

// ---- copies from shared to tensor memory ----

extern "C" __global__ void copies(u32 which, u64 tile, const u32* words, u32* out) {
  __shared__ __align__(1024) u32 shared[1024];
  __shared__ __align__(8) u64 memory;
  __shared__ u32 address;
  u32 i = threadIdx.x, lane = (i / 32 * 32) << 16, done = place(&memory);
  if (i < 32) alloc<1>(place(&address), 32);
  if (i == 0) init(done);
  for (u32 word = i; word < 1024; word += 128) shared[word] = words[word];
  proxy_fence();
  __syncthreads();
  u32 at = address;
  tile |= place(shared) >> 4;
  if (i == 0) {
    if (which == 0) asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;" ::"r"(at), "l"(tile) : "memory");
    if (which == 1) asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;" ::"r"(at), "l"(tile) : "memory");
    if (which == 2) asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(at), "l"(tile) : "memory");
    commit(done);
  }
  wait(done, 0);
  for (u32 c = 0; c < 8; c++) out[8 * i + c] = load(at + lane + c);
  wait_loads();
  __syncthreads();
  if (i < 32) dealloc<1>(at, 32);
}

// ---- a tensor copy, spelled as for one block of a pair ----

struct alignas(64) Map { char bytes[128]; };

extern "C" __global__ void box(const __grid_constant__ Map map, u32* out) {
  __shared__ __align__(128) u32 shared[64];
  __shared__ __align__(8) u64 memory;
  u32 done = place(&memory);
  if (threadIdx.x == 0) {
    init(done);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(done) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::1"
                 " [%0], [%1, {%2, %2}], [%3];" ::"r"(place(shared)), "l"(&map), "r"(4), "r"(done) : "memory");
  }
  __syncthreads();
  wait(done, 0);
  if (threadIdx.x < 64) out[threadIdx.x] = shared[threadIdx.x];
}

// ---- faults: two products of 128 x 32 in turn, correct for fault 0 ----

enum Fault {
  NONE, BAD_COUNT, NOT_FREED, FREED_TWICE, FREED_IN_PART, AFTER_RELINQUISH, NOT_ALLOCATED, OTHER_QUARTER, NO_WAIT,
  ONE_WARP_WAITS, OVERWRITTEN, NO_PROXY_FENCE, NO_WAIT_STORE, NO_WAIT_LOAD, FIRST_ADDS, ALL_LANES, WGMMA_DESCRIPTOR,
  BAD_SIDE, NOT_COMMITTED, SUMS_OVERWRITTEN, NO_BARRIER, TOO_MUCH, FREED_EARLY, OUTSIDE,
  AFTER_COMMIT, TWO_THREADS,
};

extern "C" __global__ void faults(u32 fault, u32* out) {
  __shared__ __align__(1024) u32 tiles[2048];  // 128 rows of A and 32 of B, 32 bytes each, then 12 KB that are too near the end
  __shared__ __align__(8) u64 memory[2];
  __shared__ u32 address, second;
  u32 i = threadIdx.x, warp = i / 32, lane = (warp * 32) << 16, done = place(memory);
  if (fault == AFTER_RELINQUISH && warp == 0) relinquish<1>();
  if (warp == 0) alloc<1>(place(&address), fault == BAD_COUNT ? 48 : 64);
  if (fault == TOO_MUCH && warp == 0) alloc<1>(place(&second), 512);
  if (fault != AFTER_RELINQUISH && warp == 0) relinquish<1>();
  if (i == 0) init(done), init(done + 8);
  for (u32 word = i; word < 2048; word += 128) tiles[word] = 0x3C003C00;
  if (fault != NO_PROXY_FENCE) proxy_fence();
  if (fault != NO_BARRIER) __syncthreads();
  u32 at = address, shape = 1 << 4 | 32 / 8 << 17 | 128 / 16 << 24;
  if (fault == NO_BARRIER) __syncthreads();
  u64 fixed = fault == WGMMA_DESCRIPTOR ? 0 : 1ull << 46;
  u64 form = fixed | 128ull / 16 << 16 | 256ull / 16 << 32;  // no swizzle: 8 rows of 16 bytes, two of these for k
  u64 a = form | place(tiles) >> 4, b = form | (place(tiles) + 4096) >> 4;
  if (fault == OUTSIDE) b = form | (place(tiles) + 100000) >> 4;
  if (fault == BAD_SIDE) shape = 1 << 4 | 24 / 8 << 17 | 128 / 16 << 24;
  if (fault == NOT_ALLOCATED) at += 48;
  if (fault == NO_WAIT_STORE) store(at + lane, 0);
  if (fault == NO_WAIT_STORE) {
    before_sync();
    __syncthreads();
  }
  if (fault == ALL_LANES ? warp == 0 : i == 0) {
    multiply(at, a, b, shape, 0, fault == FIRST_ADDS);
    if (fault != NOT_COMMITTED) commit(done);
  }
  if (fault == AFTER_COMMIT && i == 0) multiply(at, a, b, shape, 0, 1);
  if (fault == TWO_THREADS && i == 32) {
    multiply(at, a, b, shape, 0, 0);
    commit(done + 8);
  }
  if (fault == NO_WAIT_STORE) wait_stores();
  if (fault == OVERWRITTEN && i == 64) tiles[0] = 0;
  if (fault == FREED_EARLY && warp == 0) dealloc<1>(at, 64);
  if (fault != NO_WAIT && fault != NOT_COMMITTED && (fault != ONE_WARP_WAITS || warp == 0)) wait(done, 0);
  after_sync();
  u32 quarter = fault == OTHER_QUARTER ? (warp ^ 1) * 32 << 16 : lane;
  if (fault != NOT_COMMITTED) out[i] = load(at + quarter);
  if (fault != NO_WAIT_LOAD) wait_loads();
  before_sync();
  if (fault != SUMS_OVERWRITTEN) __syncthreads();
  after_sync();
  if (i == 0 && fault != NOT_COMMITTED) {
    multiply(at, a, b, shape, 0, 1);
    commit(done + 8);
  }
  if (fault != NOT_COMMITTED) wait(done + 8, 0);
  __syncthreads();
  if (warp == 0 && fault != NOT_FREED && fault != FREED_EARLY) {
    dealloc<1>(at, fault == FREED_IN_PART ? 32 : 64);
    if (fault == FREED_TWICE) dealloc<1>(at, 64);
  }
}
