"""Plans of products over ranks, against counts made by hand, also for 4 and 8 ranks."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest

import gemmery.distributed as gd
from gemmery.distributed import layouts
from gemmery.distributed.plan import gather_events, length, plan, scatter_events
from gemmery.errors import ArgumentError, ShapeError

ROWS, COLUMNS, COPIES, SUMMANDS = gd.Shard(0), gd.Shard(1), gd.Replicate(), gd.Partial()
MIB = 2**20


def test_rows_times_rows_gathers_b():
    """8 x 8 x 8 over 4 ranks: each misses 3 of 4 parts of B, of 2 rows of 8 elements of 2 bytes."""
    a = gd.even((8, 8), (4,), (ROWS,))
    found = gd.explain(a, a, dtype="bf16", ways="m")
    assert found.links == {(s, r): 2 * 8 * 2 for s in range(4) for r in range(4) if s != r}
    assert found.received == 3 * 32
    assert found.out.placements == (ROWS,)
    assert found.arrival == pytest.approx(96 / 350e9 + 3 * 15e-6)
    assert found.product == pytest.approx(2 * 2 * 8 * 8 / 785e12)
    assert found.joining == 0


def test_blocks_over_two_by_two_ranks_are_summa():
    """4096 cubed: a rank misses one block of A of its row of ranks and one of B of its column, 8 MiB each."""
    a = gd.even((4096, 4096), (2, 2), (ROWS, COLUMNS))
    found = gd.explain(a, a, dtype="bf16")
    assert (found.ways, found.algorithm) == ("mn", "SUMMA")
    block = 2048 * 2048 * 2
    assert found.links == dict.fromkeys(((0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)), block)
    assert found.received == 2 * block == 16 * MIB
    assert found.out.placements == (ROWS, COLUMNS)


def test_blocks_over_two_by_four_ranks():
    """8 ranks: parts of A are 2048 x 1024, of which a rank misses 3; of B 2048 x 1024, of which it misses 1."""
    a = gd.even((4096, 4096), (2, 4), (ROWS, COLUMNS))
    found = gd.explain(a, a, dtype="bf16", ways="mn")
    part = 2048 * 1024 * 2
    assert found.received == 4 * part
    assert set(found.links.values()) == {part}
    assert len(found.links) == 8 * 4


def test_a_long_k_is_cut_and_added_in_rank_order():
    """8 ranks: of 64 x 64 sums in float32 each rank gets 8 rows from 7 others."""
    a, b = gd.even((64, 2**20), (8,), (COLUMNS,)), gd.even((2**20, 64), (8,), (ROWS,))
    found = gd.explain(a, b, dtype="f16")
    assert found.ways == "k"
    assert found.links == {(s, r): 8 * 64 * 4 for s in range(8) for r in range(8) if s != r}
    assert found.received == 7 * 8 * 64 * 4
    assert found.out.placements == (ROWS,)
    order = [sender for sender, _ in layouts.sources(found.c, found.out.placements, found.out.boxes[5], 5)]
    assert order == list(range(8))


def test_a_third_dimension_cuts_k():
    """2 x 2 x 2 ranks, 8 cubed, bf16: rank (0, 0, 1) misses 4 x 4 of A and of B, and 2 x 4 sums in float32."""
    a = gd.even((8, 8), (2, 2, 2), (ROWS, COLUMNS, COPIES))
    found = gd.explain(a, a, dtype="bf16", ways="mnk")
    assert found.algorithm == "2.5-dimensional SUMMA"
    into = {rank: sum(count for (_, to), count in found.links.items() if to == rank) for rank in range(8)}
    assert into[0] == 32  # it has what it multiplies
    assert into[1] == found.received == 2 * 4 * 4 * 2 + 2 * 4 * 4


def test_a_gpu_out_of_1024():
    """32 x 32 ranks: 31 parts of a row of A and 31 of a column of B come, from 8 GPUs a host."""
    a = gd.even((32768, 32768), (32, 32), (ROWS, COLUMNS))
    found = gd.explain(a, a, dtype="bf16", ways="mn")
    part = 1024 * 1024 * 2
    assert found.received == 62 * part
    # A host has 8 GPUs, all of one row of the mesh.
    near, far = 7 * part, 55 * part
    expected = near / 350e9 + far / 50e9 + 62 * 15e-6
    assert found.arrival == pytest.approx(expected)


def test_memory_counts_operands_pieces_and_sums():
    a, b = gd.even((64, 32), (2,), (COLUMNS,)), gd.even((32, 16), (2,), (ROWS,))
    found = plan(a, b, "f32", ways="k")
    # 64 x 16 of A and 16 x 16 of B held; C 64 x 16; 32 x 16 of it come; the result has 32 x 16
    assert found.stored == 4 * (64 * 16 + 16 * 16 + 64 * 16 + 32 * 16 + 32 * 16)


@pytest.mark.parametrize("mesh", [(1,), (3,), (8,), (2, 4), (2, 2, 2)], ids=str)
def test_steps_multiply_every_triple_once(mesh):
    places = ((ROWS, COLUMNS, COPIES) * 2)[: len(mesh)]
    a, b = gd.even((12, 37), mesh, places), gd.even((37, 11), mesh, places)
    sides = set()
    for ways in ("mnk"[: len(mesh)], "m-k"[: len(mesh)], "nmk"[: len(mesh)]):
        found = plan(a, b, "f32", ways=ways, steps=5)
        sides.add(found.along)
        for rank, (of_a, of_b) in enumerate(zip(found.a_target.boxes, found.b_target.boxes, strict=True)):
            count = np.zeros((12, 11, 37), int)
            for step in range(5):
                x, y = found.operands(rank, step)
                assert x[2:] == y[:2]
                count[x.top : x.bottom, y.left : y.right, x.left : x.right] += 1
            assert (count[of_a.top : of_a.bottom, of_b.left : of_b.right, of_a.left : of_a.right] == 1).all()
            assert count.sum() == (of_a.bottom - of_a.top) * of_b.size
    assert sides - {"k"} or len(mesh) > 1


def test_ranks_that_compute_the_same_begin_in_the_same_place():
    """Else their sums, and the last bits of copies of C, would differ."""
    a, b = gd.even((8, 40), (2, 3), (ROWS, COLUMNS)), gd.even((40, 8), (2, 3), (COLUMNS, ROWS))
    found = plan(a, b, "f32", ways="k-", steps=4)
    assert found.along == "k"
    pieces = [[found.piece(rank, step) for step in range(4)] for rank in range(6)]
    assert pieces[0] == pieces[1] == pieces[2]
    assert pieces[3] == pieces[4] == pieces[5]
    assert pieces[0] != pieces[3]


@pytest.mark.parametrize("seed", range(20))
def test_parts_that_dtensor_would_make_give_its_layout(seed):
    rng = np.random.default_rng(seed)
    mesh = tuple(int(x) for x in rng.integers(1, 4, int(rng.integers(1, 4))))
    places = tuple((ROWS, COLUMNS, COPIES, SUMMANDS)[i] for i in rng.integers(0, 4, len(mesh)))
    want = gd.even(tuple(int(x) for x in rng.integers(0, 9, 2)), mesh, places)
    found = layouts.of_parts([box.shape for box in want.boxes], mesh, places)
    assert found.shape == want.shape
    assert all(one == two for one, two in zip(found.boxes, want.boxes, strict=True) if one.size)
    owners = np.zeros(want.shape, int)
    for box in want.boxes:
        owners[box.top : box.bottom, box.left : box.right] += 1
    copies = math.prod(size for size, p in zip(mesh, places, strict=True) if not isinstance(p, gd.Shard))
    assert (owners == copies).all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_ranks_do_in_the_products_of_layers(ranks):
    """No part is multiplied before it came, none is sent before it is computed, and the work is what one rank has."""
    for events, product in ((gather_events(1024, 8192, 4096, ranks), 1), (scatter_events(1024, 8192, 4096, ranks), 0)):
        assert length(events) > 2 * 1024 * 8192 * 4096 / ranks / 785e12
        for rank in range(ranks):
            mine = [event for event in events if event.rank == rank]
            work = [event for event in mine if event.what == "multiply"]
            assert sorted(event.part for event in work) == list(range(ranks))
            assert all(one.end <= two.start for one, two in pairwise(work))
            assert work[0 if product else -1].part == rank
            sends = [event for event in mine if event.what == "send"]
            assert len(sends) == ranks - 1
            if not product:
                done = {event.part: event.end for event in work}
                assert all(done[event.part] <= event.start for event in sends)
                assert [event.part for event in mine if event.what == "add"] == [rank]


def test_what_does_not_fit_is_refused_in_words():
    a = gd.even((8, 4), (2,), (ROWS,))
    with pytest.raises(ShapeError, match="as many columns"):
        gd.explain(a, a)
    with pytest.raises(ShapeError, match="mesh"):
        gd.explain(a, gd.even((4, 8), (2, 1), (ROWS, ROWS)))
    with pytest.raises(ArgumentError, match="placements"):
        gd.even((8, 4), (2, 2), (ROWS,))
    with pytest.raises(ArgumentError, match="rows"):
        gd.even((8, 4), (2,), (gd.Shard(2),))
    with pytest.raises(ArgumentError, match="ways"):
        gd.explain(a, gd.even((4, 8), (2,), (ROWS,)), ways="mn")
    with pytest.raises(ArgumentError, match="DTensors"):
        gd.explain(a, np.ones((4, 8)))
    b = gd.even((4, 8), (2,), (ROWS,))
    for wrong in ({"steps": -1}, {"steps": 1.5}, {"steps": "x"}, {"steps": [1]}, {"steps": 10**9}, {"ways": 3}):
        [(name, value)] = wrong.items()
        with pytest.raises(ArgumentError, match=re.escape(f"{name}={value!r}")):
            gd.explain(a, b, **wrong)
    with pytest.raises(ArgumentError, match="at least one rank"):
        gd.even((8, 4), (0,), (ROWS,))
    with pytest.raises(ArgumentError, match=r"'rows': it is gd\.Shard"):
        gd.even((8, 4), (2,), ("rows",))
    with pytest.raises(ShapeError, match="two dimensions"):
        gd.even((8,), (2,), (ROWS,))
    for shape in (None, 8, "ab", (8.0, 4), (-1, 4), np.ones(2)):
        with pytest.raises(ArgumentError, match=r"^shape=.*: pass a tuple of whole numbers"):
            gd.even(shape, (2,), (ROWS,))
    with pytest.raises(ArgumentError, match=r"^mesh=2: pass a tuple"):
        gd.even((8, 4), 2, (ROWS,))
    with pytest.raises(ArgumentError, match=r"^placements=Shard.*: pass a tuple"):
        gd.even((8, 4), (2,), ROWS)
    assert gd.even([8, 4], [2], [ROWS]) == a
    with pytest.raises(ArgumentError, match=r"^speeds=1: pass a gd\.Speeds"):
        gd.explain(a, b, speeds=1)
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match=r"is \(1,\): pass a tuple of the names"):
        gd.parallelize(torch.nn.Linear(2, 2), None, columns=(1,))
    with pytest.raises(ArgumentError, match="model=3"):
        gd.parallelize(3, None)


def test_the_plan_in_words():
    a = gd.even((4096, 4096), (4,), (ROWS,))
    text = str(gd.explain(a, a, dtype="bf16"))
    assert "4096 x 4096 x 4096 bf16 over 4 ranks (4)" in text
    assert "rank 0 -> rank 1: 8 MiB" in text


# The products of layers over 4 and 8 GPUs: m, n, k, and MiB on each link. Of the gather a rank sends its rows of x, in
# bf16; of the scatter it sends m / ranks rows of n sums in float32.
GATHERS = [
    (8192, 28672, 8192, {4: 32, 8: 16}),
    (4096, 14336, 4096, {4: 8, 8: 4}),
    (2048, 8192, 8192, {4: 8, 8: 4}),
    (512, 8192, 8192, {4: 2, 8: 1}),
]
SCATTERS = [
    (8192, 8192, 28672, {4: 64, 8: 32}),
    (4096, 4096, 14336, {4: 16, 8: 8}),
    (2048, 8192, 8192, {4: 16, 8: 8}),
    (512, 8192, 8192, {4: 4, 8: 2}),
]


def of_layer(shape, ranks, size, ways):
    m, n, k = shape
    places = (ROWS, COLUMNS) if ways == "n" else (COLUMNS, ROWS)
    a, b = (gd.even(sides, (ranks,), (place,)) for sides, place in zip(((m, k), (k, n)), places, strict=True))
    found = gd.explain(a, b, dtype="bf16", ways=ways)
    pairs = [(s, r) for s in range(ranks) for r in range(ranks) if s != r]
    assert found.links == dict.fromkeys(pairs, size * MIB)
    assert found.received == (ranks - 1) * size * MIB
    assert found.product == pytest.approx(2 * m * n * k / ranks / 785e12)
    text = str(found)
    assert f"{m} x {n} x {k} bf16 over {ranks} ranks" in text
    assert text.count(f": {size} MiB") == len(pairs)
    return found, text


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(("m", "n", "k", "sizes"), GATHERS, ids=str)
def test_gathers_over_four_and_eight(m, n, k, sizes, ranks):
    """All but a step of the rows comes while others are multiplied."""
    found, text = of_layer((m, n, k), ranks, sizes[ranks], "n")
    coming = (ranks - 1) * (sizes[ranks] * MIB / 350e9 + 15e-6)
    steps = max(1, (ranks - 1) * sizes[ranks] // 32)
    assert found.steps == steps
    hidden = min(coming, found.product) * (steps - 1) / steps
    assert found.arrival == pytest.approx(coming)
    assert found.seconds == pytest.approx(coming + found.product - hidden)
    assert f"predicted {found.seconds * 1e6:.4g} us" in text or f"predicted {found.seconds * 1e3:.4g} ms" in text


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(("m", "n", "k", "sizes"), SCATTERS, ids=str)
def test_scatters_over_four_and_eight(m, n, k, sizes, ranks):
    """C is joined when all of it is there: sums are sent, and those that come are read and added to m x n own ones."""
    found, _ = of_layer((m, n, k), ranks, sizes[ranks], "k")
    coming = (ranks - 1) * sizes[ranks] * MIB
    joining = coming / 350e9 + (ranks - 1) * 15e-6 + (coming + 4 * m * n) / 4.0e12
    assert (found.arrival, found.out.placements) == (0, (ROWS,))
    assert found.joining == pytest.approx(joining)
    assert found.seconds == pytest.approx(joining + found.product)


# Squares: the layout, MiB on each link, and how many ranks send to each.
SQUARES = [
    (16384, (4,), 128, 3),
    (32768, (4,), 512, 3),
    (16384, (8,), 64, 7),
    (32768, (8,), 256, 7),
    (16384, (2, 2), 128, 2),
    (32768, (2, 2), 512, 2),
    (16384, (2, 4), 64, 4),
    (32768, (2, 4), 256, 4),
]


@pytest.mark.parametrize(("n", "mesh", "size", "senders"), SQUARES, ids=str)
def test_squares_over_four_and_eight(n, mesh, size, senders):
    """By rows each rank misses all other parts of B; by blocks, those of A in its row of ranks, of B in its column."""
    ranks = math.prod(mesh)
    a = gd.even((n, n), mesh, (ROWS, COLUMNS)[: len(mesh)])
    found = gd.explain(a, a, dtype="bf16", ways="mn"[: len(mesh)])
    assert len(found.links) == ranks * senders
    assert set(found.links.values()) == {size * MIB}
    assert found.received == senders * size * MIB
    assert found.product >= 2 * n**3 / ranks / 785e12
    arrival = senders * (size * MIB / 350e9 + 15e-6)
    assert found.arrival == pytest.approx(arrival)
    hidden = min(arrival, found.product) * (found.steps - 1) / found.steps
    assert found.seconds == pytest.approx(found.product + arrival - hidden)
    rows, everywhere = (gd.even((n, n), mesh, (place,) * len(mesh)) for place in (ROWS, COPIES))
    assert gd.explain(rows, everywhere, dtype="bf16").links == {}
