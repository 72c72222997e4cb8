"""Read a PTX text as a Module: the statements outside functions.

NVIDIA, Parallel Thread Execution ISA 9.0, "Syntax", "State Spaces, Types, and Variables" and "Directives".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from gemmery.emulator.ptx import Kernel, Module, Parameter, Register, Symbol, Variable
from gemmery.emulator.ptx.body import Body, place
from gemmery.emulator.ptx.calls import Function, expand
from gemmery.emulator.ptx.scopes import Scope
from gemmery.emulator.ptx.variables import REGISTERS, laid_out, variable
from gemmery.errors import EmulationError

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


def parse(text: str, wrappers: Collection[str] = ()) -> Module:
    r"""Read all kernels of a PTX text as NVRTC, Triton, Numba or a person wrote it.

    `wrappers` names source files whose functions each wrap one instruction: `calling` drops their lines.

    >>> module = parse(".version 8.0\n.target sm_90\n.visible .entry f() { .reg .b32 %r<2>; mov.b32 %r1, 42; ret; }")
    >>> module.kernels["f"].instructions[0].text
    'mov.b32 %r1, 42'

    Raises EmulationError, with the line, for text that is not valid or not modelled.
    """
    files = {number: re.split(r"[/\\]", path)[-1] for number, path in _FILE.findall(text)}
    text = _FILE.sub("", _COMMENT.sub(_blank, text))
    text = _SECTION.sub(_blank, text)
    facts: dict[str, str] = {}
    scope = Scope()
    kernels: dict[str, tuple[Body, list[Parameter], str]] = {}
    functions: dict[str, Function] = {}
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOP.match(text, at)
        try:
            if not found:
                raise EmulationError("this is not a known directive, or its end is missing")
            if found["fact"]:
                facts[found["fact"]] = found["value"].replace(",", " ").strip().partition(" ")[0]
            elif found["variable"]:
                if not found["variable"].startswith(".pragma"):
                    scope.add(variable(found["variable"])[0])
            elif found["opening"] == "{":
                kernel = found["function"] == "entry"
                inside = Scope(scope, "" if kernel else f".{found['name']}")
                body = Body(text, found.end(), inside, files, wrappers)
                if kernel:
                    kernels[found["name"]] = body, _parameters(found["parameters"] or "", inside), found["limits"]
                else:
                    results, given = (_passed(found[group] or "", inside) for group in ("results", "parameters"))
                    functions[found["name"]] = Function(found["name"], body, results, given)
        except EmulationError as error:
            raise EmulationError(f"{place(text, at)}: {error}") from None
        at = body.read() if found["opening"] == "{" else found.end()
    if not kernels:
        raise EmulationError("this PTX has no .entry: a kernel is a function that is __global__")
    outer, _ = _spaces(scope.variables.values(), ("global", "const"))
    for body, parameters, _ in kernels.values():
        expand(body, [one.name for one in parameters], functions)
    made = {name: _kernel(name, *kernel, scope, outer) for name, kernel in kernels.items()}
    return Module(facts.get("version", ""), facts.get("target", ""), made)


def _blank(found: re.Match[str]) -> str:
    """Replace a comment by its line ends, to keep line numbers; keep a string."""
    return found[0] if found[0][0] == '"' else " " + "\n" * found[0].count("\n")


def _parameters(text: str, scope: Scope) -> list[Parameter]:
    listed: list[Parameter] = []
    start = 0
    for declaration in text.split(",") if text.strip() else []:
        made, type_ = variable(declaration)
        offset = -(-start // made.align) * made.align
        listed.append(Parameter(made.name, type_, offset, made.size))
        scope.add(made)
        start = offset + made.size
    return listed


def _passed(text: str, scope: Scope) -> tuple[Register | Symbol, ...]:
    """Read the results or parameters of a .func: .reg .b32 x, .param .b64 y."""
    made: list[Register | Symbol] = []
    for declaration in text.split(",") if text.strip() else []:
        words = declaration.split()
        if words[:1] == [".reg"]:
            if len(words) != 3 or words[1][1:] not in REGISTERS:
                raise EmulationError(f"{declaration.strip()!r}: a register is declared as .reg .b32 name")
            made.append(scope.declare(words[2], words[1][1:]))
        else:
            made.append(Symbol(scope.add(variable(declaration)[0]).name))
    return tuple(made)


def _spaces(variables: Iterable[Variable], spaces: tuple[str, ...]) -> tuple[dict[str, Variable], dict[str, int]]:
    placed: dict[str, Variable] = {}
    sizes = {}
    for space in spaces:
        found, sizes[space] = laid_out([made for made in variables if made.space == space])
        placed |= found
    return placed, sizes


def _kernel(
    name: str, body: Body, parameters: list[Parameter], limits: str, scope: Scope, outer: dict[str, Variable]
) -> Kernel:
    """Lay out a kernel's memory as ptxas does: its own variables, then those of the module that it uses."""
    used = [made for made in scope.variables.values() if made.space == "shared" and made.name in body.scope.seen]
    inner, sizes = _spaces([*body.scope.memory.values(), *used], ("shared", "local"))
    return Kernel(
        name,
        tuple(parameters),
        body.scope.taken,
        inner | outer,
        sizes["shared"],
        sizes["local"],
        tuple(body.instructions),
        body.labels,
        {word: tuple(int(value) for value in re.findall(r"\d+", values)) for word, values in _LIMIT.findall(limits)},
    )
