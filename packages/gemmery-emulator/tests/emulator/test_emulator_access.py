"""Loads and stores of every space, type and length, copies and matrices against NumPy; spellings against ptxas."""

from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.access import ACCESSES
from gemmery_emulator.lower import lowered
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ptx.module import parse

DATA = Path(__file__).parents[1] / "data" / "ptx"
HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
LANES = 32
TYPES = ACCESSES["ld"]["type"]
SPACES = ("global", "const", "param", "shared", "shared::cta", "shared::cluster", "local")
GENERIC = ("global", "const", "shared", "local")  # the spaces that a generic address is tried for
PLACES = [(space, False) for space in SPACES] + [(space, True) for space in GENERIC]
WRITTEN = [(space, generic) for space, generic in PLACES if space not in ("const", "param")]


def assembled(instruction):
    """A kernel of one instruction, with registers of each kind; ptxas 13.0 was asked the same."""
    registers = ".reg .pred p<9>; .reg .b16 h<40>; .reg .b32 r<99>; .reg .b64 d<40>; .reg .f32 f<40>; .reg .f64 g<40>;"
    body = f"{registers} .reg .b8 c<9>; .reg .b128 q<9>; .shared .align 16 .b8 S[4096];\n{instruction}\nret;"
    return lowered(parse(f"{HEAD}.visible .entry k(.param .u64 x) {{ {body} }}").kernels["k"])


@pytest.mark.parametrize("instruction", (DATA / "taken.txt").read_text().splitlines())
def test_what_ptxas_takes_is_taken(instruction):
    """Each is one instruction of the program."""
    assert len(assembled(instruction).kernel.instructions) == 2


@pytest.mark.parametrize("instruction", (DATA / "refused.txt").read_text().splitlines())
def test_what_ptxas_refuses_is_refused(instruction):
    """With the instruction in the message."""
    with pytest.raises(gm.EmulationError) as error:
        assembled(instruction)
    assert instruction.split()[0].rstrip(";") in str(error.value)


# ---- loads and stores ----


def lengths(kind):
    """Vectors of at most 16 bytes."""
    size = np.dtype(NUMPY[kind]).itemsize
    return [count for count in (1, 2, 4, 8) if count * size <= 16]


def held(kind):
    """The register that a loaded value is looked at in: narrow ones are widened by their sign."""
    if kind[0] == "f":
        return kind
    return "b64" if kind.endswith("64") else "b32"


def random_values(kind, count, seed=1):
    """All bits at random; floats are numbers."""
    generator = np.random.default_rng(seed)
    if kind[0] == "f":
        return generator.standard_normal(count).astype(NUMPY[kind])
    return generator.integers(0, 256, count * np.dtype(NUMPY[kind]).itemsize).astype(np.uint8).view(NUMPY[kind])


def braced(names):
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def kernel(space, generic, width, kind, body, constants):
    """Thread t has `width` bytes of the space at %place, of x at %from, and its results at %to."""
    window = {"shared::cta": "shared"}.get(space, space)
    own = {
        "global": "add.s64 %place, %rd1, %rd3;",
        "const": "mov.u64 %place, table; add.s64 %place, %place, %rd3;",
        "param": "",
        "local": "mov.u64 %place, depot;",
    }.get(space, "mov.u64 %place, tile; add.s64 %place, %place, %rd3;")
    convert = f"cvta.{window}.u64 %place, %place;" if generic else ""
    table = ", ".join(map(str, constants))
    return f"""{HEAD}
.const .align 16 .b8 table[{len(constants)}] = {{{table}}};
.visible .entry f(.param .u64 p0, .param .u64 p1, .param .align 16 .b8 q[{len(constants)}])
{{
  .reg .b32 %r1; .reg .b64 %rd<4>, %place, %from, %to; .reg .{held(kind)} %x<9>; .reg .b16 %h1;
  .shared .align 16 .b8 tile[{LANES * width}]; .local .align 16 .b8 depot[{width}];
  ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, {width};
  add.s64 %from, %rd1, %rd3;
  {own} {convert}
  {body}
  ret;
}}"""


