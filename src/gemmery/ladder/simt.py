"""The rungs on CUDA cores, from one block to a pipeline."""

from __future__ import annotations

from gemmery.cuda import simt
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

_EVERY = ("f32", "f64", "f16", "bf16")


def _takes(problem: Problem) -> str:
    """What no rung of these refuses but complex and integer results."""
    return ""


SIMT = (
    Rung(
        name="simt_naive",
        idea="many blocks, one thread for each element of C",
        parent=None,
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.naive),
        geometry=simt.naive,
        space={"threads": (32, 64, 128, 256, 512, 1024)},
        default={"threads": 256},
        lesson="Two loads for every multiply-add: the memory wall.",
        source="cuda/kernels/simt_naive.cu",
    ),
)
