"""Pictures of what a warp does to memory, as figures of a page: drawn from plain data, without scripts."""

from gemmery.report.pictures.divergence import divergence_picture
from gemmery.report.pictures.sectors import sectors_picture
from gemmery.report.pictures.tile import tile_picture
from gemmery.report.pictures.wavefronts import wavefronts_picture

__all__ = ["divergence_picture", "sectors_picture", "tile_picture", "wavefronts_picture"]
