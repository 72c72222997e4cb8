"""A product with the shapes that JAX knows when it traces: its key, and the job that computes it."""

from __future__ import annotations

from hashlib import blake2b

from gemmery import dispatch, dtypes
from gemmery.api.compute import prepared_for
from gemmery.api.options import only_on_devices
from gemmery.api.repeats import Prepared
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, contiguous
from gemmery.cpu.launch import Launch
from gemmery.errors import RefusedError
from gemmery.keywords import PRECISIONS, Options
from gemmery.tuples import NamedTuple

A_TRANSPOSED, B_TRANSPOSED = 1, 2
_PRECISIONS = ("", *PRECISIONS)  # by number; new ones go to the end, as programs that JAX stored have the numbers


class StaticProduct(NamedTuple):
    """A product of C-contiguous arrays, whose last two dimensions may be exchanged."""

    a_shape: Ints  # as the array is in memory
    b_shape: Ints
    dtype: str  # gemmery's names of the element types
    out: str
    transposed: int  # A_TRANSPOSED, B_TRANSPOSED, both or 0
    precision: str = ""  # on a CUDA device

    @property
    def key(self) -> int:
        """A number that identifies the product in any process; 0 is none."""
        whole = tuple(self) if self.precision else tuple(self)[:-1]
        digest = blake2b(repr(whole).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True) or 1

    @property
    def form(self) -> int:
        """A number for what the shapes and types do not say: which operands are transposed, and the precision."""
        return self.transposed | _PRECISIONS.index(self.precision) << 2

    @property
    def shape(self) -> Ints:
        """Shape of the result. Raises ShapeError."""
        return result_shape(self._exchanged(self.a_shape, A_TRANSPOSED), self._exchanged(self.b_shape, B_TRANSPOSED))

    def of_form(self, form: int) -> StaticProduct:
        """Return the product of these shapes and types that has this form."""
        return self._replace(transposed=form & 3, precision=_PRECISIONS[form >> 2])

    def _exchanged(self, sides: Ints, which: int) -> Ints:
        return (*sides[:-2], sides[-1], sides[-2]) if self.transposed & which else sides

    def operands(self) -> tuple[View, View, View]:
        """Return A, B and C as the kernel sees them, at address 0."""
        size = dtypes.get(self.dtype).size
        a, b = (
            View(0, self._exchanged(shape, which), self._exchanged(contiguous(shape, size), which), self.dtype)
            for shape, which in ((self.a_shape, A_TRANSPOSED), (self.b_shape, B_TRANSPOSED))
        )
        return a, b, View(0, self.shape, contiguous(self.shape, dtypes.get(self.out).size), self.out)


class StaticJob(NamedTuple):
    """What the handler runs: a job without pointers, once for each offset of those of A, B and C."""

    job: bytes
    offsets: tuple[tuple[int, int, int], ...]
    swapped: bool  # the job computes C' = B' A'


def prepared(product: StaticProduct) -> Prepared:
    """Return the kernel for a product on the CPU, compiled, and the form in which it takes the operands.

    Raises ArgumentError for a precision, which only products on a CUDA device have.
    """
    only_on_devices(Options(precision=product.precision or None))
    done = prepared_for(product.dtype, product.out, *product.operands())
    assert done is not None  # C is contiguous
    return done


def job(product: StaticProduct, how: Prepared, threads: int) -> StaticJob:
    """Return the job of a product. Raises RefusedError where kernels are no compiled code with jobs."""
    kernel, form = how.plan.kernel, how.form
    if not isinstance(kernel, Launch):
        raise RefusedError(f"{how.plan.rung.name} has no job that XLA can run: use gemmery.matmul outside of jit")
    words = kernel.job(*how.operands(*product.operands()), 1, 0, None, threads)
    swapped = kernel.transposes((form.batch, form.m, form.n), form.c)
    return StaticJob(words, tuple(form.offsets()), swapped)


def specialised(how: Prepared) -> Prepared | None:
    """Return the kernel compiled for this shape alone, where it is faster than the one for every shape."""
    plan = dispatch.specialised(how.problem)
    return None if plan is None else how._replace(plan=plan)
