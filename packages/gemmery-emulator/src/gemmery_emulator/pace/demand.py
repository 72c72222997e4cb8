"""What one PTX instruction asks of a multiprocessor: issue slots, a pipe, the registers that it reads and writes.

ptxas makes one machine instruction of most PTX instructions. It makes none of moves, of parameters, which are operands
from the constant bank, and of conversions between address spaces; two of whole numbers of 64 bits; many of divisions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemmery.dtypes import TENSOR_FLOAT8
from gemmery_emulator.hopper import products
from gemmery_emulator.instructions import find, written
from gemmery_emulator.op import Op
from gemmery_emulator.ptx import Instruction, Opcode, names_of

# Instructions of warps: issued, held by their operands, by pipe; operations of tensor cores, by type, of the smallest
# shape of f64, and all others of warps; wavefronts of shared memory, lines and sectors of L1; bytes to and from L2, and
# to other blocks of a cluster.
KINDS = (
    "issue", "operands", "operands_f64", "fma", "half", "integer", "multiply", "f64", "special", "convert", "shuffle",
    "access", "barrier", "tensor", "tensor_tf32", "tensor_8", "tensor_f64", "small_f64", "warp_tensor",
    "wavefronts", "lines", "sectors", "l2", "bulk", "stored", "atomics", "remote",
)  # fmt: skip
PLACE = {kind: place for place, kind in enumerate(KINDS)}

_WIDE = re.compile(r"[usb]64")
_NOTHING = frozenset({"mov", "cvta", "pragma", "nanosleep", "ret", "exit", "fence", "membar", "prefetch"})
_CONTROL = frozenset({"bar", "barrier", "mbarrier", "bra", "vote", "match", "redux", "activemask", "cp", "elect"})
_ACCESSES = frozenset({"ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix"})
_FUNCTIONS = frozenset({"sin", "cos", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh"})
_SUMS = frozenset({"fma", "mul", "mad", "add", "sub", "neg", "abs"})
_TENSOR = {"f64": "tensor_f64", "tf32": "tensor_tf32", **dict.fromkeys((*TENSOR_FLOAT8, "s8", "u8"), "tensor_8")}
_OPERANDS = {"fma": "operands", "f64": "operands_f64"}  # of multiply-adds
_DIVISION = {False: 16, True: 40}  # instructions of one in 32 bits, and in 64
_ROLES = {
    "cp.async": "copy", "cp.async.commit_group": "copy_commit", "cp.async.wait_group": "copy_wait",
    "cp.async.wait_all": "copy_wait", "cp.async.bulk.commit_group": "bulk_commit",
    "cp.async.bulk.wait_group": "bulk_wait", "wgmma.commit_group": "wgmma_commit", "wgmma.wait_group": "wgmma_wait",
    "wgmma.mma_async": "wgmma", "barrier.cluster.wait": "phase", "mbarrier.try_wait": "phase",
    "mbarrier.try_wait.parity": "phase", "mbarrier.test_wait": "phase", "mbarrier.test_wait.parity": "phase",
}  # fmt: skip


@dataclass(frozen=True)
class WarpDemand:
    """What a warp asks for when it executes an instruction."""

    amounts: tuple[tuple[int, float], ...]  # (place in KINDS, amount)
    reads: tuple[str, ...]  # registers
    writes: tuple[str, ...]
    latency: str  # of its result: a field of Latencies, "global" where the caches decide, "none"
    waits: int = -1  # number of groups of copies or products that may be under way afterwards; -1 does not wait
    role: str = ""  # of copies, products and barriers: what _ROLES says, or "barrier"


def demand_of(instruction: Instruction) -> WarpDemand:
    """Return what an instruction asks of a multiprocessor."""
    opcode = instruction.opcode
    pipe, slots, latency = _pipe(opcode)
    amounts: dict[str, float] = {}
    if slots:
        amounts["issue"] = slots
    if pipe and slots:
        amounts[pipe] = slots
    if pipe == "integer" and slots == 2:  # the multiplier may add the upper half
        amounts["integer"] = amounts["multiply"] = 1
    if pipe in _OPERANDS and len(instruction.operands) == 4:
        amounts[_OPERANDS[pipe]] = 1
    is_barrier = opcode.family in ("bar", "barrier") and not opcode.name.startswith("bar.warp")
    if is_barrier:
        amounts["barrier"] = 1
    if latency == "tensor":
        unit, operations = _product(opcode)
        amounts[unit] = operations
        if "m8n8k4" in opcode.modifiers and unit == "tensor_f64":
            amounts["small_f64"] = operations
        elif opcode.family != "wgmma" and unit != "tensor_f64":
            amounts["warp_tensor"] = operations
    role = "barrier" if is_barrier else _role(opcode)
    reads, writes = (
        ((), ()) if role == "wgmma" else _operands(instruction)
    )  # whose sums are there when it is waited for
    waits = -1
    if role.endswith("_wait"):
        waits = 0 if opcode.name == "cp.async.wait_all" else int(instruction.text.rstrip("; ").split()[-1])
    return WarpDemand(tuple((PLACE[kind], each) for kind, each in amounts.items()), reads, writes, latency, waits, role)


def _role(opcode: Opcode) -> str:
    """The role of an instruction."""
    if opcode.family in ("st", "atom", "red", "stmatrix"):
        return "store"
    names = [opcode.name, opcode.spelling]
    return next((_ROLES[name] for name in names if name in _ROLES), "")


def _operands(instruction: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The registers that an instruction reads, and those that it writes."""
    writes = tuple(register.name for register in written(instruction))
    only_written = writes and instruction.opcode.family != "wgmma"  # wgmma adds to its registers
    operands = instruction.operands[1:] if only_written else instruction.operands
    reads = set(names_of(operands))
    if instruction.guard is not None:
        reads.add(instruction.guard.name)
    return tuple(reads), writes


