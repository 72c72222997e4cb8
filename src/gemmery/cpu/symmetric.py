"""Products of a matrix with its own transpose: half of C is computed, and the other half is its mirror image.

`halve` sees that A and B are the same memory, transposed, and cuts the job into parts of which those above the diagonal
are empty. A kernel computes a part from the diagonal down; `below` of its record lets it leave out tiles above. Then the
part is mirrored while it is in a cache. An element has the bits that the whole product gives, since its sum is the same
chain: x y + s and y x + s are equal.
"""

from __future__ import annotations

from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import vector
from gemmery.cpu.layout import JOB
from gemmery.cpu.pack import transpose
from gemmery.cpu.split import HALVED, HALVED_K, HALVED_RATIO

_WIDE = 384  # columns of a part on one thread: A is packed again for each, in 3 to 8 % of the part's time
_BLOCK = 16  # rows and columns that are mirrored at once: a cache line of each row of f32
_SIZES = {1: "i8", 2: "i16", 4: "i32", 8: "i64", 16: "i128"}
_IN_REGISTERS = (2, 4, 8)  # sizes of elements of which blocks are transposed by vectors


def is_transposed(job: Args) -> Value:
    """Return True if B has the shape and strides of the transposed A, in a product of which half is worth it."""
    worth = (job.m >= HALVED) & (job.k >= HALVED_K) & (job.k * HALVED_RATIO > job.m)
    same = worth & job.m.equals(job.n) & job.a_batch.equals(job.b_batch)
    return same & job.a_row.equals(job.b_col) & job.a_col.equals(job.b_row)


def halve(module: Module) -> None:
    """Define `halve(job, copy)`: the job, or in `copy` one of half the work if A and B are the same memory, transposed.

    A job with beta is left as it is, since C has two halves then, and one with a bias, which differs by column.
    """
    with module.function("halve", ("ptr", "job"), ("ptr", "copy"), local=True, returns="ptr") as f:
        job, half = Args(f, f["job"], JOB), Args(f, f["copy"], JOB)
        answer = f.var(f["job"])
        same = f.emit("i1", f"icmp eq {job.a}, {job.b.text}") & is_transposed(job) & f.is_null(job.bias)
        no_beta = (job.beta_value | job.beta_high).equals(0)
        with f.if_(same & no_beta & (job.parts > 0) & job.at_once.equals(0)):
            for word in range(0, 8 * len(JOB), 8):
                f.store(f.load("i64", f["job"] + word, align=8), f["copy"] + word, align=8)
            m, alone = job.m, job.half_columns.equals(0)
            rows = f.select(alone, m, job.half_rows)
            columns = f.select(alone, f.min(m, _WIDE), job.half_columns)
            half.half, half.products, half.rows, half.columns = 1, 1, rows, columns
            half.row_parts, half.column_parts = (m + rows - 1) // rows, (m + columns - 1) // columns
            half.parts = half.row_parts * half.column_parts * job.batch
            answer.value = f["copy"]
        f.ret(answer.value)


def mirror(module: Module) -> None:
    """Define `mirror(source, to, row, size, rows, columns, below)`: elements of C below the diagonal, to above it.

    `source` is the first element of a part, `below` rows under the diagonal, and `to` its mirror image.
    """
    params = (("i64", "row"), ("i64", "rows"), ("i64", "columns"), ("i64", "below"))
    for size, type_ in _SIZES.items():
        with module.function(f"mirror_{size}", ("ptr", "source"), ("ptr", "to"), *params, local=True) as f:
            _mirror(f, size, type_)
    with module.function("mirror", ("ptr", "source"), ("ptr", "to"), ("i64", "size"), *params, local=True) as f:
        operands = [f[name] for name in ("source", "to", "row", "rows", "columns", "below")]
        f.switch(f["size"], {size: lambda size=size: f.call(f"mirror_{size}", *operands) for size in _SIZES})


def _mirror(f: Function, size: int, type_: str) -> None:
    rows, columns, below, row = f["rows"], f["columns"], f["below"], f["row"]
    with f.loop(0, rows, _BLOCK) as i, f.loop(0, columns, _BLOCK) as j:
        last = f.min(i + _BLOCK, rows)
        whole = (i + _BLOCK <= rows) & (j + _BLOCK <= columns) & (j + _BLOCK <= i + below)
        with f.if_(whole & (size in _IN_REGISTERS)):
            if size in _IN_REGISTERS:
                _transposed(f, size, type_, f["source"] + i * row + j * size, f["to"] + j * row + i * size)
        with f.else_(), f.loop(i, last) as r, f.loop(j, f.min(f.min(j + _BLOCK, columns), r + below)) as c:
            f.store(f.load(type_, f["source"] + r * row + c * size), f["to"] + c * row + r * size)


def _transposed(f: Function, size: int, type_: str, source: Value, to: Value) -> None:
    """Mirror a whole block: squares are transposed in registers."""
    row, lanes = f["row"], 32 // size
    for j in range(0, _BLOCK, lanes):  # whole lines of the mirror image in turn
        for i in range(0, _BLOCK, lanes):
            at = [source + row * (i + r) + j * size for r in range(lanes)]
            for c, column in enumerate(transpose(f, [f.load(vector(lanes, type_), x) for x in at])):
                f.store(column, to + row * (j + c) + i * size)
