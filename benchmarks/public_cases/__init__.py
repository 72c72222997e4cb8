"""Cases of public kernels: how each is launched, and what it computes, written in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Fill = Callable[[np.random.Generator], Array]
EPSILON = {"f4": 2.0**-24, "f2": 2.0**-11, "bf16": 2.0**-8, "f8": 2.0**-53, "tf32": 2.0**-11}


@dataclass(frozen=True)
class Case:
    """A launch of a public kernel.

    `reference` takes the arguments before the launch, floats in float64, and returns the arrays that the kernel writes,
    by the number of the argument or the name of a variable; all others must stay as they were. A float may differ by
    `terms` + 8 roundings of the type `rounds` of the largest value of its array, or of `floor`, and integers not at
    all.
    """

    file: str  # below the folder of the repositories
    kernel: str
    grid: Any
    block: Any
    args: tuple[Any, ...]  # fills of arrays, scalars, or a function of these for others
    reference: Callable[..., Mapping[int | str, Any]]
    terms: int = 1  # the longest sum, or the roundings one after the other
    floor: float = 0.0  # at least the largest value, where terms of a sum cancel
    rounds: str = "f4"  # the least precise type of a result or of an intermediate value
    options: Mapping[str, Any] = field(default_factory=dict)  # of gm.emulate
    variables: Mapping[str, Fill] = field(default_factory=dict)
    scratch: tuple[int, ...] = ()  # arguments whose values nobody asks for
    fault: str = ""  # what is wrong in the public kernel, if its result or a finding is
    as_written: Callable[..., Mapping[int | str, Any]] | None = None  # what a faulty kernel computes instead


def floats(*shape: int, low: float = -1, high: float = 1, dtype: str = "f4") -> Fill:
    """An array of random floats."""
    return lambda random: random.uniform(low, high, shape).astype(dtype)


def halves(*shape: int, low: float = -1, high: float = 1) -> Fill:
    """An array of random float16."""
    return floats(*shape, low=low, high=high, dtype="f2")


def bfloats(*shape: int) -> Fill:
    """An array of random bfloat16, as bits."""
    return lambda random: bits(random.uniform(-1, 1, shape))


def ints(*shape: int, low: int = 0, high: int = 100, dtype: str = "i4") -> Fill:
    """An array of random whole numbers, `high` left out."""
    return lambda random: random.integers(low, high, shape).astype(dtype)


def out(*shape: int, dtype: str = "f4", value: float = np.nan) -> Fill:
    """An array for results, of NaN unless another value is asked for; of integers all bits are set."""
    bad = value if np.dtype(dtype).kind == "f" or not np.isnan(value) else -1
    return lambda random: np.full(shape, bad).astype(dtype)


def zeros(*shape: int, dtype: str = "f4") -> Fill:
    """An array of zeros."""
    return out(*shape, dtype=dtype, value=0)


def of(make: Callable[[np.random.Generator], Any]) -> Fill:
    """Any other array, made by a function of the random generator."""
    return make


def bits(values: Any) -> Array:
    """Round to bfloat16, as bits."""
    whole = np.asarray(values, "f4").view("u4")
    rounded: Array = ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype("u2")
    return rounded


def from_bits(values: Array) -> Array:
    """The values of bfloat16 given as bits."""
    return (values.astype("u4") << 16).view("f4").astype("f8")
