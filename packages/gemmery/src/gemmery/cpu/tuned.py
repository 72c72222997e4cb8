"""The constants by which products are cut into blocks and for threads and rungs are chosen: a model's, or a table's.

`gemmery tune` measures them and writes a table, in the format of Kernel Tuner's caches with an object "gemmery" added:
the machine, and the constants that replace the model's. No constant changes the order of a sum, so no bit of a result
depends on a table: kc and the register tile are not in it.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import Any

from gemmery import config
from gemmery.cpu.target import Target, cores, host, tile
from gemmery.errors import GemmeryError, brief
from gemmery.tuples import NamedTuple

LAYOUT = 1  # of a table: another number where a field means something else
_MOST = 1 << 20  # bytes of a table that are read
_SHIPPED = os.path.join(os.path.dirname(__file__), "tables")


class Constants(NamedTuple):
    """The constants, with the defaults of the model."""

    mc: int  # rows and columns of the blocks of the packed product, without the tile unit
    nc: int
    # Times L2, from which on reading an unpacked B is slow: a tile that runs down k jumps one row per step. Few rows of
    # A read B once and tolerate a larger one; many rows read it again and again.
    direct_few: float = 2.0
    direct_many: float = 1.0
    # Rows of A up to which reading B once, as streams, beats packing it: m = 128 of 2048 x 2048, f32, Zen 4: 109
    # GFLOP/s streamed, 98 packed; see docs/findings/few_rows_on_a_cpu.md.
    streamed_rows: int = 160
    large_c: float = 4.0  # times L2, from which writing C takes longest in a product with small k
    # ns of work for which a thread is worth waking: a futex wake and scheduling take 5 to 50 us. If a thread comes
    # late, the others have done its parts.
    worth: int = 8_000
    wakes: int = 100_000  # total ns of work for which a single product wakes sleepers
    read: float = 16.0  # bytes that one core loads in a ns from L3 or memory: 10 to 25, by the CPU


LIMITS = {  # the least and the largest value of each that a table may have
    "mc": (4, 1 << 14), "nc": (64, 1 << 20), "direct_few": (0.01, 1000), "direct_many": (0.01, 1000),
    "streamed_rows": (8, 1 << 14), "large_c": (0.01, 10_000), "worth": (100, 1e9), "wakes": (0, 1e9),
    "read": (0.1, 10_000),
}  # fmt: skip
# Intel's cores prefetch within a page, so not down k: f32 with a 2 MiB L2, direct and packed, GFLOP/s:
# 243, 215 at n = 384; 185, 213 at 512; 62, 207 at 1024, where all rows map to one L1 set.
_DIRECT_MANY_INTEL = 0.375


def model(target: Target) -> Constants:
    """Return the constants that serve without a table."""
    sizes = tile(target)
    many = _DIRECT_MANY_INTEL if "Intel" in target.cpu else 1.0
    return Constants(sizes.mc, sizes.nc, direct_many=many)


class Table(NamedTuple):
    """The constants of a CPU, and the file that they are from; a file that is not used, and what to do about it."""

    constants: Constants
    path: str = ""  # "" for the model
    ignored: str = ""


override: Constants | None = None  # those in force while `gemmery tune` plans products


def constants(target: Target | None = None) -> Constants:
    """Return the constants of a CPU, by default of this one."""
    return override or table(target or host()).constants


@cache
def table(target: Target) -> Table:
    """Return the table of a CPU, read once: the user's, else one of the package, else the model.

    A table that cannot be used gives a warning and is ignored.
    """
    ignored = ""
    for path in _places(target):
        try:
            with open(path, encoding="utf-8") as file:
                return Table(read(file.read(_MOST), target), path, ignored)
        except FileNotFoundError:
            if path != config.table():
                continue
            why = "there is no such file"
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        ignored = f"{path} is ignored: {why}. `gemmery tune` measures a new table; GEMMERY_TABLE=off needs none"
        import warnings

        warnings.warn(ignored, RuntimeWarning, stacklevel=2)
    return Table(model(target), "", ignored)


def _places(target: Target) -> list[str]:
    """Return the files in which the table of a CPU may be, in the order in which they are tried."""
    chosen = config.table()
    if chosen:
        return [] if chosen == "off" else [chosen]
    try:
        own = [place(target)]
    except GemmeryError:  # there is no home folder
        own = []
    return [*own, os.path.join(_SHIPPED, f"{name(target)}.json")]


def place(target: Target) -> str:
    """Return the file of a CPU in the user's data folder. Raises ArgumentError where there is no home folder."""
    return os.path.join(config.data_dir(), "tables", f"{name(target)}.json")


def name(target: Target) -> str:
    """Return the name of a table: one for each model of CPU, instruction set and number of cores.

    >>> name(Target("avx2", frozenset(), "Intel(R) Core(TM) i7-8700 CPU")).startswith(
    ...     "intel-r-core-tm-i7-8700-cpu-avx2"
    ... )
    True
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{target.cpu or target.machine} {target.isa} {cores()}c".lower()).strip("-")


def machine(target: Target) -> dict[str, Any]:
    """Return what a table is for: it serves where all of this is equal."""
    version = sys.modules["gemmery"].__version__
    own = {"cpu": target.cpu, "isa": target.isa, "cores": cores(), "l1d": target.l1d, "l2": target.l2, "l3": target.l3}
    return {"layout": LAYOUT, "version": version, **own}


def read(text: str, target: Target) -> Constants:
    """Return the model's constants with those of a table's text in their place.

    Raises ValueError, with the reason, for a table that is damaged, or for another version or machine.
    """
    import json  # 1 ms, so not without a table

    try:
        own = json.loads(text)["gemmery"]
        found, changed = own["machine"], dict(own["constants"])
        other = [f"{key} {found[key]}, not {value}" for key, value in machine(target).items() if found[key] != value]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {brief(str(error))})") from None
    if other:
        raise ValueError(f"it is for {'; '.join(other)}")
    usual = model(target)
    for key, value in changed.items():
        least, most = LIMITS.get(key, (1, 0))
        whole = isinstance(getattr(usual, key, 0.0), int) and not isinstance(value, int)
        if isinstance(value, bool) or not isinstance(value, int | float) or whole or not least <= value <= most:
            raise ValueError(f"it is damaged: {brief(key)} is {brief(value)}")
    return usual._replace(**changed)
