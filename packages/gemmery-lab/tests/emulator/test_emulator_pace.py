"""Predicted times: on kernels whose time can be worked out by hand, and against records of an H200."""

import shutil
from itertools import islice

import numpy as np
import pytest

import gemmery as gm
from gemmery import config
from gemmery.cuda.pipes import BARRIER, LAUNCH, USABLE, pipes_of
from gemmery.errors import DeviceError, EmulationError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_emulator.kernels.prediction import MEETS
from gemmery_lab import on_emulator
from gemmery_lab.emulated_product import launch_of
from gemmery_lab.on_emulator import predicted_ladder
from gemmery_lab.rung_counts import agreement

pytestmark = pytest.mark.sampled(3)

BLOCKS, THREADS = 8 * 132, 256  # all that an H200 runs at once
WARPS = 8 * 8  # of a multiprocessor


def predicted(code: str, *args: object, blocks: int = BLOCKS, card: str = "h200"):
    kernel = f"__global__ void f(float* x, float* y, int n) {{ int t = threadIdx.x, i = blockIdx.x * 256 + t; {code} }}"
    x, y = (np.zeros(4 * blocks * THREADS, np.float32) for _ in range(2))
    return gm.emulate(kernel, "f", blocks, THREADS, [x, y, *args], check=False).predict(card)


def clocks(prediction, unit: str) -> float:
    """The clocks of a unit of an H200 for one warp of the fullest multiprocessor."""
    return prediction.terms[unit] * 1.98e9 / WARPS


def test_a_copy_is_bound_by_memory():
    prediction = predicted("((float4*)y)[i] = ((float4*)x)[i];", 0, blocks=2 * BLOCKS)
    moved = 2 * 16 * 2 * BLOCKS * THREADS
    assert prediction.terms["memory"] == pytest.approx(moved / (4800e9 * USABLE))
    assert prediction.bound == "memory"
    assert clocks(prediction, "L1 lines") == pytest.approx(2 * 8)  # twice four lines of 128 bytes, in and out
    # What multiprocessors do is hidden but for the first of their 16 blocks, or as far as both wait for each other.
    shown = prediction.seconds - prediction.terms["memory"] - prediction.terms["launch"]
    busiest = max(time for unit, time in prediction.terms.items() if unit not in ("memory", "waits", "launch"))
    busy = busiest + prediction.terms["waits"]
    both = (busy**MEETS + prediction.terms["memory"] ** MEETS) ** (1 / MEETS)
    assert 0 < shown <= max(busy / 16, both - prediction.terms["memory"]) * (1 + 1e-9)


def test_multiply_adds_are_bound_by_their_issue():
    sums = "float a[8]; for (int k = 0; k < 8; ++k) a[k] = x[k]; for (int k = 0; k < n; ++k) {\n#pragma unroll\n"
    loop = "for (int j = 0; j < 128; ++j) a[j % 8] = fmaf(a[j % 8], 1.5f, 2.5f); } float s = 0;"
    code = f"{sums}{loop} for (int k = 0; k < 8; ++k) s += a[k]; x[i] = s;"
    short, long = (predicted(code, count) for count in (2, 4))
    assert long.bound == "issue"
    assert clocks(long, "fma") - clocks(short, "fma") == pytest.approx(2 * 128 / 4, rel=0.01)  # no banks


def test_bank_conflicts_are_bound_by_wavefronts():
    code = (
        "__shared__ volatile float s[8192]; for (int k = t; k < 8192; k += 256) s[k] = k; __syncthreads(); float a = 0;"
        "for (int k = 0; k < n; ++k) {\n#pragma unroll\n"
        "for (int j = 0; j < 16; ++j) a += s[STRIDE + (j * 64 & 8191)]; }"
        "x[i] = a;"
    )
    spread = predicted(code.replace("STRIDE", "t % 32 * 2"), 2)
    column = predicted(code.replace("STRIDE", "t % 32 * 32"), 2)
    unit = "L1 lines"
    assert column.bound == unit
    assert clocks(column, unit) - clocks(spread, unit) == pytest.approx(2 * 16 * 30)  # 32 wavefronts each, not 2
    assert column.largest(1)[0][1] > 0.8  # the loop


