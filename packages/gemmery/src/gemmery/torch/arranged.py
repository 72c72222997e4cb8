"""Products of PyTorch's tensors by weights that `gemmery.cuda.weights` arranged."""

from __future__ import annotations

from typing import Any

import torch

from gemmery.api.device_call import keep, table
from gemmery.api.options import epilogue_name
from gemmery.arrays import View
from gemmery.cuda import ordered, weights
from gemmery.cuda.launch import Ready
from gemmery.cuda.weights import Format
from gemmery.errors import ArgumentError

TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # PyTorch for the CPU alone has none


def multiply(x: Any, arranged: Any, form: Format, bias: Any = None, activation: str | None = None) -> Any:
    """Return activation(x W' + bias) for x of shape (..., k) and an arranged weight on the same CUDA device.

    Raises ArgumentError where no kernel multiplies these.
    """
    x, device = x.contiguous(), x.get_device()
    p, q = x.data_ptr(), arranged.data_ptr()
    if p % 16:
        x = x.clone()
        p = x.data_ptr()
    key = "arranged", x.shape, x.dtype, device, arranged.get_device(), form, activation, bias is None
    known = table.calls.get(key) or keep(table.calls, key, _prepare(x, arranged, form, bias, activation))
    if isinstance(known, str):
        raise ArgumentError(known)
    run, shape, rows = known
    start = 0
    if bias is not None:
        bias = bias.float().contiguous()
        start = bias.data_ptr()
    result = x.new_empty(shape)
    if not rows:
        return result
    if not run.workspace:
        run(p, q, result.data_ptr(), _stream_of(device), start)
        return result
    stream = _stream_of(device)
    scratch = torch.empty(run.workspace, dtype=torch.uint8, device=x.device)
    extra = 0, 0, ordered.counters(run.counters, stream, device)
    run(p, q, result.data_ptr(), stream, start, scratch.data_ptr(), None, extra)
    return result


def _prepare(
    x: Any, arranged: Any, form: Format, bias: Any, activation: str | None
) -> tuple[Ready | None, tuple[int, ...], int] | str:
    """Return the launch for tensors like these, the shape of its result and its rows, or why there is none."""
    device, where = x.get_device(), f"cuda:{x.get_device()}"
    if x.shape[-1:] != (form.k,) or (bias is not None and bias.shape != (form.n,)):
        return f"x has shape {tuple(x.shape)}: a weight {form.n} x {form.k} multiplies rows of {form.k}, and has {form.n} biases"
    if arranged.numel() != form.bytes or arranged.element_size() != 1 or not arranged.is_contiguous():
        return f"the arranged weight has {arranged.numel()} elements: one in this format has {form.bytes} adjacent bytes"
    if arranged.data_ptr() % 16 or any(z.get_device() != device for z in (arranged, bias) if z is not None):
        return "an arranged weight begins at a multiple of 16 bytes, and all tensors are on one device: make copies"
    rows, dtype = x.numel() // form.k, TYPES.get(x.dtype, str(x.dtype))
    shape = (*x.shape[:-1], form.n)
    if not rows:
        return None, shape, 0
    run = weights.prepare(
        View(0, (rows, form.k), (2 * form.k, 2), dtype, where),
        form,
        View(0, (rows, form.n), (2 * form.n, 2), dtype, where),
        epilogue_name(bias, activation),
    )
    return run if isinstance(run, str) else (run, shape, rows)
