"""Time tiles of float32 on CUDA cores, whole and with parts of k, in CUDA graphs beside PyTorch; and calls in a loop.

    python benchmarks/float32_tiles.py tiles --to tiles.jsonl
    python benchmarks/float32_tiles.py choices --seed 7
    python benchmarks/float32_tiles.py host

"tiles" times those that should be fastest by a first estimate, "choices" the library's own choice alone. "host" times
float32 and its parts as calls in a loop without a graph, and what such a call takes on the host. Operands take turns
that no cache holds, results are compared with float64, and each product is a line of JSON in microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time

import torch
from graph_times import captured, say, times, turns
from rung_configs import compile_all, problem_of, put_of

import gemmery as gm
from gemmery import tiers
from gemmery.cuda.choose import cost
from gemmery.cuda.choose.data import SIMT_SHARED, SIMT_SPLITS, Tiling
from gemmery.cuda.device import KNOWN
from gemmery.errors import GemmeryError
from gemmery.ladder import simt_tiled

KEYS = "bm", "bn", "bk", "wm", "wn", "tm", "tn", "stages", "blocks"
RIVALS, SPLITS_EACH = 26, 3  # configurations of a product, and parts of k of a tile
# Tiles that the library does not have, at a guess of their speed.
MORE = {
    "rows": (Tiling(64, 64, 16, 32, 64, 8, 8, 3, 7, 110), Tiling(128, 64, 16, 64, 32, 8, 8, 3, 3, 110)),
    "pieces": (Tiling(64, 128, 16, 32, 64, 8, 8, 3, 2, 100), Tiling(64, 32, 16, 32, 32, 8, 4, 4, 5, 87)),
    "elements": (Tiling(64, 128, 16, 32, 64, 8, 8, 3, 3, 95), Tiling(64, 64, 16, 32, 64, 8, 8, 3, 7, 85)),
}
SHAPES = (
    *((64, 2048, 2048), (1000, 333, 900), (300, 700, 2000), (512, 512, 512), (640, 640, 640), (768, 768, 768)),
    *((2, 2048, 2048), (8, 4096, 4096), (16, 4096, 4096), (32, 4096, 4096), (64, 4096, 1024), (64, 1024, 4096)),
)


def random_shapes(count, seed):
    """Return products of m from 16 to 1024, n and k from 64 to 4096, every other one in multiples of 4."""
    draw = random.Random(seed)
    drawn = [[int(2 ** draw.uniform(*ends)) for ends in ((4, 10), (6, 12), (6, 12))] for _ in range(count)]
    return [tuple(side // 4 * 4 if i % 2 else side for side in sides) for i, sides in enumerate(drawn)]


def named(tile, splits):
    """Return a configuration as `put_of` takes it."""
    words = (f"{key}={getattr(tile, key)}" for key in KEYS)
    return f"simt_pipelined {' '.join(words)} splits={splits}"


def configs(m, n, k, b):
    """Return what should be fastest: of each tile, the library's and others, the best few numbers of parts of k."""
    p = problem_of(m, n, k, "f32", 1, b)
    device = KNOWN["h200"]
    tiles = simt_tiled.shared_tiles(p, device)
    tiles += next((MORE[kind] for kind, each in SIMT_SHARED.items() if each is tiles), ())

    def estimate(choice):
        return cost.shared_cycles(p, *choice, device)

    each = [sorted(((tile, splits) for splits in SIMT_SPLITS), key=estimate) for tile in tiles]
    best = sorted(itertools.chain(*(of_tile[:SPLITS_EACH] for of_tile in each)), key=estimate)[:RIVALS]
    return [named(*choice) for choice in best]


def operands(m, n, k, b, most=100):
    """Return sets of A, B and C that together no cache holds, as batches of one."""

    def made():
        y = torch.randn(1, n, k, device="cuda").mT if b == "col" else torch.randn(1, k, n, device="cuda")
        return torch.randn(1, m, k, device="cuda"), y, torch.empty(1, m, n, device="cuda")

    return [made() for _ in range(min(most, turns(4 * (m * n + m * k + n * k))))]


