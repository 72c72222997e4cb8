"""The operators `gemmery::matmul`, `linear` and `grouped_mm`: schemas, kernels, shapes for tensors without memory.

They are defined with `torch.library.Library`, not with `torch.library.custom_op`: its call of an operator takes 2 us
more, and 5 us where gradients are recorded, in Python layers around the same registrations (PyTorch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from gemmery import api, dtypes
from gemmery.api.grouped import grouped_matmul
from gemmery.arrange import result_shape
from gemmery.arrays.pytorch import NESTED
from gemmery.errors import DeviceError, DTypeError, LayoutError, ShapeError
from gemmery.torch import gradients
from gemmery.torch.gradients import Formula, bilinear, check_weight, have_tangents

_torch: Any = torch  # parts of PyTorch have no types
library = _torch.library.Library("gemmery", "DEF")  # lives as long as the process: without it the operators go

EIGHT_BIT_FLOATS = tuple(getattr(torch, dtypes.get(name).numpy, None) for name in dtypes.FLOAT8)


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    formula: Formula,
    rule: Callable[..., Any],
    tags: tuple[Any, ...] = (),
) -> Any:
    """Define an operator and return it.

    `kernel` computes it on the CPU and on CUDA devices, `fake` returns an empty tensor like its result, for tensors
    whose sizes may be symbols, `formula` has its gradients and `rule` is its torch.func.vmap.
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, kernel, "CPU")
    library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"gemmery::{name}", fake, lib=library)
    _record(name, formula)
    torch.library.register_vmap(f"gemmery::{name}", rule, lib=library)
    operator = getattr(torch.ops.gemmery, name).default
    for device, key in _AUTOCAST.items():
        library.impl(name, _converting(operator, device, key), key.name)
    return operator


def check_types(a: Any, b: Any, promoting: str = "gemmery.matmul") -> None:
    """Raise DTypeError unless both operands have the same element type, as PyTorch's products need.

    `promoting` is the function that multiplies different types, other than float8.
    """
    if a.dtype is b.dtype:
        return
    eight = [x.dtype in EIGHT_BIT_FLOATS for x in (a, b)]
    if all(eight):
        instead = "convert both to torch.float16, which holds every value of float8"
    elif any(eight):
        instead = "convert the float8 one to the type of the other, or both to float32"
    else:
        instead = f"convert one of them, or call {promoting}, which promotes them but records no gradients"
    raise DTypeError(
        f"the operands are {a.dtype} and {b.dtype}, and an operator multiplies one element type: {instead}"
    )


def without_memory(*tensors: Any) -> bool:
    """Return True for tensors on the device meta, whose results have a shape and a type but no numbers."""
    return all(x is None or x.is_meta for x in tensors)


def product(a: Any, b: Any, precision: str | None = None) -> Any:
    """Return a @ b for tensors with memory."""
    check_types(a, b)
    multiply: Any = api.matmul  # an attribute that the first product replaces
    try:
        return multiply(a, b) if precision is None else multiply(a, b, precision=precision)
    except DeviceError:
        if without_memory(a, b):
            return _fake_matmul(a, b)
        raise


def layer(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    precision: str | None = None,
) -> Any:
    """Return activation(input @ weight.T + bias) for tensors with memory."""
    check_types(input, weight)
    if weight.is_nested:
        raise LayoutError(f"weight: {NESTED}")
    check_weight(weight.shape)
    multiply: Any = api.matmul
    try:
        return multiply(input, weight.t(), bias=bias, activation=activation, precision=precision)
    except DeviceError:
        if without_memory(input, weight, bias):
            return _fake_linear(input, weight)
        raise


def result_type(a: Any) -> Any:
    """Return the element type of a product of two tensors like `a`."""
    return torch.bfloat16 if a.dtype in EIGHT_BIT_FLOATS else a.dtype


def _symbolic_shape(a: Any, b: Any) -> Any:
    """Return `result_shape` of sizes that may be symbols, which have no hash."""
    vector = len(b) == 1
    if a and b and a[-1] == b[-1 if vector else -2]:
        with contextlib.suppress(RuntimeError):  # of batches that do not broadcast
            return (*_torch.broadcast_shapes(a[:-2], b[:-2]), *a[-2:-1], *(() if vector else b[-1:]))
    return result_shape(tuple(map(int, a)), tuple(map(int, b)))


def _fake_matmul(a: Any, b: Any, *_: Any) -> Any:
    check_types(a, b)
    return a.new_empty(_symbolic_shape(a.shape, b.shape), dtype=result_type(a))


