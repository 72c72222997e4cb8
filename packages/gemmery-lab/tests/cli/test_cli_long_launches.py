"""A launch that takes long says how long, and asks for nothing else."""

import numpy as np
import pytest

from gemmery_emulator.kernels.command import announcer


def said(seconds_a_call, done, blocks):
    """The lines after calls with these numbers of blocks, each so many seconds after the one before."""
    lines, now = [], iter(range(0, 10**6, seconds_a_call))
    announce = announcer(lines.append, lambda: float(next(now)))
    for number in done:
        announce(number, blocks)
    return lines


@pytest.mark.parametrize(
    ("seconds", "done", "blocks", "words"),
    [
        (6, [0, 10], 1000, ["10 of 1,000 blocks have run in 6 seconds; the others take about 10 minutes."]),
        (6, [0, 1], 10**9, ["1 of 1,000,000,000 blocks have run in 6 seconds; the others take about 69,444 days."]),
        (6, [0, 10, 20, 30, 40], 1000, ["about 10 minutes", "about 10 minutes"]),  # 6 and 24 seconds after the start
        (6, [0, 500], 1000, []),  # 6 seconds left
        (4, [0, 10], 1000, []),  # too early
    ],
)
def test_the_time_left_is_written_seldom_and_only_if_it_is_long(seconds, done, blocks, words):
    lines = said(seconds, done, blocks)
    assert len(lines) == len(words)
    assert all(word in line and line.endswith("\n") for word, line in zip(words, lines, strict=True))


def test_the_command_hears_of_each_chunk(monkeypatch, tmp_path):
    pytest.importorskip("cuda.bindings")
    from gemmery_emulator.kernels import command
    from gemmery_lab import cli

    calls = []
    monkeypatch.setattr(command, "announcer", lambda write: lambda done, blocks: calls.append((done, blocks)))
    (tmp_path / "add.cu").write_text("__global__ void add(float* x) { if (blockIdx.x == 0) x[threadIdx.x] += 1; }")
    assert cli.run(["emulate", str(tmp_path / "add.cu"), "--grid=1200", "-af32[32]"]) == 0
    assert calls == [(0, 1200), (512, 1200), (1024, 1200)]


def test_blocks_in_order_are_kept_as_a_range():
    pytest.importorskip("cuda.bindings")
    from gemmery_emulator.findings import global_races
    from gemmery_emulator.kernels.kernel import emulate

    kept = []
    start = global_races.GlobalRaces.start

    def watched(self, *arguments):
        start(self, *arguments)
        kept.append(self._ids[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_races.GlobalRaces, "start", watched)
        code = "__global__ void f(float* x) { if (threadIdx.x == 0) x[blockIdx.x / 2] = blockIdx.x; }"
        run = emulate(code, "f", 1200, 32, [np.zeros(600, np.float32)])
    assert kept == [range(512), range(512, 1024), range(1024, 1200)]
    assert "which thread 0 of block 1 writes" in run.findings[0].message
