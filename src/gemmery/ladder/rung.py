"""What a rung is, and how one is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gemmery.arrays import View
from gemmery.errors import ArgumentError
from gemmery.problem import Problem

if TYPE_CHECKING:
    from gemmery.cuda.geometry import Geometry

Config = Mapping[str, int]


class Kernel(Protocol):
    """A built rung: C = alpha A B + beta C, on views of shape (batch, m, k), (batch, k, n), (batch, m, n).

    C is not empty; with k = 0 the sum is zero.
    A batch stride of 0 repeats one matrix. `bias` is a vector of n elements of C's accumulator type
    (its stride may be 0); only a rung that accepts the problem's `epilogue` is given one.
    """

    def __call__(
        self,
        a: View,
        b: View,
        c: View,
        *,
        alpha: complex = 1.0,
        beta: complex = 0.0,
        bias: View | None = None,
        threads: int = 1,
    ) -> None: ...


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder.

    What `expect` claims is of an aligned product: square, row by row in memory, sides that are multiples of 128 (32
    for the one block), or for a rung of vectors y = W x with the rows of such a W contiguous; f32, or the first of its
    `dtypes` where it does not take f32; its default config, on any device that runs it. The emulator shows whether it
    holds. A rung of the CPU claims nothing.
    """

    name: str  # <unit>_<idea>
    idea: str  # what it changed against its parent, in one line
    parent: str | None
    dtypes: tuple[str, ...]
    refuses: Callable[[Problem], str]  # "" or the reason in words
    build: Callable[[Problem, Config], Kernel]
    bound: Callable[[int], float] = float  # f(k) of the error bound f(k) u |A||B|
    space: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    default: Config = field(default_factory=dict)
    expect: Mapping[str, float] = field(default_factory=dict)  # fields of emulated.RungCounts
    normwise: bool = False  # the bound holds for the norm, not for each element
    lesson: str = ""  # what a reader learns from it, in a few sentences
    source: str = ""  # the kernel's file in the package: "cpu/simple.py"
    geometry: Callable[[Problem, Config], Geometry] | None = None  # how it is launched, of a rung on a GPU
    settled: Callable[[Problem, Config], Config] = lambda _, config: config  # with a value for what it leaves open

    def stated(self, config: Config) -> dict[str, int]:
        """What a config says: without the zeros that leave a choice to the rung, those of more values than 0 and 1."""
        return {key: value for key, value in config.items() if value or len(self.space.get(key, ())) <= 2}


def find(rungs: tuple[Rung, ...], name: str) -> Rung:
    """The rung called `name`; an unknown name is an ArgumentError that lists the known ones."""
    for rung in rungs:
        if rung.name == name:
            return rung
    raise ArgumentError(f"rung {name!r} is not in the ladder; known: {', '.join(r.name for r in rungs)}")
