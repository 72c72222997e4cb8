"""Products of 32 bits whose B, by rows, is multiplied from registers as C' = B' A', on the emulator."""

from __future__ import annotations

import pytest

from checked_products import matrices, run
from gemmery.cuda.choose.data import TURNED
from gemmery.errors import GemmeryError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from mutant import edited

pytestmark = pytest.mark.sampled(5)

pytest.importorskip("cuda.bindings")

EPILOGUE = find(CUDA, "wgmma_epilogue")
PROBLEM = Problem(4096, 4096, 4096, "f32", "f32", precision="tf32", device="h200")


def tile(bm: int, bn: int, stages: int = 2) -> dict[str, int]:
    return {"bm": bm, "bn": bn, "stages": stages, "cm": 1, "cn": 1, "band": 2, "blocks": 4}


@pytest.mark.many
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((264, 136, 72), tile(256, 128)),  # a row and a column of tiles with 8 rows and 8 columns
        ((40, 36, 20), tile(256, 128)),  # fewer rows than a tile, and a k of one stage that ends in a product
        ((300, 260, 200), tile(128, 128, 3)),  # several tiles for a block
        ((130, 132, 104), tile(128, 64)),
        ((64, 68, 4), tile(64, 64, 4)),  # one product, most of which is zeros
    ],
)
def test_b_by_rows_is_not_copied(shape, config):
    runs = run(EPILOGUE, *matrices(shape, "f32"), config=config)
    assert [each.kernel.partition("<")[0] for each in runs] == ["wgmma_turned"]


@pytest.mark.many
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("group / 2 % 2 * 16", "group / 2 % 2 * 8"),  # two lanes have the same columns
        ("(at % 32 / 4 ^ k) * 16", "at % 32 / 4 * 16"),  # a tile that is not swizzled
        ("at ^ 64", "at"),  # nor in the rows of the other four k
        ("wgmma_wait_group<Tiles::PRODUCTS - 1>", "wgmma_wait_group<Tiles::PRODUCTS>"),  # registers that are read
        ("if (!BEGINS) this->release(this->before);", ""),
        ("4 * eight + 2 + x]", "4 * eight + x]"),  # a column in the place of its neighbor
    ],
)
def test_mistakes_show(old, new):
    texts = edited("wgmma_turned.cu", old, new)
    with pytest.raises((AssertionError, GemmeryError)):
        run(EPILOGUE, *matrices((264, 136, 200), "f32"), config=tile(256, 128), texts=texts)


def test_plain_products_alone_choose_it():
    """A bias, factors, an A by columns, and rows that no tensor map describes are packed as before."""
    kernels = EPILOGUE.geometry(PROBLEM, EPILOGUE.default).launches
    assert [each.kernel.partition("<")[0] for each in kernels] == ["wgmma_turned"]
    for change in (
        {"epilogue": "bias"},
        {"scaled": True},
        {"a_layout": "col"},
        {"n": 4095, "alignments": (16, 4, 4)},
        {"b_layout": "col"},
    ):
        problem = PROBLEM._replace(**change)
        kernels = EPILOGUE.geometry(problem, EPILOGUE.default).launches
        assert "wgmma_turned" not in str([each.kernel for each in kernels]), change


@pytest.mark.parametrize("n", [512, 1024, 1536, 2048, 4096])
def test_tiles_that_it_has_are_chosen(n):
    config = EPILOGUE.resolve(PROBLEM._replace(m=n, n=n), EPILOGUE.default)
    assert tuple(config[key] for key in ("bm", "bn", "stages")) in [each[:3] for each in TURNED]
