"""The rungs for batches of small products: sides are constants of an instance, and a block has many products."""

from __future__ import annotations

from gemmery import dtypes
from gemmery.cuda.choose import complete
from gemmery.cuda.choose.cost import batch_products, batch_tile
from gemmery.cuda.device import THREADS, WARP
from gemmery.cuda.geometry import Geometry, instance, layouts, target, template
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import cut_off, gpu_rung, off_tensor_cores
from gemmery.problem import Config, Problem

_MOST = 32  # rows and columns of a matrix
_PIECE = 16  # bytes
_PADDED, _PADDED_MMA = 64, 32  # bytes of a line from which there are pieces between two


def _refuses(problem: Problem) -> str:
    """Refuse large sides, and products without elements."""
    sides = problem.m, problem.n, problem.k
    if max(sides) > _MOST or min(sides) < 1:
        return f"m, n, k = {sides}: it multiplies matrices with sides of 1 to {_MOST}"
    return ""


def _refuses_mma(problem: Problem) -> str:
    """Refuse what tensor cores would round, and sides that are not whole fragments."""
    if any(side % 16 for side in (problem.m, problem.n, problem.k)):
        return f"m, n, k = {problem.m}, {problem.n}, {problem.k}: fragments are 16 x 16; use simt_batched"
    return (off_tensor_cores(problem) if problem.dtype != "f64" else "") or _refuses(problem)


def _simt(name: str, problem: Problem, config: Config) -> Geometry:
    """A thread for tm x tn elements of a product, and a block for `products` of them."""
    products, tm, tn = config["products"], config["tm"], config["tn"]
    if problem.m % tm or problem.n % tn:
        raise RefusedError(f"tm={tm}, tn={tn} of C {problem.m} x {problem.n}: a thread's tile divides C; change either")
    threads = -(-products * (problem.m // tm) * (problem.n // tn) // WARP) * WARP
    if threads > THREADS:
        raise RefusedError(f"products={products}: {threads} threads; a block has at most {THREADS}; use fewer products")
    return _batched(name, problem._replace(precision=""), config, threads, (_PADDED, _PIECE), tm, tn)


def _mma(name: str, problem: Problem, config: Config) -> Geometry:
    """A warp for each product."""
    pad = 2 * _PIECE if problem.dtype == "f64" else _PIECE
    return _batched(name, problem, config, config["products"] * WARP, (_PADDED_MMA, pad))


def _batched(name: str, problem: Problem, config: Config, threads: int, apart: tuple[int, int], *tile: int) -> Geometry:
    """The launch of a kernel with a block for `products` products; `apart` are the bytes from which a line gets pieces
    behind it, and those of the pieces.
    """
    m, n, k, products = problem.m, problem.n, problem.k, config["products"]
    size, out = dtypes.get(problem.dtype).size, dtypes.get(problem.out).size
    lines = (
        (k, m, size) if problem.a_layout == "col" else (m, k, size),
        (n, k, size) if problem.b_layout == "col" else (k, n, size),
        (m, n, out),
    )
    room = sum(-(-products * _step(*each, *apart) // _PIECE) * _PIECE for each in lines)
    kernel = instance(name, problem, *layouts(problem), template("BatchSides", m, n, k), *tile, products)
    grid = -(-problem.batch // products), 1, 1
    return Geometry(
        f"{name}.cu",
        kernel,
        grid,
        (threads, 1, 1),
        room,
        needs=80,
        instructions="cp.async",
        tile=(m, n),
        overlaps=bool(config["overlap"]) and problem.device != "cpu" and target(problem).capability >= 90,
    )


def _step(lines: int, length: int, size: int, padded: int, pad: int) -> int:
    """Return the bytes from one matrix to the next in shared memory: STEP of BatchLines in batched.cuh."""
    line = length * size
    pitch = line + pad if line >= padded and line % (2 * _PIECE) == 0 else line
    room = lines * pitch
    return room if room % (2 * _PIECE) else room + _PIECE


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced."""
    products, tm, tn = batch_tile(problem, target(problem).sms)
    return complete(config, {"products": products, "tm": tm, "tn": tn})


_OVERLAP = {"overlap": (0, 1)}
_EXPECT = {
    "local_requests": 0,
    "load_sectors_a_request": 16,
    "load_bytes_a_sector": 32,
    "store_sectors_a_request": 16,
    "store_bytes_a_sector": 32,
}
_SIDES = (1, 2, 3, 4, 5, 6, 7, 8)
BATCHED = (
    gpu_rung(
        "simt_batched",
        idea="a block streams many small products: vectors cross the borders of matrices, sides are constants",
        parent="simt_smem",
        refuses=_refuses,
        geometry=_simt,
        resolve=_resolve,
        expect=_EXPECT,
        space={"products": (0, 1, 2, 4, 8, 16, 32, 64, 128, 256), "tm": (0, *_SIDES), "tn": (0, *_SIDES), **_OVERLAP},
        default={"products": 0, "tm": 0, "tn": 0, "overlap": 1},
        lesson=(
            "With a block for each product the time is that of starting blocks: 200,000 take 122 us, whatever their "
            "size. The matrices of a batch that follow each other are one array, so a block reads those of many "
            "products as vectors, whole lines at a time, and what one product needs is put apart in shared memory. "
            "Sides that are constants leave no loop and no test around the few multiply-adds."
        ),
    ),
    gpu_rung(
        "mma_batched",
        idea="a warp multiplies a whole small product, from a block's part of the batch in shared memory",
        parent="simt_batched",
        dtypes=("f16", "bf16", "f64"),
        refuses=_refuses_mma,
        bound=cut_off,
        bounds={"f64": float},
        geometry=_mma,
        resolve=lambda p, config: complete(config, {"products": batch_products(p, target(p).sms, WARP)}),
        expect=_EXPECT,
        space={"products": (0, 1, 2, 4, 8, 16), **_OVERLAP},
        default={"products": 0, "overlap": 1},
        lesson=(
            "At 16 x 16 a product of half precision has 16 multiply-adds for each 3 bytes that memory moves; CUDA "
            "cores would also convert each element as often as it is read. Tensor cores do both in a few "
            "instructions of a warp, which then only waits for its part of the batch."
        ),
    ),
)
