"""Suites: which products are timed against which rivals, from suites/*.toml (benchmarks/README.md lists the keys)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from gemmery import dtypes
from gemmery.errors import ArgumentError, DTypeError, unknown
from gemmery_lab.measure import expressions
from gemmery_lab.measure.timing import Rival
from gemmery_lab.measure.work import CALLS, LAYOUTS, OF_A, Work

SUITES = Path(__file__).parent / "suites"
KINDS = ("product", "calls", "first_call", "new_shapes", "choices", "call", "compile", "emulator")
DEVICES = ("cpu", "cuda")
ON_A_GPU = ("call", "compile")  # kinds for a GPU only
ON_A_CPU = ("calls", "first_call", "emulator")  # kinds for the CPU only
ALONE = ("emulator", "compile")  # kinds without rivals
IN_PROCESS = {  # kinds whose rival runs in gemmery's own process, and why no other does
    "first_call": "only NumPy's first product is timed",
    "new_shapes": "only NumPy is timed in the same process",
}
BY_NAME = ("numpy_installed",)  # rivals in which gemmery multiplies: they take part only where they are named
LARGEST = 1 << 40  # elements of a matrix: more than any memory, and NumPy can still count their bytes


@dataclass(frozen=True)
class Suite:
    """A list of products. Each is timed with each number of threads in `threads`, where 0 is one for each core."""

    name: str
    about: str
    kind: str
    works: tuple[Work, ...]
    threads: tuple[int, ...]
    rivals: tuple[str, ...]  # () for all that are installed
    rungs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the rungs that run a work, by its name
    device: str = "cpu"  # or "cuda"
    rest: float = 0.0  # seconds before each turn, in an order that is drawn anew in each round
    sustained: float = 0.0  # seconds of a turn without rest, for large products; 0: there is no such race


def names() -> tuple[str, ...]:
    """Return the names of the suites that come with gemmery.

    >>> "small" in names()
    True
    """
    return tuple(path.stem for path in sorted(SUITES.glob("*.toml")))


def find(name: str) -> Path:
    """Return the file of a suite: one that comes with gemmery by its name, any other by its path.

    >>> find("small").name, find("mine/own.toml").name
    ('small.toml', 'own.toml')

    Raises ArgumentError for an unknown name.
    """
    if name.endswith(".toml"):
        return Path(name)
    if name not in names():
        raise ArgumentError(f"{unknown(f'suite {name!r} is not known', name, names())}, or a path to a .toml file")
    return SUITES / f"{name}.toml"


def taking_part(suite: Suite, only: Sequence[str], known: Sequence[Rival]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a suite's rivals, or `only` instead, and why each other installed rival is left out."""
    if suite.kind in ALONE:
        return (), {}
    rivals = tuple(only) or suite.rivals or tuple(rival.name for rival in known if rival.name not in BY_NAME)
    known = [rival for rival in known if rival.name in rivals or rival.name not in BY_NAME]
    left_out: dict[str, str] = {}
    if suite.kind in IN_PROCESS and suite.device == "cpu":  # they time scripts, of which NumPy has one
        left_out = dict.fromkeys((name for name in rivals if name != "numpy"), IN_PROCESS[suite.kind])
        rivals = tuple(name for name in rivals if name == "numpy")
    reason = f"suite {suite.name} leaves it out"
    if only:
        reason = f"not among the rivals asked for: {', '.join(only)}"
    absent = (rival for rival in known if rival.name not in (*rivals, *left_out) and not rival.missing())
    return rivals, {**left_out, **{rival.name: reason for rival in absent}}


