"""Suites: which products are timed against which rivals, from suites/*.toml (benchmarks/README.md lists the keys)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from gemmery import dtypes
from gemmery.errors import ArgumentError, DTypeError
from gemmery_lab.measure import expressions
from gemmery_lab.measure.timing import Rival
from gemmery_lab.measure.work import CALLS, LAYOUTS, OF_A, Work

SUITES = Path(__file__).parent / "suites"
KINDS = ("product", "calls", "first_call", "new_shapes", "call", "compile", "emulator")
DEVICES = ("cpu", "cuda")
ON_A_GPU = ("call", "compile")  # kinds for a GPU only
ON_A_CPU = ("calls", "first_call", "emulator")  # kinds for the CPU only
ALONE = ("emulator", "compile")  # kinds without rivals
IN_PROCESS = {  # kinds whose rival runs in gemmery's own process, and why no other does
    "first_call": "only NumPy's first product is timed",
    "new_shapes": "only NumPy is timed in the same process",
}
PRECISIONS = ("", "tf32")
SCALES = ("", "one", "blocks")
_CALLS = {"square", "call", "arrays"}  # keys of a product of calls
_NEW_SHAPES = {"count", "largest", "dtype"}  # keys of a product of new shapes
LARGEST = 1 << 40  # elements of a matrix: more than any memory, and NumPy can still count their bytes
_TOP = {"about", "kind", "device", "threads", "rivals", "rest", "sustained", "product"}
_PRODUCT = {
    *("name", "rungs", "square", "shapes", "rows", "weights", "dtype", "out", "batch", "a", "b", "call", "vector"),
    *("precision", "scales", "groups"),
}


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
        close = get_close_matches(name, names(), 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ArgumentError(
            f"suite {name!r} is not known; {meant}known: {', '.join(names())}, or a path to a .toml file"
        )
    return SUITES / f"{name}.toml"


def taking_part(
    suite: Suite, requested: Sequence[str], known: Sequence[Rival]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a suite's rivals, or `requested` instead, and why each other installed rival is left out."""
    if suite.kind in ALONE:
        return (), {}
    rivals = tuple(requested) or suite.rivals or tuple(rival.name for rival in known)
    left_out: dict[str, str] = {}
    if suite.kind in IN_PROCESS and suite.device == "cpu":  # they time scripts, of which NumPy has one
        left_out = dict.fromkeys((name for name in rivals if name != "numpy"), IN_PROCESS[suite.kind])
        rivals = tuple(name for name in rivals if name == "numpy")
    reason = f"suite {suite.name} leaves it out"
    if requested:
        reason = f"not among the rivals asked for: {', '.join(requested)}"
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
    _only(table, _TOP, where)
    kind = _one_of(table.get("kind", "product"), KINDS, f"{where}: kind")
    device = _one_of(table.get("device", "cpu"), DEVICES, f"{where}: device")
    if device == "cpu" and kind in ON_A_GPU:
        raise ArgumentError(f'{where}: kind = {kind!r}: only for suites with device = "cuda"')
    if device == "cuda" and kind in ON_A_CPU:
        raise ArgumentError(f'{where}: kind = {kind!r}: only for suites with device = "cpu"')
    if kind in ALONE and "rivals" in table:
        raise ArgumentError(f"{where}: rivals: there are no rivals in kind = {kind!r}; leave the key out")
    rows = table.get("product")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ArgumentError(f"{where}: product: give at least one [[product]] table")
    if device == "cpu" and ("rest" in table or "sustained" in table):
        raise ArgumentError(f'{where}: rest and sustained: only for suites with device = "cuda"')
    for index, row in enumerate(rows):
        if kind == "emulator" and "rungs" not in row:
            raise ArgumentError(f"{where}: product {index + 1}: rungs: name the rungs to emulate")
        only = [key for key in ("precision", "scales", "groups") if key in row and device == "cpu"]
        if only:
            raise ArgumentError(f'{where}: product {index + 1}: {only[0]}: only for suites with device = "cuda"')
    read = {"calls": _calls, "new_shapes": _new_shapes}.get(kind, _works)
    works = tuple(work for index, row in enumerate(rows) for work in read(row, f"{where}: product {index + 1}"))
    return Suite(
        name=path.stem,
        about=_text(table.get("about", ""), f"{where}: about"),
        kind=kind,
        works=works,
        threads=_threads(table.get("threads", [1]), f"{where}: threads"),
        rivals=tuple(_texts(table.get("rivals", []), f"{where}: rivals")),
        rungs=_rungs(rows, where),
        device=device,
        rest=_seconds(table.get("rest", 0), f"{where}: rest"),
        sustained=_seconds(table.get("sustained", 0), f"{where}: sustained"),
    )


