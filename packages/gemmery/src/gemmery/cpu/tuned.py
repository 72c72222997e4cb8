"""Tables of `gemmery tune`: the constants that were measured on a machine, which replace those of the model.

A table is a file in the format of Kernel Tuner's caches with an object "gemmery" added: the machine, and the constants.
This module is imported where there is one.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from gemmery import config
from gemmery.errors import brief
from gemmery.tuples import NamedTuple

LAYOUT = 2  # of a table: another number where a field means something else; 1 told CPUs apart by their names
_MOST = 1 << 20  # bytes of a table that are read
LIMITS = {  # the least and the largest value of each that a table may have
    "mc": (4, 1 << 14), "nc": (64, 1 << 20), "direct_few": (0.01, 1000), "direct_many": (0.01, 1000),
    "streamed_rows": (8, 1 << 14), "large_c": (0.01, 10_000), "worth": (100, 1e9), "wakes": (0, 1e9),
    "direct_int8": (1, 1 << 30), "direct_int16": (1, 1 << 30),
}  # fmt: skip


class TunedTable(NamedTuple):
    """What a file says: constants, and its path; `ignored` names a file that is not used, why, and what to do."""

    constants: dict[str, Any]  # numbers
    path: str = ""  # "" for the model
    ignored: str = ""


def table(machine: Mapping[str, Any], usual: Mapping[str, float]) -> TunedTable:
    """Return the table of a machine, the user's or else one of the package; without one there are no constants.

    `usual` are those of the model.
    """
    ignored = ""
    for path in _places(machine):
        try:
            with open(path, encoding="utf-8") as file:
                return TunedTable(read(file.read(_MOST), machine, usual), path, ignored)
        except FileNotFoundError:
            if path != config.table():
                continue
            why = "there is no such file"
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        ignored = _ignored(path, why)
    old = next((path for path in older(machine) if not config.table() and os.path.exists(path)), "")
    if old and not ignored:
        ignored = _ignored(old, f"CPUs of several models are called {brief(machine['cpu'])}, and it does not say which")
    return TunedTable({}, "", ignored)


def _ignored(path: str, why: str) -> str:
    return f"{path} is ignored: {why}. `gemmery tune` measures a new table; GEMMERY_TABLE=off needs none"


def _places(machine: Mapping[str, Any]) -> list[str]:
    """Return the files in which the table of a machine may be, in the order in which they are tried."""
    choice = config.table()
    if choice:
        return [] if choice == "off" else [choice]
    return [os.path.join(folder, name(machine)) for folder in config.table_folders()]


def older(machine: Mapping[str, Any]) -> list[str]:
    """Return the files that had the table of a machine in layout 1."""
    words = f"{machine['cpu']} {machine['isa']} {machine['cores']}c"
    return [os.path.join(folder, _file(words)) for folder in config.table_folders()]


def name(machine: Mapping[str, Any]) -> str:
    """Return the name of the file of a table: one for each model of CPU, its instructions and number of cores.

    >>> name({"model": "GenuineIntel 6 207", "isa": "avx512", "instructions": "avx512_vnni avx512_bf16", "cores": 2})
    'genuineintel-6-207-avx512-vnni-bf16-2c.json'
    """
    instructions = " ".join(word.removeprefix(f"{machine['isa']}_") for word in machine["instructions"].split())
    return _file(f"{machine['model']} {machine['isa']} {instructions} {machine['cores']}c")


def _file(words: str) -> str:
    return f"{re.sub('[^a-z0-9]+', '-', words.lower()).strip('-')}.json"


def versioned(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table is for: it serves where all of this is equal, but for the CPU's name, which may differ.

    Its `stepping` is the first and the last of a range.
    """
    stepping = machine["stepping"]
    return {"layout": LAYOUT, "version": sys.modules["gemmery"].__version__, **machine, "stepping": [stepping] * 2}


def read(text: str, machine: Mapping[str, Any], usual: Mapping[str, float]) -> dict[str, Any]:
    """Return the constants of a table's text.

    Raises ValueError, with the reason, for a table that is damaged, or for another version or machine.
    """
    try:
        own = json.loads(text)["gemmery"]
        of, constants = own["machine"], dict[str, Any](own["constants"])
        other = [f"layout {of['layout']}, not {LAYOUT}"] if of["layout"] != LAYOUT else _other(of, machine)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {brief(str(error))})") from None
    if other:
        raise ValueError(f"it is for {'; '.join(other)}")
    for key, value in constants.items():
        least, most = LIMITS.get(key, (1, 0))
        whole = isinstance(usual.get(key), int) and not isinstance(value, int)
        if isinstance(value, bool) or not isinstance(value, int | float) or whole or not least <= value <= most:
            raise ValueError(f"it is damaged: {brief(key)} is {brief(value)}")
    return constants


def _other(of: Mapping[str, Any], machine: Mapping[str, Any]) -> list[str]:
    """Return in words what a table is for that differs from a machine. Raises KeyError, TypeError, ValueError."""
    (first, last), stepping = of["stepping"], machine["stepping"]
    same = {**versioned(machine), "cpu": of["cpu"], "stepping": of["stepping"]}
    other = [f"{key} {of[key]}, not {value}" for key, value in same.items() if of[key] != value]
    return other + ([] if first <= stepping <= last else [f"steppings {first} to {last}, not {stepping}"])
