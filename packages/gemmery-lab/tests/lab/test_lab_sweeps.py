"""The experiments on a GPU: what is asked of the device, and how records are shown, without one."""

import io
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

import gemmery_lab as lab
import records
from gemmery.cuda import driver
from gemmery.cuda.driver import find
from gemmery.cuda.geometry import refusal
from gemmery.errors import ArgumentError, DeviceError, RefusedError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find as find_rung
from gemmery_lab import climb as climbs
from gemmery_lab import experiments
from gemmery_lab.measure.record import Gpu, Run
from gemmery_lab.on_cuda import product_for
from gemmery_lab.report import terminal, words
from gemmery_lab.report.page import figures, page
from gemmery_lab.report.tables import sheets

MACHINE = replace(records.MACHINE, gpu=Gpu(name="Made-up GPU", capability=90, sms=132, l2=60 << 20, clock_mhz=1980))
NO_BLOCK = "2048 threads per block: Made-up GPU runs at most 1024"


@pytest.fixture
def asked(monkeypatch):
    """What reaches the climb on a device: each call is kept, and answered with no records."""
    calls = []

    def climb(experiment, plan, on_event, store, shape):
        device, variants = plan.device, plan.variants
        product = shape or partial(product_for, like=climbs.element(plan.dtype), device=device)
        works = [str(product(rung, n)) for n in plan.sizes for rung, _ in variants[:1]]
        rungs = [(rung.name, dict(config)) for rung, config in variants]
        calls.append((experiment.suite, rungs, plan.sizes, climbs.asked.ordinal(device), works))
        return Run(MACHINE, records.STARTED, ())

    monkeypatch.setattr(climbs, "climb", climb)
    return calls


@pytest.mark.parametrize(
    ("experiment", "rung", "key", "values"),
    [
        ("threads", "simt_linear", "threads", [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]),
        ("tile", "simt_smem", "tile", [2, 4, 8, 16, 32, 64]),
    ],
)
def test_a_key_is_varied_to_what_the_device_cannot_run(asked, experiment, rung, key, values):
    lab.sweep(experiment, sizes=[512])
    ((suite, chosen, sizes, device, _),) = asked
    assert (suite, sizes, device) == (f"sweep_{experiment}", (512,), 0)
    assert chosen == [(rung, {key: value}) for value in values]


@pytest.mark.parametrize(("experiment", "beyond"), [("threads", 2048), ("tile", 64)])
def test_the_value_beyond_is_refused_with_its_reason(experiment, beyond):
    plan = experiments.sweep(experiment)
    points = plan.points["cuda"]
    rung = next(rung for rung in CUDA if rung.name == points.variants[0][0])
    problem = climbs.element("f32").problem._replace(m=512, n=512, k=512, device="h200")
    reasons = {}
    for value in points.values:
        try:
            reasons[value] = refusal(rung.geometry(problem, {**rung.default, plan.axis.key: value}), find("h200"))
        except RefusedError as error:
            reasons[value] = str(error)
    assert [value for value, reason in reasons.items() if reason] == [beyond]
    assert "threads per block: h200 runs at most 1024" in reasons[beyond]


def test_every_variant_of_a_vector_product_takes_part(asked):
    lab.sweep("gemv", sizes=[1, 64], dtype="f16", device="cuda:1")
    ((suite, chosen, sizes, device, works),) = asked
    assert (suite, sizes, device) == ("sweep_gemv", (1, 64), 1)
    plain = [(name, config) for name, config in chosen if name != "gemv_vectorized"]
    assert len(plain) == len({(name, *config.items()) for name, config in plain}) == 12
    assert ("gemv_warp", {"r": 16, "smem": 1}) in chosen
    assert works == ["1x1x128 f16, b transposed", "1x64x128 f16, b transposed"]


def test_the_other_length_is_varied_too(asked):
    lab.sweep("gemv_k", sizes=[32], rungs=["gemv_vectorized"], dtype="bf16")
    ((_, chosen, _, _, works),) = asked
    assert chosen == [("gemv_vectorized", {})]
    assert works == ["1x4096x32 bf16, b transposed"]


