"""inspect(): facts about rungs on named devices, refusals, and how the result is shown."""

import io
import json
import re

import pytest
from rich.console import Console

import gemmery_lab as lab
from gemmery.cuda import nvrtc, roofline, sass
from gemmery.cuda.device import ARCHS, KNOWN
from gemmery.cuda.driver import find
from gemmery.errors import ArgumentError, DeviceError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find as find_rung
from gemmery_lab import cli
from gemmery_lab.inspection import gather
from gemmery_lab.inspection.gather import inspect_rung
from gemmery_lab.inspection.notebook import inspection_page, show_inspection
from gemmery_lab.inspection.records import without_code
from gemmery_lab.inspection.sections import sections

pytestmark = pytest.mark.sampled(3)

NEEDS_NVDISASM = pytest.mark.skipif(not sass.nvdisasm(), reason=sass.MISSING)


@pytest.fixture(scope="module")
def naive():
    return inspect_rung("simt_naive", n=1024, device="a100")


def words(found):
    """Every fact of an inspection by its name."""
    return {row[0]: " ".join(row[1:]) for section in sections(found) for row in section.rows}


@NEEDS_NVDISASM
def test_the_naive_rung_is_the_memory_wall(naive):
    (kernel,) = naive.kernels
    assert kernel.spilled == kernel.static_shared == kernel.dynamic_shared == 0
    assert 16 <= kernel.registers <= 64
    assert kernel.occupancy.blocks == 65536 // 4 // (-(-kernel.registers * 32 // 256) * 256) * 4 // 8
    assert naive.tile == (1, 1)
    assert naive.unit == "f32"
    assert naive.loads.intensity == 0.25
    assert naive.loads.attainable == 1555 / 4
    assert naive.once.intensity == pytest.approx(2 * 1024 / 12)
    assert sass.bytes_each(kernel.loop, "global") == 8


def test_the_arithmetic_is_said_in_words(naive):
    said = words(naive)
    assert "2 loads for every multiply-add, 8 bytes for 2 operations" in said["as it loads"]
    assert "0.250 operations a byte × 1,555 GB/s = 389 GFLOP/s attainable" in said["as it loads"]
    assert "108 multiprocessors × 128 operations a clock × 1.41 GHz = 19,492 GFLOP/s" in said["peak"]
    assert "limited by" in said["occupancy"]


def test_blocks_and_threads_are_counted_in_words(naive):
    assert re.fullmatch(r"[\d,]+ blocks of 32 × 8 = 256 threads", words(naive)["grid"])
    line = inspect_rung("simt_linear", n=8, config={"threads": 64}, device="sm_80")
    assert words(line)["grid"] == "1 block of 64 threads"


def test_a_tile_divides_what_is_loaded():
    found = inspect_rung("simt_smem", n=1024, config={"tile": 16}, device="sm_80")
    assert found.tile == (16, 16)
    assert found.loads.intensity == 4
    assert found.kernels[-1].static_shared == 2 * 16 * 16 * 4
    assert "A once for each 16 columns of C, B once for each 16 rows" in words(found)["as it loads"]


def test_every_rung_with_a_tile_in_its_config_says_so(monkeypatch):
    """Compiled kernels have no part in it: one on CUDA cores and one on tensor cores stand for all."""
    compiled = {
        kind: inspect_rung(name, n=512, device="h200", counters=False).kernels
        for kind, name in ((False, "simt_smem"), (True, "wgmma_tma"))
    }
    monkeypatch.setattr(gather, "compiled", lambda each, *_: compiled["mma" in each.kernel][-1])
    for rung in CUDA:
        if "bm" not in rung.default:
            continue
        found = inspect_rung(rung.name, n=512, device="h200", counters=False)
        asked = tuple(found.config[key] for key in ("bm", "bn") if key in found.config)  # else it is left to the rung
        assert min(found.tile) > 1, rung.name
        assert asked in ((), found.tile), rung.name


@NEEDS_NVDISASM
@pytest.mark.many
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_is_looked_at_without_a_gpu(arch):
    found = inspect_rung("simt_smem", n=512, dtype="f64", device=arch, counters=False)
    assert found.kernels[-1].arch == arch
    assert found.kernels[-1].counts["DFMA"] > 0
    assert found.unit == "f64"


