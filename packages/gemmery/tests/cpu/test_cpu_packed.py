"""The packed product where its ways part: element types, blocks, complex scalars, bytes at their limits, underflow."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from fences import at_page_end, survives
from gemmery import dtypes, verify
from gemmery.cpu import abi, build, images, launch, loops
from gemmery.cpu.target import Target, host, tile
from gemmery.problem import Problem
from operands import Placed, adds_bf16_in_pairs, numpy_dtype, place, problem, random

pytestmark = pytest.mark.sampled(3)

PAIRS = [
    (name, out)
    for name in dtypes.NAMES
    for out in dtypes.NAMES
    if not images.packed_refuses(Problem(4, 4, 4, name, out))
]
COMPLEX = ("complex64", "complex128")
BYTES = [(name, out) for name, out in PAIRS if name in ("int8", "uint8")]


def multiply(a, b, c, config=None, *, alpha=1, beta=0, bias=None, activation=""):
    """C by the packed product; C's memory, its neighbors' and the operands' are watched."""
    epilogue = "+".join(part for part in ("bias" if bias is not None else "", activation) if part)
    kernel = build.packed(problem(a, b, c, epilogue, alpha != 1 or beta != 0), config or {})
    row = None if bias is None else bias.view._replace(shape=bias.array.shape[2:], strides=bias.array.strides[2:])
    kernel(a.view, b.view, c.view, alpha=alpha, beta=beta, bias=row)
    assert a.untouched()
    assert b.untouched()
    assert c.untouched_around()
    return c.array


def operands(size, name, out, layouts="CCC", seed=1):
    m, n, k = size
    named = {"C": "C", "F": "F", "S": "strided"}
    values = (random((1, m, k), name, seed), random((1, k, n), name, seed + 1), random((1, m, n), out, seed + 2))
    return tuple(
        place(value, kind, named[layout])
        for value, kind, layout in zip(values, (name, name, out), layouts, strict=True)
    )


def assert_right(size, name, out, layouts="CCC", config=None, **options):
    a, b, c = operands(size, name, out, layouts)
    old = c.array.copy()
    result = multiply(a, b, c, config, **options)
    bias = options.pop("bias", None)
    found = verify.check(result, a.array, b.array, c=old, bias=None if bias is None else bias.array[0, 0], **options)
    assert found.error_over_bound <= 1, (size, name, out, layouts, options, found)


@pytest.mark.parametrize(("name", "out"), PAIRS)
def test_every_pair_of_types_in_every_way_of_packing(name, out):
    for layouts in itertools.product("CFS", "CFS", "CF"):
        assert_right((13, 71, 37), name, out, layouts)


@pytest.mark.parametrize(("name", "out"), PAIRS)
def test_blocks_of_any_size_give_the_product(name, out):
    for mc, kc, nc in [(6, 4, 64), (12, 20, 128), (7, 12, 70)]:
        assert_right((26, 150, 50), name, out, config={"mc": mc, "kc": kc, "nc": nc}, alpha=3, beta=2)


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("alpha", [1, 2.5, -1j, 1.5 - 0.5j])
@pytest.mark.parametrize("beta", [0, 1, 2j, -0.5 + 3j])
def test_complex_scalars(name, alpha, beta):
    assert_right((13, 71, 9), name, name, alpha=alpha, beta=beta)
    assert_right((13, 71, 9), name, name, layouts="SCF", config={"kc": 4, "nc": 64}, alpha=alpha, beta=beta)


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "complex64", "complex128"])
def test_zero_beta_does_not_read_c_and_nan_beta_does(name):
    a, b, c = operands((7, 65, 3), name, name)
    c.array[...] = np.nan
    c.before[...] = c.memory
    assert np.isfinite(multiply(a, b, c).astype(complex)).all()
    a, b, c = operands((7, 65, 3), name, name)
    assert np.isnan(multiply(a, b, c, beta=float("nan")).astype(complex).real).all()


@pytest.mark.parametrize("name", COMPLEX)
def test_infinite_complex_numbers_give_what_the_four_products_give(name):
    special = [0, 1, -2j, complex("inf"), complex("infj"), complex("nan"), complex(np.inf, -np.inf), complex(1, np.inf)]
    x, y = (np.array(v, numpy_dtype(name)) for v in zip(*itertools.product(special, special), strict=True))
    with np.errstate(invalid="ignore"):
        expected = np.empty_like(x)
        expected.real, expected.imag = x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real
    for one, two, right in zip(x, y, expected, strict=True):
        a, b = place(np.full((1, 1, 1), one), name), place(np.full((1, 1, 1), two), name)
        got = multiply(a, b, place(np.zeros((1, 1, 1), x.dtype), name))[0, 0, 0]
        np.testing.assert_array_equal([got.real, got.imag], [right.real, right.imag])


