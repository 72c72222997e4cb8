"""The rungs to consider for a problem on a CUDA device, best first, each with its reason.

At the end is what decides whether float32 in parts, and float64 by residues, take less time than the type itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil

from gemmery import dtypes
from gemmery.cuda import choose, driver, geometry, traced_function
from gemmery.cuda.choose.cost import CLOCK, quickest, quickest_shared, shared_cycles
from gemmery.cuda.choose.data import PARTS, SIMT_COSTS, SIMT_SPLITS, Tiling
from gemmery.cuda.device import Device
from gemmery.cuda.launch import too_large
from gemmery.dispatch.cpu import Candidate
from gemmery.errors import RefusedError
from gemmery.ladder import float32_parts, float32_pre_pass, int8_pieces, simt_tiled
from gemmery.ladder.cuda import BY_WEIGHTS, CUDA
from gemmery.ladder.general import GENERAL
from gemmery.problem import Problem

_RUNGS = {rung.name: rung for rung in (*CUDA, *BY_WEIGHTS)}
_GENERAL = {dtype: rung for rung in GENERAL for dtype in rung.dtypes}

_TENSOR_COPIES = "wgmma_epilogue"  # the rung of products on sm_90, of which few instances serve every shape
EIGHT_BITS = ("e4m3", "int8")  # of tokens
TENSOR_COPIED = ("f16", "bf16")  # its types that have general kernels too

# The rungs that may apply the factors of operands, by their kind; they refuse those that they do not.
_FACTORS = {
    "outer": ("wgmma_epilogue", "wgmma_grouped", "wgmma_codes"),
    "blocks": ("wgmma_blockscaled", "wgmma_grouped_k"),
}
_TENSOR_TYPES = ("f16", "bf16", "tf32", *dtypes.TENSOR_FLOAT8, "int8")  # what wgmma multiplies
_TENSOR_RESULTS = ("f16", "bf16", "f32", "int32")


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield the rungs that suit this problem on its device, best first; the last ones take every problem."""
    p, card = problem.by_rows(), driver.find(problem.device)
    for name, reason in ranking(p, card):
        rung = _RUNGS[name]
        config = dict(rung.default)
        if name == "wgmma_streamk":
            config |= {key: value for key, value in choose.chosen(p, card).items() if key in config}
        elif p.invariant and "splits" in config:
            config["splits"] = 1
        yield Candidate(rung, config, reason)


def general(problem: Problem) -> Candidate | None:
    """Return the rung with one image for all products of these types; None if these options have none."""
    p = problem.by_rows()
    rung = _GENERAL.get(p.dtype)
    if (
        rung is None
        or p.precision
        or p.scales
        or p.invariant
        or p.semiring
        or p.b_dtype
        or rung.refuses(p)
        or too_large(p)
        or driver.find(p.device).capability < 80
    ):
        return None
    return Candidate(rung, rung.default, "its image serves every shape, so that no product waits for a compiler")


def with_function(problem: Problem) -> Candidate:
    """Return the rung that multiplies and applies a traced function in one launch.

    Raises RefusedError with the reason if none can.
    """
    hopper = driver.find(problem.device).capability == 90 and problem.dtype in TENSOR_COPIED
    if traced_function.exchanges(problem):
        if not hopper:
            raise RefusedError("numbers of rows in the launch of the product: only on compute capability 9.0")
        return _only(_TENSOR_COPIES, problem, "tensor cores, and blocks that tell each other numbers of rows")
    plain = next(candidates(problem._replace(epilogue="")))
    if plain.rung.name.startswith("gemv"):
        return _only(plain.rung.name, problem, plain.reason)
    if hopper:
        return _only(_TENSOR_COPIES, problem, "tensor cores, and the function before sums leave registers")
    if traced_function.is_paired(problem):
        raise RefusedError("two weights in one launch: only devices of compute capability 9.0 have tiles of both")
    candidate = general(problem)
    if candidate is None:
        raise RefusedError(f"no kernel multiplies {problem.dtype} and applies a function")
    return candidate


@lru_cache(maxsize=64)
def copies_tensors(device: str) -> bool:
    """Return True if the kernels of a device for TENSOR_COPIED are few instances, which serve every shape."""
    return _TENSOR_COPIES in _RUNGS and driver.find(device).capability == 90


def grouped(problem: Problem) -> Candidate:
    """Return the rung that multiplies groups of rows in one launch. Raises RefusedError with the reason if none can."""
    if problem.gathered and not choose.follows_index(problem, driver.find(problem.device)):
        raise RefusedError("a copy of the rows that the index names takes less time")
    name = "wgmma_grouped_k" if problem.k_groups else "wgmma_grouped"
    return _only(name, problem, "groups: one launch reads where they end")


