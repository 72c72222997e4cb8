"""The kernels of a CUDA C++ file, their parameters and their launches, as its text has them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tree_sitter import Query, QueryCursor

from gemmery.cuda import include
from gemmery.errors import ArgumentError
from gemmery_emulator.kernels.declarations import LANGUAGE, WORD, Declaration, Source, function_of
from gemmery_emulator.kernels.programs import listed
from gemmery_emulator.kernels.source_program import program_of

_LAUNCHES = Query(LANGUAGE, "(call_expression (kernel_call_syntax) @grid arguments: (argument_list) @arguments) @call")
_OF_TYPES = {"bool", "char", "const", "double", "float", "int", "long", "short", "signed", "unsigned", "__restrict__"}


def kernels_of(text: str, name: str = "kernel.cu", folder: Path | None = None) -> dict[str, tuple[str, ...]]:
    """The kernels of a program, each with its namespace; of a template the instances that the program launches.

    >>> kernels_of("template <int N> __global__ void f(int* x) { *x = N; } int main() { f<4><<<1, 1>>>(0); }")
    {'f': ('f<4>',)}
    >>> kernels_of("template <int N> __global__ void f() {} int main() { const int n = 8; f<n><<<1, 1>>>(); }")
    {'f': ('f<8>',)}
    >>> kernels_of("template <int N, class T> __global__ void f(T* x) {} int main() { f<4><<<1, 1>>>(x); }")
    {'f': ()}
    >>> kernels_of("namespace lab { __global__ void g(int* x) { *x = 1; } }")
    {'lab::g': ('lab::g',)}
    >>> kernels_of("__global__ void h(int* x, int n = 1) {} __global__ void h(const float x[], long) {}")
    {'h': ('h(int*, int)', 'h(const float*, long)')}
    """
    program = program_of(text, name, (), folder, include.folders())
    instances: dict[str, tuple[str, ...]] = {}
    of_file, values = program.by_name.keys() | program.macros.keys(), _constants(text)
    overloads: dict[str, dict[str, Any]] = {}  # by parameters, the conditions of #if
    for each in (it for it in program.kernels(name) if it.body[1]):  # others are declared alone
        alone = each.title.removesuffix("()")
        called = f"{each.scope}::{alone}" if each.scope else alone
        if "template" not in each.head:
            types = f"{called}({', '.join(map(_type, parameters_of(each)))})"
            of_name = overloads.setdefault(called, {types: each.source.conditions(each.start)})
            if each.source.conditions(each.start) in of_name.values():
                of_name.setdefault(types, of_name[next(iter(of_name))])
            instances[called] = tuple(of_name) if len(of_name) > 1 else (called,)
        elif re.search(r"\btemplate\s*<\s*[^>\s]", each.source.text[each.start : each.stop]):
            launched = re.findall(rf"\b{alone}\s*(<[^;{{}}()]*?>)\s*<<\s*<", text)
            needed = sum(is_needed for _, is_needed in template_of(each))  # of fewer a call tells the others
            whole = (it for it in launched if it.count(",") + 1 >= needed)
            known = (WORD.sub(lambda word: _constant(word[0], of_file, values), each) for each in whole)
            instances[called] = tuple(dict.fromkeys(f"{called}{' '.join(each.split())}" for each in known))
    return instances


def meant(text: str, kernel: str, name: str = "kernel.cu", folder: Path | None = None) -> str:
    """The kernel that a name may mean without its namespace, or without the arguments of a template.

    Raises ArgumentError if there is none, or several.

    >>> meant("namespace lab { template <int N> __global__ void f() {} void g() { f<4><<<1, 1>>>(); } }", "f")
    'lab::f<4>'
    """
    known = kernels_of(text, name, folder)
    called, angle, arguments = kernel.partition("<")
    candidates = [each for each in known if each == called.strip() or each.endswith(f"::{called.strip()}")]
    if angle:
        instances = [f"{each}<{arguments}" for each in candidates]
    else:
        instances = [instance for each in candidates for instance in known[each] or (each,)]
    if len(instances) == 1:
        return instances[0]
    every = [instance for each, launched in known.items() for instance in launched or (each,)]
    if instances:
        raise ArgumentError(f"kernel={kernel!r}: {name} has {listed(instances)}; name one of them")
    raise ArgumentError(f"kernel={kernel!r}: {name} has the kernels {listed(every)}; name one of them")


def declared(
    text: str, kernel: str, name: str = "kernel.cu", folder: Path | None = None
) -> tuple[tuple[str, ...], ...]:
    """The parameters of a kernel in C, for each definition of that name.

    >>> declared("__global__ void add(const float*  x, int n = 3) {}", "add")
    (('const float* x', 'int n'),)
    """
    program = program_of(text, name, (), folder, include.folders())
    called = kernel.partition("<")[0].rpartition("::")[2].strip()
    definitions = dict[tuple[str, ...], None]()
    for each in program.kernels(name):
        if each.title == f"{called}()":
            definitions[parameters_of(each)] = None
    return tuple(definitions)


def template_of(kernel: Declaration) -> list[tuple[str, bool]]:
    """The parameters of a template: their names, "" without one, and whether an instance has to name an argument."""
    above = kernel.node.parent
    node = above.child_by_field_name("parameters") if above and above.type == "template_declaration" else None
    parts = node.named_children if node else []
    words = [WORD.findall((it.text or b"").partition(b"=")[0].decode()) for it in parts]
    kinds = ("parameter_declaration", "type_parameter_declaration")
    return [(each[-1] if len(each) > 1 else "", it.type in kinds) for each, it in zip(words, parts, strict=True)]


def parameters_of(kernel: Declaration) -> tuple[str, ...]:
    """The parameters of a definition, without their default values."""
    function = function_of(kernel.node)
    parameters = function.child_by_field_name("parameters") if function else None
    if parameters is None:
        return ()
    ends = [it.start_byte for it in parameters.children if it.type in ("(", ",", ")")]
    parts = (kernel.source.words[0][start + 1 : stop] for start, stop in pairwise(ends))
    plain = (" ".join(part.decode().partition("=")[0].split()) for part in parts)
    return tuple(part for part in plain if part and part != "void")


def _type(declared: str) -> str:
    """The type of a parameter; an array is a pointer.

    >>> _type("const float* __restrict__ x"), _type("int x[4]"), _type("unsigned")
    ('const float* __restrict__', 'int*', 'unsigned')
    """
    plain = re.sub(r"\[[^\]]*\]$", "*", declared.strip())
    name = parameter_name(plain.removesuffix("*") if "[" in declared else plain)
    return re.sub(rf"\s*\b{name}\b(\**)$", r"\1", plain) if name else plain


def names_of(definitions: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The names of parameters in C, for each definition of a kernel; "" for one that is not known.

    >>> names_of(declared("__global__ void add(const float* x, float (&y)[4], int n = 3) {}", "add"))
    {('x', '', 'n')}
    """
    return {tuple(map(parameter_name, each)) for each in definitions}


