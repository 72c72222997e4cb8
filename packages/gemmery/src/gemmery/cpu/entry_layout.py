"""The memory that the compiled entry reads: its table, and the records of a call, which it keeps on the stack.

The table is the head (objects and functions by address), the factors of the hash, the hashes of the entries, the
entries. Every field is a word of 8 bytes. What identifies a product in the table, and what it stores of one, are the
tuples at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from gemmery.cpu import objects
from gemmery.cpu.abi import Fields, pointers, words
from gemmery.cpu.layout import JOB
from gemmery.tuples import NamedTuple


def size(fields: Fields) -> int:
    """Return the bytes of a record."""
    return 8 * len(fields)


def at(fields: Fields, name: str) -> int:
    """Return the offset of a field."""
    return 8 * [field for field, _ in fields].index(name)


# Python's functions for the calls that the entry passes on, in the order of the builtins.
BUILTINS = ("matmul", "gemm", "gemv", "einsum", "tensordot", "vecdot")
HEAD = pointers(
    "array_type", "none", "false", "float_type", "double_type", "single_type", "complex_type", "int_type",
    "tuple_type", "dict_type", "error_state", "ignoring",
    *(f"python_{name}" for name in BUILTINS),
    *(f"name_{name}" for name in objects.KEYWORDS),
    *(f"is_{name}" for name in (*objects.ACTIVATIONS, *objects.SEMIRINGS)),
    "new_array", "new_copy", "copy_into", "from_array", "to_scalar",  # NumPy's functions
    "incref", "decref", "save_thread", "restore_thread", "vectorcall", "integer",  # Python's
    "clear_error", "set_context", "reset_context", "dict_item", "new_tuple",
    "run",  # the pool's
    "tensors",  # what is known of PyTorch, NULL before its first tensor
    "packed_type",  # the class of operands that were packed, NULL before the first of them
    "epilogue_type", "bound_type",  # the classes of epilogues without and with operands, NULL before the first of them
    "generation",  # of the number of threads, to which a recipe belongs
)  # fmt: skip

# An array as the entry sees it. `unit` is that of the strides in bytes; `element` identifies the element type.
OPERAND = (
    *pointers("object", "data"),
    *words("ndim"),
    *pointers("shape", "strides"),
    *words("element", "size", "unit", "flags"),
)
OPERANDS = ("a", "b", "out", "old", "bias")  # `old` is the C that beta multiplies
MOST_WORDS = 32  # of a key; products with more dimensions are Python's
CALL = (
    *((f"{operand}_{name}", type_) for operand in OPERANDS for name, type_ in OPERAND),
    *words("options"),  # SCALED, BETA, and the numbers of the activation and of the semiring
    ("alpha", "double"), ("alpha_imag", "double"), *words("alpha_integer"),
    ("beta", "double"), ("beta_imag", "double"), *words("beta_integer"),
    *words("integral"),  # 1: alpha and beta are integers
    ("bias_number", "double"), *words("bias_kind"),
    *words("tensors"),  # 1: an operand is a tensor
    *pointers("dtype", "threads"),  # the objects that the caller passed, NULL without; words of the key
    *words("raw"),  # 1: the result is an array even without dimensions
    *words("count", "hash"), *words(*(f"key_{i}" for i in range(MOST_WORDS))),
)  # fmt: skip
SCALED, BETA, ACTIVATION_SHIFT = 1, 2, 2  # in options: alpha or beta, beta alone; the activation's number above them
WIDENS, THREADS = 16, 32  # in options: the caller chose the type of the result, or the number of threads
# In options: a contraction, by builtin. Its expression or axes, or None, take the place of dtype in a call and a key.
CONTRACTION = {"einsum": 64, "tensordot": 128, "vecdot": 256}
SEMIRING_SHIFT = 9  # in options: the semiring's number, from here on
NO_BIAS, ARRAY_BIAS, NUMBER_BIAS = range(3)

# What the parsers fill in: objects, NULL where the caller passed none.
ARGUMENTS = pointers("a", "b", "out", "bias", "activation", "alpha", "beta", "old", "dtype", "threads", "semiring")

MOST_DIMENSIONS = 8  # of a result
LOOPS = 3  # around the kernel
RUN, ASIDE = 1, 2  # run the job; compute in memory of its own, then copy
SINGLE, DOUBLE, INTEGER, COMPLEX = 0, 1, 2, 4  # the type of alpha and beta in a job; COMPLEX is added to one
_ENTRY = (
    *words("count", *(f"key_{i}" for i in range(MOST_WORDS))),
    *words("kind"),
    *words("countdown"),  # products until Python makes a better entry, and 1; 0: it does not
    *pointers("c_descr"),  # NumPy's own object of the element type, which lives as long as the process
    *words("c_tensor"),  # not 0: the result is a tensor of PyTorch's element type of this number - 1
    *words("c_fortran"),  # 1: the first dimension of a new array is innermost
    *words("c_ndim", *(f"c_shape_{i}" for i in range(MOST_DIMENSIONS))),
    *words(*(f"{name}_{end}" for name in ("a", "b", "c", "bias") for end in ("low", "high"))),  # reach in bytes
    *words("plain"),  # 1: one thread and no workspace, so the kernel is called directly
    *words("quick"),  # the words of the key where the job is plain, runs once, and has A and B in order; else 0
    *words("long"),  # 1: long enough to release the GIL
    *words("scalar"),
    *words("transposed"),  # 1: the job computes C' = B' A', so its A is b
    *words("runs", *(f"loop{i}_{name}" for i in range(LOOPS) for name in ("length", "a", "b", "c"))),
)
PADDING = -len(_ENTRY) % 8  # so that a job begins with a cache line
ENTRY = (*_ENTRY, *words(*(f"padding_{i}" for i in range(PADDING))), *((f"job_{name}", type_) for name, type_ in JOB))

# A recipe is what an epilogue's first product of a kind finds out. After these fields follow: A and each weight
# (KNOWN); operands (a name, KNOWN); the slots of sums, operands and outputs; outputs and sums to be made (MADE), where
# the memory of the first sum may be that of the first output; the job of the pass by rows.
RECIPE = (
    *words("generation", "weights", "operands", "outputs"),
    *words("single"),  # 1: numbers among the slots are float32
    *words("long"),  # 1: the pass is long enough to release the GIL
    *pointers("dtype"),  # of the sums, as `matmul` is told, or NULL
)
RECIPE_DIMENSIONS, RECIPE_OPERANDS, RECIPE_OUTPUTS = 4, 12, 8  # at most
# Dimensions (-1: a number), element type, lengths and strides in bytes.
KNOWN = 2 + 2 * RECIPE_DIMENSIONS
MADE = 2 + RECIPE_DIMENSIONS  # NumPy's object of the element type (NULL: as said), dimensions, lengths

# The element type to which a pair of types promotes (CONVERTED: its dtype object), that of a result which may be cast
# to that of `out` (CAST), and that to which a bias for a result is converted (BIAS).
CONVERTED, CAST, BIAS = 1, 2, 3
PAIR = (*words("first", "second", "use"), *pointers("descr"))

# What serves every shape of an element type: families, each a kernel with the shapes that it takes.
LIMITS = ("m", "n", "k")
MEMBER = (
    *words(*(f"{name}_{end}" for name in LIMITS for end in ("low", "high")), "b_elements", "c_elements", "a_col"),
    ("work", "double"), ("most", "double"),  # m n k batch up to which one thread is enough, and is faster than a plan
    *((f"job_{name}", type_) for name, type_ in JOB),
)  # fmt: skip
MOST_FAMILIES = 21
CLASS_KEY = ("element", "options", "bias_kind", "bias_element", "b_layout")
LAYOUTS = ("any", "row", "col")  # of B, as the words of the key
CLASS = (
    *words(*CLASS_KEY, "families"),
    *words("size", "scalar", "operations"),  # bytes of an element; operations of a multiply-add
    *pointers("c_descr"),
    *words("c_tensor"),
)

SETS, WAYS = 1024, 4  # entries with the same place in the table, of which the oldest is replaced
SET_BITS, MIX = SETS.bit_length() - 1, 29
PAIRS, CLASSES, COUNTERS = 512, 512, 4096
PROBES = 8  # places of a pair or a class, one after the other
OFTEN = 64  # the calls of a shape after which it gets an entry of its own
# A call with a batch counts as one more for each so many products: kernels for every shape lose about 50 ns a product,
# so that all OFTEN together lost 6 ms, about what LLVM takes for a kernel for the shape.
PRODUCTS_BITS = 11
SOON = 8  # the same where several threads would save up to 30 us each: their plan takes 100 us, once
LONG = 1 << 21  # operations from which the GIL is released: 20 us of work, where releasing it takes 100 ns
ENTRY_BYTES = -(-size(ENTRY) // 64) * 64
CLASS_BYTES = size(CLASS) + MOST_FAMILIES * size(MEMBER)
FACTORS_AT = size(HEAD)
HASHES_AT = -(-(FACTORS_AT + 8 * MOST_WORDS) // 64) * 64
PAIRS_AT = HASHES_AT + 8 * SETS * WAYS
CLASSES_AT = PAIRS_AT + (PAIRS + PROBES) * size(PAIR)
COUNTERS_AT = CLASSES_AT + (CLASSES + PROBES) * CLASS_BYTES  # a hash and a count each
ENTRIES_AT = -(-(COUNTERS_AT + 16 * COUNTERS) // 64) * 64
TABLE_BYTES = ENTRIES_AT + SETS * WAYS * ENTRY_BYTES


# Odd numbers that look random: the powers of 2**64 over the golden ratio.
FACTORS = [int(np.uint64(pow(0x9E3779B97F4A7C15, i, 1 << 64)).astype(np.int64)) for i in range(1, MOST_WORDS + 1)]


def hashed(key: list[int]) -> int:
    """Return the hash of a key: the sum of its words, each times a constant, and odd, since 0 is a free place.

    Source: Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic" (1996).
    """
    total: int = sum(map(operator.mul, key, FACTORS))
    return total % (1 << 64) | 1


def place(hash_: int) -> int:
    """Return the index of the first entry where a key with this hash may be.

    The bits are mixed once more: keys that differ in one stride are equally far apart, and would share a few sets.
    """
    return high_bits((hash_ ^ hash_ >> MIX) * FACTORS[1], SETS) * WAYS


def place_of(key: list[int], count: int) -> int:
    """Return the index, below `count`, of the first place of a pair or a class."""
    return high_bits(sum(map(operator.mul, key, FACTORS)), count)


def high_bits(word: int, count: int) -> int:
    """Return the upper bits of a word as a number below `count`: where a hash has its counter."""
    return (word % (1 << 64)) >> (65 - count.bit_length())


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
    contraction: str = ""  # the builtin; `dtype` is its expression or axes, or None
    semiring: str = ""

    def key(self) -> Key:
        """Return the key, as compiled code writes it."""
        bias, options = _bias_and_options(self)
        out = 0 if self.out is None else len(self.out.shape) + 1
        first = len(self.a.shape) | len(self.b.shape) << 8 | out << 16 | bias << 24 | options << 32
        words = [first, *self.a.words(), *self.b.words()]
        for array in (self.out, self.bias):
            if array is not None:
                words += array.words()
        if self.contraction:
            words[0] |= CONTRACTION[self.contraction] << 32
            words.append(id(self.dtype))
        elif self.dtype is not None:
            words[0] |= WIDENS << 32
            words.append(id(self.dtype))
        if self.threads is not None:
            words[0] |= THREADS << 32
            words.append(id(self.threads))
        if self.semiring:
            words[0] |= objects.SEMIRINGS.index(self.semiring) + 1 << SEMIRING_SHIFT + 32
        return Key(words, hashed(words))


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
    b_layout: str  # "row", "col" or "any", as in Problem
    bias: np.dtype[Any] | Element | None = None  # the type of a bias that is an array
    bias_is_number: bool = False
    scaled: bool = False
    beta: bool = False
    activation: str = ""

    def words(self) -> list[int]:
        """Return the words of the key, as compiled code compares them."""
        bias, options = _bias_and_options(self)
        element = 0 if self.bias is None else word(self.bias)
        return [word(self.dtype), options, bias, element, LAYOUTS.index(self.b_layout)]


class Member(NamedTuple):
    """A kernel that runs every shape within limits on one thread, and a job in which sizes and strides are missing."""

    m: tuple[int, int]  # inclusive
    n: tuple[int, int]
    k: tuple[int, int]
    b_elements: int  # most k n
    c_elements: int  # most m n
    a_col: int  # the stride of A along k in bytes; 0: any
    work: float  # most m n k batch for which one thread is enough
    most: float  # the same until a product comes often: a plan for several threads takes longer than it saves
    job: bytes


def _bias_and_options(kind: Kind | Class) -> tuple[int, int]:
    array = NO_BIAS if kind.bias is None else ARRAY_BIAS
    activation = objects.ACTIVATIONS.index(kind.activation) + 1 if kind.activation else 0
    options = kind.scaled * SCALED | kind.beta * BETA | activation << ACTIVATION_SHIFT
    return NUMBER_BIAS if kind.bias_is_number else array, options


def word(dtype: np.dtype[Any] | Element) -> int:
    """Return the word that identifies an element type."""
    return dtype.word if isinstance(dtype, Element) else objects.element(dtype)