@pytest.mark.parametrize(("name", "out"), BYTES)
def test_bytes_at_their_limits_over_several_blocks_of_k(name, out):
    info = np.iinfo(numpy_dtype(name))
    for one, two in itertools.product((info.min, info.max, 0), repeat=2):
        a = place(np.full((1, 7, 70), one, numpy_dtype(name)), name)
        b = place(np.full((1, 70, 66), two, numpy_dtype(name)), name)
        c = place(np.zeros((1, 7, 66), numpy_dtype(out)), out)
        wanted = np.array(70 * int(one) * int(two)).astype(numpy_dtype(out))
        assert (multiply(a, b, c, {"kc": 32}) == wanted).all(), (one, two)


@pytest.mark.parametrize(("name", "largest", "out"), [("int8", -128, "int64"), ("uint8", 255, "uint64")])
def test_a_sum_of_bytes_in_64_bits_wraps_nowhere(name, largest, out):
    """k and alpha so large that the result needs more than 32 bits."""
    k = 140_000
    a = place(np.full((1, 2, k), largest, numpy_dtype(name)), name)
    b = place(np.full((1, k, 3), largest, numpy_dtype(name)), name)
    c = place(np.zeros((1, 2, 3), numpy_dtype(out)), out)
    assert multiply(a, b, c, {"kc": 40_000}, alpha=3).tolist() == [[[3 * k * largest**2] * 3] * 2]


@pytest.mark.parametrize("name", ["int16", "uint16"])
def test_pairs_of_16_bit_numbers_at_their_limits(name):
    info = np.iinfo(numpy_dtype(name))
    outs = [out for one, out in PAIRS if one == name]
    for out, one, two in itertools.product(outs, (info.min, info.max), (info.min, info.max)):
        a = place(np.full((1, 7, 2), one, numpy_dtype(name)), name)
        b = place(np.full((1, 2, 33), two, numpy_dtype(name)), name)
        c = place(np.zeros((1, 7, 33), numpy_dtype(out)), out)
        wanted = np.array(2 * int(one) * int(two)).astype(np.int64).astype(numpy_dtype(out))
        assert (multiply(a, b, c) == wanted).all(), (out, one, two)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_a_narrow_result_is_rounded_once_however_many_blocks_of_k(name):
    """Sums kept in C between blocks would round 25 times: far beyond one rounding and k of float32."""
    assert_right((9, 70, 100), name, name, config={"kc": 4})
    assert_right((9, 70, 100), name, name, layouts="FFF", config={"kc": 4, "nc": 64}, alpha=0.5, beta=-1)


def test_tiny_bfloat16_lose_no_more_than_the_bound_says():
    """The dot product instruction reads and writes numbers below 2**-126 as zero."""
    tiny = np.float32(2.0**-130)
    dtype = numpy_dtype("bf16")
    a = place(np.full((1, 7, 8), tiny).astype(dtype), "bf16")
    b = place(np.full((1, 8, 65), 2.0**100, np.float32).astype(dtype), "bf16")
    c = place(np.zeros((1, 7, 65), np.float32), "f32")
    result = multiply(a, b, c)
    assert verify.check(result, a.array, b.array).ok
    exact = np.float32(8 * 2.0**-30)
    assert (result == (0 if adds_bf16_in_pairs() else exact)).all()


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16", *COMPLEX])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (0.7, 0.3), (0.7 - 0.1j, 0.3 + 0.9j)])
def test_an_element_has_the_same_bits_in_a_whole_tile_and_at_an_edge(name, alpha, beta):
    """Else the cut between threads would show in the result."""
    if isinstance(alpha, complex) and name not in COMPLEX:
        pytest.skip("complex scalars are for complex matrices")
    a, b, c = operands((48, 256, 40), name, name)
    part = tuple(place(x, name) for x in (a.array[:, :47], b.array[:, :, :255], c.array[:, :47, :255]))
    config = {"kc": 16}
    whole = multiply(a, b, c, config, alpha=alpha, beta=beta)
    edge = multiply(*part, config, alpha=alpha, beta=beta)
    assert whole[:, :47, :255].tobytes() == edge.tobytes()


