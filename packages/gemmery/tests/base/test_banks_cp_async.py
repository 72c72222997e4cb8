"""The writes of cp.async, matrices and atomics in shared memory against the source counters of an H200."""

import json
from pathlib import Path

import numpy as np

from gemmery.banks import copied, served

PATTERNS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "cp_async_patterns_h200.jsonl").read_text().splitlines()
]


def lanes(mask):
    """One warp's booleans from the hexadecimal digits of a mask."""
    return np.array([[int(mask, 16) >> lane & 1 for lane in range(32)]], bool)


def counted(pattern):
    """Wavefronts and the ideal by the rules."""
    kind, way, size, *_ = pattern["op"].split(".")
    active, addresses = lanes(pattern["active"]), np.array([pattern["offsets"]])
    if kind == "cp":
        fetched = lanes(pattern.get("fetched", pattern["active"]))
        return copied(addresses, np.array([pattern["sources"]]), active, fetched, pattern["bytes"], size == "cg")
    if kind in ("atom", "red"):
        return served(addresses, active, 4, kind)
    return served(addresses, None, 4 * int(way.removeprefix("x")), kind)


def off(pattern):
    """By how many wavefronts the rule is off."""
    return counted(pattern).wavefronts - pattern["wavefronts"]


def test_a_copy_costs_what_was_measured():
    """What kernels copy (rows, strides, swizzles), pairs of lanes, lanes that read nothing, and addresses by lot."""
    copies = [pattern for pattern in PATTERNS if pattern["op"].startswith("cp")]
    kinds = {"cp.async.ca.4", "cp.async.ca.8", "cp.async.ca.16", "cp.async.cg.16"}
    assert {pattern["op"] for pattern in copies} == kinds
    assert [pattern for pattern in copies if off(pattern)] == []


def test_warps_are_counted_each_for_itself():
    """All patterns of one opcode at once cost the sum of each."""
    for op, width in (("cp.async.ca.4", 4), ("cp.async.ca.16", 16), ("cp.async.cg.16", 16)):
        some = [pattern for pattern in PATTERNS if pattern["op"] == op]
        addresses, sources = (np.array([pattern[end] for pattern in some]) for end in ("offsets", "sources"))
        active = np.concatenate([lanes(pattern["active"]) for pattern in some])
        fetched = np.concatenate([lanes(pattern.get("fetched", pattern["active"])) for pattern in some])
        found = copied(addresses, sources, active, fetched, width, op.startswith("cp.async.cg"))
        assert found.wavefronts == sum(pattern["wavefronts"] for pattern in some)


def test_the_ideal_is_what_so_many_bytes_need():
    """As the profiler counts memory_l1_wavefronts_shared_ideal."""
    assert [pattern for pattern in PATTERNS if counted(pattern).ideal != pattern["wavefronts_ideal"]] == []


def test_atomics_and_matrices_cost_what_was_measured():
    """Lanes that add to one word wait for each other; a matrix's eight rows are one group."""
    others = [pattern for pattern in PATTERNS if not pattern["op"].startswith("cp")]
    assert len(others) == 311
    assert [pattern for pattern in others if off(pattern)] == []
