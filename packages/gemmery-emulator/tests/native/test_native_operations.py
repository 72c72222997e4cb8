"""The code of every instruction that has some, against what it computes in NumPy."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from gemmery.cpu import jit, target
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES
from gemmery_emulator.instructions import COMPUTED
from gemmery_emulator.kernels.native.block_operations import FASTER, TYPES, TracedLanes, emit, lanes, value_of
from gemmery_emulator.kernels.native.frames import LANES
from gemmery_emulator.op import NUMPY, pair

COUNT = 1 << 12
HOST = target.host()
WITH_CONSTANT = ("lop3.b32", "prmt.b32")  # whose code differs by the last operand


def code_of(spelling: str, both: bool = False) -> Callable[..., Any] | None:
    """What adds the code of an instruction; None if it has none."""
    op, last = COMPUTED[spelling], spelling in WITH_CONSTANT
    meaning, dtypes = FASTER.get(op.meaning, op.meaning), [np.dtype(NUMPY[kind]) for kind in op.operands]
    meaning = pair(meaning, op.complement) if both else meaning

    def code(f: Function, *operands: Any) -> tuple[Value, ...]:
        pairs = zip(operands, dtypes, strict=True)
        results = meaning(*(TracedLanes(f, it, kind) if isinstance(it, Value) else it for it, kind in pairs))
        results = results if isinstance(results, tuple) else (results,)
        kinds = zip(results, (*op.results, "pred"), strict=False)
        return tuple(value_of(f, result, NUMPY[kind]) for result, kind in kinds)

    trial, count = Module(HOST).function("trial"), len(dtypes) - last
    try:
        unknown = [Value(trial, lanes(TYPES[NUMPY[kind]]), "poison") for kind in op.operands[:count]]
        code(trial, *unknown, *(kind.type(0) for kind in dtypes[count:]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return code


@cache
def coded() -> list[str]:
    """The instructions that have code, which take 0.5 s to list."""
    alone = (spelling for spelling, op in COMPUTED.items() if op.scope == "lane" and not op.carry)
    return [spelling for spelling in alone if code_of(spelling) is not None]


EDGES = {
    "i": [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1],
    "f": [0.0, -0.0, 1.0, -1.0, 0.5, 2.0**31, -(2.0**31), 2.0**32, 2.0**33, 1e-40, -1e-40, 1e38, 3e38, 1e-310, 1e300,
          np.inf, -np.inf, np.nan, 2147483520.0, -2147483904.0, 0.99999, -0.99999],
}  # fmt: skip


def values(kind: str, seed: int) -> np.ndarray:
    """Return values of a PTX type, with those at which something changes."""
    random, dtype = np.random.default_rng(seed), np.dtype(NUMPY[kind])
    if dtype.kind == "b":
        return random.random(COUNT) < 0.5
    raw = random.integers(0, 256, COUNT * dtype.itemsize, np.uint8).view(dtype).copy()
    with np.errstate(all="ignore"):
        if dtype.kind == "f":
            raw[: COUNT // 2] = random.standard_normal(COUNT // 2) * 10.0 ** random.integers(-3, 12, COUNT // 2)
            raw[::7] = random.choice(np.array(EDGES["f"]).astype(dtype), len(raw[::7]))
        else:
            raw[::3] = random.choice(np.array(EDGES["i"], np.uint64).astype(dtype), len(raw[::3]))
            raw[::11] = random.integers(0, 70, len(raw[::11])).astype(dtype)
    return raw


def in_memory(kind: str) -> str:
    return "i8" if TYPES[NUMPY[kind]] == "i1" else TYPES[NUMPY[kind]]


def add_function(module: Module, name: str, spelling: str, constant: int | None, both: bool) -> None:
    op = COMPUTED[spelling]
    code = code_of(spelling, both)
    kinds = op.operands[: len(op.operands) - (constant is not None)]
    pointers = tuple(("ptr", each) for each in ("out", "too", "a", "b", "c", "d"))
    with module.function(name, *pointers) as f, f.loop(0, COUNT, LANES) as i:
        operands = []
        for kind, at in zip(kinds, "abcd", strict=False):
            type_ = in_memory(kind)
            value = f.load(lanes(type_), f[at] + i * SIZES[type_])
            if NUMPY[kind] == "?":
                value = emit(f, "icmp ne", lanes("i1"), value, f.zero(value.type))
            operands.append(value)
        results = code(f, *operands, *(() if constant is None else (np.uint32(constant),)))
        kinds_out = (*op.results, "pred")
        for result, kind, at in zip(results, kinds_out, ("out", "too"), strict=False):
            type_ = in_memory(kind)
            kept = f.convert("zext", result, "i8") if NUMPY[kind] == "?" else result
            assert kept.type == lanes(type_), spelling
            f.store(kept, f[at] + i * SIZES[type_])


def cases() -> list[tuple[str, int | None, bool]]:
    random = np.random.default_rng(1)
    found: list[tuple[str, int | None, bool]] = []
    for spelling in coded():
        if spelling in WITH_CONSTANT:
            most = 256 if spelling.startswith("lop3") else 1 << 16
            found += [(spelling, int(each), False) for each in random.integers(0, most, 24)]
            continue
        found.append((spelling, None, False))
        if COMPUTED[spelling].complement is not None:
            found.append((spelling, None, True))
    return found


def functions(some: list[tuple[int, tuple[str, int | None, bool]]]) -> dict[str, int]:
    module = Module(HOST)
    for number, (spelling, constant, both) in some:
        add_function(module, f"f{number}", spelling, constant, both)
    text = str(module)
    # A name by which it is compiled as blocks are, and found again in another run: that saves 15 s.
    name = f"emulated blocks of a test {hashlib.sha256(text.encode()).hexdigest()}"
    return jit.load(HOST, name, lambda: text)


def test_usual_instructions_have_code():
    usual = (
        "add.s32 mul.lo.s32 mad.lo.s32 mul.wide.u32 shl.b32 shr.s32 shr.u64 and.b32 setp.lt.s32 setp.ge.u64 selp.b32 "
        "add.f32 fma.rn.f32 mul.f64 fma.rn.f64 max.f32 cvt.rn.f32.s32 cvt.s64.s32 div.s32 rem.u32 lop3.b32 prmt.b32"
    )
    assert set(usual.split()) <= set(coded()) | (set() if HOST.has_fma else {"fma.rn.f32", "fma.rn.f64"})
    assert len(coded()) > 250


def test_every_instruction_has_the_bits_of_numpy(sample):
    wrong, some = [], sample(enumerate(cases()), 3)
    addresses = functions(some)
    for number, (spelling, constant, both) in some:
        op = COMPUTED[spelling]
        kinds = op.operands[: len(op.operands) - (constant is not None)]
        inputs = [values(kind, 7 * number + place) for place, kind in enumerate(kinds)]
        outs = [np.zeros(COUNT, NUMPY[kind]) for kind in (*op.results, "pred", "pred")][:2]
        pointers = [x.ctypes.data for x in (*outs, *inputs, *inputs[:1] * (4 - len(inputs)))]
        ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 6)(addresses[f"f{number}"])(*pointers)
        extra = () if constant is None else (np.uint32(constant),)
        with np.errstate(all="ignore"):
            expected = [op.meaning(*inputs, *extra)]
            if both:
                expected.append(op.complement(*inputs))
        for out, right in zip(outs, expected, strict=False):
            assert np.asarray(right).dtype == out.dtype, spelling
            alike = out == right
            if out.dtype.kind == "f":  # zeros have signs; the payloads of NaNs are not modeled
                alike = (alike & (np.signbit(out) == np.signbit(right))) | (np.isnan(out) & np.isnan(right))
            if not alike.all():
                at = int((~alike).argmax())
                wrong.append((spelling, constant, both, [x[at] for x in inputs], out[at], right[at]))
    assert not wrong, wrong[:20]
