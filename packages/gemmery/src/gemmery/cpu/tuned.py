"""Tables of `gemmery tune`: the constants that were measured on a machine, which replace those of the model.

A table is a file in the format of Kernel Tuner's caches with an object "gemmery" added: the machine, and the constants.
This module is imported where there is one.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import Any

from gemmery import config
from gemmery.cpu.target import Constants, Target, cores, modelled
from gemmery.errors import brief
from gemmery.tuples import NamedTuple

LAYOUT = 1  # of a table: another number where a field means something else
_MOST = 1 << 20  # bytes of a table that are read
LIMITS = {  # the least and the largest value of each that a table may have
    "mc": (4, 1 << 14), "nc": (64, 1 << 20), "direct_few": (0.01, 1000), "direct_many": (0.01, 1000),
    "streamed_rows": (8, 1 << 14), "large_c": (0.01, 10_000), "worth": (100, 1e9), "wakes": (0, 1e9),
}  # fmt: skip


class Table(NamedTuple):
    """The constants of a CPU, and the file that they are from; a file that is not used, and what to do about it."""

    constants: Constants
    path: str = ""  # "" for the model
    ignored: str = ""


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
    return Table(modelled(target), "", ignored)


def _places(target: Target) -> list[str]:
    """Return the files in which the table of a CPU may be, in the order in which they are tried."""
    chosen = config.table()
    if chosen:
        return [] if chosen == "off" else [chosen]
    return [os.path.join(folder, name(target)) for folder in config.table_folders()]


def name(target: Target) -> str:
    """Return the name of the file of a table: one for each model of CPU, instruction set and number of cores.

    >>> name(Target("avx2", frozenset(), "Intel(R) Core(TM) i7-8700 CPU")).partition("-avx2-")[0]
    'intel-r-core-tm-i7-8700-cpu'
    """
    words = f"{target.cpu or target.machine} {target.isa} {cores()}c"
    return f"{re.sub('[^a-z0-9]+', '-', words.lower()).strip('-')}.json"


def machine(target: Target) -> dict[str, Any]:
    """Return what a table is for: it serves where all of this is equal."""
    version = sys.modules["gemmery"].__version__
    own = {"cpu": target.cpu, "isa": target.isa, "cores": cores(), "l1d": target.l1d, "l2": target.l2, "l3": target.l3}
    return {"layout": LAYOUT, "version": version, **own}


def read(text: str, target: Target) -> Constants:
    """Return the model's constants with those of a table's text in their place.

    Raises ValueError, with the reason, for a table that is damaged, or for another version or machine.
    """
    import json

    try:
        own = json.loads(text)["gemmery"]
        found, changed = own["machine"], dict(own["constants"])
        other = [f"{key} {found[key]}, not {value}" for key, value in machine(target).items() if found[key] != value]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {brief(str(error))})") from None
    if other:
        raise ValueError(f"it is for {'; '.join(other)}")
    usual = modelled(target)
    for key, value in changed.items():
        least, most = LIMITS.get(key, (1, 0))
        whole = isinstance(getattr(usual, key, 0.0), int) and not isinstance(value, int)
        if isinstance(value, bool) or not isinstance(value, int | float) or whole or not least <= value <= most:
            raise ValueError(f"it is damaged: {brief(key)} is {brief(value)}")
    return usual._replace(**changed)
