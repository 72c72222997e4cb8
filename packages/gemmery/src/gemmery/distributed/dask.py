"""Products of Dask arrays, and of arrays on disk that no memory holds, with gemmery's kernels in every task.

`matmul` makes one task of each block of C, which adds its products along k in one accumulator: no product of two chunks
is ever stored. Operands on disk are read by that task, piece by piece, so that a worker holds one block and two pieces.
`register` replaces the chunk functions of Dask's own `matmul`, `@` and `tensordot`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

try:
    import dask.array
    from dask.array import routines
except ModuleNotFoundError as error:
    if error.name not in ("dask", "dask.array"):
        raise
    from gemmery.errors import InstallError

    raise InstallError("gemmery.distributed.dask needs Dask: run pip install 'dask[array]'", name="dask") from error

from gemmery import api, dtypes
from gemmery.api import contractions
from gemmery.api.promote import promoted
from gemmery.distributed.plan import sums_in
from gemmery.errors import ArgumentError, ShapeError

multiply: Any = api.matmul
accumulate: Any = api.gemm
tensordot: Any = contractions.tensordot
da: Any = dask.array  # Dask has few types
_routines: Any = routines
_OWN = {name: getattr(_routines, name) for name in ("_matmul", "_tensordot")}
SHARE = 0.5  # of the memory that a block and two pieces take
LEAST_SIDE = 256


def _element(dtype: Any) -> str:
    return dtypes.resolve(dtype if isinstance(dtype, str) else np.dtype(dtype).name)


def chunks(m: int, n: int, k: int, dtype: Any, memory: float, tasks: int = 1) -> tuple[int, int, int]:
    """Return sides (rows of C, columns of C, piece of k) of tasks that fit in the memory of a worker.

    `memory` is in bytes, `tasks` how many run at once in it. A block of C is square, because that reads the fewest
    bytes of A and B. The block, its rounded copy, and a piece of A and of B that are read take half of the memory.

    >>> chunks(100_000, 100_000, 100_000, "float16", 2**30)
    (8192, 8192, 2048)

    Raises ArgumentError if a block of 256 by 256 does not fit.
    """
    if tasks < 1 or min(m, n, k) < 1:
        raise ArgumentError(f"tasks={tasks} of a product of {m} x {n} x {k}: pass numbers of at least 1")
    element = _element(dtype)
    size, sums = dtypes.get(element).size, dtypes.get(sums_in(element, dtypes.written(element))).size
    side, most = LEAST_SIDE, SHARE * memory / tasks / (sums + 2 * size)
    if side * side > most:
        raise ArgumentError(
            f"a task has {memory / tasks:.0f} bytes, too few for a block of {side} x {side}: run fewer tasks at once"
        )
    while 4 * side * side <= most:
        side *= 2
    return min(m, side), min(n, side), min(k, max(LEAST_SIDE, side // 4))


def matmul(a: Any, b: Any, *, dtype: Any = None, chunks: tuple[int, int, int] | None = None) -> Any:
    """Return the Dask array a @ b, of matrices.

    `a` and `b` are Dask arrays, or both are arrays on disk (Zarr, or any other with `shape`, `dtype` and slices), of
    which `chunks`, as the function `chunks` suggests them, cut the work. `dtype` is the type of the result.

    >>> a = dask.array.ones((4, 6), dtype="int8", chunks=2)
    >>> matmul(a, a.T, dtype="int32").compute()[0]
    array([6, 6, 6, 6], dtype=int32)

    Raises ShapeError or DTypeError for operands that cannot be multiplied, and ArgumentError if `chunks` are missing.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ShapeError(f"{tuple(a.shape)} times {tuple(b.shape)}: both must be matrices, with the same k")
    element = promoted(_element(a.dtype), _element(b.dtype))
    result = dtypes.written(element) if dtype is None else dtypes.resolve(dtype)
    kind, sums = np.dtype(dtypes.get(result).numpy), dtypes.get(sums_in(element, result)).numpy
    terms = {"dtype": kind, "sums": sums, "result": kind.name, "meta": np.empty((0, 0), kind)}
    if isinstance(a, da.Array) and isinstance(b, da.Array):
        b = b.rechunk({0: a.chunks[1]})
        # Chunks fit. Dask would take one for each length of 1, also where there are empty ones beside it.
        return da.blockwise(_block, "ij", a, "ik", b, "kj", concatenate=False, align_arrays=False, **terms)
    if isinstance(a, da.Array) or isinstance(b, da.Array):
        raise ArgumentError("one operand is a Dask array, the other is not: use dask.array.from_zarr on it, or on none")
    if chunks is None:
        raise ArgumentError("chunks are missing: give gd.dask.chunks(m, n, k, dtype, memory of a worker)")
    lengths = (a.shape[0], b.shape[1], a.shape[1])
    sides = [da.core.normalize_chunks((side,), (length,))[0] for side, length in zip(chunks, lengths, strict=True)]
    return da.map_blocks(_read_block, chunks=(sides[0], sides[1]), a=a, b=b, piece=chunks[2], **terms)


