"""doctor(): checks of this machine, with advice."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np

import gemmery
from gemmery import cache, config, dispatch, load, tiers
from gemmery.api import compute
from gemmery.api.device_call import table
from gemmery.cpu import entry, jit, target, tuned
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.target import ARM_FEATURES
from gemmery.cuda import driver, nvml, nvrtc, sass
from gemmery.errors import GemmeryError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab import measurements, on_cuda
from gemmery_lab.measure import cublas, libraries, record
from gemmery_lab.measure.torch_operands import Resident
from gemmery_lab.measure.work import Work

# Instructions that some kernels use if available.
_NEWER = ("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", *(name for name, *_ in ARM_FEATURES))
_RECOMPILED = "every process recompiles kernels"


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check; `advice` tells what to do or to expect, if anything."""

    name: str  # "cpu", "instruction set", "caches", "cores", "numpy blas", "environment", "cache folder", "torch", ...
    value: str
    ok: bool = True
    advice: str = ""


Result = str | tuple[str, bool, str]  # the value alone, or with `ok` and `advice` of the diagnosis


def doctor() -> tuple[Diagnosis, ...]:
    """Check the CPU, its caches and cores, NumPy's BLAS, the environment, the cache folder, CUDA and its devices.

    >>> [finding.name for finding in doctor() if not finding.ok]  # doctest: +SKIP
    ['environment']
    """
    findings = []
    for name, examine in {**_EXAMINED, **_gpus()}.items():
        try:
            result = examine()
            findings.append(Diagnosis(name, *([result] if isinstance(result, str) else result)))
        except Exception as error:
            findings.append(Diagnosis(name, type(error).__name__, ok=False, advice=str(error)))
    return tuple(findings)


def _cpu() -> Result:
    from gemmery.cpu import llvm  # which imports llvmlite

    return f"{target.host().cpu} ({llvm.host_cpu()}, {target.host().machine})"


def _instruction_set() -> Result:
    host, limit = target.host(), config.isa_limit()
    if limit:
        advice = "unset GEMMERY_ISA to use every instruction set of the CPU"
        return f"{host.isa}, limited by GEMMERY_ISA", False, advice
    if host.isa == "generic" and host.machine in ("x86_64", "amd64"):
        return "generic", False, "this CPU has no AVX2: products run at a quarter of the speed or slower"
    bits = 0 if host.has_sve else 8 * target.sve_bytes(host.features)
    sve = f"; SVE of {bits} bits, used with GEMMERY_ISA=sve_{bits}" if bits == 256 else ""
    return f"{host.isa}, vectors of {host.vector_bytes} bytes{sve}"


def _tile_unit() -> Result:
    advice = target.without_tiles()
    if not advice:
        return "Intel AMX, granted by the system: products of bfloat16 and 8-bit integers run on it"
    return ("not used", False, advice) if "amx_bf16" in target.host().features else "none"


def _caches() -> Result:
    host = target.host()
    sizes = {"L1d": host.l1d, "L2": host.l2, "L3": host.l3}
    return ", ".join(f"{name} {_size(size) if size else 'unknown'}" for name, size in sizes.items())


def _cores() -> Result:
    used, there = target.cores(), os.cpu_count() or 1
    return f"{used} of {there}, limited by the affinity mask or the cgroup" if used < there else str(used)


def _table() -> Result:
    usual = target.modeled(target.host())._asdict()
    own = tuned.table(target.described(target.host()), usual)
    if not own.path:
        advice = own.ignored or "`gemmery tune` measures one for this machine"
        return "none: a model of the caches chooses blocks and rungs", not own.ignored, advice
    changed = (f"{key}={value:g}" for key, value in own.constants.items() if value != usual[key])
    return f"{own.path}: {', '.join(changed) or 'as the model'}", not own.ignored, own.ignored


def _load() -> Result:
    busy, cores = load.watch(), target.cores()
    value = f"other processes use {busy:.2f} of {cores} core{'s' * (cores != 1)}"
    if busy > load.limit(cores):
        return value, False, "machine is busy: timings will be noisy, and ratios will be shown as ranges"
    return value


def _threads() -> Result:
    count, cores = config.num_threads() or cpu_threads.get(), target.cores()
    if count > cores:
        return f"{count} on {cores} cores", False, f"set GEMMERY_NUM_THREADS to {cores}: more threads share cores"
    return str(count)


