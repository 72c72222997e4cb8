"""The time that the host part of a program takes for itself, and its limit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread, get_ident
from time import perf_counter

SECONDS = 60.0  # of the host part's own code, without launches and copies


@dataclass
class HostClock:
    """Runs while the host part's own code does."""

    own: float = 0.0  # seconds up to ...
    left: float | None = field(default_factory=perf_counter)  # ... when the code went on; None in a call

    @property
    def seconds(self) -> float:
        """Seconds of the host part's own code."""
        left = self.left
        return self.own + (perf_counter() - left if left is not None else 0)

    def pause(self) -> None:
        """A call begins."""
        self.own, self.left = self.seconds, None

    def proceed(self) -> None:
        """A call ends."""
        self.left = perf_counter()

    @contextmanager
    def watched(self, seconds: float) -> Iterator[None]:
        """Send this thread a signal again and again, once the host part's own code has run for `seconds`."""
        thread, done = get_ident(), Event()

        def watch() -> None:
            while not done.wait(0.005 if self.seconds > seconds else min(0.2, seconds)):
                if self.seconds > seconds:
                    signal.pthread_kill(thread, signal.SIGVTALRM)

        watcher = Thread(target=watch, daemon=True)
        self.proceed()
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
