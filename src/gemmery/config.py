"""Every environment variable that gemmery reads, in one place.

| variable | meaning |
| --- | --- |
| `GEMMERY_NUM_THREADS` | number of threads that a product may use (default: the cores this process may run on) |
| `OMP_NUM_THREADS`, `SLURM_CPUS_PER_TASK` | most threads of a product, where `GEMMERY_NUM_THREADS` is not set |
| `GEMMERY_CACHE_DIR` | folder of compiled kernels (default: the user's cache folder) |
| `GEMMERY_ISA` | `avx512`, `avx2` or `generic`: use nothing beyond this instruction set |
| `GEMMERY_FAST_ENTRY` | `0` switches off the compiled fast entry of `matmul`, `gemm` and `gemv` |
| `GEMMERY_FLOAT32_PRECISION` | `tf32`, `f32_tensor`, `f32_strict` or `f32_plus`: float32 products on a GPU |
| `GEMMERY_TIERS` | `off`: no background work, each product is compiled for its shape before it runs (default: `on`) |
"""

from __future__ import annotations

import os
import platform
import re

from gemmery.errors import ArgumentError, brief

ISAS = ("generic", "avx2", "avx512")
FLOAT32_PRECISIONS = ("tf32", "f32_tensor", "f32_strict", "f32_plus")


def num_threads() -> int | None:
    """Return the value of GEMMERY_NUM_THREADS, or None if it is not set."""
    text = os.environ.get("GEMMERY_NUM_THREADS", "").strip()
    if not text:
        return None
    if not re.fullmatch("0*[1-9][0-9]{0,99}", text, re.ASCII):
        raise ArgumentError(
            f"GEMMERY_NUM_THREADS={brief(text)}: it must be an integer >= 1; unset it to use every core"
        )
    return int(text)


def threads_of_others() -> float:
    """Return the least number that OMP_NUM_THREADS and SLURM_CPUS_PER_TASK allow; infinity where neither is a number.

    OMP_NUM_THREADS may be a list, of which the first number is for the outermost level.
    """
    texts = (os.environ.get(name, "").partition(",")[0].strip() for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"))
    counts = (int(text) for text in texts if re.fullmatch("[0-9]{1,9}", text, re.ASCII))
    return min((count for count in counts if count), default=float("inf"))


def isa_limit() -> str | None:
    """Return the value of GEMMERY_ISA, or None if it is not set."""
    text = os.environ.get("GEMMERY_ISA", "").strip().lower()
    if not text:
        return None
    if text not in ISAS:
        raise ArgumentError(f"GEMMERY_ISA={text!r}: it must be one of {', '.join(ISAS)}; unset it to use the best one")
    return text


def fast_entry() -> bool:
    """Return False if GEMMERY_FAST_ENTRY=0 selects the plain Python entry."""
    return os.environ.get("GEMMERY_FAST_ENTRY", "1").strip() != "0"


def tiers() -> bool:
    """Return False if GEMMERY_TIERS=off switches off background work."""
    text = os.environ.get("GEMMERY_TIERS", "").strip().lower()
    if text not in ("", "on", "off"):
        raise ArgumentError(f"GEMMERY_TIERS={brief(text)}: it must be on or off; unset it for on")
    return text != "off"


def float32_precision() -> str | None:
    """Return the value of GEMMERY_FLOAT32_PRECISION, or None if it is not set."""
    text = os.environ.get("GEMMERY_FLOAT32_PRECISION", "").strip().lower()
    if not text:
        return None
    if text not in FLOAT32_PRECISIONS:
        raise ArgumentError(
            f"GEMMERY_FLOAT32_PRECISION={brief(text)}: it must be one of {', '.join(FLOAT32_PRECISIONS)}; unset it for "
            "plain float32"
        )
    return text


def cache_dir() -> str | None:
    """Return the folder of compiled kernels: GEMMERY_CACHE_DIR, else the user's cache folder.

    None where the user has no home folder (HOME is not set and the system does not know the user): a folder in the
    working directory is not trusted instead.
    """
    text = os.environ.get("GEMMERY_CACHE_DIR", "").strip()
    if text:
        folder = os.path.expanduser(text)
        return None if folder.startswith("~") else folder
    if platform.system() == "Linux":
        # The folder that platformdirs finds by the XDG Base Directory Specification: importing it takes 8 ms, half of
        # the time of a first product.
        base = os.environ.get("XDG_CACHE_HOME", "").strip()
        folder = os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "gemmery")
    else:
        from platformdirs import user_cache_dir

        folder = user_cache_dir("gemmery", appauthor=False)
    return folder if os.path.isabs(folder) else None


def data_dir() -> str:
    """Return the folder of the user's data, where records are kept.

    Raises ArgumentError where the user has no home folder.
    """
    from platformdirs import user_data_dir

    try:
        folder = user_data_dir("gemmery", appauthor=False)
    except RuntimeError:  # of versions that look for a home folder; others return "~"
        folder = ""
    if not os.path.isabs(folder):
        raise ArgumentError("no home folder, so no place for records: set HOME, or name a folder to store them in")
    return folder


def distorting(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of the environment with names that start with one of `prefixes`."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def child_environment(drop: tuple[str, ...], add: dict[str, str]) -> dict[str, str]:
    """Return a copy of the environment without variables that start with `drop`, plus `add`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return {**environment, **add}
