"""mma.sync and wmma.mma of the emulator against products written out element by element, and where wmma reaches."""

import re
import struct
from functools import cache
from itertools import product

import numpy as np
import pytest

from gemmery.errors import EmulationError
from gemmery_emulator import fragments
from gemmery_emulator.instructions import opcode as read
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ops.warp import MATRICES as MMA

WARPS = 3
LAYOUTS = ("row.row", "row.col", "col.row", "col.col")
WMMA_SHAPES = ("m16n16k16", "m32n8k16", "m8n32k16")
ROUNDOFF = {"f16": 2.0**-11, "f32": 2.0**-24, "f64": 2.0**-53}

# ---- which lane holds what, as the figures of the ISA's "Matrix Fragments for mma" put it: row and column of element i
# of a lane's fragment, from group = lane / 4 and thread = lane % 4


def a_16x16_16(group, thread, i):
    return group + (0 if i < 2 or 4 <= i < 6 else 8), 2 * thread + (i & 1) + (0 if i < 4 else 8)


def a_16x8_16(group, thread, i):
    return group + (0 if i < 2 else 8), 2 * thread + (i & 1)


def a_16x4(group, thread, i):
    return group + 8 * i, thread


def a_16x8(group, thread, i):
    return group + (0 if i in (0, 2) else 8), thread + (0 if i in (0, 1) else 4)


def a_16x16_64(group, thread, i):
    return (group, 2 * i + thread) if i % 2 == 0 else (group + 8, 2 * i - 2 + thread)


def a_8x16_8(group, thread, i):
    return group, 4 * thread + i


def a_16x16_8(group, thread, i):
    return group + (0 if i < 4 else 8), 4 * thread + (i & 3)


def a_16x32_8(group, thread, i):
    return group + (0 if i < 4 or 8 <= i < 12 else 8), 4 * thread + (i & 3) + (0 if i < 8 else 16)


def b_by_1(group, thread, i):
    return thread + 4 * i, group


def b_by_2(group, thread, i):
    return 2 * thread + (i & 1) + (0 if i < 2 else 8), group


def b_by_4(group, thread, i):
    return 4 * thread + (i & 3) + (0 if i < 4 else 16), group


def sums(group, thread, i):
    return group + (0 if i < 2 else 8), 2 * thread + (i & 1)


A = {
    (16, "m16n8k16"): a_16x16_16,
    (16, "m16n8k8"): a_16x8_16,
    (32, "m16n8k4"): a_16x4,
    (32, "m16n8k8"): a_16x8,
    (64, "m8n8k4"): a_16x4,
    (64, "m16n8k4"): a_16x4,
    (64, "m16n8k8"): a_16x8,
    (64, "m16n8k16"): a_16x16_64,
    (8, "m8n8k16"): a_8x16_8,
    (8, "m16n8k16"): a_16x16_8,
    (8, "m16n8k32"): a_16x32_8,
}
B = {8: b_by_4, 16: b_by_2, 32: b_by_1, 64: b_by_1}

# ---- element types


def e4m3(bits):
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if bits & 127 == 127:
        return float("nan")
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if bits >> 7 else size


