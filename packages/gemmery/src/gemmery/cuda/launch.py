"""A rung's kernel as a callable on views: launches are prepared once, the argument is packed at each call."""

from __future__ import annotations

import ctypes
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.cuda import constants, driver, ordered, tensormaps, traced_function
from gemmery.cuda.geometry import BAND, LARGEST_SIDE, Geometry, GeometryOf, Scaling, epilogue, refusal
from gemmery.cuda.tensormaps import KEPT, Encode, PlacedMap
from gemmery.errors import RefusedError
from gemmery.problem import Config, Problem

# A kernel, its grid, its block, the bytes of its shared memory: plain, because a named tuple takes 0.3 us to make.
FirstArguments = tuple[int, int, int, int, int, int, int, int]

_POINTERS = struct.Struct("=5Q")  # the fields of Product in product.cuh that change from call to call
_SCALARS_AT = struct.calcsize("=5Q11q4i")
# How alpha and beta are packed, by the type of sums: whole numbers modulo 2^bits, complex ones by their parts.
_SCALARS = {
    "f32": struct.Struct("=2f"),
    "f64": struct.Struct("=2d"),
    "complex64": struct.Struct("=4f"),
    "complex128": struct.Struct("=4d"),
    **dict.fromkeys(("int32", "uint32"), struct.Struct("=2I")),
    **dict.fromkeys(("int64", "uint64"), struct.Struct("=2Q")),
}
_EXTRA_AT = _SCALARS_AT + 8  # of TmaProduct in tma.cuh, which begins with a Product; 8 more where scalars are f64
_EXTRA = struct.Struct("=3Q")  # its fields that change from call to call, except those of the maps
_MAPS_AT = {"a": 256, "b": 384, "c": 512}
_REST = struct.Struct("=3Q4q4i")  # all up to the maps
_A_WORD, _B_WORD, _C_WORD = (place // 8 for place in _MAPS_AT.values())
MAPPED_BYTES = 640
_ANYWHERE = 256  # bytes of scratch memory for maps of operands without elements
_ALIGNED = dict.fromkeys(_MAPS_AT, 1 << 32)  # an address for maps that are made before one is known
Scalars = tuple[float, ...]  # alpha and beta as they are packed


def loaded(launch: Geometry, ordinal: int) -> FirstArguments:
    """Return a launch with its kernel, which is loaded on this device."""
    function = int(driver.function(launch.source, launch.kernel, ordinal, launch.shared))
    return (function, *launch.grid, *launch.block, launch.shared)


class ArgumentMemory:
    """The memory of an argument, for one call at a time; `words` are its bytes, 8 at a time.

    `parameters` is the address of the driver's list of arguments: one pointer, to `memory`, which follows it.
    """

    __slots__ = ("holds", "memory", "parameters", "words")

    def __init__(self, size: int) -> None:
        block = (ctypes.c_uint64 * (1 + size // 8))()
        self.parameters = ctypes.addressof(block)
        block[0] = self.parameters + 8
        self.memory = memoryview(block).cast("B")[8:]
        self.words = self.memory.cast("Q")
        self.holds: Ready | None = None  # whose argument is there, but for its pointers


_memories: dict[int, list[ArgumentMemory]] = defaultdict(list)  # of finished calls, by length


def packed_scalars(alpha: complex, beta: complex, out: str) -> Scalars:
    """Return alpha and beta as `Ready` takes them for a C of this type.

    >>> packed_scalars(-1, 0, "int16"), packed_scalars(1, 2j, "complex64"), packed_scalars(2.0, 0, "f16")
    ((4294967295, 0), (1, 0, 0.0, 2.0), (2.0, 0))
    """
    row = dtypes.get(dtypes.get(out).accumulator)
    if row.kind == "c":
        return alpha.real, alpha.imag, beta.real, beta.imag
    if row.kind in "iu":
        return int(alpha.real) % 2 ** (8 * row.size), int(beta.real) % 2 ** (8 * row.size)
    return alpha.real, beta.real


def scalars_of(out: str) -> struct.Struct:
    """Return how the scalars of a product into this type are packed."""
    return _SCALARS[dtypes.get(out).accumulator]


class LaunchRecords:
    """The driver's records of the launches of a product, each with its kernel, for one call at a time."""

    __slots__ = ("launches", "stream")

    def __init__(self, launches: Sequence[FirstArguments], overlaps: tuple[bool, ...], together: bool) -> None:
        early, last = overlaps or (False,) * len(launches), len(launches) - 1
        self.launches = [
            (driver.launch_config(*each[1:], early[i], together and i == last), each[0])
            for i, each in enumerate(launches)
        ]
        self.stream = 0  # in all of them

    def move(self, stream: int) -> None:
        """Let them launch on this stream."""
        for config, _ in self.launches:
            config.hStream = stream
        self.stream = stream


class Ready:
    """The launches of a rung with their argument except pointers and scalars; many threads may call it at once.

    Where the argument has tensor maps, each call writes their addresses too.
    """

    def __init__(
        self, launches: list[FirstArguments], argument: bytes, ordinal: int, workspace: int, transposed: bool,
        overlaps: tuple[bool, ...] = (), maps: tuple[PlacedMap, ...] = (), counters: int = 0, operands: int = 0,
        out: str = "f32", together: bool = False,
    ) -> None:  # fmt: skip
        self.ordinal = ordinal
        self.workspace = workspace  # bytes
        self.counters = counters  # bytes that are zero before and after: see `ordered.counters`
        self.maps = maps
        self._launches, self._overlaps, self._together = launches, overlaps, together
        self._argument = argument + bytes(operands)
        self._tail = len(argument)  # where what a traced function reads begins
        self._transposed = transposed
        self._scalars = scalars_of(out)
        self._free = _memories.setdefault(len(self._argument), [])
        self._records: list[LaunchRecords] = []  # of finished calls
        self._context = driver.context(ordinal)
        api = driver.api()
        # One record instead of 11 arguments: 0.2 us less than cuLaunchKernel.
        self._launch, self._current = api.cuLaunchKernelEx, api.cuCtxGetCurrent
        packed = {each.operand: each.packed for each in maps}
        self._a_packed, self._b_packed = packed.get("a", -1), packed.get("b", -1)
        of_argument = self._a_packed == KEPT, self._b_packed == KEPT
        self.kept = of_argument[::-1] if transposed else of_argument  # whether parts of A and of B were made before
        self._encodes = False  # whether a map is made anew for each address, instead of written into
        if maps:
            with driver.on(ordinal):
                self._encodes = not tensormaps.begins_with_address()

    def __call__(
        self, a: int, b: int, c: int, stream: int, bias: int = 0, workspace: int = 0, scalars: Scalars | None = None,
        extra: tuple[int, ...] = (), operands: bytes = b"",
    ) -> None:  # fmt: skip
        """Put the launches on a stream, with the addresses of the operands' first elements.

        `scalars` are those of `packed_scalars`, of 1 and 0 if None. `extra` are the addresses of the factors of A and
        of B and of offsets, or counters, where the product has any; or of the parts of A and of B that are `kept`.
        `operands` are those of a traced function, packed.
        """
        if self._current()[1] != self._context:  # as numbers they take 30 ns longer
            with driver.on(self.ordinal):
                return self(a, b, c, stream, bias, workspace, scalars, extra, operands)
        try:
            place = self._free.pop()
        except IndexError:
            place = ArgumentMemory(len(self._argument))
        memory = place.memory
        if place.holds is not self:
            memory[:] = self._argument
            place.holds = self
        if self._transposed:
            a, b = b, a
        _POINTERS.pack_into(memory, 0, a, b, c, bias, workspace)
        if scalars is not None:
            self._scalars.pack_into(memory, _SCALARS_AT, *scalars)
            place.holds = None
        if operands:
            memory[self._tail :] = operands
            place.holds = None
        if self.maps:
            words = place.words
            words[_A_WORD] = a if self._a_packed < 0 else workspace + self._a_packed
            words[_B_WORD] = b if self._b_packed < 0 else workspace + self._b_packed
            words[_C_WORD] = c
            if extra:
                self._put(extra, memory, words)
                place.holds = None
            if self._encodes:
                self._encode(memory, words)
        try:
            records = self._records.pop()
        except IndexError:
            records = LaunchRecords(self._launches, self._overlaps, self._together)
        if records.stream != stream:
            records.move(stream)
        for config, function in records.launches:
            status = self._launch(config, function, place.parameters, 0)
            if status[0]:
                driver.check(status)
        self._records.append(records)
        self._free.append(place)
        return None

    def _encode(self, memory: memoryview, words: memoryview) -> None:
        """Make the maps again, for the addresses that are written where a map begins."""
        for each in self.maps:
            place = _MAPS_AT[each.operand]
            memory[place : place + tensormaps.BYTES] = tensormaps.encoded(each.shape, words[place // 8])

    def _put(self, extra: tuple[int, ...], memory: memoryview, words: memoryview) -> None:
        """Write the addresses of factors and offsets, or of parts that are kept, which maps describe."""
        a, b, offsets = _in_order(extra, self._transposed)
        _EXTRA.pack_into(memory, _EXTRA_AT, a, b, offsets)
        if self._a_packed == KEPT:
            words[_A_WORD] = a
        if self._b_packed == KEPT:
            words[_B_WORD] = b


class CudaLaunch:
    """The launches of one rung for one problem; calling it puts them on C's stream and returns at once.

    If C is column-major, kernels compute C' = B' A', so that they write rows; those that are `swapped` write columns.
    """

    def __init__(self, problem: Problem, config: Config, geometry: GeometryOf) -> None:
        self.problem = problem
        self.geometry = geometry(problem.by_rows(), config)
        card = driver.find(problem.device)
        product = as_taken(problem, self.geometry.swapped)
        reason = too_large(problem) or refusal(self.geometry, card) or tensormaps.refusal(self.geometry, product)
        if reason:
            raise RefusedError(reason)
        self._ordinal = card.ordinal
        self._launches = [loaded(launch, self._ordinal) for launch in self.geometry.launches]

    def ready(
        self, a: View, b: View, c: View, bias: View | None = None, scaling: Scaling | None = None, room: int = 0
    ) -> Ready:
        """Return the launches for operands of these shapes and strides, at any addresses.

        `room` are bytes of `operands` behind the argument, where no traced function has any.

        Raises LayoutError where a tensor map cannot describe A or B.
        """
        problem, geometry = self.problem, self.geometry
        swapped, workspace = geometry.swapped, geometry.workspace
        argument = product_argument(problem, a, b, c, bias, apart=geometry.apart, swapped=swapped)
        maps = placed_maps(problem, geometry, a, b, c) if geometry.maps else ()
        if geometry.maps and problem.k == 0:
            # A kernel copies boxes beyond the end of operands without elements, which may have no address, or any. That
            # gives zeros, but on an H200 a copy by a map of address 0 faults, and one of an odd address.
            maps = tuple(each if each.operand == "c" else each._replace(packed=0) for each in maps)
            workspace = max(workspace, _ANYWHERE)
        elif ends := [tensormaps.end_of_packed(each) for each in maps if each.packed >= 0]:
            workspace = min(workspace, max(ends))  # less than for all of a batch, where it shares a matrix
        elif any(each.packed == KEPT for each in maps):  # nothing is packed: what comes before is enough
            workspace = min(box.packed for box in geometry.maps if box.split)
        if geometry.maps:
            with driver.on(self._ordinal):
                argument = mapped_argument(
                    argument, problem, maps, tensormaps.encoded, scaling=scaling, band=geometry.band,
                    ahead=geometry.ahead, swapped=swapped,
                )  # fmt: skip
        function = traced_function.of(problem)
        return Ready(
            self._launches, argument, self._ordinal, workspace, is_transposed(problem, swapped),
            tuple(launch.overlaps for launch in geometry.launches), maps, geometry.counters if geometry.maps else 0,
            function.size if function else room, problem.out, geometry.together,
        )  # fmt: skip

    def __call__(
        self, a: View, b: View, c: View, *, alpha: complex = 1.0, beta: complex = 0.0, bias: View | None = None,
        threads: int = 1, scaling: Scaling | None = None, extra: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        run = self.ready(a, b, c, bias, scaling)
        memory = ordered.Scratch(run.workspace, c.stream, self._ordinal) if run.workspace else None
        scalars, start = packed_scalars(alpha, beta, self.problem.out), 0 if bias is None else bias.pointer
        workspace = 0 if memory is None else memory.pointer
        run(a.pointer, b.pointer, c.pointer, c.stream, start, workspace, scalars, extra)


def is_transposed(problem: Problem, swapped: bool) -> bool:
    """Return True if kernels that write rows, or columns if they are `swapped`, compute C' = B' A'."""
    return (problem.c_layout == "col") != swapped


def as_taken(problem: Problem, swapped: bool) -> Problem:
    """Return the product that kernels compute: with a row-major C, or a column-major one if they are `swapped`."""
    return problem.transposed() if is_transposed(problem, swapped) else problem


def product_argument(
    problem: Problem, a: View, b: View, c: View, bias: View | None = None, *, alpha: complex = 1.0, beta: complex = 0.0,
    workspace: int = 0, apart: int = 1, swapped: bool = False,
) -> bytes:  # fmt: skip
    """Return the kernels' argument, the Product of product.cuh, for the product that they compute: see `as_taken`.

    A and C are a batch of as many matrices as rows of one of these are `apart`: see Geometry.
    """
    each, step = (0, 0) if bias is None else (0, 0, *_strides(bias))[-2:]  # from group to group, and along a row
    along = (step, 0) if is_transposed(problem, swapped) else (each, step)
    a, b, c = _views_as_taken(problem, apart, swapped, a, b, c)
    problem = as_taken(problem, swapped)
    if apart > 1:
        problem = problem._replace(m=problem.m // apart, batch=apart)
    return struct.pack(
        f"=5Q11q4i{scalars_of(problem.out).format[1:]}",
        *(0 if z is None else z.pointer for z in (a, b, c, bias)),
        workspace,
        *(stride for z in (a, b, c) for stride in _strides(z)),
        *along,
        problem.m,
        problem.n,
        problem.k,
        problem.groups or problem.k_groups or problem.batch,
        *packed_scalars(alpha, beta, problem.out),
    )


def placed_maps(problem: Problem, geometry: Geometry, a: View, b: View, c: View) -> tuple[PlacedMap, ...]:
    """Return the tensor maps of the operands of the product that kernels compute: see `as_taken`.

    Operands without elements are described as the kernels that read none of them expect: with k adjacent.
    """
    a, b, c = _views_as_taken(problem, geometry.apart, geometry.swapped, a, b, c)
    product = as_taken(problem, geometry.swapped)
    if product.k == 0:
        product = product._replace(a_layout="row", b_layout="col")
    return tensormaps.placed(geometry, product, a, b, c)


def mapped_argument(
    product: bytes, problem: Problem, maps: Sequence[PlacedMap], encode: Encode,
    addresses: Mapping[str, int] = _ALIGNED, scaling: Scaling | None = None, extra: tuple[int, ...] = (),
    band: int = BAND, ahead: int = 0, swapped: bool = False,
) -> bytes:  # fmt: skip
    """Return the argument of kernels with tensor maps, the TmaProduct of tma.cuh.

    `product` is its first field, `addresses` are those of the operands that the maps describe, by their letter, and
    `extra` those of the factors of A and B, and of offsets.
    """
    transposed = is_transposed(problem, swapped)
    _, a_row, a_k, b_k, b_column = scaling or Scaling()
    steps = (b_column, b_k, a_k, a_row) if transposed else (a_row, a_k, b_k, b_column)
    after = epilogue(problem)
    activation = after & constants.ACTIVATION if isinstance(after, int) else 0
    mapped = any(each.operand == "c" for each in maps)
    argument = bytearray(MAPPED_BYTES)
    argument[: len(product)] = product
    _REST.pack_into(
        argument, len(product), *_in_order(extra or (0, 0, 0), transposed), *steps, activation, mapped, ahead, band
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


def _columns(z: View) -> View:
    """Return the view of the transposed matrices."""
    return z._replace(shape=(z.shape[0], z.shape[2], z.shape[1]), strides=(z.strides[0], z.strides[2], z.strides[1]))


def _views_as_taken(problem: Problem, apart: int, swapped: bool, a: View, b: View, c: View) -> tuple[View, View, View]:
    """Return the operands and C of the product that kernels compute, as launches take them: see Geometry."""
    if is_transposed(problem, swapped):
        a, b, c = _columns(b), _columns(a), _columns(c)
    if apart > 1:
        a, b, c = _rows_apart(a, apart), b._replace(strides=(0, *b.strides[1:])), _rows_apart(c, apart)
    return a, b, c


def _rows_apart(z: View, batch: int) -> View:
    """Return the view of one matrix as a batch; the i-th of it has rows i, i + batch, i + 2 batch ..."""
    (_, m, n), (_, row, column) = z.shape, z.strides
    return z._replace(shape=(batch, m // batch, n), strides=(row, row * batch, column))


def _strides(z: View) -> tuple[int, ...]:
    size = dtypes.get(z.dtype).size
    return tuple(stride // size for stride in z.strides)
