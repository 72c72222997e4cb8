"""The operators under `torch.utils.flop_counter.FlopCounterMode`: as many operations as PyTorch counts for its own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402 # after the skip

import gemmery.torch as gt  # noqa: E402


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("a", "b"), [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((2, 5, 7), (2, 7, 3))])
def test_a_product_counts_as_that_of_torch(a, b, gradients):
    x, y = torch.ones(a, requires_grad=gradients), torch.ones(b, requires_grad=gradients)
    own, other = (
        counted(lambda multiply=multiply: multiply(x, y).sum().backward() if gradients else multiply(x, y))
        for multiply in (gt.matmul, torch.matmul)
    )
    assert own == other > 0


def test_a_product_with_a_vector_counts_though_that_of_torch_does_not():
    assert counted(lambda: gt.matmul(torch.ones(5, 7), torch.ones(7))) == 2 * 5 * 7


def test_layers_count_their_product():
    x, weight, bias = torch.ones(4, 64), torch.ones(8, 64), torch.ones(8)
    assert counted(lambda: gt.linear(x, weight, bias, activation="gelu")) == 2 * 4 * 8 * 64
    layer = torch.nn.Sequential(torch.nn.Linear(64, 8))
    gt.replace_linear(layer, bits=8, group=64)
    assert counted(lambda: layer(x)) == 2 * 4 * 8 * 64


def test_groups_count_each_row_once():
    a, b = torch.ones(10, 6, requires_grad=True), torch.ones(3, 6, 4, requires_grad=True)
    offs = torch.tensor([4, 4, 10], dtype=torch.int32)
    once = 2 * 10 * 6 * 4
    assert counted(lambda: gt.grouped_mm(a, b, offs)) == once
    assert counted(lambda: gt.grouped_mm(a, b, offs).sum().backward()) == 3 * once
