"""The pictures of the documents, drawn by the emulator: `python -m site_pages.pictures` in a checkout updates them."""

from __future__ import annotations

import sys
from pathlib import Path

from gemmery.errors import DeviceError
from gemmery_emulator.pages.pictures import files
from gemmery_emulator.pages.writing import write_page
from gemmery_lab.inspection.gather import inspect_rung

FOLDER = Path("docs", "pictures")
SHOWN = {  # picture of a document -> rung or exhibit, and which of its pictures
    "bank_conflicts": ("simt_vectorized", "banks-1"),
    "bank_conflicts_padded": ("simt_padded", "banks-1"),
    "swizzled_tile": ("mma_ldmatrix", "tile-1"),
    "divergence": ("divergence_split", "lanes-1"),
    "swizzled_copy": ("wgmma_tma", "swizzle-1"),
    "swizzled_copy_by_rows": ("wgmma_tma", "swizzle-2"),
    "barriers": ("wgmma_specialized", "barriers-1"),
    "barriers_epilogue": ("wgmma_epilogue", "barriers-1"),
}


def drawn() -> dict[str, str]:
    """The pictures by the names of their files. Raises DeviceError where NVRTC is not installed."""
    texts = {}
    for name, (rung, picture) in SHOWN.items():
        run = inspect_rung(rung, device="h200").emulated
        assert run is not None, f"{rung} is not emulated"
        texts[f"{name}.svg"] = files(rung, run.chosen, run.source)[f"{rung}-{picture}.svg"]
    return texts


if __name__ == "__main__":
    try:
        for file, text in drawn().items():
            sys.stdout.write(f"picture: {write_page(FOLDER / file, text, '--svg')}\n")
    except DeviceError as error:
        sys.stderr.write(f"gemmery: the pictures in {FOLDER} stay as they are: {error}\n")
