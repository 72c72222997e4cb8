"""Time every configuration of the wgmma kernels next to cuBLAS, and write the table of winners.

This needs a GPU with sm_90 and PyTorch:

    python benchmarks/tune_wgmma.py --out tune.jsonl [--seconds 240] [--missing] [--shapes 4096,512x14336x4096]

It compiles all instances in parallel processes, then takes the products one after the other, the most important first,
until the time is over. Each configuration is checked once against cuBLAS on every product, timed in one burst, and the
best ones then in several rounds in turn with cuBLAS, with rests, in an order drawn anew. A line of the output is one
configuration on one product: its time, and its ratio to cuBLAS in the same rounds (above 1: it is faster).

    python benchmarks/tune_wgmma.py --table tune.jsonl [more.jsonl ...]

writes packages/gemmery/src/gemmery/cuda/choose/data.py from such files, without a GPU: for each product the fastest
configuration whose instance is in `INSTANCES` there. It prints what that list loses, and the list of as many instances
that would lose least.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from gemmery import dtypes
from gemmery.cuda import choose
from gemmery.cuda.choose import cost
from gemmery.cuda.choose.data import FEW, INSTANCES, WINNERS, Instance, SizeClass, Winner
from gemmery.cuda.constants import MOST_OVERLAPPED
from gemmery.cuda.device import Device
from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery_lab.measure import suite
from gemmery_lab.measure.work import Work

TABLE = Path(__file__).parents[1] / "packages/gemmery/src/gemmery/cuda" / "choose" / "winners.json"
RUNGS = ("wgmma_epilogue", "wgmma_streamk")  # the second for what splits k
OUTS = {"bf16": "bf16", "f16": "f16", "tf32": "f32", "e4m3": "bf16", "e5m2": "bf16", "int8": "int32"}
LAYOUTS = {"TN": ("row", "col"), "TT": ("row", "row"), "NN": ("col", "col"), "NT": ("col", "row")}
WIDTHS = {
    128: (32, 64, 96, 112, 128, 144, 160, 192, 224, 256),
    192: (128, 192),
    256: (128, 160, 192),
    64: (32, 64, 96, 128, 160, 192, 224, 256),
}
TILES = tuple((bm, bn) for bm, widths in WIDTHS.items() for bn in widths)
CLUSTERS = ((1, 1), (2, 1), (1, 2))
SHARED = 227 << 10  # bytes of a block
STAGING = 32 << 10  # of it for finished parts of C, half for those of a tile too large to stay packed
MOST_STAGES = 8
SPLITS = (1, 2, 4, 8)
WHOLE, SPLIT, REORDERED = 14, 6, 2  # configurations timed for a product: k whole, k split, in other orders of the tiles
BURST, REST = 0.005, 0.02  # seconds of a turn, and of the pause before it
ROUNDS, FINALISTS = 5, 6
WRONG = {"bf16": 5e-3, "f16": 5e-3, "tf32": 5e-3, "e4m3": 2e-2, "e5m2": 2e-2, "int8": 0.0}  # relative norm of an error
COMPILE = "import sys; from gemmery.cuda import nvrtc; nvrtc.code(*sys.argv[1:])"


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Candidate:
    """A rung with a complete configuration."""

    rung: Rung
    config: Mapping[str, int]

    @property
    def label(self) -> str:
        tile = "{bm}x{bn} {stages} stages {cm}x{cn}".format(**self.config)
        rest = "band {band} splits {splits} blocks {blocks}".format(**self.config)
        return f"{self.rung.name.removeprefix('wgmma_'):9} {tile:22} {rest}"


def works(shapes: Sequence[tuple[int, int, int]], types: Sequence[str], layouts: Sequence[str]) -> Iterator[Work]:
    """Yield the products of shapes, types and layouts; only 16-bit types have other layouts than TN."""
    for shape, name, layout in product(shapes, types, layouts):
        a, b = LAYOUTS[layout]
        dtype, precision = ("f32", "tf32") if name == "tf32" else (name, "")
        if layout == "TN" or name in ("bf16", "f16"):
            yield Work(*shape, dtype, OUTS[name], a_layout=a, b_layout=b, precision=precision)


def important() -> list[Work]:
    """Return the products to tune for, the most important first."""
    large, small, ragged = (4096, 8192, 2048, 16384), (1024, 512, 256), (1000, 3000, 5000, 7777)
    models = [(work.m, work.n, work.k) for work in suite.load(suite.find("hopper_models")).works]

    def square(sides: Iterable[int]) -> list[tuple[int, int, int]]:
        return [(n, n, n) for n in sides]

    lists = (
        works(square((*large, *small)), ("bf16",), ("TN",)),
        works([*square(ragged), (4095, 4097, 4099)], ("bf16",), ("TN",)),
        works(square(large[:2]), ("e4m3", "int8", "tf32"), ("TN",)),
        works(square(large), ("bf16",), ("TT", "NN", "NT")),
        works(square((16384, 2048, 1024)), ("e4m3", "int8", "tf32"), ("TN",)),
        works(sorted(models), ("bf16",), ("TN",)),
        works(square(small), ("bf16",), ("TT", "NN", "NT")),
        works(square(ragged), ("bf16",), ("TT",)),
    )
    return list(dict.fromkeys(work for some in lists for work in some))


def missing(products: Iterable[Work], sms: int) -> list[Work]:
    """Return the products that the table of a device with so many multiprocessors does not have."""
    table = WINNERS.get(sms, {})
    return [work for work in products if choose.size_class(work.problem) not in table]


def resident_problem(work: Work, device: str) -> Problem:
    """Return the problem of a work whose matrices begin at multiples of 256 bytes and have no gaps.

    >>> resident_problem(Work(64, 64, 65, "bf16", "bf16", b_layout="col"), "cpu").alignments
    (2, 2, 16)
    """
    problem = work.problem
    sides = (
        problem.m if problem.a_layout == "col" else problem.k,
        problem.k if problem.b_layout == "col" else problem.n,
        problem.n,
    )
    sizes = [dtypes.get(name).size for name in (problem.dtype, problem.dtype, problem.out)]
    a, b, c = (math.gcd(side * size, 16) for side, size in zip(sides, sizes, strict=True))
    return problem._replace(device=device, alignments=(a, b, c))


def candidates(problem: Problem, device: Device, rungs: Mapping[str, Rung]) -> list[Candidate]:
    """Return the configurations worth timing that a problem allows, the best by the model first.

    Products in bf16 with k adjacent in A and B try every tile, others those of `INSTANCES`.
    """
    demand, every = cost.demand_of(problem), list[tuple[float, Candidate]]()
    for tile in tiles(problem):
        band, blocks = choose.order(tile, problem.m, problem.n, problem.batch, device)
        splits = SPLITS if RUNGS[1] in rungs and tile.cm * tile.cn == 1 else (1,)
        for parts in splits:
            if parts > 1 and not cost.shared_turns(demand, tile, parts, device.sms):
                continue
            values = dict(
                zip(choose.KEYS, (*tile[:5], band, parts, (parts == 1 and blocks) or device.sms), strict=True)
            )
            candidate = Candidate(rungs[RUNGS[parts > 1]], values)
            if launches(candidate, problem):
                every.append((cost.cycles(demand, tile, parts, device), candidate))
    every.sort(key=lambda row: row[0])
    whole = [candidate for _, candidate in every if candidate.config["splits"] == 1][:WHOLE]
    split = [candidate for _, candidate in every if candidate.config["splits"] > 1][:SPLIT]
    return [*whole, *split, *(other for each in whole[:REORDERED] for other in reordered(each, problem, device))]


def tiles(problem: Problem) -> Iterator[Instance]:
    """Yield the instances to try for a problem."""
    if problem.dtype != "bf16" or choose.kind(problem)[2] != "TN":
        yield from INSTANCES
        return
    for (bm, bn), (cm, cn) in product(TILES, CLUSTERS):
        staging = STAGING // 2 if bm * bn > 256 * MOST_OVERLAPPED else STAGING
        most = min((SHARED - staging) // ((bm + bn) * cost.ROW), MOST_STAGES)
        yield Instance(bm, bn, most, cm, cn)
    if problem.m <= FEW:
        yield from (tile for tile in INSTANCES if tile.bm == FEW)


def reordered(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Candidate]:
    """Yield a configuration with other orders of its tiles and other grids, where there are several rounds."""
    config = candidate.config
    if -(-problem.m // config["bm"]) * -(-problem.n // config["bn"]) <= 2 * device.sms:
        return
    orders = {(config["band"], 0), (8, 0), (config["band"], device.sms - device.sms % 16)}
    for band, blocks in sorted(orders - {(config["band"], config["blocks"])}):
        yield Candidate(candidate.rung, {**config, "band": band, "blocks": blocks})


def _complete(candidate: Candidate) -> dict[str, int]:
    known = candidate.rung.default
    return {**known, **{key: value for key, value in candidate.config.items() if key in known}}


def launches(candidate: Candidate, problem: Problem) -> list[tuple[str, str]]:
    """Return the sources and instances of a configuration, none if the rung or the device refuses it."""
    from gemmery.cuda import driver, geometry

    rung = candidate.rung
    if rung.refuses(problem) or rung.geometry is None:
        return []
    try:
        launch = rung.geometry(problem, _complete(candidate))
    except RefusedError:
        return []
    if geometry.refusal(launch, driver.find(problem.device)):
        return []
    return [(each.source, each.kernel) for each in launch.launches]


def compile_all(kernels: Iterable[tuple[str, str]], arch: str, processes: int) -> dict[tuple[str, str], str]:
    """Compile instances into the cache, each in a process of its own; return the messages of those that failed."""

    def compile_one(kernel: tuple[str, str]) -> str:
        command = [sys.executable, "-c", COMPILE, *kernel, arch]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        return ended.stderr.strip()[-400:] if ended.returncode else ""

    unique = sorted(set(kernels))
    with ThreadPoolExecutor(processes) as pool:
        messages = pool.map(compile_one, unique)
    return {kernel: message for kernel, message in zip(unique, messages, strict=True) if message}


class Race:
    """The products on a device: their operands, cuBLAS, and what has been timed."""

    def __init__(self, out: Path, until: float) -> None:
        from gemmery_lab.on_cuda import Cuda

        self.backend, self.out, self.until = Cuda(0), out, until
        self.vendor = self.backend.rival("cublas").caller

    def time(self, work: Work, contenders: Sequence[Candidate]) -> None:
        """Check and time all contenders on a product, print the best and append them to the file."""
        from gemmery_lab.measure.timing import Sample

        resident = self.backend.resident(work)
        placed = self.vendor.place(resident)
        samples: dict[str, Sample] = {"cublas": placed.sample(resident)}
        placed.put(0)
        resident.stream.synchronize()
        expected = self.tensor(resident).float().clone()
        by_label = {}
        for candidate in contenders:
            put = self.checked(candidate, resident, expected, work)
            if put is not None and time.monotonic() < self.until:
                by_label[candidate.label] = candidate
                samples[candidate.label] = self.backend.sampler(put, len(resident.sets))
        each = {label: _burst(sample, sample(1, 1) / 1e9) for label, sample in samples.items()}
        first = sorted(by_label, key=each.__getitem__)
        finalists = ["cublas", *first[:FINALISTS]]
        times: dict[str, list[float]] = {label: [] for label in finalists}
        for _ in range(ROUNDS):
            for label in random.sample(finalists, len(finalists)):
                time.sleep(REST)
                times[label].append(_burst(samples[label], each[label]))
        self.report(work, placed.note, by_label, each, times)

    def checked(self, candidate: Candidate, resident: Any, expected: Any, work: Work) -> Any:
        """Return what launches a contender, None if it is refused or its result differs from cuBLAS's."""
        from gemmery_lab.on_cuda import build

        try:
            put = build(candidate.rung, _complete(candidate), resident)
            resident.poison()
            put(0)
            resident.stream.synchronize()
        except GemmeryError as refused:
            say(f"  {candidate.label}: {str(refused)[:200]}")
            return None
        result = self.tensor(resident).float()
        error = float((result - expected).norm() / expected.norm())
        if not error <= WRONG[work.precision or work.dtype]:
            say(f"  WRONG {candidate.label}: relative error {error}")
            return None
        return put

    def tensor(self, resident: Any) -> Any:
        """Return the C of the first set as a tensor."""
        from gemmery_lab.measure import torch_operands

        return torch_operands.tensor(resident.sets[0].c)

    def report(
        self,
        work: Work,
        note: str,
        by_label: Mapping[str, Candidate],
        each: Mapping[str, float],
        times: Mapping[str, Sequence[float]],
    ) -> None:
        vendor = statistics.median(times["cublas"])
        say(f"{work}: {note} {work.problem.flops / vendor / 1e12:.0f} TFLOP/s, {vendor * 1e6:.2f} us")
        lines = []
        for label, candidate in by_label.items():
            final = times.get(label)
            seconds = statistics.median(final) if final else each[label]
            pairs = [rival / own for rival, own in zip(times["cublas"], final, strict=True)] if final else []
            ratio = statistics.median(pairs) if pairs else each["cublas"] / seconds
            lines.append((seconds, ratio, bool(final), label, candidate))
        with self.out.open("a", encoding="utf-8") as file:
            for seconds, ratio, is_final, label, candidate in sorted(lines, key=lambda line: line[0]):
                if is_final:
                    say(f"  x{ratio:.3f} {seconds * 1e6:10.2f} us  {label}")
                row = {
                    **{key: getattr(work, key) for key in ("m", "n", "k", "dtype", "out", "precision")},
                    "layouts": choose.kind(work.problem)[2],
                    "rung": candidate.rung.name,
                    "config": dict(candidate.config),
                    "us": seconds * 1e6,
                    "ratio": ratio,
                    "final": is_final,
                    "sms": self.backend.machine.gpu.sms,
                    "l2": self.backend.machine.gpu.l2,
                }
                file.write(json.dumps(row) + "\n")


