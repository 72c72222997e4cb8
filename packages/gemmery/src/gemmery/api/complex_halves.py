"""Products of PyTorch's complex32: those of its float16 parts, of twice the columns and twice the k."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gemmery.arrange import result_shape
from gemmery.errors import ArgumentError, DTypeError, ShapeError

_OPTIONS = ("threads", "batch_invariant", "dtype")


def product(a: Any, b: Any, out: Any, options: dict[str, Any], multiply: Callable[..., Any]) -> Any:
    """Return the product of two complex32 tensors, None if neither is one; `multiply` is `gm.matmul`.

    A row (re, im) of A times the rows (re, im) and (-im, re) of B is one of C: sums are float32, rounded once.
    Raises DTypeError for another type beside complex32, and ArgumentError for options that it does not have.
    """
    torch: Any = sys.modules.get("torch")
    half = getattr(torch, "complex32", torch)
    types = [getattr(x, "dtype", None) for x in (a, b)]
    if half is None or not any(type_ is half for type_ in types):
        return None
    if not all(type_ is half for type_ in types):
        raise DTypeError(f"the operands are {types[0]} and {types[1]}: convert both to complex32 or to complex64")
    for name in options:
        if name not in _OPTIONS:
            raise ArgumentError(f"{name}= does not apply to complex32: convert the operands to complex64")
    dtype = options.get("dtype")
    if dtype is not None and str(dtype).removeprefix("torch.") not in ("complex32", "complex64"):
        raise DTypeError(f"dtype={dtype}: a product of complex32 is complex32 or complex64")
    result_shape(tuple(a.shape), tuple(b.shape))
    wide = dtype is not None and str(dtype).endswith("64")
    rows, columns = (torch.view_as_real(x.resolve_conj()) for x in (a, b if b.ndim > 1 else b[:, None]))
    turned = torch.stack((-columns[..., 1], columns[..., 0]), -1)
    both = torch.stack((columns, turned), -3).flatten(-2).flatten(-3, -2)
    own = {**options, "dtype": torch.float32 if wide else None}
    parts = multiply(rows.flatten(-2), both, **{name: value for name, value in own.items() if value is not None})
    result = torch.view_as_complex(parts.unflatten(-1, (-1, 2)))
    result = result if b.ndim > 1 else result[..., 0]
    if out is None:
        return result
    if out.shape != result.shape or not out.is_complex():
        raise ShapeError(f"out is {out.dtype} of shape {tuple(out.shape)}, and the product {tuple(result.shape)}")
    return out.copy_(result)
