"""The public functions on arrays. `gemmery.api.explanation` is imported when it is first used."""

from gemmery.api.products import gemm, gemv, get_num_threads, matmul, set_num_threads

__all__ = ["gemm", "gemv", "get_num_threads", "matmul", "set_num_threads"]
