"""Measured winners by size of a product; written by benchmarks/tune_wgmma.py."""

from __future__ import annotations

# Multiprocessors of the device -> (bytes of an element of A and of C, layouts, size class), by `hopper.kind` and
# `hopper.size_class` -> bm, bn, stages, cm, cn, splits.
MEASURED: dict[int, dict[tuple[int, int, str, int, int, int], tuple[int, int, int, int, int, int]]] = {}