@NEEDS_NVDISASM
def test_products_on_tensor_cores_have_their_peak():
    found = inspect_rung("mma_pipelined", n=1024, dtype="bf16", config={"stages": 2}, device="a100")
    assert found.unit == "tensor"
    assert found.loads.peak == find("a100").peak("tensor")
    assert sum(number for name, number in found.kernels[-1].loop.items() if name.startswith("HMMA")) > 0


def test_tf32_is_a_dtype():
    found = inspect_rung("mma_pipelined", n=1024, dtype="tf32", config={"stages": 2}, device="h200")
    assert (found.problem.dtype, found.problem.precision, found.unit) == ("f32", "tf32", "tensor_tf32")


def test_a_rung_of_two_launches_shows_both():
    found = inspect_rung("simt_packed", n=256, device="h200")
    assert len(found.kernels) == 2
    assert [section.title for section in sections(found)][:2] == ["Launch 1 of 2", "Launch 2 of 2"]
    assert words(found)["scratch memory"] == "512 KiB"


def test_a_launch_smaller_than_the_device_is_told_in_blocks_and_bytes():
    found = inspect_rung("simt_smem", n=16, device="h200", counters=False)
    assert words(found)["waves"] == "1: 1 of the 1,056 blocks that run at a time, 0.09% of the device"
    assert "3.07 kB for 8.19 kFLOP" in words(found)["each element once"]  # 3 x 16 x 16 floats, 2 x 16^3


def test_a_rung_of_vectors_gets_a_row():
    found = inspect_rung("gemv_warp", n=512, device="h200")
    assert (found.problem.m, found.problem.n, found.problem.k, found.problem.b_layout) == (1, 512, 512, "col")
    assert inspect_rung("gemv_warp", m=1, n=512, device="h200").problem == found.problem


def test_a_vector_is_counted_as_on_the_ladder():
    (rung,) = lab.emulated_ladder(["gemv_vectorized"], [256]).rungs
    total = inspect_rung("gemv_vectorized", n=256, device="h200").emulated.total
    assert (total.requests, total.sectors) == (rung.counts.requests, rung.counts.sectors)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"rung": "nothing"}, ArgumentError, "'nothing' is neither in a ladder nor an exhibit"),
        ({"rung": "simt_smem", "dtype": "e4m3"}, ArgumentError, "simt_smem takes f32"),
        ({"rung": "simt_smem", "config": {"side": 3}}, ArgumentError, "its keys are tile"),
        ({"rung": "simt_smem", "n": -1}, ArgumentError, "n=-1"),
        ({"rung": "simt_smem", "n": 1.5}, ArgumentError, "n=1.5"),
        ({"rung": ""}, ArgumentError, "'' is neither in a ladder nor an exhibit"),
        ({"rung": "simt_smem", "config": {"tile": "16"}}, ArgumentError, "config 'tile': '16' is not a whole number"),
        ({"rung": "simt_smem", "device": "cuda:x"}, DeviceError, "'cuda:x' is neither present nor known"),
        ({"rung": "simt_smem", "config": {"tile": 33}}, RefusedError, "1089 threads per block: h200 runs at most 1024"),
        ({"rung": "mma_pipelined", "device": "t4"}, RefusedError, "needs sm_80"),
        ({"rung": "simt_single_block"}, RefusedError, "at most"),
        ({"rung": "simt_smem", "device": "z80"}, DeviceError, "neither present nor known"),
    ],
)
def test_what_cannot_be_looked_at_says_why(given, error, said):
    with pytest.raises(error, match=said):
        inspect_rung(**{"n": 4096, "device": "h200", **given})


def test_without_nvdisasm_ptx_is_counted_and_the_way_out_said(monkeypatch):
    monkeypatch.setattr(sass, "nvdisasm", lambda: "")
    found = inspect_rung("simt_smem", n=512, device="h200")
    kernel = found.kernels[-1]
    assert kernel.counts == kernel.loop == {}
    assert kernel.ptx_counts["fma.rn.f32"] > 0
    shown = io.StringIO()
    show_inspection(found, Console(file=shown, width=100))
    assert "pip install nvidia-cuda-nvdisasm" in shown.getvalue()
    assert "fma.rn.f32" in shown.getvalue()


