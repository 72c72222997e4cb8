"""What pictures show of tensor copies and mbarriers: the first block's barriers over time, and its first tiles."""

from __future__ import annotations

import pytest

import hopper
from gemmery.cuda import sass
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_emulator.kernels import kernel
from gemmery_emulator.pages.pictures import pictures
from gemmery_emulator.run import emulated
from gemmery_emulator.trace.pipeline import NOBODY, PipelineTrace
from gemmery_lab.inspection.gather import inspect_rung, trace_barriers
from gemmery_lab.inspection.records import SideBySide
from gemmery_lab.inspection.sections import differences, sections

pytestmark = pytest.mark.sampled(3)

pytest.importorskip("cuda.bindings")
STAGES, STEPS = 3, 7
SIDE = 128 * 64 * 2  # bytes of a tile of A or of B


@pytest.fixture(scope="module")
def traced():
    """A ring of three stages in clusters of two blocks, warpgroup 2 of which copies."""
    trace = PipelineTrace()
    case = hopper.pipeline(256, 512, 64 * STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernel, "emulated", lambda *args, **options: emulated(*args, **{**options, "observers": (trace,)})
        )
        kernel.emulate(case.source, case.kernel, case.grid, case.block, case.args, case.shared, "sm_90a")
    return trace


def test_all_that_happens_at_the_barriers_of_the_first_block_is_counted(traced):
    """Its stages are filled by three copies each, one of them the other block's, and handed back by both blocks."""
    assert traced.timeline.counts == {
        "copies": 3 * STEPS,
        "bytes": 2 * SIDE * STEPS,
        "arrivals": STEPS + 4 * STEPS,
        "phases": 2 * STEPS,
        "waits": 3 * STEPS,
        "slept": traced.timeline.counts["slept"],
        "products": 2 * 4 * STEPS,
    }


def test_each_stage_has_the_barrier_that_its_copier_waits_for(traced):
    timeline = traced.timeline
    full = min(timeline.full)
    assert timeline.full == tuple(full + 8 * stage for stage in range(STAGES))
    assert timeline.empty == tuple(full + 8 * (STAGES + stage) for stage in range(STAGES))


def test_events_come_in_their_order(traced):
    """Of each fill of a stage: expected, copied, landed, ended, passed; products begin before they are waited for."""
    events = traced.timeline.events
    assert [event.step for event in events] == sorted(event.step for event in events)
    first = traced.timeline.full[0]
    at = {}
    for number, event in enumerate(events):
        at.setdefault((event.what, event.barrier), number)
    order = [at[what, first] for what in ("expects", "lands", "ends", "passes")]
    assert order == sorted(order)
    assert at["multiplies", -1] < at["retires", -1]
    assert {event.who for event in events if event.what == "multiplies"} == {0, 1}
    assert {event.who for event in events if event.what == "copies"} == {2, NOBODY}  # NOBODY: the other block's
    assert {event.who for event in events if event.what in ("lands", "ends")} == {NOBODY}


def test_copies_out_of_shared_memory_are_told_once(traced):
    """The block's part of C."""
    stores = [event for event in traced.timeline.events if event.what == "stores"]
    assert sum(event.amount for event in stores) == 128 * 128 * 2
    assert {event.who for event in stores} == {0, 1}


def test_a_tile_has_the_place_of_each_of_its_pieces(traced):
    """Rows of 128 bytes under the swizzle, and the pieces of k that the first products read."""
    a, b = traced.tiles
    assert (a.box, b.box, a.size, a.swizzle) == ((64, 64), (64, 128), 2, 128)
    start = min(b.places)
    assert [place - start for place in b.places] == [
        row * 128 + (piece ^ row % 8) * 16 for row in range(128) for piece in range(8)
    ]
    for part in range(4):
        assert b.reads[part] == {
            start + row * 128 + (piece ^ row % 8) * 16 for row in range(128) for piece in (2 * part, 2 * part + 1)
        }
    assert "m64n128k16" in b.opcode


# ---- rungs ----

H200 = Problem(512, 512, 512, "bf16", "bf16", device="h200", alignments=(16, 16, 16))


