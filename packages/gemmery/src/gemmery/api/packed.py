"""Launches of products by packed weights, whose elements have 8 or 4 bits, of what unpacks those and makes codes."""

from __future__ import annotations

import math
from functools import partial

from gemmery import arrays, dtypes
from gemmery.api.codes import FORMATS
from gemmery.api.device_call import table, tell_once
from gemmery.arrays import View
from gemmery.cuda.device import WARP
from gemmery.cuda.geometry import Geometry, Scaling, instance
from gemmery.cuda.launch import CudaLaunch, Ready
from gemmery.cuda.weights import CODES, Format, problem_of
from gemmery.dispatch.cuda import quantized
from gemmery.errors import CompileError, RefusedError
from gemmery.problem import Config, Problem


def prepare_packed(x: View, packed: View, scales: View, c: View, bits: int, epilogue: str) -> Ready | str:
    """Return the launch of C = activation(x W' + bias), or why there is none.

    W is packed as by `gemmery.torch.quantize`: `packed` is (n, k bits / 8) of bytes, `scales` (n, groups). x is (m, k)
    and C (m, n), by rows. The pointers of the views are their lowest four bits. The launch takes the addresses of x,
    `packed` and C, and that of the factors in the place of scratch memory; a bias is n adjacent float32.
    """
    (m, k), n, size = x.shape, c.shape[1], dtypes.get(x.dtype).size
    if x.dtype not in ("f16", "bf16") or scales.dtype != x.dtype:
        return (
            f"x of {x.dtype} and factors of {scales.dtype}: a kernel multiplies f16 or bf16, with factors of the same"
        )
    if 0 in (m, n, k) or any(
        z.strides != arrays.contiguous(z.shape, each) for z, each in ((packed, 1), (scales, size))
    ):
        return "a kernel reads packed weights and factors that are contiguous, and not empty"
    if x.strides[1] != size or c.strides[1] != size:
        return "a kernel reads and writes rows whose elements are adjacent"
    group, of_row = k // scales.shape[1], k * bits // 8
    steps = (x.strides[:1] if m > 1 else ()), (of_row,), (c.strides[:1] if m > 1 else ())
    low = [arrays.alignment(z.pointer, step) for z, step in zip((x, packed, c), steps, strict=True)]
    problem = Problem(
        *(m, n, k, x.dtype, c.dtype, 1, "row", "col", "row"),
        epilogue=epilogue,
        device=c.device,
        alignments=(low[0], low[1], low[2]),
        bits=bits,
        group=group,
    )
    return _launch(problem, x, View(0, (1, k, n), (0, size, of_row), x.dtype), c)


def prepare_arranged(
    x: View, form: Format, c: View, epilogue: str = "", invariant: bool = False, groups: int = 0, scaled: bool = False
) -> Ready | str:
    """Return the launch of C = activation(x W' + bias), or why there is none.

    x is (m, k) and C (m, n), of elements that are adjacent in rows; the pointers of the views are their lowest four
    bits. The launch takes the addresses of x, the arranged weight and C, that of a bias of n adjacent float32, that of
    scratch memory, and as the third of `extra` that of counters: see `gemmery.cuda.ordered`. With `groups` each has an
    arranged weight, one after the other, and a bias; the first of `extra` is the address of where their rows end.
    Of codes of 8 bits, which are `scaled` if a row has a factor, it is the address of these, float32.
    """
    reason = form.refusal()
    codes = form.dtype in CODES
    if reason or x.dtype != form.dtype or (c.dtype != form.dtype and not codes):
        return reason or f"x of {x.dtype}, C of {c.dtype}: this weight is multiplied as {form.dtype}"
    if 0 in x.shape or x.strides[1] != dtypes.get(x.dtype).size:
        return "a kernel reads rows of x whose elements are adjacent, at least one"
    problem = problem_of(x, form, c, epilogue, invariant, groups)._replace(scales="outer" if scaled else "")
    size = dtypes.get(form.dtype).size
    b = View(0, (1, form.k, form.n), (0, size, size * form.k), x.dtype)
    return _launch(problem, x, b, c, groups or 1, Scaling("outer", a_row=1) if scaled else None)


def _launch(
    problem: Problem, x: View, b: View, c: View, groups: int = 0, scaling: Scaling | None = None
) -> Ready | str:
    """Return the launch of a product by packed weights, whose bias is n adjacent float32, or n for each group."""
    try:
        candidate = quantized(problem)
        kernel = candidate.rung.build(problem, candidate.config)
    except RefusedError as refused:
        return str(refused)
    except CompileError as error:  # a compiler of another version may spill
        tell_once(candidate.rung.name, str(error))
        return str(error)
    assert isinstance(kernel, CudaLaunch)
    n, bias = problem.n, None
    if problem.has_bias:
        bias = View(0, (groups, n), (4 * n, 4), "f32") if groups else View(0, (n,), (4,), "f32")
    a, result = (View(0, (1, *z.shape), (0, *z.strides), z.dtype) for z in (x, c))
    return kernel.ready(a, b, result, bias, scaling)


