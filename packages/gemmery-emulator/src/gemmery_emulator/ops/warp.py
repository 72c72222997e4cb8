"""Instructions of whole warps: shuffles, votes, matches, reductions, and products of matrices (mma.sync and wmma.mma).

NVIDIA, Parallel Thread Execution ISA 9.0, "Parallel Synchronization and Communication Instructions": a lane's
membermask names the lanes it waits for; lanes with different masks, such as tiles of 16 lanes, form separate groups.
"Warp Level Matrix Instructions": sums of integers are exact, those of f64 are chains of fused multiply-adds, and the
others are rounded as exact.py says: all bits are those of an H200. `issues` says how many machine instructions ptxas
makes for sm_90.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gemmery.dtypes import TENSOR_FLOAT8, Array
from gemmery_emulator import exact
from gemmery_emulator.exact import NORMAL, Added, SumRule
from gemmery_emulator.fragments import BY_COLUMNS, WMMA_16, Side, gathered, per_chunk, transposed, wmma_side
from gemmery_emulator.op import NUMPY, Meaning, Op
from gemmery_emulator.ops.convert import decoded

LANES = np.arange(32, dtype="i4")
# The value of an inactive lane, which the ISA leaves undefined: all bits set, which is a NaN and shows.
UNDEFINED = np.uint32(0xFFFFFFFF)


def _bits(lanes: Array) -> Array:
    """A mask of 32 bits for each last axis of 32 lanes."""
    return np.packbits(lanes, axis=-1, bitorder="little").view("u4")


# ---- shfl ----


# The lane that each lane reads, from its own number, b, and the lanes of its segment.
_SHUFFLES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "up": lambda lane, b, segment: lane - b,
    "down": lambda lane, b, segment: lane + b,
    "bfly": lambda lane, b, segment: lane ^ b,
    "idx": lambda lane, b, segment: lane & segment | b & ~segment,
}


def source_of(mode: str, lane: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """The lane that each lane reads in a shfl.sync.up, .down, .bfly or .idx, itself if the source is out of range, and
    whether it is in range.
    """
    segment = c >> 8 & 31
    limit = lane & segment | c & 31 & ~segment
    source = _SHUFFLES[mode](lane, b & 31, segment)
    inside = source >= limit if mode == "up" else source <= limit
    return np.where(inside, source, lane), inside


def sources(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """The same for the lanes of warps: (warps, 32), or one row for all warps."""
    # One row for all warps if the array repeats one value.
    b, c = ((x[:1] if x.strides[0] == 0 else x).astype("i4") for x in (b, c))
    source, inside = np.broadcast_arrays(*source_of(mode, LANES, b, c))
    return source, inside


def _shfl(mode: str, active: Array, a: Array, b: Array, c: Array, _mask: Array) -> Any:
    source, inside = sources(mode, b, c)
    if len(source) == 1:
        values, there = a[:, source[0]], active[:, source[0]]
    else:
        values, there = (np.take_along_axis(x, source, axis=1) for x in (a, active))
    if not there.all():
        values = np.where(there, values, UNDEFINED)
    return values, np.broadcast_to(inside, a.shape)


# ---- votes ----


def _ballot(active: Array, a: Array, mask: Array) -> Any:
    return _bits(active & a) & mask


_VOTES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "all": lambda active, a, mask: _ballot(active, ~a, mask) == 0,
    "any": lambda active, a, mask: _ballot(active, a, mask) != 0,
    "uni": lambda active, a, mask: (_ballot(active, ~a, mask) == 0) | (_ballot(active, a, mask) == 0),
}


def _elect(active: Array, mask: Array) -> tuple[Array, Array]:
    """The lowest participating lane."""
    members = _bits(active) & mask
    leader = np.bitwise_count(~members & (members - np.uint32(1))).astype("u4")
    return leader, leader == LANES


# ---- match ----


def _match_any(active: Array, a: Array, mask: Array) -> Array:
    same = _bits(a[:, :, None] == a[:, None, :])[..., 0]
    return same & _bits(active) & mask


def _match_all(active: Array, a: Array, mask: Array) -> tuple[Array, Array]:
    members = _bits(active) & mask
    agree = _match_any(active, a, mask) == members
    return np.where(agree, members, np.uint32(0)), agree


# ---- redux ----


def _redux(fold: np.ufunc, identity: Any, magnitude: bool, active: Array, a: Array, mask: Array) -> Any:
    a = np.abs(a) if magnitude else a
    if (mask == mask[:, :1]).all():
        members = active & (mask >> LANES.astype("u4") & 1).astype(bool)
        folded = fold.reduce(np.where(members, a, identity), axis=1, keepdims=True, dtype=a.dtype)
        return np.broadcast_to(folded, a.shape)
    members = active[:, None, :] & (mask[:, :, None] >> LANES.astype("u4") & 1).astype(bool)
    return fold.reduce(np.where(members, a[:, None, :], identity), axis=2, dtype=a.dtype)


def _reductions() -> dict[str, Op]:
    table = {}

    def add(name: str, kind: str, fold: np.ufunc, identity: float, magnitude: bool = False) -> None:
        meaning = partial(_redux, fold, np.dtype(NUMPY[kind]).type(identity), magnitude)
        table[f"redux.sync.{name}.{kind}"] = _exchange((kind,), (kind, "b32"), meaning, "redux")

    for kind in ("u32", "s32"):
        limits = np.iinfo(NUMPY[kind])
        add("add", kind, np.add, 0)
        add("min", kind, np.minimum, limits.max)
        add("max", kind, np.maximum, limits.min)
    add("and", "b32", np.bitwise_and, 0xFFFFFFFF)
    add("or", "b32", np.bitwise_or, 0)
    add("xor", "b32", np.bitwise_xor, 0)
    # sm_100a. Without .NaN any number beats a NaN, so NaN is the identity.
    for magnitude in (False, True):
        infix = ".abs" * magnitude
        add(f"min{infix}", "f32", np.fmin, np.nan, magnitude)
        add(f"max{infix}", "f32", np.fmax, np.nan, magnitude)
        add(f"min{infix}.NaN", "f32", np.minimum, np.inf, magnitude)
        add(f"max{infix}.NaN", "f32", np.maximum, -np.inf, magnitude)
    return table


def _exchange(results: tuple[str, ...], operands: tuple[str, ...], meaning: Callable[..., Any], kind: str) -> Op:
    """An instruction whose lanes wait for those that the last operand names."""
    return Op(results, operands, meaning, "warp", kind=kind, lanes="mask", effect=True)


Chain = Callable[[Array, Array, Array, Array], tuple[Array, Array]]

_HALF = np.arange(1 << 16, dtype="u2").view("f2").astype("f4")  # 30 % faster than a conversion, and it keeps NaNs


def _decoder(name: str) -> Callable[[Array], Array]:
    values = decoded(name).astype("f4")
    return lambda words: values.take(words.view("u1"))


# The elements of registers (warps, rows, words), exact, in the type of the sums.
DECODED: dict[str, Callable[[Array], Array]] = {
    "f64": lambda words: words,
    "tf32": lambda words: (words & np.uint32(0xFFFFE000)).view("f4"),  # the lower 13 bits are ignored
    "f16": lambda words: _HALF.take(words.view("u2")),
    "bf16": lambda words: (words.view("u2").astype("u4") << np.uint32(16)).view("f4"),
    **{name: _decoder(name) for name in TENSOR_FLOAT8},
    "s8": lambda words: words.view("i1").astype("f4"),
    "u8": lambda words: words.view("u1").astype("f4"),  # 32 products of 255 * 255 are below 2**24: exact in f32
}


def _halves(register: Array) -> Array:
    """Return the two f16 of each lane as f32: (warps, 32, 2)."""
    return _HALF.take(np.ascontiguousarray(register).view("u2")).reshape(*register.shape, 2)


# C as the two neighbors that a lane holds of each pattern of 8 x 8.


def _to_pairs(c: Sequence[Array], kind: str) -> list[tuple[Array, Array]]:
    if kind == "f16":
        return [(pair[..., 0], pair[..., 1]) for pair in map(_halves, c)]
    return list(zip(c[::2], c[1::2], strict=True))


def _elements(a: Side, b: Side, operands: Sequence[Array], transposed: bool) -> tuple[Array, Array]:
    """Return A (warps, rows, k) and B (warps, n, k) from registers in the order of PTX."""
    of_b, of_c = a.registers, a.registers + b.registers
    rows = DECODED[a.type](gathered(operands[:of_b], a))
    columns = DECODED[b.type](gathered(operands[of_b:of_c], b))
    return (columns, rows) if transposed else (rows, columns)


def _whole(a: Side, b: Side, saturates: bool, transposed: bool, _active: Array, *operands: Array) -> tuple[Array, ...]:
    """Compute D = A B + C in s32; `transposed` if patterns of C and D hold columns."""
    limits = np.iinfo("i4")
    rows, columns = _elements(a, b, operands, transposed)
    warps, n, k = columns.shape
    # One product for each 8 columns: BLAS takes 0.25 us for 16 x 8 x 16, a loop over k 1 us.
    products = rows[:, None] @ columns.reshape(warps, n // 8, 8, k).transpose(0, 1, 3, 2)
    parts = products.reshape(warps, -1, 32, 2).astype("i8" if saturates else "i4")
    c = operands[a.registers + b.registers :]
    totals = (parts[:, i // 2, :, i % 2] + before for i, before in enumerate(c))
    return tuple(np.clip(total, limits.min, limits.max).astype("i4") if saturates else total for total in totals)


def _rounded(
    a: Side,
    b: Side,
    types: tuple[str, str],
    rule: SumRule,
    transposed: bool,
    _active: Array,
    *operands: Array,
    core: Added = exact.added,
) -> tuple[Array, ...]:
    """Compute D = A B + C in f32 or f16, the types of C and D; `transposed` if their patterns hold columns."""
    # Hopper has 8-bit floats only in wgmma. For mma.sync ptxas converts to f16, makes two HMMA of it, one of the lower
    # halves of all registers and one of the upper, and adds C last.
    by_halves = a.type in TENSOR_FLOAT8
    rows, columns = _elements(a, b, operands, transposed)
    if by_halves:
        order = np.argsort(np.arange(a.depth) % 4 // 2, kind="stable")
        rows, columns = rows[:, :, order], columns[:, :, order]
    warps, n, k = columns.shape
    pairs = _to_pairs(operands[a.registers + b.registers :], types[0])
    patterns = np.empty((warps, len(pairs), 32, 2), np.float32)
    for pattern, pair in enumerate(pairs):
        patterns[:, pattern, :, 0], patterns[:, pattern, :, 1] = pair
    c: Array = patterns.reshape(-1, rows.shape[1], 8)
    rows = rows if n == 8 else np.repeat(rows, n // 8, axis=0)
    total = exact.chained(core, np.zeros_like(c) if by_halves else c, rows, columns.reshape(-1, 8, k), rule)
    if by_halves:
        total = exact.usual(total + c)
    parts = total.reshape(warps, -1, 32, 2)
    if types[1] == "f16":
        packed = parts.astype("f2").view("u4")
        return tuple(np.ascontiguousarray(packed[:, pattern, :, 0]) for pattern in range(len(pairs)))
    return tuple(np.ascontiguousarray(parts[:, i // 2, :, i % 2]) for i in range(2 * len(pairs)))


def _chained(a: Side, b: Side, _active: Array, *operands: Array, core: Chain = exact.chain) -> tuple[Array, ...]:
    """Compute D = A B + C in f64, four words along k after the other, on registers of 8 rows by 4 words."""
    totals = list(operands[a.registers + b.registers :])
    for chunk in range(a.chunks):
        for place, (pair, block) in enumerate(product(range(b.blocks), range(a.blocks))):
            rows, columns = operands[a.register(block, chunk)], operands[a.registers + b.register(pair, chunk)]
            both = slice(2 * place, 2 * place + 2)
            totals[both] = core(rows, columns, *totals[both])
    return tuple(totals)


def _op(a: Side, b: Side, c: str, d: str, issues: int = 1, transposed: bool = False, depth: int = 0) -> Op:
    """Return the entry of an instruction; 0 for a `depth` that suits the type."""
    patterns = a.blocks * b.blocks
    word = "f64" if a.type == "f64" else "b32"
    count = {name: patterns if name == "f16" else 2 * patterns for name in (c, d)}
    types = {"f16": "b32", "s32.satfinite": "s32"}
    meaning: Meaning
    core: Callable[..., Any] | None = None  # the function that `meaning` takes as `core`
    if a.type == "f64":
        meaning, core = partial(_chained, a, b), exact.chain
    elif d.startswith("s32"):
        meaning = partial(_whole, a, b, d == "s32.satfinite", transposed)
    else:
        by_halves = a.type in TENSOR_FLOAT8
        normal = NORMAL["f16" if by_halves else a.type]
        rule = SumRule(depth or (a.depth // 2 if by_halves else a.depth), normal, normal, halves=c == d == "f16")
        meaning, core = partial(_rounded, a, b, (c, d), rule, transposed), exact.added
    return Op(
        results=(types.get(d, d),) * count[d],
        operands=(word,) * (a.registers + b.registers) + (types.get(c, c),) * count[c],
        meaning=meaning,
        core=core,
        scope="warp",
        kind="mma",
        lanes="warp",
        effect=True,
        flops=2 * patterns * 64 * a.depth,
        issues=issues,
    )


def _mma() -> dict[str, Op]:
    """mma.sync, A by rows and B by columns. ptxas refuses f16 with f32 in C and D, and f64 by 8 x 8 with k above 4."""
    table = {}

    def add(shape: tuple[int, int, int], kinds: str, a: str, b: str, c: str, issues: int = 1) -> None:
        m, n, k = shape
        chunks = k // per_chunk(a)
        side_a, side_b = Side(a, m // 8, chunks, m // 8), Side(b, n // 8, chunks)
        table[f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{kinds}"] = _op(side_a, side_b, c.partition(".")[0], c, issues)

    for k, c in product((8, 16), ("f16", "f32")):
        add((16, 8, k), f"{c}.f16.f16.{c}", "f16", "f16", c)
    for k in (8, 16):
        add((16, 8, k), "f32.bf16.bf16.f32", "bf16", "bf16", "f32")
    for k in (4, 8):
        add((16, 8, k), "f32.tf32.tf32.f32", "tf32", "tf32", "f32")
    for shape, a, b in product(((8, 8, 16), (16, 8, 16), (16, 8, 32)), ("s8", "u8"), ("s8", "u8")):
        add(shape, f"s32.{a}.{b}.s32", a, b, "s32")
        add(shape, f"satfinite.s32.{a}.{b}.s32", a, b, "s32.satfinite")
    # 8-bit floats with two HMMA of half the k
    for k, a, b, c in product((16, 32), TENSOR_FLOAT8, TENSOR_FLOAT8, ("f16", "f32")):
        add((16, 8, k), f"{c}.{a}.{b}.{c}", a, b, c, issues=2)
    for shape, rounding in product(((8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)), ("", "rn.")):
        add(shape, f"{rounding}f64.f64.f64.f64", "f64", "f64", "f64")
    return table


def _wmma() -> dict[str, Op]:
    """wmma.mma on fragments as fragments.py loads them, independent of their layouts in memory."""
    kinds = [(shape, f"{d}.{c}", "f16", c, d, 2) for shape, c, d in product(WMMA_16, ("f16", "f32"), ("f16", "f32"))]
    kinds += [(shape, "f32.bf16.bf16.f32", "bf16", "f32", "f32", 2) for shape in WMMA_16]
    for shape, a, satfinite in product(WMMA_16, ("s8", "u8"), ("", ".satfinite")):
        kinds.append((shape, f"s32.{a}.{a}.s32{satfinite}", a, "s32", f"s32{satfinite}", 2))
    kinds.append(("m16n16k8", "f32.tf32.tf32.f32", "tf32", "f32", "f32", 4))  # HMMA.1684
    kinds += [("m8n8k4", f"{rounding}f64.f64.f64.f64", "f64", "f64", "f64", 1) for rounding in ("", "rn.")]
    table = {}
    for shape, types, a, c, d, issues in kinds:
        sides = wmma_side("a", shape, a), wmma_side("b", shape, a)
        op = _op(*sides, c, d, issues, shape in BY_COLUMNS, depth=4 if a == "tf32" else 0)
        for layouts in ("row.row", "row.col", "col.row", "col.col"):
            table[f"wmma.mma.sync.aligned.{layouts}.{shape}.{types}"] = op
    return table


EXCHANGES: dict[str, Op] = {
    **{
        f"shfl.sync.{mode}.b32": _exchange(("b32", "pred"), ("b32",) * 4, partial(_shfl, mode), "shfl")
        for mode in _SHUFFLES
    },
    **{
        f"vote.sync.{name}.pred": _exchange(("pred",), ("pred", "b32"), meaning, "vote")
        for name, meaning in _VOTES.items()
    },
    "vote.sync.ballot.b32": _exchange(("b32",), ("pred", "b32"), _ballot, "vote"),
    "activemask.b32": Op(
        *(("b32",), (), lambda active: np.broadcast_to(_bits(active), active.shape), "warp"), kind="vote"
    ),
    "elect.sync": _exchange(("b32", "pred"), ("b32",), _elect, "elect"),
    **{f"match.any.sync.{kind}": _exchange(("b32",), (kind, "b32"), _match_any, "match") for kind in ("b32", "b64")},
    **{
        f"match.all.sync.{kind}": _exchange(("b32", "pred"), (kind, "b32"), _match_all, "match")
        for kind in ("b32", "b64")
    },
    **_reductions(),
    "movmatrix.sync.aligned.m8n8.trans.b16": Op(
        *(("b32",), ("b32",), lambda active, a: transposed(a), "warp"), kind="movmatrix", lanes="warp", effect=True
    ),
}
MATRICES: dict[str, Op] = _mma() | _wmma()
TABLE = EXCHANGES | MATRICES