@pytest.mark.many
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("space", "generic"), PLACES)
def test_loads(space, generic, kind):
    """Each thread its own elements (of a parameter, all the same), widened to 4 bytes by their sign."""
    named = "" if generic else f".{space}"
    writes = space not in ("global", "const", "param")
    for count in lengths(kind):
        size = np.dtype(NUMPY[kind]).itemsize
        width = count * size
        x = random_values(kind, LANES * count)
        copied = " ".join(f"ld.global.b8 %h1, [%from+{i}]; st{named}.b8 [%place+{i}], %h1;" for i in range(width))
        registers = [f"%x{i}" for i in range(count)]
        out = "f64" if kind == "f64" else held(kind)
        each = 8 if out.endswith("64") else 4
        address = f"[q+{width}]" if space == "param" else "[%place]"
        kept = " ".join(f"st.global.{out} [%to+{each * i}], %x{i};" for i in range(count))
        vector = f".v{count}" if count > 1 else ""
        body = f"""{copied if writes else ""}
          ld{named}{vector}.{kind} {braced(registers)}, {address};
          mul.wide.u32 %to, %r1, {each * count}; add.s64 %to, %rd2, %to; {kept}"""
        seen = np.zeros(LANES * count, x.dtype if kind[0] == "f" else f"{x.dtype.kind}{each}")
        text = kernel(space, generic, width, kind, body, x.tobytes())
        run = gm.emulate(text, "f", 1, LANES, [x, seen, x.tobytes()])
        expected = np.tile(x[count : 2 * count], LANES) if space == "param" else x
        assert seen.tolist() == expected.tolist(), (named, vector)
        assert run.findings == ()


@pytest.mark.many
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("space", "generic"), WRITTEN)
def test_stores(space, generic, kind):
    """Each thread its own elements, read back byte by byte."""
    named = "" if generic else f".{space}"
    for count in lengths(kind):
        size = np.dtype(NUMPY[kind]).itemsize
        width = count * size
        x, seen = random_values(kind, LANES * count), np.zeros(LANES * width, np.uint8)
        registers = [f"%x{i}" for i in range(count)]
        loaded = " ".join(f"ld.global.{kind} %x{i}, [%from+{size * i}];" for i in range(count))
        copied = " ".join(f"ld{named}.b8 %h1, [%place+{i}]; st.global.b8 [%to+{i}], %h1;" for i in range(width))
        vector = f".v{count}" if count > 1 else ""
        cleared = " ".join(f"st.global.b8 [%from+{i}], 0;" for i in range(width)) if space == "global" else ""
        body = f"""{loaded} {cleared} st{named}{vector}.{kind} [%place], {braced(registers)};
          add.s64 %to, %rd2, %rd3; {copied}"""
        given = x.copy()
        run = gm.emulate(kernel(space, generic, width, kind, body, bytes(16)), "f", 1, LANES, [given, seen, bytes(16)])
        assert seen.tobytes() == x.tobytes(), (named, vector)
        assert run.findings == ()


def launched(body, arguments, registers=""):
    """A kernel of pointers in %rd1, %rd2 ..., the lane in %r1 and 512 bytes of shared memory at %tile."""
    given = ", ".join(f".param .u64 p{i}" for i in range(1, len(arguments) + 1))
    loads = " ".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(1, len(arguments) + 1))
    text = f"""{HEAD}.visible .entry f({given}) {{
      .reg .pred %p<5>; .reg .b32 %r<9>, %tile; .reg .b64 %rd<9>; {registers}
      .shared .align 128 .b8 tile[512]; .local .align 8 .b8 depot[8];
      {loads} mov.u32 %r1, %tid.x; mov.u32 %tile, tile;
      {body} ret; }}"""
    return gm.emulate(text, "f", 1, LANES, arguments)


# ---- where shared memory ends and begins ----


