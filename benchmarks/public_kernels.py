"""Which public .cu files compile as they are, and which of their kernels the emulator understands.

    python benchmarks/public_kernels.py FOLDER NAME [FILES]

FOLDER holds checkouts as OWNER/NAME, each with its commit in a file .commit. Of each checkout at most FILES with a
kernel are taken, at random by a fixed seed; all of them without it. benchmarks/results/NAME.json lists each file:
repository, commit, path, whether all its kernels compile, those that are understood, and the reason for each that is
not; no code. Of a template only the instances are compiled that the file launches with literal arguments, at most two.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from gemmery.errors import CompileError, GemmeryError
from gemmery_emulator.kernels.kernel import compiled_kernel, read_source
from gemmery_emulator.kernels.source_kernels import kernels_of

RESULTS = Path(__file__).parent / "results"
INSTANCES = 2  # of each template that a file launches with literal arguments
SECONDS = 240  # for a file
ARCH = "sm_90a"


def file_row(path: str) -> dict[str, Any]:
    """Compile each kernel of a file and read its PTX."""
    file = Path(path)
    text, _, _ = read_source(file)
    named = kernels_of(text, file.name, file.parent)
    compiled, understood, refused = True, [], dict[str, str]()
    instances = [each for some in named.values() for each in some[:INSTANCES] if re.fullmatch(r"[\w\s<>,:]*", each)]
    for instance in instances:
        try:
            compiled_kernel(text, file.name, file.parent, instance, ARCH)
            understood.append(instance)
        except CompileError as error:
            if "<" not in instance or "undefined" not in str(error):  # an argument is a variable of a host function
                compiled, refused[instance] = False, reason(str(error))
        except GemmeryError as error:
            refused[instance] = reason(str(error))
    return {"compiled": compiled, "understood": understood, "refused": refused} if instances else {}


def reason(error: str) -> str:
    """The first error, in the compiler's or the emulator's words and without a line of the source."""
    if unknown := re.search(r"instruction '(\S+)", error):
        return f"instruction {unknown[1]} is not modeled"
    match = re.search(r"error: (.*)", error)
    said = match[1] if match else re.sub(r"^PTX line \d+: ", "", error.splitlines()[0])
    return re.sub(r"(?<=\s)/\S*/", "", said)[:160].strip()  # files without their folders


def rows(folder: Path, files: int) -> Iterator[dict[str, Any]]:
    """A row for each file with a kernel; each in a process of its own, which may take SECONDS."""
    for checkout in sorted(folder.glob("*/*")):
        paths = [path for path in sorted(checkout.glob("**/*.cu")) if b"__global__" in path.read_bytes()]
        random.Random(1).shuffle(paths)
        for path in paths[: files or None]:
            place = {"repository": f"{checkout.parent.name}/{checkout.name}"}
            place |= {"commit": (checkout / ".commit").read_text().strip(), "path": str(path.relative_to(checkout))}
            with futures.ProcessPoolExecutor(1) as pool:
                try:
                    row = pool.submit(file_row, str(path)).result(SECONDS)
                except futures.TimeoutError:
                    row = {"compiled": False, "understood": [], "refused": {"": f"no answer in {SECONDS} s"}}
                except Exception as error:  # one file must not end the list
                    words = f"{type(error).__name__}: {error}"[:160]
                    row = {"compiled": False, "understood": [], "refused": {"": words}}
            if row:
                print(path, row["compiled"], len(row["understood"]), row["refused"], flush=True)  # noqa: T201
                yield place | row


if __name__ == "__main__":
    listed = list(rows(Path(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
    kernels = sum(len(row["understood"]) for row in listed)
    missed = sum(len(row["refused"]) for row in listed if row["compiled"])
    head = {"files": len(listed), "compiled": sum(row["compiled"] for row in listed)}
    head |= {"understood": kernels, "refused": missed}
    lines = ",\n".join(map(json.dumps, listed))
    (RESULTS / f"{sys.argv[2]}.json").write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
    print(head)  # noqa: T201
