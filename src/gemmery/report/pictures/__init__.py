"""Pictures of the memory accesses and branches of a warp, as figures of a page without scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from gemmery.emulator.trace import Divergence, WarpAccess
from gemmery.emulator.trace.chosen import Chosen
from gemmery.report.pictures import divergence, sectors, tile, wavefronts
from gemmery.report.pictures.divergence import divergence_picture
from gemmery.report.pictures.sectors import sectors_picture
from gemmery.report.pictures.tile import tile_picture
from gemmery.report.pictures.wavefronts import wavefronts_picture
from gemmery.report.pictures.wording import quoted
from gemmery.report.svg import Plot, standalone

__all__ = ["divergence_picture", "files", "pictures", "sectors_picture", "tile_picture", "wavefronts_picture"]

READINGS = {
    "tile": tile.READING,
    "banks": wavefronts.READING,
    "sectors": sectors.READING,
    "lanes": divergence.READING,
}  # by the first word of a figure's name
EDGE = 16  # around a standalone picture


def pictures(
    chosen: Chosen, source: Mapping[str, str], prefix: str = "", explained: frozenset[str] = frozenset()
) -> tuple[Plot, ...]:
    """A figure for everything that was chosen; `source` gives the text of lines, `prefix` begins the figures' names.

    The first figure of each kind says how to read it, except of the kinds that are `explained` already.
    """
    drawn: tuple[tuple[str, Plot, tuple[WarpAccess | Divergence | None, ...]], ...] = (
        *(("tile", tile_picture(one, f"tile-{at}"), (one.store, one.load)) for at, one in enumerate(chosen.tiles, 1)),
        *(("banks", wavefronts_picture(one, f"banks-{at}"), (one,)) for at, one in enumerate(chosen.shared, 1)),
        *(("sectors", sectors_picture(one, f"sectors-{at}"), (one,)) for at, one in enumerate(chosen.global_, 1)),
        *(
            ("lanes", divergence_picture(one, source, f"lanes-{at}"), (one,))
            for at, one in enumerate(chosen.divergences, 1)
        ),
    )
    found, known = [], set(explained)
    for kind, plot, shown in drawn:
        reading = "" if kind in known else f" {READINGS[kind]}"
        known.add(kind)
        found.append(
            replace(plot, name=f"{prefix}{plot.name}", caption=plot.caption + quoted(source, *shown) + reading)
        )
    return tuple(found)


def files(rung: str, chosen: Chosen, source: Mapping[str, str]) -> dict[str, str]:
    """The same as standalone SVG files, by their names: "simt_smem-banks-1.svg"."""
    return {f"{plot.name}.svg": standalone(_edged(plot.svg)) for plot in pictures(chosen, source, f"{rung}-")}


def _edged(svg: str) -> str:
    """The same with some of its background around it."""
    view = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg)
    assert view, "every picture has a view box"
    width, height = float(view[1]) + 2 * EDGE, float(view[2]) + 2 * EDGE
    return svg.replace(view[0], f'viewBox="{-EDGE} {-EDGE} {width:g} {height:g}"')
