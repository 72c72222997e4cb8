"""Every environment variable that gemmery reads, in one place.

| variable | meaning |
| --- | --- |
| `GEMMERY_NUM_THREADS` | number of threads that a product may use (default: the cores this process may run on) |
| `OMP_NUM_THREADS`, `SLURM_CPUS_PER_TASK` | most threads of a product, where `GEMMERY_NUM_THREADS` is not set |
| `MPI_LOCALNRANKS`, `OMPI_COMM_WORLD_LOCAL_SIZE` | processes of an MPI job, which share unbound cores |
| `GEMMERY_CACHE_DIR` | folder of compiled kernels (default: the user's cache folder) |
| `GEMMERY_ISA` | `avx512`, `avx2`, `generic`; on ARM `sve_512`, `sve_256`, `neon_mmla`, ...: no instruction beyond it |
| `GEMMERY_FAST_ENTRY` | `off`: without the compiled fast entry of `matmul`, `gemm` and `gemv` |
| `GEMMERY_FLOAT32_PRECISION` | `tf32`, `f32_tensor`, `f32_strict` or `f32_plus`: float32 products on a GPU |
| `GEMMERY_TABLE` | a table of `gemmery tune` to use instead of this CPU's own; `off`: none, the model serves |
| `GEMMERY_EMULATOR` | `numpy`: the emulator compiles nothing; `compiled`: everything (default: `auto`, what pays) |
| `GEMMERY_TIERS` | `off`: no background work, each product is compiled for its shape before it runs (default: `on`) |
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from gemmery.errors import ArgumentError, brief

ON_ARM = platform.machine().lower() in ("aarch64", "arm64")
# Each narrower than the next; code of SVE for vectors of one length runs where they have that length.
X86_ISAS, ARM_ISAS = ("generic", "avx2", "avx512"), ("neon", "neon_dot", "neon_mmla", "sve_256", "sve_512")
ISAS = ARM_ISAS if ON_ARM else X86_ISAS
Float32Precision = Literal["tf32", "f32_tensor", "f32_strict", "f32_plus"]
FLOAT32_PRECISIONS: tuple[str, ...] = get_args(Float32Precision)


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


def threads_of_others(cores: int) -> int:
    """Return the threads that OMP_NUM_THREADS, SLURM_CPUS_PER_TASK and an MPI job leave of the cores this process has.

    OMP_NUM_THREADS may be a list, of which the first number is for the outermost level. Processes that mpiexec has not
    bound to cores of their own share all of them: two with two threads each on two cores take 1.14 times as long as
    with one.
    """
    most = min(_counts("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"), default=cores)
    sharing = max(_counts("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"), default=1)
    bound = cores < (os.cpu_count() or 1)
    return min(most, cores if bound else max(1, cores // sharing))


def _counts(*names: str) -> list[int]:
    """Return the values of variables that are positive numbers."""
    texts = (os.environ.get(name, "").partition(",")[0].strip() for name in names)
    return [int(text) for text in texts if re.fullmatch("0*[1-9][0-9]{0,8}", text, re.ASCII)]


def isa_limit() -> str | None:
    """Return the value of GEMMERY_ISA, or None if it is not set."""
    return _one_of("GEMMERY_ISA", ISAS, "the best one")


def fast_entry() -> bool:
    """Return False if GEMMERY_FAST_ENTRY=off selects the plain Python entry."""
    return _one_of("GEMMERY_FAST_ENTRY", _SWITCH, "on") not in _OFF


def tiers() -> bool:
    """Return False if GEMMERY_TIERS=off switches off background work."""
    return _one_of("GEMMERY_TIERS", _SWITCH, "on") not in _OFF


def emulator() -> str:
    """Return the value of GEMMERY_EMULATOR: whether basic blocks are compiled."""
    return _one_of("GEMMERY_EMULATOR", ("auto", "numpy", "compiled"), "auto") or "auto"


def table() -> str:
    """Return the value of GEMMERY_TABLE: "off", or a file as it is written, with "~" replaced; "" if it is not set."""
    text = os.environ.get("GEMMERY_TABLE", "").strip()
    return "off" if text.lower() in _OFF else os.path.expanduser(text)


def table_folders() -> list[str]:
    """Return the folders of tables that products may use: the user's, if there is a home folder, and the package's."""
    own, shipped = _users("data"), os.path.dirname(__file__)
    return [os.path.join(folder, "tables") for folder in (own, shipped) if folder]


def table_files(machine: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the file of a machine's table, in this layout and in layout 1.

    There is one for each model of CPU, its instructions and number of cores; in layout 1 CPUs of a name shared one.

    >>> cpu = {"cpu": "AMD EPYC", "model": "AuthenticAMD 26 2", "isa": "avx512", "cores": 2}
    >>> table_files({**cpu, "instructions": "avx512_vnni avx512_bf16"})
    ('authenticamd-26-2-avx512-vnni-bf16-2c.json', 'amd-epyc-avx512-2c.json')
    """
    isa, cores = machine["isa"], machine["cores"]
    extensions = machine["instructions"].replace(f"{isa}_", "")
    both = f"{machine['model']} {isa} {extensions} {cores}c", f"{machine['cpu']} {isa} {cores}c"
    new, old = (re.sub("[^a-z0-9]+", "-", words.lower()).strip("-") for words in both)
    return f"{new}.json", f"{old}.json"


