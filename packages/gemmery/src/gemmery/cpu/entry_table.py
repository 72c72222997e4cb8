"""The table of the compiled entry in plain memory: its address, and how Python finds and writes what it has."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from gemmery.cpu import entry_layout as layout
from gemmery.cpu import objects, pool, workspace
from gemmery.cpu.entry_layout import Key

_tables: list[int] = []  # the first is this process's table
_turns: dict[int, int] = {}  # which entry of a full set is replaced next
_Set = ctypes.c_uint64 * layout.WAYS


def address() -> int:
    """Return the address of this process's table, or 0 where the fields of arrays are unknown or there is no pool."""
    return _tables[0] if _tables else _make()


def _make() -> int:
    if not pool.address() or not objects.known():
        _tables.append(0)
    else:
        at = workspace.pages(layout.TABLE_BYTES)
        write(at + layout.FACTORS_AT, layout.FACTORS)
        _tables.append(at)  # if two threads were here at once, the second table stays unused
    return _tables[0]


def packed(words: Sequence[int]) -> bytes:
    """Return words as the table has them."""
    return struct.pack(f"<{len(words)}q", *words)


def write(at: int, words: Sequence[int]) -> None:
    """Write words at an address."""
    write_bytes(at, packed(words))


def write_bytes(at: int, data: bytes) -> None:
    """Write while holding the GIL, which ctypes.memmove releases: compiled code reads the table under it."""
    (ctypes.c_char * len(data)).from_address(at).raw = data


def find(key: Key) -> int:
    """Return the address of the entry with a key, or 0."""
    table, first = address(), layout.place(key.hash)
    for index, stored in enumerate(_Set.from_address(table + layout.HASHES_AT + 8 * first), first):
        if stored == key.hash:
            place, count = table + layout.ENTRIES_AT + index * layout.ENTRY_BYTES, len(key.words)
            if (ctypes.c_int64 * (1 + count)).from_address(place)[:] == [count, *key.words]:
                return place  # else two threads stored an entry here at once
    return 0


def counter(table: int, key: Key) -> Any:
    """Return the hash of a counter's key, and its count."""
    index = layout.high_bits(key.hash, layout.COUNTERS)
    return (ctypes.c_uint64 * 2).from_address(table + layout.COUNTERS_AT + 16 * index)


def store_entry(table: int, key: Key, data: bytes) -> None:
    """Write an entry over that with the same key, else in a free place, else over another one of its set."""
    index = _index(table, key.hash)
    write_bytes(table + layout.ENTRIES_AT + index * layout.ENTRY_BYTES, data)
    ctypes.c_uint64.from_address(table + layout.HASHES_AT + 8 * index).value = key.hash


def _index(table: int, hash_: int) -> int:
    """Return where an entry with this hash is, or a free place, or the place whose turn it is."""
    first = layout.place(hash_)
    stored = list(_Set.from_address(table + layout.HASHES_AT + 8 * first))
    for candidate in (hash_, 0):
        if candidate in stored:
            return first + stored.index(candidate)
    turn = _turns.get(first, 0)
    _turns[first] = (turn + 1) % layout.WAYS
    return first + turn
