"""Profile the rungs of the GPU ladder with Nsight Compute and store its counters.

This needs a CUDA device, `ncu` on the PATH, and its module `ncu_report` (in extras/python next to it) on PYTHONPATH.

    python benchmarks/nsight.py [RUNG ...]

It writes benchmarks/nsight/<machine>.jsonl, which nsight_compare.py compares with the emulator.

The first line of a file is the machine, each other line a product: a square one of side 512, or a matrix-vector
product for rungs that take no other, with operands that `gemmery_lab.measure.work.operands` generates identically
everywhere. A line holds everything needed to repeat the product (the kernels, their launches, the digest of their PTX),
the SHA-256 of the bytes of C, and for each launch: requests and sectors of global memory by the hardware's counters;
instructions executed by warps, by kind; and the memory accesses by source line and opcode (Nsight Compute, "Source
Counters").
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nsight_compare import ptx_digest

from gemmery.arrays import View
from gemmery.cuda import driver, nvrtc, sass
from gemmery.cuda.geometry import Geometry
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung, find
from gemmery_lab.measure import record
from gemmery_lab.measure.torch_operands import alignment
from gemmery_lab.measure.work import Work, operands

SIDES = 512, 16  # the smaller for a rung that refuses the larger
DTYPES = ("f64", "f32", "f16")
FOLDER = Path(__file__).parent / "nsight"
GLOBAL = {
    f"{what}_{way}": f"l1tex__t_{what}_pipe_lsu_mem_global_op_{way}.sum"
    for what in ("requests", "sectors")
    for way in ("ld", "st")
}
SOURCE = {  # by instruction
    "executed": "inst_executed",
    "wavefronts": "memory_l1_wavefronts_shared",
    "ideal": "memory_l1_wavefronts_shared_ideal",
    "sectors": "memory_l2_theoretical_sectors_global",
}
MEMORY = ("LDG", "STG", "ST", "LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOM", "ATOMG", "ATOMS", "RED", "REDG")


def products(rungs: list[Rung], device: str) -> Iterator[tuple[Rung, Work]]:
    """Yield each rung with its products in each element type: square, or a vector times a matrix and its transpose."""
    for rung in rungs:
        for dtype in (dtype for dtype in DTYPES if dtype in rung.dtypes):
            for precision in ("", "tf32") if dtype == "f32" else ("",):
                like = partial(Work, dtype=dtype, out=dtype, precision=precision)
                squares = [like(side, side, side) for side in SIDES]
                vectors = [like(1, SIDES[0], SIDES[0], b_layout=layout) for layout in ("col", "row")]
                square, vector = (
                    [work for work in works if not rung.refuses(work.problem._replace(device=device))]
                    for works in (squares, vectors)
                )
                yield from ((rung, work) for work in square[:1] or vector)
                if square or vector:
                    break


def launch(rungs: list[Rung], plan: Path) -> None:
    """Run every product once, and write the launches, in order, as JSON lines."""
    with plan.open("w", encoding="utf-8") as file:
        for rung, work in products(rungs, "cuda:0"):
            kernel, digest = run(rung, work)
            launches = [described(geometry) for geometry in (*kernel.geometry.before, kernel.geometry)]
            file.write(json.dumps({"rung": rung.name, "work": asdict(work), "c": digest, "launches": launches}) + "\n")


def run(rung: Rung, work: Work) -> tuple[Any, str]:
    """Return the rung's kernel after one call, and the SHA-256 of the bytes of C, row by row."""
    host, stream = operands(work), driver.Stream()
    memories = [driver.Memory(x.nbytes) for x in host]
    for memory, x in zip(memories, host, strict=True):
        memory.write(x if x.base is None else x.base)
    memories[2].fill(0xFF)  # NaN in every type
    driver.synchronize()
    views = [
        View(memory.pointer, x[None].shape, x[None].strides, work.dtype, "cuda:0", stream.handle, True, memory)
        for memory, x in zip(memories, host, strict=True)
    ]
    a, b, c = (alignment(view) for view in views)
    kernel = rung.build(work.problem._replace(device="cuda:0", alignments=(a, b, c)), rung.default)
    kernel(*views)
    stream.synchronize()
    memories[2].read(host[2])
    return kernel, hashlib.sha256(host[2].tobytes()).hexdigest()


def described(geometry: Geometry) -> dict[str, Any]:
    """Return one launch, with the digest of its kernel's PTX."""
    program = nvrtc.compiled(geometry.source, geometry.kernel, driver.device().arch)
    return {
        "kernel": geometry.kernel,
        "entry": program.entry,
        "grid": geometry.grid,
        "block": geometry.block,
        "shared": geometry.shared,
        "ptx": ptx_digest(program.ptx),
    }


