"""One name, one thing: classes and files are named once, and no name is a word that says nothing."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[1] / "packages").glob("*/src"))
FILES = {str(path.relative_to(source)): path.read_text() for source in SOURCES for path in sorted(source.rglob("*.py"))}

# Participles and pronouns that fit every value. `left` is allowed beside `right`, and what others read has its name.
CONTENTLESS = {
    "asked", "came", "chosen", "found", "given", "held", "hurry", "kept", "left", "made", "met", "more", "named", "one",
    "said", "seen", "settled", "shown", "stated", "suited", "taken", "told", "wanted",
}  # fmt: skip

# Keys of the JSON that `gemmery inspect --json` prints.
PUBLISHED = {
    "gemmery/cuda/choose/__init__.py": {"chosen"},
    "gemmery_emulator/trace/__init__.py": {"held", "taken"},
    "gemmery_emulator/kernels/counters.py": {"chosen"},
    "gemmery_lab/rung_counts.py": {"chosen"},
}

# Modules that share a file name, and why they may.
SAME_FILE_NAME: dict[str, str] = {
    "atomics.py": "atomic instructions that generated code has, and those that the emulator runs",
    "convert.py": "conversions in generated code, and those that the emulator runs",
    "cpu.py": "the ladder of the CPU, and the choice among its rungs",
    "cuda.py": "the ladder of a GPU, and the choice among its rungs",
    "launch.py": "how a kernel is called, on each device",
    "gemv.py": "the kernel of the CPU, and the rungs of a GPU",
    "wgmma.py": "an instruction in the emulator, and the rungs that use it",
    "products.py": "the products of arrays, and those of a warpgroup",
}


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield each name that a module binds: variables, fields, parameters, functions, classes, imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name


def contentless(source: str) -> list[str]:
    """Return the bindings of a module that say nothing of what they are bound to."""
    names = [name.strip("_") for name in bindings(ast.parse(source))]
    allowed = {"left"} if "right" in names else set()
    return [name for name in names if name in CONTENTLESS - allowed]


def definitions(source: str) -> list[str]:
    """Return the public classes and type aliases that a module defines."""
    names = []
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return [name for name in names if name[0].isupper() and not name.isupper()]


def repeated(files: dict[str, str]) -> set[str]:
    """Return the classes and aliases that more than one of these modules defines."""
    counts = Counter(name for source in files.values() for name in set(definitions(source)))
    return {name for name, count in counts.items() if count > 1}


def same_file_names(paths: list[str]) -> set[str]:
    """Return the names that several of these files have, in different folders."""
    counts = Counter(path.rsplit("/", maxsplit=1)[-1] for path in paths)
    return {name for name, count in counts.items() if count > 1 and not name.startswith("__")}


def test_a_name_says_what_the_thing_is():
    names = {path: set(contentless(source)) - PUBLISHED.get(path, set()) for path, source in FILES.items()}
    assert {path: wrong for path, wrong in names.items() if wrong} == {}


def test_a_class_or_alias_is_defined_once():
    assert repeated(FILES) == set()


def test_a_file_name_stands_for_one_module():
    assert same_file_names(list(FILES)) == set(SAME_FILE_NAME)
    assert all(len(reason.split()) > 3 for reason in SAME_FILE_NAME.values())


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "_made: int = 1",
        "a, (b, *held) = x",
        "for one in x: pass",
        "[x for seen in y]",
        "with x as given: pass",
        "if (said := 1): pass",
        "def f(*, wanted=1): pass",
        "lambda taken: 1",
        "def shown(): pass",
        "class A:\n    def told(self): pass",
        "class A:\n    kept: int",
        "from x import y as met",
        "try: pass\nexcept E as came: pass",
        "match x:\n    case [one, 1]: pass",
        "match x:\n    case {**more}: pass",
        "left = 1",
    ],
)
def test_a_name_that_says_nothing_is_caught(source):
    assert len(contentless(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "x.found = 1",
        "f(given=1)",
        "print(one)",
        "'found = 1'",
        "founded = left_column = anyone = 1",
        "left, right = 1, 2",
        "from x import found",
    ],
)
def test_other_names_pass(source):
    assert contentless(source) == []


def test_a_second_definition_is_caught():
    first = "class Kernel: pass\nclass _Own: pass\nSHAPE = Config = 1"
    assert repeated({"a.py": first, "b.py": "class Other: pass"}) == set()
    assert repeated({"a.py": first, "b.py": "class Kernel: pass"}) == {"Kernel"}
    assert repeated({"a.py": "Array = list", "b/c.py": "Array: TypeAlias = 'tuple'"}) == {"Array"}
    assert repeated({"a.py": first, "b.py": "class _Own: pass\nSHAPE = 1\nif x:\n    class Kernel: pass"}) == set()


def test_a_second_file_of_a_name_is_caught():
    assert same_file_names(["a/__init__.py", "b/__init__.py", "cpu.py", "a/cuda.py"]) == set()
    assert same_file_names(["a/words.py", "b/words.py", "b/wording.py"]) == {"words.py"}
