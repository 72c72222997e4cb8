"""Families: whatever is in one is planned with the same kernel, on one thread, and gets the same bits."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from gemmery import dispatch
from gemmery.cpu import build, target
from gemmery.cpu.launch import Launch
from gemmery.cpu.layout import JOB_AT
from gemmery.cpu.target import constants
from gemmery.dispatch.cpu import families
from gemmery.problem import Problem
from operands import place, problem, random

TYPES = [("f32", "f32"), ("f64", "f64"), ("f16", "f16"), ("int8", "int32"), ("complex64", "complex64"), ("bf16", "f32")]


def shapes(draw, count):
    """(m, n, k) of every scale, some with a dimension of 1."""
    for _ in range(count):
        most = draw.choice([2, 5, 8, 13], 3)
        yield tuple(int(x) for x in 2 ** draw.uniform(0, most))


CUTS_K = ("packed", "amx_halves")  # rungs whose kernel cuts k into blocks itself
# Around limits of rows of A, of columns and of k, for a B of 1/2 and a C of 1/2 to 4 times an L2 of 1 MiB.
AT_LIMITS = [
    (32, 500, 500),
    (33, 500, 500),
    (32, 127, 4000),
    *((m, n, k) for m, n in ((600, 900), (9000, 63), (9000, 64)) for k in (4, 48, 49)),
]


def has(family, m, n, k, batch=1):
    """Return True for a product that the family serves, as the compiled entry decides it."""
    return (
        family.m[0] <= m <= family.m[1]
        and family.n[0] <= n <= family.n[1]
        and family.k[0] <= k <= family.k[1]
        and k * n <= family.b_elements
        and m * n <= family.c_elements
        and m * n * k * batch <= family.work
    )


def first(found, *shape):
    return next((family for family in found if has(family, *shape)), None)


def same(family, m, n, k):
    return family.blocks


@pytest.mark.many(5)
@pytest.mark.parametrize("threads", [1, 2, 17])
@pytest.mark.parametrize("b_layout", ["row", "col", "any"])
@pytest.mark.parametrize(("dtype", "out"), TYPES)
def test_members_are_planned_with_the_kernel_of_their_family(dtype, out, b_layout, threads):
    draw = np.random.default_rng(threads)
    found = families(dtype, out, b_layout, "", False, threads)
    members = 0
    for m, n, k in [*AT_LIMITS, *shapes(draw, 400)]:
        batch = int(draw.choice([1, 1, 3, 100]))
        a_layout = str(draw.choice(["row", "col", "any"]))
        family = first([family for family in found if a_layout == "row" or not family.a_rows], m, n, k, batch)
        if family is None:
            continue
        members += 1
        plan = dispatch.plan(Problem(m, n, k, dtype, out, batch, a_layout, b_layout if n > 1 else "row"))
        shape = (m, n, k, batch)
        assert plan.rung is family.rung, shape
        assert plan.kernel.address == family.launch.address or plan.rung.name in CUTS_K, shape
        _, fields = plan.kernel.plan(batch, m, n, k, threads)
        at = JOB_AT["kernel"]
        words = np.frombuffer(bytes(at) + fields, np.int64)
        unit = plan.kernel.unit
        loads = batch * k * (m + n) * unit.read if unit else 0
        if (
            loads < 2 * constants().worth
        ):  # else they are worth threads, which a plan gives to a product that is met often
            assert words[JOB_AT["threads"] // 8] == words[JOB_AT["parts"] // 8] == 1, shape
        own = plan.kernel.blocks(m, n, k)
        assert own.kc == family.blocks.kc or family.rung.name in CUTS_K, shape
        assert own.workspace <= family.blocks.workspace, shape
    assert members > 100


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("isa", ["", "generic"])
def test_columns_that_are_cut_alike_have_one_length_of_chains(isa, name, monkeypatch):
    cpu = target.host().limited(isa)
    monkeypatch.setattr(build, "host", lambda: cpu)
    for least, following in itertools.pairwise([*build.direct_columns.__wrapped__(name), 200]):
        assert len({build.chain(Problem(9, n, 999, name, name)) for n in range(least, following)}) == 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "changed",
    [
        {
            "direct_few": 0.1,
            "direct_many": 3.0,
            "streamed_rows": 40,
            "large_c": 0.2,
            "worth": 50_000,
            "direct_int16": 1 << 20,
        },
        {
            "direct_few": 9.0,
            "direct_many": 0.1,
            "streamed_rows": 600,
            "large_c": 50.0,
            "worth": 500,
            "mc": 36,
            "direct_int16": 1,
        },
    ],
)
@pytest.mark.parametrize(("dtype", "out"), [("f32", "f32"), ("f64", "f64"), ("f16", "f16"), ("int16", "int16")])
def test_so_they_are_with_a_table(dtype, out, changed, threads, monkeypatch):
    def forget():
        for kept in (build.forget, dispatch.plan.cache_clear):
            kept()

    monkeypatch.setattr(target, "override", target.constants()._replace(**changed))
    forget()
    test_members_are_planned_with_the_kernel_of_their_family(dtype, out, "row", threads)
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "int8", "complex64"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_the_blocks_of_a_family_give_the_bits_of_the_plan(name, layout):
    draw = np.random.default_rng(3)
    found = families(name, name, "row" if layout == "C" else "col", "", False, 1)
    served = set()
    drawn = [tuple(min(x, 300) for x in shape) for shape in shapes(draw, 12)]
    for m, n, k in [(1, 70, 33), (50, 1, 40), (5, 6, 7), (100, 130, 70), (193, 7, 64), (7, 70, 4000), *drawn]:
        family = first(found, m, n, k)
        if family is None:
            continue
        a, b = place(random((1, m, k), name, 1), name, "F"), place(random((1, k, n), name, 2), name, layout)
        results = [place(np.zeros((1, m, n), a.array.dtype), name) for _ in range(2)]
        plan = dispatch.plan(problem(a, b, results[0]))
        plan.kernel(a.view, b.view, results[0].view)
        launch = Launch(
            family.launch.address, family.launch.accumulator, family.launch.out_size, functools.partial(same, family)
        )  # fmt: skip
        launch(a.view, b.view, results[1].view)
        assert results[0].array.tobytes() == results[1].array.tobytes(), (m, n, k)
        served.add(family.rung.name)
    assert "gemv" in served
    assert len(served) == 2 + ((name, layout) == ("int8", "C")) + (name == "f16" and target.host().has_tiles)


def test_a_product_that_several_threads_would_share_is_in_no_family():
    for threads, members in ((1, 1), (2, 0)):
        found = families("f32", "f32", "row", "", False, threads)
        assert (first(found, 256, 256, 256) is not None) == members
        assert (first(found, 32, 32, 32, 2000) is not None) == members
        assert first(found, 64, 64, 64).rung.name == "direct"


def test_small_products_are_in_a_family_whatever_their_shape():
    for b_layout in ("row", "col", "any"):
        found = families("f32", "f32", b_layout, "", False, 2)
        for m, n, k in [(8, 8, 8), (1, 8, 8), (8, 1, 8), (1, 1, 8), (2, 3, 30), (40, 2, 40), (3, 50, 1), (20, 20, 0)]:
            assert first(found, m, n, k), (m, n, k, b_layout)
    assert families("f32", "f32", "row", "bias+relu", False, 2)
    assert first(families("f64", "f64", "any", "", False, 1), 50, 50, 10_000)
    half = families("f16", "f16", "any", "", False, 1)
    assert first(half, 50, 50, 256)
    assert first(half, 50, 50, 10_000) is None  # its sums over several blocks of k have no room
