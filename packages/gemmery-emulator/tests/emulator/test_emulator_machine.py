"""The machine: threads that part and meet, barriers, addresses of every space, chunks of blocks, what is refused."""

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.arguments import bound
from gemmery_emulator.hopper.cluster import in_order
from gemmery_emulator.lower import lowered
from gemmery_emulator.machine import LaunchConfig, Observer, Places
from gemmery_emulator.memory import Global
from gemmery_emulator.ptx.module import parse
from gemmery_emulator.run import run

HEAD = ".version 8.4\n.target sm_90\n.address_size 64\n"
REGISTERS = ".reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .f32 %f<4>;"


def ptx(body):
    """A kernel of one pointer in %rd1, the thread's number in %r1 and 4 bytes of it at [%rd2]; the body is line 5."""
    start = "ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd2, %rd1;"
    return f"{HEAD}.visible .entry f(.param .u64 p) {{ {REGISTERS} {start}\n{body}\nret; }}"


def threads(body, count=32, x=None):
    """The 4 bytes of each thread after the run."""
    x = np.zeros(count, np.uint32) if x is None else x
    made = gm.emulate(ptx(body), "f", 1, count, [x])
    assert made.findings == ()
    return x.tolist()


# ---- threads that part ----

COLLATZ = """__global__ void steps(int* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int value = x[i], count = 0;
  while (value != 1) {
    if (value % 2) { value = 3 * value + 1; for (int j = 0; j < value % 3; ++j) ++count; }
    else value /= 2;
    ++count;
    if (count > 300) break;
  }
  x[i] = count;
}"""


def collatz(value):
    count = 0
    while value != 1:
        if value % 2:
            value = 3 * value + 1
            count += value % 3
        else:
            value //= 2
        count += 1
        if count > 300:
            break
    return count


