"""The fast path for matmul with options, and for 8-bit types: a look-up, for PyTorch's tensors on a device.

The key has the options beside what `quick` looks up. Addresses, overlaps and gradients are checked each time.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gemmery import arrays, dtypes
from gemmery.api import quick
from gemmery.api.options import Options
from gemmery.arrays import View
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.api.prepared import TieredLaunch

_MOST = 4096  # calls kept


class KnownCall(NamedTuple):
    """A call that was made before."""

    served: TieredLaunch
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of a new result, in elements
    dtype: Any  # of a new result
    bias_dtype: Any  # in which a kernel reads a bias
    scalars: tuple[float, float]
    # For each tensor that is read: out overlaps it if the distance in bytes from its first element to out's is between.
    apart: tuple[tuple[int, int], ...]


_CALLS: dict[tuple[Any, ...], KnownCall] = {}


def remember(
    a: Any, b: Any, out: Any, options: Options, target: View, served: TieredLaunch, scalars: tuple[float, float]
) -> None:
    """Use this path for calls like this one, if all their arrays are PyTorch's; `target` is the view of the result."""
    torch = sys.modules.get("torch")
    if torch is None or type(a) not in quick.tensor_types(torch):
        return
    tensors = quick.tensor_types(torch)
    key, read = _key(a, b, out, options, tensors), _read(a, b, out, options, tensors)
    if key is None or read is None:
        return
    views = [arrays.view(z) for z in read]
    lowest, highest = arrays.reach(target.shape, target.strides, target.dtype)
    reaches = (arrays.reach(z.shape, z.strides, z.dtype) for z in views)
    if len(_CALLS) >= _MOST:
        _CALLS.clear()
    _CALLS[key] = KnownCall(
        served,
        target.shape,
        arrays.contiguous(target.shape, 1),
        getattr(torch, dtypes.get(target.dtype).numpy),
        torch.float64 if target.dtype == "f64" else torch.float32,
        scalars,
        tuple((low - highest, high - lowest) for low, high in reaches),
    )
    if torch.Tensor not in quick.OPTION_PATHS:
        quick.OPTION_PATHS.update(dict.fromkeys(tensors, _path(torch)))


def _read(a: Any, b: Any, out: Any, options: Options, tensors: tuple[type, ...]) -> list[Any] | None:
    """Return the tensors that a call reads; None if it has other arrays too, or a bias that is a number."""
    read = [a, b]
    for z in (options.bias, options.scale_a, options.scale_b):
        if type(z) in tensors:
            read.append(z)
        elif z is not None and (z is options.bias or type(z) not in (int, float)):
            return None
    return read if type(b) in tensors and (out is None or type(out) in tensors) else None


def _key(a: Any, b: Any, out: Any, options: Options, tensors: tuple[type, ...]) -> tuple[Any, ...] | None:
    """Return what identifies a call but for addresses; None if no call like it is kept."""
    dtype, bias, activation, _, precision, _, _, _, scale_a, scale_b, invariant = options
    if type(invariant) is not bool:  # 1 is True to a dictionary, and refused
        return None
    p, q = a.data_ptr(), b.data_ptr()
    bits = quick.low_bits(p, q, 0 if out is None else out.data_ptr())
    return (
        a.get_device(),
        a.dtype,
        a.shape,
        a.stride(),
        bits,
        dtype,
        activation,
        precision,
        invariant,
        *(
            z if type(z) not in tensors else (z.get_device(), z.dtype, z.shape, z.stride())
            for z in (b, bias, scale_a, scale_b, out)
        ),
    )


def _path(torch: Any) -> quick.OptionPath:
    stream_of, recording = torch._C._cuda_getCurrentRawStream, torch.is_grad_enabled
    tensors, byte = quick.tensor_types(torch), torch.uint8
    tracing, modes, transforms = arrays.recorders(torch)
    forward, written = torch.autograd.forward_ad, arrays.version_bump(torch)

    def multiply(a: Any, b: Any, out: Any, options: Options) -> Any:
        ordinal = a.get_device()
        if ordinal < 0 or options.threads is not None:
            return None
        if modes() or tracing() or transforms() or forward._current_level >= 0:  # the slow path raises the error
            return None
        read = _read(a, b, out, options, tensors)
        if read is None:
            return None
        used = read if out is None else [*read, out]
        try:
            addresses = [z.data_ptr() for z in used]
            key = _key(a, b, out, options, tensors)
            call = _CALLS.get(key)  # type: ignore[arg-type]
        except (RuntimeError, TypeError):  # a tensor without memory, or an option that cannot be looked up
            return None
        grad = recording()
        if call is None or not all(addresses) or any(z.is_neg() or (grad and z.requires_grad) for z in used):
            return None
        if out is None:
            result = a.new_empty_strided(call.shape, call.strides, dtype=call.dtype)
            r = result.data_ptr()
        else:
            result, r = out, addresses.pop()
            if any(low < r - address < high for address, (low, high) in zip(addresses, call.apart, strict=True)):
                return None
        p, q, *others = addresses
        rest, start = iter(others), 0
        if options.bias is not None:
            start = next(rest)
            if options.bias.dtype is not call.bias_dtype:
                bias = options.bias.to(call.bias_dtype)
                start = bias.data_ptr()
        extra = tuple(next(rest) if type(z) in tensors else 0 for z in (options.scale_a, options.scale_b))
        served, stream = call.served, stream_of(ordinal)
        run = served.next(stream) if served.countdown else served.run
        scratch = a.new_empty((run.workspace,), dtype=byte) if run.workspace else None
        workspace = 0 if scratch is None else scratch.data_ptr()
        if any(extra):
            run(p, q, r, stream, start, workspace, call.scalars, (*extra, 0))
        else:
            run(p, q, r, stream, start, workspace, call.scalars)
        if out is not None:
            written((out,))
        return result

    return multiply
