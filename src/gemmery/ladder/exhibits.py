"""The exhibits: small kernels that show one effect of the hardware each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from gemmery.cuda import exhibits
from gemmery.cuda.exhibits import Config, Show
from gemmery.errors import ArgumentError


@dataclass(frozen=True)
class Exhibit:
    """One effect, shown by one kernel, next to its parent's where there is one."""

    name: str
    idea: str  # the effect, in one line
    lesson: str
    source: str  # the kernel's file in the package
    show: Show
    parent: str | None = None
    space: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    default: Config = field(default_factory=dict)
    expect: Mapping[str, int] = field(default_factory=dict)  # counters at the default, by the rules

    def configs(self) -> tuple[Config, ...]:
        """The default with every value of the space in turn, one key varied at a time."""
        varied = [{**self.default, key: value} for key, values in self.space.items() for value in values]
        return tuple({tuple(sorted(config.items())): config for config in [dict(self.default), *varied]}.values())


@dataclass(frozen=True)
class EmulatedExhibit:
    """One launch of an exhibit's kernel on the emulator, over `n` elements."""

    name: str
    config: Config
    n: int
    arch: str  # what it was compiled for
    predicted: Mapping[str, int]  # by the rules
    counted: Mapping[str, int]  # the same counters, of the kernel's PTX
    error: float  # 0 when every element of the result is what it must be; above 1 otherwise
    findings: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is wrong with it, a line each: the result, a finding, a counter that is not as predicted."""
        inexact = (f"gives {self.error - 1:.0f} wrong elements",) if self.error else ()
        unmet = tuple(
            f"has {self.counted[name]:,} {name.replace('_', ' ')}, not the {value:,} predicted"
            for name, value in self.predicted.items()
            if self.counted[name] != value
        )
        return (*inexact, *(f"has a finding at {one}" for one in self.findings), *unmet)


def find(name: str) -> Exhibit:
    """The exhibit called `name`; an unknown name is an ArgumentError that lists the known ones."""
    for exhibit in EXHIBITS:
        if exhibit.name == name:
            return exhibit
    known = [one.name for one in EXHIBITS]
    close = get_close_matches(name, known, 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise ArgumentError(f"exhibit {name!r} is not known; {meant}known: {', '.join(known)}")


EXHIBITS = (
    Exhibit(
        name="divergence_split",
        idea="the lanes of one warp take two ways: threadIdx.x > 15",
        lesson=(
            "A warp has one instruction at a time. When its lanes disagree, it walks both ways one after the other, "
            "half of its lanes idle on each: twice the time for the same work."
        ),
        source="cuda/kernels/divergence_split.cu",
        show=exhibits.SPLIT,
        default={"steps": 1024},
        expect={"divergent_branches": 1 << 17},
    ),
    Exhibit(
        name="divergence_warp",
        idea="two warps take one way each: threadIdx.x > warpSize - 1",
        lesson=(
            "The same two ways, but the border lies between two warps: no warp has lanes that disagree, and none "
            "waits. Where threads must differ, let them differ by warps."
        ),
        source="cuda/kernels/divergence_warp.cu",
        show=exhibits.WHOLE,
        parent="divergence_split",
        default={"steps": 1024},
        expect={"divergent_branches": 0},
    ),
    Exhibit(
        name="reduce_adjacent",
        idea="a sum by a tree, partners next to each other",
        lesson=(
            "At the first five levels every warp of the block still works, with ever fewer of its lanes: a warp with "
            "one lane costs as much as one with 32."
        ),
        source="cuda/kernels/reduce_adjacent.cu",
        show=exhibits.ADJACENT,
        space={"threads": (64, 128, 256, 512, 1024)},
        default={"threads": 256},
    ),
    Exhibit(
        name="reduce_strided",
        idea="a sum by a tree, partners half of what is left apart",
        lesson=(
            "The first half of the threads adds, then the first quarter: whole warps retire at every level, and only "
            "the last five levels leave a warp partly idle. How much that saves depends on what else a level costs: "
            "compare the two times, and then the one by shuffles, which has no barrier at each level."
        ),
        source="cuda/kernels/reduce_strided.cu",
        show=exhibits.STRIDED,
        parent="reduce_adjacent",
        space={"threads": (64, 128, 256, 512, 1024)},
        default={"threads": 256},
    ),
    Exhibit(
        name="reduce_shuffle",
        idea="a sum by a tree in registers: lanes exchange by shuffles",
        lesson=(
            "A shuffle hands a register to another lane of the warp: five levels take five instructions, no shared "
            "memory and no barrier. One barrier is left, between the warps and the one that adds up their sums."
        ),
        source="cuda/kernels/reduce_shuffle.cu",
        show=exhibits.SHUFFLED,
        parent="reduce_strided",
        space={"threads": (64, 128, 256, 512, 1024)},
        default={"threads": 256},
        expect={"divergent_warps": 0},
    ),
    Exhibit(
        name="bank_stride",
        idea="shared memory read at a stride: lanes on one bank wait for each other",
        lesson=(
            "Shared memory has 32 banks of 4 bytes. A read takes as many passes as the busiest bank has different "
            "words to give: at an odd stride of floats one, at stride 32 all 32. Wider elements go 16 or 8 lanes at a "
            "time."
        ),
        source="cuda/kernels/bank_stride.cu",
        show=exhibits.BANKS_AT,
        space={"stride": (1, 2, 3, 4, 8, 16, 17, 32, 33), "width": (4, 8, 16)},
        default={"stride": 1, "width": 4, "steps": 512},
        expect={"bank_conflicts": 0},
    ),
    Exhibit(
        name="copy_coalesced",
        idea="global memory copied at a stride: whole sectors move for parts of them",
        lesson=(
            "Memory moves in sectors of 32 bytes. Neighbouring lanes on neighbouring floats need 4 sectors a request; "
            "8 floats apart, every lane needs a sector of its own and uses an eighth of it. Wider elements waste less."
        ),
        source="cuda/kernels/copy_coalesced.cu",
        show=exhibits.COPIED,
        space={"stride": (1, 2, 3, 4, 8, 16, 32), "width": (4, 8, 16)},
        default={"stride": 1, "width": 4},
        expect={"sectors": 3 << 20},
    ),
)
