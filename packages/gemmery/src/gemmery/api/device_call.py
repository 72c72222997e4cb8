"""A call as data, and the table of what is known of calls on CUDA devices.

A call goes this way: `array_libraries` looks it up by what its arrays say of themselves, and has it, or else
`checked_call` reads and checks it, a `CheckedCall`. Without its memory that is a `DeviceCall`, of which `prepared` has
the launches; `enqueue` puts them on a stream.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from gemmery import arrays, dtypes
from gemmery.arrange import Arrangement, Ints, arrange, layout
from gemmery.arrays import View
from gemmery.errors import LayoutError
from gemmery.keywords import FIELDS, NO_OPTIONS, Options, for_kernel
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.cuda.geometry import Scaling
    from gemmery.cuda.launch import Scalars

MOST = 8192  # entries of each kind in the table
GATHERED = "gathered"  # the kind of OperandScales whose `a` are row numbers of A, in the place of factors
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class DeviceCall(NamedTuple):
    """A call without its memory: all that decides which launches compute it.

    The pointers of its views are their lowest four bits, which decide on alignment.
    """

    a: View
    b: View
    c: View
    bias: Ints | None = None  # its strides in bytes
    epilogue: str = ""
    scaled: bool = False
    options: tuple[Any, ...] = for_kernel(NO_OPTIONS)
    scaling: Scaling | None = None
    split: str = ""  # operands that have parts
    grouped: bool = False  # B has a matrix for each group of rows of A; or groups share k, where it has one matrix


class OperandScales(NamedTuple):
    """The factors of A and B in C = (scale_a A) (scale_b B)."""

    kind: str = ""  # as Problem.scales: "" where there are only numbers
    factor: float = 1.0  # the product of the numbers
    a: View | None = None
    b: View | None = None
    scaling: Scaling | None = None  # None without arrays


NO_SCALES = OperandScales()


class CheckedCall(NamedTuple):
    """A call with its memory, whose arguments have been checked."""

    a: View
    b: View
    c: View  # without memory and strides until it is allocated
    options: Options = NO_OPTIONS  # alpha, beta, threads, precision and semiring as kernels take them
    common: str = ""  # the type in which A and B are multiplied
    result: str = ""  # that of C
    old: View | None = None  # what beta multiplies
    bias: View | None = None
    epilogue: str = ""
    operands: tuple[Any, Any] = (None, None)  # A and B as the caller of a product on the CPU passed them
    # Of calls on a device:
    scales: OperandScales = NO_SCALES
    parts: tuple[int, int] = (0, 0)  # addresses of those of A and of B, where they were split before
    offsets: View | None = None  # the ends of groups of rows

    @property
    def read(self) -> tuple[View | None, ...]:
        """A, B, the bias, and the factors of A and of B."""
        return self.a, self.b, self.bias, self.scales.a, self.scales.b

    @property
    def scaled(self) -> bool:
        """Whether alpha and beta change the product."""
        return bool(self.options.alpha != 1 or self.options.beta != 0)

    def still(self) -> DeviceCall:
        """Return a call on a device without its memory."""
        bias = None if self.bias is None else self.bias.strides
        split = "".join(operand for operand, pointer in zip("ab", self.parts, strict=True) if pointer)
        return DeviceCall(
            still(self.a), still(self.b), still(self.c), bias, self.epilogue, self.scaled, for_kernel(self.options),
            self.scales.scaling, split, self.offsets is not None,
        )  # fmt: skip


class KnownOptions(NamedTuple):
    """What a known call with options has besides, or with a C that is not `out`."""

    apart: tuple[tuple[int, int], ...]  # as of A and B, of bias, factors and C that are arrays
    bias_dtype: Any  # in which a kernel reads a bias
    scalars: Scalars
    in_place: bool = False  # C has the layout and type of the result: at the same address it is not copied
    c_bytes: int = 0  # of such a C, if it is contiguous
    is_grouped: bool = False  # offsets of groups in the place of C


class Table:
    """What is known of calls on devices, with one way to forget.

    `calls` are found by what arrays say of themselves, `latest` by the address of b. Both depend on the default
    precision of float32. `launches` are found by DeviceCalls, which name their precision.
    """

    def __init__(self) -> None:
        self.calls: dict[Any, Any] = {}
        self.latest: dict[Any, Any] = {}
        self.launches: dict[tuple[Any, ...], Any] = {}

    def once(self, prepare: F) -> F:
        """Return a function that calls `prepare` once for each DeviceCall, or what else it takes."""

        @wraps(prepare)
        def launches(*terms: Any) -> Any:
            key = prepare.__name__, *terms
            known = self.launches.get(key)
            return keep(self.launches, key, prepare(*terms)) if known is None else known

        return launches  # type: ignore[return-value]

    def forget(self) -> None:
        """Forget all calls: they were prepared with another precision of float32."""
        self.calls.clear()
        self.latest.clear()

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the number of entries of each kind, and the most that are kept."""
        return {"calls": (len(self.calls), MOST), "launches": (len(self.launches), MOST)}


