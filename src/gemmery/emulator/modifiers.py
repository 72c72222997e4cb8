"""The modifiers that an instruction which accesses memory may have, and those that may be combined.

PTX ISA 9.0, "Data Movement and Conversion Instructions" and "Parallel Synchronization and Communication Instructions".
Like ptxas, these functions accept modifiers in any order, but only one of each kind. Caches are not modelled: their
modifiers are checked, and change neither a value nor a count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gemmery.emulator.op import NUMPY
from gemmery.emulator.ptx import Opcode

Kinds = Mapping[str, Collection[str]]  # "order" -> ("weak", "volatile", ...)

SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared::cluster",
    "local": "local",
    "const": "global",
    "param": "param",
    "param::entry": "param",
}
SCOPES = ("cta", "cluster", "gpu", "sys")
LENGTHS = {"v2": 2, "v4": 4, "v8": 8}
FETCHES = ("L2::64B", "L2::128B", "L2::256B")
POLICY = "L2::cache_hint"  # the last operand is a cache policy
HALVES = ("f16", "f16x2", "bf16", "bf16x2")
ORDERED = ("relaxed", "acquire", "release")
_EVICTIONS = ("evict_normal", "evict_unchanged", "evict_first", "evict_last")
_MOVED = {
    "type": (*(f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)), "f32", "f64"),
    "length": LENGTHS,
}
_ACCESSED: Kinds = {
    **_MOVED,
    "mmio": ("mmio",),
    "scope": SCOPES,
    "L1": (*(f"L1::{when}" for when in _EVICTIONS), "L1::no_allocate"),
    "L2": tuple(f"L2::{when}" for when in _EVICTIONS),
    "policy": (POLICY,),
}
ACCESSES: Mapping[str, Kinds] = {
    "ld": {
        **_ACCESSED,
        "space": SPACES,
        "order": ("weak", "volatile", "relaxed", "acquire"),
        "cache": ("ca", "cg", "cs", "lu", "cv"),
        "read-only": ("nc",),
        "fetch": FETCHES,
    },
    "st": {
        **_ACCESSED,
        "space": tuple(name for name, space in SPACES.items() if space != "param" and name != "const"),
        "order": ("weak", "volatile", "relaxed", "release"),
        "cache": ("wb", "cg", "cs", "wt"),
    },
    "ldu": {**_MOVED, "space": ("global",)},
}
_CHANGED: Kinds = {
    "type": (*(f"{kind}{bits}" for kind in "bus" for bits in (32, 64)), "b16", "f32", "f64", *HALVES),
    "operation": ("add", "min", "max", "and", "or", "xor", "inc", "dec"),
    "order": ("relaxed", "release"),
    "scope": SCOPES,
    "space": ("global", "shared", "shared::cta", "shared::cluster"),
    "noftz": ("noftz",),
    "length": LENGTHS,
    "policy": (POLICY,),
}
ATOMICS: Mapping[str, Kinds] = {
    "red": _CHANGED,
    "atom": {
        **_CHANGED,
        "operation": (*_CHANGED["operation"], "exch", "cas"),
        "order": ("relaxed", "acquire", "release", "acq_rel"),
    },
}
COPIES: Kinds = {"space": ("shared", "shared::cta"), "cache": ("ca", "cg"), "fetch": FETCHES, "policy": (POLICY,)}


@dataclass(frozen=True)
class Spelled:
    """A load or store, read from its opcode."""

    space: str  # "" for generic
    count: int  # elements
    kind: str  # of each, a PTX type
    policy: bool  # whether a cache policy follows the operands

    @property
    def width(self) -> int:
        """Bytes per thread."""
        return np.dtype(NUMPY[self.kind]).itemsize * self.count


def sorted_out(words: Sequence[str], kinds: Kinds) -> dict[str, str] | None:
    """Return the word of each kind; None if a word has no kind, or two words have the same.

    >>> sorted_out(["relaxed", "gpu"], {"order": ORDERED, "scope": SCOPES})
    {'order': 'relaxed', 'scope': 'gpu'}
    >>> sorted_out(["gpu", "sys"], {"order": ORDERED, "scope": SCOPES}) is None
    True
    """
    by_kind: dict[str, str] = {}
    for word in words:
        kind = next((kind for kind, known in kinds.items() if word in known), None)
        if kind is None or kind in by_kind:
            return None
        by_kind[kind] = word
    return by_kind


def access(opcode: Opcode) -> Spelled | None:
    """Read the opcode of ld, ldu or st; returns None if ptxas refuses it, or it is not modelled.

    >>> from gemmery.emulator.ptx.opcodes import opcode
    >>> access(opcode("ld.global.nc.v4.f32"))
    Spelled(space='global', count=4, kind='f32', policy=False)
    >>> access(opcode("ld.shared.nc.f32")) is None
    True
    """
    words = sorted_out((*opcode.modifiers, *opcode.types), ACCESSES[opcode.name])
    if words is None or "type" not in words:
        return None
    space = words.get("space", "")
    spelled = Spelled(SPACES.get(space, ""), LENGTHS.get(words.get("length", ""), 1), words["type"], "policy" in words)
    together = _in_order(words, space) and _cached(words, space) and _narrow(words, spelled)
    return spelled if together else None


def _in_order(words: Mapping[str, str], space: str) -> bool:
    """Memory order: it needs a scope and memory that other threads see, and excludes cache operations."""
    order = words.get("order", "weak")
    if (order in ORDERED) != ("scope" in words):
        return False
    if "mmio" in words and (order, words.get("scope", "")) != ("relaxed", "sys"):
        return False
    outside = space not in ("const", "local", "param", "param::entry") or (space, order) == ("local", "volatile")
    return order == "weak" or (outside and "cache" not in words)


def _cached(words: Mapping[str, str], space: str) -> bool:
    """Caches: hints need global memory, and .nc global memory that nothing writes."""
    if "read-only" in words and (space != "global" or "order" in words or words.get("cache") in ("cv", "lu")):
        return False
    if "cache" in words and "L1" in words:
        return False
    return space in ("", "global") or not {"L1", "L2", "fetch", "policy"} & set(words)


def _narrow(words: Mapping[str, str], spelled: Spelled) -> bool:
    """Sizes: at most 16 bytes, or on sm_100 32 bytes of global memory in words of 4 or 8; .L2:: needs the latter."""
    each = spelled.width // spelled.count
    wide = spelled.width == 32 and each >= 4 and spelled.space in ("", "global") and spelled.count > 2
    return wide or (spelled.width <= 16 and "L2" not in words)


def copy(opcode: Opcode) -> dict[str, str] | None:
    """Read the opcode of cp.async from global to shared memory, by kind; returns None if ptxas refuses it.

    >>> from gemmery.emulator.ptx.opcodes import opcode
    >>> copy(opcode("cp.async.cg.shared.global.L2::128B"))
    {'cache': 'cg', 'space': 'shared', 'fetch': 'L2::128B'}
    """
    spaces = [word for word in opcode.modifiers if word in SPACES]
    words = sorted_out([word for word in opcode.modifiers if word != "global"], COPIES)
    if words is None or opcode.types or "cache" not in words or spaces[1:] != ["global"] or "space" not in words:
        return None
    return words


def atomic(opcode: Opcode) -> dict[str, str] | None:
    """Read the opcode of atom or red, by kind; returns None if ptxas refuses it.

    >>> from gemmery.emulator.ptx.opcodes import opcode
    >>> atomic(opcode("red.global.add.v2.f32"))
    {'space': 'global', 'operation': 'add', 'length': 'v2', 'type': 'f32'}
    >>> atomic(opcode("red.exch.b32")) is None
    True
    """
    words = sorted_out((*opcode.modifiers, *opcode.types), ATOMICS[opcode.name])
    if words is None or "operation" not in words or "type" not in words:
        return None
    operation, kind, outside = words["operation"], words["type"], words.get("space", "global") == "global"
    halves = kind in HALVES
    most = {"f32": 4, "f16x2": 4, "bf16x2": 4, "f16": 8, "bf16": 8}.get(kind, 0)
    length = LENGTHS.get(words.get("length", ""), 1)
    if halves != ("noftz" in words) or (not outside and "policy" in words):
        return None
    if length == 1:
        return None if halves and operation != "add" else words
    return words if outside and length <= most and (halves or operation == "add") else None
