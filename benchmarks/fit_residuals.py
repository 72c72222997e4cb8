"""Fit `Residuals` of cuda/choose/data.py to times of tiles, and choose which tiles are kept beside those of a table.

    python benchmarks/fit_residuals.py --base old.json --most 40 --to residuals.json

With the library's own file as the base and `--most 0` it writes that file again.
`--base` has the names that stay, as an earlier residuals.json. Of the others, those are added one after the other that
gain most over the tiles so far on products of the `--new` runs, where products below 0.95 of PyTorch count three times.
Then all are fitted: logarithms of measured by modeled times, less a constant of each product, by ridge regression.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from gemmery.cuda.choose import cost
from gemmery.cuda.choose.data import Instance, Residuals
from gemmery.cuda.device import KNOWN
from gemmery.problem import Problem

RECORD = Path(__file__).parent / "tuning" / "survey-nvidia-h200.jsonl"
DEVICE, CYCLES = KNOWN["h200"], 1755  # of a microsecond, which no fit depends on
MOST_ROWS, SIDES = Residuals((), {}).rows, Residuals((), {}).sides
RIDGE = 3.0, 10.0  # of terms of kinds of tiles, and of single tiles
WEIGHT = 3  # of new runs
FAST, SLOW = 1.15, 1.6  # times the fastest tile, up to which tiles count twice, and beyond which they do not count
CURED = 15  # the first run in which blocks of a cluster that lack rows do not hold up the others


def parsed(name):
    """Return the tile and the number of blocks that share its k."""
    *tile, splits = map(int, name.split(","))
    return Instance(*tile), splits


def rows_of(record, runs, new):
    """Return the products of runs that residuals are for, each with what it asks, and whether its run is new."""
    found = []
    for line in record.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        inside = 0 < row["m"] <= MOST_ROWS and row["n"] in SIDES and row["k"] in SIDES
        if row["run"] not in (*runs, *new) or not inside:
            continue
        problem = Problem(row["m"], row["n"], row["k"], "bf16", "bf16", b_layout="col", device="h200")
        if cost.straddles(demand := cost.demand_of(problem)):
            timed = {name: us for name, us in row["times"].items() if name.replace(",", "").isdigit()}
            found.append(({**row, "times": timed}, demand, row["run"] in new))
    order = {run: place for place, run in enumerate((*runs, *new))}
    return sorted(found, key=lambda each: order[each[0]["run"]])


def is_shared(name, demand):
    """Return True unless clusters would share the k of all tiles in vain."""
    tile, splits = parsed(name)
    return splits == 1 or cost.shared_turns(demand, tile, splits, DEVICE.sms) > 0


def added(rows, base, most):
    """Return the names that gain most beside those of the base."""
    best, weights, times = {}, {}, {}
    for index, (row, demand, is_new) in enumerate(rows):
        known = [us for name, us in row["times"].items() if name in base]
        known += [row["gm"]] if row["run"] < CURED else []
        if not (is_new and known):
            continue
        best[index] = math.log(min(known))
        weights[index] = 3.0 if row["torch"] / min(known) < 0.95 else 1.0
        for name, us in row["times"].items():
            if name not in base and is_shared(name, demand):
                times.setdefault(name, {})[index] = math.log(us)
    names = []
    while times and len(names) < most:
        gains = {
            name: sum(weights[i] * max(0, best[i] - us - 0.01) for i, us in each.items())
            for name, each in times.items()
        }
        name = max(gains, key=gains.__getitem__)
        if gains[name] < 0.02:
            break
        names.append(name)
        for i, us in times.pop(name).items():
            best[i] = min(best[i], us)
    return names


def fit(rows):
    """Return the terms of kinds of tiles and those of single tiles."""
    terms, ratios, weights, names, products = [], [], [], [], []
    for index, (row, demand, is_new) in enumerate(rows):
        fastest = min(row["times"].values(), default=0)
        for name, us in row["times"].items():
            tile, splits = parsed(name)
            lacks = -(-demand.n // tile.bn) % tile.cn or -(-demand.m // tile.bm) % tile.cm
            if us > SLOW * fastest or not is_shared(name, demand) or (lacks and row["run"] < CURED):
                continue
            kinds, features = cost.kinds_and_features(demand, tile, splits, DEVICE.sms)
            terms.append(np.outer(np.array(kinds, float), features).ravel())
            ratios.append(math.log(us * CYCLES / cost.cycles(demand, tile, splits, DEVICE)))
            weights.append((WEIGHT if is_new else 1) * (2 if us < FAST * fastest else 1))
            names.append(name)
            products.append(index)
    order = sorted(set(names))
    single = np.zeros((len(names), len(order)))
    single[np.arange(len(names)), [order.index(name) for name in names]] = 1
    each, weighted = np.hstack([np.array(terms), single, np.array(ratios)[:, None]]), np.array(weights, float)[:, None]
    sums, totals = np.zeros((len(rows), each.shape[1])), np.zeros(len(rows))
    np.add.at(sums, products, each * weighted)
    np.add.at(totals, products, weighted[:, 0])
    each -= (sums / np.maximum(totals, 1)[:, None])[products]
    x, y = each[:, :-1], each[:, -1]
    ridge = np.diag([RIDGE[0]] * (x.shape[1] - len(order)) + [RIDGE[1]] * len(order))
    found = np.linalg.solve(x.T @ (x * weighted) + ridge, x.T @ (y * weighted[:, 0]))
    return found[: -len(order)].reshape(-1, len(features)), dict(zip(order, found[-len(order) :], strict=True))


def text_of(classes, tiles):
    """Return the file of residuals."""
    kinds = ",\n    ".join("[" + ", ".join(f"{x:.3f}" for x in row) + "]" for row in classes)
    each = [f'"{name}": {tiles[name]:.3f}' for name in sorted(tiles, key=lambda name: [*map(int, name.split(","))])]
    lines = ",\n    ".join(", ".join(each[i : i + 5]) for i in range(0, len(each), 5))
    return f'{{\n  "classes": [\n    {kinds}\n  ],\n  "tiles": {{\n    {lines}\n  }}\n}}\n'


def main():
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--runs", type=int, nargs="*", default=[4, 5, 10, 11, 12])
    parser.add_argument("--new", type=int, nargs="*", default=[14, 15])
    parser.add_argument("--most", type=int, default=40)
    parser.add_argument("--to", type=Path, default=Path("residuals.json"))
    options = parser.parse_args()
    rows, base = rows_of(RECORD, options.runs, options.new), set(json.loads(options.base.read_text())["tiles"])
    names = base | set(added(rows, base, options.most))
    classes, tiles = fit(rows)
    options.to.write_text(text_of(classes, {name: tiles.get(name, 0.0) for name in names}), encoding="utf-8")


if __name__ == "__main__":
    main()