def _block(a: Sequence[Any], b: Sequence[Any], sums: str, result: str) -> Any:
    """Return a block of C from the chunks of a row of A and of a column of B."""
    return _added(zip(a, b, strict=True), sums, result)


def _read_block(a: Any, b: Any, piece: int, sums: str, result: str, block_info: Any = None) -> Any:
    """Return a block of C from pieces of A and B that are read one after the other."""
    (top, bottom), (left, right) = block_info[None]["array-location"]
    k = a.shape[1]
    pieces = ((start, min(start + piece, k)) for start in range(0, max(k, 1), piece))
    read = ((np.asarray(a[top:bottom, i:j]), np.asarray(b[i:j, left:right])) for i, j in pieces)
    return _added(read, sums, result)


def _added(pairs: Any, sums: str, result: str) -> Any:
    total: Any = None
    for x, y in pairs:
        if total is None:
            total = multiply(x, y, dtype=sums)
        else:
            accumulate(1, x, y, 1, total, out=total)
    return total.astype(np.dtype(result), copy=False)


def store(c: Any, place: Any, progress: bool = False) -> None:
    """Compute a Dask array into an array on disk, block by block, and show a bar if `progress`.

    Works with the client of a cluster if there is one, else with Dask's threads.

    >>> gd.dask.store(c, zarr.open("c.zarr", shape=c.shape, chunks=c.chunksize, dtype=c.dtype))  # doctest: +SKIP
    """
    job: Any = da.store(c, place, lock=False, compute=False)
    if not progress:
        job.compute()
        return
    try:
        import distributed

        cluster: Any = distributed
        running = cluster.get_client().compute(job)
    except (ImportError, ValueError):
        from dask import diagnostics

        bars: Any = diagnostics
        with bars.ProgressBar():
            job.compute()
        return
    cluster.progress(running, notebook=False)
    running.result()


def _chunk_matmul(a: Any, b: Any) -> Any:
    """Multiply two chunks as Dask's function does, which keeps the dimension of k."""
    return multiply(a, b)[..., np.newaxis, :] if _ours(a, b) else _OWN["_matmul"](a, b)


def _chunk_tensordot(a: Any, b: Any, axes: Any, is_sparse: bool) -> Any:
    if is_sparse or not _ours(a, b):
        return _OWN["_tensordot"](a, b, axes, is_sparse)
    result = tensordot(a, b, axes)
    index: list[slice | None] = [slice(None)] * result.ndim
    for axis in sorted(axes[0]):
        index.insert(axis, None)
    return result[tuple(index)]


def _ours(a: Any, b: Any) -> bool:
    """Return True for chunks that gemmery multiplies much faster than NumPy: those that its BLAS does not."""
    if type(a) is not np.ndarray or type(b) is not np.ndarray or a.dtype != b.dtype:
        return False
    return a.dtype.name in ("float16", "bfloat16") or a.dtype.kind in "iu"


def register() -> None:
    """Let `dask.array.matmul`, `@` and `tensordot` multiply chunks of float16, bfloat16 and integers with gemmery.

    It holds for graphs that are made afterwards, on every worker that can import gemmery; types of results stay Dask's.

    >>> register()
    >>> a = dask.array.ones((4, 4), dtype="float16", chunks=2)
    >>> (a @ a).compute()[0, 0]
    np.float16(4.0)
    >>> unregister()
    """
    _routines._matmul, _routines._tensordot = _chunk_matmul, _chunk_tensordot


def unregister() -> None:
    """Take back what `register` did."""
    for name, function in _OWN.items():
        setattr(_routines, name, function)


@contextmanager
def registered() -> Iterator[None]:
    """Register inside a `with` block."""
    register()
    try:
        yield
    finally:
        unregister()
