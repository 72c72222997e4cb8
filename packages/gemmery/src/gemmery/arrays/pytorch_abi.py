"""PyTorch's C functions by address, and the two fields of a tensor that compiled code reads, each checked at first use.

Most functions are PyTorch's C shim for compiled models (`aoti_torch_...`), which reports errors by return codes and
keeps its ABI. The others are C++ functions that take and return words and raise nothing.
Source: torch/csrc/inductor/aoti_torch/c/shim.h; c10/core/TensorImpl.h; torch/csrc/autograd/python_variable.h.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from gemmery import dtypes
from gemmery.tuples import NamedTuple

_TENSOR = (16, 24)  # where the C++ tensor may be in the Python object; before 2.10 it follows a flag
CODES = 64  # PyTorch's numbers of element types are below
_MOST = 192  # the bytes of a TensorImpl in which the key set is looked for

# Names of the functions, and the symbols under which versions of PyTorch export them.
_SYMBOLS = {
    "data": ("aoti_torch_get_data_ptr",),
    "dim": ("aoti_torch_get_dim",),
    "sizes": ("aoti_torch_get_sizes",),
    "strides": ("aoti_torch_get_strides",),
    "dtype": ("aoti_torch_get_dtype",),
    "storage_size": ("aoti_torch_get_storage_size",),
    "storage_offset": ("aoti_torch_get_storage_offset",),
    "empty": ("aoti_torch_empty_strided",),
    "delete": ("aoti_torch_delete_tensor_object",),
    "wrap": ("_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE"),
    "requires_grad": ("_ZNK3c1010TensorImpl13requires_gradEv",),
    "grad_mode": ("_ZN3c108GradMode10is_enabledEv",),
    "modes": ("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",),
    "included": ("_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",),
    "bump": (
        "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
        "_ZN5torch8autograd4impl12bump_versionERKN2at10TensorBaseE",
    ),
}
# The dispatch keys that a thread includes while a transform of torch.func is active, and while torch.jit.trace records.
_RECORDING = ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "Tracer")


class Abi(NamedTuple):
    """What compiled code needs to know of this PyTorch."""

    functions: dict[str, int]  # addresses, by the names above
    tensor_at: (
        int  # in the Python object: the C++ tensor, a pointer to its TensorImpl; its address is the shim's handle
    )
    keys_at: int  # in a TensorImpl: the word that says which libraries' kernels and which properties a tensor has
    plain: int  # that word for a dense tensor on the CPU, neither conjugate nor negative nor wrapped
    inference: int  # the same, created in inference mode
    recording: list[int]  # the dispatch keys of _RECORDING
    codes: dict[int, dtypes.DType]  # PyTorch's number of an element type -> gemmery's
    no_level: int  # the address of the -1 that forward_ad._current_level is outside of forward-mode differentiation


class _Functions(NamedTuple):
    """What the checks call."""

    addresses: dict[str, int]
    tensor_at: int


@functools.lru_cache(maxsize=1)
def abi(torch: Any) -> Abi | None:
    """Return the ABI of the imported PyTorch, or None where a function is missing or a check fails.

    Call it while PyTorch neither records nor transforms operations.
    """
    if sys.implementation.name != "cpython" or object.__basicsize__ != _TENSOR[0]:
        return None
    try:
        library = ctypes.PyDLL(torch._C.__file__)  # its dependencies are searched too
        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            return _checked(torch, library)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError):
        return None


def _checked(torch: Any, library: ctypes.PyDLL) -> Abi | None:
    addresses = {name: _address(library, symbols) for name, symbols in _SYMBOLS.items()}
    plain = torch.empty((4, 6), dtype=torch.float32, device="cpu")[1:, ::2]
    imaginary = torch.empty((2, 2), dtype=torch.complex64, device="cpu")
    with torch.inference_mode():
        inference = torch.empty(3, dtype=torch.int8, device="cpu")
    parameter = torch.nn.Parameter(torch.empty((2, 3), device="cpu"))
    tensors = (plain, imaginary, imaginary.conj(), imaginary.conj().imag, inference, parameter)
    places = [at for at in _TENSOR if all(_word(id(x) + at) == _impl(x) for x in tensors)]
    if not places:
        return None
    functions = _Functions(addresses, places[0])
    offsets = [at for at in range(0, _MOST, 8) if all(_word(_impl(x) + at) == _keys(torch, x) for x in tensors)]
    recording = [torch._C._parse_dispatch_key(name) for name in _RECORDING]
    level = torch.autograd.forward_ad.__dict__["_current_level"]
    codes = {_code(functions, torch, row): row for row in dtypes.BY_NAME.values() if hasattr(torch, row.numpy)}
    good = (
        len(offsets) == 1
        and all(_reads(functions, x) for x in tensors)
        and _tells_gradients(functions, torch, plain, parameter)
        and _tells_recording(functions, torch, recording)
        and _allocates(functions, torch)
        and _bumps(functions, plain)
        and not _call(functions, "modes", ctypes.c_int64)
        and level == -1
        and all(0 <= code < CODES for code in codes)
    )
    if not good:
        return None
    words = _keys(torch, plain), _keys(torch, inference)
    return Abi(addresses, places[0], offsets[0], *words, list(map(int, recording)), codes, id(level))


def _address(library: ctypes.PyDLL, symbols: tuple[str, ...]) -> int:
    for symbol in symbols:
        if hasattr(library, symbol):
            return ctypes.cast(library[symbol], ctypes.c_void_p).value or 0
    raise AttributeError(symbols[0])


def _call(functions: _Functions, name: str, result: Any, *words: Any) -> Any:
    return _prototype(result, *map(type, words))(functions.addresses[name])(*words)


_prototype = functools.cache(ctypes.PYFUNCTYPE)  # which makes a new class each time, in 20 us


def _get(functions: _Functions, name: str, x: Any, word: Any = ctypes.c_int64) -> Any:
    """Call a function of the shim that stores one word."""
    stored = word()
    handle, into = ctypes.c_void_p(id(x) + functions.tensor_at), ctypes.c_void_p(ctypes.addressof(stored))
    if _call(functions, name, ctypes.c_int32, handle, into):
        raise RuntimeError(name)
    return stored.value


def _code(functions: _Functions, torch: Any, row: dtypes.DType) -> int:
    x = torch.empty(0, dtype=getattr(torch, row.numpy), device="cpu")
    return int(_get(functions, "dtype", x, ctypes.c_int32))


def _reads(functions: _Functions, x: Any) -> bool:
    dim = _get(functions, "dim", x)
    sizes, strides = ((ctypes.c_int64 * dim).from_address(_get(functions, name, x)) for name in ("sizes", "strides"))
    return (
        (dim, tuple(sizes), tuple(strides)) == (x.ndim, tuple(x.shape), x.stride())
        and _get(functions, "data", x) == x.data_ptr()
        and _get(functions, "storage_size", x) == x.untyped_storage().nbytes()
        and _get(functions, "storage_offset", x) == x.storage_offset()
    )


def _tells_gradients(functions: _Functions, torch: Any, plain: Any, parameter: Any) -> bool:
    modes = []
    for mode in (False, True):
        with torch.set_grad_enabled(mode):
            modes.append(bool(_call(functions, "grad_mode", ctypes.c_bool)))
    wants = [_call(functions, "requires_grad", ctypes.c_bool, ctypes.c_void_p(_impl(x))) for x in (plain, parameter)]
    return modes == wants == [False, True]


def _tells_recording(functions: _Functions, torch: Any, keys: list[Any]) -> bool:
    guard: Callable[[Any], AbstractContextManager[Any]] = torch._C._IncludeDispatchKeyGuard
    included, active = [], []
    for key in keys:
        included.append(bool(_call(functions, "included", ctypes.c_bool, ctypes.c_int64(int(key)))))
        with guard(key):
            included.append(bool(_call(functions, "included", ctypes.c_bool, ctypes.c_int64(int(key)))))
            active.append(bool(torch._C._are_functorch_transforms_active()))
    return included == [False, True] * 3 and active == [True, True, False]


def _allocates(functions: _Functions, torch: Any) -> bool:
    numbers = ctypes.c_int64 * 2
    sizes, strides, handle = numbers(3, 5), numbers(5, 1), ctypes.c_void_p()
    like = torch.empty(0, dtype=torch.int16, device="cpu")
    code = ctypes.c_int32(_get(functions, "dtype", like, ctypes.c_int32))
    pointers = [ctypes.c_void_p(ctypes.addressof(x)) for x in (sizes, strides, handle)]
    zero = ctypes.c_int32(0)
    if _call(functions, "empty", ctypes.c_int32, ctypes.c_int64(2), *pointers[:2], code, zero, zero, pointers[2]):
        return False
    tensor = _call(functions, "wrap", ctypes.py_object, handle)
    _call(functions, "delete", ctypes.c_int32, handle)
    facts = (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    return facts == (torch.Tensor, (3, 5), (5, 1), torch.int16, torch.device("cpu"), False)


def _bumps(functions: _Functions, x: Any) -> bool:
    before = x._version
    _call(functions, "bump", None, ctypes.c_void_p(id(x) + functions.tensor_at))
    return bool(x._version == before + 1)


def _impl(x: Any) -> int:
    return int(x._cdata)


def _keys(torch: Any, x: Any) -> int:
    return int(torch._C._dispatch_keys(x).raw_repr())


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
