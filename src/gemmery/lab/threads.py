"""Sets the number of threads temporarily, to time or check something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemmery.bench.timing import Sample
from gemmery.cpu import threads as cpu_threads


def on(threads: int, sample: Sample) -> Sample:
    """Return the same sampler with that many threads."""

    def sampled(inner: int, warm: int) -> int:
        with in_force(threads):
            return sample(inner, warm)

    return sampled


@contextmanager
def in_force(threads: int) -> Iterator[None]:
    """Set the number of threads, as `gemmery.set_num_threads`, within a `with` block."""
    before = cpu_threads.get()
    cpu_threads.set_(threads)
    try:
        yield
    finally:
        cpu_threads.set_(before)
