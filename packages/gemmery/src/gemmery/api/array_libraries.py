"""The fast path of a call on a device: a look-up, three pointers, a launch; a class for each library of arrays.

A class says how arrays of its library are read, where results are allocated, and what the current stream is. Launches
are looked up by element types, shapes, strides, devices and options. What may differ between such arrays is checked
each time: addresses, whether `out` overlaps, whether gradients are recorded. A product of two matrices or vectors that
was not seen before is prepared here too, once the general kernel of its element type is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.device_call import CheckedCall, KnownOptions, keep, table
from gemmery.arrays import View, pytorch
from gemmery.arrays.reading import SHORT
from gemmery.keywords import DEFAULTS
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.api.prepared import TieredLaunch
    from gemmery.cuda.launch import Scalars

Keywords = dict[str, Any]  # the options that a call names
# (a, b, out, the function's name, alpha and beta or None, options or None, addresses of parts of operands that were
# split, what beta multiplies if that is not `out`, or the offsets of groups) -> the result, or None for a call not seen
# before. A call with options but without alpha and beta has them in the table.
FastPath = Callable[..., Any]
PATHS: dict[type, FastPath] = {}  # by the type of a
SPLIT: set[type] = set()  # what gm.split returns, once it is loaded: no array
QUANTIZED: set[type] = set()  # what gm.quantize returns, once it is loaded
# The names when alpha is 1 and beta 0.
PLAIN = {"gemm": "plain gemm", "gemv": "plain gemv", "matmul": "matmul", "grouped_matmul": "grouped_matmul"}
_LARGE = 1e38
_NUMBERS = (int, float)
NO_PARTS = (0, 0)
_ARRAYS = ("bias", "scale_a", "scale_b")  # options that may be arrays


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


def remember(name: str, call: CheckedCall, is_new: bool, keywords: Keywords, served: TieredLaunch) -> None:
    """Use the fast path for calls like this one of the function `name`, if the library of its arrays has one.

    C is a new array or `out`. `keywords` are the options that the call named.
    """
    from gemmery.cuda.launch import packed_scalars

    a, b, c, options = call.a, call.b, call.c, call.options
    library = library_of(a.array)
    if library is None:
        return
    kind = dtypes.get(c.dtype).kind
    if kind == "c" and isinstance(library, Torch):
        return  # a conjugate view has the same address, shape and strides
    out = None if is_new else c.array
    old = call.offsets or (None if options.old is out else call.old)
    others = [z for z in (*call.read[2:], old) if z is not None]
    if options.alpha == 0 or served.form.runs != 1 or any(z.stream != a.stream for z in (b, *others, c)):
        return
    extras = None
    if any(call.parts) or old is not None or keywords.keys() - {"precision"}:  # that one chooses launches alone
        size = dtypes.get(c.dtype).size
        in_place = old is not None and (old.dtype, old.strides) == (c.dtype, c.strides)
        whole = math.prod(c.shape) * size if in_place and c.strides == arrays.contiguous(c.shape, size) else 0
        scalars = packed_scalars(options.alpha, options.beta, c.dtype)
        bias_dtype = library.dtype(dtypes.get(c.dtype).accumulator)
        apart = tuple(_apart(z, c) for z in others)
        extras = KnownOptions(apart, bias_dtype, scalars, in_place, whole, call.offsets is not None)
    if options.alpha == 1 and options.beta == 0:
        name = PLAIN[name]
    elif kind != "f":  # the fast path packs alpha and beta as they are
        return
    named_options = keywords if keywords or any(call.parts) else None
    key = key_of(library, a.array, b.array, out, name, named_options, call.parts, old and old.array)
    if key is None:
        return
    dtype = library.dtype(c.dtype) if is_new else None
    strides = arrays.contiguous(c.shape, 1)
    keep(table.calls, key, KnownCall(served, c.shape, strides, dtype, *_apart(a, c), *_apart(b, c), extras))
    PATHS.update(dict.fromkeys(library.types, library.multiply))


def scaled(a: Any, b: Any, c: Any, out: Any, name: str, alpha: Any, beta: Any, keywords: Keywords) -> Any:
    """alpha a b + beta c by the fast path, for scalars exact in float32; None for others and for unseen products.

    c may be `out`.
    """
    path = PATHS.get(type(a))
    if path is None or type(alpha) not in _NUMBERS or type(beta) not in _NUMBERS:
        return None
    other = None if c is out else c
    if alpha == 1 and beta == 0:
        return path(a, b, out, PLAIN[name], None, keywords or None, NO_PARTS, other)
    exact = 0 < abs(alpha) < _LARGE and abs(beta) < _LARGE and (c is not None or beta == 0)
    return path(a, b, out, name, (alpha, beta), keywords or None, NO_PARTS, other) if exact else None


def _apart(z: View, c: View) -> tuple[int, int]:
    low, high = arrays.reach(z.shape, z.strides, z.dtype)
    bottom, top = arrays.reach(c.shape, c.strides, c.dtype)
    return low - top, high - bottom


def _overlaps(starts: list[int], extras: KnownOptions, r: int) -> bool:
    if extras.in_place and starts == [r]:
        return False
    for start, (low, high) in zip(starts, extras.apart, strict=True):  # noqa: SIM110 # a generator takes longer
        if low < r - start < high:
            return True
    return False


def _never(*_: Any) -> bool:
    return False


def library_of(a: Any) -> Any:
    """Return how to read arrays like `a`; None if their library has no fast path."""
    for name, array, kind in (("torch", "Tensor", Torch), ("cupy", "ndarray", CuPy)):
        module = arrays.library(a, name, array)
        if module is not None:
            return _libraries.get(name) or _libraries.setdefault(name, kind(module))
    return None


_libraries: dict[str, Any] = {}


def _fresh(library: Any, key: Any, a: Any, b: Any, starts: list[int], scalars: Scalars | None) -> KnownCall | None:
    """Prepare and keep the product of two arrays at these addresses into a new one, if `prepare_new` prepares it."""
    from gemmery.api import prepared
    from gemmery.api.device_operands import get_float32_precision

    dtype, *steps = library.steps(a, b) or (None,)
    present = None if dtype is None or (scalars and scalars[1]) else prepared.present(dtype, key[1])
    if present is None or (dtype == "f32" and get_float32_precision() is not None):  # general kernels: plain
        return None
    if scalars and dtypes.get(present.dtype).kind != "f":  # they are packed in another way
        return None
    p, q = starts
    new = prepared.prepare_new(present, key[0], a.shape, steps[0], b.shape, steps[1], p, q, scalars is not None)
    return new and keep(table.calls, key, KnownCall(*new, a.dtype, 0, 0, 0, 0))


def served(a: Any, *call: Any) -> Any:
    """Return what the fast path for arrays like `a` returns; None where there is none."""
    path = PATHS.get(type(a))
    return None if path is None else path(a, *call)


class Torch:
    """How PyTorch's tensors are read and allocated. `multiply` is the fast path for them."""

    def __init__(self, torch: Any) -> None:
        from gemmery.cuda import ordered  # not where products run on the CPU alone

        tensor, self.torch, self._copy = torch.Tensor, torch, ordered.copy
        self.types = tensor, torch.nn.Parameter
        self.address, self.ordinal = tensor.data_ptr, tensor.get_device  # take less than methods of a tensor
        self.stream = torch._C._cuda_getCurrentRawStream
        self.is_unseen, self.written = pytorch.guard(torch), pytorch.version_bump(torch)
        self.empty, self.current = pytorch.device_allocator(torch)
        self.byte = torch.uint8
        self.recording, self.make = torch.is_grad_enabled, pytorch.comparer(torch)
        general = ("f64", "f32", "f16", "bf16", "int32", "int64")
        self._names = {getattr(torch, dtypes.get(name).numpy, name): name for name in general}
        self.multiply = _fast_path(self)

    def dtype(self, name: str) -> Any:
        """Return PyTorch's element type."""
        return getattr(self.torch, dtypes.get(name).numpy)

    def read(self, tensors: Iterable[Any]) -> tuple[list[Any], list[int]] | None:
        """Return what tensors of one device say of themselves, and their addresses.

        None for others, and for tensors whose memory is not what they stand for or whose products are recorded.
        """
        types, grad = self.types, self.torch.is_grad_enabled()
        words: list[Any] = []
        starts: list[int] = []
        try:
            for x in tensors:
                if type(x) not in types or x.is_neg() or (grad and x.requires_grad):
                    return None
                start, where = x.data_ptr(), x.get_device()
                if not words:
                    words.append(where)
                if not start or where < 0 or where != words[0]:
                    return None
                words += x.dtype, x.shape, x.stride(), start & 15
                starts.append(start)
        except RuntimeError:  # a sparse tensor has no memory, a nested one no shape
            return None
        return words, starts

    def words(
        self, name: str, options: Keywords | None, parts: tuple[int, int], c: Any
    ) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
        """Return what the key of a call has of its name and options, and the tensors among these and C.

        "" for a bias that is a number, or other arrays. A call that names options in another order has another key.
        """
        if c is not None and type(c) not in self.types:
            return "", ()
        if options is None:
            return (name, "c"), (c,)
        precision = options.get("precision")
        if type(precision) is str and len(options) == 1 and c is None and parts == NO_PARTS:
            return (name, precision), ()
        words: list[Any] = [name, bool(parts[0]), bool(parts[1]), c is not None]
        types = self.types
        for option, z in options.items():
            kind = type(z)
            if kind in types:
                words.append(option)
            elif z is not DEFAULTS[option]:
                if option in _ARRAYS and (kind not in _NUMBERS or option == "bias"):
                    return "", ()
                words += (option, z, kind)  # 1 is True to a dictionary
        others = [z for z in map(options.get, _ARRAYS) if type(z) in types]
        return tuple(words), (*others, c) if c is not None else tuple(others)

    def steps(self, a: Any, b: Any) -> tuple[str | None, Any, Any] | None:
        """Return gemmery's name of the type of two dense tensors, and their strides in elements; None for others."""
        if b.dtype is not a.dtype or not (a.layout is b.layout is self.torch.strided):
            return None
        return self._names.get(a.dtype), a.stride(), b.stride()

    def elsewhere(self, a: Any, shape: Any, strides: Any, dtype: Any) -> Any:
        """Return a new tensor on the device of another, which need not be the current one."""
        return a.new_empty_strided(shape, strides, dtype=dtype)  # new_empty takes 0.5 us longer

    def run(
        self, run: Any, addresses: tuple[int, int, int], stream: int, workspace: int, extras: KnownOptions,
        options: Any, starts: list[int], parts: tuple[int, int], scalars: Scalars | None, result: Any, c: Any,
    ) -> None:  # fmt: skip
        """Launch a call with options or C; `starts` are the addresses of bias, factors and C that are tensors."""
        extra: tuple[int, ...] = ()
        scalars, start = scalars or extras.scalars, 0
        old = addresses[2] if c is None else starts.pop()
        if extras.is_grouped:
            extra = 0, 0, old
        elif old != addresses[2] and scalars[1]:
            if extras.c_bytes:  # copy_ takes longer on the host
                self._copy(old, addresses[2], extras.c_bytes, stream, run.ordinal)
            else:
                result.copy_(c)
        if options is not None:
            bias = options.get("bias")
            if bias is not None:
                start, *starts = starts
                if bias.dtype is not extras.bias_dtype:
                    bias = bias.to(extras.bias_dtype)
                    start = bias.data_ptr()
            if starts:
                types, scale_a, scale_b = self.types, options.get("scale_a"), options.get("scale_b")
                extra = (
                    starts[0] if type(scale_a) in types else 0,
                    starts[-1] if type(scale_b) in types else 0,
                    *(extra[2:] or (0,)),
                )
            elif any(parts) and any(run.kept):
                extra = parts[0] if run.kept[0] else 0, parts[1] if run.kept[1] else 0, 0
        run(*addresses, stream, start, workspace, scalars, extra)


