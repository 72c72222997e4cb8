"""CPU rungs inspected: the model of the caches against a plain one, counts that follow from the loops, the output."""

import io
import json
import re
from collections import OrderedDict

import numpy as np
import pytest
from rich.console import Console

import gemmery as gm
from gemmery.arrays import View
from gemmery.cpu import accesses, assembly, jit
from gemmery.cpu.ir import Module
from gemmery.cpu.target import host
from gemmery.errors import ArgumentError, RefusedError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab import cli
from gemmery_lab.inspection.cpu_rung import inspect_cpu_rung
from gemmery_lab.inspection.notebook import glance, inspection_page, side_by_side_page
from gemmery_lab.inspection.records import CpuSideBySide

NAMES = [rung.name for rung in CPU if not rung.name.startswith("amx_")]


class Sets:
    """A cache of sets that lose the key which was used longest ago, in plain Python."""

    def __init__(self, sets, ways):
        self.rows, self.ways = [OrderedDict() for _ in range(sets)], ways

    def misses(self, key):
        row = self.rows[key % len(self.rows)]
        absent = key not in row
        row[key] = True
        row.move_to_end(key)
        if len(row) > self.ways:
            row.popitem(last=False)
        return absent


def test_the_model_is_a_cache_of_least_recently_used_lines():
    """Random accesses of one to 64 bytes, in a kernel of which every access is counted."""
    caches, count = accesses.caches(host()), 4000
    sizes = accesses.shape(caches[0]), accesses.shape(caches[1])
    module = Module(host())
    with module.function("walk", ("ptr", "places"), ("i64", "steps")) as f, f.loop(0, f["steps"]) as i:
        f.load("<8 x i64>", f.load("ptr", f["places"] + i * 8))
    text, sites = accesses._with_touches(str(module))
    touch = Module(host())
    accesses._touch(touch, *sizes)
    state, words = accesses._state(*caches)
    walk = jit.load(host(), "test_walk", lambda: f"{text}\n{touch}", hole=state)["walk"]
    memory = np.zeros(3 << 20, np.uint8)
    random = np.random.default_rng(0)
    near = memory.ctypes.data + random.integers(0, 1 << 16, count)
    far = memory.ctypes.data + random.integers(0, memory.size - 64, count)
    places = np.where(random.random(count) < 0.7, near, far)
    accesses.ctypes.memset(state, 0, accesses.ctypes.sizeof(words))
    accesses.ctypes.CFUNCTYPE(None, accesses.ctypes.c_void_p, accesses.ctypes.c_int64)(walk)(places.ctypes.data, count)
    first, second, pages = Sets(*sizes[0]), Sets(*sizes[1]), Sets(16, 4)
    expected = [0, 0, 0, 0]
    for i, place in enumerate(map(int, places)):
        pages.misses((places.ctypes.data + 8 * i) >> 12)  # the load of the address itself
        if first.misses((places.ctypes.data + 8 * i) >> 6):
            second.misses((places.ctypes.data + 8 * i) >> 6)
        expected[0] += 1
        expected[3] += pages.misses(place >> 12)
        for line in range(place >> 6, (place + 63 >> 6) + 1):
            if first.misses(line):
                expected[1] += 1
                expected[2] += second.misses(line)
    site = [s.kind for s in sites].index("loads") + 1
    assert [s.kind for s in sites] == ["loads", "loads"]
    assert list(words[8 * site : 8 * site + 4]) == expected
    assert 0 < expected[2] < expected[1]


def test_the_naive_loops_make_the_accesses_that_they_say():
    """Two loads for each multiply-add, a store for each element of C; B down a column needs a line every time."""
    n = 256
    found = inspect_cpu_rung("scalar_naive", n=n)
    assert (found.operands["A"].loads, found.operands["B"].loads) == (n**3, n**3)
    assert (found.operands["C"].loads, found.operands["C"].stores) == (0, n**2)
    assert found.operands["B"].l1 == n**3  # 256 rows that are 1 KiB apart are in 4 sets of L1
    assert found.step == 1
    assert found.costs["additions in one chain"].count == 1000
    assert found.costs["loads"].count == 2000


def test_a_tile_in_registers_leaves_c_out_of_the_loop():
    row, tile, panels = (inspect_cpu_rung(name, n=192) for name in ("simd_row", "simd_tile", "packed_panels"))
    assert row.operands["C"].loads * host().lanes(4) == 192**3
    assert tile.operands["C"].loads == 0
    assert tile.operands["C"].stores * host().lanes(4) == 192**2
    assert tile.costs["loads"].count < row.costs["loads"].count / 2
    assert tile.costs["stores"].count == 0 < row.costs["stores"].count
    assert tile.step == panels.step  # the same tile
    assert panels.operands["B"].loads * host().lanes(4) == 192**2  # read once, to be packed
    assert panels.operands["panels and stack"].loads > 0 == tile.operands["panels and stack"].stores