def keep(entries: dict[Any, Any], key: Any, entry: T) -> T:
    """Store an entry; all are dropped first where there are many."""
    if len(entries) >= MOST:
        entries.clear()
    entries[key] = entry
    return entry


table = Table()


@cache
def tell_once(kernel: str, error: str) -> None:
    """Warn that a kernel does not compile, and that others take its place: it would only show in their times."""
    words = f"kernel {kernel} does not compile, so that slower ones are used: {error}; please report this"
    warnings.warn(words, RuntimeWarning, stacklevel=3)


def located(z: View) -> View:
    """Return the view with the number of its device, which `__cuda_array_interface__` does not contain.

    Raises LayoutError for an address or strides that are no multiples of the element size: a kernel that reads such
    elements ends with an error after which the process cannot use the device.
    """
    if z.device == "cpu":
        return z
    size = dtypes.get(z.dtype).size
    if z.pointer % size and 0 not in z.shape:
        raise LayoutError(
            f"address {z.pointer:#x} of elements of {size} bytes: it must be a multiple of the element size on a "
            "device; copy the array first"
        )
    for n, stride in zip(z.shape, z.strides, strict=True):
        if n > 1 and stride % size:
            raise LayoutError(
                f"strides {z.strides} of elements of {size} bytes: they must be multiples of the element size "
                "on a device; copy the array first"
            )
    if z.device != "cuda":
        return z
    from gemmery.cuda import ordered

    return z._replace(device=f"cuda:{ordered.where(z.pointer) if z.pointer else 0}")


def still(z: View) -> View:
    """Return a view without its memory, as a DeviceCall has it: its pointer is the lowest four bits."""
    return View(z.pointer & 15, z.shape, z.strides, z.dtype, z.device)


def low_bits(p: int, q: int, r: int) -> int:
    """Return three addresses modulo 16, packed in one number."""
    return (p & 15) << 8 | (q & 15) << 4 | r & 15 if (p | q | r) & 15 else 0


