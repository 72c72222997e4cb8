"""One rank of an NCCL group on one host, started by torchrun: the overlapped products through peers' memory.

The gather of equal parts is one launch that waits for rows, of others two products.

Operands are integers so small that every sum is exact. It exits with 0 if all its checks hold. Each rank says what it
has done, and after LIMIT seconds where each of its threads is: kernels are compiled at first, for each of the shapes.
"""

import faulthandler
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import gemmery.distributed as gd
from gemmery.distributed import groups

CASES = [  # rows of each rank, taken in turn, then n and k of one rank
    ([64, 64], 256, 128),
    ([5, 0], 24, 40),
    ([0, 9], 24, 40),
    ([300, 212], 520, 264),
    ([2048, 2048], 4096, 4096),
]


LIMIT = 200
START = time.perf_counter()


def say(rank, *words):
    sys.stderr.write(f"rank {rank}, {time.perf_counter() - START:.1f} s: {' '.join(map(str, words))}\n")


def integers(seed, *shape):
    generator = torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device=generator.device).to(torch.bfloat16)


def gathered(rank, rows, n, k, turn):
    """Return the call's operands, what it must give, and by how much it may miss; every rank computes it alone."""
    parts = [integers(100 * turn + other, count, k) for other, count in enumerate(rows)]
    w = integers(77 + turn + rank, k, n)
    want = (torch.cat(parts).double() @ w.double()).bfloat16()
    return parts[rank], w, want, torch.zeros_like(want)


def scattered(rank, rows, n, k, turn):
    """The same for the sum over ranks, of which a rank gets its rows; parts and sum are rounded to bfloat16."""
    start = sum(rows[:rank])
    total, size = torch.zeros(2, rows[rank], n, dtype=torch.float64, device="cuda")
    for other in range(len(rows)):
        x, w = integers(100 * turn + other, sum(rows), k), integers(55 + turn + other, k, n)
        part = x[start : start + rows[rank]].double() @ w.double()
        total += part
        size += part.abs()
        if other == rank:
            own = x, w
    return *own, total, size * 2.0**-7


def calls(rank, ranks, make, call):
    """Call many times in a row, without a wait between, so that a signal that is missing or too early shows."""
    for shape, n, k in CASES:
        rows = [shape[other % 2] for other in range(ranks)]
        operands = [make(rank, rows, n, k, turn) for turn in range(6)]
        say(rank, call.__name__, rows, n, k)
        results = [call(x, w, rows=rows) for _ in range(3) for x, w, *_ in operands]
        for result, (_, _, want, bound) in zip(results, operands * 3, strict=True):
            assert bool(((result.double() - want.double()).abs() <= bound).all()), (call, rows, n, k)


def replays(rank, ranks, make, call):
    """A graph of a call, again and again with new data."""
    rows, n, k = [256] * ranks, 512, 1024
    x, w, *_ = make(rank, rows, n, k, 0)
    call(x, w, rows=rows)
    torch.cuda.synchronize()
    say(rank, call.__name__, "is captured")
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(x, w, rows=rows)
    found = []
    for turn in range(20):
        new_x, new_w, *wanted = make(rank, rows, n, k, turn)
        x.copy_(new_x)
        w.copy_(new_w)
        graph.replay()
        found.append((result.clone(), *wanted))
    for result, want, bound in found:
        assert bool(((result.double() - want.double()).abs() <= bound).all()), call


def launches_of(space):
    return getattr(space, "_launches", {}).values()


def main():
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    rank = dist.get_node_local_rank()
    torch.cuda.set_device(rank)
    # A signal that does not come is an error after this time, and not after the ten minutes of NCCL.
    limit = timedelta(seconds=120)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank), timeout=limit)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for make, call in ((gathered, gd.all_gather_matmul), (scattered, gd.matmul_reduce_scatter)):
        calls(rank, ranks, make, call)
        replays(rank, ranks, make, call)
    assert any(spaces.get("peers") for spaces in groups._spaces.values()), "the devices reach each other's memory"
    kept = [launch for spaces in groups._spaces.values() for s in spaces.values() for launch in launches_of(s)]
    assert any(kept)
    assert not all(kept)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
