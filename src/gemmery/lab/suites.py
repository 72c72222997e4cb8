"""bench(): gemmery's product against the rival libraries on the suites of benchmarks/*.toml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemmery.bench.record import Run
from gemmery.lab.event import OnEvent, ignore


def bench(
    suites: Sequence[str] = (),
    rivals: Sequence[str] = (),
    threads: int = 0,
    seconds: float = 3.0,
    store: Path | None = None,
    on_event: OnEvent = ignore,
) -> Run:
    """Time `gemmery.matmul` and the rivals in turn on every product of the suites.

    `suites` are names of files in benchmarks/ without ".toml", or paths; () is every one. `rivals` limits the
    rivals to these names ("numpy", "numpy_avx512", "torch", ...). `threads` replaces what the suites say, 0 keeps
    it. `seconds` is spent on one product by all who run it. `store` is a folder: the records are appended
    to <store>/<machine>.jsonl as they are taken, so that an interrupted run keeps what it has.

    >>> run = bench(["square_f32"], seconds=1.0)  # doctest: +SKIP

    Raises ArgumentError for an unknown suite or rival, and for a suite file with a wrong key.
    """
    raise NotImplementedError


def suite_names() -> tuple[str, ...]:
    """The suites that `bench` finds: the stems of benchmarks/*.toml in a checkout, () elsewhere."""
    raise NotImplementedError


def results_folder() -> Path | None:
    """benchmarks/results of the checkout this runs from, or None when there is no checkout."""
    raise NotImplementedError
