"""Compare the predicted times of the GPU's ladder with the records of a card; needs NVRTC and no GPU.

    python benchmarks/predicted_times.py [CARD] [--types f32,bf16] [--sizes 2048] [--rungs simt_naive,...]

prints a row for each record of the suite "ladder" in benchmarks/results, then the rank correlation and the median error
over all, over the type that no constant was fitted to, and by type and size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gemmery.cuda.pipes import pipes_of
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung
from gemmery_lab.measure.work import Work
from gemmery_lab.on_emulator import predicted_rung, recorded
from gemmery_lab.rung_counts import PredictedRung, agreement

HELD_OUT = ("f16",)  # no constant of cuda/pipes.py was fitted to records of this type


def rows(card: str, types: Sequence[str], sizes: Sequence[int], rungs: Sequence[str]) -> list[PredictedRung]:
    """Predict every record, and print each."""
    device, pipes = pipes_of(card)
    ladder: dict[str, Rung] = {rung.name: rung for rung in CUDA}
    table = []
    for record in recorded(device):
        rung = ladder.get(record.kernel)
        wanted_type, wanted_size = not types or record.dtype in types, not sizes or record.n in sizes
        if rung is None or not wanted_type or not wanted_size or (rungs and rung.name not in rungs):
            continue
        layout = "col" if record.m == 1 else "row"
        work = Work(record.m, record.n, record.k, record.dtype, record.out, b_layout=layout, precision=record.precision)
        row = predicted_rung(rung, work, device, pipes, record.config)
        table.append(PredictedRung(**{**vars(row), "measured": record.seconds}))
        sys.stdout.write(f"{described(table[-1])}\n")
        sys.stdout.flush()
    return table


def described(row: PredictedRung) -> str:
    """Describe a row in a line."""
    name = f"{row.rung:22} {row.m:5} x {row.n:5} x {row.k:5} {row.dtype:5}"
    if row.prediction is None:
        return f"{name} not predicted: {row.refused}"
    times = f"{row.prediction.seconds * 1e6:11,.1f} us predicted, {row.measured * 1e6:11,.1f} measured"
    return f"{name} {times}, {row.ratio:5.2f}, {row.prediction.bound}"


def summary(table: Sequence[PredictedRung]) -> list[str]:
    """Describe the agreement over all, over the type that nothing was fitted to, and by type and size."""
    groups = {"all": list(table), "held out (f16)": [row for row in table if row.dtype in HELD_OUT]}
    for row in table:
        groups.setdefault(f"{row.dtype}, n = {row.n}", []).append(row)
    lines = []
    for name, group in groups.items():
        both = agreement(group)
        if both is not None:
            lines.append(
                f"{name}: {both.count} records, rank correlation {both.rank:.3f}, median error {both.error:.1%}"
            )
    return lines


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", nargs="?", default="h200")
    for name in ("types", "sizes", "rungs"):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=[])
    options = parser.parse_args()
    table = rows(options.card, options.types, [int(size) for size in options.sizes], options.rungs)
    if not table:
        raise RefusedError(f"benchmarks/results has no records of the ladder on {options.card}; measure some first")
    sys.stdout.write("\n".join([*summary(table), ""]))


if __name__ == "__main__":
    main()
