"""Who may import whom: three packages, the table of docs/design.md between their parts, and no circle inside a part.

Every import in the source counts: at the top of a file, inside a function, and for types alone.
"""

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import gemmery

ROOT = Path(__file__).parents[1]
SOURCES = {
    package: ROOT / "packages" / package.replace("_", "-") / "src"
    for package in ("gemmery", "gemmery_emulator", "gemmery_lab")
}

# The parts of each package, which imports from itself and those before it (docs/decisions/0034-three-packages.md).
HOUSES = {
    "gemmery": (
        "errors tuples config dtypes display problem keywords epilogues arrange banks cache tiers load arrays cpu cuda "
        "limits ladder dispatch api numpy torch jax distributed __init__ __main__ verify"
    ),
    "gemmery_emulator": "emulator pages kernels pytest",
    "gemmery_lab": "measure experiments rung_counts lab report inspection cli",
}
# The part that the modules at the top of a package are.
OWN = {"gemmery": "__init__", "gemmery_emulator": "emulator", "gemmery_lab": "lab"}
# What the library takes from above, loaded when it is first used, and why.
LAZY = {
    "gemmery_emulator.kernels.kernel.emulate": "gm.emulate runs a kernel of the user's beside its products",
    "gemmery_emulator.arguments.device_memory": "an argument of gm.emulate",
    "gemmery_emulator.hopper.tensormap.tensor_map": "an argument of gm.emulate",
    "gemmery_emulator.textures.texture": "an argument of gm.emulate",
    "gemmery_lab.inspection.notebook.inspect": "gm.inspect shows a rung of the library's in a notebook",
    "gemmery_lab.cli.main": "`python -m gemmery` is the command",
}

# A third-party library and the only places that may import it; NumPy is everyone's.
OWNERS = {
    "llvmlite": ("gemmery/cpu/llvm.py",),
    "jinja2": ("pages",),
    "matplotlib": (
        "pages",
        "report",
    ),
    "ml_dtypes": (
        "measure",
        "lab",
    ),
    "mcp": ("gemmery_emulator/kernels/mcp_server.py",),
    "mpi4py": ("gemmery_lab/over_ranks.py",),
    "platformdirs": ("gemmery/config.py",),
    "pytest": ("gemmery_emulator/pytest.py",),
    "rich": (
        "pages",
        "kernels",
        "report",
        "inspection",
        "cli",
    ),
    "tree_sitter": ("kernels",),
    "tree_sitter_cuda": ("kernels",),
    "threadpoolctl": (
        "measure",
        "lab",
    ),
    "jax": ("jax",),
    "dask": ("gemmery/distributed/dask.py",),
    "distributed": ("gemmery/distributed/dask.py",),
    "torch": (
        "distributed",
        "torch",
        "gemmery_lab/over_ranks.py",
        "gemmery_lab/measure/libraries.py",
        "gemmery_lab/measure/cublas.py",
        "gemmery_lab/measure/torch_operands.py",
    ),
    "cuda": ("cuda",),
    "cupy": ("gemmery_lab/measure/cublas.py",),
    "triton": ("gemmery_emulator/kernels/python_kernels.py",),
    "typer": (
        "pages",
        "kernels",
        "cli",
    ),
}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}


