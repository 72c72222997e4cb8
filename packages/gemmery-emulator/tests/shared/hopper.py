"""Kernels of Hopper's own instructions on whole numbers, so that a device and the emulator agree to the bit.

A case is a launch and the arrays it writes; tests compare them with NumPy's results, with those of a device that
data/hopper_h200.json holds, and on a device with its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gemmery_emulator.hopper.tensormap import TensorMap, tensor_map

PIPELINE = (Path(__file__).parents[1] / "data" / "hopper_pipeline.cu").read_text()
PIPELINE_SHARED = 3 * 2 * 16384 + 32768 + 64
HEAD = """
typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(64) Map { char bytes[128]; };
__device__ u32 place(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ void wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
}
"""


@dataclass(frozen=True)
class Case:
    """A launch; `args` are arrays, tensor maps and NumPy scalars, and the last one is written."""

    source: str
    kernel: str
    grid: tuple[int, ...]
    block: int
    args: tuple[Any, ...]
    shared: int = 0

    @property
    def written(self) -> np.ndarray:
        """The array that holds the result."""
        last = self.args[-1]
        return last.array if isinstance(last, TensorMap) else last

    def again(self) -> Case:
        """The same on copies of its arrays."""
        return replace(self, args=tuple(_copied(one) for one in self.args))


def _copied(given: Any) -> Any:
    if isinstance(given, TensorMap):
        return replace(given, array=given.array.copy())
    return given.copy() if isinstance(given, np.ndarray) else given


def whole(shape, dtype, seed, least=-4, most=4):
    """Whole numbers of a type; of fp8 and bf16 as bits."""
    numbers = np.random.default_rng(seed).integers(least, most, shape, endpoint=True)
    return numbers.astype(dtype)


# ---- products ----


def multiplying(opcode, registers, constants, in_registers=False, declared="f", start="i + threadIdx.x"):
    """A kernel of one warpgroup that executes one instruction on bytes it is given, and writes its registers."""
    kind = {"f": "float", "r": "u32"}[declared]
    first = registers + 4 if in_registers else registers + 1
    sums = ", ".join(f"%{i}" for i in range(registers))
    of_a = f"{{{', '.join(f'%{registers + i}' for i in range(4))}}}" if in_registers else f"%{registers}"
    given = ", ".join(f'"+{declared}"(sum[{i}])' for i in range(registers))
    a = ", ".join(f'"r"(a[{i}])' for i in range(4)) if in_registers else '"l"(desc_a)'
    behind = "".join(f", {one}" for one in constants)
    return (
        HEAD
        + f"""
