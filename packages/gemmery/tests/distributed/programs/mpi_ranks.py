"""One rank of an MPI job: mpiexec -n 2 python mpi_ranks.py. It aborts the job if a check fails."""

import sys
import traceback
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

import gemmery.distributed as gd
from gemmery.distributed import layouts
from gemmery.errors import ShapeError
from parts_of_matrices import joined, parts

PLACES = (gd.Shard(0), gd.Shard(1), gd.Replicate(), gd.Partial())


def main(comm):
    rank, ranks = comm.Get_rank(), comm.Get_size()
    rng = np.random.default_rng(7)
    for case, (of_a, of_b) in enumerate(product(PLACES, repeat=2)):
        m, n, k = (int(x) for x in rng.integers(0, 7, 3))
        dtype = (np.float32, np.float16, np.int8)[case % 3]
        whole = [rng.integers(-3, 4, shape).astype(dtype) for shape in ((m, k), (k, n))]
        held = [layouts.even(x.shape, (ranks,), (place,)) for x, place in zip(whole, (of_a, of_b), strict=True)]
        a, b = (parts(x, layout, rng)[rank] for x, layout in zip(whole, held, strict=True))
        c = gd.matmul(a, b, group=comm, placements=(of_a, of_b), out=gd.Shard(0))
        layout = layouts.even((m, n), (ranks,), (gd.Shard(0),))
        want = whole[0].astype(np.float64) @ whole[1].astype(np.float64)
        np.testing.assert_array_equal(joined(comm.allgather(c), layout, dtype), want)
    with pytest.raises(ShapeError, match="make no one matrix"):
        gd.matmul(np.ones((2, 2 + rank)), np.ones((2, 2)), group=comm, placements=(gd.Shard(0), gd.Replicate()))


if __name__ == "__main__":
    try:
        main(MPI.COMM_WORLD)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
