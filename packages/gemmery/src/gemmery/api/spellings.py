"""Arguments as callers spell them: options, what NumPy's functions take besides, and errors that name the argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gemmery.arrange import result_shape
from gemmery.arrays import View, view
from gemmery.errors import ArgumentError, GemmeryError, LayoutError, brief
from gemmery.keywords import DEFAULTS, LIKE_NUMPY, NAMES, NO_OPTIONS, Options

# The values that ask for what is done anyway, and the way out for others.
_NUMPYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "order": (("K", "A", "C"), "pass an out of that order, np.empty(shape, order='F'), or copy the result"),
    "casting": (("same_kind", "safe"), "convert an operand or the result with astype"),
    "axes": ((None,), "reorder the dimensions with np.moveaxis, or name them by letters in gm.einsum"),
    "axis": ((None,), "reorder the dimensions with np.moveaxis, or call gm.vecdot"),
    "keepdims": ((False,), "index the result with None"),
    "where": ((True,), "multiply a copy in which the other elements are 0"),
    "subok": ((True,), "pass np.asarray(x)"),
    "signature": ((None,), "pass dtype="),
}


def own_options(function: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return those keywords of a call of `function` that are its options; none where all have their defaults.

    Raises TypeError for a keyword that is no option, and the errors of `check`.
    """
    names = NAMES[function]
    if not names.issuperset(keywords):
        others = {name: value for name, value in keywords.items() if name not in names}
        if function not in LIKE_NUMPY:
            raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(others))!r}")
        check(function, others)
        keywords = {name: value for name, value in keywords.items() if name in names}
    for name, value in keywords.items():
        if value is not DEFAULTS[name]:
            return keywords
    return {}


def options(function: str, keywords: dict[str, Any]) -> Options:
    """Return the options of a call of `function`, as `own_options` has them; NO_OPTIONS itself without any."""
    own = own_options(function, keywords)
    return Options(**own) if own else NO_OPTIONS


def check(function: str, options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an option that NumPy has and gemmery has not, TypeError for one that neither has."""
    for name, value in options.items():
        if name not in _NUMPYS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        values, way_out = _NUMPYS[name]
        if not any(value is known or (isinstance(value, str) and value == known) for known in values):
            raise ArgumentError(f"{function} has no {name}={brief(value)}: {way_out}")


def single(out: Any) -> Any:
    """Return `out`, which NumPy also takes as a tuple of one array."""
    if type(out) is not tuple:
        return out
    if len(out) != 1:
        raise ArgumentError(f"out is a tuple of {len(out)}: pass one array, or a tuple of one")
    return out[0]


def in_order(result: Any, order: str) -> Any:
    """Return a new result of NumPy, or a number, with its elements in the order "C" or "F"."""
    if order not in ("C", "F") or np.isscalar(result):
        return result
    if isinstance(result, np.ndarray):
        return np.asanyarray(result, order=order)  # type: ignore[call-overload]
    raise ArgumentError(f"order={order!r} is for NumPy arrays, not for a {type(result).__name__}: pass an out instead")


def viewed(name: str, obj: Any) -> View:
    """Return the memory of the argument called `name`, which an error names."""
    try:
        return view(obj)
    except GemmeryError as error:
        if type(obj).__module__.partition(".")[0] == "jax":
            raise LayoutError(
                f"{name} is a {type(obj).__name__}: JAX is tracing, and gives no numbers: call gemmery.jax.matmul there"
            ) from error
        text = str(error)
        text = (
            f"{name} is{text.removeprefix('an operand is')}" if text.startswith("an operand is") else f"{name}: {text}"
        )
        raise type(error)(text) from error.__cause__


def filling(x: View, y: View, out: tuple[int, ...]) -> tuple[View, View]:
    """Return the operands, one of them repeated as often as an `out` with more batches than the product asks for."""
    shape = result_shape(x.shape, y.shape)
    ending = min(len(x.shape) - 1, 1) + min(len(y.shape) - 1, 1)
    batch, own = out[: len(out) - ending], y if len(y.shape) > 1 else x
    core = min(len(own.shape), 2)
    have, missing = own.shape[:-core], len(batch) - len(own.shape) + core
    narrow = [n for n, most in zip(reversed(shape[: len(shape) - ending]), reversed(batch), strict=False) if n != most]
    if shape == out or missing < 0 or len(out) < len(shape) or any(n != 1 for n in narrow):
        return x, y  # nothing to fill, or `compute` says what is wrong
    steps = (*(0,) * missing, *(0 if n == 1 else step for n, step in zip(have, own.strides, strict=False)))
    # No owner: this is not the memory that the caller's array describes.
    shape, steps = (*batch, *own.shape[-core:]), (*steps, *own.strides[-core:])
    wide = own._replace(shape=shape, strides=steps, owner=None)
    return (x, wide) if own is y else (wide, y)
