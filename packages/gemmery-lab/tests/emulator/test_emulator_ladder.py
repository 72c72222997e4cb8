"""Every rung of the GPU ladder without a GPU: within its bound, no byte beyond C written, no fault, its claims met."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from checked_products import ROWS, accumulator, matrices, place, run
from gemmery import dtypes
from gemmery.cuda.device import KNOWN
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_lab.climb import element
from gemmery_lab.emulated_product import Gemm, run_rung
from gemmery_lab.emulated_product import problem_of as problem_on
from gemmery_lab.on_emulator import emulated_rung, expects, product_for
from gemmery_lab.rung_counts import RungCounts
from layouts import OTHERS
from operands import NARROW, random

pytest.importorskip("cuda.bindings")

EVERY = [
    pytest.param(rung, name, id=f"{rung.name}-{name}") for rung in CUDA for name in rung.dtypes if name not in NARROW
]
RUNGS = [pytest.param(rung, id=rung.name) for rung in CUDA]
# An instance of a template is compiled for each combination of alignments, in 0.1 to 0.3 s: sides are odd, or
# multiples of 8.
SHAPES = [(1, 1, 1), (5, 3, 0), (17, 19, 23), (65, 127, 63), (64, 64, 64), (136, 200, 72)]
VECTORS = [(1, 1, 1), (1, 7, 0), (1, 259, 129), (259, 1, 129), (1, 256, 128), (128, 1, 200)]
SMALL = [(5, 3, 0), (11, 23, 35), (31, 33, 32), (32, 32, 32), (24, 40, 48)]  # for those of one block, and of batches
EVEN = [(72, 136, 64), (24, 40, 48), (1, 136, 72), (16, 32, 16)]
ODD = [(67, 131, 71), (11, 23, 35), (1, 131, 71), EVEN[0], (7, 3, 5), EVEN[3]]  # for rungs that take none of the others
WIDER = {"f16": "f32", "bf16": "f32", "f32": "f64"}
WIDENED = [pytest.param(rung, name, id=f"{rung.name}-{name}") for rung in CUDA for name in rung.dtypes if name in WIDER]
AS_COLUMNS = ("row", "col", "row")


def one_of(shapes, rung, make, **options):
    """The first of the shapes that the rung takes is right; () where it takes none."""
    return next((done for shape in shapes if (done := run(rung, *make(shape), **options))), ())


@pytest.mark.many(4)
@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_shapes(rung, name, sample):
    """Ragged, whole, empty sums, vectors; B row by row and column by column."""
    for every, layouts in [(SHAPES, ROWS), (VECTORS[1:], ROWS), (VECTORS[2:5], AS_COLUMNS), (SMALL, ROWS)]:
        for shapes in (sample(every, 3), every):
            taken = [run(rung, *matrices(shape, name, layouts=layouts)) for shape in shapes]
            if any(taken):
                return
    pytest.fail("it takes no shape")


@pytest.mark.many
@pytest.mark.parametrize("rung", RUNGS)
def test_layouts(rung, sample):
    """A, B and C row by row or column by column, and with any strides.

    A C that lies column by column is computed as its transpose from those of B and A, so four of eight ways are enough.
    """
    stated = [("row", "row", "row"), ("row", "col", "col"), ("col", "row", "col"), ("col", "col", "row")]
    stored = itertools.cycle(("odd", "padded", "aligned", "rows reversed", "padded col", "col", "row"))
    others = zip(OTHERS, OTHERS[4:] + OTHERS[:4], stored, strict=False)
    sides = itertools.cycle((EVEN, ODD))
    taken = [
        one_of(next(sides), rung, lambda shape, three=three: matrices(shape, rung.dtypes[0], layouts=three))
        for three in sample([*stated, *others], 3)
    ]
    assert any(taken)


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name"), WIDENED)
def test_a_wider_result(rung, name):
    """Half precision into f32, f32 into f64; tensor cores refuse the latter."""
    one_of(ODD, rung, lambda shape: matrices(shape, name, WIDER[name], AS_COLUMNS))


@pytest.mark.many
@pytest.mark.parametrize("rung", RUNGS)
def test_batches(rung, sample):
    """Each matrix its own, or one for all."""
    name = rung.dtypes[0]
    ways = [(ODD, (False, False)), (ODD, (True, False)), (EVEN, (False, True))]
    taken = [
        one_of(shapes, rung, lambda shape, way=way: matrices(shape, name, batch=3, shared=way))
        for shapes, way in sample(ways, 3)
    ]
    assert all(taken)


@pytest.mark.many
@pytest.mark.parametrize("rung", RUNGS)
def test_alpha_and_beta(rung):
    """A C that is not read may hold NaN."""
    name = rung.dtypes[0]
    assert one_of(ODD, rung, lambda shape: matrices(shape, name), alpha=2.0)
    for alpha, beta in [(-3, 2), (0, 5)] if dtypes.get(name).kind in "iu" else [(-1.5, 0.375), (0.0, 0.5)]:
        assert one_of(ODD, rung, lambda shape: matrices(shape, name, filled=True), alpha=alpha, beta=beta)


@pytest.mark.many
@pytest.mark.parametrize("rung", RUNGS)
def test_epilogues(rung, sample):
    """A bias of any stride, and an activation."""
    name = rung.dtypes[0]
    for epilogue, stored in sample([("bias+relu", "row"), ("gelu", "row"), ("bias+silu", "col")], 3):
        for shape in EVEN:
            held = accumulator(name)
            bias = place(random((1, 1, shape[1]), held, 4), held, "strided") if "bias" in epilogue else None
            layouts = ("row", "col", stored)
            if run(rung, *matrices(shape, name, layouts=layouts), epilogue=epilogue, bias=bias):
                break


@pytest.mark.many
@pytest.mark.parametrize("rung", RUNGS)
def test_values_that_are_not_finite(rung, sample):
    """One of them in A reaches its row of C, and no other."""
    name = rung.dtypes[0]
    for planted in sample((np.nan, np.inf), 2) if dtypes.get(name).kind == "f" else ():
        for m, n, k in EVEN:
            a, b, c = matrices((m, n, k), name)
            a.array[0, m // 2, k // 2] = planted
            a.before[...] = a.image
            if run(rung, a, b, c):
                break


@pytest.mark.many
@pytest.mark.parametrize("rung", RUNGS)
def test_configs_of_its_space_give_the_product(rung, sample):
    """The least and the largest value of each key."""
    name = rung.dtypes[0]
    ends = dict.fromkeys((key, end(values)) for key, values in rung.space.items() for end in (min, max))
    for key, value in sample(ends, 3):
        one_of(EVEN, rung, lambda shape: matrices(shape, name), config={key: value})


@pytest.mark.many
@pytest.mark.parametrize("rung", RUNGS)
def test_the_order_of_blocks_and_warps_does_not_show(rung):
    """The same bits whatever comes first; a warp at a time is slow, so there are few."""
    name, results = rung.dtypes[0], []
    for seed in (None, 1):
        for shape in [(33, 23, 19), (11, 23, 19), (1, 41, 35), (16, 16, 32)]:
            a, b, c = matrices(shape, name)
            if run(rung, a, b, c, seed=seed):
                break
        results.append(c.array.tobytes())
    assert len(set(results)) == 1


def test_wide_accesses_to_a_misaligned_matrix_are_found():
    """Arrays lie as they do on the host: to say otherwise of one of them is a fault of the caller, and shows."""
    a, b, c = matrices((64, 64, 64), "f32", layouts=("odd", "row", "row"))
    given = Gemm(a.array, b.array, c.array)
    case = problem_on(given, "f32", "f32", "h200")
    assert case.alignments == (4, 16, 16)
    rung = find(CUDA, "simt_vectorized")
    assert [one.findings for one in run_rung(rung, case, {}, given)] == [()]
    (wide,) = run_rung(rung, case._replace(alignments=(16, 16, 16)), {}, given)
    assert {one.kind for one in wide.findings} == {"misaligned"}


@pytest.mark.many
@pytest.mark.parametrize("card", ["h200", "t4", "a100", "rtx5090"])
@pytest.mark.parametrize("rung", RUNGS)
def test_what_a_rung_claims_holds(rung, card):
    """On every generation that runs it; what is claimed is counted."""
    assert set(rung.expect) <= set(RungCounts.__dataclass_fields__)
    assert rung.expect
    work = product_for(rung, 128, element(""), KNOWN[card])
    assert expects(rung, work)
    found = emulated_rung(rung, work, KNOWN[card])
    if found.refused:
        assert KNOWN[card].capability < 80 or "sm_90" in found.refused, found.refused
        return
    assert found.expected == rung.expect
    assert found.wrong == ()
