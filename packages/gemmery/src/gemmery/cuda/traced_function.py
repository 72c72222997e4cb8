"""Graphs of operations as device code: the text of kernels/traced.cuh, and the operands behind a kernel's argument.

A kernel's instance names the function in place of an EPILOGUE: from this name the compiler finds the text. One text
serves every kernel with an epilogue, whatever its threads hold; `matrices` 2 is for tiles of the sums of two weights.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

from gemmery import cache, dtypes
from gemmery.epilogues.graph import COMPARISONS, STATISTICS, EpilogueGraph, GraphOperand, GraphOutput, Node
from gemmery.errors import RefusedError
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

HEADER = "traced.cuh"
PREFIX, PAIRED = "traced_", "traced_2_"  # of the names of functions of one sum, and of two
MAP_BYTES = 128
SECOND = "second"  # the name of the sum with a second weight where a kernel reads it as an operand
_NAME = re.compile(rf"\b{PREFIX}(?:2_)?[0-9a-f]{{16}}\b")
_INFIX = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "less": "<", "less_equal": "<=", "greater": ">",
    "greater_equal": ">=", "equal": "==", "not_equal": "!=", "and": "&&", "or": "||",
}  # fmt: skip
_CALLED = (
    "absolute", "exp", "log", "tanh", "erf", "sqrt", "rsqrt", "sigmoid", "silu", "gelu", "relu", "maximum", "minimum",
    "rint",
)  # fmt: skip
_ROW_OPERATIONS = {name: code for code, name in enumerate(STATISTICS)}  # as RowOperation of traced_rows.cu


class Strides(NamedTuple):
    """Where the elements of an operand or output lie: its address, and the steps of rows and columns, in elements."""

    pointer: int
    row: int = 0
    column: int = 0


class TracedFunction(NamedTuple):
    """A graph as device code."""

    name: str  # what stands for EPILOGUE in an instance
    text: str  # of traced.cuh
    kinds: tuple[str, ...]  # of the operands in the order of the graph, then of the outputs that it stores
    number: str  # the letter of `struct` for a number
    staged: bool = False  # whether the second output has a tensor map, by which kernels write it as they write C
    carried: tuple[int, ...] = ()  # the operands that have tensor maps, by which kernels bring them as they bring A
    exchanges: bool = False  # whether it asks for a number of whole rows, of which blocks tell each other
    mapped: bool = True  # whether a second weight has a tensor map

    @property
    def size(self) -> int:
        """Return the bytes behind the argument: whole 64, as in front of them."""
        size = sum(8 * _WORDS[kind] for kind in self.kinds) + MAP_BYTES * (self.staged + len(self.carried))
        size += (MAP_BYTES * self.mapped + 8) * self.name.startswith(PAIRED)
        return -(-size // 64) * 64

    def packed(self, operands: Iterable[Strides | float], maps: Sequence[bytes] = (), apart: int = 0) -> bytes:
        """Return these bytes.

        `maps` are those of the second weight, `apart` bytes from the first, of the second output and of operands.
        """
        parts = [*maps, struct.pack("=q", apart)] if self.name.startswith(PAIRED) else [*maps]
        for kind, operand in zip(self.kinds, operands, strict=True):
            if not isinstance(operand, Strides):
                parts.append(struct.pack(f"={self.number}", operand).ljust(8, b"\0"))
                continue
            steps = {"matrix": operand[1:], "row": operand[2:], "column": operand[1:2]}[kind]
            parts.append(struct.pack(f"=Q{len(steps)}q", operand.pointer, *steps))
        return b"".join(parts).ljust(self.size, b"\0")


_WORDS = {"matrix": 3, "row": 2, "column": 2, "number": 1}
_functions: dict[str, TracedFunction] = {}


def function(
    graph: EpilogueGraph,
    accumulator: str,
    vectors: Sequence[int],
    *,
    rows: bool = False,
    matrices: int = 1,
    staged: bool = False,
    carried: tuple[int, ...] = (),
    mapped: bool = True,
) -> TracedFunction:
    """Return the device code of a graph that has kinds and types; `accumulator` is "f32" or "f64".

    `vectors` are the adjacent and aligned elements in rows of each operand and stored output, 1 for any strides. With
    `rows` the function is that of traced_rows.cu, which stores all outputs; else the kernel stores the first one, and
    if the second is `staged`, a matrix of the same type, that one too. Operands that are `carried`, matrices and rows
    of 16 bits at multiples of 16 bytes, have tensor maps. So has a second weight if it is `mapped`.

    Raises RefusedError for an operation or type that kernels lack.
    """
    return _function(graph.text, graph, accumulator, tuple(vectors), rows, matrices, staged, carried, mapped)


@lru_cache(maxsize=1024)
def _function(
    text: str, graph: EpilogueGraph, accumulator: str, vectors: tuple[int, ...], rows: bool, matrices: int,
    staged: bool, carried: tuple[int, ...], mapped: bool,
) -> TracedFunction:  # fmt: skip
    if not rows and graph.statistics and not _exchanges(graph, matrices):
        raise RefusedError(f"{text}: these statistics of rows are taken after the product, by traced_rows")
    form = accumulator, vectors, rows, matrices, staged, carried, mapped
    key = cache.digest(text.encode(), repr(form).encode()).hex()[:16]
    name = f"{PAIRED if matrices == 2 else PREFIX}{key}"
    writer = _Writer(graph, *form)
    number = "d" if accumulator == "f64" else "f"
    exchanges = bool(graph.statistics) and not rows
    of_name = TracedFunction(name, writer.text(name), writer.kinds(), number, staged, carried, exchanges, mapped)
    return _functions.setdefault(name, of_name)


def _exchanges(graph: EpilogueGraph, matrices: int) -> bool:
    """Return True for one number of each row, which one word holds, and no matrix but the first output."""
    first, *others = graph.outputs
    single = len(graph.statistics) == 1 and graph.nodes[graph.statistics[0]].op != "row_log_sum_exp"
    kinds = first.kind == "matrix" and all(other.kind == "column" for other in others)
    return single and kinds and max(graph.sums, matrices) == 1


def rows_kernel(function: TracedFunction, sums: str, n: int, threads: int) -> str:
    """Return the instance of traced_rows for rows of n sums of this type, which follow each other."""
    row = dtypes.get(sums)
    wide = max(4, 16 // row.size)
    number = {"d": "double", "f": "float"}[function.number]
    return f"traced_rows<{row.cpp}, {number}, {function.name}, {threads}, {wide}, {wide if n % wide == 0 else 1}>"


def texts(kernel: str) -> dict[str, str]:
    """Return the files that take the place of others for an instance of a kernel: the text of its function."""
    name = _NAME.search(kernel)
    return {HEADER: _functions[name[0]].text} if name else {}


def of(problem: Problem) -> TracedFunction | None:
    """Return the function that follows a product; None where that is no traced one."""
    return _functions.get(problem.epilogue)


def is_traced(problem: Problem) -> bool:
    """Return True for a product that a traced function follows."""
    return problem.epilogue.startswith(PREFIX)


def exchanges(problem: Problem) -> bool:
    """Return True for a product whose blocks tell each other a number of each row."""
    function = of(problem)
    return function is not None and function.exchanges


def is_paired(problem: Problem) -> bool:
    """Return True for a product of two weights whose tiles have the sums of both."""
    return problem.epilogue.startswith(PAIRED)


class _Writer:
    """What writes the text of a graph."""

    def __init__(
        self, graph: EpilogueGraph, accumulator: str, vectors: tuple[int, ...], rows: bool, matrices: int,
        staged: bool, carried: tuple[int, ...], mapped: bool,
    ) -> None:  # fmt: skip
        self.mapped = mapped
        self.graph, self.rows, self.matrices, self.staged, self.carried = graph, rows, matrices, staged, carried
        self.number = dtypes.get(accumulator).cpp
        self.operands = {each.name: place for place, each in enumerate(graph.operands)}
        self.stored = graph.outputs if rows else graph.outputs[1 + staged :]
        self.vectors = vectors[: len(graph.operands)]
        self.wide = vectors[len(graph.operands) :]

    def kinds(self) -> tuple[str, ...]:
        return (*(each.kind for each in self.graph.operands), *(each.kind for each in self.stored))

    def text(self, name: str) -> str:
        paired = self.matrices == 2
        members = ["TensorMap second;"] * (paired and self.mapped) + ["TensorMap more;"] * self.staged
        members += [f"TensorMap map{i};" for i in self.carried]
        members += ["long long second_apart;"] * paired
        for i, operand in enumerate(self.graph.operands):
            members += self._member(f"x{i}", operand.kind, f"const {self._type(operand.dtype)}*")
        for i, output in enumerate(self.stored):
            members += self._member(f"y{i}", output.kind, f"{self._type(output.dtype)}*")
        levels = self._levels()
        order = [number for level in levels for number in level]
        codes = "".join(
            f"    if (statistic == {place}) return {_ROW_OPERATIONS[self.graph.nodes[number].op]};\n"
            for place, number in enumerate(order)
        )
        self.places = {number: place for place, number in enumerate(order)}
        self.known = {number: f"statistics[{place}]" for number, place in self.places.items()}
        counts = {"SUMS": self._sums() if self.rows else self.matrices, "LEVELS": len(levels)}
        short = all(dtypes.get(output.dtype).size <= 2 for output in self.graph.outputs)
        counts |= {"STATISTICS": len(order), "CARRIED": len(self.carried), "STAGED": int(self.staged)}
        counts["SHORT"] = int(short)
        parts = [
            '#pragma once\n#include "operands.cuh"' + '\n#include "tma.cuh"' * ("TensorMap" in str(members)),
            f"enum {{ {name} = TRACED }};",
            "struct Operands {\n" + "".join(f"  {member}\n" for member in members) + "};",
            "struct Function {",
            f"  enum {{ {', '.join(f'{key} = {value}' for key, value in counts.items())} }};",
        ]
        if self.rows or levels:
            levels_of = "".join(
                f"    if (statistic == {self.places[number]}) return {level};\n"
                for level, numbers in enumerate(levels)
                for number in numbers
            )
            parts += [f"  static constexpr __device__ int operation(int statistic) {{\n{codes}    return 0;\n  }}"]
            parts += [f"  static constexpr __device__ int level(int statistic) {{\n{levels_of}    return 0;\n  }}"]
            parts += [self._terms(levels)]
        parts += [] if self.rows or not levels else [self._of_row()]
        parts += [self._finish()] if self.rows else [self._maps(), self._apply()]
        return "\n".join((*parts, "};\n"))

    def _sums(self) -> int:
        """Return the sums that traced_rows loads: none where the graph reads none."""
        return max((int(node.value) + 1 for node in self.graph.nodes if node.op == "sum"), default=0)

    def _type(self, dtype: str) -> str:
        kind = dtypes.get(dtype).cpp
        if dtype not in dtypes.CASTS:
            raise RefusedError(
                f"{dtype}: functions after a product on a device read and write {', '.join(dtypes.CASTS)}"
            )
        return kind

    def _member(self, name: str, kind: str, pointer: str) -> list[str]:
        if kind == "number":
            return [f"alignas(8) {self.number} {name};"]
        steps = {"matrix": ("row", "column"), "row": ("column",), "column": ("row",)}[kind]
        return [f"{pointer} {name};", *(f"long long {name}_{step};" for step in steps)]

    def _levels(self) -> list[list[int]]:
        """Return the statistics that need none, those that need only these, and so on."""
        depth: list[int] = []
        levels: list[list[int]] = []
        for number, node in enumerate(self.graph.nodes):
            own = max((depth[i] for i in node.inputs), default=0)
            if node.op in STATISTICS:
                while len(levels) <= own:
                    levels.append([])
                levels[own].append(number)
                own += 1
            depth.append(own)
        return levels

    def _loads(self, used: set[int]) -> str:
        lines = []
        for number in sorted(used):
            node = self.graph.nodes[number]
            if node.op != "operand" or number in self.known:
                continue
            i = self.operands[node.value]
            kind, name = self.graph.operands[i].kind, f"o.x{i}"
            row = f" + min(at.i, at.m - 1) * {name}_row" if kind in ("matrix", "column") else ""
            if kind == "number":
                lines.append(f"const S x{i} = {name};")
            elif kind == "column":
                lines.append(f"const S x{i} = widen<S>({name}[min(at.i, at.m - 1) * {name}_row]);")
            else:
                lines.append(f"S x{i}[WIDTH];")
                load = f"load_row<{self.vectors[i]}>(x{i}, {name}{row}, {name}_column, at.j, at.n);"
                if i in self.carried:
                    place, element = self.carried.index(i), dtypes.get(self.graph.operands[i].dtype).cpp
                    load = f"if constexpr (HOLDS > {place}) unpack<{element}>(x{i}, held[{place}]); else {load}"
                lines.append(load)
        return "".join(f"    {line}\n" for line in lines)

    def _steps(self, used: set[int]) -> str:
        lines = []
        for number in sorted(used):
            node = self.graph.nodes[number]
            condition = "bool" if node.op in (*COMPARISONS, "and", "or", "not") else "S"
            lines.append(f"const {condition} v{number} = {self._expression(node, number)};")
        return "".join(f"      {line}\n" for line in lines)

    def _expression(self, node: Node, number: int) -> str:
        op, values = node.op, [f"v{i}" for i in node.inputs]
        if number in self.known:
            return self.known[number]
        if op == "sum":
            return "sum[x]" if node.value == "0" else "second[x]"
        if op == "operand":
            i = self.operands[node.value]
            return f"x{i}[x]" if self.graph.operands[i].kind in ("matrix", "row") else f"x{i}"
        if op == "constant":
            return _constant(node.number)
        if op == "row_index":
            return "S(at.i)"
        if op == "column_index":
            return "S(at.j + x)"
        if op in _INFIX:
            return f"{values[0]} {_INFIX[op]} {values[1]}"
        if op == "negative":
            return f"-{values[0]}"
        if op == "not":
            return f"!{values[0]}"
        if op == "where":
            return f"{values[0]} ? S({values[1]}) : S({values[2]})"
        if op == "cast":
            if node.value not in dtypes.CASTS:
                raise RefusedError(f"a cast to {node.value}: functions on a device round to {', '.join(dtypes.CASTS)}")
            return f"widen<S>(narrow<{dtypes.get(node.value).cpp}>({values[0]}))"
        if op in _CALLED:
            return f"Math::{op}({', '.join(values)})"
        raise RefusedError(f"{op}: kernels on a device have no such operation")

    def _needed(self, targets: Iterable[int]) -> set[int]:
        """Return the nodes that are computed for these, not beyond those that are known."""
        used, waiting = set[int](), list(targets)
        while waiting:
            number = waiting.pop()
            if number not in used:
                used.add(number)
                if number not in self.known:
                    waiting += self.graph.nodes[number].inputs
        return used

    def _loop(self, targets: Iterable[int], last: str) -> str:
        used = self._needed(targets)
        steps = f"{self._steps(used)}{last}"
        return f"{self._loads(used)}#pragma unroll\n    for (int x = 0; x < WIDTH; ++x) {{\n{steps}    }}\n"

    def _maps(self) -> str:
        """The functions that say which operand that is carried has which map, and whether it is a row."""
        rows = [place for place, i in enumerate(self.carried) if self.graph.operands[i].kind == "row"]
        maps = "".join(f"    if (which == {place}) return &o.map{i};\n" for place, i in enumerate(self.carried))
        return (
            "  static __device__ __forceinline__ const void* map(const Operands& o, int which) {\n"
            f"{maps}    return nullptr;\n  }}\n"
            "  static constexpr __device__ bool is_row(int which) {\n"
            f"    return {' || '.join(f'which == {place}' for place in rows) or 'false'};\n  }}"
        )

    def _apply(self) -> str:
        matrices = [(i, output.node) for i, output in enumerate(self.stored) if output.kind == "matrix"]
        outputs = [self._written(output) for output in self.graph.outputs[: 1 + self.staged]]
        last = f"      sum[x] = v{outputs[0]};\n"
        if self.staged:
            last += f"      more[x] = v{outputs[1]};\n"
        last += "".join(f"      z{i}[x] = v{node};\n" for i, node in matrices)
        arrays = "".join(f"    S z{i}[WIDTH];\n" for i, _ in matrices)
        stores = "".join(self._store(i, "") for i, _ in matrices)
        outputs += [node for _, node in matrices]
        if stores:
            stores = f"    if (at.i < at.m) {{\n{stores}    }}\n"
        return (
            "  template <class Math, int HOLDS = 0, int WIDTH, class S>\n"
            "  static __device__ __forceinline__ void apply(S (&sum)[WIDTH], const S (&second)[WIDTH], "
            "const Operands& o, Spot at,\n                                               "
            "const unsigned* held = nullptr, S* more = nullptr,\n                                               "
            f"const S* of_row = nullptr) {{\n{arrays}{self._loop(outputs, last)}{stores}  }}"
        )

    def _written(self, output: GraphOutput) -> int:
        """Return the node of an output that a kernel rounds: what a cast to the output's own type reads."""
        node = self.graph.nodes[output.node]
        return node.inputs[0] if node.op == "cast" and node.value == output.dtype else output.node

    def _of_row(self) -> str:
        """The function of a row that gives what `apply` reads of it, and stores the outputs that are a column."""
        kinds, first = self.graph.kinds(), self._written(self.graph.outputs[0])
        read = {i for j in self._needed([first]) if kinds[j] != "column" for i in (j, *self.graph.nodes[j].inputs)}
        values = [i for i in sorted(read | {first}) if kinds[i] == "column"]
        used = self._needed([*values, *(output.node for output in self.stored)])
        gives = "".join(f"    of_row[{place}] = v{number};\n" for place, number in enumerate(values))
        stores = "".join(
            f"    if (stores) o.y{i}[at.i * o.y{i}_row] = narrow<{self._type(output.dtype)}>(v{output.node});\n"
            for i, output in enumerate(self.stored)
        )
        text = (
            f"  enum {{ OF_ROW = {max(len(values), 1)} }};\n  template <class Math, class S>\n"
            "  static __device__ __forceinline__ void take_row(S (&of_row)[OF_ROW], const S* statistics, "
            "const Operands& o, Spot at,\n                                                  bool stores) {\n"
            f"{self._loads(used)}{self._steps(used)}{gives}{stores}  }}"
        )
        self.known = {number: f"of_row[{place}]" for place, number in enumerate(values)}
        return text

    def _store(self, i: int, before: str) -> str:
        name = f"o.y{i}"
        return (
            f"      {before}store_row<{self.wide[i]}>(z{i}, {name} + at.i * {name}_row, {name}_column, at.j, at.n);\n"
        )

    def _terms(self, levels: list[list[int]]) -> str:
        """The function that gives, of one level, the numbers whose statistics are taken."""
        cases = ""
        for level, numbers in enumerate(levels):
            inputs = {number: self.graph.nodes[number].inputs[0] for number in numbers}
            last = "".join(f"      term[x][{self.places[number]}] = v{inputs[number]};\n" for number in numbers)
            cases += f"    if constexpr (LEVEL == {level}) {{\n{self._loop(inputs.values(), last)}    }}\n"
        return (
            "  template <int LEVEL, class Math, int WIDTH, class S, int COUNT>\n"
            "  static __device__ __forceinline__ void terms(S (&term)[WIDTH][COUNT], const S (&sum)[WIDTH], "
            "const S (&second)[WIDTH],\n                                               const S* statistics, "
            f"const Operands& o, Spot at) {{\n{cases}  }}"
        )

    def _finish(self) -> str:
        """The function that stores the outputs of traced_rows.cu: of matrices, and by the thread that is `first`."""
        nodes = [output.node for output in self.stored]
        last = "".join(f"      z{i}[x] = v{node};\n" for i, node in enumerate(nodes))
        arrays = "".join(f"    S z{i}[WIDTH];\n" for i in range(len(nodes)))
        stores = ""
        for i, output in enumerate(self.stored):
            if output.kind == "matrix":
                stores += self._store(i, "")
            else:
                kind = self._type(output.dtype)
                stores += f"      if (at.j == 0) o.y{i}[at.i * o.y{i}_row] = narrow<{kind}>(z{i}[0]);\n"
        return (
            "  template <class Math, int WIDTH, class S>\n"
            "  static __device__ __forceinline__ void finish(const S (&sum)[WIDTH], const S (&second)[WIDTH], "
            "const S* statistics,\n                                                const Operands& o, Spot at) {\n"
            f"{arrays}{self._loop(nodes, last)}{stores}  }}"
        )


def _constant(number: float) -> str:
    """Return a number as C++ has it."""
    if number != number:
        return "S(__int_as_float(0x7fc00000))"
    if number in (float("inf"), float("-inf")):
        return f"S(__int_as_float({'0x7f800000' if number > 0 else '0xff800000'}))"
    return f"S({number.hex()})"


def second_as_operand(graph: EpilogueGraph, dtype: str) -> EpilogueGraph:
    """Return a graph of two sums as one of the first alone, which reads the second from a matrix of this type."""
    nodes = tuple(
        Node("operand", (), SECOND) if node.op == "sum" and node.value == "1" else node for node in graph.nodes
    )
    return graph._replace(nodes=nodes, operands=(*graph.operands, GraphOperand(SECOND, "matrix", dtype)))