def _numpy_blas() -> Result:
    value = f"NumPy {np.__version__}, {libraries.blas()}"
    narrow = any(f"{name} kernels" in value for name in ("Haswell", "Zen", "Sandybridge", "Nehalem", "Prescott"))
    if narrow and "avx512f" in target.host().features:
        advice = "OPENBLAS_CORETYPE=SKYLAKEX enables it, and `gemmery bench` measures both"
        return value, False, f"NumPy does not use AVX-512 here; {advice}"
    return value


def _environment() -> Result:
    variables = ", ".join(f"{name}={text}" for name, text in libraries.distorting().items())
    value = variables or "no variable that changes a BLAS is set"
    if steering := " ".join(libraries.steering()):
        advice = f"unset {steering}: NumPy may run slower kernels; `gemmery bench` ignores these variables"
        return value, False, advice
    return value


def _cache_folder() -> Result:
    folder = config.cache_dir()
    if folder is None:
        return "none", False, f"{_RECOMPILED}: set HOME, or GEMMERY_CACHE_DIR to a folder"
    rule = cache.unusable(folder) or jit.reason()
    versions = _versions()
    parts: tuple[list[cache.CacheEntry], list[cache.CacheEntry]] = ([], [])  # of other versions, of this one
    for file in cache.listing(folder):
        parts[bool(file.kind) and file.version in versions.get(file.kind, (file.version,))].append(file)
    others, current = parts
    if rule and current:  # stored before the file system was made read-only, as in an image of a container
        return f"{folder}: {_entries(current)} of this version", True, f"others are not stored: {rule}"
    if rule:
        return f"{folder}, a link" if os.path.islink(folder) else folder, False, f"{_RECOMPILED}: {rule}"
    value = f"{folder}: {_entries(current)} of this version"
    if not others:
        return value
    advice = "`gemmery doctor` can prune those of other versions, which another installation may use"
    return f"{value}, {_entries(others)} of others", True, advice


def prune() -> Diagnosis:
    """Remove from the cache what this version of gemmery does not read, and tell how much it was.

    >>> prune().value  # doctest: +SKIP
    '12 entries (1.4 MiB) removed from ~/.cache/gemmery'
    """
    folder = config.cache_dir()
    if folder is None or not os.path.exists(folder):
        return Diagnosis("pruned", "there is no cache folder")
    try:
        removed = cache.prune(folder, _versions())
    except OSError:
        return Diagnosis("pruned", f"nothing, in {folder}", False, cache.unusable(folder))
    return Diagnosis("pruned", f"{_entries(removed)} removed from {folder}")


def _versions() -> dict[str, Collection[str]]:
    """Return the versions of entries that this version of gemmery reads, by kind."""
    versions: dict[str, Collection[str]] = {"cpu": jit.versions(), "cuda": nvrtc.versions()}
    with contextlib.suppress(GemmeryError):  # without NVRTC, what it compiled stays
        versions["ptx"] = (nvrtc.version(),)
    with contextlib.suppress(ModuleNotFoundError):  # without the emulator's needs, its predictions stay
        from gemmery_lab.on_emulator import sources

        versions["times"] = (sources()[:12],)
    return versions


def _entries(entries: Collection[cache.CacheEntry]) -> str:
    count = len(entries)
    return f"{count} entr{'y' if count == 1 else 'ies'} ({_size(sum(file.size for file in entries))})"


def _tiers() -> Result:
    """Check that kernels can be compiled in the background."""
    if not tiers.enabled():
        return "off, by GEMMERY_TIERS: each product is compiled for its shape before it runs"
    tiers.aside("doctor", partial(dispatch.specialized, Problem(8, 8, 8, "f32", "f32")))
    tiers.wait()
    state = tiers.state()
    if state.failures:
        return "on, but background work failed", False, f"report it: {state.failures[-1]}"
    return "on: kernels for products that come back often are compiled in the background"


def _memory() -> Result:
    """Tell how full the bounded caches of this process are."""
    plans = {"plans": dispatch.plan, "specialized plans": dispatch.specialized, "prepared products": compute.prepare}
    infos = {name: function.cache_info() for name, function in plans.items()}
    fills: dict[str, tuple[int, int | None]] = {name: (info.currsize, info.maxsize) for name, info in infos.items()}
    fills |= {"products in the compiled entry": entry.counts(), "kinds of any shape there": entry.classes()}
    fills |= {f"{kind} on devices": counts for kind, counts in table.counts().items()}
    return "places used of " + ", ".join(f"{name}: {used} of {places}" for name, (used, places) in fills.items())