def test_a_chain_of_loads_waits():
    code = "int at = 0; for (int k = 0; k < n; ++k) at = __float_as_int(x[at + k * 32]); y[i] = at;"
    short, long = (predicted(code, count, blocks=1) for count in (8, 16))
    _, pipes = pipes_of("h200")
    latency = pipes.latencies.by_kind["l2"]
    assert long.terms["waits"] - short.terms["waits"] >= 8 * latency / 1.98e9
    assert any("few warps" in doubt for doubt in long.doubts)


def test_blocks_beyond_a_full_device_take_turns():
    code = "y[i] = x[i];"
    once, twice = (predicted(code, 0, blocks=blocks) for blocks in (BLOCKS, 2 * BLOCKS))
    assert twice.terms["issue"] == pytest.approx(2 * once.terms["issue"])
    assert predicted(code, 0, blocks=1).terms["launch"] == LAUNCH


def test_a_card_without_figures_is_refused():
    run = gm.emulate("__global__ void f(float* x) { x[0] = 1; }", "f", 1, 32, [np.zeros(8, np.float32)])
    for name in ("gtx480", "rtx9090"):
        with pytest.raises(DeviceError, match="h200, h100, a100"):
            run.predict(name)
    for name in ("a100", "v100", "b200"):
        assert run.predict(name).seconds > run.predict(name).terms["launch"]


def test_blocks_that_wait_for_others_are_refused():
    code = (
        "__global__ void f(int* x) { if (threadIdx.x == 0) { atomicAdd(x, 1);"
        "while (atomicAdd(x, 0) < gridDim.x) ; } __syncthreads(); x[1 + blockIdx.x] = 1; }"
    )
    run = gm.emulate(code, "f", 200, 32, [np.zeros(256, np.int32)], check=False)
    run.rerun.bind().arrays["argument 0"][0] = 0
    with pytest.raises(EmulationError, match="blocks of one multiprocessor"):
        run.predict("h200")


def test_a_deadlock_has_no_time():
    code = (
        "#include <cuda/barrier>\n__global__ void f(float* x) { __shared__ cuda::barrier<cuda::thread_scope_block> all;"
        "if (threadIdx.x == 0) init(&all, 65); __syncthreads(); all.arrive_and_wait(); }"
    )
    run = gm.emulate(code, "f", 1, 64, [np.zeros(64, np.float32)])
    assert [finding.kind for finding in run.findings] == ["deadlock"]
    with pytest.raises(EmulationError, match="no thread of these blocks"):
        run.predict("h200")


def test_a_kernel_of_ptx_has_a_doubt():
    from gemmery.cuda import nvrtc

    ptx = nvrtc.ptx_alone("__global__ void f(float* x) { x[threadIdx.x] = 1; }", "f.cu", "f", "sm_90").text
    prediction = gm.emulate(ptx, "f", 1, 32, [np.zeros(32, np.float32)]).predict("h200")
    assert any("registers" in doubt for doubt in prediction.doubts)


def test_predictions_rank_recorded_rungs():
    names = ["simt_naive", "simt_uncoalesced", "simt_packed", "simt_smem", "simt_padded", "gemv_thread", "gemv_warp"]
    table = predicted_ladder(names, [2048])
    both = agreement(table)
    assert both is not None
    assert both.count == len(names)
    assert both.rank >= 0.999
    assert both.error <= 0.06


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_tiles_alone_on_a_multiprocessor_are_near_their_records(dtype):
    """One block each of 8 warps; at 0.74 to 0.93 if L1 and issue hide each other."""
    table = predicted_ladder(["simt_threadtile", "simt_vectorized", "simt_padded", "simt_warptile"], [1024], dtype)
    assert len(table) == 4
    for row in table:
        assert 0.88 <= row.ratio <= 1.05, row.rung


def prepared(name, m, n, k, length, launches=None):
    """The first launches of a product of which `length` of k are multiplied."""
    device, pipes = pipes_of("h200")
    rung, problem = find(CUDA, name), Problem(m, n, k, "f32", "f32", device="h200")
    geometry = launch_of(rung, problem, rung.default)
    return list(islice(on_emulator._samples(problem, geometry, length, device, pipes), launches))


