"""Measure constants of predicted times: paths of memory, handshakes and launches; needs a Hopper GPU and CuPy.

    python benchmarks/memory_paths.py

prints bytes per clock of reads from L2 by footprint, with one reader of each line and with all multiprocessors as
readers; the latency and the rate of bulk copies; clocks of a round trip between two warps through mbarriers, and of
__syncthreads(); and microseconds of empty launches by grid. Clocks are those of SM's counter, seconds those of events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cupy

SOURCE = r"""
struct alignas(16) Quad { unsigned x, y, z, w; };
__device__ __forceinline__ Quad through_l2(const Quad* p) {
  Quad v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Each of `groups` groups of blocks reads all `count` quads, `turns` times.
extern "C" __global__ void read_l2(const Quad* from, long long count, int groups, int turns, unsigned* to) {
  unsigned sum = 0;
  const long long each = gridDim.x / groups, block = blockIdx.x % each;
  const long long thread = block * blockDim.x + threadIdx.x, threads = each * blockDim.x;
  for (int turn = 0; turn < turns; ++turn) {
    for (long long i = thread; i < count; i += 4 * threads) {
      Quad v[4];
#pragma unroll
      for (int d = 0; d < 4; ++d) v[d] = through_l2(from + (i + d * threads < count ? i + d * threads : i));
#pragma unroll
      for (int d = 0; d < 4; ++d) sum += v[d].x ^ v[d].y ^ v[d].z ^ v[d].w;
    }
  }
  if (sum == 12345) to[0] = sum;
}
// Warps write 4 bytes a lane: `each` lanes adjacent, the next ones `apart` bytes further; `turns` times.
extern "C" __global__ void write_l2(char* to, int each, int apart, long long span, int turns) {
  const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x, warp = thread / 32;
  const int lane = threadIdx.x % 32;
  const long long threads = (long long)gridDim.x * blockDim.x;
  long long at = warp * (32 / each) * apart + lane / each * apart + lane % each * 4;
  for (int turn = 0; turn < turns; ++turn) {
    at %= span;
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to + at), "r"(turn) : "memory");
    at += threads / each * apart;
  }
}
__device__ __forceinline__ void expect(unsigned bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra ended; "
               "bra again; ended: }" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk(unsigned to, const char* from, unsigned bytes, unsigned bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void init(unsigned bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// `deep` copies of `bytes` are under way at a time; a block reads `span` bytes from block * apart on.
extern "C" __global__ void bulk_copies(const char* from, long long span, long long apart, int bytes, int deep,
                                       int count, long long* clocks) {
  extern __shared__ __align__(128) char shared[];
  const unsigned start = (unsigned)__cvta_generic_to_shared(shared), bars = start + deep * bytes;
  if (threadIdx.x) return;
  for (int i = 0; i < deep; ++i) init(bars + 8 * i, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const char* mine = from + blockIdx.x * apart;
  long long at = 0, begin = clock64();
  for (int i = 0; i < count + deep; ++i) {
    const unsigned slot = i % deep;
    if (i >= deep) wait(bars + 8 * slot, (i / deep - 1) & 1);
    if (i < count) {
      expect(bars + 8 * slot, bytes);
      bulk(start + slot * bytes, mine + at, bytes, bars + 8 * slot);
      at = at + bytes < span ? at + bytes : 0;
    }
  }
  clocks[blockIdx.x] = clock64() - begin;
}
extern "C" __global__ void ping_pong(int turns, long long* clocks) {
  __shared__ __align__(8) long long bar[2];
  const unsigned a = (unsigned)__cvta_generic_to_shared(bar), b = a + 8;
  if (threadIdx.x == 0) { init(a, 1); init(b, 1); }
  __syncthreads();
  const long long begin = clock64();
  if (threadIdx.x == 0) {
    for (int i = 0; i < turns; ++i) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(a) : "memory");
      wait(b, i & 1);
    }
    clocks[0] = clock64() - begin;
  } else if (threadIdx.x == 128) {
    for (int i = 0; i < turns; ++i) {
      wait(a, i & 1);
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
    }
  }
}
extern "C" __global__ void barriers(int turns, long long* clocks) {
  const long long begin = clock64();
  for (int i = 0; i < turns; ++i) __syncthreads();
  if (threadIdx.x == 0) clocks[0] = clock64() - begin;
}
// Stores and fused multiply-adds as a ladder's inner loop has them: `kind` 0 adds f32, 1 f64.
extern "C" __global__ void multiply_adds(int kind, int turns, double* to, long long* clocks) {
  float f[8];
  double d[8];
  for (int i = 0; i < 8; ++i) f[i] = threadIdx.x + i, d[i] = threadIdx.x + i;
  const long long begin = clock64();
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (kind == 0) f[i] = f[i] * 1.0001f + 0.5f;
      else d[i] = d[i] * 1.0001 + 0.5;
    }
  }
  const long long end = clock64();
  double sum = 0;
  for (int i = 0; i < 8; ++i) sum += f[i] + d[i];
  if (sum == 1.2345) to[0] = sum;
  if (threadIdx.x == 0 && blockIdx.x == 0) clocks[0] = end - begin;
}
extern "C" __global__ void nothing() {}
"""

MIB = 1 << 20
Launch = Callable[[], None]


def seconds(launch: Launch, times: int = 5) -> float:
    """The least time of a launch by events."""
    launch()
    best = float("inf")
    for _ in range(times):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        best = min(best, cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
    return best


def reads(module: Any, sms: int, clock: float) -> None:
    """Bytes per clock of all multiprocessors together, by footprint and by number of readers."""
    kernel, to = module.get_function("read_l2"), cupy.zeros(1, cupy.uint32)
    for mib in (2, 8, 16, 24, 30, 40, 50, 60, 80, 128, 512):
        memory = cupy.zeros(mib * MIB // 4, cupy.uint32)
        row = [f"{mib:4} MiB:"]
        for groups in (1, 4, 12, sms):
            turns = max(1, 2048 // (mib * groups))
            arguments = (memory, memory.nbytes // 16, groups, turns, to)
            took = seconds(lambda arguments=arguments: kernel((2 * sms,), (1024,), arguments), 3)
            rate = memory.nbytes * groups * turns / took
            row.append(f"{groups} readers {rate / 1e12:.2f} TB/s {rate / clock:.0f} B/clk")
        sys.stdout.write("  ".join(row) + "\n")
    memory = cupy.zeros(8 * MIB // 4, cupy.uint32)
    for blocks in (1, 2, 8, 32, 66, 132):
        took = seconds(lambda blocks=blocks: kernel((blocks,), (1024,), (memory, 8 * MIB // 16, blocks, 8, to)), 3)
        sys.stdout.write(f"{blocks} blocks: {8 * MIB * 8 / took / clock:.1f} B/clk each\n")


def writes(module: Any, sms: int, clock: float) -> None:
    """Bytes per clock of all stores to L2 together: of whole lines, of whole sectors, and of parts of sectors."""
    kernel = module.get_function("write_l2")
    for mib in (16, 256):
        memory = cupy.zeros(mib * MIB // 4, cupy.uint32)
        for each, apart in ((32, 128), (8, 32), (8, 8192), (4, 32), (4, 8192), (1, 32)):
            turns = 256
            arguments = (memory, each, apart, memory.nbytes - 64 * apart, turns)
            took = seconds(lambda arguments=arguments: kernel((2 * sms,), (1024,), arguments), 3)
            sectors = 2 * sms * 32 * turns * max(32 // each, 4)
            rate = 2 * sms * 1024 * turns * 4 / took
            sys.stdout.write(
                f"{mib} MiB, {4 * each} bytes together, {apart} apart: {rate / clock:.0f} B/clk, "
                f"{sectors / took / clock:.1f} sectors/clk, {rate / 1e12:.2f} TB/s\n"
            )


def copies(module: Any, sms: int, clock: float) -> None:
    """Latency of a bulk copy, and bytes per clock with several under way, from L2 and from memory."""
    kernel = module.get_function("bulk_copies")
    kernel.max_dynamic_shared_size_bytes = 200 << 10
    memory, out = cupy.zeros(1 << 29, cupy.uint8), cupy.zeros(sms, cupy.int64)
    for blocks, apart, span in ((1, 0, MIB), (1, 0, 512 * MIB), (sms, 0, MIB), (sms, MIB // 8, MIB // 8),
                                (sms, 3 * MIB, 3 * MIB)):  # fmt: skip
        for size in (128, 2048, 16384, 32768):
            row = [f"{blocks} blocks, {span / MIB:g} MiB each, {apart / MIB:g} apart, copies of {size}:"]
            for deep in (1, 2, 4, 6):
                shared, count = deep * (size + 8), 400
                arguments = (memory, span - size, apart, size, deep, count, out)
                kernel((blocks,), (32,), arguments, shared_mem=shared)
                kernel((blocks,), (32,), arguments, shared_mem=shared)
                clocks = float(cupy.mean(out[:blocks])) / count
                row.append(f"{deep} deep {clocks:.0f} clk {size / clocks:.1f} B/clk")
            sys.stdout.write("  ".join(row) + "\n")
    _ = clock


def handshakes(module: Any) -> None:
    """Clocks of a round trip through two mbarriers, and of __syncthreads()."""
    out = cupy.zeros(1, cupy.int64)
    for _ in range(2):
        module.get_function("ping_pong")((1,), (256,), (1000, out))
    sys.stdout.write(f"mbarrier round trip: {int(out[0]) / 1000:.1f} clocks\n")
    for threads in (32, 128, 256, 512, 1024):
        for _ in range(2):
            module.get_function("barriers")((1,), (threads,), (1000, out))
        sys.stdout.write(f"__syncthreads of {threads}: {int(out[0]) / 1000:.1f} clocks\n")
    for kind, name in enumerate(("f32", "f64")):
        for threads in (32, 256, 1024):
            for _ in range(2):
                module.get_function("multiply_adds")((132,), (threads,), (kind, 1000, cupy.zeros(1), out))
            sys.stdout.write(f"8000 multiply-adds in {name}, {threads} threads: {int(out[0])} clocks\n")


def launches(module: Any, sms: int) -> None:
    """Microseconds of an empty launch in a row of 200, replayed as a graph, by grid and block."""
    kernel = module.get_function("nothing")
    for threads in (128, 256, 1024):
        row = [f"empty launches of {threads} threads:"]
        for blocks in (1, sms, 8 * sms, 64 * sms, 512 * sms):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                for _ in range(200):
                    kernel((blocks,), (threads,), ())
                graph = stream.end_capture()
                graph.launch()
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record()
                graph.launch()
                end.record()
                end.synchronize()
            row.append(f"{blocks} blocks {cupy.cuda.get_elapsed_time(begin, end) * 5:.2f} us")
        sys.stdout.write("  ".join(row) + "\n")


def main() -> None:
    """Print all tables."""
    module = cupy.RawModule(code=SOURCE, options=("--std=c++17",))
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    sms, clock = properties["multiProcessorCount"], properties["clockRate"] * 1e3
    sys.stdout.write(f"{properties['name'].decode()}, {sms} multiprocessors, {clock / 1e9:.2f} GHz\n")
    handshakes(module)
    copies(module, sms, clock)
    reads(module, sms, clock)
    writes(module, sms, clock)
    launches(module, sms)


if __name__ == "__main__":
    main()
