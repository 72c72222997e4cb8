"""Packing: copy a block of A or B into panels that the micro-kernel reads in order.

A panel holds `width` (mr or nr) rows of A or columns of B, k-major, cells of `group` elements. One routine
serves both operands: `across` is the stride from one row of A (column of B) to the next, `along` the stride of k.
Rows past the edge repeat the last one or are zero: their results are never stored. k past the edge is zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from gemmery import dtypes
from gemmery.cpu.abi import Args
from gemmery.cpu.convert import load_as
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, element_of, lanes_of, vector, with_element
from gemmery.cpu.panels import Panels, panel_bytes
from gemmery.cpu.ukernel import multiply_add

PARAMS = (("i64", "count"), ("i64", "k"), "source", ("i64", "across"), ("i64", "along"), "to")

Routine = Callable[[Function, Panels], None]


def pack(module: Module, panels: Panels, routines: Mapping[str, Routine]) -> None:
    """Define `name(count, k, source, across, along, to)`: pack `count` rows (columns) of `k` elements.

    The strides select one of `routines`: "copy" if elements are adjacent across, "transpose" if they are adjacent along
    k, else "each", element by element.
    """
    for kind, body in routines.items():
        with module.function(f"{panels.name}_{kind}", *PARAMS, local=True) as f:
            body(f, panels)
    with module.function(panels.name, *PARAMS, local=True) as f:
        size, operands = dtypes.get(panels.product.dtype).size, f.parameters
        with f.if_(f["across"].equals(size)):
            f.call(f"{panels.name}_copy", *operands)
        with f.else_():
            with f.if_(f["along"].equals(size)):
                f.call(f"{panels.name}_transpose", *operands)
            with f.else_():
                f.call(f"{panels.name}_each", *operands)
        if panels.seeded and not panels.product.b_dtype:
            _seed(f, panels)


def pack_whole(f: Function, panels: Panels) -> None:
    """Pack all of B into C of the record, from left to right, since packing may write a little past a panel.

    Strides of C are those from block to block, and from column to column.

    A block of kc is packed at once, and one with gaps between its panels, since it is shorter, panel by panel.
    """
    args, parts, width = Args(f, f["args"]), panels.product.parts, panels.width
    n, k, kc, b, b_row, b_col = args.n * parts, args.k * parts, args.kc, args.b, args.b_row, args.b_col
    with f.loop(0, k, kc) as p:
        deep = f.min(k - p, kc)
        wide = f.select(deep.equals(kc), n, f.index(width))
        with f.loop(0, n, wide) as j:
            source, to = b + p // parts * b_row + j // parts * b_col, args.c + p // kc * args.c_row
            f.call("pack_b", f.min(n - j, wide), deep, source, b_col, b_row, to + j * args.c_col)


def panel(f: Function, panels: Panels, i: Value) -> Value:
    """Return the address of the first step of k in the panel of row (column) `i`."""
    at = f["to"] + i // panels.width * panel_bytes(panels, f["k"])
    return at + panels.row if panels.seeded else at


def load(f: Function, panels: Panels, at: Value, lanes: int, mask: Value | None = None) -> Value:
    """Load `lanes` neighbors (0: one scalar) in the panel's type."""
    product = panels.product
    if product.halved:
        return _halves(f, f.load_masked(vector(lanes, "half") if lanes else "half", at, mask))
    loaded = load_as(f, dtypes.get(product.dtype), product.packed, at, lanes, mask)
    return loaded ^ (1 << (8 * SIZES[product.packed] - 1)) if panels.sign_inverted else loaded


