// C = A B^T of float16: a producer warp copies tiles by tensor maps, two warpgroups multiply them, in three stages.
// Two blocks beside each other share their rows of A: each copies half of them to both. With a FAULT_... it is wrong.
typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(64) Map {
  char bytes[128];
};

constexpr int TILE = 128, DEPTH = 64, STAGES = 3, BLOCKS = 2;
constexpr u32 SIDE = TILE * DEPTH * 2;  // bytes of a tile of A or of B
constexpr u32 HALF = SIDE / BLOCKS;

__device__ u32 place(const void* p) { return u32(__cvta_generic_to_shared(p)); }

__device__ u64 descriptor(u32 start) {  // rows of 128 bytes, 8 of them 1024 apart, swizzled
#ifdef FAULT_SWIZZLE
  constexpr u64 mode = 2;
#else
  constexpr u64 mode = 1;
#endif
  return (start & 0x3FFFF) >> 4 | u64(1) << 16 | u64(1024 >> 4) << 32 | mode << 62;
}

__device__ void wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
}

__device__ void arrive(u32 barrier, u32 rank) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
               ::"r"(barrier), "r"(rank) : "memory");
}

__device__ void load(u32 to, const Map& map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

__device__ void load_to_all(u32 to, const Map& map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(short((1 << BLOCKS) - 1)) : "memory");
}

__device__ void multiply(float* sum, u64 a, u64 b, int adds) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "%64, %65, p, 1, 1, 0, 0; }"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]),
                 "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]),
                 "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]),
                 "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]),
                 "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]),
                 "+f"(sum[30]), "+f"(sum[31]), "+f"(sum[32]), "+f"(sum[33]), "+f"(sum[34]), "+f"(sum[35]),
                 "+f"(sum[36]), "+f"(sum[37]), "+f"(sum[38]), "+f"(sum[39]), "+f"(sum[40]), "+f"(sum[41]),
                 "+f"(sum[42]), "+f"(sum[43]), "+f"(sum[44]), "+f"(sum[45]), "+f"(sum[46]), "+f"(sum[47]),
                 "+f"(sum[48]), "+f"(sum[49]), "+f"(sum[50]), "+f"(sum[51]), "+f"(sum[52]), "+f"(sum[53]),
                 "+f"(sum[54]), "+f"(sum[55]), "+f"(sum[56]), "+f"(sum[57]), "+f"(sum[58]), "+f"(sum[59]),
                 "+f"(sum[60]), "+f"(sum[61]), "+f"(sum[62]), "+f"(sum[63])
               : "l"(a), "l"(b), "r"(adds));
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(384)
pipeline(int k, const __grid_constant__ Map map_a, const __grid_constant__ Map map_b,
         const __grid_constant__ Map map_c) {
  extern __shared__ __align__(1024) char tiles[];  // stages of A and B, C, barriers
  u32 shared = place(tiles), of_c = shared + STAGES * 2 * SIDE;
  u32 full = of_c + TILE * TILE * 2, empty = full + 8 * STAGES;
  int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  int row = blockIdx.y * TILE, column = blockIdx.x * TILE, steps = (k + DEPTH - 1) / DEPTH;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * i), "r"(2 * BLOCKS) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#ifndef FAULT_NO_FIRST_BARRIER
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && lane == 0) {
      for (int step = 0; step < steps; ++step) {
        int stage = step % STAGES, round = step / STAGES;
        u32 a = shared + stage * 2 * SIDE, b = a + SIDE, ready = full + 8 * stage;
#ifndef FAULT_NO_EMPTY_WAIT
        wait(empty + 8 * stage, round & 1 ^ 1);
#endif
#ifdef FAULT_SMALL_EXPECT
        u32 bytes = SIDE;
#else
        u32 bytes = 2 * SIDE;
#endif
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ready), "r"(bytes) : "memory");
        load_to_all(a + rank * HALF, map_a, step * DEPTH, row + rank * TILE / BLOCKS, ready);
        load(b, map_b, step * DEPTH, column, ready);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float sum[64];
    for (int i = 0; i < 64; ++i) sum[i] = 0;
    for (int step = 0; step < steps; ++step) {
      int stage = step % STAGES, round = step / STAGES;
      u32 a = shared + stage * 2 * SIDE, b = a + SIDE;
#ifdef FAULT_PARITY
      wait(full + 8 * stage, round & 1 ^ 1);
#else
      wait(full + 8 * stage, round & 1);
#endif
#ifndef FAULT_NO_FENCE
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
      for (int part = 0; part < DEPTH / 16; ++part)
        multiply(sum, descriptor(a + group * HALF + part * 32), descriptor(b + part * 32), step + part > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#ifndef FAULT_LATE_WAIT
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
      if (threadIdx.x % 128 < BLOCKS) arrive(empty + 8 * stage, threadIdx.x % 128);
    }
#ifdef FAULT_LATE_WAIT
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
    u32 tile = of_c + group * 64 * TILE * 2;  // 64 rows, twice 64 columns, swizzled
    for (int i = 0; i < 64; i += 2) {
      int r = warp * 16 + lane / 4 + i / 2 % 2 * 8, c = i / 4 * 8 + lane % 4 * 2;
      u32 pair, byte = c % 64 * 2 ^ (r & 7) << 4;
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(sum[i + 1]), "f"(sum[i]));
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + c / 64 * 8192 + r * 128 + byte), "r"(pair) : "memory");
    }
#ifndef FAULT_NO_PROXY_FENCE
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
#ifndef FAULT_NO_BARRIER
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
#endif
    if (threadIdx.x % 128 == 0) {
      for (int part = 0; part < 2; ++part)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                     ::"l"(&map_c), "r"(column + 64 * part), "r"(row + 64 * group), "r"(tile + 8192 * part) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
