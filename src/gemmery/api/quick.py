"""The fast path for products on a device seen before: a look-up, three pointers, a launch.

The prepared launch is looked up by element types, shapes, strides and device. What may differ between such arrays is
checked each time: addresses, whether `out` overlaps, whether gradients are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemmery import arrays
from gemmery.arrays import View
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.cuda.launch import Ready

# (a, b, out, the function's name, alpha and beta or None) -> the result, or None for a product not seen before.
Way = Callable[[Any, Any, Any, str, tuple[float, float] | None], Any]
WAYS: dict[type, Way] = {}  # by the type of a
_MOST = 4096  # products kept for each library


class Met(NamedTuple):
    """A product seen before."""

    run: Ready
    shape: tuple[int, ...]
    workspace: int
    a_low: int  # out overlaps a if the distance in bytes from a's first element to out's is between these two
    a_high: int
    b_low: int
    b_high: int


def remember(a: Any, b: Any, out: Any, name: str, views: tuple[View, View, View], run: Ready) -> None:
    """Use the fast path for arrays like these, if their library has one; `name` is that of the called function."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    x, y, target = views
    met = Met(run, target.shape, run.workspace, *_apart(x, target), *_apart(y, target))
    if torch is not None and type(a) in _tensors(torch) and type(b) in _tensors(torch):
        if out is None or type(out) in _tensors(torch):
            if torch.Tensor not in WAYS:
                way = _torch_way(torch)
                WAYS.update(dict.fromkeys(_tensors(torch), way))
            _keep(_TENSORS, _tensor_key(a, b, out, name, x.pointer, y.pointer, target.pointer), met)
    elif cupy is not None and type(a) is type(b) is cupy.ndarray and type(out) in (cupy.ndarray, type(None)):
        WAYS.setdefault(cupy.ndarray, _cupy_way(cupy))
        _keep(_ARRAYS, _array_key(a, b, out, name, x.pointer, y.pointer, target.pointer), met)


_TENSORS: dict[tuple[Any, ...], Met] = {}
_ARRAYS: dict[tuple[Any, ...], Met] = {}


def scaled(a: Any, b: Any, out: Any, name: str, alpha: Any, beta: Any) -> Any:
    """alpha a b + beta out by the fast path, for scalars exact in float32; None for others and for unseen products."""
    way = WAYS.get(type(a))
    if way is None or type(alpha) is not float or type(beta) is not float:
        return None
    if alpha == 1 and beta == 0:
        return way(a, b, out, PLAIN[name], None)
    if 0 < abs(alpha) < _LARGE and abs(beta) < _LARGE and (out is not None or beta == 0):
        return way(a, b, out, name, (alpha, beta))
    return None


PLAIN = {"gemm": "plain gemm", "gemv": "plain gemv", "matmul": "matmul"}  # the keys when alpha is 1 and beta 0


_LARGE = 1e38


def _keep(products: dict[tuple[Any, ...], Met], key: tuple[Any, ...], met: Met) -> None:
    if len(products) >= _MOST:
        products.clear()
    products[key] = met


def _apart(x: View, target: View) -> tuple[int, int]:
    low, high = arrays.reach(x.shape, x.strides, x.dtype)
    bottom, top = arrays.reach(target.shape, target.strides, target.dtype)
    return low - top, high - bottom


def _low_bits(p: int, q: int, r: int) -> int:
    """Return three addresses modulo 16, packed in one number."""
    return (p & 15) << 8 | (q & 15) << 4 | r & 15 if (p | q | r) & 15 else 0


def _tensors(torch: Any) -> tuple[type, ...]:
    return torch.Tensor, torch.nn.Parameter


def _tensor_key(a: Any, b: Any, out: Any, name: str, p: int, q: int, r: int) -> tuple[Any, ...]:
    bits = _low_bits(p, q, r)
    key = name, a.get_device(), b.get_device(), a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), bits
    return key if out is None else (*key, out.get_device(), out.dtype, out.shape, out.stride())


