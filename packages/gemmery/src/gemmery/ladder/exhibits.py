"""The exhibits: small kernels, each of which shows one effect of the hardware.

An exhibit reads an array x of small whole numbers in float32 and writes y; all its results are exact. The rules of
shared and global memory, which predict its counters, are those that Nsight Compute's counters follow on an H200.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from gemmery import banks
from gemmery.banks import BANK, BANKS, WARP
from gemmery.cuda import driver
from gemmery.cuda.geometry import Geometry, refusal, template
from gemmery.errors import RefusedError, unknown
from gemmery.problem import Config

Floats = np.ndarray[Any, np.dtype[np.float32]]
_BLOCK = 256  # threads of kernels that fix it
EMULATED = 3 << 12  # elements on the emulator: whole warps at every config, and a second for all configs of an exhibit


@dataclass(frozen=True)
class Show:
    """An exhibit's kernel: `n` elements of x, of which a launch makes `results` elements of y."""

    n: int
    launch: Callable[[str, int, Config], Geometry]  # of the kernel of this name
    results: Callable[[int, Config], int]
    expected: Callable[[Floats, Config], Floats]
    counts: Callable[[int, Config], dict[str, int]]  # of one launch, by the rules
    operations: Callable[[int, Config], int]  # additions and multiplications
    errors: Callable[[Floats, int, Config], dict[str, int]] | None = None  # counts of which the results tell


@dataclass(frozen=True)
class Exhibit:
    """One effect of the hardware, shown by one kernel, next to its parent's where it has one."""

    name: str
    idea: str  # the effect, in one line
    lesson: str
    show: Show
    parent: str | None = None
    space: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    default: Config = field(default_factory=dict)
    expect: Mapping[str, int] = field(default_factory=dict)  # counters at the default, by the rules

    @property
    def source(self) -> str:
        """The kernel's file in the package."""
        return f"cuda/kernels/{self.name}.cu"

    def launch(self, n: int, config: Config) -> Geometry:
        """Return the launch for n elements of x. Raises RefusedError for a config that cannot run."""
        return self.show.launch(self.name, n, config)

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
        return (*inexact, *(f"has a finding at {finding}" for finding in self.findings), *unmet)


def find(name: str) -> Exhibit:
    """Return the exhibit called `name`; raise ArgumentError with the known names for an unknown one."""
    for exhibit in EXHIBITS:
        if exhibit.name == name:
            return exhibit
    raise unknown(f"exhibit {name!r} is not known", name, (exhibit.name for exhibit in EXHIBITS))


def numbers(n: int) -> Floats:
    """Return the x of every exhibit: whole numbers from -8 to 7, whose sums are exact."""
    return np.random.default_rng(5).integers(-8, 8, n).astype(np.float32)


def put(exhibit: Exhibit, config: Config, x: int, y: int, ordinal: int) -> Callable[[int], None]:
    """Return a function that puts one launch on a stream; x and y are addresses on the device.

    Raises RefusedError, DeviceError.
    """
    geometry = exhibit.launch(exhibit.show.n, config)
    if reason := refusal(geometry, driver.device(ordinal)):
        raise RefusedError(reason)
    function = driver.function(geometry.source, geometry.kernel, ordinal)
    arguments = (ctypes.c_void_p(x), ctypes.c_void_p(y), ctypes.c_int(exhibit.show.n))
    return driver.launching(function, geometry.grid, geometry.block, ordinal, *arguments)


def wavefronts(addresses: Sequence[int | None], width: int, is_load: bool = True) -> int:
    """Return the wavefronts of shared memory for one access of a warp: `width` bytes per lane, None for an idle lane.

    >>> wavefronts([8 * lane for lane in range(32)], 4)  # every second bank, each asked for two words
    2
    """
    return banks.served(*_warp(addresses), width, "ld" if is_load else "st").wavefronts


def sectors(addresses: Sequence[int | None], width: int) -> int:
    """Return the sectors of global memory touched by one access of a warp: `width` aligned bytes per lane.

    >>> sectors([4 * lane for lane in range(32)], 4)
    4
    """
    return banks.moved(*_warp(addresses), width).sectors


