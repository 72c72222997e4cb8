"""Packing: a block of A or B rewritten as panels that the micro-kernel reads in order.

A panel holds `width` (mr or nr) rows of A or columns of B, k-major, cells of `group` elements. One routine
serves both operands: `across` is the stride from one row of A (column of B) to the next, `along` the stride of k.
Rows past the edge repeat the last one: their results are never stored. k past the edge is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmery import dtypes
from gemmery.cpu.convert import load_as
from gemmery.cpu.ir import SIZES, Function, Module, Value, vector
from gemmery.cpu.ukernel import Product


@dataclass(frozen=True)
class Panels:
    """One operand's packing."""

    name: str  # function name: "pack_a", "pack_b"
    width: int  # mr or nr
    product: Product


def pack(module: Module, panels: Panels) -> None:
    """Define `name(count, k, source, across, along, to)`: pack `count` rows (columns) of `k` elements.

    Three ways in, chosen by the strides: adjacent across (copy), adjacent along k (transpose in registers),
    neither (element by element).
    """
    size = dtypes.get(panels.product.dtype).size
    params = (("i64", "count"), ("i64", "k"), ("ptr", "source"), ("i64", "across"), ("i64", "along"), ("ptr", "to"))
    for way, body in (("copy", _copy), ("turn", _turn), ("each", _each)):
        with module.function(f"{panels.name}_{way}", *params, local=True) as f:
            body(f, panels)
    with module.function(panels.name, *params, local=True) as f:
        given = [f[name] for _, name in params]
        across, along = f["across"], f["along"]
        with f.if_(across.equals(size)):
            f.call(f"{panels.name}_copy", *given)
        with f.else_():
            with f.if_(along.equals(size)):
                f.call(f"{panels.name}_turn", *given)
            with f.else_():
                f.call(f"{panels.name}_each", *given)


def panel_bytes(panels: Panels, k: Value) -> Value:
    """Bytes of one panel: its steps of k times its width in cells."""
    group = panels.product.group
    steps = k if group == 1 else (k + (group - 1)) // group
    return steps * (panels.width * SIZES[panels.product.cell])


def _copy(f: Function, panels: Panels) -> None:
    """Elements of a panel row are adjacent: load vectors, convert, store."""
    product, width = panels.product, panels.width
    lanes = f.target.lanes(SIZES[product.cell])
    memory = dtypes.get(product.dtype)
    count, k, along = f["count"], f["k"], f["along"]
    stride = panel_bytes(panels, k)
    with f.loop(0, count, width) as i:
        to = f["to"] + i // width * stride
        source = f["source"] + i * memory.size
        left = count - i
        masks = [f.first_lanes(f.max(left - v, 0), min(lanes, width - v)) for v in range(0, width, lanes)]
        with f.if_(left >= width):
            _copy_rows(f, panels, source, to, along, k, None)
        with f.else_():
            _copy_rows(f, panels, source, to, along, k, masks)


