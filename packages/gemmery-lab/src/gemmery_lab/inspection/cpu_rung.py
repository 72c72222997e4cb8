"""A CPU rung as an inspection: its inner loop as compiled, its accesses in a model of the caches, and its roofs.

For ARM, llvm-mca predicts the share of its peak that each micro-kernel reaches: the cycles of its multiply-adds alone
by those of the inner loop. LLVM's models of cores know instructions, latencies and units; panels are in L1.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.cpu import assembly, images, jit, llvm, loops
from gemmery.cpu.accesses import LINE, Site, caches, counted
from gemmery.cpu.launch import Launch
from gemmery.cpu.target import ARM_FEATURES, Target, host, instruction_set
from gemmery.errors import ArgumentError, CompileError, DeviceError, RefusedError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.diff import pseudocode
from gemmery.ladder.rung import Rung, find
from gemmery.problem import Problem
from gemmery_emulator.pages import numerals
from gemmery_lab import asked
from gemmery_lab.inspection.records import Accesses, Cost, CpuInspection
from gemmery_lab.report.sheet import Columns, Sheet, tabulate

SIDE, FEW, MOST = 512, 16, 1024  # sides by default, of rungs for small products, and of the largest that is counted
# The rates of a core, round figures of those built since 2020: what each is called, and the cycles that one takes.
RATES = {
    "multiply-add instructions": ("2 a cycle", 1 / 2),
    "additions in one chain": ("4 cycles each", 4.0),
    "loads": ("2 a cycle", 1 / 2),
    "stores": ("1 a cycle", 1.0),
    "lines into L1": ("32 bytes a cycle", LINE / 32),
    "lines into L2": ("16 bytes a cycle", LINE / 16),
    "translations of pages": ("7 cycles each", 7.0),
    "bytes of A, B, C, each once": ("8 a cycle", 1 / 8),
}
REST = "panels and stack"


def inspect_cpu_rung(
    name: str, m: int = 0, n: int = 0, k: int = 0, dtype: str = "", config: Mapping[str, int] | None = None
) -> CpuInspection:
    """Return the loops, the inner loop in assembly, the accesses and the roofs of a CPU rung for one product.

    Raises ArgumentError for an element type, a side or a config that it does not take, RefusedError where it refuses.
    """
    row = find(CPU, name)
    if name.startswith("amx_"):
        raise RefusedError(f"rung {name}: loads of tile registers are not counted, so it cannot be inspected")
    settings = {**row.default, **asked.keys(row, config or {})}
    problem = _problem(row, m, n, k, dtype)
    launch = row.build(problem, settings)
    assert isinstance(launch, Launch)
    target, module, _, generate = jit.origin(launch.address)
    sites, ranges = _counted(launch, problem)
    operands = _by_operand(sites, ranges)
    touches = Counter[str]()
    for site in sites:
        touches[site.function] += site.touches
    function = max(touches, key=lambda name: touches[name])
    code = llvm.assembly(target, module, generate)
    loop = assembly.inner_loop(code, function)
    l1, l2 = (numerals.size(size) for size in caches(target))
    return CpuInspection(
        rung=name,
        idea=row.idea,
        problem=problem,
        config=row.explicit(settings),
        cpu=f"{host().cpu}: {target.isa}, L1 {l1}, L2 {l2}",
        loops=pseudocode(row.source, name),
        function=function,
        loop=loop,
        step=sum(map(assembly.multiply_adds, loop)),
        costs=_costs(problem, loop, operands["all"]),
        operands=operands,
        ir=str(generate()),
        assembly=code,
    )


def _problem(row: Rung, m: int, n: int, k: int, dtype: str) -> Problem:
    """The product of these sides, or one that the rung takes: squares, a vector, two columns, or small ones."""
    dtype = asked.spelled(dtype) or "f32"
    if dtype not in row.dtypes:
        raise ArgumentError(f"dtype {dtype!r}: rung {row.name} takes {', '.join(row.dtypes)}")
    for option, side in (("m", m), ("n", n), ("k", k)):
        if side > MOST:
            raise ArgumentError(f"{option}={side}: accesses of a CPU rung are counted for sides of at most {MOST}")
    kinds = (n or SIDE, 0), (n or SIDE, 1), (n or SIDE, 2), (n or FEW, 0)
    shapes = [(side, columns or side, side) for side, columns in kinds]
    problems = [Problem(m or rows, wide, k or deep, dtype, asked.result_type(dtype)) for rows, wide, deep in shapes]
    reasons = [row.refuses(problem) for problem in problems]
    if all(reasons):
        raise RefusedError(f"rung {row.name}: {reasons[0]}")
    return problems[reasons.index("")]


def _counted(launch: Launch, problem: Problem) -> tuple[tuple[Site, ...], dict[str, range]]:
    """What each load and store of a kernel did in the product of random matrices, and where A, B and C were."""
    m, n, k = problem.m, problem.n, problem.k
    arrays = [random_operand(problem.dtype, shape) for shape in ((m, k), (k, n))]
    arrays.append(np.zeros((m, n), dtypes.get(problem.out).stored))
    room = 1 << 20  # matrices begin at multiples of it, so that they fall into the same sets in every run
    places = [sum(-(-array.nbytes // room) * room for array in arrays[:i]) for i in range(3)]
    memory = np.empty(places[2] + arrays[2].nbytes + room, np.uint8)
    first = -(-memory.ctypes.data // room) * room
    views, ranges = [], {}
    for name, array, place in zip("ABC", arrays, places, strict=True):
        at, kind = first + place, problem.out if name == "C" else problem.dtype
        memory[at - memory.ctypes.data :][: array.nbytes] = array.view(np.uint8).ravel()
        views.append(View(at, (1, *array.shape), (0, *array.strides), kind))
        ranges[name] = range(at, at + array.nbytes)
    return counted(launch, *views), ranges


def random_operand(dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Standard normal numbers; bf16 and float8 as bits, integers from -8 to 8."""
    random = np.random.default_rng(0)
    row = dtypes.get(dtype)
    if row.kind == "i":
        return random.integers(-8, 9, shape).astype(row.numpy)
    if dtype in dtypes.FLOAT8:  # numbers from 1 to 4 with either sign
        least, most = (exponent - row.normal << row.fraction for exponent in (1, 3))
        return (random.integers(least, most, shape) | random.integers(0, 2, shape) << 7).astype(np.uint8)
    values = random.standard_normal(shape)
    if dtype == "bf16":
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(row.numpy)


