"""Who may import whom: three houses, the table of docs/design.md between their parts, and no circle inside a part.

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
SOURCE = ROOT / "src" / "gemmery"

# Each part is of one house, and imports from its own house and those before it (docs/decisions/0032-three-houses.md).
HOUSES = {
    "library": (
        "errors tuples config dtypes display problem keywords arrange banks cache tiers load arrays cpu cuda limits "
        "ladder dispatch tune api torch jax distributed __init__ __main__"
    ),
    "emulator": "emulator pages emulation pytest",
    "laboratory": "bench verify experiments rung_counts lab report inspection cli",
}
# What the library takes from above, loaded when it is first used, and why.
LAZY = {
    "gemmery.emulation.kernel.emulate": "gm.emulate runs a kernel of the user's beside its products",
    "gemmery.emulation.device_arrays.device_memory": "an argument of gm.emulate",
    "gemmery.emulator.hopper.tensormap.tensor_map": "an argument of gm.emulate",
    "gemmery.emulator.textures.texture": "an argument of gm.emulate",
    "gemmery.inspection.notebook.inspect": "gm.inspect shows a rung of the library's in a notebook",
    "gemmery.cli.main": "`python -m gemmery` is the command",
}

# A third-party library and the only places that may import it; NumPy is everyone's.
OWNERS = {
    "llvmlite": ("cpu/jit.py",),
    "jinja2": ("pages",),
    "matplotlib": ("pages", "report"),
    "ml_dtypes": ("bench", "lab"),
    "platformdirs": ("config.py",),
    "pytest": ("pytest.py",),
    "rich": ("pages", "emulation", "report", "inspection", "cli"),
    "threadpoolctl": ("bench", "lab"),
    "jax": ("jax",),
    "torch": ("torch", "bench/libraries.py", "bench/cublas.py", "bench/torch_operands.py"),
    "cuda": ("cuda",),
    "cupy": ("bench/cublas.py",),
    "typer": ("pages", "emulation", "cli"),
}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}


def rows() -> dict[str, float]:
    """The part -> its row in docs/design.md; `errors` and `tuples` lie below all, the package above `api`."""
    table = re.findall(r"^\| (\d+) \| (.+?) \|$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    found = {part: float(row) for row, parts in table for part in re.findall(r"\w+", re.sub(r"\(.*?\)", "", parts))}
    return {**found, "errors": -1, "tuples": -1, "__init__": found["api"] + 0.5, "__main__": found["cli"] + 0.5}


ROWS = rows()
FLOOR = {
    part: floor for floor, parts in enumerate(HOUSES.values()) for part in parts.split()
}  # a part -> that of its house


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


def for_types_alone(node: ast.stmt) -> bool:
    """Whether it is `if TYPE_CHECKING:`, where the package names what it loads, from any row, when it is first used."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse


def violations(path: str, source: str) -> list[str]:
    """What the file at `path`, relative to src/gemmery, does against the table: one line of words each."""
    tree = ast.parse(source)
    if path == "__init__.py":
        tree.body = [node for node in tree.body if not for_types_alone(node)]
    part = path.split("/", maxsplit=1)[0].removesuffix(".py")
    package = ".".join(["gemmery", *path.split("/")[:-1]])
    if part not in ROWS:
        return [f"{part} has no row in docs/design.md"]
    house = list(HOUSES)[FLOOR[part]]
    wrong = []
    for line, name in imports(tree, package):
        top, *rest = name.split(".")
        if top == "gemmery":
            other = rest[0] if (rest and rest[0] in ROWS) or len(rest) > 1 else "__init__"
            if other not in ROWS:
                wrong.append(f"line {line}: {other} has no row in docs/design.md")
            elif other != part and ROWS[other] >= ROWS[part]:
                wrong.append(f"line {line}: {part} (row {ROWS[part]:g}) imports {other} (row {ROWS[other]:g})")
            elif FLOOR[other] > FLOOR[part] and not (part == "__main__" and name in LAZY):
                wrong.append(
                    f"line {line}: {part}, of the {house}, imports {other}, of the {list(HOUSES)[FLOOR[other]]}"
                )
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
    modules = {".".join(["gemmery", *path.removesuffix(".py").split("/")]).removesuffix(".__init__") for path in files}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for path, source in files.items():
        package = ".".join(["gemmery", *path.split("/")[:-1]])
        module = package if path.endswith("__init__.py") else f"{package}.{path.split('/')[-1].removesuffix('.py')}"
        part = module.split(".")[1:2]
        for _, name in imports(ast.parse(source), package):
            other = name if name in modules else name.rpartition(".")[0]  # a name in a module
            if other in modules and other != module and other.split(".")[1:2] == part:
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


FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def test_a_part_imports_only_from_rows_below_it():
    wrong = {path: violations(path, (SOURCE / path).read_text()) for path in FILES}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


def test_each_part_is_of_one_house():
    assert sorted(part for parts in HOUSES.values() for part in parts.split()) == sorted(ROWS)


def test_the_library_names_what_it_takes_from_above():
    homes = {f"{module}.{name}" for module, names in gemmery._HOMES.items() for name in names}
    above = {name for name in homes if FLOOR[name.split(".")[1]] > FLOOR["__init__"]}
    assert above | {"gemmery.cli.main"} == set(LAZY)
    assert all(len(reason.split()) > 3 for reason in LAZY.values())


