"""Views of the memory of PyTorch tensors. PyTorch is not imported here: a caller that has a tensor has imported it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gemmery import dtypes
from gemmery.arrays.views import View, contiguous, elsewhere, no_memory, only_on_devices, reach
from gemmery.errors import DeviceError, DTypeError, GemmeryError, LayoutError

NESTED = (
    "a nested tensor has no single shape: multiply its parts (x.unbind()), or pad it with "
    "torch.nested.to_padded_tensor(x, 0)"
)
_ROWS: dict[object, dtypes.DType] = {}  # PyTorch's element types seen so far -> gemmery's


def guard(torch: Any) -> Callable[[], Any]:
    """Return a function that is true while PyTorch records or transforms operations, and would not see gemmery's.

    That is under torch.jit.trace, a dispatch mode, a torch.func transform, or forward-mode differentiation.
    """
    c, forward = torch._C, torch.autograd.forward_ad
    tracing, modes, transforms = c._is_tracing, c._len_torch_dispatch_stack, c._are_functorch_transforms_active

    def is_unseen() -> Any:
        return modes() or tracing() or transforms() or forward._current_level >= 0

    return is_unseen


def view(tensor: Any) -> View:
    """Return the memory of a tensor on the CPU or on a CUDA device.

    Raises LayoutError for tensors that only PyTorch can multiply (sparse, nested, fake, tracked by autograd), and for
    all tensors while PyTorch records or transforms operations, because it does not see gemmery's.
    """
    torch: Any = sys.modules["torch"]
    c = torch._C
    if c._is_tracing() or c._len_torch_dispatch_stack() or c._are_functorch_transforms_active():
        raise _unseen(torch)
    if tensor.is_nested:
        raise LayoutError(NESTED)
    if type(tensor) is not torch.Tensor and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise LayoutError(
            f"{type(tensor).__name__} defines its own arithmetic (__torch_dispatch__): pass a plain tensor, or use "
            "torch.matmul"
        )
    try:
        return _view(tensor, torch)
    except (RuntimeError, ValueError) as error:  # what PyTorch raises for a property that a tensor does not have
        if isinstance(error, GemmeryError):
            raise
        reason = str(error).partition("\n")[0]
        raise LayoutError(f"the memory of a {type(tensor).__name__} cannot be read: {reason}") from error


def _view(tensor: Any, torch: Any) -> View:
    device, stream = "cpu", 0
    if not tensor.is_cpu:
        if not tensor.is_cuda:
            if tensor.is_meta:
                raise DeviceError("a tensor on the device 'meta' has no memory: create it on 'cpu' or 'cuda'")
            raise elsewhere(tensor.device.type)
        ordinal = tensor.get_device()
        device, stream = f"cuda:{ordinal}", torch._C._cuda_getCurrentRawStream(ordinal)
    if tensor.layout is not torch.strided:
        raise LayoutError(f"a tensor of layout {tensor.layout} is not dense: pass x.to_dense()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise LayoutError(
            "the tensor requires grad, and this function records no gradients: call gemmery.torch, "
            "whose functions do, or pass x.detach()"
        )
    if _in_dual_level(torch) and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise LayoutError(
            "the tensor has a tangent of forward-mode differentiation, and gemmery computes none: pass "
            "torch.autograd.forward_ad.unpack_dual(x).primal, or use torch.matmul"
        )
    row = _ROWS.get(tensor.dtype) or _row(tensor)
    if device == "cpu" and row.name in dtypes.FLOAT8:
        raise only_on_devices(row.numpy)
    writable = not tensor.is_inference() or torch.is_inference_mode_enabled()  # PyTorch refuses it too
    if tensor.is_neg() or (row.kind == "c" and tensor.is_conj()):  # lazily negated: the memory holds the other sign
        tensor, writable = tensor.resolve_conj().resolve_neg(), False
    pointer = tensor.data_ptr()
    shape, strides, span = _in_bytes(tensor.shape, tensor.stride(), row.size, row.name)
    if span and (not pointer or span + row.size * tensor.storage_offset() > tensor.untyped_storage().nbytes()):
        raise _no_storage(tensor, span)
    return View(pointer, shape, strides, row.name, device, stream, writable, tensor)


def empty(array: Any, shape: tuple[int, ...], dtype: str) -> View:
    """Return an uninitialized C-contiguous tensor on the device of the tensor `array`, by its View."""
    torch: Any = sys.modules["torch"]
    row = dtypes.get(dtype)
    try:
        tensor = torch.empty(shape, dtype=getattr(torch, row.numpy), device=array.device)
    except RuntimeError as error:  # PyTorch has an OutOfMemoryError of its own for CUDA devices alone
        if not array.is_cpu:
            raise
        raise MemoryError(f"no memory for a {row.numpy} tensor of shape {tuple(shape)}") from error
    if not tensor.is_cpu:
        return view(tensor)
    return View(tensor.data_ptr(), shape, contiguous(shape, row.size), dtype, owner=tensor)


def device_allocator(torch: Any) -> tuple[Callable[..., Any] | None, Callable[[], int]]:
    """Return a function (shape, strides, type) -> a tensor on the current CUDA device, and the number of that device.

    It is what code of torch.compile allocates by, and takes 0.8 us less than `new_empty_strided`. None where this
    PyTorch has none.
    """
    try:
        return torch._C._dynamo.guards._empty_strided_cuda, torch._C._cuda_getDevice
    except AttributeError:  # before 2.1, or built without CUDA
        return None, lambda: -1


def version_bump(torch: Any) -> Callable[[tuple[Any, ...]], Any]:
    """Return `written` for tuples of tensors, without the 60 ns of PyTorch's public function where that is possible."""
    direct: Callable[[tuple[Any, ...]], Any]
    try:
        direct = torch._C._increment_version
        direct((torch.empty(0),))
    except (AttributeError, TypeError):  # other versions take one tensor here
        return lambda tensors: [torch.autograd.graph.increment_version(tensor) for tensor in tensors]
    return direct