def _fake_linear(input: Any, weight: Any, *_: Any) -> Any:  # noqa: A002
    check_types(input, weight)
    check_weight(weight.shape)
    shape = _symbolic_shape(input.shape, weight.t().shape)
    return input.new_empty(shape, dtype=result_type(input))


_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def _converting(operator: Any, device: str, key: Any) -> Any:
    """Return an operator that converts the floating-point tensors among its arguments, for torch.autocast."""
    keys = torch._C.DispatchKeySet(key)

    def kernel(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*(_converted(x, dtype) for x in arguments))

    return kernel


def _converted(x: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in the type of autocast; float64 and 8-bit types stay, as in PyTorch's own operators."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype.itemsize not in (2, 4):
        return x
    return x.to(dtype)


_C: Any = torch._C


def recorded_function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Return a function that autograd records.

    autograd.Function takes 1.5 us more than its base class, to look after torch.func.
    """
    # By its key compiled autograd tells functions apart: autograd.Function has this method, its base has not.
    key = "_compiled_autograd_key", lambda ctx: (ctx._autograd_function_id,)
    methods = dict([("forward", forward), ("backward", backward), key])
    return type(name, (_SingleLevelFunction,), {key: staticmethod(method) for key, method in methods.items()})


def _record(name: str, formula: Formula) -> None:
    """Record calls of an operator whose arguments need gradients.

    `torch.library.register_autograd` does the same, but refuses torch.func.grad inside torch.func.vmap, and takes
    longer.
    """
    operator = getattr(torch.ops.gemmery, name).default
    count = len(operator._schema.arguments)

    def forward(ctx: Any, *inputs: Any) -> Any:
        *operands, keys = inputs
        # Levels of torch.func below this one differentiate the product too; autograd.Function has switched that off.
        levels = _C._are_functorch_transforms_active()
        with torch.set_grad_enabled(levels), _set_fwd_grad_enabled(levels), _C._AutoDispatchBelowAutograd():
            result = operator.redispatch(keys, *operands)
            formula.setup_context(ctx, tuple(operands), result)
        return result

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return *formula.backward(ctx, *grads), None

    function = recorded_function(f"gemmery_{name}", forward, backward)

    def kernel(keys: Any, *inputs: Any) -> Any:
        keys &= _C._after_autograd_keyset
        if have_tangents(inputs):
            return formula.forward(operator, inputs)
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
            missing = count - len(inputs)  # the dispatcher leaves out arguments that have their default, None
            inputs = (*inputs, *(None,) * missing, keys)
            if not _C._are_functorch_transforms_active():
                return function.apply(*inputs)
            with enable_single_level_autograd_function():  # each level of torch.func gets here by itself
                return function.apply(*inputs)
        with _C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys, *inputs)

    library.impl(name, kernel, "Autograd", with_keyset=True)


matmul = define(
    "matmul(Tensor a, Tensor b, str? precision=None) -> Tensor",
    product,
    _fake_matmul,
    gradients.MATMUL,
    gradients.batched_matmul,
)
linear = define(
    "linear(Tensor input, Tensor weight, Tensor? bias=None, str? activation=None, str? precision=None) -> Tensor",
    layer,
    _fake_linear,
    gradients.LINEAR,
    gradients.batched_linear,
)


# ---- groups of rows, and `gemmery::grouped_mm_weights`, which the gradient of their matrices needs ----


def products(a: Any, b: Any, offs: Any) -> Any:
    """Return each group's rows of a times the group's matrix of b, for tensors with memory."""
    check_types(a, b, "gemmery.grouped_matmul")
    try:
        return grouped_matmul(a, b, offsets=offs)
    except DeviceError:
        if without_memory(a, b, offs):
            return _fake_products(a, b, offs)
        raise


def _fake_products(a: Any, b: Any, offs: Any) -> Any:
    check_types(a, b, "gemmery.grouped_matmul")
    if a.ndim != 2 or b.ndim != 3:
        raise ShapeError(
            f"grouped_mm multiplies a of shape (rows, k) by b of shape (groups, k, n) (got {tuple(a.shape)} and "
            f"{tuple(b.shape)})"
        )
    if a.shape[1] != b.shape[1]:
        result_shape(tuple(map(int, a.shape)), tuple(map(int, b.shape[1:])))  # raises
    return a.new_empty((a.shape[0], b.shape[2]), dtype=result_type(a))


def _weights(a: Any, grad: Any, offs: Any) -> Any:
    """Return for each group the product of its rows of a, transposed, and those of grad: (groups, k, n)."""
    return grouped_matmul(a.t(), grad, offsets=offs)


def _fake_weights(a: Any, grad: Any, offs: Any) -> Any:
    return a.new_empty((offs.shape[0], a.shape[1], grad.shape[1]))


def _inside(x: Any, offs: Any) -> Any:
    """Return x with zeros in the rows of no group, in which a grouped product has undefined values."""
    if offs.shape[0] == 0:
        return torch.zeros_like(x)
    rows = torch.arange(x.shape[0], device=x.device)
    return x.masked_fill((rows >= _wide(offs)[-1].to(x.device))[:, None], 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _products_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    a, b, offs = ctx.saved_tensors
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = _inside(torch.ops.gemmery.grouped_mm(grad, b.mH, offs), offs)
    if ctx.needs_input_grad[1]:
        grad_b = torch.ops.gemmery.grouped_mm_weights(a.conj(), grad, offs)
    return grad_a, grad_b, None


def _weights_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    a, b, offs = ctx.saved_tensors
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = _inside(torch.ops.gemmery.grouped_mm(b, grad.mH, offs).conj(), offs)
    if ctx.needs_input_grad[1]:
        grad_b = _inside(torch.ops.gemmery.grouped_mm(a.conj(), grad, offs), offs)
    return grad_a, grad_b, None


def _batch_of_products(info: Any, dims: tuple[Any, ...], a: Any, b: Any, offs: Any) -> tuple[Any, int]:
    """Return a batch of grouped products as one."""
    multiply, (in_a, in_b, in_offs), count = torch.ops.gemmery.grouped_mm, dims, info.batch_size
    offs = _wide(offs)
    if in_offs is None and in_b is None:  # the rows of all elements, group by group
        a = a.movedim(in_a, 1)
        return multiply(a.flatten(0, 1), b, offs * count).unflatten(0, a.shape[:2]), 1
    if in_offs is None and in_a is None:  # the columns of all matrices of a group
        b = b.movedim(in_b, 2)
        return multiply(a, b.flatten(2), offs).unflatten(1, b.shape[2:]), 1
    a, b, offs = (repeated(x, dim, count) for x, dim in zip((a, b, offs), dims, strict=True))
    rows = a.shape[1]
    ends = torch.cat((offs[:, :-1], torch.full_like(offs[:, :1], rows)), 1)  # rows of no group: any product will do
    return multiply(a.flatten(0, 1), b.flatten(0, 1), _chained(ends, rows)).unflatten(0, a.shape[:2]), 0


def _batch_of_weights(info: Any, dims: tuple[Any, ...], a: Any, grad: Any, offs: Any) -> tuple[Any, int]:
    multiply, (in_a, in_grad, in_offs), count = torch.ops.gemmery.grouped_mm_weights, dims, info.batch_size
    if in_offs is None and in_grad is None:
        a = a.movedim(in_a, 1)
        return multiply(a.flatten(1), grad, offs).unflatten(1, a.shape[1:]), 1
    if in_offs is None and in_a is None:
        grad = grad.movedim(in_grad, 1)
        return multiply(a, grad.flatten(1), offs).unflatten(2, grad.shape[1:]), 2
    a, grad, offs = (repeated(x, dim, count) for x, dim in zip((a, grad, _wide(offs)), dims, strict=True))
    rows, groups = a.shape[1], offs.shape[1]
    ends = torch.cat((offs, torch.full_like(offs[:, :1], rows)), 1)  # a group of those of no group
    result = multiply(a.flatten(0, 1), grad.flatten(0, 1), _chained(ends, rows))
    return result.unflatten(0, (count, groups + 1))[:, :groups], 0


def _wide(offs: Any) -> Any:
    """Return offsets in a type that counts the rows of a whole batch: int64, or on a CUDA device what kernels read."""
    return offs if offs.is_cuda or offs.is_floating_point() or offs.is_complex() else offs.to(torch.int64)


def repeated(x: Any, dim: int | None, count: int) -> Any:
    """Return an operand with the batch as its first dimension."""
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _chained(ends: Any, rows: int) -> Any:
    """Return the ends of the groups of all elements of a batch, whose rows follow each other."""
    first = torch.arange(ends.shape[0], device=ends.device, dtype=ends.dtype) * rows
    return (ends + first[:, None]).flatten()


GROUPED_MM = Formula(_keep, _products_backward, bilinear)

grouped_mm = define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", products, _fake_products, GROUPED_MM, _batch_of_products
)
grouped_mm_weights = define(
    "grouped_mm_weights(Tensor a, Tensor grad, Tensor offs) -> Tensor",
    _weights,
    _fake_weights,
    Formula(_keep, _weights_backward, bilinear),
    _batch_of_weights,
    tags=(torch.Tag.cudagraph_unsafe,),  # where no kernel reads the offsets, the host does
)