def load(path: Path) -> Suite:
    """Load the suite in a TOML file.

    Raises ArgumentError that names the file and the key for anything that differs from benchmarks/README.md.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"suite {str(path)!r}: {error.strerror}; give the path of a .toml file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"suite {str(path)!r} is not TOML: {error}; correct that line") from error
    where = str(path)
    top = _read(table, _TOP, where)
    kind, device, rows = top.get("kind", "product"), top.get("device", "cpu"), top.get("product")
    for kinds, of in ((ON_A_GPU, "cuda"), (ON_A_CPU, "cpu")):
        if kind in kinds and device != of:
            raise ArgumentError(f'{where}: kind = {kind!r}: only for suites with device = "{of}"')
    if kind in ALONE and "rivals" in top:
        raise ArgumentError(f"{where}: rivals: there are no rivals in kind = {kind!r}; leave the key out")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ArgumentError(f"{where}: product: give at least one [[product]] table")
    if device == "cpu" and ("rest" in top or "sustained" in top):
        raise ArgumentError(f'{where}: rest and sustained: only for suites with device = "cuda"')
    works, rungs = list[Work](), dict[str, tuple[str, ...]]()
    readers: dict[str, tuple[Any, Any]] = {"calls": (_CALLS, _calls), "new_shapes": (_NEW_SHAPES, _new_shapes)}
    keys, read = readers.get(kind, (_PRODUCT, _works))
    for index, row in enumerate(rows, 1):
        here = f"{where}: product {index}"
        if kind == "emulator" and "rungs" not in row:
            raise ArgumentError(f"{here}: rungs: name the rungs to emulate")
        if kind == "choices" and (row.get("rungs") or [""])[0] != "gm.matmul":
            raise ArgumentError(f"{here}: rungs: begin with 'gm.matmul', and name the rungs that it may not lose to")
        for key in ("precision", "scales", "groups"):
            if key in row and device == "cpu":
                raise ArgumentError(f'{here}: {key}: only for suites with device = "cuda"')
        product = _read(row, keys, here)
        works += read(product, here)
        if "rungs" in product:
            rungs[_unique(product, rungs, here)] = tuple(product["rungs"])
    defaults = {"about": "", "threads": [1], "rivals": [], "rest": 0.0, "sustained": 0.0}
    values: dict[str, Any] = {name: top.get(name, default) for name, default in defaults.items()}
    values |= {name: float(values[name]) for name in ("rest", "sustained")}
    values |= {"rivals": tuple(values["rivals"]), "threads": tuple(0 if n == "all" else n for n in values["threads"])}
    return Suite(path.stem, kind=kind, works=tuple(works), rungs=rungs, device=device, **values)


def _unique(row: dict[str, Any], known: Collection[str], where: str) -> str:
    """Return the name of a product that has rungs, which run it instead of gemmery's choice."""
    name, rungs = row.get("name", ""), row["rungs"]
    if not name or name in known:
        raise ArgumentError(f"{where}: name = {row.get('name')!r}: products with rungs need a unique name")
    if row.get("vector") or "call" in row:
        raise ArgumentError(f"{where}: rungs: they write matrices into an existing one; leave out vector and call")
    if not rungs or len(set(rungs)) < len(rungs):
        raise ArgumentError(f"{where}: rungs: give at least one, such as 'packed kc=256', and none twice")
    return str(name)


def _works(row: dict[str, Any], where: str) -> Iterator[Work]:
    """Yield every combination of the lists of a [[product]] table, with shapes as the outer loop."""
    shapes, types, batches = _shapes(row, where), row.get("dtype", ["f32"]), row.get("batch", [1])
    precision, groups, vector = row.get("precision", ""), row.get("groups", [0]), row.get("vector", False)
    if row.get("b") == OF_A and ("groups" in row or any(m != n for m, n, _ in shapes)):
        raise ArgumentError(f"{where}: b = {OF_A!r}: only where m = n, and without groups")
    if precision and types != ["f32"]:
        raise ArgumentError(f"{where}: precision = {precision!r}: only for products of f32")
    if groups != [0] and (batches != [1] or vector):
        raise ArgumentError(f"{where}: groups: they take neither batch nor vector")
    if vector and (any(n != 1 for _, n, _ in shapes) or batches != [1]):
        raise ArgumentError(f"{where}: vector: B is a vector, so n and batch must be 1")
    same = {"name": row.get("name", ""), "precision": precision, "scales": row.get("scales", "")}
    layouts = row.get("a", "row"), row.get("b", "row")
    for (m, n, k), batch, dtype, call, count in product(shapes, batches, types, row.get("call", ["out"]), groups):
        if max(m * k, k * n * max(1, count), m * n) * batch > LARGEST:
            raise ArgumentError(f"{where}: {m} x {n} x {k}, batch {batch}: at most {LARGEST} elements per matrix")
        yield Work(m, n, k, dtype, row.get("out", dtype), batch, *layouts, call, vector, groups=count, **same)


def _calls(row: dict[str, Any], where: str) -> Iterator[Work]:
    """Yield the calls of a [[product]] table of a suite of kind "calls", for each size."""
    arrays = row.get("arrays", "numpy")
    known = tuple(name for name, call in expressions.CALLS.items() if getattr(call, arrays))
    for (n, _, _), name in product(_shapes(row, where), _checked(row.get("call", [*known]), [known], f"{where}: call")):
        if n * n > LARGEST:
            raise ArgumentError(f"{where}: n = {n}: at most {LARGEST} elements per matrix")
        yield Work(n, n, n, "f32", "f32", call=name, arrays=arrays)


