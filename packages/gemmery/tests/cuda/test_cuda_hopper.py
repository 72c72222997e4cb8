"""The choice of a configuration for wgmma kernels: few instances, whole rounds, and the table before the model."""

import itertools

import pytest

from gemmery.api import prepared
from gemmery.cuda import choose
from gemmery.cuda.choose import cost, legal
from gemmery.cuda.choose.data import INSTANCES, WINNERS, Instance
from gemmery.cuda.device import KNOWN
from gemmery.problem import Problem

H200 = KNOWN["h200"]
SIDES = (1, 64, 128, 250, 1000, 1024, 2048, 3000, 4096, 4097, 8192, 16384)
MOST_SHARED = 227 << 10


def product(m, n, k, dtype="bf16", out="", a="row", b="col", batch=1, aligned=16):
    return Problem(m, n, k, dtype, out or dtype, batch, a, b, alignments=(aligned, aligned, 16))


def instance(config):
    return tuple(config[key] for key in ("bm", "bn", "stages", "cm", "cn"))


@pytest.mark.parametrize(("dtype", "out"), [("bf16", "bf16"), ("f16", "f32"), ("int8", "int32"), ("f32", "f32")])
@pytest.mark.parametrize("b", ["row", "col"])
def test_every_shape_runs_one_of_few_instances(dtype, out, b):
    problems = [product(m, n, k, dtype, out, b=b) for m, n, k in itertools.product(SIDES, SIDES, (0, 64, 4096))]
    configs = [choose.chosen(problem, H200) for problem in problems]
    assert len({instance(config) for config in configs}) <= 27
    for config in configs:
        assert tuple(config) == choose.KEYS
        assert all(value > 0 for key, value in config.items() if key != "blocks")
        assert config["stages"] * (config["bm"] + config["bn"]) * cost.ROW < MOST_SHARED


