"""A product with a producer warp, tensor maps, mbarriers, wgmma and clusters: right at any size, found when wrong."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

import hopper
from gemmery_emulator.hopper.bulk import Bulk, Load
from gemmery_emulator.hopper.tensormap import tensor_map
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")


def product(m, n, k, fault="", seed=None):
    """The product of random numbers: the largest error as a part of its bound, the run, and what was not written."""
    drawn = np.random.default_rng(1)
    a, b = drawn.standard_normal((m, k)).astype(np.float16), drawn.standard_normal((n, k)).astype(np.float16)
    c = np.full((m, n), np.nan, np.float16)
    maps = [tensor_map(one, (rows, 64), swizzle=128) for one, rows in ((a, 64), (b, 128), (c, 64))]
    case = hopper.pipeline(m, n, k, fault)
    args = [np.int32(k), *maps]
    run = emulate(case.source, "pipeline", case.grid, case.block, args, case.shared, "sm_90a", seed=seed)
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    # Sums of k exact products in float32, in any order, and one rounding to float16.
    bound = k * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b).T.astype(np.float64)) + 2.0**-11 * np.abs(exact)
    return float((np.abs(c - exact) / (1.01 * bound)).max()), run


@pytest.mark.parametrize("shape", [(128, 256, 64), (256, 256, 256), (200, 328, 424), (1, 8, 8), (130, 8, 200)])
def test_the_product_is_within_its_bound(shape):
    """Also where tiles reach beyond the matrices."""
    error, run = product(*shape)
    assert error <= 1
    assert run.findings == ()


@pytest.mark.many(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_of_blocks_and_warps_matters(seed):
    """Nothing is found, and the product is right."""
    error, run = product(200, 328, 424, seed=seed)
    assert error <= 1
    assert run.findings == ()


def test_what_it_moves_and_computes_is_counted():
    """Each block loads half of A's tile and all of B's, and stores its part of C."""
    _, run = product(256, 256, 256)
    blocks, steps = 4, 4
    assert run.flops == 2 * 256**3
    assert run.global_.bulk.used == blocks * steps * (64 + 128) * 64 * 2 + 256 * 256 * 2
    assert run.global_.bulk.requests == blocks * (steps * 2 + 4)
    assert run.instructions["wgmma"] == blocks * 2 * 4 * steps * 4
    assert run.global_.loads.requests == run.global_.stores.requests == 0


FOUND = {
    "PARITY": "not landed or uninitialized",  # as the copy has begun or not
    "SMALL_EXPECT": "not landed",
    "NO_EMPTY_WAIT": "race",
    "NO_FENCE": "misuse",
    "NO_BARRIER": "race",
    "NO_PROXY_FENCE": "misuse",
    "NO_FIRST_BARRIER": "race",
    "SWIZZLE": "misuse",
}


@pytest.mark.many
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_found(fault, seed):
    """In the machine's own order and in another."""
    _, run = product(128, 256, 384, fault, seed)
    assert {one.kind for one in run.findings} & set(FOUND[fault].split(" or "))


def test_a_tile_that_is_read_by_another_swizzle_is_found():
    """At the product, with the copy that brought the tile."""
    error, run = product(128, 256, 384, "SWIZZLE")
    assert not error <= 1
    lines = hopper.pipeline(128, 256, 384, "SWIZZLE").source.splitlines()
    (told,) = run.findings
    assert "with a swizzle of 128 bytes, with a descriptor for 64" in told.message
    assert "multiply(" in lines[told.line.number - 1]
    copy = int(re.search(r"copy at kernel.cu:(\d+)", told.message)[1])
    assert "load" in lines[copy - 1]


@pytest.mark.parametrize("seed", [None, 1])
def test_a_tile_that_is_loaded_under_a_product_is_found(seed):
    """A consumer that gives its tile back before it has waited for the product: at the load, and with the product."""
    _, run = product(256, 256, 512, "LATE_WAIT", seed)
    told = [one for one in run.findings if "may still read" in one.message]
    lines = hopper.pipeline(256, 256, 512, "").source.splitlines()
    assert told
    for one in told:
        assert one.kind == "race"
        assert one.other is not None
        assert "load" in lines[one.line.number - 1]
        assert "multiply" in lines[one.other.number - 1]


def test_what_was_written_since_or_came_as_it_was_has_any_swizzle():
    """A tile that threads have laid out anew is theirs; one that came unswizzled may be swizzled in memory."""
    shared = np.zeros(128, np.complex128)
    lines = [SimpleNamespace(line=number) for number in range(512)]
    messages = []
    machine = SimpleNamespace(
        threads=32,
        block_threads=32,
        observers=SimpleNamespace(misused=lambda machine, index, threads, message: messages.append(message)),
        unit=lambda kind: SimpleNamespace(complete=lambda *_: None, landing=[]),
        at_end=[],
        kernel=SimpleNamespace(instructions=lines),
        shared=SimpleNamespace(view=lambda *_: shared, data=shared.view(np.uint8), stride=0),
    )
    under_way, everywhere = Bulk(machine), np.arange(64)[None]
    under_way.report = lambda *_: None

    def landed(index, swizzle):
        data = (np.arange(64) + index + 0.5j)[None]
        under_way._land(Load(index, np.zeros(1, np.int64), everywhere, data, np.zeros(1, np.int64), swizzle))

    def disagreeing(swizzle):
        """The line of the copy and its swizzle, if there is a finding."""
        messages.clear()
        under_way.compare(0, np.zeros(1, np.int64), everywhere[:, None], np.full(1, swizzle))
        return [
            tuple(map(int, (re.search(r"copy at (\d+)", one)[1], re.search(r"of (\d+)", one)[1]))) for one in messages
        ]

    assert disagreeing(128) == []
    landed(3, 128)
    assert [disagreeing(128), disagreeing(64), disagreeing(0)] == [[], [(3, 128)], [(3, 128)]]
    shared[:40] = -1
    assert disagreeing(64) == [(3, 128)]  # of the pieces that nobody has written since
    shared[40:64] = -1
    assert disagreeing(64) == []
    landed(5, 0)
    assert disagreeing(64) == []
    landed(300, 32)
    assert disagreeing(64) == [(300, 32)]
