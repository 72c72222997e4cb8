"""Few rows times packed weights on a GPU: gemmery.torch.quantized_linear, PyTorch in bfloat16 and its int4 kernel.

    python benchmarks/packed_weights.py --rows 1 4 16 --shapes 4096x4096 14336x4096

A shape is out_features x in_features. Each contestant is a CUDA graph of calls with one weight after the other, so many
that together they are three times the L2 cache; the contestants take turns, and the median of a call is printed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys

import torch

import gemmery.torch
from gemmery import tiers

GROUP = 128
CALLS = 16  # of a graph at least


def replayed(call, count):
    """Return a graph of `count` calls, each with the number of its weight."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(count):
            call(number)
    torch.cuda.current_stream().wait_stream(side)
    tiers.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            call(number)
    return graph


def seconds(graph, count):
    """Return the time of one call in a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count / 1e3


def copies(make, size):
    """Return so many weights of this many bytes that no cache holds them."""
    together = 3 * torch.cuda.get_device_properties().L2_cache_size
    return [make() for _ in range(max(2, -(-together // size)))]


def contestants(x, n, k, bits):
    """Yield name, call and the weights that it goes through."""
    plain = copies(functools.partial(torch.randn, n, k, device="cuda", dtype=x.dtype), 2 * n * k)
    yield "bfloat16, PyTorch", lambda weight: torch.nn.functional.linear(x, weight), plain
    for each in bits:
        packed = [gemmery.torch.quantize(weight, each, GROUP) for weight in plain[:2]]
        numbers = itertools.cycle(packed)

        def clone(numbers=numbers):
            return tuple(part.clone() for part in next(numbers))

        layer = functools.partial(gemmery.torch.quantized_linear, x)
        yield f"{each} bits", lambda weight, layer=layer: layer(*weight), copies(clone, n * k * each // 8)
    if 4 in bits:
        pairs = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device="cuda")
        factors = torch.randn(k // GROUP, n, 2, device="cuda", dtype=x.dtype)
        weights = copies(lambda: torch._convert_weight_to_int4pack(pairs, 8), n * k // 2)
        yield "4 bits, PyTorch", lambda weight: torch._weight_int4pack_mm(x, weight, GROUP, factors), weights


def main():
    """Print a line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "14336x4096", "4096x14336", "2048x8192"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--bits", nargs="+", type=int, choices=(8, 4), default=[8, 4])
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    for shape, rows in itertools.product(options.shapes, options.rows):
        n, k = map(int, shape.split("x"))
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        graphs, kept = {}, []
        for name, call, weights in contestants(x, n, k, options.bits):
            count = max(CALLS, len(weights))
            kept.append(weights)
            graphs[name] = replayed(lambda i, call=call, weights=weights: call(weights[i % len(weights)]), count), count
        turns = [{name: seconds(*graph) for name, graph in graphs.items()} for _ in range(options.turns)]
        medians = {name: statistics.median(turn[name] for turn in turns) for name in graphs}
        first = next(iter(medians.values()))
        texts = (f"{name} {each * 1e6:.2f} us, {first / each:.2f}x" for name, each in medians.items())
        sys.stdout.write(f"{rows} x {n} x {k}: {'; '.join(texts)}\n")
        del kept


if __name__ == "__main__":
    with torch.no_grad():
        main()