@pytest.mark.many(3)
@pytest.mark.parametrize("block", [1, 31, 33, 96])
@pytest.mark.parametrize("seed", [None, 1])
def test_loops_of_different_lengths(block, seed):
    count = 100
    x = np.arange(1, count + 1, dtype=np.int32)
    made = gm.emulate(COLLATZ, "steps", -(-count // block), block, [x, np.int32(count)], seed=seed)
    assert x.tolist() == [collatz(value) for value in range(1, count + 1)]
    assert made.findings == ()
    assert made.divergent_branches > 0 or block == 1


def test_a_branch_counts_once_a_warp():
    """Two of four warps diverge at the first branch, and none at the second."""
    body = """setp.lt.u32 %p1, %r1, 40; setp.lt.u32 %p2, %r1, 64; mov.u32 %r2, 1;
    @%p1 bra A;
    mov.u32 %r2, 2;
    A: @%p2 bra B;
    add.u32 %r2, %r2, 10;
    B: st.global.u32 [%rd2], %r2;"""
    x = np.zeros(128, np.uint32)
    made = gm.emulate(ptx(body), "f", 1, 128, [x])
    assert x.tolist() == [1] * 40 + [2] * 24 + [12] * 64
    assert (made.branches, made.divergent_branches) == (8, 1)


def test_a_switch():
    body = """rem.u32 %r2, %r1, 3; mov.u32 %r3, 100;
    T: .branchtargets A, B, C;
    brx.idx %r2, T;
    A: add.u32 %r3, %r3, 1; bra D;
    B: add.u32 %r3, %r3, 2; bra D;
    C: add.u32 %r3, %r3, 3;
    D: st.global.u32 [%rd2], %r3;"""
    assert threads(body) == [101 + i % 3 for i in range(32)]


def test_guards_write_only_their_threads():
    body = "mov.u32 %r2, 7; setp.gt.u32 %p1, %r1, 9; @%p1 mov.u32 %r2, 8; @!%p1 st.global.u32 [%rd2], %r2;"
    assert threads(body) == [7] * 10 + [0] * 22


def test_the_carry_belongs_to_its_thread():
    body = (
        """ld.global.u32 %r2, [%rd2]; add.cc.u32 %r3, %r2, 0x80000000; addc.u32 %r4, 0, 5; st.global.u32 [%rd2], %r4;"""
    )
    x = np.arange(32, dtype=np.uint32) << 28
    assert threads(body, x=x.copy()) == [5 + (int(one) + 2**31 >> 32) for one in x]


# ---- indices, chunks ----


@pytest.mark.parametrize("block", [(3, 5, 7), (32, 1, 2), (1, 1, 33)])
def test_indices_of_threads_and_blocks(block):
    code = """__global__ void f(int* x) {
      int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      int lane; asm("mov.u32 %0, %%laneid;" : "=r"(lane));
      x[b * blockDim.x * blockDim.y * blockDim.z + t] = 100000 * b + 100 * t + lane; }"""
    count = int(np.prod(block))
    x = np.zeros(8 * count, np.int32)
    gm.emulate(code, "f", (2, 2, 2), block, [x])
    assert x.tolist() == [100000 * b + 100 * t + t % 32 for b in range(8) for t in range(count)]


def test_chunks_of_blocks_make_no_difference():
    """Registers that agree in a chunk are one number: chunks of one block have many of those."""
    body = """mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1; mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd3, %rd3, %rd1; setp.eq.u32 %p1, %r2, 3; @%p1 bra E; mul.lo.u32 %r5, %r2, %r2; st.global.u32 [%rd3], %r5;
    E: bar.sync 0;"""
    kernel = parse(ptx(body)).kernels["f"]
    for chunk in (32, 64, 160, 1 << 14):
        x = np.full(7 * 32, 99, np.uint32)
        given = bound(kernel, [x])
        run(lowered(kernel), LaunchConfig((7, 1, 1), (32, 1, 1), given.parameters), given.memory, chunk=chunk)
        given.write_back()
        assert x.tolist() == [99 if b == 3 else b * b for b in range(7) for _ in range(32)]


@pytest.mark.parametrize(("grid", "sides"), [((7, 1, 1), (1, 1, 1)), ((6, 4, 2), (2, 1, 2)), ((4, 6, 3), (1, 3, 1))])
@pytest.mark.parametrize("seed", [None, 5])
def test_every_block_comes_once_and_clusters_together(grid, sides, seed):
    """By rank within each cluster, against indices split by NumPy."""
    ids = np.arange(np.prod(grid)).reshape(grid[::-1])
    (x, y, z), (gx, gy, gz) = sides, grid
    expected = ids.reshape(gz // z, z, gy // y, y, gx // x, x).transpose(0, 2, 4, 1, 3, 5).reshape(-1, x * y * z)
    drawn = None if seed is None else np.random.default_rng(seed)
    step = 2 * x * y * z
    chunks = list(in_order(LaunchConfig(grid, (32, 1, 1), cluster=sides), step, drawn))
    assert all(len(chunk) == step for chunk in chunks[:-1])
    came = np.concatenate(chunks).reshape(expected.shape)
    if seed is not None:
        assert (came != expected).any()
        came = came[np.argsort(came[:, 0])]
        expected = expected[np.argsort(expected[:, 0])]
    assert (came == expected).all()


def test_the_largest_grid_is_not_laid_out_at_once():
    """Its blocks run chunk by chunk; a shuffled order of so many is refused."""
    launch = LaunchConfig((2**31 - 1, 2, 1), (32, 1, 1))
    chunks = in_order(launch, 512)
    assert next(chunks).tolist() == list(range(512))
    with pytest.raises(gm.EmulationError, match=r"16,777,216.*leave out the seed"):
        next(in_order(launch, 512, np.random.default_rng(1)))


def test_a_unit_is_made_once_in_a_chunk_and_told_of_its_end():
    """Each chunk has its own; what a unit leaves to the end is done before observers hear of the end."""
    events = []

    class Unit:
        def __init__(self, machine):
            events.append(("made", machine.block_ids.tolist()))
            machine.at_end.append(lambda: events.append("end"))

    class Asking(Observer):
        def start(self, machine):
            assert machine.unit(Unit) is machine.unit(Unit)

        def finish(self, machine):
            events.append("finish")

    kernel = parse(ptx("bar.sync 0;")).kernels["f"]
    arguments = bound(kernel, [np.zeros(32, np.uint32)])
    launch = LaunchConfig((3, 1, 1), (32, 1, 1), arguments.parameters)
    run(lowered(kernel), launch, arguments.memory, [Asking()], chunk=64)
    assert events == [("made", [0, 1]), "end", "finish", ("made", [2]), "end", "finish"]


def test_places_are_one_number_until_threads_part():
    """Threads that part have a block each; those that have ended are not running."""
    places = Places(4, stop=7)
    places.go(None, 3)
    assert (places.at, places.each) == (3, None)
    assert places.running().all()
    places.go(np.array([True, False, False, True]), 7)
    assert places.each.tolist() == [7, 3, 3, 7]
    assert places.running().tolist() == [False, True, True, False]
    places.go(None, 7)
    assert places.each.tolist() == [7] * 4
    assert not places.running().any()
    ended = Places(2, stop=0)
    assert not ended.running().any()


# ---- barriers ----


def test_named_barriers_pass_data_on():
    """Two warps fill and two empty a buffer, by barriers of 128 threads: sync on one side, arrive on the other."""
    code = """__global__ void f(int* x) {
      __shared__ int s[64];
      int i = threadIdx.x % 64;
      for (int turn = 0; turn < 4; ++turn)
        if (threadIdx.x < 64) {
          asm volatile("bar.sync 2, 128;"); s[i] = 10 * turn + i; asm volatile("bar.arrive 1, 128;");
        } else {
          asm volatile("bar.arrive 2, 128;"); asm volatile("bar.sync 1, 128;"); x[64 * turn + i] = s[63 - i];
        }
    }"""
    x = np.zeros(256, np.int32)
    made = gm.emulate(code, "f", 1, 128, [x])
    assert x.tolist() == [10 * turn + 63 - i for turn in range(4) for i in range(64)]
    assert made.findings == ()


@pytest.mark.parametrize(("first", "kinds"), [(32, []), (16, ["divergent barrier"])])
def test_warps_may_meet_at_two_instructions_of_a_named_barrier(first, kinds):
    code = f"""__global__ void f(int* x) {{
      __shared__ int s;
      if (threadIdx.x < {first}) {{ s = 7; asm volatile("bar.sync 1, 64;" ::: "memory"); }}
      else {{ asm volatile("bar.sync 1, 64;" ::: "memory"); x[threadIdx.x] = s; }}
    }}"""
    x = np.zeros(64, np.int32)
    found = gm.emulate(code, "f", 1, 64, [x]).findings
    assert [finding.kind for finding in found if finding.kind != "race"] == kinds
    assert (x[32:] == 7).all()


def test_threads_that_ended_are_not_waited_for():
    code = "__global__ void f(int* x) { if (threadIdx.x >= 40) return; __syncthreads(); x[threadIdx.x] = 1; }"
    for seed in (None, 1, 2):
        x = np.zeros(64, np.int32)
        assert gm.emulate(code, "f", 1, 64, [x], seed=seed).findings == ()
        assert x.tolist() == [1] * 40 + [0] * 24


def test_parts_of_a_warp_wait_for_each_other():
    code = """__global__ void f(int* x) {
      __shared__ int s[32];
      int i = threadIdx.x;
      if (i < 16) { s[i] = i; __syncwarp(0xFFFF); x[i] = s[15 - i]; }
      else { s[i] = 2 * i; __syncwarp(0xFFFF0000); x[i] = s[47 - i]; } }"""
    x = np.zeros(32, np.int32)
    for seed in (None, 1):
        assert gm.emulate(code, "f", 1, 32, [x], seed=seed).findings == ()
        assert x.tolist() == [15 - i for i in range(16)] + [2 * (47 - i) for i in range(16, 32)]


# ---- memory ----


def test_a_generic_address_leads_to_its_space():
    """Every third thread follows a pointer to global, to shared, and to its own memory."""
    code = """__global__ void f(int* x, int n) {
      __shared__ int s[64];
      int own[4];
      for (int j = 0; j < n; ++j) own[j] = 1000 + threadIdx.x + j;
      s[threadIdx.x] = 100 + threadIdx.x;
      int* at = threadIdx.x % 3 == 0 ? x + threadIdx.x : threadIdx.x % 3 == 1 ? s + threadIdx.x : own + n / 2;
      *at += 5;
      atomicAdd(threadIdx.x % 3 == 0 ? x + threadIdx.x : s + threadIdx.x, 1);
      x[64 + threadIdx.x] = *at; x[128 + threadIdx.x] = own[n / 2]; }"""
    x = np.arange(192, dtype=np.int32)
    assert gm.emulate(code, "f", 1, 64, [x, np.int32(4)]).findings == ()
    expected = [(i + 6, 106 + i, 1007 + i)[i % 3] for i in range(64)]
    assert x[64:128].tolist() == expected
    assert x[128:].tolist() == [1002 + i + 5 * (i % 3 == 2) for i in range(64)]


def test_bytes_and_halves_are_widened_by_their_sign():
    body = """ld.global.s8 %r2, [%rd2+1]; ld.global.u8 %r3, [%rd2+1]; ld.global.s16 %r4, [%rd2+2];
    shl.b32 %r3, %r3, 16; add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; st.global.u32 [%rd2], %r2;"""
    x = np.random.default_rng(1).integers(0, 2**32, 32).astype(np.uint32)
    at = x.view(np.int8).reshape(-1, 4).astype(np.int64), x.view(np.int16).reshape(-1, 2).astype(np.int64)
    expected = (at[0][:, 1] + (at[0][:, 1] % 256 << 16) + at[1][:, 1]) % 2**32
    assert threads(body, x=x.copy()) == expected.tolist()


def test_registers_are_taken_apart_and_put_together():
    body = """ld.global.u32 %r2, [%rd2]; mov.b32 {%h1, %h2}, %r2; mov.b32 %r3, {%h2, %h1}; mov.b64 %rd3, {%r2, %r3};
    mov.b64 {_, %r4}, %rd3; st.global.u32 [%rd2], %r4;"""
    x = np.random.default_rng(1).integers(0, 2**32, 32).astype(np.uint32)
    assert threads(body, x=x.copy()) == [int(one >> 16 | (one & 0xFFFF) << 16) for one in x.astype(np.uint64)]


def test_who_faults_reads_zeros_and_writes_nothing():
    body = "ld.global.u32 %r2, [%rd2+32]; add.u32 %r2, %r2, 1;\nst.global.u32 [%rd2+8], %r2;"
    x = np.arange(10, 42, dtype=np.uint32)
    made = gm.emulate(ptx(body), "f", 1, 32, [x])
    assert [(one.kind, one.count) for one in made.findings if one.kind != "race"] == [
        ("out of bounds", 8),
        ("out of bounds", 2),
    ]
    assert x.tolist() == [10, 11] + [19 + i for i in range(24)] + [1] * 6


def test_constants_parameters_and_addresses_of_variables():
    before = ".const .align 4 .b32 table[4] = {5, 6, 7, 8};\n.global .align 4 .b32 more[4];\n"
    body = """and.b32 %r2, %r1, 3; mul.wide.u32 %rd3, %r2, 4; mov.u64 %rd4, table; add.s64 %rd4, %rd4, %rd3;
    ld.const.u32 %r3, [%rd4]; ld.const.u32 %r4, [table+4]; ld.global.u32 %r5, [more+8]; add.u32 %r3, %r3, %r4;
    add.u32 %r3, %r3, %r5; st.global.u32 [%rd2], %r3;"""
    x = np.zeros(32, np.uint32)
    gm.emulate(ptx(body).replace(".visible", f"{before}.visible"), "f", 1, 32, [x])
    assert x.tolist() == [5 + i % 4 + 6 for i in range(32)]


# ---- what is refused ----


@pytest.mark.parametrize(
    "statement",
    [
        "fma.rn.f16x4 %r1, %r1, %r1, %r1;",
        "add.f8 %r1, %r1, %r1;",
        "add.s32.wide %r1, %r1, %r1;",
        "mul.s32 %r1, %r1, %r1;",
        "ld.global.quickly.u32 %r1, [%rd2];",
        "ld.global.v3.u32 {%r1, %r2, %r3}, [%rd2];",
        "st.param.u32 [p], %r1;",
        "tex.3d.v4.f32.s32 {%f1, %f2, %f3, %f3}, [%rd1, {%r1, %r2, %r2, %r2}];",
        "vabsdiff4.u32.u32.u32.add %r1, %r2, %r3, %r1;",
        "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {%r1, %r2}, {%r3}, {%r4}, {%r1, %r2};",
        "cp.async.cb.shared.global [%r1], [%rd1], 16;",
        "cp.async.ca.shared.global [%r1], [%rd1], 12;",
        "bar.sink 0;",
        "@%p1 bar.sync 0;",
        "cvta.to.texture.u64 %rd1, %rd1;",
        "shfl.sync.far.b32 %r1, %r1, 1, 31, -1;",
        "frobnicate;",
    ],
)
def test_an_instruction_that_is_not_modeled_is_named_with_its_line(statement):
    x = np.arange(32, dtype=np.uint32)
    opcode = statement.removeprefix("@%p1 ").split()[0].rstrip(";")
    with pytest.raises(gm.EmulationError, match=rf"{opcode}.*\(ptx:5\).*not modeled"):
        gm.emulate(ptx(statement), "f", 1, 32, [x])
    assert x.tolist() == list(range(32))


@pytest.mark.parametrize("name", ["%smid", "%nsmid", "%envreg3", "%globaltimer_lo"])
def test_a_special_register_without_a_value_is_refused_where_it_is_read(name):
    never = f"setp.eq.u32 %p1, %r1, 99; @!%p1 bra E;\nmov.u32 %r3, {name};\nE: st.global.u32 [%rd2], %r1;"
    assert threads(never) == list(range(32))
    with pytest.raises(gm.EmulationError, match=rf"special register {name} of .*\(ptx:6\) is not modeled"):
        threads(never.replace("99", "9"))


def test_clocks_count_the_instructions_that_were_executed():
    """A longer way takes longer, a wait by the clock ends, and both clocks agree."""
    code = """__global__ void f(long long* y) {
      long long start = clock64();
      int from = clock();
      y[threadIdx.x + 192] = 1;
      y[threadIdx.x] = clock64() - start;
      y[64 + threadIdx.x] = clock() - from;
      for (int k = 0; k < threadIdx.x / 16 * 50; ++k) atomicAdd((int*)y + 512, 1);
      y[128 + threadIdx.x] = clock64() - start;
      while (clock64() - start < 1000) {}
    }"""
    y = np.zeros(512, np.int64)
    assert gm.emulate(code, "f", 1, 32, [y]).findings == ()
    short, same, long = y[0], y[64], y[128]
    assert 0 < short <= same <= short + 8
    assert short + 100 < long < 1000


def test_a_chunk_frees_its_memory_when_it_ends():
    """Registers and shared memory, although its observers still know the machine."""
    machines = []

    class Watching(Observer):
        def start(self, machine):
            machines.append(machine)

    memory = Global({"out": 4 * 96})
    launch = LaunchConfig((3, 1, 1), (32, 1, 1), np.uint64(memory.address("out")).tobytes())
    run(lowered(parse(ptx("st.global.u32 [%rd2], %r1;")).kernels["f"]), launch, memory, (Watching(),), chunk=32)
    assert len(machines) == 3
    assert not any(machine.registers or machine.shared.data.size or machine.local.data.size for machine in machines)