def test_rungs_that_do_not_serve_the_type_are_left_out_unless_named(asked):
    lab.sweep("stages", dtype="f16")
    lab.sweep("stages", dtype="f64")
    lab.sweep("stages", dtype="f64", rungs=["mma_pipelined"])
    lab.sweep("size", dtype="f16", device="cuda")
    halves, doubles, named, of_sizes = ({name for name, _ in chosen} for _, chosen, *_ in asked)
    assert "mma_pipelined" in halves
    assert "mma_f64" not in halves
    assert doubles == {"simt_pipelined", "mma_f64"}
    assert named == {"mma_pipelined"}
    assert {"simt_naive", "mma_pipelined"} <= of_sizes


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: lab.sweep("color"), "threads, tile, stages, gemv, gemv_k"),
        (lambda: lab.sweep("threads", sizes=[8, 16]), "varied at one size"),
        (lambda: lab.sweep("threads", rungs=["simt_smem"]), "no threads to vary; these have: .*simt_linear"),
        (lambda: lab.sweep("threads", device="cpu"), "runs on cuda"),
        (lambda: lab.sweep("block", device="cuda"), "runs on cpu"),
        (lambda: lab.sweep("size", device="tpu"), "'tpu' is not known"),
        (lambda: lab.sweep("tile", dtype="float8"), "'float8'"),
        (lambda: lab.sweep("gemv", sizes=[0]), "size 0"),
    ],
)
def test_a_bad_argument_is_named(asked, call, named):
    with pytest.raises(ArgumentError, match=named):
        call()
    assert asked == []


ROW = find_rung(CPU, "simd_row")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"variants": [("simd_row", {})]}, "'simd_row': a plan has rungs"),
        ({"variants": [(ROW, {"tile": 3})]}, "simd_row has no such key"),
        ({"sizes": (0,)}, "size 0"),
        ({"dtype": "float8"}, "'float8'"),
        ({"device": "cuda"}, "'cuda' is none of kind 'cpu'"),
        ({"kind": "cuda"}, "'cpu' is none of kind 'cuda'"),
        ({"seconds": 0}, "seconds=0"),
        ({"kind": "cuda", "device": "cuda", "threads": 2}, "threads=2"),
    ],
)
def test_a_plan_that_nothing_can_run_is_refused(wrong, named):
    right = {"variants": [(ROW, {})], "sizes": (32, 16, 16), "dtype": "float32", "kind": "cpu", "device": "cpu"}
    plan = climbs.RungPlan(**right)
    assert (plan.sizes, plan.dtype) == ((16, 32), "f32")
    with pytest.raises(ArgumentError, match=named):
        climbs.RungPlan(**{**right, **wrong})


@pytest.mark.skipif(not driver.missing(), reason="there is a device")
def test_without_a_device_one_line_says_what_is_missing():
    with pytest.raises(DeviceError, match=r"cuda:0: .*(driver|bindings|device)"):
        lab.sweep("threads")


def of_threads():
    """Milliseconds of a block-size sweep at n = 8192, published for an older card; beyond it, a refusal."""
    taken = (65443, 34350, 19655, 13560, 6919, 5776, 5652, 5651, 5625, 5505)
    found = [
        records.measurement("sweep_threads", "simt_linear", 8192, 2 * 8192**3 / ms / 1e6, config={"threads": 2**power})
        for power, ms in enumerate(taken, 1)
    ]
    none = {"config": {"threads": 2048}, "refused": NO_BLOCK, "checked": False, "error": 0.0}
    refused = records.measurement("sweep_threads", "simt_linear", 8192, 0, **none)
    return Run(MACHINE, records.STARTED, (*found, refused, records.measurement("sweep_threads", "cublas", 8192, 9000)))