def rows() -> dict[str, float]:
    """The part -> its row in docs/design.md; `errors` and `tuples` lie below all, the package above `api`."""
    table = re.findall(r"^\| (\d+) \| (.+?) \|$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    found = {part: float(row) for row, parts in table for part in re.findall(r"\w+", re.sub(r"\(.*?\)", "", parts))}
    return {**found, "errors": -1, "tuples": -1, "__init__": found["api"] + 0.5, "__main__": found["cli"] + 0.5}


ROWS = rows()
PARTS = {package: parts.split() for package, parts in HOUSES.items()}
FLOOR = {package: floor for floor, package in enumerate(HOUSES)}


def imports(tree: ast.AST, package: str) -> list[tuple[int, str]]:
    """The line and full name of everything imported, relative names made absolute in `package`."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [(node.lineno, name.name) for name in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - level + 1], *filter(None, [module])]) if level else module
                found += [(node.lineno, f"{base}.{name.name}") for name in names]
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.append((node.lineno, name))
    return found


def module_of(path: str) -> str:
    """The full name of the module in a file, whose path begins with the package."""
    return ".".join(path.removesuffix(".py").split("/")).removesuffix(".__init__")


def part_of(module: str) -> str:
    """The part of a module: the first name in its package, or that of the package for what stands at its top."""
    package, *rest = module.split(".")
    return rest[0] if rest and (package == "gemmery" or rest[0] in PARTS[package]) else OWN[package]


def for_types_alone(node: ast.stmt) -> bool:
    """Whether it is `if TYPE_CHECKING:`, where the package names what it loads, from any row, when it is first used."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse


def violations(path: str, source: str) -> list[str]:
    """What the file at `path`, which begins with its package, does against the table: one line of words each."""
    tree = ast.parse(source)
    if path == "gemmery/__init__.py":
        tree.body = [node for node in tree.body if not for_types_alone(node)]
    part, home = part_of(module_of(path)), path.partition("/")[0]
    package = ".".join(path.split("/")[:-1])
    if part not in ROWS:
        return [f"{part} has no row in docs/design.md"]
    wrong = []
    for line, name in imports(tree, package):
        top, *rest = name.split(".")
        if top in HOUSES:
            other = rest[0] if rest and (rest[0] in PARTS[top] or (top == "gemmery" and len(rest) > 1)) else OWN[top]
            if other not in ROWS:
                wrong.append(f"line {line}: {other} has no row in docs/design.md")
            elif other != part and ROWS[other] >= ROWS[part]:
                wrong.append(f"line {line}: {part} (row {ROWS[part]:g}) imports {other} (row {ROWS[other]:g})")
            elif FLOOR[top] > FLOOR[home] and not (part == "__main__" and name in LAZY):
                wrong.append(f"line {line}: {part}, of {home}, imports {other}, of {top}")
        elif top in {"tests", "examples", "benchmarks"}:
            wrong.append(f"line {line}: the library imports {top}")
        elif top in OWNERS and not any(path == owner or part == owner for owner in OWNERS[top]):
            wrong.append(f"line {line}: {top} belongs to {' and '.join(OWNERS[top])}")
        elif top not in OWNERS and top != "numpy" and top not in sys.stdlib_module_names:
            wrong.append(f"line {line}: {top} has no owner")
        elif top == "os" and rest and rest[0] in ENVIRONMENT and part != "config":
            wrong.append(f"line {line}: only config.py reads the environment")
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attr) if attr in ENVIRONMENT and part != "config":
                wrong.append(f"line {node.lineno}: only config.py reads the environment")
    return wrong


def inside(files: Mapping[str, str]) -> dict[str, set[str]]:
    """The module of each file -> the modules of its own part that it imports; `files` maps a path to its source."""
    modules = {module_of(path) for path in files}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for path, source in files.items():
        package, module = ".".join(path.split("/")[:-1]), module_of(path)
        for _, name in imports(ast.parse(source), package):
            other = name if name in modules else name.rpartition(".")[0]  # a name in a module
            if (
                other in modules
                and other != module
                and other.partition(".")[0] == module.partition(".")[0]
                and part_of(other) == part_of(module)
            ):
                graph[module].add(other)
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The modules that reach each other by imports, one set for each knot of them."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        reached[start], ahead = set(), [start]
        while ahead:
            for module in graph[ahead.pop()] - reached[start]:
                reached[start].add(module)
                ahead.append(module)
    knots = {
        frozenset(other for other in reached[one] if one in reached[other]) for one in graph if one in reached[one]
    }
    return sorted(map(set, knots), key=sorted)


