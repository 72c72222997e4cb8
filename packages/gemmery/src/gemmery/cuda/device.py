"""The limits and rates of a CUDA device, present or only named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from gemmery.errors import DeviceError


@dataclass(frozen=True)
class Limits:
    """Limits of an architecture, from the CUDA guide's table "Technical Specifications per Compute Capability"."""

    threads: int  # per block
    shared: int  # bytes of shared memory that a block may opt into
    shared_sm: int  # bytes of shared memory of a multiprocessor
    registers_sm: int
    warps_sm: int
    blocks_sm: int


@dataclass(frozen=True)
class Rates:
    """Operations per clock of one multiprocessor, a multiply-add counting as two; 0 if there is no such unit."""

    f32: int
    f64: int
    tensor: int  # f16 and bf16 on tensor cores, summed in f32
    tensor_tf32: int
    tensor_f64: int
    tensor_8: int = 0  # float8, or int8 where there is no float8


@dataclass(frozen=True)
class Device:
    """One device, present or named."""

    name: str
    capability: int  # 90 for sm_90
    sms: int
    limits: Limits
    l2: int  # bytes
    clock: float  # GHz, boost
    bandwidth: float  # GB/s of its memory, by the data sheet; 0 when unknown
    ordinal: int = -1  # the driver's number, if it is present
    tensor_share: float = 1.0  # share of the architecture's tensor rate: GeForce cards sum in f32 at half of it

    @property
    def arch(self) -> str:
        """The architecture that code is compiled for, including architecture-specific instructions.

        Volta's is that of Turing, the oldest that NVRTC 13 compiles for; its times are predicted from that code.
        """
        return f"sm_{max(self.capability, OLDEST)}{'a' if self.capability >= 90 else ''}"

    @property
    def rates(self) -> Rates:
        """Those of the newest row not newer than its capability: of 86 for 87, of 120 for 121."""
        return RATES[max((row for row in RATES if row <= self.capability), default=min(RATES))]

    def peak(self, unit: str) -> float:
        """Return the GFLOP/s at its clock of a field of Rates; 0 if it has no such unit.

        >>> KNOWN["h200"].peak("f32")
        66908.16
        """
        share = self.tensor_share if unit in ("tensor", "tensor_tf32", "tensor_8") else 1.0
        rate: int = getattr(self.rates, unit)
        return rate * share * self.sms * self.clock


OLDEST = 75  # compute capability that kernels are compiled for
STATIC_SHARED = 48 << 10  # bytes of shared memory that a block may use without opting in
GRID = (2**31 - 1, 65535, 65535)  # blocks
WARP = 32  # threads
THREADS = 1024  # per block, on every device
REGISTERS = 65536  # per multiprocessor, on every device

LIMITS = {
    70: Limits(1024, 96 << 10, 96 << 10, 65536, 64, 32),
    75: Limits(1024, 64 << 10, 64 << 10, 65536, 32, 16),
    80: Limits(1024, 163 << 10, 164 << 10, 65536, 64, 32),
    86: Limits(1024, 99 << 10, 100 << 10, 65536, 48, 16),
    89: Limits(1024, 99 << 10, 100 << 10, 65536, 48, 24),
    90: Limits(1024, 227 << 10, 228 << 10, 65536, 64, 32),
    100: Limits(1024, 227 << 10, 228 << 10, 65536, 64, 32),
    120: Limits(1024, 99 << 10, 100 << 10, 65536, 48, 24),
}
# CUDA Programming Guide, "Throughput of Native Arithmetic Instructions"; tensor cores, dense, by the white papers and
# data sheets of the cards that are not GeForce: T4, A100, A40, L40, H100, B200, RTX PRO 6000.
RATES = {
    70: Rates(128, 64, 1024, 0, 0),
    75: Rates(128, 4, 1024, 0, 0, 2048),
    80: Rates(128, 64, 2048, 1024, 128, 4096),
    86: Rates(256, 4, 1024, 512, 4, 2048),
    89: Rates(256, 4, 1024, 512, 4, 2048),
    90: Rates(256, 128, 4096, 2048, 256, 8192),
    100: Rates(256, 128, 8192, 4096, 128, 16384),
    120: Rates(256, 4, 1024, 512, 4, 2048),
}
_IGNORED = re.compile(r"[\s_-]|nvidia|geforce")  # of common card names
_ARCHITECTURE = re.compile(r"(?:sm|compute)_?(\d+)([af]?)|(\d+)\.(\d)")
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")  # what the kernels are compiled for

