"""Compiled builtins for `matmul` and its like that repeat products: 50 ns instead of the microseconds of Python.

The first product of a kind (element types, shapes, strides, options) goes through Python, which checks, plans and
stores a prepared job in a table in plain memory. From then on the builtins read the fields of the NumPy arrays, find
the job with the same key, allocate the result and run the job. Every other call goes to the Python functions.
`einsum`, `tensordot` and `vecdot` without options are products by another key: their operands, and the address of the
expression or the axes.

The GIL guards the table; where there is none there are no builtins (`objects.known`). Compiled code holds it from the
look-up of an entry until it has copied the entry to its stack: it allocates arrays before that, which runs no Python
code, but tensors, which may, and long jobs after it. It also counts under the GIL: the numbers are plain. Python writes
a record by one call that keeps the GIL (`write_bytes`), but an entry and its hash by two, between which another thread
may look up, or store an entry in the same place. So who reads an entry by its hash compares the whole key.

A number of threads that changes meanwhile: `forget` empties the table, and who stores a job afterwards that it made for
the old number sees that `threads.generation` has changed, and calls `forget` again.

Source: CPython's `PyMethodDef` (METH_FASTCALL | METH_KEYWORDS).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gemmery.cpu import entry_layout as layout
from gemmery.cpu import entry_table, jit, objects, pool, threads, workspace
from gemmery.cpu.entry_layout import ArrayKey, Class, Element, Key, Kind, Member, PreparedJob, word
from gemmery.cpu.layout import JOB, JOB_AT
from gemmery.cpu.split import worth_half
from gemmery.cpu.target import host
from gemmery.tuples import NamedTuple

_METH_FASTCALL_KEYWORDS = 0x80 | 0x02

_dtypes: dict[int, np.dtype[Any]] = {}  # dtypes to which the table points, by address
_learned: dict[tuple[int, ...], int] = {}  # addresses of the classes in the table, by key
_active: list[bool] = []  # not empty: there are builtins


def _head() -> list[int]:
    api = ctypes.pythonapi
    python = (
        api.Py_IncRef, api.Py_DecRef, api.PyEval_SaveThread, api.PyEval_RestoreThread,
        api.PyObject_Vectorcall, api.PyLong_AsLongLongAndOverflow, api.PyErr_Clear,
        api.PyContextVar_Set, api.PyContextVar_Reset, api.PyDict_GetItem, api.PyTuple_New,
    )  # fmt: skip
    return [
        *map(id, (np.ndarray, None, False, float, np.float64, np.float32, complex, int, tuple, dict)),
        *map(id, objects.ERROR_STATE),
        *_ZEROS[: len(layout.BUILTINS)],
        *map(id, objects.KEYWORDS),
        *map(id, (*objects.ACTIVATIONS, *objects.SEMIRINGS)),
        *objects.numpy_functions(),
        *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in python),
        pool.entries()["run"],
    ]


def builtins(functions: Mapping[str, Callable[..., Any]], docs: Sequence[str]) -> list[Callable[..., Any]]:
    """Return the compiled entries for functions of Python by name, or these where arrays cannot be read.

    Each text of `docs` begins with the signature, as builtins' do, so that `help` and `inspect.signature` know it.
    """
    table = entry_table.address()
    if not table:
        return list(functions.values())
    target = host()
    if not _active:
        entry_table.write(table, _head())
        _active.append(True)
    for name, function in functions.items():
        workspace.forever(function)
        entry_table.write(table + layout.at(layout.HEAD, f"python_{name}"), [id(function)])

    def generate(name: str) -> Any:
        from gemmery.cpu import entry_code

        return getattr(entry_code, name)(target)

    # Where the module must be compiled, that is done beside the kernels of the first product, which goes to Python.
    late = jit.keeps(target) and not jit.stored(target, "entry")
    start = "python" if late else "module"
    addresses = jit.load(target, "entry" if start == "module" else "entry_python", lambda: generate(start), table)
    methods = [
        _Method(name.encode(), addresses[name], _METH_FASTCALL_KEYWORDS, doc.encode())
        for name, doc in zip(functions, docs, strict=True)
    ]

    def replace() -> None:
        compiled = jit.load(target, "entry", lambda: generate("module"), table)
        for method, name in zip(methods, functions, strict=True):
            method.call = compiled[name]

    if late:
        jit.postpone(replace)
    return [_builtin(method) for method in methods]


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


def _builtin(method: _Method) -> Callable[..., Any]:
    workspace.forever(method)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.py_object)
    # Its `self` is the module, as for functions of C extensions, so that it is pickled by name.
    function: Callable[..., Any] = new(ctypes.addressof(method), sys.modules["gemmery"], "gemmery")
    return function


def remember(kind: Kind, key: Key, c: ArrayKey, work: PreparedJob | None, calls: int = 0) -> None:
    """Store the job of products of this kind and key, with results like c; without a job they are computed aside.

    The last of `calls`, if there are any, goes to Python again.
    """
    table, result, count = entry_table.address(), result_fields(c.dtype), len(key.words)
    many = work is not None and len(work.loops) > layout.LOOPS
    if kind.dtype is not None and not _keep(kind.dtype, _dtype_objects):
        return
    if not (table and result) or count > layout.MOST_WORDS or len(c.shape) > layout.MOST_DIMENSIONS or many:
        return
    reaches = _NO_REACHES  # only those who write to `out` ask for it
    if kind.out is not None:
        reaches = [end for x in (kind.a, kind.b, c, kind.bias) for end in ((0, 0) if x is None else x.reach())]
    words = [
        count, *key.words, *_ZEROS[count:],
        layout.ASIDE if work is None else layout.RUN, calls and calls + 1, *result, 0,
        len(c.shape), *c.shape, *_ZEROS[: layout.MOST_DIMENSIONS - len(c.shape)],
        *reaches, *(_NO_RUN if work is None else _run(work, count, calls > 0)), *_ZEROS[: layout.PADDING],
    ]  # fmt: skip
    data = entry_table.packed(words) + (_NO_JOB if work is None else work.job)
    entry_table.store_entry(table, key, data)
    for contraction in _contractions.get(key.hash, ()):
        _store_contraction(table, contraction, data)


class _Contraction(NamedTuple):
    """A product by another key, with another shape of the result."""

    key: Key
    shape: tuple[int, ...]
    fortran: bool


# By the hash of the product's key: a tuple, which another thread replaces and does not change.
_contractions: dict[int, tuple[_Contraction, ...]] = {}
_MOST_CONTRACTIONS = layout.SETS * layout.WAYS
_ENTRY_WORDS = f"<{len(layout.ENTRY)}q"


def remember_contraction(product: Key, kind: Kind, shape: tuple[int, ...], fortran: bool) -> None:
    """Store contractions of this kind as a product of the table, now and whenever that gets a better job.

    `shape` is that of the result, of which the first dimension is innermost if `fortran`.
    """
    table, place, key = entry_table.address(), entry_table.find(product), kind.key()
    fits = len(key.words) <= layout.MOST_WORDS and len(shape) <= layout.MOST_DIMENSIONS
    if not place or not fits or not _keep(kind.dtype, _descriptions):
        return
    contraction, others = _Contraction(key, shape, fortran), _contractions.get(product.hash, ())
    if len(_contractions) >= _MOST_CONTRACTIONS:
        _contractions.clear()
    _contractions[product.hash] = (*(other for other in others if other.key != key), contraction)
    _store_contraction(table, contraction, ctypes.string_at(place, layout.size(layout.ENTRY)))


def _store_contraction(table: int, contraction: _Contraction, product: bytes) -> None:
    """Store an entry of the table once more, by the key of a contraction."""
    words, count = list(struct.unpack_from(_ENTRY_WORDS, product)), len(contraction.key.words)
    if words[layout.at(layout.ENTRY, "kind") // 8] != layout.RUN:
        return
    shape = [*contraction.shape, *_ZEROS[len(contraction.shape) : layout.MOST_DIMENSIONS]]
    fields = (
        ("count", [count, *contraction.key.words, *_ZEROS[count:]]),
        ("c_fortran", [contraction.fortran]),
        ("c_ndim", [len(contraction.shape), *shape]),
        ("quick", [0]),  # which `matmul` alone looks for
    )
    for name, values in fields:
        first = layout.at(layout.ENTRY, name) // 8
        words[first : first + len(values)] = values
    entry_table.store_entry(table, contraction.key, struct.pack(_ENTRY_WORDS, *words))


def _keep(argument: object, objects: dict[int, object]) -> bool:
    """Keep an argument that the table knows by its address alive, so that no other gets it; False for one too many."""
    if len(objects) < _MOST_OBJECTS:
        objects.setdefault(id(argument), argument)
    return id(argument) in objects


_dtype_objects: dict[int, object] = {}
_descriptions: dict[int, object] = {}  # expressions and axes of contractions
_MOST_OBJECTS = 256
_ZEROS = [0] * layout.MOST_WORDS
_NO_REACHES = [0] * 8
_NO_RUN = [0] * (6 + 4 * layout.LOOPS)
_SCALARS = {
    "float": layout.SINGLE,
    "double": layout.DOUBLE,
    "complex float": layout.COMPLEX | layout.SINGLE,
    "complex double": layout.COMPLEX | layout.DOUBLE,
}
_NO_JOB = bytes(8 * len(JOB))
_job_words = struct.Struct("<q").unpack_from


def _run(work: PreparedJob, count: int, counted: bool) -> list[int]:
    """Return the fields of an entry that describe how its job runs; `count` are the words of its key."""
    parts, workspace, batch, at_once = (
        _job_words(work.job, JOB_AT[name])[0] for name in ("parts", "workspace_bytes", "batch", "at_once")
    )
    long = work.flops >= layout.LONG
    plain = parts == 1 and not workspace and not long and not _halves(work.job)
    quick = plain and (batch == 1 or at_once) and not (work.loops or work.transposed or counted)
    words = [plain, count if quick else 0, long, _SCALARS.get(work.scalar, layout.INTEGER), work.transposed]
    words.append(math.prod(length for length, _ in work.loops))
    for length, (a, b, c) in work.loops:
        words += [length, b, a, c] if work.transposed else [length, a, b, c]
    return words + [1, 0, 0, 0] * (layout.LOOPS - len(work.loops))


def _halves(job: bytes) -> bool:
    """Return True for the job of a product that the pool halves where A and B are the same memory, transposed."""
    m, n, k, _, a_row, a_col, _, b_row, b_col = struct.unpack_from("<9q", job)
    return m == n and (a_row, a_col) == (b_col, b_row) and worth_half(n, k)


def calls_until_often(products: int) -> int:
    """Return the calls, each with so many products, after which a kernel for their shape is worth compiling."""
    return -(-layout.OFTEN // (1 + (products >> layout.PRODUCTS_BITS)))


NEW, STORED, OFTEN = range(3)
_COUNTDOWN_AT = layout.at(layout.ENTRY, "countdown")


def status(key: Key) -> int:
    """Return whether the table has a key, or OFTEN where compiled code asks Python for a job, or for a better one."""
    table = entry_table.address()
    if not table or len(key.words) > layout.MOST_WORDS:
        return NEW
    place = entry_table.find(key)
    if place:
        return OFTEN if ctypes.c_int64.from_address(place + _COUNTDOWN_AT).value == 1 else STORED
    counted, count = entry_table.counter(table, key)
    return OFTEN if counted == key.hash and count >= layout.OFTEN else NEW


def come_often(key: Key) -> None:
    """Let the next call of Python with this key store the best job, as if it had come often."""
    table = entry_table.address()
    if not table or len(key.words) > layout.MOST_WORDS:
        return
    place = entry_table.find(key)
    if not place:
        entry_table.counter(table, key)[:] = key.hash, layout.OFTEN
    elif ctypes.c_int64.from_address(place + _COUNTDOWN_AT).value > 0:
        ctypes.c_int64.from_address(place + _COUNTDOWN_AT).value = 1


def result_fields(dtype: np.dtype[Any] | Element) -> tuple[int, ...]:
    """Return the fields of an entry for a new result of this element type, none for one that NumPy must make."""
    if isinstance(dtype, Element):
        return 0, dtype.code + 1
    own: np.dtype[Any] = np.dtype(dtype.type)
    if objects.element(own) != objects.element(dtype):
        return ()
    _dtypes[id(own)] = own
    return id(own), 0


def know_tensors(facts: int) -> None:
    """Let the builtins take PyTorch's tensors, by what is known of PyTorch at this address."""
    table = entry_table.address()
    if table:
        ctypes.c_int64.from_address(table + layout.at(layout.HEAD, "tensors")).value = facts


