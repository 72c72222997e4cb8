"""Kernels that show how they are called: one marks what it was given, one waits at a gate."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from gemmery.arrays import View
from gemmery.cpu import atomics, jit, layout, pool
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Matrix, Module
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.split import Unit
from gemmery.cpu.target import host

NO_BLOCKS = Blocks()


def _launch(name: str, made: Module, unit: Unit | None, at_once: bool = False, workspace: int = 0) -> Launch:
    digest = hashlib.sha256(str(made).encode()).hexdigest()
    address = jit.load(host(), f"{name}_{digest}", lambda: made)[name]
    return Launch(address, "i32", 4, lambda m, n, k: Blocks(workspace=workspace), unit=unit, at_once=at_once)


def mark(unit: Unit | None = None, at_once: bool = False, workspace: int = 0) -> Launch:
    """Adds 1 to every element of C of each call, in the first product alone."""
    made = Module(host())
    with made.function("mark", ("ptr", "args")) as f:
        args = Args(f, f["args"])
        c = Matrix(f, args.c, "i32", args.c_row, args.c_col)
        with f.loop(0, args.m) as i, f.loop(0, args.n) as j:
            c[i, j] = c[i, j] + 1
    return _launch("mark", made, unit, at_once, workspace)


def gate(unit: Unit | None) -> Launch:
    """Counts who arrives in the first word of `bias`, waits until the second is not zero, adds 1 to C's elements."""
    made = Module(host())
    with made.function("gate", ("ptr", "args")) as f:
        args = Args(f, f["args"])
        c = Matrix(f, args.c, "i32", args.c_row, args.c_col)
        at = args.bias
        f.emit("i64", f"atomicrmw add {at}, i64 1 seq_cst")
        with f.while_() as again:
            again.until(f.emit("i64", f"load atomic i64, {at + 8} seq_cst, align 8").differs(0))
        with f.loop(0, args.m) as i, f.loop(0, args.n) as j:
            c[i, j] = c[i, j] + 1
    return _launch("gate", made, unit)


class Gate:
    """The two words that `gate` looks at."""

    def __init__(self) -> None:
        self.words = (ctypes.c_int64 * 2)()

    @property
    def view(self) -> View:
        return View(ctypes.addressof(self.words), (2,), (0,), "i64")

    def wait_for(self, arrived: int) -> None:
        """Return when so many wait at the gate."""
        end = time.monotonic() + 60
        while self.words[0] < arrived:
            assert time.monotonic() < end, f"{self.words[0]} of {arrived} came"
            time.sleep(0.001)

    def open(self) -> None:
        self.words[1] = 1


def zeros(batch: int, m: int, n: int) -> tuple[np.ndarray, View]:
    """A batch of m x n int32 and its view."""
    array = np.zeros((batch, m, n), np.int32)
    return array, View(array.ctypes.data, array.shape, array.strides, "int32", owner=array)


def slot(number: int) -> tuple[int, int, int]:
    """(taken, address, bytes) of a caller's workspace."""
    at = pool.address() + layout.SLOTS + number * layout.SLOT
    return tuple((ctypes.c_int64 * 3).from_address(at))


def modes(unit: Unit | None) -> Launch:
    """Like `gate`, and stores in C's elements the floating-point mode in which they were computed."""
    made = Module(host())
    with made.function("modes", ("ptr", "args")) as f:
        args = Args(f, f["args"])
        c = Matrix(f, args.c, "i32", args.c_row, args.c_col)
        at = args.bias
        f.emit("i64", f"atomicrmw add {at}, i64 1 seq_cst")
        with f.while_() as again:
            again.until(f.emit("i64", f"load atomic i64, {at + 8} seq_cst, align 8").differs(0))
        mode = f.convert("trunc", atomics.floating_mode(f), "i32")
        with f.loop(0, args.m) as i, f.loop(0, args.n) as j:
            c[i, j] = mode
    return _launch("modes", made, unit)


@contextmanager
def floating_mode(change: int) -> Iterator[int]:
    """This thread in a floating-point mode with the bits of `change` set (x86-64: MXCSR); its number is given."""
    entries = pool.entries()
    read = ctypes.CFUNCTYPE(ctypes.c_int64)(entries["mode"])
    write = ctypes.CFUNCTYPE(None, ctypes.c_int64)(entries["set_mode"])
    before = read()
    write(before | change)
    try:
        yield before | change
    finally:
        write(before)


def opened(gate: Gate, arrived: int) -> threading.Thread:
    """A thread that opens the gate when so many wait there."""

    def wait() -> None:
        gate.wait_for(arrived)
        gate.open()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
