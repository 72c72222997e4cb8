"""wgmma_gathered: rows that other devices send while a launch runs. All devices are parts of one emulated launch."""

from __future__ import annotations

import struct
from importlib import import_module

import numpy as np
import pytest

from emulated_card import installed
from gemmery.cuda import nvrtc
from gemmery.cuda.driver import find
from gemmery.problem import Problem
from gemmery_emulator.arguments import memory_of
from gemmery_emulator.hopper import tensormap
from gemmery_emulator.kernels.programs import prepared
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.run import emulated
from gemmery_lab.emulated_product import Gemm, problem_of, product_bytes
from mutant import edited

pytest.importorskip("cuda.bindings")
pytest.importorskip("torch", reason="PyTorch is not installed")

from gemmery.distributed import peers
from gemmery.errors import RefusedError

FILE = "wgmma_gathered.cu"
CONFIG = {"bm": 64, "bn": 64, "stages": 3, "cm": 1, "cn": 1, "band": 4, "blocks": 2}
K, N = 72, 136
SIGNAL = 'asm volatile("st.release.SCOPE.global.s32 [%0], 1;" ::"l"(sends.flags[peer] + device) : "memory");'
COPY = """for (int i = threadIdx.x; i < sends.count; i += blockDim.x) sends.to[peer][i] = sends.from[i];
    __syncthreads();"""
DEVICES = """
struct Sends { const short* from; short* to[DEVICES]; int* flags[DEVICES]; long long count; };
template <class T, class Out> struct OnDevices { Gathered<T, Out> of[DEVICES]; Sends sends[DEVICES]; };

// Blocks of the first rows of the grid are the products of the devices, those of the others copy for them.
template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __cluster_dims__(Tiles::CM, 1, 1) __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    on_devices(const __grid_constant__ OnDevices<T, Out> all) {
  extern __shared__ __align__(1024) char shared[];
  const int device = blockIdx.y % DEVICES;
  if (blockIdx.y < DEVICES) return gathered<EPILOGUE, Tiles>(all.of[device], shared);
  if (blockIdx.x > 0) return;
  const Sends& sends = all.sends[device];
  for (int away = 1; away < DEVICES; ++away) {
    const int peer = (device + away) % DEVICES;
    SENDING
  }
}"""


def on_devices(
    devices, rows, sending=f"{COPY} if (threadIdx.x == 0) {SIGNAL}", scope="sys", seed=None, texts=None, pairs=1
):
    """The results of all devices, what they must be, and findings."""
    rng = np.random.default_rng(devices)
    whole = rng.integers(-3, 4, (rows * devices, K)).astype("f2")
    arrays, parts = {}, []
    for device in range(devices):
        w = np.asfortranarray(rng.integers(-3, 4, (K, N)).astype("f2"))
        full = np.full_like(whole, np.nan)
        flags, c = np.zeros(devices, "i4"), np.full((1, len(whole), N), np.nan, "f2")
        gemm = Gemm(full[None], w[None], c, offsets=flags)
        parts.append((gemm, w))
        own = whole[device * rows : (device + 1) * rows].copy()
        for name, array in (("A", full), ("B", w.T), ("C", gemm.c), ("own", own), ("offsets", flags)):
            arrays[f"{name} of device {device}"] = array.reshape(-1).view(np.uint8)
    problem = problem_of(parts[0][0], "f16", "f16", "h200")
    config = peers.RUNG.resolve(problem.by_rows(), {**peers.RUNG.default, **CONFIG, "cm": pairs})
    geometry = peers.gathered_geometry(problem.by_rows(), config, rows)
    text = {FILE: nvrtc.text(FILE), **(texts or {})}
    text[FILE] += DEVICES.replace("SENDING", sending).replace("SCOPE", scope).replace("DEVICES", str(devices))
    kernel = f"on_devices<{geometry.kernel.partition('<')[2]}"
    code = nvrtc.ptx(FILE, kernel, find("h200").arch, text)
    program = prepared(code.text, code.entry)
    memory = memory_of(arrays, [program.kernel], {})
    argument, sends = b"", b""
    for device, (gemm, _) in enumerate(parts):
        at = {name: memory.address(f"{name} of device {device}") for name in ("A", "B", "C", "own", "offsets")}
        product = product_bytes(problem, geometry, gemm, at, 0)
        own = tensormap.encoded(at["own"], "float16", 128, (K, rows, 1), (2 * K, 2 * K * rows), (64, 64, 1), (1, 1, 1))
        argument += product + own + peers._TAIL.pack(device * rows, rows, 10**9)
        there = [memory.address(f"A of device {peer}") + device * rows * K * 2 for peer in range(devices)]
        there += [memory.address(f"offsets of device {peer}") for peer in range(devices)]
        sends += struct.pack(f"={2 * devices + 2}Q", at["own"], *there, rows * K)
    argument = (argument + sends).ljust(program.kernel.parameters[0].size, b"\0")
    launch = LaunchConfig((geometry.grid[0], 2 * devices, 1), geometry.block, argument, geometry.shared, (pairs, 1, 1))
    run = emulated(program, launch, memory, seed=seed)
    results = [memory.bytes(f"C of device {device}").view("f2").reshape(len(whole), N) for device in range(devices)]
    return results, [whole.astype("f4") @ w.astype("f4") for _, w in parts], run.findings


