"""The 32-byte sectors that one access of a warp touches in global memory."""

from __future__ import annotations

from collections.abc import Mapping

from gemmery.emulator.trace import WarpAccess
from gemmery.report import words
from gemmery.report.pictures.drawing import (
    cell,
    filled,
    instruction,
    label,
    legend,
    line_of,
    outline,
    spoken,
    svg,
    who,
)
from gemmery.report.svg import Plot
from gemmery.report.words import plural

SECTOR, LINE = 32, 128  # bytes
LEFT, BYTE = 96, 6  # of the picture: labels, and the width of a byte
ROW, APART = 18, 4
READING = f"A row of the picture is a line of {LINE} bytes; the number at its left is its offset from the first line."


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
                parts.append(outline(x + 1, top, SECTOR * BYTE - 2, ROW, "rule"))
        parts += _pieces(line, used, top)
        top += ROW + APART
    parts.append(legend(LEFT, top + 10, (("accent", "used, by the lanes named"), ("soft", "moved, but not used"))))
    requested, moved = len(used), len(sectors) * SECTOR
    ideal = -(-requested // SECTOR)
    summary = f"{plural(len(sectors), 'sector')} of {SECTOR} bytes"
    caption = (
        f"{instruction(access)}: {summary}, where {ideal} would hold what the lanes use: {requested:,} of {moved:,} "
        f"bytes, {words.percent(requested / moved)}."
    )
    described = f"sectors of {access.opcode} at {line_of(access)}: {summary}, {requested} of {moved} bytes used"
    return Plot(name, f"Sectors of {access.opcode}, {line_of(access)}", caption, svg(described, top + 22, parts))


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
    parts, first = [], line * LINE
    end = first + LINE
    while first < end:
        by, after = used.get(first, ()), first + 1
        while after < end and used.get(after, ()) == by:
            after += 1
        if by:
            x, width = LEFT + first % LINE * BYTE, (after - first) * BYTE
            parts.append(filled(x + 1, top, width - 2, ROW, "accent", who(by), f"{spoken(by)}: {after - first} bytes"))
        first = after
    return parts