@pytest.mark.parametrize(("name", "out"), PAIRS)
@pytest.mark.parametrize("layouts", ["CCC", "FFC", "CFC"])
def test_few_columns_have_the_bits_that_they_have_among_many(name, out, layouts):
    """The last columns of C are computed by narrower tiles."""
    a, b, c = operands((13, 70, 21), name, out, layouts)
    whole = multiply(a, b, c)
    for columns in (1, 2, 8, 9, 16, 17, 32, 33, 50):
        some = place(b.array[:, :, :columns], name, layouts[1]), place(c.array[:, :, :columns], out)
        assert multiply(a, *some).tobytes() == whole[:, :, :columns].tobytes(), columns


def test_depth_zero_is_what_remains_without_a_product():
    a, b, c = operands((7, 66, 0), "f32", "f32")
    old = c.array.copy()
    np.testing.assert_array_equal(multiply(a, b, c, beta=2), 2 * old)
    a, b, c = operands((7, 66, 0), "int8", "int32")
    assert not multiply(a, b, c).any()


@pytest.mark.parametrize(("name", "out"), PAIRS)
@pytest.mark.parametrize("columns", [70, 1])
def test_bias_is_added_to_every_row_once(name, out, columns):
    kind = dtypes.get(out).accumulator
    values = random((1, 1, columns), kind, 9)
    row = place(values, kind)
    if columns == 1:  # one number for all columns: a step of zero
        row = place(np.broadcast_to(values, (1, 1, 70)).copy(), kind)
        row.array = np.lib.stride_tricks.as_strided(row.array, (1, 1, 70), (0, 0, 0))
    if dtypes.get(out).kind not in "iu":
        assert_right((8, 70, 19), name, out, config={"kc": 8, "nc": 64}, bias=row)
        return
    a, b, c = operands((8, 70, 19), name, out)
    with np.errstate(over="ignore"):
        wanted = verify.reference(a.array, b.array, out=out) + row.array.astype(c.array.dtype)
    np.testing.assert_array_equal(multiply(a, b, c, {"kc": 8, "nc": 64}, bias=row), wanted)


@pytest.mark.parametrize("epilogue", ["bias", "relu", "bias+gelu", "bias+silu"])
@pytest.mark.parametrize(("name", "out"), [("f32", "f32"), ("f64", "f64"), ("f16", "f16"), ("bf16", "f32")])
def test_epilogues_of_products_of_any_width_and_layout(name, out, epilogue):
    activation = epilogue.removeprefix("bias").removeprefix("+")
    for columns, layouts in itertools.product((1, 7, 16, 20, 40, 70), ("CCC", "FFC", "SSC")):
        bias = place(random((1, 1, columns), dtypes.get(out).accumulator, 9), dtypes.get(out).accumulator)
        row = bias if "bias" in epilogue else None
        assert_right((9, columns, 21), name, out, layouts, bias=row, activation=activation)


@pytest.mark.parametrize(
    ("name", "out", "epilogue", "layout", "words"),
    [
        ("f32", "f16", "", "row", "wider type of the same kind"),
        ("int8", "f32", "", "row", "wider type of the same kind"),
        ("f32", "f32", "tanh", "row", "relu, gelu, silu"),
        ("int32", "int32", "relu", "row", "floating-point"),
        ("complex64", "complex64", "relu", "row", "floating-point"),
        ("f32", "f32", "bias", "col", "row-major"),
    ],
)
def test_what_it_refuses_and_why(name, out, epilogue, layout, words):
    assert words in images.packed_refuses(Problem(4, 4, 4, name, out, c_layout=layout, epilogue=epilogue))


def run_in(blocks, kernel, a, b, c):
    """C by one call of the compiled function, with a workspace of just the size of these blocks."""
    (_, m, k), n = a.array.shape, b.array.shape[2]
    room = np.full(blocks.workspace + 8192, 0xA5, np.uint8)
    start = -room.ctypes.data % 4096
    scalars = np.frombuffer(launch.scalar(kernel.accumulator, 1) + launch.scalar(kernel.accumulator, 0), np.uint8)
    fields = {"m": m, "n": n, "k": k, "mc": blocks.mc, "kc": blocks.kc, "nc": blocks.nc}
    fields |= {"workspace": room.ctypes.data + start, "alpha": scalars.ctypes.data, "beta": scalars.ctypes.data + 16}
    for key, placed in (("a", a), ("b", b), ("c", c)):
        fields |= {key: placed.view.pointer, f"{key}_row": placed.view.strides[1], f"{key}_col": placed.view.strides[2]}
    record = (ctypes.c_int64 * len(abi.FIELDS))()
    for key, value in fields.items():
        record[abi.SLOT[key]] = value
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)(ctypes.addressof(record))
    assert (room[start + blocks.workspace :] == 0xA5).all()
    assert (room[:start] == 0xA5).all()
    return c.array


