"""The table through which a kernel reaches the operands and outputs of an epilogue, and the code that reads and writes.

A slot has three words: an address, and the bytes from one product of a batch and from one row to the next; columns are
adjacent. That of an operand which is a number has the number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gemmery import dtypes
from gemmery.cpu.convert import load_as
from gemmery.cpu.epilogue import lower, store_output
from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import vector
from gemmery.epilogues.graph import EpilogueGraph, Node
from gemmery.tuples import NamedTuple

WORDS = 3  # of a slot


class Slot(NamedTuple):
    """What a slot names: sums in memory, an operand, or an output."""

    kind: str  # of KINDS
    dtype: str


class EpilogueAccess(NamedTuple):
    """How the kernel of a graph computes: in vectors of `lanes` elements, with a table of these slots."""

    graph: EpilogueGraph
    element: str  # "float" or "double"
    lanes: int
    slots: tuple[Slot, ...]
    sums: int  # slots before those of operands; 0 where sums are in registers

    @property
    def type(self) -> str:
        """The type of a vector."""
        return vector(self.lanes, self.element)


def access(graph: EpilogueGraph, element: str, lanes: int, sums: Sequence[str] = ()) -> EpilogueAccess:
    """Return how a kernel reaches sums of these types in memory, operands and outputs, in this order."""
    slots = (
        *(Slot("matrix", dtype) for dtype in sums),
        *(Slot(operand.kind, operand.dtype) for operand in graph.operands),
        *(Slot(output.kind, output.dtype) for output in graph.outputs),
    )
    return EpilogueAccess(graph, element, lanes, slots, len(sums))


def places(f: Function, how: EpilogueAccess, table: Value, product: Value, row: Value) -> list[Value]:
    """Return for each slot the address of a row, or the number in all lanes."""
    result = []
    for place, slot in enumerate(how.slots):
        at = table + 8 * WORDS * place
        if slot.kind == "number":
            result.append(f.broadcast(f.load(how.element, at), how.lanes))
            continue
        batch, step = (f.load("i64", at + 8 * word, align=8) for word in (1, 2))
        result.append(f.load("ptr", at, align=8) + product * batch + row * step)
    return result


def values(
    f: Function, how: EpilogueAccess, at: list[Value], row: Value, j: Value, mask: Value | None,
    known: Mapping[Node, Value],
) -> Callable[[int], Value]:  # fmt: skip
    """Return the function that computes a node for the columns from j on; `known` are nodes in registers."""
    element, lanes = how.element, how.lanes
    names = {operand.name: place for place, operand in enumerate(how.graph.operands, how.sums)}

    def leaf(node: Node) -> Value:
        if node in known:
            return known[node]
        if node.op == "row_index":
            return f.broadcast(f.emit(element, f"sitofp {row} to {element}"), lanes)
        if node.op == "column_index":
            return f.broadcast(f.emit(element, f"sitofp {j} to {element}"), lanes) + f.ramp(how.type)
        place = int(node.value) if node.op == "sum" else names[node.value]
        kind, dtype = how.slots[place]
        if kind == "number":
            return at[place]
        memory = dtypes.get(dtype)
        if kind == "column":
            return f.broadcast(load_as(f, memory, element, at[place], 0, None), lanes)
        return load_as(f, memory, element, at[place] + j * memory.size, lanes, mask)

    return lower(f, how.graph, how.type, leaf)


def store(
    f: Function, how: EpilogueAccess, at: list[Value], j: Value, mask: Value | None,
    value: Callable[[int], Value], kind: str,
) -> None:  # fmt: skip
    """Store the outputs of a kind: a vector of a "matrix" from column j on, or the number of a "column"."""
    first = len(how.slots) - len(how.graph.outputs)
    outputs = [place for place, output in enumerate(how.graph.outputs) if output.kind == kind]
    # All are computed before one is stored: it may be the memory of a sum.
    results = [value(how.graph.outputs[place].node) for place in outputs]
    for place, result in zip(outputs, results, strict=True):
        memory, to = dtypes.get(how.slots[first + place].dtype), at[first + place]
        if kind == "column":
            store_output(f, f.shuffle(result, result, [0]), memory, to)
        else:
            store_output(f, result, memory, to + j * memory.size, mask)