def quantized(problem: Problem) -> Candidate:
    """Return the rung that multiplies packed weights. Raises RefusedError with the reason if none can."""
    if problem.levels and problem.dtype in EIGHT_BITS:
        return _only("wgmma_codes", problem, "codes of 8 bits by weights of 4: wgmma multiplies both as the type of x")
    if problem.levels:
        return _only("wgmma_quantized", problem, "weights of few bits: wgmma takes them from registers")
    return _only("gemv_quantized", problem, "few rows and packed weights: mma takes them as they are unpacked")


def _only(name: str, problem: Problem, reason: str) -> Candidate:
    candidate = Candidate(_RUNGS[name], _RUNGS[name].default, reason)
    refused = refusal(problem, candidate)
    if refused:
        raise RefusedError(f"{name}: {refused}")
    return candidate


def refusal(problem: Problem, candidate: Candidate) -> str:
    """Return the reason why this rung refuses the problem on its device, or ""."""
    rung, config, _ = candidate
    p = problem.by_rows()
    if p.dtype not in rung.dtypes:
        return f"it does not support {p.dtype}"
    if p.scales and rung.name not in _FACTORS[p.scales]:
        return f"it applies no factors of kind {p.scales!r}"
    reason = rung.refuses_kind(p) or rung.refuses(p) or too_large(p)
    if reason or rung.geometry is None:
        return reason
    try:
        return geometry.refusal(rung.geometry(p, config), driver.find(p.device))
    except RefusedError as error:
        return str(error)


def ranking(p: Problem, card: Device) -> list[tuple[str, str]]:
    """Return the names of rungs that suit a problem with a row-major C, best first, each with the reason in words.

    For an invariant problem the choice does not depend on m or the batch, and no rung of it adds in another order.
    """
    choices = []
    if card.capability == 90 and choose.outruns_gemv(p, card):
        choices += [choice for choice in _by_wgmma(p, card) if choice[0] in _RUNGS]
    if p.precision.startswith("f32_") and p.k and card.capability == 90:
        choices += _by_parts(p, card)
    by_residues = p.precision == "f64_normwise" and p.k >= int8_pieces.SHALLOW and card.capability == 90
    if by_residues and (p.invariant or residues_pay(p)):
        choices.append(("ozaki_int8", _RESIDUES))
    if choose.streams_batch(p, card):
        many = f"{p.batch} products of {p.m} x {p.n} x {p.k}: a block streams many of them"
        choices += [("mma_batched", f"{many}, a warp multiplies each"), ("simt_batched", many)]
    if (p.m == 1 or p.n == 1) and not p.invariant:
        vector = "one operand is a vector: the matrix is read once, at memory bandwidth"
        choices += [("gemv_vectorized", vector), ("gemv_warp", vector)]
    if card.capability == 90:
        choices += [choice for choice in _by_wgmma(p, card) if choice[0] in _RUNGS]
    if p.dtype in ("f16", "bf16") or p.precision == "tf32":
        what = p.precision or p.dtype
        choices.append(("mma_pipelined", f"{what}: tensor cores read tiles from a ring in shared memory"))
        if card.capability < 80 and p.dtype == "f16":
            choices.append(("wmma_f16", f"tensor cores of sm_{card.capability} multiply f16"))
    faster = card.peak("tensor_f64") / card.peak("f64")
    if p.dtype == "f64" and faster > 1:
        choices.append(("mma_f64", f"tensor cores multiply float64 {faster:g} times as fast as CUDA cores"))
    if card.capability == 90 and int8_pieces.digits_pay(p):
        count = int8_pieces.digit_products(p.dtype, p.out)
        choices.append(("wgmma_digits", f"{p.dtype}: tensor cores multiply its bytes, {count} products of int8"))
    exact = f"{p.dtype} on CUDA cores: tiles in registers, the next one loaded during the multiplication"
    choices.append(("simt_pipelined", exact))
    choices.append(("simt_smem", "no faster rung supports it; this one supports every layout"))
    choices.append(("simt_naive", "no faster rung supports it; this one supports every problem"))
    return choices


def _by_parts(p: Problem, card: Device) -> list[tuple[str, str]]:
    """Return the rungs that multiply float32 in parts and suit a problem, each with the reason in words.

    What is asked for by name is not a question of time.
    """
    if p.precision == "f32_plus":
        return [("split_paired", "f32_plus: three bfloat16 for each float32, and sums in two numbers")]
    strict = "three bfloat16 for each float32: no element's value changes how another is multiplied"
    if p.precision == "f32_strict":
        return [("split_bf16x6", f"f32_strict: {strict}")] if p.k >= float32_parts.SHALLOW else []
    if p.k < float32_parts.DEEP:
        return []
    if not p.invariant and not parts_pay(p, float32_pre_pass.in_registers(p), card, simt_tiled.shared_tiles(p, card)):
        return []
    return [("split_fp16x3", f"f32_tensor: {_GUARDED}")]


