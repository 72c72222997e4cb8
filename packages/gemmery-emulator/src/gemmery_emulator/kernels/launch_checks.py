"""Checks of the arguments of emulate(), and arrays on the memory of tensors and buffers."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemmery import arrays
from gemmery.cuda import device
from gemmery.errors import ArgumentError, DeviceError, brief
from gemmery_emulator.kernels.programs import three
from gemmery_emulator.machine import Dims

Sides = int | Sequence[int]
FLOATS_OF_8_BITS = tuple(f"torch.float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))


def argument(place: int, value: Any) -> Any:
    """Return an array on the memory of a tensor, a buffer or what DLPack describes; any other argument as it is."""
    if isinstance(value, np.ndarray | np.generic | bytes | bytearray | int | float | None):
        return value
    if isinstance(value, list | tuple):
        inside = [argument(place, each) for each in value]
        return inside if isinstance(value, list) else tuple(inside)
    torch = arrays.library(value, "torch", "Tensor")
    if torch is not None:
        if value.device.type != "cpu":
            raise ArgumentError(f"argument {place} is a tensor on {value.device}: pass tensor.cpu()")
        if value.layout != torch.strided:
            raise ArgumentError(f"argument {place} is a tensor of layout {value.layout}: pass tensor.to_dense()")
        plain = value.detach()
        bits = {"torch.bfloat16": torch.uint16, **dict.fromkeys(FLOATS_OF_8_BITS, torch.uint8)}
        value = plain.view(bits[str(plain.dtype)]) if str(plain.dtype) in bits else plain
    try:
        if torch is not None:
            return value.numpy()
        if hasattr(value, "__array_interface__"):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        if hasattr(value, "__dlpack__"):
            raise ArgumentError(f"argument {place} cannot be read on the CPU ({error}): pass a NumPy array") from None
        return value  # a tensor map, or what no kernel takes


def steps(args: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Return the strides of the matrices among a kernel's arguments."""
    arrays = {f"argument {place}": value for place, value in enumerate(args) if isinstance(value, np.ndarray)}
    return {name: (array.strides[0], array.strides[1]) for name, array in arrays.items() if array.ndim == 2}


def type_error(
    kernel: Any,
    args: Any,
    shared: Any,
    options: Any,
    variables: Any,
    seed: Any,
    max_steps: Any,
    seconds: Any,
    **flags: Any,
) -> str:
    """Return what is wrong with the type of an argument; "" if nothing is."""
    if not isinstance(kernel, str):
        return f"kernel={brief(kernel)}: pass the name of a kernel as a string"
    if not isinstance(args, list | tuple):
        return f"args is of type {type(args).__name__}: pass a list of the kernel's arguments, such as [x, y]"
    if not isinstance(shared, int | np.integer) or shared < 0:
        return f"shared={brief(shared)}: pass the bytes of shared memory, a whole number >= 0"
    if not isinstance(options, list | tuple) or not all(isinstance(option, str) for option in options):
        return f"options={brief(options)}: pass a tuple of strings, one for each option, such as ('-DN=4',)"
    if not isinstance(variables, Mapping | None):
        return f"variables is of type {type(variables).__name__}: pass a dictionary of arrays, such as {{'table': x}}"
    if seed is not None and (not isinstance(seed, int | np.integer) or seed < 0):
        return f"seed={brief(seed)}: pass a whole number >= 0, or None for ascending order"
    if not isinstance(max_steps, int | np.integer) or max_steps < 1:
        return f"max_steps={brief(max_steps)}: pass a whole number >= 1"
    if not isinstance(seconds, int | float) or not seconds > 0:
        return f"seconds={brief(seconds)}: pass a number > 0, or math.inf for no limit"
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            return f"{name}={brief(flag)}: pass True or False"
    return ""


def architecture(arch: Any) -> str:
    """The architecture that a name or a card means; raises ArgumentError for another."""
    try:
        return device.architecture(arch)
    except (AttributeError, TypeError, DeviceError) as error:  # not a string, or an unknown name
        reason = f"; {error}" if isinstance(error, DeviceError) else ""
        raise ArgumentError(
            f"arch={brief(arch)}: pass an architecture from sm_{min(device.LIMITS)} on, such as 'sm_80' or 'sm_90a', "
            f"or a card, such as 'rtx3090'{reason}"
        ) from None


def dims(name: str, value: Sides) -> Dims:
    """A grid, a block or a cluster as three sides; raises ArgumentError for what is none."""
    sides = tuple(value) if isinstance(value, Sequence) else (value,)
    try:
        whole = [int(side) for side in sides]
    except (TypeError, ValueError, OverflowError):
        whole = []
    if not 1 <= len(whole) <= 3 or any(a != b or a < 1 for a, b in zip(whole, sides, strict=True)):
        raise ArgumentError(f"{name}={brief(value)}: pass a whole number >= 1, or a tuple of up to three")
    return three(tuple(whole))
