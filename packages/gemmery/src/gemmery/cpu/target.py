"""The features and caches of this CPU, and the tile and block sizes that suit them."""

from __future__ import annotations

import functools
import math
import os
import platform
from collections.abc import Iterator

from gemmery import config
from gemmery.tuples import NamedTuple

_VECTOR_BYTES = {"avx512": 64, "avx2": 32, "sve_512": 64, "sve_256": 32}  # 16 of all others
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}) | _AVX2
# The levels of the x86-64 System V ABI that a narrower target is limited to: LLVM's name, and the features under
# Linux's names. This lists the features to keep, since a list of features to drop would miss later extensions.
_V1 = frozenset({"cmov", "cx8", "fpu", "fxsr", "mmx", "sse", "sse2"})
_V3 = _V1 | _AVX2 | {"abm", "avx", "bmi1", "bmi2", "cx16", "lahf_lm", "movbe", "pni", "popcnt", "sse4_1", "sse4_2"}
_V3 |= {"ssse3", "xsave"}
# What Linux's auxiliary vector says of an ARM CPU: Linux's name of a feature, the entry (AT_HWCAP, AT_HWCAP2), its bit,
# and LLVM's name.
_HWCAP, _HWCAP2 = 16, 26
ARM_FEATURES = (
    ("asimd", _HWCAP, 1, "neon"), ("atomics", _HWCAP, 8, "lse"), ("asimdhp", _HWCAP, 10, "fullfp16"),
    ("asimddp", _HWCAP, 20, "dotprod"), ("asimdfhm", _HWCAP, 23, "fp16fml"), ("i8mm", _HWCAP2, 13, "i8mm"),
    ("bf16", _HWCAP2, 14, "bf16"), ("sve", _HWCAP, 22, "sve"), ("sve2", _HWCAP2, 1, "sve2"),
)  # fmt: skip
_NEON = frozenset({"asimd", "atomics"})
_NEON_DOT = _NEON | {"asimdhp", "asimddp", "asimdfhm"}
_MMLA = frozenset({"i8mm", "bf16"})
_LEVELS = {
    "generic": ("x86-64", _V1),
    "avx2": ("x86-64-v3", _V3),
    "neon": ("generic", _NEON),
    "neon_dot": ("generic", _NEON_DOT),
    "neon_mmla": ("generic", _NEON_DOT | _MMLA),
    "sve_256": ("generic", _NEON_DOT | _MMLA | {"sve"}),
    "sve_512": ("generic", _NEON_DOT | _MMLA | {"sve"}),
}
X86 = ("x86_64", "amd64")
_SYSFS_CACHES = "/sys/devices/system/cpu/cpu0/cache"
FAN = 1024  # sums of blocks of k that are added in one chain: see long_k
SHALLOW = 128  # up to this k, writing C dominates, and packed tiles go along the rows of C