def _pipe(opcode: Opcode) -> tuple[str, float, str]:
    """The pipe of an instruction, its issue slots, and the kind of its latency."""
    family, types = opcode.family, opcode.types
    wide, double = any(map(_WIDE.match, types)), "f64" in types
    if family in ("mma", "wmma", "wgmma"):
        return _matrix(opcode)
    if opcode.space == "param" or family in _NOTHING:
        return "", 0, "none"
    if family in _ACCESSES or opcode.name == "cp.async":
        space = "shared" if "shared" in opcode.space or "matrix" in family else "global"
        return "access", 1, space if family in ("ld", "ldu", "ldmatrix", "atom") else "none"
    if family == "shfl":
        return "shuffle", 1, "shared"
    if family in _CONTROL or family == "griddepcontrol":
        return "", 1, "none"
    if family == "cvt":
        return _conversion(types)
    if family in _FUNCTIONS:
        return "special", 8 if double else 1 if "approx" in opcode.modifiers else 4, "special"
    if family in ("div", "rem"):
        return "integer", 3 if "approx" in opcode.modifiers else _DIVISION[wide or double], "special"
    if double:
        return "f64", 1, "f64"
    if family in _SUMS and types and types[-1] in ("f32", "f16", "bf16", "f16x2", "bf16x2"):
        return "fma" if types[-1] == "f32" else "half", 1, "fma"
    if family in ("mad", "mul"):
        return "multiply", 4 if wide and "wide" not in opcode.modifiers else 1, "multiply"
    return "integer", 2 if wide else 1, "integer"


def _matrix(opcode: Opcode) -> tuple[str, float, str]:
    entry = find(opcode)
    if products.shape_of(opcode) or (isinstance(entry, Op) and entry.flops):
        return "", 1, "tensor"
    if "load" in opcode.name or "store" in opcode.name:
        return "access", float(entry.issues), "shared" if "load" in opcode.name else "none"
    return "", 1, "none"


def _conversion(types: tuple[str, ...]) -> tuple[str, float, str]:
    """Of whole numbers only a sign is extended; f16 and bf16 become f32 by an addition or a shift."""
    if not any(each.startswith(("f", "bf", "e", "tf")) for each in types):
        extends = len(types) == 2 and _WIDE.match(types[0]) and types[1].startswith("s")
        return "integer", 1 if extends else 0, "integer"
    if "f64" in types:
        return "convert", 4, "special"
    whole = any(each.startswith(("s", "u", "b")) and not each.startswith("bf") for each in types)
    return ("convert", 1, "special") if whole else ("integer", 1, "integer")


def _product(opcode: Opcode) -> tuple[str, float]:
    """The tensor unit of a matrix instruction, and the operations of one warp."""
    product = products.shape_of(opcode)
    if product is not None:
        return _TENSOR.get(product.a, "tensor"), float(product.flops)
    entry = find(opcode)
    operations = float(entry.flops) if isinstance(entry, Op) else 0.0
    return _TENSOR.get(opcode.types[1] if len(opcode.types) > 2 else opcode.types[-1], "tensor"), operations
