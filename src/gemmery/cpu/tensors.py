"""What compiled code knows of PyTorch: addresses, the words of its dispatcher, its element types."""

from __future__ import annotations

import ctypes
from typing import Any

from gemmery.arrays.pytorch_abi import CODES, Abi
from gemmery.cpu import workspace

_FUNCTIONS = (
    "data", "dim", "sizes", "strides", "dtype", "storage_size", "storage_offset", "empty", "delete", "wrap",
    "requires_grad", "grad_mode", "modes", "included", "bump",
)  # fmt: skip
# The element types follow, by PyTorch's number: the word that identifies each, and its size.
WORDS = (
    *((name, "ptr") for name in _FUNCTIONS),
    ("tensor_type", "ptr"),
    ("parameter_type", "ptr"),
    ("tensor_at", "i64"),
    ("keys_at", "i64"),
    ("plain_keys", "i64"),
    ("inference_keys", "i64"),
    ("front_key", "i64"),
    ("back_key", "i64"),
    ("trace_key", "i64"),
    ("get_item", "ptr"),
    ("forward", "ptr"),  # the dictionary of torch.autograd.forward_ad
    ("level_name", "ptr"),
    ("no_level", "ptr"),
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
