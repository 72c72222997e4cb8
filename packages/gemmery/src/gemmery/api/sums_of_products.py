"""A contraction of any operands as batches of products: one or two operands at once, by their labels."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any

from gemmery import arrays
from gemmery.api import elementwise, products, quick_contractions, spellings
from gemmery.api.one_product import DimensionLabel, Dimensions, Labels, shape_of
from gemmery.api.options import dtype_name, thread_count
from gemmery.api.promote import promoted, widened
from gemmery.arrays import View, view
from gemmery.dtypes import get
from gemmery.errors import DeviceError, LayoutError, ShapeError
from gemmery.tuples import NamedTuple


class Factor(NamedTuple):
    """An operand: a label for each dimension, the array, and its view."""

    labels: Dimensions
    array: Any
    view: View


def merged(some: list[Factor], needed: set[DimensionLabel], options: dict[str, Any]) -> Factor:
    """Return the product of operands, two at a time, with the labels that are needed: those of all operands first."""
    while len(some) > 2:
        rest = needed | set(chain(*(factor.labels for factor in some[2:])))
        some = [merged(some[:2], rest, options), *some[2:]]
    every = dict.fromkeys(chain(*(factor.labels for factor in some)))
    retained = [label for label in every if label in needed]
    retained.sort(key=lambda label: not all(label in factor.labels for factor in some))
    array = sum_of_products(some, tuple(retained), options)
    return Factor(tuple(retained), array, view(array))


def sum_of_products(factors: list[Factor], c: Dimensions, options: dict[str, Any], out: Any = None) -> Any:
    """Compute a contraction of one or two operands, whatever their labels."""
    (left, a, x), (right, b, y) = factors[0], factors[-1]
    like = arrays.kind(*(factor.array for factor in factors))
    if len(factors) == 2 and quick_contractions.is_product(left, right, c):
        with suppress(ShapeError) if _may_repeat(left, x, right, y) else nullcontext():
            return contract(like, Labels(left, right, c), a, b, x, y, out, options)
    own = arrays.allocates(like)
    left, a = elementwise.diagonals(left, with_transposes(a, x, own))
    if len(factors) == 1:
        right = tuple(label for label in left if label not in c)
        if not right and out is None and options.get("dtype") is None:
            return arrays.wrap(like, elementwise.transposed(a, tuple(left.index(label) for label in c)))
        b = elementwise.ones(a, tuple(n for n, label in zip(a.shape, left, strict=True) if label in right))
    else:
        right, b = elementwise.diagonals(right, with_transposes(b, y, own))
        left, a, right, b = elementwise.repeated_once(left, a, right, b)
        left, a = _reduced(left, a, {*right, *c}, options)
        right, b = _reduced(right, b, {*left, *c}, options)
    x, y = view(a), view(b)
    if quick_contractions.is_product(left, right, c):
        return contract(like, Labels(left, right, c), a, b, x, y, out, options)
    product = elementwise.multiplied(Labels(left, right, c), a, b, _result(x, y, options.get("dtype")), out)
    return product if out is not None else arrays.wrap(like, product)


def _may_repeat(left: Dimensions, x: View, right: Dimensions, y: View) -> bool:
    """Return True if a length of 1 of one operand meets another one, which NumPy broadcasts."""
    lengths = dict(zip(right, y.shape, strict=True))
    return any(label in lengths and 1 in {n, lengths[label]} for label, n in zip(left, x.shape, strict=True))


def _reduced(
    labels: Dimensions, array: Any, needed: set[DimensionLabel], options: dict[str, Any]
) -> tuple[Dimensions, Any]:
    """Return an operand summed over the labels that are not needed."""
    retained = tuple(label for label in labels if label in needed)
    if retained == labels:
        return labels, array
    return retained, sum_of_products([Factor(labels, array, view(array))], retained, options)


def contract(like: Any, labels: Labels, a: Any, b: Any, x: View, y: View, out: Any, options: dict[str, Any]) -> Any:
    """Compute a contraction of a and b, with the views x and y, as one batch of products like `like`."""
    own = arrays.allocates(like)
    array, steps = None, None
    target = None if out is None else spellings.viewed("out", out)
    if options:
        dtype, threads = options.get("dtype"), thread_count(options.get("threads"))
        options = {**options, "dtype": None if dtype is None else get(dtype_name(dtype)).numpy, "threads": threads}
    arrays.unchanged(a=x, b=y, out=target)  # from here on no code of an argument runs
    if target is not None:
        _check_out(target, shape_of(labels, x.shape, y.shape))
        array, steps = with_transposes(out, target, arrays.allocates(out)), target.strides
    size = get(x.dtype).size if x.dtype == y.dtype and options.get("dtype") is None else 0
    shape, form, lengths, inverse = quick_contractions.form_of(
        labels, x.shape, x.strides, y.shape, y.strides, size, steps
    )
    if array is None and (form.c.moves or inverse):
        array = arrays.empty(like if own else None, lengths, _result(x, y, options.get("dtype")))[0]
        array = elementwise.transposed(array, inverse) if inverse else array
    product = products.matmul(
        quick_contractions.turned(with_transposes(a, x, own), form.a),
        quick_contractions.turned(with_transposes(b, y, own), form.b),
        None if array is None else quick_contractions.turned(array, form.c),
        **options,
    )
    if out is not None:
        return out
    return arrays.wrap(like, product.reshape(shape) if array is None else array)


def _check_out(target: View, shape: tuple[int, ...]) -> None:
    """Raise unless `out` has the shape of the result and can be written; `matmul` checks the rest."""
    if target.shape != shape:
        raise ShapeError(f"out has shape {target.shape}, and the result {shape}; pass an out of that shape")
    if not target.writable:
        raise LayoutError("out cannot be written in place: it is read-only, or is not an array")


def _result(x: View, y: View, dtype: Any) -> str:
    """Return the element type of a new result."""
    name = None if dtype is None else dtype_name(dtype)
    if x.device == "cpu":
        common = promoted(x.dtype, y.dtype)
        return common if name is None else widened(common, name)
    from gemmery.api import device_operands

    return device_operands.types(x, y, name, None)[1]


def with_transposes(obj: Any, its_view: View, own: bool) -> Any:
    """Return an array whose dimensions can be reordered without a copy: `obj`, or a NumPy array of the same memory.

    With `own` a PyTorch tensor and a CuPy array stay what they are.
    """
    if own and arrays.allocates(obj):
        return obj
    if its_view.device != "cpu":
        raise DeviceError(
            f"a {type(obj).__name__} on {its_view.device}: on a device tensordot, vecdot and einsum take PyTorch "
            "tensors and CuPy arrays; convert with torch.from_dlpack or cupy.from_dlpack, or call gm.matmul"
        )
    return arrays.as_numpy(obj, its_view)
