"""The handler for CUDA devices: Python puts the launches of a product on XLA's stream, as `gemmery.matmul` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmery.api.precision import get_float32_precision
from gemmery.cuda import ordered
from gemmery.jax import frame as frames

if TYPE_CHECKING:
    from gemmery.api.prepared import TieredLaunch

_MOST = 4096
# By key, device, alignment of the addresses, and default precision.
_launches: dict[tuple[Any, ...], TieredLaunch | None] = {}


def handle(frame: int) -> int:
    """Launch the product of a call; return 0, or the address of an error of XLA."""
    try:
        if not frames.answered(frame):
            _launch(frame)
    except BaseException as error:  # nothing may be raised into XLA
        return frames.failed(frame, f"{type(error).__name__}: {error}")
    return 0


def _launch(frame: int) -> None:
    """Put the launches of a call on its stream.

    A product of memory like that of an earlier call is looked up: its views and its plan, made anew each time, would
    take longer than the launch. XLA lets no result overlap an operand.
    """
    stream, (a, b, c) = frames.stream(frame), frames.addresses(frame)
    low, ordinal = (a & 15) << 8 | (b & 15) << 4 | c & 15, ordered.where(c)
    known = frames.key(frame), ordinal, low, get_float32_precision()
    served = _launches.get(known)
    if served is None:
        if len(_launches) >= _MOST:
            _launches.clear()
        _launches[known] = _write(frame, (a, b, c), ordinal, stream)
        return
    run = served.next(stream)
    scratch = ordered.Scratch(run.workspace, stream, ordinal) if run.workspace else None
    for first, second, third in served.form.offsets():
        run(a + first, b + second, c + third, stream, 0, 0 if scratch is None else scratch.pointer)


def _write(frame: int, addresses: tuple[int, int, int], ordinal: int, stream: int) -> TieredLaunch | None:
    """Launch the product of a call; return what ran."""
    from gemmery.api import on_device  # for the first product on a device

    product = frames.product(frame)
    x, y, target = (
        z._replace(pointer=address, device=f"cuda:{ordinal}", stream=stream)
        for z, address in zip(product.operands(), addresses, strict=True)
    )
    return on_device.write(x, y, target, product.precision or None)
