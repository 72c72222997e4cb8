"""Small kernels that each show one effect: their launches, results, and costs by the rules of the hardware.

An exhibit reads an array x of small whole numbers in float32 and writes y; all its results are exact. The rules of
shared and global memory are those that Nsight Compute's counters follow on an H200.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmery import banks
from gemmery.banks import BANK, BANKS, LANES
from gemmery.cuda import driver
from gemmery.cuda.geometry import Geometry
from gemmery.errors import RefusedError

Config = Mapping[str, int]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Show:
    """An exhibit's kernel: `n` elements of x, of which a launch makes `results` elements of y."""

    n: int
    launch: Callable[[int, Config], Geometry]
    results: Callable[[int, Config], int]
    expected: Callable[[Floats, Config], Floats]
    counts: Callable[[int, Config], dict[str, int]]  # of one launch, by the rules
    operations: Callable[[int, Config], int]  # additions and multiplications


def numbers(n: int) -> Floats:
    """Return the x of every exhibit: whole numbers from -8 to 7, whose sums are exact."""
    return np.random.default_rng(5).integers(-8, 8, n).astype(np.float32)


def put(show: Show, config: Config, x: int, y: int, ordinal: int) -> Callable[[int], None]:
    """Return a function that puts one launch on a stream; x and y are addresses on the device.

    Raises RefusedError, DeviceError.
    """
    geometry = show.launch(show.n, config)
    function = driver.function(geometry.source, geometry.kernel, ordinal)
    given = (ctypes.c_void_p(x), ctypes.c_void_p(y), ctypes.c_int(show.n))

    def launch(stream: int) -> None:
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
        with driver.on(ordinal):
            launched = driver.api().cuLaunchKernel(
                function, *geometry.grid, *geometry.block, 0, stream, ctypes.addressof(pointers), 0
            )
            driver.check(launched)

    return launch


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
    warps = [lanes[first : first + LANES] for first in range(0, len(lanes), LANES)]
    return sum(any(warp) and not all(warp) for warp in warps)