extern "C" __global__ void multiply(const uint4* bytes, int count, u64 desc_a, u64 desc_b, int adds, {kind}* out) {{
  extern __shared__ __align__(1024) uint4 shared[];
  for (int i = threadIdx.x; i < count; i += 128) shared[i] = bytes[i];
  desc_a += place(shared) >> 4;
  desc_b += place(shared) >> 4;
  u32 a[4];
  for (int i = 0; i < 4; ++i) a[i] = ((const u32*)bytes)[4 * threadIdx.x + i];
  {kind} sum[{registers}];
  for (int i = 0; i < {registers}; ++i) sum[i] = {start};
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{first + 1}, 0; {opcode} {{{sums}}}, {of_a}, %{first}, p{behind}; }}"
               : {given} : {a}, "l"(desc_b), "r"(adds));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < {registers}; ++i) out[threadIdx.x * {registers} + i] = sum[i];
}}
"""
    )


MODES = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor(start, leading, stride, swizzle, base=0):
    """The 64 bits of a matrix descriptor; bytes."""
    return np.uint64(start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | MODES[swizzle] << 62)


# A in the first 32 KB and B in the second: start, leading, stride, swizzle, base; of 16-bit types, k = 16, n = 128.
K_MAJOR = {
    "plain": (0, 128, 256, 0),
    "plain far": (256, 8192, 128, 0),
    "32": (1024, 16, 256, 32),
    "64": (0, 16, 512, 64),
    "64 on": (32, 16, 512, 64),
    "128": (0, 16, 1024, 128),
    "128 on": (96, 16, 1024, 128),
    "128 far": (2048, 16, 1536, 128),
    "128 base": (384, 16, 1024, 128, 3),
    "64 base": (128, 16, 512, 64, 1),
}
ROWS_MAJOR = {
    "plain": (0, 2048, 128, 0),
    "32": (0, 1024, 256, 32),
    "64": (512, 2048, 512, 64),
    "128": (0, 4096, 1024, 128),
    "128 on": (2048, 8192, 2048, 128),
}
BYTES = 1 << 16


SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


@dataclass(frozen=True)
class Product:
    """One wgmma.mma_async, its operands in 64 KB of bytes."""

    sums: str = "f32"
    a: str = "f16"
    b: str = "f16"
    n: int = 128
    of_a: tuple[int, ...] = K_MAJOR["128"]
    of_b: tuple[int, ...] = K_MAJOR["128"]
    turned: tuple[int, int] = (0, 0)
    sign: int = 1
    adds: int = 1
    in_registers: bool = False

    @cached_property
    def case(self) -> Case:
        """Its launch."""
        depth = 32 // SIZES[self.a]
        opcode = f"wgmma.mma_async.sync.aligned.m64n{self.n}k{depth}.{self.sums}.{self.a}.{self.b}"
        registers = self.n // (4 if self.sums == "f16" else 2)
        constants = () if self.sums == "s32" else (self.sign, 1)
        if SIZES[self.a] == 2:
            constants += self.turned[1:] if self.in_registers else self.turned
        declared = "f" if self.sums == "f32" else "r"
        ones = {"start": "0x3C003C00"} if self.sums == "f16" else {}  # in halves
        source = multiplying(opcode, registers, constants, self.in_registers, declared, **ones)
        start, *rest = self.of_b
        out = np.zeros((128, registers), np.float32 if declared == "f" else np.uint32)
        descriptors = descriptor(*self.of_a), descriptor(start + BYTES // 2, *rest)
        args = (operand_bytes(self.a), np.int32(BYTES // 16), *descriptors, np.int32(self.adds), out)
        return Case(source, "multiply", (1,), 128, args, BYTES)


PRODUCTS = {
    **{f"a k {name}": Product(of_a=layout) for name, layout in K_MAJOR.items()},
    **{f"b k {name}": Product(of_b=layout) for name, layout in K_MAJOR.items()},
    **{f"a rows {name}": Product(of_a=layout, turned=(1, 0)) for name, layout in ROWS_MAJOR.items()},
    **{f"b rows {name}": Product(of_b=layout, turned=(0, 1)) for name, layout in ROWS_MAJOR.items()},
    "negated": Product(sign=-1),
    "first": Product(adds=0),
    "a in registers": Product(in_registers=True),
    **{f"n {n}": Product(n=n) for n in (8, 24, 64, 256)},
    "f16 f16": Product("f16", n=64),
    "bf16": Product("f32", "bf16", "bf16", 64),
    "tf32": Product("f32", "tf32", "tf32", 64),
    "e4m3 e5m2": Product("f32", "e4m3", "e5m2", 64),
    "f16 e5m2 e4m3": Product("f16", "e5m2", "e4m3", 64),
    "s8 u8": Product("s32", "s8", "u8", 64),
    "u8 s8": Product("s32", "u8", "s8", 64),
}


def operand_bytes(kind):
    """64 KB of small whole numbers of a type."""
    if kind == "f16":
        return whole(BYTES // 2, np.float16, 1).view(np.uint8)
    if kind in ("bf16", "tf32"):
        bits = whole(BYTES // (2 if kind == "bf16" else 4), np.float32, 2).view(np.uint32)
        return ((bits >> 16).astype(np.uint16) if kind == "bf16" else bits).view(np.uint8)
    if kind in ("e4m3", "e5m2"):  # bytes that are small in both: 0, and powers of two with either sign
        some = np.array([0x00, 0x38, 0x3C, 0x40, 0xB8, 0xBC, 0xC0], np.uint8)
        return some[np.random.default_rng(3).integers(0, len(some), BYTES)]
    return np.random.default_rng(4).integers(0, 256, BYTES).astype(np.uint8)


# ---- boxes ----

LOADING = """
extern "C" __global__ void load(const __grid_constant__ Map map, int bytes, int x, int y, int z, uint4* out) {
  extern __shared__ __align__(1024) uint4 shared[];  // the box, then an mbarrier
  u32 to = place(shared), ready = to + bytes;
  for (int i = threadIdx.x; i < bytes / 16; i += 32) shared[i] = make_uint4(7, 7, 7, 7);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ready) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ready), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.tensor.@d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {@c}], [%5];"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(ready) : "memory");
  }
  wait(ready, 0);
  for (int i = threadIdx.x; i < bytes / 16; i += 32) out[i] = shared[i];
}
"""
STORING = """
extern "C" __global__ void store(int bytes, int x, int y, int z, const uint4* given, const __grid_constant__ Map map) {
  extern __shared__ __align__(1024) uint4 shared[];
  for (int i = threadIdx.x; i < bytes / 16; i += 32) shared[i] = given[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("cp.@rasync.bulk.tensor.@d.global.shared::cta.@atile.bulk_group [%0, {@c}], [%4];"
                 ::"l"(&map), "r"(x), "r"(y), "r"(z), "r"(place(shared)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
"""


def _filled(text, dimensions, first, adds=False):
    named = ", ".join(f"%{first + i}" for i in range(dimensions))
    text = text.replace("@d", f"{dimensions}d").replace("@c", named)
    return HEAD + text.replace("@r", "reduce." if adds else "").replace("@a", "add." if adds else "")


# Array, box, swizzle, steps; where the box begins, from the innermost.
BOXES = {
    "inside": (((96, 72), np.float16), (16, 64), 0, None, (8, 16, 0)),
    "row 5": (((96, 72), np.float16), (16, 32), 0, None, (8, 5, 0)),
    "32": (((96, 72), np.float16), (32, 16), 32, None, (16, 16, 0)),
    "64": (((96, 72), np.float16), (32, 32), 64, None, (8, 1, 0)),
    "128": (((96, 72), np.float16), (32, 64), 128, None, (0, 64, 0)),
    "before": (((96, 72), np.float16), (32, 64), 128, None, (-8, -3, 0)),
    "beyond": (((93, 72), np.float16), (32, 64), 128, None, (40, 80, 0)),
    "far beyond": (((93, 72), np.float16), (32, 64), 128, None, (400, 8, 0)),
    "bytes": (((40, 48), np.uint8), (16, 32), 32, None, (16, 20, 0)),
    "words": (((40, 12), np.float32), (16, 8), 32, None, (4, 30, 0)),
    "steps": (((64, 40), np.float32), (32, 8), 0, (3, 1), (4, 8, 0)),
    "cube": (((5, 20, 40), np.float16), (3, 8, 16), 32, None, (32, 15, 3)),
    "line": (((99,), np.int32), (64,), 0, None, (72, 0, 0)),
}


def boxed(name):
    """The array of a box."""
    shape, dtype = BOXES[name][0]
    return whole(shape, dtype, 5)


def boxes():
    """By name: boxes loaded, stored and added."""
    for name, (_, box, swizzle, steps, where) in BOXES.items():
        array = boxed(name)
        made = tensor_map(array, box, swizzle=swizzle, steps=steps)
        sides = [-(-side // step) for side, step in zip(box, steps or (1,) * len(box), strict=True)]
        size = int(np.prod(sides)) * array.itemsize
        at = tuple(np.int32(one) for one in where)
        out = np.zeros(size // 16 * 4, np.uint32)
        shared = size + 16
        yield (
            f"load {name}",
            Case(_filled(LOADING, array.ndim, 2), "load", (1,), 32, (made, np.int32(size), *at, out), shared),
        )
        data = whole(size // array.itemsize, array.dtype, 6)
        for adds in (False, True) if array.dtype in (np.float16, np.float32, np.int32) else (False,):
            into = tensor_map(array.copy(), box, swizzle=swizzle, steps=steps)
            args = (np.int32(size), *at, data, into)
            text = _filled(STORING, array.ndim, 1, adds)
            yield f"{'add' if adds else 'store'} {name}", Case(text, "store", (1,), 32, args, shared)


# ---- clusters ----

CLUSTERS = (
    HEAD
    + """
extern "C" __global__ void __cluster_dims__(2, 2, 1) cluster(u32* out) {
  __shared__ u32 numbers[32];
  u32 rank, ranks, own = blockIdx.x + gridDim.x * blockIdx.y, x, y, cx, cy, nx, there, named, value, old;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
  asm volatile("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(x));
  asm volatile("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(y));
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(cx));
  asm volatile("mov.u32 %0, %%clusterid.y;" : "=r"(cy));
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(nx));
  numbers[threadIdx.x] = 100 * own + threadIdx.x;
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  u32 next = (rank + 1) % ranks;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place(numbers + threadIdx.x)), "r"(next));
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(named) : "r"(there));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  u32* generic;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"(numbers + threadIdx.x), "r"(next));
  u32 again = *(volatile u32*)generic;
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], 7;" : "=r"(old) : "r"(there) : "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  u32 all[] = {rank, ranks, x, y, cx, cy, nx, named, value, again, old, numbers[threadIdx.x]};
  for (int i = 0; i < 12; ++i) out[(own * 32 + threadIdx.x) * 12 + i] = all[i];
}
"""
)


BARRIERS = (
    HEAD
    + """
