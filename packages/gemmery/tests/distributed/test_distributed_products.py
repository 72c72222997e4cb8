"""Products over ranks that are threads of this process: the messages are those of real ranks."""

import math
import queue
import threading
from itertools import product

import numpy as np
import pytest

import gemmery.distributed as gd
from gemmery.distributed import layouts, products
from gemmery.distributed.plan import plan
from gemmery.errors import ArgumentError, DTypeError, ShapeError
from parts_of_matrices import joined, parts

ROWS, COLUMNS, COPIES, SUMMANDS = gd.Shard(0), gd.Shard(1), gd.Replicate(), gd.Partial()
PLACES = (ROWS, COLUMNS, COPIES, SUMMANDS)


class Request:
    def __init__(self, wait):
        self.Wait = wait


class Comm:
    """A communicator whose ranks are threads, with the methods of mpi4py that are used."""

    def __init__(self, size):
        self.size, self.barrier, self.told = size, threading.Barrier(size, timeout=20), [None] * size
        self.boxes = {pair: queue.Queue() for pair in product(range(size), repeat=2)}
        self.sent = {}

    def at(self, rank):
        return Rank(self, rank)


class Rank:
    def __init__(self, comm, rank):
        self.comm, self.rank = comm, rank

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.comm.size

    def allgather(self, value):
        self.comm.barrier.wait()
        self.comm.told[self.rank] = value
        self.comm.barrier.wait()
        return list(self.comm.told)

    def Isend(self, array, peer):
        self.comm.boxes[self.rank, peer].put(array.copy())
        pair = self.rank, peer
        self.comm.sent[pair] = self.comm.sent.get(pair, 0) + array.nbytes
        return Request(lambda: None)

    def Irecv(self, array, peer):
        def wait():
            array[...] = self.comm.boxes[peer, self.rank].get(timeout=20)

        return Request(wait)


def on_ranks(size, function):
    """Run function(rank's communicator) on threads; return results, the messages, or raise what the first rank did."""
    comm, found, errors = Comm(size), [None] * size, [None] * size

    def run(rank):
        try:
            found[rank] = function(comm.at(rank))
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, comm, errors


def check(mesh, of_a, of_b, shape, out=None, dtype=np.float32, **options):
    m, n, k = shape
    rng = np.random.default_rng(abs(hash((mesh, of_a, of_b, shape))) % 2**32)
    a, b = (rng.integers(-3, 4, size).astype(dtype) for size in ((m, k), (k, n)))
    held = layouts.even((m, k), mesh, of_a), layouts.even((k, n), mesh, of_b)
    mine = [parts(x, layout, rng) for x, layout in zip((a, b), held, strict=True)]

    def one(comm):
        x, y = (part[comm.rank] for part in mine)
        return gd.matmul(x, y, group=comm, placements=(of_a, of_b), mesh=mesh, out=out, **options)

    found, comm, errors = on_ranks(math.prod(mesh), one)
    assert not any(errors), errors
    name = np.dtype(dtype).name
    chosen = plan(*held, products._types(a, b, None)[0], "", out, products._speeds(a), **options)
    want = a.astype(np.complex128) @ b.astype(np.complex128)
    np.testing.assert_array_equal(joined(found, chosen.out, dtype), want, err_msg=f"{name} {chosen}")
    assert comm.sent == chosen.links
    return chosen


@pytest.mark.parametrize("out", [None, *PLACES], ids=str)
def test_every_pair_of_placements_on_three_ranks(out):
    for of_a, of_b in product(PLACES, repeat=2):
        check((3,), (of_a,), (of_b,), (7, 5, 8), None if out is None else (out,))


@pytest.mark.many
@pytest.mark.parametrize("of_a", list(product(PLACES, repeat=2)), ids=layouts.words)
def test_every_pair_of_placements_on_two_by_two_ranks(of_a):
    for of_b in product(PLACES, repeat=2):
        check((2, 2), of_a, of_b, (5, 6, 7))
        check((2, 2), of_a, of_b, (5, 3, 9), (ROWS, COLUMNS), steps=3)