@table.once
def prepare_unpacking(
    packed: View, scales: View, zeros: View | None, scale: View | None, dtype: str, format_: str
) -> Ready | str:
    """Return the launch that writes W of `dtype`, by rows, or why there is none.

    The views are those of a `QuantizedMatrix` of this format, with all but the last dimension in one. The launch takes
    the addresses of the zero points, of `packed` and of W, that of `scale` in the place of a bias, and that of the
    factors in the place of scratch memory.
    """
    row, own = FORMATS[format_], scales.dtype
    n, k = packed.shape[0], packed.shape[1] * 8 // row.bits
    if dtype not in ("f32", "f16", "bf16") or own not in ("f32", "f16", "bf16", "uint8"):
        return f"W of {dtype} and factors of {own}: a kernel writes f32, f16 or bf16, with factors of these"
    if (
        0 in (n, k)
        or packed.pointer % 16
        or any(
            z is not None and z.strides != arrays.contiguous(z.shape, dtypes.get(z.dtype).size)
            for z in (packed, scales, zeros)
        )
    ):
        return "a kernel unpacks weights and factors that are contiguous, at a multiple of 16 bytes, and not empty"
    group = k // scales.shape[1]
    if group % _PIECE:
        return f"groups of {group}: a kernel unpacks {_PIECE} columns at a time, with one factor"
    w = View(0, (1, n, k), (0, k * dtypes.get(dtype).size, dtypes.get(dtype).size), dtype)
    factors = "f32" if own == "uint8" else own
    problem = Problem(n, k, 0, factors, dtype, device=packed.device, bits=row.bits, group=group)
    return CudaLaunch(problem, {}, partial(_unpacking, format_, zeros is not None)).ready(w, w, w)


_PIECE = 8  # elements that a thread writes at a time, of one group
_THREADS, _EACH = 256, 4  # threads of a block, pieces of a thread


def _unpacking(format_: str, zeros: bool, problem: Problem, _: Config) -> Geometry:
    """Return a launch that writes C, of packed B whose factors lie in scratch memory, a piece after the other."""
    pieces = problem.m * problem.n // _PIECE
    kernel = instance("unpack", problem, format_.upper(), zeros, problem.group, _EACH)
    return Geometry("unpack.cu", kernel, (-(-pieces // (_THREADS * _EACH)), 1, 1), (_THREADS, 1, 1))


_KEPT = 8  # pieces of 16 bytes of a row that a thread keeps


@table.once
def prepare_rows(x: View, codes: View) -> Ready | str:
    """Return the launch that writes codes of 8 bits, (m, k), and a factor for each row of x, or why there is none.

    The pointers of the views are their lowest four bits. The launch takes the address of x twice, that of the codes,
    and that of the m factors in the place of scratch memory.
    """
    (m, k), size = x.shape, dtypes.get(x.dtype).size
    if x.dtype not in ("f32", "f16", "bf16") or 0 in x.shape or x.strides[1] != size or codes.strides != (k, 1):
        return "a kernel makes codes of rows of f32, f16 or bf16 whose elements are adjacent, and not none"
    low = arrays.alignment(x.pointer, x.strides[:1] if m > 1 else ())
    problem = Problem(m, k, k, x.dtype, codes.dtype, device=x.device, alignments=(low, 16, 16))
    a, c = (View(0, (1, m, k), (0, *z.strides), z.dtype) for z in (x, codes))
    try:
        return CudaLaunch(problem, {}, _rows).ready(a, a._replace(strides=(0, 0, 0)), c)
    except RefusedError as refused:
        return str(refused)


def _rows(problem: Problem, _: Config) -> Geometry:
    """Return a launch with a warp a row, or a block a longer row."""
    size = dtypes.get(problem.dtype).size
    vec = math.gcd(problem.k, max(1, min(16, problem.alignments[0]) // size))
    pieces = problem.k // vec
    team = WARP if pieces <= _KEPT * WARP else 256 if pieces <= _KEPT * 256 else 512
    each = min(_KEPT, 1 << max(0, -(-pieces // team) - 1).bit_length())
    threads = max(team, 4 * WARP)
    return Geometry(
        "quantize_rows.cu",
        instance("quantize_rows", problem, vec, team, each),
        (-(-problem.m // (threads // team)), 1, 1),
        (threads, 1, 1),
        needs=89 if problem.out in dtypes.FLOAT8 else 80,
    )