class Target(NamedTuple):
    """A CPU for the kernel generators. Cache sizes are in bytes for one core (L3: shared), 0 when unknown."""

    isa: str  # "avx512", "avx2", "generic"; on ARM "neon", "neon_dot", "neon_mmla", "sve_256", "sve_512"
    features: frozenset[str]  # Linux's names: avx512_vnni, avx512_bf16, amx_tile, ...; asimddp, i8mm, ...
    cpu: str = ""
    machine: str = "x86_64"
    l1d: int = 0
    l2: int = 0
    l3: int = 0
    llvm: str = ""  # LLVM's name of the CPU to compile for; "" for the one this process runs on
    model: str = ""  # as the CPU numbers itself: vendor, family and model; implementer, variant and part
    stepping: int = 0

    @property
    def vector_bytes(self) -> int:
        """The bytes of a vector register."""
        return _VECTOR_BYTES.get(self.isa, 16)

    @property
    def is_arm(self) -> bool:
        """True for 64-bit ARM CPUs."""
        return self.machine in ("aarch64", "arm64")

    @property
    def is_intel(self) -> bool:
        """True for Intel's CPUs."""
        return "Intel" in f"{self.model} {self.cpu}"

    @property
    def is_zen5(self) -> bool:
        """True for AMD's family 26 with registers of 512 bits in use."""
        return self.isa == "avx512" and self.model.startswith("AuthenticAMD 26 ")

    @property
    def has_sve(self) -> bool:
        """True for kernels whose vectors are registers of SVE."""
        return self.isa.startswith("sve")

    @property
    def has_fma(self) -> bool:
        """True if the CPU has a fused multiply-add."""
        return self.isa != "generic"

    @property
    def has_vnni(self) -> bool:
        """True if the CPU has dot products of four bytes (`vpdpbusd`) at full vector width."""
        return self.isa == "avx512" and "avx512_vnni" in self.features

    @property
    def has_bf16_dot(self) -> bool:
        """True if the CPU has fast dot products of two bfloat16 (`vdpbf16ps`).

        On Intel's cores with AMX they run at half the rate of float32 (Emerald Rapids: 105 GFLOP/s against 216), so
        widening while packing is faster there.
        """
        slow = "amx_bf16" in self.features or self.hides_tiles
        return self.isa == "avx512" and "avx512_bf16" in self.features and not slow

    @property
    def hides_tiles(self) -> bool:
        """True for Intel's cores with AMX where a virtual machine, the system or GEMMERY_ISA hides it."""
        return self.is_intel and "avx512_fp16" in self.features and not self.has_tiles

    @property
    def has_tiles(self) -> bool:
        """True if the CPU has a tile unit (AMX) for bfloat16 and 8-bit integers, and the system grants its state."""
        return self.isa == "avx512" and self.features >= {"amx_tile", "amx_bf16", "amx_int8"}

    @property
    def copied(self) -> int:
        """The rows of A from which on the first tile of `direct` copies the columns of B that it reads; 0: never.

        The tiles below read the copy. Rows of B a power of two apart share few sets of L1 (n = 128, f64: 8 of 64, so 96
        of 256 lines stay), others straddle lines. Of MKL's speed on Emerald Rapids, one thread, in place and copied:
        f64 n = 128 0.97, 1.03, 256 0.95, 1.13, 777 0.76, 1.00; 50 x 400 x 300 0.84, 0.98; 24 x 256 x 256 0.89, 0.88.
        Zen 3, whose tiles have 4 rows and not 8, gains from copies 1.27 at n = 128, 1.21 at 37 x 402 x 223.
        """
        return {"avx512": 48 if self.is_intel else 0, "avx2": 16}.get(self.isa, 0)

    def lanes(self, size: int) -> int:
        """Return the number of elements of `size` bytes in a vector register."""
        return self.vector_bytes // size

    def limited(self, isa: str) -> Target:
        """Return the same CPU limited to `isa`; its code is compiled for a plain CPU of that level.

        "avx512" leaves out the tile unit alone.
        """
        if isa == "avx512":
            return self._replace(features=self.features - {"amx_tile"})
        isas = next((some for some in (config.X86_ISAS, config.ARM_ISAS) if {isa, self.isa} <= {*some}), None)
        if not isas or isas.index(self.isa) < isas.index(isa) or not (self.is_arm or self.machine in X86):
            return self
        name, features = _LEVELS[isa]
        return self._replace(isa=isa, features=self.features & features, llvm=name)


class Tile(NamedTuple):
    """Sizes of the packed product, in elements: the register tile mr x (nv vectors), and the three blocks.

    mr * nv accumulators, nv vectors of B and one broadcast must fit the register file (32 vectors with
    AVX-512 and NEON, 16 with AVX2). A kc x nr panel of B streams from L2, an mc x kc block of A stays in it,
    kc x nc of B stays in L3 (Goto and van de Geijn, ACM TOMS 34(3), 2008).
    """

    mr: int
    nv: int
    mc: int
    kc: int
    nc: int


