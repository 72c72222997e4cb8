"""A tile in shared memory: the place of each element, and the lanes that store and load it together."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.banks import BANK, BANKS
from gemmery.emulator.trace import TileLayout, WarpAccess
from gemmery.report.pictures.drawing import EM, LEAST, cell, instruction, label, legend, line_of, spoken, svg, who
from gemmery.report.pictures.wavefronts import boxes, cost, groups
from gemmery.report.svg import Plot

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


def tile_picture(layout: TileLayout, name: str = "tile") -> Plot:
    """The places of a tile, 128 bytes a row, under its store and under its load.

    A cell holds the row and the column of its first element; the first lanes that are served together are laid over it.
    """
    accesses = [access for access in (layout.store, layout.load) if access is not None]
    first = {access: groups(access)[0] for access in accesses}
    rows = _rows([access.addresses[lane] for access in accesses for lane in first[access]], layout)
    parts, top = [], 8.0
    for access in accesses:
        panel, top = _panel(layout, access, first[access], rows, top)
        parts += panel
    parts.append(legend(LEFT, top + 2, MEANINGS))
    caption = " ".join(f"{_verb(access).capitalize()}: {instruction(access)}; {cost(access)}." for access in accesses)
    title = f"The tile of {layout.operand} in shared memory"
    return Plot(name, title, caption, svg(f"{title}: {caption}", top + 16, parts))


def _rows(addresses: Sequence[int | None], layout: TileLayout) -> list[int]:
    """The rows that are shown: those touched, and as many after them as show the pattern."""
    touched = sorted({address // BANK_ROW for address in addresses if address is not None})
    filled = sorted({offset // BANK_ROW for offset in layout.held})
    after = [row for row in filled if touched and row > touched[0] and row not in touched]
    return sorted((touched + after[: max(0, FEWEST - len(touched))])[:MOST])


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
    """Cells that the group touches: by which lanes, and in which colour."""
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
