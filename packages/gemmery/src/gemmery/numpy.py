"""NumPy's own products by gemmery: `install()` puts its kernels behind `np.matmul`, `@` and their like.

>>> import numpy as np, gemmery.numpy
>>> with gemmery.numpy.install():
...     np.arange(4, dtype="i2").reshape(2, 2) @ np.eye(2, dtype="i2")
array([[0, 1],
       [2, 3]], dtype=int16)
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from _thread import RLock  # that of `threading`
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from gemmery import dtypes, tiers
from gemmery.api.repeats import member
from gemmery.arrays import View
from gemmery.cpu import entry_table, images, jit, pool, threads, ufunc, workspace
from gemmery.cpu.entry_layout import LAYOUTS, Member, at
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.split import Unit
from gemmery.cpu.target import constants, host
from gemmery.dispatch.cpu import UNLIMITED, Family, families
from gemmery.errors import DTypeError, RefusedError, brief
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

__all__ = ["DEFAULT", "install", "installed", "uninstall"]


def __dir__() -> list[str]:
    return __all__


DEFAULT = tuple(row.numpy for row in dtypes.BY_NAME.values() if row.kind in "iub" or row.name == "f16")
_REPLACE = 30  # PyUFunc_ReplaceLoopBySignature in NumPy's table of ufuncs' functions, which only grows
_CONJUGATES = ("vecdot", "vecmat")  # their complex products have the conjugate of the first operand
_LEAST = 100  # multiply-adds of one product below which NumPy's loop takes less time than a kernel's call
_STEP = 0.002  # ns of a multiply-add of bools where no row ends early

LoopName = tuple[str, str]  # a ufunc and NumPy's letter of an element type

_ours: dict[LoopName, None] = {}  # the loops that NumPy's ufuncs have
_lock = RLock()  # of installations, for their whole time


def install(types: Any = None, *, wait: bool = False) -> AbstractContextManager[object]:
    """Let NumPy multiply by gemmery's kernels: `np.matmul`, `a @ b`, `np.vecdot`, `np.matvec` and `np.vecmat`.

    >>> a = np.arange(6, dtype="u1").reshape(2, 3)
    >>> with install():
    ...     a @ a.T
    array([[ 5, 14],
           [14, 50]], dtype=uint8)

    `types` are element types of the operands: by default those that NumPy multiplies without a BLAS, which are float16,
    the integers and bool (`DEFAULT`); float32, float64, complex64 and complex128 may be added. Integers and bools keep
    every bit; floats keep the bounds of docs/promises.md. `with install(): ...` ends with `uninstall` of what this call
    put in.

    The kernels of a type are compiled in the background, from its first product on, which NumPy's own loop computes as
    before; `wait=True` compiles all of them now. Products that no kernel takes stay NumPy's: strided results, empty or
    tiny ones. Threads are those of `gm.set_num_threads`.

    Raises DTypeError for other types, RefusedError on a system without gemmery's pool of threads (other than Linux).
    """
    letters = [letter for dtype in (DEFAULT if types is None else _listed(types)) for letter in _letters(dtype)]
    with _lock:
        new = [name for name in _loops(letters) if name not in _ours]
        for name, letter in new:
            old = _root() + ufunc.place(letter, f"old_{name}")
            _replace(name, letter, _addresses()[f"{name}_{ufunc.TYPES.index(letter)}"], old)
            _ours[name, letter] = None
    if wait or not tiers.enabled():
        for letter in letters:
            for layout in LAYOUTS:
                _make(letter, layout)
    installation = ExitStack()
    installation.callback(_take_out, new)
    return installation


def uninstall() -> None:
    """Give NumPy's ufuncs the loops that they had before the first `install`; without one it does nothing."""
    _take_out(tuple(_ours))


def installed() -> tuple[str, ...]:
    """Return the element types that NumPy multiplies by gemmery's kernels now.

    >>> with install(types=["int8"]):
    ...     installed()
    ('int8',)
    """
    return tuple(dict.fromkeys(np.dtype(letter).name for _, letter in _ours))


def _listed(types: Any) -> list[Any]:
    return list(types) if isinstance(types, Iterable) and not isinstance(types, str) else [types]


