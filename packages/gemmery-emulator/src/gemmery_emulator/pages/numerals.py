"""Numbers as text, with the same digits wherever one is shown."""

from __future__ import annotations

import math

WIDE = 0.2  # of a ratio: a spread from which on its range is shown


def digits(value: float) -> str:
    """Return three significant digits without an exponent.

    >>> [digits(value) for value in (0, 0.001234, 9.996, 117.4, 65078.2)]
    ['0', '0.00123', '10.0', '117', '65,078']
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    value = float(f"{value:.2e}") if abs(value) < 100 else value
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def amount(value: float, unit: str) -> str:
    """Return a quantity with a prefix up to G.

    >>> amount(137.4e9, "FLOP"), amount(16_384, "B"), amount(12, "B")
    ('137 GFLOP', '16.4 kB', '12 B')
    """
    for prefix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{digits(value / scale)} {prefix}{unit}"
    return f"{value:g} {unit}"


def duration(seconds: float) -> str:
    """Return seconds in a suitable unit.

    >>> duration(0.0123), duration(4.2e-8)
    ('12.3 ms', '42.0 ns')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{digits(seconds * scale)} {unit}"
    return f"{digits(seconds * 1e9)} ns"


def size(count: int) -> str:
    """Return bytes in a suitable unit: 32768 is "32 KiB"; 0 is "unknown"."""
    if not count:
        return "unknown"
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count / 1024**power:g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 wavefront`, `2 wavefronts`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def times(ratio: float | None, spread: float = 0.0, ranged: bool = True) -> str:
    """Return a speed-up: a difference smaller than its spread is marked as a tie, a wide spread is shown as a range.

    Without `ranged` there is no room for that.

    >>> times(2.5), times(1.01, 0.02), times(4.05, 0.95), times(None)
    ('2.50×', '~1.01×', '3.1–5×', '')
    """
    if ratio is None:
        return ""
    if ranged and spread >= WIDE * ratio and ratio > 0.01:
        low, high = (float(f"{end:.2g}") for end in (max(ratio - spread, 0.0), ratio + spread))
        return f"{low:g}–{high:g}×"
    return f"{'~' if abs(ratio - 1) <= spread else ''}{digits(ratio)}×"


def percent(part: float | None) -> str:
    """Return a fraction in percent, "" for None."""
    return "" if part is None else f"{100 * part:.{2 if part < 0.1 else 1}f}%"
