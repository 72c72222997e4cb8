"""The kernels by wgmma on a device: every type, layout, edge, epilogue and tile; the same bits whatever the tile."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from gemmery.cuda import driver
from gemmery.cuda.choose.cost import is_swapped
from gemmery.cuda.choose.data import INSTANCES
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gpu_operands import matrices, place, problem, run
from operands import random

ON_HOPPER = not driver.missing() and driver.find("cuda:0").capability == 90
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="wgmma needs compute capability 9.0")]

LIBRARY = find(CUDA, "wgmma_epilogue")
TYPES = [
    *[("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16"), ("f16", "f32"), ("f32", "f32")],
    *[("e4m3", "bf16"), ("e4m3", "f32"), ("e5m2", "f16"), ("int8", "int32"), ("int8", "bf16"), ("int8", "f32")],
]
EITHER = ("row", "col")
RAGGED = [(1, 1, 1), (1, 264, 72), (65, 63, 64), (127, 129, 65), (300, 520, 200), (520, 300, 1000), (257, 1, 96)]
DEPTHS = (0, 1, 8, 63, 64, 65, 127, 128, 129)
CONFIGS = [dict(zip(("bm", "bn", "stages", "cm", "cn"), tile[:5], strict=True)) for tile in INSTANCES]
CONFIGS += [{"bm": 128, "bn": 256, "stages": 3, "cm": 1, "cn": 1}]  # which has more buffers for sums of 32 bits


@pytest.mark.parametrize(("name", "out"), TYPES)
def test_layouts_and_ragged_shapes(name, out):
    for shape, a_layout, b_layout in itertools.product(RAGGED, EITHER, EITHER):
        assert run(LIBRARY, *matrices(shape, name, out, (a_layout, b_layout, "row")))
    for shape in RAGGED[3:5]:
        assert run(LIBRARY, *matrices(shape, name, out, ("row", "col", "col")))


@pytest.mark.parametrize(("name", "out"), TYPES)
def test_small_depths(name, out):
    for k, m in itertools.product(DEPTHS, (1, 63, 64, 65)):
        assert run(LIBRARY, *matrices((m, 136, k), name, out, ("row", "col", "row")))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("name", "out"), [("bf16", "bf16"), ("bf16", "f32"), ("e4m3", "bf16"), ("int8", "int32")])
def test_tiles_in_many_rounds(config, name, out):
    """Few blocks, so that the ring and the buffers of C go on from tile to tile."""
    narrow = config["bn"] % 32 or (config["bm"], config["bn"], config["stages"]) == (256, 160, 4)
    halves = config["bm"] == 192 or is_swapped(config["bm"])
    if (halves and (name, out) != ("bf16", "bf16")) or (narrow and out in ("f32", "int32")):
        pytest.skip("no product of these types has such a tile")
    for (m, n, k), blocks in (((1100, 1304, 328), 4), ((700, 1000, 64), 2)):
        shape = (8 if config["bm"] == 8 else m, n, k)
        config = {**LIBRARY.default, **config, "band": 4, "blocks": blocks}
        assert run(LIBRARY, *matrices(shape, name, out, ("row", "col", "row")), config=config)


@pytest.mark.parametrize("name", ["bf16", "f16"])
@pytest.mark.parametrize(
    "shape", [(3000, 1000, 1000), (3000, 3000, 200), (1000, 1000, 1000), (2984, 520, 3000)], ids=str
)
def test_tiles_of_rows_that_are_apart(shape, name):
    """Also where A begins elsewhere in a line; the same bits each time, and those of another tile."""
    m, n, k = shape
    tile = (64, 128, 8, 2, 1) if m == 1000 else (192, 192, 4, 2, 1)
    config = {**LIBRARY.default, **dict(zip(("bm", "bn", "stages", "cm", "cn"), tile, strict=True))}
    for first, b_layout in ((0, "col"), (0, "row"), (8, "col")):
        a, b, c = matrices((m, n, k + first), name, name, ("row", b_layout, "row"))
        a = replace(a, shape=(1, m, k), offset=a.offset + first * a.strides[2])
        b = replace(b, shape=(1, k, n), offset=b.offset + first * b.strides[1])
        assert LIBRARY.geometry(problem(a, b, c), config).apart == 8
        other = {**config, "bm": 128, "bn": 128, "stages": 4, "cm": 1}
        assert LIBRARY.geometry(problem(a, b, c), other).apart == 1
        results = set()
        for each in (config, config, other):
            assert run(LIBRARY, a, b, c, config=each)
            results.add(np.array(c.result()).tobytes())
        assert len(results) == 1


@pytest.mark.parametrize("config", [config for config in CONFIGS if is_swapped(config["bm"])], ids=str)
def test_any_number_of_rows(config):
    """The last tile overlaps the one above by whole pieces, and columns of C overlap, too. No map has one column."""
    for m in (*range(2, config["bm"] + 2, 7), 3 * config["bm"] - 1, 1037):
        for layout in EITHER:
            full = {**LIBRARY.default, **config, "band": 4, "blocks": 6}
            assert run(LIBRARY, *matrices((m, 520, 136), "bf16", "bf16", ("row", layout, "row")), config=full)
            c_by_columns = matrices((520, m, 136), "f16", "f16", (layout, "col", "col"))
            assert run(LIBRARY, *c_by_columns, config=full)


@pytest.mark.parametrize("config", [config for config in CONFIGS if config["bm"] != 192], ids=str)
def test_every_tile_has_its_own_bias(config):
    """Also in later rounds of a block, and of a tile that is not the first of its row."""
    m = 8 if config["bm"] == 8 else 700
    layout = "row" if (config["bm"], config["bn"], config["stages"]) == (256, 160, 3) else "col"
    for epilogue in ("bias", "bias+relu", "bias+gelu"):
        a, b, c = matrices((m, 1000, 136), "bf16", "bf16", ("row", layout, "row"))
        bias = place(random((1, 1, 1000), "f32", 4), "f32", "row")
        rounds = {**LIBRARY.default, **config, "band": 4, "blocks": 2}
        assert run(LIBRARY, a, b, c, epilogue=epilogue, bias=bias, config=rounds)


@pytest.mark.parametrize(("name", "out"), [pair for pair in TYPES if pair[0] != "int8"])
def test_epilogues(name, out):
    """Those of int8, which need factors, are in test_gpu_api_scales.py."""
    for shape, epilogue in itertools.product([(200, 264, 136), (67, 131, 71)], ("bias+gelu", "silu", "bias", "relu")):
        bias = place(random((1, 1, shape[1]), "f32", 4), "f32", "strided") if "bias" in epilogue else None
        a, b, c = matrices(shape, name, out, ("row", "col", "row"))
        assert run(LIBRARY, a, b, c, epilogue=epilogue, bias=bias, alpha=0.5)
    c = place(random((1, 200, 264), out, 3), out, "row")
    a, b, _ = matrices((200, 264, 136), name, out, ("row", "col", "row"))
    assert run(LIBRARY, a, b, c, alpha=-1.5, beta=0.375)


@pytest.mark.parametrize(("name", "out"), TYPES)
def test_batches(name, out):
    for shared in ((False, False), (True, False), (False, True)):
        for shape in ((72, 136, 64), (67, 131, 71)):
            assert run(LIBRARY, *matrices(shape, name, out, ("row", "col", "row"), batch=5, shared=shared))


@pytest.mark.parametrize(("name", "out"), [("bf16", "bf16"), ("f32", "f32"), ("e4m3", "f32")])
def test_every_tile_gives_the_same_bits(name, out):
    """Products are added in the order of k, in one block."""
    a, b, c = matrices((515, 520, 1304), name, out, ("row", "col", "row"))
    results = [
        np.array(c.result()).tobytes()
        for config in CONFIGS
        if run(LIBRARY, a, b, c, config={**LIBRARY.default, **config})
    ]
    # Four are for few rows, five for results of 16 bits, and those that are swapped for operands of 16 bits as well.
    assert len(results) >= len(CONFIGS) - 9 - (name != "bf16") * sum(is_swapped(config["bm"]) for config in CONFIGS)
    assert len(set(results)) == 1


@pytest.mark.parametrize(("name", "out"), [("bf16", "bf16"), ("f32", "f32"), ("e4m3", "f32")])
def test_a_tile_of_eight_rows_gives_the_bits_of_others(name, out):
    few = [config for config in CONFIGS if config["bm"] == 8 and (config["bn"] % 32 == 0 or out == "bf16")]
    for rows in (1, 5, 8):
        a, b, c = matrices((rows, 520, 4104), name, out, ("row", "col", "row"))
        results = []
        for config in [*few, {"bm": 64, "bn": 64, "stages": 8, "cm": 1, "cn": 1}]:
            assert run(LIBRARY, a, b, c, config={**LIBRARY.default, **config})
            results.append(np.array(c.result()).tobytes())
        assert len(results) > 1
        assert len(set(results)) == 1


@pytest.mark.parametrize("name", ["wgmma_tma", "wgmma_specialized", "wgmma_persistent", "wgmma_cluster"])
def test_the_rungs_below(name):
    rung = find(CUDA, name)
    for shape, a_layout, b_layout in itertools.product([(300, 520, 200), (65, 264, 1000)], EITHER, EITHER):
        if a_layout == "row" or shape[0] % 8 == 0:
            assert run(rung, *matrices(shape, "f16", "f16", (a_layout, b_layout, "row")))
