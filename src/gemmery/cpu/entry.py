"""Compiled builtins for `matmul`, `gemm` and `gemv` that repeat products: 50 ns instead of the microseconds of Python.

The first product of a kind (element types, shapes, strides, options) goes through Python, which checks, plans and
stores a prepared job in a table in plain memory. From then on the builtins read the fields of the NumPy arrays, find
the job with the same key, allocate the result and run the job. Every other call goes to the Python functions.

Source: CPython's `PyMethodDef` (METH_FASTCALL | METH_KEYWORDS).
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gemmery.cpu import entry_layout as layout
from gemmery.cpu import jit, objects, pool, threads, workspace
from gemmery.cpu.entry_layout import ENTRY
from gemmery.cpu.layout import JOB
from gemmery.cpu.target import host
from gemmery.tuples import NamedTuple

_METH_FASTCALL_KEYWORDS = 0x80 | 0x02


class Element(NamedTuple):
    """An element type of PyTorch."""

    word: int  # which identifies it in a key
    code: int  # PyTorch's number
    itemsize: int


class Array(NamedTuple):
    """What the table knows of an array."""

    dtype: np.dtype[Any] | Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def words(self) -> list[int]:
        """Return the words of the key."""
        return [_word(self.dtype), *(x for both in zip(self.shape, self.strides, strict=True) for x in both)]

    def reach(self) -> tuple[int, int]:
        """Return the lowest byte and one past the highest, from the first element."""
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + self.dtype.itemsize


class Kind(NamedTuple):
    """The key of products: what the arguments of two calls must have in common to share a job."""

    a: Array
    b: Array
    out: Array | None = None
    bias: Array | None = None  # an array of numbers of the kernel's type, contiguous
    bias_is_number: bool = False
    scaled: bool = False  # alpha is not 1 or beta is not 0
    beta: bool = False  # beta is not 0, and `out` is the old C
    activation: str = ""

    def words(self) -> list[int]:
        """Return the words of the key, as compiled code writes them."""
        bias, options = _bias_and_options(self)
        out = 0 if self.out is None else len(self.out.shape) + 1
        first = len(self.a.shape) | len(self.b.shape) << 8 | out << 16 | bias << 24 | options << 32
        arrays = (x for x in (self.a, self.b, self.out, self.bias) if x is not None)
        return [first, *(word for array in arrays for word in array.words())]


class Work(NamedTuple):
    """The prepared job of a product, run once for each place of `loops`: (length, steps of A, B and C in bytes)."""

    job: bytes
    scalar: str  # LLVM's name of the type of alpha and beta
    flops: int
    loops: Sequence[tuple[int, tuple[int, int, int]]] = ()
    swapped: bool = False  # the job computes C' = B' A'


class Class(NamedTuple):
    """What products of any shape must have in common to be served by the same families of kernels."""

    dtype: np.dtype[Any] | Element  # of A, B and C
    b_rows: bool  # the elements of a row of B are adjacent
    bias: np.dtype[Any] | Element | None = None  # the type of a bias that is an array
    bias_is_number: bool = False
    scaled: bool = False
    beta: bool = False
    activation: str = ""

    def words(self) -> list[int]:
        """Return the words of the key, as compiled code compares them."""
        bias, options = _bias_and_options(self)
        element = 0 if self.bias is None else _word(self.bias)
        return [_word(self.dtype), options, bias, element, int(self.b_rows)]


class Member(NamedTuple):
    """A kernel that runs every shape within limits on one thread, and a job in which sizes and strides are missing."""

    m: tuple[int, int]  # inclusive
    n: tuple[int, int]
    k: tuple[int, int]
    b_elements: int  # most k n
    c_elements: int  # most m n
    work: float  # most m n k batch
    job: bytes


def _bias_and_options(kind: Kind | Class) -> tuple[int, int]:
    array = layout.NO_BIAS if kind.bias is None else layout.ARRAY_BIAS
    activation = layout.ACTIVATIONS.index(kind.activation) + 1 if kind.activation else 0
    options = kind.scaled * layout.SCALED | kind.beta * layout.BETA | activation << layout.ACTIVATION_SHIFT
    return layout.NUMBER_BIAS if kind.bias_is_number else array, options


_kept: dict[int, np.dtype[Any]] = {}  # dtypes to which the table points, by address
_learned: set[tuple[int, ...]] = set()  # keys of the classes in the table
_turns: dict[int, int] = {}  # which entry of a full set is replaced next


@functools.cache
def _table() -> int:
    """Return the address of this process's table, or 0 where the fields of arrays are unknown or there is no pool."""
    if not pool.address() or not objects.known():
        return 0
    at = workspace.pages(layout.TABLE_BYTES)
    _write(at + layout.FACTORS_AT, layout.FACTORS)
    return at