def _rungs(rows: list[dict[str, Any]], where: str) -> dict[str, tuple[str, ...]]:
    """Return the rungs that products name instead of gemmery's choice, by the name of the product."""
    rungs: dict[str, tuple[str, ...]] = {}
    for index, row in enumerate(rows):
        here = f"{where}: product {index + 1}"
        if "rungs" not in row:
            continue
        name = row.get("name")
        if not name or name in rungs:
            raise ArgumentError(f"{here}: name = {name!r}: products with rungs need a unique name")
        if row.get("vector") or "call" in row:
            raise ArgumentError(f"{here}: rungs: they write matrices into an existing one; leave out vector and call")
        rungs[name] = tuple(_texts(row["rungs"], f"{here}: rungs"))
        if not rungs[name] or len(set(rungs[name])) < len(rungs[name]):
            raise ArgumentError(f"{here}: rungs: give at least one, such as 'packed kc=256', and none twice")
    return rungs


def _works(row: dict[str, Any], where: str) -> Iterator[Work]:
    """Yield every combination of the lists of a [[product]] table, with shapes as the outer loop."""
    _only(row, _PRODUCT, where)
    shapes = _shapes(row, where)
    types = [_dtype(name, f"{where}: dtype") for name in _list(row.get("dtype", ["f32"]), f"{where}: dtype")]
    batches = _sizes(row.get("batch", [1]), f"{where}: batch")
    calls = [_one_of(name, CALLS, f"{where}: call") for name in _list(row.get("call", ["out"]), f"{where}: call")]
    a = _one_of(row.get("a", "row"), LAYOUTS, f"{where}: a")
    b = _one_of(row.get("b", "row"), (*LAYOUTS, OF_A), f"{where}: b")
    if b == OF_A and ("groups" in row or any(m != n for m, n, _ in shapes)):
        raise ArgumentError(f"{where}: b = {b!r}: only where m = n, and without groups")
    name = _text(row.get("name", ""), f"{where}: name")
    precision = _one_of(row.get("precision", ""), PRECISIONS, f"{where}: precision")
    if precision and types != ["f32"]:
        raise ArgumentError(f"{where}: precision = {precision!r}: only for products of f32")
    scales = _one_of(row.get("scales", ""), SCALES, f"{where}: scales")
    groups = _sizes(row["groups"], f"{where}: groups") if "groups" in row else [0]
    if groups != [0] and (batches != [1] or row.get("vector")):
        raise ArgumentError(f"{where}: groups: they take neither batch nor vector")
    vector = row.get("vector", False)
    if not isinstance(vector, bool):
        raise ArgumentError(f"{where}: vector = {vector!r}: it must be true or false")
    if vector and (any(n != 1 for _, n, _ in shapes) or batches != [1]):
        raise ArgumentError(f"{where}: vector: B is a vector, so n and batch must be 1")
    for (m, n, k), batch, dtype, call, count in product(shapes, batches, types, calls, groups):
        if max(m * k, k * n * max(1, count), m * n) * batch > LARGEST:
            raise ArgumentError(f"{where}: {m} x {n} x {k}, batch {batch}: at most {LARGEST} elements per matrix")
        out = _dtype(row["out"], f"{where}: out") if "out" in row else dtype
        work = Work(m, n, k, dtype, out, batch, a, b, call, vector, name=name, precision=precision)
        yield replace(work, scales=scales, groups=count)


