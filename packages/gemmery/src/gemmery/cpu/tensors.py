"""What compiled code knows of PyTorch: addresses, the words of its dispatcher, its element types."""

from __future__ import annotations

import ctypes
from typing import Any

from gemmery.arrays.pytorch_abi import CODES, Abi
from gemmery.cpu import workspace
from gemmery.cpu.abi import pointers, words

_FUNCTIONS = (
    "data", "dim", "sizes", "strides", "dtype", "storage_size", "storage_offset", "empty", "delete", "wrap",
    "requires_grad", "grad_mode", "modes", "included", "bump",
)  # fmt: skip
# The element types follow, by PyTorch's number: the word that identifies each, and its size.
WORDS = (
    *pointers(*_FUNCTIONS, "tensor_type", "parameter_type"),
    *words("tensor_at", "keys_at", "plain_keys", "inference_keys", "front_key", "back_key", "trace_key"),
    *pointers("get_item"),
    *pointers("forward"),  # the dictionary of torch.autograd.forward_ad
    *pointers("level_name", "no_level"),
)
CODES_AT = 8 * len(WORDS)
_BYTES = CODES_AT + 16 * CODES
_LEVEL = "_current_level"


def element(code: int) -> int:
    """Return the word that identifies an element type of PyTorch: negative, as no word of NumPy's is."""
    return -1 - code


def facts(torch: Any, abi: Abi) -> int:
    """Return the address of what compiled code needs to know of PyTorch, in memory that stays."""
    forward = torch.autograd.forward_ad.__dict__
    item = ctypes.cast(ctypes.pythonapi.PyDict_GetItem, ctypes.c_void_p).value
    types = torch.Tensor, torch.nn.Parameter
    for thing in (*types, forward, _LEVEL):
        workspace.forever(thing)
    words = [abi.functions[name] for name in _FUNCTIONS]
    words += [id(types[0]), id(types[1]), abi.tensor_at, abi.keys_at, abi.plain, abi.inference, *abi.recording]
    words += [item or 0, id(forward), id(_LEVEL), abi.no_level]
    for code in range(CODES):
        row = abi.codes.get(code)
        words += [element(code), row.size] if row else [0, 1]
    at = workspace.pages(_BYTES)
    (ctypes.c_int64 * len(words)).from_address(at)[:] = [*words]
    return at
