"""Blackwell's tensor memory and its products: values against NumPy, and every fault of data/tcgen05.cu."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gemmery.errors import EmulationError
from gemmery_emulator.hopper.tensormap import tensor_map
from gemmery_emulator.kernels.kernel import emulate
from gemmery_emulator.kernels.prediction import predicted_run

pytest.importorskip("cuda.bindings")
SOURCE = (Path(__file__).parents[1] / "data" / "tcgen05.cu").read_text()
ARCH = "sm_100a"
SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
KINDS = {"f16": 0, "bf16": 0, "tf32": 1, "e4m3": 2, "e5m2": 2, "s8": 3, "u8": 3}
TYPES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "s8": 1, "u8": 0}
SUMS = {"f16": 0, "f32": 1, "s32": 2}
MODES = {0: 0, 128: 2, 64: 4, 32: 6}


def run(kernel, *args, blocks=1, shared=0, seed=None):
    return emulate(SOURCE, kernel, blocks, 128, args, shared=shared, arch=ARCH, seed=seed)


# ---- products ----


def place(row, k, size, layout):
    """The byte of an element, as the ISA's canonical layouts put it."""
    swizzle, by_rows, leading, stride = layout
    along = 16 // size
    if not by_rows and not swizzle:
        at = row // 8 * stride + row % 8 * 16 + k // along * leading + k % along * size
    elif not by_rows:
        at = row // 8 * stride + row % 8 * swizzle + k * size
    elif not swizzle:
        at = row // along * stride + row % along * size + k // 8 * leading + k % 8 * 16
    else:
        wide = swizzle // size
        at = row // wide * leading + row % wide * size + k // 8 * stride + k % 8 * swizzle
    return at ^ (at // 128 & max(swizzle // 16 - 1, 0)) * 16


def layout_of(swizzle, by_rows, rows, size):
    """A layout without gaps, with its two strides."""
    if not by_rows:
        return swizzle, by_rows, 16 * rows if not swizzle else 16, 128 if not swizzle else 8 * swizzle
    if not swizzle:
        return swizzle, by_rows, 8 * size * rows, 128
    return swizzle, by_rows, 32 // size * swizzle, 8 * swizzle


def descriptor(at, layout):
    swizzle, _, leading, stride = layout
    return np.uint64(at >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | MODES[swizzle] << 61)


def drawn(rng, shape, kind):
    """Random elements: their bits, and their values."""
    match kind:
        case "s8" | "u8":
            bits = rng.integers(-128 if kind == "s8" else 0, 128 if kind == "s8" else 256, shape)
            bits = bits.astype("i1" if kind == "s8" else "u1")
            return bits.view("u1"), bits.astype("f8")
        case "f16":
            values = rng.standard_normal(shape).astype("f2")
            return values.view("u2"), values.astype("f8")
        case "bf16":
            bits = (rng.standard_normal(shape).astype("f4").view("u4") >> 16).astype("u2")
            return bits, (bits.astype("u4") << 16).view("f4").astype("f8")
        case "tf32":
            bits = rng.standard_normal(shape).astype("f4").view("u4") & np.uint32(0xFFFFE000)
            return bits, bits.view("f4").astype("f8")
    bits = rng.integers(0, 0x50, shape).astype("u1") | rng.integers(0, 2, shape).astype("u1") << 7
    return bits, fp8(bits, kind)


def fp8(bits, kind):
    """The values of numbers of 8 bits, by their fields."""
    fraction, bias = (3, 7) if kind == "e4m3" else (2, 15)
    exponent, rest = (bits.astype("i8") & 127) >> fraction, (bits.astype("i8") & (1 << fraction) - 1) / (1 << fraction)
    size = np.where(exponent == 0, rest * 2.0 ** (1 - bias), (1 + rest) * 2.0 ** (exponent - bias))
    return np.where(bits >> 7, -size, size)


def tile(bits, layout):
    """The bytes of a matrix in shared memory, one element after the other."""
    size = bits.itemsize
    rows, depth = bits.shape
    places = np.array([[place(row, k, size, layout) for k in range(depth)] for row in range(rows)])
    memory = np.zeros(-(-int(places.max() + size) // 1024) * 1024, np.uint8)
    memory[places[..., None] + np.arange(size)] = bits[..., None].view("u1").reshape(rows, depth, size)
    return memory


def shape_bits(m, n, a, b, sums, by_rows=(False, False), negative=(False, False)):
    flags = negative[0] << 13 | negative[1] << 14 | by_rows[0] << 15 | by_rows[1] << 16
    return SUMS[sums] << 4 | TYPES[a] << 7 | TYPES[b] << 10 | flags | n // 8 << 17 | m // 16 << 24


def parameters(a, b, shape, kind, columns, adds, in_memory=0):
    form = [("a", "u8"), ("b", "u8"), *((name, "u4") for name in ("shape", "kind", "columns", "adds", "in_memory"))]
    return np.array((a, b, shape, kind, columns, adds, in_memory), np.dtype(form, align=True))[()]


def lanes_of(m):
    row = np.arange(min(m, 128))
    return row // 16 * 32 + row % 16 if m == 64 else row


def product(a_kind, b_kind, sums, m, n, layouts, adds=True, negative=(False, False), in_memory=False, seed=None):
    """A product on the emulator: the words of its sums, the exact sums, and a bound of their error."""
    rng, depth = np.random.default_rng(m + n), 32 // SIZES[a_kind]
    a_bits, a = drawn(rng, (m, depth), a_kind)
    b_bits, b = drawn(rng, (n, depth), b_kind)
    before = rng.integers(-1000, 1000, (128, n))
    words = before.astype("i4").view("u4") if sums == "s32" else before.astype("f4").view("u4")
    if sums == "f16":
        words = before.astype("f2").view("u2").astype("u4")
    (swizzle_a, by_rows_a), (swizzle_b, by_rows_b) = layouts
    forms = layout_of(swizzle_a, by_rows_a, m, SIZES[a_kind]), layout_of(swizzle_b, by_rows_b, n, SIZES[b_kind])
    first = tile(a_bits, forms[0])
    tiles = np.concatenate([first, tile(b_bits, forms[1])])
    lanes, held = lanes_of(m), np.zeros((128, 8), np.uint32)
    held[lanes] = np.ascontiguousarray(a_bits).view("u4")
    given = parameters(
        descriptor(0, forms[0]),
        descriptor(len(first), forms[1]),
        shape_bits(m, n, a_kind, b_kind, sums, (by_rows_a and not in_memory, by_rows_b), negative),
        KINDS[a_kind],
        n,
        adds,
        8 * in_memory,
    )
    out = np.zeros((128, n), np.uint32)
    done = run("product", tiles.view("u4"), tiles.size // 4, words, held, out, given, shared=tiles.size, seed=seed)
    assert done.findings == ()
    sign = -1 if negative[0] != negative[1] else 1
    start = before[lanes] * adds
    untouched = np.setdiff1d(np.arange(128), lanes)
    assert (out[untouched] == words[untouched]).all()
    return out[lanes], start + sign * a @ b.T, abs(start) + abs(a) @ abs(b).T


ROWS_128 = (128, False), (128, False)
CASES = {
    "f16": ("f16", "f16", "f32", 128, 64, ROWS_128, {}),
    "bf16 without a swizzle": ("bf16", "bf16", "f32", 128, 32, ((0, False), (0, False)), {"negative": (True, False)}),
    "f16 of 64 rows": ("f16", "f16", "f32", 64, 24, ((64, False), (32, False)), {"adds": False}),
    "f16 by columns": ("f16", "f16", "f32", 128, 128, ((128, True), (64, True)), {"negative": (True, True)}),
    "f16 by columns without a swizzle": ("f16", "f16", "f32", 64, 64, ((0, True), (32, True)), {}),
    "f16 with sums in f16": ("f16", "f16", "f16", 128, 16, ROWS_128, {}),
    "f16 of tensor memory": ("f16", "f16", "f32", 128, 256, ROWS_128, {"in_memory": True}),
    "f16 of tensor memory, 64 rows": ("f16", "f16", "f32", 64, 64, ROWS_128, {"in_memory": True}),
    "tf32": ("tf32", "tf32", "f32", 128, 32, ((128, False), (64, False)), {"negative": (False, True)}),
    "fp8": ("e4m3", "e5m2", "f32", 128, 64, ((32, False), (128, True)), {}),
    "fp8 by columns": ("e5m2", "e4m3", "f32", 128, 32, ((128, True), (0, False)), {"adds": False}),
    "fp8 of tensor memory": ("e4m3", "e4m3", "f16", 128, 32, ((32, False), (64, False)), {"in_memory": True}),
    "i8": ("s8", "u8", "s32", 128, 64, ((128, False), (0, False)), {}),
    "i8 of 64 rows": ("u8", "s8", "s32", 64, 8, ((128, False), (32, False)), {}),
}


@pytest.mark.many(5)
@pytest.mark.parametrize("name", CASES)
def test_a_product_of_tiles(name):
    *case, options = CASES[name]
    words, exact, sizes = product(*case, **options)
    if case[2] == "s32":
        assert (words.view("i4") == exact).all()
    elif case[2] == "f16":
        assert (words >> 16 == 0).all()
        assert (abs(words.astype("u2").view("f2") - exact) <= 2.0**-11 * abs(exact) + 2.0**-20 * sizes).all()
    else:
        assert (abs(words.view("f4") - exact) <= 2.0**-20 * sizes).all()


@pytest.mark.parametrize("m", [128, 256])
def test_a_product_of_a_pair_of_blocks(m):
    """Each block has half of the rows of A, half of those of B, and half of the sums."""
    rng, n = np.random.default_rng(m), 64
    a_bits, a = drawn(rng, (m, 16), "f16")
    b_bits, b = drawn(rng, (n, 16), "f16")
    form = layout_of(128, False, 64, 2)
    halves = [np.concatenate([tile(a_bits[r * m // 2 :][: m // 2], form), tile(b_bits[r * n // 2 :][: n // 2], form)])
              for r in range(2)]  # fmt: skip
    tiles, columns = np.stack(halves), n if m == 256 else n // 2
    before = np.zeros((2, 128, columns), np.uint32)
    out = np.zeros_like(before)
    bits = shape_bits(m, n, "f16", "f16", "f32")
    given = parameters(descriptor(0, form), descriptor(m // 2 * 128, form), bits, 0, columns, 0)
    words = tiles.shape[1] // 4
    done = run("pair", tiles.view("u4"), words, before, before, out, given, blocks=2, shared=words * 4)
    assert done.findings == ()
    sums = out.view("f4")
    if m == 128:  # 64 rows: the first half of the columns in lanes 0 to 63, the second in the others
        sums = np.concatenate([sums[:, :64], sums[:, 64:]], axis=2)
    assert (abs(sums.reshape(m, n) - a @ b.T) <= 2.0**-20 * (abs(a) @ abs(b).T)).all()


# ---- registers and copies ----

# Of each shape the lane and the column of register r of lane t of a warp, as the ISA's figures have them.
FRAGMENTS = [
    ("32x32b", lambda t, r: (t, r)),
    ("16x64b", lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r)),
    ("16x128b", lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2))),
    ("16x256b", lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4))),
    ("16x32bx2", lambda t, r: (t % 16, r + 16 * (t // 16))),
]


@pytest.mark.parametrize("half", [0, 16])
@pytest.mark.parametrize("which", range(5), ids=[name for name, _ in FRAGMENTS])
def test_registers_of_each_shape(which, half):
    half = half if which else 0
    out, after = np.zeros((128, 8), np.uint32), np.zeros((128, 32), np.uint32)
    assert run("shapes", np.uint32(which), np.uint32(half), out, after).findings == ()
    expected = np.zeros_like(after)
    for thread in range(128):
        for register in range(8):
            lane, column = FRAGMENTS[which][1](thread % 32, register)
            lane += thread // 32 * 32 + half
            assert out[thread, register] == 64 * lane + column
            expected[lane, column] = 64 * lane + column
    assert (after == expected).all()


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_lanes_of_other_warps_are_other_places(seed):
    out = np.zeros(128, np.uint32)
    assert run("quarters", out, seed=seed).findings == ()
    assert (out[:64] == np.arange(64) * np.repeat([1, 2], 32)).all()


def test_registers_of_two_columns():
    out, after = np.zeros((128, 2), np.uint32), np.zeros((128, 4), np.uint32)
    assert run("packed", out, after).findings == ()
    thread = np.arange(128)
    assert (after == np.stack([np.full(128, 7), thread, np.full(128, 9), np.zeros(128)], axis=1)).all()
    assert (out == np.stack([thread << 16 | 7, np.full(128, 9)], axis=1)).all()


@pytest.mark.parametrize(("which", "rows", "width"), [(0, 128, 8), (1, 128, 4), (2, 32, 4)])
def test_copies_to_tensor_memory(which, rows, width):
    words = np.random.default_rng(0).integers(0, 1 << 32, (rows, width), np.uint32)
    form = layout_of(32 if which == 0 else 0, False, rows, 1)
    memory, out = np.zeros(4096, np.uint8), np.zeros((128, 8), np.uint32)
    laid = tile(words.view("u1"), form)
    memory[: laid.size] = laid
    done = run("copies", np.uint32(which), descriptor(0, form), memory.view("u4"), out)
    assert done.findings == ()
    assert (out[:, :width] == np.tile(words, (128 // rows, 1))).all()


def test_a_tensor_copy_for_one_block_of_a_pair():
    words, out = np.arange(256, dtype=np.uint32).reshape(16, 16), np.zeros((8, 8), np.uint32)
    assert run("box", tensor_map(words, (8, 8)), out).findings == ()
    assert (out == words[4:12, 4:12]).all()


# ---- faults ----

FAULTS = {
    "allocates 48 columns": "BAD_COUNT",
    "that nobody frees": "NOT_FREED",
    "which is free": "FREED_TWICE",
    "which is no allocation": "FREED_IN_PART",
    "gave up the permit": "AFTER_RELINQUISH",
    "columns 48 to 79 of tensor memory, which are not all allocated": "NOT_ALLOCATED",
    "warp 0 of a block reaches the lanes 0 to 31": "OTHER_QUARTER",
    "(lanes 0 to 15), which the tcgen05.mma": "NO_WAIT",
    "thread 32 of block 0 reads column 0 of tensor memory (lanes 32 to 47), which the tcgen05.mma": "ONE_WARP_WAITS",
    "may still read: wait at the mbarrier of its tcgen05.commit": "OVERWRITTEN",
    "without a fence.proxy.async since": "NO_PROXY_FENCE",
    "execute tcgen05.wait::st in the warp that writes them": "NO_WAIT_STORE",
    "execute tcgen05.wait::ld in the warp that reads them": "NO_WAIT_LOAD",
    "which nothing has written: the first product must not add": "FIRST_ADDS",
    "executes tcgen05.mma with 32 lanes": "ALL_LANES",
    "not 0b001": "WGMMA_DESCRIPTOR",
    "starts a product of 128 x 24": "BAD_SIDE",
    "is not complete when its block ends": "NOT_COMMITTED",
    "which thread 32 uses at": "SUMS_OVERWRITTEN",
    "(address, byte 0), which thread 0 writes": "NO_BARRIER",
    "its block leaves 448 of 512 free": "TOO_MUCH",
    "frees tensor memory that the operation at": "FREED_EARLY",
    "reads a matrix that ends at byte": "OUTSIDE",
    "thread 0 of block 0 reads column 0 of tensor memory (lanes 0 to 15), which the tcgen05.mma at": "AFTER_COMMIT",
    "thread 32 of block 0 uses column 0 of tensor memory (lanes 0 to 15), which the tcgen05.mma at": "TWO_THREADS",
}
NAMES = [name.strip() for name in SOURCE.partition("enum Fault {")[2].partition("}")[0].split(",") if name.strip()]


def faulty(name, seed=None):
    out = np.zeros(128, np.float32)
    return run("faults", np.uint32(NAMES.index(name)), out.view("u4"), seed=seed).findings, out


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_two_products_in_turn_are_right(seed):
    found, out = faulty("NONE", seed)
    assert found == ()
    assert (out == 16).all()


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_fault_is_found(name):
    message = next(message for message, fault in FAULTS.items() if fault == name)
    assert [one.message for one in faulty(name)[0] if message in one.message]


def test_a_commit_waits_for_what_its_thread_started_before():
    assert (faulty("AFTER_COMMIT")[1] == 16).all()


# ---- what is not modeled ----

COPY = "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
REFUSED = {
    "tcgen05.shift.cta_group::1.down [%r1];": "tcgen05.shift",
    "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, %p1;": "tcgen05.mma.ws",
    "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd1, [%r1], %r1, %p1;": "tcgen05.mma.sp",
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%r1], %rd1, %rd1, %r1, [%r1], [%r1], %p1;": "mxf4",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, {%r1, %r1}, %p1;": "disabled lanes",
    "mov.b32 %r1, 1; tcgen05.mma.cta_group::1.kind::f16 [0], 0, 0, 0, {0, 0, %r1, 0}, %p1;": "lanes that are disabled",
    "tcgen05.cp.cta_group::1.4x256b [%r1], %rd1;": "tcgen05.cp",
    f"{COPY}.cta_group::2 [0], [0, {{0}}], [0];": "cta_group::2",
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r1];": "try_cancel",
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r1];": "1 registers",
}


def test_no_time_is_predicted_of_tensor_memory():
    out = np.zeros((128, 2), np.uint32), np.zeros((128, 4), np.uint32)
    for card in ("h200", "b200"):
        with pytest.raises(EmulationError, match=r"tensor memory \(tcgen05\), whose times are not predicted"):
            predicted_run(run("packed", *out), card)


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_modeled_is_refused_in_words(text):
    ptx = f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry f() {{
  .reg .b32 %r<2>; .reg .b64 %rd<2>; .reg .pred %p<2>;
  {text}
  ret;
}}"""
    with pytest.raises(EmulationError, match=r"is not modeled") as error:
        emulate(ptx, "f", 1, 32, (), arch=ARCH)
    assert REFUSED[text] in str(error.value)