@pytest.mark.many(5)
@pytest.mark.parametrize(
    ("rung", "dtype", "unit"),
    [
        ("simt_smem", "f16", "f32"),
        ("gemv_quantized", "f16", "tensor"),
        ("mma_f64", "f64", "tensor_f64"),
        ("mma_pipelined", "tf32", "tensor_tf32"),
        ("wmma_f16", "bf16", "tensor"),
        ("wgmma_epilogue", "bf16", "tensor"),
        ("wgmma_epilogue", "tf32", "tensor_tf32"),
        ("wgmma_epilogue", "e4m3", "tensor_8"),
        ("wgmma_epilogue", "int8", "tensor_8"),
        ("wgmma_blockscaled", "e5m2", "tensor_8"),
        ("split_fp16x3", "f32", "tensor"),
        ("ozaki_int8", "f64", "tensor_8"),
    ],
)
def test_the_unit_that_multiplies_follows_from_the_ptx_of_all_launches(rung, dtype, unit):
    row = find_rung(CUDA, rung)
    problem = gather._problem(row, 0, 512, 0, dtype, find("h200"))
    launches = row.geometry(problem, {**row.default, **row.resolve(problem, row.default)}).launches
    codes = [nvrtc.ptx(launch.source, launch.kernel, "sm_90a").text for launch in launches]
    assert roofline.unit(problem.dtype, [opcode for code in codes for opcode in sass.ptx_counts(code)]) == unit


@pytest.mark.parametrize(("rung", "dtype"), [("wgmma_epilogue", "e4m3"), ("ozaki_int8", "f64")])
def test_without_nvdisasm_the_peak_is_that_of_the_unit_that_multiplies(rung, dtype, monkeypatch):
    monkeypatch.setattr(sass, "nvdisasm", lambda: "")
    found = inspect_rung(rung, n=512, dtype=dtype, device="h200", counters=False)
    assert found.unit == "tensor_8"
    assert "tensor cores, 8 bits" in words(found)["peak"]
    assert found.loads.peak == find("h200").peak("tensor_8")
    notes = " ".join(note for section in sections(found) for note in section.notes)
    assert ("multiplies parts of the elements" in notes) == (dtype == "f64")


@NEEDS_NVDISASM
def test_code_is_shown_when_asked_for(naive, capsys):
    assert cli.run(["inspect", "simt_naive", "--n", "1024", "--device", "a100", "--ptx", "--sass"]) == 0
    out = capsys.readouterr().out
    assert ".visible .entry" in out or ".weak .entry" in out
    assert "FFMA R" in out
    assert without_code(naive).kernels[0].ptx == ""


@NEEDS_NVDISASM
def test_json_holds_the_figures_and_the_code_asked_for(capsys):
    line = "inspect simt_smem --n 512 --device sm_90 --config tile=32 --json"
    assert cli.run(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"][0]["occupancy"]["blocks"] == 2
    assert found["loads"]["intensity"] == 8
    assert found["kernels"][0]["sass"] == ""
    assert cli.run([*line.split(), "--sass"]) == 0
    assert "FFMA" in json.loads(capsys.readouterr().out)["kernels"][0]["sass"]


def test_the_page_needs_nothing_else(naive, tmp_path, capsys):
    text = inspection_page(naive)
    assert text.startswith("<!doctype html>")
    assert "simt_naive&lt;float, float, 0&gt;" in text
    assert set(re.findall(r"https?://[^\s\"<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert cli.run(["inspect", "simt_naive", "--device", "t4", "--html", str(tmp_path / "x.html")]) == 0
    assert "SASS of" in (tmp_path / "x.html").read_text()
    assert "page:" in capsys.readouterr().out


@pytest.mark.many(4)
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_card_runs_the_first_rung(name):
    assert inspect_rung("simt_naive", n=64, device=name, counters=False).device.name == name


@pytest.mark.parametrize("rung", [None, 1, ["simt_naive"], {}])
def test_a_rung_that_is_not_text_is_refused(rung):
    """By name, before anything is looked up."""
    with pytest.raises(ArgumentError, match="pass its name as text"):
        inspect_rung(rung)