def _warp(addresses: Sequence[int | None]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return one warp's addresses and active lanes in the form of the rules."""
    lanes = [(address or 0, address is not None) for address in addresses]
    return np.array([[address for address, _ in lanes]]), np.array([[active for _, active in lanes]])


# ---- one warp and two branches ----


def _ways(name: str, block: int, border: int) -> Show:
    def launch(n: int, config: Config) -> Geometry:
        return Geometry(f"{name}.cu", f"{name}<{config['steps']}>", (-(-n // block), 1, 1), (block, 1, 1))

    def expected(x: Floats, config: Config) -> Floats:
        away = np.where(np.arange(x.size) % block > border, np.float32(-0.5), np.float32(0.5))
        moved: Floats = (x + away * config["steps"]).astype(np.float32)
        return moved

    def counts(n: int, config: Config) -> dict[str, int]:
        return {"divergent_branches": -(-n // block) * divergent([thread > border for thread in range(block)])}

    return Show(1 << 22, launch, lambda n, _: n, expected, counts, lambda n, config: 2 * n * config["steps"])


SPLIT = _ways("divergence_split", LANES, 15)
WHOLE = _ways("divergence_warp", 2 * LANES, LANES - 1)


# ---- a sum by a tree ----

RESIDENT = 132 * 2048  # threads of a large device: starting more blocks would take longer than the trees


def _tree(name: str, levels: Callable[[int], list[list[bool]]]) -> Show:
    """`levels` returns which threads of a block add at each level."""

    def launch(n: int, config: Config) -> Geometry:
        block = config["threads"]
        if block < LANES or block & (block - 1):
            raise RefusedError(
                f"{block} threads per block: the tree halves them down to a warp; use a power of two >= 32"
            )
        blocks = min(-(-n // block), RESIDENT // block)
        return Geometry(f"{name}.cu", f"{name}<{block}>", (blocks, 1, 1), (block, 1, 1))

    def expected(x: Floats, config: Config) -> Floats:
        block = config["threads"]
        sums: Floats = np.pad(x, (0, -x.size % block)).reshape(-1, block).sum(axis=1)
        return sums

    def counts(n: int, config: Config) -> dict[str, int]:
        block = config["threads"]
        blocks, each = -(-n // block), levels(block)
        working = sum(any(lanes[first : first + LANES]) for lanes in each for first in range(0, block, LANES))
        return {
            "working_warps": blocks * working,
            "divergent_warps": blocks * sum(divergent(lanes) for lanes in each),
        }

    return Show(
        1 << 23, launch, lambda n, c: -(-n // c["threads"]), expected, counts, lambda n, c: n - n // c["threads"]
    )


def _apart(block: int) -> list[int]:
    """Return 1, 2, 4, ... up to half a block."""
    return [1 << level for level in range(block.bit_length() - 1)]


def _adjacent(block: int) -> list[list[bool]]:
    return [[thread % (2 * apart) == 0 for thread in range(block)] for apart in _apart(block)]


def _strided(block: int) -> list[list[bool]]:
    return [[thread < apart for thread in range(block)] for apart in reversed(_apart(block))]


def _shuffled(block: int) -> list[list[bool]]:
    """Every lane adds at each of five levels, and then those of the first warp once more."""
    return 5 * [[True] * block] + 5 * [[thread < LANES for thread in range(block)]]


ADJACENT = _tree("reduce_adjacent", _adjacent)
STRIDED = _tree("reduce_strided", _strided)
SHUFFLED = _tree("reduce_shuffle", _shuffled)


# ---- banks of shared memory ----

BANK_BLOCK = 256


def _bank_launch(n: int, config: Config) -> Geometry:
    _check_width(config)
    if config["steps"] % 16:
        raise RefusedError(f"steps {config['steps']}: they run 16 at a time; use a multiple of 16")
    kernel = f"bank_stride<{BANK_BLOCK}, {config['width'] // 4}, {config['stride']}, {config['steps']}>"
    return Geometry("bank_stride.cu", kernel, (-(-n // BANK_BLOCK), 1, 1), (BANK_BLOCK, 1, 1))


def _bank_expected(x: Floats, config: Config) -> Floats:
    lanes, steps = np.arange(LANES)[:, None], np.arange(config["steps"])[None]
    elements = x[: x.size // 4 * 4].reshape(-1, config["width"] // 4)
    sums = elements[lanes * config["stride"] + 2 * (steps % 16) + steps // 16 % 2].sum(axis=(1, 2))
    return np.resize(sums, x.size)


def _bank_counts(n: int, config: Config) -> dict[str, int]:
    width, stride = config["width"], config["stride"]
    loads = -(-n // BANK_BLOCK) * (BANK_BLOCK // LANES) * config["steps"]
    each = wavefronts([width * stride * lane for lane in range(LANES)], width)
    ideal = width * LANES // (BANKS * BANK)
    return {"shared_loads": loads, "wavefronts": loads * each, "bank_conflicts": loads * (each - ideal)}


BANKS_AT = Show(
    1 << 19,
    _bank_launch,
    lambda n, _: n,
    _bank_expected,
    _bank_counts,
    lambda n, config: n * config["steps"] * config["width"] // 4,
)


# ---- sectors of global memory ----

COPY_BLOCK = 256


def _copy_launch(n: int, config: Config) -> Geometry:
    _check_width(config)
    elements = n * 4 // config["width"]
    if elements % config["stride"]:
        raise RefusedError(
            f"stride {config['stride']}: it must divide the {elements} elements; use a power of two, or 3"
        )
    kernel = f"copy_coalesced<{config['width'] // 4}, {config['stride']}>"
    return Geometry("copy_coalesced.cu", kernel, (-(-elements // COPY_BLOCK), 1, 1), (COPY_BLOCK, 1, 1))


def _copy_counts(n: int, config: Config) -> dict[str, int]:
    """Return requests and sectors read; as many are written."""
    width, stride = config["width"], config["stride"]
    apart = n * 4 // width // stride  # threads that take elements `stride` apart, before the next element
    each = [sectors([width * (stride * lane + turn) for lane in range(LANES)], width) for turn in range(stride)]
    return {"requests": apart // LANES * stride, "sectors": apart // LANES * sum(each)}


COPIED = Show(3 << 23, _copy_launch, lambda n, _: n, lambda x, _: x, _copy_counts, lambda *_: 0)


def _check_width(config: Config) -> None:
    if config["width"] not in (4, 8, 16) or config["stride"] < 1:
        raise RefusedError(
            f"width {config['width']}, stride {config['stride']}: lanes move 4, 8 or 16 bytes, 1 element or more apart"
        )
