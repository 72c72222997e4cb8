"""Machine code of a compiled kernel: its instructions, its main loop, and counts by kind.

Reference: NVIDIA, "CUDA Binary Utilities": nvdisasm and the instruction sets. Counts are static: how many instructions
the code has, not how many a run executes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from gemmery.errors import DeviceError

MISSING = "SASS needs nvdisasm: pip install nvidia-cuda-nvdisasm, or put the CUDA toolkit's on the PATH"
_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?);", re.MULTILINE)
_SECTION = re.compile(r"^//-+ \.text\.(\S+) +-+$", re.MULTILINE)
_LABEL = re.compile(r"^(\.\w+):", re.MULTILINE)
# Inline assembly has several instructions on a line, and braces and labels before one.
_PTX = re.compile(r"(?:[\s{}]|[$\w]+:(?!:))*(?:@!?%?\w+\s+)?([a-z][\w.:]*)")
_WIDTHS = {"U8": "8", "S8": "8", "U16": "16", "S16": "16", "64": "64", "128": "128", "256": "256"}
_SIZED = ("LDG", "LDS", "LDL", "STG", "STS", "STL", "LD", "ST", "LDGSTS")
Number = TypeVar("Number", int, float)

ORDER = ("MMA", "FMA", "LDG", "STG", "UBLKCP", "UTMA", "LDS", "STS", "LDL", "STL", "BAR", "SYNCS", "WARPGROUP", "SHFL")


@dataclass(frozen=True)
class SassInstruction:
    """One instruction: its address, opcode and operands."""

    address: int
    opcode: str  # "LDG.E.128"
    operands: str
    target: int = -1  # address that a branch to a label goes to


def disassembled(cubin: bytes, entry: str) -> str:
    """The SASS of one kernel in machine code, as nvdisasm writes it.

    Raises DeviceError when there is no nvdisasm, or it does not know the architecture.
    """
    tool = nvdisasm()
    if not tool:
        raise DeviceError(MISSING)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"nvdisasm failed: {done.stderr.strip()}; a newer one knows newer architectures")
    return section(done.stdout, entry)


def section(text: str, entry: str) -> str:
    """The part of nvdisasm's output that is one kernel's."""
    starts = [(head.start(), head[1]) for head in _SECTION.finditer(text)] + [(len(text), "")]
    for (start, name), (end, _) in pairwise(starts):
        if name == entry:
            return text[start:end].rstrip() + "\n"
    raise DeviceError(f"nvdisasm shows no kernel {entry}: {', '.join(name for _, name in starts[:-1])}")


def instructions(text: str) -> tuple[SassInstruction, ...]:
    """The instructions of one kernel's SASS, in order."""
    ends = ((label[1], _LINE.search(text, label.end())) for label in _LABEL.finditer(text))
    labels = {label: int(line[1], 16) if line else -1 for label, line in ends}
    code = []
    for line in _LINE.finditer(text):
        words = line[2].split(None, 1)
        if words[0].startswith("@"):  # a predicate
            words = words[1].split(None, 1)
        operands = words[1].strip() if len(words) > 1 else ""
        label = re.search(r"`\((\.\w+)\)", operands)
        target = labels.get(label[1], -1) if label and words[0].startswith("BRA") else -1
        code.append(SassInstruction(int(line[1], 16), words[0], operands, target))
    return tuple(code)


def main_loop(code: Sequence[SassInstruction]) -> tuple[SassInstruction, ...]:
    """The innermost loop that multiplies and adds; of several the one that does most, () when there is none.

    A loop is the code between a backward branch and its target.
    """
    loops = _loops(code)
    busy = {span: arithmetic(counts(body)) for span, body in loops.items()}
    inner = [
        span
        for span in loops
        if busy[span] and not any(busy[other] and other != span and _within(other, span) for other in loops)
    ]
    # A branch back from behind the kernel's end, where waits are repeated, spans what is no loop.
    whole = {span: not any(line.opcode == "EXIT" for line in loops[span]) for span in inner}
    return loops[max(inner, key=lambda span: (busy[span], whole[span], len(loops[span])))] if inner else ()


def loading_loop(code: Sequence[SassInstruction]) -> tuple[SassInstruction, ...]:
    """The smallest loop around the main loop that loads from global memory; () where the main loop does so itself."""
    main = main_loop(code)
    if not main or _loads_globally(main):
        return ()
    inner = (main[0].address, main[-1].address)
    around = [body for span, body in _loops(code).items() if span != inner and _within(inner, span)]
    return min((body for body in around if _loads_globally(body)), key=len, default=())


def step(code: Sequence[SassInstruction], multiplies: float) -> tuple[dict[str, int], int]:
    """Counts of one pass of the loop that loads, and how often the main loop runs within it.

    `multiplies` is how many multiply-adds a warp needs for such a pass, 0 where that is not known. A main loop that
    loads from global memory itself runs once. The result is ({}, 0) where the number of passes cannot be told.
    """
    main, around = main_loop(code), loading_loop(code)
    if not around:
        return counts(main), 1 if main else 0
    apart = Counter(counts(around))
    apart.subtract(counts(main))
    inside = multiply_adds(counts(main))
    passes, rest = divmod(multiplies - multiply_adds(apart), inside) if inside else (0, 0)
    if passes < 1 or rest:
        return {}, 0
    whole = {name: apart[name] + int(passes) * counts(main).get(name, 0) for name in apart}
    return ordered(whole), int(passes)


