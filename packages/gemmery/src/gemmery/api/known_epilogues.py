"""The fast path of an epilogue on tensors of a CUDA device: a look-up, addresses, one launch.

The slow path reads each tensor several times, and the host is then busy for longer than the device with a step of
training (docs/findings/functions_on_a_gpu.md). What it found out is looked up by the function and by the types, shapes,
strides and alignments of the tensors; what may differ between such tensors is checked each time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from gemmery.api import array_libraries
from gemmery.api.device_call import keep, table
from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.cuda import driver, ordered, tensormaps
from gemmery.cuda.launch import Ready
from gemmery.cuda.traced_function import Strides, TracedFunction
from gemmery.tuples import NamedTuple


class EpilogueLaunch(NamedTuple):
    """A launch with a function, and where its arguments lie: memory that it reads or writes, and numbers."""

    run: Ready
    function: TracedFunction
    pointers: tuple[View | None, View | None, View | None]  # of A, B and C, or of the first and the last sums
    stored: Sequence[Strides | float]  # what the function reads and writes besides
    maps: Sequence[tuple[tensormaps.MapShape, View]] = ()
    last: View | None = None  # of two weights the second


class KnownEpilogue(NamedTuple):
    """A call seen before. A place is that of a tensor of the call, then of a result; -1 of none."""

    run: Ready
    function: TracedFunction
    pointers: Ints
    stored: tuple[tuple[int, int, int] | float, ...]  # places and strides, or numbers
    maps: tuple[tuple[tensormaps.MapShape, int], ...]
    last: int
    results: tuple[tuple[Ints, Ints, Any], ...]  # shapes, strides in elements, and types


class TensorCall(NamedTuple):
    """A call of an epilogue on tensors of one device, and what identifies it among others."""

    key: tuple[Any, ...]
    tensors: list[Any]  # the sums, or the operands of their product, then those of the epilogue
    addresses: list[int]
    ordinal: int


def call_of(function: Any, sums: Sequence[Any], operands: Mapping[str, Any], form: Any) -> TensorCall | None:
    """Return a call as the fast path reads it; None where the slow path has to look at it."""
    library = array_libraries.library_of(sums[0])
    if not isinstance(library, array_libraries.Torch) or library.is_unseen():
        return None
    tensors, numbers = [*sums], []
    for value in operands.values():
        if type(value) in library.types:
            tensors.append(value)
        elif type(value) not in (int, float):
            return None
        # -0.0 is 0.0 to a dictionary, and 1 is 1.0.
        numbers.append(value.hex() if type(value) is float else value if type(value) is int else None)
    reading = library.read(tensors)
    if reading is None:
        return None
    words, addresses = reading
    same = tuple(map(addresses.index, addresses))  # of a tensor that is passed twice
    key = "epilogue", function, form, *words, same, *operands, *numbers
    return TensorCall(key, tensors, addresses, words[0])


def known(tensor_call: TensorCall | None) -> Any:
    """Return what a call seen before returns; None for another."""
    call: KnownEpilogue | None = None if tensor_call is None else table.calls.get(tensor_call.key)
    if call is None or tensor_call is None:
        return None
    torch: Any = sys.modules["torch"]
    first, ordinal = tensor_call.tensors[0], tensor_call.ordinal
    results = [torch.empty_strided(*sides, dtype=dtype, device=first.device) for *sides, dtype in call.results]
    addresses = [*tensor_call.addresses, *(z.data_ptr() for z in results), 0]
    stored = [z if isinstance(z, float) else Strides(addresses[z[0]], *z[1:]) for z in call.stored]
    maps = [(shape, addresses[place]) for shape, place in call.maps]
    a, b, c = (addresses[place] for place in call.pointers)
    apart = addresses[call.last] - b if call.last >= 0 else 0
    workspace = first.new_empty((call.run.workspace,), dtype=torch.uint8) if call.run.workspace else None
    start = 0 if workspace is None else workspace.data_ptr()
    stream = torch._C._cuda_getCurrentRawStream(ordinal)
    launch(call.run, call.function, (a, b, c), stored, maps, apart, stream, start)
    return results[0] if len(results) == 1 else tuple(results)


def launch(
    run: Ready, function: TracedFunction, pointers: tuple[int, int, int], stored: Sequence[Strides | float],
    maps: Sequence[tuple[tensormaps.MapShape, int]], apart: int, stream: int, workspace: int = 0,
) -> None:  # fmt: skip
    """Put a launch with a function on a stream; two weights lie `apart` bytes from each other."""
    with driver.on(run.ordinal) if maps else nullcontext():  # a thread of autograd may have no context
        described = [tensormaps.at_address(*each) for each in maps]
    words = (0, 0, ordered.counters(run.counters, stream, run.ordinal)) if run.counters else ()
    run(*pointers, stream, 0, workspace, None, words, function.packed(stored, described, apart))


def remember(call: TensorCall | None, launch: EpilogueLaunch | None, returned: Any) -> None:
    """Keep a call, if one launch did it from its tensors to what it returned."""
    if call is None or launch is None:
        return
    results = returned if isinstance(returned, tuple) else (returned,)
    addresses = [*call.addresses, *(z.data_ptr() for z in results)]
    places = {p: place for place, p in reversed([*enumerate(addresses)])}
    memories = [*launch.pointers, launch.last, *(z for _, z in launch.maps)]
    used = [z.pointer for z in (*memories, *launch.stored) if isinstance(z, (View, Strides))]
    if any(p not in places for p in used):  # a copy that was converted
        return
    *pointers, last = (-1 if z is None else places[z.pointer] for z in (*launch.pointers, launch.last))
    stored = [(places[z.pointer], z.row, z.column) if isinstance(z, Strides) else float(z) for z in launch.stored]
    maps = tuple((shape, places[z.pointer]) for shape, z in launch.maps)
    layouts = tuple((tuple(z.shape), z.stride(), z.dtype) for z in results)
    entry = KnownEpilogue(launch.run, launch.function, tuple(pointers), tuple(stored), maps, last, layouts)
    keep(table.calls, call.key, entry)
