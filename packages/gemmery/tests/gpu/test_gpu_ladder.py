"""Every rung of the GPU ladder on every kind of problem: error within its bound, no byte written outside C."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gemmery import dtypes, verify
from gemmery.arrays import View
from gemmery.cuda import driver, halved
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.problem import Problem
from gpu_operands import built, matrices, place, problem, run
from layouts import OTHERS
from operands import NARROW, numpy_dtype, random

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

EVERY = [
    pytest.param(rung, name, id=f"{rung.name}-{name}") for rung in CUDA for name in rung.dtypes if name not in NARROW
]
RUNGS = [pytest.param(rung, id=rung.name) for rung in CUDA if set(rung.dtypes).difference(NARROW)]
# Sides are odd or multiples of 8: an instance of a template is compiled for each combination of alignments.
SHAPES = [
    *[(1, 1, 1), (1, 7, 1), (7, 1, 1), (1, 1, 33), (5, 3, 3), (3, 5, 0), (136, 72, 0), (1, 40, 0)],
    *[(17, 19, 23), (31, 33, 32), (32, 32, 32), (64, 64, 64), (65, 127, 63), (128, 128, 16), (128, 256, 128)],
    *[(130, 257, 104), (97, 89, 101), (256, 8, 512), (8, 256, 40), (200, 136, 1000)],
    *[(1, 259, 129), (1, 256, 128), (259, 1, 129), (256, 1, 128), (1, 1000, 136), (4, 504, 520)],
]
LARGER = [(517, 771, 1025), (512, 512, 512), (1, 1031, 2056)]
OF_A_TRANSPOSE = [(17, 19, 23), (128, 128, 64), (200, 136, 1000), (1, 259, 129), (1, 256, 128), (1, 1031, 2056)]
ODD = [(67, 131, 71), (11, 23, 35), (1, 131, 71), (7, 3, 5)]  # the last for rungs of batches
EVEN = [(72, 136, 64), (24, 40, 48), (1, 136, 72), (16, 32, 16)]
WIDER = {"f16": "f32", "bf16": "f32", "f32": "f64"}


def one_of(shapes, rung, make, **options):
    """Check the first of the shapes that the rung takes; return False if it takes none."""
    return any(run(rung, *make(shape), **options) for shape in shapes)


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_shapes(rung, name):
    taken = [run(rung, *matrices(shape, name, name)) for shape in [*SHAPES, *LARGER]]
    taken += [run(rung, *matrices(shape, name, name, ("row", "col", "row"))) for shape in OF_A_TRANSPOSE]
    assert any(taken)


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_layouts(rung, name):
    either = ("row", "col")
    stored = itertools.cycle(("odd", "padded", "aligned", "rows reversed", "padded col", "col", "row"))
    others = zip(OTHERS, OTHERS[4:] + OTHERS[:4], stored, strict=False)
    taken = [
        one_of(shapes, rung, lambda shape, three=three: matrices(shape, name, name, three))
        for three in [*itertools.product(either, either, either), *others]
        for shapes in (ODD, EVEN)
    ]
    assert any(taken)


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_a_wider_result(rung, name):
    if name not in WIDER:
        pytest.skip("nothing is wider")
    for shapes, b_layout in [(ODD, "row"), (EVEN, "row"), (EVEN, "col")]:
        one_of(shapes, rung, lambda shape, lies=b_layout: matrices(shape, name, WIDER[name], ("row", lies, "row")))


@pytest.mark.parametrize("rung", RUNGS)
def test_products_of_fewer_bits(rung):
    for shape, b_layout in [(ODD[0], "row"), (EVEN[0], "row"), (EVEN[0], "col"), (EVEN[2], "col")]:
        run(rung, *matrices(shape, "f32", "f32", ("row", b_layout, "row")), precision="tf32")


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_batches(rung, name):
    shared = [(False, False), (True, False), (False, True)]
    ways = [(("row", "row", "row"), way) for way in shared] + [(("row", "col", "row"), way) for way in shared]
    taken = [
        run(rung, *matrices(shape, name, name, layouts, 3, repeated))
        for shape in [(1, 1, 1), (5, 7, 3), ODD[1], *EVEN]
        for layouts, repeated in [*ways, (("padded", "padded col", "padded"), (False, False))]
    ]
    taken.append(run(rung, *matrices((24, 24, 24), name, name, batch=301)))
    taken.append(run(rung, *matrices((32, 16, 32), name, name, batch=301)))
    taken.append(run(rung, *matrices((3, 3, 3), name, name, batch=100_003)))
    assert any(taken)


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_alpha_and_beta(rung, name):
    def given(shape, layouts):
        a, b, c = matrices(shape, name, name, layouts)
        return a, b, place(random(c.shape, name, 3), name, layouts[2])

    for layouts in [("row", "row", "row"), ("col", "row", "col")]:
        one_of(ODD, rung, lambda shape, three=layouts: matrices(shape, name, name, three), alpha=2.0)
        for alpha, beta in [(1.0, 1.0), (-1.5, 0.375), (0.0, 0.5)] if name != "bool" else [(1, 1), (0, 1)]:
            one_of(ODD, rung, lambda shape, three=layouts: given(shape, three), alpha=alpha, beta=beta)
    one_of(EVEN, rung, lambda shape: given(shape, ("row", "col", "row")), alpha=1.5, beta=-1.0)


@pytest.mark.parametrize("rung", RUNGS)
def test_epilogues(rung):
    name = rung.dtypes[0]
    held = dtypes.get(name).accumulator
    ways = [*itertools.product(["bias", "relu", "gelu", "silu", "bias+relu", "bias+gelu", "bias+silu"], ["row"], [1.0])]
    for epilogue, stored, alpha in [*ways, ("bias+relu", "col", 1.0), ("bias+gelu", "row", 0.5)]:
        for shape in EVEN:
            bias = place(random((1, 1, shape[1]), held, 4), held, "strided") if "bias" in epilogue else None
            layouts = ("row", "col", stored)
            if run(rung, *matrices(shape, name, name, layouts), epilogue=epilogue, bias=bias, alpha=alpha):
                break


@pytest.mark.parametrize("rung", RUNGS)
def test_every_config_of_its_space_gives_the_product(rung):
    name = rung.dtypes[0]
    for key, values in rung.space.items():
        for value in values:
            one_of(EVEN, rung, lambda shape: matrices(shape, name, name, ("row", "col", "row")), config={key: value})


@pytest.mark.parametrize("planted", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("rung", RUNGS)
def test_values_that_are_not_finite(rung, planted):
    """One of them in A affects its row of C only."""
    name = rung.dtypes[0]
    if dtypes.get(name).kind not in "fc":
        pytest.skip(f"{name} has no such values")
    for m, n, k in EVEN:
        a, b, c = matrices((m, n, k), name, name, ("row", "col", "row"))
        a.values[0, m // 2, k // 2] = planted
        a.memory.write(a.before)
        run(rung, a, b, c)


@pytest.mark.parametrize("rung", RUNGS)
def test_grids_beyond_65535(rung):
    """Large in every direction that a kernel may map to y or z."""
    name = rung.dtypes[0]
    for shape, batch in [((65535 * 8 + 9, 3, 2), 1), ((3, 65535 * 8 + 9, 2), 1), ((2, 3, 2), 65535 + 8)]:
        run(rung, *matrices(shape, name, name, batch=batch))
    run(rung, *matrices((1, 65535 * 8 + 9, 2), name, name, ("row", "col", "row")))


SIDE = 32_768


def long(name):
    """Rows of SIDE elements that make more than 2**32, or more than 2**31 (18 GB) of the widest type."""
    return 70_000 if name == "f64" else 140_000


def picked(name):
    """The rows to look at: the ends, and where 31 and 32 bits end."""
    around = [2**bits // SIDE + step for bits in (31, 32) for step in (-1, 0, 1)]
    return [row for row in (0, 1, *around, long(name) - 2, long(name) - 1) if row < long(name)]


def large(name, shape, layout):
    """More elements than 31 bits count, of one small number; random ones in the picked rows (columns for "col")."""
    size = dtypes.get(name).size
    memory = driver.Memory(long(name) * SIDE * size)
    memory.fill(0x3C)
    lines = random((len(picked(name)), SIDE), name, 5)
    for line, at in zip(lines, picked(name), strict=True):
        memory.write(np.ascontiguousarray(line), at * SIDE * size)
    strides = (0, SIDE * size, size) if layout == "row" else (0, size, SIDE * size)
    return memory, lines, View(memory.pointer, (1, *shape), strides, name, "cuda:0", owner=memory)


@pytest.mark.parametrize("rung", RUNGS)
def test_more_than_two_to_the_31_elements_of_a(rung):
    name = min(set(rung.dtypes).difference(NARROW), key=lambda name: (dtypes.get(name).size, name))
    for n in (8, 1):
        b, c = place(random((1, SIDE, n), name, 2), name), place(np.zeros((1, long(name), n), numpy_dtype(name)), name)
        case = Problem(long(name), n, SIDE, name, name, 1, "row", b.layout(), c.layout(), device="cuda:0")
        if (kernel := built(rung, case)) is None:
            continue
        _memory, lines, a = large(name, (long(name), SIDE), "row")
        kernel(a, b.view(), c.view())
        driver.synchronize()
        result = c.result()[0]
        assert verify.check(result[picked(name)], lines, b.values[0], rung.bound).ok
        rest = np.delete(result, picked(name), axis=0)
        assert np.array_equal(rest, np.broadcast_to(rest[:1], rest.shape))
        return


@pytest.mark.parametrize("rung", RUNGS)
def test_more_than_two_to_the_31_elements_of_b(rung):
    name = min(set(rung.dtypes).difference(NARROW), key=lambda name: (dtypes.get(name).size, name))
    for m in (8, 1):
        a, c = place(random((1, m, SIDE), name, 2), name), place(np.zeros((1, m, long(name)), numpy_dtype(name)), name)
        case = Problem(m, long(name), SIDE, name, name, 1, "row", "col", "row", device="cuda:0")
        if (kernel := built(rung, case)) is None:
            continue
        _memory, lines, b = large(name, (SIDE, long(name)), "col")
        kernel(a.view(), b, c.view())
        driver.synchronize()
        result = c.result()[0]
        assert verify.check(np.ascontiguousarray(result[:, picked(name)]), a.values[0], lines.T, rung.bound).ok
        rest = np.delete(result, picked(name), axis=1)
        assert np.array_equal(rest, np.broadcast_to(rest[:, :1], rest.shape))
        return


@pytest.mark.parametrize("rung", RUNGS)
def test_more_than_two_to_the_31_elements_of_c(rung):
    name = min(set(rung.dtypes).difference(NARROW), key=lambda name: (dtypes.get(name).size, name))
    size, k = dtypes.get(name).size, 8
    a, b = place(random((1, long(name), k), name, 1), name), place(random((1, k, SIDE), name, 2), name)
    kernel = built(rung, Problem(long(name), SIDE, k, name, name, device="cuda:0"))
    if kernel is None:
        pytest.skip("the rung takes no such matrix")
    memory = driver.Memory(long(name) * SIDE * size)
    memory.fill(0xFF)
    strides = (long(name) * SIDE * size, SIDE * size, size)
    kernel(a.view(), b.view(), View(memory.pointer, (1, long(name), SIDE), strides, name, "cuda:0", owner=memory))
    driver.synchronize()
    result = np.empty((len(picked(name)), SIDE), numpy_dtype(name))
    for row, at in zip(result, picked(name), strict=True):
        memory.read(row, at * SIDE * size)
    assert verify.check(result, a.values[0][picked(name)], b.values[0], rung.bound).ok


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
def test_a_sum_of_matrices(name):
    for m, n, batch in [(1, 1, 1), (5, 7, 3), (64, 64, 1), (67, 131, 2), (1, 100_003, 1), (70_001, 3, 1)]:
        for layouts in itertools.product(("row", "col", "odd", "reversed", "padded"), repeat=2):
            a, b = (place(random((batch, m, n), name, at), name, layout) for at, layout in enumerate(layouts))
            c = place(np.full((batch, m, n), np.nan).astype(numpy_dtype(name)), name, layouts[0])
            halved.addition(a.view(), b.view(), c.view())(a.view(), b.view(), c.view())
            driver.synchronize()
            assert np.array_equal(c.result(), a.values + b.values)


def test_a_sum_of_more_than_two_to_the_31_elements():
    name = "bf16"
    memory, lines, x = large(name, (long(name), SIDE), "row")
    halved.addition(x, x, x)(x, x, x)
    driver.synchronize()
    result = np.empty_like(lines)
    for row, at in zip(result, picked(name), strict=True):
        memory.read(row, at * SIDE * 2)
    assert np.array_equal(result, lines + lines)


@pytest.mark.parametrize(("name", "config"), [("simt_linear", {"threads": 1025}), ("simt_smem", {"tile": 64})])
def test_a_launch_that_cannot_run_leaves_c_alone(name, config):
    rung = next(rung for rung in CUDA if rung.name == name)
    a, b, c = matrices((40, 40, 40), "f32", "f32")
    with pytest.raises(RefusedError, match="threads per block"):
        rung.build(problem(a, b, c), {**rung.default, **config})
    driver.synchronize()
    assert np.array_equal(c.image(), c.before)