__device__ u32 pending(u64 state) {
  u32 count;
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(state));
  return count;
}
__device__ u32 over(u32 barrier, u64 state) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "l"(state) : "memory");
  return done;
}
extern "C" __global__ void barriers(const u32* given, u32* out) {
  __shared__ __align__(16) u32 copied[64];
  __shared__ __align__(8) u64 memory[4];
  u32 first = place(memory), second = first + 8, third = first + 16, fourth = first + 24, lane = threadIdx.x;
  u64 one = 0, two = 0, three = 0, dropped = 0, last = 0;
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 5;" ::"r"(first) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 3;" ::"r"(second) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(third) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(fourth) : "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(one) : "r"(first) : "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 3;" : "=l"(two) : "r"(first) : "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(three) : "r"(first) : "memory");
    wait(first, 0);
    asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];" : "=l"(dropped) : "r"(second) : "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" ::"r"(second) : "memory");
    wait(second, 0);
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(last) : "r"(second) : "memory");
    wait(second, 1);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 48;" ::"r"(fourth) : "memory");
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(fourth) : "memory");
    asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 64;" ::"r"(fourth) : "memory");
    wait(fourth, 0);
  }
  __syncwarp();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place(copied + lane)), "l"(given + lane) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(third) : "memory");
  wait(third, 0);
  u32 next = place(copied + 32 + lane);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(next), "l"(given + 32 + lane) : "memory");
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(third) : "memory");
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(third) : "memory");
  wait(third, 1);
  out[32 + lane] = copied[31 - lane];
  out[64 + lane] = copied[63 - lane];
  if (lane == 0) {
    u32 all[] = {pending(one), pending(two), pending(three), pending(dropped), pending(last), over(first, one),
                 over(first, three), over(second, last)};
    for (int i = 0; i < 8; ++i) out[i] = all[i];
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(first) : "memory");
  }
}
"""
)
ROWS = (
    HEAD
    + """
