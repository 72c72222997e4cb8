"""Numbers that the host and kernels share: the host writes them into the text of every kernel."""

from __future__ import annotations

# The activations of `bias=` and `activation=`, functions of kernels/operands.cuh, as two bits of an EPILOGUE.
RELU, GELU, SILU = 4, 8, 12
ACTIVATION = RELU | GELU | SILU
# Beside the steps of `Epilogue`: factors of rows of A and columns of B, or of whole tensors; and all other steps, of
# which the argument asks for some.
FACTORS, ASKED = 16, 32
TRACED = 64  # a function that was traced: see cuda/traced_function.py
MOST_OVERLAPPED = 144  # sums of a thread of a tile that stays in registers, packed, while the next one is multiplied
BIAS_BYTES = 2 * 256 * 4  # of the bias of the columns of a tile, for each of two warpgroups
MOST_AHEAD = 8192  # elements of C of a tile whose B is asked for ahead
PACK_THREADS = 256  # of a block that packs operands
# Of float32 in parts: threads of a block of the pre-pass; the parts for which its workspace has room, and those of an
# operand that was split before, two and three; what it says of operands, which else will do with two parts; and the
# sides and k of a tile of a strip.
SPLIT_THREADS = 256
MOST_PARTS, KEPT_PARTS = 3, 5
INEXACT, NOT_FINITE = 1, 2
STRIP, STRIP_DEEP = 64, 128
# Of float64 by residues: threads of a block; sides of a unit of ozaki_scales, and sides and k of one of ozaki_residues.
OZAKI_THREADS, OZAKI_SIDES, OZAKI_TALL, OZAKI_DEEP = 256, 16, 32, 128
# Of whole numbers by their bytes: threads of a block that splits, the sides and k that it splits at a time, and the
# products of two digits, of at most 2^14 each, whose sum has 31 bits.
DIGITS_THREADS, DIGITS_TALL, DIGITS_DEEP, MOST_DIGITS = 256, 32, 128, 131_071

HEADER = "constants.cuh"  # which is included first
_VALUES = ", ".join(f"{name} = {value}" for name, value in globals().copy().items() if type(value) is int)
TEXT = f"enum {{ {_VALUES} }};\n"  # a constexpr would be a global variable in every kernel's PTX
