"""One rank of a Gloo group: python gloo_ranks.py RANK RANKS FILE CASE. It exits with 0 if all its checks hold."""

import copy
import os
import sys
from datetime import timedelta
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import gemmery.distributed as gd
from gemmery.distributed import layouts, one_host
from gemmery.distributed.overlap import exchange
from gemmery.distributed.plan import plan as planned
from gemmery.errors import ArgumentError, GemmeryError, ShapeError
from parts_of_matrices import joined, parts, uneven

PLACES = (Shard(0), Shard(1), Replicate(), Partial())


def ours(places):
    return tuple(gd.Shard(p.dim) if isinstance(p, Shard) else getattr(gd, type(p).__name__)() for p in places)


def products(rank, ranks):
    """Products of DTensors, in every pair of placements: right, in the placement that explain tells, twice alike."""
    dims = (ranks,) if ranks < 4 else (2, ranks // 2)
    mesh = init_device_mesh("cpu", dims)
    rng = np.random.default_rng(3)
    every = list(product(product(PLACES, repeat=len(dims)), repeat=2))
    for case, (of_a, of_b) in enumerate(every if len(every) <= 16 else every[::17]):
        m, n, k = (int(x) for x in rng.integers(0, 7, 3))
        dtype = (torch.float32, torch.bfloat16, torch.float16, torch.int8)[case % 4]
        whole = [rng.integers(-3, 4, shape).astype(np.float32) for shape in ((m, k), (k, n))]
        held = [layouts.even(x.shape, dims, ours(places)) for x, places in zip(whole, (of_a, of_b), strict=True)]
        a, b = (
            DTensor.from_local(
                torch.from_numpy(parts(x, layout, rng)[rank]).to(dtype),
                mesh,
                places,
                run_check=False,
                shape=x.shape,
                stride=(x.shape[1], 1),
            )
            for x, layout, places in zip(whole, held, (of_a, of_b), strict=True)
        )
        c = gd.matmul(a, b)
        plan = gd.explain(a, b)
        assert ours(c.placements) == plan.out.placements
        assert tuple(c.shape) == (m, n)
        assert c.dtype == dtype
        found = exchange(dist.group.WORLD)(c.to_local().double().numpy())
        np.testing.assert_array_equal(joined(found, plan.out, np.float64), whole[0] @ whole[1])
        assert torch.equal(gd.matmul(a, b).to_local(), c.to_local())

    world, rows, whole = dist.group.WORLD, gd.Shard(0), gd.Replicate()
    x, w = torch.ones(2, 6), torch.ones(6, 5)
    assert gd.matmul(x, w, group=world, placements=(rows, whole)).shape == (2, 5)
    mine = rank == ranks - 1
    for operand, places in (
        (x.numpy() if mine else x, (rows, whole)),
        (x, "ab" if mine else (rows, whole)),
        (x.clone().requires_grad_(mine), (rows, whole)),
    ):
        with pytest.raises(GemmeryError, match=f"rank {ranks - 1}: "):
            gd.matmul(operand, w, group=world, placements=places)
    for wrong in ({"steps": 1.5}, {"ways": 3}, {"mesh": [ranks]}):
        with pytest.raises(GemmeryError, match=f"rank {ranks - 1}: "):
            gd.matmul(x, w, group=world, placements=(rows, whole), **(wrong if mine else {}))


def pairs(rank, ranks):
    """Parts of any sizes, also none, in every pair of placements on a row of ranks and on two rows."""
    mine = ours(PLACES)
    rng = np.random.default_rng(11)
    results, checks = [], []
    for mesh in ((ranks,), (2, ranks // 2)):
        for seed, (of_a, of_b) in enumerate(product(product(mine, repeat=len(mesh)), repeat=2)):
            m, n, k = (int(x) for x in rng.integers(0, 2 * ranks, 3))
            whole = [rng.integers(-3, 4, shape).astype(np.float32) for shape in ((m, k), (k, n))]
            held = [uneven(x.shape, mesh, places, seed) for x, places in zip(whole, (of_a, of_b), strict=True)]
            a, b = (torch.from_numpy(parts(x, layout, rng)[rank]) for x, layout in zip(whole, held, strict=True))
            results.append(gd.matmul(a, b, placements=(of_a, of_b), mesh=mesh).numpy())
            checks.append((planned(*held, "f32", speeds=gd.CORE).out, whole[0] @ whole[1]))
    for found, (layout, want) in zip(zip(*exchange(dist.group.WORLD)(results), strict=True), checks, strict=True):
        np.testing.assert_array_equal(joined(found, layout, np.float32), want)
    assert len(checks) == 16 + 256


def overlapped(rank, ranks):
    """The two products of layers, of parts of any numbers of rows, and their gradients."""
    generator = torch.Generator().manual_seed(5)
    shared = one_host.MOST_BYTES
    for dtype, most in product((torch.float64, torch.bfloat16, torch.int8), (shared, 0)):
        one_host.MOST_BYTES = most  # of 0, ranks send messages
        for rows in ([3] * ranks, [0, *[5] * (ranks - 1)], list(range(ranks))):
            m, k, n = sum(rows), 8, 5
            x, w = (torch.randint(-3, 4, s, generator=generator).to(dtype) for s in ((m, k), (k, n)))
            want = (x.double() @ w.double()).to(dtype)
            mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
            assert torch.equal(gd.all_gather_matmul(x[mine], w), want)
            part = slice(rank * k // ranks, (rank + 1) * k // ranks)
            assert torch.equal(gd.matmul_reduce_scatter(x[:, part], w[part], rows=rows), want[mine])
    one_host.MOST_BYTES = shared
    x, w = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((4 * ranks, 6), (6, 3)))
    grad = torch.randn(4 * ranks, 3, generator=generator, dtype=torch.float64)
    mine = slice(4 * rank, 4 * rank + 4)
    one, weight = x[mine].clone().requires_grad_(), w.clone().requires_grad_()
    gd.all_gather_matmul(one, weight).backward(grad * (rank + 1))
    scale = ranks * (ranks + 1) / 2
    torch.testing.assert_close(one.grad, scale * (grad @ w.T)[mine])
    torch.testing.assert_close(weight.grad, (rank + 1) * x.T @ grad)
    whole, weight = (x * (rank + 1)).requires_grad_(), w.clone().requires_grad_()
    gd.matmul_reduce_scatter(whole, weight).backward(grad[mine])
    torch.testing.assert_close(whole.grad, grad @ w.T)
    torch.testing.assert_close(weight.grad, (rank + 1) * x.T @ grad)
    with pytest.raises(ShapeError, match="rank 1"):
        gd.all_gather_matmul(x[mine][:, : 6 - rank], w)
    narrower = (slice(None), slice(6 - (rank == 1)))
    with pytest.raises(ShapeError, match=rf"ranks 0 and 1 share \[{4 * ranks}, 6, 8\] and \[{4 * ranks}, 5, 8\]"):
        gd.all_gather_matmul(x[mine][narrower], w.T[narrower].T, rows=[4] * ranks)
    for function in gd.all_gather_matmul, gd.matmul_reduce_scatter:
        with pytest.raises(ArgumentError, match="rank 1: x is a list"):
            function([[1.0]] if rank == 1 else x, w)
        with pytest.raises(ShapeError, match="rank 1"):
            function(torch.tensor(1.0) if rank == 1 else x, w)
        for group in "x", 3:
            with pytest.raises(ArgumentError, match=f"group={group!r} is no process group of this rank: pass one"):
                function(x, w, group=group)


class Block(torch.nn.Module):
    """The layers of a Llama block, with a product of features in place of attention."""

    def __init__(self, bias):
        super().__init__()
        self.q_proj, self.v_proj = (torch.nn.Linear(8, 8, bias=bias) for _ in range(2))
        self.o_proj = torch.nn.Linear(8, 8, bias=bias)
        self.gate_proj, self.up_proj = (torch.nn.Linear(8, 12, bias=bias) for _ in range(2))
        self.down_proj = torch.nn.Linear(12, 8, bias=bias)

    def forward(self, x):
        x = x + self.o_proj(self.q_proj(x).cumsum(1) * self.v_proj(x))
        return x + self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def block(rank, ranks):
    """A block in one line: its output and every gradient are those of one rank."""
    torch.manual_seed(1)
    whole = Block(bias=True).double()
    spread = gd.parallelize(copy.deepcopy(whole), init_device_mesh("cpu", (ranks,)))
    x = torch.randn(2, 3 * ranks, 8, dtype=torch.float64)
    mine = slice(3 * rank, 3 * rank + 3)
    want = whole(x)
    want.square().sum().backward()
    part = spread(x[:, mine])
    torch.testing.assert_close(part, want[:, mine])
    part.square().sum().backward()
    for name, parameter in spread.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad, msg=name)


def one_dies(rank, ranks):
    """A rank that dies is an error on the others, long before the test's limit."""
    gd.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2))
    if rank == ranks - 1:
        os._exit(0)
    try:
        gd.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2))
    except RuntimeError:
        os._exit(0)
    raise AssertionError("a product without one of its ranks gave a result")


if __name__ == "__main__":
    me, count = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=me, world_size=count, timeout=timedelta(seconds=60)
    )
    for name in sys.argv[4].split(","):
        globals()[name](me, count)
    dist.barrier()
    dist.destroy_process_group()