@pytest.mark.parametrize(("layouts", "box"), [(("row", "col"), (64, 128)), (("col", "row"), (64, 64))])
def test_a_rung_is_traced_at_a_product_of_one_tile(layouts, box):
    """Twice through its ring; boxes of operands that are contiguous along m or n have 64 rows of k."""
    rung = find(CUDA, "wgmma_tma")
    problem = H200._replace(a_layout=layouts[0], b_layout=layouts[1])
    trace = trace_barriers(rung, problem, rung.default, "sm_90a")
    counts = trace.timeline.counts
    assert counts["phases"] == 2 * rung.default["stages"]
    assert [tile.array for tile in trace.tiles] == ["A", "B"]
    assert [tile.box for tile in trace.tiles] == [box, box]
    for tile in trace.tiles:
        assert sorted(tile.places) == list(range(min(tile.places), max(tile.places) + 16, 16))


def test_a_rung_without_tensor_maps_has_no_timeline():
    rung = find(CUDA, "mma_ldmatrix")
    assert trace_barriers(rung, H200, rung.default, "sm_90a") is None


def test_an_inspection_draws_and_counts_them():
    inspection = inspect_rung("wgmma_tma", n=256, dtype="bf16", device="h200")
    names = [plot.name for plot in pictures(inspection.emulated.chosen, inspection.emulated.source)]
    assert names[:3] == ["barriers-1", "swizzle-1", "swizzle-2"]
    assert "registers by role" not in dict(sections(inspection)[0].rows)
    (section,) = (part for part in sections(inspection) if part.title == "Barriers of the first block")
    assert dict(section.rows)["ring"] == "4 stages"
    assert dict(section.rows)["tensor copies"] == "24, 262,144 bytes"


def test_barriers_of_two_rungs_are_compared():
    """Of a tile of 128 x 128, and of one of 128 x 256 in a cluster of two, which share rows of four boxes of B."""
    pair = SideBySide(
        *(inspect_rung(f"wgmma_{name}", n=512, dtype="f16", device="h200") for name in ("tma", "cluster"))
    )
    (section,) = (part for part in differences(pair) if part.title == "Barriers of the first block")
    rows = {row[0]: row[1:] for row in section.rows}
    assert rows["products of warpgroups"] == ("64", "64", "")
    assert rows["tensor copies"] == ("24", "72", "3.00×")


def test_an_inspection_tells_the_roles_of_warpgroups_and_their_cluster():
    inspection = inspect_rung("wgmma_cluster", n=512, dtype="f16", device="h200", counters=False)
    launch = dict(sections(inspection)[0].rows)
    assert launch["registers by role"] == "232 and 40 a thread, which warpgroups set themselves (setmaxnreg)"
    assert launch["cluster"] == "2 blocks"


def test_8_bit_types_are_inspected_with_their_results_and_their_peak():
    inspection = inspect_rung("wgmma_epilogue", n=512, dtype="float8_e4m3fn", device="h200", counters=False)
    problem = inspection.problem
    assert (problem.dtype, problem.out, problem.b_layout) == ("e4m3", "bf16", "col")
    assert inspection.loads.peak == inspection.device.peak("tensor_8") == 2 * inspection.device.peak("tensor")


@pytest.mark.skipif(not sass.nvdisasm(), reason=sass.MISSING)
@pytest.mark.parametrize(
    ("rung", "dtype", "opcode", "said"),
    [
        ("wgmma_tma", "bf16", "HGMMA.64x", "wgmma, 4 in the kernel with 1 wait, 4 in the main loop with 1 wait"),
        ("wgmma_cluster", "f16", "HGMMA.64x", "wgmma, 8 in the kernel with 2 waits, 4 in the main loop with 1 wait"),
        ("wgmma_epilogue", "e4m3", "QGMMA.64x", None),
    ],
)
def test_products_are_counted_in_machine_code(rung, dtype, opcode, said):
    inspection = inspect_rung(rung, n=512, dtype=dtype, device="h200", counters=False)
    assert any(name.startswith(opcode) for name in inspection.kernels[-1].counts)
    assert said is None or dict(sections(inspection)[0].rows)["products"] == said
