"""warm(): compiles and stores the kernels that products will need, before a program runs; a GPU need not be present."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

from gemmery import cache, config
from gemmery import dtypes as known
from gemmery.api import options
from gemmery.api.promote import can_cast, kernel_types
from gemmery.cpu import target
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.ir import Module
from gemmery.cuda import driver, nvrtc
from gemmery.cuda.geometry import Geometry
from gemmery.dispatch import choice
from gemmery.dispatch.cuda import copies_tensors, general
from gemmery.errors import ArgumentError, CacheError, CompileError, DeviceError, DTypeError, RefusedError, brief
from gemmery.keywords import ACTIVATIONS
from gemmery.problem import Problem

Progress = Callable[[int, int, str], object]


@dataclass(frozen=True)
class Warmed:
    """What `warm` did.

    >>> print(Warmed(compiled=3, there=2, bytes=81920, seconds=0.25, folder="/var/cache/gemmery"))
    compiled 3 kernels in 0.25 s, 2 were there: 80 KiB in /var/cache/gemmery
    """

    compiled: int  # kernels
    there: int  # kernels that the cache had already
    bytes: int  # of all of them on disk
    seconds: float
    folder: str

    def __str__(self) -> str:
        count = f"{self.compiled} kernel{'s' * (self.compiled != 1)}"
        size = f"{self.bytes / 1024:,.0f} KiB in {self.folder}"
        return f"compiled {count} in {self.seconds:.2g} s, {self.there} were there: {size}"


class WarmImage(NamedTuple):
    """A kernel to be made."""

    name: str
    size: Callable[[], int]  # bytes on disk, 0 if it is not there
    make: Callable[[], object]


def warm(
    dtypes: Any = None, device: str = "cpu", *, threads: int | None = None, progress: Progress | None = None
) -> Warmed:
    """Compile and store the kernels of these element types, so that no product waits for the compiler.

    >>> gm.warm(["float32", "int8"])  # doctest: +SKIP
    Warmed(compiled=17, there=2, bytes=562144, seconds=0.91, folder='/var/cache/gemmery')

    Afterwards no product of these types on the CPU waits for a compilation, whatever its shape, strides and options, in
    this process or in another of this user on the same kind of CPU. Kernels for one shape are still compiled in the
    background for products that come back often; with GEMMERY_TIERS=off products wait for those.

    Parameters
    ----------
    dtypes : element type or list of them, optional
        As for `dtype=` of `matmul`. Default: all of the device.
    device : str
        "cpu", or a GPU: "cuda" for the one here, a card such as "h200", or "sm_90". A card need not be present. Its
        general kernels are made, and the specialized ones of aligned products.
    threads : int, optional
        Kernels compiled at the same time. Default: one for each core that this process may use.
    progress : callable, optional
        Called with (kernels done, kernels in all, name) after each kernel.

    Raises CacheError if kernels cannot be stored, DTypeError, DeviceError and ArgumentError for wrong arguments.
    """
    began = time.perf_counter()
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress={brief(progress)}: pass a function of (kernels done, kernels in all, name)")
    count = target.cores() if threads is None else cpu_threads.checked(threads)
    images = list(_images(dtypes, device, count))
    folder = _folder()
    missing = [image for image in images if not image.size()]
    _make(missing, count, len(images), progress)
    sizes = [image.size() for image in images]
    if not all(sizes):
        from gemmery.cpu import jit

        rule = jit.reason() or cache.unusable(folder) or cache.FULL
        raise CacheError(f"{folder}: kernels were compiled but not stored: {rule}")
    seconds = time.perf_counter() - began
    return Warmed(len(missing), len(images) - len(missing), sum(sizes), seconds, folder)


def _images(names: Any, device: str, threads: int) -> Iterator[WarmImage]:
    """Yield every image, once. Raises the errors of wrong arguments."""
    if not isinstance(device, str):
        raise ArgumentError(f"device={brief(device)} must be a name: 'cpu', 'cuda', or a card such as 'h200'")
    if device == "cpu":
        return _of_cpu(_dtype_names(names, known.BY_NAME, device))
    return images(_dtype_names(names, types(device), device), device, threads > 1)


def _dtype_names(names: Any, supported: Iterable[str], device: str) -> tuple[str, ...]:
    """Return gemmery's names of element types, one or several, in any spelling."""
    supported = tuple(supported)
    if names is None:
        return supported
    several = names if isinstance(names, list | tuple | set | frozenset) else [names]
    selected = tuple(dict.fromkeys(_dtype_name(name) for name in several))
    for name in selected:
        if name not in supported:
            raise DTypeError(f"there are no kernels of {name} for {device}, only of {', '.join(supported)}")
    return selected