def _letters(dtype: Any) -> list[str]:
    """Return NumPy's letters of an element type: long and long long have the same bits."""
    try:
        own = np.dtype(dtype)
    except Exception:  # TypeError, or what an object raises
        own = np.dtype(object)
    known = [letter for letter in ufunc.TYPES if np.dtype(letter) == own.newbyteorder("=")]
    if not known:
        names = ", ".join((*DEFAULT, "float32", "float64", "complex64", "complex128"))
        raise DTypeError(f"types has {brief(dtype)}, which no kernel multiplies: use {names}")
    return known


def _loops(letters: Iterable[str]) -> Iterator[LoopName]:
    """Yield the loops of these types that this NumPy has."""
    for name in ufunc.UFUNCS:
        function: Any = getattr(np, name, None)  # vecdot came with NumPy 2.0, matvec and vecmat with 2.2
        for letter in letters if function is not None else ():
            conjugates = name in _CONJUGATES and letter in "FD"
            if f"{letter}{letter}->{letter}" in function.types and not conjugates:
                yield name, letter


def _take_out(loops: Iterable[LoopName]) -> None:
    with _lock:
        for name, letter in loops:
            if (name, letter) in _ours:
                _put_back(name, letter)


def _put_back(name: str, letter: str) -> None:
    place, replaced = _root() + ufunc.place(letter, f"old_{name}"), ctypes.c_int64()
    _replace(name, letter, ctypes.c_int64.from_address(place).value, ctypes.addressof(replaced))
    if replaced.value == _addresses()[f"{name}_{ufunc.TYPES.index(letter)}"]:
        del _ours[name, letter]
    else:  # another's, put in after ours, which it may call
        _replace(name, letter, replaced.value, 0)


def _replace(name: str, letter: str, loop: int, old: int) -> None:
    """Give a ufunc another loop for a type. NumPy writes the address of the one before to `old`, in the same step."""
    module: Any = np._core._multiarray_umath  # type: ignore[attr-defined]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = (ctypes.c_void_p * (_REPLACE + 1)).from_address(pointer(module._UFUNC_API, None))
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    signature = (ctypes.c_int * 3)(*[np.dtype(letter).num] * 3)
    if prototype(table[_REPLACE] or 0)(getattr(np, name), loop, ctypes.addressof(signature), old):
        raise RefusedError(f"np.{name} has no loop of its own for {np.dtype(letter).name}: uninstall what replaced it")


class ProductCount(NamedTuple):
    """Products of one element type and one class of shapes since `count(True)`."""

    dtype: str
    shapes: str  # one of ufunc.CLASSES
    products: int
    work: int  # multiply-adds
    seconds: float
    numpys: int  # products that NumPy's own loops computed, such as those before the kernels were there
    numpys_seconds: float
    samples: tuple[tuple[int, int, int, int], ...]  # the last shapes: batch, m, n, k


def count(on: bool) -> None:
    """Let the loops count and time what they run, from zero; or let them stop."""
    for letter in ufunc.TYPES if on else ():
        place = _root() + ufunc.place(letter, "products_0")
        entry_table.write(place, [0] * (len(ufunc.CLASSES) * len(ufunc.CLASS)))
    entry_table.write(_root() + at(ufunc.ROOT, "counting"), [int(on)])


def counts() -> list[ProductCount]:
    """Return what the loops have counted, by element type and class of shapes."""
    rows = []
    for letter in ufunc.TYPES:
        for i, shapes in enumerate(ufunc.CLASSES):
            place = _root() + ufunc.place(letter, f"products_{i}")
            products, work, ns, numpys, _, numpys_ns, *rest = (ctypes.c_int64 * len(ufunc.CLASS)).from_address(place)
            if products or numpys:
                samples = set(zip(*[iter(rest)] * 4, strict=True)) - {(0, 0, 0, 0)}
                name = np.dtype(letter).name
                times = ns / 1e9, numpys, numpys_ns / 1e9
                rows.append(ProductCount(name, shapes, products, work, *times, tuple(samples)))
    return rows


# ---- what the loops read ----


@functools.cache
def _root() -> int:
    """Return the address of the record that the loops read."""
    if not pool.address():
        raise RefusedError(f"gemmery.numpy needs Linux on x86-64 or ARM, not {sys.platform}: call gm.matmul instead")
    root, usual = workspace.pages(ufunc.ROOT_BYTES), constants()
    ask = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_ask)
    workspace.forever(ask)
    pending, called = (ctypes.cast(x, ctypes.c_void_p).value or 0 for x in (ctypes.pythonapi.Py_AddPendingCall, ask))
    floats = struct.unpack("<2q", struct.pack("<2d", 1 / usual.worth, usual.wakes))
    entry_table.write(root, [threads.get(), *floats, 0, pool.address(), pool.entries()["run"], pending, called])
    for letter in ufunc.TYPES:
        place = root + ufunc.place(letter, "size")
        entry_table.write(place, [np.dtype(letter).itemsize, _LEAST])
    threads.at_change.append(lambda: entry_table.write(root, [threads.get()]))
    os.register_at_fork(after_in_child=_ask_again)
    return root