@pytest.mark.parametrize(("name", "out"), PAIRS)
def test_the_workspace_it_asks_for_holds_every_write(name, out):
    sizes = [(13, 130, 257), (6, 64, 590), (7, 129, 270)]
    for size, layouts in itertools.product(sizes, ("CCC", "CFC", "FCC")):
        a, b, c = operands(size, name, out, layouts)
        kernel = build.packed(problem(a, b, c), {})
        assert kernel.blocks(*size).workspace  # else the panels are on the stack
        assert verify.check(run_in(kernel.blocks(*size), kernel, a, b, c), a.array, b.array).ok


@pytest.mark.parametrize(("name", "out"), PAIRS)
def test_the_blocks_of_the_largest_part_serve_every_shape_with_the_bits_of_its_plan(name, out):
    """The kernel cuts m, n and k evenly itself. Where C is narrower than its sums, k must fit in one block."""
    made, sizes = images.product(host(), Problem(1, 1, 1, name, out)), tile(host())
    deepest = sizes.kc * made.group // made.parts
    blocks = build.packed(Problem(1, 65, 1, name, out), {}).blocks(2 * sizes.mc, sizes.nc // made.parts, deepest)
    for m, n, k in [(1, 1, 1), (13, 71, 37), (97, 130, 5), (96, 65, deepest), (3, 4500, 2), (100, 0, 3), (5, 5, 0)]:
        a, b, c = operands((m, n, k), name, out)
        kernel = build.packed(problem(a, b, c), {})
        kernel(a.view, b.view, c.view)
        planned = c.array.tobytes()
        c.array[...] = 0
        assert run_in(blocks, kernel, a, b, c).tobytes() == planned, (m, n, k)


@pytest.mark.parametrize("name", ["f32", "f64", "complex64"])
def test_few_rows_pack_a_block_of_b_that_l2_holds(name):
    """More rows read a block again and again, and pack fewer of A the wider it is. A size that is asked for stays."""
    sizes, wide = tile(host()), 192
    kernel = build.packed(Problem(16, 4096, 4096, name, name, b_layout="col"), {})
    for m, least, most in ((1, 1, wide), (sizes.mc, 1, wide), (sizes.mc + 1, sizes.nc // 2, sizes.nc)):
        assert least <= kernel.blocks(m, 4096, 4096).nc <= most, m
    asked = build.packed(Problem(16, 4096, 4096, name, name, b_layout="col"), {"nc": 512})
    assert asked.blocks(16, 4096, 4096).nc > wide


def test_a_bias_takes_no_image_of_its_own():
    for epilogue in ("", "relu"):
        with_bias = f"bias+{epilogue}" if epilogue else "bias"
        addresses = {
            build.packed(Problem(4, 4, 4, "f32", "f32", epilogue=e), {}).address for e in (epilogue, with_bias)
        }
        assert len(addresses) == 1


@pytest.mark.process
@pytest.mark.many
@pytest.mark.parametrize(("name", "out"), PAIRS)
def test_nothing_past_the_end_of_an_operand_is_touched(name, out):
    def fenced(rows, columns, kind, layout):
        turned = layout == "F"
        flat = at_page_end(random((columns, rows) if turned else (rows, columns), kind, 1))
        array = (flat.T if turned else flat)[None]
        return Placed(array, array, array, kind)

    runs = []
    for layouts, (m, n, k) in itertools.product(
        itertools.product("CF", "CF", "CF"), [(13, 71, 37), (7, 65, 3), (5, 9, 6)]
    ):
        sides = zip(((m, k), (k, n), (m, n)), (name, name, out), layouts, strict=True)
        a, b, c = (fenced(*side, kind, layout) for side, kind, layout in sides)
        runs.append((build.packed(problem(a, b, c), {}), a.view, b.view, c.view))
    assert survives(lambda: [kernel(*views) for kernel, *views in runs])


@pytest.mark.parametrize(("name", "out"), PAIRS)
def test_other_machines_get_no_instruction_of_x86(name, out):
    target = Target("generic", frozenset(), machine="riscv64")
    text = str(loops.packed(target, images.product(target, Problem(4, 4, 4, name, out))))
    assert "llvm.x86" not in text
    assert "call void @pack_b" in text


def test_operands_of_any_layout_are_multiplied_by_one_image():
    kernels = set()
    for layouts in itertools.product("CFS", "CFS", "CF"):
        a, b, c = operands((13, 71, 37), "f32", "f32", layouts)
        kernel = build.packed(problem(a, b, c), {})
        kernel(a.view, b.view, c.view)
        assert verify.check(c.array, a.array, b.array).ok
        kernels.add(kernel.address)
    assert len(kernels) == 1
