"""Parts of k of packed weights: blocks and consumers that share a tile, the order in which they add, wrong kernels."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery.cuda.choose.variants import variant_of
from gemmery.cuda.device import KNOWN
from gemmery.cuda.weights import Format
from gemmery.errors import EmulationError
from mutant import edited
from test_cuda_wgmma_quantized import SMALL, TYPES, check, emulated, logical, multiplied, problem

pytestmark = pytest.mark.sampled(7)


@pytest.mark.many(2)
@pytest.mark.parametrize("config", [{"splits": 2, "ways": 2}, {"runs": 5, "ways": 1}])
def test_bits_do_not_depend_on_the_order_of_blocks(config):
    form = Format(192, 640, "int4", 128, "bf16")
    config = SMALL | {"stages": 4} | config
    results = [emulated(form, 11, config=config, order=order)[0] for order in (1, 2)]
    assert np.array_equal(*results)
    check(form, 11, config=config, order=3)


@pytest.mark.sampled(1)
@pytest.mark.many(2)
@pytest.mark.parametrize("ways", [2, 4])
def test_one_consumer_adds_up_parts_as_ways_do(ways):
    """Steps of k that are no multiple of them; in a block for each tile, in two for one, and in blocks that stay."""
    form = Format(130, 128 * 13, "int4", 128, "bf16")
    tile = SMALL | {"tokens": 16, "warpgroups": 4, "ways": ways, "stages": 8, "turns": 1, "shares": 1}
    wide = tile | {"warpgroups": 2, "ways": 1, "turns": ways}
    for splits in (1, 2):
        results = [check(form, 20, config=each | {"splits": splits}) for each in (tile, wide, wide | {"warpgroups": 3})]
        assert np.array_equal(*results[:2])
        assert np.array_equal(*results[1:])
    staying, plain = (check(form, 40, config=wide | each) for each in ({"splits": 1}, {"runs": 4}))
    assert np.array_equal(staying, plain)
    assert not np.array_equal(results[0], check(form, 20, config=wide | {"turns": 1, "splits": 2}))
    for each in ({"splits": 1}, {"runs": 4}):  # one block has the parts of both
        assert np.array_equal(results[0], check(form, 20, config=wide | each | {"shares": 2}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [16, 48])
def test_a_block_adds_up_a_pair_of_parts(tokens):
    """Of two or four, as blocks with one each do. The last part takes the third one off, so that an order shows."""
    form, file = Format(130, 1024, "int4", 128, "bf16"), "wgmma_quantized.cu"
    codes, scales, *_ = logical(form)
    codes[:, 768:], scales[:, 6:] = codes[:, 512:768], scales[:, 4:6]
    x = np.random.default_rng(3).standard_normal((50, 1024))
    x[:, 512:768] *= 4096
    x[:, 768:] = -x[:, 512:768]
    tile = SMALL | {"tokens": tokens, "warpgroups": 2, "ways": 1, "stages": 4}
    one_by_one = edited(file, "i += 2) {", "++i) {")[file].replace("block + i + 1 <=", "0 >")
    for parts in (2, 4):
        each, pairs = {"splits": parts}, {"splits": parts // 2, "shares": 2}
        results = []
        for config, texts in ((each, None), (pairs, None), (each, {file: one_by_one})):
            result, findings = multiplied(form, x.astype(TYPES["bf16"]), (codes, scales), tile | config, texts)
            assert findings == []
            results.append(result)
        assert np.array_equal(results[0], results[1])
        assert np.array_equal(results[0], results[2]) is (parts == 2)


def test_invariant_products_add_in_one_order():
    """A row has the same bits alone, among 70 and among 300, whose tiles differ; n and k say in how many parts."""
    form = Format(130, 1024, "int4", 128, "f16")
    rows = [emulated(form, m, invariant=True)[0][:1] for m in (1, 70, 300)]
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])
    for sides in ((130, 1024), (4096, 4096), (4096, 14336), (8192, 28672), (28672, 8192)):
        form, parts, tiles = Format(*sides, "int4", 128, "bf16"), set(), set()
        for m in (1, 9, 33, 200, 700):
            choice = variant_of(problem(form, m)._replace(invariant=True), form, KNOWN["h200"])
            assert 1 in (choice["ways"], choice["turns"])
            parts.add((choice["ways"] * choice["turns"], choice["splits"] * choice["shares"]))
            tiles.add(choice["tokens"])
        assert len(parts) == 1
        assert len(tiles) > 2


PAIR = SMALL | {"tokens": 48, "warpgroups": 2, "ways": 1, "stages": 3, "splits": 2}


@pytest.mark.parametrize(
    ("config", "order"), [(PAIR, 1), (PAIR, 2), (PAIR | {"splits": 4}, 3), (PAIR | {"runs": 3}, 2)]
)
def test_the_last_of_two_blocks_keeps_its_part(config, order):
    """Of more than 32 tokens; of four blocks it reads its own again, and blocks that stay share some of their tiles."""
    check(Format(64, 512, "int4", 128, "bf16"), 90 if config["runs"] else 41, config=config, order=order)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("wgmma_quantized.cu", "one = last = one + last - int(blockIdx.x);", "one = last = int(blockIdx.x);"),
        ("wgmma_quantized.cu", "while (written && ", "while (false && "),
        ("ptx.cuh", "red.release.gpu", "red.relaxed.gpu"),
    ],
)
def test_parts_of_two_blocks_that_are_wrong_are_told(file, old, new):
    form, texts = Format(64, 512, "int4", 128, "bf16"), edited(file, old, new)
    try:
        result, exact, size, findings = emulated(form, 41, config=PAIR, order=1, texts=texts)
    except (AssertionError, EmulationError):
        return
    assert findings or not np.all(np.abs(result - exact) <= 2.0**-8 * np.abs(exact) + 2.0**-14 * size)