def parts_in_graphs(problem: Problem) -> bool:
    """Return True for float32 that parts multiply in a CUDA graph alone: elsewhere the host's launches last longer."""
    if problem.precision != "f32_tensor" or problem.invariant or problem.k < float32_parts.DEEP:
        return False
    p, card = problem.by_rows(), driver.find(problem.device)
    terms = p, float32_pre_pass.in_registers(p), card, simt_tiled.shared_tiles(p, card)
    return card.capability == 90 and parts_pay(*terms, host=0) and not parts_pay(*terms)


_RESIDUES = (
    "f64_normwise: int8 tensor cores multiply residues of scaled integers; the device takes CUDA cores for Inf, NaN "
    "and extreme norms"
)
_GUARDED = (
    "two halves for each float32, three products on tensor cores; the device takes three bfloat16 where the guard "
    "finds elements too small for halves, and CUDA cores for Inf and NaN"
)


def _by_wgmma(p: Problem, card: Device) -> list[tuple[str, str]]:
    """Return the rungs on wgmma that suit a problem, best first, each with the reason in words."""
    what = p.precision or p.dtype
    if what not in _TENSOR_TYPES or p.out not in _TENSOR_RESULTS:
        return []
    if p.scales == "blocks":
        return [("wgmma_blockscaled", f"{what} with factors of blocks, which are applied every 128 of k")]
    choices = []
    if choose.chosen(p, card)["splits"] > 1:
        choices.append(("wgmma_streamk", f"{what}: so few tiles that the blocks of a cluster share the k of each"))
    choices.append(("wgmma_epilogue", f"{what}: tensor cores read tiles that tensor copies bring to shared memory"))
    return choices


# Times on an H200, in microseconds and cycles of 1.7 GHz.
LAUNCHES, HOST = (9.0, 17.0), 50.0  # on the device, in a graph, of rows alone and with others; on the host
PRE_PASS = 3.6e6, 2.5e6  # bytes in a microsecond, of rows that stay in registers and of others
CYCLES, PARTS_END, BUSY = 1700.0, 4000, 0.85  # of a microsecond; of the end of a tile; of tensor cores
SIMT, SIMT_LEAST, SIMT_END = (42e6, 48e6), 4.0, 2.0  # operations in a microsecond, of whole rounds; likewise


def parts_pay(
    problem: Problem, in_registers: int, device: Device, tiles: tuple[Tiling, ...] = (), host: float = HOST
) -> bool:
    """Return True if split_fp16x3 should take less time for a product with a row-major C than CUDA cores.

    Rows of the operands in `in_registers` stay there in the pre-pass: bit 0 stands for A, bit 1 for B. CUDA cores may
    take one of the `tiles` whose k blocks share. A CUDA graph takes no time of the `host`.

    >>> from gemmery.cuda.device import KNOWN
    >>> case = Problem(4096, 4096, 4096, "f32", "f32")
    >>> [parts_pay(each, 3, KNOWN["h200"]) for each in (case, case._replace(m=8))]
    [True, False]
    """
    m, n, k, batch, sms = problem.m, problem.n, problem.k, problem.batch, device.sms
    tile = quickest(PARTS, m, n, batch, sms)
    rounds = -(-(-(-m // tile.bm) * -(-n // tile.bn) * batch) // sms)
    step = 3 * tile.bm * tile.bn / 32 / BUSY
    product = rounds * (-(-k // 64) * step + PARTS_END) / CYCLES
    others = in_registers != 3
    sides = ((m, in_registers & 1), (n, in_registers & 2))
    pre_pass = sum(batch * side * k * 8 / PRE_PASS[not fast] for side, fast in sides)
    waves = -(-m // 64) * -(-n // 64) * batch / sms
    simt = max(SIMT_LEAST, problem.flops / SIMT[others] * ceil(waves) / waves + SIMT_END)
    if tiles:
        choice = quickest_shared(tiles, SIMT_SPLITS, problem, device)
        simt = (SIMT_COSTS.start + shared_cycles(problem, *choice, device)) / CLOCK
    return max(host, LAUNCHES[others] + pre_pass + product) < simt


# Of float64, in microseconds of an H200: launches by residues and by itself, and 1e6 multiply-adds of each. Elements of
# A, B and C are scaled, cut and put together. At n = 1024, 2048, 2560, 3072 that is 76, 356, 632, 1026 (76, 338, 653
# and 974 timed), and 44, 334, 649 and 1119 for itself (44, 312, 723, 1182).
RESIDUES, RESIDUES_ELEMENT, FLOAT64 = (18.0, 0.0256), 9.4e-6, (3.0, 0.0385)


def residues_pay(problem: Problem) -> bool:
    """Return True if ozaki_int8 should take less time for a product of float64 than tensor cores for float64.

    >>> [residues_pay(Problem(n, n, n, "f64", "f64")) for n in (2048, 2560)]
    [False, True]
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    work, elements = batch * m * n * k / 1e6, batch * (m * n + m * k + n * k)
    of_residues = RESIDUES[0] + RESIDUES[1] * work + RESIDUES_ELEMENT * elements
    return of_residues < FLOAT64[0] + FLOAT64[1] * work
