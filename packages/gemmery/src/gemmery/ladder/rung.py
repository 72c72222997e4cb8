"""The Rung tuple, and look-up by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.errors import ArgumentError
from gemmery.problem import Config, Problem
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.cuda.geometry import GeometryOf


class Kernel(Protocol):
    """A built rung: C = alpha A B + beta C, on views of shape (batch, m, k), (batch, k, n), (batch, m, n).

    C is not empty; with k = 0 the sum is zero. A batch stride of 0 repeats one matrix. `bias` is a vector of n
    elements of C's accumulator type (its stride may be 0), passed only to rungs that accept the problem's `epilogue`.
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


def as_given(problem: Problem, config: Config) -> Config:
    """Return the config of a rung that chooses nothing itself."""
    return config


Growth = Callable[[int], float]


class Rung(NamedTuple):
    """One kernel of the ladder.

    `expect` holds for an aligned product: square and row-major with sides that are multiples of 128 (32 for the single
    block), or, for matrix-vector rungs, y = W x with contiguous rows of such a W; in f32, or the first of `dtypes` if
    the rung does not take f32; with the default config, on any device that runs it. The emulator checks it. CPU rungs
    expect nothing.
    """

    name: str  # <unit>_<idea>
    idea: str  # what changed from its parent, in one line
    parent: str | None
    dtypes: tuple[str, ...]
    refuses: Callable[[Problem], str]  # "" or the reason
    build: Callable[[Problem, Config], Kernel]
    bound: Growth = float  # f(k) of the error bound f(k) u |A||B|
    space: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    default: Config = MappingProxyType({})
    expect: Mapping[str, float] = MappingProxyType({})  # fields of emulated.RungCounts
    normwise: bool = False  # the bound is on norms, not on each element
    lesson: str = ""  # what it teaches, in a few sentences
    source: str = ""  # the kernel's file in the package: "cpu/simple.py"
    geometry: GeometryOf | None = None  # how a GPU rung is launched
    resolve: Callable[[Problem, Config], Config] = as_given  # the config with every choice made
    bounds: Mapping[str, Growth] = MappingProxyType({})  # by element type ("tf32" too), where it is not `bound`
    mixed: tuple[str, ...] = ()  # the types of A and B that it takes where they differ
    semirings: bool = False  # it takes products of semirings
    one_sided: bool = False  # with A and B exchanged a sum has other bits: it is added in another order

    def bound_of(self, dtype: str, precision: str = "") -> Growth:
        """Return f(k) for products of an element type, or of f32 in this precision."""
        return self.bounds.get(precision or dtype, self.bound)

    def refusal(self, problem: Problem) -> str:
        """Return why it does not multiply a problem, its type included; "" if it does."""
        if problem.dtype not in self.dtypes:
            return f"it is written for {', '.join(self.dtypes)}, not {problem.dtype}"
        return self.refuses_kind(problem) or self.refuses(problem)

    def refuses_kind(self, problem: Problem) -> str:
        """Return why it does not take the semiring of a problem, or its types of A and B together; "" if it does."""
        if problem.b_dtype and not {problem.dtype, problem.b_dtype}.issubset(self.mixed):
            return f"A and B must have one type, not {problem.dtype} and {problem.b_dtype}"
        if not problem.semiring:
            return ""
        if not self.semirings:
            return f"it adds products, and has no {problem.semiring}"
        return "" if dtypes.get(problem.dtype).kind == "f" else f"{problem.semiring} is of floats, not {problem.dtype}"

    def explicit(self, config: Config) -> dict[str, int]:
        """Return the config without zeros that leave a choice to the rung, where 0 is not one of two real values."""
        return {key: value for key, value in config.items() if value or len(self.space.get(key, ())) <= 2}


def without_vector(problem: Problem) -> str:
    """Refuse products in which neither operand is a vector."""
    if problem.m == 1 or problem.n == 1:
        return ""
    return f"it multiplies a matrix by a vector: m or n must be 1, and C is {problem.m} x {problem.n}"


def find(rungs: tuple[Rung, ...], name: str) -> Rung:
    """Return the rung called `name`; raise ArgumentError with the known names if there is none."""
    for rung in rungs:
        if rung.name == name:
            return rung
    raise ArgumentError(f"rung {name!r} is not in the ladder; known: {', '.join(r.name for r in rungs)}")
