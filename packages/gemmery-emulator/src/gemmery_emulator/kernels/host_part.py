"""The host part of a CUDA C++ program: its text for a host compiler, in which a kernel launches itself.

A kernel's body becomes a call that hands its arguments to Python, functions of the device alone are left out, and
`k<<<grid, block>>>(x)` becomes `(configure(grid, block), k(x))`. So overloads, template arguments and conversions are
the host compiler's, as they are nvcc's. Lines keep their numbers. Its names of allocations, variables and instances of
templates, and the time that it takes for itself, are here too.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from threading import Event, Thread, get_ident
from time import perf_counter

from gemmery.cuda import include
from gemmery.errors import CompileError, EmulationError, InstallError
from gemmery_emulator.kernels.declarations import Declaration, Source, blanked, marks
from gemmery_emulator.kernels.source_kernels import parameter_name, parameters_of, template_of
from gemmery_emulator.kernels.source_program import SourceProgram
from gemmery_emulator.kernels.stand_ins import HOST_LIBRARIES
from gemmery_emulator.symbols import last_name

SECONDS = 60.0  # of the host part's own code, without launches and copies
OTHERS = (".cpp", ".cc", ".cxx", ".c")  # endings of files that have host code alone
COMPILERS = ("g++", "clang++", "c++")
# The headers of CUDA that are here, by the file that stands for them.
_STANDS = {
    "runtime.h": "cuda_runtime.h vector_functions.h cuda.h cuda_runtime_api.h device_launch_parameters.h mma.h "
    "cooperative_groups.h cooperative_groups/reduce.h cooperative_groups/scan.h cooperative_groups/memcpy_async.h "
    "cuda_profiler_api.h builtin_types.h driver_types.h cuda_pipeline.h sm_60_atomic_functions.h cuda/barrier "
    "cuda/pipeline cuda/atomic cuda/annotated_ptr cuda/ptx",
    "half.h": "cuda_fp16.h cuda_bf16.h",
    "cublas.h": "cublas_v2.h cublas.h",
    "samples.h": "helper_cuda.h helper_functions.h helper_timer.h helper_string.h",
    "host_defines.h": "crt/host_defines.h",
}
HEADERS = {header: file for file, headers in _STANDS.items() for header in headers.split()}
_ABSENT = re.compile(r"fatal error: (\S+): No such file")
_DEEP = "a/b/c/d/e"  # so that headers of "../.." are in the folder, too
_LAUNCH = re.compile(r"<<\s*<")  # formatters write << <
_CLOSED = re.compile(r">>\s*>(?=(?:\s|\\\n)*\()")
_CALLED = re.compile(r"[A-Za-z_][\w:]*\s*$")


def host_texts(program: SourceProgram) -> dict[str, str]:
    """The texts of a program's file and of its own headers for the host's compiler.

    >>> from gemmery_emulator.kernels.source_program import program_of
    >>> code = "__global__ void k(int* x) { *x = 1; } int main() { k<<<1, dim3(8)>>>(0); }"
    >>> print(host_texts(program_of(code, "a.cu", (), None, ()))["a.cu"])
    __global__ void k(int* x) { gemmery::launch("k", "", __PRETTY_FUNCTION__, __LINE__, x); } int main() { \
(gemmery::configure(1, dim3(8)), k(0)); }
    """
    host = marks(program.macros, frozenset({"__host__"}))
    device = marks(program.macros, frozenset({"__device__"}))
    texts = {}
    for file, source in program.sources.items():
        parts = [part for each in source.declarations for part in _parts(each, program, host, device)]
        texts[file] = re.sub(r"\bvoid(?=\s+main\s*\()", "int", _with_launches(blanked(source, parts)))
    return texts


def _parts(
    each: Declaration, program: SourceProgram, host: frozenset[str], device: frozenset[str], inside: bool = False
) -> Iterator[tuple[int, int, str]]:
    """What is replaced in a declaration: the bodies of kernels, and functions of the device alone."""
    if each.head & program.kernel_marks:
        if each.body[1]:
            yield *each.body, _launch(each)
    elif (
        each.kind in ("function", "guide") and each.head & device and not each.head & (host | {"constexpr", "virtual"})
    ):
        yield each.start, each.stop, ""
    for member in each.members:
        yield from _parts(member, program, host, device, True)


def _launch(kernel: Declaration) -> str:
    """The body of a kernel for the host."""
    names = [_argument(part) for part in parameters_of(kernel)]
    called = kernel.title.removesuffix("()")
    called = f"{kernel.scope}::{called}" if kernel.scope else called
    parameters = [name for name, _ in template_of(kernel)]
    listed = ", ".join([f'"{called}"', f'"{" ".join(parameters)}"', "__PRETTY_FUNCTION__", "__LINE__", *names])
    return f"{{ gemmery::launch({listed}); }}"


def _argument(declared: str) -> str:
    """A parameter as an argument of another call; a parameter without a name has no use, and no value.

    >>> _argument("const float* x"), _argument("float (*rows)[4]"), _argument("T... rest"), _argument("int")
    ('x', 'rows', 'rest...', 'gemmery::Unnamed()')
    """
    inside = re.search(r"\(\s*[*&]\s*(?:const\s+|__restrict__\s+)?(\w+)", declared)
    name = inside[1] if inside else parameter_name(declared)
    return f"{name}{'...' * ('...' in declared)}" if name else "gemmery::Unnamed()"


def _with_launches(text: str) -> str:
    """A text with calls in place of launches, also in macros."""
    tokens = [(start, stop) for kind, start, stop in Source(text).tokens if kind in ("comment", "text")]
    done, pieces = 0, list[str]()
    for match in _LAUNCH.finditer(text):
        begin = match.start()
        if begin < done or any(start <= begin < stop for start, stop in tokens):
            continue
        name = _beginning(text, begin)
        ends = (it for it in _CLOSED.finditer(text, begin) if _is_whole(text[match.end() : it.start()]))
        stop = next(ends, None)
        if name is None or stop is None:
            continue
        closed = _closing(text, text.index("(", stop.end()))
        if closed < 0:
            continue
        called, sides = text[name:begin], text[match.end() : stop.start()]
        pieces += [text[done:name], f"(gemmery::configure({sides}), {called}{text[stop.end() : closed + 1]})"]
        done = closed + 1
    return "".join([*pieces, text[done:]])


def _is_whole(text: str) -> bool:
    return text.count("(") == text.count(")") and text.count("{") == text.count("}")


def _beginning(text: str, end: int) -> int | None:
    """Where the name of a kernel begins that ends at an offset, with its template's arguments."""
    at = len(text[:end].rstrip(" \t\r\n\\"))
    if at and text[at - 1] == ">":
        at = _opening(text, at, "<(", ">)")
    if at and text[at - 1] == ")":  # of a pointer to a kernel, (*k)
        return _opening(text, at, "(", ")")
    name = _CALLED.search(text[:at])
    return name.start() if name else None


