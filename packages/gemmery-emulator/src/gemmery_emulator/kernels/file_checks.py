"""The command that checks files of kernels for faults, as a hook before a commit and an action of a repository do.

A file says how it is launched, in comments that are options of `gemmery emulate`:

    // gemmery: -k add --grid 4 --block 256 --arg f32[1024]=random --arg f32[1024]=zeros --arg n=1024

Without one a file with main() runs as a program, and of another one each kernel is compiled and read.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from gemmery.errors import ArgumentError, CompileError, GemmeryError, InstallError

SHORT_HELP = "Check .cu files for faults, as before a commit."
SERVES = "Serve the emulator to an assistant (MCP)."
_LAUNCH = re.compile(r"^\s*(?://|\*|/\*)\s*gemmery:\s*(.+?)(?:\s*\*/)?\s*$", re.MULTILINE)
_PLACE = re.compile(r"([^\s:()]+\.(?:cu|cuh|h|hpp|cpp))[:(](\d+)[):]")
_DEVICE_CODE = re.compile(r"__global__|<<\s*<")
# What the host part of a program lacks on this machine, which is no fault of the file.
_LACKS = re.compile(
    r"[^\n:]*: No such file or directory|[^\n:]* file not found|does not link: [^\n]*"
    r"|[^\n]*/cccl/[^\n]*error:[^\n]*"
    r"|.(?:thrust|cu[A-Z_a-z]|CU|nv|nccl)\w*. (?:was not|has not been|is not|does not)[^\n]*"
)
_ARGUMENT = re.compile(r"did not compile for \S+: (?:error: )?identifier \"(\w+)\" is undefined")
_UNKNOWN = (
    "was not compiled: the file does not tell the arguments of the template; launch it with those in a comment, "
    '`// gemmery: -k "{}<...>" --grid 1 ...`'
)
KNOWN = {"-k": "kernel", "--kernel": "kernel", "-a": "arg", "--arg": "arg", "-o": "option", "--option": "option",
         "--grid": "grid", "--block": "block", "--shared": "shared", "--arch": "arch"}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file, and the line, 0 where it is not known."""

    file: Path
    line: int
    message: str
    counts: bool = True  # False for what was not checked, and why

    def __str__(self) -> str:
        return self.message if self.message.startswith(self.file.name) else f"{self.file}: {self.message}"

    def annotation(self) -> str:
        """The form in which an action of GitHub marks a line."""
        text = self.message.replace("%", "%25").replace("\n", "%0A")
        return f"::{'error' if self.counts else 'notice'} file={self.file},line={max(self.line, 1)}::{text}"


def launches_of(text: str) -> list[dict[str, Any]]:
    """The launches that the comments of a file ask for.

    >>> launches_of("// gemmery: -k add --grid 4 --arg n=3 --arg 4")
    [{'kernel': 'add', 'grid': '4', 'arg': ['n=3', '4']}]

    Raises ArgumentError for an option that is not known.
    """
    launches = []
    for match in _LAUNCH.finditer(text):
        launch: dict[str, Any] = {}
        try:
            words = [part for word in shlex.split(match[1]) for part in _separated(word)]
        except ValueError as error:  # of quotes
            raise ArgumentError(
                f"gemmery: {match[1]}: {error}; close each quote, or put a backslash before it"
            ) from None
        if len(words) % 2:
            raise ArgumentError(f"gemmery: {match[1]}: {words[-1]} has no value")
        for name, value in zip(words[::2], words[1::2], strict=True):
            if name not in KNOWN:
                raise ArgumentError(f"gemmery: {match[1]}: {name} is none of {', '.join(KNOWN)}")
            key = KNOWN[name]
            launch[key] = [*launch.get(key, []), value] if key in ("arg", "option") else value
        launches.append(launch)
    return launches


def _separated(word: str) -> list[str]:
    name, sign, value = word.partition("=")
    return [name, value] if sign and name.startswith("--") else [word]


def faults_of(file: Path) -> Iterator[Fault]:
    """Run or compile what is in a file, and yield what is wrong with it."""
    from gemmery_emulator.kernels.kernel import read_source

    try:
        text, _, _ = read_source(file)
        launches = launches_of(text)
        if launches:
            for launch in launches:
                yield from _of_launch(file, launch)
        elif re.search(r"^\s*(?:int|void|auto)\s+main\s*\(", text, re.MULTILINE) and _DEVICE_CODE.search(text):
            yield from _of_program(file, text)
        else:
            yield from _of_kernels(file, text)
    except InstallError:
        raise
    except (GemmeryError, MemoryError) as error:
        yield _fault(file, str(error))


