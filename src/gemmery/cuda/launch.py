"""A rung's kernel as a callable on views: launches are prepared once, the argument is packed at each call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.cuda import driver, ordered, tensormaps
from gemmery.cuda.geometry import ACTIVATION, BAND, LARGEST_SIDE, Geometry, GeometryOf, epilogue, refusal
from gemmery.cuda.tensormaps import Encode, PlacedMap
from gemmery.errors import RefusedError
from gemmery.problem import Config, Problem

Scaling = tuple[str, int, int, int, int]  # Problem.scales; steps of factors: A's rows, A's k, B's k, B's columns
FirstArguments = tuple[int, int, int, int, int, int, int, int]
# An argument, as words of 8 bytes too, the address of the driver's array of pointers to it, and their owner.
Buffer = tuple[bytearray, memoryview, int, Any]

_POINTERS = struct.Struct("=5Q")  # the fields of Product in product.cuh that change from call to call
_SCALARS_AT = struct.calcsize("=5Q11q4i")
_SCALARS = {_SCALARS_AT + 2 * size: struct.Struct(f"=2{letter}") for size, letter in ((4, "f"), (8, "d"))}
_EXTRA_AT = _SCALARS_AT + 8  # of TmaProduct in tma.cuh, which begins with a Product
_EXTRA = struct.Struct("=3Q")  # its fields that change from call to call, except those of the maps
_MAPS_AT = {"a": 256, "b": 384, "c": 512}
_REST = struct.Struct("=3Q4q4i")  # all up to the maps
_A_WORD, _B_WORD, _C_WORD = (place // 8 for place in _MAPS_AT.values())
MAPPED_BYTES = 640
_ANYWHERE = 256  # bytes of scratch memory for maps of operands without elements
_ALIGNED = dict.fromkeys(_MAPS_AT, 1 << 32)  # an address for maps that are made before one is known
_SCALARS[MAPPED_BYTES] = _SCALARS[_EXTRA_AT]
_buffers: dict[int, list[Buffer]] = {size: [] for size in _SCALARS}  # of finished calls, by the argument's length


def first_arguments(
    function: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int
) -> FirstArguments:
    """Return the first arguments of cuLaunchKernel.

    They are a plain tuple, because a named one takes 0.3 us to make and 0.1 us more to unpack at each launch.
    """
    return (function, *grid, *block, shared)


class Ready:
    """The launches of a rung with their argument except pointers and scalars; many threads may call it at once.

    Where the argument has tensor maps, each call writes their addresses too.
    """

    def __init__(
        self,
        launches: list[FirstArguments],
        argument: bytes,
        ordinal: int,
        workspace: int,
        transposed: bool,
        overlaps: tuple[bool, ...] = (),
        maps: tuple[PlacedMap, ...] = (),
    ) -> None:
        self.ordinal = ordinal
        self.workspace = workspace  # bytes
        self.maps = maps
        self._launches = launches
        self._overlaps = overlaps if any(overlaps) else ()
        self._single = launches[0] if len(launches) == 1 and not self._overlaps else None  # no loop: 0.2 us less
        self._fixed = argument[_POINTERS.size :]
        self._transposed = transposed
        self._scalars = _SCALARS[len(argument)]
        self._free = _buffers[len(argument)]
        self._context = int(driver.context(ordinal))
        api = driver.api()
        self._launch, self._current = api.cuLaunchKernel, api.cuCtxGetCurrent
        self._launch_early: Any = api.cuLaunchKernelEx if self._overlaps else None
        # Of finished calls: the driver's record of each launch that overlaps, None of the others.
        self._early: list[tuple[tuple[FirstArguments, Any], ...]] = []
        packed = {each.operand: each.packed for each in maps}
        self._a_packed, self._b_packed = packed.get("a", -1), packed.get("b", -1)
        self._encodes = False  # whether a map is made anew for each address, instead of written into
        if maps:
            with driver.on(ordinal):
                self._encodes = not tensormaps.begins_with_address()

    def __call__(
        self,
        a: int,
        b: int,
        c: int,
        stream: int,
        bias: int = 0,
        workspace: int = 0,
        scalars: tuple[float, float] | None = None,
        extra: tuple[int, ...] = (),
    ) -> None:
        """Put the launches on a stream, with the addresses of the operands' first elements.

        `extra` are the addresses of the factors of A and of B and of offsets, where the product has any.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = _buffer(_POINTERS.size + len(self._fixed))
        memory, words, parameters, _ = buffer
        if self._transposed:
            a, b = b, a
        _POINTERS.pack_into(memory, 0, a, b, c, bias, workspace)
        memory[_POINTERS.size :] = self._fixed
        if scalars is not None:
            self._scalars.pack_into(memory, _SCALARS_AT, *scalars)
        if self.maps:
            if extra:
                _EXTRA.pack_into(memory, _EXTRA_AT, *_in_order(extra, self._transposed))
            words[_A_WORD] = a if self._a_packed < 0 else workspace + self._a_packed
            words[_B_WORD] = b if self._b_packed < 0 else workspace + self._b_packed
            words[_C_WORD] = c
            if self._encodes:
                self._encode(memory, words)
        if int(self._current()[1]) == self._context:
            self._run(stream, parameters)
        else:
            with driver.on(self.ordinal):
                self._run(stream, parameters)
        self._free.append(buffer)

    def _run(self, stream: int, parameters: int) -> None:
        launch = self._launch
        if self._single is not None:
            status = launch(*self._single, stream, parameters, 0)
            if status[0]:
                driver.check(status)
            return
        if self._overlaps:
            self._run_early(stream, parameters)
            return
        for arguments in self._launches:
            status = launch(*arguments, stream, parameters, 0)
            if status[0]:
                driver.check(status)

    def _run_early(self, stream: int, parameters: int) -> None:
        """Put launches on a stream some of which overlap with the previous ones."""
        try:
            early = self._early.pop()
        except IndexError:
            pairs = zip(self._launches, self._overlaps, strict=True)
            early = tuple((launch, driver.early_launch(*launch[1:]) if over else None) for launch, over in pairs)
        for launch, config in early:
            if config is None:
                status = self._launch(*launch, stream, parameters, 0)
            else:
                config.hStream = stream
                status = self._launch_early(config, launch[0], parameters, 0)
            if status[0]:
                driver.check(status)
        self._early.append(early)

    def _encode(self, memory: bytearray, words: memoryview) -> None:
        """Make the maps again, for the addresses that are written where a map begins."""
        for each in self.maps:
            place = _MAPS_AT[each.operand]
            memory[place : place + tensormaps.BYTES] = tensormaps.encoded(each.shape, words[place // 8])


def _buffer(size: int) -> Buffer:
    """Return memory for an argument of this many bytes, used by one call at a time."""
    memory = bytearray(size)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof((ctypes.c_char * size).from_buffer(memory)))
    return memory, memoryview(memory).cast("Q"), ctypes.addressof(pointers), pointers


class CudaLaunch:
    """The launches of one rung for one problem; calling it puts them on C's stream and returns at once.

    If C is column-major, the kernels compute C' = B' A', so that they write rows.
    """

    def __init__(self, problem: Problem, config: Config, geometry: GeometryOf) -> None:
        self.problem = problem
        self.geometry = geometry(problem.by_rows(), config)
        card = driver.find(problem.device)
        rows = problem.by_rows()
        reason = too_large(problem) or refusal(self.geometry, card) or tensormaps.refusal(self.geometry, rows)
        if reason:
            raise RefusedError(reason)
        self._ordinal = card.ordinal
        self._launches = [
            first_arguments(
                int(driver.function(launch.source, launch.kernel, self._ordinal, launch.shared)),
                launch.grid,
                launch.block,
                launch.shared,
            )
            for launch in self.geometry.launches
        ]

    def ready(self, a: View, b: View, c: View, bias: View | None = None, scaling: Scaling | None = None) -> Ready:
        """Return the launches for operands of these shapes and strides, at any addresses.

        Raises LayoutError where a tensor map cannot describe A or B.
        """
        argument = product_argument(self.problem, a, b, c, bias)
        overlaps = tuple(launch.overlaps for launch in self.geometry.launches)
        transposed, workspace = self.problem.c_layout == "col", self.geometry.workspace
        if not self.geometry.maps:
            return Ready(self._launches, argument, self._ordinal, workspace, transposed, overlaps)
        maps = placed_maps(self.problem, self.geometry, a, b, c)
        if self.problem.k == 0:
            # A kernel copies boxes beyond the end of operands without elements, which may have no address, or any. That
            # gives zeros, but on an H200 a copy by a map of address 0 faults, and one of an odd address.
            maps = tuple(each if each.operand == "c" else each._replace(packed=0) for each in maps)
            workspace = max(workspace, _ANYWHERE)
        elif any(each.packed >= 0 for each in maps):  # less than for all of a batch, where it shares a matrix
            ends = [tensormaps.end_of_packed(each) for each in maps if each.packed >= 0]
            workspace = min(workspace, max(ends))
        with driver.on(self._ordinal):
            argument = mapped_argument(
                argument, self.problem, maps, tensormaps.encoded, scaling=scaling, band=self.geometry.band
            )
        return Ready(self._launches, argument, self._ordinal, workspace, transposed, overlaps, maps)

    def __call__(
        self,
        a: View,
        b: View,
        c: View,
        *,
        alpha: complex = 1.0,
        beta: complex = 0.0,
        bias: View | None = None,
        threads: int = 1,
        scaling: Scaling | None = None,
        extra: tuple[int, ...] = (),
    ) -> None:
        run, stream = self.ready(a, b, c, bias, scaling), c.stream
        scalars = alpha.real, beta.real
        scratch = ordered.allocate(run.workspace, stream, self._ordinal) if run.workspace else 0
        start = bias.pointer if bias is not None else 0
        try:
            run(a.pointer, b.pointer, c.pointer, stream, start, scratch, scalars, extra)
        finally:
            if scratch:
                ordered.free(scratch, stream, self._ordinal)


def product_argument(
    problem: Problem,
    a: View,
    b: View,
    c: View,
    bias: View | None = None,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    workspace: int = 0,
) -> bytes:
    """Return the kernels' argument, the Product of product.cuh; of C' = B' A' where C is column-major."""
    transposed, problem = problem.c_layout == "col", problem.by_rows()
    x, y, z = (_strides(view) for view in (a, b, c))
    each, step = (0, 0) if bias is None else (0, 0, *_strides(bias))[-2:]  # from group to group, and along a row
    if transposed:
        a, b = b, a
        x, y, z = (y[0], y[2], y[1]), (x[0], x[2], x[1]), (z[0], z[2], z[1])
    along = (step, 0) if transposed else (each, step)
    number = "d" if problem.out == "f64" else "f"
    return struct.pack(
        f"=5Q11q4i2{number}",
        a.pointer,
        b.pointer,
        c.pointer,
        bias.pointer if bias is not None else 0,
        workspace,
        *x,
        *y,
        *z,
        *along,
        problem.m,
        problem.n,
        problem.k,
        problem.groups or problem.batch,
        alpha.real,
        beta.real,
    )


def placed_maps(problem: Problem, geometry: Geometry, a: View, b: View, c: View) -> tuple[PlacedMap, ...]:
    """Return the tensor maps of a product's operands; those of C' = B' A' where C is column-major.

    Operands without elements are described as the kernels that read none of them expect: with k adjacent.
    """
    if problem.c_layout == "col":
        a, b, c = _columns(b), _columns(a), _columns(c)
    rows = problem.by_rows()
    if rows.k == 0:
        rows = rows._replace(a_layout="row", b_layout="col")
    return tensormaps.placed(geometry, rows, a, b, c)


def mapped_argument(
    product: bytes,
    problem: Problem,
    maps: Sequence[PlacedMap],
    encode: Encode,
    addresses: Mapping[str, int] = _ALIGNED,
    scaling: Scaling | None = None,
    extra: tuple[int, ...] = (),
    band: int = BAND,
) -> bytes:
    """Return the argument of kernels with tensor maps, the TmaProduct of tma.cuh.

    `product` is its first field, `addresses` are those of the operands that the maps describe, by their letter, and
    `extra` those of the factors of A and B, and of offsets.
    """
    transposed = problem.c_layout == "col"
    a_row, a_k, b_k, b_col = (0, 0, 0, 0) if scaling is None else scaling[1:]
    steps = (b_col, b_k, a_k, a_row) if transposed else (a_row, a_k, b_k, b_col)
    activation = epilogue(problem) & ACTIVATION
    mapped = any(each.operand == "c" for each in maps)
    argument = bytearray(MAPPED_BYTES)
    argument[:_EXTRA_AT] = product
    _REST.pack_into(
        argument, _EXTRA_AT, *_in_order(extra or (0, 0, 0), transposed), *steps, activation, mapped, 0, band
    )
    for each in maps:
        place = _MAPS_AT[each.operand]
        argument[place : place + tensormaps.BYTES] = encode(each.shape, addresses[each.operand])
    return bytes(argument)


def _in_order(extra: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """Return the addresses of factors and offsets as the argument holds them."""
    a, b, *offsets = extra
    offset = offsets[0] if offsets else 0
    return (b, a, offset) if transposed else (a, b, offset)


def too_large(problem: Problem) -> str:
    """Return why kernels cannot index this problem's sides; "" if they can."""
    side = max(problem.m, problem.n, problem.k, problem.batch)
    return f"a side of {side}: kernels count to {LARGEST_SIDE:,}; cut the product" if side > LARGEST_SIDE else ""


def _columns(view: View) -> View:
    """Return the view of the transposed matrices."""
    *batch, rows, columns = view.shape
    *along, row, column = view.strides
    return view._replace(shape=(*batch, columns, rows), strides=(*along, column, row))


def _strides(view: View) -> tuple[int, ...]:
    size = dtypes.get(view.dtype).size
    return tuple(step // size for step in view.strides)