# Data sheets and architecture white papers of the vendor, not measured: Volta (v100), Turing (t4, 2080ti), A100 and
# A30, GA102 (a10, a40, a6000 and the rtx30 cards; L2 and clock of rtx3060 as its makers give them), Ada (the rtx40
# cards, l4, and l40s by its data sheet, its L2 as of the L40), H100 and H200, Blackwell. Checked against published
# tables: v100 (cvw.cac.cornell.edu), rtx4060ti, rtx4070 (thefpsreview.com), rtx4070ti, rtx5070 (purespecs.click,
# fpsbench.com), rtx5080, rtx5090 (tweaktown.com), a40, a100 (sysrqmts.com), b200 (chipsandcheese.com).
KNOWN = {
    row.name: row
    for row in (
        Device("h200", 90, 132, LIMITS[90], 60 << 20, 1.98, 4800.0),
        Device("h100", 90, 132, LIMITS[90], 50 << 20, 1.98, 3350.0),
        Device("a100", 80, 108, LIMITS[80], 40 << 20, 1.41, 1555.0),
        Device("rtx3090", 86, 82, LIMITS[86], 6 << 20, 1.695, 936.0, tensor_share=0.5),
        Device("rtx4090", 89, 128, LIMITS[89], 72 << 20, 2.52, 1008.0, tensor_share=0.5),
        Device("rtx5090", 120, 170, LIMITS[120], 96 << 20, 2.407, 1792.0, tensor_share=0.5),
        Device("b200", 100, 148, LIMITS[100], 126 << 20, 1.965, 8000.0),
        Device("v100", 70, 80, LIMITS[70], 6 << 20, 1.53, 900.0),
        Device("t4", 75, 40, LIMITS[75], 4 << 20, 1.59, 320.0),
        Device("2080ti", 75, 68, LIMITS[75], 5632 << 10, 1.545, 616.0, tensor_share=0.5),
        Device("a30", 80, 56, LIMITS[80], 24 << 20, 1.44, 933.0),
        Device("a10", 86, 72, LIMITS[86], 6 << 20, 1.695, 600.0),
        Device("a40", 86, 84, LIMITS[86], 6 << 20, 1.74, 696.0),
        Device("rtx3080", 86, 68, LIMITS[86], 5 << 20, 1.71, 760.0, tensor_share=0.5),
        Device("l4", 89, 58, LIMITS[89], 48 << 20, 2.04, 300.0),
        Device("l40s", 89, 142, LIMITS[89], 96 << 20, 2.52, 864.0),
        Device("rtx4080", 89, 76, LIMITS[89], 64 << 20, 2.505, 716.8, tensor_share=0.5),
        Device("a6000", 86, 84, LIMITS[86], 6 << 20, 1.8, 768.0),
        Device("rtx3070", 86, 46, LIMITS[86], 4 << 20, 1.725, 448.0, tensor_share=0.5),
        Device("rtx3060", 86, 28, LIMITS[86], 3 << 20, 1.777, 360.0, tensor_share=0.5),
        Device("rtx4070", 89, 46, LIMITS[89], 36 << 20, 2.475, 504.0, tensor_share=0.5),
        Device("rtx4060ti", 89, 34, LIMITS[89], 32 << 20, 2.535, 288.0, tensor_share=0.5),
        Device("rtx4070ti", 89, 60, LIMITS[89], 48 << 20, 2.61, 504.2, tensor_share=0.5),
        Device("rtx5070", 120, 48, LIMITS[120], 48 << 20, 2.512, 672.0, tensor_share=0.5),
        Device("rtx4060", 89, 24, LIMITS[89], 24 << 20, 2.46, 272.0, tensor_share=0.5),
        Device("rtx5080", 120, 84, LIMITS[120], 64 << 20, 2.617, 960.0, tensor_share=0.5),
    )
}


def card(name: str) -> Device:
    """Return a card of the table by its name, its architecture or its compute capability, in any case.

    >>> card("RTX 3090").arch, card("SM_80").name, card("9.0").name
    ('sm_86', 'a100', 'h200')

    Raises DeviceError for a name that is not known; the message suggests one that is spelled like it.
    """
    spelled = _IGNORED.sub("", name.lower())
    for row in KNOWN.values():
        sm = f"{row.capability // 10}.{row.capability % 10}"
        if spelled in (row.name, f"sm{row.capability}", f"sm{row.capability}a", f"compute{row.capability}", sm):
            return row
    archs = dict.fromkeys(row.arch for row in KNOWN.values())
    close = get_close_matches(spelled, (*KNOWN, *archs), 1)
    meant = f"; did you mean {close[0]!r}?" if close else ";"
    raise DeviceError(
        f"device {name!r} is neither present nor known{meant} known: cuda, cuda:N, {', '.join((*KNOWN, *archs))}"
    )


def architecture(name: str) -> str:
    """Return the architecture that code is compiled for, by its own name or by that of a card, in any case.

    >>> architecture("SM_87"), architecture("9.0"), architecture("H100")
    ('sm_87', 'sm_90', 'sm_90a')

    Raises DeviceError for a name that is not known, and for architectures before the first of the table.
    """
    match = _ARCHITECTURE.fullmatch(name.strip().lower())
    if match:
        number = match[1] or match[3] + match[4]
        if int(number) >= min(LIMITS):
            return f"sm_{number}{match[2] or ''}"
    return card(name).arch