def _opening(text: str, end: int, opens: str, closes: str) -> int:
    """Where the brackets open that close before an offset."""
    depth = 0
    for at in range(end - 1, -1, -1):
        depth += (text[at] in closes) - (text[at] in opens)
        if depth == 0 or text[at] in ";{}":
            return at
    return 0


def _closing(text: str, opened: int) -> int:
    depth = 0
    for kind, start, _ in Source(text[opened:]).tokens:
        if kind == "bracket" and text[opened + start] in "()":
            depth += 1 if text[opened + start] == "(" else -1
            if depth == 0:
                return opened + start
    for at in range(opened, len(text)):  # in a macro
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return -1


def compiler() -> str:
    """The host compiler; raises InstallError if there is none."""
    path = next((place for name in COMPILERS if (place := shutil.which(name))), "")
    if not path:
        raise InstallError(
            f"running main() needs a compiler of C++ on the PATH ({' or '.join(COMPILERS)}), and there is none: "
            "install one, or run the kernels alone, without --run"
        )
    return path


def library(program: SourceProgram, folder: Path | None, options: Sequence[str], into: Path) -> Path:
    """Compile the host part of a program to a shared library; raises CompileError with the compiler's words."""
    where = into / _DEEP
    texts = host_texts(program)
    for header, stands in HEADERS.items():
        if header not in texts:
            path = into / "headers" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            text = files(__package__).joinpath("host", stands).read_text(encoding="utf-8")
            path.write_text(text, encoding="utf-8")
    for file, text in texts.items():
        path = where / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    built = into / f"program{len(list(into.glob('*.so')))}.so"  # of each attempt, as a name is loaded once
    passed = [each for each in options if re.match(r"-[DUI]|-std", each)]
    searched = [part for path in include.folders() for part in ("-idirafter", path)]
    beside = ["-I", str(folder)] if folder else []
    paths = [str(Path(each).resolve()) for each in options if each.endswith(OTHERS)]
    others = [each for each in paths if not each.endswith(".c")]
    in_c = {each: str(into / f"{number}.o") for number, each in enumerate(paths) if each.endswith(".c")}
    openmp = ["-fopenmp"] if any("<omp.h>" in text for text in texts.values()) else []
    driver = compiler()
    # Without this, variables of headers are those of the first program in this process.
    alone = ["-fno-gnu-unique"] if Path(driver).name == "g++" else []
    flags = "-shared -fPIC -O1 -w -fpermissive -std=gnu++17 -D__CUDACC__ -D__NVCC__ -include cuda_runtime.h"
    places = ["-I", str(where), "-I", str(into / "headers"), *beside, *searched]
    libraries = ["-o", str(built), "-Wl,--wrap=exit", "-ldl", "-lm", "-lpthread"]
    command = [driver, *alone, *flags.split(), *passed, *places, *openmp, "-x", "c++", program.name, *others]
    command += ["-x", "none", *in_c.values(), *libraries]
    plain = [driver, "-x", "c", "-c", "-fPIC", "-O1", "-w", *passed, *beside]
    for each in (*([*plain, source, "-o", place] for source, place in in_c.items()), command):
        done = subprocess.run(each, cwd=where, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            words = done.stderr.replace(str(where) + "/", "").replace(str(into / "headers") + "/", "")
            ways = f"{_shortened(words)}{_way_out(program, words)}"
            raise CompileError(f"the host part of {program.name} does not compile:\n{ways}")
    return built


LINES = 24  # of a compiler's words that are shown


def _way_out(program: SourceProgram, words: str) -> str:
    """What to do where a header is missing, or of a library that runs on a GPU alone."""
    own = (header for header in _ABSENT.findall(words) if header in program.missing)
    says = dict.fromkeys(own, "is not here: name its folder with --option -IFOLDER")
    of_gpu = (header for header, _, _ in program.includes() if header.startswith(HOST_LIBRARIES))
    says |= dict.fromkeys(of_gpu, "is of Thrust or CUB, which need a GPU: write that part as a kernel or for the host")
    return "".join(f"\n{header} {what}; the kernels alone run without --run" for header, what in [*says.items()][:1])


def _shortened(words: str) -> str:
    lines = [line for line in words.splitlines() if not re.match(r"In file included|\s+from ", line)]
    return "\n".join(lines[:LINES]) + ("\n..." if len(lines) > LINES else "")


def build_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for one program."""
    return tempfile.TemporaryDirectory(prefix="gemmery-")


# ---- its names ----


def allocation_name(name: str, line: int) -> str:
    """The name of an allocation: "d_a (line 12)" of "(void**)&d_a, n * sizeof(float)"."""
    first = re.sub(r"^\s*\([^()]*\*\s*\)|^\s*(reinterpret_cast|static_cast)\s*<[^>]*>", "", name)
    words = re.findall(r"[A-Za-z_]\w*", first.partition(",")[0])
    return f"{words[-1] if words else 'memory'} (line {line})"


def plain(symbol: str) -> str:
    """The last name in a symbol of a variable: "table" of "_ZN3lab5tableE"."""
    name = last_name(symbol)
    return name if name.isidentifier() and not symbol.startswith(("_ZN4cuda", "_ZZ")) else symbol


def instance(name: str, parameters: Sequence[str], pretty: str) -> str:
    """A kernel's name with the arguments of its template, which a compiler of C++ writes after a function's name.

    >>> instance("f", ["T", "N"], "void f(T*) [with T = float; int N = 4]")
    'f<float, 4>'
    """
    if not any(parameters):
        return name
    inside = pretty[pretty.rindex("[") :].removeprefix("[with ").removeprefix("[").removesuffix("]")
    values = []
    for place, parameter in enumerate(parameters, 1):
        called = rf"\b{parameter}" if parameter else f"<template-parameter-1-{place}>"
        piece = re.search(rf"(?:^|[;,] )[^;=]*?{called} = (.*?)(?=; |, \w+ = |$)", inside)
        if not piece or "lambda" in piece[1]:
            raise EmulationError(f"{pretty}: an argument of the template has no name that another compiler knows")
        values.append(piece[1].removeprefix("{").removesuffix("}"))
    return f"{name}<{', '.join(value for value in values if value)}>"


# ---- its time ----


@dataclass
class HostClock:
    """Runs while the host part's own code does."""

    own: float = 0.0  # seconds up to ...
    since: float | None = field(default_factory=perf_counter)  # ... when the code went on; None in a call

    @property
    def seconds(self) -> float:
        """Seconds of the host part's own code."""
        since = self.since
        return self.own + (perf_counter() - since if since is not None else 0)

    def pause(self) -> None:
        """A call begins."""
        self.own, self.since = self.seconds, None

    def proceed(self) -> None:
        """A call ends."""
        self.since = perf_counter()

    @contextmanager
    def watched(self, seconds: float) -> Iterator[None]:
        """Send this thread a signal again and again, once the host part's own code has run for `seconds`."""
        thread, done, seconds = get_ident(), Event(), max(seconds, 0.05)  # so that the program has its handler by then

        def watch() -> None:
            while not done.wait(0.005 if self.seconds > seconds else min(0.2, seconds)):
                if self.seconds > seconds:
                    signal.pthread_kill(thread, signal.SIGVTALRM)

        watcher = Thread(target=watch, daemon=True)
        self.proceed()
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
