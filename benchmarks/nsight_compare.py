"""Compare the emulator's counters with Nsight Compute's, in a file that nsight.py wrote.

    python benchmarks/nsight_compare.py FILE [RUNG ...]

Each product is run again on the emulator. For each launch these are compared: requests and sectors of global memory,
wavefronts of shared memory and their ideal, instructions by kind; in total, and accesses also by place in the source.
The bytes of C are compared too. Known differences are in nsight/known.toml, with their reasons, and so are products
that are not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gemmery.cuda.geometry import Geometry
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung, find
from gemmery.problem import Problem
from gemmery_emulator.counters.counts import Counts
from gemmery_lab.emulated_product import EmulationOptions, Gemm, run_rung
from gemmery_lab.measure.work import Work, operands

ARCH = "sm_90a"
KNOWN = Path(__file__).parent / "nsight" / "known.toml"
HARDWARE = ("requests_ld", "sectors_ld", "requests_st", "sectors_st")  # counted by the hardware, for a whole launch
# Machine opcodes by the kind under which the emulator counts them. HFMA2 only loads constants here.
ARITHMETIC = {
    **dict.fromkeys(("FFMA", "DFMA"), "fma"),
    **dict.fromkeys(("FADD", "DADD"), "fadd"),
    **dict.fromkeys(("HMMA", "DMMA"), "mma"),
    "BAR": "bar",
    "SHFL": "shfl",
}
ACCESSES = {
    **dict.fromkeys(("LDG", "LDS"), "ld"),
    **dict.fromkeys(("STG", "STS", "ST"), "st"),
    **dict.fromkeys(("ATOM", "ATOMG", "ATOMS"), "atom"),
    **dict.fromkeys(("RED", "REDG"), "red"),
    "LDSM": "ldmatrix",
    "STSM": "stmatrix",
    "LDGSTS": "cp.async",
}
SHARED = {"LDS": "loads", "LDSM": "loads", "STS": "stores", "STSM": "stores", "LDGSTS": "stores"}
GLOBAL = {"LDG": "sectors_ld", "LDGSTS": "sectors_ld", "STG": "sectors_st"}

Counted = Mapping[str, int]


@dataclass(frozen=True)
class Difference:
    """A counter on which the emulator and the profiler differ."""

    name: str  # "ld" of a whole launch, "ld at load.cuh:89" of a place in its source
    ours: int
    theirs: int

    def __str__(self) -> str:
        return f"{self.name}: {self.ours:,} emulated, {self.theirs:,} measured"


def machine(file: Path) -> dict[str, Any]:
    """Return the GPU and the version of ncu of a file."""
    head: dict[str, Any] = json.loads(file.read_text(encoding="utf-8").partition("\n")[0])
    return head


def stored(file: Path) -> list[dict[str, Any]]:
    """Return the products in a file."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "rung" in row]


def kind(row: dict[str, Any]) -> str:
    """Return the type in which a product is computed: "f16", "tf32"."""
    dtype: str = row["work"]["precision"] or row["work"]["dtype"]
    return dtype


@cache
def noted() -> dict[str, Any]:
    """Return the known differences: the tables of nsight/known.toml."""
    return tomllib.loads(KNOWN.read_text(encoding="utf-8"))


def known(row: dict[str, Any]) -> list[Difference]:
    """Return the known differences of a product."""
    counts = [count for table in noted()["known"] for count in table["counts"]]
    return [Difference(*rest) for rung, of, *rest in counts if (rung, of) == (row["rung"], kind(row))]


def aside(row: dict[str, Any]) -> str:
    """Return why a product is not compared; "" if it is."""
    product = [row["rung"], kind(row), row["work"]["b_layout"]]
    return next((table["why"] for table in noted()["aside"] if product in table["products"]), "")


def alike(row: dict[str, Any]) -> frozenset[str]:
    """Return sets of source lines that a product's machine code is known to confuse."""
    pairs = [lines for table in noted()["alike"] for lines in table["lines"]]
    return frozenset(line for rung, of, *lines in pairs if (rung, of) == (row["rung"], kind(row)) for line in lines)


def measured(launch: dict[str, Any]) -> Counted:
    """Return the profiler's counters of a launch."""
    counts = sum((Counter(access(line)) for line in launch["memory"]), Counter())
    for opcode, executed in launch["instructions"].items():
        if opcode.split(".")[0] in ARITHMETIC:
            counts[ARITHMETIC[opcode.split(".")[0]]] += executed
    return {**counts, **{name: launch[name] for name in HARDWARE}}


def access(line: dict[str, Any]) -> dict[str, int]:
    """Return the counters of the accesses of one opcode at one line.

    ptxas puts `@!PT LDS RZ, [RZ]` in front of cp.async, three times: they load nothing, and are not counted.
    """
    opcode = line["opcode"].split(".")[0]
    if opcode == "LDS" and not line["wavefronts"]:
        return {}
    counts = {ACCESSES[opcode]: line["executed"]}
    if opcode in SHARED:
        counts |= {f"{SHARED[opcode]}_{name}": line[name] for name in ("wavefronts", "ideal")}
    if opcode in GLOBAL:
        counts[GLOBAL[opcode]] = line["sectors"]
    return counts


