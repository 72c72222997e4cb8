"""Apply an epilogue to sums in memory, row by row: statistics of a row first, then what reads them.

It serves every product whose kernel has no epilogue of its own, all with statistics of rows, and those of two weights.
The record of a kernel says which rows: its addresses of A and B count the rows and products before this part, and that
of the bias is the table of `slots`. A row is added by vectors, one sum a lane, then the lanes in halves.
"""

from __future__ import annotations

from functools import cache

from gemmery.arrays import View
from gemmery.cpu import jit, slots
from gemmery.cpu.abi import FIELDS, Args
from gemmery.cpu.epilogue import larger
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.split import Unit
from gemmery.cpu.target import Target, host
from gemmery.epilogues.graph import STATISTICS, Node, by_sums_and_maxima, parse
from gemmery.tuples import NamedTuple

_FIELDS = tuple((name, "i64" if name in "ab" else type_) for name, type_ in FIELDS)
_EACH = 0.5  # ns of an element: gelu or silu of float32 with AVX-512 take 0.2 to 0.6


class Pass(NamedTuple):
    """An epilogue of sums in memory: its graph with the kinds and types of operands, and the types of the sums."""

    graph: str
    element: str  # in which it computes, "float" or "double"
    sums: tuple[str, ...]  # gemmery's names


@cache
def kernel(how: Pass) -> Launch:
    """Return the kernel of an epilogue; its jobs are those of `job`."""
    entry = jit.load(host(), f"rows {tuple(how)}", lambda: module(host(), how))["rows"]
    return Launch(entry, how.element, 1, lambda m, n, k: Blocks(), unit=Unit(1, 0, 0, each=_EACH))


def job(launch: Launch, batch: int, m: int, n: int, table: int, threads: int) -> bytes:
    """Return the job of a pass over `batch` products of m rows and n columns, with a table of slots at an address."""
    counts = View(0, (batch, m, 1), (0, 1, 0), "int8"), View(0, (batch, 1, n), (1, 0, 0), "int8")
    written = View(0, (batch, m, n), (0, 0, 1), "int8")
    return launch.job(*counts, written, 1, 0, View(table, (n,), (0,), "int8"), threads)


def module(target: Target, how: Pass) -> Module:
    """Return the module of a pass; its entry is `rows`."""
    code, graph = Module(target), by_sums_and_maxima(parse(how.graph))
    reach = slots.access(graph, how.element, target.lanes(SIZES[how.element]), how.sums)
    with code.function("rows", "args") as f:
        args = Args(f, f["args"], _FIELDS)
        m, n, first, product, table = args.m, args.n, args.a, args.b, args.bias
        with f.loop(0, m) as i:
            row, known = first + i, dict[Node, Value]()
            at = slots.places(f, reach, table, product, row)
            for level in _levels(reach):
                _add_up(f, reach, at, row, n, level, known)
            if any(output.kind == "matrix" for output in graph.outputs):
                for j, mask in f.in_vectors(n, reach.lanes):
                    value = slots.values(f, reach, at, row, j, mask, known)
                    slots.store(f, reach, at, j, mask, value, "matrix")
            value = slots.values(f, reach, at, row, f.index(0), None, known)
            slots.store(f, reach, at, f.index(0), None, value, "column")
    return code


def _levels(how: slots.EpilogueAccess) -> list[list[Node]]:
    """Return the statistics, those first that read no other."""
    depth: list[int] = []
    for op, inputs, _ in how.graph.nodes:
        depth.append(max((depth[i] for i in inputs), default=0) + (op in STATISTICS))
    statistics = [(depth[number], how.graph.nodes[number]) for number in how.graph.statistics]
    return [[node for d, node in statistics if d == level] for level in range(1, max(depth, default=0) + 1)]


def _add_up(
    f: Function, how: slots.EpilogueAccess, at: list[Value], row: Value, n: Value, level: list[Node],
    known: dict[Node, Value],
) -> None:  # fmt: skip
    """Compute the statistics of a level over one row, which are then known."""
    start = {
        node: f.zero(how.type) if node.op == "row_sum" else f.const(how.type, float("-inf")) for node in level
    }  # fmt: skip
    totals = {node: f.var(value) for node, value in start.items()}

    def add(node: Node, x: Value, y: Value) -> Value:
        return x + y if node.op == "row_sum" else larger(f, x, y)

    for j, mask in f.in_vectors(n, how.lanes):
        value = slots.values(f, how, at, row, j, mask, known)
        for node, total in totals.items():
            x = value(node.inputs[0])
            total.value = add(node, total.value, x if mask is None else f.select(mask, x, start[node]))
    for node, total in totals.items():
        x, half = total.value, how.lanes // 2
        while half:
            x = add(node, x, f.shuffle(x, x, [lane ^ half for lane in range(how.lanes)]))
            half //= 2
        known[node] = f.shuffle(x, x, [0] * how.lanes)  # lanes of a maximum differ in the sign of zero
