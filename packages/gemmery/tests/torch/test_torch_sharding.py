"""gemmery.torch on DTensors: two processes give the values, gradients and placements of nn.Linear and torch.matmul."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gemmery.torch  # noqa: E402 # after the skip

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch has no distributed part")


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def same(got, expected):
    assert got.shape == expected.shape
    assert bool(((got.full_tensor() - expected).abs() <= 1e-11).all())


def compare(mesh, function, expected, tensors, placements):
    """Compare results and gradients of parts of these tensors with those of the whole."""
    from torch.distributed.tensor import distribute_tensor

    parts = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(tensors, placements, strict=True)]
    whole = [x.clone().requires_grad_() for x in tensors]
    got, right = function(*parts), expected(*whole)
    same(got, right)
    for one, other in zip(
        torch.autograd.grad((got**2).sum(), parts), torch.autograd.grad((right**2).sum(), whole), strict=True
    ):
        same(one, other)


def tensor_parallel(mesh):
    """Layers by columns and by rows, as a transformer has them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)) for _ in range(3)]
    whole, theirs, mine = (layer.double() for layer in layers)
    for model in (theirs, mine):
        model.load_state_dict(whole.state_dict())
    gemmery.torch.replace_linear(mine)
    for model in (theirs, mine):
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = draw(6, 12)
    for model in (mine, theirs, whole):
        (model(x) ** 2).sum().backward()
    for a, b, c in zip(mine.parameters(), theirs.parameters(), whole.parameters(), strict=True):
        assert a.grad.placements == b.grad.placements
        same(a.grad, c.grad)
    with torch.inference_mode():
        assert bool(((mine(x) - whole(x)).abs() <= 1e-12).all())
    assert bool(((torch.compile(mine, fullgraph=True, backend="aot_eager")(x) - whole(x)).abs() <= 1e-12).all())


def layers(mesh):
    """An activation follows the sum over k: what holds without one must not be remembered for one."""
    from torch.distributed.tensor import Replicate, Shard

    tensors = (draw(2, 6, 12), draw(4, 12), draw(4))
    for of_x, of_weight in itertools.product([*map(Shard, range(3)), Replicate()], [Shard(0), Shard(1), Replicate()]):
        for activation, biased in ((None, True), ("relu", True), (None, False), ("gelu", True)):
            for function in (gemmery.torch.linear, torch.ops.gemmery.linear):
                call = lambda *of, f=function, act=activation: f(*of, *[None] * (3 - len(of)), act)  # noqa: E731
                placements = (of_x, of_weight, Shard(0))[: 2 + biased]
                expected = lambda *of, act=activation: gemmery.torch.linear(*of, activation=act)  # noqa: E731
                compare(mesh, call, expected, tensors[: 2 + biased], placements)


def products(mesh):
    from torch.distributed.tensor import Replicate, Shard

    for a, b in (
        ((2, 4, 6), (2, 6, 8)), ((2, 4, 6), (6, 8)), ((4, 6), (2, 6, 8)), ((6,), (6, 8)), ((4, 6), (6,)), ((6,), (6,)),
        ((2, 1, 4, 6), (4, 6, 2)), ((1, 4, 6), (2, 6, 8)),
    ):  # fmt: skip
        for placements in itertools.product(*([*map(Shard, range(len(shape))), Replicate()] for shape in (a, b))):
            compare(mesh, gemmery.torch.matmul, torch.matmul, (draw(*a), draw(*b)), placements)


def work(rank, store):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for case in (tensor_parallel, layers, products):
        case(mesh)
    torch.distributed.destroy_process_group()


@pytest.mark.process
def test_two_processes(tmp_path):
    """All cases in two processes: starting them takes longer than a case."""
    run = f"import test_torch_sharding as t; t.work({{}}, {str(tmp_path / 'store')!r})"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", run.format(rank)],
            cwd=os.path.dirname(__file__),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [each.communicate(timeout=200)[1] for each in both]
    finally:
        for each in both:
            each.kill()
    assert [each.returncode for each in both] == [0, 0], "\n".join(errors)[-4000:]


@pytest.mark.process
def test_nothing_is_imported_where_no_dtensor_is():
    code = "import sys, torch, gemmery.torch; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
