"""The timing protocol on contestants whose times are made up: statistics, turns, budgets."""

import gc
import itertools
import math
import random

import pytest

from gemmery.errors import ArgumentError
from gemmery_lab.measure import timing
from gemmery_lab.measure.timing import Contestant, compare


class Fake:
    """A contestant whose calls take `next(times)` nanoseconds each; it writes its turns to a shared log."""

    def __init__(self, name, times, log=None):
        self.name, self.times, self.log = name, iter(times), [] if log is None else log
        self.calls = 0

    def sample(self, inner, warm):
        self.calls += inner + warm
        self.log.append((self.name, inner, warm))
        return int(inner * next(self.times))

    @property
    def contestant(self):
        return Contestant(self.name, self.sample)


def constant(name, ns, log=None):
    return Fake(name, itertools.repeat(ns), log)


def turns(log, name):
    """Samples after calibration: those with an untimed call before them."""
    return [entry for entry in log if entry[0] == name and entry[2]]


def test_a_constant_contestant_has_its_time_as_median_best_and_p95():
    log = []
    found = compare([constant("a", 2e6, log).contestant], seconds=1.0).timings["a"]
    assert found.seconds == found.best == found.p95 == pytest.approx(2e-3)
    assert turns(log, "a")[0][1] == 3  # 3 calls of 2 ms last 5 ms


def test_the_ratio_is_rival_over_first():
    found = compare([constant("a", 1e6).contestant, constant("b", 3e6).contestant], seconds=1.0)
    assert found.versus["b"].median == pytest.approx(3.0)
    assert found.versus["b"].spread == pytest.approx(0.0)


def test_median_best_and_p95_of_varying_samples():
    times = itertools.chain([6e6, 6e6], itertools.cycle([6e6, 7e6, 8e6, 9e6, 30e6]))
    found = compare([Fake("a", times).contestant], seconds=10.0).timings["a"]
    assert found.samples == timing.MAX_ROUNDS
    assert (found.best, found.seconds, found.p95) == pytest.approx((6e-3, 8e-3, 30e-3))


def test_ratios_are_taken_pair_by_pair_so_that_a_drift_of_both_cancels():
    drift = [6e6] * 2 + [6e6 * 1.05**i for i in range(60)]
    found = compare([Fake("a", drift).contestant, Fake("b", [2 * t for t in drift]).contestant], seconds=5.0)
    assert found.timings["a"].p95 > 5 * found.timings["a"].best  # the machine slowed down a lot
    assert found.versus["b"].median == pytest.approx(2.0)
    assert found.versus["b"].spread == pytest.approx(0.0, abs=1e-6)


def test_the_spread_is_half_the_interquartile_range_of_the_ratios():
    rival = itertools.chain([6e6, 6e6], itertools.cycle([6e6 * r for r in (0.8, 0.9, 1.0, 1.1, 1.2)]))
    found = compare([constant("a", 6e6).contestant, Fake("b", rival).contestant], seconds=5.0).versus["b"]
    assert found.median == pytest.approx(1.0)
    assert found.spread == pytest.approx(0.1, abs=0.01)


def test_every_round_runs_everyone_in_a_rotated_order():
    log = []
    fakes = [constant(name, 10e6, log) for name in "abc"]
    compare([fake.contestant for fake in fakes], seconds=1.0)
    order = "".join(name for name, _, warm in log if warm)
    assert order.startswith("abc" + "bca" + "cab" + "abc")
    assert order.count("a") == order.count("b") == order.count("c") > 3


def test_an_order_can_be_drawn_in_each_round():
    log = []
    fakes = [constant(name, 10e6, log) for name in "abc"]
    compare([fake.contestant for fake in fakes], seconds=1.0, draw=random.Random(1))
    order = "".join(name for name, _, warm in log if warm)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3
    assert {later[0] for first, later in itertools.pairwise(rounds) if first == "abc"} != {"b"}


