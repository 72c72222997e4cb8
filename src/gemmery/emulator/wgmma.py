"""Products of a warpgroup: wgmma, whose operands lie in shared memory and whose sums appear when they are waited for.

PTX ISA 9.0, section 9.7.15. Elements and products are exact and sums of f32, as in ops/mma.py; the instructions of one
wait are one product with a longer k. A warpgroup is four warps of a block that follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator.lower import Lowering, Step, refused
from gemmery.emulator.op import Mask
from gemmery.emulator.ops.mma import DECODED
from gemmery.emulator.ptx import Immediate, Instruction, Register, Vector

if TYPE_CHECKING:
    from gemmery.emulator.simt import Machine

THREADS, ROWS, DEPTH = 128, 64, 32  # of a warpgroup; rows of its product; bytes of k of one instruction
PIECE = 16
EXACT = 256  # products of bytes whose sum f32 still holds: 256 * 255 * 255 < 2**24
Array = NDArray[Any]
Indices = NDArray[np.int64]

_SPELLED = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)(\.satfinite)?")
_SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_SUMS = {
    ("f16", "f16"): ("f32", "f16"),
    ("bf16", "bf16"): ("f32",),
    ("tf32", "tf32"): ("f32",),
    **{(a, b): ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")},
    **{(a, b): ("s32",) for a in ("s8", "u8") for b in ("s8", "u8")},
}


@dataclass(frozen=True)
class Shape:
    """What an instruction multiplies."""

    n: int
    sums: str
    a: str
    b: str
    saturates: bool

    @property
    def registers(self) -> int:
        """Of each thread, for the sums."""
        return self.n // (4 if self.sums == "f16" else 2)

    @property
    def flops(self) -> int:
        """Of one of the four warps."""
        return 2 * 16 * self.n * DEPTH // _SIZES[self.a]


def shape(opcode: str) -> Shape | None:
    """The shape and the types of a wgmma.mma_async; None where there is no such instruction.

    >>> shape("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16").registers
    64
    """
    found = _SPELLED.fullmatch(opcode)
    if not found:
        return None
    n, k, sums, a, b = int(found[1]), int(found[2]), *found.group(3, 4, 5)
    if sums not in _SUMS.get((a, b), ()) or k * _SIZES[a] != DEPTH or (found[6] and sums != "s32"):
        return None
    sides = range(8, 257, 8) if sums != "s32" else (8, 24, *range(16, 257, 16))
    return Shape(n, sums, a, b, bool(found[6])) if n in sides else None


# ---- descriptors ----


@dataclass(frozen=True)
class Layout:
    """What a descriptor says of an operand, but for the start address."""

    rows: int  # m or n
    by_rows: bool  # M- or N-major: the rows are contiguous
    leading: int  # bytes
    stride: int
    base: int
    swizzle: int  # bytes


_MODES = (0, 128, 64, 32)


@lru_cache(maxsize=256)
def _pieces(layout: Layout, start: int) -> Indices:
    """Where the pieces of 16 bytes lie, from the multiple of 1024 before the start: (rows, 2), or (rows / 8, k)."""
    one = layout
    pitch = one.swizzle or PIECE  # from a row to the next, or along k
    if not one.by_rows:
        row, piece = np.arange(one.rows)[:, None], np.arange(2)
        across = piece * (one.leading if not one.swizzle else PIECE)
        offsets = row // 8 * one.stride + row % 8 * pitch + across
    else:
        piece, k = np.arange(one.rows // 8)[:, None], np.arange(16)
        many = pitch // PIECE
        groups, along = (one.leading, one.stride) if one.swizzle else (one.stride, one.leading)
        offsets = piece // many * groups + piece % many * PIECE + k // 8 * along + k % 8 * pitch
    addresses = offsets + start
    if one.swizzle:
        addresses = addresses ^ (((addresses >> 7) - one.base & one.swizzle // 16 - 1) << 4)
    return addresses


@dataclass(frozen=True)
class Side:
    """An operand of all warpgroups that execute an instruction together."""

    type: str
    rows: int
    by_rows: bool = False
    descriptors: Indices | None = None  # one a warpgroup
    registers: tuple[Array, ...] = ()  # of A: four, each (warpgroups, 128)

    def only(self, some: NDArray[np.bool_]) -> Side:
        """Those warpgroups of it."""
        chosen = None if self.descriptors is None else self.descriptors[some]
        return replace(self, descriptors=chosen, registers=tuple(one[some] for one in self.registers))

    def pieces(self) -> Indices:
        """Offsets in shared memory of the pieces of 16 bytes: (warpgroups, ...)."""
        assert self.descriptors is not None
        every = []
        for descriptor in np.unique(self.descriptors & ~0x3FFF).tolist():
            layout = Layout(
                self.rows,
                self.by_rows,
                (descriptor >> 16 & 0x3FFF) << 4,
                (descriptor >> 32 & 0x3FFF) << 4,
                descriptor >> 49 & 7,
                _MODES[descriptor >> 62 & 3],
            )
            every.append((descriptor, layout))
        starts = (self.descriptors & 0x3FFF) << 4
        rough = starts & ~1023
        found: Indices | None = None
        for descriptor, layout in every:
            for fine in np.unique(starts & 1023).tolist():
                pattern = _pieces(layout, fine)
                these = (self.descriptors & ~0x3FFF == descriptor) & (starts & 1023 == fine)
                if found is None:
                    found = np.empty((len(starts), *pattern.shape), np.int64)
                found[these] = rough[these, None, None] + pattern
        assert found is not None
        return found

    def words(self, shared: Array, pieces: Indices | None) -> Array:
        """Its bytes by rows as words: (warpgroups, rows, 8)."""
        if pieces is None:
            return _from_registers(self.registers)
        found = shared.take(pieces)
        if self.by_rows:
            count = len(found)
            found = found.view("u2").reshape(count, self.rows // 8, 16, 8).swapaxes(2, 3)
            return np.ascontiguousarray(found).reshape(count, self.rows, 16).view("u4")
        return found.view("u4")


def _from_registers(registers: tuple[Array, ...]) -> Array:
    """A of four registers: lane / 4 is the row, the second one 8 rows below, the third 16 bytes on."""
    held = np.stack(registers).reshape(2, 2, -1, 4, 8, 4)  # bytes, rows, warpgroup, warp, row, word
    return np.ascontiguousarray(held.transpose(2, 3, 1, 4, 0, 5)).reshape(-1, ROWS, 8)


# ---- products under way ----


@dataclass(frozen=True)
class Product:
    """One wgmma.mma_async of the warpgroups that executed it together."""

    index: int
    shape: Shape
    slots: tuple[int, ...]  # of the registers of its sums
    groups: Indices  # warpgroups, by their first thread
    a: Side
    b: Side
    adds: NDArray[np.bool_]  # of each warpgroup: whether it adds to what the registers hold
    sign: int
    batch: Indices  # which commit of each warpgroup it belongs to

    def only(self, some: NDArray[np.bool_]) -> Product:
        """Those warpgroups of it."""
        parts = (self.groups[some], self.a.only(some), self.b.only(some), self.adds[some], self.batch[some])
        return replace(self, groups=parts[0], a=parts[1], b=parts[2], adds=parts[3], batch=parts[4])


class Products:
    """The products under way of a chunk of blocks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._under_way: list[Product] = []
        self._committed = np.zeros(machine.threads, np.int64)  # of a warpgroup, at its first thread
        self._fenced = np.zeros(machine.threads, bool)
        self._left: dict[tuple[int, ...], tuple[Indices, list[Array]]] = {}  # what the last wait put into registers

    def fence(self, groups: Indices) -> None:
        """wgmma.fence."""
        self._fenced[groups] = True

    def fenced(self, product: Product) -> None:
        """Tell of registers that others may have written since the last fence."""
        bad = ~self._fenced[product.groups]
        if bad.any() and (self._changed(product) | ~self._known(product))[bad].any():
            what = "multiplies without a wgmma.fence after its registers were written: put one before the first product"
            self._machine.misuse(product.index, product.groups[bad], what)
            self._fenced[product.groups] = True

    def _known(self, product: Product) -> NDArray[np.bool_]:
        if any(one.slots == product.slots for one in self._under_way):
            return np.ones(len(product.groups), bool)
        left = self._left.get(product.slots)
        return np.zeros(len(product.groups), bool) if left is None else np.isin(product.groups, left[0])

    def _changed(self, product: Product) -> NDArray[np.bool_]:
        changed = np.zeros(len(product.groups), bool)
        left = self._left.get(product.slots)
        if left is None or any(one.slots == product.slots for one in self._under_way):
            return changed
        lanes = _lanes(product.groups)
        for slot, before in zip(product.slots, left[1], strict=True):
            now = self._machine.registers[slot]
            if now is not before:
                bits = np.asarray(self._machine.spread(now)[lanes]).view("u4") != before[lanes].view("u4")
                changed |= bits.any(axis=1)
        return changed & product.adds

    def add(self, product: Product) -> None:
        """Begin; it belongs to the group that its warpgroup commits next."""
        self.fenced(product)
        self._under_way.append(replace(product, batch=self._committed[product.groups]))

    def commit(self, groups: Indices) -> None:
        """wgmma.commit_group."""
        self._committed[groups] += 1

    def wait(self, index: int, groups: Indices, pending: int) -> None:
        """wgmma.wait_group: all but the latest groups are in their registers."""
        ready, left = [], []
        waits = np.zeros(self._machine.threads, bool)
        waits[groups] = True
        for product in self._under_way:
            now = (product.batch < self._committed[product.groups] - pending) & waits[product.groups]
            if now.all():
                ready.append(product)
            else:
                left.append(product if not now.any() else product.only(~now))
                if now.any():
                    ready.append(product.only(now))
        self._under_way = left
        while ready:
            first, run = ready[0], [ready.pop(0)]
            while ready and _joins(first, ready[0], len(run)):
                run.append(ready.pop(0))
            self._finish(run)
        for group in np.unique(groups % self._machine.block_threads):
            some = groups[groups % self._machine.block_threads == group]
            for observer in self._machine.observers:
                observer.warpgroup(self._machine, index, some)
        self._fenced[groups] = False

    def _finish(self, run: list[Product]) -> None:
        """One product of several instructions that add to the same registers."""
        machine, first = self._machine, run[0]
        base = (first.groups // machine.block_threads * machine.shared.stride)[:, None, None]
        shared = machine.shared.view("c16", 1)
        sides: tuple[list[Array], list[Array]] = ([], [])
        for product in run:
            for side, decoded in zip((product.a, product.b), sides, strict=True):
                pieces = None
                if side.descriptors is not None:
                    pieces = side.pieces()
                    pieces = self._read(product, pieces, base)
                decoded.append(DECODED[side.type](side.words(shared, pieces)))
        a, b = (decoded[0] if len(run) == 1 else np.concatenate(decoded, axis=2) for decoded in sides)
        sums = _multiplied(a, b)
        if first.sign < 0:
            sums = -sums
        self._write(first, sums)

    def _read(self, product: Product, offsets: Indices, base: Indices) -> Indices:
        """Tell what is read, and give it as pieces of the chunk's shared memory; what is outside reads as the first."""
        machine = self._machine
        bad = offsets + PIECE > machine.shared_bytes
        if bad.any():
            threads = product.groups[bad.any(axis=(1, 2))]
            far = int(offsets.max()) + PIECE
            what = f"multiplies a matrix that ends at byte {far} of shared memory: a block has {machine.shared_bytes}"
            machine.misuse(product.index, threads, what)
            offsets = np.where(bad, 0, offsets)
        for observer in machine.observers:
            observer.bulk(machine, product.index, product.groups, offsets.reshape(len(offsets), -1), "reads")
        places: Indices = (offsets + base) // PIECE
        return places

    def _write(self, product: Product, sums: Array) -> None:
        """Add to the registers of all threads of the warpgroups."""
        machine, lanes = self._machine, _lanes(product.groups)
        n = product.shape.n
        # Of D (warpgroup, warp, half, row, j, lane, pair) a lane's registers are j, half, pair.
        parts = sums.reshape(-1, 4, 2, 8, n // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        parts = parts.reshape(n // 2, -1, THREADS)
        held = [machine.registers[slot] for slot in product.slots]
        kind = "f4" if product.shape.sums == "f32" else "u4"
        whole = np.stack([machine.spread(np.asarray(one)) for one in held]).view(kind)
        before = whole[:, lanes]
        whole[:, lanes] = _ADDED[product.shape.sums](product, parts, before, product.adds[:, None])
        for slot, row, one in zip(product.slots, whole, held, strict=True):
            machine.registers[slot] = row.view(one.dtype)
        self._left[product.slots] = product.groups, [machine.registers[slot] for slot in product.slots]


def _multiplied(a: Array, b: Array) -> Array:
    """A (warpgroups, 64, k) by the transpose of B (warpgroups, n, k), in so many rows at once as BLAS does alone.

    OpenBLAS starts threads for products above 2**18 multiply-adds; beside other work they made 8 products of
    64 x 128 x 64 take 200 ms, not 2.
    """
    (_, n, k), rows = b.shape, ROWS
    while rows > 1 and rows * n * k > 1 << 18:
        rows //= 2
    return (a.reshape(len(a), -1, rows, k) @ b.swapaxes(1, 2)[:, None]).reshape(len(a), ROWS, n)


def _joins(first: Product, other: Product, count: int) -> bool:
    """Does a product add to what another leaves, so that both are one."""
    return (
        other.slots == first.slots
        and other.shape == first.shape
        and other.sign == first.sign
        and first.shape.sums != "f16"
        and not (first.shape.saturates or (first.shape.sums == "s32" and (count + 1) * DEPTH > EXACT))
        and bool(other.adds.all())
        and np.array_equal(other.groups, first.groups)
    )


def _f32(product: Product, sums: Array, before: Array, adds: Array) -> Array:
    return sums if not adds.any() else np.where(adds, before + sums, sums)


def _f16(product: Product, sums: Array, before: Array, adds: Array) -> Array:
    pairs = sums.reshape(-1, 2, *sums.shape[1:])
    held = np.stack([before & 0xFFFF, before >> 16], axis=1).astype("u2").view("f2").astype("f4")
    bits = np.where(adds, held + pairs, pairs).astype("f2").view("u2").astype("u4")
    packed: Array = bits[:, 0] | bits[:, 1] << 16
    return packed


def _s32(product: Product, sums: Array, before: Array, adds: Array) -> Array:
    whole = sums.astype("i8") + np.where(adds, before.view("i4"), 0)
    if product.shape.saturates:
        whole = np.clip(whole, -(1 << 31), (1 << 31) - 1)
    return whole.astype("i4").view("u4")


_ADDED: dict[str, Callable[[Product, Array, Array, Array], Array]] = {"f32": _f32, "f16": _f16, "s32": _s32}


def _lanes(groups: Indices) -> Indices:
    """The threads of each warpgroup: (warpgroups, 128)."""
    return groups[:, None] + np.arange(THREADS)


# ---- instructions ----


def handler(lowering: Lowering, index: int) -> Step:
    """wgmma.*"""
    instruction = lowering.kernel.instructions[index]
    opcode = instruction.opcode
    if opcode == "wgmma.fence.sync.aligned":
        return lambda machine, mask: machine.products.fence(_groups(machine, index, mask))
    if opcode == "wgmma.commit_group.sync.aligned":
        return lambda machine, mask: machine.products.commit(_groups(machine, index, mask))
    if opcode == "wgmma.wait_group.sync.aligned":
        pending = instruction.operands[0]
        if not isinstance(pending, Immediate):
            raise refused(instruction)
        return lambda machine, mask: machine.products.wait(index, _groups(machine, index, mask), pending.bits)
    found = shape(opcode)
    if found is None:
        raise refused(instruction)
    return _multiply(lowering, instruction, index, found)


def _multiply(lowering: Lowering, instruction: Instruction, index: int, shape: Shape) -> Step:
    sums, a, b, *rest = instruction.operands
    if not isinstance(sums, Vector) or len(sums.elements) != shape.registers:
        raise refused(instruction, f"{shape.registers} registers of sums are needed:")
    kind = shape.sums if shape.sums != "f16" else "b32"
    slots = []
    for one in sums.elements:
        if not isinstance(one, Register):
            raise refused(instruction)
        lowering.write(one, kind, instruction)
        slots.append(lowering.slots[one.name])
    adds = lowering.read(rest[0], "pred", instruction) if rest else lambda _: np.True_
    constants = [one.bits if isinstance(one, Immediate) else None for one in rest[1:]]
    in_registers = isinstance(a, Vector)
    signs, turned = _constants(instruction, shape, constants, in_registers)
    reads = [lowering.read(one, "b32", instruction) for one in a.elements] if isinstance(a, Vector) else []
    read_a = None if in_registers else lowering.read(a, "s64", instruction)
    read_b = lowering.read(b, "s64", instruction)
    early = _early(lowering, index, sums)

    def step(machine: Machine, mask: Mask) -> None:
        groups = _groups(machine, index, mask)
        if not len(groups):
            return
        held = machine.registers
        lanes = _lanes(groups)
        side_a = Side(shape.a, ROWS, turned[0], registers=tuple(machine.spread(read(held))[lanes] for read in reads))
        if read_a is not None:
            side_a = Side(shape.a, ROWS, turned[0], machine.spread(read_a(held))[groups])
        side_b = Side(shape.b, shape.n, turned[1], machine.spread(read_b(held))[groups])
        added = np.asarray(machine.spread(adds(held))[groups])
        product = Product(index, shape, tuple(slots), groups, side_a, side_b, added, signs, np.zeros(0, np.int64))
        machine.products.add(product)
        if early is not None:
            what = f"uses a register that the wgmma at {instruction.line} may still write: wgmma.wait_group before"
            machine.misuse(early, groups, what)

    return step


def _early(lowering: Lowering, index: int, sums: Vector) -> int | None:
    """The instruction that uses a register of the sums before any wait, as far as they follow without a branch."""
    kernel = lowering.kernel
    labels = frozenset(kernel.labels.values())
    for place in range(index + 1, len(kernel.instructions)):
        one = kernel.instructions[place]
        if place in labels or one.opcode.startswith(("wgmma.wait_group", "bra", "brx", "ret", "exit")):
            return None
        if one.opcode.startswith("wgmma") and one.operands[:1] == (sums,):
            continue
        if not frozenset(sums.elements).isdisjoint(lowering.flat(one.operands)):
            return place
    return None


def _constants(
    instruction: Instruction, shape: Shape, given: list[int | None], in_registers: bool
) -> tuple[int, tuple[bool, bool]]:
    """The sign of the product, and which operands are contiguous along their rows."""
    signed = 2 if shape.sums != "s32" else 0
    turning = (1 if in_registers else 2) if shape.a in ("f16", "bf16") else 0
    if len(given) != signed + turning:
        raise refused(instruction, f"{len(given)} constants behind the predicate:")
    sign = 1
    for one in given[:signed]:
        if one not in (1, -1, 0xFFFFFFFF):
            raise refused(instruction, "a scale other than 1 and -1:")
        sign *= 1 if one == 1 else -1
    turned = [one == 1 for one in given[signed:]]
    while len(turned) < 2:
        turned.insert(0, False)
    return sign, (turned[0], turned[1])


def _groups(machine: Machine, index: int, mask: Mask) -> Indices:
    """The first threads of the warpgroups that execute an instruction."""
    each, own = machine.block_threads, machine.launch.block_threads
    whole = each // THREADS
    starts = (np.arange(machine.blocks)[:, None] * each + np.arange(whole) * THREADS).ravel()
    active = np.ones(machine.threads, bool) if mask is None else mask
    complete = active[_lanes(starts)].all(axis=1) if whole else np.zeros(0, bool)
    if int(complete.sum()) * THREADS != int(np.count_nonzero(active)) or own % 32:
        apart = active.copy()
        apart[_lanes(starts[complete])] = False
        what = "executes an instruction of a warpgroup without the rest of it: all 128 threads take part"
        machine.misuse(index, np.flatnonzero(apart), what)
    return starts[complete]


def registers_of(lowering: Lowering, index: int) -> Step:
    """setmaxnreg: a thread's registers are not counted here; a number that the hardware refuses is refused."""
    instruction = lowering.kernel.instructions[index]
    count = instruction.operands[0]
    known = instruction.opcode in ("setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32")
    if not known or not isinstance(count, Immediate) or count.bits % 8 or not 24 <= count.bits <= 256:
        raise refused(instruction, "a number of registers that is no multiple of 8 from 24 to 256:")
    return lambda machine, mask: None