def _burst(sample: Callable[[int, int], int], seconds: float) -> float:
    """Return the seconds of a call, over a turn of BURST seconds for calls of about so many seconds."""
    inner = max(1, round(BURST / max(seconds, 1e-7)))
    return sample(inner, 1) / inner / 1e9


def tune(out: Path, products: Sequence[Work], seconds: float, processes: int) -> None:
    """Time the configurations of these products until the time is over."""
    from gemmery.cuda import driver

    start = time.monotonic()
    device = driver.find("cuda:0")
    rungs = {rung.name: rung for rung in CUDA if rung.name in RUNGS}
    race = Race(out, start + seconds)
    problems = [resident_problem(work, "cuda:0") for work in products]
    lists = [candidates(problem, device, rungs) for problem in problems]
    kernels = [
        kernel
        for problem, some in zip(problems, lists, strict=True)
        for each in some
        for kernel in launches(each, problem)
    ]
    say(f"{len(set(kernels))} instances for {len(lists)} products")
    failed = compile_all(kernels, device.arch, processes)
    for kernel, message in failed.items():
        say(f"  not compiled: {kernel[1]}: {message}")
    say(f"compiled in {time.monotonic() - start:.0f} s")
    for index, (work, problem, some) in enumerate(zip(products, problems, lists, strict=True)):
        if time.monotonic() > race.until:
            say(f"time is over: {len(lists) - index} products were not timed")
            break
        usable = [each for each in some if not failed.keys() & set(launches(each, problem))]
        try:
            race.time(work, usable)
        except GemmeryError as error:
            say(f"{work}: {error}")
    say(f"{time.monotonic() - start:.0f} s")


