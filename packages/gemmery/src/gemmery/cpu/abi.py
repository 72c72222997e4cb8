"""The calling convention of compiled CPU kernels: `void kernel(ptr args)`, where args is a record of 8-byte fields.

Strides are in bytes and may have any sign. alpha and beta point to one scalar of the kernel's accumulator
type. A kernel reads only the fields it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmery.cpu.ir import Function, Value

Fields = tuple[tuple[str, str], ...]  # the names of a record's fields, each with its LLVM type


def pointers(*names: str) -> Fields:
    """Return fields that are addresses."""
    return tuple((name, "ptr") for name in names)


def words(*names: str) -> Fields:
    """Return fields that are integers."""
    return tuple((name, "i64") for name in names)


FIELDS = (
    *words("m", "n", "k"),
    *pointers("a"), *words("a_row", "a_col"),
    *pointers("b"), *words("b_row", "b_col"),
    *pointers("c"), *words("c_row", "c_col"),
    *pointers("alpha", "beta", "bias"), *words("bias_step"),
    *words("batch", "a_batch", "b_batch", "c_batch"),
    *pointers("workspace"), *words("mc", "kc", "nc"),
    # 0, or by how many rows the first element lies below the diagonal, from which on C is needed, and 1.
    *words("below"),
)  # fmt: skip
SLOT = {name: i for i, (name, _) in enumerate(FIELDS)}


def copy_record(f: Function, source: Value, to: Value, fields: Fields, at: int = 0) -> None:
    """Copy the words of a record that begins `at` so many bytes behind an address."""
    for offset in range(0, 8 * len(fields), 8):
        f.store(f.load("i64", source + (at + offset), align=8), to + offset, align=8)


class Args:
    """A record inside a kernel: `args.m` loads a field, `args.m = x` stores it."""

    def __init__(self, f: Function, base: Value, fields: Fields = FIELDS) -> None:
        object.__setattr__(self, "_f", f)
        object.__setattr__(self, "_base", base)
        object.__setattr__(self, "_fields", {name: (8 * i, type_) for i, (name, type_) in enumerate(fields)})

    def _at(self, name: str) -> tuple[Value, str]:
        base: Value = object.__getattribute__(self, "_base")
        offset, type_ = object.__getattribute__(self, "_fields")[name]
        return base + offset, type_

    def __getattr__(self, name: str) -> Value:
        f: Function = object.__getattribute__(self, "_f")
        at, type_ = self._at(name)
        return f.load(type_, at, align=8)

    def __setattr__(self, name: str, value: Value | int) -> None:
        f: Function = object.__getattribute__(self, "_f")
        f.store(f.index(value) if isinstance(value, int) else value, self._at(name)[0], align=8)
