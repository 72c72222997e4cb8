"""The accesses of a kernel to memory, counted while it runs, with a model of the caches of one core.

In a copy of the kernel, each load, store and prefetch calls `touch`, which looks its lines up in L1, then in L2, and
its page in a table of translations. A set loses the line that was used longest ago. All are empty at first; there is
no hardware prefetcher, and lines that are written back are not counted.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from threading import RLock

from gemmery.arrays import View
from gemmery.cpu import jit, workspace
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES
from gemmery.cpu.launch import Launch
from gemmery.cpu.target import Target
from gemmery.tuples import NamedTuple

LINE = 64
_PAGES, _PAGE_WAYS = 64, 4  # of 4 KiB, whose translations are at hand
_SITES = 1 << 14  # more than any kernel has
_WORDS = 8  # of a site; the first five are its counters
_ACCESS = re.compile(r" +(?:%\w+ = )?(?:(?:load|store) (?:<(\d+) x )?(\w+).*, align |call .*@llvm\.(?:masked|pref))")
_MASKED = re.compile(r"<\d+ x (\w+)>.*<(\d+) x i1> (%\w+)")
_lock = RLock()  # all kernels share one model


class Site(NamedTuple):
    """A load, store or prefetch in the code of a kernel, and what it did in a run."""

    function: str
    kind: str  # "loads", "stores", "prefetches"
    touches: int = 0
    l1: int = 0  # lines that came into L1
    l2: int = 0  # lines that came into L2
    pages: int = 0  # pages whose translation was not at hand
    address: int = 0  # of the last access


def caches(target: Target) -> tuple[int, int]:
    """Return the bytes of L1 and L2: those of the target, or common ones where they are not known."""
    return target.l1d or 32 << 10, target.l2 or 1 << 20


def shape(size: int) -> tuple[int, int]:
    """Return (sets, ways) of a cache: 8 ways, or some more for a power of two of sets.

    >>> shape(32 << 10), shape(48 << 10)
    ((64, 8), (64, 12))
    """
    sets = 1 << (size // LINE // 8).bit_length() - 1
    return sets, size // LINE // sets


def counted(launch: Launch, a: View, b: View, c: View) -> tuple[Site, ...]:
    """Compute C = A B by a kernel on one thread, and return what each of its loads, stores and prefetches did."""
    target, name, entry, generate = jit.origin(launch.address)
    text, sites = _with_touches(str(generate()))
    assert len(sites) <= _SITES, name
    l1, l2 = caches(target)
    module = Module(target)
    _touch(module, shape(l1), shape(l2))
    with _lock:
        at, words = _state(l1, l2)
        kernel = jit.load(target, f"{name}_counted_{l1}_{l2}", lambda: f"{text}\n{module}", hole=at)[entry]
        ctypes.memset(at, 0, ctypes.sizeof(words))
        Launch(kernel, launch.accumulator, launch.out_size, launch.blocks, at_once=launch.at_once)(a, b, c)
        counters = [words[_WORDS * i : _WORDS * i + 5] for i in range(len(sites))]
    return tuple(Site(*site[:2], *numbers) for site, numbers in zip(sites, counters, strict=True))


def _with_touches(text: str) -> tuple[str, list[Site]]:
    """Return IR that calls `touch` before each access, and these accesses."""
    lines, sites, function, declared = list[str](), list[Site](), "", dict[str, None]()
    for line in text.splitlines():
        if line.startswith("define"):
            function = line.partition("@")[2].partition("(")[0]
        if access := _ACCESS.match(line):
            kind = "prefetches" if "@llvm.pref" in line else "loads" if " = " in line else "stores"
            pointer, size = re.findall(r"ptr (%\w+)", line)[-1], "1"
            if masked := _MASKED.search(line):  # the lanes that exist are the first
                size, bits = f"%touched_{len(sites)}", int(masked[2])
                declared[f"declare i{bits} @llvm.ctpop.i{bits}(i{bits})"] = None
                lines += [
                    f"  {size}_bits = bitcast <{bits} x i1> {masked[3]} to i{bits}",
                    f"  {size}_lanes = call i{bits} @llvm.ctpop.i{bits}(i{bits} {size}_bits)",
                    f"  {size}_count = zext i{bits} {size}_lanes to i64",
                    f"  {size} = mul i64 {size}_count, {SIZES[masked[1]]}",
                ]
            elif "@llvm." not in line:
                size = str(int(access[1] or 1) * SIZES[access[2]])
            lines.append(f"  call void @touch(ptr {pointer}, i64 {size}, i64 {len(sites)})")
            sites.append(Site(function, kind))
        lines.append(line)
    return "\n".join((*lines, *declared)), sites


@functools.cache
def _state(l1: int, l2: int) -> tuple[int, ctypes.Array[ctypes.c_int64]]:
    """Return the memory of the model: the words of each site, then the tables of pages, L1 and L2."""
    count = _SITES * _WORDS + _PAGES + (l1 + l2) // LINE
    at = workspace.pages(8 * count)
    return at, (ctypes.c_int64 * count).from_address(at)


def _touch(module: Module, l1: tuple[int, int], l2: tuple[int, int]) -> None:
    """Define `touch(at, bytes, site)`."""
    with module.function("touch", "at", ("i64", "bytes"), ("i64", "site"), local=True) as f:
        state, at = f.emit("ptr", f"inttoptr i64 {jit.HOLE} to ptr"), f.emit("i64", f"ptrtoint {f['at']} to i64")
        site, pages = state + f["site"] * (8 * _WORDS), state + 8 * _SITES * _WORDS
        to_l1 = pages + 8 * _PAGES
        to_l2 = to_l1 + 8 * l1[0] * l1[1]

        def count(word: int) -> None:
            f.store(f.load("i64", site + 8 * word) + 1, site + 8 * word)

        def beyond_l1() -> None:
            count(1)
            _look(f, to_l2, l2, line, lambda: count(2))

        with f.if_(f["bytes"] > 0):  # else all lanes are masked
            count(0)
            f.store(at, site + 8 * 4)
            _look(f, pages, (_PAGES // _PAGE_WAYS, _PAGE_WAYS), at >> 12, lambda: count(3))
            with f.loop(at >> 6, ((at + f["bytes"] - 1) >> 6) + 1) as line:
                _look(f, to_l1, l1, line, beyond_l1)


def _look(f: Function, table: Value, sets_ways: tuple[int, int], key: Value, absent: Callable[[], None]) -> None:
    """Put a key first in its set: those before its old place move back by one; the last one leaves if it was absent."""
    sets, ways = sets_ways
    place, carried, rest = f.var(table + (key & (sets - 1)) * (8 * ways)), f.var(key), f.var(f.index(ways))
    with f.while_() as again:
        old = f.load("i64", place.value)
        f.store(carried.value, place.value)
        carried.value = old
        again.until(old.equals(key))
        place.value, rest.value = place.value + 8, rest.value - 1
        again.until(rest.value.equals(0))
    with f.if_(carried.value.differs(key)):
        absent()