Times = dict[tuple[int, tuple[int, int, str]], dict[SizeClass, dict[Winner, float]]]
Instances = frozenset[tuple[int, ...]]
OURS: Instances = frozenset(tuple(tile[:5]) for tile in INSTANCES)


def read(rows: Sequence[Mapping[str, Any]]) -> Times:
    """Return the times of configurations by multiprocessors, types and layouts, and size class."""
    by_size: Times = {}
    for row in rows:
        a, b = LAYOUTS[row["layouts"]]
        problem = Problem(row["m"], row["n"], row["k"], row["dtype"], row["out"], a_layout=a, b_layout=b)
        types = row["sms"], choose.kind(problem)
        bm, bn, stages, cm, cn, splits = (row["config"][name] for name in ("bm", "bn", "stages", "cm", "cn", "splits"))
        config: Winner = bm, bn, stages, cm, cn, splits
        times = by_size.setdefault(types, {}).setdefault(choose.size_class(problem), {})
        times[config] = min(row["us"], times.get(config, math.inf))
    return by_size


def winners(rows: Sequence[Mapping[str, Any]], instances: Instances = OURS) -> dict[int, dict[SizeClass, Winner]]:
    """Return the table of `choose` from the lines of files.

    >>> line = {"m": 64, "n": 32, "k": 16, "dtype": "bf16", "out": "bf16", "layouts": "TN", "us": 2.0, "sms": 132}
    >>> config = {"bm": 64, "bn": 32, "stages": 8, "cm": 1, "cn": 1, "splits": 1}
    >>> winners([line | {"config": config}, line | {"us": 1.0, "config": config | {"bn": 64}}])
    {132: {(2, 2, 'TN', 1, 1, 16, True): (64, 64, 8, 1, 1, 1)}}
    """
    table: dict[int, dict[SizeClass, Winner]] = {}
    for (sms, _), sizes in sorted(read(rows).items()):
        for size, times in sizes.items():
            allowed = {config: us for config, us in times.items() if config[:5] in instances}
            if allowed:
                table.setdefault(sms, {})[size] = min(allowed, key=allowed.__getitem__)
    return table