def _torch_way(torch: Any) -> Way:
    stream_of, recording = torch._C._cuda_getCurrentRawStream, torch.is_grad_enabled
    tensors, byte = _tensors(torch), torch.uint8
    tracing, modes, transforms = arrays.recorders(torch)
    forward, written = torch.autograd.forward_ad, arrays.version_bump(torch)
    products = _TENSORS

    def way(a: Any, b: Any, out: Any, name: str, scalars: tuple[float, float] | None) -> Any:
        ordinal = a.get_device()
        if ordinal < 0 or type(b) not in tensors:
            return None
        if modes() or tracing() or transforms() or forward._current_level >= 0:  # the slow path raises the error
            return None
        p, q = a.data_ptr(), b.data_ptr()
        if not p or not q:
            return None
        bits = _low_bits(p, q, 0) if (p | q) & 15 else 0
        if out is None:
            met = products.get(
                (name, ordinal, b.get_device(), a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), bits)
            )
            if met is None or ((a.requires_grad or b.requires_grad) and recording()) or a.is_neg() or b.is_neg():
                return None
            made = a.new_empty(met.shape)
            r = made.data_ptr()
        else:
            if type(out) not in tensors:
                return None
            made, r = out, out.data_ptr()
            met = products.get(
                (
                    name,
                    ordinal,
                    b.get_device(),
                    a.dtype,
                    b.dtype,
                    a.shape,
                    b.shape,
                    a.stride(),
                    b.stride(),
                    bits | r & 15,
                    out.get_device(),
                    out.dtype,
                    out.shape,
                    out.stride(),
                )
            )
            if (
                met is None
                or not r
                or met.a_low < r - p < met.a_high
                or met.b_low < r - q < met.b_high
                or ((a.requires_grad or b.requires_grad or out.requires_grad) and recording())
                or a.is_neg()
                or b.is_neg()
                or out.is_neg()
            ):
                return None
        if met.workspace:
            scratch = a.new_empty((met.workspace,), dtype=byte)
            met.run(p, q, r, stream_of(ordinal), 0, scratch.data_ptr(), scalars)
        else:
            met.run(p, q, r, stream_of(ordinal), 0, 0, scalars)
        if out is not None:
            written((out,))
        return made

    return way


def _array_key(a: Any, b: Any, out: Any, name: str, p: int, q: int, r: int) -> tuple[Any, ...]:
    bits = _low_bits(p, q, r)
    key = name, a.device.id, b.device.id, a.dtype, b.dtype, a.shape, b.shape, a.strides, b.strides, bits
    return key if out is None else (*key, out.device.id, out.dtype, out.shape, out.strides)


def _cupy_way(cupy: Any) -> Way:
    stream, current, ndarray, byte = cupy.cuda.get_current_stream, cupy.cuda.device.get_device_id, cupy.ndarray, "u1"
    products = _ARRAYS

    def way(a: Any, b: Any, out: Any, name: str, scalars: tuple[float, float] | None) -> Any:
        if type(b) is not ndarray:
            return None
        p, q = a.data.ptr, b.data.ptr
        if not p or not q:
            return None
        made = out
        if out is None:
            met = products.get(_array_key(a, b, None, name, p, q, 0))
            if met is None or a.device.id != current():
                return None
            made = ndarray(met.shape, a.dtype)
            r = made.data.ptr
        else:
            if type(out) is not ndarray:
                return None
            r = out.data.ptr
            met = products.get(_array_key(a, b, out, name, p, q, r))
            if met is None or not r or met.a_low < r - p < met.a_high or met.b_low < r - q < met.b_high:
                return None
        if met.workspace:
            if a.device.id != current():
                return None
            scratch = ndarray((met.workspace,), byte)
            met.run(p, q, r, stream(a.device.id).ptr, 0, scratch.data.ptr, scalars)
        else:
            met.run(p, q, r, stream(a.device.id).ptr, 0, 0, scalars)
        return made

    return way