@pytest.mark.parametrize(
    ("devices", "rows", "seed", "pairs"), [(2, 128, None, 1), (4, 64, None, 1), (2, 64, 1, 1), (2, 256, None, 2)]
)
def test_devices_that_multiply_while_rows_come(devices, rows, seed, pairs):
    results, wanted, findings = on_devices(devices, rows, seed=seed, pairs=pairs)
    assert findings == ()
    for result, want in zip(results, wanted, strict=True):
        assert np.array_equal(result, want)


WAIT = "    while (ptx::ld_acquire_sys(p.offsets + piece) == 0) {"
FAULTS = {
    "no wait": {"texts": edited(FILE, WAIT, "    while (false) {")},
    "a wait for another piece": {"texts": edited(FILE, WAIT, WAIT.replace("+ piece", "+ (begin / each + 3) % 4"))},
    "a flag that is read without acquire": {
        "texts": edited("ptx_hopper.cuh", "ld.acquire.sys.global.s32", "ld.relaxed.sys.global.s32")
    },
    "a flag before the rows": {"sending": f"if (threadIdx.x == 0) {SIGNAL} {COPY}"},
    "a flag while other threads copy": {
        "sending": f"{COPY.replace('__syncthreads();', '')} if (threadIdx.x == 0) {SIGNAL}"
    },
    "a flag without release": {"sending": f"{COPY} if (threadIdx.x == 0) {SIGNAL.replace('release', 'relaxed')}"},
}


