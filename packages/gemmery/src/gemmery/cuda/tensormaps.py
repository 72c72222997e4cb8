"""Tensor maps of a product's operands, by which a kernel's bulk copies find boxes of them in memory.

NVIDIA, CUDA Driver API, "Tensor Map Object Management". A map is made once for a shape; later calls change its address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.cuda import driver
from gemmery.cuda.geometry import Geometry, MapBox, describable
from gemmery.errors import LayoutError, RefusedError
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

BYTES = 128
ALIGNMENT = 16  # bytes, of the address and the strides
PACKED_APART = 256  # bytes of which packed operands begin at multiples
KEPT = -2  # the place of an operand that was split before
_LONGEST_BOX, _LARGEST_STRIDE = 256, 1 << 40
_SWIZZLES, _PROMOTIONS = (0, 32, 64, 128), (0, 64, 128, 256)
_KINDS = {row.name: row.tensor_map for row in dtypes.DTYPES if row.tensor_map}


class MapShape(NamedTuple):
    """All that a map describes except the address. Dimensions are inner, outer and batch; the inner one has no stride.

    A matrix that all products of a batch share has the batch extent 1.
    """

    dtype: str
    extents: tuple[int, int, int]
    strides: tuple[int, int]  # bytes
    box: tuple[int, int]
    swizzle: int
    promotion: int
    deep: int = 1  # matrices that a copy moves: a row of one matrix is then a row of each, 128 bytes after the other


class PlacedMap(NamedTuple):
    """The map of one operand, and where the operand lies."""

    operand: str
    shape: MapShape
    packed: int  # bytes from the workspace's start; -1: at the operand's own address; KEPT: where its parts are


Encode = Callable[[MapShape, int], bytes]  # the 128 bytes of a map, for an address


def refusal(geometry: Geometry, problem: Problem) -> str:
    """Return why the operands of a product, as kernels take it, cannot have the maps of a geometry; "" if they can.

    C need not have one: a kernel then writes it by ordinary stores.
    """
    for box in geometry.maps:
        reason = describable(problem, box.operand) if box.packed < 0 and box.operand != "c" else ""
        if reason:
            return f"{reason}; copy the operand to one with aligned rows, or take a rung that packs it"
    return ""


def placed(geometry: Geometry, problem: Problem, a: View, b: View, c: View) -> tuple[PlacedMap, ...]:
    """Return the maps of a geometry for views of shape (batch, rows, columns), as kernels take the product.

    C is left out where a map cannot describe it. Packed operands follow each other in the workspace: only the views
    tell whether a batch shares one matrix. Raises LayoutError where A or B cannot have a map.
    """
    views, maps = {"a": a, "b": b, "c": c}, []
    for box in geometry.maps:
        if box.packed < 0 and box.operand == "c" and describable(problem, "c"):
            continue
        try:
            described = shape(box._replace(split=0), problem, views[box.operand])
            maps.append(PlacedMap(box.operand, described, box.packed))
        except LayoutError:
            if box.operand != "c" or box.required:
                raise
    elsewhere = {box.operand: shape(box, problem, views[box.operand]) for box in geometry.maps if box.split}
    return tuple(
        each._replace(shape=elsewhere[each.operand], packed=KEPT) if each.operand in elsewhere else each
        for each in _next_to_each_other(maps)
    )


def _next_to_each_other(maps: Sequence[PlacedMap]) -> list[PlacedMap]:
    """Return the maps with packed operands without the room for matrices that a batch shares."""
    packed = sorted((each for each in maps if each.packed >= 0), key=lambda each: each.packed)
    places, start = {}, packed[0].packed if packed else 0
    for each in packed:
        places[each.operand] = start
        start = end_of_packed(each._replace(packed=start))
    return [each._replace(packed=places.get(each.operand, -1)) for each in maps]


def end_of_packed(placed_map: PlacedMap) -> int:
    """Return the bytes of the workspace up to the end of a packed operand."""
    size = placed_map.shape.strides[1] * placed_map.shape.extents[2]
    return placed_map.packed + -(-size // PACKED_APART) * PACKED_APART


def shape(box: MapBox, problem: Problem, view: View) -> MapShape:
    """Return what the map of an operand describes. Raises LayoutError if no map can, RefusedError for a wrong box."""
    batch, rows, columns = view.shape
    size, name = dtypes.get(view.dtype).size, box.operand.upper()
    batches = batch if view.strides[0] else 1
    if box.packed >= 0:
        outer, inner = (columns, rows) if box.operand == "b" else (rows, columns)
        extents = (inner, outer, batches * (box.split or box.parts))
        return _checked(box, box.element or view.dtype, extents, (box.pitch, box.pitch * max(1, outer)))
    by_columns = (problem.a_layout, problem.b_layout, problem.c_layout)["abc".index(box.operand)] == "col"
    outer, inner, step = (columns, rows, view.strides[2]) if by_columns else (rows, columns, view.strides[1])
    whole = -(-inner * size // ALIGNMENT) * ALIGNMENT
    step = step if outer > 1 and inner else max(whole, ALIGNMENT)
    along = (
        view.strides[0] if batches > 1 and inner and outer else min(step * max(1, outer), _LARGEST_STRIDE - ALIGNMENT)
    )
    for stride in (step, along):
        if stride % ALIGNMENT or not 0 < stride < _LARGEST_STRIDE:
            raise LayoutError(
                f"{name} has a stride of {stride} bytes: a tensor map takes multiples of {ALIGNMENT} from {ALIGNMENT} "
                f"to 2^40; copy the operand to a contiguous array"
            )
    if box.deep > 1:
        return _checked(box, view.dtype, (box.box[0], outer, inner // box.box[0]), (step, box.box[0] * size))
    return _checked(box, view.dtype, (inner, outer, batches), (step, along))


def of_operand(geometry: Geometry, problem: Problem, operand: View) -> MapShape:
    """Return what the map of a function's operand describes, a matrix or one row: boxes with the rows of a tile."""
    box = MapBox("c", (64, min(geometry.tile[0], operand.shape[0])))
    return shape(box, problem, operand._replace(shape=(1, *operand.shape), strides=(0, *operand.strides)))


