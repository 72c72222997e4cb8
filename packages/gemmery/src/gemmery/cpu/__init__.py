"""The CPU backend: kernels written as loops in Python, compiled for the host's instruction set."""

from gemmery import dtypes as dtypes  # first: it notes when the generators began to be imported
