"""Flags, order and sums of the overlapped products between devices: their streams on the emulator, in shared memory."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("torch.distributed", reason="PyTorch is not installed")

from gemmery.distributed import peers
from streams_of_devices import Host

K, N, CALLS = 3, 4, 3
ROWS = {2: ([3, 2], [0, 4]), 4: ([2, 2, 2, 2], [3, 0, 1, 2])}


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(x, w):
    """The sums of x @ w as the emulated kernel adds them up."""
    sums = np.zeros((len(x), w.shape[1]), np.float32)
    for j in range(w.shape[0]):
        sums = np.float32(np.float64(x[:, j, None]) * np.float64(w[j]) + np.float64(sums))
    return sums


def gathered(monkeypatch, rows, keep=False, inside=False, **options):
    """Calls of the gather on all devices, each with new rows of x: results, what they must be, and findings."""
    return _calls(monkeypatch, rows, "gather", keep, inside=inside, **options)


def scattered(monkeypatch, rows, keep=False, **options):
    """The same for the sum over devices, of which each gets its rows."""
    return _calls(monkeypatch, rows, "scatter", keep, **options)


def _calls(patch, rows, what, keep, left_out=(), least=0.0, seed=None, turned=False, inside=False, **signals):
    ranks, m = len(rows), sum(rows)
    host = Host(ranks, left_out, turned)
    host.install(patch, peers, inside)
    patch.setattr(peers, "LEAST_WORK", least)
    checks = []
    for rank, device in enumerate(host.devices):
        host.current = device.main
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks)
        w = random(50 + rank, K, N)
        here = host.put(rank, w)
        x = device.empty((rows[rank] if what == "gather" else m, K))
        space = peers.Gather(group, tuple(rows), x) if what == "gather" else peers.Scatter(group, tuple(rows), x, N)
        for call in range(CALLS):
            if what == "gather":
                parts = [random(10 * call + other, count, K) for other, count in enumerate(rows)]
                x.copy_(host.put(rank, parts[rank]))
                result, full = space(x, here, keep)
                wanted = [product(np.concatenate(parts), w), np.concatenate(parts)]
                results = [result, full] if keep else [result]
            else:
                every = [random(10 * call + other, m, K) for other in range(ranks)]
                x.copy_(host.put(rank, every[rank]))
                results = [space(x, here)]
                own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
                total = product(every[0][own], random(50, K, N))
                for other in range(1, ranks):
                    total = total + product(every[other][own], random(50 + other, K, N))
                wanted = [total]
            for one, want in zip(results, wanted, strict=False):
                there = host.put(rank, np.zeros(want.shape, np.float32))
                there.copy_(one)
                checks.append((there.places, want))
            device.end_call()
            assert device.empty(x.shape).places is x.places  # it is not free
    memory, findings = host.run(seed, **signals)
    return [(memory[places], want) for places, want in checks], findings


CASES = [(rows, least) for ranks in ROWS for rows in ROWS[ranks] for least in (0.0, 1e12)]


def inside(monkeypatch, rows, **options):
    """Calls of the gather with one launch that waits for flags."""
    return gathered(monkeypatch, rows, inside=True, **options)


@pytest.mark.many(7)
@pytest.mark.parametrize("call", [gathered, inside, scattered])
@pytest.mark.parametrize(("rows", "least"), CASES, ids=str)
def test_devices_that_hand_over_rows_and_sums(monkeypatch, call, rows, least):
    """Calls in a row on 2 and 4 devices: nothing races, and the sums have the bits of the order of ranks."""
    checks, findings = call(monkeypatch, rows, least=least, keep=least > 0)
    assert findings == ()
    assert len(checks) == CALLS * len(rows) * (1 + (call is not scattered and least > 0))
    for result, want in checks:
        assert result.tobytes() == want.tobytes()


WAITS = (
    "free",
    "arrived",
    "the side stream waits for the main stream",
    "the main stream waits for the side stream",
)


@pytest.mark.many(7)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("call", "missing"),
    [(call, wait) for call in (gathered, scattered, inside) for wait in WAITS] + [(inside, "the launch waits")],
)
def test_a_flag_that_is_missing_is_a_race(monkeypatch, call, ranks, missing):
    left_out = (missing, "the launch waits") if missing == "arrived" else (missing,)
    _, findings = call(monkeypatch, ROWS[ranks][0], left_out=left_out, keep=call is not inside)
    assert "race" in {each.kind for each in findings}


@pytest.mark.parametrize("word", ["RELEASE", "ACQUIRE"])
def test_a_signal_that_orders_nothing_is_a_race(monkeypatch, word):
    _, findings = scattered(monkeypatch, ROWS[2][0], **{word: "relaxed"})
    assert {each.kind for each in findings} == {"race"}


@pytest.mark.parametrize("scope", ["sys", "gpu"])
def test_a_signal_of_one_device_is_none_for_another(monkeypatch, scope):
    """Each block is a device here, for which the emulator has no scope: a device's own is then that of a block."""
    orders = import_module("gemmery_emulator.findings.orders")
    monkeypatch.setattr(orders, "OWN_SCOPES", orders.OWN_SCOPES | {"gpu"})
    _, findings = gathered(monkeypatch, ROWS[2][0], SCOPE=scope)
    assert {each.kind for each in findings} == ({"race"} if scope == "gpu" else set())


@pytest.mark.many(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_streams_gives_the_same_bits(monkeypatch, seed):
    checks, findings = scattered(monkeypatch, ROWS[4][1], seed=seed)
    assert findings == ()
    assert all(result.tobytes() == want.tobytes() for result, want in checks)


def test_another_order_of_sums_gives_other_bits(monkeypatch):
    """Or the comparison above would not see it."""
    checks, _ = scattered(monkeypatch, ROWS[4][0], turned=True)
    assert any(result.tobytes() != want.tobytes() for result, want in checks)
