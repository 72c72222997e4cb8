"""The emulator's floating-point instructions against the hardware's, bit by bit except for NaNs."""

import numpy as np
import pytest

from gemmery.cuda import driver
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ops.convert import TABLE as CONVERT
from gemmery_emulator.ops.floating import TABLE as FLOATING
from gpu_operands import functions, launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

COUNT, BLOCK = 16384, 256
REGISTERS = {"pred": "p", "f32": "f", "f64": "d"} | dict.fromkeys(("u8", "s8"), "r")
SPECIAL = [0, -0.0, 1, -1, 0.5, 1.5, 2.5, np.inf, -np.inf, np.nan, 65504, 65520, 448, 464, 480, 57344, 61440, 255.5]
SPECIAL += [2.0**31, -(2.0**31), 2.0**63, 2.0**64, 1e-8, -1e-8, 6e-8, 3e38, 1e-40, -1e-40, 5e-324, 1.7e308]


def on_hopper(opcode):
    """Whether sm_90 has it: arithmetic of pairs of f32, sums of f32 and halves, and a limit to tf32 came later."""
    mixed = opcode.startswith(("add.", "sub.", "fma.")) and opcode.endswith((".f32.f16", ".f32.bf16"))
    return ".f32x2" not in opcode and not mixed and not (".satfinite" in opcode and ".tf32" in opcode)


OPS = {opcode: op for opcode, op in (FLOATING | CONVERT).items() if on_hopper(opcode)}
EQUAL = {opcode: op for opcode, op in OPS.items() if ".approx" not in opcode and ".full" not in opcode}


def size(type_):
    return np.dtype(NUMPY[type_]).itemsize


def register(type_, i):
    return f"%{REGISTERS.get(type_) or {2: 'h', 4: 'r', 8: 'q'}[size(type_)]}{i}"