FILES = {str(path.relative_to(source)): path for source in SOURCES.values() for path in sorted(source.rglob("*.py"))}


def test_a_part_imports_only_from_rows_below_it():
    wrong = {path: violations(path, FILES[path].read_text()) for path in FILES}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


def test_each_part_is_of_one_house():
    assert sorted(part for parts in PARTS.values() for part in parts) == sorted(ROWS)


def test_the_library_names_what_it_takes_from_above():
    homes = {f"{module}.{name}" for module, names in gemmery._HOMES.items() for name in names}
    above = {name for name in homes if not name.startswith("gemmery.")}
    assert above | {"gemmery_lab.cli.main"} == set(LAZY)
    assert all(len(reason.split()) > 3 for reason in LAZY.values())


def short(modules: set[str]) -> set[str]:
    return {module.removeprefix("gemmery.") for module in modules}


def test_no_circle_of_imports_inside_a_part():
    knots = circles(inside({path: file.read_text() for path, file in FILES.items()}))
    assert [sorted(short(knot)) for knot in knots] == []


def test_the_table_of_the_design_was_read():
    assert ROWS["errors"] < ROWS["config"] == ROWS["dtypes"] == 0
    assert ROWS["cpu"] == ROWS["cuda"] == ROWS["emulator"] < ROWS["pages"] == ROWS["limits"] < ROWS["kernels"]
    assert ROWS["kernels"] == ROWS["ladder"] == ROWS["measure"] < ROWS["dispatch"] == ROWS["rung_counts"] < ROWS["api"]
    assert ROWS["api"] < ROWS["__init__"] < ROWS["lab"] == ROWS["report"] < ROWS["inspection"] < ROWS["cli"]
    assert ROWS["cli"] < ROWS["__main__"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gemmery/cpu/loops.py", "from gemmery.ladder import rung"),
        ("gemmery/cpu/loops.py", "from gemmery import dispatch"),
        ("gemmery/cpu/loops.py", "from ..ladder.rung import Rung"),
        ("gemmery/cpu/loops.py", "from .. import api"),
        ("gemmery/cpu/loops.py", "import gemmery.cuda.driver"),
        ("gemmery_lab/measure/timing.py", "def f():\n    from gemmery.ladder.cpu import CPU"),
        ("gemmery_lab/measure/timing.py", "if TYPE_CHECKING:\n    from gemmery.dispatch import Plan"),
        ("gemmery/dispatch.py", "from gemmery import matmul"),
        ("gemmery/__init__.py", "from gemmery_emulator.kernels.kernel import emulate"),
        ("gemmery/__init__.py", "def f():\n    from gemmery_lab.inspection.notebook import inspect"),
        ("gemmery/__init__.py", "if not TYPE_CHECKING:\n    from gemmery_lab.inspection.notebook import inspect"),
        ("gemmery_lab/report.py", "from gemmery_lab import RunEvent"),
        ("gemmery/api/explanation.py", "def f():\n    from gemmery_lab.measure import record"),
        ("gemmery/torch/gradients.py", "from gemmery_emulator.kernels.kernel import emulate"),
        ("gemmery/dispatch/cuda.py", "if TYPE_CHECKING:\n    from gemmery_emulator.run import EmulatedRun"),
        ("gemmery_emulator/pytest.py", "import gemmery_lab.measure.record"),
        ("gemmery_emulator/kernels/kernel.py", "from gemmery_lab import report"),
        ("gemmery/__main__.py", "from gemmery_lab.report.words import types"),
        ("gemmery_lab/rungs.py", "from gemmery_lab.inspection.records import Inspection"),
        ("gemmery_lab/report/page.py", "def f():\n    from gemmery_lab.inspection import pages"),
        ("gemmery/unheard.py", "import os"),
        ("gemmery/api.py", "import gemmery.unheard.of"),
        ("gemmery/cpu/loops.py", "import llvmlite.binding"),
        ("gemmery/cpu/loops.py", "import importlib\nimportlib.import_module('llvmlite')"),
        ("gemmery/arrays.py", "import torch"),
        ("gemmery/arrays.py", "def f():\n    return __import__('cupy')"),
        ("gemmery_lab/rungs.py", "from matplotlib import pyplot"),
        ("gemmery/api.py", "import scipy"),
        ("gemmery/verify.py", "from tests.shapes import ALL"),
        ("gemmery/api.py", "import os\nos.environ['X']"),
        ("gemmery/api.py", "import os\nos.getenv('X')"),
        ("gemmery/api.py", "from os import environ"),
    ],
)
def test_a_violation_is_caught(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gemmery/cpu/loops.py", "from gemmery.cpu import ir\nfrom . import pack\nfrom ..errors import ShapeError"),
        ("gemmery/cpu/llvm.py", "import llvmlite.binding as llvm"),
        ("gemmery/cpu/target.py", "from gemmery import config"),
        ("gemmery_lab/measure/libraries.py", "import torch"),
        ("gemmery_lab/rungs.py", "import gemmery\nfrom gemmery import matmul, api"),
        (
            "gemmery_emulator/kernels/kernel.py",
            "from gemmery.cuda import nvrtc\nfrom gemmery_emulator.pages import numerals",
        ),
        ("gemmery_lab/rungs.py", "from gemmery_emulator.kernels.kernel import emulate"),
        ("gemmery/__main__.py", "from gemmery_lab.cli import main"),
        ("gemmery/config.py", "import os\nos.environ.get('X')"),
        ("gemmery/__init__.py", "from gemmery import api"),
        (
            "gemmery/__init__.py",
            "if TYPE_CHECKING:\n    from gemmery_lab.inspection.notebook import inspect as inspect",
        ),
        ("gemmery/api.py", "import os\nos.sched_getaffinity(0)\nimport numpy as np"),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert violations(path, source) == []


@pytest.mark.parametrize(
    "back",
    [
        "from gemmery.cpu.pack import panels",
        "from gemmery.cpu import pack",
        "from . import pack",
        "import gemmery.cpu.pack",
        "def width():\n    from gemmery.cpu.pack import panels",
        "def width():\n    importlib.import_module('gemmery.cpu.pack')",
        "if TYPE_CHECKING:\n    from gemmery.cpu.pack import Panel",
    ],
)
def test_a_circle_is_caught(back):
    files = {
        "gemmery/cpu/__init__.py": "",
        "gemmery/cpu/pack.py": "from gemmery.cpu import ir",
        "gemmery/cpu/tile.py": back,
    }
    files["gemmery/cpu/ir.py"] = "from gemmery.cpu.tile import Tile"
    assert [short(knot) for knot in circles(inside(files))] == [{"cpu.pack", "cpu.ir", "cpu.tile"}]


def test_a_circle_through_a_package_is_caught():
    files = {
        "gemmery/cpu/__init__.py": "def build():\n    from gemmery.cpu import jit",
        "gemmery/cpu/jit.py": "from gemmery.cpu import build",
    }
    assert [short(knot) for knot in circles(inside(files))] == [{"cpu", "cpu.jit"}]


def test_modules_without_a_way_back_are_no_circle():
    files = {
        "gemmery/cpu/__init__.py": "from gemmery.cpu import jit",
        "gemmery/cpu/jit.py": "from gemmery.cpu import ir\nfrom gemmery.cpu import pack",
        "gemmery/cpu/pack.py": "from gemmery.cpu import ir",
        "gemmery/cpu/ir.py": "from gemmery.errors import ShapeError\nfrom gemmery.cpu.ir import Function",
        "gemmery/errors.py": "from gemmery.cpu import jit",
    }
    assert circles(inside(files)) == []