@pytest.mark.parametrize("shape", [(2, 3, 9), (0, 3, 4), (3, 0, 4), (3, 2, 0), (1, 1, 1), (9, 1, 2)], ids=str)
def test_fewer_rows_than_ranks_and_empty_matrices(shape):
    for of_a, of_b in product(PLACES, repeat=2):
        check((4,), (of_a,), (of_b,), shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int32", "complex64"])
@pytest.mark.parametrize("steps", [1, 4])
def test_element_types(dtype, steps):
    pytest.importorskip("ml_dtypes")
    dtype = np.dtype(dtype)
    for ways in "mnk-":
        check((3,), (COLUMNS,), (ROWS,), (6, 5, 11), dtype=dtype, steps=steps, ways=ways)


@pytest.mark.parametrize("ways", ["mnk", "kmn", "mmk", "nk-", "kkk"])
def test_three_dimensions(ways):
    check((2, 2, 2), (ROWS, COLUMNS, COPIES), (ROWS, COLUMNS, SUMMANDS), (9, 8, 13), ways=ways, steps=2)


@pytest.mark.parametrize("seed", range(6))
def test_random_parts_shapes_and_ways(seed):
    """Parts of any sizes, which no rule gives, in random floating-point numbers."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 6))
    m, n, k = (int(x) for x in rng.integers(1, 40, 3))
    dtype = [np.float32, np.float64, np.complex128][seed % 3]
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n)))
    dims = [int(x) for x in rng.integers(0, 2, 2)]
    cuts = [np.sort(rng.integers(0, x.shape[dim] + 1, size - 1)) for x, dim in zip((a, b), dims, strict=True)]
    mine = [np.split(x, cut, axis=dim) for x, cut, dim in zip((a, b), cuts, dims, strict=True)]
    places = tuple(gd.Shard(dim) for dim in dims)
    run = lambda comm: gd.matmul(  # noqa: E731
        *(x[comm.rank] for x in mine), group=comm, placements=places, out=COPIES, steps=int(1 + seed % 3)
    )
    found, _, errors = on_ranks(size, run)
    assert not any(errors), errors
    bound = 2 * (k + size + 3) * np.finfo(dtype).eps * (np.abs(a) @ np.abs(b))
    for part in found:
        assert (np.abs(part - a.astype(np.complex128) @ b) <= bound).all()
    again, _, _ = on_ranks(size, run)
    for one, two in zip(found, again, strict=True):
        assert one.tobytes() == two.tobytes()


def test_ranks_multiply_before_they_agree_if_nothing_is_sent(monkeypatch):
    """The second call of a kind; what another rank says then may still change or refuse it."""
    multiply, allgather = products.multiply, Rank.allgather
    order = {0: [], 1: []}
    ranks = {}

    def counted(*operands, **options):
        order[ranks[threading.get_ident()]].append("multiply")
        return multiply(*operands, **options)

    def gathered(self, value):
        order[self.rank].append("agree")
        return allgather(self, value)

    monkeypatch.setattr(products, "multiply", counted)
    monkeypatch.setattr(Rank, "allgather", gathered)
    a, b = np.arange(56.0).reshape(8, 7), np.arange(35.0).reshape(7, 5)

    def call(cut, b=b):
        def one(comm):
            ranks[threading.get_ident()] = comm.rank
            order[comm.rank].clear()
            mine = np.split(a, [cut])[comm.rank]
            return gd.matmul(mine, b[comm.rank] if isinstance(b, list) else b, group=comm, placements=(ROWS, COPIES))

        return on_ranks(2, one)

    for cut in (3, 3, 5):
        found, comm, errors = call(cut)
        assert not any(errors)
        np.testing.assert_array_equal(np.concatenate(found), a @ b)
        assert not comm.sent
    call(3)
    assert order == {0: ["multiply", "agree"], 1: ["multiply", "agree"]}
    _, _, errors = call(3, [b, b[:, :4]])  # rank 0 has met its arguments
    assert order[0] == ["multiply", "agree"]
    assert [type(error) for error in errors] == [ShapeError, ShapeError]


def refused(kind, text, function, size=2):
    _, comm, errors = on_ranks(size, function)
    assert all(type(error) is kind for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert text in str(errors[0])
    assert comm.sent == {}


def test_ranks_refuse_together_before_anything_is_sent():
    x = np.ones((4, 4), np.float32)

    def call(a=x, b=x, **options):
        return lambda comm: gd.matmul(
            a(comm) if callable(a) else a,
            b,
            group=comm,
            **{"placements": (ROWS, COPIES), **{k: v(comm) if callable(v) else v for k, v in options.items()}},
        )

    refused(ShapeError, "rank 1", call(lambda comm: x if comm.rank == 0 else x[0]))
    refused(ShapeError, "as many columns", call(x[:, :3]))
    refused(ShapeError, "make no one matrix", call(lambda comm: x[:, : 3 + comm.rank]))
    refused(DTypeError, "convert one", call(x.astype(np.float64)))
    other = [x, x.astype(np.float64)]
    refused(ArgumentError, "dtype", lambda comm: call(other[comm.rank], other[comm.rank])(comm))
    refused(ArgumentError, "out", call(out=lambda comm: ROWS if comm.rank else COPIES))
    refused(ArgumentError, "placements of a", call(placements=lambda comm: (ROWS if comm.rank else COPIES, COPIES)))
    refused(ArgumentError, "mesh (3,)", call(mesh=(3,)))
    refused(ArgumentError, "dimensions 0 (rows)", call(placements=(gd.Shard(2), COPIES)))
    refused(DTypeError, "", call(x.astype(bool), x.astype(bool)))
    refused(ArgumentError, "ways", call(ways="x"))
