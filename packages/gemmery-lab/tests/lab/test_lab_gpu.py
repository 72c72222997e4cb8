"""The ladder on a made-up GPU: checks, turns, refusals, rivals, and rungs predicted to be too slow."""

from dataclasses import replace

import numpy as np
import pytest

from gemmery import dtypes
from gemmery.ladder.cuda import CUDA
from gemmery_lab import climb, on_cuda
from gemmery_lab import session as contest
from gemmery_lab import session as sessions
from gemmery_lab.experiments import LADDER
from gemmery_lab.measure.work import Work
from gemmery_lab.measurements import WRONG
from gemmery_lab.on_cuda import NO_RIVAL
from gemmery_lab.session import Session, Task
from made_up_device import RATE, WORK, MadeUp, measured, numpy_for_a_device, rival, rung, session

__all__ = ["numpy_for_a_device"]  # a fixture


def test_a_rung_is_checked_and_timed_beside_its_parent_and_cublas():
    (slow, quick), (cublas,) = measured(rung("simt_a"), rung("simt_b", "simt_a", speed=4.0))
    assert slow.seconds == pytest.approx(WORK.problem.flops / RATE, rel=1e-3)
    assert quick.versus == pytest.approx({"cublas": 0.5, "simt_a": 4.0}, rel=1e-3)
    assert quick.spread["simt_a"] < 0.1  # they took turns
    assert quick.checked
    assert 0 < quick.error <= 1
    assert (quick.unit, quick.peak_gflops, quick.bandwidth_gbs, quick.copy_gbs) == ("CUDA cores", 6e4, 4400.0, 4000.0)
    assert quick.clock_mhz == 1755
    assert cublas.seconds == pytest.approx(slow.seconds / 8, rel=1e-3)
    assert cublas.note == "cuBLAS 99, torch.mm"


def test_the_rival_is_shown_as_it_ran_beside_the_quickest_rung():
    """Beside a slow one a device is cooler, and its clocks are higher."""
    three = rung("simt_a"), rung("simt_b", speed=4.0), rung("simt_c", speed=2.0)
    on, clocks = session(rivals=(rival(),), ladder=three), iter([0, 1980, 0, 1500, 0, 1700])
    on.backend.monitor.clock = lambda: next(clocks)
    found = sessions.Level(on, "ladder", WORK, 0, 5.0)
    assert [found.measure(one, {}, None).clock_mhz for one in three] == [1980, 1500, 1700]
    (cublas,) = found.rivals()
    assert cublas.clock_mhz == 1500


def test_a_wrong_product_is_recorded_as_one():
    def off(a, b, c):
        np.matmul(a, b, out=c)
        c[..., -1, -1] += 1

    (m,), _ = measured(rung("simt_off", product=off))
    assert m.error > 1


def test_an_element_that_is_not_written_is_found_though_no_sample_holds_it(monkeypatch):
    monkeypatch.setattr(on_cuda, "SAMPLED_WIDE", 1e4)
    assert 31 not in on_cuda.sample((1, 600, 600), 64, 1e4)[1]

    def lazy(a, b, c):
        held = c[0, 31, 17]
        np.matmul(a, b, out=c)
        c[0, 31, 17] = held

    (m,), _ = measured(rung("simt_lazy", product=lazy), work=replace(WORK, m=600, n=600))
    assert m.error == WRONG


def test_refusals_are_recorded_with_their_reasons():
    (types, shape), _ = measured(
        rung("mma_halves", dtypes=("f16",)), rung("simt_small", refuses=lambda problem: f"n = {problem.n}: too large")
    )
    assert types.refused == "it is written for f16, not f32"
    assert shape.refused == "n = 64: too large"
    assert not types.seconds
    assert types.unit == "CUDA cores"


def test_without_a_library_the_column_says_what_to_install():
    (m,), (cublas,) = measured(rung("simt_a"), rivals=())
    assert m.seconds
    assert m.versus == {}
    assert cublas.refused == NO_RIVAL


def test_a_type_that_the_library_lacks_is_said_and_the_rungs_run():
    (m,), (cublas,) = measured(rung("simt_a"), rivals=(rival(serves=("f64",)),))
    assert m.seconds
    assert cublas.refused == "no product of f32"


