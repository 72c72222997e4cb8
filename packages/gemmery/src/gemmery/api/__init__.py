"""The public functions on arrays. `gemmery.api.explanation` is imported when it is first used."""

from gemmery.api.options import get_num_threads, set_num_threads
from gemmery.api.products import gemm, gemv, matmul

__all__ = ["gemm", "gemv", "get_num_threads", "matmul", "set_num_threads"]