def _checked(box: MapBox, dtype: str, extents: tuple[int, int, int], strides: tuple[int, int]) -> MapShape:
    """Return what a map describes, after a check of its box. Raises RefusedError."""
    name = box.operand.upper()
    if dtype not in _KINDS:
        raise RefusedError(f"{name} is {dtype}: a tensor map describes {', '.join(_KINDS)}")
    row = box.box[0] * dtypes.get(dtype).size
    if not all(1 <= side <= _LONGEST_BOX for side in box.box) or row % ALIGNMENT:
        raise RefusedError(f"box={box.box} of {name}: sides are 1 to {_LONGEST_BOX}, rows multiples of 16 bytes")
    if box.swizzle not in _SWIZZLES or (box.swizzle and row != box.swizzle):
        raise RefusedError(
            f"swizzle={box.swizzle} of {name}: 0, or 32, 64 or 128 if a row of the box has as many: {row}"
        )
    if box.promotion not in _PROMOTIONS:
        raise RefusedError(f"promotion={box.promotion} of {name}: 0, 64, 128 or 256 bytes")
    return MapShape(dtype, extents, strides, box.box, box.swizzle, box.promotion, box.deep)


def encoded(described: MapShape, address: int) -> bytes:
    """Return the driver's 128 bytes of a map. Raises LayoutError if it refuses."""
    cuda = driver.api()
    long, short = cuda.cuuint64_t, cuda.cuuint32_t
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{described.swizzle}B" if described.swizzle else "CU_TENSOR_MAP_SWIZZLE_NONE"
    promotion = f"L2_{described.promotion}B" if described.promotion else "NONE"
    status, encoding = cuda.cuTensorMapEncodeTiled(
        getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_KINDS[described.dtype]}"),
        3,
        address,
        [long(max(1, side)) for side in described.extents],
        [long(stride) for stride in described.strides],
        [short(side) for side in (*described.box, described.deep)],
        [short(1)] * 3,
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cuda.CUtensorMapSwizzle, swizzle),
        getattr(cuda.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise LayoutError(
            f"the driver makes no tensor map of {described} at {address:#x} ({getattr(status, 'name', status)}): copy "
            "the operand"
        )
    return ctypes.string_at(int(encoding.getPtr()), BYTES)


_encoded_once = lru_cache(maxsize=1024)(encoded)


def at_address(described: MapShape, address: int) -> bytes:
    """Return the same bytes, by the driver only the first time, where it suffices to write the address."""
    if not begins_with_address():
        return encoded(described, address)
    return address.to_bytes(8, "little") + _encoded_once(described, _ADDRESSES[0])[8:]


_SAMPLE = MapShape("f16", (4096, 512, 8), (8192, 8192 * 512), (64, 128), 128, 256)
_ADDRESSES = (0x7F12_3456_7000, 0x0ABC_DEF0)


@lru_cache
def begins_with_address() -> bool:
    """Return True if a map's address is its first 8 bytes, and nothing else in it depends on the address.

    The driver does not document it, so two maps that differ only in the address are compared.
    """
    first, second = (encoded(_SAMPLE, address) for address in _ADDRESSES)
    begins = tuple(int.from_bytes(data[:8], "little") for data in (first, second))
    return begins == _ADDRESSES and first[8:] == second[8:]
