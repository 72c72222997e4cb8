"""Products on the tile unit (Intel AMX): sums of 32 x 32 in four tile registers, for bfloat16 and 8-bit integers.

A tile register holds 16 rows of 64 bytes. One instruction adds the products of a tile of A (16 rows, 64 bytes of k) and
one of B (64 bytes of k, as 16 cells of 4 bytes, for 16 columns) to a tile of sums. The panel of B is packed as for dot
products; in that of A a row's 64 bytes of k are adjacent. Each step loads two tiles of both for four products, one load
a product (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import vector
from gemmery.cpu.pack import Routine, interleave, load, pack_each, panel, row_at, transpose
from gemmery.cpu.panels import Panels
from gemmery.cpu.ukernel import STEPS, TILE_BYTES, TILE_ROWS, Product

_SIDE = 2  # tiles of sums in a row and in a column
_A, _B = _SIDE * _SIDE, _SIDE * _SIDE + _SIDE  # the registers of A and of B follow those of the sums
# Operations of a step of `define_peak`, times the bytes of an element.
PEAK_STEP = _A * 2 * TILE_ROWS * TILE_ROWS * TILE_BYTES
_ROW = _SIDE * TILE_BYTES  # bytes of a row of the panel of B, and of the sums
# The palette; bytes of a row of each register from byte 16 on, its rows from byte 48 on.
_CONFIG = (1, 0, 0x0040_0040_0040_0040, 0x0040_0040_0040_0040, 0, 0, 0x1010_1010_1010_1010, 0)
_PARAMS = (("i64", "steps"), ("ptr", "a"), ("ptr", "b"), ("ptr", "sums"))


def configured(f: Function, product: Product) -> AbstractContextManager[None]:
    """Give the tile registers their shape for the body, if the product uses them."""
    return _shaped(f) if product.on_tiles else nullcontext()


@contextmanager
def _shaped(f: Function) -> Iterator[None]:
    """Give all tile registers their shape, and release them after the body: else a switch of threads saves 8 KiB."""
    config = f.buffer(8 * len(_CONFIG))
    for at, word in enumerate(_CONFIG):
        f.store(f.const("i64", word), config + 8 * at)
    _tile(f, "ldtilecfg", config)
    yield
    _tile(f, "tilerelease")


def define(module: Module, product: Product) -> None:
    """Define `tiles_RxC(steps, a, b, sums)`, which stores the sums of R x C tiles of a product of two panels."""
    for rows, columns in ((1, 1), (1, 2), (2, 1), (2, 2)):
        with module.function(f"tiles_{rows}x{columns}", *_PARAMS, local=True) as f:
            sums = [(r, c, _SIDE * r + c) for r in range(rows) for c in range(columns)]
            for _, _, total in sums:
                _tile(f, "tilezero", f.const("i8", total))
            with f.loop(0, f["steps"]) as p:
                a, b = f["a"] + p * (_SIDE * TILE_ROWS * TILE_BYTES), f["b"] + p * (TILE_ROWS * _ROW)
                for r in range(rows):
                    _load(f, _A + r, a + r * TILE_ROWS * TILE_BYTES, TILE_BYTES)
                for c in range(columns):
                    _load(f, _B + c, b + c * TILE_BYTES, _ROW)
                for r, c, total in sums:
                    _tile(f, product.step, *(f.const("i8", register) for register in (total, _A + r, _B + c)))
            for r, c, total in sums:
                at = f["sums"] + r * TILE_ROWS * _ROW + c * TILE_BYTES
                _tile(f, "tilestored64", f.const("i8", total), at, f.index(_ROW))


def define_peak(module: Module, name: str, dtype: str) -> None:
    """Define `name(n, p)`: `n` times four products of tiles of bf16 or int8, which stay in their registers."""
    with module.function(name, ("i64", "n"), ("ptr", "p")) as f, _shaped(f):
        for register in range(_A, _B + _SIDE):
            _load(f, register, f["p"], TILE_BYTES)
        with f.loop(0, f["n"]):
            for total in range(_A):
                registers = total, _A + total // _SIDE, _B + total % _SIDE
                _tile(f, STEPS[dtype], *(f.const("i8", register) for register in registers))


def multiply(f: Function, steps: Value, a: Value, b: Value, sums: Value, rows: Value, columns: Value) -> None:
    """Store the sums of two panels, of which `rows` and `columns` are needed."""
    with f.if_(rows > TILE_ROWS):
        _columns(f, 2, (steps, a, b, sums), columns)
    with f.else_():
        _columns(f, 1, (steps, a, b, sums), columns)


def _columns(f: Function, rows: int, operands: tuple[Value, ...], columns: Value) -> None:
    with f.if_(columns > TILE_ROWS):
        f.call(f"tiles_{rows}x2", *operands)
    with f.else_():
        f.call(f"tiles_{rows}x1", *operands)


def _load(f: Function, register: int, at: Value, row: int) -> None:
    _tile(f, "tileloadd64", f.const("i8", register), at, f.index(row))


def _tile(f: Function, name: str, *values: Value) -> None:
    f.module.declare(f"declare void @llvm.x86.{name}({', '.join(value.type for value in values)})")
    f.call(f"llvm.x86.{name}", *values)


def _pack_rows(f: Function, panels: Panels) -> None:
    """Pack rows of A, whose elements are adjacent along k: 64 bytes of each, zeros past its end."""
    k, cell = f["k"], panels.group
    whole = k // cell * cell
    with f.loop(0, f["count"], panels.width) as i, f.loop(0, _rows(f, panels, i)) as r:
        row, to = row_at(f, i + r), panel(f, panels, i) + r * TILE_BYTES

        def move(p: Value, mask: Value | None, row: Value, to: Value) -> None:
            f.store(load(f, panels, row + p * panels.element, cell, mask), to + p // cell * panels.row)

        with f.loop(0, whole, cell) as p:
            move(p, None, row, to)
        with f.if_(whole < k):
            move(whole, f.first_lanes(k - whole, cell), row, to)


def _pack_columns(f: Function, panels: Panels) -> None:
    """Pack columns of A, whose elements are adjacent down the rows."""
    k, count = f["k"], f["count"]
    with (
        f.loop(0, count, panels.width) as i,
        f.loop(0, _rows(f, panels, i), TILE_ROWS) as first,
        f.loop(0, k, panels.group) as p,
    ):
        _transpose(f, panels, i, first, p)


def _rows(f: Function, panels: Panels, i: Value) -> Value:
    """Return the rows that are read of the panel from row `i` on: those of one tile, or of two."""
    return f.select(f["count"] - i > TILE_ROWS, f.index(panels.width), f.index(TILE_ROWS))


def _transpose(f: Function, panels: Panels, i: Value, first: Value, p: Value) -> None:
    """Pack 16 rows from `first` on of the panel of row `i`, and 64 bytes of k from `p` on."""
    k, group, count = f["k"], panels.product.group, f["count"]
    source, rest = f["source"] + (i + first) * panels.element, f.max(count - i - first, 0)
    cells = []
    for at in range(0, panels.group, group):
        rows = []
        for q in range(at, at + group):
            exists = f.first_lanes(f.select(p + q < k, rest, f.index(0)), TILE_ROWS)
            rows.append(load(f, panels, source + (p + q) * f["along"], TILE_ROWS, exists))
        cells.append(f.bitcast(interleave(f, rows), vector(TILE_ROWS, "i32")))
    to = panel(f, panels, i) + first * TILE_BYTES + p // panels.group * panels.row
    for r, row in enumerate(transpose(f, cells)):
        f.store(row, to + r * TILE_BYTES)


ROUTINES_A: Mapping[str, Routine] = {"copy": _pack_columns, "transpose": _pack_rows, "each": pack_each}
