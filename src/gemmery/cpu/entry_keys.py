"""What identifies a product in the table of the compiled entry, and what the table stores of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemmery.cpu import entry_layout as layout
from gemmery.cpu import objects
from gemmery.tuples import NamedTuple


class Element(NamedTuple):
    """An element type of PyTorch."""

    word: int  # which identifies it in a key
    code: int  # PyTorch's number
    itemsize: int


class ArrayKey(NamedTuple):
    """What the table knows of an array."""

    dtype: np.dtype[Any] | Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def words(self) -> list[int]:
        """Return the words of the key."""
        words = [word(self.dtype)]
        for both in zip(self.shape, self.strides, strict=True):
            words += both
        return words

    def reach(self) -> tuple[int, int]:
        """Return the lowest byte and one past the highest, from the first element."""
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + self.dtype.itemsize


class Key(NamedTuple):
    """The key of a product in the table."""

    words: list[int]
    hash: int


class Kind(NamedTuple):
    """The key of products: what the arguments of two calls must have in common to share a job."""

    a: ArrayKey
    b: ArrayKey
    out: ArrayKey | None = None
    bias: ArrayKey | None = None  # an array of numbers of the kernel's type, contiguous
    bias_is_number: bool = False
    scaled: bool = False  # alpha is not 1 or beta is not 0
    beta: bool = False  # beta is not 0, and `out` is the old C
    activation: str = ""
    dtype: object = None  # the object passed as dtype=, which identifies it; the table keeps it alive
    threads: int | None = None  # one of those that Python has as one object each, or None

    def key(self) -> Key:
        """Return the key, as compiled code writes it."""
        bias, options = _bias_and_options(self)
        out = 0 if self.out is None else len(self.out.shape) + 1
        first = len(self.a.shape) | len(self.b.shape) << 8 | out << 16 | bias << 24 | options << 32
        words = [first, *self.a.words(), *self.b.words()]
        for array in (self.out, self.bias):
            if array is not None:
                words += array.words()
        if self.dtype is not None:
            words[0] |= layout.WIDENS << 32
            words.append(id(self.dtype))
        if self.threads is not None:
            words[0] |= layout.THREADS << 32
            words.append(id(self.threads))
        return Key(words, layout.hashed(words))


class PreparedJob(NamedTuple):
    """The prepared job of a product, run once for each place of `loops`: (length, steps of A, B and C in bytes)."""

    job: bytes
    scalar: str  # LLVM's name of the type of alpha and beta, after "complex" for two of them
    flops: int
    loops: Sequence[tuple[int, tuple[int, int, int]]] = ()
    transposed: bool = False  # the job computes C' = B' A'


class Class(NamedTuple):
    """What products of any shape must have in common to be served by the same families of kernels."""

    dtype: np.dtype[Any] | Element  # of A, B and C
    b_rows: bool  # the elements of a row of B are adjacent
    bias: np.dtype[Any] | Element | None = None  # the type of a bias that is an array
    bias_is_number: bool = False
    scaled: bool = False
    beta: bool = False
    activation: str = ""

    def words(self) -> list[int]:
        """Return the words of the key, as compiled code compares them."""
        bias, options = _bias_and_options(self)
        element = 0 if self.bias is None else word(self.bias)
        return [word(self.dtype), options, bias, element, int(self.b_rows)]


class Member(NamedTuple):
    """A kernel that runs every shape within limits on one thread, and a job in which sizes and strides are missing."""

    m: tuple[int, int]  # inclusive
    n: tuple[int, int]
    k: tuple[int, int]
    b_elements: int  # most k n
    c_elements: int  # most m n
    work: float  # most m n k batch for which one thread is enough
    most: float  # the same until a product comes often: a plan for several threads takes longer than it saves
    job: bytes


def _bias_and_options(kind: Kind | Class) -> tuple[int, int]:
    array = layout.NO_BIAS if kind.bias is None else layout.ARRAY_BIAS
    activation = layout.ACTIVATIONS.index(kind.activation) + 1 if kind.activation else 0
    options = kind.scaled * layout.SCALED | kind.beta * layout.BETA | activation << layout.ACTIVATION_SHIFT
    return layout.NUMBER_BIAS if kind.bias_is_number else array, options


def word(dtype: np.dtype[Any] | Element) -> int:
    """Return the word that identifies an element type."""
    return dtype.word if isinstance(dtype, Element) else objects.element(dtype)
