"""The CPU backend: kernels written as loops in Python, compiled for the host's instruction set."""