def _write(at: int, words: Sequence[int]) -> None:
    _write_bytes(at, struct.pack(f"<{len(words)}q", *words))


def _write_bytes(at: int, data: bytes) -> None:
    """Write while holding the GIL, which ctypes.memmove releases: compiled code reads the table under it."""
    (ctypes.c_char * len(data)).from_address(at).raw = data


def _head(functions: Sequence[Callable[..., Any]]) -> list[int]:
    api = ctypes.pythonapi
    python = (
        api.Py_IncRef, api.Py_DecRef, api.PyEval_SaveThread, api.PyEval_RestoreThread,
        api.PyObject_Vectorcall, api.PyLong_AsLongLongAndOverflow,
        api.PyContextVar_Set, api.PyContextVar_Reset,
    )  # fmt: skip
    return [
        *map(id, (np.ndarray, None, float, int, *objects.ERROR_STATE)),
        *map(id, functions),
        *map(id, objects.KEYWORDS),
        *map(id, objects.ACTIVATIONS),
        *objects.numpy_functions(),
        *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in python),
        pool.entries()["run"],
    ]


def builtins(functions: Sequence[Callable[..., Any]], docs: Sequence[str]) -> list[Callable[..., Any]]:
    """Return the compiled entries for Python's matmul, gemm and gemv, or these where arrays cannot be read.

    Each text of `docs` begins with the signature, as builtins' do, so that `help` and `inspect.signature` know it.
    """
    table = _table()
    if not table:
        return list(functions)
    target = host()
    for function in functions:
        workspace.forever(function)
    _write(table, _head(functions))

    def generate() -> Any:
        from gemmery.cpu import entry_code

        return entry_code.module(target)

    addresses = jit.load(target, "entry", generate, table)
    return [_builtin(name, addresses[name], doc) for name, doc in zip(layout.BUILTINS, docs, strict=True)]


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


def _builtin(name: str, address: int, doc: str) -> Callable[..., Any]:
    method = _Method(name.encode(), address, _METH_FASTCALL_KEYWORDS, doc.encode())
    workspace.forever(method)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.py_object)
    # Its `self` is the module, as for functions of C extensions, so that it is pickled by name.
    made: Callable[..., Any] = new(ctypes.addressof(method), sys.modules["gemmery"], "gemmery")
    return made


def remember(kind: Kind, c: Array, work: Work | None, counted: bool = False) -> None:
    """Store the job of products of this kind, whose results are like c; without a job they are computed aside.

    If they are `counted`, number OFTEN of them goes to Python again.
    """
    table, key = _table(), kind.words()
    many = work is not None and len(work.loops) > layout.LOOPS
    if not table or len(key) > layout.MOST_WORDS or len(c.shape) > layout.MOST_DIMENSIONS or many:
        return
    result = _result(c.dtype)
    if not result:
        return
    entry = dict.fromkeys((name for name, _ in ENTRY), 0)
    entry |= {f"key_{i}": word for i, word in enumerate(key)}
    entry |= {f"c_shape_{i}": length for i, length in enumerate(c.shape)}
    entry |= {
        "count": len(key),
        "kind": layout.ASIDE,
        "left": counted and layout.OFTEN + 1,
        "c_ndim": len(c.shape),
    } | result
    for name, array in (("a", kind.a), ("b", kind.b), ("c", c), ("bias", kind.bias)):
        if array is not None:
            entry[f"{name}_low"], entry[f"{name}_high"] = array.reach()
    if work is not None:
        entry |= {"kind": layout.RUN, **_work(work)}
        entry["quick"] &= not counted
    hash_ = layout.hashed(key)
    index = _index(table, hash_)
    _write(table + layout.ENTRIES_AT + index * layout.ENTRY_BYTES, list(entry.values()))
    ctypes.c_uint64.from_address(table + layout.HASHES_AT + 8 * index).value = hash_


