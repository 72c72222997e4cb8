"""The CUDA backend: kernels in C++, compiled at run time for the device at hand."""
