"""Measured winners by size of a product; written by benchmarks/tune_wgmma.py."""

from __future__ import annotations

# Multiprocessors of the device -> (bytes of an element, layouts, size class of `hopper`)
# -> bm, bn, stages, cm, cn, splits.
MEASURED: dict[int, dict[tuple[int, str, int, int, int], tuple[int, int, int, int, int, int]]] = {}
