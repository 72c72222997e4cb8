"""Time the tiles that products in bfloat16 may have next to PyTorch's routes and the library's choice, on Hopper.

    python benchmarks/tile_survey.py --shapes 392x4096x4096,147x1280x8192 --random 100 --seed 5 --to survey.jsonl

B lies by columns. Each contestant is a CUDA graph of calls whose operands take turns and fill three L2 caches. Tiles
that the model of `cuda/choose/cost.py` finds much slower than the best one are left out; each other one is checked
and timed, and the fastest ones then take turns with PyTorch's and the library's choice. A product is a line of JSON
with microseconds; `times` has those of tiles, by bm, bn, stages, cm, cn, splits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from rung_configs import TOLERANCES, compile_all, graph_of, number_of_sets, put_of, say

import gemmery as gm
from gemmery.cuda import choose, driver
from gemmery.cuda.choose import cost, legal
from gemmery.cuda.choose.data import INSTANCES
from gemmery.errors import GemmeryError
from gemmery.problem import Problem

FIRST, ROUNDS, FINALISTS = 3, 7, 4  # replays of each tile, turns of the finalists, and their number


def drawn(count, seed):
    """Return random shapes, sides as powers of two that are uniformly distributed."""
    draw = random.Random(seed)
    shapes = []
    for _ in range(count):
        m = int(2 ** draw.uniform(0, 9))
        shapes.append((m, *(int(2 ** draw.uniform(8, 13)) // 8 * 8 for _ in range(2))))
    return shapes


def tiles_of(problem, device, near):
    """Return the names of configurations, by tile and split, that the model does not find `near` times as slow."""
    demand, found = cost.demand_of(problem), []
    fitted = choose.fitted_for(problem, demand, device)
    known = fitted.tiles if fitted else choose.card(device).split
    for tile in INSTANCES:
        if legal.illegal(problem, tile):
            continue
        for splits in range(1, 9):
            name = *tile[:5], splits
            if splits > 1 and not (name in known and cost.shared_turns(demand, tile, splits, device.sms)):
                continue
            band, blocks = choose.order(tile, problem.m, problem.n, 1, device)
            words = dict(zip(choose.KEYS, (*tile[:5], band, splits, blocks), strict=True))
            words["blocks"] = blocks or device.sms
            rung = "wgmma_streamk" if splits > 1 else "wgmma_epilogue"
            names = " ".join(f"{key}={value}" for key, value in words.items() if splits > 1 or key != "splits")
            if splits > 1:
                names = " ".join(f"{key}={words[key]}" for key in choose.KEYS if key != "blocks")
            label = ",".join(map(str, name))
            found.append((cost.cycles(demand, tile, splits, device), label, f"{rung} {names}"))
    best = min(each for each, _, _ in found)
    return {label: name for each, label, name in found if each <= near * best}


def replayed(graph, count):
    """Return the microseconds of a call in one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count


def survey(problem, names):
    """Return the line of a product."""
    m, n, k = problem.m, problem.n, problem.k
    count = min(number_of_sets(problem.bytes), 256)
    made = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    sets = [(made(1, m, k), made(1, n, k).mT, made(1, m, n)) for _ in range(count)]
    flat = [tuple(x[0] for x in each) for each in sets]
    exact = flat[0][0].float() @ flat[0][1].float()
    bias = made(n)

    def by_lt(i):
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.mm(*flat[i][:2], out=flat[i][2])
        torch.backends.cuda.preferred_blas_library("cublas")

    rivals = {
        "mm": lambda i: torch.mm(*flat[i][:2], out=flat[i][2]),
        "lt": by_lt,
        "addmm": lambda i: torch.addmm(bias, *flat[i][:2], out=flat[i][2]),
        "gm": lambda i: gm.matmul(*flat[i][:2], out=flat[i][2]),
    }
    graphs = {label: graph_of(put, count) for label, put in rivals.items()}
    times = {}
    for label, name in names.items():
        try:
            put = put_of(problem, name, sets)
            flat[0][2].fill_(float("nan"))
            put(0)
            error = ((flat[0][2].float() - exact).norm() / exact.norm()).item()
            if not error <= TOLERANCES["bf16"]:
                say(f"{m} x {n} x {k}: WRONG {name}: {error}")
                continue
            graph = graph_of(put, count)
        except (RuntimeError, GemmeryError) as refused:
            say(f"{m} x {n} x {k}: {name}: {str(refused)[:150]}")
            continue
        graphs[label] = graph
        replayed(*graph)
        times[label] = min(replayed(*graph) for _ in range(FIRST))
    last = [*rivals, *sorted(times, key=times.__getitem__)[:FINALISTS]]
    turns = {label: [] for label in last}
    for _ in range(ROUNDS):
        for label in last:
            turns[label].append(replayed(*graphs[label]))
    final = {label: round(statistics.median(each), 3) for label, each in turns.items()}
    fastest = min(("mm", "lt", "addmm"), key=final.__getitem__)
    line = {"m": m, "n": n, "k": k, "torch": final[fastest], "route": fastest, "gm": final["gm"]}
    line["times"] = {label: final.get(label, round(each, 3)) for label, each in times.items()}
    return line


def main():
    """Print and write a line for each product."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", type=lambda text: [tuple(map(int, x.split("x"))) for x in text.split(",")])
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--near", type=float, default=1.6)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--to", default="survey.jsonl")
    options = parser.parse_args()
    end, device = time.monotonic() + options.seconds, driver.find("cuda:0")
    torch.cuda.init()
    shapes = [*(options.shapes or ()), *drawn(options.random, options.seed)]
    problems = [Problem(*shape, "bf16", "bf16", b_layout="col", device="cuda:0") for shape in shapes]
    names = [tiles_of(each, device, options.near) for each in problems]
    compile_all([(problem, each.values()) for problem, each in zip(problems, names, strict=True)])
    say(f"{sum(map(len, names))} configurations of {len(shapes)} products, {end - time.monotonic():.0f} s left")
    with open(options.to, "a", encoding="utf-8") as lines:
        for problem, each in zip(problems, names, strict=True):
            if time.monotonic() > end:
                say("out of time")
                break
            line = survey(problem, each)
            lines.write(f"{json.dumps(line)}\n")
            best = min(line["times"], key=line["times"].__getitem__)
            ratios = f"{line['torch'] / line['gm']:.3f} {line['torch'] / line['times'][best]:.3f}"
            say(f"{line['m']}x{line['n']}x{line['k']} {line['route']} {line['torch']:.2f} gm, best: {ratios} {best}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
