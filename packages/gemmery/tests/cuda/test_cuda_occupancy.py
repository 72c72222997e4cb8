"""Occupancy and roofline: the rules of the hardware against worked examples and the driver's own answer."""

import pytest

from gemmery.cuda import driver, nvrtc
from gemmery.cuda.device import KNOWN, RATES, architecture, card
from gemmery.cuda.driver import find
from gemmery.cuda.roofline import loaded, occupancy, registered_warps, roofline, shared_allocated
from gemmery.errors import DeviceError
from gemmery.problem import Problem

H200 = find("h200")
# (threads, registers, bytes of shared memory) -> blocks: cuOccupancyMaxActiveBlocksPerMultiprocessor on an H200.
SAID = {
    (256, 32, 0): 8,
    (256, 32, 20000): 8,
    (256, 32, 40000): 5,
    (1024, 30, 8192): 2,
    (64, 32, 512): 32,
    (64, 32, 9512): 21,
    (64, 32, 20512): 10,
    (9, 60, 72): 32,
    (9, 60, 9072): 23,
    (256, 127, 8320): 2,
    (256, 244, 196608): 1,
    (128, 223, 32768): 2,
    (128, 32, 20000): 11,
}


@pytest.mark.parametrize(("launch", "blocks"), SAID.items())
def test_blocks_are_what_the_driver_said(launch, blocks):
    assert occupancy(H200, *launch).blocks == blocks


def test_registers_are_given_by_warp_in_units_of_256_within_a_partition():
    assert registered_warps(65536, 32) == 64
    assert registered_warps(65536, 33) == 48  # 40 a thread: 1280 of a partition's 16384, 12 warps in each of four
    assert registered_warps(65536, 255) == 8
    assert registered_warps(65536, 168) == 12  # not 65536 // 5376 = 12.19: 3 in each partition


def test_a_block_takes_a_kilobyte_of_the_systems_from_ampere_on():
    assert shared_allocated(75, 8192) == 8192
    assert shared_allocated(80, 8192) == 9216
    assert shared_allocated(90, 1) == 1152


def test_what_limits_is_named():
    assert occupancy(H200, 256, 128, 0).by == ("registers",)
    assert occupancy(H200, 256, 32, 100 << 10).by == ("shared memory",)
    assert occupancy(H200, 32, 16, 0).by == ("blocks",)
    assert occupancy(H200, 256, 32, 0).by == ("registers", "warps")
    assert occupancy(find("sm_86"), 256, 32, 0).limits["warps"] == 6  # 48 warps a multiprocessor


def test_waves_and_the_tail_of_a_grid():
    found = occupancy(H200, 256, 128, 0, grid=2 * 132 * 3 + 66)
    assert (found.blocks, found.slots, found.warps, found.share) == (2, 264, 16, 0.25)
    assert (found.waves, found.tail) == (3.25, 0.25)
    assert found.filled == 3.25 / 4
    whole = occupancy(H200, 256, 128, 0, grid=264)
    assert (whole.waves, whole.tail, whole.filled) == (1, 1, 1)


def test_what_does_not_fit_runs_no_block():
    found = occupancy(H200, 256, 32, 300 << 10)
    assert (found.blocks, found.waves, found.filled) == (0, 0, 0)


# Peaks of data sheets in TFLOP/s: what the rates, multiprocessors and clocks of the tables must come to.
SHEETS = [
    ("a100", "f32", 19.5),
    ("a100", "f64", 9.7),
    ("a100", "tensor", 312),
    ("a100", "tensor_tf32", 156),
    ("a100", "tensor_f64", 19.5),
    ("h200", "f32", 67),
    ("h200", "f64", 33.5),
    ("h200", "tensor_f64", 67),
    ("rtx3090", "f32", 35.6),
    ("rtx3090", "tensor", 71),
    ("rtx4090", "f32", 82.6),
    ("rtx4090", "tensor", 165.2),
    ("rtx5090", "f32", 104.8),
    ("rtx5090", "tensor", 209.5),
    ("t4", "f32", 8.1),
    ("t4", "tensor", 65),
    ("2080ti", "f32", 13.4),
    ("b200", "f64", 37),
    ("a100", "tensor_8", 624),
    ("t4", "tensor_8", 130),
]