def _calls(row: dict[str, Any], where: str) -> Iterator[Work]:
    """Yield the calls of a [[product]] table of a suite of kind "calls", for each size."""
    _only(row, _CALLS, where)
    arrays = _one_of(row.get("arrays", "numpy"), expressions.ARRAYS, f"{where}: arrays")
    known = tuple(name for name, call in expressions.CALLS.items() if getattr(call, arrays))
    names = [_one_of(name, known, f"{where}: call") for name in _list(row.get("call", list(known)), f"{where}: call")]
    for (n, _, _), name in product(_shapes(row, where), names):
        if n * n > LARGEST:
            raise ArgumentError(f"{where}: n = {n}: at most {LARGEST} elements per matrix")
        yield Work(n, n, n, "f32", "f32", call=name, arrays=arrays)


def _new_shapes(row: dict[str, Any], where: str) -> Iterator[Work]:
    """Yield the works of a [[product]] table of a suite of kind "new_shapes": `batch` products up to (m, n, k)."""
    _only(row, _NEW_SHAPES, where)
    (count,), (largest,) = (_sizes([row.get(key, 0)], f"{where}: {key}") for key in ("count", "largest"))
    if largest * largest * count > LARGEST:
        raise ArgumentError(f"{where}: {count} products up to {largest}: at most {LARGEST} elements")
    for name in _list(row.get("dtype", ["f32"]), f"{where}: dtype"):
        dtype = _dtype(name, f"{where}: dtype")
        yield Work(largest, largest, largest, dtype, dtype, batch=count, call="new", seed=5)


def _threads(value: Any, where: str) -> tuple[int, ...]:
    """Return the numbers of threads, 0 for "all": those that the process may use."""
    counts = _list(value, where) or _sizes(value, where)
    return tuple(0 if count == "all" else _sizes([count], where)[0] for count in counts)


def _shapes(row: dict[str, Any], where: str) -> list[tuple[int, int, int]]:
    """Return the shapes of `square = [n, ...]`, `shapes = [[m, n, k], ...]`, or each of `rows` by each of `weights`."""
    ways = [set(way) & set(row) for way in (("square",), ("shapes",), ("rows", "weights"))]
    if sum(map(bool, ways)) != 1 or len(ways[2]) == 1:
        raise ArgumentError(
            f"{where}: give either square = [n, ...] or shapes = [[m, n, k], ...] or rows = [m, ...] and "
            "weights = [[n, k], ...]"
        )
    if "square" in row:
        return [(n, n, n) for n in _sizes(row["square"], f"{where}: square")]
    if "shapes" in row:
        return [(m, n, k) for m, n, k in _tuples(row["shapes"], 3, "[m, n, k]", f"{where}: shapes")]
    weights = _tuples(row["weights"], 2, "[n, k]", f"{where}: weights")
    return [(m, n, k) for n, k in weights for m in _sizes(row["rows"], f"{where}: rows")]


def _tuples(value: Any, count: int, form: str, where: str) -> list[list[int]]:
    """Return a list of lists of `count` sizes each."""
    tuples = []
    for each in _list(value, where):
        sizes = _sizes(each, where)
        if len(sizes) != count:
            raise ArgumentError(f"{where}: {each!r} must be {form}")
        tuples.append(sizes)
    return tuples


def _only(table: dict[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ArgumentError(f"{where}: key {key!r} is not known; known: {', '.join(sorted(known))}")


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ArgumentError(f"{where} = {value!r}: it must be a list")
    return value


def _texts(value: Any, where: str) -> list[str]:
    return [_text(text, where) for text in _list(value, where)]


def _sizes(value: Any, where: str) -> list[int]:
    sizes = _list(value, where)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"{where}: {size!r} must be a whole number >= 1")
    if not sizes:
        raise ArgumentError(f"{where}: the list is empty; give at least one number")
    return sizes


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 3600:
        raise ArgumentError(f"{where} = {value!r}: it must be a number of seconds")
    return float(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"{where} = {value!r}: it must be text in quotes")
    return value


def _one_of(value: Any, known: tuple[str, ...], where: str) -> str:
    if value not in known:
        raise ArgumentError(f"{where} = {value!r}: it must be one of {', '.join(known)}")
    return str(value)


def _dtype(name: Any, where: str) -> str:
    try:
        return dtypes.resolve(_text(name, where), (*dtypes.NAMES, *dtypes.FLOAT8))
    except DTypeError as error:
        raise ArgumentError(f"{where}: {error}") from None
