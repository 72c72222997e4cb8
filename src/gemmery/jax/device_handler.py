"""The handler for CUDA devices: Python puts the launches of a product on XLA's stream, as `gemmery.matmul` does."""

from __future__ import annotations

from gemmery.jax import frame as frames


def handle(frame: int) -> int:
    """Launch the product of a call; return 0, or the address of an error of XLA."""
    try:
        if not frames.answered(frame):
            _launch(frame)
    except BaseException as error:  # nothing may be raised into XLA
        return frames.failed(frame, f"{type(error).__name__}: {error}")
    return 0


def _launch(frame: int) -> None:
    from gemmery.api import on_device  # for the first product on a device
    from gemmery.cuda import ordered

    product, stream, addresses = frames.product(frame), frames.stream(frame), frames.addresses(frame)
    device = f"cuda:{ordered.where(addresses[2])}"
    x, y, target = (
        z._replace(pointer=address, device=device, stream=stream)
        for z, address in zip(product.operands(), addresses, strict=True)
    )
    on_device.write(x, y, target)
