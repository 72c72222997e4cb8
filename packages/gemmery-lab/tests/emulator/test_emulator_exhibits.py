"""The exhibits on the emulator: exact results, and the counters that the rules of the hardware predict."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

import gemmery
import gemmery_lab as lab
from gemmery.cuda import driver, nvrtc
from gemmery.errors import ArgumentError, RefusedError
from gemmery.ladder.exhibits import EMULATED, EXHIBITS, find, numbers
from gemmery_lab import cli, exhibit_runs

EACH = [pytest.param(one, id=one.name) for one in EXHIBITS]


@pytest.mark.many
@pytest.mark.parametrize("shown", EACH)
def test_what_is_predicted_is_counted_at_every_config(shown):
    """Result, counters and findings, for every value of the space."""
    found = lab.emulated_exhibit(shown.name)
    assert [one.config for one in found] == list(shown.configs())
    for one in found:
        assert one.counted == dict(shown.show.counts(one.n, one.config)), one.config
        assert one.error == 0, one.config
        assert one.findings == (), one.config
        assert one.wrong == ()


@pytest.mark.many
@pytest.mark.parametrize("shown", EACH)
def test_counters_are_the_same_for_an_older_architecture(shown):
    """The PTX for an older card has the same accesses and the same branches."""
    if shown.name == "truncation":
        with pytest.raises(RefusedError, match=r"16 of k, from compute capability 8.0 on: sm_75 is older"):
            lab.emulated_exhibit(shown.name, device="2080ti")
        return
    for one in lab.emulated_exhibit(shown.name, device="2080ti"):
        assert one.wrong == (), one.config


@pytest.mark.many(5)
@pytest.mark.parametrize("name", ["reduce_adjacent", "reduce_strided", "reduce_shuffle"])
@pytest.mark.parametrize("n", [1, 33, 1000, 1025])
def test_a_tree_of_any_length_has_an_exact_sum(name, n):
    for one in lab.emulated_exhibit(name, n):
        assert one.error == 0, one.config


def test_as_many_sectors_are_written_as_read():
    """copy_coalesced predicts what is read; the stores are at the same places of y."""
    for config in find("copy_coalesced").configs():
        run = emulated("copy_coalesced", config)
        assert run.global_.stores == run.global_.loads, config


@pytest.mark.parametrize("name", ["bank_stride", "copy_coalesced"])
def test_as_ptxas_merges_and_as_the_ptx_says_are_one(name):
    """No access of these kernels has a neighbor to merge with: they move elements of one width."""
    for config in find(name).configs():
        run = emulated(name, config)
        assert run.merged == run.as_ptx, config


def emulated(name, config):
    """A launch with all its counters."""
    exhibit = find(name)
    x = numbers(EMULATED)
    geometry = exhibit.launch(x.size, config)
    made = nvrtc.ptx(geometry.source, geometry.kernel, "sm_90")
    arguments = [x, np.empty(exhibit.show.results(x.size, config), np.float32), np.int32(x.size)]
    return gemmery.emulate(made.text, made.entry, geometry.grid, geometry.block, arguments)


def test_what_is_wrong_is_said():
    """A counter that is off, a wrong element, a finding."""
    (good, *_) = lab.emulated_exhibit("divergence_split", 64)
    assert good.predicted == {"divergent_branches": 2}
    bad = replace(good, counted={"divergent_branches": 3}, error=3.0, findings=("line 9: a race",))
    said = (
        "gives 2 wrong elements",
        "has a finding at line 9: a race",
        "has 3 divergent branches, not the 2 predicted",
    )
    assert bad.wrong == said


def test_unknown_names_are_refused():
    with pytest.raises(ArgumentError, match="bank_stride"):
        lab.emulated_exhibit("bank_strides")
    with pytest.raises(ArgumentError, match="h200"):
        lab.emulated_exhibit("bank_stride", device="h2000")


@pytest.fixture
def no_gpu(monkeypatch):
    """As on a machine without a GPU."""
    monkeypatch.setattr(driver, "missing", lambda: "no driver here")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_command_counts_on_the_emulator(capsys):
    assert cli.run(["exhibit", "copy_coalesced"]) == 0
    said = capsys.readouterr()
    assert "no driver here" in said.err
    assert "using the emulator" in said.err
    configs = len(find("copy_coalesced").configs())
    assert f"{configs}/{configs} copy_coalesced, stride" in said.err
    assert "__global__" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    rows = [line.split() for line in said.out.splitlines()]
    at = rows.index(["8", "4", "rules", "384", "12,288"])  # stride, width, requests, sectors
    assert rows[at + 1] == ["emulator", "384", "12,288"]


@pytest.mark.usefixtures("no_gpu")
def test_as_json_it_is_what_the_library_gives(capsys):
    assert cli.run(["exhibit", "reduce_shuffle", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["config"] for one in found] == [{"threads": t} for t in (256, 64, 128, 512, 1024)]
    assert all(one["counted"] == one["predicted"] for one in found)
    assert found[0]["counted"]["divergent_warps"] == 0


@pytest.mark.usefixtures("no_gpu")
def test_a_counter_that_is_not_as_predicted_is_told_and_fails(capsys, monkeypatch):
    monkeypatch.setattr(exhibit_runs, "_counted", lambda *_: {"divergent_branches": 7})
    assert cli.run(["exhibit", "divergence_warp"]) == 1
    assert "has 7 divergent branches, not the 0 predicted" in capsys.readouterr().err
