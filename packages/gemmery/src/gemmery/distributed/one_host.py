"""Memory that the ranks of one host share, through which the CPUs' products of layers hand over rows and parts of sums.

Gloo sends through sockets: two copies and a thread beside the product on each side. Here a rank writes once to where
the others read, and only a few words in each call go through the group, so that a rank that died is its error.
"""

from __future__ import annotations

import os
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemmery.distributed.groups import exchange, spaces_of
from gemmery.errors import ShapeError

_distributed: Any = dist  # parts of PyTorch have no types
FOLDER = Path("/dev/shm")
MOST_BYTES = 2**29  # of both halves: larger products hide their messages


class HostSpace:
    """Two halves of a shared file that calls use in turn: no rank writes to one that another still reads.

    A rank begins a call when all have told it that they wrote the last one's half, so have read the half before.
    """

    def __init__(self, group: Any, size: int) -> None:
        """Share `size` bytes a half; all ranks call it together, and all of them have a file or none."""
        self.group, self.size, self.turn, self.whole = group, size, 0, None
        tell = exchange(group)
        path = tell(_new_file(2 * size) if group.rank() == 0 else None)[0]
        try:
            mine = torch.from_file(path, shared=True, size=2 * size, dtype=torch.uint8) if path else None
        except (OSError, RuntimeError):  # rank 0 is on another host
            mine = None
        if all(tell(mine is not None)):
            self.whole = mine
        if path and group.rank() == 0:
            Path(path).unlink()

    def half(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return the next call's half as a tensor."""
        self.turn += 1
        begin, size = self.turn % 2 * self.size, prod(shape) * dtype.itemsize
        whole: Any = self.whole
        return whole[begin : begin + size].view(dtype).view(shape)

    def written(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Tell all ranks that this one has written its part, and wait for theirs.

        Raises ShapeError on every rank if two have halves of different shapes or types.
        """
        mine = torch.tensor([*shape, dtype.itemsize])
        every = [torch.empty_like(mine) for _ in range(self.group.size())]
        _distributed.all_gather(every, mine, group=self.group)
        for rank, other in enumerate(every):
            if not torch.equal(other, every[0]):
                raise ShapeError(
                    f"ranks 0 and {rank} share {every[0].tolist()} and {other.tolist()} (sides, bytes an element): "
                    "call with the same shapes and types on all ranks"
                )


def _new_file(size: int) -> str | None:
    """Return the path of a new file of so many bytes, all of them there, or None."""
    try:
        handle, path = tempfile.mkstemp(prefix="gemmery-", dir=FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError:  # the host has less shared memory
        Path(path).unlink()
        return None
    finally:
        os.close(handle)
    return path


def host_space(group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> HostSpace | None:
    """Return the space of a group for such a tensor; None for ranks of several hosts, and for large or empty ones."""
    size = max(1 << 16, 1 << (prod(shape) * dtype.itemsize - 1).bit_length())
    if group.size() < 2 or not prod(shape) or 2 * size > MOST_BYTES:
        return None
    spaces = spaces_of(group)
    known: HostSpace | None = spaces.get("host")
    if known is None or (known.whole is not None and known.size < size):
        known = spaces["host"] = HostSpace(group, size)
    return known if known.whole is not None else None
