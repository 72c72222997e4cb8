"""Any array as a View of its memory, and results of the kind that was given."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class View:
    """Memory of an array: where it starts, its shape, its strides in bytes (any sign, 0 for broadcasting)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # gemmery's name: "f32"
    device: str = "cpu"
    stream: int = 0
    writable: bool = True
    owner: object = field(default=None, compare=False, repr=False)  # keeps the memory alive
