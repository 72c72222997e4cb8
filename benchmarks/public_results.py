"""What the emulator computes with public kernels, compared with NumPy.

    python benchmarks/public_results.py FOLDER [PART OF A NAME]

FOLDER holds checkouts as OWNER/NAME. Each case of `public_cases` runs its file as it is, and all of its arrays are
compared with a reference in float64. benchmarks/results/public_results.json lists each case, without its code: file,
kernel, result, the largest error in units of the bound, the kinds of findings, and what is wrong in a public kernel,
which runs in another order of blocks and warps, too. A case with an unexplained finding is wrong. With a part of a name
only its cases run, and nothing is written.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from public_cases import EPSILON, Array, Case, from_bits
from public_cases.leetcuda import CASES as LEETCUDA
from public_cases.leetgpu import CASES as LEETGPU
from public_cases.llmc import CASES as LLMC
from public_cases.samples import CASES as SAMPLES

import gemmery as gm

RESULTS = Path(__file__).parent / "results" / "public_results.json"
CASES = (*SAMPLES, *LEETGPU, *LEETCUDA, *LLMC)


def widened(value: Any) -> Any:
    """A copy of an argument for the reference, floats in float64."""
    if isinstance(value, np.ndarray):
        return value.astype("f8") if value.dtype.kind == "f" else value.copy()
    return [widened(each) for each in value] if isinstance(value, list) else value


def error(actual: Array, expected: Array, bound: float) -> float:
    """The largest difference in units of the bound; infinite where one of them is no number, or integers differ."""
    if actual.dtype.kind != "f":
        return 0.0 if np.array_equal(actual, expected) else np.inf
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        units = np.where(same, 0.0, np.abs(actual.astype("f8") - expected) / bound)
    return float(np.nan_to_num(units, nan=np.inf, posinf=np.inf).max(initial=0.0))


def row(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case."""
    random = np.random.default_rng(7)
    args = [each(random) if callable(each) else each for each in case.args]
    variables = {name: fill(random) for name, fill in case.variables.items()}
    before = {**dict(enumerate(map(widened, args))), **{name: widened(each) for name, each in variables.items()}}
    begin = time.perf_counter()
    try:
        run = gm.emulate(
            folder / case.file, case.kernel, case.grid, case.block, args, variables=variables, **case.options
        )
    except gm.GemmeryError as refused:
        return {"result": "refused", "words": str(refused).splitlines()[0][:160]}
    seconds = time.perf_counter() - begin
    after = {**dict(enumerate(args)), **variables}
    worst = largest_error(case, case.reference, before, after)
    result = "right" if worst <= 1 else "wrong"
    if result == "wrong" and case.fault and (case.as_written is not None or run.findings):
        other = 0.0 if case.as_written is None else largest_error(case, case.as_written, before, after)
        result = "fault of the kernel" if other <= 1 else "wrong"
    findings = sorted({finding.kind for finding in run.findings})
    if findings and not case.fault:
        raise RuntimeError(f"findings that are not explained: {findings}")
    print(f"{seconds:6.2f} s", end=" ")  # noqa: T201
    return {"result": result, "error": float(f"{worst:.2g}"), "findings": findings}


def largest_error(case: Case, reference: Any, before: dict[int | str, Any], after: dict[int | str, Any]) -> float:
    """The largest error of all arrays, in units of the bound; infinite if one changed that should not."""
    named = {name: value for name, value in before.items() if isinstance(name, str)}
    expected = reference(*(value for name, value in before.items() if not isinstance(name, str)), **named)
    worst = 0.0
    for name, old in before.items():
        actual = after[name]
        if isinstance(actual, np.ndarray) and name not in case.scratch:
            wanted = np.broadcast_to(expected.get(name, old), actual.shape)
            if actual.dtype == np.uint16 and wanted.dtype.kind == "f":
                actual = from_bits(actual)
            largest = float(np.abs(np.nan_to_num(wanted, posinf=0, neginf=0)).max(initial=0.0))
            scale = max(case.floor, largest) if actual.dtype.kind == "f" else 1.0
            roundings = case.terms + 8 if name in expected else 0.0
            worst = max(worst, error(actual, wanted, max(roundings * EPSILON[case.rounds] * scale, 1e-300)))
    return worst


def named(case: Case) -> dict[str, str]:
    """The place of a case's kernel."""
    owner, name, *path = case.file.split("/")
    return {"repository": f"{owner}/{name}", "path": "/".join(path), "kernel": case.kernel}


def main(folder: Path, part: str) -> None:
    """Run the cases whose file or kernel has this part in its name."""
    rows = []
    for case in CASES:
        if part not in f"{case.file} {case.kernel}":
            continue
        try:
            result = row(case, folder)
        except Exception as error:  # one case must not end the list
            result = {"result": "wrong", "words": f"{type(error).__name__}: {error}"[:160]}
        if case.fault:
            again = row(replace(case, options={**case.options, "seed": 3}), folder)
            result |= {"in another order": again["result"], "fault": case.fault}
        print(result["result"], case.file.rpartition("/")[2], case.kernel, {**result, "result": ""}, flush=True)  # noqa: T201
        rows.append(named(case) | result)
    counts = {
        each: sum(row["result"] == each for row in rows)
        for each in ("right", "fault of the kernel", "refused", "wrong")
    }
    print(counts)  # noqa: T201
    if not part:
        head = json.dumps({"cases": len(rows)} | counts)
        RESULTS.write_text(f'{head[:-1]}, "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), " ".join(sys.argv[2:]))