@pytest.mark.parametrize("static", [1, 512, 513, 527])
def test_dynamic_shared_memory_is_all_there_behind_static_memory_of_any_size(static):
    code = f"""extern __shared__ float4 d[];
    __global__ void f(float4* x, unsigned* total) {{
      __shared__ char s[{static}];
      for (int i = threadIdx.x; i < {static}; i += 32) s[i] = 7;
      d[threadIdx.x] = x[31 - threadIdx.x];
      __syncthreads();
      x[threadIdx.x] = d[threadIdx.x];
      if (s[{static} - 1] != 7) __trap();
      asm("mov.u32 %0, %total_smem_size;" : "=r"(*total));
    }}"""
    x, total = np.arange(128, dtype=np.float32).reshape(32, 4), np.zeros(1, np.uint32)
    expected = x[::-1].copy()
    assert gm.emulate(code, "f", 1, 32, [x, total], shared=512).findings == ()
    assert x.tolist() == expected.tolist()
    assert total[0] == -(-static // 16) * 16 + 512


def test_an_address_of_32_bits_and_an_offset_wrap():
    """Register and immediate are added as the hardware adds them: -8 + 4 t + 8 is 4 t."""
    seen = np.zeros(LANES, np.uint32)
    body = """mul.lo.u32 %r2, %r1, 4; add.s32 %r3, %tile, %r2; st.shared.u32 [%r3], %r1;
      sub.s32 %r2, %r2, 8; add.s32 %r2, %r2, %tile; ld.shared.u32 %r4, [%r2+8];
      mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2; st.global.u32 [%rd2], %r4; bar.warp.sync -1;
      mov.u32 %r5, -8; ld.shared.u32 %r6, [%r5+8];"""
    assert launched(body, [seen]).findings == ()
    assert seen.tolist() == list(range(LANES))


def test_an_address_before_shared_memory_is_told_as_such():
    (found,) = launched("mov.u32 %r2, -4; ld.shared.u32 %r3, [%r2];", [np.zeros(1)]).findings
    assert found.kind == "out of bounds"
    assert "byte -4 of shared memory" in str(found)


# ---- cp.async ----


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", lambda lane, size: size),
        (", %r2", lambda lane, size: min(lane % 5, size)),
        (", 0", lambda lane, size: 0),
        (", %p1", lambda lane, size: 0 if lane < 10 else size),
        (", !%p1", lambda lane, size: size if lane < 10 else 0),
    ],
    ids=["whole", "bytes", "none", "ignored", "not ignored"],
)
@pytest.mark.parametrize("policy", [False, True])
def test_async_copies(size, given, kept, policy):
    """What is copied, and zeros behind it; a cache policy is no number of bytes."""
    x, seen = random_values("u8", LANES * size), np.full(LANES * size, 7, np.uint8)
    copied = " ".join(f"ld.shared.b8 %r5, [%r3+{i}]; st.global.b8 [%rd4+{i}], %r5;" for i in range(size))
    word, hint = (".L2::cache_hint", ", %rd5") if policy else ("", "")
    body = f"""rem.u32 %r2, %r1, 5; setp.lt.u32 %p1, %r1, 10; createpolicy.fractional.L2::evict_last.b64 %rd5, 1.0;
      mul.wide.u32 %rd3, %r1, {size}; add.s64 %rd4, %rd2, %rd3; add.s64 %rd3, %rd1, %rd3;
      mad.lo.u32 %r3, %r1, {size}, %tile;
      cp.async.ca.shared.global{word} [%r3], [%rd3], {size}{given}{hint};
      cp.async.commit_group; cp.async.wait_group 0; {copied}"""
    run = launched(body, [x, seen])
    lane, place = np.divmod(np.arange(LANES * size), size)
    bytes_kept = np.array([kept(one, size) for one in range(LANES)])[lane]
    assert seen.tolist() == np.where(place < bytes_kept, x, 0).tolist()
    assert run.findings == ()


