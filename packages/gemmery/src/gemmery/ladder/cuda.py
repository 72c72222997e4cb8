"""The GPU ladder: CUDA cores, tensor cores, a matrix times a vector; and a rung that multiplies by arranged weights."""

from __future__ import annotations

from gemmery import dtypes
from gemmery.cuda import weights
from gemmery.cuda.choose import complete
from gemmery.cuda.choose.variants import QUANTIZED, QuantizedTile, most_shared, shared_bytes, tiles_cut, variant_of
from gemmery.cuda.geometry import Geometry, MapBox, element, instance, target, template
from gemmery.cuda.weights import KINDS, STEP, Format
from gemmery.errors import RefusedError
from gemmery.ladder.float32_parts import SPLIT_FLOAT32
from gemmery.ladder.gemv import GEMV, GEMV_QUANTIZED
from gemmery.ladder.general import BATCHED, GENERAL
from gemmery.ladder.gpu import gpu_rung
from gemmery.ladder.int8_pieces import INTEGERS, OZAKI
from gemmery.ladder.rung import Rung
from gemmery.ladder.simt import SIMT
from gemmery.ladder.simt_tiled import TILED
from gemmery.ladder.tensor import MMA, TENSOR
from gemmery.ladder.wgmma import WGMMA, aligned_sums
from gemmery.ladder.wgmma_split import GROUPED, SPLIT, promoted
from gemmery.problem import Config, Problem

NAME = "wgmma_quantized"
GROUP = 8  # bytes of where a group ends
COUNTER = 4  # bytes of a counter of the blocks that have added to a tile


def _refuses(problem: Problem) -> str:
    """Refuse weights that were not arranged for it, and x and C that are not rows of half precision."""
    p = problem.by_rows()
    if p.levels not in KINDS:
        return "it multiplies by weights that gemmery.cuda.weights.arrange has put in its order, of 8 or 4 bits"
    if p.dtype in weights.CODES:
        return f"x of {p.dtype}: {CODES} multiplies codes"
    if p.out != p.dtype:
        return f"it writes the type of x, {p.dtype}, not {p.out}"
    if p.batch > 1 or p.scaled or p.scales:
        return "it multiplies one matrix, without alpha, beta or float32 factors"
    if p.a_layout != "row" or p.alignments[0] % 16 or p.k % 8:
        return f"k={p.k}, rows of x at multiples of {p.alignments[0]} bytes: rows are multiples of 16 bytes; copy x"
    return format_of(p).refusal() or ("" if p.c_layout == "row" else "it writes rows whose elements are adjacent")


def format_of(problem: Problem) -> Format:
    """Return the format of the arranged weight of a problem."""
    return Format(problem.n, problem.k, problem.levels, problem.group, problem.dtype)