@pytest.mark.many(5)
@pytest.mark.parametrize("name", NAMES)
def test_every_rung_is_inspected(name):
    """It multiplies in its inner loop, touches all of A, B and C, and is shown."""
    found = inspect_cpu_rung(name, n=96 if name != "batched" else 0)
    problem = found.problem
    assert found.step > 0
    assert any("multiply-add" in assembly.kinds(line) for line in found.loop)
    for matrix, elements in (("A", problem.m * problem.k), ("B", problem.k * problem.n)):
        own = found.operands[matrix]
        assert own.loads * host().vector_bytes >= 4 * elements, matrix
        # `direct` and `streamed` prefetch what they read next of B.
        assert own.l1 >= elements * 4 // 64 or (own.l1 and found.operands["all"].prefetches), matrix
    assert found.operands["C"].stores * host().vector_bytes >= 4 * problem.m * problem.n
    total = found.operands["all"]
    assert total.loads == sum(own.loads for key, own in found.operands.items() if key != "all")
    assert total.l2 <= total.l1
    loops = found.loops.splitlines()
    assert 3 < len(loops) <= 12
    page = inspection_page(found)
    assert "Inner loop of" in page
    assert "Simulated" in page


def test_counting_changes_no_result():
    a, b = np.random.default_rng(1).standard_normal((2, 1, 70, 70)).astype("f4")
    results = []
    for run in (lambda launch, *views: launch(*views), accesses.counted):
        c = np.zeros((1, 70, 70), "f4")
        views = (View(x.ctypes.data, x.shape, x.strides, "f32") for x in (a, b, c))
        run(find(CPU, "packed").build(Problem(70, 70, 70, "f32", "f32"), {}), *views)
        results.append(c)
    assert np.array_equal(*results)


def test_two_are_shown_side_by_side(capsys):
    pair = CpuSideBySide(*(inspect_cpu_rung(name, n=96) for name in ("simd_blocked", "simd_tile")))
    assert re.match(r"For 1,000 multiply-adds: loads [\d.]+ → [\d.]+, 0\.\d+×; ", glance(pair))
    assert "The least cycles" in side_by_side_page(pair)
    assert cli.run(["inspect", "simd_blocked", "simd_tile", "--n", "96"]) == 0
    assert "translations of pages" in capsys.readouterr().out


def test_the_command_and_the_library_show_the_same(capsys, tmp_path):
    assert cli.run(["inspect", "packed", "--n", "64", "--html", str(tmp_path / "p.html")]) == 0
    out = capsys.readouterr().out
    for text in ("pack B[kc, nc]", "For 1,000 multiply-adds", "Inner loop of tiles"):
        assert text in out
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    assert cli.run(["inspect", "packed", "--n", "64", "--json", "--sass"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ir"] == ""
    assert "tiles:" in record["assembly"]
    shown = gm.inspect("packed", n=64)
    assert record["operands"]["B"] == {name: getattr(shown.operands["B"], name) for name in record["operands"]["B"]}
    assert "<iframe" in shown._repr_html_()
    assert repr(gm.inspect("packed", "direct", n=64)).startswith(
        "<Comparison of packed and direct: 64 × 64 × 64, f32; "
    )


def test_brackets_are_no_markup():
    from gemmery_lab.inspection.notebook import show_inspection

    out = io.StringIO()
    show_inspection(inspect_cpu_rung("packed", n=32), Console(file=out, width=100))
    assert "pack A[mc, kc]" in out.getvalue()


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("simd_row", {"dtype": "f16"}, "rung simd_row takes f32, f64"),
        ("packed", {"config": {"block": 3}}, "its keys are mc, kc, nc"),
        ("packed", {"k": 4000}, "k=4000"),
    ],
)
def test_what_cannot_be_inspected_says_why(name, given, said):
    with pytest.raises(ArgumentError, match=said):
        inspect_cpu_rung(name, **given)


def test_a_rung_that_refuses_the_product_says_why():
    assert inspect_cpu_rung("gemv", n=64).problem.n == 1  # a rung of vectors gets one
    with pytest.raises(RefusedError, match="at most 32"):
        inspect_cpu_rung("batched", n=64)
    with pytest.raises(RefusedError, match="loads of tile registers are not counted"):
        inspect_cpu_rung("amx_tile")


def test_the_largest_step_is_three_rungs():
    parents = {rung.name: rung.parent for rung in CPU}
    assert [parents[name] for name in ("packed", "packed_panels", "simd_tile", "direct")] == [
        "packed_panels",
        "simd_tile",
        "simd_blocked",
        "simd_tile",
    ]