extern "C" __global__ void __cluster_dims__(2, 1, 1) rows(const uint4* given, uint4* out) {
  __shared__ __align__(128) uint4 to[64];
  __shared__ __align__(8) u64 barrier;
  u32 ready = place(&barrier), rank = blockIdx.x % 2, lane = threadIdx.x;
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ready) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (lane == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(ready) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], 256, [%2], %3;"
                 ::"r"(place(to + 16 * rank)), "l"(given + 16 * blockIdx.x), "r"(ready), "h"(short(3)) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];"
                 ::"r"(place(to + 32)), "l"(given + 32 * blockIdx.x), "r"(ready) : "memory");
  }
  __syncwarp();
  wait(ready, 0);
  to[lane].x += 1000;
  to[lane + 32].x += 2000;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (lane == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;"
                 ::"l"(out + 64 * blockIdx.x), "r"(place(to)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
"""
)

EXCHANGE = (
    HEAD
    + """
extern "C" __global__ void __cluster_dims__(2, 1, 1) exchange(u32* out) {
  __shared__ __align__(16) u32 from[32], to[32];
  __shared__ __align__(8) u64 barrier;
  u32 ready = place(&barrier), other = blockIdx.x % 2 ^ 1, lane = threadIdx.x, there, its_barrier;
  if (lane == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ready) : "memory");
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place(to)), "r"(other));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its_barrier) : "r"(ready), "r"(other));
  from[lane] = 100 * blockIdx.x + lane;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (lane == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(ready) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                 ::"r"(there), "r"(place(from)), "r"(its_barrier) : "memory");
  }
  __syncwarp();
  wait(ready, 0);
  out[blockIdx.x * 32 + lane] = to[lane];
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
"""
)


def pipeline(m, n, k, fault="", least=-1, most=1):
    """C = A B^T by tiles of 128 x 128 in clusters of two."""
    a, b, c = (
        whole((m, k), np.float16, 7, least, most),
        whole((n, k), np.float16, 8, least, most),
        np.zeros((m, n), np.float16),
    )
    maps = (
        tensor_map(a, (64, 64), swizzle=128),
        tensor_map(b, (128, 64), swizzle=128),
        tensor_map(c, (64, 64), swizzle=128),
    )
    head = f"#define FAULT_{fault}\n" if fault else "\n"
    # The array that is written comes last, so the depth comes before the maps.
    return Case(
        head + PIPELINE, "pipeline", (-(-n // 256) * 2, -(-m // 128)), 384, (np.int32(k), *maps), PIPELINE_SHARED
    )


CASES = {
    **{name: one.case for name, one in PRODUCTS.items()},
    **dict(boxes()),
    "cluster": Case(CLUSTERS, "cluster", (4, 6), 32, (np.zeros((24, 32, 12), np.uint32),)),
    "barriers": Case(BARRIERS, "barriers", (1,), 32, (np.arange(64, dtype=np.uint32), np.zeros(96, np.uint32))),
    "rows": Case(ROWS, "rows", (4,), 32, (np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32))),
    "exchange": Case(EXCHANGE, "exchange", (4,), 32, (np.zeros(128, np.uint32),)),
    "pipeline": pipeline(200, 328, 424),
}
