"""Products with an epilogue that come again: what the first call found out about them, for compiled code.

An epilogue has its recipes, for NumPy arrays of the same shapes, strides and types (`cpu.entry_epilogue`). A recipe
says what to allocate and which products to run, and has the job of the pass with its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemmery.cpu import entry, entry_layout, entry_table, objects
from gemmery.epilogues.trace import BoundEpilogue, Epilogue

_MOST = 64  # recipes of an epilogue; then the oldest goes


def remember(
    function: Epilogue, operands: Sequence[Any], read: Sequence[tuple[str, Any]], results: Sequence[Any],
    sums: Sequence[Any], steps: Sequence[tuple[int, int] | None], flags: tuple[int, bool, bool], dtype: str | None,
    job: bytes,
) -> None:  # fmt: skip
    """Store the recipe of a product whose arrays were used as they are.

    `read` has operands by name, `steps` those of the slots, None of a number; `flags` are the generation of the number
    of threads, whether numbers are float32, and whether the pass is long.
    """
    most, written = entry_layout.RECIPE_DIMENSIONS, (*results, *sums)
    arrays = [*operands, *(x for _, x in read if type(x) not in (int, float))]
    if (
        type(function) is not Epilogue
        or any(type(x) is not np.ndarray or x.ndim > most for x in (*arrays, *written))
        or not all(x.ndim for x in written)
        or len(read) > entry_layout.RECIPE_OPERANDS
        or len(results) > entry_layout.RECIPE_OUTPUTS
    ):
        return
    fields = [entry.result_fields(x.dtype) for x in written]
    if not all(fields):
        return
    generation, *others = flags
    words = [generation, len(sums), len(read), len(results), *others, 0 if dtype is None else id(dtype)]
    for x in operands:
        words += _known(x)
    names = {name: name for name in function.parameters}
    for name, x in read:
        words += [id(names[name]), *_known(x)]
    words += [word for step in steps for word in (0, *(step or (0, 0)))]
    for place, x in enumerate(written):
        shared = place == len(results) and x is results[0]
        record = [0 if shared else fields[place][0], x.ndim, *x.shape]
        words += record + [0] * (entry_layout.MADE - len(record))
    key = entry_table.packed(words)
    stored = [recipe for recipe in function.recipes if not recipe.startswith(key)]
    function.recipes = (key + job, *stored[: _MOST - 1])
    entry.know_epilogues(function, BoundEpilogue, function.recipes)


def _known(x: Any) -> list[int]:
    """Return what a recipe knows of an array, or of a number."""
    words = [-1, 0]
    if type(x) is np.ndarray:
        words = [x.ndim, objects.element(x.dtype)]
        for both in zip(x.shape, x.strides, strict=True):
            words += both
    return words + [0] * (entry_layout.KNOWN - len(words))
