"""The compiled entry over random histories: all its calls, while kernels are compiled in the background.

Element types whose objects come and go must never be confused.

NumPy's own dtype objects live forever. An unpickled array brings an object of its own, which dies with the array, and
another type's may then be made at the same address.
"""

from __future__ import annotations

import gc
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import gemmery as gm
from gemmery import tiers
from gemmery.api import compute, repeats
from gemmery.cpu import entry
from gemmery.cpu.entry_layout import OFTEN

NAMES = ("f4", "i4", "u4", "f8", "i8", "u8", "i1", "u1", "c8", "f2", "i2", "u2", "q", ml_dtypes.bfloat16)
ELEMENTS = st.sampled_from([np.dtype(name) for name in NAMES])
SIDES = st.sampled_from([6, 8])
MAKERS = st.sampled_from(["own", "pickled", "swapped", "metadata", "foreign"])
GUARD = 64  # bytes on both sides of each array
POISON = 0xA5
MOST = 12  # arrays alive at once


def fresh(element: np.dtype, maker: str) -> np.dtype:
    """A dtype of this element type: NumPy's own object, or one that dies with the arrays that have it."""
    own = np.dtype(element)
    if maker == "pickled":
        return pickle.loads(pickle.dumps(np.empty(1, own))).dtype
    if maker == "swapped":
        return own.newbyteorder().newbyteorder("=")
    if maker == "foreign":
        return own.newbyteorder()
    return np.dtype(own, metadata={"unit": own.name}) if maker == "metadata" else own


class Guarded:
    """An array between guard zones, and the whole numbers in it."""

    def __init__(self, side: int, dtype: np.dtype, values: np.ndarray | None) -> None:
        size = side * side * dtype.itemsize
        self.memory = np.full(size + 2 * GUARD, POISON, np.uint8)
        self.array = np.ndarray((side, side), dtype, self.memory, GUARD)
        self.values = values
        if values is not None:
            self.array[...] = values

    def check(self) -> None:
        assert (self.memory[:GUARD] == POISON).all()
        assert (self.memory[-GUARD:] == POISON).all()
        if self.values is not None:
            assert np.array_equal(self.array, self.values)


def _into(z, a, b, c=None, beta=0):
    """The product in the memory of z, which may be an operand too."""
    return gm.gemm(1, a, b, beta, c, out=z)


def own(x):
    """A copy of an array in the native byte order."""
    return x.astype(x.dtype.newbyteorder("="))


def wide(x):
    """A type to which every product of arrays like x may be converted."""
    return "c16" if x.dtype.kind == "c" else "f8"


