"""Fit `SimtCosts` and the speeds of `SIMT_SHARED` of cuda/choose/data.py to times of float32 tiles on CUDA cores.

    python benchmarks/fit_float32_tiles.py
    python benchmarks/fit_float32_tiles.py --runs 2 3 --check 6
    python benchmarks/fit_float32_tiles.py --check 13 --judge 4116

It prints the costs and a speed for each tile, as they are in that file, and how much longer than the fastest tile that
was timed the chosen one takes, in the runs of `--check`, and the one listed first, which in run 13 is the choice before
it. Logarithms of modeled by measured times are made small by Gauss and Newton, near what the file has; tiles near the
fastest of a product count twice.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from gemmery.cuda.choose import cost
from gemmery.cuda.choose.data import SHARED_DEPTH, SIMT_COSTS, SIMT_PACKED, SIMT_SHARED
from gemmery.cuda.device import KNOWN
from gemmery.ladder import simt_tiled
from gemmery.problem import Problem

RECORD = Path(__file__).parent / "tuning" / "float32-tiles-nvidia-h200.jsonl"
DEVICE = KNOWN["h200"]
FITTED = ("idle", "memory", "l2", "fill", "sum", "start", "wait", "copy", "pack", "copied")
FIRST_PACKED = 12  # the first run in which tiles of SIMT_PACKED had B copied
FAST, SLOW = 1.15, 1.6  # times the fastest tile, up to which tiles count twice, and beyond which they hardly count
NEAR, STEP, ROUNDS = 0.6, 1e-3, 6  # how much it counts to stay near; of a derivative; of the fit


def products_of(runs, without=None, seed=None):
    """Return the products of runs: each with PyTorch's time, and those of tiles, by their place in SIMT_SHARED.

    Those of one seed can be left out, or be the only ones. Places of tiles whose B was copied to rows of n first are
    those of "packed".
    """
    places = {(kind, *tile[:8]): (kind, i) for kind, tiles in SIMT_SHARED.items() for i, tile in enumerate(tiles)}
    packed = {("pieces", *tile[:8]): ("packed", SIMT_SHARED["rows"].index(tile)) for tile in SIMT_PACKED}
    found = []
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row["kind"].startswith("float32 tiles") or row["run"] not in runs or row["k"] < SHARED_DEPTH:
            continue
        if (without and row.get("seed") == without) or (seed and row.get("seed") != seed):
            continue
        problem = Problem(row["m"], row["n"], row["k"], "f32", "f32", b_layout=row["b"], device="h200")
        kind, times = simt_tiled.shared_kind(problem), {}
        known = places | packed if row["run"] >= FIRST_PACKED else places
        for name, us in row["times"].items():
            values = name.split()
            if len(values) == 10 and us > 0 and (place := known.get((kind, *map(int, values[:8])))):
                times[place, int(values[-1])] = us
        if times:
            found.append((problem, min(row["times"]["torch"], row["times"]["lt"]), times))
    return found


def modeled(problem, choice, x, order):
    """Return the microseconds of a product by a tile and parts of k, where x has logarithms of costs and of speeds."""
    (kind, index), splits = choice
    costs = SIMT_COSTS._replace(**dict(zip(FITTED, map(math.exp, x), strict=False)))
    place, cycles = ("rows", cost.packed_cycles) if kind == "packed" else (kind, cost.shared_cycles)
    tile = SIMT_SHARED[place][index]._replace(speed=math.exp(x[len(FITTED) + order[place, index]]))
    return (costs.start + cycles(problem, tile, splits, DEVICE, costs)) / cost.CLOCK


def fit(products, x, order):
    """Return x with which the model is nearest to the times of products."""
    rows = [(problem, choice, us, us / min(times.values())) for problem, _, times in products
            for choice, us in times.items()]  # fmt: skip
    weights = np.sqrt([2 if slower < FAST else 1 if slower < SLOW else 0.3 for *_, slower in rows])
    first = np.array(x)
    places = [order["rows" if kind == "packed" else kind, index] for _, ((kind, index), _), *_ in rows]
    near, speeds = np.eye(len(x)) * NEAR, len(FITTED) + np.array(places)

    def misses(x):
        off = [math.log(modeled(problem, choice, x, order) / us) for problem, choice, us, _ in rows]
        return np.concatenate([weights * off, (x - first) * NEAR])

    def slopes_at(x, here):
        """Return derivatives: the time of a tile depends on all costs and on its own speed alone."""
        slopes = np.concatenate([np.zeros((len(rows), len(x))), near])
        for i in range(len(FITTED)):
            slopes[:, i] = (misses(x + STEP * np.eye(len(x))[i]) - here) / STEP
        faster = x.copy()
        faster[len(FITTED) :] += STEP
        slopes[np.arange(len(rows)), speeds] = (misses(faster) - here)[: len(rows)] / STEP
        return slopes

    damping, here = 1.0, misses(x)
    for _ in range(ROUNDS):
        slopes = slopes_at(x, here)
        square, slope = slopes.T @ slopes, slopes.T @ here
        for _ in range(8):
            there = x - np.linalg.solve(square + damping * np.diag(np.diag(square)), slope)
            if (new := misses(there)) @ new < here @ here:
                x, here, damping = there, new, damping / 4
                break
            damping *= 4
    return x


def checked(products, taken):
    """Return a line on the choices: how much longer they take than the fastest, and PyTorch's times by theirs."""
    longer, torch = [], []
    for problem, theirs, times in products:
        us = times[taken(problem, times)]
        longer.append(math.log(us / min(times.values())))
        torch.append(theirs / us)
    share, mean = np.mean(np.array(torch) >= 0.95), math.exp(np.mean(np.log(torch)))
    words = f"{math.exp(np.mean(longer)):.3f} of the fastest in the mean, {math.exp(max(longer)):.3f} at worst"
    return f"{len(products)} products: {words}; PyTorch {mean:.3f}, {min(torch):.3f} at worst, {share:.2f} reach 0.95"


def main():
    """Print what is fitted, and how the choices do before and after."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, nargs="*", default=[2, 3, 6, 12])
    parser.add_argument("--check", type=int, nargs="*", default=[2, 3, 6, 12, 13])
    parser.add_argument("--judge", type=int, help="fit without the products of this seed, and check these")
    options = parser.parse_args()
    places = [(kind, i) for kind, tiles in SIMT_SHARED.items() for i in range(len(tiles))]
    order = {place: i for i, place in enumerate(places)}
    speeds = [SIMT_SHARED[kind][i].speed for kind, i in places]
    before = np.log([*(getattr(SIMT_COSTS, name) for name in FITTED), *speeds])
    seed = options.judge
    after, check = fit(products_of(options.runs, without=seed), before, order), products_of(options.check, seed=seed)

    def taken_by(x):
        return lambda problem, times: min(times, key=lambda choice: modeled(problem, choice, x, order))

    print("listed first:", checked(check, lambda _, times: next(iter(times))))  # noqa: T201
    print("before:", checked(check, taken_by(before)))  # noqa: T201
    print("after:", checked(check, taken_by(after)))  # noqa: T201
    for name, value in zip(FITTED, after, strict=False):
        print(f"{name} = {math.exp(value):.4g}")  # noqa: T201
    for place, value in zip(places, after[len(FITTED) :], strict=True):
        print(SIMT_SHARED[place[0]][place[1]][:10], place[0], round(math.exp(value)))  # noqa: T201


if __name__ == "__main__":
    main()
