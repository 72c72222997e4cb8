"""atom and red against a loop over threads in plain Python: every operation and type, in global and shared memory."""

import random

import numpy as np
import pytest

import gemmery as gm
from conformance import drawn, within
from gemmery_emulator.atomics import CHANGES
from gemmery_emulator.op import NUMPY, STORED

THREADS, PLACES = 64, 8
REGISTERS = {"b16": "b16", "f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}


def stored(kind):
    """The register type that holds a PTX type."""
    return REGISTERS.get(kind, f"{'f' if kind[0] == 'f' else 'b'}{kind[1:]}")


def as_float(bits, kind):
    return (
        np.uint16(bits).view(np.float16).astype(np.float64)
        if kind == "f16"
        else np.float64(np.uint32(bits << 16).view(np.float32))
    )


def as_bits(value, kind):
    """A float64 as bits of a 16-bit float, rounded to nearest, ties to even."""
    if kind == "f16":
        return int(np.float16(value).view(np.uint16))
    if np.isnan(value):
        return 0x7FFF
    with np.errstate(over="ignore"):
        wide = int(np.float32(value).view(np.uint32))
    return (wide + 0x7FFF + (wide >> 16 & 1)) >> 16


def serial(name, kind):
    """What a thread makes of a value: (old, operand) -> new, in Python's numbers or bits of 16-bit floats."""
    if kind in ("f16x2", "bf16x2"):
        one = serial(name, kind[:-2])
        return lambda old, given: one(old & 0xFFFF, given & 0xFFFF) | one(old >> 16, given >> 16) << 16
    if kind in ("f16", "bf16"):
        choose = {"add": lambda x, y: x + y, "min": min, "max": max}[name]
        return lambda old, given: as_bits(choose(as_float(old, kind), as_float(given, kind)), kind)
    if kind in ("f32", "f64"):
        return lambda old, given: NUMPY_TYPES[kind](old) + NUMPY_TYPES[kind](given)
    return {
        "add": lambda old, given: within(old + given, kind),
        "min": min,
        "max": max,
        "and": lambda old, given: old & given,
        "or": lambda old, given: old | given,
        "xor": lambda old, given: old ^ given,
        "exch": lambda old, given: given,
        "inc": lambda old, given: 0 if old >= given else old + 1,
        "dec": lambda old, given: given if old == 0 or old > given else old - 1,
    }[name]


NUMPY_TYPES = {"f32": np.float32, "f64": np.float64}


def values(kind, count, seed):
    """Operands: whole numbers of floats, so that few sums round; edges and all bits of the others."""
    generator = np.random.default_rng(seed)
    if kind in ("f32", "f64"):
        return (generator.integers(-1000, 1000, count) / 8).astype(NUMPY[kind])
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        bits = [as_bits(x, kind.removesuffix("x2")) for x in generator.integers(-50, 50, 2 * count) / 4]
        joined = [low | high << 16 for low, high in zip(bits[::2], bits[1::2], strict=True)]
        return np.array(joined if kind.endswith("x2") else bits[:count], f"u{np.dtype(NUMPY[kind]).itemsize}")
    drawing = random.Random(seed)
    return np.array([drawn(kind, drawing) for _ in range(count)], NUMPY[kind])


def ptx(opcode, kind, shared, result, operands):
    """A kernel in which thread t updates place[t], if it is active, and keeps the old value."""
    size, register = np.dtype(NUMPY[kind]).itemsize, stored(kind)
    bits = f"b{8 * size}"
    target = "[%place]" if shared else "[%rd6]"
    copy_in = f"ld.global.{bits} %x0, [%rd8]; st.shared.{bits} [%own], %x0; bar.sync 0;"
    copy_out = f"bar.sync 0; ld.shared.{bits} %x0, [%own]; st.global.{bits} [%rd8], %x0;"
    given = ", ".join(f"%x{1 + i}" for i in range(operands))
    loads = " ".join(f"add.s64 %rd9, %rd{3 + i}, %rd5; ld.global.{bits} %x{1 + i}, [%rd9];" for i in range(operands))
    change = (
        f"{opcode} %x4, {target}, {given}; st.global.{bits} [%rd7], %x4;" if result else f"{opcode} {target}, {given};"
    )
    return f"""
.version 8.4
.target sm_90
.address_size 64
.visible .entry f(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3, .param .u64 p4, .param .u64 p5)
{{
  .reg .pred %p<3>; .reg .b32 %r<8>, %place, %own; .reg .b64 %rd<16>; .reg .{register} %x<5>;
  .shared .align 8 .b8 places[{PLACES * size}];
  ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2];
  ld.param.u64 %rd3, [p3]; ld.param.u64 %rd4, [p4]; ld.param.u64 %rd10, [p5];
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd5, %r0, {size};
  mul.wide.u32 %rd11, %r0, 4;
  add.s64 %rd12, %rd1, %rd11; ld.global.u32 %r1, [%rd12];
  add.s64 %rd13, %rd10, %rd11; ld.global.u32 %r2, [%rd13];
  mul.wide.u32 %rd14, %r1, {size}; add.s64 %rd6, %rd0, %rd14;
  mov.u32 %place, places; mad.lo.u32 %place, %r1, {size}, %place;
  mov.u32 %own, places; mad.lo.u32 %own, %r0, {size}, %own;
  add.s64 %rd8, %rd0, %rd5; add.s64 %rd7, %rd2, %rd5;
  setp.ge.u32 %p2, %r0, {PLACES};
  @%p2 bra COPIED;
  {copy_in.replace("bar.sync 0;", "") if shared else ""}
COPIED:
  bar.sync 0;
  {loads}
  setp.eq.u32 %p1, %r2, 0;
  @%p1 bra SKIP;
  {change}
SKIP:
  bar.sync 0;
  @%p2 bra DONE;
  {copy_out.replace("bar.sync 0;", "") if shared else ""}
DONE:
  ret;
}}"""


PATTERNS = {
    "one place": (np.zeros(THREADS, np.uint32), np.ones(THREADS, np.uint32)),
    "spread": (np.arange(THREADS, dtype=np.uint32) * 5 % PLACES, np.ones(THREADS, np.uint32)),
    "some lanes": (np.arange(THREADS, dtype=np.uint32) // 9 % PLACES, (np.arange(THREADS) % 3 > 0).astype(np.uint32)),
}


HALVES = ("f16", "f16x2", "bf16", "bf16x2")
IN_VECTORS = [(name, kind) for name, kind in CHANGES if kind in HALVES and name != "add"]  # alone they do not exist


@pytest.mark.many
@pytest.mark.parametrize("shared", [False, True], ids=["global", "shared"])
@pytest.mark.parametrize(("name", "kind"), [one for one in CHANGES if one not in IN_VECTORS], ids=lambda one: one)
def test_threads_take_turns(name, kind, shared):
    """With and without a result, for three patterns of places: the old values and the final ones."""
    operands = 2 if name == "cas" else 1
    space = "shared" if shared else "global"
    word = f"{name}.noftz" if kind in HALVES else name
    for case, (places, active) in PATTERNS.items():
        start = values(kind, PLACES, 1)
        given = [values(kind, THREADS, seed) for seed in (2, 3)]
        if name == "cas":  # every second comparison succeeds, if nobody came before
            given[0] = np.where(np.arange(THREADS) % 2 == 0, start[places], given[0])
        left, found = start.tolist(), [0] * THREADS
        for thread in np.flatnonzero(active):
            place = places[thread]
            old = found[thread] = left[place]
            one, two = (values_[thread].item() for values_ in given)
            left[place] = (two if old == one else old) if name == "cas" else serial(name, kind)(old, one)
        for result in (True, False) if name not in ("exch", "cas") else (True,):
            text = ptx(f"{'atom' if result else 'red'}.{space}.{word}.{kind}", kind, shared, result, operands)
            memory, seen = start.copy(), np.zeros(THREADS, start.dtype)
            run = gm.emulate(text, "f", 1, THREADS, [memory, places, seen, *given, active])
            assert memory.tolist() == left, case
            assert run.findings == ()
            if result:
                assert seen.tolist() == found, case
            atomics = run.shared.atomics if shared else run.global_.atomics
            assert atomics.requests == 2


@pytest.mark.parametrize(("name", "kind"), IN_VECTORS, ids=lambda one: one)
def test_vectors_take_turns(name, kind):
    """Pairs of all threads at one place: the old values and the final one."""
    start, given = values(kind, 2, 1), values(kind, 2 * THREADS, 2)
    size = start.itemsize
    text = f"""
.version 8.4
.target sm_90
.address_size 64
.visible .entry f(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
  .reg .b32 %r1; .reg .b64 %rd<6>; .reg .{stored(kind)} %x<5>;
  ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2];
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd4, %r1, {2 * size}; add.s64 %rd2, %rd2, %rd4; add.s64 %rd3, %rd3, %rd4;
  ld.global.v2.b{8 * size} {{%x1, %x2}}, [%rd2];
  atom.global.{name}.noftz.v2.{kind} {{%x3, %x4}}, [%rd1], {{%x1, %x2}};
  st.global.v2.b{8 * size} [%rd3], {{%x3, %x4}};
  ret;
}}"""
    left, found = start.tolist(), []
    for pair in given.reshape(-1, 2).tolist():
        found += left
        left = [serial(name, kind)(old, one) for old, one in zip(left, pair, strict=True)]
    seen = np.zeros_like(given)
    gm.emulate(text, "f", 1, THREADS, [start, given, seen])
    assert start.tolist() == left
    assert seen.tolist() == found


def test_vectors():
    """A thread updates four floats or eight halves; threads of one place take turns element by element."""
    text = """
.version 8.4
.target sm_90
.address_size 64
.visible .entry f(.param .u64 p0, .param .u64 p1)
{
  .reg .b64 %rd<4>; .reg .f32 %f<8>; .reg .b16 %h<16>;
  ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
  mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000; mov.f32 %f3, 0f40400000; mov.f32 %f4, 0f40800000;
  red.global.add.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};
  mov.b16 %h1, 0x3C00;
  atom.global.add.noftz.v8.f16 {%h2, %h3, %h4, %h5, %h6, %h7, %h8, %h9}, [%rd2],
    {%h1, %h1, %h1, %h1, %h1, %h1, %h1, %h1};
  ret;
}"""
    floats, shorts = np.arange(4, dtype=np.float32), np.arange(8, dtype=np.float16)
    gm.emulate(text, "f", 1, 32, [floats, shorts])
    assert floats.tolist() == [32, 65, 98, 131]
    assert shorts.tolist() == [32 + i for i in range(8)]


@pytest.mark.parametrize("kind", ["float", "double"])
def test_sums_of_floats_round_once_a_thread(kind):
    """In the order of threads, with one place for all and with a place for every eighth."""
    code = f"""__global__ void f(const {kind}* x, {kind}* sums, int places) {{
      atomicAdd(sums + threadIdx.x % places, x[threadIdx.x]); }}"""
    x = np.random.default_rng(1).standard_normal(512).astype(np.float32 if kind == "float" else np.float64)
    for places in (1, 64):
        expected = np.zeros(64, x.dtype)
        for thread in range(512):
            expected[thread % places] += x[thread]
        sums = np.zeros(64, x.dtype)
        gm.emulate(code, "f", 1, 512, [x, sums, places])
        assert sums.tobytes() == expected.tobytes()


COUNT = """__global__ void count(const int* x, int* total) {
  __shared__ int bins[4];
  if (threadIdx.x < 4) bins[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(bins + x[threadIdx.x], 1);
  /* here */
  if (threadIdx.x < 4) atomicAdd(total + threadIdx.x, bins[threadIdx.x]);
}"""


def counted(code):
    x, total = (np.arange(64, dtype=np.int32) ** 2 % 4), np.zeros(4, np.int32)
    return gm.emulate(code, "count", 2, 64, [x, total]).findings, total.tolist()


def test_what_races_with_an_atomic():
    """Two atomics do not; a plain store does, and a read without a barrier in between."""
    assert counted(COUNT.replace("/* here */", "__syncthreads();")) == ((), [64, 64, 0, 0])
    (read,) = counted(COUNT)[0]
    assert (read.kind, read.line.number, read.other.number) == ("race", 7, 5)
    stored = COUNT.replace(
        "/* here */", "__syncthreads(); if (threadIdx.x == 40) bins[0] = 9; atomicAdd(bins, 1); __syncthreads();"
    )
    assert {(one.kind, one.line.number) for one in counted(stored)[0]} == {("race", 6)}


@pytest.mark.parametrize(
    "opcode",
    [
        "atom.global.add.b32",
        "atom.global.mul.u32",
        "red.global.cas.b32",
        "atom.global.add.add.u32",
        "atom.local.add.u32",
        "red.exch.b32",
        "red.acquire.gpu.add.u32",
        "red.acq_rel.gpu.add.u32",
        "atom.global.exch.u32",
        "atom.global.and.u32",
        "atom.global.min.f32",
        "atom.global.add.noftz.f32",
        "atom.global.add.f16x2",
        "atom.global.min.noftz.f16x2",
        "atom.shared.add.v2.f32",
        "atom.global.add.v2.u32",
        "atom.global.add.v8.f32",
        "atom.weak.global.add.u32",
        "atom.volatile.global.add.u32",
        "atom.global.shared.add.u32",
        "atom.relaxed.acquire.gpu.global.add.u32",
        "atom.gpu.sys.global.add.u32",
        "atom.shared.add.L2::cache_hint.u32",
    ],
)
def test_what_is_no_atomic_is_refused(opcode):
    text = (
        ".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry f(.param .u64 p)"
        f"{{ .reg .b64 %rd1; .reg .b32 %r<4>; ld.param.u64 %rd1, [p]; {opcode} %r1, [%rd1], %r2; ret; }}"
    )
    with pytest.raises(gm.EmulationError, match=rf"{opcode}.*\(ptx:4\) is not modeled"):
        gm.emulate(text, "f", 1, 32, [np.zeros(4, np.uint32)])


def test_every_type_has_a_register():
    assert {STORED[stored(kind)][1:] for _, kind in CHANGES} == {"2", "4", "8"}
