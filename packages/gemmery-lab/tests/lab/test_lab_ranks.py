"""The workload `distributed` of `gemmery bench`: what counts as load beside a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemmery_lab.over_ranks import TorchClock

CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
SAY = "import sys; from gemmery_lab.over_ranks import CpuOfRanks; input(); print(*CpuOfRanks().children())"


@pytest.mark.process
@pytest.mark.skipif(not CHILDREN.exists(), reason="this system does not list the children of a process")
def test_the_work_of_one_rank_is_no_load_for_another():
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for code in (SAY, "input()")
    ]
    numbers = [str(rank.pid) for rank in ranks]
    said = ranks[0].communicate("\n")[0].split()
    ranks[1].communicate("\n")
    assert numbers[1] in said
    assert numbers[0] not in said


def test_the_transfer_alone_is_by_a_function_that_pytorch_has_and_keeps():
    """all_gather_into_tensor, of PyTorch before 2.13, warns since then."""
    torch = pytest.importorskip("torch")

    gathered = []

    def gather(into, part):
        gathered.append((into.shape, part.shape))

    def deprecated(*_):
        raise FutureWarning

    old, new = {"all_gather_into_tensor": gather}, {"all_gather_into_tensor": deprecated, "all_gather_single": gather}
    for dist in (old, new, {"all_gather_single": gather}):
        clock = SimpleNamespace(torch=torch, dist=SimpleNamespace(**dist), device="cpu", ranks=1)
        TorchClock.products(clock, 4, "f32")["gather alone"]()
    assert gathered == [((4, 4), (4, 4))] * 3
