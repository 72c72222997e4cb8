"""Times of calls on a CUDA device in graphs, for benchmarks that are programs; operands take turns.

PyTorch's stream and events are used: calls are gemmery's and PyTorch's, in the same process.
"""

from __future__ import annotations

import math
import statistics
import sys

import torch

ROTATED = 200 << 20  # bytes of operands that together no cache holds


def say(line):
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def turns(size, least=2):
    """Return how many operands of so many bytes take turns."""
    return max(least, math.ceil(ROTATED / size))


def captured(calls):
    """Return a CUDA graph of calls, each of which ran before: kernels are compiled and weights arranged then."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


def times(runs, rounds, warm=True):
    """Return the median times in us of functions that put work on the stream; they take turns, and one is not timed."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    measured = [[] for _ in runs]
    for _ in range(rounds + 1):
        for each, run in zip(measured, runs, strict=True):
            if warm:
                run()
            begin.record()
            run()
            end.record()
            end.synchronize()
            each.append(begin.elapsed_time(end) * 1e3)
    return [statistics.median(each[1:]) for each in measured]


def time_of(calls, rounds=7):
    """Return the median time in us of a call, of those in a graph."""
    return times([captured(calls).replay], rounds)[0] / len(calls)
