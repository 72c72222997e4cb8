"""The fast path for products on a device: a look-up, three pointers, a launch.

The prepared launch is looked up by element types, shapes, strides and device. What may differ between such arrays is
checked each time: addresses, whether `out` overlaps, whether gradients are recorded. A product of two matrices or
vectors that was not seen before is prepared here too, once the general kernel of its element type is there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gemmery import arrays
from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.api.prepared import TieredLaunch

# (a, b, out, the function's name, alpha and beta or None) -> the result, or None for a product not seen before.
FastPath = Callable[[Any, Any, Any, str, tuple[float, float] | None], Any]
OptionPath = Callable[..., Any]  # a, b, out, options, and addresses of parts of operands that were split -> as those
OPTION_PATHS: dict[type, OptionPath] = {}  # those of quick_options.py, for other products than those of FAST_PATHS
# (the function's name, shape and strides of a, of b, their addresses, whether scaled) -> the first fields of a product
Fresh = Callable[[str, Ints, Ints, Ints, Ints, int, int, bool], "tuple[TieredLaunch, Ints, Ints] | None"]
_MOST = 4096  # products kept for each library


FAST_PATHS: dict[type, FastPath] = {}  # by the type of a
SPLIT: set[type] = set()  # what gm.split returns, once it is loaded: no array


class KnownProduct(NamedTuple):
    """A product seen before."""

    served: TieredLaunch
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of a new result, in elements
    a_low: int  # out overlaps a if the distance in bytes from a's first element to out's is between these two
    a_high: int
    b_low: int
    b_high: int


def remember(a: Any, b: Any, out: Any, name: str, views: tuple[View, View, View], served: TieredLaunch) -> None:
    """Use the fast path for arrays like these, if their library has one; `name` is that of the called function."""
    torch, cupy = arrays.library(a, "torch", "Tensor"), arrays.library(a, "cupy", "ndarray")
    x, y, target = views
    product = KnownProduct(
        served, target.shape, arrays.contiguous(target.shape, 1), *_apart(x, target), *_apart(y, target)
    )
    if torch is not None and type(a) in tensor_types(torch) and type(b) in tensor_types(torch):
        if out is None or type(out) in tensor_types(torch):
            if torch.Tensor not in FAST_PATHS:
                FAST_PATHS.update(dict.fromkeys(tensor_types(torch), _torch_path(torch)))
            _keep(_TENSORS, _tensor_key(a, b, out, name, x.pointer, y.pointer, target.pointer), product)
            _serve(a.dtype, a.get_device(), x)
    elif cupy is not None and type(a) is type(b) is cupy.ndarray and type(out) in (cupy.ndarray, type(None)):
        FAST_PATHS.setdefault(cupy.ndarray, _cupy_path(cupy))
        _keep(_ARRAYS, _array_key(a, b, out, name, x.pointer, y.pointer, target.pointer), product)
        _serve(a.dtype, a.device.id, x)


_TENSORS: dict[tuple[Any, ...], KnownProduct] = {}
_ARRAYS: dict[tuple[Any, ...], KnownProduct] = {}
_FRESH: dict[tuple[Any, int], Fresh] = {}  # by a library's element type and the device


def _serve(dtype: Any, ordinal: int, x: View) -> None:
    """Let new products of this element type be prepared here, if its general kernel is there."""
    from gemmery.api import prepared
    from gemmery.api.precision import get_float32_precision
    from gemmery.cuda import images

    if x.dtype == "f32" and get_float32_precision() is not None:
        return  # general kernels are plain float32
    present = images.present(x.dtype, ordinal)
    if present is not None:
        _FRESH[dtype, ordinal] = partial(prepared.prepare_new, present)


def scaled(a: Any, b: Any, c: Any, out: Any, name: str, alpha: Any, beta: Any) -> Any:
    """alpha a b + beta c by the fast path, where c is out or None, for scalars exact in float32; None for others and
    for unseen products.
    """
    path = FAST_PATHS.get(type(a))
    if path is None or type(alpha) is not float or type(beta) is not float:
        return None
    scalars = None
    if alpha != 1 or beta != 0:
        if not (0 < abs(alpha) < _LARGE and abs(beta) < _LARGE and (c is not None or beta == 0)):
            return None
        scalars = alpha, beta
    else:
        name = PLAIN[name]
    return path(a, b, out, name, scalars)


PLAIN = {"gemm": "plain gemm", "gemv": "plain gemv", "matmul": "matmul"}  # the keys when alpha is 1 and beta 0


_LARGE = 1e38


def forget() -> None:
    """Forget all products: they were prepared with another precision of float32."""
    for products in (_TENSORS, _ARRAYS, _FRESH, _REPEATED, _REPEATED_INTO):
        products.clear()


def counts() -> dict[str, tuple[int, int]]:
    """Return the number of products kept for each library, and the most that are kept."""
    return {"tensors": (len(_TENSORS), _MOST), "arrays": (len(_ARRAYS), _MOST)}


def _keep(products: dict[tuple[Any, ...], KnownProduct], key: tuple[Any, ...], product: KnownProduct) -> None:
    if len(products) >= _MOST:
        products.clear()
    products[key] = product


def _apart(x: View, target: View) -> tuple[int, int]:
    low, high = arrays.reach(x.shape, x.strides, x.dtype)
    bottom, top = arrays.reach(target.shape, target.strides, target.dtype)
    return low - top, high - bottom


def low_bits(p: int, q: int, r: int) -> int:
    """Return three addresses modulo 16, packed in one number."""
    return (p & 15) << 8 | (q & 15) << 4 | r & 15 if (p | q | r) & 15 else 0


def tensor_types(torch: Any) -> tuple[type, ...]:
    """Return the types of tensors that the fast paths take."""
    return torch.Tensor, torch.nn.Parameter


def _tensor_key(a: Any, b: Any, out: Any, name: str, p: int, q: int, r: int) -> tuple[Any, ...]:
    bits = low_bits(p, q, r)
    key = name, a.get_device(), b.get_device(), a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), bits
    return key if out is None else (*key, out.get_device(), out.dtype, out.shape, out.stride())


def _new_of_tensors(
    a: Any, b: Any, key: tuple[Any, ...], p: int, q: int, scalars: tuple[float, float] | None
) -> KnownProduct | None:
    """Prepare and remember the product of two tensors, if `prepare_new` prepares it."""
    prepare = _FRESH.get((a.dtype, a.get_device()))
    if prepare is None or b.dtype is not a.dtype or b.get_device() != a.get_device() or (scalars and scalars[1]):
        return None
    new = prepare(key[0], a.shape, a.stride(), b.shape, b.stride(), p, q, scalars is not None)
    if new is None:
        return None
    product = KnownProduct(*new, 0, 0, 0, 0)
    _keep(_TENSORS, key, product)
    return product


class Repeated(NamedTuple):
    """A product of tensors that came before, at addresses that are multiples of 16."""

    name: str
    alike: Callable[..., bool]  # of tensors, the result last where the caller passes it
    product: KnownProduct
    tracked: bool  # whether one of the tensors wants a gradient, which nothing recorded


# The last product of each b, by id(b): weights stay, and ids of other tensors come back. Its tensors are compared by
# one call, instead of their key: 1 us less on the host of an H200. An id tells nothing but which product to try.
_REPEATED: dict[int, Repeated] = {}  # into new arrays
_REPEATED_INTO: dict[int, Repeated] = {}


def _torch_path(torch: Any) -> FastPath:
    stream_of, recording = torch._C._cuda_getCurrentRawStream, torch.is_grad_enabled
    tensors, byte, new, into = tensor_types(torch), torch.uint8, _REPEATED, _REPEATED_INTO
    tracing, modes, transforms = arrays.recorders(torch)
    forward, written = torch.autograd.forward_ad, arrays.version_bump(torch)
    known = _known(torch)
    empty, current = arrays.device_allocator(torch)

    def multiply(a: Any, b: Any, out: Any, name: str, scalars: tuple[float, float] | None) -> Any:
        ordinal = a.get_device()
        if ordinal < 0 or type(b) not in tensors or (out is not None and type(out) not in tensors):
            return None
        if modes() or tracing() or transforms() or forward._current_level >= 0:  # the slow path raises the error
            return None
        try:
            p, q, r = a.data_ptr(), b.data_ptr(), 0 if out is None else out.data_ptr()
        except RuntimeError:  # a sparse tensor: the slow path raises the error
            return None
        if not p or not q or (out is not None and not r):
            return None
        last, product = (new if out is None else into).get(id(b)), None
        aligned = not (p | q | r) & 15
        if last is not None and aligned and not (a.is_nested or b.is_nested or (out is not None and out.is_nested)):
            called, alike, product, tracked = last
            same = called is name and (alike(a, b) if out is None else alike(a, b, out))
            if not same or (tracked and recording()):
                product = None
        if product is None:
            product = known(a, b, out, p, q, r, name, scalars)
            if product is None:
                return None
        served, shape, strides, a_low, a_high, b_low, b_high = product
        if out is not None:
            if a_low < r - p < a_high or b_low < r - q < b_high:
                return None
            result = out
        elif empty is not None and current() == ordinal:
            result = empty(shape, strides, a.dtype)
        else:
            result = a.new_empty_strided(shape, strides)  # new_empty takes 0.5 us longer
        stream = stream_of(ordinal)
        run = served.next(stream) if served.countdown else served.run
        scratch = a.new_empty((run.workspace,), dtype=byte) if run.workspace else None
        run(p, q, r or result.data_ptr(), stream, 0, 0 if scratch is None else scratch.data_ptr(), scalars)
        if out is not None:
            written((out,))
        return result

    return multiply


def _known(torch: Any) -> Callable[..., KnownProduct | None]:
    """Return the look-up of a product of tensors, which prepares products that `prepare_new` prepares."""
    products, recording, strided, make = _TENSORS, torch.is_grad_enabled, torch.strided, arrays.comparer(torch)

    def note(repeated: dict[int, Repeated], name: str, product: KnownProduct, tensors: tuple[Any, ...]) -> None:
        if make is None or len({*map(id, tensors)}) < len(tensors):
            return
        if len(repeated) >= _MOST:
            repeated.clear()
        tracked = any(x.requires_grad for x in tensors)
        repeated[id(tensors[1])] = Repeated(name, make(*tensors), product, tracked)

    def known(
        a: Any, b: Any, out: Any, p: int, q: int, r: int, name: str, scalars: tuple[float, float] | None
    ) -> KnownProduct | None:
        try:
            key = _tensor_key(a, b, out, name, p, q, r)
        except RuntimeError:  # a nested tensor has no shape: the slow path raises the error
            return None
        product = products.get(key)
        if ((a.requires_grad or b.requires_grad) and recording()) or a.is_neg() or b.is_neg():
            return None
        if out is not None and ((out.requires_grad and recording()) or out.is_neg()):
            return None
        if product is None:
            fresh = out is None and a.layout is b.layout is strided
            return _new_of_tensors(a, b, key, p, q, scalars) if fresh else None
        if not (p | q | r) & 15:
            if out is None:
                note(_REPEATED, name, product, (a, b))
            else:
                note(_REPEATED_INTO, name, product, (a, b, out))
        return product

    return known


def _array_key(a: Any, b: Any, out: Any, name: str, p: int, q: int, r: int) -> tuple[Any, ...]:
    bits = low_bits(p, q, r)
    key = name, a.device.id, b.device.id, a.dtype, b.dtype, a.shape, b.shape, a.strides, b.strides, bits
    return key if out is None else (*key, out.device.id, out.dtype, out.shape, out.strides)


def _new_of_arrays(
    a: Any, b: Any, key: tuple[Any, ...], p: int, q: int, scalars: tuple[float, float] | None
) -> KnownProduct | None:
    """Prepare and remember the product of two arrays, if `prepare_new` prepares it."""
    prepare = _FRESH.get((a.dtype, a.device.id))
    if prepare is None or b.dtype != a.dtype or b.device.id != a.device.id or (scalars and scalars[1]):
        return None
    size, steps = a.dtype.itemsize, (*a.strides, *b.strides)
    if any(step % size for step in steps):
        return None
    each = tuple(step // size for step in steps)
    new = prepare(key[0], a.shape, each[: a.ndim], b.shape, each[a.ndim :], p, q, scalars is not None)
    if new is None:
        return None
    product = KnownProduct(*new, 0, 0, 0, 0)
    _keep(_ARRAYS, key, product)
    return product


def _cupy_path(cupy: Any) -> FastPath:
    stream_of, current, ndarray = cupy.cuda.get_current_stream, cupy.cuda.device.get_device_id, cupy.ndarray
    products = _ARRAYS

    def multiply(a: Any, b: Any, out: Any, name: str, scalars: tuple[float, float] | None) -> Any:
        if type(b) is not ndarray or (out is not None and type(out) is not ndarray):
            return None
        p, q, r = a.data.ptr, b.data.ptr, 0 if out is None else out.data.ptr
        if not p or not q or (out is not None and not r) or (out is None and a.device.id != current()):
            return None
        key = _array_key(a, b, out, name, p, q, r)
        product = products.get(key) or (_new_of_arrays(a, b, key, p, q, scalars) if out is None else None)
        if product is None:
            return None
        if out is not None and (product.a_low < r - p < product.a_high or product.b_low < r - q < product.b_high):
            return None
        served, stream = product.served, stream_of(a.device.id).ptr
        run = served.next(stream) if served.countdown else served.run
        if run.workspace and out is not None and a.device.id != current():
            return None
        result = ndarray(product.shape, a.dtype) if out is None else out
        scratch = ndarray((run.workspace,), "u1") if run.workspace else None
        run(p, q, result.data.ptr, stream, 0, 0 if scratch is None else scratch.data.ptr, scalars)
        return result

    return multiply
