"""What the emulator knows of an instruction, and the meaning of one that only computes, from registers to registers.

Modifiers are sorted by kind: state spaces, memory orders and scopes, lengths of vectors, hints to caches. Like ptxas,
instructions accept them in any order, but only one of each kind. Caches are not modeled: their modifiers are checked,
and change neither a value nor a count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.dtypes import TENSOR_FLOAT8

Values = Any  # a NumPy scalar if all threads agree, else an array with one value per thread
Indices = NDArray[np.int64]  # of threads, blocks, bytes
Meaning = Callable[..., Any]  # the function of an instruction
Flags = NDArray[np.bool_]
Mask = Flags | None  # the active threads; None means all

_WARP_FLAGS = np.dtype("V32")
# The NumPy type of values of a PTX type. bf16, 8-bit floats and packed types are kept as their bits.
NUMPY = {f"{kind}{8 * size}": f"{to}{size}" for kind, to in zip("bus", "uui", strict=True) for size in (1, 2, 4, 8)}
NUMPY |= dict.fromkeys(("bf16", *(f"{name}x2" for name in TENSOR_FLOAT8)), "u2")
NUMPY |= dict.fromkeys(("f16x2", "bf16x2", "tf32"), "u4") | {"pred": "?", "f16": "f2", "f32": "f4", "f64": "f8"}
# The NumPy type of a register of a declared type: unsigned integers, except for floats of 4 and 8 bytes.
STORED = {name: f"u{kind[1:]}" for name, kind in NUMPY.items()} | {"pred": "?", "f32": "f4", "f64": "f8"}


@dataclass(frozen=True, kw_only=True)
class Traits:
    """An instruction in the table of `instructions`: what other parts need to know of it."""

    kind: str = ""  # its key in EmulatedRun.instructions: "fma", "mma"; "" for the first word of its name
    issues: int = 1  # machine instructions that ptxas makes of it
    lanes: str = ""  # whom it waits for: "mask" the lanes that its last operand names, "warp", "warpgroup", or nobody
    writes: bool = True  # whether its first operand, if that is a register, is a result
    effect: bool = True  # whether it does more than compute its results
    orders: bool = False  # whether ptxas moves no access across it
    waits: bool = False  # whether it is repeated until it succeeds, as a basic block of its own


@dataclass(frozen=True)
class Op(Traits):
    """An instruction that only computes.

    `meaning` takes the operands in order, vectors flattened, each in the NumPy type of its PTX type. It returns the
    result, or a tuple of several results.

    The operands of a "lane" op are scalars or arrays, which NumPy broadcasts: from scalars comes a scalar. A "warp" op
    takes the active threads as an array (warps, 32), then its operands, each an array (warps, 32); it returns arrays of
    that shape, or of one value per thread.
    """

    results: tuple[str, ...]  # PTX types
    operands: tuple[str, ...]
    meaning: Meaning
    scope: str = "lane"  # or "warp"
    flops: int = 0  # floating-point operations of one thread ("lane") or of one warp ("warp")
    core: Callable[..., Any] | None = None  # a function for which `meaning` takes a faster one as its parameter `core`
    carry: str = ""  # "in", "out", "in out": the thread's carry flag is the last operand, the last result, or both
    folds: bool = False  # for min and max: there may be a third operand, combined with the result of the first two
    complement: Meaning | None = None  # for setp: the function that gives q, if "p|q" is written
    kind: str = field(default="alu", kw_only=True)
    effect: bool = field(default=False, kw_only=True)


def same(name: str, kinds: Iterable[str], arity: int, meaning: Meaning, kind: str) -> dict[str, Op]:
    """The entries of an instruction whose operands and result have one type, for each of these types."""
    return {f"{name}.{t}": Op((t,), (t,) * arity, meaning, kind=kind) for t in kinds}


def warps_in(mask: Flags) -> int:
    """How many warps have a thread in the mask; NumPy counts 32 bytes as one element that is not zero."""
    return int(np.count_nonzero(mask.view(_WARP_FLAGS)))


def lowest(values: NDArray[Any]) -> int:
    """The least of some values; for few, argmin is faster than min."""
    return int(values[values.argmin()])


def highest(values: NDArray[Any]) -> int:
    """The greatest of some values."""
    return int(values[values.argmax()])


def pair(first: Meaning, second: Meaning) -> Meaning:
    """Return two results of the same operands."""
    return lambda *operands: (first(*operands), second(*operands))


Kinds = Mapping[str, Collection[str]]  # "order" -> ("weak", "volatile", ...)

SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared::cluster",
    "local": "local",
    "const": "global",
    "param": "param",
    "param::entry": "param",
}
SCOPES = ("cta", "cluster", "gpu", "sys")
LENGTHS = {"v2": 2, "v4": 4, "v8": 8}
FETCHES = ("L2::64B", "L2::128B", "L2::256B")
POLICY = "L2::cache_hint"  # the last operand is a cache policy


def sort_by_kind(words: Sequence[str], kinds: Kinds) -> dict[str, str] | None:
    """Return the word of each kind; None if a word has no kind, or two words have the same.

    >>> sort_by_kind(["relaxed", "gpu"], {"order": ["relaxed", "acquire"], "scope": SCOPES})
    {'order': 'relaxed', 'scope': 'gpu'}
    >>> sort_by_kind(["gpu", "sys"], {"scope": SCOPES}) is None
    True
    """
    by_kind: dict[str, str] = {}
    for word in words:
        kind = next((kind for kind, known in kinds.items() if word in known), None)
        if kind is None or kind in by_kind:
            return None
        by_kind[kind] = word
    return by_kind