@pytest.mark.parametrize(("name", "unit", "sheet"), SHEETS)
def test_peaks_are_those_of_the_data_sheets(name, unit, sheet):
    assert find(name).peak(unit) / 1e3 == pytest.approx(sheet, rel=0.01)


def test_a_device_is_found_by_its_card_and_by_its_architecture():
    assert find("sm_80") is find("a100")
    assert find("sm_90") is find("sm_90a") is H200
    assert find("sm_75").name == "t4"
    with pytest.raises(DeviceError, match="known: cuda, cuda:N, h200"):
        find("sm_12")
    assert {row.capability for row in KNOWN.values()} <= set(RATES)


@pytest.mark.parametrize("name", ["H100", "h100", "H 100", "NVIDIA H100", "nvidia-h100"])
def test_a_card_is_found_however_its_name_is_written(name):
    assert find(name) is card(name) is KNOWN["h100"]


def test_each_card_is_found_in_capitals_and_by_its_compute_capability():
    for name, row in KNOWN.items():
        assert card(name.upper()) is row
        assert card(f"{row.capability // 10}.{row.capability % 10}").capability == row.capability
        assert architecture(name.upper()) == architecture(row.arch.upper()) == row.arch
    assert find("GeForce RTX 3090") is KNOWN["rtx3090"]
    assert [architecture(name) for name in ("SM_90", "compute_90", "9.0", "sm_87", "12.1")] == [
        *["sm_90"] * 3,
        "sm_87",
        "sm_121",
    ]


@pytest.mark.parametrize(("name", "meant"), [("RTX3O90", "rtx3090"), ("4090", "rtx4090"), ("h1000", "h100")])
def test_a_misspelled_card_suggests_the_one_that_was_meant(name, meant):
    for resolve in (find, card, architecture):
        with pytest.raises(DeviceError, match=f"{name!r} is neither present nor known; did you mean {meant!r}"):
            resolve(name)
    for name in ("sm_60", "6.1", "", "cuda:x", "90"):
        with pytest.raises(DeviceError, match="is neither present nor known"):
            find(name)


def test_the_first_chip_of_all_gives_its_known_figures():
    """346.5 GFLOP/s, 86.4 GB/s, two loads of 4 bytes for a multiply-add: 21.6 attainable."""
    cube = Problem(1024, 1024, 1024, "f32", "f32")
    found = roofline(cube.flops, loaded(cube, 1, 1), peak=346.5, bandwidth=86.4)
    assert found.intensity == 0.25
    assert found.attainable == pytest.approx(21.6)
    assert found.by == "memory"


def test_a_tile_loads_each_matrix_once_for_its_side():
    problem = Problem(256, 512, 128, "f64", "f64", batch=3)
    assert loaded(problem, 64, 128) == 3 * 8 * (256 * 128 * 4 + 128 * 512 * 4)
    assert loaded(problem, 60, 500) == 3 * 8 * (256 * 128 * 2 + 128 * 512 * 5)  # tiles at the edges load all they need


def test_enough_work_a_byte_is_limited_by_the_peak():
    found = roofline(1e9, 1e6, peak=500, bandwidth=100)
    assert (found.attainable, found.by) == (500, "compute")


@pytest.mark.gpu
@pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())
def test_the_driver_agrees_on_the_device_at_hand():
    device = driver.device(0)
    api = driver.api()
    made = nvrtc.code("simt_smem.cu", "simt_smem<float, float, 0, 16>", device.arch)
    function = driver.function("simt_smem.cu", "simt_smem<float, float, 0, 16>", 0)
    for threads in (32, 96, 256):
        for extra in (0, 1000, 20000, 45000):
            with driver.on(0):
                said = driver.check(api.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, extra))
            assert occupancy(device, threads, made.report.registers, made.report.shared + extra).blocks == said
