"""The fast path of a call on a device: a look-up, three pointers, a launch; a class for each library of arrays.

A class says how arrays of its library are read, where results are allocated, and what the current stream is. Launches
are looked up by element types, shapes, strides, devices and options. What may differ between such arrays is checked
each time: addresses, whether `out` overlaps, whether gradients are recorded. A product of two matrices or vectors that
was not seen before is prepared here too, once the general kernel of its element type is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemmery import arrays, dtypes
from gemmery.api.device_call import keep, low_bits, table
from gemmery.arrays import View, pytorch
from gemmery.arrays.reading import SHORT
from gemmery.keywords import DEFAULTS, Options
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.api.device_operands import Inputs
    from gemmery.api.prepared import TieredLaunch
    from gemmery.cuda.launch import Scalars

Keywords = dict[str, Any]  # the options that a call names
# (a, b, out, the function's name, alpha and beta or None, options or None, addresses of parts of operands that were
# split) -> the result, or None for a call not seen before. A call with options has its scalars in the table.
FastPath = Callable[..., Any]
PATHS: dict[type, FastPath] = {}  # by the type of a
SPLIT: set[type] = set()  # what gm.split returns, once it is loaded: no array
QUANTIZED: set[type] = set()  # what gm.quantize returns, once it is loaded
PLAIN = {"gemm": "plain gemm", "gemv": "plain gemv", "matmul": "matmul"}  # the names when alpha is 1 and beta 0
_LARGE = 1e38
_NUMBERS = (int, float)
NO_PARTS = (0, 0)
_ARRAYS = ("bias", "scale_a", "scale_b")  # options that may be arrays


class KnownOptions(NamedTuple):
    """What a call with options has besides."""

    apart: tuple[tuple[int, int], ...]  # as of A and B, of bias and factors that are arrays
    bias_dtype: Any  # in which a kernel reads a bias
    scalars: Scalars


class KnownCall(NamedTuple):
    """A call seen before."""

    served: TieredLaunch
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of a new result, in elements
    dtype: Any  # of a new result
    a_low: int  # out overlaps a if the distance in bytes from a's first element to out's is between these two
    a_high: int
    b_low: int
    b_high: int
    options: KnownOptions | None = None


def remember(
    name: str, inputs: Inputs, target: View, is_new: bool, options: Options, keywords: Keywords, served: TieredLaunch
) -> None:
    """Use the fast path for calls like this one of the function `name`, if the library of its arrays has one.

    `target` is the result, a new array or `out`. `keywords` are the options that the call named.
    """
    from gemmery.cuda.launch import packed_scalars

    library = _library_of(inputs.x.array)
    if library is None:
        return
    kind = dtypes.get(target.dtype).kind
    if kind == "c" and isinstance(library, Torch):
        return  # a conjugate view has the same address, shape and strides
    x, y, *others = (z for z in inputs.read if z is not None)
    a, b, out = x.array, y.array, None if is_new else target.array
    if any(type(z) not in library.types for z in ((a, b) if is_new else (a, b, out))):
        return  # a subclass has arithmetic of its own
    if options.alpha == 0 or served.form.runs != 1 or any(z.stream != x.stream for z in (y, *others, target)):
        return
    words: tuple[Any, ...] | None = ()
    extras, scalars = None, packed_scalars(options.alpha, options.beta, target.dtype)
    if any(inputs.parts) or keywords:
        words = library.words(keywords, inputs.parts) if name == "matmul" else None
        bias_dtype = library.dtype(dtypes.get(target.dtype).accumulator)
        extras = KnownOptions(tuple(_apart(z, target) for z in others), bias_dtype, scalars)
    elif options.alpha == 1 and options.beta == 0:
        name = PLAIN[name]
    elif kind != "f":  # the fast path packs alpha and beta as they are
        return
    if words is None or (options.old is not None and (is_new or options.old is not out)):
        return
    key = (*library.key(a, b, out, name, x.pointer, y.pointer, 0 if is_new else target.pointer), *words)
    dtype, strides = library.dtype(target.dtype) if is_new else None, arrays.contiguous(target.shape, 1)
    call = KnownCall(served, target.shape, strides, dtype, *_apart(x, target), *_apart(y, target), extras)
    keep(table.calls, key, call)
    PATHS.update(dict.fromkeys(library.types, library.multiply))


def scaled(a: Any, b: Any, c: Any, out: Any, name: str, alpha: Any, beta: Any) -> Any:
    """alpha a b + beta c by the fast path, where c is out or None, for scalars exact in float32; None for others and
    for unseen products.
    """
    path = PATHS.get(type(a))
    if path is None or type(alpha) is not float or type(beta) is not float:
        return None
    if alpha == 1 and beta == 0:
        return path(a, b, out, PLAIN[name], None)
    exact = 0 < abs(alpha) < _LARGE and abs(beta) < _LARGE and (c is not None or beta == 0)
    return path(a, b, out, name, (alpha, beta)) if exact else None


def _apart(x: View, target: View) -> tuple[int, int]:
    low, high = arrays.reach(x.shape, x.strides, x.dtype)
    bottom, top = arrays.reach(target.shape, target.strides, target.dtype)
    return low - top, high - bottom


def _overlaps(starts: list[int], apart: tuple[tuple[int, int], ...], r: int) -> bool:
    for start, (low, high) in zip(starts, apart, strict=True):  # noqa: SIM110 # a generator takes longer
        if low < r - start < high:
            return True
    return False


def _library_of(a: Any) -> Any:
    """Return how to read arrays like `a`; None if their library has no fast path."""
    for name, array, kind in (("torch", "Tensor", Torch), ("cupy", "ndarray", CuPy)):
        module = arrays.library(a, name, array)
        if module is not None:
            return _libraries.get(name) or _libraries.setdefault(name, kind(module))
    return None


_libraries: dict[str, Any] = {}


def _preparing() -> Callable[..., KnownCall | None]:
    """Return a function that prepares and keeps the product of two new arrays, if `prepare_new` prepares it.

    It takes the key, the element type, the device, shape and strides in elements of both, their addresses, and alpha
    and beta or None.
    """
    from gemmery.api import prepared
    from gemmery.api.device_operands import get_float32_precision
    from gemmery.api.prepared import prepare_new

    def fresh(key: Any, dtype: str | None, ordinal: int, a: Any, a_step: Any, b: Any, b_step: Any, p: int, q: int,
              scalars: Scalars | None) -> KnownCall | None:  # fmt: skip
        present = None if dtype is None or (scalars and scalars[1]) else prepared.present(dtype, ordinal)
        if present is None or (dtype == "f32" and get_float32_precision() is not None):  # general kernels: plain
            return None
        if scalars and dtypes.get(present.dtype).kind != "f":  # they are packed in another way
            return None
        new = prepare_new(present, key[0], a, a_step, b, b_step, p, q, scalars is not None)
        return new and keep(table.calls, key, KnownCall(*new, key[3], 0, 0, 0, 0))

    return fresh


class Torch:
    """PyTorch's tensors. `multiply` is the fast path for them."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.types = torch.Tensor, torch.nn.Parameter
        self.multiply = self._path()

    def dtype(self, name: str) -> Any:
        """Return PyTorch's element type."""
        return getattr(self.torch, dtypes.get(name).numpy)

    @staticmethod
    def key(a: Any, b: Any, out: Any, name: str, p: int, q: int, r: int) -> tuple[Any, ...]:
        """Return what identifies a call without options, by the addresses of its tensors."""
        bits = low_bits(p, q, r)
        key = name, a.get_device(), b.get_device(), a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), bits
        return key if out is None else (*key, out.get_device(), out.dtype, out.shape, out.stride())

    def words(self, options: Keywords, parts: tuple[int, int]) -> tuple[Any, ...] | None:
        """Return what the key of a call has of its options; None for a bias that is a number, or for other arrays.

        A call that names them in another order has another key.
        """
        words: list[Any] = [] if parts == NO_PARTS else [bool(parts[0]), bool(parts[1])]
        types = self.types
        for name, z in options.items():
            kind = type(z)
            if kind in types:
                words += (name, z.get_device(), z.dtype, z.shape, z.stride())
            elif z is not DEFAULTS[name]:
                if name in _ARRAYS and (kind not in _NUMBERS or name == "bias"):
                    return None
                words += (name, z, kind)  # 1 is True to a dictionary
        return tuple(words)

    def _look_ups(self) -> tuple[Callable[..., KnownCall | None], Callable[..., tuple[KnownCall | None, list[int]]]]:
        """Return the look-ups of calls by their keys: without options, and with them."""
        calls, recording, strided, types = table.calls, self.torch.is_grad_enabled, self.torch.strided, self.types
        key_of, words_of, fresh, make = self.key, self.words, _preparing(), pytorch.comparer(self.torch)
        served = ("f64", "f32", "f16", "bf16", "int32", "int64")
        names = {getattr(self.torch, dtypes.get(name).numpy, name): name for name in served}  # of general kernels

        def known(a: Any, b: Any, out: Any, p: int, q: int, r: int, name: str, scalars: Scalars | None) -> Any:
            try:
                key = key_of(a, b, out, name, p, q, r)
            except RuntimeError:  # a nested tensor has no shape
                return None
            call = calls.get(key)
            if ((a.requires_grad or b.requires_grad) and recording()) or a.is_neg() or b.is_neg():
                return None
            if out is not None and ((out.requires_grad and recording()) or out.is_neg()):
                return None
            if call is None:
                dense = a.layout is b.layout is strided
                if out is not None or not dense or b.dtype is not a.dtype or b.get_device() != a.get_device():
                    return None
                operands = a.shape, a.stride(), b.shape, b.stride(), p, q
                return fresh(key, names.get(a.dtype), a.get_device(), *operands, scalars)
            tensors = (a, b) if out is None else (a, b, out)
            if make is not None and not (p | q | r) & 15 and len({*map(id, tensors)}) == len(tensors):
                # Weights stay, and ids of other tensors come back. The tensors of the next call are compared by one
                # call instead of their key: 1 us less on the host of an H200. An id tells nothing but which to try.
                tracked = any(x.requires_grad for x in tensors)  # one wants a gradient, which nothing recorded
                keep(table.latest[out is not None], id(b), (name, make(*tensors), call, tracked))
            return call

        def optional(
            a: Any, b: Any, out: Any, p: int, q: int, r: int, name: str, options: Keywords, parts: tuple[int, int]
        ) -> tuple[KnownCall | None, list[int]]:
            others: list[Any] = [z for z in map(options.get, _ARRAYS) if type(z) in types]
            try:
                call = calls.get((*key_of(a, b, out, name, p, q, r), *words_of(options, parts)))  # type: ignore[misc]
                starts = [z.data_ptr() for z in others]
            except (RuntimeError, TypeError):  # a tensor without memory, or an option that has no key
                return None, []
            grad = recording()
            for z in (a, b, *others) if out is None else (a, b, out, *others):
                if z.is_neg() or (grad and z.requires_grad):
                    return None, []
            return (call, starts) if all(starts) else (None, [])

        return known, optional

    def _run(
        self, run: Any, addresses: tuple[int, int, int], stream: int, workspace: int, extras: KnownOptions,
        options: Any, starts: list[int], parts: tuple[int, int],
    ) -> None:  # fmt: skip
        """Launch a call with options; `starts` are the addresses of bias and factors that are tensors."""
        extra: tuple[int, ...] = ()
        bias, start = options.get("bias"), 0
        if bias is not None:
            start, *starts = starts
            if bias.dtype is not extras.bias_dtype:
                bias = bias.to(extras.bias_dtype)
                start = bias.data_ptr()
        if starts:
            types, scale_a, scale_b = self.types, options.get("scale_a"), options.get("scale_b")
            extra = starts[0] if type(scale_a) in types else 0, starts[-1] if type(scale_b) in types else 0, 0
        elif any(parts) and any(run.kept):
            extra = parts[0] if run.kept[0] else 0, parts[1] if run.kept[1] else 0, 0
        run(*addresses, stream, start, workspace, extras.scalars, extra)

    def _path(self) -> FastPath:
        torch, types, byte, new, into = self.torch, self.types, self.torch.uint8, *table.latest
        stream_of, recording = torch._C._cuda_getCurrentRawStream, torch.is_grad_enabled
        tracing, modes, transforms = pytorch.recorders(torch)
        forward, written = torch.autograd.forward_ad, pytorch.version_bump(torch)
        empty, current = pytorch.device_allocator(torch)
        known, optional = self._look_ups()
        run_with_options = self._run

        def multiply(
            a: Any, b: Any, out: Any, name: str, scalars: Scalars | None, options: Keywords | None = None,
            parts: tuple[int, int] = NO_PARTS,
        ) -> Any:  # fmt: skip
            ordinal = a.get_device()
            if (
                ordinal < 0
                or type(b) not in types
                or (out is not None and type(out) not in types)
                or modes()  # here and below the slow path raises the error
                or tracing()
                or transforms()
                or forward._current_level >= 0
            ):
                return None
            try:
                p, q, r = a.data_ptr(), b.data_ptr(), 0 if out is None else out.data_ptr()
            except RuntimeError:  # a sparse tensor
                return None
            if not p or not q or (out is not None and not r):
                return None
            if options is None:
                call = None
                last: Any = (new if out is None else into).get(id(b))
                if (
                    last is not None
                    and not (p | q | r) & 15
                    and not (a.is_nested or b.is_nested or (r and out.is_nested))
                ):
                    called, alike, call, tracked = last
                    same = called is name and (alike(a, b) if out is None else alike(a, b, out))
                    if not same or (tracked and recording()):
                        call = None
                call = call or known(a, b, out, p, q, r, name, scalars)
            else:
                call, starts = optional(a, b, out, p, q, r, name, options, parts)
            if call is None:
                return None
            served, shape, strides, dtype, a_low, a_high, b_low, b_high, extras = call
            if out is not None:
                if (
                    a_low < r - p < a_high
                    or b_low < r - q < b_high
                    or (extras is not None and _overlaps(starts, extras.apart, r))
                ):
                    return None
                result = out
            elif empty is not None and current() == ordinal:
                result = empty(shape, strides, dtype)
            else:
                result = a.new_empty_strided(shape, strides, dtype=dtype)  # new_empty takes 0.5 us longer
            stream = stream_of(ordinal)
            run = served.next(stream) if served.countdown else served.run
            scratch = a.new_empty((run.workspace,), dtype=byte) if run.workspace else None
            workspace = 0 if scratch is None else scratch.data_ptr()
            if extras is None:
                run(p, q, r or result.data_ptr(), stream, 0, workspace, scalars)
            else:
                run_with_options(run, (p, q, r or result.data_ptr()), stream, workspace, extras, options, starts, parts)
            if out is not None:
                written((out,))
            return result

        return multiply


