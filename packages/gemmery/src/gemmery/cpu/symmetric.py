"""Products of a matrix with its own transpose: half of C is computed, and the other half is its mirror image.

`halve` sees that A and B are the same memory, transposed, and cuts the job into parts of which those above the
diagonal are empty. A kernel computes a part from the diagonal down; `below` of its record lets it leave out tiles above
the diagonal. Then the part is mirrored while it is in a cache. An element has the bits that the whole product gives,
since its sum is the same chain: x y + s and y x + s are equal.
"""

from __future__ import annotations

from functools import partial

from gemmery.cpu.abi import Args, copy_record
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import vector
from gemmery.cpu.layout import JOB
from gemmery.cpu.pack import transpose
from gemmery.cpu.split import HALVED, HALVED_K, HALVED_RATIO

_WIDE = 384  # columns of a part on one thread: A is packed again for each, in 3 to 8 % of the part's time
_BLOCK = 16  # rows and columns that are mirrored at once: a cache line of each row of f32
_IN_REGISTERS = {4: "float", 8: "double"}  # elements of which vectors are transposed, by their size


def is_transposed(job: Args) -> Value:
    """Return True if B has the shape and strides of the transposed A, in a product of which half is worth it."""
    worth = (job.m >= HALVED) & (job.k >= HALVED_K) & (job.k * HALVED_RATIO > job.m)
    same = worth & job.m.equals(job.n) & job.a_batch.equals(job.b_batch)
    return same & job.a_row.equals(job.b_col) & job.a_col.equals(job.b_row)


def halve(module: Module) -> None:
    """Define `halve(job, copy)`: the job, or in `copy` one of half the work if A and B are the same memory, transposed.

    A job with beta is left as it is, since C has two halves then, and one with a bias, which differs by column.
    """
    with module.function("halve", "job", "copy", local=True, returns="ptr") as f:
        job, half = Args(f, f["job"], JOB), Args(f, f["copy"], JOB)
        answer = f.var(f["job"])
        same = f.emit("i1", f"icmp eq {job.a}, {job.b.text}") & is_transposed(job) & f.is_null(job.bias)
        no_beta = (job.beta_value | job.beta_high).equals(0)
        with f.if_(same & no_beta & (job.parts > 0) & job.at_once.equals(0)):
            copy_record(f, f["job"], f["copy"], JOB)
            m, alone = job.m, job.half_columns.equals(0)
            rows = f.select(alone, m, job.half_rows)
            columns = f.select(alone, f.min(m, _WIDE), job.half_columns)
            half.half, half.products, half.rows, half.columns = 1, 1, rows, columns
            half.row_parts, half.column_parts = (m + rows - 1) // rows, (m + columns - 1) // columns
            half.parts = half.row_parts * half.column_parts * job.batch
            answer.value = f["copy"]
        f.ret(answer.value)


def mirror(module: Module) -> None:
    """Define `mirror(source, to, size, row, rows, columns, below)`: elements of C below the diagonal, to above it.

    `source` is the first element of a part, `below` rows under the diagonal, and `to` its mirror image.
    """
    params = ("source", "to", ("i64", "size"), ("i64", "row"))
    for each, type_ in _IN_REGISTERS.items():
        with module.function(f"transposed_{each}", *params, local=True) as f:
            _transposed(f, each, type_)
    with module.function("mirror", *params, ("i64", "rows"), ("i64", "columns"), ("i64", "below"), local=True) as f:
        source, to, size, row, rows, columns, below = f.parameters
        quick = size.equals(4) | size.equals(8)
        with f.loop(0, rows, _BLOCK) as i, f.loop(0, f.min(columns, i + below + _BLOCK), _BLOCK) as j:
            down, right = i + _BLOCK, j + _BLOCK
            place = source + i * row + j * size, to + j * row + i * size, size, row
            with f.if_(quick & (down <= rows) & (right <= columns) & (right <= i + below)):
                f.switch(size, {each: partial(f.call, f"transposed_{each}", *place) for each in _IN_REGISTERS})
            with f.else_(), f.loop(i, f.min(down, rows)) as r, f.loop(j, f.min(f.min(right, columns), r + below)) as c:
                at, image = source + r * row + c * size, to + c * row + r * size
                f.switch(size, {each: partial(_move, f, f"i{8 * each}", at, image) for each in (1, 2, 4, 8, 16)})


def _move(f: Function, type_: str, source: Value, to: Value) -> None:
    f.store(f.load(type_, source), to)


def _transposed(f: Function, size: int, type_: str) -> None:
    """Mirror a whole block, whole lines of the mirror image in turn: squares are transposed in registers."""
    row, lanes = f["row"], 32 // size
    with f.loop(0, _BLOCK, lanes) as j, f.loop(0, _BLOCK, lanes) as i:
        square = [f.load(vector(lanes, type_), f["source"] + row * (i + r) + j * size) for r in range(lanes)]
        for c, column in enumerate(transpose(f, square)):
            f.store(column, f["to"] + row * (j + c) + i * size)
