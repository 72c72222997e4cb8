"""What a product over ranks needs of the ranks: their number, messages between them, and memory of their kind.

Ranks tell each other what they were called with, before anything else is sent: all go on, or all raise one error.
`TorchRanks` are those of a process group of torch.distributed, `MpiRanks` those of a communicator of mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gemmery import dtypes, errors
from gemmery.errors import ArgumentError, GemmeryError

Messages = Sequence[tuple[int, Any]]  # the other rank, and a contiguous array


def agree(
    exchange: Callable[[object], list[Any]],
    function: str,
    same: Mapping[str, object],
    own: object,
    wrong: Exception | None = None,
) -> list[Any]:
    """Return every rank's `own`.

    `exchange` takes what this rank says, which JSON can write, and returns what every rank says, in their order. `same`
    are values, by name, that must be equal on all ranks. `wrong` is an error that this rank found in its own arguments.

    Raises `wrong` on every rank if one has it, and ArgumentError on every rank if the functions or values differ.
    """
    error = None if wrong is None else (type(wrong).__name__, str(wrong))
    answers = exchange((function, {name: repr(value) for name, value in same.items()}, own, error))
    for rank, (_, _, _, result) in enumerate(answers):
        if result is not None:
            kind, text = result
            raise getattr(errors, kind, GemmeryError)(f"rank {rank}: {text}")
    for name in sorted({name for _, values, _, _ in answers for name in values} | {"function"}):
        values = [called if name == "function" else known.get(name, "nothing") for called, known, _, _ in answers]
        if len(set(values)) > 1:
            differ = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise ArgumentError(f"the ranks called with different values of {name}: {differ}; call with the same")
    return [theirs for _, _, theirs, _ in answers]


class TorchRanks:
    """The ranks of a process group, in the order of a mesh."""

    def __init__(self, group: Any, members: Sequence[int], device: Any) -> None:
        """Take the group, its members' global ranks in the order of the mesh, and the device of their tensors."""
        import torch
        import torch.distributed as dist

        self._torch: Any = torch
        self._dist: Any = dist
        self._group, self._members, self._device = group, list(members), device
        self.rank, self.size = self._members.index(dist.get_rank()), len(members)

    def exchange(self, value: object) -> list[Any]:
        """Tell all ranks a value; return what each said."""
        from gemmery.distributed.groups import exchange

        every = exchange(self._group)((self.rank, value))
        return [answers for _, answers in sorted(every, key=lambda answers: int(answers[0]))]

    def _type(self, dtype: str) -> Any:
        return getattr(self._torch, dtypes.get(dtype).numpy)

    def empty(self, shape: tuple[int, int], dtype: str) -> Any:
        """Return a tensor whose values are not set."""
        return self._torch.empty(shape, dtype=self._type(dtype), device=self._device)

    def cast(self, array: Any, dtype: str) -> Any:
        """Return a tensor in another element type, or itself."""
        return array.to(self._type(dtype))

    def packed(self, array: Any) -> Any:
        """Return a contiguous tensor of the same values."""
        return array.contiguous()

    def start(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """Start to send and to receive; return the function that waits for both."""
        operations = [
            self._dist.P2POp(function, array, self._members[peer], group=self._group)
            for function, messages in ((self._dist.isend, sends), (self._dist.irecv, receives))
            for peer, array in messages
        ]
        works = self._dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()
            operations.clear()  # which kept the tensors

        return wait


class MpiRanks:
    """The ranks of a communicator of mpi4py."""

    def __init__(self, comm: Any) -> None:
        """Take the communicator."""
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def exchange(self, value: object) -> list[Any]:
        """Tell all ranks a value; return what each said."""
        every: list[Any] = self._comm.allgather(value)
        return every

    def empty(self, shape: tuple[int, int], dtype: str) -> Any:
        """Return an array whose values are not set."""
        return np.empty(shape, np.dtype(dtypes.get(dtype).numpy))

    def cast(self, array: Any, dtype: str) -> Any:
        """Return an array in another element type, or itself."""
        return array.astype(np.dtype(dtypes.get(dtype).numpy), copy=False)

    def packed(self, array: Any) -> Any:
        """Return an array of the same values, row by row."""
        return np.ascontiguousarray(array)

    def start(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """Start to send and to receive; return the function that waits for both."""
        arriving = [self._comm.Irecv(_raw(array), peer) for peer, array in receives]
        leaving = [self._comm.Isend(_raw(array), peer) for peer, array in sends]

        def wait() -> None:
            for request in (*arriving, *leaving):
                request.Wait()

        return wait


Ranks = TorchRanks | MpiRanks


def _raw(array: Any) -> Any:
    """Return the bytes of an array: MPI knows no half precision."""
    return array.reshape(-1).view(np.uint8)
