"""Rows of grouped products, gathered by an index on the way in and added in order on the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.compute import writable
from gemmery.api.options import result_types
from gemmery.arrays import View, view
from gemmery.errors import ArgumentError, DTypeError, LayoutError, ShapeError


def product(
    a: Any, b: Any, y: View, offsets: Any, out: Any, gather: Any, scatter: Any, options: dict[str, Any],
    multiply: Callable[..., Any],
) -> Any:  # fmt: skip
    """Return what `grouped_matmul`, which is `multiply`, has for rows by an index; `y` is what b stands for."""
    x, torch = view(a), arrays.library(a, "torch", "Tensor")
    if offsets is None or len(x.shape) != 2 or len(y.shape) != 3:
        raise ArgumentError("gather= and scatter= are for offsets=, a of shape (rows, k) and b of (groups, k, n)")
    if torch is None and (type(a) is not np.ndarray):
        raise LayoutError(
            f"a is a {type(a).__name__}: gather= and scatter= take arrays of NumPy and tensors of PyTorch"
        )
    if gather is not None:
        a = a[_index("gather", gather, None, x.shape[0], a, torch)]
    if scatter is None:
        return multiply(a, b, offsets=offsets, out=out, **options)
    result = result_types(x, y, options.get("dtype"))[1]
    target = None if out is None else view(out)
    rows = x.shape[0] if target is None else next(iter(target.shape), 0)
    if target is not None:
        arrays.together(a=x, out=target)
        writable(target, (rows, y.shape[-1]), result)
    to = _index("scatter", scatter, a.shape[0], rows, a, torch)
    sums = dtypes.get(result).accumulator
    each = multiply(a, b, offsets=offsets, **{**options, "dtype": dtypes.get(sums).numpy})
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


def _index(name: str, index: Any, count: int | None, rows: int, a: Any, torch: Any) -> Any:
    """Return an index of rows as an array of a's library. Raises DTypeError, ShapeError and ArgumentError."""
    index = np.asarray(index) if torch is None else torch.as_tensor(index, device=a.device)
    where = view(index)
    if dtypes.get(where.dtype).kind not in "iu" and where.shape != (0,):  # NumPy takes [] for floats
        raise DTypeError(f"{name} is {index.dtype}, and row numbers are integers: pass int64")
    if len(where.shape) != 1 or count not in (None, where.shape[0]):
        length = "any number of" if count is None else count
        raise ShapeError(f"{name} has shape {where.shape}: pass {length} row numbers, in one dimension")
    if where.device == "cpu" and where.shape[0] and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise ArgumentError(f"{name} has row {int(index.min())} to {int(index.max())}, and there are {rows} rows")
    return index.astype(np.int64) if torch is None else index.long()


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
    ends = torch.as_tensor(offsets, device=to.device)
    inside = torch.arange(len(to), device=to.device) < (ends[-1] if len(ends) else 0)
    to, order = torch.sort(torch.where(inside, to, rows), stable=True)
    counts = torch.searchsorted(to, torch.arange(rows + 2, device=to.device)).diff()
    return torch.segment_reduce(each[order], "sum", lengths=counts, axis=0, initial=0, unsafe=True)[:rows]
