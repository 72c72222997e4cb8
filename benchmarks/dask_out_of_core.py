"""Dask: a product whose operands and result are each twice the workers' memory, and chunks of NumPy against gemmery's.

python benchmarks/dask_out_of_core.py FOLDER [MIB]      # FOLDER holds the arrays, MIB is the limit of the one worker
"""

import resource
import sys
import time
from functools import partial
from pathlib import Path

import dask.array as da
import numpy as np
import zarr
from distributed import Client, LocalCluster

import gemmery.distributed as gd


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def against_numpy(dtype: str, n: int = 1024, chunk: int = 512) -> None:
    """Time one graph with both kinds of chunks."""
    x = np.random.default_rng(0).integers(-3, 4, (n, n)).astype(dtype)
    a = da.from_array(x, chunks=chunk)

    def seconds() -> float:
        graph = a @ a
        start = time.perf_counter()
        graph.compute(scheduler="threads")
        return time.perf_counter() - start

    numpy_seconds = seconds()
    with gd.dask.registered():
        seconds()
        ours = sorted(seconds() for _ in range(5))[2]
    ratio = f"NumPy {numpy_seconds:.2f} s, gemmery {ours:.4f} s, {numpy_seconds / ours:.0f} times"
    say(f"{dtype} {n}, chunks of {chunk}: {ratio}")


def out_of_core(folder: Path, mib: int) -> None:
    """Multiply float16 squares of twice the limit each."""
    memory = mib * 2**20
    n = -(-int((2 * memory / 2) ** 0.5) // 512) * 512
    sides = gd.dask.chunks(n, n, n, "float16", memory / 3, tasks=2)
    made = partial(zarr.create_array, overwrite=True, shape=(n, n), dtype="float16", compressors=None)
    arrays = [made(folder / name, chunks=(1024, 1024)) for name in ("a", "b")]
    block = np.random.default_rng(0).integers(-2, 3, (1024, n)).astype("float16")
    for array in arrays:
        for top in range(0, n, 1024):
            array[top : top + 1024] = block[: n - top]
    c = gd.dask.matmul(*arrays, chunks=sides)
    place = made(folder / "c", chunks=c.chunksize)
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, memory_limit=memory, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        start = time.perf_counter()
        gd.dask.store(c, place, progress=True)
        took = time.perf_counter() - start
        peak = client.run(lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    row = arrays[0][5].astype(np.int64)
    want = np.zeros(n, np.int64)
    for top in range(0, n, 1024):
        want += row[top : top + 1024] @ arrays[1][top : top + 1024].astype(np.int64)
    assert np.array_equal(place[5], want.astype(np.float16))
    say(
        f"\nfloat16 {n} cubed, {2 * n * n / 2**20:.0f} MiB each, limit {mib} MiB, blocks {sides}: {took:.0f} s, "
        f"{2 * n**3 / took / 1e9:.0f} GFLOP/s, read {gd.dask.bytes_read(n, n, n, 'float16', sides) / 2**30:.1f} GiB, "
        f"peak of the worker {max(peak.values()) / 1024:.0f} MiB"
    )


if __name__ == "__main__":
    for kind in ("float16", "int8"):
        against_numpy(kind)
    out_of_core(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 320)