def know_packed(packed: object, array: np.ndarray[Any, Any]) -> None:
    """Let the builtins take operands of the class of `packed`, of which they read the array in the first slot."""
    table = entry_table.address()
    if table and ctypes.c_int64.from_address(id(packed) + objects.FIRST_SLOT).value == id(array):
        entry_table.write(table + layout.at(layout.HEAD, "packed_type"), [id(type(packed))])


def know_epilogues(epilogue: object, bound: type, recipes: tuple[bytes, ...]) -> bool:
    """Let the builtins take epilogues, of which they read the recipes in the first slot; False where they cannot."""
    table = entry_table.address() if _active else 0
    if table and ctypes.c_int64.from_address(id(epilogue) + objects.FIRST_SLOT).value == id(recipes):
        words = [id(type(epilogue)), id(bound), threads.generation]
        entry_table.write(table + layout.at(layout.HEAD, "epilogue_type"), words)
        return True
    return False


def promote(first: np.dtype[Any], second: np.dtype[Any], common: np.dtype[Any]) -> None:
    """Convert operands of these types to `common` from now on."""
    _store_pair(first, second, layout.CONVERTED, common)


def convert_bias(result: np.dtype[Any], bias: np.dtype[Any], used: np.dtype[Any]) -> None:
    """Convert a bias of this type to `used` for results of the type of the operands from now on."""
    _store_pair(result, bias, layout.BIAS, used)


