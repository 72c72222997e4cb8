"""Pictures of memory accesses, branches, tensor copies and barriers, as figures of a page without scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gemmery.banks import BANK, BANKS
from gemmery_emulator.pages.numerals import plural
from gemmery_emulator.pages.pictures import timeline, wavefronts
from gemmery_emulator.pages.pictures.timeline import divergence_picture, timeline_picture
from gemmery_emulator.pages.pictures.wavefronts import boxes, cost, groups, sectors_picture, wavefronts_picture
from gemmery_emulator.pages.svg import (
    EM,
    LEAST,
    WIDTH,
    Plot,
    cell,
    instruction,
    key,
    label,
    line_of,
    quoted,
    spoken,
    standalone,
    svg,
    who,
)
from gemmery_emulator.trace import Divergence, TileLayout, WarpAccess
from gemmery_emulator.trace.pipeline import CopiedTile
from gemmery_emulator.trace.selection import Selection

BANK_ROW = BANK * BANKS  # bytes that the 32 banks hold once
LEFT, BYTE = 96, 6  # of the picture: labels, and the width of a byte
FEWEST, MOST = 8, 16  # rows that are shown
SMALL = LEAST  # font size of what a cell holds
MEANINGS = (
    ("accent", "lanes served together"),
    ("rival", "lanes in a bank conflict"),
    ("rule", "the rest of the tile"),
)
READING = (
    "A row of the picture is the 32 banks once; the number at its left is its offset in bytes. A cell shows the lanes, "
    "and row, column of its first element."
)
PIECE = 16  # bytes that a swizzle moves as a unit
ROWS = 20  # rows of 128 bytes that are drawn
LABEL, APART = 44, 20  # of the picture: row numbers, and the space between the two panels
HEIGHT, GAP = 18, 2
FILLS = ("accent", "s2", "s1", "s3")  # of the products, in their order
COPY_READING = (
    "A cell is a piece of 16 bytes, named by the row and the column of its first element in the box. On the left are "
    "the rows of the box as they lie in global memory, on the right shared memory, 128 bytes a row: all 32 banks once."
)


def tile_picture(layout: TileLayout, name: str = "tile") -> Plot:
    """The places of a tile, 128 bytes a row, under its store and under its load.

    A cell holds the row and the column of its first element; the first lanes that are served together are laid over it.
    """
    accesses = [access for access in (layout.store, layout.load) if access is not None]
    first = {access: groups(access)[0] for access in accesses}
    # The rows that are shown: those touched, and as many after them as show the pattern.
    addresses = (access.addresses[lane] for access in accesses for lane in first[access])
    touched = sorted({address // BANK_ROW for address in addresses if address is not None})
    filled = sorted({offset // BANK_ROW for offset in layout.held})
    after = [row for row in filled if touched and row > touched[0] and row not in touched]
    rows = sorted((touched + after[: max(0, FEWEST - len(touched))])[:MOST])
    parts, top = [], 8.0
    for access in accesses:
        panel, top = _panel(layout, access, first[access], rows, top)
        parts += panel
    parts.append(key(LEFT, top + 2, MEANINGS))
    caption = " ".join(f"{_verb(access).capitalize()}: {instruction(access)}; {cost(access)}." for access in accesses)
    title = f"The tile of {layout.operand} in shared memory"
    return Plot(name, title, caption, svg(f"{title}: {caption}", top + 16, parts))


def _panel(
    layout: TileLayout, access: WarpAccess, group: Sequence[int], rows: Sequence[int], top: float
) -> tuple[list[str], float]:
    """The rows under one access, and where they end."""
    size = max(access.piece, BANK)
    longest = max((len(f"{row}, {column}") for row, column in layout.held.values()), default=0)
    lines = 1 if longest * EM * SMALL < size * BYTE - 2 else 2
    height = 18 + 10 * lines
    title = f"{_verb(access)}, {spoken(group)}: {access.opcode}, {line_of(access)}"
    parts = [label(0, top, title, anchor="start", size=12)]
    top += 18
    parts.append(label(LEFT - 12, top, "banks" if size > BANK else "bank", "muted", anchor="end"))
    for at in range(0, BANK_ROW, size):
        bank = at // BANK
        text = str(bank) if size == BANK else f"{bank}–{bank + size // BANK - 1}"
        parts.append(label(LEFT + (at + size / 2) * BYTE, top, text, "muted", 10))
    top += 10
    by = _overlay(access, group, size)
    before = rows[0]
    for row in rows:
        top += 8 if row > before + 1 else 0
        before = row
        parts.append(label(LEFT - 12, top + height / 2, f"{row * BANK_ROW:,}", "muted", 10, "end"))
        for at in range(row * BANK_ROW, (row + 1) * BANK_ROW, size):
            parts += _cell(layout, at, size, by.get(at), top, height, lines)
        top += height + 2
    return parts, top + 20


def _overlay(access: WarpAccess, group: Sequence[int], size: int) -> dict[int, tuple[tuple[int, ...], str]]:
    """Cells that the group touches: by which lanes, and in which color."""
    meeting = {lane for box in boxes(access, group) if box.meets for lane in box.lanes}
    touched: dict[int, list[int]] = {}
    for lane in group:
        address = access.addresses[lane]
        if address is not None:
            touched.setdefault(address // size * size, []).append(lane)
    return {at: (tuple(by), "rival" if meeting & set(by) else "accent") for at, by in touched.items()}


def _cell(
    layout: TileLayout,
    at: int,
    size: int,
    touched: tuple[tuple[int, ...], str] | None,
    top: float,
    height: float,
    lines: int,
) -> list[str]:
    """One place of the tile: the lanes above, what it holds below."""
    x, width = LEFT + at % BANK_ROW * BYTE, size * BYTE
    by, fill = touched or ((), "rule")
    element = layout.held.get(at)
    texts = () if element is None else (f"{element[0]}, {element[1]}",) if lines == 1 else tuple(map(str, element))
    holds = f"{layout.operand}[{element[0]}][{element[1]}]" if element else "nothing of the tile"
    tooltip = f"{holds} at byte {at:,}" + (f": {spoken(by)}" if by else "")
    parts = [cell(x + 1, top, width - 2, height, fill, tooltip)]
    middle = x + width / 2
    if by:
        lanes = next(text for text in (*who(by), "") if EM * LEAST * len(text) < width - 4)
        font = min(11, (width - 4) / (EM * max(len(lanes), 2)))
        parts.append(label(middle, top + 9, lanes, "paper", font))
    for index, text in enumerate(texts):
        down = height / 2 + (index - (len(texts) - 1) / 2) * 10 + (7 if by else 0)
        parts.append(label(middle, top + down, text, "paper" if by else "muted", SMALL))
    return parts


def _verb(access: WarpAccess) -> str:
    return "load" if access.kind in ("ld", "ldmatrix") else "store"


def swizzled_picture(tile: CopiedTile, name: str = "swizzle") -> Plot:
    """The box of a tensor copy on both sides, its pieces colored by the product that reads them."""
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
        parts += _piece(LABEL + piece * each, top + row * (HEIGHT + GAP), each, fill, text, tooltip)
        each, down = width / (BANK_ROW // PIECE), top + place // BANK_ROW * (HEIGHT + GAP)
        edge = 2 * LABEL + APART + width + place % BANK_ROW // PIECE * each
        parts += _piece(edge, down, each, fill, text, tooltip)
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
    parts.append(key(LABEL, bottom + 14, meanings))
    title = f"A box of {tile.array} that a tensor copy swizzles"
    return Plot(name, title, _caption(tile, pieces), svg(title, bottom + 28, parts))


def _piece(x: float, y: float, width: float, fill: str, text: str, tooltip: str) -> list[str]:
    ink = "muted" if fill == "rule" else "paper"
    return [cell(x + 1, y, width - 2, HEIGHT, fill, tooltip), label(x + width / 2, y + HEIGHT / 2, text, ink, LEAST)]


def _fills(tile: CopiedTile, first: int, visible: set[int]) -> dict[int, str]:
    """The color of each piece that one of the first products reads."""
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


READINGS = {
    "tile": READING,
    "banks": wavefronts.READING,
    "sectors": wavefronts.SECTORS_READING,
    "lanes": timeline.LANES_READING,
    "swizzle": COPY_READING,
    "barriers": timeline.READING,
}  # by the first word of a figure's name
EDGE = 16  # around a standalone picture


def pictures(
    accesses: Selection, source: Mapping[str, str], prefix: str = "", explained: frozenset[str] = frozenset()
) -> tuple[Plot, ...]:
    """A figure for each tile, access and branch, and for barriers.

    `source` gives the text of lines, `prefix` begins the figures' names. The first figure of each
    kind says how to read it, except of the kinds that are `explained` already.
    """
    drawn: tuple[tuple[Plot, tuple[WarpAccess | Divergence | None, ...]], ...] = (
        *((timeline_picture(barriers, "barriers-1"), ()) for barriers in (accesses.timeline,) if barriers is not None),
        *((swizzled_picture(tile, f"swizzle-{at}"), ()) for at, tile in enumerate(accesses.copied, 1)),
        *((tile_picture(tile, f"tile-{at}"), (tile.store, tile.load)) for at, tile in enumerate(accesses.tiles, 1)),
        *((wavefronts_picture(access, f"banks-{at}"), (access,)) for at, access in enumerate(accesses.shared, 1)),
        *((sectors_picture(access, f"sectors-{at}"), (access,)) for at, access in enumerate(accesses.global_, 1)),
        *(
            (divergence_picture(branch, source, f"lanes-{at}"), (branch,))
            for at, branch in enumerate(accesses.divergences, 1)
        ),
    )
    plots, known = [], set(explained)
    for plot, events in drawn:
        kind = plot.name.partition("-")[0]
        reading = "" if kind in known else f" {READINGS[kind]}"
        known.add(kind)
        caption = plot.caption + quoted(source, *events) + reading
        plots.append(replace(plot, name=f"{prefix}{plot.name}", caption=caption))
    return tuple(plots)


def files(rung: str, accesses: Selection, source: Mapping[str, str]) -> dict[str, str]:
    """The same as standalone SVG files, by their names: "simt_smem-banks-1.svg"."""
    return {f"{plot.name}.svg": standalone(_edged(plot.svg)) for plot in pictures(accesses, source, f"{rung}-")}


def _edged(svg: str) -> str:
    """The same with some of its background around it."""
    view = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg)
    assert view, "every picture has a view box"
    width, height = float(view[1]) + 2 * EDGE, float(view[2]) + 2 * EDGE
    return svg.replace(view[0], f'viewBox="{-EDGE} {-EDGE} {width:g} {height:g}"')
