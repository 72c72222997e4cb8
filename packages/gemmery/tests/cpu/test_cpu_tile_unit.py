"""The tile unit: packing, edges and the order of its instructions on a model of them, which needs no such CPU."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re

import llvmlite.binding as llvm
import numpy as np
import pytest

from gemmery import dtypes, limits, verify
from gemmery.arrays import View
from gemmery.cpu import build, loops
from gemmery.cpu.abi import FIELDS
from gemmery.cpu.ir_types import vector
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.panels import operands, whole, workspace_bytes
from gemmery.cpu.target import Target
from gemmery.cpu.ukernel import register_tile
from gemmery.problem import Problem
from operands import place, random

XEON = Target("avx512", frozenset({"amx_tile", "amx_bf16", "amx_int8"}))
REGISTERS = np.zeros((8, 16, 64), np.uint8)
KEPT = []
PRODUCTS = [("bf16", "f32", "tdpbf16ps"), ("bf16", "bf16", "tdpbf16ps"), ("int8", "int32", "tdpbssd"),
            ("uint8", "int32", "tdpbuud"), ("int8", "int8", "tdpbssd")]  # fmt: skip


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
    with module.function("model.tileloadd64", ("i8", "to"), ("ptr", "at"), ("i64", "step")) as f, f.loop(0, 16) as r:
        f.store(f.load(row, f["at"] + r * f["step"]), register(f, f["to"]) + r * 64)
    with module.function("model.tilestored64", ("i8", "of"), ("ptr", "at"), ("i64", "step")) as f, f.loop(0, 16) as r:
        f.store(f.load(row, register(f, f["of"]) + r * 64), f["at"] + r * f["step"])
    wide, narrow, group = ("float", "bfloat", 2) if step == "tdpbf16ps" else ("i32", "i8", 4)
    size = 4 // group
    with (
        module.function(f"model.{step}", ("i8", "to"), ("i8", "a"), ("i8", "b")) as f,
        f.loop(0, 16) as i,
        f.loop(0, 16) as p,
        f.loop(0, 16) as j,
    ):
        at = register(f, f["to"]) + i * 64 + j * 4
        total = f.load(wide, at)
        for g in range(group):
            x, y = (
                f.load("i16" if narrow == "bfloat" else narrow, register(f, f[name]) + r * 64 + c * 4 + g * size)
                for name, r, c in (("a", i, p), ("b", p, j))
            )
            if narrow == "bfloat":
                x, y = (f.bitcast(f.convert("zext", number, "i32") << 16, wide) for number in (x, y))
                total = f.fma(x, y, total)
            else:
                how = "zext" if step == "tdpbuud" else "sext"
                total = total + f.convert(how, x, wide) * f.convert(how, y, wide)
        f.store(total, at)


@functools.cache
def launch(dtype, out, epilogue="", sizes=(64, 128, 64), once=False):
    """The packed product on the model; with `once` a pair with the function that packs B for it."""
    problem = Problem(2, 2, 2, dtype, out, epilogue=epilogue)
    made = build.product(XEON, problem)
    assert made.step == next(step for *types, step in PRODUCTS if types == [dtype, out])
    module = loops.packed(XEON, made, once=once)
    define_model(module, made.step)
    lines = (line for line in str(module).splitlines() if not re.match(r"declare void @llvm.x86.(ldtilecfg|t)", line))
    # Without bfloat16 in the CPU, LLVM calls functions that are not there, even for shuffles.
    text = (
        re.sub(r"@llvm\.x86\.(?=ldtilecfg|t)", "@model.", "\n".join(lines))
        .replace("bfloat 0xR0000", "i16 0")
        .replace("bfloat", "i16")
    )
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    parsed = llvm.parse_assembly(text)
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), opt=1)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    KEPT.append(engine)
    mc, kc, nc = sizes
    register = register_tile(XEON, made)

    def blocks(m, n, k):
        tall, deep, wide = build.even(m, mc, register.mr), build.even(k, kc, made.unit), build.even(n, nc, register.nr)
        return Blocks(tall, deep, wide, workspace_bytes(XEON, made, m, k, tall, deep, wide))

    def bytes_of(k, n):
        return whole(operands(made, register)[1], k, n, build.even(k, kc, made.unit))

    def steps(k, n):
        return bytes_of(k, n).block, bytes_of(k, n).panel // register.nr

    def pack(b, k, n):
        """B in the middle of a block whose last byte no panel may reach."""
        size = bytes_of(k, n)
        to = np.full(size.size + 64, 0x7F, np.uint8)
        values = {
            "n": n, "k": k, "b": b.ctypes.data, "b_row": b.strides[1], "b_col": b.strides[2],
            "kc": build.even(k, kc, made.unit), "c": to.ctypes.data, "c_row": size.block, "c_col": size.panel,
        }  # fmt: skip
        record = np.array([values.get(name, 0) for name, _ in FIELDS], np.int64)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("panels"))(record.ctypes.data)
        assert (to[-64:] == 0x7F).all()
        return View(to.ctypes.data, (1, k, n), (0, 0, 0), dtype, owner=to)

    address, scalar, size = engine.get_function_address("packed"), made.scalar, dtypes.get(out).size
    if once:
        return Launch(address, scalar, size, blocks, b_steps=steps), pack
    return Launch(address, scalar, size, blocks)


SIZES = (*itertools.product((1, 16, 33), (1, 17, 65), (1, 31, 65)), (70, 130, 300), (32, 32, 128), (3, 2, 0))


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


@pytest.mark.parametrize(("dtype", "out", "step"), PRODUCTS)
@pytest.mark.parametrize("layout", ["C", "F", "strided"])
def test_a_b_packed_once_gives_the_same_bits(dtype, out, step, layout):
    (kernel, pack), plain = launch(dtype, out, once=True), launch(dtype, out)
    for m, n, k in SIZES:
        a = place(random((1, m, k), dtype, 0), dtype, "C")
        b = place(random((1, k, n), dtype, 1), dtype, layout)
        c, expected = (place(random((1, m, n), out, 2), out, "C") for _ in range(2))
        kernel(a.view, pack(b.array, k, n), c.view, alpha=3, beta=2)
        plain(a.view, b.view, expected.view, alpha=3, beta=2)
        assert c.array.tobytes() == expected.array.tobytes(), (m, n, k)
        assert b.untouched()


def test_the_peak_is_that_of_resident_tiles():
    for dtype, step in (("bf16", "tdpbf16ps"), ("int8", "tdpbssd")):
        text = str(limits._peak_module(XEON, dtype))
        assert limits.unit(dtype, XEON) == dtype
        assert text.count(f"call void @llvm.x86.{step}") == 4
        loop = text[text.index("body") : text.index("done", text.index("body"))]
        assert "tileload" not in loop


def test_gemmery_isa_switches_the_unit_off():
    assert XEON.has_tiles
    assert not XEON.limited("avx512").has_tiles
    assert not XEON.limited("avx2").has_tiles
    assert not XEON._replace(features=XEON.features - {"amx_tile"}).has_tiles