class CuPy:
    """How CuPy's arrays are read and allocated. `multiply` is the fast path for them, without options."""

    make = run = None  # nothing compares arrays by one call, and no call has options

    def __init__(self, cupy: Any) -> None:
        stream, ndarray = cupy.cuda.get_current_stream, cupy.ndarray
        self.types, self.byte, self.current = (ndarray,), np.dtype(np.uint8), cupy.cuda.device.get_device_id
        self.address, self.ordinal = attrgetter("data.ptr"), attrgetter("device.id")
        self.stream = lambda ordinal: stream(ordinal).ptr
        self.empty = lambda shape, strides, dtype: ndarray(shape, dtype)
        self.is_unseen = self.written = self.recording = _never
        self.multiply = _fast_path(self)

    dtype = staticmethod(arrays.numpy_dtype)

    def elsewhere(self, a: Any, shape: Any, _: Any, dtype: Any) -> Any:
        """Return a new array on the device of another, which need not be the current one."""
        with a.device:
            return type(a)(shape, dtype)

    def read(self, tensors: Iterable[Any]) -> tuple[list[Any], list[int]] | None:
        """Return what arrays of one device say of themselves, and their addresses; None for others."""
        every = tuple(tensors)
        if any(type(x) not in self.types or x.device.id != every[0].device.id for x in every):
            return None
        starts = [x.data.ptr for x in every]
        words = (word for x, p in zip(every, starts, strict=True) for word in (x.dtype, x.shape, x.strides, p & 15))
        return ([every[0].device.id, *words], starts) if all(starts) else None

    def words(self, *_: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return what says that a call with options or another C has no key."""
        return "", ()

    def steps(self, a: Any, b: Any) -> tuple[str | None, Any, Any] | None:
        """Return gemmery's name of the type of two arrays, and their strides in elements; None for others."""
        size = a.dtype.itemsize
        if b.dtype != a.dtype or any(step % size for step in (*a.strides, *b.strides)):
            return None
        each = [tuple(step // size for step in z.strides) for z in (a, b)]
        return SHORT.get(a.dtype), each[0], each[1]


def key_of(
    library: Any, a: Any, b: Any, out: Any, name: str, options: Keywords | None, parts: tuple[int, int] = NO_PARTS,
    c: Any = None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return what identifies a call; None for one that the fast path does not take."""
    rest, others = (name, ()) if options is c is None else library.words(name, options, parts, c)
    reading = library.read((a, b, *others) if out is None else (a, b, out, *others))
    return (rest, *reading[0]) if rest and reading is not None else None


def _look_up(library: Any) -> Callable[..., KnownCall | None]:
    """Return the look-up of calls by what their arrays say of themselves."""
    calls, latest, read = table.calls, table.latest, library.read
    recording, make = library.recording, library.make

    def known(tensors: Any, rest: Any, place: int, odd: int, scalars: Scalars | None) -> Any:
        before = latest.get(place)
        if before is not None and not odd and before[0] == rest and make is not None:
            for z in tensors:
                if z.is_nested:
                    break
            else:
                if before[1](*tensors) and not (before[2] and recording()):
                    return before[3]
        reading = read(tensors)
        if reading is None:
            return None
        words, starts = reading
        key = (rest, *words)
        call = calls.get(key)
        if call is None:
            if type(rest) is not str or len(tensors) > 2:
                return None
            a, b = tensors
            return _fresh(library, key, a, b, starts, scalars)
        if make is not None and not odd and len({*map(id, tensors)}) == len(tensors):
            # Weights stay where they are. Tensors of a call that comes a third time are compared with those of the
            # second by one call, instead of their key: 1 us less on the host of an H200. The address of b and the
            # number of tensors tell nothing but which to try.
            again = before is not None and before[3] is call and before[1] is _never
            tracked = any(x.requires_grad for x in tensors)  # one wants a gradient, which nothing recorded
            keep(latest, place, (rest, make(*tensors) if again else _never, tracked, call))
        return call

    return known


def _fast_path(library: Any) -> FastPath:
    types, byte, run_with_options, words_of = library.types, library.byte, library.run, library.words
    address, ordinal_of, stream_of, is_unseen = library.address, library.ordinal, library.stream, library.is_unseen
    empty, current, elsewhere, written = library.empty, library.current, library.elsewhere, library.written
    known = _look_up(library)

    def multiply(
        a: Any, b: Any, out: Any, name: str, scalars: Scalars | None, options: Keywords | None = None,
        parts: tuple[int, int] = NO_PARTS, c: Any = None,
    ) -> Any:  # fmt: skip
        ordinal = ordinal_of(a)
        if (
            ordinal < 0
            or type(b) not in types
            or (out is not None and type(out) not in types)
            or is_unseen()  # here and below the slow path raises the error
        ):
            return None
        try:
            p, q, r = address(a), address(b), 0 if out is None else address(out)
            if not p or not q or (out is not None and not r):
                return None
            tensors: tuple[Any, ...] = (a, b) if out is None else (a, b, out)
            rest, low = name, p | q | r
            if options is not None or c is not None:
                rest, others = words_of(name, options, parts, c)
                starts = [address(z) for z in others]
                if not rest or 0 in starts:
                    return None
                for start in starts:
                    low |= start
                tensors += others
            call = known(tensors, rest, q + len(tensors), low & 15, scalars)
        except (RuntimeError, TypeError, ValueError):  # a tensor without memory, or an option that has no key
            return None
        if call is None:
            return None
        served, shape, strides, dtype, a_low, a_high, b_low, b_high, extras = call
        if out is not None:
            if (
                a_low < r - p < a_high
                or b_low < r - q < b_high
                or (extras is not None and _overlaps(starts, extras, r))
            ):
                return None
            result = out
        elif empty is not None and current() == ordinal:
            result = empty(shape, strides, dtype)
        else:
            result = elsewhere(a, shape, strides, dtype)
        stream = stream_of(ordinal)
        run = served.next(stream) if served.countdown else served.run
        scratch = elsewhere(a, (run.workspace,), (1,), byte) if run.workspace else None
        workspace, to = 0 if scratch is None else address(scratch), r or address(result)
        if extras is None:
            run(p, q, to, stream, 0, workspace, scalars)
        else:
            run_with_options(run, (p, q, to), stream, workspace, extras, options, starts, parts, scalars, result, c)
        if out is not None:
            written((out,))
        return result

    return multiply