def _dtype_name(dtype: Any) -> str:
    """As `options.dtype_name`, for operands: 8-bit floating-point types too."""
    if dtype is None:  # NumPy's name for float64
        raise DTypeError("a dtype is None: name a type, such as 'float32', or leave dtypes out for all")
    text = str(dtype).removeprefix("torch.") if isinstance(dtype, str) or hasattr(dtype, "itemsize") else ""
    float8 = next((name for name in known.FLOAT8 if text in (name, known.get(name).numpy)), "")
    return float8 or options.dtype_name(dtype)


def _folder() -> str:
    """Return the cache folder. Raises CacheError if nothing can be stored there."""
    folder = config.cache_dir()
    if folder is None:
        raise CacheError("there is no home folder, so no place for kernels: set HOME, or GEMMERY_CACHE_DIR to a folder")
    rule = cache.unusable(folder)
    if rule:
        raise CacheError(f"{folder}: kernels cannot be stored there: {rule}")
    return folder


def _make(images: list[WarmImage], threads: int, total: int, progress: Progress | None) -> None:
    done = total - len(images)
    if progress is not None:
        progress(done, total, "")
    with ThreadPoolExecutor(threads, "gemmery-warm") as pool:
        futures = {pool.submit(image.make): image.name for image in images}
        try:
            for future in as_completed(futures):
                future.result()
                done += 1
                if progress is not None:
                    progress(done, total, futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _of_cpu(names: tuple[str, ...]) -> Iterator[WarmImage]:
    """Yield the images of products on the CPU, those that every product needs first."""
    from gemmery.cpu import entry_code, jit, pool_code
    from gemmery.cpu.images import serving

    host = target.host()
    if not jit.keeps(host):
        raise CacheError(f"kernels for {host.machine} are not stored on disk, so none can be made in advance")
    images: dict[str, Callable[[], Module]] = {}
    images |= {"pool": partial(pool_code.module, host), "entry": partial(entry_code.module, host)}
    for dtype, out in dict.fromkeys(pair for name in names for pair in _pairs(name)):
        for activation in ("", *(ACTIVATIONS if known.get(out).kind == "f" else ())):
            images |= serving(dtype, out, activation)

    def make(name: str) -> None:
        if name != "entry":  # whose addresses in this process are the business of `entry`
            jit.load(host, name, images[name])
        if not jit.stored(host, name):  # also if it was loaded when there was another folder, or none
            jit.store(host, name, images[name])

    for name in images:
        yield WarmImage(name, partial(jit.stored, host, name), partial(make, name))


def _pairs(name: str) -> list[tuple[str, str]]:
    """Return the element types of A and B, and of C, with which kernels compute products of a type.

    >>> _pairs("int8")
    [('int8', 'int8'), ('int8', 'int16'), ('int8', 'int32'), ('int8', 'int64')]
    """
    results = [wide for wide in known.BY_NAME if can_cast(name, wide, "safe")]
    pairs = dict.fromkeys(kernel_types(name, wide) for wide in sorted(results, key=lambda wide: known.get(wide).size))
    own = kernel_types(name, name)[0]
    return [pair for pair in pairs if pair[0] == own]


_TYPES = ("f16", "bf16", "f32", "f64")
_EIGHT_BITS = (*known.TENSOR_FLOAT8, "int8")  # which only some devices multiply
_SIDES = (64, 256, 1024, 4096)  # of aligned products whose specialized kernels are made
_MANY_SIDES = (*_SIDES, 1000, 5000)  # of those whose kernels serve many shapes; rows of the last two cross lines of L2
_EIGHTHS = (3000, 3000, 3000)  # whose tiles have every eighth row
_LAYOUTS = ("row", "col")
_ALIGNMENTS = (16, 2)  # bytes: operands that tensor maps describe, and such that are packed first


def types(name: str) -> tuple[str, ...]:
    """Return the element types of products on a GPU; the usual ones for a GPU that is not known."""
    try:
        return (*_TYPES, *_EIGHT_BITS) if copies_tensors(name) else _TYPES
    except DeviceError:
        return _TYPES


def images(names: tuple[str, ...], name: str, apart: bool = False) -> Iterator[WarmImage]:
    """Yield every kernel of a GPU, which need not be present, once. Raises DeviceError for an unknown one.

    With `apart` each is compiled in a process of its own, because NVRTC compiles one kernel at a time in a process:
    8 kernels take 7.9 s with one thread and 8.2 s with two.
    """
    try:
        card = driver.find(name)
    except DeviceError as error:
        if "known" in str(error):
            raise
        raise DeviceError(f"{error}; name a card instead, such as h200: it need not be present") from None
    nvrtc.bindings()
    make = _in_a_process if apart else nvrtc.code
    yielded = set()
    numbers = tuple(dtype for dtype in names if dtype not in _EIGHT_BITS)
    for geometry in chain(_general(numbers, name), _specialized(numbers, name), _shared(names, name)):
        key = geometry.source, geometry.kernel, card.arch
        if key not in yielded:
            yielded.add(key)
            yield WarmImage(geometry.kernel, partial(nvrtc.stored, *key), partial(make, *key))


_COMPILE = "import sys; from gemmery.cuda import nvrtc; nvrtc.code(*sys.argv[1:])"


def _in_a_process(source: str, kernel: str, arch: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, source, kernel, arch], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompileError(f"kernel {kernel} of {source} did not compile for {arch}: {done.stderr[-2000:].strip()}")


def _general(names: tuple[str, ...], name: str) -> Iterator[Geometry]:
    """Yield the launches of every general kernel: one for each result, activation and tile."""
    for dtype, out, activation in product(names, known.NAMES, ("", *ACTIVATIONS)):
        problem = Problem(64, 64, 64, dtype, out, epilogue=activation, device=name)
        candidate = general(problem) if can_cast(dtype, out, "safe") else None
        if candidate is None or candidate.rung.geometry is None:
            continue
        for tile in candidate.rung.space["tile"]:
            with contextlib.suppress(RefusedError):
                yield candidate.rung.geometry(problem, {**candidate.config, "tile": tile})


def _specialized(names: tuple[str, ...], name: str) -> Iterator[Geometry]:
    """Yield the launches of products of aligned matrices, row-major or transposed, and of matrices and vectors."""
    for dtype, a, b in product(names, _LAYOUTS, _LAYOUTS):
        square = Problem(1, 1, 1, dtype, dtype, a_layout=a, b_layout=b, device=name)
        squares = [square._replace(m=side, n=side, k=side) for side in _SIDES]
        column, row = square._replace(m=1024, k=1024, b_layout="row"), square._replace(n=1024, k=1024, a_layout="row")
        for problem in (*squares, column, row):
            rung, config, _ = choice(problem)
            assert rung.geometry is not None
            launch = rung.geometry(problem, config)
            yield from launch.launches


def _shared(names: tuple[str, ...], name: str) -> Iterator[Geometry]:
    """Yield the launches of kernels that serve many shapes: those that products of small and large sides choose."""
    layouts = _LAYOUTS if copies_tensors(name) else ()
    for dtype, a, b, alignment in product(names, layouts, layouts, _ALIGNMENTS):
        out = "int32" if dtype == "int8" else known.written(dtype)
        plain = Problem(1, 1, 1, dtype, out, a_layout=a, b_layout=b, device=name)
        finished = plain._replace(scales="outer") if dtype in known.TENSOR_FLOAT8 else plain._replace(epilogue="bias")
        for (m, n, k), steps in product((*product(_MANY_SIDES, repeat=3), _EIGHTHS), (plain, finished)):
            problem = steps._replace(m=m, n=n, k=k, alignments=(alignment,) * 3)
            with contextlib.suppress(RefusedError):
                rung, config, _ = choice(problem)
                assert rung.geometry is not None
                launches = rung.geometry(problem, config).launches
                if launches[-1].maps:
                    yield from launches
