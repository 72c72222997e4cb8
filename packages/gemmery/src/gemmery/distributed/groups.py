"""Process groups of torch.distributed: by name, as operators know them, with what they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gemmery.errors import ArgumentError

_distributed: Any = dist  # parts of PyTorch have no types
_c10d: Any = c10d


def group_name(group: Any) -> str:
    """Return the name of a process group, of all ranks by default."""
    if isinstance(group, str):
        return group
    if not torch.compiler.is_compiling() and not _distributed.is_initialized():
        raise ArgumentError("there is no process group: call torch.distributed.init_process_group first")
    result: str = (_distributed.group.WORLD if group is None else group).group_name
    return result


def resolve(name: str) -> Any:
    """Return the process group with a name."""
    return _c10d._resolve_process_group(name)


def exchange(group: Any) -> Any:
    """Return the function with which the ranks of a process group tell each other an object."""

    def tell(value: object) -> list[Any]:
        every: list[Any] = [None] * group.size()
        _distributed.all_gather_object(every, value, group=group)
        return every

    return tell


def timeout(group: Any) -> timedelta:
    """Return how long the ranks of a group wait for each other."""
    try:
        limit: timedelta = group._get_backend(torch.device(group._device_types[0])).options._timeout
    except (AttributeError, RuntimeError):
        limit = _c10d._get_default_timeout(_distributed.get_backend(group))
    return limit


def capturing(x: Any) -> bool:
    """Return True while a CUDA graph captures the current stream, where ranks cannot talk."""
    return bool(x.is_cuda and torch.cuda.is_current_stream_capturing())


def spans(rows: Sequence[int]) -> list[slice]:
    """Return each rank's rows of the whole."""
    ends = list(accumulate(rows, initial=0))
    return [slice(start, end) for start, end in pairwise(ends)]