def short(modules: set[str]) -> set[str]:
    return {module.removeprefix("gemmery.") for module in modules}


def test_no_circle_of_imports_inside_a_part():
    knots = circles(inside({path: (SOURCE / path).read_text() for path in FILES}))
    assert [sorted(short(knot)) for knot in knots] == []


def test_the_table_of_the_design_was_read():
    assert ROWS["errors"] < ROWS["config"] == ROWS["dtypes"] == 0
    assert ROWS["cpu"] == ROWS["cuda"] == ROWS["emulator"] < ROWS["pages"] == ROWS["limits"] < ROWS["emulation"]
    assert ROWS["emulation"] == ROWS["ladder"] == ROWS["bench"] < ROWS["dispatch"] == ROWS["rung_counts"] < ROWS["api"]
    assert ROWS["api"] < ROWS["__init__"] < ROWS["lab"] == ROWS["report"] < ROWS["inspection"] < ROWS["cli"]
    assert ROWS["cli"] < ROWS["__main__"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cpu/loops.py", "from gemmery.ladder import rung"),
        ("cpu/loops.py", "from gemmery import dispatch"),
        ("cpu/loops.py", "from ..ladder.rung import Rung"),
        ("cpu/loops.py", "from .. import api"),
        ("cpu/loops.py", "import gemmery.cuda.driver"),
        ("bench/timing.py", "def f():\n    from gemmery.ladder.cpu import CPU"),
        ("bench/timing.py", "if TYPE_CHECKING:\n    from gemmery.dispatch import Plan"),
        ("dispatch.py", "from gemmery import matmul"),
        ("__init__.py", "from gemmery.emulation.kernel import emulate"),
        ("__init__.py", "def f():\n    from gemmery.inspection.notebook import inspect"),
        ("__init__.py", "if not TYPE_CHECKING:\n    from gemmery.inspection.notebook import inspect"),
        ("report.py", "from gemmery.lab import RunEvent"),
        ("api/explanation.py", "def f():\n    from gemmery.bench import record"),
        ("torch/eager.py", "from gemmery.emulation.kernel import emulate"),
        ("dispatch/cuda.py", "if TYPE_CHECKING:\n    from gemmery.emulator.run import EmulatedRun"),
        ("pytest.py", "import gemmery.bench.record"),
        ("emulation/kernel.py", "from gemmery import verify"),
        ("__main__.py", "from gemmery.report.words import types"),
        ("lab/rungs.py", "from gemmery.inspection.records import Inspection"),
        ("report/page.py", "def f():\n    from gemmery.inspection import pages"),
        ("unheard.py", "import os"),
        ("api.py", "import gemmery.unheard.of"),
        ("cpu/loops.py", "import llvmlite.binding"),
        ("cpu/loops.py", "import importlib\nimportlib.import_module('llvmlite')"),
        ("arrays.py", "import torch"),
        ("arrays.py", "def f():\n    return __import__('cupy')"),
        ("lab/rungs.py", "from matplotlib import pyplot"),
        ("api.py", "import scipy"),
        ("verify.py", "from tests.shapes import ALL"),
        ("api.py", "import os\nos.environ['X']"),
        ("api.py", "import os\nos.getenv('X')"),
        ("api.py", "from os import environ"),
    ],
)
def test_a_violation_is_caught(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cpu/loops.py", "from gemmery.cpu import ir\nfrom . import pack\nfrom ..errors import ShapeError"),
        ("cpu/jit.py", "import llvmlite.binding as llvm"),
        ("cpu/target.py", "from gemmery import config"),
        ("bench/libraries.py", "import torch"),
        ("lab/rungs.py", "import gemmery\nfrom gemmery import matmul, api"),
        ("emulation/kernel.py", "from gemmery.cuda import nvrtc\nfrom gemmery.pages import numerals"),
        ("lab/rungs.py", "from gemmery.emulation.kernel import emulate"),
        ("__main__.py", "from gemmery.cli import main"),
        ("config.py", "import os\nos.environ.get('X')"),
        ("__init__.py", "from gemmery import api"),
        ("__init__.py", "if TYPE_CHECKING:\n    from gemmery.inspection.notebook import inspect as inspect"),
        ("api.py", "import os\nos.sched_getaffinity(0)\nimport numpy as np"),
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
    files = {"cpu/__init__.py": "", "cpu/pack.py": "from gemmery.cpu import ir", "cpu/tile.py": back}
    files["cpu/ir.py"] = "from gemmery.cpu.tile import Tile"
    assert [short(knot) for knot in circles(inside(files))] == [{"cpu.pack", "cpu.ir", "cpu.tile"}]


def test_a_circle_through_a_package_is_caught():
    files = {
        "cpu/__init__.py": "def build():\n    from gemmery.cpu import jit",
        "cpu/jit.py": "from gemmery.cpu import build",
    }
    assert [short(knot) for knot in circles(inside(files))] == [{"cpu", "cpu.jit"}]


def test_modules_without_a_way_back_are_no_circle():
    files = {
        "cpu/__init__.py": "from gemmery.cpu import jit",
        "cpu/jit.py": "from gemmery.cpu import ir\nfrom gemmery.cpu import pack",
        "cpu/pack.py": "from gemmery.cpu import ir",
        "cpu/ir.py": "from gemmery.errors import ShapeError\nfrom gemmery.cpu.ir import Function",
        "errors.py": "from gemmery.cpu import jit",
    }
    assert circles(inside(files)) == []
