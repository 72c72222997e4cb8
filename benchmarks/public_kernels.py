"""Which public .cu files compile as they are, and which of their kernels the emulator understands.

    python benchmarks/public_kernels.py FOLDER

FOLDER holds checkouts as OWNER/NAME. benchmarks/results/public_kernels.json lists each file with a kernel: repository,
path, whether it compiles as it is, its kernels that are understood, and the reason for each that is not; no code. Of a
template only the instances are compiled that the file launches with literal arguments, at most two.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from gemmery.cuda.device_part import device_part, kernels_of
from gemmery.errors import GemmeryError
from gemmery_emulator.lower import lowered
from gemmery_emulator.ptx.module import parse

RESULTS = Path(__file__).parent / "results" / "public_kernels.json"
INSTANCES = 2  # of each template that a file launches with literal arguments
SECONDS = 120  # for a file


def file_row(path: str) -> dict[str, Any]:
    """Compile a file's kernels and read their PTX."""
    file = Path(path)
    text = file.read_text(encoding="utf-8", errors="replace")
    named = kernels_of(text, file.name, file.parent)
    kernels = {kernel.rpartition("::")[2]: instances for kernel, instances in named.items()}
    if not kernels:
        return {}
    refused: dict[str, str] = {}
    understood: set[str] = set()
    compiled = True
    try:
        part = device_part(text, file.name, "", "sm_90a", (), file.parent)
        broken = {name: reason(error) for name, error in part.errors.items() if name in kernels}
        compiled, refused = not broken, refused | broken
        read(part.ptx.text, understood, refused)
    except GemmeryError as error:
        compiled, refused = False, refused | {name: reason(str(error)) for name in kernels}
    for name, instances in kernels.items():
        for instance in instances[:INSTANCES] if name not in refused else ():
            if "<" in instance and re.fullmatch(r"[\w\s<>,]*", instance):
                try:
                    read(
                        device_part(text, file.name, instance, "sm_90a", (), file.parent).ptx.text, understood, refused
                    )
                except GemmeryError as error:
                    if "undefined" not in str(error):  # an argument is a variable of a host function
                        compiled, refused[instance] = False, reason(str(error))
    return {"compiled": compiled, "understood": sorted(understood - refused.keys()), "refused": refused}


def read(ptx: str, understood: set[str], refused: dict[str, str]) -> None:
    """Read each kernel of a PTX text as the emulator does."""
    for name in re.findall(r"\.entry (\w+)\(", ptx):
        try:
            lowered(parse(ptx, frozenset()).kernels[name])
            understood.add(name)
        except GemmeryError as error:
            refused[name] = reason(str(error))


def reason(error: str) -> str:
    """The first error, in the compiler's or the emulator's words and without a line of the source."""
    if unknown := re.search(r"instruction '(\S+)", error):
        return f"instruction {unknown[1]} is not modelled"
    match = re.search(r"error: (.*)", error)
    said = match[1] if match else re.sub(r"^PTX line \d+: ", "", error.splitlines()[0])
    return re.sub(r"(?<=\s)/\S*/", "", said)[:160].strip()  # files without their folders


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each file with a kernel; each in a process of its own, which may take SECONDS."""
    for path in sorted(folder.glob("*/*/**/*.cu")):
        owner, name, *_ = path.relative_to(folder).parts
        place = {"repository": f"{owner}/{name}", "path": str(path.relative_to(folder / owner / name))}
        with futures.ProcessPoolExecutor(1) as pool:
            try:
                row = pool.submit(file_row, str(path)).result(SECONDS)
            except futures.TimeoutError:
                row = {"compiled": False, "understood": [], "refused": {"": f"no answer in {SECONDS} s"}}
            except Exception as error:  # one file must not end the list
                row = {"compiled": False, "understood": [], "refused": {"": f"{type(error).__name__}: {error}"[:160]}}
        if row:
            print(path.name, row["compiled"], len(row["understood"]), row["refused"], flush=True)  # noqa: T201
            yield place | row


if __name__ == "__main__":
    listed = list(rows(Path(sys.argv[1])))
    kernels = sum(len(row["understood"]) for row in listed)
    missed = sum(len(row["refused"]) for row in listed if row["compiled"])
    head = {"files": len(listed), "compiled": sum(row["compiled"] for row in listed)}
    head |= {"understood": kernels, "refused": missed}
    lines = ",\n".join(map(json.dumps, listed))
    RESULTS.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
    print(head)  # noqa: T201
