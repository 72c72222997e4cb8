"""The exhibits: small kernels, each of which shows one effect of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from gemmery.cuda import exhibits
from gemmery.cuda.exhibits import Config, Show
from gemmery.errors import ArgumentError


@dataclass(frozen=True)
class Exhibit:
    """One effect of the hardware, shown by one kernel, next to its parent's where it has one."""

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
        """The default, and every value of the space in turn, one key varied at a time."""
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
    error: float  # 0 when every element of the result is right; above 1 otherwise
    findings: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[str, ...]:
        """Its faults, a line each: wrong elements, findings, counters that differ from the prediction."""
        inexact = (f"gives {self.error - 1:.0f} wrong elements",) if self.error else ()
        unmet = tuple(
            f"has {self.counted[name]:,} {name.replace('_', ' ')}, not the {value:,} predicted"
            for name, value in self.predicted.items()
            if self.counted[name] != value
        )
        return (*inexact, *(f"has a finding at {one}" for one in self.findings), *unmet)


def find(name: str) -> Exhibit:
    """Return the exhibit called `name`; raise ArgumentError with the known names for an unknown one."""
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
        idea="the lanes of one warp take two paths: threadIdx.x > 15",
        lesson=(
            "A warp executes one instruction at a time. When its lanes disagree at a branch, it runs both paths one "
            "after the other, with half of its lanes idle on each. The same work takes twice as long."
        ),
        source="cuda/kernels/divergence_split.cu",
        show=exhibits.SPLIT,
        default={"steps": 1024},
        expect={"divergent_branches": 1 << 17},
    ),
    Exhibit(
        name="divergence_warp",
        idea="two warps take one path each: threadIdx.x > warpSize - 1",
        lesson=(
            "The same two paths, but whole warps take them: no warp has lanes that disagree, so none runs both. Where "
            "threads must branch, let them branch by warps."
        ),
        source="cuda/kernels/divergence_warp.cu",
        show=exhibits.WHOLE,
        parent="divergence_split",
        default={"steps": 1024},
        expect={"divergent_branches": 0},
    ),
    Exhibit(
        name="reduce_adjacent",
        idea="a tree sum of neighbours",
        lesson=(
            "At the first five levels every warp of the block works, with fewer of its lanes at each: a warp with one "
            "active lane costs as much as one with 32."
        ),
        source="cuda/kernels/reduce_adjacent.cu",
        show=exhibits.ADJACENT,
        space={"threads": (64, 128, 256, 512, 1024)},
        default={"threads": 256},
    ),
    Exhibit(
        name="reduce_strided",
        idea="a tree sum of elements half the remaining length apart",
        lesson=(
            "The first half of the threads adds, then the first quarter: whole warps retire at every level, and only "
            "the last five levels leave a warp partly idle. The gain depends on the other costs of a level: compare "
            "the two times, and that of the sum by shuffles, which has no barrier at each level."
        ),
        source="cuda/kernels/reduce_strided.cu",
        show=exhibits.STRIDED,
        parent="reduce_adjacent",
        space={"threads": (64, 128, 256, 512, 1024)},
        default={"threads": 256},
    ),
    Exhibit(
        name="reduce_shuffle",
        idea="a tree sum in registers, by shuffles between lanes",
        lesson=(
            "A shuffle moves a register to another lane of the warp: five levels take five instructions, no shared "
            "memory and no barrier. One barrier remains, before one warp adds the sums of the others."
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
        idea="shared memory read with a stride: lanes that read different words of one bank wait for each other",
        lesson=(
            "Shared memory has 32 banks of 4 bytes. A read takes as many passes as different words are read from the "
            "busiest bank: 1 for an odd stride of floats, 32 for stride 32. Wider elements are read 16 or 8 lanes at a "
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
        idea="global memory copied with a stride: whole sectors move, and only parts of them are used",
        lesson=(
            "Memory moves in sectors of 32 bytes. Neighbouring lanes that read neighbouring floats need 4 sectors per "
            "request; 8 floats apart, every lane needs its own sector and uses an eighth of it. Wider elements waste "
            "less."
        ),
        source="cuda/kernels/copy_coalesced.cu",
        show=exhibits.COPIED,
        space={"stride": (1, 2, 3, 4, 8, 16, 32), "width": (4, 8, 16)},
        default={"stride": 1, "width": 4},
        expect={"sectors": 3 << 20},
    ),
)
