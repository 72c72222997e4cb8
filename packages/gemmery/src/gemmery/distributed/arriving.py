"""all_gather(x) @ w in one launch, `wgmma_gathered`, which itself waits for the rows of other GPUs.

Two launches, of own rows and of the others', each have a last wave of few tiles: 4096 x 14336 x 4096 over two H200
takes 341 us so, and 311 in one (docs/findings/products_over_ranks.md).
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gemmery.api.device_call import DeviceCall, described
from gemmery.api.prepared import operand_views
from gemmery.arrays import view
from gemmery.cuda import driver, tensormaps
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.launch import CudaLaunch
from gemmery.errors import LayoutError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Config, Problem

RUNG = find(CUDA, "wgmma_epilogue")
# Signals are kernels of PyTorch's, of one warp. If each multiprocessor had a block that waits for one, none could run.
FREE = 1
_TAIL = struct.Struct("=2iQ48x")  # behind the argument and the map of the own rows: see Gathered in wgmma_gathered.cu


class ArrivingProduct:
    """The launch for operands of some shapes and strides."""

    def __init__(self, full: Any, w: Any, out: Any, rank: int, rows: int) -> None:
        """Prepare it for the gathered rows, of which each rank sends `rows`.

        Raises RefusedError or LayoutError for what the kernel does not multiply.
        """
        call = DeviceCall(view(full), view(w), view(out))
        form, problem = described(call)
        if reason := RUNG.refusal(problem):
            raise RefusedError(reason)
        config = RUNG.resolve(problem.by_rows(), RUNG.default)
        launch = CudaLaunch(problem, config, lambda problem, config: gathering(problem, config, rows))
        self._run = launch.ready(*operand_views(form, problem, None), room=tensormaps.BYTES + _TAIL.size)
        of_a = next(each.shape for each in self._run.maps if each.operand == "a")
        self._own = of_a._replace(extents=(of_a.extents[0], rows, 1))
        self._begin, self._each = rank * rows, rows

    def __call__(self, x: Any, full: Any, w: Any, out: Any, stream: int, flags: int, limit: float) -> None:
        """Put the launch on a stream. `flags` is the address of a word for each rank's rows, `limit` in seconds."""
        own, a, b, c = (view(each).pointer for each in (x, full, w, out))
        with driver.on(self._run.ordinal):
            map_of_own = tensormaps.encoded(self._own, own)
        tail = map_of_own + _TAIL.pack(self._begin, self._each, int(limit * 1e9))
        self._run(a, b, c, stream, extra=(0, 0, flags), operands=tail)


def gathering(problem: Problem, config: Config, rows: int) -> Geometry:
    """Return the launch of `wgmma_gathered` for pieces of so many rows. Raises RefusedError if there is none."""
    assert RUNG.geometry is not None
    whole = RUNG.geometry(problem, config)
    alone = not (whole.before or whole.swapped or whole.apart > 1 or whole.cluster > 1)
    if not alone or problem.a_layout != "row" or rows % whole.tile[0]:
        raise RefusedError(f"pieces of {rows} rows: it takes whole tiles of {whole.tile[0]}, and K-major rows in place")
    sms = driver.find(problem.device).sms
    if whole.grid[0] > sms - FREE:
        raise RefusedError(f"{whole.grid[0]} blocks on {sms} multiprocessors: {FREE} must be free for signals")
    # A band of tiles that holds rows of two pieces would have the first blocks wait.
    of_piece = rows // whole.tile[0]
    band = next(band for band in range(min(whole.band, of_piece), 0, -1) if of_piece % band == 0)
    kernel = whole.kernel.replace(f"{RUNG.name}<", "wgmma_gathered<")
    return replace(whole, source="wgmma_gathered.cu", kernel=kernel, band=band)


def prepared(
    launches: dict[object, ArrivingProduct | None],
    x: Any,
    full: Any,
    w: Any,
    out: Any,
    rank: int,
    rows: tuple[int, ...],
) -> ArrivingProduct | None:
    """Return the launch for operands of this kind, which `launches` keep, or None where two products must do."""
    of_w = view(w)
    if view(x).pointer % tensormaps.ALIGNMENT:
        return None
    key = of_w.shape, of_w.strides, of_w.pointer % tensormaps.ALIGNMENT
    if key not in launches:
        launches[key] = None
        if len(set(rows)) == 1 and all(of_w.shape):
            with suppress(RefusedError, LayoutError):
                launches[key] = ArrivingProduct(full, w, out, rank, rows[0])
    return launches[key]
