"""One access of a warp: its stacks on the 32 banks of shared memory, or its sectors of global memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gemmery import banks
from gemmery.banks import BANK, BANKS, WARP
from gemmery_emulator.pages.numerals import percent, plural
from gemmery_emulator.pages.svg import Plot, cell, filled, instruction, key, label, lanes, line_of, spoken, svg, who
from gemmery_emulator.trace import WarpAccess
from gemmery_emulator.trace.selection import served

LEFT, WIDE = 96, 24  # of the picture: labels, and the width of a bank
GAP = 12  # between groups of lanes
MEANINGS = {False: ("accent", "lanes without conflicts"), True: ("rival", "lanes in a bank conflict")}
READING = (
    "A box is a word, or neighboring words, with the lanes that request it; boxes on one bank are stacked, and the "
    "highest stack of a group is its number of wavefronts."
)
SECTOR, LINE = 32, 128  # bytes
BYTE = 6  # of the picture: the width of a byte
ROW, APART = 18, 4
SECTORS_READING = (
    f"A row of the picture is a line of {LINE} bytes; the number at its left is its offset from the first line."
)


@dataclass(frozen=True)
class Box:
    """Words on neighboring banks that the same lanes request in the same wavefront of their group."""

    level: int
    bank: int
    banks: int
    lanes: tuple[int, ...]
    meets: bool  # other words are asked for on one of these banks


def wavefronts_picture(access: WarpAccess, name: str = "banks") -> Plot:
    """The banks of one access, for each group of lanes that is served together, as READING says."""
    turns = groups(access)
    stacks = [boxes(access, group) for group in turns]
    heights = [1 + max(box.level for box in stack) for stack in stacks]
    row = 22 if sum(heights) <= 12 else 16
    parts = [label(LEFT - 12, 9, "bank", "muted", anchor="end")]
    parts += [label(LEFT + (bank + 0.5) * WIDE, 9, str(bank), "muted", 10) for bank in range(BANKS)]
    top = 22.0
    for group, stack, height in zip(turns, stacks, heights, strict=True):
        parts += _stack(group, stack, height, top, row)
        top += height * row + GAP
    kinds = {box.meets for stack in stacks for box in stack}
    parts.append(key(LEFT, top + 10, [MEANINGS[meets] for meets in (False, True) if meets in kinds]))
    described = f"banks of {access.opcode} at {line_of(access)}: {cost(access)}"
    caption = f"{instruction(access)}: {cost(access)}. {_turns(turns)}"
    return Plot(name, f"Banks of {access.opcode}, {line_of(access)}", caption, svg(described, top + 22, parts))


def groups(access: WarpAccess) -> list[tuple[int, ...]]:
    """The lanes of an access that shared memory serves together, group after group; lanes not active are left out.

    >>> from gemmery_emulator.ptx import Line
    >>> wide = WarpAccess(
    ...     Line("k.cu", 1), Line("k.cu", 1), "ld.shared.v4.f32", "shared", "ld", 16, (0, None, 32, 48) * 8
    ... )
    >>> groups(wide)[0]
    (0, 2, 3, 4, 6, 7)
    """
    if access.kind in ("ldmatrix", "stmatrix"):
        return _every(access, banks.ROWS)
    passes, together = served(access), min(WARP, BANK * BANKS // access.width)
    narrow = _every(access, together)
    # Pairs that agree are served in groups twice as wide; the number of groups shows it.
    return narrow if len(narrow) == passes.wavefronts - passes.conflicts else _every(access, 2 * together)


def cost(access: WarpAccess) -> str:
    """The wavefronts of an access, and how many of them are conflicts.

    >>> from gemmery_emulator.ptx import Line
    >>> line, addresses = Line("k.cu", 1), tuple(range(0, 256, 8))
    >>> cost(WarpAccess(line, line, "ld.shared.f32", "shared", "ld", 4, addresses))
    '2 wavefronts, 1 of them a bank conflict'
    """
    passes = served(access)
    wavefronts = plural(passes.wavefronts, "wavefront")
    if not passes.conflicts:
        return f"{wavefronts}, no bank conflict"
    conflicts = "a bank conflict" if passes.conflicts == 1 else "bank conflicts"
    return f"{wavefronts}, {passes.conflicts} of them {conflicts}"


def _every(access: WarpAccess, together: int) -> list[tuple[int, ...]]:
    """Active lanes in groups of `together` neighbors, without empty groups."""
    active = [lane for lane in range(access.addressing) if access.addresses[lane] is not None]
    return [tuple(group) for _, group in groupby(active, lambda lane: lane // together)]


def boxes(access: WarpAccess, group: Sequence[int]) -> list[Box]:
    """The words that a group of lanes asks for, stacked on their banks in the order of the lanes.

    >>> from gemmery_emulator.ptx import Line
    >>> access = WarpAccess(Line("k.cu", 1), Line("k.cu", 1), "ld.shared.f32", "shared", "ld", 4, (0, 128, 128))
    >>> [(box.bank, box.level, box.lanes, box.meets) for box in boxes(access, (0, 1, 2))]
    [(0, 0, (0,), True), (0, 1, (1, 2), True)]
    """
    readers: dict[int, list[int]] = {}  # word -> lanes
    for lane in group:
        address = access.addresses[lane]
        if address is not None:
            for word in range(address // BANK, (address + max(access.piece, BANK)) // BANK):
                readers.setdefault(word, []).append(lane)
    on: list[list[int]] = [[] for _ in range(BANKS)]  # words, in the order of the wavefronts
    for word in readers:
        on[word % BANKS].append(word)
    stack: list[Box] = []
    for level in range(max(map(len, on))):
        for bank, words in enumerate(on):
            if level < len(words):
                box = Box(level, bank, 1, tuple(readers[words[level]]), len(words) > 1)
                before = stack[-1] if bank and on[bank - 1][level : level + 1] == [words[level] - 1] else None
                if before and (before.lanes, before.meets) == (box.lanes, box.meets):
                    stack[-1] = replace(before, banks=before.banks + 1)
                else:
                    stack.append(box)
    return stack


def _stack(group: Sequence[int], stack: Sequence[Box], height: int, top: float, row: float) -> list[str]:
    """One group of lanes: its name, the banks that idle in each of its wavefronts, and the boxes on them."""
    middle = top + height * row / 2
    parts = [label(0, middle, f"lanes {lanes(group)}" if len(group) > 1 else f"lane {group[0]}", anchor="start")]
    if height > 1:
        parts[0] = label(0, middle - 7, f"lanes {lanes(group)}", anchor="start")
        parts.append(label(0, middle + 7, f"{height} wavefronts", "rival", 10, "start"))
    for level in range(height):
        y = top + (height - 1 - level) * row
        parts += [cell(LEFT + bank * WIDE + 1, y + 1, WIDE - 2, row - 2, "rule") for bank in range(BANKS)]
    for box in stack:
        y, x = top + (height - 1 - box.level) * row, LEFT + box.bank * WIDE
        banks = f"bank {box.bank}" if box.banks == 1 else f"banks {box.bank} to {box.bank + box.banks - 1}"
        tooltip = f"{spoken(box.lanes)} on {banks}, wavefront {box.level + 1} of {height}"
        fill = "rival" if box.meets else "accent"
        parts.append(filled(x + 1, y + 1, box.banks * WIDE - 2, row - 2, fill, who(box.lanes), tooltip))
    return parts


def _turns(turns: Sequence[Sequence[int]]) -> str:
    if len(turns) == 1:
        return "All lanes of the warp are served together."
    return f"The warp is served in {len(turns)} groups of up to {max(map(len, turns))} lanes."


def sectors_picture(access: WarpAccess, name: str = "sectors") -> Plot:
    """The sectors of one access, a row for each 128-byte line: the bytes that lanes use, and those that move unused.

    Offsets are counted from the first line touched.
    """
    used = _used(access)
    sectors = sorted({byte // SECTOR for byte in used})
    lines = sorted({sector * SECTOR // LINE for sector in sectors})
    origin = lines[0] * LINE
    parts, top = [label(LEFT - 12, 9, "byte", "muted", anchor="end")], 22.0
    parts += [label(LEFT + at * BYTE, 9, str(at), "muted", 10, "start") for at in range(0, LINE, SECTOR)]
    for line in lines:
        parts.append(label(LEFT - 12, top + ROW / 2, f"{line * LINE - origin:+,}", "muted", 10, "end"))
        for sector in range(line * LINE // SECTOR, (line + 1) * LINE // SECTOR):
            x = LEFT + sector * SECTOR % LINE * BYTE
            if sector in sectors:
                parts.append(cell(x + 1, top, SECTOR * BYTE - 2, ROW, "soft", f"sector {sector * SECTOR - origin:+,}"))
            else:
                parts.append(_outline(x + 1, top, SECTOR * BYTE - 2, ROW, "rule"))
        parts += _pieces(line, used, top)
        top += ROW + APART
    parts.append(key(LEFT, top + 10, (("accent", "used, by the lanes named"), ("soft", "moved, but not used"))))
    requested, moved = len(used), len(sectors) * SECTOR
    ideal = -(-requested // SECTOR)
    summary = f"{plural(len(sectors), 'sector')} of {SECTOR} bytes"
    caption = (
        f"{instruction(access)}: {summary}, where {ideal} would hold what the lanes use: {requested:,} of {moved:,} "
        f"bytes, {percent(requested / moved)}."
    )
    described = f"sectors of {access.opcode} at {line_of(access)}: {summary}, {requested} of {moved} bytes used"
    return Plot(name, f"Sectors of {access.opcode}, {line_of(access)}", caption, svg(described, top + 22, parts))


def _outline(x: float, y: float, width: float, height: float, stroke: str) -> str:
    """The border of a cell."""
    return (
        f'<rect x="{x + 0.5:g}" y="{y + 0.5:g}" width="{width - 1:g}" height="{height - 1:g}" rx="2" '
        f'fill="none" stroke="var(--{stroke})"/>'
    )


def _used(access: WarpAccess) -> Mapping[int, tuple[int, ...]]:
    """Which lanes use each byte, in the order of the bytes."""
    users: dict[int, list[int]] = {}
    for lane, address in enumerate(access.addresses):
        if address is not None:
            for byte in range(address, address + access.width):
                users.setdefault(byte, []).append(lane)
    return {byte: tuple(users[byte]) for byte in sorted(users)}


def _pieces(line: int, used: Mapping[int, tuple[int, ...]], top: float) -> list[str]:
    """The used bytes of one line, in pieces that the same lanes use."""
    parts = []
    for by, run in groupby(range(line * LINE, (line + 1) * LINE), lambda byte: used.get(byte, ())):
        if by:
            bytes_ = [*run]
            x, width = LEFT + bytes_[0] % LINE * BYTE, len(bytes_) * BYTE
            parts.append(filled(x + 1, top, width - 2, ROW, "accent", who(by), f"{spoken(by)}: {len(bytes_)} bytes"))
    return parts