def values(type_, rng):
    """Any bits, sums of few bits, normal numbers of any size, special ones."""
    kind = np.dtype(NUMPY[type_])
    bits = rng.integers(0, 256, COUNT * kind.itemsize, np.uint8)
    name = type_.removesuffix("x2")
    if name not in ("f16", "bf16", "f32", "f64"):
        wide = bits.view(f"u{kind.itemsize}")
        wide[::2] >>= rng.integers(0, 8 * kind.itemsize, COUNT // 2).astype(wide.dtype)
        return wide.view(kind)
    floats = bits.view(np.uint16 if name == "bf16" else f"f{size(name)}")
    count = len(floats) // 4
    chosen = [
        rng.integers(-4000, 4000, count) / 2.0 ** rng.integers(0, 12, count),
        rng.standard_normal(count) * 10.0 ** rng.integers(-4, 5, count),
        rng.choice(SPECIAL, count),
    ]
    for i, part in enumerate(chosen):
        to = floats[i * count : (i + 1) * count]
        to[:] = part.astype(np.float32).view(np.uint32) >> 16 if name == "bf16" else part.astype(floats.dtype)
    rng.shuffle(floats)
    return bits.view(kind)


def kernel(ops, places):
    """PTX that applies every instruction to the operands at its places; results lie one after the other."""
    lines = [
        ".version 9.0\n.target sm_90\n.address_size 64",
        ".visible .entry all(.param .u64 in, .param .u64 out) {",
        ".reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<8>; .reg .b64 %q<4>; .reg .f32 %f<4>; .reg .f64 %d<4>;",
        ".reg .b64 %in, %out, %at, %x1, %x2, %x4, %x8;",
        "mov.u32 %r4, %ctaid.x; mov.u32 %r5, %tid.x;",
        f"mad.lo.u32 %r4, %r4, {BLOCK}, %r5; cvt.u64.u32 %x1, %r4;",
        "shl.b64 %x2, %x1, 1; shl.b64 %x4, %x1, 2; shl.b64 %x8, %x1, 3;",
        "ld.param.u64 %in, [in]; ld.param.u64 %out, [out];",
    ]
    end = 0
    for opcode, op in ops.items():
        for i, type_ in enumerate(op.operands, 1):
            load = type_ if size(type_) == 1 else f"b{8 * size(type_)}"
            lines.append(f"add.u64 %at, %in, %x{size(type_)};")
            lines.append(f"ld.global.{load} {register(type_, i)}, [%at+{places[type_, i]}];")
        (result,) = op.results
        named = [register(type_, i) for i, type_ in enumerate((result, *op.operands))]
        lines.append(f"{opcode} {', '.join(named)};")
        if result == "pred":
            lines.append("selp.b32 %r0, 1, 0, %p0;")
        store, source = ("u8", "%r0") if size(result) == 1 else (f"b{8 * size(result)}", named[0])
        lines += [f"add.u64 %at, %out, %x{size(result)};", f"st.global.{store} [%at+{end}], {source};"]
        end += COUNT * size(result)
    return "\n".join([*lines, "ret;", "}\n"]), end


def launched(ptx, data, length):
    """Return the bytes that the kernel writes."""
    source, target = driver.Memory(data.nbytes), driver.Memory(length)
    source.write(data)
    target.fill(0)
    out = np.empty(length, np.uint8)
    launch(*functions(ptx, ["all"]), COUNT // BLOCK, BLOCK, source, target)
    target.read(out)
    return out


def comparable(x, type_):
    """Bits, every NaN the same."""
    name = type_.removesuffix("x2")
    if name in ("f16", "bf16", "f32", "f64", "tf32"):
        nan, bits = {"f16": (0x7C00, "u2"), "bf16": (0x7F80, "u2"), "f64": (0x7FF << 52, "u8")}.get(
            name, (0x7F800000, "u4")
        )
        x = np.ascontiguousarray(x).view(bits)
        return np.where(x & ~x.dtype.type(1 << (8 * x.itemsize - 1)) > nan, x.dtype.type(nan + 1), x)
    return x


@pytest.fixture(scope="module")
def results():
    """Return operands, and the hardware's results for each opcode."""
    if driver.device().capability < 90:
        pytest.skip("needs compute capability 9.0")
    rng = np.random.default_rng(11)
    types = sorted({type_ for op in OPS.values() for type_ in op.operands})
    with np.errstate(all="ignore"):
        operands = {(type_, i): values(type_, rng) for type_ in types for i in (1, 2, 3)}
    ends = np.cumsum([0, *(x.nbytes for x in operands.values())])
    ptx, length = kernel(OPS, dict(zip(operands, map(int, ends), strict=False)))
    out = launched(ptx, np.concatenate([x.view(np.uint8) for x in operands.values()]), length)
    found, at = {}, 0
    for opcode, op in OPS.items():
        end = at + COUNT * size(op.results[0])
        found[opcode], at = out[at:end].view(NUMPY[op.results[0]]), end
    return operands, found


def emulated(opcode, operands):
    op = OPS[opcode]
    with np.errstate(all="ignore"):
        return op.meaning(*(operands[type_, i] for i, type_ in enumerate(op.operands, 1)))


def test_what_is_rounded_is_equal_bit_by_bit(results):
    operands, found = results
    wrong = {}
    for opcode, op in EQUAL.items():
        ours, theirs = (comparable(x, op.results[0]) for x in (emulated(opcode, operands), found[opcode]))
        if not np.array_equal(ours, theirs):
            i = int(np.flatnonzero(ours != theirs)[0])
            wrong[opcode] = [hex(x) for x in (ours[i], theirs[i])]
    assert wrong == {}


@pytest.mark.parametrize("name", ["rcp", "sqrt", "rsqrt", "ex2", "div"])
def test_what_is_approximated_is_close(results, name):
    """Within 2 units in the last place, as PTX ISA 9.0 states them."""
    operands, found = results
    opcodes = [o for o in OPS if o not in EQUAL and o.split(".")[0] == name and OPS[o].results == ("f32",)]
    assert opcodes
    for opcode in opcodes:
        ours, theirs = (comparable(x, "f32").astype(np.int64) for x in (emulated(opcode, operands), found[opcode]))
        assert np.abs(ours - theirs).max() <= 2, opcode
