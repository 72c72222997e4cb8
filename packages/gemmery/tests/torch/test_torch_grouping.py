"""gemmery.torch.grouped_mm: values, gradients of both orders, vmap, and rows that belong to no group."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gemmery.torch  # noqa: E402
from gemmery.errors import ArgumentError, DTypeError, ShapeError  # noqa: E402

OPERATOR = torch.ops.gemmery.grouped_mm
ROWS, BATCH = 7, 3


def draw(*shape, seed=0, grad=False):
    numbers = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=numbers, dtype=torch.float64, requires_grad=grad)


def by_loop(a, b, offs):
    """The rows that belong to groups, one product after the other."""
    ends = [0, *offs.tolist()]
    return torch.cat([a[start:end] @ b[group] for group, (start, end) in enumerate(pairwise(ends))])


def close(result, expected):
    return result.shape == expected.shape and bool(((result - expected).abs() <= 1e-12).all())


@pytest.mark.parametrize("ends", [(2, 2, 7), (1, 3, 5), (0, 0, 0)])
@pytest.mark.parametrize("multiply", [gemmery.torch.grouped_mm, OPERATOR])
def test_values_and_gradients_of_both_orders(ends, multiply):
    a, b, offs = draw(ROWS, 4, grad=True), draw(3, 4, 5, grad=True), torch.tensor(ends, dtype=torch.int32)
    inside = lambda a, b: multiply(a, b, offs)[: ends[-1]]  # noqa: E731
    assert close(inside(a, b), by_loop(a, b, offs))
    assert torch.autograd.gradcheck(inside, (a, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(inside, (a, b), fast_mode=True)


def test_forward_mode():
    a, b, offs = draw(ROWS, 4), draw(3, 4, 5), torch.tensor([2, 2, 7])
    for argument in (0, 1):
        results = [
            torch.func.hessian(lambda a, b: multiply(a, b, offs).sin().sum(), argument)(a, b)  # noqa: B023
            for multiply in (gemmery.torch.grouped_mm, by_loop)
        ]
        assert close(*results)


def test_rows_of_no_group_have_no_gradient():
    a, b = draw(ROWS, 4, grad=True), draw(3, 5, 4, grad=True)
    gemmery.torch.grouped_mm(a, b.mT, torch.tensor([1, 2, 4])).sum().backward()
    assert close(a.grad[4:], torch.zeros(3, 4, dtype=torch.float64))
    assert close(a.grad[:1], b.detach()[0].sum(0)[None])
    assert close(b.grad[2, 0], a.detach()[2:4].sum(0))


def test_without_groups():
    a, b = draw(ROWS, 4, grad=True), draw(0, 4, 5, grad=True)
    result = gemmery.torch.grouped_mm(a, b, torch.zeros(0, dtype=torch.int32))
    assert result.shape == (ROWS, 5)
    assert torch.autograd.grad(result[:0].sum(), a)[0].abs().sum() == 0


@pytest.mark.parametrize("dims", [(1, None, None), (None, 3, None), (2, 1, None), (0, 0, 0), (None, None, 0)])
@pytest.mark.parametrize("last", [ROWS, 5])
def test_vmap_with_gradients(dims, last):
    a, b = (
        draw(*shape) if dim is None else draw(BATCH, *shape).movedim(0, dim)
        for shape, dim in zip(((ROWS, 4), (3, 4, 5)), dims, strict=False)
    )
    offs = torch.tensor([2, 2, last])
    if dims[2] == 0:
        offs = torch.stack([torch.tensor([i, 2, last]) for i in range(BATCH)])
    items = [[x] * BATCH if dim is None else x.unbind(dim) for x, dim in zip((a, b, offs), dims, strict=True)]
    result = torch.func.vmap(gemmery.torch.grouped_mm, dims)(a, b, offs)[:, :last]
    assert close(result, torch.stack([by_loop(*item) for item in zip(*items, strict=True)]))

    def gradients(multiply):
        return torch.func.grad(lambda a, b, offs: multiply(a, b, offs)[:last].sin().sum(), (0, 1))

    each = torch.func.vmap(gradients(gemmery.torch.grouped_mm), dims)(a, b, offs)
    expected = zip(*(gradients(by_loop)(*item) for item in zip(*items, strict=True)), strict=True)
    for of_batch, of_items in zip(each, expected, strict=True):
        assert close(of_batch, torch.stack(of_items))


@pytest.mark.many(7)
@pytest.mark.parametrize(
    ("name", "last"),
    [("uint8", 110), ("int8", 110), ("int16", 20_000), ("uint16", 30_000), ("uint64", 9), ("int32", 9)],
)
@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (0, 0, None), (0, None, 0), (0, 0, 0)])
def test_vmap_counts_the_rows_of_a_batch_in_a_wide_type(name, last, dims):
    """All rows together are more than 8 and 16 bits count. Some belong to no group."""
    batch, rows, dtype = BATCH, last + 9, getattr(torch, name)
    shapes = ((rows, 4), (2, 4, 5))
    a, b = (draw(*(s if dim is None else (batch, *s))) for s, dim in zip(shapes, dims, strict=False))
    offs = torch.tensor([5, last] if dims[2] is None else [[i, last] for i in range(batch)])
    narrow = offs.to(dtype)
    product = lambda a, b, offs: gemmery.torch.grouped_mm(a, b, offs)[:last]  # noqa: E731
    items = [[x] * batch if dim is None else x.unbind(0) for x, dim in zip((a, b, offs), dims, strict=True)]
    expected = torch.stack([by_loop(*item) for item in zip(*items, strict=True)])
    assert close(torch.func.vmap(product, dims)(a, b, narrow), expected)

    gradients = torch.func.vmap(torch.func.grad(lambda a, b, offs: product(a, b, offs).sin().sum(), (0, 1)), dims)
    for got, wide in zip(gradients(a, b, narrow), gradients(a, b, offs), strict=True):
        assert close(got, wide)


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "uint16", "uint32", "uint64"])
def test_gradients_with_offsets_of_every_integer_type(name):
    a, b, offs = draw(ROWS, 4, grad=True), draw(3, 4, 5, grad=True), torch.tensor([2, 2, 5])
    results = [gemmery.torch.grouped_mm(a, b, ends)[:5] for ends in (offs, offs.to(getattr(torch, name)))]
    wide, narrow = (torch.autograd.grad(result.sin().sum(), (a, b)) for result in results)
    assert all(map(close, narrow, wide))


def test_vmap_refuses_the_offsets_that_one_product_refuses():
    a, b = draw(BATCH, ROWS, 4), draw(3, 4, 5)
    with pytest.raises(DTypeError, match="row numbers are integers"):
        torch.func.vmap(gemmery.torch.grouped_mm, (0, None, None))(a, b, torch.tensor([1.0, 2.0, 7.0]))


def test_opcheck():
    a, b, offs = draw(ROWS, 4, grad=True), draw(3, 4, 5, grad=True), torch.tensor([2, 2, 7])
    torch.library.opcheck(OPERATOR.default, (a, b, offs))
    torch.library.opcheck(torch.ops.gemmery.grouped_mm_weights.default, (a, draw(ROWS, 5, grad=True), offs))


def test_autocast():
    a, b = draw(ROWS, 4).float(), draw(3, 4, 5).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gemmery.torch.grouped_mm(a, b, torch.tensor([1, 3, 7]))
    assert result.dtype == torch.bfloat16
    assert bool(((result - by_loop(a, b, torch.tensor([1, 3, 7]))).abs() <= 0.2).all())


def test_errors_of_the_library_pass():
    a, b, offs = draw(ROWS, 4), draw(3, 4, 5), torch.tensor([1, 3, 7])
    for multiply in (gemmery.torch.grouped_mm, OPERATOR):
        with pytest.raises(ArgumentError, match="ends of groups"):
            multiply(a, b, torch.tensor([3, 1, 7]))
        with pytest.raises(ShapeError, match="must be equal"):
            multiply(a, b.mT, offs)
        with pytest.raises(DTypeError, match="one element type"):
            multiply(a, b.float(), offs)
    with pytest.raises(ShapeError, match=r"\(groups, k, n\)"):
        OPERATOR(a.to("meta"), b[0].to("meta"), offs.to("meta"))
    with pytest.raises(ShapeError, match="must be equal"):
        OPERATOR(a.to("meta"), b.mT.to("meta"), offs.to("meta"))