def float32(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def half(bits):
    return struct.unpack("<e", struct.pack("<H", bits))[0]


VALUE = {
    "f64": lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0],
    "f32": float32,
    "tf32": lambda bits: float32(bits >> 13 << 13),
    "f16": half,
    "bf16": lambda bits: float32(bits << 16),
    "e4m3": e4m3,
    "e5m2": lambda bits: half(bits << 8),
    "s8": lambda bits: bits - 256 if bits > 127 else bits,
    "u8": lambda bits: bits,
    "s32": lambda bits: bits - 2**32 if bits >> 31 else bits,
}
SIZE = {"f64": 64, "f32": 32, "tf32": 32, "s32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
VALUE_AT = np.vectorize(lambda bits, kind: VALUE[kind](int(bits)), otypes=[object], excluded=["kind"])


@cache
def integers(kind):
    """The bits of -4 ... 4, as many as the type has: sums of their products are exact in every type, in any order."""
    if kind == "f64":
        return [int(np.float64(i).view("u8")) for i in range(-4, 5)]
    if SIZE[kind] == 32:
        return [int(np.float32(i).view("u4")) for i in range(-4, 5)]
    return [bits for bits in range(2 ** SIZE[kind]) if VALUE[kind](bits) in range(-4, 5)]


def small(rng, kind, shape):
    """Random small integers as bits."""
    if kind == "s32":
        return rng.integers(0, 2**32, shape, dtype="u4")
    return rng.choice(np.array(integers(kind), f"u{SIZE[kind] // 8}"), shape)


def real(rng, kind, shape):
    """Random reals of both signs as bits, with random lower bits in tf32."""
    x = rng.standard_normal(shape)
    if kind in ("f64", "f32", "f16"):
        return x.astype(f"f{SIZE[kind] // 8}").view(f"u{SIZE[kind] // 8}")
    if kind in ("tf32", "bf16"):
        bits = x.astype("f4").view("u4")
        return bits if kind == "tf32" else (bits >> 16).astype("u2")
    if kind[0] == "e":  # no sum beyond f16
        return rng.choice(np.array([bits for bits in range(256) if abs(VALUE[kind](bits)) < 4], "u1"), shape)
    return rng.integers(0, 256, shape, dtype="u1")


def values(bits, kind):
    return VALUE_AT(bits, kind=kind)


# ---- opcodes


def opcodes():
    """Every product there is, each with the types of A, B, C and D."""
    found = {}
    for shape, c in product(("m16n8k8", "m16n8k16"), ("f16", "f32")):
        found[f"mma.sync.aligned.{shape}.row.col.{c}.f16.f16.{c}"] = ("f16", "f16", c, c)
    for shape in ("m16n8k8", "m16n8k16"):
        found[f"mma.sync.aligned.{shape}.row.col.f32.bf16.bf16.f32"] = ("bf16", "bf16", "f32", "f32")
    for shape in ("m16n8k4", "m16n8k8"):
        found[f"mma.sync.aligned.{shape}.row.col.f32.tf32.tf32.f32"] = ("tf32", "tf32", "f32", "f32")
    for shape, a, b in product(("m8n8k16", "m16n8k16", "m16n8k32"), ("s8", "u8"), ("s8", "u8")):
        for saturating in ("", ".satfinite"):
            found[f"mma.sync.aligned.{shape}.row.col{saturating}.s32.{a}.{b}.s32"] = (a, b, "s32", "s32")
    for shape, a, b in product(("m16n8k16", "m16n8k32"), ("e4m3", "e5m2"), ("e4m3", "e5m2")):
        for c in ("f16", "f32"):
            found[f"mma.sync.aligned.{shape}.row.col.{c}.{a}.{b}.{c}"] = (a, b, c, c)
    for shape, rounding in product(("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"), ("", ".rn")):
        found[f"mma.sync.aligned.{shape}.row.col{rounding}.f64.f64.f64.f64"] = ("f64",) * 4
    for layouts, shape in product(LAYOUTS, WMMA_SHAPES):
        for c, d in product(("f16", "f32"), ("f16", "f32")):
            found[f"wmma.mma.sync.aligned.{layouts}.{shape}.{d}.{c}"] = ("f16", "f16", c, d)
        found[f"wmma.mma.sync.aligned.{layouts}.{shape}.f32.bf16.bf16.f32"] = ("bf16", "bf16", "f32", "f32")
        for a, saturating in product(("s8", "u8"), ("", ".satfinite")):
            found[f"wmma.mma.sync.aligned.{layouts}.{shape}.s32.{a}.{a}.s32{saturating}"] = (a, a, "s32", "s32")
    for layouts in LAYOUTS:
        found[f"wmma.mma.sync.aligned.{layouts}.m16n16k8.f32.tf32.tf32.f32"] = ("tf32", "tf32", "f32", "f32")
        for rounding in ("", ".rn"):
            found[f"wmma.mma.sync.aligned.{layouts}.m8n8k4{rounding}.f64.f64.f64.f64"] = ("f64",) * 4
    return found


ORACLES = opcodes()
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


def extents(opcode):
    return tuple(int(extent) for extent in SHAPE.search(opcode).groups())


# ---- matrices into registers and back


def spread(matrix, place, kind):
    """A matrix of bits (warps, rows, columns) as the registers of mma.sync: (warps, 32) each."""
    warps, rows, columns = matrix.shape
    count = rows * columns // 32
    elements = np.zeros((warps, 32, count), matrix.dtype)
    for lane, i in product(range(32), range(count)):
        elements[:, lane, i] = matrix[:, *place(lane // 4, lane % 4, i)]
    words = elements.view("u8" if kind == "f64" else "u4")
    return [np.ascontiguousarray(words[:, :, i]) for i in range(words.shape[2])]


def collected(registers, rows, columns, kind):
    """The sums of mma.sync as a matrix of bits."""
    count = rows * columns // 32
    elements = np.stack(registers, axis=2).view(f"u{SIZE[kind] // 8}")
    assert elements.shape[2] == count
    matrix = np.zeros((len(elements), rows, columns), elements.dtype)
    for lane, i in product(range(32), range(count)):
        matrix[:, *sums(lane // 4, lane % 4, i)] = elements[:, lane, i]
    return matrix


def in_memory(matrix, layout, stride):
    """A matrix of bits as it lies in memory, with a gap after each line: (warps, elements)."""
    lines = matrix if layout == "row" else matrix.transpose(0, 2, 1)
    held = np.full((lines.shape[0], lines.shape[1], stride), 0x55, matrix.dtype)
    held[:, :, : lines.shape[2]] = lines
    return held.reshape(len(held), -1)


def wmma_load(opcode, memory, stride):
    """What wmma.load does, by bytes and lanes."""
    fragment = fragments.wmma_fragment(read(opcode))
    held = memory.view("u1")
    registers = [None] * fragment.registers
    for piece in fragment.pieces:
        at = (piece.major * stride + piece.minor) * fragment.size
        if piece.matrices:
            rows = np.stack([held[:, start : start + 16] for start in at], axis=1)
            got = fragments.loaded(rows, piece.transposed)
        else:
            lanes = np.stack([held[:, start : start + piece.width] for start in at], axis=1)
            got = [np.ascontiguousarray(lanes.view(piece.dtype)[:, :, i]) for i in range(len(piece.registers))]
        piece.put(got, registers)
    count = fragment.registers // fragment.copies
    return registers[:count] * fragment.copies


def wmma_store(opcode, registers, memory, stride):
    """What wmma.store does, by bytes and lanes."""
    fragment = fragments.wmma_fragment(read(opcode))
    held = memory.view("u1")
    for piece in fragment.pieces:
        at = (piece.major * stride + piece.minor) * fragment.size
        lanes = np.stack(piece.get(registers), axis=2).view("u1")
        for lane, start in enumerate(at):
            held[:, start : start + piece.width] = lanes[:, lane]


@pytest.fixture(autouse=True)
def quiet():
    """As the machine runs."""
    with np.errstate(all="ignore"):
        yield


def typed(registers, kinds):
    return [x.view(NUMPY[kind]) for x, kind in zip(registers, kinds, strict=True)]


ACTIVE = np.ones((WARPS, 32), bool)


def by_mma(opcode, a, b, c):
    kinds, op = ORACLES[opcode], MMA[opcode]
    size, shape = SIZE[kinds[0]], SHAPE.search(opcode)[0]
    registers = spread(a, A[size, shape], kinds[0]) + spread(b, B[size], kinds[1]) + spread(c, sums, kinds[2])
    d = op.meaning(ACTIVE, *typed(registers, op.operands))
    assert [x.dtype for x in d] == [np.dtype(NUMPY[kind]) for kind in op.results]
    assert all(x.shape == (WARPS, 32) for x in d)
    return collected(d, *c.shape[1:], kinds[3])


def by_wmma(opcode, a, b, c, space=".shared", c_layout="row"):
    kinds, op, shape = ORACLES[opcode], MMA[opcode], SHAPE.search(opcode)[0]
    layouts = opcode.split(".")[4:6]
    registers, stride = [], 48
    for operand, layout, matrix, kind in zip("abc", [*layouts, c_layout], (a, b, c), kinds, strict=False):
        load = f"wmma.load.{operand}.sync.aligned.{layout}.{shape}{space}.{kind}"
        registers += wmma_load(load, in_memory(matrix, layout, stride), stride)
    d = op.meaning(ACTIVE, *typed(registers, op.operands))
    assert [x.dtype for x in d] == [np.dtype(NUMPY[kind]) for kind in op.results]
    memory = in_memory(np.zeros(c.shape, f"u{SIZE[kinds[3]] // 8}"), c_layout, stride)
    wmma_store(f"wmma.store.d.sync.aligned.{c_layout}.{shape}{space}.{kinds[3]}", d, memory, stride)
    rows, columns = c.shape[1:] if c_layout == "row" else c.shape[:0:-1]
    lines = memory.reshape(WARPS, -1, stride)
    assert (lines[:, :, columns:] == 0x55).all()  # gaps are left alone
    lines = lines[:, :rows, :columns]
    return lines if c_layout == "row" else lines.transpose(0, 2, 1)


def operands(opcode, make, seed=5):
    m, n, k = extents(opcode)
    rng = np.random.default_rng(seed)
    a, b, c, _ = ORACLES[opcode]
    return make(rng, a, (WARPS, m, k)), make(rng, b, (WARPS, k, n)), make(rng, c, (WARPS, m, n))


def multiplied(opcode, a, b, c, **how):
    return (by_mma if opcode.startswith("mma") else by_wmma)(opcode, a, b, c, **how)


def wrapped(total, opcode):
    if "satfinite" in opcode:
        return max(-(2**31), min(2**31 - 1, total))
    return (total + 2**31) % 2**32 - 2**31


# ---- tests


@pytest.mark.parametrize("opcode", ORACLES)
def test_integers_are_exact(opcode):
    a, b, c = operands(opcode, small)
    kinds = ORACLES[opcode]
    expected = values(a, kinds[0]) @ values(b, kinds[1]) + values(c, kinds[2])
    if kinds[3] == "s32":
        expected = np.vectorize(wrapped, otypes=[object])(expected, opcode)
    assert (values(multiplied(opcode, a, b, c), kinds[3]) == expected).all()


@pytest.mark.parametrize("opcode", [opcode for opcode in ORACLES if "s32" not in opcode])
def test_reals_are_within_k_roundings(opcode):
    a, b, c = operands(opcode, real)
    kinds = ORACLES[opcode]
    exact = [
        np.vectorize(np.longdouble, otypes=["g"])(values(x, kind)) for x, kind in zip((a, b, c), kinds, strict=False)
    ]
    expected, size = exact[0] @ exact[1] + exact[2], abs(exact[0]) @ abs(exact[1]) + abs(exact[2])
    found = values(multiplied(opcode, a, b, c), kinds[3]).astype("g")
    summed = ROUNDOFF["f64" if kinds[0] == "f64" else "f32"] * (extents(opcode)[2] + 1)
    if kinds[0][0] == "e":  # two sums are written before the last one
        summed += 2 * ROUNDOFF[kinds[3]]
    assert (abs(found - expected) <= summed * size + ROUNDOFF[kinds[3]] * abs(expected)).all()


@pytest.mark.parametrize(("shape", "kind", "part"), [("m16n16k16", "f16", 16), ("m16n16k8", "tf32", 4)])
def test_wmma_adds_as_mma_on_halves_of_its_columns(shape, kind, part):
    """In tf32 on halves of k too, which are rounded one after the other."""
    types = "f32.f32" if kind == "f16" else f"f32.{kind}.{kind}.f32"
    whole = f"wmma.mma.sync.aligned.row.col.{shape}.{types}"
    a, b, c = operands(whole, real)
    found = multiplied(whole, a, b, c)
    for n in (slice(0, 8), slice(8, 16)):
        sums_before = np.ascontiguousarray(c[:, :, n])
        for k in range(0, a.shape[2], part):
            one = f"mma.sync.aligned.m16n8k{part}.row.col.f32.{kind}.{kind}.f32"
            sums_before = multiplied(one, a[:, :, k : k + part], b[:, k : k + part, n], sums_before)
        assert (found[:, :, n] == sums_before).all()


@pytest.mark.parametrize("opcode", [opcode for opcode in ORACLES if ".s32" in opcode])
def test_bytes_at_their_limits_wrap_or_saturate(opcode):
    kinds, (m, n, k) = ORACLES[opcode], extents(opcode)
    low, high = ({"s8": (0x80, 0x7F), "u8": (0, 0xFF)}[kind] for kind in kinds[:2])
    a, b = np.full((WARPS, m, k), low[0], "u1"), np.full((WARPS, k, n), high[1], "u1")
    a[1:] = low[1]
    c = np.full((WARPS, m, n), 0x7FFFFFFF, "u4")
    c[0] = 0x80000000
    expected = np.vectorize(wrapped, otypes=[object])(
        values(a, kinds[0]) @ values(b, kinds[1]) + values(c, kinds[2]), opcode
    )
    assert (values(multiplied(opcode, a, b, c), "s32") == expected).all()


@pytest.mark.parametrize("opcode", [o for o in ORACLES if "s32" not in o and (o.startswith("mma") or ".row.col." in o)])
def test_infinity_and_nan_pass_through(opcode):
    kinds, (_, n, k) = ORACLES[opcode], extents(opcode)
    a, b, c = operands(opcode, small)
    infinite = {"f64": 0x7FF << 52, "tf32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80, "e5m2": 0x7C, "e4m3": 0x7F}
    a[0, 1, k - 1], b[1, 0, n - 1] = infinite[kinds[0]], infinite[kinds[1]]
    exact = [values(x, kind).astype(float) for x, kind in zip((a, b, c), kinds, strict=False)]
    expected = (exact[0][:, :, :, None] * exact[1][:, None]).sum(axis=2) + exact[2]
    found = values(multiplied(opcode, a, b, c), kinds[3]).astype(float)
    assert np.isfinite(expected).all(axis=(1, 2)).tolist() == [False, False, True]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["f16", "bf16", "e4m3", "e5m2"])
def test_every_value_of_a_type_is_read_exactly(kind):
    opcode = {
        "f16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "e4m3": "mma.sync.aligned.m16n8k16.row.col.f32.e4m3.e4m3.f32",
        "e5m2": "mma.sync.aligned.m16n8k16.row.col.f32.e5m2.e5m2.f32",
    }[kind]
    bits = np.arange(2 ** SIZE[kind], dtype=f"u{SIZE[kind] // 8}")
    one = next(bit for bit in bits if VALUE[kind](int(bit)) == 1)
    expected = values(bits, kind).astype("f4")
    finite = np.isfinite(expected)
    bits, expected = np.resize(bits[finite], -(-finite.sum() // 128) * 128), expected[finite]
    a = np.zeros((len(bits) // 128, 16, 16), bits.dtype)
    for first in range(0, 128, 16):  # one element a row, so that the sum is the element
        a[:, :, 3] = bits.reshape(-1, 128)[:, first : first + 16]
        b = np.zeros((len(a), 16, 8), bits.dtype)
        b[:, 3] = one
        registers = spread(a, A[SIZE[kind], "m16n8k16"], kind) + spread(b, B[SIZE[kind]], kind)
        c = [np.zeros((len(a), 32), "f4")] * 4
        d = collected(MMA[opcode].meaning(np.ones((len(a), 32), bool), *registers, *c), 16, 8, "f32").view("f4")
        wanted = np.resize(expected, bits.size).reshape(-1, 128)[:, first : first + 16]
        np.testing.assert_array_equal(d, np.repeat(wanted[:, :, None], 8, axis=2))


@pytest.mark.many(7)
@pytest.mark.parametrize("c_layout", ["row", "col"])
@pytest.mark.parametrize("space", ["", ".global", ".shared", ".shared::cta"])
@pytest.mark.parametrize("shape", [*WMMA_SHAPES, "m16n16k8", "m8n8k4"])
def test_wmma_from_any_space_to_any_layout(shape, space, c_layout):
    for opcode in ORACLES:
        if opcode.startswith("wmma") and f".{shape}." in opcode and "satfinite" not in opcode:
            a, b, c = operands(opcode, small)
            found = multiplied(opcode, a, b, c, space=space, c_layout=c_layout)
            assert (found == multiplied(opcode, a, b, c)).all(), opcode


def test_flops_and_registers_follow_the_shape():
    for opcode, (a, b, c, d) in ORACLES.items():
        (m, n, k), op = extents(opcode), MMA[opcode]
        assert (op.flops, op.kind, op.scope) == (2 * m * n * k, "mma", "warp"), opcode
        assert len(op.results) == m * n * SIZE[d] // 32 // max(32, SIZE[d]), opcode
        if not (opcode.startswith("wmma") and a == "f16"):
            bits = m * k * SIZE[a] + k * n * SIZE[b] + m * n * SIZE[c]
            assert len(op.operands) == bits // 32 // max(32, SIZE[a]), opcode


# Instructions of ptxas 13.0 for sm_90.
ISSUES = {"m8n8k4": 1, "m16n16k8": 4, **dict.fromkeys(WMMA_SHAPES, 2)}


def test_issues_are_what_ptxas_makes():
    for opcode, kinds in ORACLES.items():
        shape = SHAPE.search(opcode)[0]
        expected = ISSUES[shape] if opcode.startswith("wmma") else 2 if kinds[0][0] == "e" else 1
        assert MMA[opcode].issues == expected, opcode


# What ptxas 13.0 makes of wmma.load and wmma.store for sm_90 at a stride of 40 elements: bytes a lane, and each
# instruction's distance in bytes from the first.
RECORDED = {
    "load.a.sync.aligned.row.m16n16k16.global.bf16": (4, (0, 0x280, 0x10, 0x290)),
    "load.b.sync.aligned.row.m16n16k16.global.bf16": (4, (0, 0x280, 0x10, 0x290)),
    "load.a.sync.aligned.col.m16n16k16.global.bf16": (4, (0, 0x10, 0x280, 0x290)),
    "load.b.sync.aligned.col.m16n16k16.global.bf16": (4, (0, 0x10, 0x280, 0x290)),
    "load.a.sync.aligned.row.m32n8k16.global.u8": (4, (0, 0x140, 0x280, 0x3C0)),
    "load.b.sync.aligned.row.m16n16k16.shared.u8": (1, (0, 0x28, 0x50, 0x78, 8, 0x30, 0x58, 0x80)),
    "load.b.sync.aligned.col.m16n16k16.global.u8": (4, (0, 0x140)),
    "load.c.sync.aligned.row.m16n16k16.shared.f32": (8, (0, 0x500, 0x20, 0x520)),
    "load.c.sync.aligned.row.m16n16k16.shared.f16": (4, (0, 0x280, 0x10, 0x290)),
    "load.c.sync.aligned.row.m32n8k16.global.f32": (8, (0, 0x500, 0xA00, 0xF00)),
    "load.c.sync.aligned.row.m8n32k16.global.f32": (4, (0, 0xA0, 0x20, 0xC0, 0x40, 0xE0, 0x60, 0x100)),
    "load.c.sync.aligned.row.m8n32k16.shared.f16": (4, (0, 0x10, 0x20, 0x30)),
    "load.c.sync.aligned.col.m16n16k16.shared.f32": (4, (0, 0xA0, 0x20, 0xC0, 0x500, 0x5A0, 0x520, 0x5C0)),
    "load.c.sync.aligned.col.m16n16k16.shared.f16": (4, (0, 0x10, 0x280, 0x290)),
    "load.c.sync.aligned.col.m8n8k4.shared.f64": (8, (0, 0x140)),
    "store.d.sync.aligned.row.m8n8k4.shared.f64": (16, (0,)),
    "store.d.sync.aligned.row.m16n16k8.shared.f32": (8, (0, 0x500, 0x20, 0x520)),
    "store.d.sync.aligned.col.m8n32k16.shared.f32": (8, (0, 0x500, 0xA00, 0xF00)),
    "store.d.sync.aligned.row.m16n16k16.global.s32": (8, (0, 0x500, 0x20, 0x520)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_wmma_reaches_memory_as_ptxas_does(name):
    fragment = fragments.wmma_fragment(read(f"wmma.{name}"))
    width, distances = RECORDED[name]
    first = [int(piece.major[0] * 40 + piece.minor[0]) * fragment.size for piece in fragment.pieces]
    assert ({piece.width for piece in fragment.pieces}, tuple(first)) == ({width}, distances)


# LDSM of so many matrices each.
MATRICES = {
    "a.sync.aligned.row.m16n16k16.shared.f16": (4,),
    "b.sync.aligned.row.m16n16k16.shared.f16": (4,),
    "a.sync.aligned.row.m32n8k16.shared.bf16": (4, 4),
    "b.sync.aligned.col.m32n8k16.shared.f16": (2,),
    "b.sync.aligned.col.m8n32k16.shared.f16": (4, 4),
    "a.sync.aligned.row.m16n16k16.shared.s8": (2,),
    "a.sync.aligned.row.m32n8k16.shared.u8": (2, 2),
    "b.sync.aligned.col.m32n8k16.shared.u8": (1,),
}


@pytest.mark.parametrize("name", MATRICES)
def test_wmma_takes_matrices_from_shared_memory(name):
    pieces = fragments.wmma_fragment(read(f"wmma.load.{name}")).pieces
    assert tuple(len(piece.registers) for piece in pieces) == MATRICES[name]
    assert all(piece.matrices and len(piece.major) == 8 * len(piece.registers) for piece in pieces)


@pytest.mark.parametrize(
    "opcode",
    [
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.s4",
        "wmma.load.a.sync.aligned.row.m8n8k4.shared.f16",
        "wmma.load.d.sync.aligned.row.m16n16k16.shared.f32",
        "wmma.store.d.sync.aligned.row.m16n16k16.local.f32",
    ],
)
def test_other_fragments_are_refused(opcode):
    with pytest.raises(EmulationError, match=re.escape(opcode)):
        fragments.wmma_fragment(read(opcode))


def test_the_stride_left_out_is_the_extent_of_a_line():
    strides = {"a.sync.aligned.row": 16, "a.sync.aligned.col": 32, "b.sync.aligned.row": 8, "b.sync.aligned.col": 16}
    for name, stride in strides.items():
        assert fragments.wmma_fragment(read(f"wmma.load.{name}.m32n8k16.shared.f16")).stride == stride
    assert fragments.wmma_fragment(read("wmma.store.d.sync.aligned.col.m32n8k16.shared.f32")).stride == 32


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposing", [False, True])
def test_matrices_of_8_by_8(count, transposing):
    opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposing}.shared.b16"
    assert fragments.matrices(read(opcode)) == (count, transposing)
    assert fragments.matrices(read(opcode.replace("ld", "st", 1).replace(".shared", ""))) == (count, transposing)
    elements = np.random.default_rng(3).integers(0, 2**16, (WARPS, count, 8, 8), dtype="u2")
    rows = elements.reshape(WARPS, 8 * count, 8).view("u1")
    registers = fragments.loaded(rows, transposing)
    assert len(registers) == count
    for matrix, lane in product(range(count), range(32)):
        row, pair = lane // 4, 2 * (lane % 4)
        for i in range(2):
            expected = elements[:, matrix, pair + i, row] if transposing else elements[:, matrix, row, pair + i]
            assert (registers[matrix][:, lane] >> 16 * i & 0xFFFF == expected).all()
    assert (fragments.stored(registers, transposing) == rows).all()


def test_other_matrices_are_refused():
    with pytest.raises(EmulationError, match=r"m16n16.*m8n8"):
        fragments.matrices(read("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8"))


def test_the_table_and_the_oracles_are_one_set():
    assert set(ORACLES) == set(MMA)
