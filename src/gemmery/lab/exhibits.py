"""exhibit(): one effect of the hardware, measured over its space beside its parent's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from gemmery.bench import timing
from gemmery.bench.record import Measurement, Run
from gemmery.bench.timing import Contestant
from gemmery.bench.work import Work
from gemmery.cuda import driver, exhibits
from gemmery.cuda.driver import Memory
from gemmery.cuda.exhibits import Config
from gemmery.errors import ArgumentError, RefusedError
from gemmery.lab import results
from gemmery.lab.event import OnEvent, ignore
from gemmery.lab.gpu.session import GpuSession, ordinal
from gemmery.ladder.exhibits import Exhibit, find

SHARE = 0.3  # seconds for one config and its parent


def exhibit(
    name: str, device: str = "cuda", seconds: float = SHARE, on_event: OnEvent = ignore, store: Path | None = None
) -> Run:
    """Run an exhibit at its default and with every value of its space: checked, and timed beside its parent.

    A measurement's `config` says what was varied, `note` what the rules predict of one launch. Results are exact:
    `error` is 0, or above 1 when an element differs. `seconds` is spent on one config.

    >>> run = exhibit("bank_stride")  # doctest: +SKIP

    Raises ArgumentError for an unknown name or device and for no time at all, DeviceError when there is no device.
    """
    shown = find(name)
    session = GpuSession(len(shown.configs()), on_event, exhibited_on(device, seconds), store)
    stage = _Stage(session, shown)
    for config in shown.configs():
        session.begin(f"{name}, {words(config)}")
        session.end(stage.measure(config, seconds))
    return session.run


def exhibited_on(device: str, seconds: float = SHARE) -> int:
    """The number of the GPU that an exhibit is run on. Raises ArgumentError as `exhibit` does."""
    gpu = ordinal(device)
    if gpu is None:
        raise ArgumentError(f"device {device!r}: an exhibit is of a GPU; say cuda, or cuda:N")
    if not seconds > 0:
        raise ArgumentError(f"seconds={seconds}: the time for one config must be above 0")
    return gpu


def predicted(shown: Exhibit) -> tuple[tuple[Config, Mapping[str, int]], ...]:
    """What the rules of the hardware say of each config, for one launch; no device is needed."""
    return tuple((config, shown.show.counts(shown.show.n, config)) for config in shown.configs())


def words(config: Config) -> str:
    """A config in words: "stride 4, width 8"."""
    return ", ".join(f"{key} {value}" for key, value in config.items())


class _Stage:
    """An exhibit's arrays on the device."""

    def __init__(self, session: GpuSession, shown: Exhibit) -> None:
        self._session, self._shown = session, shown
        ordinal = session.stream.ordinal
        self._host = exhibits.numbers(shown.show.n)
        self._x, self._y = Memory(self._host.nbytes, ordinal), Memory(self._host.nbytes, ordinal)
        self._x.write(self._host)

    def measure(self, config: Config, seconds: float) -> Measurement:
        """One config, checked and timed; refused in words where the kernel does not take it."""
        show, session = self._shown.show, self._session
        plain = self._plain(config)
        try:
            own = self._contestant(self._shown, config)
        except RefusedError as refused:
            return replace(plain, refused=str(refused))
        error = self._error(config)
        parent = [self._contestant(find(self._shown.parent), config)] if self._shown.parent else []
        session.monitor.seen()
        found = timing.compare([own, *parent], seconds)
        note = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in show.counts(show.n, config).items())
        done = results.timed(plain, found.timings[own.name], (0.0, 0.0), found.versus)
        return replace(done, error=error, checked=True, note=note, clock_mhz=session.monitor.seen())

    def _plain(self, config: Config) -> Measurement:
        show = self._shown.show
        work = Work(1, show.n, 1, "f32", "f32")
        moved = 4 * (show.n + show.results(show.n, config))
        blank = results.blank("exhibit", self._shown.name, work, 0, config=dict(config))
        return replace(blank, flops=show.operations(show.n, config), bytes=moved)

    def _contestant(self, shown: Exhibit, config: Config) -> Contestant:
        stream = self._session.stream
        launch = exhibits.put(shown.show, config, self._x.pointer, self._y.pointer, stream.ordinal)
        return Contestant(shown.name, self._session.sampler(lambda _: launch(stream.handle), 1))

    def _error(self, config: Config) -> float:
        """0 when every element of a launch into poisoned memory is what it must be; above 1 otherwise."""
        show, stream = self._shown.show, self._session.stream
        self._y.fill(0xFF)
        driver.synchronize(stream.ordinal)
        exhibits.put(show, config, self._x.pointer, self._y.pointer, stream.ordinal)(stream.handle)
        driver.synchronize(stream.ordinal)
        y = np.empty(show.results(show.n, config), np.float32)
        self._y.read(y)
        wrong = int(np.count_nonzero(~(y == show.expected(self._host, config))))
        return 1.0 + wrong if wrong else 0.0