def float32_precision() -> str | None:
    """Return the value of GEMMERY_FLOAT32_PRECISION, or None if it is not set."""
    return _one_of("GEMMERY_FLOAT32_PRECISION", FLOAT32_PRECISIONS, "plain float32")


_OFF = ("off", "0")
_SWITCH = ("on", "off", "1", "0")


def _one_of(variable: str, choices: tuple[str, ...], default: str) -> str | None:
    """Return the value of a variable, or None if it is not set. Raises ArgumentError for none of its choices."""
    text = os.environ.get(variable, "").strip().lower()
    if not text or text in choices:
        return text or None
    raise ArgumentError(f"{variable}={brief(text)}: it must be one of {', '.join(choices)}; unset it for {default}")


def cache_dir() -> str | None:
    """Return the folder of compiled kernels: GEMMERY_CACHE_DIR, else the user's cache folder.

    None where the user has no home folder (HOME is not set and the system does not know the user): a folder in the
    working directory is not trusted instead. A relative GEMMERY_CACHE_DIR begins at the working directory of its first
    use in this process, and stays there.
    """
    text = os.environ.get("GEMMERY_CACHE_DIR", "").strip()
    return _absolute(os.path.expanduser(text)) if text else _users("cache")


_BASES = {"cache": ("XDG_CACHE_HOME", "~/.cache"), "data": ("XDG_DATA_HOME", "~/.local/share")}


def _users(kind: str) -> str | None:
    """Return the user's folder of a kind, "cache" or "data"; None without a home folder."""
    if platform.system() == "Linux":
        # The folder that platformdirs finds by the XDG Base Directory Specification: importing it takes 8 ms, half of
        # the time of a first product.
        variable, usual = _BASES[kind]
        base = os.environ.get(variable, "").strip()
        folder = os.path.join(base if os.path.isabs(base) else os.path.expanduser(usual), "gemmery")
    else:
        import platformdirs

        find = {"cache": platformdirs.user_cache_dir, "data": platformdirs.user_data_dir}[kind]
        try:
            folder = find("gemmery", appauthor=False)
        except RuntimeError:  # of versions that look for a home folder; others return "~"
            folder = ""
    return folder if os.path.isabs(folder) else None


@functools.cache
def _absolute(folder: str) -> str | None:
    try:
        return None if folder.startswith("~") else os.path.abspath(folder)
    except FileNotFoundError:  # the working directory was removed
        return None


def data_dir() -> str:
    """Return the folder of the user's data, where records and tables are kept.

    Raises ArgumentError where the user has no home folder.
    """
    folder = _users("data")
    if folder is None:
        raise ArgumentError("no home folder, so no place for records: set HOME, or name a folder to store them in")
    return folder


def distorting(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of the environment with names that start with one of `prefixes`."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def child_environment(drop: tuple[str, ...], add: dict[str, str]) -> dict[str, str]:
    """Return a copy of the environment without variables that start with `drop`, plus `add`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return {**environment, **add}