def of_vectors():
    found = []
    for n in (1, 64, 4096):
        for place, config in enumerate(({"r": 1, "smem": 0}, {"r": 16, "smem": 0}, {})):
            kernel = "gemv_warp" if config else "cublas"
            sides = {"m": 1, "k": 128, "dtype": "f16", "out": "f16", "seconds": 1e-6 * (n + place + 2) / 3}
            found.append(records.measurement("sweep_gemv", kernel, n, 1, config=config, **sides))
    return Run(MACHINE, records.STARTED, tuple(found))


def test_a_table_has_a_row_for_each_value_and_no_time_for_a_refusal():
    (sheet,) = sheets(of_threads(), ())
    rows = [[cell.text for cell in row] for row in sheet.rows]
    assert [row[1] for row in rows] == [*(str(2**power) for power in range(1, 12)), ""]
    assert rows[0][2] == "65,443"
    assert rows[10][2:] == ["refused", "", "", "", ""]
    assert f"simt_linear at 2048: {NO_BLOCK}" in sheet.notes
    assert [row[0].text for row in sheet.rows if row[2].tone == "best"] == ["simt_linear"]
    assert rows[9][2] == next(row[2].text for row in sheet.rows if row[2].tone == "best")


def test_refusals_of_one_reason_are_said_once():
    run = of_threads()
    more = replace(run.measurements[10], config={"threads": 4096}, refused=NO_BLOCK.replace("2048", "4096"))
    other = replace(more, config={"threads": 8192}, refused="no such thing")
    (sheet,) = sheets(replace(run, measurements=(*run.measurements, more, other)), ())
    assert f"simt_linear at 2048, 4096: {NO_BLOCK}" in sheet.notes
    assert "simt_linear at 8192: no such thing" in sheet.notes


def test_variants_are_told_apart_by_what_differs():
    (sheet,) = sheets(of_vectors(), ())
    assert sheet.head == ("µs", "1", "64", "4096")
    assert [row[0].text for row in sheet.rows] == ["gemv_warp, r 1", "gemv_warp, r 16", "cuBLAS"]
    assert [row[1].tone for row in sheet.rows] == ["best", "", ""]
    assert "K = 128" in sheet.title


def test_a_figure_marks_the_limit_and_shows_the_refusal_as_one():
    (plot,) = figures(of_threads())
    assert "1,024 threads, the limit of a block" in plot.svg
    assert "refused: 2048 threads per block" in plot.svg
    assert "cuBLAS" in plot.svg
    assert plot.name == "sweep_threads"


def test_a_figure_of_vectors_marks_l2():
    run = of_vectors()
    wide = replace(run.measurements[0], n=1 << 20)
    (plot,) = figures(replace(run, measurements=(*run.measurements, wide)))
    assert "W fills L2, 60 MiB" in plot.svg


def test_a_tile_that_is_a_block_of_threads_is_marked_at_its_side():
    found = [
        records.measurement("sweep_tile", "simt_smem", 512, 100 * tile, config={"tile": tile}) for tile in (8, 16, 64)
    ]
    (plot,) = figures(Run(MACHINE, records.STARTED, tuple(found)))
    assert "1,024 threads" in plot.svg


@pytest.mark.parametrize("run", [of_threads(), of_vectors()])
def test_a_sweep_is_shown_in_a_terminal_and_on_a_page(run):
    shown = io.StringIO()
    terminal.show(run, CUDA, Console(file=shown, width=120))
    assert words.title(run) in page(run, CUDA)
    assert run.measurements[0].kernel in shown.getvalue()


def test_progress_says_what_was_varied(capsys):
    run = of_threads()
    shown = io.StringIO()
    with terminal.progress(CUDA, Console(file=shown, width=200)) as progress:
        progress.update("", 1, 2, run.measurements[0])
        progress.update("", 2, 2, run.measurements[10])
    assert "threads 2: 65.4 s" in shown.getvalue()
    assert f"threads 2048: not run, {NO_BLOCK}" in shown.getvalue()
