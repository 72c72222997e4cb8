"""The GPU ladder: CUDA cores, tensor cores, and a matrix times a vector."""

from __future__ import annotations

from gemmery.ladder.float32_parts import SPLIT_FLOAT32
from gemmery.ladder.gemv import GEMV, GEMV_QUANTIZED
from gemmery.ladder.general import BATCHED, GENERAL
from gemmery.ladder.int8_pieces import INTEGERS, OZAKI
from gemmery.ladder.rung import Rung
from gemmery.ladder.simt import SIMT, TILED
from gemmery.ladder.tensor import MMA, TENSOR
from gemmery.ladder.wgmma import WGMMA
from gemmery.ladder.wgmma_quantized import GEMM_QUANTIZED
from gemmery.ladder.wgmma_split import GROUPED, SPLIT

CUDA: tuple[Rung, ...] = (
    *SIMT,
    *TILED,
    *TENSOR,
    *MMA,
    *WGMMA,
    *SPLIT,
    *SPLIT_FLOAT32,
    *OZAKI,
    *INTEGERS,
    *GROUPED,
    *GENERAL,
    *GEMV,
    *GEMV_QUANTIZED,
    *BATCHED,
)

# They multiply by weights that gemmery.cuda.weights arranged, and by nothing else: no product of `gemmery ladder`.
BY_WEIGHTS: tuple[Rung, ...] = GEMM_QUANTIZED
