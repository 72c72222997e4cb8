"""One spelling for each opcode: ptxas accepts modifiers in any order, and compilers write them in several.

The words that name an instruction come first, and types keep their order (PTX ISA 9.0, "Instruction Statements").
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from itertools import takewhile

from gemmery.emulator import barriers, ops

# Words that belong to the name, which must come before all others: mul.lo, shf.l, cp.async.bulk.
_LEADS = {
    **dict.fromkeys(("mul", "mad", "mul24", "mad24", "madc", "dp2a"), ("lo", "hi", "wide")),
    "shf": ("l", "r"),
    "div": ("full",),
    "cvt": ("pack",),
    "cvta": ("to",),
    "bar": ("warp", "cta"),
    "barrier": ("cta", "cluster", "arrive", "wait"),
    "cp": ("reduce", "async", "bulk", "prefetch", "tensor", "mbarrier", "arrive"),
    "wmma": ("load", "store", "mma", "a", "b", "c", "d"),
}
_TYPE = r"(?:[busf]\d+|bf16|tf32|[ef]\d+m\d+|pred)(?:x2|x4)?"
_SPACE = r"(?:global|shared|local|const|param)(?:::\w+)?"
_SHAPE = r"m\d+n\d+(?:k\d+)?"
_IN_TURN = (re.compile(_TYPE), re.compile("row|col"))  # words whose order matters
# The order of modifiers, by the first word of the opcode; "" stands for all words that no other pattern matches.
_ORDERS = {
    "ldmatrix": ("sync", "aligned", _SHAPE, r"x\d", "trans", _SPACE, ""),
    "stmatrix": ("sync", "aligned", _SHAPE, r"x\d", "trans", _SPACE, ""),
    "wmma": ("sync", "aligned", "row|col", _SHAPE, _SPACE, ""),
    "wgmma": ("", "sync", "aligned", _SHAPE, _TYPE, "satfinite"),
    "cp": (
        *("", r"[1-5]d", "ca|cg", "L2", _SPACE, "add", "tile", "mbarrier::.*", "multicast.*", "bulk_group"),
        *("L2::.*", _TYPE),
    ),
    "fence": ("", "sc|acq_rel|acquire|release", "sync_restrict.*", "cta|cluster|gpu|sys"),
    "barrier": ("", "acquire|release|relaxed", "aligned"),
    "prefetch": (_SPACE, ""),
    "applypriority": (_SPACE, ""),
}
_PLAIN = ("", _TYPE)


@lru_cache(maxsize=4096)
def canonical(opcode: str) -> str:
    """Return an opcode as the tables and the manual spell it; for an unknown one, types come last.

    >>> canonical("ldmatrix.sync.aligned.x4.m8n8.shared.b16"), canonical("add.f32.ftz.rn")
    ('ldmatrix.sync.aligned.m8n8.x4.shared.b16', 'add.rn.ftz.f32')
    """
    if opcode in ops.TABLE or "." not in opcode:
        return opcode
    name, lead, words = _parted(opcode)
    if name in _spelled():
        found = _known(name).get(_key(name, lead, words))
        if found is not None:
            return found
    if any(word in _LEADS.get(name, ()) for word in words) or (name in _spelled() and name not in _ORDERS):
        return opcode
    order = _ORDERS.get(name, _PLAIN)
    return ".".join((name, *lead, *sorted(words, key=lambda word: _place(order, word))))


def _parted(opcode: str) -> tuple[str, list[str], list[str]]:
    """Split an opcode into its first word, the others that belong to the name, and the rest."""
    name, *words = opcode.split(".")
    lead = list(takewhile(lambda word: word in _LEADS.get(name, ()), words))
    return name, lead, words[len(lead) :]


def _place(order: tuple[str, ...], word: str) -> int:
    named = (place for place, pattern in enumerate(order) if pattern and re.fullmatch(pattern, word))
    return next(named, order.index(""))


Key = tuple[tuple[str, ...], ...]


def _key(name: str, lead: list[str], words: list[str]) -> Key:
    """Return a key that all spellings of an opcode share: name, types and layouts in order, sorted modifiers."""
    in_turn = [tuple(word for word in words if pattern.fullmatch(word)) for pattern in _IN_TURN]
    others = sorted(word for word in words if not any(word in some for some in in_turn))
    return (name, *lead), *in_turn, tuple(others)


@cache
def _spelled() -> dict[str, list[str]]:
    """All opcodes that compute and those of barriers, by their first word."""
    found: dict[str, list[str]] = {}
    for opcode in (*ops.TABLE, *barriers.SYNC, *barriers.ARRIVE, *barriers.REDUCTIONS):
        found.setdefault(opcode.partition(".")[0], []).append(opcode)
    return found


@cache
def _known(name: str) -> dict[Key, str]:
    """The opcodes with this first word, by their keys."""
    return {_key(*_parted(opcode)): opcode for opcode in _spelled()[name]}