def often(kind: Kind) -> bool:
    """Return True if compiled code has run so many products of this kind that it asks Python for a better job."""
    table, hash_, index = _find(kind)
    if not table:
        return False
    if index is not None:
        at = table + layout.ENTRIES_AT + index * layout.ENTRY_BYTES + layout.at(ENTRY, "left")
        return ctypes.c_int64.from_address(at).value == 1
    at = table + layout.COUNTERS_AT + 16 * layout.counter_place(hash_)
    counted, count = (ctypes.c_uint64 * 2).from_address(at)
    return counted == hash_ and count >= layout.OFTEN


def knows(kind: Kind) -> bool:
    """Return whether the table has an entry with this key."""
    return _find(kind)[2] is not None


def _find(kind: Kind) -> tuple[int, int, int | None]:
    """Return the table, the hash of a key, and the index of its entry."""
    table, key = _table(), kind.words()
    if not table or len(key) > layout.MOST_WORDS:
        return 0, 0, None
    hash_ = layout.hashed(key)
    first = layout.place(hash_)
    stored = list((ctypes.c_uint64 * layout.WAYS).from_address(table + layout.HASHES_AT + 8 * first))
    return table, hash_, first + stored.index(hash_) if hash_ in stored else None


def _word(dtype: np.dtype[Any] | Element) -> int:
    return dtype.word if isinstance(dtype, Element) else objects.element(dtype)


def _result(dtype: np.dtype[Any] | Element) -> dict[str, int]:
    """Return the fields of an entry for a new result of this element type, none for one that NumPy must make."""
    if isinstance(dtype, Element):
        return {"c_tensor": dtype.code + 1}
    own: np.dtype[Any] = np.dtype(dtype.type)
    if objects.element(own) != objects.element(dtype):
        return {}
    _kept[id(own)] = own
    return {"c_descr": id(own)}


def know_tensors(facts: int) -> None:
    """Let the builtins take PyTorch's tensors, by what is known of PyTorch at this address."""
    table = _table()
    if table:
        ctypes.c_int64.from_address(table + layout.at(layout.HEAD, "tensors")).value = facts


_SCALARS = {"float": layout.SINGLE, "double": layout.DOUBLE}


def _work(work: Work) -> dict[str, int]:
    """Return the fields of an entry that describe how its job runs."""
    fields = dict(zip((name for name, _ in JOB), struct.unpack(f"<{len(JOB)}q", work.job), strict=True))
    long = work.flops >= layout.LONG
    plain = fields["parts"] == 1 and not fields["workspace_bytes"] and not long
    single = fields["batch"] == 1 or fields["at_once"]
    loops = [*work.loops, *[(1, (0, 0, 0))] * (layout.LOOPS - len(work.loops))]
    found = {
        "plain": int(plain),
        "quick": int(plain and single and not work.loops and not work.swapped),
        "long": int(long),
        "scalar": _SCALARS.get(work.scalar, layout.INTEGER),
        "swapped": int(work.swapped),
        "runs": math.prod(length for length, _ in work.loops),
    }
    names = "bac" if work.swapped else "abc"
    for i, (length, steps) in enumerate(loops):
        found |= {f"loop{i}_length": length} | {f"loop{i}_{x}": step for x, step in zip(names, steps, strict=True)}
    return found | {f"job_{name}": word for name, word in fields.items()}


