"""What a user calls: check, view, dispatch, run."""

from gemmery.api.explanation import Explanation, explain
from gemmery.api.products import gemm, gemv, get_num_threads, matmul, set_num_threads

__all__ = ["Explanation", "explain", "gemm", "gemv", "get_num_threads", "matmul", "set_num_threads"]