def test_a_rung_is_not_run_when_its_time_at_a_smaller_size_says_that_it_is_too_slow():
    slow = rung("simt_slow")
    on, half = session(rivals=(rival(),), ladder=(slow,)), replace(WORK, m=512, n=512, k=512)
    before = sessions.Level(on, "ladder", half, 0, 1.0).measure(slow, {}, None)
    work = replace(WORK, m=1024, n=1024, k=1024)
    m = sessions.Level(on, "ladder", work, 0, 1.0).measure(slow, {}, replace(before, seconds=0.5))
    assert m.refused == "predicted to take 4 s a call, above the limit of 1 s"


def test_a_product_that_leaves_a_device_idle_predicts_nothing():
    quick = rung("simt_quick", speed=8.0)
    on = session(rivals=(rival(),), ladder=(quick,))
    before = sessions.Level(on, "ladder", WORK, 0, 1.0).measure(quick, {}, None)
    work = replace(WORK, m=1024, n=1024, k=1024)
    m = sessions.Level(on, "ladder", work, 0, 1.0).measure(quick, {}, replace(before, seconds=1.0))
    assert not m.refused


def test_the_first_size_is_predicted_by_a_smaller_one():
    work = replace(WORK, m=1024, n=1024, k=1024)
    (m,), _ = measured(rung("simt_slow"), work=work, seconds=1.0)
    assert "predicted to take 2.1 s a call" in m.refused


@pytest.mark.parametrize("name", [one.name for one in CUDA])
def test_every_rung_is_shown_on_a_product_that_it_is_for(name):
    one = next(other for other in CUDA if other.name == name)
    dtype = one.dtypes[0]
    out = "bf16" if dtype in dtypes.FLOAT8 else dtype
    like = Work(1, 1, 1, dtype, out, precision="tf32" if dtype == "f32" else "")
    work = on_cuda.product_for(one, 512, like, "cuda:0")
    if name.startswith("gemv_"):
        assert (work.m, work.n, work.k, work.b_layout) == (1, 512, 512, "col")
    elif name.endswith("_batched"):
        assert (work.m, work.n, work.k, work.batch) == (16, 16, 16, 32 * 32)
    else:
        assert (work.m, work.n, work.k, work.batch) == (512, 512, 512, 1)
    assert bool(one.refuses(work.problem)) == (name == "simt_single_block")


def test_a_ladder_climbs_each_size_and_ends_it_with_its_rival(monkeypatch):
    both = rung("simt_a"), rung("simt_b", "simt_a", 2.0)
    backend, events = MadeUp(rivals=(rival(),), ladder=both), []
    monkeypatch.setattr(sessions, "open_session", lambda gpu, *options: Session(backend, *options))
    run = climb.climb(
        LADDER, climb.RungPlan([(one, {}) for one in both], (16, 32), "f32", "cuda", "cuda"), events.append
    )
    assert [(m.kernel, m.n) for m in run.measurements] == [
        (kernel, n) for n in (16, 32) for kernel in ("simt_a", "simt_b", "cublas")
    ]
    assert max(event.done for event in events) == 4


def test_rungs_of_a_suite_take_turns_with_each_other_and_the_rivals():
    three = (rung("simt_a"), rung("simt_b", "simt_a", 2.0), rung("mma_c", dtypes=("f16",)))
    on = session(rivals=(rival(),), ladder=three)
    labels = tuple(one.name for one in three)
    found = contest.contest(on, Task("mine", WORK, labels, 0, (on.backend.rival("cublas"),), 0.1))
    by_kernel = {m.kernel: m for m in found}
    assert by_kernel["simt_b"].versus == pytest.approx({"simt_a": 2.0, "cublas": 0.25}, rel=1e-3)
    assert by_kernel["simt_a"].versus == pytest.approx({"simt_b": 0.5, "cublas": 0.125}, rel=1e-3)
    assert by_kernel["cublas"].versus == pytest.approx({"simt_a": 8.0, "simt_b": 4.0}, rel=1e-3)
    assert by_kernel["mma_c"].refused == "it is written for f16, not f32"