def _index(table: int, hash_: int) -> int:
    """Return where an entry with this hash is, or a free place, or the place whose turn it is."""
    first = layout.place(hash_)
    stored = list((ctypes.c_uint64 * layout.WAYS).from_address(table + layout.HASHES_AT + 8 * first))
    for wanted in (hash_, 0):
        if wanted in stored:
            return first + stored.index(wanted)
    turn = _turns.get(first, 0)
    _turns[first] = (turn + 1) % layout.WAYS
    return first + turn


def promote(first: np.dtype[Any], second: np.dtype[Any], common: np.dtype[Any]) -> None:
    """Convert operands of these types to `common` from now on."""
    _store_pair(first, second, layout.CONVERTED, common)


def allow_cast(result: np.dtype[Any], out: np.dtype[Any]) -> None:
    """Copy results of this type into contiguous arrays of the type of `out` from now on."""
    _store_pair(result, out, layout.CAST, result)


def _store_pair(first: np.dtype[Any], second: np.dtype[Any], use: int, dtype: np.dtype[Any]) -> None:
    table, key, descr = _table(), [_word(first), _word(second)], _result(dtype).get("c_descr", 0)
    if table and descr and key != [_word(_kept[descr])] * 2:
        _store(table + layout.PAIRS_AT, layout.size(layout.PAIR), layout.pair_place(*key), [*key, use], [descr])


def learn(class_: Class, scalar: str, operations: int, members: Sequence[Member]) -> None:
    """Serve every shape of a class by these kernels, of which the first that fits is chosen.

    `scalar` is LLVM's name of the type of alpha and beta, `operations` the number of those of a multiply-add.
    """
    table, key, result = _table(), class_.words(), _result(class_.dtype)
    if not table or not result:
        return
    members = members[: layout.MOST_FAMILIES]
    head = dict.fromkeys((name for name, _ in layout.CLASS), 0) | result
    head |= {"families": len(members), "size": class_.dtype.itemsize, "scalar": _SCALARS.get(scalar, layout.INTEGER)}
    head |= {"operations": operations}
    words = list(head.values())[len(key) :]
    for member in members:
        work = struct.unpack("<q", struct.pack("<d", member.work))
        limits = (*member.m, *member.n, *member.k, member.b_elements, member.c_elements)
        words += [*limits, *work, *struct.unpack(f"<{len(JOB)}q", member.job)]
    _store(table + layout.CLASSES_AT, layout.CLASS_BYTES, layout.class_place(key), key, words)
    _learned.add(tuple(key))


def learned(class_: Class) -> bool:
    """Return True if the table has been told of this class."""
    return tuple(class_.words()) in _learned


def _store(records: int, size: int, first: int, key: list[int], words: list[int]) -> None:
    """Write a record over one with the same key, else in a free one of its places, else in the first."""
    places = [records + (first + i) * size for i in range(layout.PROBES)]
    stored = [list((ctypes.c_int64 * len(key)).from_address(place)) for place in places]
    chosen = next((i for wanted in (key, [0] * len(key)) for i, other in enumerate(stored) if other == wanted), 0)
    _write(places[chosen], [*key, *words])


def forget() -> None:
    """Drop every prepared job, because the number of threads has changed."""
    table = _table()
    if table:
        _learned.clear()
        _write_bytes(table + layout.HASHES_AT, bytes(8 * layout.SETS * layout.WAYS))
        _write_bytes(table + layout.CLASSES_AT, bytes(layout.COUNTERS_AT - layout.CLASSES_AT))


def counts() -> tuple[int, int]:
    """Return the number of prepared products in the table, and the number of its places."""
    table, places = _table(), layout.SETS * layout.WAYS
    used = (ctypes.c_uint64 * places).from_address(table + layout.HASHES_AT) if table else ()
    return sum(1 for word in used if word), places


threads.at_change.append(forget)