def by_lt(a, b, c):
    """Multiply by cublasLt."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.mm(a, b, out=c)
    torch.backends.cuda.preferred_blas_library("cublas")


def raced(m, n, k, b, names):
    """Return the microseconds of PyTorch's ways, ours and the configurations; those that are wrong have -1."""
    sets = operands(m, n, k, b)
    flat = [tuple(x[0] for x in each) for each in sets]
    puts = {
        "torch": lambda i: torch.mm(*flat[i][:2], out=flat[i][2]),
        "lt": lambda i: by_lt(*flat[i]),
        "gm": lambda i: gm.matmul(*flat[i][:2], out=flat[i][2]),
    }
    puts |= {name: put_of(problem_of(m, n, k, "f32", 1, b), name, sets) for name in names}
    for _ in range(20):
        puts["gm"](0)
    tiers.wait()
    exact, size = flat[0][0].double() @ flat[0][1].double(), flat[0][0].double().abs() @ flat[0][1].double().abs()
    graphs, wrong = {}, {}
    for name, put in puts.items():
        flat[0][2].fill_(float("nan"))
        try:
            put(0)
        except GemmeryError as error:
            say(f"{name}: {error}")
            continue
        first = flat[0][2].clone()
        put(0)
        right = ((first.double() - exact).abs() <= 1e-5 * size).all() and torch.equal(first, flat[0][2])
        if right:
            graphs[name] = captured([lambda i=i, put=put: put(i) for i in range(len(sets))]).replay
        else:
            wrong[name] = -1
    medians = times(list(graphs.values()), 3)
    return {name: round(each / len(sets), 2) for name, each in zip(graphs, medians, strict=True)} | wrong


def short(name):
    """Return a configuration as its values."""
    return " ".join(word.split("=")[-1] for word in name.removeprefix("simt_pipelined ").split())


def host_cases():
    """Yield products, and the ways in which each is computed in a loop."""
    shapes = [(n, n, n) for n in (512, 576, 640, 704, 768, 896, 1024)] + [(1000, 333, 900), (256, 1024, 1024)]
    for m, n, k in shapes:
        for b in ("row", "col"):
            sets = [tuple(x[0] for x in each) for each in operands(m, n, k, b, 8)]

            def ways(sets=sets):
                options = {"gm": {}, "parts": {"precision": "f32_tensor", "batch_invariant": True}}
                options["f32_tensor"] = {"precision": "f32_tensor"}
                yield "torch", lambda i: torch.mm(*sets[i][:2], out=sets[i][2])
                for name, given in options.items():
                    yield name, lambda i, given=given: gm.matmul(*sets[i][:2], out=sets[i][2], **given)

            yield {"m": m, "n": n, "k": k, "a": "row", "b": b}, dict(ways()), len(sets)


def in_a_loop(calls, count, rounds=15, each=100):
    """Return of each call the microseconds in a loop until the device is done, and until the host is."""
    spent = [([], []) for _ in calls]
    for _ in range(rounds):
        for call, (whole, host) in zip(calls, spent, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for i in range(each):
                call(i % count)
            put = time.perf_counter()
            torch.cuda.synchronize()
            whole.append((time.perf_counter() - begin) / each * 1e6)
            host.append((put - begin) / each * 1e6)
    return [[round(statistics.median(times), 2) for times in pair] for pair in spent]


def main():
    """Write a line for each product."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("tiles", "choices", "host"))
    parser.add_argument("--to", help="a file to append to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds

    def write(row):
        say(json.dumps(row))
        if options.to:
            with open(options.to, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    if options.what == "host":
        for case, ways, count in host_cases():
            for way in ways.values():
                for i in range(40):
                    way(i % count)
            tiers.wait()
            loops = in_a_loop(list(ways.values()), count)
            graphs = [captured([lambda i=i, way=way: way(i) for i in range(count)]).replay for way in ways.values()]
            graphs = [round(each / count, 2) for each in times(graphs, 7)]
            row = {
                name: {"loop": loop, "host": host, "graph": graph}
                for name, (loop, host), graph in zip(ways, loops, graphs, strict=True)
            }
            write({"kind": "float32 in a loop", **case, "times": row})
        return
    shapes = [(*shape, b) for shape in (*SHAPES, *random_shapes(options.count, options.seed)) for b in ("row", "col")]
    names = {shape: configs(*shape) if options.what == "tiles" else [] for shape in shapes}
    begin = time.monotonic()
    compile_all([(problem_of(*shape[:3], "f32", 1, shape[3]), names[shape] or ["simt_pipelined"]) for shape in shapes])
    say(f"compiled in {time.monotonic() - begin:.0f} s")
    for m, n, k, b in shapes:
        if time.monotonic() > end:
            say("out of time")
            break
        found = raced(m, n, k, b, names[m, n, k, b])
        row = {"kind": f"float32 {options.what}", "m": m, "n": n, "k": k, "dtype": "f32", "a": "row", "b": b}
        write({**row, "times": {short(name): each for name, each in found.items()}})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main()