@pytest.mark.many(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_flag_that_is_missing_or_orders_nothing_is_a_race(fault):
    """But for a missing fence.proxy.async.global: the emulator knows of that for shared memory alone."""
    _, _, findings = on_devices(4, 64, **FAULTS[fault])
    assert {each.kind for each in findings} == {"race"}, findings


@pytest.mark.parametrize("scope", ["sys", "gpu"])
def test_a_flag_of_one_device_is_none_for_another(monkeypatch, scope):
    """The emulator has no scope for a device: here it is that of a block."""
    orders = import_module("gemmery_emulator.findings.orders")
    monkeypatch.setattr(orders, "OWN_SCOPES", orders.OWN_SCOPES | {"gpu"})
    _, _, findings = on_devices(2, 64, scope=scope, texts=edited(FILE, "// Idea", f"// scope {scope}: idea"))
    assert {each.kind for each in findings} == ({"race"} if scope == "gpu" else set())


ORDER = """
template <class T, class Out, int EPILOGUE, class Tiles> __global__ void order_of(Gathered<T, Out> p, int* rows) {
  for (Arriving<Tiles> order(p, Cluster<1, 1>()); order.more(); order.next()) {
    *rows++ = order.tile.row;
    *rows++ = order.is_own();
  }
}"""


def test_own_rows_come_first_and_then_those_of_the_rank_before():
    """The order in which the pieces arrive: a rank sends to the next one first."""
    text = nvrtc.text(FILE) + ORDER
    kernel = "order_of<f16, f16, 0, WgmmaTiles<f16, ROW, COL, 64, 64, 3, Consumers<1, 64, 2>>>"
    code = nvrtc.ptx(FILE, kernel, find("h200").arch, {FILE: text})
    program = prepared(code.text, code.entry)
    rows, begin = 128, 256
    argument = bytearray(program.kernel.parameters[0].size)
    argument[128:144] = struct.pack("=4i", 4 * rows, 64, 64, 1)  # m, n, k, batch
    argument[220:224] = struct.pack("=i", 16)  # rows of tiles in a band
    argument[768:] = peers._TAIL.pack(begin, rows, 0)
    order = np.full(16, -1, np.int32)
    memory = memory_of({"rows": order.view(np.uint8)}, [program.kernel], {})
    argument = bytes(argument) + struct.pack("=Q", memory.address("rows"))
    emulated(program, LaunchConfig((1, 1, 1), (1, 1, 1), argument, 0, (1, 1, 1)), memory)
    tiles = memory.bytes("rows").view(np.int32).reshape(8, 2)
    assert tiles[:, 0].tolist() == [320, 256, 192, 128, 64, 0, 448, 384]
    assert tiles[:, 1].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_what_the_kernel_does_not_multiply_is_refused():
    problem = Problem(512, 256, 64, "bf16", "bf16", 1, "row", "col", device="h200", alignments=(16, 16, 16))
    config = {**peers.RUNG.resolve(problem, peers.RUNG.default)}
    assert peers.gathered_geometry(problem, config, 256).kernel.startswith("wgmma_gathered<bf16")
    wide = {**config, "bm": 128, "bn": 256, "stages": 4, "band": 16, "blocks": 128}
    bands = [peers.gathered_geometry(problem._replace(m=2 * rows), wide, rows).band for rows in (1024, 384, 2048, 2560)]
    assert bands == [8, 3, 16, 10]  # no band has rows of two pieces
    with pytest.raises(RefusedError, match="whole tiles"):
        peers.gathered_geometry(problem, config, 100)
    with pytest.raises(RefusedError, match="in place"):
        peers.gathered_geometry(problem._replace(alignments=(2, 16, 16)), config, 256)
    large = problem._replace(m=8192, n=8192)
    with pytest.raises(RefusedError, match="must be free"):
        peers.gathered_geometry(large, {**config, "bm": 128, "bn": 128, "stages": 4, "blocks": 132}, 4096)


def test_one_wave_of_tiles_is_cut_smaller_for_the_rows_of_a_piece():
    problem = Problem(512, 4096, 8192, "bf16", "bf16", 1, "row", "col", device="h200", alignments=(16, 16, 16))
    whole = peers.RUNG.resolve(problem, peers.RUNG.default)
    assert (whole["bm"], whole["bn"]) == (128, 128)
    config = peers.gathered_config(problem, 256)
    assert (config["bm"], config["bn"], config["cm"]) == (64, 128, 2)
    launch = peers.gathered_geometry(problem, config, 256)
    assert (launch.kernel.partition("<")[0], launch.cluster, launch.grid[0]) == ("wgmma_gathered_cluster", 2, 128)
    large = problem._replace(m=2048)
    assert peers.gathered_config(large, 1024) == peers.RUNG.resolve(large, peers.RUNG.default)
    assert peers.gathered_config(problem, 300) == whole  # which no tile divides
    with pytest.raises(RefusedError, match="whole tiles of 128"):
        peers.gathered_geometry(problem._replace(m=384), config, 192)


def test_a_rank_launches_it_with_its_own_rows_where_they_lie(monkeypatch):
    """All above the driver is as on a GPU: the kernel's choice, maps, the argument. The others' rows have come."""
    card = installed(monkeypatch)
    rng = np.random.default_rng(1)
    rows, n, k = 128, 96, 136
    whole = rng.integers(-3, 4, (4 * rows, k)).astype("f2")
    w, wide = rng.integers(-3, 4, (n, k)).astype("f2"), np.full_like(whole, np.nan)
    wide[:rows], wide[2 * rows :] = whole[:rows], whole[2 * rows :]  # not those of rank 1
    x, full, b, out = (card.put(each, "f16") for each in (whole[rows : 2 * rows], wide, w, np.zeros((4 * rows, n))))
    flags = card.put(np.array([1, 0, 1, 1]), "int32")
    assert peers.arriving_product({}, x, full, b.T, out, 1, (rows, rows, rows, rows - 1)) is None
    nothing = card.empty((k, 0), "f16"), card.empty((4 * rows, 0), "f16")
    assert peers.arriving_product({}, x, full, *nothing, 1, (rows,) * 4) is None
    beside = card.put(whole[:rows], "f16", beside=2)  # of an address that no tensor map has
    assert peers.arriving_product({}, beside, full, b.T, out, 1, (rows,) * 4) is None
    launch = peers.arriving_product({}, x, full, b.T, out, 1, (rows,) * 4)
    launch(x, full, b.T, out, 0, flags.memory.pointer, 60.0)
    assert (card.launched, card.findings) == (["wgmma_gathered"], [])
    assert np.array_equal(out.numbers, whole.astype("f4") @ w.T.astype("f4"))
