"""Apply an epilogue to sums in memory, row by row: statistics of a row first, then what reads them.

It serves every product whose kernel has no epilogue of its own, all with statistics of rows, and those of two weights.
The record of a kernel says which rows: its addresses of A and B count the rows and products before this part, and that
of the bias is the table of `slots`. A row is added by vectors, one sum a lane, then the lanes in halves.
"""

from __future__ import annotations

from functools import cache

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.cpu import jit
from gemmery.cpu.abi import FIELDS, Args
from gemmery.cpu.convert import load_as
from gemmery.cpu.epilogue import larger, lower, store_output
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.split import Unit
from gemmery.cpu.target import Target, host
from gemmery.epilogues.graph import STATISTICS, EpilogueGraph, Node, by_sums_and_maxima, parse
from gemmery.tuples import NamedTuple

WORDS = 3  # of a slot: an address, and bytes from one product and one row to the next; or the number of an operand
_FIELDS = tuple((name, "i64" if name in "ab" else type_) for name, type_ in FIELDS)
_EACH = 0.5  # ns of an element: gelu or silu of float32 with AVX-512 take 0.2 to 0.6


class Pass(NamedTuple):
    """An epilogue of sums in memory: its graph with the kinds and types of operands, and the types of the sums."""

    graph: str
    element: str  # in which it computes, "float" or "double"
    sums: tuple[str, ...]  # gemmery's names


class Slot(NamedTuple):
    """What a slot of the table names: a sum, operand or output."""

    kind: str  # of KINDS
    dtype: str


def slots(graph: EpilogueGraph, sums: tuple[str, ...]) -> list[Slot]:
    """Return the order of the table: sums, operands, outputs."""
    return [
        *(Slot("matrix", dtype) for dtype in sums),
        *(Slot(operand.kind, operand.dtype) for operand in graph.operands),
        *(Slot(output.kind, output.dtype) for output in graph.outputs),
    ]


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
    graph = by_sums_and_maxima(parse(how.graph))
    code = Module(target)
    with code.function("rows", ("ptr", "args")) as f:
        _Rows(f, graph, how).emit()
    return code


