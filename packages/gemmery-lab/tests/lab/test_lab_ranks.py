"""The workload `distributed` of `gemmery bench`: what counts as load beside a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
