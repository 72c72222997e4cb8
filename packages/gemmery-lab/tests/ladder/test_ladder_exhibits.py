"""The exhibits without a GPU: the rules against counters of an H200, what they predict, refusals, code, the command."""

from pathlib import Path

import numpy as np
import pytest

from gemmery import cuda
from gemmery.cuda import nvrtc
from gemmery.cuda.device import ARCHS
from gemmery.errors import ArgumentError, RefusedError
from gemmery.ladder.exhibits import EXHIBITS, divergent, find, numbers, sectors, wavefronts
from gemmery_lab import cli

LANES = range(32)
HALF = [lane * 4 if lane < 16 else None for lane in LANES]
EACH = [pytest.param(one, id=one.name) for one in EXHIBITS]


# Every full warp at one stride is as Nsight Compute counted it on an H200; the others follow from the rules.
@pytest.mark.parametrize(
    ("addresses", "width", "is_load", "counted"),
    [
        ([4 * lane for lane in LANES], 4, True, 1),
        ([8 * lane for lane in LANES], 4, True, 2),
        ([36 * lane for lane in LANES], 4, True, 1),
        ([32 * lane for lane in LANES], 4, True, 8),
        ([128 * lane for lane in LANES], 4, True, 32),
        ([0 for _ in LANES], 4, True, 1),
        ([16 * lane for lane in LANES], 16, True, 4),
        ([64 * lane for lane in LANES], 16, False, 16),
        ([80 * lane for lane in LANES], 16, False, 4),
        ([512 * lane for lane in LANES], 16, False, 32),
        ([16 * (lane // 2) for lane in LANES], 16, True, 2),  # lanes n and n ^ 1 agree: twice as many are served
        ([16 * (lane // 2) for lane in LANES], 16, False, 4),  # stores never merge
        ([8 * (lane // 2) for lane in LANES], 8, True, 1),
        ([8 * (lane // 2) for lane in LANES], 8, False, 2),
        (list(LANES), 1, True, 1),
        (HALF, 4, True, 1),
        ([None for _ in LANES], 16, True, 0),
    ],
)
def test_wavefronts(addresses, width, is_load, counted):
    assert wavefronts(addresses, width, is_load) == counted


def test_one_lane_that_disagrees_keeps_a_wide_load_from_merging():
    pairs = [16 * (lane // 2) for lane in LANES]
    assert wavefronts(pairs, 16) == 2
    assert wavefronts([*pairs[:-1], 4096], 16) == 4


@pytest.mark.parametrize(
    ("addresses", "width", "counted"),
    [
        ([4 * lane for lane in LANES], 4, 4),
        ([4 + 4 * lane for lane in LANES], 4, 5),
        ([32 * lane for lane in LANES], 4, 32),
        ([16 * lane for lane in LANES], 16, 16),
        ([0 for _ in LANES], 8, 1),
        (HALF, 4, 2),
    ],
)
def test_sectors(addresses, width, counted):
    assert sectors(addresses, width) == counted


def test_divergent_warps():
    assert divergent([lane > 15 for lane in range(64)]) == 1
    assert divergent([lane > 31 for lane in range(64)]) == 0


@pytest.mark.parametrize("shown", EACH)
def test_what_an_exhibit_claims_follows_from_the_rules(shown):
    counts = shown.show.counts(shown.show.n, shown.default)
    assert counts
    assert {name: counts[name] for name in shown.expect} == dict(shown.expect)


def test_the_rules_set_a_pair_of_exhibits_apart():
    def counts(name, **config):
        shown = find(name)
        return shown.show.counts(1 << 16, {**shown.default, **config})

    assert counts("divergence_split")["divergent_branches"] == (1 << 16) // 32
    assert counts("divergence_warp")["divergent_branches"] == 0
    adjacent, strided = counts("reduce_adjacent"), counts("reduce_strided")
    assert adjacent["divergent_warps"] == 256 * (5 * 8 + 4 + 2 + 1)  # blocks x (five levels of eight warps, then fewer)
    assert strided["divergent_warps"] == 256 * 5
    assert strided["working_warps"] == 256 * (4 + 2 + 1 + 5)
    assert counts("bank_stride", stride=32)["wavefronts"] == 32 * counts("bank_stride")["wavefronts"]
    assert counts("copy_coalesced", stride=8)["sectors"] == 8 * counts("copy_coalesced")["sectors"]
    assert counts("copy_coalesced", stride=8, width=16)["sectors"] == 2 * counts("copy_coalesced", width=16)["sectors"]


@pytest.mark.parametrize("shown", EACH)
def test_results_are_exact_numbers_of_the_right_length(shown):
    x = numbers(1 << 12)
    for config in shown.configs():
        expected = shown.show.expected(x, config)
        assert expected.dtype == np.float32
        assert expected.size == shown.show.results(x.size, config)
        assert np.array_equal(expected, np.round(expected))


def test_cut_sums_become_too_small_and_rounded_ones_do_not():
    for steps in (16, 64, 256):
        counts = find("truncation").show.counts(1 << 13, {"steps": steps})
        assert abs(counts["mean_error_in_core"] + steps / 2) <= 1  # half of the numbers are odd
        assert abs(counts["mean_error_promoted"]) <= 1
        assert counts["largest_error_promoted"] < 3 * steps**0.5


def test_an_expected_sum_is_the_sum():
    x = numbers(1000)
    found = find("reduce_strided").show.expected(x, {"threads": 256})
    assert found.tolist() == [x[first : first + 256].sum() for first in (0, 256, 512, 768)]


def test_an_expected_bank_sum_walks_as_the_kernel_does():
    x = numbers(4096)
    config = {"stride": 3, "width": 8, "steps": 48}
    found = find("bank_stride").show.expected(x, config)
    for lane in (0, 7, 31):
        places = [lane * 3 + 2 * step + turn for turn in (0, 1, 0) for step in range(16)]
        assert found[lane] == found[lane + 32] == sum(x[2 * place] + x[2 * place + 1] for place in places)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("reduce_strided", {"threads": 96}, "96 threads"),
        ("reduce_adjacent", {"threads": 16}, "power of two"),
        ("bank_stride", {"stride": 1, "width": 12, "steps": 8}, "width 12"),
        ("bank_stride", {"stride": 1, "width": 4, "steps": 20}, "multiple of 16"),
        ("copy_coalesced", {"stride": 0, "width": 4}, "stride 0"),
        ("copy_coalesced", {"stride": 5, "width": 4}, "divide"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(name, config, words):
    exhibit = find(name)
    with pytest.raises(RefusedError, match=words):
        exhibit.launch(exhibit.show.n, config)


def test_an_unknown_exhibit_is_an_error_that_names_the_known():
    with pytest.raises(ArgumentError, match="bank_stride"):
        find("bank_strides")


@pytest.mark.many
@pytest.mark.parametrize("shown", EACH)
def test_an_exhibit_compiles_for_every_architecture(shown):
    pytest.importorskip("cuda.bindings")
    geometry = shown.launch(shown.show.n, shown.default)
    for arch in ARCHS:
        if int(arch[3:].rstrip("a")) < geometry.needs:
            continue
        report = nvrtc.code(geometry.source, geometry.kernel, arch).report
        assert report.registers > 0
        assert report.spill_stores == report.spill_loads == 0


def test_every_exhibit_has_its_file_and_a_parent_that_exists():
    kernels = Path(cuda.__file__).with_name("kernels")
    assert len({one.name for one in EXHIBITS}) == len(EXHIBITS)
    for one in EXHIBITS:
        assert one.source == f"cuda/kernels/{one.name}.cu"
        assert (kernels / f"{one.name}.cu").is_file()
        assert one.parent is None or find(one.parent)
        assert set(one.space) <= set(one.default)


def test_the_command_lists_exhibits(capsys):
    assert cli.run(["exhibit"]) == 0
    said = capsys.readouterr().out
    assert all(one.name in said for one in EXHIBITS)


def test_predictions_cover_every_config():
    for shown in EXHIBITS:
        for config in shown.configs():
            assert shown.show.counts(shown.show.n, config)
