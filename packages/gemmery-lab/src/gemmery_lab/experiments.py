"""The experiments: all that a command, a table, a figure and the documents need to know of one, in one entry.

A new sweep is an entry of experiments.toml; a new suite is a file in measure/suites/.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmery.errors import unknown

if TYPE_CHECKING:
    from gemmery_lab.measure.record import Measurement

Variants = tuple[tuple[str, Mapping[str, int]], ...]  # rungs, each with a config


@dataclass(frozen=True)
class Axis:
    """The quantity that differs between records: a key of the config, or a side of the product, or neither."""

    label: str
    key: str = ""  # of the rungs' config, varied at one size
    side: str = ""  # "n" or "k"
    fixed: int = 0  # the other side of the matrix in y = W x; 0 for squares
    threads: int = 0  # a block has value ** threads threads; 0 if the value does not set their number

    def of(self, m: Measurement) -> int | None:
        """Return its value in a record; None if it has none, as that of a rival without the key."""
        sides: dict[str, int] = {"n": m.n, "k": m.k}
        return sides[self.side] if self.side else m.config.get(self.key)


@dataclass(frozen=True)
class Points:
    """The default points of an experiment on a kind of device."""

    variants: Variants = ()  # () for every rung
    sizes: tuple[int, ...] = ()  # sides of the products; only one if a key is varied
    values: tuple[int, ...] = ()  # of the key, including some that a device cannot run; () for those of the rung


@dataclass(frozen=True)
class Experiment:
    """One experiment. `suite` is the field of its records, `arguments` the command that takes them."""

    name: str
    suite: str
    title: str
    axis: Axis
    arguments: str
    table: str  # of report.tables.SHEETS
    figures: tuple[str, ...]  # of report.page.DRAWINGS
    points: Mapping[str, Points]  # by kind of device: "cpu", "cuda" or "emulator"; the first is the default
    dtype: str = ""  # the element type that the documents show; "" if the option --dtype is not taken

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of devices on which it is timed; the emulator counts."""
        return tuple(device for device in self.points if device != "emulator")

    @property
    def is_sweep(self) -> bool:
        """True if it varies one quantity."""
        return bool(self.axis.key or self.axis.side)

    @property
    def heading(self) -> str:
        """Its name as text: "square f32"."""
        return self.name.replace("_", " ")


def built_in(name: str, axis: Mapping[str, Any], **entry: Any) -> Experiment:
    """Return the experiment of an entry of experiments.toml; `rungs` and `values` are those of every device."""
    varied, points = Axis(**axis), {}
    rungs, values = entry.pop("rungs", ()), entry.pop("values", ())
    for device in [key for key in entry if key in ("cpu", "cuda", "emulator")]:
        row = entry.pop(device)
        words = [rung.split() for rung in row.get("rungs", rungs)]
        variants = tuple((rung, {key: int(n) for key, n in (x.split("=") for x in keys)}) for rung, *keys in words)
        points[device] = Points(variants, tuple(row.get("sizes", ())), tuple(row.get("values", values)))
    sweep = {"suite": f"sweep_{name}", "arguments": f"sweep {name}", "dtype": "f32"}
    usual = sweep if varied.key or varied.side else {"suite": name, "arguments": name}
    fields: dict[str, Any] = {**usual, **entry, "figures": tuple(entry.get("figures", ("sweep",)))}
    return Experiment(name, axis=varied, points=points, **fields)


_ENTRIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BUILT_IN = tuple(built_in(name, **entry) for name, entry in _ENTRIES.items())
LADDER, *SWEEPS, CHAIN, DISTRIBUTED, EXHIBIT = BUILT_IN

COMPARED = "Products compared with rival libraries"  # the title of records of suites, or of several experiments
ANY_SUITE = "any"  # the table of the suite whose records look like these
TABLES = {
    **dict.fromkeys(("product", "choices", "call", "calls"), "products"),
    **dict.fromkeys(("compile", "emulator"), "by_case"),
    "first_call": "first_products",
    "new_shapes": "new_shapes",
}  # by the kind of a suite


def sweep(name: str) -> Experiment:
    """Return a sweep by its name. Raises ArgumentError for an unknown one."""
    by_name = {experiment.name: experiment for experiment in SWEEPS}
    if name not in by_name:
        raise unknown(f"experiment {name!r} is not known", name, by_name)
    return by_name[name]


@functools.cache
def find(suite: str) -> Experiment:
    """Return the experiment whose records have this suite; a suite of a user's own for any other name.

    >>> find("sweep_tile").axis.label, find("small").arguments
    ('side of a tile', 'bench small')
    """
    for experiment in BUILT_IN:
        if experiment.suite == suite:
            return experiment
    from gemmery_lab.measure import suite as suites  # loads what commands need not wait for to check their arguments

    table, device = ANY_SUITE, "cpu"
    if suite in suites.names():
        loaded = suites.load(suites.find(suite))
        table, device = TABLES[loaded.kind], loaded.device
    figures = ("tournaments", "speedups", "roofline")
    return Experiment(suite, suite, COMPARED, Axis("product"), f"bench {suite}", table, figures, {device: Points()})


def of(measurement: Measurement) -> Experiment:
    """Return the experiment that a record belongs to."""
    return find(measurement.suite)
