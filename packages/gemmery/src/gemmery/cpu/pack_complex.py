"""Packing of complex operands as real panels, the 1m method (see `Product`).

A, m x k, becomes m x 2k: step 2p holds the real parts of column p, step 2p + 1 the imaginary ones. B, k x n, becomes
2k x 2n: row 2p holds row p unchanged, as (re, im) pairs, and row 2p + 1 the same times i, (-im, re). The rows of the
real product then hold the complex one, as pairs. Widths, counts and k of the panels count real numbers: two for each
column of B, one for each row of A.
"""

from __future__ import annotations

from collections.abc import Mapping

from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import SIZES, lanes_of
from gemmery.cpu.pack import Routine, copy_transposed, load, panel, row_at, transpose, under_masks
from gemmery.cpu.panels import Panels


def times_i(f: Function, pairs: Value) -> Value:
    """Turn every pair (re, im) of a vector into (-im, re)."""
    negated = f.emit(pairs.type, f"fneg {pairs}")
    lanes = lanes_of(pairs.type)
    return f.shuffle(pairs, negated, [lane - 1 if lane % 2 else lanes + lane + 1 for lane in range(lanes)])


def _copy_a(f: Function, panels: Panels) -> None:
    """Pack a column-major A: split pairs for whole panels; the last rows go one by one."""
    width = panels.width
    whole = f["count"] // width * width
    with f.loop(0, whole, width) as i:
        source, to = f["source"] + i * (2 * panels.element), panel(f, panels, i)
        with f.loop(0, f["k"] // 2) as p:
            pairs = load(f, panels, source + p * f["along"], 2 * width)
            for part in range(2):
                f.store(f.shuffle(pairs, pairs, list(range(part, 2 * width, 2))), to + (p * 2 + part) * panels.row)
    with f.if_(whole < f["count"]):
        _each_row(f, panels, whole)


def _each_a(f: Function, panels: Panels) -> None:
    with f.loop(0, f["count"], panels.width) as i:
        _each_row(f, panels, i)


def _each_row(f: Function, panels: Panels, i: Value) -> None:
    """Pack the panel of row `i`, one element at a time."""
    with f.loop(0, panels.width) as r:
        row, to = row_at(f, i + r), panel(f, panels, i) + r * SIZES[panels.product.cell]
        with f.loop(0, f["k"] // 2) as p:
            for part in range(2):
                number = load(f, panels, row + p * f["along"] + part * panels.element, 0)
                f.store(number, to + (p * 2 + part) * panels.row)


def _copy_b(f: Function, panels: Panels) -> None:
    """Pack a row-major B: vectors of pairs, stored unchanged and times i."""
    cell = SIZES[panels.product.cell]
    lanes = f.target.lanes(cell)
    with f.loop(0, f["count"], panels.width) as j:
        for masks in under_masks(f, panels, f["count"] - j):
            source, to = f["source"] + j * panels.element, panel(f, panels, j)
            with f.loop(0, f["k"] // 2) as p:
                row, step = source + p * f["along"], to + p * (2 * panels.row)
                for v, mask in enumerate(masks):
                    pairs = load(f, panels, row + v * lanes * panels.element, lanes, mask)
                    _store_twice(f, panels, pairs, step + v * lanes * cell)


def _store_twice(f: Function, panels: Panels, pairs: Value, at: Value) -> None:
    f.store(pairs, at)
    f.store(times_i(f, pairs), at + panels.row)


def _copy_transposed_b(f: Function, panels: Panels) -> None:
    """Pack a column-major B: transpose as many columns as a vector holds pairs."""
    cell = SIZES[panels.product.cell]
    lanes = f.target.lanes(cell)
    whole = f["k"] // lanes * lanes
    with f.loop(0, f["count"], panels.width) as j, f.loop(0, panels.width, lanes) as first:
        columns = [_column(f, (j + first) // 2 + c) for c in range(lanes // 2)]
        to = panel(f, panels, j) + first * cell
        with f.loop(0, whole, lanes) as p:
            loaded = [load(f, panels, column + p * panels.element, lanes) for column in columns]
            for step, transposed in enumerate(transpose(f, loaded, unit=2)):
                _store_twice(f, panels, transposed, to + (p + 2 * step) * panels.row)
    _each_column(f, panels, whole)


def _column(f: Function, c: Value) -> Value:
    """Return the start of column `c` of B; past the edge, of the last one."""
    return f["source"] + f.min(c, f["count"] // 2 - 1) * f["across"]


def _each_column(f: Function, panels: Panels, start: Value | int = 0) -> None:
    """Pack every panel of B from step `start` on, one element at a time."""
    cell = SIZES[panels.product.cell]
    with f.loop(0, f["count"], panels.width) as j, f.loop(0, panels.width, 2) as c:
        column, to = _column(f, (j + c) // 2), panel(f, panels, j) + c * cell
        with f.loop(f.index(start) // 2, f["k"] // 2) as p:
            at, step = column + p * f["along"], to + p * (2 * panels.row)
            real, imaginary = load(f, panels, at, 0), load(f, panels, at + panels.element, 0)
            negated = f.emit(imaginary.type, f"fneg {imaginary}")
            for number, part in enumerate((real, imaginary, negated, real)):
                f.store(part, step + number // 2 * panels.row + number % 2 * cell)


ROUTINES_A: Mapping[str, Routine] = {"copy": _copy_a, "transpose": copy_transposed, "each": _each_a}
ROUTINES_B: Mapping[str, Routine] = {"copy": _copy_b, "transpose": _copy_transposed_b, "each": _each_column}