class _Rows:
    """The loops of a pass under construction."""

    def __init__(self, f: Function, graph: EpilogueGraph, how: Pass) -> None:
        self.f, self.graph, self.how = f, graph, how
        self.lanes = f.target.lanes(SIZES[how.element])
        self.type = vector(self.lanes, how.element)
        self.slots = slots(graph, how.sums)
        self.statistics: dict[Node, Var] = {}

    def emit(self) -> None:
        f, args = self.f, Args(self.f, self.f["args"], _FIELDS)
        m, n, first, product, table = args.m, args.n, args.a, args.b, args.bias
        bases: list[Value] = []
        rows: list[Value] = []
        for place, slot in enumerate(self.slots):
            at = table + 8 * WORDS * place
            if slot.kind == "number":
                bases.append(f.broadcast(f.load(self.how.element, at), self.lanes))
                rows.append(f.index(0))
                continue
            steps = [f.load("i64", at + 8 * word, align=8) for word in (1, 2)]
            bases.append(f.load("ptr", at, align=8) + product * steps[0] + first * steps[1])
            rows.append(steps[1])
        with f.loop(0, m) as i:
            places = [
                base if slot.kind == "number" else base + i * row
                for slot, base, row in zip(self.slots, bases, rows, strict=True)
            ]
            for level in self._levels():
                self._add_up(places, first + i, n, level)
            columns = [place for place, output in enumerate(self.graph.outputs) if output.kind == "column"]
            matrices = [place for place in range(len(self.graph.outputs)) if place not in columns]
            if matrices:
                self._over_row(n, lambda j, mask: self._store(places, first + i, j, mask, matrices))
            for place in columns:
                slot = len(self.slots) - len(self.graph.outputs) + place
                value = self._values(places, first + i, f.index(0), None)(self.graph.outputs[place].node)
                scalar = f.shuffle(value, value, [0])
                store_output(f, scalar, dtypes.get(self.slots[slot].dtype), places[slot])

    def _levels(self) -> list[list[int]]:
        """Return the statistics, those first that read no other."""
        depth: list[int] = []
        for op, inputs, _ in self.graph.nodes:
            below = max((depth[i] for i in inputs), default=0)
            depth.append(below + (op in STATISTICS))
        wanted = self.graph.statistics
        return [[x for x in wanted if depth[x] == d] for d in range(1, max(depth, default=0) + 1)]

    def _over_row(self, n: Value, body: object) -> None:
        """Run a body for each vector of a row, the last one with a mask."""
        f, step = self.f, self.lanes
        whole = n // step * step
        with f.loop(0, whole, step) as j:
            body(j, None)  # type: ignore[operator]
        with f.if_(whole < n):
            body(whole, f.first_lanes(n - whole, step))  # type: ignore[operator]

    def _add_up(self, places: list[Value], row: Value, n: Value, level: list[int]) -> None:
        """Compute the statistics of a level, over one row."""
        f, nodes = self.f, self.graph.nodes
        start = {
            number: f.zero(self.type) if nodes[number].op == "row_sum" else f.const(self.type, float("-inf"))
            for number in level
        }
        totals = {number: f.var(value) for number, value in start.items()}

        def body(j: Value, mask: Value | None) -> None:
            value = self._values(places, row, j, mask)
            for number, total in totals.items():
                x = value(nodes[number].inputs[0])
                x = x if mask is None else f.select(mask, x, start[number])
                total.value = total.value + x if nodes[number].op == "row_sum" else larger(f, total.value, x)

        self._over_row(n, body)
        for number, total in totals.items():
            x, half = total.value, self.lanes // 2
            while half:
                order = [lane ^ half for lane in range(self.lanes)]
                other = f.shuffle(x, x, order)
                x = x + other if nodes[number].op == "row_sum" else larger(f, x, other)
                half //= 2
            first = f.shuffle(x, x, [0] * self.lanes)  # lanes of a maximum differ in the sign of zero
            self.statistics[nodes[number]] = f.var(first)

    def _values(self, places: list[Value], row: Value, j: Value, mask: Value | None) -> object:
        """Return the function that computes nodes for the columns from j on."""
        f, element, lanes = self.f, self.how.element, self.lanes
        names = {operand.name: place for place, operand in enumerate(self.graph.operands, len(self.how.sums))}

        def leaf(node: Node) -> Value:
            if node.op in STATISTICS:
                return self.statistics[node].value
            if node.op in ("row_index", "column_index"):
                count = f.emit(element, f"sitofp {row if node.op == 'row_index' else j} to {element}")
                number = f.broadcast(count, lanes)
                return number if node.op == "row_index" else number + f.ramp(self.type)
            place = int(node.value) if node.op == "sum" else names[node.value]
            slot, at = self.slots[place], places[place]
            memory = dtypes.get(slot.dtype or "f32")
            if slot.kind == "number":
                return at
            if slot.kind == "column":
                return f.broadcast(load_as(f, memory, element, at, 0, None), lanes)
            return load_as(f, memory, element, at + j * memory.size, lanes, mask)

        return lower(f, self.graph, self.type, leaf)

    def _store(self, places: list[Value], row: Value, j: Value, mask: Value | None, outputs: list[int]) -> None:
        value = self._values(places, row, j, mask)
        first = len(self.slots) - len(self.graph.outputs)
        # Every output is computed before one is stored: it may be the memory of a sum.
        results = [value(self.graph.outputs[place].node) for place in outputs]  # type: ignore[operator]
        for place, result in zip(outputs, results, strict=True):
            memory = dtypes.get(self.slots[first + place].dtype)
            store_output(self.f, result, memory, places[first + place] + j * memory.size, mask)
