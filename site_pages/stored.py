"""The records of a checkout: for each machine and suite, those of the newest run that has them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemmery.errors import ArgumentError
from gemmery_lab import experiments
from gemmery_lab.experiments import Experiment
from gemmery_lab.measure import record
from gemmery_lab.measure import suite as suites
from gemmery_lab.measure.record import Measurement, Run

TYPE = "dtype", "precision"  # the fields of a record that tell its element type
FOLDER = "benchmarks/results"  # of a checkout, with the records of each machine


@dataclass(frozen=True)
class Query:
    """The query of a marker: `table: skinny machine=first dtype=f32` selects from the suite "skinny"."""

    suite: str
    others: tuple[str, ...]
    fields: Mapping[str, str]
    machine: str = ""  # a name, "first", "cpu" for all CPUs, "gpu" for all GPUs, "" for all machines

    def matches(self, measurement: Measurement) -> bool:
        """Return True for a record of the suite whose fields have the wanted values."""
        return measurement.suite == self.suite and all(
            str(getattr(measurement, name)) == value for name, value in self.fields.items()
        )


def query(marker: str) -> Query:
    """Parse the text of a marker; values with spaces are quoted as in a shell: `kernel='packed kc=256'`.

    Raises ArgumentError if the suite is missing or a field is unknown.
    """
    parts = shlex.split(marker)
    fields = dict(word.split("=", 1) for word in parts if "=" in word)
    machine = fields.pop("machine", "")
    for name in fields:
        if name not in Measurement.__dataclass_fields__:
            raise ArgumentError(f"marker {marker!r}: measurements have no field {name!r}")
    plain = [word for word in parts if "=" not in word]
    if not plain:
        raise ArgumentError(f"marker {marker!r}: name the suite, as in `table: skinny`")
    return Query(plain[0], tuple(plain[1:]), fields, machine)


class Stored:
    """The records in benchmarks/results of a checkout, read once."""

    def __init__(self, root: Path) -> None:
        files = sorted((root / FOLDER).glob("*.jsonl"))
        self.machines = tuple(file.stem for file in files)
        # By suite and machine, with the records of that suite alone: there are 15,000, and hundreds of markers.
        self._runs: dict[str, dict[str, list[Run]]] = {}
        for file in files:
            for run in record.read(file):
                for suite in dict.fromkeys(m.suite for m in run.measurements):
                    records = tuple(m for m in run.measurements if m.suite == suite)
                    of_suite = self._runs.setdefault(suite, {}).setdefault(file.stem, [])
                    of_suite.append(replace(run, measurements=records))
        self._known = {*(experiment.suite for experiment in every()), *self._runs}

    def newest(self, selection: Query) -> list[Run]:
        """Return for each machine the newest run with matching records, reduced to these.

        Raises ArgumentError for an unknown suite.
        """
        if selection.suite not in self._known:
            raise ArgumentError(
                f"marker: suite {selection.suite!r} is not known; known: {', '.join(sorted(self._known))}"
            )
        newest = list[Run]()
        for name, runs in self._runs.get(selection.suite, {}).items():
            for run in reversed(runs):
                kind = "gpu" if run.machine.gpu.name else "cpu"
                records = tuple(filter(selection.matches, run.measurements))
                if records and selection.machine in ("", "first", name, kind):
                    newest.append(replace(run, measurements=records))
                    break
        return newest[:1] if selection.machine == "first" else newest

    def newest_of_each(self, selection: Query, *names: str) -> list[Run]:
        """Return for each machine one run with the newest matching records for all values of the fields `names`."""
        runs = [run for runs in self._runs.get(selection.suite, {}).values() for run in runs]
        records = filter(selection.matches, (m for run in runs for m in run.measurements))
        return _merged(
            run
            for values in dict.fromkeys(tuple(getattr(m, name) for name in names) for m in records)
            for run in self.newest(
                replace(selection, fields={**selection.fields, **dict(zip(names, values, strict=True))})
            )
        )

    def everything(self, suites: Sequence[str], selection: Query) -> list[Run]:
        """Return one run per machine that the query names, with the newest records of all these suites that match."""
        return _merged(run for suite in suites for run in self.newest(replace(selection, suite=suite)))


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Merge the runs of each machine into one."""
    by_machine: dict[str, list[Run]] = {}
    for run in runs:
        by_machine.setdefault(run.machine.name, []).append(run)
    return [
        Run(same[-1].machine, max(run.started for run in same), tuple(m for run in same for m in run.measurements))
        for _, same in sorted(by_machine.items())
    ]


def missing(selection: Query) -> str:
    """Return the text of a block without records."""
    where = {"": "", "first": "", "cpu": "", "gpu": " on a GPU"}.get(selection.machine, f" on `{selection.machine}`")
    device = "cuda" if selection.machine == "gpu" else ""
    line = command(experiments.find(selection.suite), device, selection.fields.get("dtype", ""), FOLDER)
    return f"Not measured{where} yet: `{line}` stores the records."


def command(experiment: Experiment, device: str = "", dtype: str = "", store: str = "") -> str:
    """Return the command that takes the records of an experiment: on its default device and type unless given.

    >>> command(experiments.sweep("size"), "cuda", "f16")
    'gemmery sweep size --device cuda --dtype f16'
    """
    other = device in experiment.devices[1:]
    dtype = experiment.dtype and (dtype or experiment.dtype)
    options = {"--device": device if other else "", "--dtype": dtype if dtype != "f32" else "", "--store": store}
    return " ".join(["gemmery", experiment.arguments, *(f"{name} {value}" for name, value in options.items() if value)])


def every() -> tuple[Experiment, ...]:
    """Return all experiments that come with gemmery."""
    return (*experiments.BUILT_IN, *map(experiments.find, suites.names()))