def comparer(torch: Any) -> Callable[..., Callable[..., bool]] | None:
    """Return what makes a comparison: of tensors with those that it was made for, all by one call.

    It is what torch.compile decides by whether code that it made for some tensors fits others. It is true for tensors
    of the same types (classes and elements), devices, shapes, strides, bits (conjugate, negative) and `requires_grad`,
    if none comes twice. A nested tensor ends the process: ask before. None where this PyTorch has no such function, or
    where it does not tell tensors apart.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards

        def make(*tensors: Any) -> Callable[..., bool]:
            check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            return check

        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            return make if _tells_apart(make, torch) else None
    except (AttributeError, RuntimeError, SystemError, TypeError):
        return None


def _tells_apart(make: Callable[..., Callable[..., bool]], torch: Any) -> bool:
    """Return True if comparisons see in each of two tensors all that they must see."""

    def plain() -> Any:
        return torch.empty((4, 6), dtype=torch.float32, device="cpu")

    class Other(torch.Tensor):  # type: ignore[misc]
        """A tensor with a class of its own."""

    x, y = plain(), plain()
    others = [
        torch.empty((4, 7), dtype=torch.float32, device="cpu")[:, :6],
        torch.empty((4, 7), dtype=torch.float32, device="cpu"),
        torch.empty((4, 6, 1), dtype=torch.float32, device="cpu"),
        torch.empty((4, 6), dtype=torch.int32, device="cpu"),
        torch.empty((4, 6), dtype=torch.float32, device="meta"),
        torch._neg_view(plain()),
        plain().requires_grad_(True),
        torch.nn.Parameter(plain(), requires_grad=False),
        plain().as_subclass(Other),
    ]
    same = make(x, y)
    return same(plain(), plain()) is True and not any(same(x, other) or same(other, y) for other in others)


@lru_cache(maxsize=1024)
def _in_bytes(
    shape: tuple[int, ...], stride: tuple[int, ...], size: int, dtype: str
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shape as a plain tuple, the strides in bytes, and the size in bytes of the memory range."""
    shape, strides = tuple(shape), tuple(size * step for step in stride)
    return shape, strides, reach(shape, strides, dtype)[1]


def _in_dual_level(torch: Any) -> bool:
    """Return True where a tensor may have a tangent; not inside an operator, whose tangents autograd has taken off."""
    level: int = torch.autograd.forward_ad._current_level
    c = torch._C
    return level >= 0 and not c._dispatch_tls_is_dispatch_key_excluded(c.DispatchKey.AutogradFunctionality)


def _row(tensor: Any) -> dtypes.DType:
    text = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        raise DTypeError(f"a quantized tensor ({text}) is not supported: pass x.dequantize()")
    row = _ROWS[tensor.dtype] = dtypes.get(text)
    return row


def _unseen(torch: Any) -> LayoutError:
    """Return the error for a product while PyTorch records or transforms operations."""
    if torch._C._is_tracing():
        what = "torch.jit.trace cannot record"
    elif torch._C._are_functorch_transforms_active():
        what = "torch.func (vmap, grad, functionalize) cannot transform"
    else:
        mode = type(torch.utils._python_dispatch._get_current_dispatch_mode()).__name__
        what = f"{mode}, a dispatch mode as torch.export and make_fx use, cannot see"
    return LayoutError(f"{what} products of gemmery: call gemmery outside, or use torch.matmul inside")


def _no_storage(tensor: Any, span: int) -> LayoutError:
    have = tensor.untyped_storage().nbytes()
    if not tensor.data_ptr() and (have or tensor._is_zerotensor()):
        return no_memory(f"a tensor of shape {tuple(tensor.shape)}")
    need = span + tensor.element_size() * tensor.storage_offset()
    return LayoutError(
        f"a tensor of shape {tuple(tensor.shape)} needs {need} bytes of storage and has {have}: the storage was "
        "resized, as FSDP does with parameters that are not in use; allocate it again first"
    )
