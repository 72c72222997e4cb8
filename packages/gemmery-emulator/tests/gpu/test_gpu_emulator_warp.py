"""The emulator's matrix and warp instructions against the hardware's: equal bits."""

import numpy as np
import pytest

from gemmery.cuda import driver
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ops.warp import EXCHANGES as WARP
from gemmery_emulator.ops.warp import MATRICES as MMA
from gpu_operands import functions, launch
from test_emulator_ops_mma import ORACLES as PRODUCTS
from test_emulator_ops_mma import SIZE, extents, real, small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

WARPS = 4
ON_HOPPER = {opcode: op for opcode, op in WARP.items() if not (opcode.startswith("redux") and opcode.endswith(".f32"))}
OPS = MMA | ON_HOPPER
REGISTERS = {"f32": "f32", "f64": "f64", "b64": "b64", "pred": "pred"}  # all others are of 32 bits
SPREAD = {"redux.sync.and.b32": np.bitwise_or, "redux.sync.or.b32": np.bitwise_and}  # else all bits become alike
HALVES = np.where(np.arange(32) < 16, 0xFFFF, 0xFFFF0000).astype(np.uint32)

# ---- operands: each (WARPS, 32)


def cut(opcode):
    """How many registers A, B and C have."""
    a, b, *_ = PRODUCTS[opcode]
    m, n, k = extents(opcode)
    if opcode.startswith("wmma") and a == "f16":
        of_a = of_b = 8
    else:
        of_a, of_b = (count * SIZE[kind] // 32 // max(32, SIZE[kind]) for count, kind in ((m * k, a), (k * n, b)))
    return of_a, of_b, len(MMA[opcode].operands) - of_a - of_b


def fragment(rng, kind, held, registers):
    """Random elements of a fragment that holds `held` registers, repeated to as many as it is given in."""
    width = max(32, SIZE[kind])
    bits = (small if kind == "s32" else real)(rng, kind, (WARPS, 32, held * width // SIZE[kind]))
    words = np.ascontiguousarray(bits).view(f"u{width // 8}")
    return [np.ascontiguousarray(words[:, :, i % held]) for i in range(registers)]


def of_product(opcode, rng):
    m, n, k = extents(opcode)
    elements = m * k, k * n, m * n
    found = []
    for kind, count, registers in zip(PRODUCTS[opcode], elements, cut(opcode), strict=False):
        found += fragment(rng, kind, count * SIZE[kind] // 32 // max(32, SIZE[kind]), registers)
    return typed(found, MMA[opcode].operands)


def of_warp(opcode, rng):
    """Any bits; few values for match, few and many true ones for vote; the last operand says which lanes take part."""
    kinds = WARP[opcode].operands
    found = []
    for kind in kinds:
        if kind == "pred":
            found.append(rng.random((WARPS, 32)) < np.array([0.5, 0, 1, 0.95])[:, None])
        else:
            found.append(rng.integers(0, 1 << 32, (WARPS, 32)).astype(NUMPY[kind]))
    name = opcode.split(".")[0]
    if opcode in SPREAD:
        found[0] = SPREAD[opcode].reduce(rng.integers(0, 1 << 32, (4, WARPS, 32), np.uint32))
    if name == "match":
        found[0] %= np.array([2, 1, 5, 9], found[0].dtype)[:, None]
    if found and name != "movmatrix":
        halved = name in ("redux", "vote") or opcode.startswith("match.any")
        found[-1] = np.broadcast_to(HALVES if halved else np.uint32(0xFFFFFFFF), (WARPS, 32))
    return found


def typed(registers, kinds):
    return [x.view(NUMPY[kind]) for x, kind in zip(registers, kinds, strict=True)]


# ---- the hardware


def kernel(name, opcode):
    """PTX of one instruction: operands lie one after the other in cells of 8 bytes a thread, results behind them."""
    op = OPS[opcode]
    kinds = [REGISTERS.get(kind, "b32") for kind in (*op.operands, *op.results)]
    named = [f"%x{i}" for i in range(len(kinds))]
    given, taken = named[: len(op.operands)], named[len(op.operands) :]
    lines = [
        f".visible .entry {name}(.param .u64 data) {{ .reg .b64 %at, %off; .reg .b32 %t<3>;",
        *(f".reg .{kind} {x};" for kind, x in zip(kinds, named, strict=True)),
        "ld.param.u64 %at, [data]; mov.u32 %t0, %ctaid.x; mov.u32 %t1, %tid.x;",
        "mad.lo.u32 %t0, %t0, 32, %t1; mul.wide.u32 %off, %t0, 8; add.u64 %at, %at, %off;",
    ]
    places = [f"[%at+{8 * 32 * WARPS * i}]" for i in range(len(kinds))]
    for x, kind, place in zip(given, kinds, places, strict=False):
        load = f"ld.global.b32 %t2, {place}; setp.ne.s32 {x}, %t2, 0;"
        lines.append(load if kind == "pred" else f"ld.global.{kind} {x}, {place};")
    lines.append(f"{opcode} {arguments(opcode, given, taken)};")
    for x, kind, place in zip(taken, kinds[len(given) :], places[len(given) :], strict=True):
        store = f"selp.b32 %t2, 1, 0, {x}; st.global.b32 {place}, %t2;"
        lines.append(store if kind == "pred" else f"st.global.{kind} {place}, {x};")
    return "\n".join([*lines, "ret; }\n"])


def arguments(opcode, given, taken):
    if opcode not in MMA:
        return ", ".join(["|".join(taken), *given])
    of_a, of_b, _ = cut(opcode)
    groups = taken, given[:of_a], given[of_a : of_a + of_b], given[of_a + of_b :]
    return ", ".join(f"{{{', '.join(group)}}}" for group in groups)


def launched(function, op, operands):
    """The results that the hardware gives."""
    cells = np.zeros((len(operands) + len(op.results), WARPS, 32), np.uint64)
    for cell, x in zip(cells, operands, strict=False):
        wide = x.astype(np.uint32) if x.dtype == bool else x
        cell[:] = np.ascontiguousarray(wide).view(f"u{wide.itemsize}")
    memory = driver.Memory(cells.nbytes)
    memory.write(cells)
    launch(function, WARPS, 32, memory)
    memory.read(cells)
    kinds = [np.dtype(NUMPY[kind]) for kind in op.results]
    taken = zip(cells[len(operands) :], kinds, strict=True)
    return [x != 0 if kind.kind == "b" else x.astype(f"u{kind.itemsize}").view(kind) for x, kind in taken]


@pytest.fixture(scope="module")
def both():
    """Of each opcode its operands, what the hardware gives, and what the emulator gives."""
    if driver.device().capability != 90:
        pytest.skip("needs compute capability 9.0")
    rng = np.random.default_rng(3)
    text = ".version 8.7\n.target sm_90a\n.address_size 64\n"
    text += "".join(kernel(f"k{i}", opcode) for i, opcode in enumerate(OPS))
    found = {}
    made = functions(text, [f"k{i}" for i in range(len(OPS))])
    for function, (opcode, op) in zip(made, OPS.items(), strict=True):
        operands = of_product(opcode, rng) if opcode in MMA else of_warp(opcode, rng)
        found[opcode] = operands, launched(function, op, operands), emulated(op, operands)
    return found


def emulated(op, operands):
    with np.errstate(all="ignore"):
        results = op.meaning(np.ones((WARPS, 32), bool), *operands)
    return results if isinstance(results, tuple) else (results,)


# ---- tests


@pytest.mark.parametrize("opcode", OPS)
def test_the_results_are_equal(both, opcode):
    """Sums, votes, shuffles and reductions: every bit of every lane, and so which lane holds what."""
    _, theirs, ours = both[opcode]
    for x, y in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(x, np.broadcast_to(y, (WARPS, 32)))