def counted(counts: Counts) -> Counted:
    """Return the emulator's counters of a launch, or of a place in its source."""
    loads, stores = counts.global_.loads, counts.global_.stores
    banks = {"loads": counts.shared.loads, "stores": counts.shared.stores}
    return {
        **dict(zip(HARDWARE, (loads.requests, loads.sectors, stores.requests, stores.sectors), strict=True)),
        **{f"{way}_wavefronts": shared.wavefronts for way, shared in banks.items()},
        **{f"{way}_ideal": shared.wavefronts_ideal for way, shared in banks.items()},
        **{name: counts.instructions[name] for name in (*ARITHMETIC.values(), *ACCESSES.values())},
    }


def differences(row: dict[str, Any], launches: list[Counts]) -> Iterator[Difference]:
    """Return where the emulator's counters of a product's launches differ from the profiler's."""
    for launch, counts in zip(row["launches"], launches, strict=True):
        ours, theirs = counted(counts), measured(launch)
        for name in sorted({*ours, *theirs}):
            if ours.get(name, 0) != theirs.get(name, 0):
                yield Difference(name, ours.get(name, 0), theirs.get(name, 0))
        yield from by_place(counts, launch, alike(row))


def by_place(counts: Counts, launch: dict[str, Any], together: frozenset[str]) -> Iterator[Difference]:
    """Return where the counters of accesses differ at a place in the source.

    ptxas gives an instruction its own line, or that of an inlined call around it, so a place is a set of lines that
    cannot be distinguished. `together` are lines that ptxas is known to confuse.
    """
    frames = {tuple(map(str, lines)): counted(part) for lines, part in counts.frames.items()}
    lines: dict[str, Counter[str]] = {}
    for line in launch["memory"]:
        lines.setdefault(f"{line['file']}:{line['line']}", Counter()).update(access(line))
    for name in sorted({name for values in lines.values() for name in values}):
        theirs = {line: values[name] for line, values in lines.items() if values[name]}
        listed = together.union(theirs)
        ours = {at: values[name] for at, values in frames.items() if values[name]}
        where = {at: listed.intersection(at) or frozenset(at[-1:]) for at in ours}
        for place in joined([*where.values(), *(frozenset((line,)) for line in theirs), together]):
            here = sum(value for at, value in ours.items() if where[at] <= place)
            there = sum(value for line, value in theirs.items() if line in place)
            if here != there:
                yield Difference(f"{name} at {', '.join(sorted(place))}", here, there)


def joined(sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Merge sets that have common elements.

    >>> joined([frozenset("ab"), frozenset("c"), frozenset("bd")]) == [frozenset("c"), frozenset("abd")]
    True
    """
    merged: list[frozenset[str]] = []
    for lines in sets:
        touched = [other for other in merged if other & lines]
        merged = [other for other in merged if not other & lines] + [lines.union(*touched)]
    return merged


def emulated(row: dict[str, Any]) -> tuple[list[Counts], str]:
    """Return the emulator's counters of each launch, and the SHA-256 of the bytes of C."""
    rung, problem = product(row)
    a, b, c = operands(Work(**row["work"]))
    c.view(np.uint8)[...] = 0xFF
    runs = run_rung(
        rung, problem, row.get("config", {}), Gemm(a[None], b[None], c[None]), EmulationOptions(ARCH, check=False)
    )
    return [run.counts for run in runs], hashlib.sha256(c.tobytes()).hexdigest()


def ptx_digest(text: str) -> str:
    """Return the SHA-256 of a PTX text without its `.file` lines, which name the compiler's working folder."""
    return hashlib.sha256(re.sub(r"^[ \t]*\.file[^\n]*$", "", text, flags=re.MULTILINE).encode()).hexdigest()


def geometry_of(row: dict[str, Any]) -> Geometry:
    """Return how a stored product is launched on an H200."""
    rung, problem = product(row)
    assert rung.geometry is not None
    return rung.geometry(problem, {**rung.default, **row.get("config", {})})  # that of today's choice, if none is named


def product(row: dict[str, Any]) -> tuple[Rung, Problem]:
    """Return a stored product and its rung: the arrays were CuPy's, aligned to 16 bytes."""
    problem = Work(**row["work"]).problem._replace(device="h200", alignments=(16, 16, 16))
    return find(CUDA, row["rung"]), problem


def main() -> None:
    """Compare a file's products, of all rungs or of some."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("rungs", nargs="*", help="names in the GPU ladder; all when none is given")
    options = parser.parse_args()
    for row in stored(options.file):
        if options.rungs and row["rung"] not in options.rungs:
            continue
        if reason := aside(row):
            sys.stdout.write(f"{row['rung']}, {Work(**row['work'])}: not compared: {reason}\n")
            continue
        launches, digest = emulated(row)
        expected = known(row)
        lines = [f"{each}{' (known)' * (each in expected)}" for each in differences(row, launches)]
        lines += ["the bytes of C"] * (digest != row["c"])
        sys.stdout.write("".join(f"{row['rung']}, {Work(**row['work'])}: {line}\n" for line in lines or ["equal"]))


if __name__ == "__main__":
    main()
