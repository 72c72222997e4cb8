"""Each kernel of tests/faults is found out, at its marked lines; its repaired twin is not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gemmery.lab.kernel import SOURCE, emulate

pytest.importorskip("cuda.bindings")

FOLDER = Path(__file__).with_name("faults")
ONE, SIDE = (128, 1, 1), (32, 32, 1)


def floats(count):
    """1, 2, 3, ..."""
    return np.arange(1, count + 1, dtype=np.float32)


# What is found; the grid, the block and the arguments; bytes of dynamic shared memory.
FAULTS = {
    "missing_barrier": ("race", 3, ONE, [floats(384), floats(384)]),
    "missing_second_barrier": ("race", 1, ONE, [floats(128), floats(512), np.int32(4)]),
    "wrong_stage": ("race", 1, ONE, [floats(128), floats(512), np.int32(4)]),
    "ring_overwritten": ("race", 1, ONE, [floats(128), floats(512), np.int32(4)]),
    "wait_without_barrier": ("race", 1, ONE, [floats(128), floats(128)]),
    "warps_race": ("race", 1, ONE, [floats(1), floats(128)]),
    "narrow_neighbours": ("race", 1, ONE, [np.zeros(128, np.uint8), np.arange(128, dtype=np.uint8)]),
    "missing_syncwarp": ("race", 1, ONE, [floats(128), floats(128)]),
    "atomic_and_store": ("race", 1, ONE, [np.zeros(128, np.int32)]),
    "producer_consumer": ("race", 1, ONE, [floats(128), floats(128), np.int32(1)]),
    "same_value": ("race", 2, ONE, [np.zeros(128, np.int32), floats(128)]),
    "blocks_race": ("race", 3, (129, 1, 1), [floats(384), floats(384)]),
    "lax_wait": ("not landed", 1, ONE, [floats(128), floats(256)]),
    "uninitialised": ("uninitialised", 1, SIDE, [floats(1024), floats(1024)]),
    "off_by_one_global": ("out of bounds", 2, ONE, [floats(200), np.int32(200)]),
    "off_by_one_shared": ("out of bounds", 1, ONE, [floats(128), floats(128)]),
    "off_by_one_local": ("out of bounds", 1, ONE, [floats(128), np.arange(8, dtype=np.int32)]),
    "wrong_swizzle": ("out of bounds", 1, ONE, [floats(512), floats(512)]),
    "null_pointer": ("out of bounds", 1, ONE, [floats(128), None]),
    "dynamic_shared": ("out of bounds", 1, ONE, [floats(128), floats(128)], 1024),
    "misaligned": ("misaligned", 1, ONE, [floats(128), floats(1280), np.int32(9)]),
    "divergent_barrier": ("divergent barrier", 1, ONE, [floats(128), floats(128)]),
    "barrier_in_branch": ("divergent barrier", 1, ONE, [floats(128), floats(128)]),
    "mbarrier_count": ("deadlock", 1, ONE, [floats(128)]),
    "mbarrier_parity": ("deadlock", 1, ONE, [floats(128)]),
}


def found(name, fixed=False, seed=None):
    """What is found in one of the kernels."""
    _, blocks, block, args, *shared = FAULTS[name]
    code = (FOLDER / f"{name}.cu").read_text()
    if fixed:
        code = code.replace(code.partition("\n")[0], "#define FIXED", 1)
    return emulate(
        code, name, blocks, block, [np.copy(x) if np.ndim(x) else x for x in args], *shared, seed=seed
    ).findings


def marked(name, word):
    """The lines with this word in a comment behind the code."""
    lines = (FOLDER / f"{name}.cu").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if re.search(rf";.*// .*\b{word}\b|\)  // {word}$", line)}


def test_every_kernel_of_the_folder_is_launched():
    """A kernel that is added is tested."""
    assert set(FAULTS) == {path.stem for path in FOLDER.glob("*.cu")}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_its_line(name):
    """The kind, the line, and the other line where there are two; and nothing else."""
    others = marked(name, "OTHER") or {None}
    told = {(one.kind, one.line.number, one.other and one.other.number) for one in found(name)}
    assert told == {(FAULTS[name][0], line, other) for line in marked(name, "FAULT") for other in others}


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_found_in_the_repaired_kernel(name):
    """The same kernel as it should be."""
    assert found(name, fixed=True) == ()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_warps_hides_nothing(seed):
    """Every fault is found in any order of blocks and warps, and no repaired kernel is blamed."""
    for name in FAULTS:
        assert FAULTS[name][0] in {one.kind for one in found(name, seed=seed)}, name
        assert found(name, fixed=True, seed=seed) == (), name


def message(name):
    """The first finding in words."""
    return str(found(name)[0])


def test_a_message_says_who_where_and_what_to_do():
    """Thread, block, address in the array, both lines, and the way out."""
    assert message("missing_barrier") == (
        f"{SOURCE}:9: race: thread 0 of block 0 reads byte 508 of shared memory (tile, byte 508), which "
        f"thread 127 writes at {SOURCE}:5; no barrier between: put __syncthreads() there"
    )
    assert message("off_by_one_global") == (
        f"{SOURCE}:9: out of bounds: thread 72 of block 1 writes 4 bytes at address 0x1320, ending 4 bytes "
        "beyond the 800 of argument 0; bound the index, or allocate more"
    )
    assert message("uninitialised").startswith(
        f"{SOURCE}:10: uninitialised: thread (31, 0, 0) of block 0 reads byte 128 of shared memory (tile, "
    )
    assert "__syncwarp()" in message("missing_syncwarp")
    assert "null pointer" in message("null_pointer")


def test_a_missing_barrier_shows_where_all_values_are_the_same():
    """Equal stores pass, but not a store over what another thread reads."""
    _, blocks, block, _ = FAULTS["missing_second_barrier"]
    code = (FOLDER / "missing_second_barrier.cu").read_text()
    args = [floats(128), np.ones(512, np.float32), np.int32(4)]
    (one,) = emulate(code, "missing_second_barrier", blocks, block, args).findings
    assert one.kind == "race"


def test_faults_are_counted_over_all_blocks():
    """One finding for a pair of lines, however many threads and blocks commit it."""
    (one,) = found("missing_barrier")
    assert one.count == 3 * 128
    (one,) = found("off_by_one_global")
    assert (one.count, one.block, one.thread) == (1, (1, 0, 0), (72, 0, 0))