def _geometry(name: str, problem: Problem, config: Config) -> Geometry:
    """Blocks of 64 to 256 rows of W by up to 128 tokens; those that share the k of a tile add up in scratch memory.

    Raises RefusedError for a variant that would hang or does not fit.
    """
    tokens, warpgroups, blocks, ways, stages, resident, turns, shares = (
        config[key] for key in ("tokens", "warpgroups", "blocks", "ways", "stages", "resident", "turns", "shares")
    )
    form, lines = format_of(problem), warpgroups // max(ways, 1)
    parts, threads, steps = lines * blocks, 128 * (warpgroups + 1), form.places[1]
    shares = min(shares, steps) if config["runs"] or config["splits"] <= 2 else 1
    if warpgroups % ways or parts not in (1, 2, 3, 4):
        raise RefusedError(f"{warpgroups} warpgroups, {ways} for {blocks} x 64 rows: a block has 64 to 256 rows")
    if max(turns, shares) > 1 and ways > 1:
        each = "turns" if turns > 1 else "shares"
        raise RefusedError(
            f"{each}={config[each]}, ways={ways}: parts of k have a consumer each, or one has all; take {each}=1"
        )
    if shares > 2:
        raise RefusedError(f"shares={shares}: parts of k are added in pairs; take 1 or 2")
    if stages < 2 * ways or stages % ways:
        raise RefusedError(
            f"stages={stages}, ways={ways}: a consumer hands a stage back when it has the next one, and would wait for "
            "ever; take a multiple of ways, twice as many at least"
        )
    sums = lines * blocks * tokens * 64 * 4  # bytes
    stays = config["runs"] > 0 or problem.groups > 0  # for many tiles: results have room of their own
    tile = QuantizedTile(tokens, warpgroups, blocks, ways, stages, resident)
    shared = shared_bytes(form, tile, stages, stays, shares > 1)
    if shared > most_shared(resident):
        raise RefusedError(
            f"{shared} bytes of shared memory: each of {resident} blocks of a multiprocessor has "
            f"{most_shared(resident)}; take fewer stages"
        )
    tiles = -(-problem.n // (64 * parts)) * most_across(problem, tokens)
    splits = 0 if config["runs"] else 1 << min(config["splits"], steps).bit_length() - 1  # at most so many: a shift
    grid = min(config["runs"], tiles * steps) or tiles * splits
    cut = 0 if splits or problem.groups or problem.invariant else tiles_cut(tiles, steps, grid)
    if problem.groups:  # whose ends decide on the device whether blocks share tiles, unless they must not
        splits, shared = int(problem.invariant), shared + GROUP * problem.groups + 8
        grid = min(config["runs"] or target(problem).sms * resident, tiles if splits else tiles * steps)
        if shared > most_shared(resident):
            raise RefusedError(f"{problem.groups} groups: there is no room for where they end; take fewer stages")
    parted = splits > 1 or cut > 0 or (problem.groups > 0 and not splits)
    deep = problem.k % 64 == 0
    early = not config["late"]
    kind, _, special = form.kind.partition("_")
    levels = template("Levels", element(problem), kind.upper(), form.columns, special == "zeros", special == "close")
    shape = tokens, warpgroups, blocks, ways, stages, resident, deep, early, stays, problem.groups > 0, turns, shares
    return Geometry(
        f"{name}.cu",
        instance(name, problem, template("QuantizedTiles", element(problem), levels, *shape)),
        (grid, 1, 1),
        (threads, 1, 1),
        shared=shared,
        workspace=2 * grid * sums if parted else 0,
        counters=tiles * lines * COUNTER if parted else 0,
        needs=90,
        instructions="wgmma",
        alone=True,
        overlaps=early,
        tile=(tokens, 64 * parts),
        maps=(MapBox("a", (64, tokens), deep=2 if deep else 1),),
        band=splits or -cut,
    )


def most_across(problem: Problem, tokens: int) -> int:
    """Return how often tiles of so many tokens have all rows of W, at most: the tokens of each group may end in one."""
    return problem.m // tokens + min(problem.groups, problem.m) if problem.groups else -(-problem.m // tokens)


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced, except `late`; without `splits` or `runs`, by one of them."""
    part = {key: value for key, value in config.items() if value}
    choices = variant_of(problem, format_of(problem), target(problem), part)
    if config["splits"]:
        choices["runs"] = 0
    return complete(config, choices)


CODES = "wgmma_codes"
_TOKENS, _ROWS, _STAGES = 128, 128, {2: 7, 4: 6}  # stages by bytes of a result


def _refuses_codes(problem: Problem) -> str:
    """Refuse what is not codes of 8 bits by levels of 4 that were arranged for them."""
    p = problem.by_rows()
    if p.levels != "int4" or p.dtype not in weights.CODES:
        return "it multiplies codes of e4m3 and int8 by int4, which gemmery.cuda.weights.arrange_levels has arranged"
    if p.out not in ("bf16", "f16", "f32"):
        return f"it writes bf16, f16 and f32, not {p.out}"
    if p.batch > 1 or p.groups or p.scaled or p.scales == "blocks":
        return "it multiplies one matrix, without alpha and beta"
    if p.a_layout != "row" or p.alignments[0] % 16 or p.k % 16:
        return f"k={p.k}, rows of x at multiples of {p.alignments[0]} bytes: rows are multiples of 16 bytes; copy x"
    return format_of(p).refusal() or ("" if p.c_layout == "row" else "it writes rows whose elements are adjacent")


def _geometry_codes(name: str, problem: Problem, config: Config) -> Geometry:
    """Blocks that stay, with two warpgroups of 64 rows of W by 128 tokens."""
    stages, size, chunk = config["stages"], dtypes.get(problem.out).size, format_of(problem).chunk
    if not 2 <= stages <= _STAGES[size]:
        raise RefusedError(f"stages={stages}: a ring beside results of {size} bytes has 2 to {_STAGES[size]} stages")
    shared = stages * (_TOKENS * STEP + 2 * chunk) + 2 * _TOKENS * (64 * size + 16) + 16 * stages
    tiles = -(-problem.m // _TOKENS) * -(-problem.n // _ROWS)
    return Geometry(
        f"{name}.cu",
        instance(name, problem, template("CodeTiles", element(problem), _TOKENS, stages, size)),
        (min(tiles, config["blocks"]), 1, 1),
        (384, 1, 1),
        shared=shared,
        needs=90,
        instructions="wgmma",
        alone=True,
        overlaps=True,
        tile=(_TOKENS, _ROWS),
        maps=(MapBox("a", (STEP, _TOKENS)),),
        band=config["band"],
    )


def _resolve_codes(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced."""
    stages = _STAGES.get(dtypes.get(problem.out).size, 2)
    return complete(config, {"stages": stages, "band": 16, "blocks": target(problem).sms})


GEMM_QUANTIZED = (
    gpu_rung(
        NAME,
        idea="weights of 4 or 8 bits are unpacked in registers, which wgmma takes as its left operand",
        parent="gemv_quantized",
        dtypes=("bf16", "f16"),
        refuses=_refuses,
        bound=aligned_sums,
        geometry=_geometry,
        resolve=_resolve,
        space={
            "tokens": (0, *sorted({tile.tokens for tile in QUANTIZED})),
            "warpgroups": (0, 2, 3, 4),
            "blocks": (0, 1, 2),
            "ways": (0, 1, 2, 4),
            "stages": (0, 3, 4, 5, 6, 8, 12, 16, 20, 24),
            "resident": (0, 1, 2),
            "splits": (0, 1, 2, 4, 8),
            "runs": (0, 132, 264),
            "late": (0, 1),
            "turns": (0, 1, 2, 4),
            "shares": (0, 1, 2),
        },
        lesson=(
            "With rows of W as the M side and tokens as the N side, a product of 8 tokens takes a sixteenth of the "
            "cycles of one of 128, and no row of a tile is wasted. A register operand needs no way back to shared "
            "memory, so weights cross it in 4 bits. A bfloat16 whose high byte is zero is an integer times a power of "
            "two: one logical instruction and one multiply-add make two weights, with their factor, rounded once. What "
            "is left is latency: one thread must ask for all of W early enough, and few tokens need every "
            "multiprocessor, so warpgroups of a block share rows and take the steps of k in turn."
        ),
    ),
    gpu_rung(
        CODES,
        idea="weights of 4 bits become the 8-bit type of the tokens' codes, a sum of 128 of k has its factor",
        parent=NAME,
        dtypes=weights.CODES,
        refuses=_refuses_codes,
        bound=promoted,
        bounds={"int8": lambda k: -(-k // STEP) + 4},
        geometry=_geometry_codes,
        resolve=_resolve_codes,
        space={"stages": (0, 3, 5), "band": (0, 1, 4), "blocks": (0, 1, 7)},
        lesson=(
            "With many tokens tensor cores are the limit, and 8-bit types have twice the rate of halves. Each of the "
            "16 levels of 4 bits is a number of e4m3, and bits 0 to 15 of that type are just as many times 2^-9, so a "
            "level needs no table: its sign goes to the top, and a multiply-add of four bytes at a time does it. "
            "Registers hold the weights, tokens lie in shared memory, and while one warpgroup scales its sum of 128 of "
            "k and adds it in float32, the other one's products are under way."
        ),
    ),
)


CUDA: tuple[Rung, ...] = (
    *SIMT,
    *TILED,
    *TENSOR,
    *MMA,
    *WGMMA,
    *SPLIT,
    *SPLIT_FLOAT32,
    *OZAKI,
    *INTEGERS,
    *GROUPED,
    *GENERAL,
    *GEMV,
    *GEMV_QUANTIZED,
    *BATCHED,
)

# They multiply by weights that gemmery.cuda.weights arranged, and by nothing else: no product of `gemmery ladder`.
BY_WEIGHTS: tuple[Rung, ...] = GEMM_QUANTIZED