def put(f: Function, panels: Panels, cells: Value, at: Value) -> None:
    """Store cells in a panel, in each of its forms."""
    f.store(cells, at)
    if panels.forms > 1:
        f.store((cells << 16) | (cells >> 16), at + panels.row // 2)


def _halves(f: Function, numbers: Value) -> Value:
    """Return float16 as cells of two bfloat16 that add up to it.

    The upper half, in the lower bits, is the first 8 of the 11 bits of a number, the lower half the others. Both are
    normal or zero, since the smallest float16 is 2**-24. Those of an infinity are itself and NaN.
    """
    wide = f.convert("fpext", numbers, "float")
    bits = f.bitcast(wide, with_element(wide.type, "i32"))
    upper = bits & -0x10000
    lower = f.bitcast(wide - f.bitcast(upper, wide.type), bits.type)
    return (lower & -0x10000) | (bits >> 16)


def _copy(f: Function, panels: Panels) -> None:
    """Pack elements that are adjacent across: load vectors, convert, store."""
    k, group = f["k"], panels.product.group
    whole = k if group == 1 else k // group * group
    if group == 1 and f.target.isa == "avx2":
        done = f["count"] // panels.width * panels.width
        _copy_whole(f, panels, done)
        with f.if_(done < f["count"]):
            _copy_rows(f, panels, done, k, masks_of(f, panels, f["count"] - done))
        return
    with f.loop(0, f["count"], panels.width) as i:
        for masks in under_masks(f, panels, f["count"] - i):
            _copy_rows(f, panels, i, whole, masks)


def _copy_whole(f: Function, panels: Panels, stop: Value) -> None:
    """Pack whole panels up to `stop`, row after row, as they lie in memory.

    With AVX2 a row of a panel is one line, and a panel at once would read each from a page of its own (1024 x 342 of
    1024 x 1024, f32, Zen 3: 340 us for three panel by panel, 280 so).
    """
    cell = SIZES[panels.product.cell]
    lanes = f.target.lanes(cell)
    with f.loop(0, f["k"]) as p, f.loop(0, stop, panels.width) as i:
        source, to = f["source"] + p * f["along"] + i * panels.element, panel(f, panels, i) + p * panels.row
        for v in range(0, panels.width, lanes):
            cells = load(f, panels, source + v * panels.element, min(lanes, panels.width - v))
            f.store(cells, to + v * cell)


def under_masks(f: Function, panels: Panels, rest: Value) -> Iterator[Sequence[Value | None]]:
    """Emit a body for masks of the vectors of a panel row of which `rest` elements exist; None means all of them.

    Whole rows have a body without masks (6 x 2048 x 512, Zen 4: f32 1.3 times as fast, c64 1.6). With AVX-512, cells of
    several elements have one body for both: they gain little, and two take LLVM 15 ms longer.
    """
    masks = masks_of(f, panels, rest)
    if f.target.isa == "avx512" and panels.product.group > 1:
        yield masks
        return
    with f.if_(rest >= panels.width):
        yield [None] * len(masks)
    with f.else_():
        yield masks


def masks_of(f: Function, panels: Panels, rest: Value) -> list[Value]:
    """Return a mask for each vector of a panel row of which `rest` elements exist."""
    width, lanes = panels.width, f.target.lanes(SIZES[panels.product.cell])
    return [f.first_lanes(f.max(rest - v, 0), min(lanes, width - v)) for v in range(0, width, lanes)]


def _copy_rows(f: Function, panels: Panels, i: Value, whole: Value, masks: Sequence[Value | None]) -> None:
    lanes, cell = f.target.lanes(SIZES[panels.product.cell]), SIZES[panels.product.cell]
    few = _few(f, panels)
    k, group, along = f["k"], panels.product.group, f["along"]
    source, to = f["source"] + i * panels.element, panel(f, panels, i)
    rest = f["count"] - i

    def step(p: Value, rows: list[Value], exists: Sequence[Value | None]) -> None:
        with ExitStack() as wider:
            for mask, v in zip(masks, range(0, panels.width, lanes), strict=True):
                if v in (few, 2 * few):  # one, two or all vectors: see `used`
                    wider.enter_context(f.if_(rest >= v + 1))
                loaded = [load(f, panels, row + v * panels.element, min(lanes, panels.width - v), mask) for row in rows]
                known = [
                    x if yes is None else f.select(yes, x, f.zero(x.type))
                    for x, yes in zip(loaded, exists, strict=True)
                ]
                f.store(interleave(f, known), to + p // group * panels.row + v * cell)

    with f.loop(0, whole, group) as p:
        step(p, [source + p * along + along * g for g in range(group)], [None] * group)
    if group > 1:
        with f.if_(whole < k):
            rows = [source + f.min(whole + g, k - 1) * along for g in range(group)]
            step(whole, rows, [None, *[whole + g < k for g in range(1, group)]])
    if panels.product.on_tiles:
        nothing = f.zero(vector(lanes, panels.product.cell))
        with f.loop((k + (group - 1)) // group, panels.steps(k)) as p, f.loop(0, panels.row, lanes * cell) as at:
            f.store(nothing, to + p * panels.row + at)


def interleave(f: Function, rows: list[Value]) -> Value:
    """Interleave `group` vectors into cells: lane 0 of each, then lane 1 of each, ..."""
    while len(rows) > 1:
        # Pairing row g with row g + half leaves cells in the order 0, 1, 2, 3 after the last round.
        half, lanes = len(rows) // 2, lanes_of(rows[0].type)
        order = [lane + lanes * side for lane in range(lanes) for side in range(2)]
        rows = [f.shuffle(rows[g], rows[g + half], order) for g in range(half)]
    return rows[0]


def copy_transposed(f: Function, panels: Panels) -> None:
    """Pack elements that are adjacent along k: load `lanes` cells of each row, transpose, store step by step.

    If `width` is not a multiple of the vector, the stores of one step reach into the next step, which overwrites
    them. So steps must be stored in order, and the buffer needs a vector of slack at its end. With AVX-512 the last
    steps of k are loaded under a mask and stored as whole vectors too, into the panel after this one or into `slack`.
    """
    width, lanes = panels.width, f.target.lanes(SIZES[panels.product.cell])
    block = lanes * panels.product.group
    masked = f.target.isa == "avx512"
    stop = f["k"] if masked else f["k"] // block * block
    with f.loop(0, f["count"], width) as i:
        if width % lanes:
            _turn_rows(f, panels, i, stop, [f.index(first) for first in range(0, width, lanes)])
        else:
            few = _few(f, panels)
            with f.loop(0, f.index(few) * used(f, f["count"] - i, width, few), lanes) as first:
                _turn_rows(f, panels, i, stop, [first])
        if not masked:
            _step_by_step(f, panels, i, stop, f.index(panels.element))


def _few(f: Function, panels: Panels) -> int:
    """Return the cells of a panel row that a vector of sums needs: one for each lane, if the row is such vectors."""
    sums, cells = (f.target.lanes(SIZES[name]) for name in (panels.product.accumulator, panels.product.cell))
    return cells if panels.width % sums else max(sums, cells)


def used(f: Function, count: Value, width: int, lanes: int) -> Value:
    """Return how many vectors the micro-kernel reads of a panel row with `count` numbers: 1, 2 or all of them."""
    vectors = f.index(width // lanes)
    for few in (2, 1):
        if few * lanes < width:
            vectors = f.select(count <= few * lanes, f.index(few), vectors)
    return vectors


def _turn_rows(f: Function, panels: Panels, i: Value, stop: Value, chunks: list[Value]) -> None:
    """Transpose chunks of `lanes` rows, which begin at these rows of a panel."""
    product, cell = panels.product, SIZES[panels.product.cell]
    lanes = f.target.lanes(cell)
    to = panel(f, panels, i)
    rows = [
        [row_at(f, i + (first + r)) for r in range(min(lanes, panels.width - number * lanes))]
        for number, first in enumerate(chunks)
    ]
    block, square = lanes * product.group, vector(lanes, product.cell)
    loaded = [[f.var(f.zero(square)) for _ in some] for some in rows]

    def read(p: Value, mask: Value | None) -> None:
        for some, into in zip(rows, loaded, strict=True):
            for row, to in zip(some, into, strict=True):
                to.value = f.bitcast(load(f, panels, row + p * panels.element, block, mask), square)

    with f.loop(0, stop, block) as p:
        if f.target.isa == "avx512":  # loads under a mask take twice as long (Zen 4)
            with f.if_(p + block <= f["k"]):
                read(p, None)
            with f.else_():
                read(p, f.first_lanes(f["k"] - p, block))
        else:
            read(p, None)
            if f.target.isa == "avx2" and panels.width % lanes:  # A: its rows are short, and begin on other pages
                for row in itertools.chain(*rows):
                    f.prefetch(row + f["across"] * panels.width + p * panels.element, locality=2)
        transposed = [transpose(f, [row.value for row in some]) for some in loaded]
        for step in range(lanes):
            at = to + (p // product.group + step) * panels.row
            for first, columns in zip(chunks, transposed, strict=True):
                f.store(columns[step], at + first * cell)


def row_at(f: Function, i: Value) -> Value:
    """Return the start of row (column) `i` of the operand; past the edge, of the last one."""
    return f["source"] + f.min(i, f["count"] - 1) * f["across"]


def transpose(f: Function, rows: list[Value], unit: int = 1) -> list[Value]:
    """Transpose `lanes` rows of `lanes` elements by log2(lanes) rounds of two-input shuffles.

    An element is `unit` neighboring lanes of the vector. Missing rows are poison, so that LLVM removes unused
    shuffles. The first rounds move blocks of 16 bytes, the last ones elements inside them (16 x 16 floats from memory,
    Zen 4: 10 % faster than the other way round).
    """
    lanes = lanes_of(rows[0].type) // unit
    empty = Value(f, rows[0].type, "poison")
    rows = [*rows, *[empty] * (lanes - len(rows))]
    inside = min(lanes, max(16 // (unit * SIZES[element_of(rows[0].type)]), 1))
    spans = [1 << i for i in range(lanes.bit_length() - 1)]
    for span in sorted(spans, key=lambda span: span < inside):
        low = [lane if not lane & span else lanes + lane - span for lane in range(lanes)]
        high = [lane + span if not lane & span else lanes + lane for lane in range(lanes)]
        for r in range(lanes):
            if r & span:
                continue
            x, y = rows[r], rows[r + span]
            if x.text == y.text == "poison":
                continue
            picks = ([unit * lane + part for lane in order for part in range(unit)] for order in (low, high))
            rows[r], rows[r + span] = (f.shuffle(x, y, order) for order in picks)
    return rows


def pack_each(f: Function, panels: Panels) -> None:
    """Pack elements that are adjacent in neither direction, one at a time."""
    with f.loop(0, f["count"], panels.width) as i:
        _step_by_step(f, panels, i, f.index(0), f["along"])


def _step_by_step(f: Function, panels: Panels, i: Value, start: Value, along: Value) -> None:
    """Pack steps of k from `start` (a multiple of the group) to the end, one element at a time, then zeros."""
    product = panels.product
    element, group, k = SIZES[product.packed], panels.group, f["k"]
    with f.loop(0, panels.width) as r:
        row, to = row_at(f, i + r), panel(f, panels, i) + r * (group * element)

        def place(p: Value) -> Value:
            return to + (p // group * panels.row + (p & (group - 1)) * element if group > 1 else p * panels.row)

        with f.loop(start, k) as p:
            put(f, panels, load(f, panels, row + p * along, 0), place(p))
        if group > 1 or product.on_tiles:
            with f.loop(k, panels.steps(k) * group) as p:
                put(f, panels, f.zero(product.packed), place(p))


def _seed(f: Function, panels: Panels) -> None:
    """Write the correction for A's flipped sign bit, per block of k: 128 times the sums of B's columns, negated.

    Flipping turns signed a into a + 128 and unsigned a into a - 128.
    """
    product = panels.product
    lanes = f.target.lanes(SIZES[product.accumulator])
    cells = vector(lanes, product.cell)
    ones = f.const(cells, 0x01010101)
    with f.loop(0, f["count"], panels.width) as i, f.loop(0, panels.width, lanes) as first:
        column = panel(f, panels, i) + first * SIZES[product.cell]
        total = f.var(f.zero(vector(lanes, product.accumulator)))
        with f.loop(0, panels.steps(f["k"])) as p:
            total.value = multiply_add(f, product, ones, f.load(cells, column + p * panels.row), total.value)
        f.store(total.value * (-128 if product.is_signed else 128), column + -panels.row)


ROUTINES: Mapping[str, Routine] = {"copy": _copy, "transpose": copy_transposed, "each": pack_each}