@pytest.mark.parametrize(("given", "message"), [(4, ""), (6, ""), (8, "accesses 8 bytes"), (16, "accesses 16 bytes")])
def test_an_async_copy_reads_no_more_than_its_size(given, message):
    """PTX ISA, cp.async: src-size bytes are copied, and the rest is filled with zeros without reading."""
    x = random_values("u8", 6)
    seen = np.full(16, 7, np.uint8)
    copied = " ".join(f"ld.shared.b8 %r5, [%r3+{i}]; st.global.b8 [%rd2+{i}], %r5;" for i in range(16))
    body = f"""setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mov.u32 %r3, %tile; mov.u32 %r2, {given};
      cp.async.ca.shared.global [%r3], [%rd1], 16, %r2; cp.async.commit_group; cp.async.wait_group 0; {copied}
      END:"""
    run = launched(body, [x, seen])
    if message:
        assert message in str(run.findings[0])
    else:
        assert run.findings == ()
        assert seen.tolist() == [*x[:given], *[0] * (16 - given)]


# ---- ldmatrix and stmatrix ----


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_to_registers_and_back(count, trans):
    """Lane 4 r + w has elements 2 w and 2 w + 1 of row r of each matrix, or of its transpose."""
    x = random_values("u16", 64 * 4)
    loaded, stored = np.zeros((count, LANES), np.uint32), np.zeros(64 * count, np.uint16)
    word, names = ".trans" if trans else "", braced([f"%r{2 + i}" for i in range(count)])
    names = names if count > 1 else "{%r2}"
    kept = " ".join(f"st.global.b32 [%rd5+{4 * LANES * i}], %r{2 + i};" for i in range(count))
    body = f"""mul.wide.u32 %rd4, %r1, 16; mad.lo.u32 %r6, %r1, 16, %tile; add.s64 %rd4, %rd1, %rd4;
      ld.global.v2.b64 {{%rd6, %rd7}}, [%rd4]; st.shared.v2.b64 [%r6], {{%rd6, %rd7}}; bar.sync 0;
      ldmatrix.sync.aligned.m8n8.x{count}{word}.shared.b16 {names}, [%r6];
      mul.wide.u32 %rd5, %r1, 4; add.s64 %rd5, %rd2, %rd5; {kept}
      bar.sync 0; st.shared.v2.b64 [%r6], {{0, 0}}; bar.sync 0;
      stmatrix.sync.aligned.m8n8.x{count}{word}.shared.b16 [%r6], {names}; bar.sync 0;
      setp.ge.u32 %p1, %r1, {8 * count}; @%p1 bra END;
      ld.shared.v2.b64 {{%rd6, %rd7}}, [%r6]; mul.wide.u32 %rd4, %r1, 16; add.s64 %rd4, %rd3, %rd4;
      st.global.v2.b64 [%rd4], {{%rd6, %rd7}};
      END:"""
    run = launched(body, [x, loaded, stored])
    matrices = x.reshape(4, 8, 8)[:count]
    turned = matrices.transpose(0, 2, 1) if trans else matrices
    assert loaded.view(np.uint16).tolist() == turned.reshape(count, 64).tolist()
    assert stored.tolist() == matrices.ravel().tolist()
    assert run.findings == ()


# ---- addresses ----


def test_where_a_generic_address_lies():
    """isspacep of an address in each space: global, shared, another block's shared, local."""
    seen = np.zeros((3, 4), np.uint32)
    spaces = ("global", "shared::cta", "shared::cluster", "local")
    asked = " ".join(
        f"isspacep.{space} %p1, %rd{2 + row}; selp.u32 %r2, 1, 0, %p1; "
        f"st.global.u32 [%rd1+{16 * row + 4 * column}], %r2;"
        for row in range(3)
        for column, space in enumerate(spaces)
    )
    body = f"""mov.b64 %rd2, %rd1; mov.u64 %rd3, tile; cvta.shared.u64 %rd3, %rd3;
      mov.u64 %rd4, depot; cvta.local.u64 %rd4, %rd4; setp.ne.u32 %p2, %r1, 0; @%p2 bra END; {asked} END:"""
    launched(body, [seen])
    assert seen.tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("space", ["const", "global", "shared", "shared::cta", "shared::cluster", "local", "param"])
def test_addresses_go_to_generic_and_back(space):
    """cvta, then cvta.to."""
    seen = np.zeros(1, np.uint64)
    launched(f"cvta.{space}.u64 %rd2, 80; cvta.to.{space}.u64 %rd3, %rd2; st.global.u64 [%rd1], %rd3;", [seen])
    assert seen.tolist() == [80]
