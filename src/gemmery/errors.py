"""Every error gemmery raises: each message says the value, the rule it broke and the way out."""

from __future__ import annotations


def shown(value: object) -> str:
    """Return at most 40 characters of a value, for a message. Python does not print integers of 5,000 digits.

    >>> shown(1.5), shown(10**50)
    ('1.5', '1000000000000000000000000000000000000...')
    """
    try:
        text = repr(value)
    except ValueError:
        return f"an {type(value).__name__} too large to print"
    return text if len(text) <= 40 else f"{text[:37]}..."


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


class InstallError(GemmeryError, ModuleNotFoundError):
    """A package that an optional part of gemmery needs is not installed."""


EXTRAS = {  # packages that an extra of pyproject.toml installs, by the name under which Python imports them
    "lab": ("matplotlib", "ml_dtypes", "rich", "threadpoolctl", "typer"),
    "cuda": ("cuda", "nvidia"),
}


def missing(extra: str, what: str) -> str:
    """The message for a part of gemmery whose extra is not installed; every such message is made here.

    >>> missing("lab", "the commands need rich")
    "the commands need rich: run pip install '.[lab]' in a checkout of gemmery"
    """
    return f"{what}: run pip install '.[{extra}]' in a checkout of gemmery"


def not_installed(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError:
    """The InstallError for `what` when an extra installs the package that `error` misses, else `error` itself."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return InstallError(missing(extra, f"{what} needs {package}"), name=error.name)
    return error
