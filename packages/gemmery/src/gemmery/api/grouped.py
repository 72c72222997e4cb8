"""grouped_matmul: groups of rows of one matrix, each times a matrix of its own; or a list of products."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import array_libraries, opaque, products
from gemmery.api.array_libraries import NO_PARTS
from gemmery.api.checked import checked_call, writable
from gemmery.api.options import host_ends, own_options, result_types, viewed
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, view
from gemmery.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from gemmery.keywords import Options, takes_options

if TYPE_CHECKING:
    from typing import Unpack

    from numpy.typing import NDArray

    from gemmery.keywords import Foreign, GroupedOptions, Out, Plain, StackOptions

_QUANTIZED = array_libraries.QUANTIZED
_BLOCK = 128  # of k, that has a factor of its own


if TYPE_CHECKING:  # mypy attaches a block to the function after it only if it contains nothing but overloads

    @overload
    def grouped_matmul(
        a: Plain, b: Plain, *, offsets: Any, out: None = None, **options: Unpack[StackOptions]
    ) -> NDArray[Any]: ...
    @overload
    def grouped_matmul(
        a: Foreign, b: Foreign | Plain, *, offsets: Any, out: None = None, **options: Unpack[StackOptions]
    ) -> Foreign: ...
    @overload
    def grouped_matmul(a: Any, b: Any, *, offsets: Any, out: Out, **options: Unpack[StackOptions]) -> Out: ...
    @overload
    def grouped_matmul(
        a: Sequence[NDArray[Any]], b: Sequence[NDArray[Any]], *, out: None = None, **options: Unpack[GroupedOptions]
    ) -> list[NDArray[Any]]: ...
    @overload
    def grouped_matmul(
        a: Sequence[Foreign], b: Sequence[Foreign], *, out: None = None, **options: Unpack[GroupedOptions]
    ) -> list[Foreign]: ...
    @overload
    def grouped_matmul(
        a: Any, b: Any, *, offsets: Any = None, out: Any = None, **options: Unpack[StackOptions]
    ) -> Any: ...


@opaque.opaque
@takes_options
def grouped_matmul(
    a: Any, b: Any, *, offsets: Any = None, out: Any = None, gather: Any = None, scatter: Any = None, **keywords: Any
) -> Any:
    """Return the products of groups of rows, each with a matrix of its own, as layers of experts need them.

    >>> import numpy as np, gemmery as gm
    >>> tokens, experts = np.arange(8.0).reshape(4, 2), np.stack([np.eye(2), -np.eye(2), 10 * np.eye(2)])
    >>> gm.grouped_matmul(tokens, experts, offsets=[1, 1, 4])  # one row, none, three
    array([[ 0.,  1.],
           [20., 30.],
           [40., 50.],
           [60., 70.]])
    >>> gm.grouped_matmul([tokens[:1], tokens[1:]], [experts[0], experts[1][:, :1]])
    [array([[0., 1.]]), array([[-2.],
           [-4.],
           [-6.]])]

    With `offsets`, `a` is (rows, k) and contains the rows of all groups, one group after the other; `b` is
    (groups, k, n), with any strides: `weights.mT` for weights of (groups, n, k). Group g has the rows from
    offsets[g - 1] (0 for the first) up to, not including, offsets[g]; it may have none. The result is (rows, n). Rows
    from the last offset on belong to no group: they are not written, neither in `out` nor in a new result, whose
    values there are undefined.

    - `offsets`: `groups` integers, not decreasing, at most `rows`. For arrays on a CUDA device they may be there too,
      as int32. Offsets on the device are not checked: each is used as if it were at least the one before it and at
      most `rows`.
    - `out`: an array of the result's shape that receives the result and is returned.
    - `gather`: row numbers of `a`, of any length: the groups' rows are a[gather], so that tokens need no copy by hand.
      On a CUDA device they are not checked.
    - `scatter`: a row number of the result for each row of the groups. The result has as many rows as `a`, or as `out`;
      each is the sum of those that go there, in their order, from zero, rounded once.
    - `bias`: (groups, n) or (n,) numbers, or one.
    - `scale_a`, `scale_b`: factors of A and B as in `matmul`: one number, or one for each row of `a`; one number, one
      for each group, or (groups, n).
    - `dtype`, `activation`, `batch_invariant`: as in `matmul`.

    >>> gm.grouped_matmul(tokens, experts[1:], offsets=[2, 3], gather=[0, 3, 3], scatter=[0, 1, 1])
    array([[ 0., -1.],
           [54., 63.],
           [ 0.,  0.],
           [ 0.,  0.]])

    With `offsets` and a `b` of (k, n), groups follow each other along k: `a` is (m, k), group g has the columns of `a`
    and the rows of `b` from offsets[g - 1] to offsets[g], and the result is (groups, m, n), zeros for a group of none.
    These are the gradients of experts' weights, `tokens.T` times the gradient of what they became.

    >>> gm.grouped_matmul(tokens.T, np.ones((4, 1)), offsets=[1, 1, 4]).mT
    array([[[ 0.,  1.]],
    <BLANKLINE>
           [[ 0.,  0.]],
    <BLANKLINE>
           [[12., 15.]]])

    There is no `bias`, and factors are as in `matmul`; those of blocks of 128 of k are counted from the start of `a`
    and `b`, not of a group. Groups that begin at multiples of 128 are multiplied fastest; where no kernel reads
    offsets, a group that begins inside a block of factors is refused.

    Without `offsets`, `a` and `b` are lists of matrices of any shapes, and the result is the list of their products;
    `out` is a list or None, `bias`, `scale_a` and `scale_b` are lists with an element (or None) for each product, or
    what all products share. They are written one after the other, so an element of `out` must not overlap what a later
    product reads.

    `b` may be a `QuantizedMatrix` of shape (groups, k, n), or a list of quantized matrices without `offsets`. On a
    device of compute capability 9.0 one launch reads the codes of those that have rows, where `a` and factors have one
    type of 16 bits. Blocks may share the sums of a tile there, so that the last bits of a row depend on where groups
    end, unless `batch_invariant`. Elsewhere weights are expanded by a launch, then all groups multiplied by another; on
    the CPU, group by group.

    Each group's product has the element types, accuracy and determinism of `matmul`. Compute capability 9.0 multiplies
    all groups of float16, bfloat16, float8 and int8 in one launch; there the bits of a row depend on no other row.

    Raises the errors of `matmul`; ArgumentError for offsets that decrease or lie beyond the rows, and for a group that
    begins inside a block of factors; ShapeError for an `offsets` that has not one number for each group, and for lists
    of different lengths; DTypeError for offsets that are no integers, and on a device no int32.
    """
    if opaque.waiting and opaque.settle():
        return grouped_matmul(a, b, offsets=offsets, out=out, gather=gather, scatter=scatter, **keywords)
    if gather is not None or scatter is not None:
        return _gathered(a, b, offsets, out, gather, scatter, keywords)
    keywords = own_options("grouped_matmul", keywords) if keywords else keywords
    if offsets is None:
        return _listed(a, b, out, Options(**keywords))
    done = array_libraries.served(a, b, out, "grouped_matmul", None, keywords or None, NO_PARTS, offsets)
    return _stacked(a, b, offsets, out, keywords) if done is None else done


def _stacked(a: Any, b: Any, offsets: Any, out: Any, keywords: dict[str, Any]) -> Any:
    """Return the products of the groups that `offsets` cut out of `a`."""
    terms = Options(**keywords)
    x, where = view(a), view(offsets)
    y = _viewed(b, x.dtype)
    deep = len(y.shape) == 2 and type(b) not in _QUANTIZED
    shape = _stacked_shape(x, y, where, terms, deep)
    if x.device != "cpu":
        from gemmery.api import on_device

        where = on_device.checked_offsets(x, where)
        if type(b) in _QUANTIZED:
            from gemmery.api import quantized_products

            done = quantized_products.experts(a, b, x, where, shape, offsets, out, terms)
            if done is not None:
                return done
            y = view(quantized_products.device_weight(b, x.dtype, x).swapaxes(-1, -2))
        return on_device.product("grouped_matmul", x, y, out, terms, keywords, NO_PARTS, shape, where, multiply_groups)
    arrays.together(a=x, b=y, offsets=where)
    call = checked_call("grouped_matmul", x, y, out, terms, shape=shape, offsets=where)
    ends = host_ends(offsets, x.shape[deep], "columns" if deep else "rows")
    last, bias = shape[0] if deep or not ends else ends[-1], call.bias
    apart = out is not None and any(z and arrays.overlap(z, call.c) for z in call.read)
    like = arrays.kind(a, b)
    array = arrays.empty(like, shape, call.result).array if out is None or apart else out
    # From here on no code of an argument runs.
    arrays.unchanged(a=x, b=y, bias=bias, out=None if out is None else call.c)
    a, b = sliceable(a, x), sliceable(b, y)
    dtype = None if terms.dtype is None else dtypes.get(call.result).numpy
    multiply_groups(a, b, ends, array, terms._replace(bias=bias and sliceable(terms.bias, bias), dtype=dtype))
    if apart:
        arrays.store(view(array[:last]), view(out[:last]))
        arrays.written(out)
    return arrays.wrap(like, array) if out is None else out


def _viewed(b: Any, dtype: str) -> View:
    """Return the memory of b; of quantized matrices a view of what they stand for, in the type of a."""
    return View(0, b.shape, (0,) * len(b.shape), dtype) if type(b) in _QUANTIZED else view(b)


def _stacked_shape(x: View, y: View, offsets: View, terms: Options, deep: bool) -> Ints:
    """Return the shape of the result, of groups along k if `deep`. Raises ShapeError, DTypeError and ArgumentError."""
    if len(x.shape) != 2 or len(y.shape) != 3 - deep:
        raise ShapeError(
            f"grouped_matmul with offsets multiplies a of shape (rows, k) by b of shape (groups, k, n) (got shapes "
            f"{x.shape} and {y.shape}), or a of shape (m, k) by b of shape (k, n) in groups along k; pass lists of "
            "matrices without offsets for products of different shapes"
        )
    if deep and terms.bias is not None:
        raise ArgumentError("a bias of groups along k: each has a matrix of its own; add it to the result")
    if len(offsets.shape) != 1 or not (deep or offsets.shape == y.shape[:1]):
        count, have = ("groups", "") if deep else (y.shape[0], f", and b has {y.shape[0]} matrices")
        raise ShapeError(f"offsets has shape {offsets.shape}{have}; pass the end of each group: shape ({count},)")
    if dtypes.get(offsets.dtype).kind not in "iu" and offsets.shape[0]:
        raise DTypeError(f"offsets are {dtypes.get(offsets.dtype).numpy}, and row numbers are integers; pass int32")
    return (*offsets.shape, *result_shape(x.shape, y.shape)) if deep else result_shape(x.shape, y.shape[1:])


def _listed(a: Any, b: Any, out: Any, terms: Options) -> list[Any]:
    """Return the products of two lists of matrices, computed one after the other."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, list | tuple):
            raise ArgumentError(
                f"{name} is a {type(operand).__name__}: without offsets, a and b are lists of matrices; pass offsets, "
                "the ends of the groups in the rows of a"
            )
    count = len(a)
    lists = [("b", b), ("out", out), ("bias", terms.bias), ("scale_a", terms.scale_a), ("scale_b", terms.scale_b)]
    for name, values in lists:
        if isinstance(values, list | tuple) and len(values) != count:
            raise ShapeError(f"{name} has {len(values)} elements, and a has {count}; pass one for each product")
    if out is not None and not isinstance(out, list | tuple):
        raise ArgumentError(f"out is a {type(out).__name__}: pass a list of {count} arrays, one for each product")

    def of(values: Any, i: int) -> Any:
        return values[i] if isinstance(values, list | tuple) else values

    each = [
        terms._replace(bias=of(terms.bias, i), scale_a=of(terms.scale_a, i), scale_b=of(terms.scale_b, i))
        for i in range(count)
    ]

    for i, x in enumerate(map(view, a)):
        y = _viewed(b[i], x.dtype)
        if len(x.shape) != 2 or len(y.shape) != 2:
            raise ShapeError(f"a[{i}] and b[{i}] have shapes {x.shape} and {y.shape}; pass lists of matrices")
        shape = result_shape(x.shape, y.shape)
        if out is None:
            continue
        if x.device == "cpu":  # all are checked before the first is written
            checked_call("matmul", x, y, out[i], each[i])
        else:
            target = view(out[i])
            writable(target, shape, target.dtype)

    return [products.matmul(a[i], b[i], of(out, i), **each[i].passed()) for i in range(count)]


