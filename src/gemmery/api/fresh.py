"""The short path for products of new shapes: two matrices or vectors on a device, into a new array.

Once the general kernel of an element type is there, nothing else is needed: a launch is its argument.
"""

from __future__ import annotations

from gemmery import arrays, dtypes
from gemmery.api.halved import Halved
from gemmery.api.prepared import TieredLaunch, leaves_to_general, often, specialised
from gemmery.arrange import Arrangement, Ints, result_shape
from gemmery.arrays import View
from gemmery.cuda.images import Images
from gemmery.cuda.launch import Ready

_DIMENSIONS = {
    "matmul": {(1, 1), (1, 2), (2, 1), (2, 2)},
    "gemm": {(2, 2)},
    "plain gemm": {(2, 2)},
    "gemv": {(2, 1)},
    "plain gemv": {(2, 1)},
}  # of the operands of each function that are prepared here
_LARGEST = 1_000_000_000  # longest side prepared here
_ALONE = Arrangement(0, 0, 0, 1, (0, 0, 0), (0, 0, 0), (0, 0, 0))  # no loop around the product


def prepare(
    images: Images, name: str, a: Ints, a_step: Ints, b: Ints, b_step: Ints, p: int, q: int, scaled: bool
) -> tuple[TieredLaunch, Ints, Ints] | None:
    """Return the launch of the function `name` for operands of these shapes and strides in elements, and the shape
    and strides of the result; None for other products. `p` and `q` are the addresses of the operands.
    """
    if (len(a), len(b)) not in _DIMENSIONS[name]:
        return None
    m, k, a_row, a_col = (*a, *a_step) if len(a) == 2 else (1, *a, 0, *a_step)
    depth, n, b_row, b_col = (*b, *b_step) if len(b) == 2 else (*b, 1, *b_step, 0)
    if k != depth or not m or not n or not k or max(m, n, k) > _LARGEST:
        return None
    device = f"cuda:{images.ordinal}"
    if not leaves_to_general(images.dtype, device, m, n, k):
        return None
    run = images.ready(m, n, k, (a_row, a_col), (b_row, b_col), (n, 1), p | q)
    terms = images.dtype, images.ordinal, a, a_step, b, b_step, p & 15, q & 15, scaled
    shape = (*a[:-1], *b[1:])
    soon = often(images.dtype, device, 2 * m * n * k)
    return TieredLaunch(_ALONE, run, _better, terms, soon), shape, (n, 1) if len(shape) == 2 else (1,) * len(shape)


def _better(
    dtype: str, ordinal: int, a: Ints, a_step: Ints, b: Ints, b_step: Ints, p: int, q: int, scaled: bool
) -> Ready | Halved:
    """Return the launches made for such a product."""
    size, device = dtypes.get(dtype).size, f"cuda:{ordinal}"
    x, y = (
        View(address, tuple(shape), tuple(size * step for step in steps), dtype, device)
        for shape, steps, address in ((a, a_step, p), (b, b_step, q))
    )
    shape = result_shape(x.shape, y.shape)
    target = View(0, shape, arrays.contiguous(shape, size), dtype, device)
    return specialised(x, y, target, None, "", scaled, "", None, False).run
