"""A product on the CPU as data: its arguments, checked, and the kernel that computes it."""

from __future__ import annotations

from typing import Any

from gemmery import dispatch
from gemmery.arrange import Arrangement, Three
from gemmery.arrays import View
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple


class Terms(NamedTuple):
    """The parameters of a product besides A and B."""

    alpha: complex = 1
    beta: complex = 0
    old: View | None = None  # the C that beta multiplies
    epilogue: str = ""
    bias: View | None = None
    threads: int | None = None
    bias_array: Any = None  # the bias as the caller passed it
    bias_view: View | None = None  # its memory
    dtype: Any = None  # the type of the result, as the caller passed it
    invariant: bool = False  # the bits of a row must not depend on the number of rows
    widens: bool = False  # the result has another type than operands like these give


PLAIN = Terms()


class Call(NamedTuple):
    """A call with arguments that have been checked, except `out`."""

    a: Any
    b: Any
    x: View  # the memory of a and b
    y: View
    common: str  # the element type to which a and b promote
    result: str  # that of the product
    terms: Terms


class Prepared(NamedTuple):
    """A product without its memory."""

    plan: dispatch.Plan
    problem: Problem
    form: Arrangement

    def operands(self, x: View, y: View, target: View, offset: Three = (0, 0, 0)) -> tuple[View, View, View]:
        """Return the operands of one run of the kernel."""
        problem, form = self.problem, self.form
        batch, m, n, k = form.batch, form.m, form.n, form.k
        return (
            View(x.pointer + offset[0], (batch, m, k), form.a, problem.dtype),
            View(y.pointer + offset[1], (batch, k, n), form.b, problem.dtype),
            View(target.pointer + offset[2], (batch, m, n), form.c, problem.out),
        )
