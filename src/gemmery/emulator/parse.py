"""PTX text to Module: what stands outside of functions.

NVIDIA, Parallel Thread Execution ISA 9.0, chapters 4, 5 and 11.
"""

from __future__ import annotations

import re

from gemmery.emulator.body import Body, place
from gemmery.emulator.ptx import Kernel, Module, Parameter, Variable
from gemmery.emulator.scopes import Scope
from gemmery.emulator.variables import laid_out, variable
from gemmery.errors import EmulationError

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_FILE = re.compile(r'^[ \t]*\.file\s+(\d+)\s+"([^"]*)"[^\n]*', re.MULTILINE)
_SECTION = re.compile(r"^[ \t]*\.section[^{\n]*\s*\{[^}]*\}", re.MULTILINE)
_TOP = re.compile(
    r"""\s*(?:
        \.(?P<fact>version|target|address_size) \s+ (?P<value>[^\n]*)
      | (?:\.(?:visible|weak|extern|common)\s+)* \.(?P<function>entry|func) \s* (?:\((?P<results>[^()]*)\))? \s*
        (?P<name>[\w$%]+) \s* (?:\((?P<parameters>[^()]*)\))? (?P<limits>[^{;]*) (?P<opening>[{;])
      | (?P<variable>\. [^;]*) ;
    )""",
    re.VERBOSE,
)
_LIMIT = re.compile(r"\.(\w+)([\s,\d]*)")


def module(text: str) -> Module:
    """All kernels of a PTX text; raises EmulationError with the line of what is not understood."""
    files = {number: re.split(r"[/\\]", path)[-1] for number, path in _FILE.findall(text)}
    text = _FILE.sub("", _COMMENT.sub(_blank, text))
    text = _SECTION.sub(_blank, text)
    facts: dict[str, str] = {}
    scope = Scope()
    bodies: dict[str, tuple[Body, list[Parameter], str]] = {}
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOP.match(text, at)
        try:
            if not found:
                raise EmulationError("no directive is known that begins so, or it does not end")
            if found["fact"]:
                facts[found["fact"]] = found["value"].replace(",", " ").split()[0]
            elif found["variable"]:
                if not found["variable"].startswith(".pragma"):
                    scope.add(variable(found["variable"])[0])
            elif found["opening"] == "{" and found["function"] == "func":
                raise EmulationError("device functions are not inlined yet")
            elif found["opening"] == "{":
                inside = Scope(scope)
                parameters = _parameters(found["parameters"] or "", inside)
                body = Body(text, found.end(), inside, files)
                bodies[found["name"]] = body, parameters, found["limits"]
        except EmulationError as error:
            raise EmulationError(f"{place(text, at)}: {error}") from None
        at = found.end()
        if found["opening"] == "{":
            at = body.read()
    if not bodies:
        raise EmulationError("this PTX has no .entry: a kernel is a function that is __global__")
    outer, _ = _spaces(list(scope.variables.values()), ("global", "const"))
    kernels = {name: _kernel(name, *parts, scope, outer) for name, parts in bodies.items()}
    return Module(facts.get("version", ""), facts.get("target", ""), kernels)


def _blank(found: re.Match[str]) -> str:
    """A comment's line ends, so that lines keep their numbers; a string stays."""
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


def _spaces(variables: list[Variable], spaces: tuple[str, ...]) -> tuple[dict[str, Variable], dict[str, int]]:
    placed: dict[str, Variable] = {}
    sizes = {}
    for space in spaces:
        found, sizes[space] = laid_out([made for made in variables if made.space == space])
        placed |= found
    return placed, sizes


def _kernel(
    name: str, body: Body, parameters: list[Parameter], limits: str, scope: Scope, outer: dict[str, Variable]
) -> Kernel:
    """Lay out the memory of one kernel; of the module's shared variables those that it names."""
    used = [made for made in scope.variables.values() if made.space == "shared" and made.name in body.scope.seen]
    inner, sizes = _spaces(used + list(body.scope.memory.values()), ("shared", "local"))
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