def test_boxes_of_64_columns_have_room():
    for m, n in itertools.product(SIDES, SIDES):
        config = choose.chosen(product(m, n, 4096, b="row"), H200)
        wide = -(-config["bn"] // 64) * 64
        assert config["stages"] * (config["bm"] + wide) * cost.ROW < MOST_SHARED


def test_a_square_takes_whole_rounds():
    config = choose.chosen(product(4096, 4096, 4096), H200)
    assert (config["bm"], config["bn"], config["blocks"]) == (128, 256, 128)


def test_rows_that_straddle_lines_take_clusters_or_larger_tiles():
    demand = cost.demand_of(product(5000, 5000, 5000))
    assert demand.a_more == demand.b_more == cost.STRADDLING / 16
    shared = [tile for tile in INSTANCES if tile[:2] == (128, 256)]
    alone, pair = (cost.cycles(demand, tile, 1, H200) for tile in shared)
    assert pair < alone


def test_operands_that_are_packed_have_whole_lines():
    demand = cost.demand_of(product(4095, 4097, 4099, aligned=2))
    assert (demand.a_more, demand.b_more) == (0, 0)


def test_few_tiles_split_k_unless_the_kernel_cannot():
    few = product(128, 1024, 8192)
    assert choose.chosen(few, H200)["splits"] > 1
    assert choose.chosen(few, H200, split=False)["splits"] == 1
    assert choose.chosen(product(8192, 8192, 8192), H200)["splits"] == 1


@pytest.fixture
def unknown():
    """No product has a configuration yet."""
    choose._chosen.cache_clear()
    yield
    choose._chosen.cache_clear()


def test_k_is_split_only_by_blocks_that_share_nothing_else():
    configs = [choose.chosen(product(m, n, 16384), H200) for m in (64, 128, 256) for n in range(512, 9000, 512)]
    assert any(config["splits"] > 1 for config in configs)
    assert all(config["cm"] == config["cn"] == 1 for config in configs if config["splits"] > 1)


def test_a_split_that_is_chosen_is_one_that_the_kernel_takes():
    shapes = itertools.product((5, 45, 105, 200), (256, 640, 1104), (1384, 2544, 5400))
    for (m, n, k), b in itertools.product(shapes, ("row", "col")):
        case = product(m, n, k, b=b)
        config = choose.chosen(case, H200)
        tile = Instance(*instance(config))
        assert not legal.illegal(case, tile)
        assert config["splits"] == 1 or not legal.split_refusal(tile, config["splits"])


def test_few_rows_take_a_ring_that_keeps_enough_of_b_under_way():
    for m, b in itertools.product((1, 16, 64, 128), ("row", "col")):
        case = product(m, 4096, 4096, b=b)._replace(invariant=True)
        config = choose.chosen(case, H200)
        columns = min(4096, H200.sms * config["bn"])
        assert config["splits"] == 1
        assert columns * config["stages"] * cost.ROW >= 6 << 20  # bytes; 4 MB reach 3.2 TB/s, 8 MB 3.9


def test_rows_that_end_within_a_second_tile_of_64_take_a_taller_one():
    """A copy takes longer for a row beyond the edge than for one of the matrix."""
    for m, invariant in itertools.product((65, 100, 111), (False, True)):
        case = product(m, 4096, 14336)._replace(invariant=invariant)
        assert choose.chosen(case, H200)["bm"] == 128
        assert choose.chosen(case._replace(k=1024, invariant=True), H200)["bm"] == 64
        assert choose.chosen(case._replace(n=5000, k=5000, invariant=True), H200)["bm"] in (72, 104, 120)
    for m in (64, 112, 128):
        assert choose.chosen(product(m, 4096, 14336)._replace(invariant=True), H200)["bm"] == 64


@pytest.mark.parametrize("k", [4096, 7168, 14336])
def test_128_rows_by_4096_need_no_split(k):
    """Pairs that share B are faster, so that batch invariance costs nothing there."""
    case = product(128, 4096, k)
    assert choose.chosen(case, H200) == choose.chosen(case._replace(invariant=True), H200)


@pytest.mark.parametrize(("m", "n"), [(0, 64), (64, 0), (0, 0)])
def test_a_product_without_elements_has_a_configuration(m, n):
    """Nothing is launched for it, but its geometry may be asked for."""
    assert all(choose.chosen(product(m, n, 64), H200).values())


def test_no_block_of_a_cluster_lacks_rows():
    for m, n, k in itertools.product((1, 64, 100, 128, 200), range(512, 30000, 1536), (512, 4096)):
        config = choose.chosen(product(m, n, k)._replace(invariant=True), H200)
        assert config["bm"] * (config["cm"] - 1) < m


def test_the_table_comes_before_the_model(monkeypatch, unknown):
    size = choose.size_class(product(4096, 4096, 4096))
    monkeypatch.setattr(choose, "WINNERS", {132: {size: (64, 128, 8, 1, 1, 2)}})
    config = choose.chosen(product(4096, 4096, 4096), H200)
    assert (*instance(config), config["splits"]) == (64, 128, 8, 1, 1, 2)
    assert choose.chosen(product(4096, 4096, 4096), H200, split=False)["splits"] == 1
    assert choose.chosen(product(4096, 4096, 4096, b="row"), H200)["bm"] == 128
    assert choose.chosen(product(4096, 4096, 4096, batch=2), H200)["bm"] == 128


def test_rows_of_an_order_are_not_more_than_there_are():
    assert choose.order(INSTANCES[0], 3 * 128, 100 * 256, 1, H200)[0] == 3


def test_eight_rows_take_a_ring_of_their_own():
    few = product(8, 4096, 4096)
    for case in (few, few._replace(m=1, invariant=True)):
        assert instance(choose.chosen(case, H200)) == (8, 32, 24, 1, 1)
    for case in (few._replace(m=9), few._replace(b_layout="row"), few._replace(k=256), few._replace(a_layout="col")):
        assert choose.chosen(case, H200)["bm"] > 8


@pytest.mark.parametrize(
    ("n", "k", "tile"),
    [
        (14336, 4096, (8, 112, 8)),
        (8192, 8192, (8, 64, 12)),
        (5120, 13824, (8, 96, 10)),
        (6144, 4096, (64, 64, 8)),
        (16384, 4096, (8, 64, 12)),  # this and the next were not measured
        (5120, 8192, (8, 64, 12)),
    ],
)
def test_eight_rows_have_the_columns_that_were_measured(n, k, tile):
    for m, invariant in ((8, True), (8, False), (1, True)):
        assert instance(choose.chosen(product(m, n, k)._replace(invariant=invariant), H200))[:3] == tile
    assert choose.chosen(product(9, n, k), H200)["bm"] > 8


def test_bands_have_as_many_rows_as_each_other():
    tile = Instance(192, 192, 4, 2, 1)
    assert [choose.order(tile, 192 * rows, 192 * 16, 1, H200)[0] for rows in (16, 24, 26)] == [
        4,
        6,
        5,
    ]  # of clusters of two


def test_a_grid_of_whole_columns_takes_as_many_rounds_of_clusters():
    """2600 squared has 21 rows of 128 and 12 columns of 224: 11 by 12 pairs, of which 66 run at a time, not 64."""
    pair = Instance(128, 224, 4, 2, 1)
    assert choose.order(pair, 2600, 2600, 1, H200)[1] == 0
    assert choose.order(pair._replace(cm=1), 2600, 2600, 1, H200)[1] == 128
    assert choose.order(pair._replace(cm=1, cn=2), 12 * 128, 21 * 224, 1, H200)[1] == 0
    for m, n in itertools.product(range(200, 6000, 360), repeat=2):
        config = choose.chosen(product(m, n, 1000), H200)
        if config["blocks"]:
            rows, columns = (-(-side // config[tile]) for side, tile in ((m, "bm"), (n, "bn")))
            clusters = -(-rows // config["cm"]) * -(-columns // config["cn"])
            each = config["cm"] * config["cn"]
            assert -(-clusters // (128 // each)) == -(-clusters // (132 // each))


def test_some_tiles_are_only_for_rows_that_straddle():
    def takes(m, n, k):
        config = choose.chosen(product(m, n, k), H200)
        tiles = [tile[:5] for tile in INSTANCES if tile.known == "straddle"]
        return tuple(config[key] for key in ("bm", "bn", "stages", "cm", "cn")) in tiles

    assert takes(3400, 3400, 3400)
    assert takes(1080, 1080, 1080)
    assert not any(takes(m, n, k) for m, n, k in itertools.product((1080, 3400), (1080, 3400), (1088, 3392)))
    assert not takes(5400, 5400, 5400)  # too many rounds


@pytest.mark.parametrize(("m", "n", "k"), [(200, 200, 200), (424, 424, 424), (392, 576, 1432), (128, 1000, 1000)])
def test_narrow_tiles_are_not_for_rows_that_straddle(m, n, k):
    """But for those whose blocks share rows."""
    tile = choose.chosen(product(m, n, k), H200)
    assert tile["bn"] > 32 or tile["cn"] > 1


def test_a_ring_for_wide_boxes_has_fewer_stages():
    products = product(5000, 5000, 5000), product(5000, 5000, 5000, b="row")
    deep, shallow = (tile for tile in INSTANCES if tile[:2] == (256, 160))
    assert [deep in legal.instances(each) for each in products] == [True, False]
    assert [shallow in legal.instances(each) for each in products] == [True, True]
    assert deep not in legal.instances(product(5000, 5000, 5000, "bf16", "f32"))


def test_what_may_be_split_is_known_without_the_model():
    """General kernels, whose sums have no parts, serve no product that is split later."""
    for m, n, k in itertools.product((8, 64, 100, 512, 2048), (8, 64, 1000, 4096, 8192), (64, 512, 1000, 1024, 4096)):
        if choose.chosen(product(m, n, k), H200)["splits"] > 1:
            assert choose.may_split(m, n, k, 1, H200) or 2 * m * n * k >= prepared.MEDIUM
    for sizes, winner in ((key[3:], winner) for table in WINNERS.values() for key, winner in table.items()):
        (tall, wide), k = sizes[:2], 2 ** (sizes[2] / 4)
        if winner[5] > 1:
            assert (
                choose.may_split(64 * tall, 32 * wide, round(k * 1.1), 1, H200)
                or 4096 * tall * wide * k >= prepared.MEDIUM
            )
