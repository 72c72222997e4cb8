"""Modifiers by their kind: state spaces, memory orders and scopes, lengths of vectors, hints to caches.

PTX ISA 9.0, "Data Movement and Conversion Instructions" and "Parallel Synchronization and Communication Instructions".
Like ptxas, instructions accept modifiers in any order, but only one of each kind. Caches are not modelled: their
modifiers are checked, and change neither a value nor a count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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
ORDERED = ("relaxed", "acquire", "release")


def sort_by_kind(words: Sequence[str], kinds: Kinds) -> dict[str, str] | None:
    """Return the word of each kind; None if a word has no kind, or two words have the same.

    >>> sort_by_kind(["relaxed", "gpu"], {"order": ORDERED, "scope": SCOPES})
    {'order': 'relaxed', 'scope': 'gpu'}
    >>> sort_by_kind(["gpu", "sys"], {"order": ORDERED, "scope": SCOPES}) is None
    True
    """
    by_kind: dict[str, str] = {}
    for word in words:
        kind = next((kind for kind, known in kinds.items() if word in known), None)
        if kind is None or kind in by_kind:
            return None
        by_kind[kind] = word
    return by_kind
