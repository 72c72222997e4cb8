"""A tile that a tensor copy brought: its pieces in global and in shared memory, and the products that read them."""

from __future__ import annotations

from gemmery.emulator.trace.pipeline import CopiedTile
from gemmery.report.pictures.drawing import LEAST, cell, label, legend, svg
from gemmery.report.svg import WIDTH, Plot
from gemmery.report.words import plural

PIECE, BANK_ROW = 16, 128  # bytes: what a swizzle moves as a unit, and what the 32 banks hold once
ROWS = 20  # rows of 128 bytes that are drawn
LABEL, APART = 44, 20  # of the picture: row numbers, and the space between the two panels
HEIGHT, GAP = 18, 2
FILLS = ("accent", "s2", "s1", "s3")  # of the products, in their order
READING = (
    "A cell is a piece of 16 bytes, named by the row and the column of its first element in the box. On the left are "
    "the rows of the box as they lie in global memory, on the right shared memory, 128 bytes a row: all 32 banks once."
)


def swizzled_picture(tile: CopiedTile, name: str = "swizzle") -> Plot:
    """The box of a tensor copy on both sides, its pieces coloured by the product that reads them."""
    pieces = tile.box[0] * tile.size // PIECE  # of a row of the box
    first = min(tile.places) // BANK_ROW * BANK_ROW
    places = {place - first: divmod(at, pieces) for at, place in enumerate(tile.places)}
    visible = {place: piece for place, piece in places.items() if place < ROWS * BANK_ROW}
    fills = _fills(tile, first, set(visible))
    width = (WIDTH - 2 * LABEL - APART) / 2
    top = 40.0
    parts = [
        label(LABEL, 9, f"{tile.array} in global memory", "ink", 12, "start"),
        label(2 * LABEL + APART + width, 9, "shared memory", "ink", 12, "start"),
    ]
    for edge, heads in (
        (LABEL, [str(at * PIECE // tile.size) for at in range(pieces)]),
        (2 * LABEL + APART + width, [f"{at * 4}–{at * 4 + 3}" for at in range(BANK_ROW // PIECE)]),
    ):
        each = width / len(heads)
        parts += [label(edge + (at + 0.5) * each, 28, head, "muted", 10) for at, head in enumerate(heads)]
        parts.append(label(edge - 8, 28, "column" if edge == LABEL else "banks", "muted", 10, "end"))
    for place, (row, piece) in visible.items():
        text = f"{row}, {piece * PIECE // tile.size}"
        fill = fills.get(place, "rule")
        tooltip = f"{tile.array}[{row}][{piece * PIECE // tile.size}] of the box at byte {place:,}"
        each = width / pieces
        parts += _cell(LABEL + piece * each, top + row * (HEIGHT + GAP), each, fill, text, tooltip)
        each, down = width / (BANK_ROW // PIECE), top + place // BANK_ROW * (HEIGHT + GAP)
        edge = 2 * LABEL + APART + width + place % BANK_ROW // PIECE * each
        parts += _cell(edge, down, each, fill, text, tooltip)
    last = max(*(row for row, _ in visible.values()), max(visible) // BANK_ROW)
    for row in range(last + 1):
        middle = top + row * (HEIGHT + GAP) + HEIGHT / 2
        if row in {of for of, _ in visible.values()}:
            parts.append(label(LABEL - 8, middle, str(row), "muted", 10, "end"))
        if row <= max(visible) // BANK_ROW:
            parts.append(label(2 * LABEL + APART + width - 8, middle, f"{row * BANK_ROW:,}", "muted", 10, "end"))
    bottom = top + (last + 1) * (HEIGHT + GAP)
    number = len(set(fills.values()))
    meanings = [(fill, f"read by product {at + 1}") for at, fill in enumerate(FILLS[:number])]
    meanings += [("rule", "read later")] if len(fills) < len(visible) else []
    parts.append(legend(LABEL, bottom + 14, meanings))
    title = f"A box of {tile.array} that a tensor copy swizzles"
    return Plot(name, title, _caption(tile, pieces), svg(title, bottom + 28, parts))


def _cell(x: float, y: float, width: float, fill: str, text: str, tooltip: str) -> list[str]:
    ink = "muted" if fill == "rule" else "paper"
    return [
        cell(x + 1, y, width - 2, HEIGHT, fill, tooltip),
        label(x + width / 2, y + HEIGHT / 2, text, ink, LEAST),
    ]


def _fills(tile: CopiedTile, first: int, visible: set[int]) -> dict[int, str]:
    """The colour of each piece that one of the first products reads."""
    fills: dict[int, str] = {}
    reads = [{place - first for place in read} & visible for read in tile.reads]
    for fill, read in zip(FILLS, filter(None, reads), strict=False):
        for place in read:
            fills.setdefault(place, fill)
    return fills


def _caption(tile: CopiedTile, pieces: int) -> str:
    """The box, the rule of its swizzle, and what a product reads of it."""
    columns, rows = tile.box
    box = f"A box of {plural(rows, 'row')} of {columns} elements, {columns * tile.size} bytes each"
    apart = ""
    if tile.swizzle:
        mask = tile.swizzle // PIECE - 1
        apart = (
            f" Piece p of a row goes to place p xor (r mod {mask + 1}), where r counts rows of 128 bytes: {mask + 1} "
            "pieces of one column come to different banks."
        )
    read = ""
    if tile.reads and tile.opcode:
        count = len(tile.reads[0])
        read = f" The first product ({tile.opcode}) reads {count} of the {rows * pieces} pieces."
    return f"{box}, with a swizzle of {tile.swizzle} bytes.{apart}{read}"
