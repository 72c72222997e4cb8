"""Read an opcode: its name, modifiers and types, in one spelling.

ptxas accepts modifiers in any order, and compilers write them in several. The words that name an instruction come
first, and types keep their order (PTX ISA 9.0, "Instruction Statements").
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from itertools import takewhile

from gemmery_emulator.control import BARRIERS
from gemmery_emulator.instructions import COMPUTED, OTHERS
from gemmery_emulator.op import SPACES
from gemmery_emulator.ptx import Opcode

# Words that must come before all others: mul.lo, shf.l, cp.async.bulk.
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
        *("", r"[1-5]d", "ca|cg", "L2", _SPACE, "add", "tile", "mbarrier::.*", "multicast.*", "cta_group.*"),
        *("bulk_group", "L2::.*", _TYPE),
    ),
    "fence": ("", "sc|acq_rel|acquire|release", "sync_restrict.*", "cta|cluster|gpu|sys"),
    "barrier": ("", "acquire|release|relaxed", "aligned"),
    "prefetch": (_SPACE, ""),
    "applypriority": (_SPACE, ""),
}
_PLAIN = ("", _TYPE)


@lru_cache(maxsize=4096)
def opcode(text: str) -> Opcode:
    """Read an opcode; an unknown one is read in the same way.

    >>> read = opcode("cp.async.shared.global.cg")
    >>> read.name, read.modifiers, str(read)
    ('cp.async', ('cg', 'shared', 'global'), 'cp.async.cg.shared.global')
    """
    spelling = canonical(text)
    family, lead, words = _parted(spelling)
    if not set(words).isdisjoint(_LEADS.get(family, ())):  # cvta.u64.to.global: no instruction has this name
        return Opcode(spelling, (), (), spelling, spelling, "")
    words = [*lead, *words]
    length = len(list(takewhile(lambda word: word in _naming().get(family, ()), words)))
    name, others = ".".join((family, *words[:length])), words[length:]
    types = tuple(word for word in others if _IN_TURN[0].fullmatch(word))
    rest = tuple(word for word in others if word not in types)
    space = next((word for word in rest if word in SPACES), "")
    return Opcode(name, rest, types, spelling, family, space.removesuffix("::cta").removesuffix("::entry"))


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    """Return an opcode as the tables and the manual spell it; for an unknown one, types come last.

    >>> canonical("ldmatrix.sync.aligned.x4.m8n8.shared.b16"), canonical("add.f32.ftz.rn")
    ('ldmatrix.sync.aligned.m8n8.x4.shared.b16', 'add.rn.ftz.f32')
    """
    if text in COMPUTED or "." not in text:
        return text
    name, lead, words = _parted(text)
    if name in _spelled():
        known = _known(name).get(_key(name, lead, words))
        if known is not None:
            return known
    if any(word in _LEADS.get(name, ()) for word in words) or (name in _spelled() and name not in _ORDERS):
        return text
    order = _ORDERS.get(name, _PLAIN)
    return ".".join((name, *lead, *sorted(words, key=lambda word: _place(order, word))))


def _parted(text: str) -> tuple[str, list[str], list[str]]:
    """Split an opcode into its first word, the others that belong to the name, and the rest."""
    name, *words = text.split(".")
    lead = list(takewhile(lambda word: word in _LEADS.get(name, ()), words))
    return name, lead, words[len(lead) :]


def _place(order: tuple[str, ...], word: str) -> int:
    places = (place for place, pattern in enumerate(order) if pattern and re.fullmatch(pattern, word))
    return next(places, order.index(""))


SpellingKey = tuple[tuple[str, ...], ...]


def _key(name: str, lead: list[str], words: list[str]) -> SpellingKey:
    """Return a key that all spellings of an opcode share: name, types and layouts in order, sorted modifiers."""
    in_turn = [tuple(word for word in words if pattern.fullmatch(word)) for pattern in _IN_TURN]
    others = sorted(word for word in words if not any(word in some for some in in_turn))
    return (name, *lead), *in_turn, tuple(others)


@cache
def _naming() -> dict[str, set[str]]:
    """The words that with the first one name an instruction, as in cp.async.bulk."""
    families: dict[str, set[str]] = {}
    for name in OTHERS.keys() - BARRIERS.keys():
        family, *words = name.split(".")
        families.setdefault(family, set()).update(words)
    return families


@cache
def _spelled() -> dict[str, list[str]]:
    """All opcodes that compute and those of barriers, by their first word."""
    families: dict[str, list[str]] = {}
    for spelling in (*COMPUTED, *BARRIERS):
        families.setdefault(spelling.partition(".")[0], []).append(spelling)
    return families


@cache
def _known(name: str) -> dict[SpellingKey, str]:
    """The opcodes with this first word, by their keys."""
    return {_key(*_parted(spelling)): spelling for spelling in _spelled()[name]}
