"""What a user calls: check, view, dispatch, run. `gemmery.api.explanation` is loaded when it is asked for."""

from gemmery.api.products import gemm, gemv, get_num_threads, matmul, set_num_threads

__all__ = ["gemm", "gemv", "get_num_threads", "matmul", "set_num_threads"]
