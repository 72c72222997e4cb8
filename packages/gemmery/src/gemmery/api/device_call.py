"""A call on a CUDA device as data, and the table of what is known of calls.

A call goes this way: `array_libraries` looks it up by what its arrays say of themselves. One that is not known is read,
checked and converted (`on_device`, `device_operands`), and described as a `DeviceCall`; `prepared` has the launches of
that, and `enqueue` puts them on a stream.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from gemmery import arrays, dtypes
from gemmery.arrange import Arrangement, Ints, Three, arrange, layout
from gemmery.arrays import View
from gemmery.errors import LayoutError
from gemmery.keywords import FIELDS, NO_OPTIONS, for_kernel
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.cuda.geometry import Scaling

MOST = 8192  # entries of each kind in the table
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class DeviceCall(NamedTuple):
    """A call without its memory: all that decides which launches compute it.

    The pointers of its views are their lowest four bits, which decide on alignment.
    """

    x: View
    y: View
    c: View
    bias: Ints | None = None  # its strides in bytes
    epilogue: str = ""
    scaled: bool = False
    options: tuple[Any, ...] = for_kernel(NO_OPTIONS)
    scaling: Scaling | None = None
    split: str = ""  # operands that have parts
    grouped: bool = False  # y has a matrix for each group of rows of x; or groups share k, where it has one matrix


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
    x, y, c = call.x, call.y, call.c
    size, b_size, out_size = (dtypes.get(z.dtype).size for z in (x, y, c))
    deep = call.grouped and len(y.shape) == 2
    if call.grouped:  # a batch of matrices of C, for parts of the k of A and B, or one of B, which shares A and C
        (m, k), groups, n = x.shape, (c if deep else y).shape[0], c.shape[-1]
        a, b, result = ((0, *z.strides) if len(z.strides) == 2 else z.strides for z in (x, y, c))
        form = Arrangement(m, n, k, groups, a, b, result)  # type: ignore[arg-type] # three each
    else:
        more_columns = call.bias is None
        form = arrange(x.shape, x.strides, y.shape, y.strides, c.shape, c.strides, out_size, more_columns=more_columns)
    m, n, k = form.m, form.n, form.k
    layouts, low = [], []
    sides = (x, m, k, form.a, size), (y, k, n, form.b, b_size), (c, m, n, form.c, out_size)
    for i, (z, rows, columns, steps, each) in enumerate(sides):
        layouts.append(layout(rows, columns, steps[1], steps[2], each))
        pointer = math.gcd(z.pointer, *(step[i] for _, step in form.loops))
        low.append(arrays.alignment(pointer, limiting_steps(layouts[i], form.batch, rows, columns, steps, each)))
    if call.grouped and not deep and layouts[2] != "row":
        layouts[2] = "any"  # C' = B' A' would have groups of columns
    problem = Problem(
        m,
        n,
        k,
        dtype=x.dtype,
        out=c.dtype,
        batch=1 if call.grouped else form.batch,
        a_layout=layouts[0],
        b_layout=layouts[1],
        c_layout=layouts[2],
        epilogue=call.epilogue,
        scaled=call.scaled,
        device=c.device,
        alignments=(low[0], low[1], low[2]),
        scales="" if call.scaling is None else call.scaling.kind,
        groups=form.batch if call.grouped and not deep else 0,
        k_groups=form.batch if deep else 0,
        b_dtype=y.dtype if y.dtype != x.dtype else "",
        split="".join(name for name in call.split if walks_parts(form, name, x if name == "a" else y)),
        **{field: value for field, value in zip(FIELDS, call.options, strict=True) if value is not None},
    )
    return form, problem


def distinct(z: View, operand: str) -> tuple[int, int]:
    """Return the number of matrices in an operand ("a" or "b"), and the stride that walks them.

    Raises LayoutError if none does.
    """
    if 0 in z.shape:
        return 0, 0
    count, step = 1, 0
    for length, stride in zip(reversed(z.shape[:-2]), reversed(z.strides[:-2]), strict=True):
        if length == 1:
            continue
        if count == 1:
            count, step = length, stride
        elif stride == count * step:
            count *= length
        else:
            step = 0
        if step == 0:
            raise LayoutError(
                f"{operand} has shape {z.shape} and strides {z.strides}: no single stride walks its matrices, and "
                "parts follow each other; copy it to a contiguous array"
            )
    return count, step


def walks_parts(form: Arrangement, operand: str, z: View) -> bool:
    """Return True if the product reads the rows of A, or columns of B, in the order of the array's memory."""
    place = "ab".index(operand)  # of the operand, and of its rows or columns
    steps, sides = (form.a, form.b)[place], (form.m, form.n)[place]
    if any(step[place] for _, step in form.loops) or 0 in z.shape or 0 in (form.m, form.n):
        return False
    count, batch_step = distinct(z, operand)
    own, own_step, side_step = z.shape[place - 2], z.strides[place - 2], steps[1 + place]
    matrices = form.batch if steps[0] else 1
    total = count * own
    if matrices * sides != total:
        return False
    return all(
        i // sides * steps[0] + i % sides * side_step == i // own * batch_step + i % own * own_step
        for i in {1, own - 1, own, sides - 1, sides, total - 1}
        if i < total
    )


def limiting_steps(layout_: str, batch: int, rows: int, columns: int, strides: Three, size: int) -> Ints:
    """Return the strides that limit a matrix's alignment: all but those of length 1 and of adjacent elements.

    A stride of a repeated or reversed row or column, or of a reversed batch, counts as 1 byte: tensor maps, which take
    multiples of 16 bytes, describe none of them.
    """
    along, row, column = strides
    steps = [along if along >= 0 else 1] if batch > 1 else []
    if rows > 1 and layout_ != "col" and not (columns == 1 and row == size):
        steps.append(row if row > 0 else 1)
    if columns > 1 and layout_ != "row":
        steps.append(column if column > 0 else 1)
    return tuple(steps)