def _of_launch(file: Path, launch: dict[str, Any]) -> Iterator[Fault]:
    from gemmery_emulator.kernels import written_arguments
    from gemmery_emulator.kernels.kernel import emulate, only_kernel

    values = [written_arguments.argument(text, place) for place, text in enumerate(launch.get("arg", []))]
    grid, block = (
        written_arguments.sides(name, launch.get(name, default)) for name, default in (("grid", "1"), ("block", "32"))
    )
    shared = launch.get("shared", "0")
    if not shared.isdecimal():
        raise ArgumentError(f"gemmery: --shared {shared}: write a number of bytes >= 0")
    options = {"shared": int(shared), "arch": launch.get("arch", "sm_90")}
    kernel = launch.get("kernel") or only_kernel(file)
    run = emulate(file, kernel, grid, block, values, options=tuple(launch.get("option", ())), **options)
    yield from (_fault(file, str(finding)) for finding in run.findings)


def _of_program(file: Path, text: str) -> Iterator[Fault]:
    from gemmery_emulator.kernels.host_runtime import run_program

    try:
        program = run_program(file)
    except CompileError as error:
        if not (lacks := _LACKS.search(str(error))):
            raise
        words = f"{file.name}: main() does not run here, and each kernel is only compiled: {lacks[0].strip()}"
        yield Fault(file, 0, words, counts=False)
        yield from _of_kernels(file, text)
        return
    yield from (_fault(file, note) for note in program.notes)
    yield from (_fault(file, str(finding)) for run in program.runs for finding in run.findings)
    if program.status:
        yield Fault(file, 0, f"{file.name}: main() returned {program.status}")


def _of_kernels(file: Path, text: str) -> Iterator[Fault]:
    from gemmery_emulator.kernels.kernel import NONE, compiled_kernel
    from gemmery_emulator.kernels.source_kernels import kernels_of

    kernels = kernels_of(text, file.name, file.parent)
    if not kernels:
        yield Fault(file, 0, f"{file.name} {NONE}", counts=False)
    for kernel, instances in kernels.items():
        unknown = "" if instances else kernel
        for instance in instances:
            try:
                compiled_kernel(text, file.name, file.parent, instance, "sm_90")
            except GemmeryError as error:
                if (name := _ARGUMENT.search(str(error))) and re.search(rf"<.*\b{name[1]}\b", instance):
                    unknown = instance
                else:
                    yield _fault(file, str(error))
        if unknown:
            yield Fault(file, 0, f"{file.name}: {unknown} {_UNKNOWN.format(kernel)}", counts=False)


def _fault(file: Path, message: str) -> Fault:
    lines = [int(match[2]) for match in _PLACE.finditer(message) if match[1] == file.name]
    return Fault(file, lines[0] if lines else 0, message)


def faults(
    files: Annotated[list[Path], Argument(metavar="FILES", help=".cu files.", show_default=False)],
    github: Annotated[bool, Option("--github", help="Mark the lines in a pull request.")] = False,
) -> Callable[[], int]:
    """Check .cu files for faults without a GPU: races, bounds, barriers, uninitialized reads, errors of the compiler.

    A comment `// gemmery: --grid 4 --block 256 --arg f32[1024]=random --arg n=1024` says how a kernel is launched, with
    options of `gemmery emulate`. Without one a file with main() runs as a program, and of another one each kernel is
    compiled. The exit code is 1 for a fault.
    """
    for file in files:
        if not file.is_file():
            reason = "it is a folder" if file.is_dir() else "there is no such file"
            raise ArgumentError(f"{file}: {reason}; give paths of .cu files")
        if file.suffix not in (".cu", ".cuh"):
            raise ArgumentError(f"{file}: faults are looked for in .cu and .cuh files; leave it out")
    return partial(_faults, files, github)


def _faults(files: list[Path], github: bool) -> int:
    from gemmery_emulator.kernels.command import announcer
    from gemmery_emulator.run import progress

    count, before = 0, progress.set(announcer(sys.stderr.write))
    for file in files:
        for fault in faults_of(file):
            count += fault.counts
            sys.stdout.write(f"{fault.annotation() if github else fault}\n")
            sys.stdout.flush()
    progress.reset(before)
    sys.stdout.write(f"{count} fault{'s' * (count != 1)} in {len(files)} file{'s' * (len(files) != 1)}\n")
    return 1 if count else 0


def mcp() -> Callable[[], int]:
    """Serve the emulator to an assistant by the Model Context Protocol, on standard input and output.

    Its tools run, faults, counters, predict and diff take the text of a kernel and a launch. `pip install 'mcp>=2'`.
    """
    from gemmery_emulator.kernels.mcp_server import server

    try:
        service = server()
    except ModuleNotFoundError as error:
        raise ArgumentError(str(error)) from error

    def serve() -> int:
        service.run("stdio")
        return 0

    return serve
