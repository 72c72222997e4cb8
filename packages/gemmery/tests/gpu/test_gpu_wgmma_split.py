"""Sums over k in parts, on a device of sm_90: shared by the blocks of a cluster, or each with its own factors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from block_scales import scaled_operands
from gemmery.arrays import View
from gemmery.cuda import driver
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.ladder.wgmma_split import turns
from gpu_operands import Placed, built, matrices, place, problem, run
from operands import numpy_dtype

STREAMK, BLOCKSCALED = (find(CUDA, name) for name in ("wgmma_streamk", "wgmma_blockscaled"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(
        bool(driver.missing()) or driver.find("cuda:0").capability != 90, reason="needs a device of sm_90"
    ),
]

TILES = [
    {"bm": 128, "bn": 256, "stages": 4, "splits": 2},
    {"bm": 128, "bn": 128, "stages": 6, "splits": 2},
    {"bm": 128, "bn": 64, "stages": 8, "splits": 2},
    {"bm": 64, "bn": 128, "stages": 8, "splits": 4},
    {"bm": 128, "bn": 128, "stages": 6, "splits": 8},
]
TN = ("row", "col", "row")
# Whole tiles and shared ones, shared ones alone, several turns of them, and k of less than a step for each block.
SHAPES = [(1000, 1000, 1000), (2000, 2312, 520), (128, 4096, 1024), (3000, 3000, 72), (136, 200, 8), (1, 4096, 4096)]


@pytest.mark.parametrize("config", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shared_tiles(shape, config):
    assert run(STREAMK, *matrices(shape, "bf16", "bf16", TN), config=config)


@pytest.mark.parametrize("config", TILES[:4], ids=str)
def test_shared_tiles_of_other_layouts_batches_and_types(config):
    either = ("row", "col")
    for layouts, name in zip(itertools.product(either, either, either), itertools.cycle(("f16", "bf16")), strict=False):
        assert run(STREAMK, *matrices((200, 328, 264), name, name, layouts, batch=3), config=config)
        assert run(STREAMK, *matrices((201, 331, 263), name, "f32", layouts), config=config)


@pytest.mark.parametrize("config", TILES[:4], ids=str)
def test_shared_tiles_with_an_epilogue(config):
    for shape in ((200, 328, 264), (2000, 2312, 128)):
        a, b, c = matrices(shape, "bf16", "bf16", TN)
        bias = place(np.linspace(-2, 2, shape[1], dtype=np.float32)[None, None], "f32")
        assert run(STREAMK, a, b, c, alpha=0.5, bias=bias, epilogue="bias+gelu", config=config)


@pytest.mark.parametrize("config", TILES, ids=str)
def test_the_same_bits_each_time(config):
    """Also of launches that overlap, into one C after the other."""
    a, b, first = matrices((2000, 2312, 1032), "bf16", "bf16", TN)
    others = [matrices((2000, 2312, 1032), "bf16", "bf16", TN)[2] for _ in range(8)]
    kernel = built(STREAMK, problem(a, b, first), config)
    count, blocks = -(-2000 // config["bm"]) * -(-2312 // config["bn"]), kernel.geometry.grid[0]
    assert turns(count, blocks, config["splits"])[1] > 0 or config["bn"] < 256
    for c in (first, *others):
        kernel(a.view(), b.view(), c.view())
    driver.synchronize()
    bits = first.result().tobytes()
    assert all(c.result().tobytes() == bits for c in others)


def scaled(shape, name, out, config, **options):
    """Run a product of float8 with factors of blocks; return C and the operands."""
    across = shape[0] % 2 == 1
    operands = scaled_operands(*shape, name)
    a, b = place(operands.a[None], name), place(operands.b[None], name, "col")
    c = place(np.full((1, *shape[:2]), np.nan).astype(numpy_dtype(out)), out)
    factors = [place(operands.a_scale[None], "f32", "col" if across else "row"), place(operands.b_scale[None], "f32")]
    case = problem(a, b, c, options.get("epilogue", ""), options.get("alpha", 1.0) != 1)._replace(scales="blocks")
    kernel = built(BLOCKSCALED, case, config)
    steps = [step // 4 for each in factors for step in each.strides[1:]]
    options.pop("epilogue", None)
    pointers = [each.view().pointer for each in factors]
    kernel(a.view(), b.view(), c.view(), scaling=("blocks", *steps), extra=(*pointers, 0), **options)
    driver.synchronize()
    return c.result()[0], operands


CONFIGS = [{}, {"bm": 64, "stages": 4}, {"bn": 64, "stages": 4}, {"blocks": 8}]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("name", "out"), [("e4m3", "bf16"), ("e4m3", "f32"), ("e5m2", "f16")])
def test_factors_of_blocks(name, out, config):
    for shape in [(128, 128, 128), (1, 1, 16), (2000, 2312, 1040), (77, 129, 656), (1031, 264, 4112), (40, 72, 128)]:
        c, operands = scaled(shape, name, out, config)
        assert np.array_equal(c, operands.product.astype(numpy_dtype(out))), shape


def test_factors_of_blocks_with_an_epilogue():
    bias: Placed = place(np.arange(-132, 132, dtype=np.float32)[None, None], "f32")
    row: View = bias.view()._replace(shape=bias.shape[2:], strides=bias.strides[2:])
    c, operands = scaled((200, 264, 528), "e4m3", "f32", {}, alpha=0.5, bias=row, epilogue="bias+relu")
    assert np.array_equal(c, np.maximum(0.5 * operands.product + bias.values[0, 0], 0))


@pytest.mark.parametrize("name", BLOCKSCALED.dtypes)
def test_random_float8_keeps_the_bound(name):
    for shape in ((256, 384, 512), (300, 200, 4112)):
        assert run(BLOCKSCALED, *matrices(shape, name, "f32", TN))
