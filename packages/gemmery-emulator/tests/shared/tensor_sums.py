"""Kernels of one matrix instruction each, on operands that show how a tensor core rounds its sums.

data/sums_h200.npz holds the operands, and what an H200 made of them: for eight kinds of operands (of similar size; of
all exponents; graded along k; below the least normal number; near the largest; with infinities and NaN; that cancel;
mostly zeros) 4 rows of A, 8 columns of B and the sums before, as bytes, and the sums after by instruction.
A larger run on the same machine, 442,368 sums of 27 instructions, had no difference from the emulator either.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from hopper import SIZES, Case

DATA = Path(__file__).parents[1] / "data" / "sums_h200.npz"
KINDS = 8  # of operands
ROWS = (1, 22, 43, 60)  # of the 64 that four warps multiply
WGMMA = """
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  u64 desc = u64(u32(__cvta_generic_to_shared(s)) >> 4) | u64(128 >> 4) << 16 | u64(256 >> 4) << 32;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{ .reg .pred p; setp.ne.b32 p, @one, 0; @opcode {@sums}, {@a}, @desc, p, 1, 1@turned; }"
               : @out : @in, "l"(desc), "r"(1));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");"""
MMA = """
  asm volatile("@opcode {@sums}, {@a}, {@b}, {@sums};" : @out : @in);"""
KERNEL = """
typedef unsigned u32;
typedef unsigned long long u64;
extern "C" __global__ void add(const u32* A, const u32* B, const @word* C, @word* D) {
  __shared__ __align__(1024) u32 s[64];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  A += blockIdx.x * 512 + (warp * 16 + lane / 4) * 8 + lane % 4;
  B += blockIdx.x * 64;
  if (threadIdx.x < 64) s[threadIdx.x % 8 / 4 * 32 + threadIdx.x / 8 * 4 + threadIdx.x % 4] = B[threadIdx.x];
  u32 a[4] = {A[0], A[64], A[4], A[68]};
  u32 b[2] = {B[lane / 4 * 8 + lane % 4], B[lane / 4 * 8 + lane % 4 + 4]};
  @word d[@count];
  int first = (blockIdx.x * 64 + warp * 16 + lane / 4) * 2 * @count + lane % 4 * (@count / 2);
  for (int i = 0; i < @count; ++i) d[i] = C[first + @at];@multiply
  for (int i = 0; i < @count; ++i) D[first + @at] = d[i];
}
"""


def opcodes():
    """The instructions: the type of A and B, that of the sums, and the bytes along k."""
    found = {}
    for kind, sums in product(("f16", "bf16", "tf32", "e4m3", "e5m2"), ("f32", "f16")):
        if sums == "f16" and kind in ("bf16", "tf32"):
            continue
        depth = 32 // SIZES[kind]
        found[f"wgmma.mma_async.sync.aligned.m64n8k{depth}.{sums}.{kind}.{kind}"] = kind, sums, 32
        for size in (32, 16):
            k = size // SIZES[kind]
            found[f"mma.sync.aligned.m16n8k{k}.row.col.{sums}.{kind}.{kind}.{sums}"] = kind, sums, size
    return found


def source(opcode):
    """The kernel of an instruction: four warps, a block for each kind of operands."""
    kind, sums, size = opcodes()[opcode]
    count, letter = (4, "f") if sums == "f32" else (2, "r")
    wgmma = opcode.startswith("wgmma")
    registers = [f"a[{i}]" for i in range(size // 8)] + ([] if wgmma else [f"b[{i}]" for i in range(size // 16)])
    words = {
        "word": "float" if sums == "f32" else "u32",
        "multiply": WGMMA if wgmma else MMA,
        "opcode": opcode,
        "sums": _numbers(0, count),
        "a": _numbers(count, size // 8),
        "b": _numbers(count + size // 8, size // 16),
        "desc": f"%{count + 4}",
        "one": f"%{count + 5}",
        "turned": ", 0" if SIZES[kind] == 2 else "",
        "out": ", ".join(f'"+{letter}"(d[{i}])' for i in range(count)),
        "in": ", ".join(f'"r"({register})' for register in registers),
        "at": "(i / 2 * 64 + i % 2)" if sums == "f32" else "(i * 32)",
        "count": str(count),
    }
    text = KERNEL.replace("@multiply", words.pop("multiply"))
    for name in sorted(words, key=len, reverse=True):
        text = text.replace(f"@{name}", words[name])
    return text


def _numbers(first, count):
    return ", ".join(f"%{first + i}" for i in range(count))


@cache
def recorded():
    """The arrays of the file by name."""
    with np.load(DATA) as arrays:
        return dict(arrays)


def case(opcode):
    """A launch of the instruction on the recorded operands."""
    kind, sums, _ = opcodes()[opcode]
    width = 32 if sums == "f32" else 16
    a, before = np.zeros((KINDS, 64, 32), np.uint8), np.zeros((KINDS, 64, width), np.uint8)
    a[:, ROWS], before[:, ROWS] = recorded()[f"a {kind}"], recorded()[f"before {kind} {sums}"]
    word = np.float32 if sums == "f32" else np.uint32
    arrays = (
        a.view(np.uint32),
        recorded()[f"b {kind}"].view(np.uint32),
        before.view(word),
        np.zeros_like(before).view(word),
    )
    return Case(source(opcode), "add", (KINDS,), 128, arrays)


def rows(written):
    """The bytes of the rows that are recorded."""
    return written.view(np.uint8)[:, ROWS]