def multiply_groups(a: Any, b: Any, ends: Sequence[int], out: Any, terms: Options) -> None:
    """Write the product of each group to its rows of `out`, along k to its matrix, one `matmul` after the other.

    Raises ArgumentError where a group begins within a block of k that has a factor.
    """
    a, b = sliceable(a), sliceable(b)
    bias, scale_a, scale_b = (
        sliceable(values) if isinstance(values, list | tuple) else values
        for values in (terms.bias, terms.scale_a, terms.scale_b)
    )
    sides, deep = [tuple(getattr(values, "shape", ())) for values in (bias, scale_a, scale_b)], len(b.shape) == 2
    in_blocks = deep and len(sides[1]) == 2 and sides[1][1] > 1
    each_row, each_group = (not deep and shape not in ((), (1,)) for shape in sides[1:])
    bounds = list(pairwise((0, *ends)))
    for group, (start, _) in enumerate(bounds):  # before anything is written
        if in_blocks and start % _BLOCK:
            raise ArgumentError(f"group {group} begins at {start}: with factors of blocks, use a multiple of {_BLOCK}")
    for group, (start, end) in enumerate(bounds):
        part = slice(start // _BLOCK, -(-end // _BLOCK))
        options = terms._replace(
            bias=bias[group] if len(sides[0]) == 2 else bias,
            scale_a=scale_a[:, part] if in_blocks else scale_a[start:end] if each_row else scale_a,
            scale_b=scale_b[part] if in_blocks else scale_b[group] if each_group else scale_b,
        )
        if deep:
            products.matmul(a[:, start:end], b[start:end], out[group], **options.passed())
        elif start < end:
            products.matmul(a[start:end], b[group], out[start:end], **options.passed())


def sliceable(array: Any, its_view: View | None = None) -> Any:
    """Return an array of which rows can be taken without code of its own: itself, or NumPy's of its memory."""
    if isinstance(array, np.ndarray | int | float) or arrays.allocates(array) or type(array) in _QUANTIZED:
        return array
    its_view = its_view or view(array)
    return arrays.as_numpy(its_view) if its_view.device == "cpu" else array


def _gathered(a: Any, b: Any, offsets: Any, out: Any, gather: Any, scatter: Any, options: dict[str, Any]) -> Any:
    """Return the products of rows that an index gathers on the way in, and adds in order on the way out."""
    x, torch = view(a), arrays.library(a, "torch", "Tensor")
    y = _viewed(b, x.dtype)
    if offsets is None or len(x.shape) != 2 or len(y.shape) != 3:
        raise ArgumentError("gather= and scatter= are for offsets=, a of shape (rows, k) and b of (groups, k, n)")
    if torch is None and (type(a) is not np.ndarray):
        raise LayoutError(
            f"a is a {type(a).__name__}: gather= and scatter= take arrays of NumPy and tensors of PyTorch"
        )
    kinds = (np.ndarray, list, tuple, *array_libraries.QUANTIZED)
    if torch is None and scatter is not None and not isinstance(b, kinds):
        raise LayoutError(f"b is a {type(b).__name__} and a an array of NumPy: with scatter= pass two of one library")
    index = None if gather is None else _index("gather", gather, None, x.shape[0], a, torch)
    if scatter is None:
        return _of_rows(a, index, b, offsets, out, options)
    result = result_types(x, y, options.get("dtype"))[1]
    target = None if out is None else view(out)
    rows = x.shape[0] if target is None else next(iter(target.shape), 0)
    if target is not None:
        arrays.together(a=x, out=target)
        writable(target, (rows, y.shape[-1]), result)
    to = _index("scatter", scatter, (a if index is None else index).shape[0], rows, a, torch)
    sums = dtypes.get(result).accumulator
    each = _of_rows(a, index, b, offsets, None, {**options, "dtype": dtypes.get(sums).numpy})
    if torch is not None:
        total = _added_by_torch(torch, each, to, offsets, rows).to(getattr(torch, dtypes.get(result).numpy))
    else:
        last = int(np.asarray(offsets)[-1]) if len(offsets) else 0
        total = _added(each, to, last, rows, arrays.numpy_dtype(result))
    if target is None:
        return total
    if x.device == "cpu":
        arrays.store(view(total), target)
        arrays.written(out)
    else:
        arrays.assign(out, total)
    return out


def _of_rows(a: Any, index: Any, b: Any, offsets: Any, out: Any, options: dict[str, Any]) -> Any:
    """Return the products of the rows that an index names; a kernel that reads the index needs no copy of them."""
    x = view(a)
    if index is None or x.device == "cpu" or type(b) in _QUANTIZED:
        return grouped_matmul(a if index is None else a[index], b, offsets=offsets, out=out, **options)
    from gemmery.api import on_device

    terms, y, where = Options(**own_options("grouped_matmul", options)), view(b), view(offsets)
    _stacked_shape(x, y, where, terms, False)
    done = on_device.gathered(x, y, out, view(index.contiguous()), on_device.checked_offsets(x, where), terms)
    return grouped_matmul(a[index], b, offsets=offsets, out=out, **options) if done is None else done


def _index(name: str, index: Any, count: int | None, rows: int, a: Any, torch: Any) -> Any:
    """Return an index of rows as an array of a's library. Raises DTypeError, ShapeError and ArgumentError."""
    where = viewed(name, index)
    if dtypes.get(where.dtype).kind not in "iu" and where.shape != (0,):  # NumPy takes [] for floats
        raise DTypeError(f"{name} is {dtypes.get(where.dtype).numpy}, and row numbers are integers: pass int64")
    if len(where.shape) != 1 or count not in (None, where.shape[0]):
        length = "any number of" if count is None else count
        raise ShapeError(f"{name} has shape {where.shape}: pass {length} row numbers, in one dimension")
    index = index if torch is not None and hasattr(index, "long") else np.array(arrays.as_numpy(where), np.int64)
    index = index if torch is None else torch.as_tensor(index, device=a.device).long()
    if where.device == "cpu" and where.shape[0] and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise ArgumentError(f"{name} has row {int(index.min())} to {int(index.max())}, and there are {rows} rows")
    return index


@np.errstate(all="ignore")
def _added(each: Any, to: Any, last: int, rows: int, dtype: np.dtype[Any]) -> Any:
    """Return rows added in order to those that `to` says, from zeros, without rows from `last` on, as `dtype`."""
    order = np.argsort(to[:last], kind="stable")
    targets, starts = np.unique(to[order], return_index=True)
    counts, total = np.diff(starts, append=last), np.zeros((rows, each.shape[1]), each.dtype)
    for turn in range(max(counts, default=0)):  # by turns, since np.add.reduceat adds in pairs
        going = counts > turn
        total[targets[going]] += each[order[starts[going] + turn]]
    return total.astype(dtype, copy=False)


def _added_by_torch(torch: Any, each: Any, to: Any, offsets: Any, rows: int) -> Any:
    """Return the same of tensors, without waiting for a device; rows of no group are added to one more row."""
    if each.is_complex():
        return torch.view_as_complex(_added_by_torch(torch, torch.view_as_real(each), to, offsets, rows))
    ends = torch.as_tensor(offsets, device=to.device)
    inside = torch.arange(len(to), device=to.device) < (ends[-1] if len(ends) else 0)
    to = torch.where(inside, to, rows)
    if not each.is_floating_point():  # in any order, and not as unsigned types, which PyTorch does not add
        each = each.view(getattr(torch, f"int{8 * each.itemsize}"))
        return each.new_zeros(rows + 1, each.shape[1]).index_add_(0, to, each)[:rows]
    to, order = torch.sort(to, stable=True)
    counts = torch.searchsorted(to, torch.arange(rows + 2, device=to.device)).diff()
    return torch.segment_reduce(each[order], "sum", lengths=counts, axis=0, initial=0, unsafe=True)[:rows]
