"""warm(): compiles and stores the kernels that products will need, before a program runs."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gemmery import cache, config
from gemmery import dtypes as known
from gemmery.api import options
from gemmery.api.promote import can_cast, kernel_types
from gemmery.cpu import target
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.ir import Module
from gemmery.errors import ArgumentError, CacheError, DTypeError, brief

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
        general kernels are made, and the specialised ones of aligned products.
    threads : int, optional
        Kernels compiled at the same time. Default: one for each core that this process may use.
    progress : callable, optional
        Called with (kernels done, kernels in all, name) after each kernel.

    Raises CacheError if kernels cannot be stored, DTypeError, DeviceError and ArgumentError for wrong arguments.
    """
    began = time.perf_counter()
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
    from gemmery.api.warm_cuda import images, types

    return (WarmImage(*image) for image in images(_dtype_names(names, types(device), device), device, threads > 1))


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
    return next((name for name, row in known.FP8.items() if text in (name, row.numpy)), "") or options.dtype_name(dtype)


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
    from gemmery.cpu import build, entry_code, jit, pool_code

    host = target.host()
    if not jit.keeps(host):
        raise CacheError(f"kernels for {host.machine} are not stored on disk, so none can be made in advance")
    images: dict[str, Callable[[], Module]] = {}
    images |= {"pool": partial(pool_code.module, host), "entry": partial(entry_code.module, host)}
    for dtype, out in dict.fromkeys(pair for name in names for pair in _pairs(name)):
        for activation in ("", *(options.ACTIVATIONS if known.get(out).kind == "f" else ())):
            images |= build.images(dtype, out, activation)

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
