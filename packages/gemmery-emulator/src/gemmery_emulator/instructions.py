"""All instructions that are modeled: each file of them has a table, and stands here once; and how opcodes are read.

Also whether a program uses their results, or may throw them away: a shuffle at the end of a tree reads lanes outside
its mask, and a condition after it drops what they return, as in
`u = __shfl_down_sync(mask, v, 8); if (lane + 8 < count) v += u;`. Compilers compute the sum anyway and select.

An opcode is read as its name, modifiers and types, in one spelling: ptxas accepts modifiers in any order, and compilers
write them in several. The words that name an instruction come first, and types keep their order (PTX ISA 9.0,
"Instruction Statements").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from itertools import takewhile
from typing import TypeVar

from gemmery_emulator import access, atomics, call_stack, control, fragments, printing, textures
from gemmery_emulator.blackwell import tcgen05
from gemmery_emulator.control import BARRIERS
from gemmery_emulator.hopper import async_stores, cluster, mbarrier, transfers, wgmma
from gemmery_emulator.op import SPACES, Op, Traits
from gemmery_emulator.ops import convert, floating, integer, logic, warp
from gemmery_emulator.ptx import Instruction, Label, Opcode, PtxKernel, Register, Vector, names_of

Form = TypeVar("Form")
UNKNOWN = Traits()  # of an instruction that is not modeled


def merged(*tables: Mapping[str, Form]) -> dict[str, Form]:
    """Merge tables; raises ValueError for an instruction that two of them define."""
    merged: dict[str, Form] = {}
    for table in tables:
        twice = merged.keys() & table.keys()
        if twice:
            raise ValueError(f"{sorted(twice)} are defined twice: keep each instruction in one file")
        merged |= table
    return merged


# Instructions that only compute, by their full opcodes.
COMPUTED: dict[str, Op] = merged(*(file.TABLE for file in (integer, logic, floating, convert, warp)))
# Those that need the machine, by their names; barriers by their full opcodes.
OTHERS: dict[str, Traits] = merged(
    *(file.TABLE for file in (access, fragments, atomics, printing, call_stack, textures, control)),
    *(file.TABLE for file in (mbarrier, transfers, async_stores, wgmma, cluster, tcgen05)),
)
TABLE: dict[str, Traits] = merged(COMPUTED, OTHERS)


def find(opcode: Opcode) -> Traits:
    """Return what the table says of an instruction; UNKNOWN if it is not modeled."""
    return TABLE.get(opcode.spelling) or TABLE.get(opcode.name) or UNKNOWN


def written(instruction: Instruction) -> tuple[Register, ...]:
    """Return the registers that an instruction writes."""
    if not instruction.operands or not find(instruction.opcode).writes:
        return ()
    first = instruction.operands[0]
    parts = first.elements if isinstance(first, Vector) else (first,)
    return tuple(part for part in parts if isinstance(part, Register))


@lru_cache(maxsize=64)
def makers(kernel: PtxKernel) -> Mapping[str, list[int]]:
    """Return the instructions that write each register."""
    writers: dict[str, list[int]] = {}
    for index, instruction in enumerate(kernel.instructions):
        for register in written(instruction):
            writers.setdefault(register.name, []).append(index)
    return writers


def used(kernel: PtxKernel, index: int) -> tuple[bool, dict[int, bool]]:
    """Whether every way through the kernel uses the first result of an instruction, and the selections that may not.

    Selections, guarded instructions and conjunctions of predicates may leave a value out, and so may code that only
    one side of a branch executes. Selections are told by index, with whether the value is the first of the two.
    """
    first = names_of(kernel.instructions[index].operands[:1])[:1]
    selections: dict[int, bool] = {}
    answers: dict[tuple[int, frozenset[str]], bool] = {}

    def reaches(at: int, values: frozenset[str]) -> bool:
        """Whether all ways from an instruction use one of these registers."""
        while values and at < len(kernel.instructions):
            instruction = kernel.instructions[at]
            name = instruction.opcode.name
            if name == "bra":
                if instruction.guard is not None and instruction.guard.name in values:
                    return True
                if (at, values) in answers:
                    return answers[at, values]
                answers[at, values] = False  # a loop that does not use the values drops them
                ways = [kernel.labels[each.name] for each in instruction.operands if isinstance(each, Label)]
                ways += [at + 1] if instruction.guard is not None else []
                each_way = [reaches(way, values) for way in ways]  # all, for their selections
                answers[at, values] = all(each_way)
                return answers[at, values]
            if name in ("ret", "exit", "trap", "brx") and instruction.guard is None:
                return False
            if name == "selp" and instruction.guard is None:
                sources = [not values.isdisjoint(names_of([operand])) for operand in instruction.operands[1:3]]
                if sources[0] != sources[1]:
                    selections[at] = sources[0]
            after = _after(instruction, name, values)
            if after is None:
                return True
            at, values = at + 1, after
        return False

    return reaches(index + 1, frozenset(first)), selections


def stores(kernel: PtxKernel, index: int) -> frozenset[int]:
    """The stores that some way through the kernel may give a value computed from the first result of an instruction."""
    values = set(names_of(kernel.instructions[index].operands[:1])[:1])
    count = 0
    while count < len(values):
        count = len(values)
        for instruction in kernel.instructions:
            if not find(instruction.opcode).effect and not values.isdisjoint(names_of(instruction.operands[1:])):
                values.update(register.name for register in written(instruction))
    return frozenset(
        place
        for place, instruction in enumerate(kernel.instructions)
        if instruction.opcode.name == "st" and not values.isdisjoint(names_of(instruction.operands[1:]))
    )


def _after(instruction: Instruction, name: str, values: frozenset[str]) -> frozenset[str] | None:
    """The registers that hold the value after an instruction; None if the instruction uses it."""
    results = {register.name for register in written(instruction)}
    sources = instruction.operands[1:] if results else instruction.operands
    if instruction.guard is not None:
        return None if instruction.guard.name in values else values
    may_drop = name == "selp" or (name in ("and", "or") and instruction.opcode.type == "pred")
    reads = not values.isdisjoint(names_of(sources[-1:] if name == "selp" else () if may_drop else sources))
    if reads and (name == "selp" or find(instruction.opcode).effect):
        return None
    return values | results if reads else values - results


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