def _by_operand(sites: Sequence[Site], ranges: Mapping[str, range]) -> dict[str, Accesses]:
    """The accesses to A, B, C and other memory, and to all of it."""
    own: dict[str, list[Site]] = {name: [] for name in (*ranges, REST)}
    for site in sites:
        own[next((name for name, place in ranges.items() if site.address in place), REST)].append(site)

    def traffic(part: Sequence[Site]) -> Accesses:
        kinds = (sum(site.touches for site in part if site.kind == kind) for kind in ("loads", "stores", "prefetches"))
        return Accesses(*kinds, *(sum(getattr(site, name) for site in part) for name in ("l1", "l2", "pages")))

    return {name: traffic(part) for name, part in {**own, "all": sites}.items()}


def _costs(problem: Problem, loop: Sequence[str], whole: Accesses) -> dict[str, Cost]:
    """What 1,000 multiply-adds need: instructions of the inner loop; lines, pages and bytes of the whole product."""
    kinds = Counter(kind for line in loop for kind in assembly.kinds(line))
    step, total = 1000 / max(1, sum(map(assembly.multiply_adds, loop))), 1000 / (problem.flops / 2)
    counts = (
        *(step * kinds["multiply-add"], step * assembly.chain(loop), step * kinds["load"], step * kinds["store"]),
        *(total * whole.l1, total * whole.l2, total * whole.pages, total * problem.bytes),
    )
    rates = zip(RATES.items(), counts, strict=True)
    return {name: Cost(count, count * cycles, rate) for (name, (rate, cycles)), count in rates}


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
    types = images.product(target, Problem(8, 8, 8, dtype, out))
    code = llvm.assembly(target, types.name, lambda: loops.packed(target, types))
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
    names, versions, by_types = dict[str, str](), set[str](), dict[str, dict[str, str]]()
    for row in rows:
        alike = row.core.split()[0].endswith(row.model.split()[-1].lower())
        names[row.core] = row.core if alike else f"{row.core} ({row.model})"
        text = f"{row.share:.0%} {row.instruction}, {row.multiply_adds / row.cycles:.3g}"
        by_types.setdefault(f"{row.dtype} -> {row.out}", {})[row.core] = text
        versions.add(row.llvm)
    columns: Columns[tuple[str, dict[str, str]]] = [
        ("types", lambda line: line[0]),
        *((name, lambda line, core=core: line[1][core]) for core, name in names.items()),
    ]
    note = (
        f"Predicted by llvm-mca {', '.join(sorted(versions))}, not measured: the share of the peak of the multiply-add "
        "units, the instruction, and multiply-adds a cycle. In brackets the core whose model LLVM uses."
    )
    return tabulate("Micro-kernels for ARM, predicted", columns, by_types.items(), [note])
