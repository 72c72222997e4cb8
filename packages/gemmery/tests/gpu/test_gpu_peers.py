"""The overlapped products between GPUs of one host, which signal through each other's memory. Needs two GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAM = Path(__file__).parents[1] / "distributed" / "programs" / "nccl_ranks.py"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs of one host"
    ),
]


def test_products_of_two_ranks_over_peers_memory():
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*run, str(PROGRAM)], check=False, env={**os.environ}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
