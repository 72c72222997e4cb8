"""Every experiment has what a command, a table, a figure and the documents need, and a new one is one entry."""

import shlex

import pytest

import gemmery_lab as lab
import records
from gemmery.errors import ArgumentError
from gemmery_lab import experiments
from gemmery_lab.cli.parser import app
from gemmery_lab.climb import planned
from gemmery_lab.measure import suite as suites
from gemmery_lab.measure.record import Run
from gemmery_lab.report import words
from gemmery_lab.report.page import DRAWINGS, figures
from gemmery_lab.report.tables import SHEETS, sheets
from site_pages import stored
from site_pages.stored import Query, missing

EVERY = {experiment.suite: experiment for experiment in stored.every()}


@pytest.mark.parametrize("suite", EVERY)
def test_an_experiment_has_a_title_an_axis_a_table_and_figures(suite):
    experiment = EVERY[suite]
    assert experiments.find(suite) is experiment
    assert experiment.title
    assert experiment.axis.label
    assert not (experiment.axis.key and experiment.axis.side)
    assert experiment.table in SHEETS
    assert set(experiment.figures) <= DRAWINGS.keys()
    assert experiment.figures or experiment is experiments.EXHIBIT  # its page shows the kernel
    assert experiment.devices


@pytest.mark.parametrize("suite", EVERY)
def test_the_command_line_takes_its_command(suite, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for device in EVERY[suite].devices:
        name, *arguments = shlex.split(stored.command(EVERY[suite], device, store=str(tmp_path)))
        assert name == "gemmery"
        assert callable(app([*arguments], standalone_mode=False))


def test_each_has_records_of_its_own():
    every = stored.every()
    assert len(EVERY) == len(every)
    assert set(suites.names()) == {experiment.suite for experiment in every} - {
        experiment.suite for experiment in experiments.BUILT_IN
    }


def test_all_kinds_have_a_use_and_every_kind_of_suite_a_table():
    assert set(experiments.TABLES) == set(suites.KINDS)
    assert {experiment.table for experiment in EVERY.values()} | {"tokens"} == set(SHEETS)
    assert set(DRAWINGS) == {kind for experiment in EVERY.values() for kind in experiment.figures}


def test_a_command_names_the_device_and_the_type_that_are_not_its_own():
    size, gemv, small = experiments.sweep("size"), experiments.sweep("gemv"), experiments.find("small")
    assert stored.command(size, "cpu", "f32") == "gemmery sweep size"
    assert stored.command(size, "cuda", "f64", "there") == "gemmery sweep size --device cuda --dtype f64 --store there"
    assert stored.command(gemv, "cuda") == "gemmery sweep gemv --dtype f16"
    assert stored.command(small, "cuda", "f64") == "gemmery bench small"


def test_an_unknown_sweep_is_named_with_a_near_one():
    with pytest.raises(ArgumentError, match="did you mean 'tile'"):
        experiments.sweep("tiles")


def test_a_suite_of_ones_own_is_shown_as_what_its_records_look_like():
    mine = experiments.find("mine")
    assert mine.table == experiments.ANY_SUITE
    assert stored.command(mine) == "gemmery bench mine"
    (row,) = records.bench().measurements[:1]
    (sheet,) = sheets(Run(records.MACHINE, records.STARTED, (row.__class__(**{**vars(row), "suite": "mine"}),)), ())
    assert sheet.title.startswith("mine")


def test_a_new_sweep_is_one_entry(monkeypatch):
    trial = experiments.built_in(
        "depth",
        title="Time against the depth of a block",
        axis={"label": "depth of a block", "key": "kc"},
        table="by_key",
        cpu={"rungs": ["packed"], "sizes": [512], "values": [128, 256]},
    )
    monkeypatch.setattr(experiments, "SWEEPS", (*experiments.SWEEPS, trial))
    monkeypatch.setattr(experiments, "BUILT_IN", (*experiments.BUILT_IN, trial))
    experiments.find.cache_clear()
    plan = planned(trial, (), (), "f32", "")
    assert [(rung.name, config) for rung, config in plan.variants] == [
        ("packed", {"kc": 128}),
        ("packed", {"kc": 256}),
    ]
    taken = [
        records.measurement(trial.suite, "packed", 512, kc, config={"kc": kc}, versus={"numpy": 2.0})
        for kc in (128, 256)
    ]
    run = Run(records.MACHINE, records.STARTED, tuple(taken))
    (sheet,) = sheets(run, ())
    (plot,) = figures(run)
    assert sheet.head[1] == "depth of a block"
    assert sheet.head[5] == "× NumPy"
    assert sheet.title == plot.title == "Time against the depth of a block, n = 512, f32"
    assert words.title(run) == trial.title
    assert "`gemmery sweep depth --store" in missing(Query(trial.suite, (), {}))
    experiments.find.cache_clear()


def test_the_emulator_counts_the_sweeps_with_points_for_it():
    countable = [sweep.name for sweep in experiments.SWEEPS if "emulator" in sweep.points]
    assert countable == ["threads", "tile", "stages"]
    with pytest.raises(ArgumentError, match="it runs threads, tile, stages"):
        lab.emulated_sweep("size")
