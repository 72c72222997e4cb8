"""Pictures of memory accesses, branches, tensor copies and barriers, as figures of a page without scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from gemmery_emulator.pages.pictures import tile, timeline, wavefronts
from gemmery_emulator.pages.pictures.tile import swizzled_picture, tile_picture
from gemmery_emulator.pages.pictures.timeline import divergence_picture, timeline_picture
from gemmery_emulator.pages.pictures.wavefronts import sectors_picture, wavefronts_picture
from gemmery_emulator.pages.svg import Plot, quoted, standalone
from gemmery_emulator.trace import Divergence, WarpAccess
from gemmery_emulator.trace.selection import Selection

READINGS = {
    "tile": tile.READING,
    "banks": wavefronts.READING,
    "sectors": wavefronts.SECTORS_READING,
    "lanes": timeline.LANES_READING,
    "swizzle": tile.COPY_READING,
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
