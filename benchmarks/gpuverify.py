"""Run the racy CUDA kernels of GPUVerify's test suite on the emulator, and print what it finds as JSON.

    git clone https://github.com/mc-imperial/gpuverify
    python benchmarks/gpuverify.py gpuverify/testsuite/CUDA > benchmarks/results/gpuverify.json

GPUVerify proves the absence of races for all arguments; here arrays hold small numbers, and two values are tried for
whole numbers. Dead stores stay, as the kernels are compiled for a debugger. What only GPUVerify and Clang know is
replaced.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

import gemmery as gm

RACY = (
    "atomics/add_tid",
    "atomics/add_zero",
    "cooperative_groups/fail/race",
    "curand_tests/fail/curand_mtgp32_block_race",
    "curand_tests/fail/curand_mtgp32_race",
    "curand_tests/fail/curand_race",
    "curand_tests/fail/init_race",
    "fail_tests/race_on_shared",
    "fail_tests/shared_int",
    "fresh_arrays/fail/array",
    "fresh_arrays/fail/inherit",
    "fresh_arrays/fail/struct_char",
    "fresh_arrays/fail/struct_float",
    "fresh_arrays/fail/struct_nested",
    "loop_unwind",
    "memcpy/fail_arrayofstruct",
    "memcpy/fail_overstep",
    "memcpy/lentoobig",
    "memcpy/notexactdiv",
    "misc/fail/miscfail3",
    "misc/fail/miscfail4",
    "param_values/value_causing_race",
    "pointeranalysistests/testbasicaliasing",
    "pointertests/cast",
    "warpsync/bad_inter_group",
    "warpsync/broken_shuffle",
    "warpsync/equality_abstraction_issue",
)
PRELUDE = """
#define __requires(x)
#define __requires_fresh_array(x)
#define __assert(x)
#define __builtin_memcpy(to, from, count) \\
  for (int at = 0; at < int(count); ++at) reinterpret_cast<char*>(to)[at] = reinterpret_cast<const char*>(from)[at]
"""
# Generators whose state is in memory: what cuRAND's functions of these names read and write.
RANDOM = """
struct curandState { unsigned s; };
struct curandStateMtgp32_t { unsigned s[8192], at; };
__device__ inline void curand_init(unsigned seed, unsigned, unsigned, curandState* state) {
  state->s = seed;
  state->s = state->s * 69069 + 1;
}
__device__ inline unsigned curand(curandState* state) { return state->s = state->s * 69069 + 1; }
__device__ inline float curand_uniform(curandState* state) { return curand(state) * 0x1p-32f; }
__device__ inline unsigned curand(curandStateMtgp32_t* state) {
  unsigned at = state->at + threadIdx.x;
  unsigned value = state->s[(at + 1) % 8192] ^ state->s[at % 8192];
  state->s[at % 8192] = value;
  __syncthreads();
  return value;
}
"""
NUMBERS = (1, 185)


def argument(parameter: str, number: int) -> Any:
    """Return the value for a parameter as C++ declares it."""
    if "*" in parameter:
        kinds = {"float": np.float32, "unsigned": np.uint32, "int": np.int32}
        kind = next((kinds[word] for word in parameter.replace("*", " ").split() if word in kinds), np.uint32)
        return (np.arange(1 << 16) % 251).astype(kind)
    if parameter.split(maxsplit=1)[0] in ("int", "unsigned"):
        return np.int32(number)
    return tuple(np.zeros(64, np.float32) for _ in range(42 if "array" in parameter else 1))


def kinds(folder: Path, name: str) -> list[str]:
    """Return the kinds of findings in a kernel of the suite, those of its warnings as "warning: equal stores"."""
    text = (folder / name / "kernel.cu").read_text()
    sizes = [int(re.search(rf"{side}Dim=\[?(\d+)", text)[1]) for side in ("grid", "block")]  # type: ignore[index]
    kernel, listed = re.search(r"__global__\s+void\s+(\w+)\s*\(([^)]*)\)", text).groups()  # type: ignore[union-attr]
    if "p[42]" in text:
        listed = "array"
    code = re.sub(r'#include\s*[<"]cuda.h[>"]', "", text)
    all_kinds: set[str] = set()
    for number in NUMBERS:
        args = [argument(each.strip(), number) for each in listed.split(",") if each.strip()]
        prelude = PRELUDE + (RANDOM if "curand" in text else "")
        run = gm.emulate(prelude + code, kernel, sizes[0], min(sizes[1], 1024), args, options=("-G",))
        all_kinds |= {each.kind for each in run.findings} | {f"warning: {each.kind}" for each in run.warnings}
    return sorted(all_kinds)


def main() -> None:
    """Print the results of all racy kernels."""
    folder, results = Path(sys.argv[1]), {}
    for name in RACY:
        try:
            results[name] = kinds(folder, name)
        except gm.GemmeryError as error:
            results[name] = [f"refused: {str(error).splitlines()[0]}"]
    races = sum("race" in each for each in results.values())
    equal = sum("warning: equal stores" in each and "race" not in each for each in results.values())
    counts = {"racy": len(RACY), "found": races + equal, "as a race": races, "as a warning alone": equal}
    sys.stdout.write(json.dumps({**counts, "kernels": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
