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

from gemmery.arrays.reading import address
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.launch import Launch
from gemmery.cpu.layout import JOB_AT
from gemmery.cpu.slots import WORDS
from gemmery.epilogues.trace import Epilogue
from gemmery.tuples import NamedTuple

_MOST = 256  # recipes of an epilogue; then all are forgotten
_BIAS = JOB_AT["bias"]


class Recipe(NamedTuple):
    """A product without its memory."""

    results: tuple[tuple[tuple[int, ...], Any], ...]  # shape and type of each
    sums: tuple[tuple[tuple[int, ...], Any] | None, ...]  # of the memory for sums; None: the first result's
    options: Mapping[str, Any]  # of the product
    arrays: tuple[tuple[int, str], ...]  # the words of operands in the table, and their names
    numbers: tuple[tuple[int, str], ...]  # the bytes, and the names
    code: str  # of a number in the table
    words: tuple[int, ...]  # the table, where addresses and numbers are 0
    first: int  # the word of the first result
    launch: Launch
    job: bytes
    rooms: list[tuple[Any, bytes]]  # tables that no call uses, and jobs with their addresses


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


def again(
    function: Epilogue, operands: Mapping[str, Any], a: Any, weights: Sequence[Any], multiply: Callable[..., Any]
) -> Any:  # fmt: skip
    """Return the results of a product whose recipe is known, else None."""
    recipe: Recipe | None = function.recipes.get(key_of(operands, a, weights))
    if recipe is None:
        return None
    try:
        table, job = recipe.rooms.pop()
    except IndexError:  # the first call, or one while others run
        table = (ctypes.c_int64 * len(recipe.words))(*recipe.words)
        job = recipe.job[:_BIAS] + ctypes.addressof(table).to_bytes(8, "little") + recipe.job[_BIAS + 8 :]
    try:
        for at, name in recipe.numbers:
            struct.pack_into(recipe.code, table, at, operands[name])
    except OverflowError:  # of a number beyond float32
        return None
    for at, name in recipe.arrays:
        table[at] = address(operands[name])
    results = [np.empty(shape, dtype) for shape, dtype in recipe.results]
    for place, result in enumerate(results):
        table[recipe.first + WORDS * place] = address(result)
    sums = [results[0] if room is None else np.empty(*room) for room in recipe.sums]
    for place, total in enumerate(sums):
        multiply(a, weights[place], out=total, **recipe.options)
        table[WORDS * place] = address(total)
    recipe.launch.run(job, a, weights[0])
    recipe.rooms.append((table, job))
    return results[0] if len(results) == 1 else tuple(results)


def remember(
    function: Epilogue, key: Hashable, results: Sequence[Any], sums: Sequence[Any], options: Mapping[str, Any],
    operands: Sequence[str], steps: Sequence[tuple[int, int] | None], double: bool, launch: Launch, job: bytes,
) -> None:  # fmt: skip
    """Store the recipe of a product whose arrays were used as they are; `steps` of a number are None."""
    if len(function.recipes) >= _MOST:
        function.recipes.clear()
    shapes = tuple((x.shape, x.dtype) for x in results)
    room = tuple(None if total is results[0] else (total.shape, total.dtype) for total in sums)
    inputs = [(place, name, steps[place]) for place, name in enumerate(operands, len(sums))]
    function.recipes[key] = Recipe(
        shapes, room, options,
        tuple((WORDS * place, name) for place, name, step in inputs if step is not None),
        tuple((8 * WORDS * place, name) for place, name, step in inputs if step is None),
        "<d" if double else "<f", tuple(word for step in steps for word in (0, *(step or (0, 0)))),
        WORDS * (len(sums) + len(operands)), launch, job, [],
    )  # fmt: skip
