"""wgmma and bulk copies of tensors, element by element, and both against the bits of an H200."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

import hopper
from gemmery.errors import ArgumentError, EmulationError, LayoutError
from gemmery_emulator.hopper.tensormap import tensor_map
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")
RECORDED = json.loads((Path(__file__).parents[1] / "data" / "hopper_h200.json").read_text())
ARCH = "sm_90a"


def run(case):
    """A case on the emulator: what is written, and the run."""
    case = case.again()
    done = emulate(case.source, case.kernel, case.grid, case.block, case.args, case.shared, ARCH)
    return case.written, done


# ---- products ----


def place(layout, by_rows, row, k, size):
    """The byte of an element of an operand, as the ISA's canonical layouts put it."""
    start, leading, stride, swizzle, base = (*layout, 0)[:5]
    if not by_rows:
        byte = k * size
        across = byte // 16 * leading + byte % 16 if not swizzle else byte
        at = start + row // 8 * stride + row % 8 * (swizzle or 16) + across
    elif not swizzle:
        at = start + row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * 2
    else:
        wide = swizzle // 2
        at = start + row // wide * leading + row % wide * 2 + k // 8 * stride + k % 8 * swizzle
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return at ^ ((at // 128 - base) & mask) * 16


FP8 = {"e4m3": {0x00: 0, 0x38: 1, 0x3C: 1.5, 0x40: 2}, "e5m2": {0x00: 0, 0x38: 0.5, 0x3C: 1, 0x40: 2}}
NATIVE = {"f16": "f2", "tf32": "f4", "s8": "i1", "u8": "u1"}


def element(data, at, kind):
    """One number from its bytes."""
    if kind in FP8:
        return FP8[kind][int(data[at]) & 0x7F] * (-1 if data[at] & 0x80 else 1)
    if kind == "bf16":
        return float((data[at : at + 2].view("u2").astype("u4") << 16).view("f4")[0])
    size = np.dtype(NATIVE[kind]).itemsize
    return float(data[at : at + size].view(NATIVE[kind])[0])


def matrix(data, layout, by_rows, rows, kind):
    """An operand, element by element."""
    size = hopper.SIZES[kind]
    depth = 32 // size
    return np.array(
        [[element(data, place(layout, by_rows, row, k, size), kind) for k in range(depth)] for row in range(rows)]
    )


def from_registers(data, kind):
    """A of four registers, as the ISA's figure for wgmma's A has them."""
    found = np.zeros((64, 16))
    for thread, register, half in itertools.product(range(128), range(4), range(2)):
        row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
        found[row, register // 2 * 8 + thread % 4 * 2 + half] = element(
            data, 16 * thread + 4 * register + 2 * half, kind
        )
    return found


def expected(told):
    """D of a product's case, as its 128 threads hold it."""
    data = told.case.args[0]
    a = from_registers(data, told.a) if told.in_registers else matrix(data, told.of_a, told.turned[0], 64, told.a)
    start, *rest = told.of_b
    b = matrix(data, (start + hopper.BYTES // 2, *rest), told.turned[1], told.n, told.b)
    sums = told.sign * (a @ b.T)
    out = np.zeros((128, told.n // 2))
    for thread, i in itertools.product(range(128), range(told.n // 2)):
        row, column = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
        before = 1 if told.sums == "f16" else i + thread
        out[thread, i] = sums[row, column] + told.adds * before
    if told.sums == "f16":
        return out.astype("f2").view("u4")
    return out.astype("f4") if told.sums == "f32" else out.astype("i8").astype("i4").view("u4")


@pytest.mark.many(5)
@pytest.mark.parametrize("name", hopper.PRODUCTS)
def test_a_product_has_the_elements_of_its_layouts(name):
    """Exact: the operands are whole numbers."""
    told = hopper.PRODUCTS[name]
    found, done = run(told.case)
    assert found.tobytes() == expected(told).tobytes()
    assert done.findings == ()
    assert done.flops == 2 * 64 * told.n * (32 // hopper.SIZES[told.a])


def test_a_sum_that_is_used_before_it_is_waited_for_is_found():
    """A store between the product and its wait."""
    case = hopper.PRODUCTS["n 8"].case
    wait = 'asm volatile("wgmma.wait_group.sync.aligned 0;"'
    early = 'asm volatile("st.global.f32 [%0], %1;" ::"l"(out), "f"(sum[3]) : "memory");'
    assert case.source.count(wait) == 1
    source = case.source.replace(wait, early + wait)
    found = emulate(source, case.kernel, case.grid, case.block, case.args, case.shared, ARCH).findings
    assert {one.kind for one in found if "may still write" in one.message} == {"misuse"}


@pytest.mark.parametrize("last", [True, False])
def test_a_register_of_a_that_is_written_before_the_product_ends_is_found(last):
    """Between the product and its wait, or behind it."""
    case = hopper.PRODUCTS["a in registers"].case
    wait, write = 'wgmma.wait_group.sync.aligned 0;" :::', "add.u32 %0, %0, 1;"
    assert case.source.count(wait) == 1
    both = f"wgmma.wait_group.sync.aligned 0; {write}" if last else f"{write} wgmma.wait_group.sync.aligned 0;"
    source = case.source.replace(wait, f'{both}" :: "r"(a[2]) :')
    found = emulate(source, case.kernel, case.grid, case.block, case.args, case.shared, ARCH).findings
    assert {one.kind for one in found if "register of A" in one.message} == (set() if last else {"misuse"})


@pytest.mark.parametrize(
    "opcode",
    [
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.f16.f16",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16",
        "wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8",
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.bf16.bf16",
    ],
)
def test_a_product_that_is_none_is_refused(opcode):
    """A shape or types that PTX does not have."""
    body = f".reg .b32 %r<9>; .reg .b64 %d<2>; {opcode} {{%r1}}, %d0, %d1, 1;"
    code = f".version 8.0\n.target sm_90a\n.entry f() {{ {body} }}"
    with pytest.raises(EmulationError, match="not modeled"):
        emulate(code, "f", 1, 128, [], arch=ARCH)


SHARES = """
extern "C" __global__ void __launch_bounds__({threads}, {blocks}) f(int* out) {{
  if (threadIdx.x < 128) {{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  }} else {{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 {count};");
    out[threadIdx.x] = 1;
  }}
}}
"""


@pytest.mark.parametrize(
    ("threads", "blocks", "count", "launched"),
    [(640, 1, 112, 0), (640, 1, 120, 96), (384, 1, 240, 0), (384, 2, 104, 0), (384, 2, 112, 80)],
)
def test_warpgroups_that_ask_for_more_registers_than_the_launch_has_are_found(threads, blocks, count, launched):
    """Four consumers of 120 and a producer of 24 are more than five warpgroups of 96: an H200 waited for ever."""
    source = SHARES.format(threads=threads, blocks=blocks, count=count)
    found = emulate(source, "f", 3, threads, [np.zeros(threads, np.int32)], 0, ARCH).findings
    assert [one.kind for one in found if "waits for ever" in one.message] == ["misuse"] * bool(launched)
    assert all(f"launched with {launched} " in one.message for one in found)


APART = """
extern "C" __global__ void __launch_bounds__(128, 1) f(int* out) {{
  if (threadIdx.x < 64) {{ asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); out[threadIdx.x] = 1; }}
  else {{ {other} out[threadIdx.x] = 2; }}
}}
"""


@pytest.mark.parametrize(
    ("other", "words"), [(24, ""), (32, "another number"), (0, "without the rest of the warpgroup")]
)
def test_warps_of_a_warpgroup_ask_for_the_same_registers(other, words):
    """In one instruction or in several, as Triton writes one for each role of a warp."""
    asks = f'asm volatile("setmaxnreg.dec.sync.aligned.u32 {other};");' if other else ""
    found = emulate(APART.format(other=asks), "f", 2, 128, [np.zeros(128, np.int32)], 0, ARCH).findings
    assert [one.kind for one in found] == ["misuse"] * bool(words)
    assert all(words in one.message for one in found)


# ---- boxes ----


def image(name):
    """A box as it lies in shared memory, and the elements of the array that it is made of, by their bytes there."""
    _, box, swizzle, steps, where = hopper.BOXES[name]
    array = hopper.boxed(name)
    steps, size = steps or (1,) * len(box), array.itemsize
    sides = [-(-side // step) for side, step in zip(box, steps, strict=True)]
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    found = {}
    for number, at in enumerate(itertools.product(*map(range, sides))):
        index = tuple(one * step + first for one, step, first in zip(at, steps, where[: len(box)][::-1], strict=True))
        byte = number * size
        inside = all(0 <= one < side for one, side in zip(index, array.shape, strict=True))
        found[(byte ^ (byte // 128 & bits) * 16) // size] = index if inside else None
    return found


@pytest.mark.parametrize("name", hopper.BOXES)
def test_a_box_is_loaded_element_by_element(name):
    """Swizzled, and zeros where there is no array."""
    array = hopper.boxed(name)
    found, done = run(hopper.CASES[f"load {name}"])
    wanted = np.zeros(found.nbytes // array.itemsize, array.dtype)
    for at, index in image(name).items():
        wanted[at] = 0 if index is None else array[index]
    assert found.tobytes() == wanted.tobytes()
    assert done.findings == ()
    assert done.global_.bulk.used == sum(index is not None for index in image(name).values()) * array.itemsize


@pytest.mark.parametrize("how", ["store", "add"])
@pytest.mark.parametrize("name", hopper.BOXES)
def test_a_box_is_stored_element_by_element(name, how):
    """What lies outside the array is left."""
    case = hopper.CASES.get(f"{how} {name}")
    if case is None:
        pytest.skip("no sum of this type")
    wanted, data = hopper.boxed(name), case.args[-2]
    for at, index in image(name).items():
        if index is not None:
            wanted[index] = data[at] + (wanted[index] if how == "add" else 0)
    found, done = run(case)
    assert np.array_equal(found, wanted)
    assert done.findings == ()


@pytest.mark.parametrize("where", [(3, 0, 0), (4, 16, 0), (-2, 0, 0)])
def test_a_box_that_begins_between_multiples_of_16_bytes_is_found(where):
    """Along the innermost dimension: an H200 calls it an illegal instruction."""
    case = hopper.CASES["load inside"]
    args = [*case.args[:2], *map(np.int32, where), case.args[-1]]
    found = emulate(case.source, case.kernel, 1, 32, args, case.shared, ARCH).findings
    assert any(one.kind == "misuse" and "no multiple of 16" in one.message for one in found)


def test_a_tensor_map_that_the_driver_would_refuse_is_refused():
    """Ranks, sides, alignment, swizzles."""
    array = np.zeros((64, 40), np.float16)
    for box, more, error in (
        ((64,), {}, ArgumentError),
        ((64, 7), {}, ArgumentError),
        ((257, 8), {}, ArgumentError),
        ((64, 64), {"swizzle": 32}, ArgumentError),
        ((64, 16), {"swizzle": 16}, ArgumentError),
        ((64, 16), {"steps": (9, 1)}, ArgumentError),
        ((64, 16), {"steps": (1, 2)}, ArgumentError),
    ):
        with pytest.raises(error):
            tensor_map(array, box, **more)
    with pytest.raises(LayoutError):
        tensor_map(np.zeros((64, 41), np.float16), (64, 16))
    with pytest.raises(LayoutError):
        tensor_map(array.T, (16, 64))


def loaded(array, box, where):
    """A box of an array, and whether anything was found."""
    size = math.prod(box) * array.itemsize
    out = np.zeros(size // 4, np.uint32)
    at = map(np.int32, (*where[::-1], 0, 0)[:3])
    text = hopper._filled(hopper.LOADING, array.ndim, 2)
    done = emulate(text, "load", 1, 32, [tensor_map(array, box), np.int32(size), *at, out], size + 16, ARCH)
    return out.view(np.uint8).view(array.dtype).reshape(box), done.findings


def stored(array, box, where, values, adds=False):
    """Write or add a box of values to an array."""
    at = map(np.int32, (*where[::-1], 0, 0)[:3])
    text = hopper._filled(hopper.STORING, array.ndim, 1, adds)
    data = np.ascontiguousarray(values)
    return emulate(
        text, "store", 1, 32, [np.int32(data.nbytes), *at, data, tensor_map(array, box)], data.nbytes, ARCH
    ).findings


VIEWS = {
    "with gaps": lambda x: x.reshape(60, 2, 48)[:, 1, :40],
    "exchanged": lambda x: x.reshape(4, 15, 96)[:, :, 8:].transpose(1, 0, 2),
    "every third row": lambda x: x.reshape(60, 96)[::3],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_tensor_map_describes_a_view_with_gaps(view):
    x = np.arange(60 * 96, dtype=np.float16)
    seen = VIEWS[view](x)
    box = (*(2,) * (seen.ndim - 1), 16)
    where = (*(1,) * (seen.ndim - 1), 8)
    inside = tuple(slice(first, first + side) for first, side in zip(where, box, strict=True))
    found, findings = loaded(seen, box, where)
    assert np.array_equal(found, seen[inside])
    assert findings == ()
    expected = x.copy()
    VIEWS[view](expected)[inside] = -1
    assert stored(seen, box, where, np.full(box, -1, np.float16)) == ()
    assert np.array_equal(x, expected)


def test_a_store_writes_whole_pieces_behind_the_end_of_a_row():
    """As an H200 does; a reduction adds to elements of the array alone."""
    x = np.zeros((6, 48), np.float16)
    inside = x[:, :43]  # rows of 86 bytes
    stored(inside, (4, 16), (1, 32), np.full((4, 16), -1, np.float16))
    assert (x[1:5, 32:48] == -1).all()  # 5 elements more
    assert not x[:, :32].any()
    assert not x[0].any()
    x[:] = 0
    stored(inside, (4, 16), (1, 32), np.full((4, 16), -1, np.float16), adds=True)
    assert (x[1:5, 32:43] == -1).all()
    assert not x[:, 43:].any()


def test_a_tensor_map_of_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    random = np.random.default_rng(0)
    array = random.standard_normal((20, 32)).astype(ml_dtypes.bfloat16)
    found, findings = loaded(array, (8, 16), (4, 8))
    assert np.array_equal(found, array[4:12, 8:24])
    values = random.standard_normal((8, 16)).astype(ml_dtypes.bfloat16)
    expected = array.copy()
    expected[4:12, 8:24] += values
    assert stored(array, (8, 16), (4, 8), values, adds=True) == findings == ()
    assert np.array_equal(array, expected)
    stored(array, (8, 16), (4, 8), values)
    assert np.array_equal(array[4:12, 8:24], values)


@pytest.mark.parametrize(
    ("array", "box", "error", "words"),
    [
        (5, (1,), ArgumentError, "int is no array; pass a NumPy array"),
        ([[1.0]], (1, 1), ArgumentError, "list is no array"),
        (np.zeros((8, 8), np.complex64), (8, 8), ArgumentError, "array of complex64; a map describes uint8, int8"),
        (np.zeros((8, 8), "S4"), (8, 8), ArgumentError, "a map describes"),
        (np.zeros((8, 8), ">f4"), (8, 8), ArgumentError, "a map describes"),
        (np.zeros((8, 8), np.float32), 8, ArgumentError, "box=8: pass a tuple of whole numbers"),
        (np.zeros((8, 8), np.float32), (8, 4.5), ArgumentError, "box=.8, 4.5.: pass a tuple of whole numbers"),
        (np.zeros((8, 8), np.float32).T, (8, 8), LayoutError, "of a transposed matrix pass the matrix"),
        (np.zeros(9, np.float32)[1:], (8,), LayoutError, "begins 4 bytes after a multiple of 16: pass a copy"),
    ],
)
def test_what_no_tensor_map_describes_is_refused_in_words(array, box, error, words):
    with pytest.raises(error, match=words):
        tensor_map(array, box)


def test_a_foreign_tensor_map_is_refused():
    """A driver's map means nothing here."""
    case = hopper.CASES["load inside"]
    with pytest.raises(EmulationError, match=r"tensor_map\(array, box\)"):
        emulate(case.source, case.kernel, 1, 32, [bytes(128), *case.args[1:]], case.shared, ARCH)


# ---- clusters ----


def test_blocks_of_a_cluster_reach_each_other():
    """Ranks, places, loads and sums in the memory of the next block."""
    found, done = run(hopper.CASES["cluster"])
    assert done.findings == ()
    for block, lane in itertools.product(range(24), range(32)):
        x, y = block % 4, block // 4
        rank, corner = x % 2 + 2 * (y % 2), x // 2 * 2 + y // 2 * 2 * 4
        following = (rank + 1) % 4
        other = corner + following % 2 + following // 2 * 4
        value = 100 * other + lane
        own = [rank, 4, x % 2, y % 2, x // 2, y // 2, 2, following, value, value, value, 100 * block + lane + 7]
        assert found[block, lane].tolist() == own


def test_bytes_in_a_row_go_to_both_blocks_and_back():
    """Multicast in quarters of both blocks, the half of each its own, sums, and a bulk store."""
    found, done = run(hopper.CASES["rows"])
    given = hopper.CASES["rows"].args[0].reshape(-1, 4)
    for block in range(4):
        pair = block - block % 2
        wanted = np.concatenate([given[16 * pair : 16 * pair + 32], given[32 * block : 32 * block + 32]])
        wanted[:32, 0] += 1000
        wanted[32:, 0] += 2000
        assert np.array_equal(found.reshape(4, 64, 4)[block], wanted)
    assert done.findings == ()
    assert done.global_.bulk.used == 4 * (256 + 512 + 1024)


@pytest.mark.parametrize("pending", [0, 1, 2])
def test_a_store_reads_no_sooner_than_its_wait(pending):
    """What overwrites a tile that is still being read shows in the result."""
    store = 'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;"'
    commit = 'asm volatile("cp.async.bulk.commit_group;" ::: "memory");'
    fence = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
    code = f"""{hopper.HEAD}
extern "C" __global__ void twice(u32* out) {{
  __shared__ __align__(128) u32 tile[32];
  tile[threadIdx.x] = threadIdx.x;
  {fence}
  __syncwarp();
  if (threadIdx.x == 0) {{
    for (int i = 0; i < 2; ++i) {{ {store} ::"l"(out + 32 * i), "r"(place(tile)) : "memory"); {commit} }}
    asm volatile("cp.async.bulk.wait_group.read {pending};" ::: "memory");
  }}
  __syncwarp();
  tile[threadIdx.x] = 99;
}}"""
    out = np.zeros(64, np.uint32)
    found = emulate(code, "twice", 1, 32, [out], arch=ARCH).findings
    assert {one.kind for one in found} == ({"race", "misuse"} if pending else set())
    kept = (2 - pending) * 32
    assert out[:kept].tolist() == [i % 32 for i in range(kept)]
    assert out[kept:].tolist() == [99] * (64 - kept)


def test_blocks_of_a_cluster_copy_into_each_other():
    """In bulk, out of shared memory into that of the other block."""
    found, done = run(hopper.CASES["exchange"])
    assert found.reshape(4, 32).tolist() == [[100 * (block ^ 1) + lane for lane in range(32)] for block in range(4)]
    assert done.findings == ()


# ---- a device ----


@pytest.mark.many(5)
@pytest.mark.parametrize("name", RECORDED)
def test_the_bits_are_those_of_a_device(name):
    """Of an H200, recorded; test_gpu_hopper.py runs the same on any."""
    found, _ = run(hopper.CASES[name])
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == RECORDED[name]


@pytest.mark.parametrize(("late", "kinds"), [(False, {"race"}), (True, set())])
def test_a_tile_that_is_overwritten_under_a_product_is_found(late, kinds):
    """A store to shared memory between the product and its wait; behind the wait it is let pass."""
    case = hopper.PRODUCTS["n 8"].case
    wait = 'asm volatile("wgmma.wait_group.sync.aligned 0;"'
    store = 'asm volatile("st.shared.u32 [%0], %0;" ::"r"(0) : "memory");'
    assert case.source.count(wait) == 1
    source = case.source.replace(wait, (wait + ");" if late else "") + store + wait)
    found = emulate(source, case.kernel, case.grid, case.block, case.args, case.shared, ARCH).findings
    assert {one.kind for one in found if "may still read" in one.message} == kinds
