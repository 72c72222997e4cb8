"""Weights of 4 or 8 bits in the order in which kernels read them.

The weight is W, (n, k); the product is C = activation(x W' + bias). Its logical form is a code of each element, and a
factor of each group of columns of a row. `arrange` makes the kernel's form of it, bytes on the same device; levels.cuh
describes a chunk of 64 rows by 128 columns. Chunks of 256 rows lie together for each 128 columns, so that what a block
needs at a time is adjacent. A factor of each row, in float32, follows the last chunk.
"""

from __future__ import annotations

from typing import Any

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.errors import ArgumentError, ShapeError
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

KINDS = {"int4": 4, "int4_close": 4, "int4_zeros": 4, "int8": 8, "e4m3": 8, "e2m1": 4}  # bits of an element
ROWS, STEP = 256, 128  # rows of chunks that lie together, columns of a chunk
_PARTS = 64  # rows of a chunk
CODES = ("e4m3", "int8")  # types of x by which levels are multiplied as that type
_GROUPS = {4: (16, 32, 64, 128), 8: (0, 16, 32, 64, 128)}  # columns of a factor; 128 stands for multiples of it
# What factors in bfloat16 are multiplied by, as powers of two: integers in its low bits are 2^-133 of themselves, and
# float4 in its place 2^-126. Kernels take 2^-13 off sums.
_SHIFTS = {"int4": 120, "int4_zeros": 120, "int8": 120, "e2m1": 113}