def allow_cast(result: np.dtype[Any], out: np.dtype[Any]) -> None:
    """Copy results of this type into contiguous arrays of the type of `out` from now on."""
    _store_pair(result, out, layout.CAST, result)


def _store_pair(first: np.dtype[Any], second: np.dtype[Any], use: int, dtype: np.dtype[Any]) -> None:
    table, key, result = entry_table.address(), [word(first), word(second)], result_fields(dtype)
    if table and result and key != [word(_dtypes[result[0]])] * 2:
        place = layout.place_of(key, layout.PAIRS)
        _store(table + layout.PAIRS_AT, layout.size(layout.PAIR), place, [*key, use], [result[0]])


def learn(class_: Class, scalar: str, operations: int, members: Sequence[Member]) -> None:
    """Serve every shape of a class by these kernels, of which the first that fits is chosen.

    `scalar` is the type of alpha and beta as in `PreparedJob`, `operations` the number of those of a multiply-add.
    """
    table, key, result = entry_table.address(), class_.words(), result_fields(class_.dtype)
    if not table or not result:
        return
    members = members[: layout.MOST_FAMILIES]
    words = [len(members), class_.dtype.itemsize, _SCALARS.get(scalar, layout.INTEGER), operations, *result]
    for member in members:
        work = struct.unpack("<2q", struct.pack("<2d", member.work, member.most))
        limits = (*member.m, *member.n, *member.k, member.b_elements, member.c_elements, member.a_col)
        words += [*limits, *work, *struct.unpack(f"<{len(JOB)}q", member.job)]
    at = _store(table + layout.CLASSES_AT, layout.CLASS_BYTES, layout.place_of(key, layout.CLASSES), key, words)
    _learned[tuple(key)] = at


