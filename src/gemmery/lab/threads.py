"""A number of threads in force while something is timed or checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemmery.bench.timing import Sample
from gemmery.cpu import threads as cpu_threads


def on(threads: int, sample: Sample) -> Sample:
    """The same sampler with that many threads in force."""

    def sampled(inner: int, warm: int) -> int:
        with in_force(threads):
            return sample(inner, warm)

    return sampled


@contextmanager
def in_force(threads: int) -> Iterator[None]:
    """What `gemmery.set_num_threads` does, for the length of a block."""
    before = cpu_threads.get()
    cpu_threads.set_(threads)
    try:
        yield
    finally:
        cpu_threads.set_(before)