def tile(target: Target) -> Tile:
    """Return the packed product's sizes, which are the same for every element type."""
    if target.isa == "avx512":
        return Tile(mr=6, nv=4, mc=96, kc=768, nc=2048)
    if target.isa == "avx2":
        return Tile(mr=6, nv=2, mc=96, kc=384, nc=1024)
    if target.is_arm:
        return Tile(mr=6, nv=4, mc=96, kc=256, nc=1024)
    return Tile(mr=4, nv=2, mc=96, kc=256, nc=1024)


class Constants(NamedTuple):
    """By what products are cut into blocks, and for threads, and rungs are chosen; the defaults are a model's.

    `gemmery tune` measures them. None changes the order of a sum, so no bit of a result depends on them.
    """

    mc: int  # rows and columns of the blocks of the packed product, without the tile unit
    nc: int
    # Times L2, from which on reading an unpacked B is slow: a tile that runs down k jumps one row per step. Few rows of
    # A read B once and tolerate a larger one; many rows read it again and again.
    direct_few: float = 2.0
    direct_many: float = 1.0
    # Rows of A up to which reading B once, as streams, beats packing it: m = 128 of 2048 x 2048, f32, Zen 4: 109
    # GFLOP/s streamed, 98 packed; see docs/findings/few_rows_on_a_cpu.md.
    streamed_rows: int = 160
    large_c: float = 4.0  # times L2, from which writing C takes longest in a product with small k
    # ns of work for which a thread is worth waking: a futex wake and scheduling take 5 to 50 us. If a thread comes
    # late, the others have done its parts.
    worth: int = 8_000
    # Bytes of B above which packing integers of 8 and of 16 bits is faster, since a step on their panels is four or two
    # multiply-adds. Zen 4, squares, in place and packed: int8 n = 16 0.33 and 0.32 us, 24 0.60 and 0.45, 64 4.2 and
    # 3.1; int16 n = 96 11.4 and 12.9, 128 25.0 and 15.0.
    direct_int8: int = 256
    direct_int16: int = 24 << 10
    wakes: int = 100_000  # total ns of work for which a single product wakes sleepers


# Intel's cores prefetch within a page, so not down k. Emerald Rapids, L2 of 2 MiB, one thread, direct and packed, of
# MKL's speed: f32 n = 384 1.04, 0.96, 512 0.99, 0.98, 1024 0.94, 1.03; f64 384 1.03, 1.01, 512 0.98, 1.00.
_DIRECT_MANY_INTEL = 0.5
# With AVX2 a step of streams has 10 loads and stores for 12 multiply-adds. Zen 3, us, operands in turn over 40 MB,
# streams and packed: f32, 24 x 1024 x 1024 687, 796, 60 rows 1694, 1591, 130 rows 3771, 3205; f64, 48 x 700 x 700 1240,
# 1253.
_STREAMED_AVX2 = 48


def modeled(target: Target) -> Constants:
    """Return the constants that serve without a table."""
    sizes = tile(target)
    many = _DIRECT_MANY_INTEL if target.is_intel else 1.0
    streamed = _STREAMED_AVX2 if target.isa == "avx2" else 160
    return Constants(sizes.mc, sizes.nc, direct_many=many, streamed_rows=streamed)


override: Constants | None = None  # those in force while `gemmery tune` plans products


def constants(target: Target | None = None) -> Constants:
    """Return the constants of a CPU, by default of this one: those of its table, if it has one, else the model's."""
    return override or _constants(target or host())


@functools.cache
def _constants(target: Target) -> Constants:
    choice, usual, machine = config.table(), modeled(target), described(target)
    files = (os.path.join(folder, file) for folder in config.table_folders() for file in config.table_files(machine))
    if choice == "off" or not (choice or any(map(os.path.exists, files))):
        return usual
    from gemmery.cpu import tuned  # 1 ms with what it imports

    table = tuned.table(machine, usual._asdict())
    if table.ignored:
        import warnings

        warnings.warn(table.ignored, RuntimeWarning, stacklevel=2)
    return usual._replace(**table.constants)


