"""Special registers and the addresses of variables, which a machine puts into slots before it starts.

PTX ISA 9.0, "Special Registers".
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np

from gemmery_emulator.machine import Machine, unraveled

TIMER = "%globaltimer"  # constant; the CUDA library reads it to limit its waits
CLOCKS = {"%clock": "u4", "%clock64": "u8"}  # the only ones that change: the instructions that warps ran so far
WORKSPACE = "workspace of the grid"  # where cooperative groups count the blocks at grid.sync()
WORKSPACE_AT = ("%envreg1", "%envreg2")  # the high and the low half of its address
GROUPS_AT = "%reserved_smem_offset_1"  # where tiles of several warps of cooperative groups keep barriers and results
GROUPS = 512  # bytes there; the toolkit's headers use 288
AXES = {".x": 0, ".y": 1, ".z": 2}


def value(machine: Machine, name: str) -> Any:
    """Return the address of a variable, or the value of a special register that is modeled."""
    variable = machine.kernel.variables.get(name)
    if variable is not None:
        outside = variable.space in ("global", "const")
        return np.uint64(machine.memory.address(name) if outside else variable.offset)
    stem, axis = name[:-2], AXES.get(name[-2:])
    if axis is not None and stem in _BY_AXIS:
        return _narrow(_BY_AXIS[stem](machine, axis))
    return _narrow(_PLAIN[name](machine))


def shared_bytes(machine: Machine, names: Container[str]) -> int:
    """The shared memory of a block of a kernel that reads these special registers, with what is reserved behind it."""
    size = machine.kernel.shared + machine.launch.shared
    return -(-size // 128) * 128 + GROUPS if GROUPS_AT in names else size


def is_modeled(name: str) -> bool:
    """Whether a special register is modeled: hardware identifiers and performance counters are not."""
    return name in _PLAIN or (name[:-2] in _BY_AXIS and name[-2:] in AXES)


def names() -> tuple[str, ...]:
    """The special registers that are modeled; those with three axes without the axis."""
    return tuple(sorted((*_BY_AXIS, *_PLAIN)))


def _narrow(values: Any) -> Any:
    """Return values as uint32, one scalar if all threads agree; those of another type are scalars already."""
    if isinstance(values, np.bool_ | np.uint64):
        return values
    values = np.asarray(values).astype(np.uint32)
    return values.reshape(-1)[0] if values.ndim == 0 or (values == values[0]).all() else values


def _thread(machine: Machine) -> Any:
    return np.arange(machine.threads) % machine.block_threads


def _ctaid(machine: Machine, axis: int) -> Any:
    return np.repeat(unraveled(machine.block_ids, machine.launch.grid)[axis], machine.block_threads)


def _workspace(machine: Machine, half: int) -> int:
    """Half of the address of the grid's workspace; 0 for a launch without one."""
    address = next((array.start for array in machine.memory.allocations if array.name == WORKSPACE), 0)
    return address >> 32 if half == 0 else address & 0xFFFFFFFF


def _lane(machine: Machine) -> Any:
    return np.arange(machine.threads, dtype=np.uint32) % 32


_BY_AXIS: dict[str, Callable[[Machine, int], Any]] = {
    "%tid": lambda machine, axis: unraveled(_thread(machine), machine.launch.block)[axis],
    "%ctaid": _ctaid,
    "%ntid": lambda machine, axis: machine.launch.block[axis],
    "%nctaid": lambda machine, axis: machine.launch.grid[axis],
    "%clusterid": lambda machine, axis: _ctaid(machine, axis) // machine.launch.cluster[axis],
    "%nclusterid": lambda machine, axis: machine.launch.grid[axis] // machine.launch.cluster[axis],
    "%cluster_ctaid": lambda machine, axis: _ctaid(machine, axis) % machine.launch.cluster[axis],
    "%cluster_nctaid": lambda machine, axis: machine.launch.cluster[axis],
}
_ONE = np.uint32(1)
_PLAIN: dict[str, Callable[[Machine], Any]] = {
    "%laneid": _lane,
    "%warpid": lambda machine: _thread(machine) // 32,
    "%nwarpid": lambda machine: machine.block_threads // 32,
    "%gridid": lambda machine: 0,
    "%is_explicit_cluster": lambda machine: np.bool_(machine.launch.cluster != (1, 1, 1)),
    "%clock": lambda machine: np.uint32(0),
    "%clock64": lambda machine: np.uint64(0),
    TIMER: lambda machine: np.uint64(0),
    WORKSPACE_AT[0]: lambda machine: _workspace(machine, 0),
    WORKSPACE_AT[1]: lambda machine: _workspace(machine, 1),
    "%cluster_ctarank": lambda machine: np.repeat(
        np.arange(machine.blocks) % machine.launch.together, machine.block_threads
    ),
    "%cluster_nctarank": lambda machine: machine.launch.together,
    "%lanemask_eq": lambda machine: _ONE << _lane(machine),
    "%lanemask_lt": lambda machine: (_ONE << _lane(machine)) - _ONE,
    "%lanemask_le": lambda machine: (_ONE << _lane(machine)) * np.uint32(2) - _ONE,
    "%lanemask_gt": lambda machine: ~((_ONE << _lane(machine)) * np.uint32(2) - _ONE),
    "%lanemask_ge": lambda machine: ~((_ONE << _lane(machine)) - _ONE),
    "%dynamic_smem_size": lambda machine: machine.launch.shared,
    "%total_smem_size": lambda machine: machine.kernel.shared + machine.launch.shared,
    GROUPS_AT: lambda machine: machine.shared.size - GROUPS,
}
