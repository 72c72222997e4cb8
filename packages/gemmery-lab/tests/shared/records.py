"""Made-up records for tests of reports: a ladder, two sweeps and a suite."""

from dataclasses import replace

from gemmery.ladder.rung import Rung
from gemmery_lab.measure.record import MachineRecord, Measurement, Run
from gemmery_lab.report import sheet, tables, words

MACHINE = MachineRecord(
    name="made-up-avx512-2c",
    cpu="Made-up CPU <1>",
    isa="avx512",
    cores=2,
    l1d=32 << 10,
    l2=1 << 20,
    l3=32 << 20,
    os="Linux 6.1",
    python="3.11.7",
    numpy="2.4.6",
    llvmlite="0.50.0",
    blas="openblas 0.3.31, SkylakeX kernels",
    gemmery="0.1.0",
)
STARTED = "2026-11-20T10:00:00.000000+00:00"


def rung(name, idea, parent):
    return Rung(name, idea, parent, ("f32",), refuses=lambda problem: "", build=None)


RUNGS = (
    rung("scalar_naive", "C[i,j] += A[i,k] * B[k,j], loops i, j, k", None),
    rung("scalar_reordered", "loops i, k, j: B and C are walked along rows", "scalar_naive"),
    rung("simd_row", "one element of A broadcast, fused multiply-add over a row of B", "scalar_reordered"),
    rung("simd_blocked", "the same inside square blocks that fit a cache", "simd_row"),
    rung("packed", "a register tile of C, panels packed in the order they are read, five loops", "simd_blocked"),
    rung("packed_threaded", "the same over the cores", "packed"),
    rung("gemv", "one vector: A is read once, in the order it lies", None),
    rung("strassen", "fewer multiplications: seven products of halves instead of eight", "packed"),
)


def measurement(suite, kernel, n, gflops, **more):
    flops = 2 * n**3
    seconds = flops / gflops / 1e9 if gflops else 0.0
    threads = more.get("threads", 1)
    row = Measurement(
        suite=suite,
        kernel=kernel,
        m=n,
        n=n,
        k=n,
        dtype="f32",
        out="f32",
        batch=1,
        threads=threads,
        seconds=seconds,
        best=0.97 * seconds,
        p95=1.06 * seconds,
        samples=21,
        flops=flops,
        bytes=12 * n * n,
        peak_gflops=116.3 * threads,
        bandwidth_gbs=21.7 * (1 + 0.4 * (threads - 1)),
        error=0.037,
        checked=True,
    )
    return replace(row, **more)


SQUARE = tuple(r for r in RUNGS if r.name != "gemv")
SPEEDS = {
    512: (1.07, 3.5, 17.1, 14.2, 103.4, 196.0, 0.0, 99.7, 190.0),
    1024: (0.51, 3.1, 13.8, 14.9, 105.9, 205.1, 101.2, 104.2, 199.0),
    2048: (0.26, 2.2, 7.9, 12.4, 106.8, 209.3, 113.1, 105.5, 203.0),
}


def ladder():
    found = []
    for n, (*own, numpy, numpy_threaded) in SPEEDS.items():
        by_name = dict(zip([r.name for r in SQUARE], own, strict=True))
        for r in SQUARE:
            threaded = r.name == "packed_threaded"
            speed = by_name[r.name]
            versus = {"numpy": speed / (numpy_threaded if threaded else numpy)}
            if r.parent:
                versus[r.parent] = speed / by_name[r.parent]
            more = {"versus": versus, "spread": {"numpy": 0.02}, "threads": 2 if threaded else 1}
            if r.name == "simd_blocked":
                more["config"] = {"block": 512}
            if not speed:
                more = {"refused": "one level of it needs n >= 1024, and n is 512", "checked": False, "error": 0.0}
            found.append(measurement("ladder", r.name, n, speed, **more))
        found.append(measurement("ladder", "numpy", n, numpy))
        found.append(measurement("ladder", "numpy", n, numpy_threaded, threads=2))
        for kernel, speed in (("gemv", 10.2), ("numpy", 9.9)):
            flops, moved = 2 * n * n, 4 * (n * n + 2 * n)
            found.append(
                measurement("ladder", kernel, n, speed, m=1, flops=flops, bytes=moved, seconds=flops / speed / 1e9)
            )
    return Run(MACHINE, STARTED, tuple(found))


def sweep_block():
    milliseconds = {8: 3141, 16: 2172, 32: 1750, 64: 1734, 128: 1531, 256: 1484, 512: 1297, 1024: 2063, 2048: 2172}
    found = [
        measurement("sweep_block", "simd_blocked", 2048, 2 * 2048**3 / taken / 1e6, config={"block": block})
        for block, taken in milliseconds.items()
    ]
    return Run(MACHINE, STARTED, (*found, measurement("sweep_block", "numpy", 2048, 105.5)))


def sweep_size():
    found = []
    for power in range(5, 12):
        n = 2**power
        for kernel, top in (("simd_row", 17.0), ("simd_blocked", 16.0), ("packed", 107.0), ("numpy", 105.0)):
            drop = 0.5 if kernel == "simd_row" and n > 1024 else 1.0
            found.append(measurement("sweep_size", kernel, n, top * drop * n / (n + 60)))
    return Run(MACHINE, STARTED, tuple(found))


def bench():
    found = []
    for m, n, k, speed, numpy, torch in (
        (512, 512, 512, 103.0, 101.0, 52.0),
        (8, 1024, 1024, 32.0, 9.1, 16.0),
        (16, 2048, 2048, 61.0, 38.0, 40.0),
        (4096, 4096, 32, 77.0, 51.0, 60.0),
        (4096, 1, 4096, 9.8, 10.2, 9.9),
    ):
        flops = 2 * m * n * k
        shape = {"m": m, "k": k, "flops": flops, "bytes": 4 * (m * k + k * n + m * n)}
        versus = {"numpy": speed / numpy, "torch": speed / torch}
        for kernel, own, against in (("gm.matmul", speed, versus), ("numpy", numpy, {}), ("torch", torch, {})):
            timed = {"seconds": flops / own / 1e9, "versus": against, "spread": dict.fromkeys(against, 0.03)}
            found.append(measurement("skinny_f32", kernel, n, own, **shape, **timed))
    return Run(MACHINE, STARTED, tuple(found))


def markdown(run, rungs=()):
    """A run as Markdown, as documents show it: the machine, then a table for each sheet."""
    parts = [f"# {words.title(run)}\n", f"{words.machine(run.machine)}. Measured {words.when(run)}.\n"]
    parts += [f"**{warning}**\n"] if (warning := words.banner(run)) else []
    parts += [f"## {each.title}\n\n{sheet.table(each)}" for each in tables.sheets(run, rungs)]
    return "\n".join(parts)