# From three arrays, and their values, to a result and what it must be: every entry, and every way through it.
ENTRIES = {
    "plain": lambda a, b, c, x, y, z: (gm.matmul(a, b), x @ y),
    "columns": lambda a, b, c, x, y, z: (gm.matmul(a.T, b[:, ::2]), x.T @ y[:, ::2]),
    "vector": lambda a, b, c, x, y, z: (gm.matmul(a, b[0]), x @ y[0]),
    "dot": lambda a, b, c, x, y, z: (gm.matmul(a[1], b[:, 2]), x[1] @ y[:, 2]),
    "batch": lambda a, b, c, x, y, z: (gm.matmul(a[None], b), (x @ y)[None]),
    "bias": lambda a, b, c, x, y, z: (gm.matmul(a, b, bias=c[0]), x @ y + z[0]),
    "gemm": lambda a, b, c, x, y, z: (gm.gemm(1.0, a, b), x @ y),
    "gemm with c": lambda a, b, c, x, y, z: (gm.gemm(1, a, b, 1.0, c), x @ y + z),
    "gemm into c": lambda a, b, c, x, y, z: (_into(w := own(c), a, b, w, 1), x @ y + z),
    "gemm into a": lambda a, b, c, x, y, z: (_into(w := own(a), w, b, c, 1), x @ y + z),
    "gemv": lambda a, b, c, x, y, z: (gm.gemv(a, b[0], c[0], alpha=1, beta=1), x @ y[0] + z[0]),
    "other types": lambda a, b, c, x, y, z: (_into(np.empty(z.shape, wide(a)), a, b, z.astype(wide(a)), 1), x @ y + z),
}


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        entry.forget()
        self.alive: list[Guarded] = []
        self.draw = np.random.default_rng(0)

    @rule(element=ELEMENTS, side=SIDES, maker=MAKERS)
    def make(self, element, side, maker):
        values = self.draw.integers(0, 4, (side, side))  # products below 127: exact in every type
        self.alive.append(Guarded(side, fresh(element, maker), values))
        del self.alive[:-MOST]

    @rule(place=st.integers(0, MOST - 1))
    def drop(self, place):
        del self.alive[place : place + 3]

    @rule(count=st.integers(1, 8), element=st.sampled_from(["U77", "S3", "M8[s]", "i1,f8", "f8", "i4"]))
    def reuse_the_memory_of_dead_dtypes(self, count, element):
        self.others = [fresh(np.dtype(element), "pickled") for _ in range(count)]

    @rule()
    def collect(self):
        gc.collect(0)

    @rule(count=st.integers(1, 20), maker=st.sampled_from([None, "own", "swapped"]))
    def multiply(self, count, maker):
        for _ in range(count if self.alive else 0):
            a = self.alive[self.draw.integers(len(self.alive))]
            alike = [x for x in self.alive if x.array.shape == a.array.shape and x.array.dtype == a.array.dtype]
            self.check_product(a, alike[self.draw.integers(len(alike))], maker)

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(1, 12), times=st.sampled_from([1, 2, 130]))
    def call_entries(self, count, times):
        """Of a product of 130 times, the kernel is replaced by one for its shape, somewhere on the way."""
        a = self.pick()
        alike = [x for x in self.alive if (x.array.shape, x.array.dtype) == (a.array.shape, a.array.dtype)]
        native = a.array.dtype.newbyteorder("=")
        for name in self.draw.choice([*ENTRIES], count):
            operands = [a, *(alike[i] for i in self.draw.integers(len(alike), size=2))]
            arrays, values = ([getattr(x, field) for x in operands] for field in ("array", "values"))
            for _ in range(times):
                result, expected = ENTRIES[name](*arrays, *values)
                assert np.array_equal(result, expected)
                assert result.dtype == native or name == "other types"

    def check_product(self, a, b, maker):
        native = a.array.dtype.newbyteorder("=")
        out = None if maker is None else Guarded(len(a.values), fresh(native, maker), None)
        result = gm.matmul(a.array, b.array, None if out is None else out.array)
        assert result.dtype == native
        assert np.array_equal(result, a.values @ b.values)
        if out is not None:
            assert result is out.array
            out.check()
        elif a.array.dtype.isnative:
            assert result.dtype.metadata == a.array.dtype.metadata

    def pick(self, alike: Guarded | None = None) -> Guarded:
        choices = [x for x in self.alive if alike is None or x.array.shape == alike.array.shape]
        return choices[self.draw.integers(len(choices))]

    @rule(alpha=st.sampled_from([1, 2, 1.0, -1.0]), beta=st.sampled_from([0, 1, 2.0]), place=st.sampled_from("nco"))
    def scale(self, alpha, beta, place):
        """gemm into a new array (n), into the old C (c), or into another out (o)."""
        if not self.alive:
            return
        a = self.pick()
        b, old = a, Guarded(len(a.values), a.array.dtype.newbyteorder("="), self.draw.integers(0, 4, a.values.shape))
        out = {"n": None, "c": old, "o": Guarded(len(a.values), old.array.dtype, None)}[place]
        want = (int(alpha) * (a.values @ b.values) + int(beta) * old.values).astype(old.array.dtype)
        before = old.values
        old.values = None if place == "c" else before
        result = gm.gemm(alpha, a.array, b.array, beta, old.array, out=None if out is None else out.array)
        assert np.array_equal(result, want)
        assert out is None or result is out.array
        for array in (old, *([] if out is None else [out])):
            array.check()

    @rule()
    def multiply_vectors(self):
        if not self.alive:
            return
        a = self.pick()
        x, values = a.array[0], a.values[0]
        native = a.array.dtype.newbyteorder("=")
        assert np.array_equal(gm.gemv(a.array, x), (a.values @ values).astype(native))
        assert np.array_equal(gm.matmul(x, a.array), (values @ a.values).astype(native))
        assert gm.matmul(x, x) == np.array(values @ values).astype(native)

    @rule()
    def multiply_two_types(self):
        if not self.alive:
            return
        a = self.pick()
        b = self.pick(a)
        try:
            result = gm.matmul(a.array, b.array)
        except gm.DTypeError:  # bfloat16 with float16 or with wide integers
            assert ml_dtypes.bfloat16 in (a.array.dtype, b.array.dtype)
            return
        assert np.array_equal(result, a.values @ b.values)

    @rule(times=st.sampled_from([20, OFTEN + 2]))
    def repeat_a_product(self, times):
        """A product that comes often is compiled for its shape in the background, while others are computed."""
        if not self.alive:
            return
        a = self.pick()
        want = a.values @ a.values
        for _ in range(times):
            assert np.array_equal(gm.matmul(a.array, a.array), want)

    @rule(count=st.sampled_from([1, 2, None]))
    def change_the_number_of_threads(self, count):
        gm.set_num_threads(count)

    @rule()
    def wait_for_the_background(self):
        tiers.wait()

    def teardown(self) -> None:
        gm.set_num_threads(None)

    @invariant()
    def nothing_else_is_written(self):
        for array in self.alive:
            array.check()


class HistoriesWithoutTiers(Histories):
    """The same where each kernel is compiled for its shape at once."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("GEMMERY_TIERS", "off")
        self.patch.setattr(repeats, "_tiers", lambda: False)
        compute.prepare.cache_clear()

    def teardown(self):
        super().teardown()
        self.patch.undo()
        compute.prepare.cache_clear()
        entry.forget()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
TestHistoriesWithoutTiers = HistoriesWithoutTiers.TestCase
TestHistoriesWithoutTiers.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
