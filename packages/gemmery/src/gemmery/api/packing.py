"""Operands that are packed once on the CPU, and not in each product."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import mmap
import pickle
from typing import TYPE_CHECKING, Any

from gemmery import arrays, dtypes
from gemmery.api.options import dtype_name, viewed
from gemmery.api.promote import kernel_types, widened
from gemmery.arrange import Ints
from gemmery.cpu import entry, packed_once, workspace
from gemmery.cpu.packed_once import Layout, Packed, PackedView
from gemmery.errors import DeviceError, DTypeError, LayoutError, ShapeError

if TYPE_CHECKING:
    from gemmery.keywords import DTypeLike
else:  # help() shows it
    DTypeLike = Any

_VERSION = 1  # of a pickle, and of the order of bytes in a layout


class PackedMatrix(Packed):
    """A matrix in the order in which products read it: what `gm.pack` returns. It never changes.

    `shape` is (k, n), `dtype` the name of its element type, `result` that of the products, and `nbytes` the memory.
    """

    __slots__ = ("_block", "layout", "result")

    def __init__(self, shape: Ints, dtype: str, result: str, layout: Layout, block: mmap.mmap) -> None:
        strides = arrays.contiguous(shape, dtypes.get(dtype).size)
        self.array = packed_once.stand_in(block, shape, dtype, result)
        self.memory = PackedView(workspace.address(block), shape, strides, dtype, writable=False, owner=block)
        entry.know_packed(self, self.array)
        self._block, self.layout, self.result = block, layout, dtypes.get(result).numpy

    @property
    def shape(self) -> Ints:
        """The shape of the matrix, (k, n)."""
        return self.memory.shape

    @property
    def dtype(self) -> str:
        """The name of its element type: "float32"."""
        return dtypes.get(self.memory.dtype).numpy

    @property
    def nbytes(self) -> int:
        """The bytes of its memory."""
        return len(self._block)

    def __repr__(self) -> str:
        result = "" if self.result == self.dtype else f", result={self.result}"
        return f"PackedMatrix(shape={self.shape}, dtype={self.dtype}{result}, nbytes={self.nbytes})"

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Raise LayoutError: nothing but a product reads the panels."""
        raise LayoutError("only gm.matmul(x, packed), gm.gemm and gm.explain read it: pass the matrix itself here")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return what a pickle holds; from protocol 5 on, the memory may travel beside it."""
        memory = pickle.PickleBuffer(self._block) if protocol >= 5 else bytes(self._block)
        return _restored, (_VERSION, self.shape, self.memory.dtype, self.result, tuple(self.layout), memory)

    def check(self, common: str, result: str, semiring: str = "") -> None:
        """Raise DTypeError unless it was packed for products of these element types, LayoutError for a semiring's."""
        own = self.memory.dtype
        if common != own:
            have, need = self.dtype, dtypes.get(common).numpy
            raise DTypeError(
                f"b was packed as {have}, and with this a the product is one of {need}: convert a to {have}, or pack b "
                f"as {need}"
            )
        if packed_once.layout(*kernel_types(common, result)) != self.layout:
            name = dtypes.get(result).numpy
            raise DTypeError(
                f"b was packed for results of {self.result}, and this result is {name}, for which panels hold other "
                f"numbers: pack b with dtype={name!r}"
            )
        # Steps of a semiring have names of their own, and read panels as those of multiply-adds lie.
        if semiring and (
            semiring == "log_sum_exp"
            or packed_once.layout(*kernel_types(common, result), semiring)[1:] != self.layout[1:]
        ):
            why = "reads b itself" if semiring == "log_sum_exp" else f"reads panels of {self.dtype} in another order"
            raise LayoutError(f"b is packed, and semiring={semiring!r} {why}: pass the matrix itself")


def pack(b: Any, dtype: DTypeLike | None = None) -> PackedMatrix:
    """Pack a matrix once, on the CPU, as the right operand of many products: the weights of a layer.

    >>> import numpy as np, gemmery as gm
    >>> w = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> packed = gm.pack(w)
    >>> gm.matmul(np.ones((2, 3), np.float32), packed)
    array([[12., 15., 18., 21.],
           [12., 15., 18., 21.]], dtype=float32)

    `b` is (k, n), of any strides and any kind that `gm.matmul` takes; pass `w.T` for weights of shape (n, k). Its
    numbers are copied: b may be changed or freed. `gm.matmul(x, packed)` and `gm.gemm(alpha, x, packed)` take every x
    and every option that they take with b, but for semiring="log_sum_exp". The bits of `gm.matmul(x, packed)` are those
    of `gm.matmul(x, b, batch_invariant=True)` with a row-major b of two or more columns: a row of the result does not
    depend on the number of rows. From 48 rows, columns and k on, float16 on a CPU with a tile unit has those of
    `gm.matmul(x, b)`, unless `batch_invariant=True`.

    `dtype` is the type of results wider than b's, as in `gm.matmul`: sums in float64 need other panels than those in
    float32. `nbytes` is the memory of the panels: k n elements of b's own size, with k and n rounded up. Complex ones
    take twice their size, and float16 takes 4 bytes on a CPU without fused multiply-adds.

    The panels are those of this machine's instruction set. A pickle loads on machines that read the same, and is
    refused by others. Threads and forked processes may share a packed matrix. Source: Goto and van de Geijn, ACM TOMS
    34(3), 2008.

    Raises ShapeError for what is no matrix, DTypeError for element types that the CPU does not multiply and for a
    `dtype` that cannot hold every number of b's, DeviceError for an array on a device, and MemoryError.
    """
    y = viewed("b", b)
    if y.device != "cpu":
        raise DeviceError(
            f"gm.pack takes a matrix in CPU memory, and b is on {y.device}: pack a copy, in PyTorch b.cpu()"
        )
    if len(y.shape) != 2:
        raise ShapeError(f"gm.pack takes one matrix (k, n), and b has shape {y.shape}: pack the matrices one by one")
    result = y.dtype if dtype is None else widened(y.dtype, dtype_name(dtype))
    source, out = kernel_types(y.dtype, result)
    block = workspace.fresh(max(1, packed_once.size(source, out, *y.shape)), large=True)
    packed = PackedMatrix(y.shape, y.dtype, result, packed_once.layout(source, out), block)
    packed_once.pack(y if y.dtype == source else arrays.converted(y, source), out, packed.memory.pointer)
    arrays.unchanged(b=y)
    return packed


def _restored(version: int, shape: Ints, dtype: str, result: str, layout: Any, memory: Any) -> PackedMatrix:
    """Return a packed matrix from its pickle. Raises LayoutError for one that this machine does not read."""
    again = "pack the matrix again with gm.pack"
    if version != _VERSION:
        raise LayoutError(f"a packed matrix of version {version}, and this gemmery reads version {_VERSION}: {again}")
    source, out = kernel_types(dtype, dtypes.resolve(result, dtypes.BY_NAME))
    theirs, ours = Layout(*layout), packed_once.layout(source, out)
    if theirs != ours:
        raise LayoutError(
            f"a matrix of shape {shape} was packed for another machine or instruction set, as ({theirs}), and this one "
            f"reads ({ours}): {again}"
        )
    data = memoryview(memory).cast("B")
    size = max(1, packed_once.size(source, out, *shape))
    if len(data) != size:
        raise LayoutError(f"a packed matrix of shape {shape} has {len(data)} bytes and needs {size}: {again}")
    block = workspace.fresh(size, large=True)
    block[:size] = data
    return PackedMatrix(tuple(shape), dtype, result, ours, block)
