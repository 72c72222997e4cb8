"""Layouts of a batch of matrices in memory with guards before and after."""

from __future__ import annotations

import numpy as np

GUARD = 512  # bytes before and after, all ones: NaN in every floating type, so that a stray read shows in the result
OTHERS = ("padded", "aligned", "odd", "strided", "reversed", "rows reversed", "padded col", "reversed col", "one row")


def laid(
    values: np.ndarray, layout: str = "row", one_for_all: bool = False, guard: int = GUARD
) -> tuple[np.ndarray, np.ndarray]:
    """Return memory full of ones, and in it a view of `values` (batch, rows, columns) in that layout.

    `one_for_all` repeats the first matrix (stride 0).
    """
    batch, rows, columns = values.shape
    size = values.dtype.itemsize
    wide = -(-columns * size // 16) * 16 // size
    row, column = {
        "row": (columns, 1),
        "col": (1, rows),
        "padded": (columns + 3, 1),
        "aligned": (wide + 16 // size, 1),  # every row starts at a multiple of 16 bytes
        "odd": (columns, 1),  # the first element does not
        "strided": (2 * columns + 1, 2),
        "reversed": (-columns, -1),
        "rows reversed": (-(columns + 1), 1),
        "padded col": (1, rows + 5),
        "reversed col": (-1, -rows),
        "one row": (0, 1),
    }[layout]
    spans = [abs(row) * max(0, rows - 1), abs(column) * max(0, columns - 1)]
    each = rows * columns if layout in ("row", "col", "odd") else -(-(sum(spans) + 1) * size // 16) * 16 // size
    steps = (0 if one_for_all else each, row, column)
    repeats = 0 if one_for_all else max(0, batch - 1)
    length = repeats * each + sum(spans) + 1 if values.size else 0
    first = spans[0] * (row < 0) + spans[1] * (column < 0) + (layout == "odd")
    image = np.full(2 * guard + (length + (layout == "odd")) * size, 0xFF, np.uint8)
    inside = np.ndarray(values.shape, values.dtype, image, guard + first * size, tuple(step * size for step in steps))
    inside[...] = values[:, :1] if layout == "one row" else values[:1] if one_for_all else values
    return image, inside
