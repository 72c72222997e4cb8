"""Products of tensors that come again are recognized by one comparison, which must serve what a look-up would serve."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace

import pytest

from gemmery.api import array_libraries
from gemmery.api.device_call import table
from gemmery.arrays import pytorch

torch = pytest.importorskip("torch")


class There(torch.Tensor):
    """A tensor on the CPU that says it is on a device."""

    def get_device(self):
        return 0

    def data_ptr(self):
        return getattr(self, "answer", super().data_ptr)()


class Core:
    """What the fast path read of torch._C."""

    _cuda_getCurrentRawStream = staticmethod(lambda _: 7)

    def __getattr__(self, name):
        return getattr(torch._C, name)


class StandIn:
    """PyTorch, with these tensors for plain ones."""

    _C, Tensor = Core(), There

    def __getattr__(self, name):
        return getattr(torch, name)


LIBRARY = array_libraries.Torch(StandIn())


def key_of(a, b, out, name):
    """The key of a call, whether or not gradients are recorded."""
    with torch.no_grad():
        return array_libraries.key_of(LIBRARY, a, b, out, name, None)


@pytest.fixture
def path(monkeypatch):
    """The fast path for these tensors, without a product."""
    table.forget()
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    yield LIBRARY.multiply
    table.forget()


def keep(launches, a, b, out, name):
    """Store a product of such tensors; its launches put its number into a list."""
    number = len(table.calls)

    def run(*_):
        launches.append(number)

    run.workspace = 0
    served = SimpleNamespace(countdown=0, run=run)
    call = array_libraries.KnownCall(served, (3, 3), (3, 1), torch.float32, -64, 64, -64, 64)
    table.calls.setdefault(key_of(a, b, out, name), call)


def contents(start):
    """Views that differ in one property each."""
    memory = torch.zeros(4096)
    at = memory[start:]
    return [
        at[:9].view(3, 3),
        at[:9].view(3, 3),
        at[:9].view(3, 3).t(),
        at[:12].view(3, 4)[:, :3],
        at[:12].view(3, 4),
        at[1:10].view(3, 3),  # another alignment
        at[:9].view(3, 3).view(torch.int32),
        torch._neg_view(at[:9].view(3, 3)),
        at[:9].view(3, 3).clone().requires_grad_(),
        at[:9],
    ]


def test_a_repeated_product_is_the_one_that_a_look_up_gives(path):
    draw, launches, served = random.Random(5), [], 0
    a, b, out = (torch.zeros(3, 3).as_subclass(There) for _ in range(3))
    sets = [contents(start) for start in (0, 256, 512)]

    def become(x, content):
        x.requires_grad_(False)
        x.data = content.detach()
        x.requires_grad_(content.requires_grad)

    for turn in range(4000):
        # Most often only one of the three changes, and the objects, by which a product is found first, never do.
        changed = draw.choice((a, b, out, None))
        for x, choices in zip((a, b, out), sets, strict=True):
            if x is changed:
                become(x, draw.choice(choices) if draw.random() < 0.4 else choices[0])
        name, target = draw.choice(("matmul", "gemm", "matmul")), draw.choice((out, None))
        if draw.random() < 0.2 or turn < 50:
            keep(launches, a, b, target, name)
        launches.clear()
        used = (a, b) if target is None else (a, b, out)
        with torch.set_grad_enabled(draw.random() < 0.5):
            wanted = torch.is_grad_enabled() and any(x.requires_grad for x in used)
            product = table.calls.get(key_of(a, b, target, name))
            path(a, b, target, name, None)
        got = list(launches)
        launches.clear()
        if product is not None and not wanted and not any(x.is_neg() for x in used):
            product.served.run()
            served += 1
        assert got == launches
    assert served > 500
    assert any(alike is not None for _, alike, *_ in table.latest.values())


def test_an_out_that_overlaps_is_not_written_by_a_repeated_product(path):
    memory, launches = torch.zeros(4096), []
    a, b, out = (memory[start : start + 9].view(3, 3).as_subclass(There) for start in (0, 256, 512))
    keep(launches, a, b, out, "matmul")
    for _ in range(3):
        assert path(a, b, out, "matmul", None) is out
    out.data = memory[4:13].view(3, 3)
    assert path(a, b, out, "matmul", None) is None
    assert path(a, b, b, "matmul", None) is None
    assert launches == [0, 0, 0]


@pytest.mark.parametrize("kind", ["nested", "sparse"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tensor_that_is_not_dense_in_place_of_a_repeated_one_is_left_to_the_slow_path(path, kind, place):
    launches = []
    tensors = [torch.zeros(3, 3).as_subclass(There) for _ in range(3)]
    keep(launches, *tensors[:2], None, "matmul")
    keep(launches, *tensors, "matmul")
    for _ in range(3):
        assert path(*tensors[:2], None, "matmul", None) is not None
        assert path(*tensors, "matmul", None) is tensors[2]
    if kind == "nested":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors[place] = torch.nested.nested_tensor([torch.ones(3, 3), torch.ones(2, 3)]).as_subclass(There)
    else:  # a sparse tensor cannot become one of these, so its answer is put in place
        tensors[place].answer = torch.eye(3).to_sparse().data_ptr
    if place < 2:
        assert path(*tensors[:2], None, "matmul", None) is None
    assert path(*tensors, "matmul", None) is None
    assert launches == [0, 1] * 3


def test_repeated_products_are_forgotten_with_the_others(path):
    launches = []
    a, b, out = (torch.zeros(3, 3).as_subclass(There) for _ in range(3))
    for target in (None, out):
        keep(launches, a, b, target, "matmul")
    path(a, b, None, "matmul", None)
    path(a, b, out, "matmul", None)
    assert table.latest
    table.forget()
    assert path(a, b, out, "matmul", None) is None
    assert (table.calls, table.latest) == ({}, {})


def test_comparisons_that_do_not_tell_tensors_apart_are_not_used(monkeypatch):
    assert pytorch.comparer(torch) is not None
    guards = SimpleNamespace(TensorGuards=lambda *_, **__: SimpleNamespace(check=lambda *_: True))
    monkeypatch.setattr(torch._C, "_dynamo", SimpleNamespace(guards=guards))
    assert pytorch.comparer(torch) is None
    monkeypatch.setattr(torch._C, "_dynamo", SimpleNamespace(guards=SimpleNamespace()))
    assert pytorch.comparer(torch) is None
