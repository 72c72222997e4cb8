"""Products of Dask arrays, in this process and on a LocalCluster."""

import numpy as np
import pytest

pytest.importorskip("dask.array", reason="Dask is not installed: pip install 'dask[array]'")
pytest.importorskip("ml_dtypes")

import dask.array as da

import gemmery.distributed as gd
from gemmery.errors import ArgumentError, DTypeError, ShapeError

TYPES = ("float16", "bfloat16", "int8", "int32", "float32")


def integers(*shape, dtype, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def check(found, x, y, dtype):
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float64), x.astype(np.float64) @ y.astype(np.float64))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(7, 5, 11), (1, 1, 1), (4, 9, 0), (0, 3, 4)])
def test_one_task_a_block(dtype, m, n, k):
    x, y = integers(m, k, dtype=dtype), integers(k, n, dtype=dtype)
    a, b = da.from_array(x, chunks=(3, 4)), da.from_array(y, chunks=(5, 2))
    check(gd.dask.matmul(a, b).compute(scheduler="sync"), x, y, dtype)
    wider = "int64" if dtype == "int32" else "float32"
    check(gd.dask.matmul(a, b, dtype=wider).compute(scheduler="sync"), x, y, wider)


@pytest.mark.parametrize("empty", [(0, 1), (1, 0, 0), (0, 0, 1, 0)])
def test_a_length_of_one_may_have_empty_chunks(empty):
    x, y = integers(1, 5, dtype="int8"), integers(5, 1, dtype="int8")
    a, b = da.from_array(x, chunks=(empty, (2, 3))), da.from_array(y, chunks=((4, 1), empty))
    check(gd.dask.matmul(a, b).compute(scheduler="sync"), x, y, "int8")
    check(gd.dask.matmul(b, a).compute(scheduler="sync"), y, x, "int8")


def test_sums_of_half_precision_are_rounded_once():
    """4096 ones and one of 2048: chunks rounded apart would give another sum."""
    a = da.ones((1, 4096), dtype="float16", chunks=(1, 128))
    b = da.concatenate([da.full((1, 1), 2048, dtype="float16"), da.ones((4095, 1), dtype="float16")]).rechunk(128)
    assert float(gd.dask.matmul(a, b).compute(scheduler="sync")[0, 0]) == np.float16(2048 + 4095)


@pytest.mark.parametrize("dtype", TYPES)
def test_registered_chunks(dtype, monkeypatch):
    """Right values, and as many products and contractions of gemmery's as there are pairs of chunks."""
    x, y = integers(7, 9, dtype=dtype), integers(9, 5, dtype=dtype)
    a, b = da.from_array(x, chunks=(3, 4)), da.from_array(y, chunks=(4, 2))
    want = x.astype(np.float64) @ y.astype(np.float64)
    calls = []
    for name in ("multiply", "tensordot"):
        function = getattr(gd.dask, name)
        monkeypatch.setattr(gd.dask, name, lambda *x, function=function: (calls.append(1), function(*x))[1])
    with gd.dask.registered():
        graphs = a @ b, da.matmul(a, b), da.tensordot(a, b, 1), da.tensordot(b, a, ((0,), (1,))).T
    for graph in graphs:
        calls.clear()
        np.testing.assert_array_equal(graph.compute(scheduler="sync").astype(np.float64), want)
        assert len(calls) == (0 if dtype == "float32" else 3 * 3 * 3)
    if dtype != "bfloat16":  # Dask's own sums refuse it
        calls.clear()
        (a @ b).compute(scheduler="sync")
        assert calls == []


def test_chunks_fit_the_memory_they_are_given():
    for memory in (2**22, 2**26, 2**30):
        for dtype, sums in (("float16", 4), ("int8", 1), ("float64", 8)):
            rows, columns, piece = gd.dask.chunks(10**6, 10**6, 10**6, dtype, memory)
            size = np.dtype(dtype).itemsize
            assert rows * columns * (sums + size) + piece * (rows + columns) * size <= memory
            assert piece <= rows
    with pytest.raises(ArgumentError, match="fewer tasks"):
        gd.dask.chunks(1000, 1000, 1000, "float32", 1000)
    with pytest.raises(ArgumentError, match="tasks=0"):
        gd.dask.chunks(1000, 1000, 1000, "float32", 2**30, tasks=0)
    with pytest.raises(DTypeError, match="f99"):
        gd.dask.chunks(1000, 1000, 1000, "f99", 2**30)


def test_what_does_not_fit_is_refused():
    a = da.ones((4, 3), chunks=2)
    with pytest.raises(ShapeError):
        gd.dask.matmul(a, a)
    with pytest.raises(DTypeError):
        gd.dask.matmul(a.astype(bool), a.T.astype(bool))
    with pytest.raises(DTypeError, match="no common element type"):
        gd.dask.matmul(a.astype("float16"), a.T.astype("bfloat16"))
    with pytest.raises(ArgumentError, match="chunks"):
        gd.dask.matmul(np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(ArgumentError, match="from_zarr"):
        gd.dask.matmul(a, np.ones((3, 2)))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_a_local_cluster_multiplies_arrays_on_disk(tmp_path):
    zarr = pytest.importorskip("zarr", reason="Zarr is not installed: pip install zarr")
    distributed = pytest.importorskip(
        "distributed", reason="the cluster of Dask is not installed: pip install distributed"
    )
    x, y = integers(300, 200, dtype="float16"), integers(200, 250, dtype="float16", seed=1)
    stored = []
    for name, array in (("a", x), ("b", y)):
        stored.append(zarr.open(tmp_path / name, mode="w", shape=array.shape, chunks=(128, 128), dtype=array.dtype))
        stored[-1][:] = array
    c = gd.dask.matmul(*stored, chunks=(128, 128, 64))
    place = zarr.open(tmp_path / "c", mode="w", shape=c.shape, chunks=c.chunksize, dtype=c.dtype)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster),
    ):
        gd.dask.store(c, place, progress=True)
        with gd.dask.registered():
            a, b = (da.from_zarr(array) for array in stored)
            check((a @ b).compute(), x, y, np.float16)
    check(place[:], x, y, np.float16)