def _copy_rows(
    f: Function, panels: Panels, source: Value, to: Value, along: Value, k: Value, masks: list[Value] | None
) -> None:
    product, width = panels.product, panels.width
    lanes, cell = f.target.lanes(SIZES[product.cell]), SIZES[product.cell]
    memory, group = dtypes.get(product.dtype), product.group

    def rows(p: Value, present: int) -> None:
        for number, v in enumerate(range(0, width, lanes)):
            some = min(lanes, width - v)
            mask = masks[number] if masks else None
            loaded = [
                load_as(f, memory, product.packed, source + (p + g) * along + v * memory.size, some, mask)
                if g < present
                else f.zero(vector(some, product.packed))
                for g in range(group)
            ]
            f.store(interleave(f, loaded), to + (p // group) * (width * cell) + v * cell)

    whole = k // group * group if group > 1 else k
    with f.loop(0, whole, group) as p:
        rows(p, group)
    for present in range(1, group):
        with f.if_((k - whole).equals(present)):
            rows(whole, present)


def interleave(f: Function, rows: list[Value]) -> Value:
    """Cells from `group` vectors: lane 0 of each, then lane 1 of each, ..."""
    while len(rows) > 1:
        # Pairing row g with row g + half leaves cells in the order 0, 1, 2, 3 after the last round.
        half = len(rows) // 2
        rows = [_zip(f, rows[g], rows[g + half]) for g in range(half)]
    return rows[0]


def _zip(f: Function, x: Value, y: Value) -> Value:
    lanes = int(x.type[1:].split(" ", 1)[0])
    return f.shuffle(x, y, [lane + lanes * side for lane in range(lanes) for side in range(2)])


def _turn(f: Function, panels: Panels) -> None:
    """Elements along k are adjacent: load `lanes` cells of each row, transpose, store step by step.

    When `width` is no multiple of the vector, the stores of one step run into the next step's place and are
    overwritten by it: steps must be stored in order, and the buffer must have a vector of slack at its end.
    """
    product, width = panels.product, panels.width
    cell, group = SIZES[product.cell], product.group
    lanes = f.target.lanes(cell)
    memory = dtypes.get(product.dtype)
    count, k, across = f["count"], f["k"], f["across"]
    stride = panel_bytes(panels, k)
    block = lanes * group
    whole = k // block * block
    firsts = range(0, width, lanes)
    together = [list(firsts)] if width % lanes else [[first] for first in firsts]
    with f.loop(0, count, width) as i:
        to = f["to"] + i // width * stride
        last = f.min(count - i, width) - 1
        rows = [f["source"] + (i + f.min(r, last)) * across for r in range(width)]
        for chunk in together:
            with f.loop(0, whole, block) as p:
                turned = {}
                for first in chunk:
                    some = rows[first : first + lanes]
                    turned[first] = transpose(
                        f, [_load_cells(f, product, row + p * memory.size, lanes) for row in some]
                    )
                for step in range(lanes):
                    for first in chunk:
                        f.store(turned[first][step], to + (p // group + step) * (width * cell) + first * cell)
        _each_step(f, panels, rows, f.index(memory.size), to, whole, k)


def _load_cells(f: Function, product: Product, at: Value, lanes: int) -> Value:
    """`lanes` cells of a row whose elements are adjacent."""
    memory = dtypes.get(product.dtype)
    loaded = load_as(f, memory, product.packed, at, lanes * product.group, None)
    return f.bitcast(loaded, vector(lanes, product.cell))


def transpose(f: Function, rows: list[Value]) -> list[Value]:
    """`lanes` rows of `lanes` elements turned into columns by log2(lanes) rounds of two-input shuffles.

    Missing rows are poison, so that LLVM drops the shuffles nobody needs.
    """
    lanes = int(rows[0].type[1:].split(" ", 1)[0])
    empty = Value(f, rows[0].type, "poison")
    rows = [*rows, *[empty] * (lanes - len(rows))]
    span = 1
    while span < lanes:
        for r in range(lanes):
            if r & span:
                continue
            x, y = rows[r], rows[r + span]
            if x.text == y.text == "poison":
                continue
            low = [lane if not lane & span else lanes + lane - span for lane in range(lanes)]
            high = [lane + span if not lane & span else lanes + lane for lane in range(lanes)]
            rows[r], rows[r + span] = f.shuffle(x, y, low), f.shuffle(x, y, high)
        span *= 2
    return rows


def _each(f: Function, panels: Panels) -> None:
    """No two neighbours are adjacent: one element at a time."""
    count, k, across, along = f["count"], f["k"], f["across"], f["along"]
    stride = panel_bytes(panels, k)
    with f.loop(0, count, panels.width) as i:
        last = f.min(count - i, panels.width) - 1
        rows = [f["source"] + (i + f.min(r, last)) * across for r in range(panels.width)]
        _each_step(f, panels, rows, along, f["to"] + i // panels.width * stride, f.index(0), k)


def _each_step(
    f: Function, panels: Panels, rows: list[Value], along: Value, to: Value, start: Value, stop: Value
) -> None:
    """Steps of k from `start` (a multiple of the group) to `stop`, element by element, the last group padded with zero."""
    product = panels.product
    memory, group = dtypes.get(product.dtype), product.group
    element = SIZES[product.packed]
    with f.loop(start, stop) as p:
        at = to + (p // group) * (panels.width * group * element) + (p - p // group * group) * element
        for r, row in enumerate(rows):
            one = load_as(f, memory, product.packed, row + p * along, 0, None)
            f.store(one, at + r * group * element)
    if group > 1:
        with f.loop(stop, (stop + (group - 1)) // group * group) as p:
            at = to + (p // group) * (panels.width * group * element) + (p - p // group * group) * element
            for r in range(panels.width):
                f.store(f.zero(product.packed), at + r * group * element)