def loss(products: Sequence[Mapping[Winner, float]], instances: Instances) -> float:
    """Return by how much products take longer with these instances alone, on geometric average."""
    total = 0.0
    for times in products:
        best = min(times.values())
        allowed = [us for config, us in times.items() if config[:5] in instances]
        total += math.log(min(allowed, default=4 * best) / best)
    return math.expm1(total / len(products))


def few(products: Sequence[Mapping[Winner, float]], most: int) -> Instances:
    """Return instances that lose least over products, each as its times by configuration: added one by one."""
    every = {config[:5] for times in products for config in times}
    picked: Instances = frozenset()
    while len(picked) < most and loss(products, picked) > 0:
        picked |= {min(sorted(every - picked), key=lambda instance: loss(products, picked | {instance}))}
    return picked


def latest(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the lines of files, of each product those of the last file that has it.

    Raises ArgumentError if a product was timed on devices with caches of other sizes: one table cannot have both.
    """
    products: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for file in files:
        lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            lines.setdefault(tuple(row[key] for key in ("sms", "m", "n", "k", "dtype", "layouts")), []).append(row)
        for key in (each for each in lines if each in products):
            one, other = products[key][0], lines[key][0]
            if one["l2"] != other["l2"]:
                sides = "x".join(str(one[side]) for side in "mnk")
                raise ArgumentError(
                    f"{file}: {sides} was timed with {other['l2'] >> 20} MiB of L2 there and {one['l2'] >> 20} MiB "
                    "in an earlier file: pass the files of one device"
                )
        products |= lines
    return [row for rows in products.values() for row in rows]


def write_table(files: Sequence[Path], to: Path = TABLE) -> None:
    """Write choose/winners.json from runs; a product that was timed again counts as in the last one."""
    rows = latest(files)
    for (_, types), sizes in read(rows).items():
        products = list(sizes.values())
        best = few(products, len(OURS))
        say(f"{types}: {len(products)} products lose {loss(products, OURS):.2%}")
        say(f"  they would lose {loss(products, best):.2%} with {sorted(best)}")
    devices = [f'"{sms}": [\n' + ",\n".join(written(table)) + "\n]" for sms, table in winners(rows).items()]
    to.write_text("{\n" + ",\n".join(devices) + "\n}\n", encoding="utf-8")


def written(table: Mapping[SizeClass, Winner]) -> Iterator[str]:
    """Yield the rows of a device's winners: each with the kinds of products and the sizes that it suits.

    >>> list(written({(2, 2, "TN", 1, 2, 40, False): (64, 32, 8, 1, 1, 1)}))
    ['[[64, 32, 8, 1, 1, 1], [[2, 2, "TN", false]], [[1, 2, 40]]]']
    """
    kinds: dict[tuple[Winner, tuple[int, int, int]], dict[tuple[int, int, bool], str]] = {}
    for (size, out, layouts, rows, columns, depth, straddles), winner in table.items():
        found = kinds.setdefault((winner, (rows, columns, depth)), {})
        found[size, out, straddles] = f"{found.get((size, out, straddles), '')} {layouts}".strip()
    alike: dict[tuple[Winner, tuple[tuple[int, int, str, bool], ...]], list[tuple[int, int, int]]] = {}
    for (winner, sides), found in kinds.items():
        what = tuple((size, out, layouts, straddles) for (size, out, straddles), layouts in found.items())
        alike.setdefault((winner, what), []).append(sides)
    return (json.dumps((*row, sorted(sizes))) for row, sizes in alike.items())


def shape(text: str) -> tuple[int, int, int]:
    """Return m, n, k of "4096" or "512x14336x4096"."""
    sides = [int(side) if side.isdecimal() else 0 for side in text.split("x")]
    if len(sides) not in (1, 3) or min(sides) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no shape: write one side, or three with x between, from 1 on")
    m, n, k = sides * 3 if len(sides) == 1 else sides
    return m, n, k


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tune.jsonl"))
    parser.add_argument("--table", type=Path, nargs="+", help="write the table from these files")
    parser.add_argument("--shapes", type=lambda text: [shape(part) for part in text.split(",")])
    parser.add_argument("--types", type=lambda text: text.split(","), default=["bf16"])
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=["TN"])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--missing", action="store_true", help="only products that the table does not have")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.table:
        try:
            write_table(options.table)
        except ArgumentError as error:
            parser.error(str(error))
        return
    some = list(works(options.shapes, options.types, options.layouts)) if options.shapes else important()
    if options.missing:
        from gemmery.cuda import driver

        some = missing(some, driver.find("cuda:0").sms)
    tune(options.out, some, options.seconds, options.processes)


if __name__ == "__main__":
    main()
