"""Rates and latencies of a multiprocessor by architecture, from which times are predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from gemmery.cuda.device import KNOWN, WARP, Device, card
from gemmery.errors import DeviceError


@dataclass(frozen=True)
class Latencies:
    """Clocks until a result is there."""

    shared: float
    l1: float
    l2: float
    memory: float
    fma: float = 4
    integer: float = 4.5
    multiply: float = 5
    f64: float = 8
    special: float = 20
    tensor: float = 33
    barrier: float = 20
    mbarrier: float = 30  # from an arrival until a warp that waits goes on
    remote: float = 180  # the same, of a warp of another block of its cluster
    cluster: float = 200
    begin: float = 160  # from the end of a block until the next one's first instruction
    bulk: float = 450  # of a bulk copy from L2, until its bytes arrive
    bulk_store: float = 400  # until one has read shared memory
    wgmma: float = 40  # from a product's last operation until its sums are there

    @property
    def by_kind(self) -> dict[str, float]:
        """The latencies by name."""
        return {**{field.name: float(getattr(self, field.name)) for field in fields(self)}, "none": 0.0}


@dataclass(frozen=True)
class Pipes:
    """Lanes per clock of each pipe of a multiprocessor, and the latencies of its memories."""

    fma: int  # f32
    half: int  # pairs of f16 or bf16
    integer: int  # additions, comparisons, logic, shifts
    multiply: int  # whole numbers
    f64: int
    latencies: Latencies
    l1: int  # bytes of L1 and shared memory together
    l2: float = 64  # bytes per clock from L2
    l2_all: float = inf  # the same, while all multiprocessors ask
    l2_in_step: float = inf  # the same, while all blocks of a launch run at once and ask for the same bytes together
    bulk_all: float = inf  # the same, of bulk copies, where that is less
    stores_all: float = inf  # the same, of stores of whole sectors to L2
    remote: float = 16  # bytes per clock to other blocks of a cluster
    special: int = 16
    convert: int = 16
    accesses: int = 32  # loads and stores, to all memories
    warp_tensor: float = 1.0  # share of the tensor cores' peak that mma.sync reaches
    small_f64: float = 1.0  # share of the peak in f64 that products of 8 x 8 x 4 reach
    tensor: float = 1.0  # share that any instruction reaches at the power that the card may take
    heat: float = 0.0  # by which the clock falls, as a share, while all tensor cores run at their peak


BARRIER = 16  # threads a clock; CUDA Programming Guide, "Synchronization Instruction"

# Lanes: CUDA Programming Guide, "Throughput of Native Arithmetic Instructions". L1: the same, "Technical Specifications
# per Compute Capability". Latencies of memories: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
# Architecture", 2024 (arXiv 2402.13499); of L2 of sm_90 a chain of loads on an H200, and of memory what copies of all
# multiprocessors take longer. benchmarks/memory_paths.py has these, what L2 gives and takes, and handshakes: `l2_all`
# is between 4,350 with up to 12 readers and 8,400 in step, as neighbors share; `stores_all` is that of stores that
# stay (simt_linear, of 4 bytes); those that sweep memory get 1,300. There peak_mma.cu and
# peak_wgmma.cu measure the shares of tensor cores, a loop of m8n8k4 `small_f64`; `heat` is from the clocks recorded
# with the ladder in bf16. Few multiprocessors store no faster each: at 53 bytes a clock, the 32 blocks of
# wgmma_specialized at n = 1024 would take 0.90 of their recorded time. `remote`, of clusters of two: Luo et al., 3.3
# TB/s of 114 multiprocessors. `accesses`: load/store units in NVIDIA's white papers of Turing, GA102 and Ada, and 32 in
# those of GV100, GA100 and GH100; those of sm_120 are taken as sm_89's.
# Of sm_75: Jia et al., "Dissecting the NVidia Turing T4 GPU via Microbenchmarking", 2019 (arXiv 1903.07486), of sm_70
# the same authors' table of Volta (arXiv 1804.06826). No such table of sm_86 is known: its multiprocessor is that of
# sm_89, and its L2 and memory are taken as those of sm_80. Of sm_120 the lanes and latencies are taken as those of
# sm_89; its cards differ in clock, multiprocessors, L2 and memory. Of sm_100, L1 and L2 are those that
# chipsandcheese.com measured on a B200, in ns; the rest is taken as sm_90's, and mma.sync as no faster than there.
# What L2 gives to all: 2,048 bytes a clock on a V100, 5,120 on an A100 (white papers); 8.7 TB/s on an RTX PRO 6000
# (chipsandcheese.com), and as much for each multiprocessor on sm_75, sm_86 and sm_89. It takes stores in the H200's
# proportion.
TAKEN = 1780 / 5200  # bytes stored to L2 for each that it gives


def _l2(read: float) -> dict[str, Any]:
    """What L2 gives and takes, of a card of which this was not measured: bytes a clock and multiprocessor."""
    return {"l2_all": read, "l2_in_step": read, "stores_all": read * TAKEN}


_HOPPER: dict[str, Any] = {
    "l2_all": 5200 / 132,
    "bulk_all": 4350 / 132,
    "l2_in_step": 8400 / 132,
    "stores_all": 1780 / 132,
}
PIPES: Mapping[int, Pipes] = {
    70: Pipes(64, 64, 64, 64, 32, Latencies(19, 28, 193, 400), 128 << 10, **_l2(2048 / 80)),
    75: Pipes(64, 64, 64, 64, 2, Latencies(19, 32, 188, 296), 96 << 10, accesses=16, **_l2(17.8)),
    80: Pipes(64, 128, 64, 64, 32, Latencies(29, 38, 262, 466), 192 << 10, **_l2(5120 / 108)),
    86: Pipes(128, 64, 64, 64, 2, Latencies(30, 43, 262, 466), 128 << 10, accesses=16, **_l2(17.8)),
    89: Pipes(128, 64, 64, 64, 2, Latencies(30, 43, 273, 542), 128 << 10, accesses=16, **_l2(17.8)),
    90: Pipes(
        128, 128, 64, 64, 64, Latencies(29, 41, 278, 753), 256 << 10,
        warp_tensor=0.6, small_f64=0.5, tensor=0.96, heat=0.38, **_HOPPER,
    ),
    100: Pipes(
        128, 128, 64, 64, 64, Latencies(29, 39, 295, 753), 256 << 10,
        warp_tensor=0.3, small_f64=0.5, tensor=0.96, **_HOPPER,
    ),
    120: Pipes(128, 64, 64, 64, 2, Latencies(30, 43, 273, 542), 128 << 10, accesses=16, **_l2(17.8)),
}  # fmt: skip

# Measured on an H200: outer products of 8 + 8 registers in f32, of 4 + 4 in f64.
OPERANDS = 0.187  # issue slots of a multiply-add whose registers share a bank, if the machine code is not known
OPERANDS_F64 = 0.16  # the same in f64, as a share of its time

# Fitted to records of the ladder on an H200 in f32, bf16 and f64; those in f16 are held out.
LAUNCH = 2e-6  # seconds of the first launch, with the time to start and to end it
OVERLAPPED = 1.2e-6  # of one whose predecessor lets it begin before it ends, in a series of such launches
NEXT = 1e-6  # seconds of each launch after it
DISPATCHED = 0.614e-9  # seconds for each block; benchmarks/memory_paths.py
USABLE = 0.92  # share of the data sheet's bandwidth that a kernel reaches


FITTED = 90  # the capability of the card that was measured


def origin(device: Device) -> str:
    """Return which constants behind a prediction were measured on such a card, in a sentence."""
    sheets = "lanes, caches and bandwidth are those of NVIDIA's guide and data sheet"
    if device.capability == FITTED:
        own = "latencies of L2 and memory, rates of tensor cores and times of launches were measured on an H200"
        return f"Of the constants, {own}; other latencies are published measurements; {sheets}."
    of_others = {86: ", in part of sm_80", 100: ", in part of sm_90", 120: " of sm_89, as are its lanes"}
    latencies = "latencies are published measurements" + of_others.get(device.capability, "")
    return f"No constant was measured on this card: {latencies}; {sheets}; times of launches are an H200's."


def predictable() -> tuple[str, ...]:
    """Return the names of the cards whose times are predicted."""
    return tuple(name for name, device in KNOWN.items() if device.capability in PIPES)


def pipes_of(name: str) -> tuple[Device, Pipes]:
    """Return a card by its name and the rates of its multiprocessors.

    >>> pipes_of("A100")[1].fma
    64

    Raises DeviceError, which names the cards that are known.
    """
    if name in predictable():
        return KNOWN[name], PIPES[KNOWN[name].capability]
    listed = ", ".join(predictable())
    try:
        device = card(name)
    except (DeviceError, AttributeError):  # a name that is no text has no lower()
        raise DeviceError(f"card {name!r} is not known: times are predicted for {listed}; name one of them") from None
    return device, PIPES[device.capability]


def clocks_of(device: Device, pipes: Pipes, busy: int = 0, *, in_step: bool = False) -> dict[str, float]:
    """Return the clocks of a multiprocessor for one of each kind of what kernels ask for.

    So many multiprocessors are `busy`, all by default: they share what L2 can do, which is more while they are
    `in_step`.

    >>> clocks_of(*pipes_of("h200"))["fma"]
    0.25
    """
    rates, shared = device.rates, device.sms / (busy or device.sms)
    operations = {
        unit: getattr(rates, unit) * device.tensor_share * pipes.tensor
        for unit in ("tensor", "tensor_tf32", "tensor_8")
    }
    clocks = {unit: 1 / rate if rate else 0.0 for unit, rate in operations.items()}
    by_warps = 1 / pipes.warp_tensor - 1 / pipes.tensor if pipes.warp_tensor < pipes.tensor else 0.0
    lanes = {name: getattr(pipes, name) for name in ("fma", "half", "integer", "multiply", "f64", "special", "convert")}
    return {
        **clocks,
        "tensor_f64": 1 / rates.tensor_f64 if rates.tensor_f64 else 0.0,
        "warp_tensor": by_warps / (rates.tensor * device.tensor_share),
        **{name: WARP / each for name, each in lanes.items()},
        "issue": 1 / 4,
        "operands": OPERANDS / 4,
        "operands_f64": OPERANDS_F64 * WARP / pipes.f64,
        "small_f64": (1 / pipes.small_f64 - 1) / rates.tensor_f64 if rates.tensor_f64 else 0.0,
        "barrier": WARP / BARRIER,
        "shuffle": 1.0,
        "access": WARP / pipes.accesses,
        "wavefronts": 1.0,
        "lines": 1.0,
        "sectors": 1 / 4,
        "l2": 1 / min(pipes.l2, (pipes.l2_in_step if in_step else pipes.l2_all) * shared),
        "bulk": 1 / min(pipes.l2, (pipes.l2_in_step if in_step else min(pipes.bulk_all, pipes.l2_all)) * shared),
        "remote": 1 / pipes.remote,
        **dict.fromkeys(("stored", "atomics"), 1 / min(pipes.l2, pipes.stores_all)),
    }