def _new_shapes(row: dict[str, Any], where: str) -> Iterator[Work]:
    """Yield the works of a [[product]] table of a suite of kind "new_shapes": `batch` products up to (m, n, k)."""
    count, largest = (_checked(row.get(key, 0), _SIZE, f"{where}: {key}") for key in ("count", "largest"))
    if largest * largest * count > LARGEST:
        raise ArgumentError(f"{where}: {count} products up to {largest}: at most {LARGEST} elements")
    for dtype in row.get("dtype", ["f32"]):
        yield Work(largest, largest, largest, dtype, dtype, batch=count, call="new", seed=5)


def _shapes(row: dict[str, Any], where: str) -> list[tuple[int, int, int]]:
    """Return the shapes of `square = [n, ...]`, `shapes = [[m, n, k], ...]`, or each of `rows` by each of `weights`."""
    ways = [set(way) & set(row) for way in (("square",), ("shapes",), ("rows", "weights"))]
    if sum(map(bool, ways)) != 1 or len(ways[2]) == 1:
        raise ArgumentError(
            f"{where}: give either square = [n, ...] or shapes = [[m, n, k], ...] or rows = [m, ...] and "
            "weights = [[n, k], ...]"
        )
    for key, count, form in (("shapes", 3, "[m, n, k]"), ("weights", 2, "[n, k]")):
        for each in row.get(key, []):
            if len(each) != count:
                raise ArgumentError(f"{where}: {key}: {each!r} must be {form}")
    if "weights" in row:
        return [(m, n, k) for n, k in row["weights"] for m in row["rows"]]
    return [(n, n, n) for n in row["square"]] if "square" in row else [(m, n, k) for m, n, k in row["shapes"]]


def _read(table: dict[str, Any], rules: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a table by its keys, each as its rule has it."""
    for key in table:
        if key not in rules:
            raise ArgumentError(f"{where}: key {key!r} is not known; known: {', '.join(sorted(rules))}")
    return {key: _checked(value, rules[key], f"{where}: {key}") for key, value in table.items()}


def _checked(value: Any, rule: Any, where: str) -> Any:
    """Return a value that follows its rule.

    A rule is a tuple of known values, a list with the rule of what a list holds, a function that returns the value, or
    a test and the words for a value that fails it.
    """
    if isinstance(rule, list):
        if not isinstance(value, list):
            raise ArgumentError(f"{where} = {value!r}: it must be a list")
        if not value and rule[0] in (_SIZE, _COUNT):
            raise ArgumentError(f"{where}: the list is empty; give at least one number")
        return [_checked(each, rule[0], where) for each in value]
    if isinstance(rule, _Rule):
        if not rule.allows(value):
            raise ArgumentError(f"{where}{rule.words.format(value)}")
    elif isinstance(rule, tuple):
        if value not in rule:
            raise ArgumentError(f"{where} = {value!r}: it must be one of {', '.join(rule)}")
    else:
        return rule(value, where)
    return value


class _Rule(NamedTuple):
    allows: Callable[[Any], bool]
    words: str


_SIZE = _Rule(lambda value: type(value) is int and value >= 1, ": {!r} must be a whole number >= 1")
_COUNT = _SIZE._replace(allows=lambda value: value == "all" or _SIZE.allows(value))  # of threads
_SECONDS = _Rule(lambda x: type(x) in (int, float) and 0 <= x < 3600, " = {!r}: it must be a number of seconds")
_TEXT = _Rule(lambda value: isinstance(value, str), " = {!r}: it must be text in quotes")
_FLAG = _Rule(lambda value: isinstance(value, bool), " = {!r}: it must be true or false")


def _dtype(value: Any, where: str) -> str:
    try:
        return dtypes.resolve(_checked(value, _TEXT, where), (*dtypes.NAMES, *dtypes.FLOAT8))
    except DTypeError as error:
        raise ArgumentError(f"{where}: {error}") from None


_TOP = {
    "about": _TEXT,
    "kind": KINDS,
    "device": DEVICES,
    "threads": [_COUNT],
    "rivals": [_TEXT],
    "rest": _SECONDS,
    "sustained": _SECONDS,
    "product": lambda rows, where: rows,
}
_SHAPES = {"square": [_SIZE], "shapes": [[_SIZE]], "rows": [_SIZE], "weights": [[_SIZE]]}
_PRODUCT = {
    **_SHAPES,
    "name": _TEXT,
    "rungs": [_TEXT],
    "dtype": [_dtype],
    "out": _dtype,
    "batch": [_SIZE],
    "call": [CALLS],
    "a": LAYOUTS,
    "b": (*LAYOUTS, OF_A),
    "vector": _FLAG,
    "precision": ("", "tf32"),
    "groups": [_SIZE],
    "scales": ("", "one", "blocks"),
}
_CALLS = {"square": [_SIZE], "call": [_TEXT], "arrays": expressions.ARRAYS}
_NEW_SHAPES = {"count": _SIZE, "largest": _SIZE, "dtype": [_dtype]}
