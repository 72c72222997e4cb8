"""A CUDA kernel's PTX, run on the CPU over all threads at once, with the counters a profiler would show."""
