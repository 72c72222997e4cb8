"""Products of warpgroups under way: their sums reach the registers when a thread waits for them.

PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions". Sums are rounded as exact.py says, those of integers
not at all; the instructions before one wait are computed together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmery.dtypes import TENSOR_FLOAT8, Array
from gemmery_emulator.exact import NORMAL, Added, SumRule, chained
from gemmery_emulator.fragments import BITS
from gemmery_emulator.hopper.bulk import DEPTH, ROWS, Bulk, PieceReaders, RegisterMatrix, SharedTile
from gemmery_emulator.machine import Machine, Rows, landed, report_misuse
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.ops.warp import DECODED
from gemmery_emulator.ptx import Opcode

THREADS = 128  # of a warpgroup
EXACT = 256  # products of bytes whose sum is exact in f32: 256 * 255 * 255 < 2**24

_SPELLED = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)(\.satfinite)?")
_SIZES = {name: bits // 8 for name, bits in BITS.items()}
_SUMS = {
    ("f16", "f16"): ("f32", "f16"),
    ("bf16", "bf16"): ("f32",),
    ("tf32", "tf32"): ("f32",),
    **{(a, b): ("f32", "f16") for a in TENSOR_FLOAT8 for b in TENSOR_FLOAT8},
    **{(a, b): ("s32",) for a in ("s8", "u8") for b in ("s8", "u8")},
}


@dataclass(frozen=True)
class WgmmaShape:
    """The shape and types of a product."""

    n: int
    sums: str
    a: str
    b: str
    saturates: bool

    @property
    def registers(self) -> int:
        """Registers of each thread for the sums."""
        return self.n // (4 if self.sums == "f16" else 2)

    @property
    def rule(self) -> SumRule:
        """How floating-point sums are rounded."""
        size, halves = _SIZES[self.a], self.sums == "f16"
        aligned, result = (13, 13) if size == 1 else (25, 23)
        return SumRule(DEPTH // size, NORMAL[self.a], NORMAL[self.b], aligned, 23 if halves else result, halves)

    @property
    def flops(self) -> int:
        """Floating-point operations of one of the four warps."""
        return 2 * 16 * self.n * DEPTH // _SIZES[self.a]


def shape_of(opcode: Opcode) -> WgmmaShape | None:
    """Return the shape and the types of a wgmma.mma_async; None if there is no such instruction.

    >>> from gemmery_emulator.instructions import opcode
    >>> shape_of(opcode("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16")).registers
    64
    """
    match = _SPELLED.fullmatch(str(opcode))
    if not match:
        return None
    n, k, sums, a, b = int(match[1]), int(match[2]), *match.group(3, 4, 5)
    if sums not in _SUMS.get((a, b), ()) or k * _SIZES[a] != DEPTH or (match[6] and sums != "s32"):
        return None
    sides = range(8, 257, 8) if sums != "s32" else (8, 24, *range(16, 257, 16))
    return WgmmaShape(n, sums, a, b, bool(match[6])) if n in sides else None


@dataclass(frozen=True)
class WarpgroupProduct(Rows):
    """One wgmma.mma_async, for the warpgroups that executed it together."""

    index: int
    shape: WgmmaShape
    slots: tuple[int, ...]  # of the registers of its sums
    groups: Indices  # warpgroups, by their first thread
    a: SharedTile | RegisterMatrix
    b: SharedTile
    adds: Flags  # for each warpgroup: whether it adds to the registers
    sign: int
    batch: Indices  # the commit group, for each warpgroup
    core: Added  # sums.added, or a faster function with the same bits


class Products:
    """The products under way of a chunk of blocks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._under_way: list[WarpgroupProduct] = []
        self._committed = np.zeros(machine.threads, np.int64)  # of a warpgroup, at its first thread
        self._fenced = np.zeros(machine.threads, bool)
        self._readers = PieceReaders(machine)
        self._latest: dict[tuple[int, ...], tuple[Indices, list[Array]]] = {}  # the registers after the last wait
        machine.at_end.append(self._forgotten)

    def fence(self, groups: Indices) -> None:
        """wgmma.fence."""
        self._fenced[groups] = True

    def _rewritten(self, product: WarpgroupProduct) -> Flags:
        """The warpgroups that may have written the registers of a product since they last waited for them."""
        if any(earlier.slots == product.slots for earlier in self._under_way):
            return np.zeros(len(product.groups), bool)
        latest = self._latest.get(product.slots)
        if latest is None:
            return np.ones(len(product.groups), bool)
        rewritten, lanes = np.zeros(len(product.groups), bool), lanes_of(product.groups)
        for slot, before in zip(product.slots, latest[1], strict=True):
            now = self._machine.registers[slot]
            if now is not before:
                bits = np.asarray(self._machine.spread(now)[lanes]).view("u4") != before[lanes].view("u4")
                rewritten |= bits.any(axis=1)
        return rewritten & product.adds | ~np.isin(product.groups, latest[0])

    def add(self, product: WarpgroupProduct) -> None:
        """Start a product; it belongs to the group that its warpgroup commits next."""
        bad = ~self._fenced[product.groups]
        if bad.any() and self._rewritten(product)[bad].any():
            what = "multiplies without a wgmma.fence after a write to its registers: put one before the first product"
            report_misuse(self._machine, product.index, product.groups[bad], what)
            self._fenced[product.groups] = True
        of_a = product.a.slots if isinstance(product.a, RegisterMatrix) else ()
        self.used(dict.fromkeys((*product.slots, *of_a), product.index), None, product)
        self._under_way.append(replace(product, batch=self._committed[product.groups]))
        for places in self._reads(product):
            self._readers.begin(places)
        self._machine.observers.multiplied(self._machine, product.index, product.groups)

    def used(self, uses: Mapping[int, int], mask: Mask, by: WarpgroupProduct | None = None) -> None:
        """Report the first use of a register, by slot, that a product under way will write; a product may add to it."""
        for product in self._under_way:
            places = [uses[slot] for slot in product.slots if slot in uses]
            if not places or (by is not None and {*by.slots} & {*product.slots}):
                continue
            some: Any = np.ones(len(product.groups), bool)
            if by is not None:
                some = np.isin(product.groups, by.groups)
            elif mask is not None:
                some = np.any(mask[lanes_of(product.groups)], axis=1)
            if some.any():
                line = self._machine.kernel.instructions[product.index].line
                what = (
                    f"uses a register that the wgmma at {line} may still write: {self._way_out(product, some)} before"
                )
                report_misuse(self._machine, min(places), product.groups[some], what)

    def _forgotten(self) -> None:
        """Report products that nobody has waited for when all threads have ended."""
        for product in self._under_way:
            way_out = self._way_out(product, np.ones(len(product.groups), bool))
            what = f"starts a product that nobody waits for, so that its sums reach no register: {way_out} after it"
            report_misuse(self._machine, product.index, product.groups, what)

    def _way_out(self, product: WarpgroupProduct, some: Flags) -> str:
        if (product.batch == self._committed[product.groups])[some].any():
            return "wgmma.commit_group, which no thread executed since the product, and then wgmma.wait_group 0"
        return "wgmma.wait_group, with a smaller number where there is one,"

    def reader(self, places: Indices) -> tuple[int, int] | None:
        """Return which of these bytes of the chunk's shared memory a product under way reads, and its instruction."""
        under_way = ((product.index, self._reads(product)) for product in self._under_way)
        return self._readers.reader(places, under_way) if self._under_way else None

    def _reads(self, product: WarpgroupProduct) -> list[Indices]:
        """Return the pieces of the chunk's shared memory that a product reads, for each operand in shared memory."""
        machine, sides = self._machine, (product.a, product.b)
        blocks = product.groups // machine.block_threads
        return [side.places(machine, blocks) for side in sides if isinstance(side, SharedTile)]

    def commit(self, groups: Indices) -> None:
        """wgmma.commit_group."""
        self._committed[groups] += 1

    def wait(self, index: int, groups: Indices, pending: int) -> None:
        """wgmma.wait_group: all groups except the latest ones reach their registers."""
        ready: list[WarpgroupProduct] = []
        waits = np.zeros(self._machine.threads, bool)
        waits[groups] = True

        def completes(product: WarpgroupProduct) -> Flags:
            return (product.batch < self._committed[product.groups] - pending) & waits[product.groups]

        self._under_way = landed(self._under_way, completes, ready.append)
        while ready:
            first, run = ready[0], [ready.pop(0)]
            while ready and _joins(first, ready[0], len(run)):
                run.append(ready.pop(0))
            self._finish(run)
        for group in np.unique(groups % self._machine.block_threads):
            some = groups[groups % self._machine.block_threads == group]
            self._machine.observers.warpgroup(self._machine, index, some)
        self._fenced[groups] = False

    def _finish(self, run: list[WarpgroupProduct]) -> None:
        """Compute several instructions that add to the same registers as one product."""
        first = run[0]
        sides: tuple[list[Array], list[Array]] = ([], [])
        for product in run:
            self._still_there(product)
            for places in self._reads(product):
                self._readers.end(places)
            kinds = product.shape.a, product.shape.b
            for side, kind, decoded in zip((product.a, product.b), kinds, sides, strict=True):
                decoded.append(DECODED[kind](self._words(product, side)))
        a, b = (decoded[0] if len(run) == 1 else np.concatenate(decoded, axis=2) for decoded in sides)
        self._write(first, multiplied(a, b) if first.shape.sums == "s32" else self._rounded(first, a, b))

    def _still_there(self, product: WarpgroupProduct) -> None:
        """Report registers of A whose bits have changed since the product began."""
        machine, lanes = self._machine, lanes_of(product.groups)
        if not isinstance(product.a, RegisterMatrix):
            return
        for slot, began in zip(product.a.slots, product.a.registers, strict=True):
            now = np.asarray(machine.spread(machine.registers[slot])[lanes])
            bad = (now.view("u4") != began.view("u4")).any(axis=1)
            if bad.any():
                what = (
                    "writes a register of A before the product that reads it has ended: put a wgmma.wait_group between"
                )
                report_misuse(machine, product.index, product.groups[bad], what)
                return

    def _words(self, product: WarpgroupProduct, side: SharedTile | RegisterMatrix) -> Array:
        """The words of A or B; report what is read of shared memory."""
        if isinstance(side, RegisterMatrix):
            return side.words()
        machine, groups = self._machine, product.groups
        places = side.read(machine, product.index, groups, groups // machine.block_threads)
        machine.unit(Bulk).compare(product.index, groups, places, side.swizzles())
        return side.words(machine, places)

    def _rounded(self, product: WarpgroupProduct, a: Array, b: Array) -> Array:
        """Return the registers' sums after one or several instructions that add to them."""
        shape, lanes = product.shape, lanes_of(product.groups)
        words = np.stack(
            [np.asarray(self._machine.spread(self._machine.registers[slot])[lanes]) for slot in product.slots]
        )
        if shape.sums == "f16":
            before = np.moveaxis(words.view("f2").reshape(*words.shape, 2), 3, 1).astype("f4")
        else:
            before = words.view("f4")
        parts = before.reshape(shape.n // 8, 2, 2, -1, 4, 8, 4).transpose(3, 4, 1, 5, 0, 6, 2)
        start = np.where(product.adds[:, None, None], parts.reshape(-1, ROWS, shape.n), np.float32(0))
        return chained(product.core, start, a if product.sign > 0 else -a, b, shape.rule)

    def _write(self, product: WarpgroupProduct, sums: Array) -> None:
        """Put sums into the registers of all threads of the warpgroups; those of integers are added there."""
        machine, lanes = self._machine, lanes_of(product.groups)
        n = product.shape.n
        # In D (warpgroup, warp, half, row, j, lane, pair) the registers of a lane are indexed by j, half, pair.
        parts = sums.reshape(-1, 4, 2, 8, n // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        parts = parts.reshape(n // 2, -1, THREADS)
        registers = [machine.registers[slot] for slot in product.slots]
        whole = np.stack([machine.spread(np.asarray(register)) for register in registers]).view("u4")
        if product.shape.sums == "f16":
            pairs = parts.reshape(-1, 2, *parts.shape[1:]).astype("f2").view("u2").astype("u4")
            whole[:, lanes] = pairs[:, 0] | pairs[:, 1] << 16
        elif product.shape.sums == "f32":
            whole[:, lanes] = parts.view("u4")
        else:
            adds, saturates = product.adds[:, None], product.shape.saturates
            whole[:, lanes] = added_whole(parts, whole[:, lanes], adds, saturates)
        for slot, row, register in zip(product.slots, whole, registers, strict=True):
            machine.registers[slot] = row.view(register.dtype)
        self._latest[product.slots] = product.groups, [machine.registers[slot] for slot in product.slots]


def added_whole(sums: Array, before: Array, adds: Flags, saturates: bool) -> Array:
    """Return the words of sums in s32, added where `adds` to the ones before."""
    whole = sums.astype("i8") + np.where(adds, before.view("i4"), 0)
    if saturates:
        whole = np.clip(whole, -(1 << 31), (1 << 31) - 1)
    return whole.astype("i4").view("u4")


def multiplied(a: Array, b: Array) -> Array:
    """Multiply A (any, m, k) by the transpose of B (any, n, k), in parts that keep BLAS on one thread.

    OpenBLAS starts threads for products above 2**18 multiply-adds; next to other work they made 8 products of
    64 x 128 x 64 take 200 ms instead of 2.
    """
    (_, n, k), rows = b.shape, a.shape[1]
    while rows > 1 and rows * n * k > 1 << 18:
        rows //= 2
    return (a.reshape(len(a), -1, rows, k) @ b.swapaxes(1, 2)[:, None]).reshape(len(a), a.shape[1], n)


def _joins(first: WarpgroupProduct, other: WarpgroupProduct, count: int) -> bool:
    """Whether a product adds to the result of another, so that both can be computed as one."""
    return (
        other.slots == first.slots
        and other.shape == first.shape
        and other.sign == first.sign
        and first.shape.sums != "f16"
        and not (first.shape.saturates or (first.shape.sums == "s32" and (count + 1) * DEPTH > EXACT))
        and bool(other.adds.all())
        and np.array_equal(other.groups, first.groups)
    )


def lanes_of(groups: Indices) -> Indices:
    """Return the threads of each warpgroup: (warpgroups, 128)."""
    return groups[:, None] + np.arange(THREADS)