def profile(rungs: list[Rung], ncu: str, folder: Path) -> list[dict[str, Any]]:
    """Run the rungs under Nsight Compute, and add its counters to what `launch` wrote."""
    plan, report = folder / "plan.jsonl", folder / "report"
    metrics = ",".join([*GLOBAL.values(), *SOURCE.values()])
    names = [rung.name for rung in rungs]
    options = ["--clock-control", "none", "--section", "SourceCounters", "--metrics", metrics, "-f", "-o", str(report)]
    subprocess.run([ncu, *options, sys.executable, __file__, "--launch", str(plan), *names], check=True)
    rows = [json.loads(line) for line in plan.read_text(encoding="utf-8").splitlines()]
    counted = actions(report.with_suffix(".ncu-rep"))
    for row in rows:
        for launch in row["launches"]:
            launch.update(counters(launch["entry"], next(counted)))
    unplanned = [action.name() for action in counted]
    if unplanned:
        raise SystemExit(f"Nsight Compute saw {len(unplanned)} launches more than were planned: {unplanned[:3]}")
    return rows


def actions(report: Path) -> Iterator[Any]:
    """Return the launches in a report, in order."""
    try:
        import ncu_report
    except ImportError:
        raise SystemExit("ncu_report: put extras/python of Nsight Compute's folder on PYTHONPATH") from None
    context = ncu_report.load_report(str(report))
    for section in (context.range_by_idx(index) for index in range(context.num_ranges())):
        yield from (section.action_by_idx(index) for index in range(section.num_actions()))


def counters(entry: str, action: Any) -> dict[str, Any]:
    """Return the counters of one launch, which must be of the kernel with the symbol `entry`."""
    if action.name(action.NameBase_MANGLED) != entry:
        raise SystemExit(f"launch of {action.name(action.NameBase_MANGLED)}, where {entry} was planned")
    memory: dict[tuple[int, str], Counter[str]] = {}
    kinds: Counter[str] = Counter()
    values = {name: by_address(action.metric_by_name(metric)) for name, metric in SOURCE.items()}
    for address, executed in values["executed"].items():
        opcode = opcode_of(action.sass_by_pc(address))
        kinds[sass.kind(opcode)] += executed
        if opcode.split(".")[0] in MEMORY:
            line = action.source_info(address)
            at = (Path(line.file_name()).name, line.line(), opcode) if line else ("", 0, opcode)
            memory.setdefault(at, Counter()).update({name: counts.get(address, 0) for name, counts in values.items()})
    return {
        **{name: int(action.metric_by_name(metric).as_uint64()) for name, metric in GLOBAL.items()},
        "instructions": dict(sorted(kinds.items())),
        "memory": [
            {"file": file, "line": line, "opcode": opcode, **counts}
            for (file, line, opcode), counts in sorted(memory.items())
        ],
    }


def by_address(metric: Any) -> dict[int, int]:
    """Return the values of a metric by instruction address."""
    places = metric.correlation_ids()
    return {int(places.as_uint64(index)): int(metric.as_uint64(index)) for index in range(metric.num_instances())}


def opcode_of(text: str) -> str:
    """Return the opcode of a line of SASS, which may begin with a predicate.

    >>> opcode_of("@!P0 LDG.E.128 R4, [R2.64]")
    'LDG.E.128'
    """
    words = text.split()
    return words[1] if words[0].startswith("@") else words[0]


def main() -> None:
    """Profile rungs, or with --launch run them once for the profiler."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rungs", nargs="*", help="names in the GPU ladder; all when none is given")
    parser.add_argument(
        "--launch", type=Path, metavar="PLAN", help="run them once, and write to PLAN what was launched"
    )
    options = parser.parse_args()
    rungs = [find(CUDA, name) for name in options.rungs] or list(CUDA)
    if options.launch:
        launch(rungs, options.launch)
        return
    ncu = shutil.which("ncu")
    if not ncu:
        raise SystemExit("ncu, the command line of Nsight Compute, is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        rows = profile(rungs, ncu, Path(folder))
    here = record.gpu_machine()
    file = FOLDER / f"{here.name}.jsonl"
    file.parent.mkdir(exist_ok=True)
    head = {"gpu": asdict(here.gpu), "ncu": version(ncu)}
    file.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]), encoding="utf-8")
    sys.stdout.write(f"{len(rows)} products: {file}\n")


def version(ncu: str) -> str:
    """Return Nsight Compute's version, "2025.3.1.0"."""
    text = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=True).stdout
    return text.partition("Version ")[2].split()[0]


if __name__ == "__main__":
    main()
