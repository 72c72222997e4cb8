"""The counts of a run: memory, banks, arithmetic, instructions, branches; in total and by source line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from gemmery_emulator.ptx import Line


class _Sum:
    """A dataclass of counts that is added field by field."""

    def __add__(self, other: Self) -> Self:
        names = [field_.name for field_ in fields(self) if field_.compare]  # type: ignore[arg-type]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Traffic(_Sum):
    """Accesses that move sectors of 32 bytes between the L1 cache and the threads."""

    requests: int = 0  # accesses by warps with an active lane; for bulk copies their number
    sectors: int = 0  # each counted once per request, as the profiler does for the L1 cache
    used: int = 0  # bytes of the sectors that at least one lane accessed

    @property
    def bytes(self) -> int:
        """Bytes moved: 32 for each sector."""
        return 32 * self.sectors

    @property
    def sectors_a_request(self) -> float:
        """Sectors per request: 4 if 32 lanes access 4 adjacent bytes each, at most 32; 0 without requests."""
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def used_a_sector(self) -> float:
        """Bytes used per sector, of 32; 0 without sectors."""
        return self.used / self.sectors if self.sectors else 0.0


class _OfTotal:
    """A count of all kinds of accesses together."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, traffic: Any, owner: type) -> int:
        return getattr(traffic.total, self._name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MemoryTraffic(_Sum):
    """Loads, stores and atomics of global (or local) memory; cp.async counts as a load."""

    loads: Traffic = Traffic()
    stores: Traffic = Traffic()
    atomics: Traffic = Traffic()
    bulk: Traffic = Traffic()  # copies by the tensor memory accelerator, which bypass the L1 cache

    @property
    def total(self) -> Traffic:
        """The sum of all kinds."""
        return self.loads + self.stores + self.atomics + self.bulk

    requests, sectors, bytes, used = _OfTotal(), _OfTotal(), _OfTotal(), _OfTotal()


@dataclass(frozen=True)
class Banked(_Sum):
    """Accesses to shared memory."""

    requests: int = 0  # accesses by warps with an active lane
    wavefronts: int = 0  # passes over the banks
    wavefronts_ideal: int = 0  # passes that so many bytes need: the profiler's memory_l1_wavefronts_shared_ideal
    bank_conflicts: int = 0  # passes because lanes served together access different words of one bank


@dataclass(frozen=True)
class SharedTraffic(_Sum):
    """Loads (with ldmatrix), stores (with stmatrix and the writes of cp.async) and atomics of shared memory."""

    loads: Banked = Banked()
    stores: Banked = Banked()
    atomics: Banked = Banked()

    @property
    def total(self) -> Banked:
        """The sum of all kinds."""
        return self.loads + self.stores + self.atomics

    requests, wavefronts, wavefronts_ideal, bank_conflicts = _OfTotal(), _OfTotal(), _OfTotal(), _OfTotal()


class Lines(dict[Line, "Counts"]):
    """Counts by source line, in the order of the source; `lines["kernel.cu:9"]` finds a line by its name.

    For a line without counts it raises KeyError, which lists the lines with counts.
    """

    def __getitem__(self, line: Line | str) -> Counts:
        return super().__getitem__(line)  # type: ignore[index]  # a text comes back through __missing__

    def __missing__(self, line: Line | str) -> Counts:
        for counted, counts in self.items():
            if str(counted) == line:
                return counts
        raise KeyError(f"{line}: nothing was counted there; the lines with counts are: {', '.join(map(str, self))}")


@dataclass(frozen=True)
class Counts(_Sum):
    """The counts of a launch, or of one of its lines."""

    shared: SharedTraffic = SharedTraffic()
    global_: MemoryTraffic = MemoryTraffic()
    local: MemoryTraffic = MemoryTraffic()  # spilled registers and arrays of each thread
    flops: int = 0  # a multiply-add counts as two
    instructions: Counter[str] = field(default_factory=Counter)  # kind -> warps that executed one: smsp__inst_executed
    thread_instructions: int = 0  # the same, by active threads
    branches: int = 0  # conditional branches, by warps
    divergent_branches: int = 0  # branches at which the threads of the warp diverge
    lines: Lines = field(default_factory=Lines, compare=False)  # by line of the kernel's file
    # By line and the lines inlined into it.
    frames: Mapping[Frames, Counts] = field(default_factory=dict, compare=False)

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte of global memory traffic; infinity without traffic."""
        return self.flops / self.global_.bytes if self.global_.bytes else float("inf")


Frames = tuple[Line, ...]  # a line of the kernel's file, then the lines inlined into it
CountKey = tuple[str, ...]  # ("flops",), ("instructions", kind), ("shared", "loads", "wavefronts")


def of(frames: Mapping[Frames, Mapping[CountKey, int]]) -> Counts:
    """Convert sums by frames and name to counts: in total, by line and by frames."""
    lines: dict[Line, defaultdict[CountKey, int]] = {}
    everything: defaultdict[CountKey, int] = defaultdict(int)
    for place, sums in frames.items():
        line = lines.setdefault(place[0], defaultdict(int))
        for key, value in sums.items():
            line[key] += value
            everything[key] += value
    return replace(
        _of(everything),
        lines=Lines({line: _of(lines[line]) for line in sorted(lines, key=_place)}),
        frames={place: _of(frames[place]) for place in sorted(frames, key=lambda frames: [*map(_place, frames)])},
    )


def _of(sums: Mapping[CountKey, int]) -> Counts:
    def part(kind: type[Banked | Traffic], *place: str) -> Any:
        return kind(**{name: sums.get((*place, name), 0) for name in FIELDS[kind]})

    ways = FIELDS[MemoryTraffic]
    single: Mapping[str, Any] = {name: sums.get((name,), 0) for name in SINGLE}
    return Counts(
        shared=SharedTraffic(**{way: part(Banked, "shared", way) for way in FIELDS[SharedTraffic]}),
        global_=MemoryTraffic(**{way: part(Traffic, "global", way) for way in ways}),
        local=MemoryTraffic(**{way: part(Traffic, "local", way) for way in ways}),
        instructions=Counter({key[1]: value for key, value in sums.items() if key[0] == "instructions"}),
        **single,
    )


def _place(line: Line) -> tuple[str, int]:
    return line.file, line.number


FIELDS: Mapping[type, tuple[str, ...]] = {
    kind: tuple(field_.name for field_ in fields(kind)) for kind in (Banked, Traffic, SharedTraffic, MemoryTraffic)
}
SINGLE = ("flops", "thread_instructions", "branches", "divergent_branches")
