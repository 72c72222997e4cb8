"""The records of a checkout: what each machine's file holds of a suite, from the newest run that has it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemmery.bench import record, suite
from gemmery.bench.record import Measurement, Run
from gemmery.errors import ArgumentError

COMMANDS = {
    "ladder": "gemmery ladder --store benchmarks/results",
    "sweep_size": "gemmery sweep size --store benchmarks/results",
    "sweep_block": "gemmery sweep block --store benchmarks/results",
    "sweep_threads": "gemmery sweep threads --store benchmarks/results",
    "sweep_tile": "gemmery sweep tile --store benchmarks/results",
    "sweep_stages": "gemmery sweep stages --store benchmarks/results",
    "sweep_gemv": "gemmery sweep gemv --dtype f16 --store benchmarks/results",
    "sweep_gemv_k": "gemmery sweep gemv_k --dtype f16 --store benchmarks/results",
    "chain": "gemmery bench --workload chain --store benchmarks/results",
}  # what stores the records of a suite that is no file; `gemmery bench NAME` those of one that is


@dataclass(frozen=True)
class Query:
    """What a marker asks for: `table: skinny machine=first dtype=f32` is of the suite "skinny"."""

    suite: str
    others: tuple[str, ...]
    fields: Mapping[str, str]
    machine: str = ""  # a name, "first", "cpu" or "gpu" for those whose records are of one, or "" for every one

    def matches(self, measurement: Measurement) -> bool:
        """True for a record of the suite whose fields are as they must be."""
        return measurement.suite == self.suite and all(
            str(getattr(measurement, name)) == wanted for name, wanted in self.fields.items()
        )


def query(said: str) -> Query:
    """The words of a marker, quoted as in a shell where a value has spaces: `kernel='packed kc=256'`.

    Raises ArgumentError when the suite is missing, or for a field that measurements do not have.
    """
    parts = shlex.split(said)
    fields = dict(word.split("=", 1) for word in parts if "=" in word)
    machine = fields.pop("machine", "")
    for name in fields:
        if name not in Measurement.__dataclass_fields__:
            raise ArgumentError(f"marker {said!r}: {name!r} is no field of a measurement")
    plain = [word for word in parts if "=" not in word]
    if not plain:
        raise ArgumentError(f"marker {said!r}: name the suite, as in `table: skinny`")
    return Query(plain[0], tuple(plain[1:]), fields, machine)


class Stored:
    """The files of benchmarks/results in a checkout, read once."""

    def __init__(self, root: Path) -> None:
        files = sorted((root / "benchmarks" / "results").glob("*.jsonl"))
        self._runs: dict[str, tuple[Run, ...]] = {file.stem: record.read(file) for file in files}
        held = {m.suite for runs in self._runs.values() for run in runs for m in run.measurements}
        self.suites = suite.names()
        self._known = {*COMMANDS, *self.suites, *held}

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines that have a file, by name."""
        return tuple(self._runs)

    def newest(self, asked: Query) -> list[Run]:
        """For each machine, the newest run that holds what is asked for, with nothing else in it.

        Raises ArgumentError for a suite that there is not.
        """
        if asked.suite not in self._known:
            raise ArgumentError(f"marker: suite {asked.suite!r} is not known; known: {', '.join(sorted(self._known))}")
        found = []
        for name, runs in self._runs.items():
            of = [run for run in reversed(runs) if asked.machine in ("", "first", name, _kind(run))]
            found += [run for run in (_only(asked, run) for run in of) if run.measurements][:1]
        return found[:1] if asked.machine == "first" else found

    def newest_of_each_type(self, asked: Query) -> list[Run]:
        """For each machine, one run with the newest records of every element type of what is asked for."""
        held = (m for runs in self._runs.values() for run in runs for m in run.measurements if asked.matches(m))
        types = dict.fromkeys((m.dtype, m.precision) for m in held)
        return _merged(
            run
            for dtype, precision in types
            for run in self.newest(replace(asked, fields={**asked.fields, "dtype": dtype, "precision": precision}))
        )

    def everything(self, suites: Sequence[str], machine: str = "") -> list[Run]:
        """Return one run per machine, with the newest records of all these suites."""
        return _merged(run for suite in suites for run in self.newest(Query(suite, (), {}, machine)))


def _merged(runs: Iterable[Run]) -> list[Run]:
    """One run for each machine, with all records of its runs."""
    by_machine: dict[str, list[Run]] = {}
    for run in runs:
        by_machine.setdefault(run.machine.name, []).append(run)
    return [
        Run(same[-1].machine, max(run.started for run in same), tuple(m for run in same for m in run.measurements))
        for _, same in sorted(by_machine.items())
    ]


def _kind(run: Run) -> str:
    return "gpu" if run.machine.gpu.name else "cpu"


def _only(asked: Query, run: Run) -> Run:
    return Run(run.machine, run.started, tuple(filter(asked.matches, run.measurements)))


def missing(asked: Query) -> str:
    """What stands where there is no record."""
    where = {"": "", "first": "", "cpu": "", "gpu": " on a GPU"}.get(asked.machine, f" on `{asked.machine}`")
    command = COMMANDS.get(asked.suite, f"gemmery bench {asked.suite} --store benchmarks/results")
    if asked.machine == "gpu" and asked.suite in ("ladder", "sweep_size"):
        command = command.replace("--store", "--device cuda --store")
    if asked.suite in COMMANDS and asked.fields.get("dtype", "f32") != "f32" and "--dtype" not in command:
        command = command.replace("--store", f"--dtype {asked.fields['dtype']} --store")
    return f"Not measured{where} yet: `{command}` stores the records."
