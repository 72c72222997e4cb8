"""Operands on a GPU: random numbers in any layout, between guards that detect stray accesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gemmery import arrange, arrays, dtypes, verify
from gemmery.arrays import View
from gemmery.cuda import driver
from gemmery.errors import LayoutError, RefusedError
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from layouts import GUARD, laid
from operands import numpy_dtype, random

TF32 = 2.0**14  # float32 units that rounding A and B to 10 bits of fraction may cost: 2 * 2**-11 = 2**14 * 2**-24


@dataclass
class Placed:
    """A batch of matrices on the device, and a copy of the memory around them."""

    memory: driver.Memory
    before: np.ndarray
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    offset: int
    name: str

    def view(self, stream: int = 0) -> View:
        return View(
            self.memory.pointer + self.offset, self.shape, self.strides, self.name, "cuda:0", stream, True, self
        )

    def within(self, image: np.ndarray) -> np.ndarray:
        """Return the matrices in a copy of the memory."""
        return np.ndarray(self.shape, numpy_dtype(self.name), image, self.offset, self.strides)

    @property
    def values(self) -> np.ndarray:
        """Return the original matrices."""
        return self.within(self.before)

    def image(self) -> np.ndarray:
        """Return the current memory."""
        found = np.empty_like(self.before)
        self.memory.read(found)
        return found

    def result(self) -> np.ndarray:
        """Return the current matrices; raise AssertionError if a byte outside their elements has changed."""
        image, untouched = self.image(), self.before.copy()
        values = self.within(image).copy()
        self.within(untouched)[...] = values
        assert np.array_equal(image, untouched), "memory around C was written"
        return values

    def layout(self) -> str:
        return arrange.layout(*self.shape[1:], *self.strides[1:], dtypes.get(self.name).size)

    def alignment(self) -> int:
        size, (along, row, column) = dtypes.get(self.name).size, self.strides
        steps = [along if along >= 0 else 1] if self.shape[0] > 1 else []
        walked = zip((row, column), self.shape[1:], strict=True)
        steps += (step if step > 0 else 1 for step, length in walked if length > 1 and step != size)
        return arrays.alignment(self.memory.pointer + self.offset, tuple(steps))


def place(values: np.ndarray, name: str, layout: str = "row", one_for_all: bool = False, guard: int = GUARD) -> Placed:
    """Return `values` (batch, rows, columns) in memory of that layout; `one_for_all` repeats the first (stride 0)."""
    image, inside = laid(values, layout, one_for_all, guard)
    offset = inside.ctypes.data - image.ctypes.data
    made = Placed(driver.Memory(image.nbytes), image, values.shape, inside.strides, offset, name)
    made.memory.write(image)
    return made


def matrices(shape, name, out, layouts=("row", "row", "row"), batch=1, shared=(False, False), guard=GUARD):
    """Return A, B and a poisoned C."""
    (m, n, k), out = shape, dtypes.written(out)
    a = place(random((batch, m, k), name, 1), name, layouts[0], shared[0], guard)
    b = place(random((batch, k, n), name, 2), name, layouts[1], shared[1], guard)
    with np.errstate(invalid="ignore"):  # integers have no NaN
        poison = np.full((batch, m, n), np.nan).astype(numpy_dtype(out))
    return a, b, place(poison, out, layouts[2], guard=guard)


def problem(a: Placed, b: Placed, c: Placed, epilogue: str = "", scaled: bool = False, precision: str = "") -> Problem:
    batch, m, n = c.shape
    layouts = (a.layout(), b.layout(), c.layout())
    alignments = (a.alignment(), b.alignment(), c.alignment())
    return Problem(m, n, a.shape[2], a.name, c.name, batch, *layouts, epilogue, scaled, "cuda:0", precision, alignments)


def needed(rung: Rung, name: str) -> str:
    """Return the precision that the rung requires for this element type: "tf32" on tensor cores."""
    plain = Problem(64, 64, 64, name, dtypes.written(name), device="cuda:0")
    fewer = plain._replace(precision="tf32")
    return "tf32" if name == "f32" and rung.refuses(plain) and not rung.refuses(fewer) else ""


def allowed(rung: Rung, precision: str, name: str = "") -> Callable[[int], float]:
    """Return f(k) of the rung's bound, including the rounding of the operands."""
    bound = rung.bound_of(name, precision)
    return (lambda k: bound(k) + TF32) if precision == "tf32" else bound


def built(rung: Rung, case: Problem, config=None):
    """Return the rung's kernel for a problem, None if it refuses with a reason."""
    reason = rung.refuses(case) if case.dtype in rung.dtypes else f"{rung.name} does not take {case.dtype}"
    if not reason:
        try:
            return rung.build(case, {**rung.default, **(config or {})})
        except RefusedError as error:
            reason = str(error)
    assert len(reason.split()) > 3, reason
    return None


def run(rung, a, b, c, *, alpha=1.0, beta=0.0, bias=None, epilogue="", precision=None, config=None) -> bool:
    """Multiply and check; return False if the rung refuses."""
    precision = needed(rung, a.name) if precision is None else precision
    case = problem(a, b, c, epilogue, alpha != 1 or beta != 0, precision)
    kernel = built(rung, case, config)
    if kernel is None:
        return False
    row = None
    if bias is not None:
        row = bias.view()._replace(shape=bias.shape[2:], strides=bias.strides[2:])
    try:
        kernel(a.view(), b.view(), c.view(), alpha=alpha, beta=beta, bias=row)
    except LayoutError:  # strides that no tensor map describes
        return False
    driver.synchronize()
    found = verify.check(
        c.result(),
        a.values,
        b.values,
        allowed(rung, precision, a.name),
        alpha=alpha,
        beta=beta,
        c=c.values if beta != 0 else None,
        bias=None if bias is None else bias.values[0, 0],
        activation=epilogue.split("+")[-1] if epilogue != "bias" else "",
        normwise=rung.normwise,
        most_flops=1e7,
    )
    assert found.error_over_bound <= 1, f"{case}: {found}"
    assert np.array_equal(a.image(), a.before), f"A was written: {case}"
    assert np.array_equal(b.image(), b.before), f"B was written: {case}"
    return True


def functions(ptx: str, names: list[str]) -> list:
    """Load the kernels of a PTX text on the first device."""
    with driver.on(0):
        module = driver.check(driver.api().cuModuleLoadData(ptx.encode() + b"\0"))
        return [driver.check(driver.api().cuModuleGetFunction(module, name.encode())) for name in names]


def launch(function, blocks: int, threads: int, *memories: driver.Memory) -> None:
    """Run a kernel whose parameters are pointers to these buffers, and wait for it."""
    pointers = np.array([memory.pointer for memory in memories], np.uint64)
    arguments = pointers.ctypes.data + 8 * np.arange(len(memories), dtype=np.uint64)
    with driver.on(0):
        status = driver.api().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, 0, arguments.ctypes.data, 0)
        driver.check(status)
    driver.synchronize()