class Format(NamedTuple):
    """What a kernel must know of a weight: its sizes, the kind of its codes, and the columns that share a factor.

    `kind` is "int4" (0 to 15, 8 more than the level), "int4_close" (the same with factors as `close` asks for),
    "int4_zeros" (0 to 15, and a zero point for each factor), "int8", "e4m3" or "e2m1" (the bits of these). `group` is 0
    where a row has one factor, which multiplies its finished sum. `dtype` is the type of x and of the factors of
    groups, "bf16" or "f16"; or "e4m3" or "int8", whose factors are float32.
    """

    n: int
    k: int
    kind: str
    group: int
    dtype: str

    @property
    def columns(self) -> int:
        """Columns that share a factor in a chunk: those of a group, 128 of a longer one; 0: there are none."""
        return STEP if self.group and self.group % STEP == 0 else self.group

    @property
    def chunk(self) -> int:
        """Bytes of 64 rows by 128 columns, with their factors and zero points."""
        if self.dtype in CODES:
            return _PARTS * (STEP // 2 + 4)
        factors = STEP // self.columns if self.columns else 0
        return _PARTS * STEP * KINDS[self.kind] // 8 + factors * _PARTS * (3 if self.kind == "int4_zeros" else 2)

    @property
    def places(self) -> tuple[int, int]:
        """How many times 256 rows, and 128 columns, the weight has, rounded up."""
        return -(-self.n // ROWS), -(-self.k // STEP)

    @property
    def bytes(self) -> int:
        """Bytes of the arranged weight.

        >>> Format(4096, 4096, "int4", 128, "bf16").bytes / (4096 * 4096 / 2)
        1.033203125
        """
        bands, steps = self.places
        return bands * steps * ROWS // _PARTS * self.chunk + 4 * bands * ROWS

    def refusal(self) -> str:
        """Return why there is no such weight for a kernel, in words; "" if there is."""
        if self.kind not in KINDS:
            return f"elements of kind {self.kind!r}: kernels multiply {', '.join(KINDS)}"
        if self.dtype in CODES and (self.kind != "int4" or self.columns != STEP):
            return (
                f"{self.kind} in groups of {self.group} by codes of {self.dtype}: they multiply int4 in groups of 128"
            )
        if self.dtype not in ("bf16", "f16", *CODES):
            return f"x of {self.dtype}: weights of {KINDS[self.kind]} bits are multiplied as bf16 and f16"
        if self.kind == "int4_close" and self.dtype != "f16":
            return f"{self.kind} by x of {self.dtype}: only float16 has few exponents; take int4"
        if self.columns not in _GROUPS[KINDS[self.kind]]:
            return f"groups of {self.group}: a factor is for 16, 32, 64 or multiples of 128 columns, or a row of 8 bits"
        if min(self.n, self.k) < 1 or self.k % (self.group or 8):
            return (
                f"n={self.n}, k={self.k}: k is a multiple of {self.group or 8}, and no side is 0; add columns of zeros"
            )
        return ""


def close(form: Format, scales: Any) -> Format:
    """Return a format of int4 and float16 as "int4_close", which is unpacked sooner, if its factors allow that.

    The normal factors of a row lie within a ratio of 32; others are 0. Then a power of two for each row, which its
    finished sum takes off again, brings them to 2^10 and more, where no weight is subnormal.
    """
    if form.kind != "int4" or form.dtype != "f16":
        return form
    exponents, top = _exponents(scales)
    near = (exponents > 0) & (exponents < 31) & (exponents + 5 >= top)
    return form._replace(kind="int4_close") if bool((near | (scales & 0x7FFF == 0)).all()) else form


def _exponents(scales: Any) -> tuple[Any, Any]:
    """Return the exponents of float16 as they are stored, and the largest of each row."""
    exponents = (scales & 0x7FFF) >> 10
    top = exponents.amax(1, True) if hasattr(exponents, "permute") else exponents.max(1, keepdims=True)
    return exponents, top


def arrange(form: Format, codes: Any, scales: Any, zeros: Any = None, rows: Any = None) -> Any:
    """Return a weight in the kernel's form, flat bytes of the library and on the device of `codes`.

    >>> import numpy as np
    >>> form = Format(300, 256, "int4", 128, "bf16")
    >>> one = np.full((300, 2), 0x3F80, np.uint16)  # 1 as bfloat16
    >>> arrange(form, np.zeros((300, 256), np.uint8), one).shape == (form.bytes,)
    True

    `codes` are (n, k), one a byte, uint8. `scales` are (n, k / group), the bits of `form.dtype` as 16-bit integers;
    None where `form.group` is 0. `zeros` are (n, k / group) uint8, whole numbers from 0 to 16. `rows` are n float32 by
    which the sums of rows are multiplied; None: 1. The arrays are of NumPy, CuPy or PyTorch, all of the same.

    Raises ArgumentError for a format that no kernel has and factors that it cannot hold, ShapeError for other shapes.
    """
    reason = form.refusal()
    if reason:
        raise ArgumentError(reason)
    groups = (form.n, form.k // form.group) if form.group else None
    shapes = {"codes": (form.n, form.k), "scales": groups, "zeros": groups if form.kind == "int4_zeros" else None}
    for (name, shape), array in zip(shapes.items(), (codes, scales, zeros), strict=True):
        own = None if array is None else tuple(array.shape)
        if own != shape:
            raise ShapeError(f"{name} has shape {own}: a weight {form.n} x {form.k} in this format has {shape}")
    (bands, steps), chunk = form.places, form.chunk
    whole = _zeros(codes, (form.bytes,))
    chunks = whole[: bands * steps * 4 * chunk].reshape(bands, steps, 4, chunk)
    size = _PARTS * STEP * KINDS[form.kind] // 8
    chunks[..., :size] = _bands(_weights(form, _padded(codes, (bands * ROWS, steps * STEP))), bands)
    if form.group:
        count = STEP // form.columns
        sides = bands * ROWS, steps * count
        factors = _bits(_padded(_repeated(_shifted(form, scales), form), sides), codes.dtype)
        chunks[..., size : size + count * 128] = _bands(_pairs(factors, bands, steps, count), bands)
        if zeros is not None:
            points = _padded(_repeated(zeros, form), sides)[..., None]
            chunks[..., size + count * 128 :] = _bands(_pairs(points, bands, steps, count), bands)
    ends = whole[bands * steps * 4 * chunk :].reshape(bands * ROWS, 4)
    if rows is None:
        ends[:, 2], ends[:, 3] = 0x80, 0x3F  # 1 as float32
    else:
        ends[: form.n] = rows.reshape(form.n, 1).view(codes.dtype)
    if form.kind == "int4_close":  # times 2^24 of subnormal levels, by what factors were multiplied: exponent 30 is 1
        ends.view(scales.dtype)[: form.n, 1] += (_exponents(scales)[1][:, 0] + 24 - 30) << 7
    return whole


def _weights(form: Format, codes: Any) -> Any:
    """Return the bytes of chunks without factors, (rows of chunks, steps, bytes), of whole chunks of codes.

    Axes of 64 rows: warps, 8 rows of a fragment, the row or the next one. Of 128 columns: 16-byte pieces of a thread,
    products, halves of a product's columns, 4 threads, 2 adjacent columns.
    """
    rows, columns = codes.shape
    if KINDS[form.kind] == 4:
        shape, order = (2, 4, 2, 4, 2), (0, 4, 5, 1, 2, 8, 6, 9, 7, 3)
    else:
        shape, order = (4, 2, 2, 4, 2), (0, 4, 5, 1, 2, 8, 6, 7, 9, 3)
    apart = codes.reshape(rows // 64, 4, 8, 2, columns // STEP, *shape)
    v = _permuted(apart, order)  # its last axis is the row or the next one, of 4 bits after halves of columns
    if form.kind.startswith("int4"):
        packed = v[..., 0, :] | v[..., 1, :] << 4
    elif form.kind == "int8":
        packed = v ^ 0x80
    elif form.kind == "e4m3":
        packed = _halves(_floats8(form.dtype, v[..., 0], v[..., 1]))
    else:
        packed = _halves(_floats4(form.dtype, v[..., 0, 0], v[..., 0, 1], v[..., 1, 0], v[..., 1, 1]))
    return packed.reshape(rows // 64, columns // STEP, -1)


def arrange_levels(form: Format, codes: Any, scales: Any) -> Any:
    """Return a weight for an x of codes of 8 bits in the form of wgmma_codes.cu, flat bytes.

    >>> import numpy as np
    >>> form = Format(300, 256, "int4", 128, "e4m3")
    >>> arrange_levels(form, np.zeros((300, 256), np.uint8), np.ones((300, 2), np.float32)).shape == (form.bytes,)
    True

    `codes` are (n, k) uint8 from 0 to 15, 8 more than their level; `scales` are (n, k / group) float32. A byte has the
    levels of a row and the next one, of adjacent bytes of k. A level is two's complement for int8, and 1/16 of what the
    kernel multiplies; for e4m3 a sign and the magnitude, one less of a negative level, and 512 times that. Factors make
    up for it.

    Raises ArgumentError for a format that no kernel has.
    """
    reason = form.refusal() or ("" if form.dtype in CODES else f"x of {form.dtype}: see `arrange`")
    if reason:
        raise ArgumentError(reason)
    (bands, steps), chunk, size = form.places, form.chunk, _PARTS * STEP // 2
    whole = _zeros(codes, (form.bytes,))
    chunks = whole[: bands * steps * 4 * chunk].reshape(bands, steps, 4, chunk)
    negative = codes < 8
    levels = codes ^ 8 if form.dtype == "int8" else _where(negative, 15 - codes, codes - 8)
    levels = _padded(levels, (bands * ROWS, steps * STEP))
    # Rows: warps, 8 of a fragment, the row or the next one. Columns: units, products, halves of 16, 4 threads, 4 bytes.
    apart = levels.reshape(bands * 4, 4, 8, 2, steps, 2, 2, 2, 4, 4)
    v = _permuted(apart, (0, 4, 5, 1, 2, 8, 6, 7, 9, 3))
    packed = v[..., 0] | v[..., 1] << 4
    chunks[..., :size] = _bands(packed.reshape(bands * 4, steps, -1), bands)
    factors = _padded(_repeated(scales, form), (bands * ROWS, steps)) * (1 / 16 if form.dtype == "int8" else 512)
    each = _permuted(factors.reshape(bands * 4, _PARTS, steps), (0, 2, 1))
    each = _contiguous(each).view(codes.dtype)
    chunks[..., size:] = _bands(each.reshape(bands * 4, steps, -1), bands)
    return whole


def _where(condition: Any, x: Any, y: Any) -> Any:
    """Return elements of x where a condition holds, else of y."""
    return x.where(condition, y) if hasattr(x, "permute") else (x * condition + y * ~condition).astype(x.dtype)


def _contiguous(array: Any) -> Any:
    """Return a contiguous array of the same elements."""
    return array.contiguous() if hasattr(array, "permute") else array.copy(order="C")


def _halves(parts: tuple[Any, Any]) -> Any:
    """Return the low and the high bytes of half words next to each other."""
    both = _zeros(parts[0], (*parts[0].shape, 2))
    both[..., 0], both[..., 1] = parts
    return both


def _floats8(dtype: str, x: Any, y: Any) -> tuple[Any, Any]:
    """Return the low and the high byte of half words of two float8: see `Levels.number` in levels.cuh."""
    if dtype == "bf16":  # x at bits 15 and 10 to 4, y at 11, 14 to 12 and 3 to 0
        return (x & 15) << 4 | y & 15, x & 0x80 | y & 0x70 | y >> 7 << 3 | x >> 4 & 7
    return (x & 1) << 7 | y & 0x7F, x & 0x80 | y >> 7 << 6 | x >> 1 & 0x3F  # x at 15 and 13 to 7


def _floats4(dtype: str, a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any]:
    """Return the low and the high byte of half words of four float4: see `Levels.fraction` in levels.cuh."""
    if dtype == "bf16":
        # a at 15 and 8 to 6, b at 9 and 2 to 0, d at 11, 4, 3 and 10, c at 14 to 12 and, its sign, 5 of the other half
        low = (a & 3) << 6 | (c >> 3)[..., [1, 0]] << 5 | (d >> 1 & 3) << 3 | b & 7
        high = a >> 3 << 7 | (c & 7) << 4 | d >> 3 << 3 | (d & 1) << 2 | b >> 3 << 1 | a >> 2 & 1
        return low, high
    # a at 15 and 11 to 9, b at 8 and 4 to 2, c at 0 and 14 to 12, d at 1 and 7 to 5
    low = (b & 7) << 2 | c >> 3 | d >> 3 << 1 | (d & 7) << 5
    return low, a >> 3 << 7 | (a & 7) << 1 | b >> 3 | (c & 7) << 4


def _shifted(form: Format, scales: Any) -> Any:
    """Return the bits of factors with their power of two. Raises ArgumentError where it does not fit."""
    if form.kind == "int4_close":
        exponents, top = _exponents(scales)
        return scales + _cast(exponents > 0, scales.dtype) * ((30 - top) << 10)
    shift = _SHIFTS.get(form.kind, 0) if form.dtype == "bf16" else 0
    if not shift:
        return scales
    exponents = (scales & 0x7FFF) >> 7
    if bool((exponents + shift >= 255).any()):
        raise ArgumentError(
            f"a factor is 2^{128 - shift} or more, or no number: kernels hold smaller ones in bfloat16; divide the "
            "factors, and pass what they were divided by as `rows`"
        )
    return scales + _cast(exponents > 0, scales.dtype) * (shift << 7)  # subnormal ones are taken as they are, about 0


def _repeated(factors: Any, form: Format) -> Any:
    """Return factors with one for each 128 columns of longer groups."""
    times = max(1, form.group // STEP)
    rows, groups = factors.shape
    if times == 1:
        return factors
    spread = _zeros(factors, (rows, groups, times))
    spread[...] = factors[..., None]
    return spread.reshape(rows, groups * times)


def _pairs(factors: Any, bands: int, steps: int, count: int) -> Any:
    """Return the bytes of factors, (rows of chunks, steps, bytes): those of two rows next to each other."""
    apart = factors.reshape(bands * 4, 32, 2, steps, count, factors.shape[-1])
    return _permuted(apart, (0, 3, 1, 4, 2, 5)).reshape(bands * 4, steps, -1)


def _bands(chunks: Any, bands: int) -> Any:
    """Return chunks with those of 256 rows next to each other."""
    return _permuted(chunks.reshape(bands, 4, *chunks.shape[1:]), (0, 2, 1, 3))


def _bits(words: Any, byte: Any) -> Any:
    """Return 16-bit integers as two bytes each."""
    return words[..., None].view(byte)


def _padded(array: Any, shape: tuple[int, int]) -> Any:
    """Return a matrix with rows and columns of zeros behind it."""
    if tuple(array.shape) == shape:
        return array
    whole = _zeros(array, shape)
    whole[: array.shape[0], : array.shape[1]] = array
    return whole


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    """Return zeros of an array's library, device and type."""
    if hasattr(like, "new_zeros"):
        return like.new_zeros(shape)
    import numpy as np

    return np.zeros_like(like, shape=shape)


def _permuted(array: Any, axes: tuple[int, ...]) -> Any:
    """Return a view with its axes in another order."""
    return array.permute(axes) if hasattr(array, "permute") else array.transpose(axes)


def _cast(array: Any, dtype: Any) -> Any:
    """Return an array of another type."""
    return array.to(dtype) if hasattr(array, "permute") else array.astype(dtype)


def problem_of(x: View, form: Format, c: View, epilogue: str = "", invariant: bool = False, groups: int = 0) -> Problem:
    """Return the product of x, (m, k) by rows, and an arranged weight, or one for each of `groups` of rows.

    `invariant`: with the same bits for any m.
    """
    size = dtypes.get(c.dtype).size
    low = x.pointer | (x.strides[0] if x.shape[0] > 1 else 0), 0, c.pointer | (c.strides[0] if c.shape[0] > 1 else 0)
    return Problem(
        *(x.shape[0], form.n, form.k, form.dtype, c.dtype, 1, "row", "col", "row" if c.strides[1] == size else "any"),
        epilogue=epilogue,
        device=c.device,
        invariant=invariant,
        alignments=tuple(16 if not each % 16 else each & -each for each in low),  # type: ignore[arg-type]
        bits=KINDS[form.kind],
        group=form.columns,
        levels=form.kind,
        groups=groups,
    )
