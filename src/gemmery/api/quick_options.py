"""The fast path for matmul with options, and for 8-bit types: a look-up, for PyTorch's tensors on a device.

The key has the options beside what `quick` looks up. Addresses, overlaps and gradients are checked each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmery import arrays, dtypes
from gemmery.api import quick
from gemmery.arrays import View
from gemmery.keywords import Options
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


def forget() -> None:
    """Forget all calls: they were prepared with another precision of float32."""
    _CALLS.clear()


def remember(
    a: Any,
    b: Any,
    out: Any,
    options: Options,
    target: View,
    served: TieredLaunch,
    scalars: tuple[float, float],
    parts: tuple[int, int] = (0, 0),
) -> None:
    """Use this path for calls like this one, if all their arrays are PyTorch's; `target` is the view of the result.

    `parts` are the addresses of the parts of A and of B, where they were split before.
    """
    torch = arrays.library(a, "torch", "Tensor")
    if torch is None or type(a) not in quick.tensor_types(torch):
        return
    tensors = quick.tensor_types(torch)
    call = _key(a, b, out, options, tensors, parts) if type(b) in tensors else None
    if call is None:
        return
    key, used, _ = call
    views = [arrays.view(z) for z in (used if out is None else used[:-1])]
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


def _key(
    a: Any, b: Any, out: Any, options: Options, tensors: tuple[type, ...], split: tuple[int, int] = (0, 0)
) -> tuple[tuple[Any, ...], list[Any], list[int]] | None:
    """Return what identifies a call, the tensors that it reads and then writes, and their addresses.

    None if it has other arrays too, or a bias that is a number.
    """
    dtype, bias, activation, _, precision, _, _, _, scale_a, scale_b, *others = options
    used, parts = [a, b], [a.dtype, a.shape, a.stride(), dtype, activation, precision, *others]
    for z in (b, bias, scale_a, scale_b, out):
        if z is None:
            parts.append(None)
        elif type(z) in tensors:
            if z is not b:
                used.append(z)
            parts += (z.get_device(), z.dtype, z.shape, z.stride())
        elif type(z) in _NUMBERS and z is not bias and z is not out:
            parts.append(z)
        else:
            return None
    addresses = [z.data_ptr() for z in used]
    parts += (a.get_device(), quick.low_bits(addresses[0], addresses[1], 0 if out is None else addresses[-1]))
    if any(split):
        parts += map(bool, split)
    return tuple(parts), used, addresses


_NUMBERS = (int, float)


def _parts_read(parts: tuple[int, int], reads: tuple[bool, bool]) -> tuple[int, ...]:
    """Return the last argument of a launch: the addresses of the parts that it reads; nothing if it reads none."""
    if not any(parts) or not any(reads):
        return ()
    return parts[0] if reads[0] else 0, parts[1] if reads[1] else 0, 0


def _path(torch: Any) -> quick.OptionPath:
    stream_of, recording = torch._C._cuda_getCurrentRawStream, torch.is_grad_enabled
    tensors, byte = quick.tensor_types(torch), torch.uint8
    tracing, modes, transforms = arrays.recorders(torch)
    forward, written = torch.autograd.forward_ad, arrays.version_bump(torch)

    def multiply(a: Any, b: Any, out: Any, options: Options, parts: tuple[int, int] = (0, 0)) -> Any:
        ordinal = a.get_device()
        if ordinal < 0 or type(b) not in tensors or options.threads is not None:
            return None
        if modes() or tracing() or transforms() or forward._current_level >= 0:  # the slow path raises the error
            return None
        if type(options.batch_invariant) is not bool:  # 1 is True to a dictionary, and refused
            return None
        try:
            key, used, addresses = _key(a, b, out, options, tensors, parts)  # type: ignore[misc]
            call = _CALLS.get(key)
        except (RuntimeError, TypeError):  # a tensor without memory, an option that has no key, or no tensor
            return None
        grad = recording()
        if call is None or not all(addresses) or any(z.is_neg() or (grad and z.requires_grad) for z in used):
            return None
        if out is None:
            result = a.new_empty_strided(call.shape, call.strides, dtype=call.dtype)
            addresses.append(result.data_ptr())
        else:
            result, r = out, addresses[-1]
            if any(low < r - address < high for address, (low, high) in zip(addresses, call.apart, strict=False)):
                return None
        launch(call, a, options, addresses, ordinal, parts)
        if out is not None:
            written((out,))
        return result

    def launch(
        call: KnownCall, a: Any, options: Options, addresses: list[int], ordinal: int, parts: tuple[int, int]
    ) -> None:
        bias, scale_a, scale_b = options.bias, options.scale_a, options.scale_b
        p, q, *others, r = addresses
        start = 0
        if bias is not None:
            start = others.pop(0)
            if bias.dtype is not call.bias_dtype:
                bias = bias.to(call.bias_dtype)
                start = bias.data_ptr()
        served, stream = call.served, stream_of(ordinal)
        run = served.next(stream) if served.countdown else served.run
        scratch = a.new_empty((run.workspace,), dtype=byte) if run.workspace else None
        workspace = 0 if scratch is None else scratch.data_ptr()
        if others:
            extra = (others[0] if type(scale_a) in tensors else 0, others[-1] if type(scale_b) in tensors else 0, 0)
            run(p, q, r, stream, start, workspace, call.scalars, extra)
        else:
            run(p, q, r, stream, start, workspace, call.scalars, _parts_read(parts, run.kept))

    return multiply