def divergent(lanes: Sequence[bool]) -> int:
    """Return how many warps have lanes that disagree.

    >>> divergent([lane > 15 for lane in range(64)])
    1
    """
    warps = [lanes[first : first + WARP] for first in range(0, len(lanes), WARP)]
    return sum(any(warp) and not all(warp) for warp in warps)


def _warp(addresses: Sequence[int | None]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return one warp's addresses and active lanes in the form of the rules."""
    lanes = [(address or 0, address is not None) for address in addresses]
    return np.array([[address for address, _ in lanes]]), np.array([[active for _, active in lanes]])


def _over(name: str, count: int, block: int, *parameters: object) -> Geometry:
    """Return a launch of a thread for each of `count` elements."""
    return Geometry(f"{name}.cu", template(name, *parameters), (-(-count // block), 1, 1), (block, 1, 1))


# ---- one warp and two branches ----


def _branches(block: int, border: int) -> Show:
    """Threads of a block take one path up to the border, and another above it."""

    def launch(name: str, n: int, config: Config) -> Geometry:
        return _over(name, n, block, config["steps"])

    def expected(x: Floats, config: Config) -> Floats:
        away = np.where(np.arange(x.size) % block > border, np.float32(-0.5), np.float32(0.5))
        moved: Floats = (x + away * config["steps"]).astype(np.float32)
        return moved

    def counts(n: int, config: Config) -> dict[str, int]:
        return {"divergent_branches": -(-n // block) * divergent([thread > border for thread in range(block)])}

    return Show(1 << 22, launch, lambda n, _: n, expected, counts, lambda n, config: 2 * n * config["steps"])


# ---- a sum by a tree ----

_RESIDENT = 132 * 2048  # threads of a large device: starting more blocks would take longer than the trees


def _tree(levels: Callable[[int], list[list[bool]]]) -> Show:
    """`levels` returns which threads of a block add at each level."""

    def launch(name: str, n: int, config: Config) -> Geometry:
        block = config["threads"]
        if block < WARP or block & (block - 1):
            raise RefusedError(
                f"{block} threads per block: the tree halves them down to a warp; use a power of two >= 32"
            )
        return _over(name, min(n, _RESIDENT // block * block), block, block)

    def expected(x: Floats, config: Config) -> Floats:
        block = config["threads"]
        sums: Floats = np.pad(x, (0, -x.size % block)).reshape(-1, block).sum(axis=1)
        return sums

    def counts(n: int, config: Config) -> dict[str, int]:
        block = config["threads"]
        blocks, each = -(-n // block), levels(block)
        working = sum(any(lanes[first : first + WARP]) for lanes in each for first in range(0, block, WARP))
        return {"working_warps": blocks * working, "divergent_warps": blocks * sum(divergent(lanes) for lanes in each)}

    return Show(
        1 << 23, launch, lambda n, c: -(-n // c["threads"]), expected, counts, lambda n, c: n - n // c["threads"]
    )


def _adjacent(block: int) -> list[list[bool]]:
    apart = [1 << level for level in range(block.bit_length() - 1)]
    return [[thread % (2 * each) == 0 for thread in range(block)] for each in apart]


# ---- banks of shared memory ----


def _bank_launch(name: str, n: int, config: Config) -> Geometry:
    _check_width(config)
    if config["steps"] % 16:
        raise RefusedError(f"steps {config['steps']}: they run 16 at a time; use a multiple of 16")
    return _over(name, n, _BLOCK, _BLOCK, config["width"] // 4, config["stride"], config["steps"])


def _bank_expected(x: Floats, config: Config) -> Floats:
    lanes, steps = np.arange(WARP)[:, None], np.arange(config["steps"])[None]
    elements = x[: x.size // 4 * 4].reshape(-1, config["width"] // 4)
    sums = elements[lanes * config["stride"] + 2 * (steps % 16) + steps // 16 % 2].sum(axis=(1, 2))
    return np.resize(sums, x.size)


def _bank_counts(n: int, config: Config) -> dict[str, int]:
    width, stride = config["width"], config["stride"]
    loads = -(-n // _BLOCK) * (_BLOCK // WARP) * config["steps"]
    each = wavefronts([width * stride * lane for lane in range(WARP)], width)
    ideal = width * WARP // (BANKS * BANK)
    return {"shared_loads": loads, "wavefronts": loads * each, "bank_conflicts": loads * (each - ideal)}


_BANKS_AT = Show(
    1 << 19,
    _bank_launch,
    lambda n, _: n,
    _bank_expected,
    _bank_counts,
    lambda n, config: n * config["steps"] * config["width"] // 4,
)


# ---- sectors of global memory ----


def _copy_launch(name: str, n: int, config: Config) -> Geometry:
    _check_width(config)
    elements = n * 4 // config["width"]
    if elements % config["stride"]:
        raise RefusedError(
            f"stride {config['stride']}: it must divide the {elements} elements; use a power of two, or 3"
        )
    return _over(name, elements, _BLOCK, config["width"] // 4, config["stride"])


def _copy_counts(n: int, config: Config) -> dict[str, int]:
    """Return requests and sectors read; as many are written."""
    width, stride = config["width"], config["stride"]
    apart = n * 4 // width // stride  # threads that take elements `stride` apart, before the next element
    each = [sectors([width * (stride * lane + turn) for lane in range(WARP)], width) for turn in range(stride)]
    return {"requests": apart // WARP * stride, "sectors": apart // WARP * sum(each)}


_COPIED = Show(3 << 23, _copy_launch, lambda n, _: n, lambda x, _: x, _copy_counts, lambda *_: 0)


# ---- sums of tensor cores ----


def _sums_launch(name: str, n: int, config: Config) -> Geometry:
    """Four sums of each kind in a thread, as the warp's products have them."""
    launch = _over(name, n // _RESULTS_OF_A_WARP * WARP, WARP, config["steps"])
    return replace(launch, needs=80, instructions="mma of 16 bits, 16 of k")


_RESULTS_OF_A_WARP = 8 * WARP
_BEGIN = 1 << 24  # from here on float32 has even numbers only, up to 2^25


def _sums(x: Floats, config: Config) -> tuple[Floats, Floats, Floats]:
    """Return the exact sums without what they begin with, those that tensor cores keep, and those of CUDA cores."""
    threads, steps = np.arange(x.size // _RESULTS_OF_A_WARP * WARP)[:, None], config["steps"]
    places = 4 * threads + np.arange(4)
    exact, core = np.zeros(places.shape, np.int64), np.full(places.shape, _BEGIN)
    rounded = core.astype(np.float32)
    for step in range(steps):
        number = x[(places + 127 * step) % x.size].astype(np.int64) + 9
        exact += number
        core = core + number & ~1
        rounded += number.astype(np.float32)
    return exact.astype(np.float32), (core - _BEGIN).astype(np.float32), rounded - np.float32(_BEGIN)


def _sums_expected(x: Floats, config: Config) -> Floats:
    _, core, rounded = _sums(x, config)
    results: Floats = np.stack((core, rounded), axis=1).reshape(-1)
    return results


def _sums_errors(y: Floats, n: int, config: Config) -> dict[str, int]:
    """Return the mean and the largest error of sums: in whole numbers, each of them one of 2^24."""
    exact = _sums(numbers(n), config)[0]
    core, rounded = (y.reshape(-1, 2, 4)[:, kind] - exact for kind in range(2))
    return {
        "mean_error_in_core": round(float(core.mean())),
        "mean_error_promoted": round(float(rounded.mean())),
        "largest_error_in_core": round(float(abs(core).max())),
        "largest_error_promoted": round(float(abs(rounded).max())),
    }


_CUT = Show(
    1 << 14,
    _sums_launch,
    lambda n, _: n // _RESULTS_OF_A_WARP * _RESULTS_OF_A_WARP,
    _sums_expected,
    lambda n, config: _sums_errors(_sums_expected(numbers(n), config), n, config),
    lambda n, config: n // _RESULTS_OF_A_WARP * 2 * config["steps"] * 2 * 16 * 8 * 16,
    _sums_errors,
)


def _check_width(config: Config) -> None:
    if config["width"] not in (4, 8, 16) or config["stride"] < 1:
        raise RefusedError(
            f"width {config['width']}, stride {config['stride']}: lanes move 4, 8 or 16 bytes, 1 element or more apart"
        )


_reduction = partial(Exhibit, space={"threads": (64, 128, 256, 512, 1024)}, default={"threads": 256})
EXHIBITS = (
    Exhibit(
        name="divergence_split",
        idea="the lanes of one warp take two paths: threadIdx.x > 15",
        lesson=(
            "A warp executes one instruction at a time. When its lanes disagree at a branch, it runs both paths one "
            "after the other, with half of its lanes idle on each. The same work takes twice as long."
        ),
        show=_branches(WARP, 15),
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
        show=_branches(2 * WARP, WARP - 1),
        parent="divergence_split",
        default={"steps": 1024},
        expect={"divergent_branches": 0},
    ),
    _reduction(
        name="reduce_adjacent",
        idea="a tree sum of neighbors",
        lesson=(
            "At the first five levels every warp of the block works, with fewer of its lanes at each: a warp with one "
            "active lane costs as much as one with 32."
        ),
        show=_tree(_adjacent),
    ),
    _reduction(
        name="reduce_strided",
        idea="a tree sum of elements half the remaining length apart",
        lesson=(
            "The first half of the threads adds, then the first quarter: whole warps retire at every level, and only "
            "the last five levels leave a warp partly idle. The gain depends on the other costs of a level: compare "
            "the two times, and that of the sum by shuffles, which has no barrier at each level."
        ),
        show=_tree(lambda block: [[each < sum(level) for each in range(block)] for level in _adjacent(block)]),
        parent="reduce_adjacent",
    ),
    _reduction(
        name="reduce_shuffle",
        idea="a tree sum in registers, by shuffles between lanes",
        lesson=(
            "A shuffle moves a register to another lane of the warp: five levels take five instructions, no shared "
            "memory and no barrier. One barrier remains, before one warp adds the sums of the others."
        ),
        # Every lane adds at each of five levels, and then those of the first warp once more.
        show=_tree(lambda block: 5 * [[True] * block] + 5 * [[thread < WARP for thread in range(block)]]),
        parent="reduce_strided",
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
        show=_BANKS_AT,
        space={"stride": (1, 2, 3, 4, 8, 16, 17, 32, 33), "width": (4, 8, 16)},
        default={"stride": 1, "width": 4, "steps": 512},
        expect={"bank_conflicts": 0},
    ),
    Exhibit(
        name="copy_coalesced",
        idea="global memory copied with a stride: whole sectors move, and only parts of them are used",
        lesson=(
            "Memory moves in sectors of 32 bytes. Neighboring lanes that read neighboring floats need 4 sectors per "
            "request; 8 floats apart, every lane needs its own sector and uses an eighth of it. Wider elements waste "
            "less."
        ),
        show=_COPIED,
        space={"stride": (1, 2, 3, 4, 8, 16, 32), "width": (4, 8, 16)},
        default={"stride": 1, "width": 4},
        expect={"sectors": 3 << 20},
    ),
    Exhibit(
        name="truncation",
        idea="sums that stay in tensor cores are cut toward zero, and become too small",
        lesson=(
            "Tensor cores cut a sum to 24 bits; CUDA cores round it to the nearest such number. A cut makes a positive "
            "sum smaller, so errors add up as k grows. Errors of rounding have both signs and mostly cancel. The rungs "
            "that multiply float32 in parts therefore let CUDA cores take the sum over after 64 of k."
        ),
        show=_CUT,
        space={"steps": (16, 64, 256)},
        default={"steps": 64},
        expect={"mean_error_promoted": 0},
    ),
)