def multiply_adds(kinds: Mapping[str, int]) -> int:
    """Multiply-adds of one warp in counted instructions; 0 for a matrix instruction whose shape is not known.

    >>> multiply_adds({"FFMA": 2, "LDS.128": 4}), multiply_adds({"HMMA.16816.F32": 1}), multiply_adds({"DMMA.8x8x4": 1})
    (64, 2048, 256)
    >>> [multiply_adds({name: 1}) for name in ("HGMMA.64x256x16.F32", "QGMMA.64x256x32.F32.E4M3.E4M3", "IGMMA.64x8x32")]
    [65536, 131072, 4096]
    """
    return sum(number * _multiply_adds(name) for name, number in kinds.items())


def counts(code: Iterable[SassInstruction]) -> dict[str, int]:
    """How many instructions of each kind there are, the kinds that matter first."""
    return ordered(Counter(kind(line.opcode) for line in code if line.opcode != "NOP"))


def ordered(kinds: Mapping[str, Number]) -> dict[str, Number]:
    """Counts with the kinds that matter first."""
    return dict(sorted(kinds.items(), key=lambda item: (_rank(item[0]), -item[1], item[0])))


def arithmetic(kinds: Mapping[str, int]) -> int:
    """Number of instructions that multiply and add."""
    return sum(number for name, number in kinds.items() if _rank(name) < ORDER.index("LDG"))


def is_notable(name: str) -> bool:
    """True for a kind that computes, loads, stores or waits; the rest are addresses, loops and moves."""
    return _rank(name) < len(ORDER)


def kind(opcode: str) -> str:
    """The kind of an opcode: accesses keep the bits that they move a thread, matrix products their shape.

    >>> [kind(name) for name in ("LDG.E.128.CONSTANT", "LDS", "HMMA.16816.F32.BF16", "IMAD.MOV.U32", "LDSM.16.M88.4")]
    ['LDG.128', 'LDS.32', 'HMMA.16816.F32.BF16', 'IMAD', 'LDSM.4']
    >>> kind("WARPGROUP.DEPBAR.LE")
    'WARPGROUP.DEPBAR'
    """
    base, *rest = opcode.split(".")
    if base in _SIZED:
        return f"{base}.{next((_WIDTHS[part] for part in rest if part in _WIDTHS), '32')}"
    if base == "WARPGROUP":
        return ".".join((base, *rest[:1]))
    if base == "LDSM":
        return f"LDSM.{rest[-1]}"
    return opcode if base.endswith("MMA") else base


def bytes_each(kinds: Mapping[str, int], space: str) -> float:
    """Bytes that a thread loads from "global" or "shared" memory per multiply-add on CUDA cores, 0 without any.

    >>> bytes_each({"FFMA": 16, "LDG.32": 32}, "global")
    8.0
    """
    start = {"global": "LDG.", "shared": "LDS."}[space]
    loads = {name: number for name, number in kinds.items() if name.startswith(start)}
    loaded = sum(int(name.removeprefix(start)) // 8 * number for name, number in loads.items())
    adds = sum((2 if name.endswith("2") else 1) * number for name, number in kinds.items() if _rank(name) == 1)
    return loaded / adds if adds else 0.0


def on_tensor_cores(kinds: Mapping[str, int]) -> bool:
    """True for code that multiplies on tensor cores, by its counts in SASS."""
    return any(_rank(name) == 0 for name in kinds)


def ptx_counts(text: str) -> dict[str, int]:
    """How many PTX instructions of each opcode the text of a kernel has."""
    body = re.sub(r"//.*|^\s*\.loc\s.*", "", text.partition("\n{")[2], flags=re.MULTILINE)
    opcodes = Counter(match[1] for statement in body.split(";") if (match := _PTX.match(statement)))
    return dict(sorted(opcodes.items(), key=lambda item: (-item[1], item[0])))


def _loops(code: Sequence[SassInstruction]) -> dict[tuple[int, int], tuple[SassInstruction, ...]]:
    """The code of each loop by the addresses where it begins and ends."""
    spans = {(branch.target, branch.address) for branch in code if 0 <= branch.target <= branch.address}
    return {span: tuple(line for line in code if span[0] <= line.address <= span[1]) for span in sorted(spans)}


def _loads_globally(code: Iterable[SassInstruction]) -> bool:
    return any(line.opcode.startswith(("LDG", "UBLKCP", "UTMALDG")) for line in code)


def _multiply_adds(name: str) -> int:
    """Multiply-adds of a warp in one instruction of a kind."""
    if _rank(name) == 1:
        return 64 if name.endswith("2") else 32
    base, _, shape = name.partition(".")
    if not base.endswith("MMA") or not shape:
        return 0
    sides = shape.partition(".")[0]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", sides) or re.fullmatch(r"(8|16)(8)(4|8|16|32|64)", sides)
    if not match:
        return 0
    m, n, k = map(int, match.groups())
    return m * n * k // (4 if base.endswith("GMMA") else 1)  # four warps issue a wgmma together


def _rank(name: str) -> int:
    """The place of a kind in ORDER, len(ORDER) for the rest."""
    base = name.partition(".")[0]
    if base.endswith("MMA"):
        return 0
    if re.fullmatch(r"[FD]FMA2?", base):  # HFMA2 mostly loads constants
        return 1
    prefix = "LDS" if base == "LDSM" else base
    return next((place for place, start in enumerate(ORDER) if place > 1 and prefix.startswith(start)), len(ORDER))


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@lru_cache
def nvdisasm() -> str:
    """The path of nvdisasm: from NVIDIA's wheel, the toolkit of CUDA_HOME, or the PATH; "" without."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return shutil.which("nvdisasm") or ""
    return find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm") or ""
