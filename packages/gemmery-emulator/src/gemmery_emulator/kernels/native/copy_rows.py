"""Copies of cp.async that have begun: rows that compiled code has, and what the machine has of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmery_emulator.kernels.native.buffers import Buffers
from gemmery_emulator.kernels.native.frames import COPY, Record
from gemmery_emulator.kernels.native.translation import AsyncCopy, Translation
from gemmery_emulator.machine import Machine
from gemmery_emulator.reach import Copies, Copy

ROOM = 32  # copies under way; a power of two


class CopyRows:
    """The copies of a chunk, which either the machine has or compiled code."""

    def __init__(
        self, machine: Machine, context: Record, records: Record, own: Buffers, translation: Translation
    ) -> None:
        self._translation = translation
        self._copies, self._context, self._own = machine.unit(Copies), context, own
        self._rows = Record(COPY, ROOM)
        self._places, self._data = own.copies(ROOM)
        self._addresses = {
            index: records.address(number + 1)
            for index, number in translation.number.items()
            if isinstance(translation.forms[index], AsyncCopy)
        }
        self._lent = False
        context.set("copies", self._rows.words)
        context.set("copy_places", self._places)
        context.set("copy_data", self._data)

    def lend(self) -> None:
        """Let compiled code have the copies, if all threads have begun as many groups."""
        copies, context = self._copies, self._context
        if self._lent:
            return
        fits = isinstance(copies.committed, int) and len(copies.under_way) <= ROOM
        fits = fits and all(isinstance(each.group, int) for each in copies.under_way)
        context.set("copy_room", ROOM if fits else 0)
        if not fits:
            return
        self._lent = True
        context.set("copy_first", 0)
        context.set("copy_count", len(copies.under_way))
        context.set("committed", copies.committed)
        for row, copy in enumerate(copies.under_way):
            self._rows.set("desc", self._addresses[copy.index], row)
            self._rows.set("group", copy.group, row)
            width = copy.data.shape[1]
            self._places[row] = -1
            self._places[row, copy.threads] = copy.rows * width
            self._data[row, : width * self._own.threads].reshape(-1, width)[copy.threads] = copy.data

    def give_back(self) -> None:
        """Let the machine have them."""
        if not self._lent:
            return
        self._lent = False
        indices = {address: index for index, address in self._addresses.items()}
        first, under_way = self._context.get("copy_first"), list[Copy]()
        for row in (np.arange(first, first + self._context.get("copy_count")) % ROOM).tolist():
            index = indices[self._rows.get("desc", row)]
            form: Any = self._translation.forms[index]
            threads = np.flatnonzero(self._places[row] >= 0)
            places, width = self._places[row, threads], form.ends[1].width
            data = self._data[row, : width * self._own.threads].reshape(-1, width)[threads]
            offsets = places - self._own.bases[threads]
            under_way.append(Copy(index, places // width, offsets, data, threads, self._rows.get("group", row)))
        self._copies.resume(under_way, self._context.get("committed"))