_DEEP = 24  # constants that name each other
_NAMED = re.compile(
    r"#define[ \t]+(\w+)[ \t]+([^\n]+)|\bdim3\s+(\w+)\s*(?:=\s*dim3\s*)?([({][^;]*[)}])\s*;|"
    r"\b(?:int|unsigned|long|size_t|float|double|auto|u?int\d+_t)\s+(\w+)\s*=\s*([^;,]+)[;,]"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SUFFIX = re.compile(r"\b((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[uUlLfF]*\b|\b(\d+\.)[fF]")
_CAST = re.compile(r"\((?:unsigned|int|long|float|double|size_t)+\)|\b(?:static_cast\s*<[^>]*>|dim3)(?=\s*\()")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: operator.lshift}


def launch_of(text: str, kernel: str) -> tuple[Any, Any, tuple[Any, ...]]:
    r"""The grid, the block and the arguments of the first launch of a kernel, None for what the text does not tell.

    >>> launch_of("#define N 1000\nint main() { dim3 b(16, 16); f<<<(N + 15) / 16, b>>>(x, N, 2.5f); }", "f")
    (63, (16, 16), (None, 1000, 2.5))
    """
    values = _constants(text)
    called = kernel.partition("<")[0].rpartition("::")[2].strip()
    source = Source(text.replace("<< <", "<<<").replace(">> >", ">>>"))  # as formatters write it
    for _, captures in QueryCursor(_LAUNCHES).matches(source.root):
        (call,), (sides,), (arguments,) = captures["call"], captures["grid"], captures["arguments"]
        before = source.words[0][call.start_byte : sides.start_byte].decode()
        if re.search(rf"(?:^|\W){re.escape(called)}\s*(?:<.*)?$", before, re.DOTALL):
            parts = [
                [_value((it.text or b"").decode().replace("->", "."), values) for it in node.named_children]
                for node in (sides, arguments)
            ]
            grid, block, *_ = *parts[0], None, None
            return grid, block, tuple(parts[1])
    return None, None, ()


def _constants(text: str) -> dict[str, str]:
    """The expressions of a text's constants and variables, "" where one has several."""
    values: dict[str, str] = {}
    for match in _NAMED.finditer(_COMMENT.sub(" ", text)):
        name, value = next(pair for pair in zip(match.groups()[::2], match.groups()[1::2], strict=True) if pair[0])
        values[name] = value if values.get(name, value) == value else ""  # of two values neither is known
    return values


def _constant(name: str, of_file: Collection[str], values: Mapping[str, str]) -> str:
    """The value of a name that only a function of the host knows, or the name."""
    value = _value(name, values) if name not in of_file else None
    return name if value is None else str(value)


def _value(expression: str, values: Mapping[str, str], depth: int = 0) -> Any:
    """The value of an expression of C in numbers and names of constants; None if it has others."""
    plain = (
        _CAST.sub("", _SUFFIX.sub(lambda match: match[1] or match[2], expression)).replace("{", "(").replace("}", ")")
    )
    try:
        return _computed(ast.parse(plain.strip(), mode="eval").body, values, depth)
    except (ArithmeticError, LookupError, RecursionError, SyntaxError, TypeError, ValueError):
        return None


def _computed(node: ast.expr, values: Mapping[str, str], depth: int) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name) and depth < _DEEP:
        return _value(values[node.id], values, depth + 1)
    if isinstance(node, ast.Tuple):
        sides = tuple(_computed(side, values, depth) for side in node.elts)
        return sides if all(isinstance(side, int) for side in sides) else None
    if isinstance(node, ast.BinOp):
        left, right = (_computed(side, values, depth) for side in (node.left, node.right))
        if isinstance(node.op, ast.Div):
            return left // right if isinstance(left, int) and isinstance(right, int) else left / right
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand, values, depth)
    raise ValueError


def parameter_name(declared: str) -> str:
    """The last word of a parameter's type and name; "" where that may be no name."""
    word = re.fullmatch(r".*[\s*&](\w+)\s*(\[[^\]]*\]\s*)*", declared.partition("=")[0].strip(), re.DOTALL)
    return word[1] if word and "(" not in declared and word[1] not in _OF_TYPES else ""
