"""inspect() as Python and notebooks use it: what was found, displayed as the page that the command writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from html import escape

from gemmery import lab
from gemmery.lab.inspection import together
from gemmery.ladder import inspection
from gemmery.report.inspection import inspection_page, where
from gemmery.report.side_by_side import comparison_page


class Inspection(inspection.Inspection):
    """A rung for one problem on one device; a notebook displays it as a page with its pictures."""

    def __repr__(self) -> str:
        """One line, without the code of its kernels."""
        return f"<Inspection of {self.rung}: {where(self)}>"

    def _repr_html_(self) -> str:
        return _framed(inspection_page(self))


class Comparison(inspection.Comparison):
    """Two rungs for the same product on the same device; a notebook displays them side by side."""

    def __repr__(self) -> str:
        """One line, without the code of their kernels."""
        return f"<Comparison of {self.old.rung} and {self.new.rung}: {where(self.new, config=False)}>"

    def _repr_html_(self) -> str:
        return _framed(comparison_page(self))


def inspect(
    rung: str,
    other: str = "",
    *,
    m: int = 0,
    n: int = 0,
    k: int = 0,
    dtype: str = "",
    config: Mapping[str, int] | None = None,
    device: str = "",
    line: str = "",
) -> Inspection | Comparison:
    """What a rung of the GPU is made of and what each of its lines does to memory, or two rungs side by side.

    Exhibits are looked at likewise, with `n` elements. No GPU is needed. `m` and `k` are `n` unless said, which is
    4096; `device` is "cuda", a card ("a100") or an architecture ("sm_80"); the counters are taken on the emulator with
    sides of at most 256. `line`, "simt_smem.cu:18", chooses whose accesses are shown as pictures.

    >>> found = inspect("simt_smem", n=1024, device="h200")
    >>> found.kernels[-1].spilled, found.emulated.total.bank_conflicts
    (0, 0)

    Raises ArgumentError for an unknown rung, config or line, RefusedError where the rung does not take the product.
    """
    names = [rung, *([other] if other else [])]
    together(names)
    found = [lab.inspect(name, m, n, k, dtype, config, device, line) for name in names]
    if len(found) == 2:
        return Comparison(*found)
    return Inspection(**{one.name: getattr(found[0], one.name) for one in fields(found[0])})


def _framed(page: str) -> str:
    """A page inside another one, whose style stays its own."""
    return (
        f'<iframe srcdoc="{escape(page)}" title="gemmery inspect" style="width: 100%; height: 48rem; border: 0">'
        "</iframe>"
    )
