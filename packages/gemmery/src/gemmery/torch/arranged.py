"""Products of PyTorch's tensors by weights that `gemmery.cuda.weights` arranged.

`layer` takes a weight as `gemmery.torch.quantize` returns it. It arranges the weight in its first call, and keeps that
copy, of as many bits, as long as the packed tensor lives and nothing is written to it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from weakref import ref

import torch

from gemmery.api.device_call import keep, table
from gemmery.api.options import epilogue_name
from gemmery.api.packed import prepare_arranged
from gemmery.arrays import View
from gemmery.cuda import ordered, weights
from gemmery.cuda.choose.variants import expands
from gemmery.cuda.driver import find
from gemmery.cuda.launch import Ready
from gemmery.cuda.weights import Format, arrange, arrange_levels
from gemmery.errors import ArgumentError

T = TypeVar("T")

TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # PyTorch for the CPU alone has none


_copies: dict[int, tuple[Any, tuple[int, ...], Format, Any]] = {}  # of packed tensors: see `_hold`


def layer(x: Any, packed: Any, scales: Any, bias: Any, activation: str | None) -> Any:
    """Return activation(x W' + bias) for a weight of `gemmery.torch.quantize`; None where no kernel multiplies it."""
    if scales.dtype is not x.dtype or x.dtype not in TYPES or x.is_neg() or not x.numel():
        return None
    state = _version(packed), scales.data_ptr(), _version(scales)
    entry = _copies.get(id(packed))
    if entry is None or entry[0]() is not packed or entry[1] != state:
        entry = _hold(packed, scales, state)
    if entry is None or entry[3] is None or expands(x.numel() // entry[2].k, entry[2], find(f"cuda:{x.get_device()}")):
        return None
    return _product(x, entry[3], entry[2], bias, activation)


def matrix_layer(x: Any, matrix: Any, bias: Any, activation: str | None, invariant: bool = False) -> Any:
    """Return activation(x W' + bias) for the logical form of a matrix; None where no kernel multiplies it.

    `matrix` has `format`, `packed`, `scales`, `zeros` and `scale` as a `gemmery.QuantizedMatrix` has them, and a dict
    `_copies`, where the arranged copy stays.
    """
    entry = _entry(x, matrix, _arranged)
    if entry is None:
        return None
    if not invariant and expands(x.numel() // entry[0].k, entry[0], find(f"cuda:{x.get_device()}")):
        return None
    return _product(x, entry[1], entry[0], bias, activation, invariant)


def experts(
    x: Any, matrix: Any, ends: Any, bias: Any, activation: str | None, invariant: bool = False, out: Any = None
) -> Any:
    """Return the rows of groups of x, each times its matrix of a stack, in one launch; None where no kernel has it.

    `ends` are int32 on the device of x; `bias` is (groups, n). The result is `out`, if that is not None.
    """
    entry = None if x.is_neg() or not len(matrix) else _entry(x, matrix, _arranged_experts)
    return None if entry is None else _product(x, entry[1], entry[0], bias, activation, invariant, ends, out)


def codes_layer(x: Any, matrix: Any, factors: Any, bias: Any, activation: str | None, out: str) -> Any:
    """Return activation((factors x) W' + bias) of type `out` for rows of codes of 8 bits; None where no kernel has it.

    `factors` are one float32 for each row of x, or None.
    """
    kind = _CODES.get(x.dtype)
    if kind is None or matrix.format != "int4" or matrix.zeros is not None or x.dim() != 2 or not x.numel():
        return None
    entry = _entry(x, matrix, _arranged_levels)
    if entry is None:
        return None
    form, arranged = entry
    key = "codes", x.shape, x.dtype, x.get_device(), form, activation, bias is None, factors is None, out
    known = table.calls.get(key)
    if known is None:
        where, (m, k), n = f"cuda:{x.get_device()}", x.shape, form.n
        size = 4 if out == "f32" else 2
        of_x, of_c = View(0, (m, k), (k, 1), kind, where), View(0, (m, n), (size * n, size), out, where)
        name = epilogue_name(bias, activation, out)
        known = keep(table.calls, key, prepare_arranged(of_x, form, of_c, name, scaled=factors is not None))
    if isinstance(known, str):
        return None
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    bias = None if bias is None else bias.float().contiguous()
    factors = None if factors is None else factors.contiguous()
    result = torch.empty((x.shape[0], form.n), dtype=_RESULTS[out], device=x.device)
    start, of_rows = (0 if z is None else z.data_ptr() for z in (bias, factors))
    extra = (of_rows, 0, 0) if of_rows else ()
    run: Ready = known
    stream = stream_of(x.get_device())
    run(x.data_ptr(), arranged.data_ptr(), result.data_ptr(), stream, start, 0, None, extra)
    return result


_CODES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}
_RESULTS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def _arranged_levels(matrix: Any, dtype: torch.dtype) -> tuple[Format, Any] | None:
    """Return the format and the arranged bytes of a matrix of int4 for codes of a type."""
    packed, scales = matrix.packed, matrix.scales
    if packed.ndim != 2 or not packed.numel():
        return None
    n, k = packed.shape[0], 2 * packed.shape[1]
    form = Format(n, k, "int4", k // scales.shape[1], _CODES[dtype])
    if form.refusal():
        return None
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return form, arrange_levels(form, codes, scales.float())


def _entry(x: Any, matrix: Any, make: Callable[..., tuple[Format, Any] | None]) -> tuple[Format, Any] | None:
    """Return the format and the arranged bytes of a matrix for such an x, made once; None if there are none."""
    key, state = ("arranged", x.dtype), (matrix.packed.data_ptr(), matrix.packed.get_device())
    if key not in matrix._copies:
        if x.dtype not in (*TYPES, *_CODES) or torch.cuda.is_current_stream_capturing():
            return None
        on_hopper = find(f"cuda:{x.get_device()}").capability == 90
        matrix._copies[key] = state, _outside(lambda: make(matrix, x.dtype)) if on_hopper else None
    was, entry = matrix._copies[key]
    return entry if was == state and not x.is_neg() and x.get_device() == state[1] else None


def _arranged_experts(matrix: Any, dtype: torch.dtype) -> tuple[Format, Any] | None:
    """Return the format of matrices, and the arranged bytes of each, (groups, bytes)."""
    for close in (True, False):  # only some may have factors that are close
        entries = [_arranged(matrix[i], dtype, close) for i in range(len(matrix))]
        known = [entry for entry in entries if entry is not None]
        if len(known) == len(entries) and len({form for form, _ in known}) == 1:
            return known[0][0], torch.stack([each for _, each in known])
    return None


_KINDS = {"int8": "int8", "int4": "int4", "float8_e4m3": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}


def _arranged(matrix: Any, dtype: torch.dtype, close: bool = True) -> tuple[Format, Any] | None:
    """Return the format and the arranged bytes of a matrix for x of a type; None where the kernel cannot hold it."""
    packed, scales, kind, rows = matrix.packed, matrix.scales, _KINDS[matrix.format], None
    if packed.ndim != 2 or not packed.numel():
        return None
    codes = packed.view(torch.uint8)
    if weights.KINDS[kind] == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    n, k = codes.shape
    group, zeros = k // scales.shape[1], matrix.zeros
    if zeros is not None:
        whole = zeros.clamp(0, 16).round()
        if kind != "int4" or not torch.equal(whole, zeros):
            return None
        kind, zeros = "int4_zeros", whole.to(torch.uint8)
    if matrix.format == "mxfp4":
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    elif matrix.format == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn).float()
        rows = matrix.scale.float().expand(n).contiguous()
    elif kind in ("int8", "e4m3") and group == k:
        rows = scales.float().flatten()
        scales, group = None, 0
    if scales is not None:
        exact, scales = scales, scales.to(dtype)
        if not torch.equal(scales.to(exact.dtype), exact):
            return None  # a factor of another type would be rounded
        scales = scales.view(torch.int16)
    form = Format(n, k, kind, group, TYPES[dtype])
    if form.refusal():
        return None
    form = weights.close(form, scales) if close else form
    with suppress(ArgumentError):
        return form, arrange(form, codes, scales, zeros, rows)
    return None


def _outside(make: Callable[[], T]) -> T:
    """Return what `make` returns on the current stream, in memory of no graph's pool.

    A compiled step with CUDA graphs runs once with all that its thread allocates in the pool of the graph, where what
    outlives the step is an error. So another thread allocates.
    """
    stream = torch.cuda.current_stream()

    def make_there() -> T:
        with torch.no_grad(), torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as other:
        return other.submit(make_there).result()


def _version(tensor: Any) -> int:
    """Return how often PyTorch wrote to a tensor, as far as it counts."""
    return 0 if tensor.is_inference() else tensor._version


def _hold(packed: Any, scales: Any, state: tuple[int, ...]) -> tuple[Any, tuple[int, ...], Format, Any] | None:
    """Return what is kept for a packed tensor: a reference to it, the state of its memory, the format, the copy.

    The copy is None where no kernel multiplies it. While a graph is captured none is made: it would be in the graph.
    """
    device, bits = packed.get_device(), 8 if packed.dtype is torch.int8 else 4
    if packed.ndim != 2 or scales.ndim != 2 or not scales.numel() or torch.cuda.is_current_stream_capturing():
        return None
    n, k = packed.shape[0], packed.shape[1] * 8 // bits
    form = Format(n, k, f"int{bits}", k // scales.shape[1], TYPES[scales.dtype])
    arranged = None
    if not form.refusal() and scales.get_device() == device and find(f"cuda:{device}").capability == 90:
        codes = packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).reshape(n, k)
        with suppress(ArgumentError):  # factors that the kernel cannot hold
            codes, factors = codes.view(torch.uint8), scales.detach().contiguous().view(torch.int16)
            form = weights.close(form, factors)
            arranged = _outside(lambda: arrange(form, codes, factors))
    key = id(packed)
    _copies[key] = ref(packed, lambda _: _copies.pop(key, None)), state, form, arranged
    return _copies[key]


KnownLaunch = tuple[Ready | None, tuple[int, ...]] | str  # a launch and the shape of its result, or why there is none


def _product(
    x: Any, arranged: Any, form: Format, bias: Any, activation: str | None, invariant: bool = False, ends: Any = None,
    out: Any = None,
) -> Any:  # fmt: skip
    """Return the result of the launch for tensors like these, which is made once; None where there is none."""
    of_bias = None if bias is None else (bias.shape, bias.get_device())
    of_weight = arranged.get_device(), arranged.shape, form
    key = ("arranged", x.shape, x.dtype, x.get_device(), *of_weight, activation, of_bias, invariant)
    known: KnownLaunch | None = table.calls.get(key)
    known = known or keep(table.calls, key, _prepare(x, arranged, form, bias, activation, invariant))
    if isinstance(known, str):
        return None
    (run, shape), x, start = known, x.contiguous(), 0
    p, q, device = x.data_ptr(), arranged.data_ptr(), x.get_device()
    if p % 16:
        x = x.clone()
        p = x.data_ptr()
    if bias is not None:
        bias = bias.float().contiguous()
        start = bias.data_ptr()
    result = x.new_empty(shape) if out is None else out
    if run is None:
        return result
    stream, where = stream_of(device), 0 if ends is None else ends.data_ptr()
    if not run.workspace:
        run(p, q, result.data_ptr(), stream, start, 0, None, (where, 0, 0) if where else ())
        return result
    scratch = torch.empty(run.workspace, dtype=torch.uint8, device=x.device)
    extra = where, 0, ordered.counters(run.counters, stream, device)
    run(p, q, result.data_ptr(), stream, start, scratch.data_ptr(), None, extra)
    return result


def _prepare(x: Any, arranged: Any, form: Format, bias: Any, activation: str | None, invariant: bool) -> KnownLaunch:
    """Return the launch for tensors like these, the shape of its result and its rows, or why there is none."""
    device, where = x.get_device(), f"cuda:{x.get_device()}"
    groups = arranged.shape[0] if arranged.ndim == 2 else 0
    sides = (groups, form.n) if groups else (form.n,)
    if x.shape[-1:] != (form.k,) or (bias is not None and bias.shape != sides):
        return f"x has shape {tuple(x.shape)}: a weight {form.n} x {form.k} takes rows of {form.k}, and {form.n} biases"
    if arranged.numel() != form.bytes * (groups or 1) or arranged.element_size() != 1 or not arranged.is_contiguous():
        return f"the arranged weight has {arranged.numel()} elements: in this format it has {form.bytes} adjacent bytes"
    if arranged.data_ptr() % 16 or any(z.get_device() != device for z in (arranged, bias) if z is not None):
        return "an arranged weight begins at a multiple of 16 bytes, and all tensors are on one device: make copies"
    rows, dtype = x.numel() // form.k, TYPES.get(x.dtype, str(x.dtype))
    shape = (*x.shape[:-1], form.n)
    if not rows:
        return None, shape
    of_x, of_c = (View(0, (rows, side), (2 * side, 2), dtype, where) for side in (form.k, form.n))
    run = prepare_arranged(of_x, form, of_c, epilogue_name(bias, activation, "f32"), invariant, groups)
    return run if isinstance(run, str) else (run, shape)
