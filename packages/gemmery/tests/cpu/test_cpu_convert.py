"""Conversions between memory and registers, on every bit pattern of 16 bits and on the edges of the wider types."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from gemmery import config, dtypes
from gemmery.cpu import abi, jit
from gemmery.cpu.convert import load_as, store_as
from gemmery.cpu.ir import Module
from gemmery.cpu.ir_types import SIZES
from gemmery.cpu.target import host
from operands import numpy_dtype

ELEMENT = {"float": np.float32, "double": np.float64}
ISAS = [isa for isa in reversed(config.ISAS) if host().limited(isa).isa == isa]
LANES = (0, 16)  # one scalar, and a vector


def converted(isa, memory, element, values, lanes, *, narrowing):
    """`values` from memory's type to the register's, or back, by compiled code of that instruction set."""
    target = host().limited(isa)
    source, to = dtypes.get(memory), element
    sizes = (SIZES[element], source.size) if narrowing else (source.size, SIZES[element])

    def make():
        module = Module(target)
        with module.function("convert", ("ptr", "args")) as f:
            args = abi.Args(f, f["args"])
            a, c, step = args.a, args.c, max(lanes, 1)
            with f.loop(0, args.n, step) as i:
                if narrowing:
                    loaded = f.load(f"<{lanes} x {to}>" if lanes else to, a + i * sizes[0])
                    store_as(f, loaded, source, c + i * sizes[1])
                else:
                    f.store(load_as(f, source, to, a + i * sizes[0], lanes, None), c + i * sizes[1])
        return module

    name = f"convert_{memory}_{element}_{lanes}_{narrowing}"
    code = jit.load(target, name, make)["convert"]
    count = -(-len(values) // 16) * 16
    given = np.zeros(count, values.dtype)
    given[: len(values)] = values
    into = np.zeros(count, numpy_dtype(memory) if narrowing else ELEMENT.get(element, element.replace("i", "int")))
    record = (ctypes.c_int64 * len(abi.FIELDS))()
    record[abi.SLOT["a"]], record[abi.SLOT["c"]], record[abi.SLOT["n"]] = given.ctypes.data, into.ctypes.data, count
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code)(ctypes.addressof(record))
    return into[: len(values)]


def same(x, y):
    """Equal as numbers, signs of zero included, NaN for NaN."""
    both_nan = np.isnan(x) & np.isnan(y)
    return both_nan | ((x == y) & (np.signbit(x) == np.signbit(y)))


def between(low, high):
    """Floats across a range of exponents, and around the halfway points between the values of 16-bit types."""
    draw = np.random.default_rng(3)
    spread = (draw.uniform(1, 2, 4000) * 2.0 ** draw.integers(low, high, 4000)).astype(np.float32)
    every = np.arange(1 << 16, dtype=np.uint16)
    halves = every.view(np.float16).astype(np.float32)
    steps = [halves[:-1] / 2 + halves[1:] / 2]
    bits = (every.astype(np.uint32) << 16) | 0x8000
    steps.append(bits.view(np.float32))
    centers = np.concatenate(steps)
    near = [np.nextafter(centers, np.float32(side)) for side in (-np.inf, np.inf)]
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 65504, 65519.996, 65520, 1e38, 3.4e38], np.float32)
    signaling = np.array([0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FC00000, 0x7F80FFFF], np.uint32).view(np.float32)
    return np.concatenate([spread, -spread, centers, *near, special, signaling])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("element", ["float", "double"])
def test_every_narrow_float_widens_exactly(isa, lanes, name, dtype, element):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    got = converted(isa, name, element, values, lanes, narrowing=False)
    with np.errstate(invalid="ignore"):
        wanted = values.astype(np.float32).astype(ELEMENT[element])
    assert same(got, wanted).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("name", "low", "high"), [("f16", -30, 20), ("bf16", -140, 128)])
def test_floats_narrow_to_the_nearest_and_ties_to_even(isa, lanes, name, low, high):
    with np.errstate(all="ignore"):
        values = between(low, high)
        wanted = values.astype(numpy_dtype(name)).astype(np.float32)
    got = converted(isa, name, "float", values, lanes, narrowing=True).astype(np.float32)
    wrong = ~same(got, wanted)
    assert not wrong.any(), (values[wrong][:5], got[wrong][:5], wanted[wrong][:5])


@pytest.mark.many(5)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("element", ["i16", "i32", "i64"])
def test_integers_widen_by_their_sign_and_wrap_back(isa, lanes, name, element):
    if SIZES[element] < dtypes.get(name).size:
        pytest.skip("not wider")
    info = np.iinfo(numpy_dtype(name))
    draw = np.random.default_rng(4)
    values = np.concatenate([draw.integers(info.min, info.max, 500, endpoint=True), [info.min, info.max, 0, 1]])
    values = values.astype(numpy_dtype(name))
    got = converted(isa, name, element, values, lanes, narrowing=False)
    np.testing.assert_array_equal(got, values.astype(got.dtype))
    wide = draw.integers(np.iinfo(got.dtype).min, np.iinfo(got.dtype).max, 500, got.dtype, endpoint=True)
    np.testing.assert_array_equal(converted(isa, name, element, wide, lanes, narrowing=True), wide.astype(values.dtype))
