"""Whether float32 in parts, and float64 by residues, take less time than multiplying in the type itself."""

from __future__ import annotations

from math import ceil

from gemmery.cuda.choose.cost import CLOCK, quickest, quickest_shared, shared_cycles
from gemmery.cuda.choose.data import PARTS, SIMT_COSTS, SIMT_SPLITS, Tiling
from gemmery.cuda.device import Device
from gemmery.problem import Problem

# Times on an H200, in microseconds and cycles of 1.7 GHz.
LAUNCHES, HOST = (9.0, 17.0), 50.0  # on the device, in a graph, of rows alone and with others; on the host
PRE_PASS = 3.6e6, 2.5e6  # bytes in a microsecond, of rows that stay in registers and of others
CYCLES, PARTS_END, BUSY = 1700.0, 4000, 0.85  # of a microsecond; of the end of a tile; of tensor cores
SIMT, SIMT_LEAST, SIMT_END = (42e6, 48e6), 4.0, 2.0  # operations in a microsecond, of whole rounds; likewise


def parts_pay(
    problem: Problem, in_registers: int, device: Device, tiles: tuple[Tiling, ...] = (), host: float = HOST
) -> bool:
    """Return True if split_fp16x3 should take less time for a product with a row-major C than CUDA cores.

    Rows of the operands in `in_registers` stay there in the pre-pass: bit 0 stands for A, bit 1 for B. CUDA cores may
    take one of the `tiles` whose k blocks share. A CUDA graph takes no time of the `host`.

    >>> from gemmery.cuda.device import KNOWN
    >>> case = Problem(4096, 4096, 4096, "f32", "f32")
    >>> [parts_pay(each, 3, KNOWN["h200"]) for each in (case, case._replace(m=8))]
    [True, False]
    """
    m, n, k, batch, sms = problem.m, problem.n, problem.k, problem.batch, device.sms
    tile = quickest(PARTS, m, n, batch, sms)
    rounds = -(-(-(-m // tile.bm) * -(-n // tile.bn) * batch) // sms)
    step = 3 * tile.bm * tile.bn / 32 / BUSY
    product = rounds * (-(-k // 64) * step + PARTS_END) / CYCLES
    others = in_registers != 3
    sides = ((m, in_registers & 1), (n, in_registers & 2))
    pre_pass = sum(batch * side * k * 8 / PRE_PASS[not fast] for side, fast in sides)
    waves = -(-m // 64) * -(-n // 64) * batch / sms
    simt = max(SIMT_LEAST, problem.flops / SIMT[others] * ceil(waves) / waves + SIMT_END)
    if tiles:
        choice = quickest_shared(tiles, SIMT_SPLITS, problem, device)
        simt = (SIMT_COSTS.start + shared_cycles(problem, *choice, device)) / CLOCK
    return max(host, LAUNCHES[others] + pre_pass + product) < simt


# Of float64, in microseconds of an H200: launches by residues and by itself, and 1e6 multiply-adds of each. Elements of
# A, B and C are scaled, cut and put together. At n = 1024, 2048, 2560, 3072 that is 76, 356, 632, 1026 (76, 338, 653
# and 974 timed), and 44, 334, 649 and 1119 for itself (44, 312, 723, 1182).
RESIDUES, RESIDUES_ELEMENT, FLOAT64 = (18.0, 0.0256), 9.4e-6, (3.0, 0.0385)


def residues_pay(problem: Problem) -> bool:
    """Return True if ozaki_int8 should take less time for a product of float64 than tensor cores for float64.

    >>> [residues_pay(Problem(n, n, n, "f64", "f64")) for n in (2048, 2560)]
    [False, True]
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    work, elements = batch * m * n * k / 1e6, batch * (m * n + m * k + n * k)
    of_residues = RESIDUES[0] + RESIDUES[1] * work + RESIDUES_ELEMENT * elements
    return of_residues < FLOAT64[0] + FLOAT64[1] * work