class CuPy:
    """CuPy's arrays. `multiply` is the fast path for them, without options."""

    def __init__(self, cupy: Any) -> None:
        self.types = (cupy.ndarray,)
        self._fresh = _preparing()
        self.multiply = self._path(cupy)

    dtype = staticmethod(arrays.numpy_dtype)

    @staticmethod
    def key(a: Any, b: Any, out: Any, name: str, p: int, q: int, r: int) -> tuple[Any, ...]:
        """Return what identifies a call, by the addresses of its arrays."""
        bits = low_bits(p, q, r)
        key = name, a.device.id, b.device.id, a.dtype, b.dtype, a.shape, b.shape, a.strides, b.strides, bits
        return key if out is None else (*key, out.device.id, out.dtype, out.shape, out.strides)

    @staticmethod
    def words(options: Keywords, parts: tuple[int, int]) -> tuple[Any, ...] | None:
        """Return None: calls with options are not looked up."""
        return None

    def _new(self, a: Any, b: Any, key: tuple[Any, ...], p: int, q: int, scalars: Scalars | None) -> KnownCall | None:
        size, steps = a.dtype.itemsize, (*a.strides, *b.strides)
        if b.dtype != a.dtype or b.device.id != a.device.id or any(step % size for step in steps):
            return None
        each = tuple(step // size for step in steps)
        operands = a.shape, each[: a.ndim], b.shape, each[a.ndim :], p, q
        return self._fresh(key, SHORT.get(a.dtype), a.device.id, *operands, scalars)

    def _path(self, cupy: Any) -> FastPath:
        stream_of, current, ndarray = cupy.cuda.get_current_stream, cupy.cuda.device.get_device_id, cupy.ndarray
        calls, key_of = table.calls, self.key

        def multiply(
            a: Any, b: Any, out: Any, name: str, scalars: Scalars | None, options: Keywords | None = None,
            parts: tuple[int, int] = NO_PARTS,
        ) -> Any:  # fmt: skip
            if options is not None or type(b) is not ndarray or (out is not None and type(out) is not ndarray):
                return None
            p, q, r = a.data.ptr, b.data.ptr, 0 if out is None else out.data.ptr
            if not p or not q or (out is not None and not r) or (out is None and a.device.id != current()):
                return None
            key = key_of(a, b, out, name, p, q, r)
            call = calls.get(key) or (self._new(a, b, key, p, q, scalars) if out is None else None)
            if call is None:
                return None
            if out is not None and (call.a_low < r - p < call.a_high or call.b_low < r - q < call.b_high):
                return None
            served, stream = call.served, stream_of(a.device.id).ptr
            run = served.next(stream) if served.countdown else served.run
            if run.workspace and out is not None and a.device.id != current():
                return None
            result = ndarray(call.shape, call.dtype) if out is None else out
            scratch = ndarray((run.workspace,), "u1") if run.workspace else None
            run(p, q, result.data.ptr, stream, 0, 0 if scratch is None else scratch.data.ptr, scalars)
            return result

        return multiply