@functools.cache
def _addresses() -> dict[str, int]:
    return jit.load(host(), "ufunc", lambda: ufunc.module(host()), _root())


def _ask(word: int) -> int:
    """Have the kernels made for which a loop has set the word at this address; Python calls it in the main thread."""
    letter, layout = ufunc.asking(word - _root())
    if not tiers.aside(("numpy", letter, layout), functools.partial(_make, letter, layout)):
        ctypes.c_int64.from_address(word).value = 0  # the next product asks again
    return 0


def _ask_again() -> None:
    """In a forked child, where nobody makes what its parent was making, let loops ask again."""
    global _lock
    _lock = RLock()
    for letter in ufunc.TYPES:
        place = _root() + ufunc.place(letter, f"asked_{LAYOUTS[0]}")
        entry_table.write(place, [0] * len(LAYOUTS))


def _make(letter: str, layout: str) -> None:
    """Compile the kernels of an element type and a layout of B, if the loops have none, and show them these."""
    place = _root() + ufunc.place(letter, f"kernels_{layout}")
    if ctypes.c_int64.from_address(place).value:
        return
    dtype = dtypes.BY_NUMPY_NAME[np.dtype(letter).name]
    # Products modulo 2 to the bits of C are the same for signed and unsigned integers.
    name = dtype.name.removeprefix("u")
    problem = Problem(1, 1, 1, name, name, b_layout=layout)
    if dtype.kind == "b":
        kernels = [_kernel_of_bools()]
    else:
        every = families(problem.dtype, problem.out, layout, "", False, 1)
        if dtype.kind in "iu":  # whose bits no kernel changes: where `gm.matmul` makes a plan, the last one serves
            whole = (1, UNLIMITED)
            last = every[-1]._replace(m=whole, n=whole, b_elements=UNLIMITED, c_elements=UNLIMITED)
            every = (*every, last)
        kernels = [_words(member(family, problem), family.launch.unit, _sums(family, problem)) for family in every]
    block = [len(kernels), *(word for words in kernels for word in words)]
    address = workspace.pages(8 * len(block))
    entry_table.write(address, block)
    publish = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(_addresses()["publish"])
    publish(place, address)


def _sums(family: Family, problem: Problem) -> int:
    """Return the bytes of an element of sums that a kernel keeps apart from C where k takes several blocks, else 0."""
    types = images.product(host(), problem)
    apart = types.sums_apart and family.rung.name == "packed" and family.blocks.workspace
    return dtypes.SIZES[types.scalar] if apart else 0


def _words(own: Member, unit: Unit | None, sums: int) -> list[int]:
    """Return a kernel as the loops read it; with sums apart, for which a loop finds room, it takes every k."""
    cut = unit or Unit(0, 0, 0.0, wide=0)
    k = (0, UNLIMITED) if sums else own.k
    floats = struct.unpack("<6q", struct.pack("<6d", own.work, own.most, cut.step, cut.pack, cut.each, cut.read))
    limits = (*own.m, *own.n, *k, own.b_elements, own.c_elements, own.a_col)
    job = struct.unpack(f"<{len(own.job) // 8}q", own.job)
    return [*limits, *floats[:2], *job, cut.rows, cut.columns, cut.wide, *floats[2:], sums]


def _kernel_of_bools() -> list[int]:
    """Return the kernel of bools, for every shape."""

    def generate() -> Any:
        from gemmery.cpu import or_and

        return or_and.module(host())

    unit = Unit(1, 8 * host().lanes(1), 0.0, each=_STEP)
    launch = Launch(jit.load(host(), "or_and", generate)["or_and"], "i32", 1, lambda m, n, k: Blocks(), unit=unit)
    view, every = View(0, (1, 1, 1), (0, 1, 1), "bool"), (0, UNLIMITED)
    job = launch.job(view, view, view, 1, 0, None, 1)
    return _words(Member(every, every, every, UNLIMITED, UNLIMITED, 0, 0.0, 0.0, job), unit, 0)