def described(call: DeviceCall) -> tuple[Arrangement, Problem]:
    """Return a call as a kernel sees it.

    Parts of operands that the product walks in another order, or that CUDA cores multiply, do not count.
    """
    a, b, c = call.a, call.b, call.c
    deep = call.grouped and len(b.shape) == 2
    if call.grouped:  # a batch of matrices of C, for parts of the k of A and B, or one of B, which shares A and C
        (m, n), k, batch = c.shape[-2:], a.shape[1], (c if deep else b).shape[0]
        strides = ((0, *z.strides) if len(z.strides) == 2 else z.strides for z in (a, b, c))
        form = Arrangement(m, n, k, batch, *strides)  # type: ignore[arg-type] # three each
    else:
        size, more_columns = dtypes.get(c.dtype).size, call.bias is None
        form = arrange(a.shape, a.strides, b.shape, b.strides, c.shape, c.strides, size, more_columns)
    m, n, k, batch = form.m, form.n, form.k, form.batch
    layouts, low = [], []
    a, b = a._replace(shape=(batch, m, k), strides=form.a), b._replace(shape=(batch, k, n), strides=form.b)
    c = c._replace(shape=(batch, m, n), strides=form.c)
    for i, z in enumerate((a, b, c)):
        _, rows, columns = z.shape
        layouts.append(layout(rows, columns, z.strides[1], z.strides[2], dtypes.get(z.dtype).size))
        pointer = math.gcd(z.pointer, *(loop[i] for _, loop in form.loops))
        low.append(arrays.alignment(pointer, limiting_strides(z, layouts[i])))
    if call.grouped and not deep and layouts[2] != "row":
        layouts[2] = "any"  # C' = B' A' would have groups of columns
    problem = Problem(
        m, n, k, a.dtype, c.dtype, 1 if call.grouped else batch, layouts[0], layouts[1], layouts[2], call.epilogue,
        call.scaled, c.device, alignments=(low[0], low[1], low[2]),
        scales="" if call.scaling is None or call.scaling.kind == GATHERED else call.scaling.kind,
        gathered=call.scaling is not None and call.scaling.kind == GATHERED,
        groups=batch if call.grouped and not deep else 0, k_groups=batch if deep else 0,
        b_dtype=b.dtype if b.dtype != a.dtype else "",
        split="".join(operand for operand in call.split if walks_parts(form, operand, getattr(call, operand))),
        **{field: value for field, value in zip(FIELDS, call.options, strict=True) if value is not None},
    )  # fmt: skip
    return form, problem


def distinct(z: View, operand: str) -> tuple[int, int]:
    """Return the number of matrices in an operand ("a" or "b"), and the stride that walks them.

    Raises LayoutError if none does.
    """
    if 0 in z.shape:
        return 0, 0
    count, stride = 1, 0
    for length, along in zip(reversed(z.shape[:-2]), reversed(z.strides[:-2]), strict=True):
        if length == 1:
            continue
        if count == 1:
            count, stride = length, along
        elif along == count * stride:
            count *= length
        else:
            stride = 0
        if stride == 0:
            raise LayoutError(
                f"{operand} has shape {z.shape} and strides {z.strides}: no single stride walks its matrices, and "
                "parts follow each other; copy it to a contiguous array"
            )
    return count, stride


def walks_parts(form: Arrangement, operand: str, z: View) -> bool:
    """Return True if the product reads the rows of A, or columns of B, in the order of the array's memory."""
    place = "ab".index(operand)  # of the operand, and of its rows or columns
    strides, n = (form.a, form.b)[place], (form.m, form.n)[place]
    if any(loop[place] for _, loop in form.loops) or 0 in z.shape or 0 in (form.m, form.n):
        return False
    count, stride = distinct(z, operand)
    own, own_stride = z.shape[place - 2], z.strides[place - 2]
    if (form.batch if strides[0] else 1) * n != count * own:
        return False
    return all(
        i // n * strides[0] + i % n * strides[1 + place] == i // own * stride + i % own * own_stride
        for i in {1, own - 1, own, n - 1, n, count * own - 1}
        if i < count * own
    )


def limiting_strides(z: View, layout_: str) -> Ints:
    """Return the strides that limit the alignment of a batch: all but those of length 1 and of adjacent elements.

    A stride of a repeated or reversed row or column, or of a reversed batch, counts as 1 byte: tensor maps, which take
    multiples of 16 bytes, describe none of them.
    """
    (batch, m, n), (along, row, column) = z.shape, z.strides
    strides = [along if along >= 0 else 1] if batch > 1 else []
    if m > 1 and layout_ != "col" and not (n == 1 and row == dtypes.get(z.dtype).size):
        strides.append(row if row > 0 else 1)
    if n > 1 and layout_ != "row":
        strides.append(column if column > 0 else 1)
    return tuple(strides)