def _installed(name: str, missing: str) -> Result:
    """Check for an optional package; `missing` tells the effect of its absence."""
    return record.version(name) or ("not installed", True, missing)


def _product() -> Result:
    a = np.random.default_rng(0).standard_normal((33, 33), np.float32)
    return _verdict(measurements.error(gemmery.matmul(a, a), a, a, float), "CPU")


def _verdict(worst: float, where: str) -> Result:
    if not worst <= 1:
        return f"failed: error {worst:.3g} times the bound", False, f"a kernel is wrong on this {where}: report it"
    return f"passed ({worst:.2g} of the bound)"


def _cuda() -> Result:
    """Check the compiler of GPU kernels, which needs no GPU."""
    try:
        return f"NVRTC {nvrtc.version()}, cuda-bindings {record.version('cuda-bindings')}"
    except GemmeryError as error:
        return "not installed", True, f"{error}; products on the CPU work without it"


def _gpus() -> dict[str, Callable[[], Result]]:
    """The checks of each device, or one finding that tells what is missing."""
    missing = driver.missing()
    if missing:
        return {"gpu": lambda: ("none", True, missing)}
    version = f"{nvml.driver_version() or 'version unknown'}, supports CUDA {driver.version()}"
    checks: dict[str, Callable[[], Result]] = {"cuda driver": lambda: version}
    for ordinal in range(driver.count()):
        checks[f"cuda:{ordinal}"] = partial(_device, ordinal)
        checks[f"self-test on cuda:{ordinal}"] = partial(_product_on, ordinal)
    return checks | {"cublas": _cublas}


def _device(ordinal: int) -> Result:
    device, monitor = driver.device(ordinal), nvml.Monitor(ordinal)
    clock = monitor.most_clock / 1e3 or device.clock
    power = f", limited to {monitor.power_limit:.0f} W" if monitor.power_limit else ""
    value = f"{device.name}: {device.arch}, {device.sms} multiprocessors up to {clock:.2f} GHz{power}, "
    value += f"{_size(driver.room(ordinal))} of memory free, L2 {_size(device.l2)}"
    advice = f"clocks and power are unknown: {monitor.missing}" if monitor.missing else ""
    return value, True, advice


def _product_on(ordinal: int) -> Result:
    resident = Resident(Work(33, 33, 33, "f32", "f32"), driver.Stream(ordinal))
    rung = find(CUDA, "simt_smem")
    put = on_cuda.build(rung, rung.default, resident)
    return _verdict(on_cuda.error(resident, lambda: put(0), rung.bound), "device")


def _cublas() -> Result:
    reasons = [rival.missing() for rival in cublas.RIVALS]
    there = [rival.runs for rival, reason in zip(cublas.RIVALS, reasons, strict=True) if not reason]
    if there:
        return "; ".join(there)
    return "none", True, f"{'; '.join(reasons)}: there is no library to compare with on a GPU"


def _size(count: int) -> str:
    name, unit = ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20) if count >= 2**20 else ("KiB", 2**10)
    return f"{count / unit:.4g} {name}"


_EXAMINED: dict[str, Callable[[], Result]] = {
    "cpu": _cpu,
    "instruction set": _instruction_set,
    "features": lambda: ", ".join(sorted(set(_NEWER) & target.host().features)) or "none of the optional ones",
    "tile unit": _tile_unit,
    "caches": _caches,
    "cores": _cores,
    "table": _table,
    "threads": _threads,
    "load": _load,
    "numpy blas": _numpy_blas,
    "environment": _environment,
    "cache folder": _cache_folder,
    "self-test": _product,
    "tiers": _tiers,
    "float32 precision": lambda: config.float32_precision() or "plain float32, on CUDA cores",
    "memory": _memory,
    "python": lambda: f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}",
    "llvmlite": lambda: _installed("llvmlite", "kernels that are not cached cannot be compiled: pip install llvmlite"),
    "ml_dtypes": lambda: _installed("ml_dtypes", "NumPy needs it for bfloat16: pip install ml_dtypes"),
    "torch": lambda: _installed("torch", "`gemmery bench` will skip this rival; nothing else needs it"),
    "cuda": _cuda,
    "nvdisasm": lambda: sass.nvdisasm() or ("not found", True, sass.MISSING),
}