def test_what_prepares_a_product_passes_over_the_whole_k():
    """Of the launches that split operands, the third has blocks along k."""
    part, whole = (prepared("split_bf16x6", 512, 512, 4096, length, 3) for length in (64, 4096))
    assert "split_strips" in str(part[2][0].lines)
    assert [paced.loaded for _, paced in part] == [paced.loaded for _, paced in whole]


def test_what_a_product_of_two_launches_reads_is_in_l2_where_it_fits():
    assert [shape.hot for shape, _ in prepared("simt_packed", 1024, 1024, 1024, 64)] == [False, True]
    assert [shape.hot for shape, _ in prepared("simt_packed", 8192, 8192, 8192, 64)] == [False, False]
    assert [shape.hot for shape, _ in prepared("simt_padded", 1024, 1024, 1024, 64)] == [False]


def test_a_rung_without_f32_has_the_type_of_its_records():
    """Squares of 2048 in bf16 are recorded; no product of 40 is."""
    other, recorded = predicted_ladder(["wgmma_tma"], [40, 2048])
    assert (recorded.dtype, other.dtype) == ("bf16", "f16")
    assert recorded.measured > other.measured == 0
    assert predicted_ladder(["simt_naive"], [40])[0].dtype == "f32"


def test_barriers_take_their_own_time():
    code = "for (int k = 0; k < n; ++k) { x[i] = 1; __syncthreads(); }"
    short, long = (predicted(code, count) for count in (4, 8))
    assert clocks(long, "barrier") - clocks(short, "barrier") == pytest.approx(4 * 32 / BARRIER)


def test_predictions_are_kept_with_what_they_depend_on(monkeypatch, tmp_path):
    """A second call reads the first one's; another card, config or source does not."""
    seen = []
    plain = on_emulator.predicted_rung

    def look(rung, *others):
        seen.append(rung.name)
        return plain(rung, *others)

    monkeypatch.setattr(config, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(on_emulator, "predicted_rung", look)
    first, again = (predicted_ladder(["simt_smem", "gemv_warp"], [96]) for _ in range(2))
    assert again == first
    assert len(seen) == 2
    predicted_ladder(["simt_smem"], [96], card="a100")
    monkeypatch.setattr(on_emulator, "sources", lambda: "0" * 64)
    predicted_ladder(["simt_smem"], [96])
    assert len(seen) == 4


def test_every_file_that_shapes_a_prediction_is_in_its_digest(tmp_path, monkeypatch):
    """A changed kernel, or a changed constant of a card, makes other predictions."""
    copy = tmp_path / "gemmery"
    shutil.copytree(gm.__path__[0], copy)
    monkeypatch.setattr(gm, "__path__", [str(copy)])
    digests = {on_emulator.sources.__wrapped__()}
    for name in ("cuda/kernels/simt_smem.cu", "cuda/pipes.py", "ladder/simt.py"):
        (copy / name).write_text((copy / name).read_text() + "\n")
        digests.add(on_emulator.sources.__wrapped__())
    assert len(digests) == 4


@pytest.mark.process
def test_processes_predict_what_one_does():
    names = ["simt_naive", "simt_smem", "gemv_warp"]
    assert predicted_ladder(names, [80], processes=2) == predicted_ladder(names, [80])


def test_roles_wait_for_each_other_in_time():
    """The producer's copies are under way while consumers multiply, and both wait at mbarriers."""
    row = predicted_ladder(["wgmma_specialized"], [512], "bf16")[0]
    timeline = on_emulator.rung_timeline(row, "h200")
    spent = timeline.totals()
    assert spent["waits at an mbarrier"] > 0
    copies = [span for span in timeline.spans if span.what == "bulk copy"]
    products = [span for span in timeline.spans if span.what == "multiplies"]
    assert {span.warp for span in copies} == {0}
    assert {span.warp // 4 for span in products} == {1, 2}
    first = min(span.begin for span in products)
    assert first >= min(span.end for span in copies)  # the first stage has come
    assert row.prediction.seconds * 1e9 * timeline.clock >= timeline.clocks
