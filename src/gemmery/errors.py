"""Every error gemmery raises: each message says the value, the rule it broke and the way out."""

from __future__ import annotations


class GemmeryError(Exception):
    """Base of all gemmery errors; `except gm.GemmeryError` catches every one."""


class ShapeError(GemmeryError, ValueError):
    """Shapes that cannot be multiplied, or an `out` of the wrong shape."""


class DTypeError(GemmeryError, TypeError):
    """An element type that is not served, or a mix that cannot be promoted."""


class LayoutError(GemmeryError, ValueError):
    """Memory that cannot be used as asked: read-only `out`, overlapping `out`, foreign byte order."""


class DeviceError(GemmeryError, ValueError):
    """Operands on different devices, or a device that is not there."""


class ArgumentError(GemmeryError, ValueError):
    """An option with a value outside its range: threads, activation, block, rung name."""


class RefusedError(GemmeryError, ValueError):
    """A rung that cannot run this problem; the message is the rung's own reason."""


class CompileError(GemmeryError, RuntimeError):
    """A kernel that did not compile or link: a bug in gemmery, with the kernel's name."""


class EmulationError(GemmeryError, NotImplementedError):
    """An instruction or an operand that the emulator does not model: its opcode, the line and the way out."""


class CheckError(GemmeryError, AssertionError):
    """A result outside its error bound: the element, both values and the bound are in the message."""
