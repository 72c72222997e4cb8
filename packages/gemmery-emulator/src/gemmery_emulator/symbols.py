"""Read the element types of a kernel's pointers from its symbol.

Itanium C++ ABI, "External Names (a.k.a. Mangling)": `_Z3addPKfPfi` is add(const float*, float*, int).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmery.errors import ArgumentError

# A type is a name, a pair ("*" | "[]" | "...", type) or ("T", number of a template parameter), else None.
Type = Any

_BUILTIN = {
    "v": "void", "w": "wchar_t", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char",
    "s": "short", "t": "unsigned short", "i": "int", "j": "unsigned int", "l": "long", "m": "unsigned long",
    "x": "long long", "y": "unsigned long long", "n": "__int128", "o": "unsigned __int128",
    "f": "float", "d": "double", "e": "long double", "g": "__float128", "z": "...",
}  # fmt: skip
_BITS = {"short": "2", "int": "4", "long": "8", "long long": "8"}
_FLOATS = {"float": "float32", "double": "float64", "__half": "float16", "__nv_bfloat16": "bfloat16"}
_HALVES, _SHORTS = {"float16", "bfloat16"}, {"int16", "uint16"}  # each may be passed as the bits of the other
_VECTOR = re.compile(r"(?:(u?)(short|int|long|longlong)|(float|double|__half|__nv_bfloat16))([1-4])(?:_16a|_32a)?")


def pointees(symbol: str) -> tuple[str, ...]:
    """Return the type that each parameter of a function points or refers to; "" if unknown, or not a pointer.

    >>> pointees("_Z1gIfLi4EEvPKT_PS0_i")
    ('float', 'float', '')

    Returns () for a symbol that is not mangled or cannot be read.
    """
    if not symbol.startswith("_Z"):
        return ()
    try:
        return tuple(_pointee(type_) for type_ in _Reader(symbol, 2).parameters())
    except (_UnknownError, IndexError, ValueError, RecursionError):
        return ()


def mismatch(pointee: str, dtype: np.dtype[Any]) -> str:
    """Return the NumPy type that an array for a pointer should have; "" if `dtype` is right, or the type unknown.

    Any pointer takes a structured array; one to integers takes integers of the same size, signed or not; one to 16-bit
    integers takes float16 and bfloat16 too, as their bits.

    >>> mismatch("float", np.dtype("f8")), mismatch("unsigned int", np.dtype("i4")), mismatch("void", np.dtype("f8"))
    ('float32', '', '')
    """
    expected, vector = _numpy(pointee), _VECTOR.fullmatch(pointee)
    if vector and vector[4] in "24" and expected[-2:] == "32" and dtype.itemsize <= 2:
        return ""  # wide copies of short elements
    if not expected or dtype.names is not None or dtype.subdtype is not None or dtype.name.startswith("void"):
        return ""
    if dtype.name == expected or ({dtype.name, expected} & _HALVES and {dtype.name, expected} & _SHORTS):
        return ""
    if dtype.kind == "c":  # pairs of numbers
        return "" if np.dtype(f"f{dtype.itemsize // 2}").name == expected else expected
    alike = dtype.kind in "iumM" and "int" in expected and expected.endswith(f"int{8 * dtype.itemsize}")
    return "" if alike else expected


def check_elements(symbol: str, args: Sequence[Any]) -> None:
    """Compare the types of arrays with those of the pointers of a function; raises ArgumentError."""
    types = pointees(symbol)
    for place, (value, pointee) in enumerate(zip(args, types, strict=True)) if len(types) == len(args) else ():
        expected = mismatch(pointee, value.dtype) if isinstance(value, np.ndarray) else ""
        if expected:
            raise ArgumentError(
                f"argument {place} is an array of {value.dtype}, but the kernel's parameter points to {pointee}: "
                f"pass an array of {expected}, or view its bytes as {expected}"
            )


def _numpy(pointee: str) -> str:
    """Return the NumPy type of a C++ type or of the elements of a vector type; "" if any array may be passed."""
    match = _VECTOR.fullmatch(pointee)
    if match:
        pointee = match[3] or (f"unsigned {match[2]}" if match[1] else match[2]).replace("longlong", "long long")
    pointee = {"__half2": "__half", "__nv_bfloat162": "__nv_bfloat16"}.get(pointee, pointee)
    if pointee in _FLOATS:
        return _FLOATS[pointee]
    size = _BITS.get(pointee.removeprefix("unsigned "))
    return f"{'u' if pointee.startswith('unsigned') else ''}int{8 * int(size)}" if size else ""


def _pointee(type_: Type) -> str:
    inner = type_[1] if isinstance(type_, tuple) and type_[0] == "*" else None
    while isinstance(inner, tuple) and inner[0] == "[]":
        inner = inner[1]
    return inner if isinstance(inner, str) else ""


class _UnknownError(Exception):
    """A mangled name with a part that this reader does not know."""


@dataclass
class _Reader:
    """A mangled name, read from left to right."""

    text: str
    at: int
    known: list[Type] = field(default_factory=list)  # the substitutions S_, S0_, S1_ ...
    arguments: list[Type] = field(default_factory=list)  # of the function's template

    def parameters(self) -> Iterator[Type]:
        """Yield the types of the function's parameters."""
        if self._function():
            self._type()  # a template's result
        while self.at < len(self.text):
            yield from self._resolved(self._type())

    def _resolved(self, type_: Type) -> Iterator[Type]:
        """Replace template parameters in a type; yields one type for each argument of a pack."""
        if isinstance(type_, tuple) and type_[0] == "...":
            packs = [argument for argument in self.arguments if isinstance(argument, list)]
            if len(packs) != 1:
                raise _UnknownError
            for argument in packs[0]:
                yield self._put(type_[1], argument)
        elif type_ != "void":
            yield self._put(type_, None)

    def _put(self, type_: Type, pack: Type) -> Type:
        if not isinstance(type_, tuple):
            return type_
        if type_[0] == "T":
            argument = self.arguments[type_[1]]
            return pack if isinstance(argument, list) else argument
        return (type_[0], self._put(type_[1], pack))

    def _match(self, pattern: str) -> str:
        match = re.compile(pattern).match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match[0] if match else ""

    def _function(self) -> bool:
        """Read the function's name; returns whether it is an instance of a template."""
        if self._match("N"):
            templated = self._nested()
            self.known.pop()  # the function's own name is not a substitution
            return templated
        name = self._source()
        if self.text[self.at :].startswith("I"):
            self.known.append(name)
            self.arguments = self._template_arguments()
            return True
        return False

    def _source(self) -> str:
        self._match("L")  # static
        length = int(self._match(r"\d+") or 0)
        name = self.text[self.at : self.at + length]
        if not length or len(name) < length:
            raise _UnknownError
        self.at += length
        return name

    def _nested(self) -> bool:
        """Read a nested name after N, without its meaning; returns whether it ends with template arguments."""
        self._match("[rVK]+")
        templated = False
        while not self._match("E"):
            templated = self.text[self.at] == "I"
            if self._match("St"):
                continue
            if self.text[self.at] == "S":
                self._substitution()
                continue
            if templated:
                self.arguments = self._template_arguments()
            else:
                self._source()
            self.known.append(None)
        return templated

    def _substitution(self) -> Type:
        match = self._match(r"S[0-9A-Z]*_")
        if not match:
            raise _UnknownError
        return self.known[int(match[1:-1], 36) + 1 if match[1:-1] else 0]

    def _template_arguments(self) -> list[Type]:
        self.at += 1
        types: list[Type] = []
        while not self._match("E"):
            if self._match("L"):
                self._type()
                if not self._match("n?[0-9a-f]*E"):
                    raise _UnknownError
                types.append(None)
            elif self.text[self.at] == "J":
                types.append(self._template_arguments())
            else:
                types.append(self._type())
        return types

    def _type(self) -> Type:
        first = self.text[self.at]
        if self._match("[rVK]+"):
            return self._remembered(self._type())
        for pattern, kind in (("[PRO]", "*"), (r"A(?:\d*|T\d*_)_", "[]"), ("Dp", "...")):
            if self._match(pattern):
                return self._remembered((kind, self._type()))
        if self._match("F"):
            while not self._match("E"):
                self._type()
            return self._remembered(None)
        if parameter := self._match(r"T\d*_"):
            return self._remembered(("T", int(parameter[1:-1]) + 1 if parameter[1:-1] else 0))
        if self._match("N"):
            arguments = self.arguments
            self._nested()
            self.arguments = arguments
            return None
        if first == "S" and not self._match("St"):
            return self._instance(self._substitution())
        if first.isdigit() or first == "S":
            return self._instance(self._remembered(self._source()))
        if first not in _BUILTIN:
            raise _UnknownError
        self.at += 1
        return _BUILTIN[first]

    def _instance(self, name: Type) -> Type:
        """Return a name, or None for an instance of a template, whose arguments are skipped."""
        if self.text[self.at : self.at + 1] != "I":
            return name
        self._template_arguments()
        return self._remembered(None)

    def _remembered(self, type_: Type) -> Type:
        self.known.append(type_)
        return type_
