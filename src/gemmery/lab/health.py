"""doctor(): what this machine offers, what distorts it, and what to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `advice` says what to do and is "" when all is well."""

    name: str  # "cpu", "instruction set", "caches", "cores", "numpy blas", "environment", "cache folder", "torch", ...
    value: str
    ok: bool = True
    advice: str = ""


def doctor() -> tuple[Finding, ...]:
    """Look at the CPU, its caches and cores, NumPy's BLAS, the environment and the cache folder.

    >>> [finding.name for finding in doctor() if not finding.ok]  # doctest: +SKIP
    ['environment']
    """
    raise NotImplementedError
