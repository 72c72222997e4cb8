"""What compiled code and Python share: records of 64-bit words, whose fields have names; and how code reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import lanes_of, vector

WORD = 8  # bytes of a field
LANES = 16  # threads whose values are in one vector
# Entries for different accesses of warps: what was accessed, by which lanes, how often, a hash, then 32 addresses.
ENTRY, ENTRIES, SLOTS = 40, 8192, 1 << 14
NOT_ACTIVE = -1  # in `found`, for a warp without an active lane
PAIR_AT = 32  # the bit of what was accessed from which on is 1 + the entry of the other end of a copy
IN_ROWS = 4  # the word that says whether the addresses of each vector of lanes are equal, or without gaps
BOUNDS = (5, 6, 7)  # the words with the least and the greatest of the addresses, and all their bits
RELATIVE = 8  # the word of an entry with its first address

ADDRESSES = ("own_addresses", "first_base", "second_base", "third_base", "fourth_base")  # what accesses add offsets to
# A launch: sizes, where threads are, buffers by thread, tables of blocks and registers, memory, races, counts.
CONTEXT = [
    "threads", "block_threads", "warps", "stop", "at", "uniform", "steps", "budget", "elapsed", "ended", "places",
    "mask", "full", "ran", "registers", "addresses", *ADDRESSES, "sources", "reads", "lanes",
    "every_lane", "before", "where",
    "stamps", "who", "goes", "blocks", "access", "parameters", "memory", "shared", "bases", "shared_limit", "arrays",
    "array_count", "alike", "clocked", "known", "clock", "each_warp", "ticks", "clock_limit", "many", "seen_by_all",
    "begins", "own_lane", "own_stamp", "own_clock", "written", "read", "read_too", "shift", "races", "grid", "narrow",
    "grid_shift", "last", "other", "updated", "updated_too", "thread_at", "clock_at", "someone", "one_block",
    "written_low", "written_high", "read_low", "read_high", "atomic", "entries", "slots", "used", "found",
    "read_found", "least", "most", "every", "listed", "copies", "copy_places", "copy_data", "copy_first", "copy_count",
    "copy_room", "committed",
]  # fmt: skip
# An instruction that accesses memory.
ACCESS = [
    "call", "mark", "shared", "stores", "width", "follows", "access", "seen", "latest", "offset", "number", "refused",
    "kept", "paired", "pending",
]  # fmt: skip
# A copy that has begun: the record of its end in shared memory, and its group; and the bytes of the widest.
COPY, WIDEST = ["desc", "group"], 16
# A basic block; `ready` is the address of its code.
BLOCK = [
    "ready", "first", "last", "way", "target", "guarded", "gathers", "diverged", "every_warp", "every_thread",
    "branches", "divergent", "barrier",
]  # fmt: skip
# How blocks end.
FOLLOWS, BRANCHES, MEETS, ELSEWHERE = range(4)
# Why compiled code returns to Python.
ENOUGH, UNKNOWN, NOBODY, END, INSIDE = range(5)  # INSIDE plus the index of the instruction that Python executes


class Record:
    """A record, or a table of them, as Python sees it."""

    def __init__(self, names: list[str], rows: int = 1) -> None:
        self.words: NDArray[np.int64] = np.zeros((rows, len(names)), np.int64)
        self._places = {name: place for place, name in enumerate(names)}
        flat: Any = self.words.reshape(-1)
        self._flat = memoryview(flat)
        self._width = len(names)

    def copy(self) -> Record:
        """Return another one with the same numbers."""
        other = Record(list(self._places), len(self.words))
        other.words[:] = self.words
        return other

    def get(self, name: str, row: int = 0) -> int:
        """Return a field."""
        value: int = self._flat[row * self._width + self._places[name]]
        return value

    def set(self, name: str, value: Any, row: int = 0) -> None:
        """Set a field: to a number, or to the address of an array."""
        number = value.__array_interface__["data"][0] if isinstance(value, np.ndarray) else int(value)
        self._flat[row * self._width + self._places[name]] = number

    def column(self, name: str) -> NDArray[np.int64]:
        """Return a field of all rows."""
        return self.words[:, self._places[name]]

    def address(self, row: int = 0) -> int:
        """Return the address of a row."""
        return int(self.words.__array_interface__["data"][0]) + row * self._width * WORD


class FrameFields:
    """A record as code sees it."""

    def __init__(self, f: Function, base: Value, names: list[str]) -> None:
        self._f, self._base, self._names = f, base, names

    def at(self, name: str) -> Value:
        """Return the address of a field."""
        return self._base + WORD * self._names.index(name)

    def get(self, name: str) -> Value:
        """Load a number."""
        return self._f.load("i64", self.at(name), 8)

    def pointer(self, name: str) -> Value:
        """Load an address."""
        return self._f.load("ptr", self.at(name), 8)

    def set(self, name: str, value: Value | int) -> None:
        """Store a number."""
        self._f.store(self._f.index(value), self.at(name), 8)

    def add(self, name: str, value: Value | int) -> None:
        """Add to a number."""
        self.set(name, self.get(name) + value)

    def leave(self, value: Value | int) -> None:
        """Return from the middle of a function."""
        self._f.line(f"ret {self._f.index(value)}")
        self._f._label(f"after{self._f._fresh()}")  # what follows is never reached

    def leave_if(self, condition: Value, value: Value | int = 1) -> None:
        """Return from the middle of a function if a condition holds."""
        with self._f.if_(condition):
            self.leave(value)

    def called(self, name: str, *values: Value) -> Value:
        """Call a function of the module that returns a number."""
        return self._f.result_of(Value(self._f, "ptr", f"@{name}"), "i64", *values)

    def word(self, table: Value, place: Value) -> Value:
        """Load a number from a table of 64-bit words."""
        return self._f.load("i64", table + place * WORD, 8)

    def put(self, table: Value, place: Value, value: Value) -> None:
        """Store a number in a table of 64-bit words."""
        self._f.store(value, table + place * WORD, 8)

    def byte(self, table: Value, place: Value) -> Value:
        """Load a flag."""
        return self._f.emit("i64", f"zext {self._f.load('i8', table + place)} to i64")

    def listed(self, lanes: Value, i: Value) -> Value:
        """Load the thread at a place of a list."""
        return self._f.emit("i64", f"sext {self._f.load('i32', lanes + i * 4, 4)} to i64")

    def over(self, a: Value, b: Value, op: str) -> Value:
        """Add an unsigned division or remainder."""
        return self._f.emit("i64", f"{op} {a}, {b.text}")

    def number_of(self, flag: Value) -> Value:
        """Return 1 where a flag is set, else 0."""
        return self._f.emit("i64", f"zext {flag} to i64")

    def both(self, flag: Value, other: Value) -> Value:
        """Whether two flags are set."""
        return self._f.emit("i1", f"and {flag}, {other.text}")

    def flagged(self, table: Value, start: Value, count: int = LANES) -> Value:
        """Load the flags of some threads."""
        return self._f.load(vector(count, "i8"), table + start).differs(0)

    def bits_of(self, flags: Value) -> Value:
        """Return flags as bits of a number."""
        return self._f.emit("i64", f"zext {self._f.bitcast(flags, f'i{lanes_of(flags.type)}')} to i64")