# The features by which kernels are chosen.
_CHOSEN_BY = ("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", *(name for name, *_ in ARM_FEATURES))


def described(target: Target) -> dict[str, str | int]:
    """Return what a table of constants depends on; `cpu`, the CPU's name, is for people: unlike models share one."""
    instructions = " ".join(name for name in _CHOSEN_BY if name in target.features)
    model = target.model or target.cpu or target.machine
    of_model: dict[str, str | int] = {"model": model, "stepping": target.stepping, "isa": target.isa}
    sizes = {"l1d": target.l1d, "l2": target.l2}
    return {"cpu": target.cpu, **of_model, "instructions": instructions, "cores": cores(), **sizes}


def k_block(target: Target, parts: int = 1) -> int:
    """Return the most elements of k, each of `parts` real numbers, that multiply-adds sum in one chain."""
    return tile(target).kc // parts


def deepest(target: Target) -> int:
    """Return the largest k for which FAN sums of blocks are enough: `direct` adds no more."""
    return k_block(target) * FAN


def direct_tile(target: Target) -> tuple[int, int]:
    """Return (mr, nv) of the kernels that read A and B in place."""
    if target.isa == "avx512":
        return (8, 3) if target.copied else (12, 2)
    return (4, 3) if target.isa == "avx2" else (4, 2)


# The least k of `dots`: fewer take most of the time to add lanes (200 x 4 x 32, f32, Zen 4: 3.6 us, 3.4 by `direct`).
DOTS_K = 48
DOTS_ROWS, DOTS_BLOCK = 1024, 1024  # rows of C whose sums it keeps at once, and elements of k in a block
# Elements from one copied column of B to the next: multiples of 4 KiB share one set of the L1 cache.
DOTS_APART = DOTS_BLOCK + 32


def dots_columns(target: Target, size: int, b_layout: str = "col") -> int:
    """Return the most columns of C for which `dots` is fastest: up to 1/2 of a vector, 1/4 if they are copied.

    4 x 6 x 1000, f32, Zen 4: 4.6 us with a copy of 6 columns, 3.5 by `direct`.
    """
    return min(6, target.lanes(size) // (2 if b_layout == "col" else 4))


def instruction_set(features: frozenset[str]) -> str:
    """Return the widest instruction set that a CPU with these features supports in full.

    >>> instruction_set(frozenset({"asimd", "asimddp"})), instruction_set(frozenset({"sse2"}))
    ('neon_dot', 'generic')
    """
    if "asimd" in features:
        return "neon_mmla" if features >= _MMLA else "neon_dot" if "asimddp" in features else "neon"
    return "avx512" if features >= _AVX512 else "avx2" if features >= _AVX2 else "generic"


@functools.cache
def host() -> Target:
    """Return the CPU that this process runs on, limited by GEMMERY_ISA if that is set."""
    machine = platform.machine().lower()
    fields = _cpuinfo()
    flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
    if config.ON_ARM:
        flags = hwcaps() | {"asimd"}  # which each has, where the system says nothing
    isa, limit = instruction_set(flags) if config.ON_ARM or machine in X86 else "generic", config.isa_limit()
    # Registers of 256 bits are used if asked for: Neoverse V1 multiplies two of them in a cycle, or four of 128 bits.
    scalable = f"sve_{8 * sve_bytes(flags)}"
    if scalable in _LEVELS and scalable == (limit or "sve_512"):
        isa = scalable
    l1d, l2, l3 = _caches()
    if "amx_tile" in flags and not _grants_tiles():
        flags -= {"amx_tile"}
    cpu = fields.get("CPU part") or fields.get("model name") or platform.processor() or machine
    model = " ".join(fields[key] for key in _MODEL if key in fields)
    stepping = fields.get("stepping", fields.get("CPU revision", ""))
    steps = int(stepping) if stepping.isdecimal() else 0
    target = Target(isa, flags, cpu, machine, l1d, l2, l3, model=model, stepping=steps)
    return target.limited(limit) if limit else target


# arch_prctl of x86-64 Linux, its request for a state of the processor, and the number of that of tile registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _grants_tiles() -> bool:
    """Ask the system to let this process, its threads and its children use tile registers; Linux 5.16 and newer do."""
    import ctypes  # an import that most CPUs do not need

    return not ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)


