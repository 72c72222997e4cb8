"""The exceptions of gemmery. Each message names the value, the rule that it breaks, and what to do instead."""

from __future__ import annotations

from collections.abc import Container, Iterable


def brief(value: object) -> str:
    """Return at most 40 characters of a value on one line, for a message.

    >>> brief(1.5), brief(10**50)
    ('1.5', '1000000000000000000000000000000000000...')
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python prints no integer of 5,000 digits, and an object's own __repr__ may raise anything
        return "an int too large to print" if isinstance(value, int) else f"<{type(value).__name__}>"
    return text if len(text) <= 40 else f"{text[:37]}..."


def is_one(value: object, known: Container[str]) -> bool:
    """Return True for a text that is one of the known; an array would be compared by elements, a list has no hash."""
    return isinstance(value, str) and value in known


def unknown(what: str, name: object, known: Iterable[str]) -> ArgumentError:
    """Return the error for a name that is not known, as `what` says, with the known names and one that is close."""
    from difflib import get_close_matches  # loads with the first mistake

    names = tuple(known)
    close = get_close_matches(name if isinstance(name, str) else "", names, 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return ArgumentError(f"{what}; {meant}known: {', '.join(names)}")


class GemmeryError(Exception):
    """Base class of all exceptions that gemmery raises on purpose."""


class ShapeError(GemmeryError, ValueError):
    """Shapes that cannot be multiplied, or an `out` of the wrong shape."""


class DTypeError(GemmeryError, TypeError):
    """An element type that is not supported, or types without a common type."""


class LayoutError(GemmeryError, ValueError):
    """Memory that cannot be read or written: freed, masked, sparse, or an `out` that is read-only."""


class DeviceError(GemmeryError, ValueError):
    """Operands on different devices, or a device that is not present."""


class ArgumentError(GemmeryError, ValueError):
    """An option with a wrong value, such as threads, an activation or the name of a rung."""


class RefusedError(GemmeryError, ValueError):
    """A rung that does not support the problem; the message gives the reason."""


class CompileError(GemmeryError, RuntimeError):
    """A kernel that does not compile or link; the message names it."""


class CacheError(GemmeryError, RuntimeError):
    """A cache folder in which kernels cannot be stored; the message tells what to do about it."""


class EmulationError(GemmeryError, NotImplementedError):
    """An instruction that the emulator does not model, or a malformed kernel; the message names the line."""


class CheckError(GemmeryError, AssertionError):
    """A result outside its error bound; the message names the element, both values and the bound."""


class InstallError(GemmeryError, ModuleNotFoundError):
    """A package that an optional part of gemmery needs is not installed."""


EXTRAS = {  # the packages that each extra installs, by import name
    "lab": (
        *("gemmery_emulator", "gemmery_lab", "jinja2", "matplotlib", "ml_dtypes", "rich", "threadpoolctl", "typer"),
        *("tree_sitter", "tree_sitter_cuda"),
    ),
    "cuda": ("cuda", "nvidia"),
    "mcp": ("mcp",),
}


def missing(extra: str, what: str) -> str:
    """Return the message for a part of gemmery that needs an extra that is not installed.

    >>> missing("lab", "the commands need rich")
    "the commands need rich: run pip install '.[lab]' in a checkout of gemmery"
    """
    return f"{what}: run pip install '.[{extra}]' in a checkout of gemmery"


def not_installed(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError:
    """Return an InstallError if an extra installs the missing package, else `error` itself."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return InstallError(missing(extra, f"{what} needs {package}"), name=error.name)
    return error
