"""Ranks tell each other what they were called with, before anything else is sent: all go on, or all raise one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemmery import errors
from gemmery.errors import ArgumentError, GemmeryError

# What this rank says, which JSON can write -> what every rank says, in the order of ranks.
Exchange = Callable[[object], list[Any]]


def agree(
    exchange: Exchange, function: str, same: Mapping[str, object], own: object, wrong: Exception | None = None
) -> list[Any]:
    """Return every rank's `own`.

    `same` are values, by name, that must be equal on all ranks. `wrong` is an error that this rank found in its own
    arguments.

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