def without_tiles() -> str:
    """Return why products do not run on a tile unit (AMX) here, and what to do about it; "" if they do."""
    if host().has_tiles:
        return ""
    if "amx_tile" not in _cpuinfo().get("flags", "").split():
        return "this CPU has no tile unit (Intel AMX), or the system hides it: use packed, which runs on vectors"
    if config.isa_limit():
        return "GEMMERY_ISA switches the tile unit (Intel AMX) off: unset it"
    if not _grants_tiles():
        return (
            "the system does not grant the registers of the tile unit (Intel AMX): Linux does from version 5.16 on, "
            "unless a filter of system calls (seccomp) forbids arch_prctl; update the one or allow the other"
        )
    return "the tile unit (Intel AMX) of this CPU lacks bfloat16 or 8-bit integers: use packed"


def hwcaps(path: str = "/proc/self/auxv") -> frozenset[str]:
    """Return the features of an ARM CPU by Linux's auxiliary vector; none where there is no such file."""
    try:
        with open(path, "rb") as file:
            words = memoryview(file.read()).cast("Q").tolist()
    except OSError:
        return frozenset()
    entries = dict(zip(words[::2], words[1::2], strict=False))
    return frozenset(name for name, entry, bit, _ in ARM_FEATURES if entries.get(entry, 0) >> bit & 1)


def sve_bytes(features: frozenset[str]) -> int:
    """Return the bytes of a vector register of SVE here; 0 for features without it."""
    if "sve" not in features:
        return 0
    import ctypes

    length = int(ctypes.CDLL(None).prctl(_SVE_GET_LENGTH, 0, 0, 0, 0))
    return max(length, 0) & 0xFFFF


_SVE_GET_LENGTH = 51  # a request of prctl


_MODEL = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")


def _cpuinfo() -> dict[str, str]:
    """Return what the system says of the first processor; nothing where it has no /proc/cpuinfo."""
    fields = dict[str, str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip():
                    fields[key.strip()] = value.strip()
                elif fields.keys() & {"flags", "Features"}:
                    break
    except OSError:
        pass
    return fields


def _caches() -> tuple[int, int, int]:
    """Return the data cache sizes of core 0 by level, from sysfs."""
    sizes = {1: 0, 2: 0, 3: 0}
    for index in range(8):
        try:
            level, kind, size = (_text(f"{_SYSFS_CACHES}/index{index}/{name}") for name in ("level", "type", "size"))
        except OSError:
            break
        if kind != "Instruction" and int(level) in sizes:
            factor = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
            sizes[int(level)] = int(size.rstrip("KM")) * factor
    return sizes[1], sizes[2], sizes[3]


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def cores() -> int:
    """Return the number of cores that this process may use, by affinity mask and cgroup quotas (rounded up)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas())]))


_CGROUPS = "/sys/fs/cgroup"


def _quotas() -> Iterator[float]:
    """Yield the cores that the cgroups of this process allow, from its own up to the root, by versions 1 and 2."""
    try:
        groups = _text("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for group in groups:  # "0::/user.slice/job" of version 2, "4:cpu,cpuacct:/job" of version 1
        _, controllers, path = group.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts), -1, -1):  # a container may see only the root of its own group
            folder = "/".join([_CGROUPS, *(["cpu"] if controllers else []), *parts[:count]])
            try:
                if controllers:
                    quota, period = _text(f"{folder}/cpu.cfs_quota_us"), _text(f"{folder}/cpu.cfs_period_us")
                else:
                    quota, period = _text(f"{folder}/cpu.max").split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):
                continue
