"""Occupancy of a launch: blocks per multiprocessor, what limits them, waves of the grid.

NVIDIA, CUDA Programming Guide, "Multiprocessor Level" and "Technical Specifications per Compute Capability"; the rules
are those of the driver's cuOccupancyMaxActiveBlocksPerMultiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmery.cuda.device import WARP, Device

REGISTER_UNIT = 256  # registers are allocated to a warp in this unit
PARTITIONS = 4  # of a multiprocessor, each with 1/4 of its registers and warps


@dataclass(frozen=True)
class Occupancy:
    """How much of a device one launch fills."""

    limits: dict[str, int]  # blocks per multiprocessor that each resource allows
    by: tuple[str, ...]  # the resources that limit it
    blocks: int  # that a multiprocessor runs at once
    warps: int
    most_warps: int  # that a multiprocessor holds
    share: float  # of its warps
    slots: int  # blocks that the whole device runs at once
    waves: float  # how often the grid fills the device
    tail: float  # share of the device used by the last wave; 1 if waves are whole
    filled: float  # share of the device's time used by blocks, if all take equally long


def occupancy(device: Device, threads: int, registers: int, shared: int, grid: int = 1) -> Occupancy:
    """Return the occupancy of `grid` blocks of `threads`, with `registers` per thread and `shared` bytes per block.

    >>> from gemmery.cuda.device import card
    >>> occupancy(card("a100"), threads=256, registers=128, shared=32 << 10).limits
    {'registers': 2, 'shared memory': 4, 'warps': 8, 'blocks': 32}
    """
    limits = device.limits
    warps = -(-threads // WARP)
    most = {
        "registers": registered_warps(limits.registers_sm, registers) // warps,
        "shared memory": limits.shared_sm // shared_allocated(device.capability, shared),
        "warps": limits.warps_sm // warps,
        "blocks": limits.blocks_sm,
    }
    blocks = min(most.values())
    slots = blocks * device.sms
    return Occupancy(
        limits=most,
        by=tuple(name for name, number in most.items() if number == blocks),
        blocks=blocks,
        warps=blocks * warps,
        most_warps=limits.warps_sm,
        share=blocks * warps / limits.warps_sm,
        slots=slots,
        waves=grid / slots if slots else 0.0,
        tail=(grid % slots or slots) / slots if slots else 0.0,
        filled=grid / (slots * -(-grid // slots)) if slots and grid else 0.0,
    )


def registered_warps(registers_sm: int, registers: int) -> int:
    """Return the warps whose registers fit: each warp's are rounded up to REGISTER_UNIT, in one partition."""
    each = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    return registers_sm // PARTITIONS // each * PARTITIONS


def shared_allocated(capability: int, shared: int) -> int:
    """Return the shared memory that a block takes: from sm_80 on plus a kilobyte for the system, in whole units."""
    unit, reserved = (128, 1024) if capability >= 80 else (256, 0)
    return max(-(-(shared + reserved) // unit) * unit, 1)
