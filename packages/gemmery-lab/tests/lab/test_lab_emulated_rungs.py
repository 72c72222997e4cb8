"""The ladder on the emulator: its products, counters, roofs, faults, table and page."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

import gemmery_lab as lab
from gemmery.cuda.device import KNOWN
from gemmery.errors import ArgumentError, EmulationError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_emulator.kernels.prediction import Prediction
from gemmery_emulator.pages import svg
from gemmery_emulator.pages.writing import as_json
from gemmery_lab import asked, on_emulator
from gemmery_lab.climb import element
from gemmery_lab.on_emulator import emulated_rung, expects, product_for
from gemmery_lab.report import emulated_tables
from gemmery_lab.report.emulated_tables import complaints, emulated_sheets, overviews, predicted_sheets
from gemmery_lab.report.page import emulated_page, roofs
from gemmery_lab.rung_counts import EmulatedLadder, PredictedRung

pytestmark = pytest.mark.sampled(3)

pytest.importorskip("cuda.bindings")

H200 = KNOWN["h200"]
FEW = ["simt_single_block", "simt_naive", "simt_uncoalesced", "mma_ldmatrix", "gemv_warp"]


@pytest.fixture(scope="module")
def few():
    """A few rungs at 128, compiled for an A100."""
    return lab.emulated_ladder(FEW, [128], device="a100")


def test_each_rung_gets_a_product_that_shows_it(few):
    shapes = {one.rung: (one.m, one.n, one.k, one.dtype) for one in few.rungs}
    assert shapes == {
        "simt_single_block": (32, 32, 32, "f32"),
        "simt_naive": (128, 128, 128, "f32"),
        "simt_uncoalesced": (128, 128, 128, "f32"),
        "mma_ldmatrix": (128, 128, 128, "f16"),
        "gemv_warp": (1, 128, 128, "f32"),
    }
    assert all(0 < one.error <= 1 and not one.wrong for one in few.rungs)


def test_counts_of_naive_are_those_of_its_loop(few):
    """Each warp loads a word of A (a sector) and 32 of B (4 sectors) for each k, and stores 32 of C."""
    counts = find_one(few, "simt_naive").counts
    warps, k = 128 * 128 // 32, 128
    assert counts.flops == 2 * 128**3
    assert counts.requests == warps * (2 * k + 1)
    assert counts.sectors == warps * (5 * k + 4)
    assert counts.bytes == 32 * counts.sectors
    assert (counts.load_sectors_a_request, counts.store_sectors_a_request) == (2.5, 4)
    assert counts.wavefronts == counts.bank_conflicts == counts.divergent_branches == 0


def test_the_roof_is_the_longest_of_four_times(few):
    one, card = find_one(few, "simt_uncoalesced"), KNOWN["a100"]
    assert one.unit == "f32"
    assert one.compute_seconds == pytest.approx(2 * 128**3 / (card.peak("f32") * 1e9))
    assert one.memory_seconds == pytest.approx(one.counts.bytes / (card.bandwidth * 1e9))
    assert one.roof_seconds == one.memory_seconds > one.compute_seconds
    assert one.limit == "memory"
    clocks = 108 * 1.41e9
    assert one.issue_seconds == pytest.approx(one.counts.warp_instructions / 4 / clocks)
    assert find_one(few, "mma_ldmatrix").shared_seconds == pytest.approx(1536 / clocks)
    assert one.intensity == one.counts.flops / one.counts.bytes
    assert find_one(few, "mma_ldmatrix").unit == "tensor"


CHAIN = ["simt_threadtile", "simt_vectorized", "simt_padded", "simt_swizzled", "simt_warptile"]


@pytest.fixture(scope="module")
def chain():
    """Rungs on CUDA cores with the same multiply-adds, compiled for an H200."""
    return lab.emulated_ladder(CHAIN, [128])


def test_roofs_of_shared_memory_and_issue_slots_rank_rungs_of_equal_arithmetic(chain):
    """Measured on an H200 too: padding gains a third, the swizzle ties with it."""
    assert len({one.compute_seconds for one in chain.rungs}) == 1
    assert [one.limit for one in chain.rungs] == ["memory", "shared", "issue", "issue", "issue"]
    threads, vectors, padded, swizzled, warps = (one.roof_seconds for one in chain.rungs)
    assert threads > 1.2 * vectors > 1.2 * 1.2 * padded
    assert swizzled == pytest.approx(padded, rel=0.05)
    assert warps == pytest.approx(padded, rel=0.05)
    assert find_one(chain, "simt_warptile").shared_seconds < 0.7 * find_one(chain, "simt_padded").shared_seconds


def test_a_gain_names_the_parent_and_is_of_one_product(chain):
    rows = {row[0].text: row[-1].text for row in overviews(chain)[0].rows}
    assert rows["simt_threadtile"] == ""  # its parent did not run
    assert rows["simt_vectorized"] == "1.39× simt_threadtile"
    assert rows["simt_warptile"].endswith("× simt_padded")
    other = replace(find_one(chain, "simt_padded"), dtype="f64")
    assert chain.gain(other, "simt_vectorized") == 0


def test_wavefronts_that_conflicts_do_not_explain_are_explained():
    """Lanes that read the same words share a wavefront of wide loads; cp.async takes more than its bytes would."""
    run = lab.emulated_ladder(["simt_vectorized", "simt_padded", "simt_pipelined"], [128])
    (sheet,) = [sheet for sheet in emulated_sheets(run) if sheet.title.startswith("Shared")]
    for one in run.rungs:
        counts = one.counts
        assert counts.wavefronts == counts.shared_load_wavefronts + counts.shared_store_wavefronts
        rest = counts.wavefronts - counts.bank_conflicts - counts.wavefronts_ideal
        named = [note for note in sheet.notes if f"{one.rung} {abs(rest):,}" in note]
        assert len(named) == (rest != 0), one.rung
        assert not named or ("cp.async" in named[0]) == (rest > 0)


def test_a_terminal_shows_one_table_and_the_verdict(chain):
    shown = io.StringIO()
    emulated_tables.show_emulated(chain, Console(file=shown, width=120))
    text = shown.getvalue()
    assert text.count("simt_swizzled ") == 1
    assert "5 of 5 results are right, no findings, all counters are as expected." in text
    broken = replace(chain.rungs[0], error=2.0, findings=("a.cu:3: race",), expected={"bank_conflicts": 0})
    bad = EmulatedLadder(chain.device, chain.started, (broken, replace(chain.rungs[1], refused="too large")))
    shown = io.StringIO()
    emulated_tables.show_emulated(bad, Console(file=shown, width=200))
    assert "0 of 1 results are right, 1 finding, 1 counter not as expected; 1 rung did not run." in shown.getvalue()
    for said in ("outside its error bound", "a.cu:3: race", "claims bank_conflicts = 0, and has 12288", "too large"):
        assert said in shown.getvalue()


def test_f32_of_fewer_bits_runs_on_tensor_cores():
    run = lab.emulated_ladder(["mma_pipelined", "mma_f64"], [32], "tf32")
    assert [(one.dtype, one.unit) for one in run.rungs] == [("tf32", "tensor_tf32"), ("tf32", "")]
    assert "it is written for f64, not f32" in run.rungs[1].refused
    assert run.rungs[0].error <= 1


def test_a_dtype_leaves_out_the_rungs_without_it():
    wanted = [rung.name for rung in CUDA if "int8" in rung.dtypes]
    run = lab.emulated_ladder(sizes=[16], dtype="int8")
    assert [one.rung for one in run.rungs] == wanted
    assert all(one.error <= 1 and not one.wrong for one in run.rungs if not one.refused)
    assert [one.rung for one in run.rungs if one.refused] == ["wgmma_digits"]


def test_a_rung_that_the_card_lacks_instructions_for_says_so():
    run = lab.emulated_ladder(["mma_ldmatrix", "wmma_f16"], [32], device="t4")
    assert [bool(one.refused) for one in run.rungs] == [True, False]
    assert "needs sm_80" in run.rungs[0].refused
    assert not complaints(run)


def test_what_is_not_modeled_is_the_reason_that_a_rung_did_not_run(monkeypatch):
    def stop(*_, **__):
        raise EmulationError("a.cu:3: brkpt is not modeled")

    monkeypatch.setattr(on_emulator, "run_rung", stop)
    run = lab.emulated_ladder(["simt_naive"], [16])
    assert run.rungs[0].refused == "a.cu:3: brkpt is not modeled"
    shown = io.StringIO()
    emulated_tables.show_emulated(run, Console(file=shown, width=120))
    assert shown.getvalue() == "No rung ran: simt_naive, a.cu:3: brkpt is not modeled.\n"
    assert "brkpt is not modeled" in emulated_page(run)


def test_claims_are_of_aligned_products_alone():
    smem = find(CUDA, "simt_smem")
    assert expects(smem, product_for(smem, 256, element(""), H200))
    for n, dtype in [(32, ""), (100, ""), (256, "f16"), (192, "")]:
        assert not expects(smem, product_for(smem, n, element(dtype), H200))


def test_a_claim_that_does_not_hold_is_wrong(monkeypatch):
    boast = find(CUDA, "simt_uncoalesced")._replace(expect={"load_sectors_a_request": 4, "divergent_branches": 0})
    found = emulated_rung(boast, product_for(boast, 128, element(""), H200), KNOWN["h200"])
    assert found.unmet == ("load_sectors_a_request",)
    assert found.wrong == ("claims load_sectors_a_request = 4, and has 16.5",)


def test_a_result_outside_its_bound_is_wrong():
    strict = find(CUDA, "simt_naive")._replace(bound=lambda _: 0.0)
    found = emulated_rung(strict, product_for(strict, 16, element(""), H200), KNOWN["h200"])
    assert not found.error <= 1
    assert "outside its error bound" in found.wrong[0]


def test_what_is_shown(few):
    shown = io.StringIO()
    emulated_tables.show_emulated(few, Console(file=shown, width=120))
    text = shown.getvalue()
    assert "a100: sm_80, 108 multiprocessors" in text
    assert "no cache is modeled" in " ".join(text.split())
    titles = [sheet.title for sheet in emulated_sheets(few)]
    assert titles == [
        "Global memory, n = 128",
        "Shared memory and branches, n = 128",
        "Roofs: times without caches, n = 128",
        "Warp instructions by kind, in thousands, n = 128",
        "Checks, n = 128",
    ]
    (naive,) = [row for row in emulated_sheets(few)[0].rows if row[0].text == "simt_naive"]
    assert [cell.text for cell in naive[1:5]] == ["131,584", "329,728", "2.50", "4.00"]


def test_what_is_wrong_is_shown_where_it_is(few):
    bad = replace(find_one(few, "simt_naive"), error=float("nan"), findings=("a.cu:3: race: two lanes",))
    run = EmulatedLadder(few.device, few.started, (bad,))
    assert len(complaints(run)) == 2
    row = emulated_sheets(run)[-1].rows[0]
    assert [cell.tone for cell in row].count("bad") == 2
    assert "a.cu:3: race: two lanes" in emulated_page(run)


def test_the_page_needs_nothing_else(few):
    text = emulated_page(few)
    assert text.startswith("<!doctype html>")
    assert set(re.findall(r"https?://[^\s\"<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert all(name in text for name in FEW)
    assert "Expected where all tiles are whole: divergent branches 0, load sectors per request 16.5" in text


def test_the_page_shows_roofs_and_which_rung_grew_from_which(chain):
    text = emulated_page(chain)
    (plot,) = roofs(chain)
    assert plot.svg in text
    assert set(re.findall(r"var\(--(\w+)\)", plot.svg)) <= set(svg.PALETTE)
    assert all(f"{one.roof_seconds * 1e6:.3g}" in plot.svg for one in chain.rungs)
    tree = text[text.index("Rungs under their") : text.index("The factor is")]
    assert tree.count("<ul class=tree>") == 4  # vectorized in threadtile, padded in that, two siblings in that
    assert "1.31× simt_vectorized" in tree
    assert 'href="#rung-simt_padded"' in tree
    assert 'id="rung-simt_padded"' in text
    assert "packages/gemmery/src/gemmery/cuda/kernels/simt_padded.cu" in text
    assert "gemmery ladder diff simt_vectorized simt_padded" in text


def test_the_page_draws_an_access_of_each_rung(chain, few):
    """To shared memory where there is one, and says once how to read such a picture."""
    text = emulated_page(chain)
    drawn = re.findall(r"<h2>Banks of (\S+), ", text)
    assert len(drawn) == len(chain.rungs)
    assert text.count("boxes on one bank are stacked") == 1
    assert "wavefronts, 4 of them bank conflicts" in text  # simt_vectorized
    assert "Sectors of ld.global" in emulated_page(few)  # simt_naive has no shared memory
    assert html.unescape(text).count("<svg ") == len(drawn) + 1


def test_first_letters_of_names_stay_as_they_are():
    text = emulated_page(lab.emulated_ladder(["mma_f64", "gemv_thread_smem"], [32]))
    for name in ("mma_f64", "gemv_thread_smem"):
        assert f"<b>{find(CUDA, name).idea}</b>" in text


def test_json_is_the_record(few):
    found = json.loads(as_json(few))
    assert [one["rung"] for one in found["rungs"]] == FEW
    assert found["rungs"][1]["counts"]["load_sectors_a_request"] == 2.5
    assert found["rungs"][1]["kinds"]["fma"] == 128**3 // 32


def test_progress_is_told_before_and_after():
    told = []
    run = lab.emulated_ladder(["simt_naive", "simt_smem"], [16], on_rung=lambda *event: told.append(event))
    assert [(done, total, record) for _, done, total, record in told] == [
        (0, 2, None),
        (1, 2, run.rungs[0]),
        (1, 2, None),
        (2, 2, run.rungs[1]),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rungs": ["packed"]}, "'packed' runs on the CPU"),
        ({"sizes": [1025]}, "1 to 1024"),
        ({"dtype": "quad"}, "Supported: f32"),
        ({"device": "vx1"}, "known: h200"),
    ],
)
def test_bad_requests_are_refused(given, said):
    with pytest.raises(ArgumentError, match=said):
        lab.emulated_ladder(**given)


def find_one(run, name):
    return next(one for one in run.rungs if one.rung == name)


def test_cards_are_known_in_any_case():
    """RTX3090 is rtx3090."""
    assert asked.emulated_card("RTX3090") is asked.emulated_card("rtx3090")


@pytest.mark.parametrize(
    ("rungs", "said"),
    [
        (["simt_naive"], "The grid has 1 block at this size"),
        (["simt_naive", "simt_uncoalesced"], "All grids have 1 block at this size"),
    ],
)
def test_the_number_of_grids_agrees_with_its_verb(rungs, said):
    shown = io.StringIO()
    emulated_tables.show_emulated(lab.emulated_ladder(rungs, [8]), Console(file=shown, width=200))
    assert said in shown.getvalue()


def test_a_limit_is_told_once_and_columns_without_records_are_left_out():
    """A prediction names what bounds a rung, so the table of roofs does not; without one it does."""
    ladder = lab.emulated_ladder(["simt_smem"], [32])
    (counted,) = overviews(ladder)
    assert "limit" in counted.head
    row = PredictedRung("simt_smem", 32, 32, 32, "f32", prediction=Prediction("h200", 2e-6, "issue", {}))
    predicted = replace(ladder, predicted=(row, replace(row, prediction=None, refused="no")))
    (beside,) = overviews(predicted)
    (times,) = predicted_sheets(predicted)
    assert "limit" not in beside.head
    assert not {"measured", "ratio"} & set(times.head)
    page = emulated_page(ladder)
    assert "predicted for" not in page
    assert "without caches" in page
    assert "Each rung multiplied two small matrices" in page
    assert "least time" not in page


def test_the_predicted_ladder_comes_first():
    """Bars grow with the rate, and a page draws them."""
    ladder = lab.emulated_ladder(["simt_naive"], [8])
    names = ["simt_uncoalesced", "simt_naive", "simt_pipelined", "gemv_warp"]
    ladder = replace(ladder, predicted=lab.predicted_ladder(names, [512]))
    shown = io.StringIO()
    emulated_tables.show_emulated(ladder, Console(file=shown, width=80))
    lines = shown.getvalue().splitlines()
    assert lines[0].strip() == "The ladder at n = 512, predicted on h200"
    lengths = {line.split()[0]: line.count("█") for line in lines if "░" in line or "█" in line}
    assert lengths["simt_uncoalesced"] == 1 < lengths["simt_naive"] < lengths["simt_pipelined"] == 16
    page = emulated_page(ladder)
    assert page.index("The ladder at n = 512, predicted for h200") < page.index("From rung to rung")
    assert "was measured on this card" not in page
    other = replace(ladder, device=KNOWN["a100"], predicted=lab.predicted_ladder(names[:2], [512], card="a100"))
    assert "No constant was measured on this card" in emulated_page(other)
