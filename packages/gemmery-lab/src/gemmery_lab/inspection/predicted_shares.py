"""The share of its peak that each micro-kernel for ARM reaches, predicted by llvm-mca from LLVM's models of cores.

The inner loop is compiled for each core, and its cycles a pass are compared with those of its multiply-adds alone. The
model knows instructions, latencies and units; panels are in L1, and branches are foreseen.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from gemmery.cpu import assembly, build, jit, loops
from gemmery.cpu.target import ARM_FEATURES, Target, instruction_set
from gemmery.errors import CompileError, DeviceError
from gemmery.problem import Problem
from gemmery_lab.report.sheet import Cell, Sheet

_V8_2 = frozenset({"asimd", "atomics", "asimdhp", "asimddp"})
_V9 = _V8_2 | {"asimdfhm", "i8mm", "bf16"}
# LLVM's name of each core, and after a space the instruction set if it is not its usual one; its features; and what
# LLVM's model of it describes.
CORES = {
    "neoverse-v2": (_V9, "Neoverse V2"),
    "neoverse-v1": (_V9, "Neoverse V1"),
    "neoverse-v1 sve_256": (_V9 | {"sve"}, "Neoverse V1"),
    "neoverse-n1": (_V8_2, "Neoverse N1"),
    "apple-m1": (_V8_2 | {"asimdfhm"}, "Apple A7"),
    "cortex-a76": (_V8_2, "Cortex-A57"),
}
TYPES = (("f32", "f32"), ("f64", "f64"), ("f16", "f16"), ("bf16", "bf16"), ("int8", "int32"), ("int32", "int32"))
_PASSES = 200
_OLDEST = 17  # the first llvm-mca with a model of Neoverse V2


@dataclass(frozen=True)
class PredictedShare:
    """A pass of an inner loop as llvm-mca predicts it."""

    core: str
    model: str  # the core whose model LLVM uses
    dtype: str
    out: str
    instruction: str
    multiply_adds: int  # in a pass
    cycles: float
    share: float  # of the peak: the cycles of the multiply-adds alone, divided by those of the loop
    llvm: str  # the version of llvm-mca


def predict(cores: Iterable[str] = CORES) -> tuple[PredictedShare, ...]:
    """Return a prediction for each core and pair of element types.

    >>> predict(["neoverse-n1"])[0].instruction  # doctest: +SKIP
    'fmla'

    Raises DeviceError where there is no llvm-mca that is new enough.
    """
    program, version = _llvm_mca()
    return tuple(_predicted(program, version, core, *types) for core in cores for types in TYPES)


def _predicted(program: str, version: str, core: str, dtype: str, out: str) -> PredictedShare:
    features, model = CORES[core]
    llvms, _, isa = core.partition(" ")
    target = Target(isa or instruction_set(features), features, core, "aarch64", llvm=llvms)
    types = build.product(target, Problem(8, 8, 8, dtype, out))
    code = jit.assembly(target, types.name, lambda: loops.packed(target, types))
    loop = assembly.inner_loop(code, "tiles")
    adds = [line for line in loop if assembly.multiply_adds(line)]
    cycles, least = (_cycles(program, llvms, features, lines) for lines in (loop, adds))
    segments = target.vector_bytes // 16  # of a register; what is counted are those of one
    count, name = segments * sum(map(assembly.multiply_adds, loop)), adds[0].partition(" ")[0]
    return PredictedShare(core, model, dtype, out, name, count, cycles, round(least / cycles, 3), version)


def _llvm_mca() -> tuple[str, str]:
    """Return the newest llvm-mca on the PATH, and its version."""
    versions = dict[tuple[int, ...], str]()
    for name in ("llvm-mca", *(f"llvm-mca-{major}" for major in range(_OLDEST, 40))):
        if path := shutil.which(name):
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            if match := re.search(r"LLVM version (\d+)\.(\d+)\.(\d+)", answer):
                versions[tuple(map(int, match.groups()))] = path
    newest = max(versions, default=(0,))
    if newest[0] < _OLDEST:
        there = f"llvm-mca {newest[0]} is too old" if versions else "there is no llvm-mca on the PATH"
        raise DeviceError(f"{there}: install LLVM {_OLDEST} or newer, on Debian and Ubuntu a package like llvm-19")
    return versions[newest], ".".join(map(str, newest))


def _cycles(program: str, core: str, features: Iterable[str], lines: Iterable[str]) -> float:
    """Return the cycles of a pass, the mean of many."""
    text = "\n".join(re.sub(r"\.L\w+$", "0", line) for line in lines)
    flags = ",".join(f"+{llvms}" for name, *_, llvms in ARM_FEATURES if name in features)
    command = [program, "-mtriple=aarch64", f"-mcpu={core}", f"-mattr={flags}", f"-iterations={_PASSES}"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    match = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if done.returncode or not match:
        raise CompileError(f"llvm-mca cannot read the loop for {core}: {done.stderr[:500]}")
    return int(match[1]) / _PASSES


def sheet(rows: Iterable[PredictedShare]) -> Sheet:
    """Return predictions as a table: the share of the peak, the instruction, and multiply-adds a cycle."""
    rows = tuple(rows)
    cores = list(dict.fromkeys((row.core, row.model) for row in rows))
    head = (
        "types",
        *(
            core if core.split()[0].endswith(model.split()[-1].lower()) else f"{core} ({model})"
            for core, model in cores
        ),
    )
    lines = []
    for types in dict.fromkeys((row.dtype, row.out) for row in rows):
        cells = [row for core, _ in cores for row in rows if (row.core, row.dtype, row.out) == (core, *types)]
        texts = [f"{row.share:.0%} {row.instruction}, {row.multiply_adds / row.cycles:.3g}" for row in cells]
        lines.append(tuple(map(Cell, (" -> ".join(types), *texts))))
    versions = ", ".join(sorted({row.llvm for row in rows}))
    note = (
        f"Predicted by llvm-mca {versions}, not measured: the share of the peak of the multiply-add units, the "
        "instruction, and multiply-adds a cycle. In brackets the core whose model LLVM uses."
    )
    return Sheet("Micro-kernels for ARM, predicted", head, tuple(lines), (note,))
