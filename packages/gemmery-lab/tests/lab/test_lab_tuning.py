"""gemmery tune: what halving picks, what an interrupt costs, and how long it takes, by made-up times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import gemmery_lab as lab
from gemmery import config, dispatch
from gemmery.cpu import target, tuned
from gemmery.cpu.target import host
from gemmery.errors import ArgumentError, CheckError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import find
from gemmery_lab import cli, health, tuning
from gemmery_lab.tuning import Probe, Question, Score

PROBE = Probe(8, 8, 8, "f32")
MODEL = target.modeled(host())
BLOCKS = Question("blocks", {"mc": (24, 48, 192, 384), "nc": (512, 4096)}, (PROBE,))
STREAMS = Question("streams", {"streamed_rows": (32, 64, 128, 256)}, (PROBE,))
THREADS = Question("threads", {"worth": (2000, 4000, 16_000)}, (PROBE,))


class Machine:
    """A machine on which constants take made-up times, with a clock that only its races move."""

    def __init__(self, best, spread=0.0, cost=1.0, busy=0.0):
        self.best, self.spread, self.cost, self.busy, self.now = best, spread, cost, busy, 0.0
        self.races, self.stop_at = [], math.inf

    def time(self, constants):
        """1 for the best values, more the further they are away."""
        return 1 + sum(abs(math.log2(getattr(constants, key) / value)) for key, value in self.best.items())

    def race(self, question, base, candidates, seconds, end):
        if len(self.races) >= self.stop_at:
            raise KeyboardInterrupt
        self.races.append((question.name, len(candidates)))
        self.now += self.cost * seconds
        if self.now > end:
            self.now = end
            raise TimeoutError
        return [Score(self.time(each) / self.time(base), self.spread, self.busy) for each in candidates]

    def tune(self, minutes=10.0, asked=(BLOCKS, STREAMS, THREADS), **options):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tuning, "race", self.race)
            patched.setattr(tuning, "monotonic", lambda: self.now)
            patched.setattr(tuning, "questions", lambda host, threads: asked)
            return tuning.tune(minutes, **options)


def forget():
    """Let the next look for constants read the table."""
    target._constants.cache_clear()


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """An empty data folder; no question needs long, and nobody else uses the machine."""
    monkeypatch.setattr(config, "data_dir", lambda: str(tmp_path))
    monkeypatch.setattr(config, "table_folders", lambda: [str(tmp_path / "tables")])
    monkeypatch.setattr(config, "table_files", lambda machine: ("this.json", "old.json"))
    monkeypatch.setattr(tuning, "least", lambda question, base: 1.0)
    monkeypatch.delenv("GEMMERY_TABLE", raising=False)
    forget()
    yield tmp_path / "tables"
    forget()


def test_halving_finds_the_best_and_the_table_has_it():
    machine = Machine({"mc": 192, "nc": 512, "streamed_rows": 64, "worth": 16_000})
    result = machine.tune()
    assert target.constants() == MODEL._replace(mc=192, nc=512, streamed_rows=64, worth=16_000)
    assert health._table() == (f"{result.path}: mc=192, nc=512, streamed_rows=64, worth=16000", True, "")
    assert [outcome.after for outcome in result.outcomes] == [
        {"mc": 192, "nc": 512},
        {"streamed_rows": 64},
        {"worth": 16_000},
    ]
    assert all(outcome.score.time < 1 for outcome in result.outcomes)
    blocks = [count for name, count in machine.races if name == "blocks"]
    assert blocks == [14, 7, 4, 2, 1]  # the last one next to the constants so far


def test_later_questions_start_from_the_answers_so_far(monkeypatch):
    bases = []
    machine = Machine({"mc": 192})
    monkeypatch.setattr(
        machine,
        "race",
        lambda question, base, *rest: bases.append(base) or Machine.race(machine, question, base, *rest),
    )
    machine.tune(asked=(BLOCKS, STREAMS))
    assert bases[0] == MODEL
    assert bases[-1] == MODEL._replace(mc=192)


@pytest.mark.parametrize(("best", "spread"), [({"mc": MODEL.mc}, 0.0), ({"mc": 192}, 0.6)])
def test_constants_stay_where_nothing_is_faster_by_more_than_the_spread(best, spread):
    result = Machine(best, spread).tune(asked=(Question("rows", {"mc": (48, 192)}, (PROBE,)),))
    assert result.outcomes[0].before == result.outcomes[0].after == {"mc": MODEL.mc}
    assert result.outcomes[0].score
    assert target.constants() == MODEL


def test_a_run_that_keeps_every_constant_leaves_no_table(folder):
    asked = (Question("rows", {"mc": (48, 192)}, (PROBE,)),)
    first = Machine({"mc": 192}).tune(asked=asked)
    assert [str(file) for file in folder.iterdir()] == [first.path]
    second = Machine({"mc": MODEL.mc}).tune(asked=asked)
    assert second.path == ""
    assert not folder.exists()
    assert "no table" in cli.looking.tuning_in_words(second)
    other = folder / "other.json"
    folder.mkdir()
    other.write_text("{}")
    Machine({"mc": MODEL.mc}).tune(asked=asked)
    assert other.exists()


@pytest.mark.parametrize(("busy", "spread", "mc"), [(0.2, 0.4, 192), (1.9, 0.4, MODEL.mc), (1.9, 0.1, 192)])
def test_on_a_busy_machine_a_gain_must_be_three_times_the_spread(busy, spread, mc):
    asked, machine = (Question("rows", {"mc": (48, 192)}, (PROBE,)), STREAMS), Machine({"mc": 192}, spread, busy=busy)
    machine.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        machine.tune(asked=asked)
    result = Machine({"mc": 192}, spread).tune(asked=asked)  # it remembers how busy the machine was
    assert target.constants().mc == mc
    assert result.outcomes[0].score.busy == busy


@pytest.mark.parametrize("stop_at", range(11))
def test_an_interrupted_run_goes_on_where_it_was(stop_at, folder):
    best = {"mc": 192, "nc": 512, "streamed_rows": 64, "worth": 16_000}
    whole = Machine(best)
    expected = whole.tune()
    (folder / "this.json").unlink()
    first = Machine(best)
    first.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        first.tune()
    assert len(first.races) == stop_at
    assert not (folder / "this.json").exists()
    second = Machine(best)
    result = second.tune()
    assert first.races + second.races == whole.races
    assert result.outcomes == expected.outcomes
    assert [file.name for file in folder.iterdir()] == ["this.json"]
    third = Machine(best)
    third.tune()  # one that ended is measured anew
    assert third.races == whole.races


def test_a_fresh_run_uses_nothing_of_an_interrupted_one():
    first, second = Machine({"mc": 192}), Machine({"mc": 48})
    first.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        first.tune()
    second.tune(fresh=True)
    assert target.constants().mc == 48
    assert len(second.races) == 11


def interrupted(folder):
    """The journal of a run that was stopped, and what it holds."""
    first = Machine({"mc": 192})
    first.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        first.tune()
    (journal,) = folder.iterdir()
    return journal, json.loads(journal.read_text())


@pytest.mark.parametrize("damage", ["", "{", '{"gemmery": 1}', "another version"])
def test_a_damaged_or_stale_journal_is_measured_anew(damage, folder):
    journal, own = interrupted(folder)
    own["gemmery"]["machine"]["version"] = "9.9"
    journal.write_text(json.dumps(own) if damage == "another version" else damage)
    second = Machine({"mc": 192})
    second.tune()
    assert len(second.races) == 11
    assert target.constants().mc == 192


@pytest.mark.parametrize(
    "row", [{"times": "abc"}, {"spreads": [None]}, {"busy": [math.nan]}, {"times": {}}, {"mc": "x"}]
)
def test_rows_of_a_journal_that_are_damaged_are_measured_anew(row, folder):
    journal, own = interrupted(folder)
    own["cache"] = {key: {**old, **row} for key, old in own["cache"].items()}
    journal.write_text(json.dumps(own))
    second = Machine({"mc": 192})
    second.tune()
    assert len(second.races) == 11
    assert target.constants().mc == 192


@pytest.mark.parametrize("cost", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("minutes", [0.1, 1.0, 10.0])
def test_it_ends_within_its_time(minutes, cost):
    machine = Machine({"mc": 192, "worth": 16_000}, cost=cost)
    result = machine.tune(minutes)
    assert 0 < result.seconds <= 60 * minutes
    assert any(outcome.score for outcome in result.outcomes)


def test_a_machine_that_takes_longer_than_planned_still_has_a_last_round():
    machine = Machine({"mc": 192}, cost=2.5)
    result = machine.tune(asked=(BLOCKS,))
    assert [count for _, count in machine.races] == [14, 1]
    assert result.outcomes[0].after["mc"] == 192


def test_what_there_is_no_time_for_keeps_the_model(monkeypatch):
    monkeypatch.setattr(tuning, "least", lambda question, base: 100.0 if question is BLOCKS else 1.0)
    result = Machine({"mc": 192, "worth": 16_000}).tune(0.2)
    assert [outcome.question for outcome in result.outcomes] == ["streams", "threads", "blocks"]  # the shortest first
    assert [bool(outcome.score) for outcome in result.outcomes] == [True, True, False]
    assert target.constants() == MODEL._replace(worth=16_000)
    table = json.loads(Path(result.path).read_text())
    assert set(table["gemmery"]["constants"]) == {"streamed_rows", "worth"}


def test_the_file_has_the_format_of_kernel_tuners_caches():
    path = Machine({"mc": 192}).tune().path
    table = json.loads(Path(path).read_text())
    keys = list(target.Constants._fields)
    assert table["schema_version"] == "1.1.0"
    assert table["tune_params_keys"] == keys
    assert {table[key].__class__ for key in ("device_name", "kernel_name", "problem_size", "objective")} == {str}
    assert len(table["cache"]) == 14 + 4 + 3
    for key, row in table["cache"].items():
        assert key == ",".join(str(row[name]) for name in keys)
        assert all(row[name] in table["tune_params"][name] for name in keys)
        assert row["time"] == row["times"][-1]
        assert {"compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"} <= set(row)
        assert "T" in row["timestamp"]


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(minutes, capsys):
    with pytest.raises(ArgumentError, match="the time to tune must be above 0"):
        tuning.tune(minutes)
    assert cli.run(["tune", "--minutes", str(minutes)]) == 2
    assert "must be above 0 and at most 1440" in capsys.readouterr().err


def test_every_question_is_about_constants_that_a_table_may_have():
    for threads in (1, 2, 64):
        asked = tuning.questions(host(), threads)
        keys = [key for question in asked for key in question.values]
        assert len(keys) == len({*keys})
        assert set(keys) == set(target.Constants._fields) - ({"worth", "wakes"} if threads == 1 else set())
        for question in asked:
            for key, values in question.values.items():
                least, most = tuned.LIMITS[key]
                assert all(least <= value <= most for value in values)
            assert MODEL not in question.candidates(MODEL)


def test_each_question_has_products_that_its_candidates_plan_differently():
    for question in tuning.questions(host(), 2):
        every = [MODEL, *question.candidates(MODEL)]
        plans = {tuple(tuning._planned(probe, each)[1] for probe in question.probes) for each in every}
        assert len(plans) > 2, question.name
        assert target.constants() == MODEL  # planning leaves nothing behind


def test_a_race_has_a_score_for_each_candidate():
    question = Question(
        "few", {"streamed_rows": (8, 32, 300)}, (Probe(16, 700, 700, "f32"), Probe(40, 700, 700, "f32"))
    )
    base = MODEL._replace(direct_few=0.1, direct_many=0.1)
    eight, some, many = scores = tuning.race(
        question, base, [base._replace(streamed_rows=rows) for rows in (8, 32, 300)], 0.02, math.inf
    )
    assert all(score.time > 0 and score.spread >= 0 for score in scores)
    assert (many.time, many.spread) == (1.0, 0.0)  # the same plans as the base
    assert eight != some


def test_a_race_lets_workers_sleep():
    probe = Probe(96, 96, 96, "f32", 2, idle=True)
    base = MODEL._replace(worth=100)
    (score,) = tuning.race(
        Question("x", {"worth": (10**8,)}, (probe,)), base, [base._replace(worth=10**8)], 0.01, math.inf
    )
    assert score.time > 0


def test_a_candidate_with_other_bits_is_an_error(monkeypatch):
    packed = find(CPU, "packed")
    monkeypatch.setattr(dispatch, "choice", lambda problem: (packed, {"kc": target.constants().mc}, ""))
    question = Question("depth", {"mc": (16,)}, (Probe(50, 50, 900, "f32"),))
    with pytest.raises(CheckError, match="the bits of C depend on mc"):
        tuning.race(question, MODEL, [MODEL._replace(mc=16)], 0.01, math.inf)


def test_the_command_says_what_it_found(monkeypatch, capsys):
    machine = Machine({"mc": 192}, cost=0.2)
    monkeypatch.setattr(
        lab, "tune", lambda minutes, fresh, on_step: machine.tune(minutes, fresh=fresh, on_step=on_step), raising=False
    )
    assert cli.run(["tune", "--minutes", "1"]) == 0
    out = capsys.readouterr().out
    assert "mc 96 -> 192" in out
    assert "kept; the best other one takes" in out
    assert "this.json" in out
    machine.stop_at = 0
    machine.races.clear()
    assert cli.run(["tune", "--json"]) == 130
    assert "`gemmery tune` goes on where it was" in capsys.readouterr().err


def test_doctor_names_the_table():
    assert health._table()[0].startswith("none: ")
    result = Machine({"mc": 192}).tune()
    forget()
    assert health._table() == (f"{result.path}: mc=192", True, "")
    Path(result.path).write_text("{")
    forget()
    value, ok, advice = health._table()
    assert (value.startswith("none: "), ok) == (True, False)
    assert f"{result.path} is ignored" in advice
