"""A wrong version of a kernel, made by one edit that tests must detect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmery.cuda import nvrtc

EVEN = (40, 48, 40)


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs once in `file` of kernels/, becomes `new`; `rung` runs it."""

    rung: str
    file: str
    old: str
    new: str
    why: str  # what is wrong
    config: Mapping[str, int] = field(default_factory=dict)
    shape: tuple[int, int, int] = (40, 45, 43)  # m, n, k
    name: str = "f32"  # element type
    out: str = ""  # that of the result, if another
    epilogue: str = ""
    layouts: tuple[str, str, str] = ("row", "row", "row")
    batch: int = 1
    survives: str = ""  # why no run can distinguish it from the kernel

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


def of(rung: str, *rows: tuple[str, str, str, str], **problem: Any) -> tuple[Mutant, ...]:
    """Return mutants of a rung by file, old text, new text and reason; all for one problem."""
    return tuple(Mutant(rung, *row, **problem) for row in rows)


def edited(file: str, old: str, new: str) -> dict[str, str]:
    """Return the text of a kernel's file with one edit, by name; `old` must stand in it once."""
    text = nvrtc.headers().get(file) or nvrtc.text(file)
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
    return {file: text.replace(old, new)}