def learned(class_: Class) -> bool:
    """Return True if the table has been told of this class."""
    return tuple(class_.words()) in _learned


def _store(records: int, size: int, first: int, key: list[int], words: list[int]) -> int:
    """Write a record over one with the same key, else in a free one of its places, else in the first."""
    places = [records + (first + i) * size for i in range(layout.PROBES)]
    stored = [list((ctypes.c_int64 * len(key)).from_address(place)) for place in places]
    index = next((i for candidate in (key, [0] * len(key)) for i, other in enumerate(stored) if other == candidate), 0)
    _learned.pop(tuple(stored[index]), None)
    entry_table.write(places[index], [*key, *words])
    return places[index]


def forget() -> None:
    """Drop every prepared job, because the number of threads has changed."""
    table = entry_table.address()
    _contractions.clear()
    if table:
        entry_table.write_bytes(table + layout.HASHES_AT, bytes(8 * layout.SETS * layout.WAYS))
        entry_table.write_bytes(table + layout.COUNTERS_AT, bytes(16 * layout.COUNTERS))
        entry_table.write(table + layout.at(layout.HEAD, "generation"), [threads.generation])
        while _learned:  # another thread may learn a class meanwhile
            with contextlib.suppress(KeyError):  # or forget the last one
                _, place = _learned.popitem()
                entry_table.write_bytes(place, bytes(layout.size(layout.CLASS)))


def active() -> bool:
    """Return True if this process has compiled builtins."""
    return bool(_active)


def counts() -> tuple[int, int]:
    """Return the number of prepared products in the table, and the number of its places."""
    table, places = entry_table.address(), layout.SETS * layout.WAYS
    used = (ctypes.c_uint64 * places).from_address(table + layout.HASHES_AT) if table else ()
    return sum(1 for word in used if word), places


def classes() -> tuple[int, int]:
    """Return the number of classes that are served in every shape, and the number of their places."""
    return len(_learned), layout.CLASSES


threads.at_change.append(forget)
