"""The meaning of an instruction that only computes: registers in, registers out.

Memory, control flow and barriers are not here: they need the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = Any  # a NumPy scalar where all threads agree, else an array of one value a thread
Mask = NDArray[np.bool_] | None  # the threads that take part; None is all

# How a value of a PTX type lies in NumPy. bf16, fp8 and packed types travel as their bits.
NUMPY = {
    "pred": "?",
    **dict.fromkeys(("b8", "u8"), "u1"),
    **dict.fromkeys(("b16", "u16", "bf16", "e4m3x2", "e5m2x2"), "u2"),
    **dict.fromkeys(("b32", "u32", "f16x2", "bf16x2", "tf32"), "u4"),
    **dict.fromkeys(("b64", "u64"), "u8"),
    "s8": "i1",
    "s16": "i2",
    "s32": "i4",
    "s64": "i8",
    "f16": "f2",
    "f32": "f4",
    "f64": "f8",
}
# How a register of a declared type is kept: unsigned bits, but for floats of 4 and 8 bytes.
STORED = {name: f"u{kind[1:]}" for name, kind in NUMPY.items()} | {"pred": "?", "f32": "f4", "f64": "f8"}


@dataclass(frozen=True)
class Op:
    """`meaning` takes the operands in order, vectors flattened, each of the NumPy type of its PTX type, and returns the
    result, or a tuple when there are several.

    Of a "lane" op operands are scalars or arrays as they come, and NumPy's broadcasting does the rest: scalars in,
    scalar out. A "warp" op is given the active threads as an array (warps, 32) and then its operands, each an array
    (warps, 32); it returns arrays of that shape, or of one value a thread.
    """

    results: tuple[str, ...]  # PTX types
    operands: tuple[str, ...]
    meaning: Callable[..., Any]
    scope: str = "lane"  # or "warp"
    kind: str = "alu"  # what Run.instructions counts it as: "fma", "mma", "shfl", "cvt", ...
    flops: int = 0  # floating-point operations of one thread ("lane") or of one warp ("warp")
    issues: int = 1  # machine instructions that this one becomes
    chains: bool = False  # `meaning` has a parameter `chain`, for which a faster exact.chain may be given
    carry: str = ""  # "in", "out", "in out": the thread's carry flag is the last operand, the last result, or both
    folds: bool = False  # of min and max: a third operand may follow, which is taken with the result of the two
    complement: Callable[..., Any] | None = None  # of setp: where "p|q" is written, gives q of the same operands
