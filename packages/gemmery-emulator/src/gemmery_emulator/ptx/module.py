"""Read a PTX text as a PtxModule: the statements outside functions.

NVIDIA, Parallel Thread Execution ISA 9.0, "Syntax", "State Spaces, Types, and Variables" and "Directives".
"""

from __future__ import annotations

import gc
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from gemmery.errors import EmulationError
from gemmery_emulator.ptx import Parameter, PtxKernel, PtxModule, Register, Symbol, Variable
from gemmery_emulator.ptx.body import Body, address, place, with_functions
from gemmery_emulator.ptx.calls import DeviceFunction, Functions, expand
from gemmery_emulator.ptx.scopes import REGISTERS, Scope, laid_out, variable

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_FILE = re.compile(r'^[ \t]*\.file\s+(\d+)\s+"([^"]*)"[^\n]*', re.MULTILINE)
_SECTION = re.compile(r"^[ \t]*\.section[^{\n]*\s*\{[^}]*\}", re.MULTILINE)
_TOP = re.compile(
    r"""\s*(?:
        \.(?P<fact>version|target|address_size) \s+ (?P<value>[^\n]*)
      | (?:\.(?:visible|weak|extern|common)\s+)* \.(?P<function>entry|func) \s* (?:\((?P<results>[^()]*)\))? \s*
        (?P<name>[\w$%]+) \s* (?:\((?P<parameters>[^()]*)\))? (?P<limits>[^{;]*) (?P<opening>[{;])
      | (?P<variable>\. (?:"[^"]*"|[^;"])*) ;
    )""",
    re.VERBOSE,
)
_LIMIT = re.compile(r"\.(\w+)([\s,\d]*)")


@contextmanager
def without_collection() -> Iterator[None]:
    """Leave garbage for later: tens of thousands of objects that stay are searched again and again for cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@without_collection()
def parse(text: str, wrappers: Collection[str] = ()) -> PtxModule:
    r"""Read all kernels of a PTX text as NVRTC, Triton, Numba or a person wrote it.

    `wrappers` names source files whose functions each wrap one instruction: `calling` drops their lines.

    >>> module = parse(".version 8.0\n.target sm_90\n.visible .entry f() { .reg .b32 %r<2>; mov.b32 %r1, 42; ret; }")
    >>> module.kernels["f"].instructions[0].text
    'mov.b32 %r1, 42'

    Raises EmulationError, with the line, for text that is not valid or not modeled.
    """
    files = {number: re.split(r"[/\\]", path)[-1] for number, path in _FILE.findall(text)}
    text = _FILE.sub("", _COMMENT.sub(_blank, text))
    text = _SECTION.sub(_blank, text)
    facts: dict[str, str] = {}
    scope = Scope()
    kernels: dict[str, tuple[Body, list[Parameter], str]] = {}
    functions: dict[str, DeviceFunction] = {}
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOP.match(text, at)
        try:
            if not match:
                raise EmulationError("this is not a known directive, or its end is missing")
            if match["fact"]:
                facts[match["fact"]] = match["value"].replace(",", " ").strip().partition(" ")[0]
            elif match["variable"]:
                if not match["variable"].startswith(".pragma"):
                    scope.add(variable(match["variable"])[0])
            else:
                scope.functions.setdefault(match["name"], address(len(scope.functions)))
            if match["opening"] == "{":
                kernel = match["function"] == "entry"
                suffix = "" if kernel else f".{match['name']}"
                inside = Scope(scope, suffix, functions=scope.functions, pointed=scope.pointed)
                body = Body(text, match.end(), inside, files, wrappers)
                if kernel:
                    kernels[match["name"]] = body, _parameters(match["parameters"] or "", inside), match["limits"]
                else:
                    results, passed = (_passed(match[group] or "", inside) for group in ("results", "parameters"))
                    functions[match["name"]] = DeviceFunction(match["name"], body, results, passed)
        except EmulationError as error:
            raise EmulationError(f"{place(text, at)}: {error}") from None
        at = body.read() if match["opening"] == "{" else match.end()
    if not kernels:
        raise EmulationError("this PTX has no .entry: a kernel is a function that is __global__")
    initial = {name for variable in scope.variables.values() for _, name, _ in variable.pointers}
    pointed = {name: at for name, at in scope.functions.items() if name in initial | scope.pointed}
    outer, _ = _spaces([with_functions(each, pointed) for each in scope.variables.values()], ("global", "const"))
    for body, parameters, _ in kernels.values():
        expand(body, [parameter.name for parameter in parameters], Functions(functions, pointed))
    entries = {at: name for name, at in pointed.items() if name in kernels}
    read = {name: _kernel(name, *kernel, scope, outer, entries) for name, kernel in kernels.items()}
    return PtxModule(facts.get("version", ""), facts.get("target", ""), read)


def _blank(match: re.Match[str]) -> str:
    """Replace a comment by its line ends, to keep line numbers; keep a string."""
    return match[0] if match[0][0] == '"' else " " + "\n" * match[0].count("\n")


def _parameters(text: str, scope: Scope) -> list[Parameter]:
    listed: list[Parameter] = []
    start = 0
    for declaration in text.split(",") if text.strip() else []:
        declared, type_ = variable(declaration)
        offset = -(-start // declared.align) * declared.align
        listed.append(Parameter(declared.name, type_, offset, declared.size))
        scope.add(declared)
        start = offset + declared.size
    return listed


def _passed(text: str, scope: Scope) -> tuple[Register | Symbol, ...]:
    """Read the results or parameters of a .func: .reg .b32 x, .param .b64 y."""
    operands: list[Register | Symbol] = []
    for declaration in text.split(",") if text.strip() else []:
        words = declaration.split()
        if words[:1] == [".reg"]:
            if len(words) != 3 or words[1][1:] not in REGISTERS:
                raise EmulationError(f"{declaration.strip()!r}: a register is declared as .reg .b32 name")
            operands.append(scope.declare(words[2], words[1][1:]))
        else:
            operands.append(Symbol(scope.add(variable(declaration)[0]).name))
    return tuple(operands)


def _spaces(variables: Iterable[Variable], spaces: tuple[str, ...]) -> tuple[dict[str, Variable], dict[str, int]]:
    placed: dict[str, Variable] = {}
    sizes = {}
    for space in spaces:
        inside, sizes[space] = laid_out([declared for declared in variables if declared.space == space])
        placed |= inside
    return placed, sizes


def _kernel(
    name: str,
    body: Body,
    parameters: list[Parameter],
    limits: str,
    scope: Scope,
    outer: dict[str, Variable],
    entries: dict[int, str],
) -> PtxKernel:
    """Lay out a kernel's memory as ptxas does: its own variables, then those of the module that it uses."""
    used = [each for each in scope.variables.values() if each.space == "shared" and each.name in body.scope.used]
    inner, sizes = _spaces([*body.scope.memory.values(), *used], ("shared", "local"))
    return PtxKernel(
        name,
        tuple(parameters),
        body.scope.types,
        inner | outer,
        sizes["shared"],
        sizes["local"],
        tuple(body.instructions),
        body.labels,
        {word: tuple(int(value) for value in re.findall(r"\d+", values)) for word, values in _LIMIT.findall(limits)},
        entries,
    )