def test_tiny_calls_are_repeated_until_a_sample_can_be_timed():
    log = []
    found = compare([constant("a", 50, log).contestant], seconds=1.0).timings["a"]
    assert found.seconds == pytest.approx(50e-9)
    inners = {inner for _, inner, _ in turns(log, "a")}
    assert len(inners) == 1
    assert inners.pop() * 50 >= timing.SAMPLE_NS


def test_a_clock_that_shows_nothing_ends_and_gives_no_zero():
    found = compare([constant("a", 0).contestant, constant("b", 0).contestant], seconds=0.1)
    assert found.timings["a"].seconds > 0
    assert math.isfinite(found.versus["b"].median)


def test_a_slow_rival_is_sampled_in_fewer_rounds_evenly_spread():
    log = []
    found = compare([constant("a", 10e6, log).contestant, constant("b", 200e6, log).contestant], seconds=2.0)
    assert found.timings["b"].samples == 5
    assert found.timings["a"].samples > 20
    assert found.versus["b"].pairs == 5
    positions = [i for i, entry in enumerate(log[4:]) if entry[0] == "b"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(positions)]
    assert max(gaps) <= 2 * min(gaps)


def test_a_call_longer_than_its_share_runs_once():
    slow = constant("b", 9e9)
    found = compare([constant("a", 10e6).contestant, slow.contestant], seconds=2.0)
    assert slow.calls == 1
    assert found.timings["b"].seconds == pytest.approx(9.0)
    assert found.versus["b"].median == pytest.approx(900.0)


def test_three_rounds_at_least_for_what_fits_its_share():
    found = compare([constant("a", 0.9e9).contestant, constant("b", 0.6e9).contestant], seconds=2.0)
    assert found.timings["a"].samples == found.versus["b"].pairs == 3


def test_one_pair_alone_does_not_tell_near_equals_apart():
    found = compare([constant("a", 9e9).contestant, constant("b", 10e9).contestant], seconds=2.0)
    assert found.versus["b"].pairs == 1
    assert found.versus["b"].spread >= abs(found.versus["b"].median - 1)


def test_the_budget_is_kept():
    fakes = [constant("a", 30e6), constant("b", 70e6)]
    compare([fake.contestant for fake in fakes], seconds=3.0)
    assert 1e9 <= fakes[0].calls * 30e6 + fakes[1].calls * 70e6 <= 3.3e9


def test_threads_rest_before_every_turn():
    log, pauses = [], []
    fakes = [constant("a", 10e6, log), constant("b", 10e6, log)]
    compare([fake.contestant for fake in fakes], seconds=4.0, rest=0.25, pause=pauses.append)
    assert set(pauses) == {0.25}
    assert len(pauses) == 2 + len([entry for entry in log if entry[2]])  # two calibrations, then each turn
    assert len(pauses) <= 16  # rest counts toward the budget


def test_the_collector_is_off_inside_a_sample_and_as_before_afterwards():
    seen = []
    timing.calls(lambda: seen.append(gc.isenabled()))(3, 1)
    assert seen == [False] * 4
    assert gc.isenabled()


@pytest.mark.parametrize("c", [None, "C"])
def test_products_are_called_as_a_user_would(c):
    seen = []
    timing.products(lambda *args, **kwargs: seen.append((args, kwargs)), "A", "B", c)(2, 1)
    assert seen == [(("A", "B"), {} if c is None else {"out": "C"})] * 3


def test_the_collector_comes_back_after_an_error():
    def fails():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timing.calls(fails)(1, 0)
    assert gc.isenabled()


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
def test_a_budget_must_be_positive(seconds):
    with pytest.raises(ArgumentError, match="seconds"):
        compare([constant("a", 1e6).contestant], seconds=seconds)


def test_names_must_differ():
    with pytest.raises(ArgumentError, match="own name"):
        compare([constant("a", 1e6).contestant, constant("a", 1e6).contestant], seconds=1.0)
