"""st.async and red.async: values, the bytes they complete at an mbarrier, faults, and races with what waits."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery.errors import EmulationError
from gemmery_emulator.kernels.kernel import emulate
from hopper import HEAD

pytest.importorskip("cuda.bindings")
RING = (
    HEAD
    + r"""
__device__ u32 mapped(u32 at, u32 rank) {
  u32 to;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(at), "r"(rank));
  return to;
}
__device__ void meet() { asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory"); }
extern "C" __global__ void __cluster_dims__(2) ring(const int* x, int* y) {
  __shared__ __align__(16) int s[256];
  __shared__ __align__(8) u64 bar;
  u32 t = threadIdx.x, rank = blockIdx.x % 2, own = place(&bar);
  if (t == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(own) : "memory");
  }
  for (int i = t; i < 256; i += 64) s[i] = 100;
  meet();
  if (t == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], BYTES;" :: "r"(own) : "memory");
  u32 to = mapped(place(s), rank ^ 1), mark = mapped(own, RANK);
  int v = x[blockIdx.x * 64 + t];
  asm volatile("OPCODE [%0], VALUE, [%2];" :: "r"(to + AT), "r"(v), "r"(mark) : "memory");
  WAIT
  for (int i = t; i < 256; i += 64) y[blockIdx.x * 256 + i] = s[i];
  meet();
}
"""
)
BYTES = "shared::cluster.mbarrier::complete_tx::bytes"
STORE, UPDATE = f"st.async.{BYTES}.b32", f"red.async.relaxed.cluster.{BYTES}"


def ring(opcode=STORE, count=256, at="4 * t", value="%1", rank="rank ^ 1", wait="wait(own, 0);"):
    """What each of four blocks was sent by the other of its cluster, what it received, and the findings."""
    x, y = np.random.default_rng(3).integers(-50, 50, (4, 64)).astype(np.int32), np.zeros((4, 256), np.int32)
    code = RING
    for word, text in {"BYTES": count, "RANK": rank, "OPCODE": opcode, "VALUE": value, "AT": at, "WAIT": wait}.items():
        code = code.replace(word, str(text))
    run = emulate(code, "ring", 4, 64, [x, y])
    return x[[1, 0, 3, 2]], y, run


def test_a_store_reaches_the_block_that_waits():
    sent, y, run = ring()
    assert run.findings == ()
    assert (y[:, :64] == sent).all()
    assert (y[:, 64:] == 100).all()
    assert run.instructions["st.async"] == 8


def test_a_vector_is_stored_whole():
    sent, y, run = ring(f"st.async.weak.{BYTES}.v4.s32", 1024, "16 * t", "{%1, %1, %1, %1}")
    assert run.findings == ()
    assert (y == np.repeat(sent, 4, axis=1)).all()


@pytest.mark.parametrize(
    ("operation", "meaning"),
    [
        ("add.s32", np.add), ("add.u32", np.add), ("min.s32", np.minimum), ("max.s32", np.maximum),
        ("and.b32", np.bitwise_and), ("or.b32", np.bitwise_or), ("xor.b32", np.bitwise_xor),
    ],
)  # fmt: skip
def test_updates_of_one_place_take_turns(operation, meaning):
    sent, y, run = ring(f"{UPDATE}.{operation}", at="t % 4 * 4")
    assert run.findings == ()
    expected = meaning.reduce(np.concatenate([np.full((4, 1, 4), 100), sent.reshape(4, 16, 4)], axis=1), axis=1)
    assert (y[:, :4] == expected).all()
    assert (y[:, 4:] == 100).all()


@pytest.mark.parametrize("wait", ["", "meet();"])
def test_what_nobody_waited_for_has_not_landed(wait):
    _, y, run = ring(wait=wait)
    assert (y == 100).all()
    (race,) = (each for each in run.findings if each.kind == "race")
    assert race.message.endswith("by st.async; nothing has waited for it: wait at its mbarrier first")
    assert (race.line.number, race.other.number) == (34, 32)


def test_threads_that_do_not_wait_race_with_those_that_do():
    _, _, run = ring(wait="if (t < 32) wait(own, 0);")
    (race,) = run.findings
    assert race.kind == "race"
    assert "thread 32 of block 0 reads byte 128 of shared memory (s, byte 128) of block 0" in race.message


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"rank": "rank"}, "misuse", "and completes at an mbarrier of another: map both addresses to the same rank"),
        ({"count": 260}, "deadlock", "0 of 1 arrivals and 4 bytes are missing"),
        ({"count": 252}, "deadlock", "4 bytes too many"),
        ({"at": "4 * t + 800"}, "out of bounds", "thread 58 of block 0 writes 4 bytes at byte 1032 of shared memory"),
        ({"at": "4 * t + 1"}, "misaligned", "the address must be a multiple of 4"),
    ],
)
def test_faults_are_found(changed, kind, words):
    _, _, run = ring(**changed)
    assert any(each.kind == kind and words in each.message for each in run.findings)


@pytest.mark.parametrize(
    "opcode", [f"st.async.{BYTES}.b16", f"st.async.{BYTES}.v4.b64", f"{UPDATE}.add.s64", f"red.async.{BYTES}.add.u32"]
)
def test_what_ptxas_refuses_is_refused(opcode):
    with pytest.raises(EmulationError, match=r"async.*is not modeled"):
        ring(opcode)
