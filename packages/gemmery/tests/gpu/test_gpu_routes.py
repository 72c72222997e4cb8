"""Products whose operands are packed first, on a GPU: any layout and alignment, the same bits, chains of launches.

The rungs by tensor copies run behind `gpu.library`, as the one that serves products does.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from gemmery import dtypes
from gemmery.cuda import driver
from gemmery.cuda.launch import CudaLaunch
from gemmery.errors import RefusedError
from gemmery.ladder import gpu
from gemmery.ladder.cuda import CUDA
from gpu_operands import matrices, place, problem, run
from layouts import OTHERS
from operands import random

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

NAMES = ("f16", "bf16", "f32", "e4m3", "int8")
KS = (0, 1, 8, 63, 64, 65)


def routed(rung):
    """The rung with any operands; the one that serves products is routed already."""
    if rung.name == "wgmma_epilogue":
        return rung
    geometry = partial(gpu.library, rung.geometry)
    return rung._replace(
        geometry=geometry,
        refuses=lambda case: "",
        build=lambda case, config: CudaLaunch(case, config, geometry),
    )


ROUTED = [routed(rung) for rung in CUDA if rung.name in ("wgmma_tma", "wgmma_cluster", "wgmma_epilogue")]
RUNGS = [pytest.param(rung, id=rung.name) for rung in ROUTED]
EVERY = [pytest.param(rung, name, id=f"{rung.name}-{name}") for rung in ROUTED for name in NAMES if name in rung.dtypes]


def result_of(name):
    return {"int8": "int32", "e4m3": "bf16"}.get(name, name)


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_every_layout_of_both_operands(rung, name):
    stored = itertools.cycle(("odd", "padded", "aligned", "rows reversed", "padded col", "col", "row", "strided"))
    either = ("row", "col", *OTHERS)
    for index, (a_layout, b_layout) in enumerate(itertools.product(either, either)):
        shape = (67, 131, 71) if index % 2 else (72, 136, 64)
        layouts = (a_layout, b_layout, next(stored))
        assert run(rung, *matrices(shape, name, result_of(name), layouts)), layouts


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_where_loops_over_k_begin_and_end(rung, name):
    for k in (*KS, 127, 129, 1031):
        for layouts in (("row", "col", "row"), ("odd", "odd", "odd"), ("col", "row", "col"), ("strided",) * 3):
            assert run(rung, *matrices((129, 65, k), name, result_of(name), layouts)), (k, layouts)


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_sides_that_no_tile_divides(rung, name):
    for shape in [(1, 300, 77), (300, 1, 77), (2, 3, 5), (1023, 511, 257), (517, 771, 1025), (4099, 259, 4099)]:
        for layouts in (("row", "row", "row"), ("row", "col", "row"), ("col", "row", "col")):
            assert run(rung, *matrices(shape, name, result_of(name), layouts)), (shape, layouts)


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_batches_and_repeated_matrices(rung, name):
    for shared in ((False, False), (True, False), (False, True), (True, True)):
        for layouts in (("odd", "odd", "row"), ("row", "col", "odd"), ("col", "row", "col"), ("reversed",) * 3):
            assert run(rung, *matrices((70, 90, 41), name, result_of(name), layouts, 5, shared)), (shared, layouts)


@pytest.mark.parametrize("rung", RUNGS)
def test_alpha_beta_bias_and_activations(rung):
    name = rung.dtypes[0]
    for layouts in (("odd", "odd", "odd"), ("col", "strided", "strided"), ("odd", "row", "col"), ("row", "col", "row")):
        for alpha, beta in ((1.0, 1.0), (-1.5, 0.375), (0.5, 0.0)):
            a, b, c = matrices((67, 131, 71), name, name, layouts)
            c = place(random(c.shape, name, 3), name, layouts[2])
            assert run(rung, a, b, c, alpha=alpha, beta=beta), layouts
        kind = dtypes.get(name).accumulator
        bias = place(random((1, 1, 131), kind, 4), kind)
        for epilogue in ("bias", "bias+relu", "gelu", "bias+silu"):
            options = {"bias": bias} if "bias" in epilogue else {}
            assert run(rung, *matrices((67, 131, 71), name, name, layouts), epilogue=epilogue, **options)


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_packed_operands_give_the_bits_of_aligned_ones(rung, name):
    results = []
    for layouts in (("aligned", "padded col", "row"), ("odd", "odd", "odd"), ("strided", "col", "row"), ("col",) * 3):
        a, b, c = matrices((200, 136, 1000), name, result_of(name), layouts)
        assert run(rung, a, b, c)
        results.append(c.result())
    for other in results[1:]:
        assert np.array_equal(results[0].view(np.uint8), np.ascontiguousarray(other).view(np.uint8))


@pytest.mark.parametrize("rung", RUNGS)
def test_a_chain_of_packed_products_is_that_of_waiting_ones(rung):
    """Each product reads what the one before wrote, and packs it into memory that the one before may still read."""
    side = 515
    numbers = (random((1, side, side), "f16", 1) / np.float16(24)).astype(np.float16)  # sums keep about their size
    weights, first = place(numbers, "f16", "odd"), random((1, side, side), "f16", 2)

    def chain(is_waiting):
        x, y = (place(first, "f16", "odd") for _ in range(2))
        case = problem(x, weights, y)
        try:
            kernel = rung.build(case, rung.default)
        except RefusedError as error:
            pytest.skip(str(error))
        for _ in range(40):
            kernel(x.view(), weights.view(), y.view())
            x, y = y, x
            if is_waiting:
                driver.synchronize()
        driver.synchronize()
        return x.result()

    expected, result = chain(True), chain(False)
    assert np.isfinite(expected).all()
    assert np.array_equal(expected.view(np.uint16), result.view(np.uint16))
