"""Products with an epilogue that come again: what the first call found out about them, without its checks.

An epilogue has its recipes, for NumPy arrays of the same shapes, strides and types. A recipe allocates the results,
multiplies, and runs the pass with a table of the new addresses.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from gemmery.arrays import View
from gemmery.arrays.reading import address
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.launch import Launch
from gemmery.cpu.layout import JOB_AT
from gemmery.epilogues.trace import Epilogue
from gemmery.tuples import NamedTuple

_MOST = 256  # recipes of an epilogue; then all are forgotten
_BIAS = JOB_AT["bias"]


class Recipe(NamedTuple):
    """A product without its memory."""

    results: tuple[tuple[tuple[int, ...], Any], ...]  # shape and type of each
    sums: tuple[tuple[tuple[int, ...], Any] | None, ...]  # of the memory for sums; None: the first result's
    options: Mapping[str, Any]  # of the product
    operands: tuple[str, ...]
    pack: Callable[..., bytes]  # the table
    steps: tuple[tuple[int, int] | None, ...]  # of each slot; None of a number
    launch: Launch
    before: bytes  # the job, before and after the address of the table
    after: bytes


def key_of(operands: Mapping[str, Any], a: Any, weights: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the key of a product's recipe, None for operands that are neither NumPy's arrays nor Python's numbers."""
    parts: list[Any] = [cpu_threads.generation]
    for x in (a, *weights):
        if type(x) is not np.ndarray:
            return None
        parts += (x.dtype, x.shape, x.strides)
    for name, value in operands.items():
        if type(value) is np.ndarray:
            parts += (name, value.dtype, value.shape, value.strides)
        elif type(value) is float or type(value) is int:
            parts.append(name)
        else:
            return None
    return tuple(parts)


def run(
    function: Epilogue, key: Hashable, operands: Mapping[str, Any], a: Any, weights: Sequence[Any],
    multiply: Callable[..., Any],
) -> Any:  # fmt: skip
    """Return the results of a product whose recipe is known, else None."""
    recipe: Recipe | None = function.recipes.get(key)
    if recipe is None:
        return None
    results = [np.empty(shape, dtype) for shape, dtype in recipe.results]
    sums = [results[0] if room is None else np.empty(*room) for room in recipe.sums]
    for weight, total in zip(weights, sums, strict=True):
        multiply(a, weight, out=total, **recipe.options)
    words: list[Any] = []
    for x, step in zip((*sums, *map(operands.__getitem__, recipe.operands), *results), recipe.steps, strict=True):
        if step is None:
            words.append(x)
        else:
            words += (address(x), *step)
    try:
        table = ctypes.create_string_buffer(recipe.pack(*words))
    except OverflowError:  # of a number beyond float32
        return None
    job = recipe.before + ctypes.addressof(table).to_bytes(8, "little") + recipe.after
    view = View(0, (), (), "f32")
    recipe.launch.run(job, view, view)
    return results[0] if len(results) == 1 else tuple(results)


def remember(
    function: Epilogue, key: Hashable, results: Sequence[Any], sums: Sequence[Any], options: Mapping[str, Any],
    operands: Sequence[str], steps: Sequence[tuple[int, int] | None], number: str, launch: Launch, job: bytes,
) -> None:  # fmt: skip
    """Store the recipe of a product whose arrays were used as they are; `number` is the code of one in the table."""
    if len(function.recipes) >= _MOST:
        function.recipes.clear()
    pad = {"f": "f20x", "d": "d16x"}[number]
    pack = struct.Struct("<" + "".join(pad if step is None else "3q" for step in steps)).pack
    shapes = tuple((x.shape, x.dtype) for x in results)
    room = tuple(None if total is results[0] else (total.shape, total.dtype) for total in sums)
    function.recipes[key] = Recipe(
        shapes, room, options, tuple(operands), pack, tuple(steps), launch, job[:_BIAS], job[_BIAS + 8 :]
    )
