"""The tile unit: packing, edges and the order of its instructions on a model of them, which needs no such CPU."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re

import llvmlite.binding as llvm
import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes, limits, verify
from gemmery.arrays import View
from gemmery.cpu import build, convert, epilogue, images, loops, panels, simple, tile_unit
from gemmery.cpu.abi import FIELDS
from gemmery.cpu.ir_types import vector
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.target import Target, host
from gemmery.cpu.ukernel import register_tile
from gemmery.problem import Problem
from operands import numpy_dtype, place, random

pytestmark = pytest.mark.sampled(3)

XEON = Target("avx512", frozenset({"amx_tile", "amx_bf16", "amx_int8"}))
REGISTERS = np.zeros((8, 16, 64), np.uint8)
KEPT = []
PRODUCTS = [("bf16", "f32", "tdpbf16ps"), ("bf16", "bf16", "tdpbf16ps"), ("int8", "int32", "tdpbssd"),
            ("uint8", "uint32", "tdpbuud"), ("int8", "int8", "tdpbssd"), ("f16", "f16", "tdpbf16ps"),
            ("f16", "f32", "tdpbf16ps")]  # fmt: skip
SUMS = (("bf16", "f32"), ("int8", "int32"), ("uint8", "uint32"))


def types_of(dtype, out, epilogue="", b_dtype="", b_layout="row"):
    """The product of these types that runs on the unit."""
    problem = Problem(2, 2, 2, dtype, out, epilogue=epilogue, b_dtype=b_dtype, b_layout=b_layout)
    kinds = images.product(XEON, problem)
    return images.halved(kinds) if dtype == "f16" else kinds


def define_model(module, step):
    """The instructions as functions of the module, on registers in memory; one of another shape would not be right."""

    def register(f, number):
        start = f.emit("ptr", f"inttoptr i64 {REGISTERS.ctypes.data} to ptr")
        return start + f.convert("zext", number, "i64") * 1024

    row = vector(64, "i8")
    with module.function("model.ldtilecfg", ("ptr", "config")) as f:
        # Registers that nobody has shaped hold what no sum is right with.
        word = f.load("i64", f["config"] + 48)
        shaped = word.equals(0x1010_1010_1010_1010) & f.load("i64", f["config"] + 16).equals(0x0040_0040_0040_0040)
        with f.loop(0, 8 * 1024) as at:
            start = f.emit("ptr", f"inttoptr i64 {REGISTERS.ctypes.data} to ptr")
            f.store(f.select(shaped, f.const("i8", 0), f.const("i8", 99)), start + at)
    with module.function("model.tilerelease") as f:
        pass
    with module.function("model.tilezero", ("i8", "to")) as f, f.loop(0, 1024, 64) as at:
        f.store(f.zero(row), register(f, f["to"]) + at)
    for name in ("tileloadd64", "tileloaddt164"):
        with (
            module.function(f"model.{name}", ("i8", "to"), ("ptr", "at"), ("i64", "step")) as f,
            f.loop(0, 16) as r,
        ):
            f.store(f.load(row, f["at"] + r * f["step"]), register(f, f["to"]) + r * 64)
    name = "model.avx512bf16.cvtneps2bf16.512"
    with module.function(name, (vector(16, "float"), "x"), returns=vector(16, "i16")) as f:
        f.ret(convert.narrow(f, f["x"], dtypes.get("bf16")))
    # x 2**n, whose n is whole: a product of two powers of two. CPUs without AVX-512 lack the instruction.
    floats, element = vector(16, "float"), epilogue._FORMATS["float"]
    terms = ((floats, "x"), (floats, "n"), (floats, "kept"), ("i16", "every"), ("i32", "how"))
    with module.function("model.avx512.mask.scalef.ps.512", *terms, returns=floats) as f:
        x, start = f["x"], f.const(floats, element.rounder)
        n = epilogue._bits(f, f["n"] + start) - epilogue._bits(f, start)
        for part in (n >> 1, n - (n >> 1)):
            x = x * f.bitcast((part + element.bias) << element.exponent_at, floats)
        f.ret(x)
    with module.function("model.tilestored64", ("i8", "of"), ("ptr", "at"), ("i64", "step")) as f, f.loop(0, 16) as r:
        f.store(f.load(row, register(f, f["of"]) + r * 64), f["at"] + r * f["step"])
    wide, narrow, group = ("float", "bfloat", 2) if step == "tdpbf16ps" else ("i32", "i8", 4)
    size = 4 // group
    with (
        module.function(f"model.{step}", ("i8", "to"), ("i8", "a"), ("i8", "b")) as f,
        f.loop(0, 16) as i,
        f.loop(0, 16) as j,
    ):
        at = register(f, f["to"]) + i * 64 + j * 4
        chains = [f.var(f.zero(wide)) for _ in range(group)]  # each of every second, or fourth, element of k
        with f.loop(0, 16) as p:
            for g, chain in enumerate(chains):
                x, y = (
                    f.load("i16" if narrow == "bfloat" else narrow, register(f, f[name]) + r * 64 + c * 4 + g * size)
                    for name, r, c in (("a", i, p), ("b", p, j))
                )
                if narrow == "bfloat":
                    x, y = (f.bitcast(f.convert("zext", number, "i32") << 16, wide) for number in (x, y))
                    chain.value = f.fma(x, y, chain.value)
                else:
                    how = {"s": "sext", "u": "zext"}  # the letters after tdpb: A, B
                    chain.value = chain.value + f.convert(how[step[4]], x, wide) * f.convert(how[step[5]], y, wide)
        first, *others = chains
        f.store(sum((chain.value for chain in others), first.value) + f.load(wide, at), at)


def compiled(module, step, *names):
    """The addresses of functions of a module for the tile unit, whose instructions are those of the model."""
    define_model(module, step)
    instruction = r"@llvm\.x86\.(?=ldtilecfg|t|avx512bf16|avx512.mask.scalef)"
    lines = (line for line in str(module).splitlines() if not re.match(rf"declare .* {instruction}", line))
    # Without bfloat16 in the CPU, LLVM calls functions that are not there, even for shuffles.
    text = re.sub(instruction, "@model.", "\n".join(lines)).replace("bfloat 0xR0000", "i16 0").replace("bfloat", "i16")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    parsed = llvm.parse_assembly(text)
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), opt=1)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    KEPT.append(engine)
    return [engine.get_function_address(name) for name in names]


@functools.cache
def launch(
    dtype,
    out,
    epilogue="",
    sizes=(64, 128, 64),
    depth=panels.DEPTH,
    once=False,
    b_dtype="",
    resident=tile_unit._RESIDENT,
    b_layout="row",
):
    """The packed product on the model; with `once` a pair with the function that packs B for it."""
    kinds = types_of(dtype, out, epilogue, b_dtype, b_layout)
    memory = build._in_memory(kinds)
    assert b_dtype or kinds.step == next(step for *types, step in PRODUCTS if types == [dtype, out])
    mc, kc, nc = sizes
    register = register_tile(XEON, kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "DEPTH", depth)
        patch.setattr(tile_unit, "_RESIDENT", resident)
        [address] = compiled(loops.packed(XEON, kinds, once=once), kinds.step, "packed")
        whole = compiled(loops.packed(XEON, memory, once=True), kinds.step, "panels") if once else []

    def blocks(m, n, k):
        tall, deep, wide = build.even(m, mc, register.mr), build.even_kc(kinds, k, kc), build.even(n, nc, register.nr)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panels, "DEPTH", depth)
            return Blocks(tall, deep, wide, panels.workspace_bytes(XEON, kinds, m, k, tall, deep, wide, once))

    def bytes_of(k, n):
        return panels.whole(panels.operands(memory, register)[1], k, n, build.even_kc(memory, k, kc))

    def steps(k, n):
        return bytes_of(k, n).block, bytes_of(k, n).panel // register.nr

    def pack(b, k, n):
        """B in the middle of a block whose last byte no panel may reach."""
        size = bytes_of(k, n)
        to = np.full(size.size + 64, 0x7F, np.uint8)
        values = {
            "n": n, "k": k, "b": b.ctypes.data, "b_row": b.strides[1], "b_col": b.strides[2],
            "kc": build.even_kc(memory, k, kc),
            "c": to.ctypes.data, "c_row": size.block, "c_col": size.panel // register.nr,
        }  # fmt: skip
        record = np.array([values.get(name, 0) for name, _ in FIELDS], np.int64)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(whole[0])(record.ctypes.data)
        assert (to[-64:] == 0x7F).all()
        return View(to.ctypes.data, (1, k, n), (0, 0, 0), dtype, owner=to)

    kernel = Launch(address, kinds.scalar, dtypes.get(out).size, blocks, b_steps=steps if once else None)
    return (kernel, pack) if once else kernel


SIZES = (
    *itertools.product((1, 16, 33), (1, 17, 65), (1, 31, 65)),
    (70, 130, 300),
    (32, 32, 128),
    (3, 2, 0),
    (48, 450, 96),
)


@pytest.mark.many(7)
@pytest.mark.parametrize(("dtype", "out", "step"), PRODUCTS)
@pytest.mark.parametrize("layouts", ["CC", "CF", "FC", "FF", "padded", "strided"])
def test_products_on_the_model(dtype, out, step, layouts):
    kernel = launch(dtype, out)
    kinds = (layouts, layouts) if len(layouts) > 2 else layouts
    for m, n, k in SIZES:
        a, b = (place(random((1, *shape), dtype, seed), dtype, kind)
                for seed, (shape, kind) in enumerate(zip(((m, k), (k, n)), kinds, strict=True)))  # fmt: skip
        c = place(random((1, m, n), out, 2), out, "C")
        for alpha, beta in ((1, 0), (3, 2)):
            old = c.array.copy()
            kernel(a.view, b.view, c.view, alpha=alpha, beta=beta)
            checked = verify.check(c.array, a.array, b.array, verify.blocked, alpha=alpha, beta=beta, c=old)
            assert checked.ok, (m, n, k, alpha, checked)


@pytest.mark.many(3)
@pytest.mark.parametrize("layouts", ["CC", "FF", "strided"])
@pytest.mark.parametrize(("dtype", "b_dtype", "step"), [("int8", "uint8", "tdpbsud"), ("uint8", "int8", "tdpbusd")])
def test_one_operand_with_signs_and_one_without(dtype, b_dtype, step, layouts, sample):
    assert images.product(XEON, Problem(2, 2, 2, dtype, "int32", b_dtype=b_dtype)).step == step
    kinds = (layouts, layouts) if len(layouts) > 2 else layouts
    for out in sample(("int16", "int32", "int64"), 3):
        kernel = launch(dtype, out, b_dtype=b_dtype)
        for m, n, k in SIZES:
            a, b = (place(random((1, *shape), name, seed), name, kind) for seed, (shape, name, kind)
                    in enumerate(zip(((m, k), (k, n)), (dtype, b_dtype), kinds, strict=True)))  # fmt: skip
            c = place(random((1, m, n), out, 2), out, "C")
            old = c.array.copy()
            kernel(a.view, b.view, c.view, alpha=3, beta=2)
            assert np.array_equal(c.array, 3 * (a.array.astype(out) @ b.array.astype(out)) + 2 * old), (m, n, k)
            assert c.untouched_around()


@pytest.mark.many(5)
@pytest.mark.parametrize(("dtype", "out", "step"), PRODUCTS)
@pytest.mark.parametrize("layout", ["C", "F", "strided"])
def test_a_b_packed_once_gives_the_same_bits(dtype, out, step, layout, sample):
    """Blocks of k, and parts and chains of k in a block, of which the last are shorter."""
    parts = {"sizes": (64, 4096, 96), "depth": 4 << 10}
    wider = (96, 96, 512), (70, 130, 700), (48, 113, 2112), (16, 50, 4200)
    for keywords, shapes in sample((({}, SIZES), (parts, wider)), 2):
        (kernel, pack), plain = launch(dtype, out, **keywords, once=True), launch(dtype, out, **keywords)
        for m, n, k in shapes:
            a = place(random((1, m, k), dtype, 0), dtype, "C")
            b = place(random((1, k, n), dtype, 1), dtype, layout)
            c, expected = (place(random((1, m, n), out, 2), out, "C") for _ in range(2))
            kernel(a.view, pack(b.array, k, n), c.view, alpha=3, beta=2)
            plain(a.view, b.view, expected.view, alpha=3, beta=2)
            assert c.array.tobytes() == expected.array.tobytes(), (m, n, k)
            assert b.untouched()


@pytest.mark.parametrize(("dtype", "out", "step"), PRODUCTS)
def test_the_parts_for_threads_begin_at_panels_of_a_b_packed_once(dtype, out, step, monkeypatch):
    monkeypatch.setattr(build, "host", lambda: XEON)
    monkeypatch.setattr(build, "once_entries", lambda types: {"packed": 0})
    kinds = types_of(dtype, out, b_layout="packed")
    memory, register = build._in_memory(kinds), register_tile(XEON, kinds)
    kernel, panel = build.packed_once.__wrapped__(kinds), panels.operands(memory, register)[1]
    assert kernel.unit.columns % panel.width == 0
    assert kernel.b_steps(300, 500)[1] * panel.width == panels.panel_bytes(panel, 300)


@pytest.mark.many(5)
@pytest.mark.parametrize(("dtype", "out", "step"), PRODUCTS)
def test_sums_that_stay_tiles_between_parts_of_k(dtype, out, step):
    """Parts of one or more steps, and several chains of k in a block: a second one begins at 1024 for bfloat16."""
    for sizes, depth in (((64, 4096, 96), 4 << 10), ((64, 256, 96), 4 << 10), ((32, 4096, 96), panels.DEPTH)):
        kernel = launch(dtype, out, sizes=sizes, depth=depth)
        for m, n, k in ((96, 96, 512), (70, 130, 700), (48, 113, 2112)):
            a, b = (place(random((1, *shape), dtype, seed), dtype, "C") for seed, shape in enumerate(((m, k), (k, n))))
            c = place(random((1, m, n), out, 2), out, "C")
            for alpha, beta in ((1, 0), (1, 1), (3, 2)):
                old = c.array.copy()
                kernel(a.view, b.view, c.view, alpha=alpha, beta=beta)
                checked = verify.check(c.array, a.array, b.array, verify.blocked, alpha=alpha, beta=beta, c=old)
                assert checked.ok, (m, n, k, alpha, checked)
                assert c.untouched_around()


@pytest.mark.many(3)
@pytest.mark.parametrize("resident", [tile_unit._RESIDENT, 1 << 12])
@pytest.mark.parametrize(("dtype", "out", "step"), [types for types in PRODUCTS if types[:2] in SUMS])
def test_an_a_anywhere_in_a_cache_line(dtype, out, step, resident):
    """More panels of B than those for which A is read where it is; two blocks of rows, and several parts of k."""
    kernel = launch(dtype, out, sizes=(32, 1024, 480), depth=4 << 10, resident=resident)
    size = dtypes.get(dtype).size
    for m, n, k in ((32, 480, 256), (64, 500, 192), (48, 970, 64)):
        b, expected = place(random((1, k, n), dtype, 1), dtype, "C"), None
        for offset in (0, 16, 64 - size):
            memory = np.zeros(m * k * size + 128, np.uint8)
            memory = memory[-memory.ctypes.data % 64 + offset :][: m * k * size]
            a = memory.view(b.array.dtype).reshape(1, m, k)
            a[:] = random((1, m, k), dtype, 0)
            c = place(random((1, m, n), out, 2), out, "C")
            kernel(View(a.ctypes.data, a.shape, a.strides, dtype, owner=a), b.view, c.view)
            assert verify.check(c.array, a, b.array, verify.blocked).ok, (m, n, k, offset)
            expected = expected or c.array.tobytes()
            assert c.array.tobytes() == expected
            assert c.untouched_around()


@pytest.mark.many(4)
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(("dtype", "out", "kc"), [("bf16", "bf16", 4096), ("int8", "int32", 8192)])
def test_a_long_k_in_the_blocks_of_the_unit(dtype, out, kc, once):
    """Blocks, chains and parts of k as products have them; A is packed, since its rows are whole pages apart."""
    kernel = launch(dtype, out, sizes=(256, kc, 1024), once=once)
    kernel, pack = kernel if once else (kernel, None)
    for m, n, k in ((1, 96, 4096), (32, 96, 16384)):
        a, b = (place(random((1, *shape), dtype, seed), dtype, "C") for seed, shape in enumerate(((m, k), (k, n))))
        c = place(random((1, m, n), out, 2), out, "C")
        kernel(a.view, pack(b.array, k, n) if pack else b.view, c.view)
        assert verify.check(c.array, a.array, b.array, verify.blocked).ok, (m, n, k)


@pytest.mark.parametrize(
    ("out", "epilogue"), [("bf16", "bias"), ("bf16", "bias+gelu"), ("f32", "bias+relu"), ("f32", "relu")]
)
def test_epilogues_on_the_model(out, epilogue):
    """Whole tiles and edges, one chain of k and two."""
    kernel, activation = launch("bf16", out, epilogue, (64, 4096, 96)), epilogue.rpartition("+")[2]
    for m, n, k in ((32, 96, 64), (33, 50, 1100)):
        a, b = (place(random((1, *shape), "bf16", seed), "bf16", "C") for seed, shape in enumerate(((m, k), (k, n))))
        c, row = place(random((1, m, n), out, 2), out, "C"), place(random((1, 1, n), "f32", 3), "f32", "C")
        bias = row.view._replace(shape=(n,), strides=row.array.strides[2:]) if "bias" in epilogue else None
        kernel(a.view, b.view, c.view, bias=bias)
        checked = verify.check(
            c.array, a.array, b.array, verify.blocked, bias=None if bias is None else row.array[0, 0],
            activation="" if activation == "bias" else activation,
        )  # fmt: skip
        assert checked.ok, (m, n, k, checked)


def test_panels_of_float16_in_memory_are_made_halves():
    parts = {"sizes": (64, 768, 128), "once": True}
    (plain, pack_halves), (kernel, pack) = (launch("f16", "f16", **parts, b_layout=x) for x in ("row", "packed"))
    for m, n, k in ((48, 200, 1000), (33, 65, 31), (70, 130, 300)):
        a, b = (place(random((1, *shape), "f16", seed), "f16", "C") for seed, shape in enumerate(((m, k), (k, n))))
        c, expected = (place(random((1, m, n), "f16", 2), "f16", "C") for _ in range(2))
        kernel(a.view, pack(b.array, k, n), c.view, alpha=3, beta=2)
        plain(a.view, pack_halves(b.array, k, n), expected.view, alpha=3, beta=2)
        assert c.array.tobytes() == expected.array.tobytes(), (m, n, k)


@pytest.mark.parametrize("layouts", ["CC", "FF", "strided"])
@pytest.mark.parametrize("out", ["f16", "f32"])
def test_halves_of_special_numbers(out, layouts):
    """Infinity, NaN, zero, the largest and the least numbers, in a chain of several parts, and of two blocks."""
    kernel = launch("f16", out, sizes=(64, 256, 128), depth=4 << 10)
    kinds = (layouts, layouts) if len(layouts) > 2 else layouts
    special = [np.inf, -np.inf, np.nan, 0, -0.0, 65504, 2.0**-24, -(2.0**-14) * (1 - 2.0**-10), 1 + 2.0**-10]
    draw = np.random.default_rng(0)
    for m, n, k, count in ((20, 70, 40, 3), (33, 130, 300, 9), (17, 64, 1, 40), (16, 64, 33, 0)):
        numbers = [random((1, *shape), "f16", seed) for seed, shape in enumerate(((m, k), (k, n)))]
        for array in numbers:
            places = draw.integers(0, array.size, count)
            array.reshape(-1)[places] = draw.choice(special, count)
        a, b = (place(array, "f16", kind) for array, kind in zip(numbers, kinds, strict=True))
        c, turned = (place(np.zeros((1, *shape), numpy_dtype(out)), out, "C") for shape in ((m, n), (n, m)))
        kernel(a.view, b.view, c.view)
        with np.errstate(all="ignore"):
            checked = verify.check(c.array, a.array, b.array, verify.blocked)
        assert checked.ok, (m, n, k, checked)
        swapped = [x.view._replace(shape=x.view.shape[:1] + x.view.shape[:0:-1],
                                   strides=x.view.strides[:1] + x.view.strides[:0:-1]) for x in (b, a)]  # fmt: skip
        kernel(*swapped, turned.view)
        finite = np.isfinite(c.array)
        assert (turned.array.swapaxes(1, 2)[finite] == c.array[finite]).all()
        assert (np.isfinite(turned.array.swapaxes(1, 2)) == finite).all()


def test_all_float16_are_the_sums_of_their_halves():
    """One column of B is 1, so that sums are the numbers."""
    kernel = launch("f16", "f32")
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(1, -1, 64)
    numbers = np.where(np.isfinite(numbers), numbers, np.float16(0))
    for at in range(0, numbers.shape[1], 256):
        a, b = (place(x, "f16", "C") for x in (numbers[:, at : at + 256], np.eye(64, dtype=np.float16)[None]))
        c = place(np.zeros((1, 256, 64), np.float32), "f32", "C")
        kernel(a.view, b.view, c.view)
        assert (c.array == numbers[:, at : at + 256]).all()


@pytest.mark.parametrize(("dtype", "out", "step"), [types for types in PRODUCTS if types[:2] in SUMS])
def test_the_rung_that_packs_nothing(dtype, out, step):
    kinds = images.product(XEON, Problem(2, 2, 2, dtype, out))
    [address] = compiled(simple.amx_tile(XEON, kinds), step, "amx_tile")
    kernel = Launch(address, kinds.scalar, 4, lambda m, n, k: Blocks())
    for m, n, k in SIZES:
        a, b = (place(random((1, *shape), dtype, seed), dtype, "padded") for seed, shape in enumerate(((m, k), (k, n))))
        c = place(random((1, m, n), out, 2), out, "padded")
        kernel(a.view, b.view, c.view)
        checked = verify.check(c.array, a.array, b.array)
        assert checked.ok, (m, n, k, checked)
        assert c.untouched_around()


def test_the_peak_is_that_of_resident_tiles():
    for dtype, step in (("bf16", "tdpbf16ps"), ("int8", "tdpbssd")):
        text = str(limits._peak_module(XEON, dtype))
        assert limits.unit(dtype, XEON) == dtype
        assert text.count(f"call void @llvm.x86.{step}") == 4
        loop = text[text.index("body") : text.index("done", text.index("body"))]
        assert "tileload" not in loop


@pytest.mark.skipif(not host().has_tiles, reason="needs a tile unit (AMX)")
@pytest.mark.parametrize("types", [("bf16", "bf16", "bf16"), ("int8", "int8", "int32"), ("int8", "uint8", "int32"),
                                   ("uint8", "int8", "int32"), ("uint8", "uint8", "int32")])  # fmt: skip
def test_threads_on_the_unit_share_a_packed_b(types):
    """A begins at each of two places in a cache line, and a part of k ends in the middle of a step."""
    first, second, out = types
    for m, n, k in ((700, 1200, 1030), (1024, 1024, 2112), (640, 3000, 400)):
        a, b = random((m, k + 8), first, 0)[:, 8:], random((k, n), second, 1)
        dtype = None if out == first else out
        one, many = (gm.matmul(a, b, dtype=dtype, threads=threads) for threads in (1, 4))
        assert one.tobytes() == many.tobytes()
        assert verify.check(one[None], a[None], b[None], verify.blocked, most_flops=1e8).ok
        x = random((m, m + 90), first, 2)[:, : m // 2]
        whole, half = (gm.matmul(x, y, dtype=dtype, threads=4) for y in (x.T.copy(), x.T))
        assert whole.tobytes() == half.tobytes()


def test_gemmery_isa_switches_the_unit_off():
    assert XEON.has_tiles
    assert not XEON.limited("avx512").has_tiles
    assert not XEON.limited("avx2").has_tiles
    assert not XEON._replace(features=XEON.features - {"amx_tile"}).has_tiles
