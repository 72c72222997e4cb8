"""PyTorch's CPU tensors in the compiled entry: reading operands, allocating results, noticing what only PyTorch sees.

What this code does not take goes to Python, which raises the errors. A tensor's memory is read through PyTorch's C
shim (3 ns a question); a new tensor takes 160 ns, and its Python object 130 ns.
"""

from __future__ import annotations

from gemmery.arrays.pytorch_abi import CODES
from gemmery.cpu import objects
from gemmery.cpu.abi import Args
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_arguments import same
from gemmery.cpu.entry_layout import OPERAND
from gemmery.cpu.ir import Function, FunctionParameter, Module, Value
from gemmery.cpu.tensors import CODES_AT, WORDS

IS_TENSOR = 1 << 32  # in the flags of an operand, above those of NumPy
_MOST_DIMENSIONS = 8  # of a new tensor
_LARGE = 1 << 30  # bytes from which Python allocates, because the shim writes a failure to stderr

NEW = (("i64", "code"), ("i64", "ndim"), "shape", ("i64", "fortran"), "data")


def define(module: Module) -> None:
    """Define what the builtins need for tensors."""
    with _function(module, "read_tensor", "x", "record", returns="i64") as f:
        _read(f, Args(f, f["facts"], WORDS), Args(f, f["record"], OPERAND))
    with _function(module, "recorded", returns="i64") as f:
        f.ret(_recorded(f, Args(f, f["facts"], WORDS)))
    with _function(module, "new_tensor", *NEW, returns="ptr") as f:
        _new(f, Args(f, f["facts"], WORDS))
    with module.function("contiguous", "record", local=True, returns="i64") as f:
        _contiguous(f, Args(f, f["record"], OPERAND))
    with _function(module, "copy_tensor", "record", returns="ptr") as f:
        _copy(f, Args(f, f["record"], OPERAND))
    with module.function("store_tensor", "source", "target", local=True, returns="i64") as f:
        _store(f, Args(f, f["source"], OPERAND), Args(f, f["target"], OPERAND))
    with _function(module, "written", "x") as f:
        _written(f, Args(f, f["facts"], WORDS))


def _function(module: Module, name: str, *params: FunctionParameter, returns: str = "void") -> Function:
    return module.function(name, "facts", *params, local=True, returns=returns)


def _read(f: Function, torch: Args, operand: Args) -> None:
    """Fill an operand's record; return 1 for a dense tensor on the CPU whose gradient is not wanted, else 0.

    The word of keys excludes every other tensor: on other devices, sparse, quantized, nested, conjugate, negative,
    fake, functional, batched, with __torch_dispatch__.
    """
    x, good = f["x"], f.var(f.index(0))
    type_ = f.load("ptr", x + objects.TYPE)
    with f.if_(same(f, type_, torch.tensor_type) | same(f, type_, torch.parameter_type)):
        handle = x + torch.tensor_at
        impl = f.load("ptr", handle)
        keys = f.load("i64", impl + torch.keys_at)
        with f.if_(keys.equals(torch.plain_keys) | keys.equals(torch.inference_keys)):
            tracked = f.var(_true(f, torch.requires_grad, impl))
            with f.if_(tracked.value):
                tracked.value = _true(f, torch.grad_mode)
            code_at = f["facts"] + (_number(f, torch.dtype, handle) & (CODES - 1)) * 16 + CODES_AT
            element, size = f.load("i64", code_at), f.load("i64", code_at + 8)
            operand.object, operand.ndim = x, _word(f, torch.dim, handle)
            operand.data, operand.shape, operand.strides = (
                _word(f, at, handle, "ptr") for at in (torch.data, torch.sizes, torch.strides)
            )
            operand.element, operand.size, operand.unit = element, size, size
            plain = keys.equals(torch.plain_keys)  # an inference tensor is written in inference mode alone: by Python
            operand.flags = f.select(plain, f.index(IS_TENSOR | objects.WRITEABLE), f.index(IS_TENSOR))
            known = (tracked.value ^ True) & element.differs(0) & (f.is_null(operand.data) ^ True)
            with f.if_(known & (_word(f, torch.storage_size, handle) >= _needed(f, torch, operand, handle, size))):
                good.value = 1
    f.ret(good.value)


def _needed(f: Function, torch: Args, operand: Args, handle: Value, size: Value) -> Value:
    """Return the bytes of storage up to the last element of a tensor that has some."""
    last = f.var(_word(f, torch.storage_offset, handle))
    shape, strides = operand.shape, operand.strides
    with f.loop(0, operand.ndim) as i:
        step = f.load("i64", strides + i * 8) * (f.load("i64", shape + i * 8) - 1)
        last.value = last.value + step
    return (last.value + 1) * size


def _recorded(f: Function, torch: Args) -> Value:
    """Return nonzero while PyTorch records, transforms or differentiates operations (forward mode)."""
    level = f.result_of(torch.get_item, "ptr", torch.forward, torch.level_name)
    active = f.result_of(torch.modes, "i64")
    for key in (torch.front_key, torch.back_key, torch.trace_key):
        active = active | f.convert("zext", _true(f, torch.included, key), "i64")
    return active | f.convert("zext", same(f, level, torch.no_level) ^ True, "i64")


def _new(f: Function, torch: Args) -> None:
    """Return a new tensor and store where its memory is, or NULL and no exception: Python then tries.

    It is contiguous, in the order of Fortran if asked for.
    """
    shape, ndim = f["shape"], f["ndim"]
    strides, handle, tensor = f.buffer(8 * _MOST_DIMENSIONS, 8), f.buffer(8, 8), f.var(f.null)
    step = f.var(f.index(1))
    with f.loop(0, ndim) as i:
        axis = f.select(f["fortran"].equals(0), ndim - 1 - i, i) * 8
        f.store(step.value, strides + axis)
        step.value = step.value * f.load("i64", shape + axis)
    code_at = f["facts"] + f["code"] * 16 + CODES_AT
    with f.if_(step.value * f.load("i64", code_at + 8) < _LARGE):
        code, cpu = f.convert("trunc", f["code"], "i32"), f.const("i32", 0)
        error = f.result_of(torch.empty, "i32", ndim, shape, strides, code, cpu, cpu, handle)
        with f.if_(error.equals(0)):
            f.result_of(torch.data, "i32", f.load("ptr", handle), f["data"])
            tensor.value = f.result_of(torch.wrap, "ptr", f.load("ptr", handle))  # 2.5 leaves an empty handle
            f.result_of(torch.delete, "i32", f.load("ptr", handle))
    f.ret(tensor.value)


def _contiguous(f: Function, x: Args) -> None:
    """Return the bytes of a contiguous tensor, 0 for others."""
    ndim, shape, strides = x.ndim, x.shape, x.strides
    step, other = f.var(f.index(1)), f.var(f.index(0))
    with f.loop(0, ndim) as i:
        axis = (ndim - 1 - i) * 8
        length = f.load("i64", shape + axis)
        differs = f.convert("zext", f.load("i64", strides + axis).differs(step.value) & length.differs(1), "i64")
        other.value = other.value | differs
        step.value = step.value * length
    f.ret(f.select(other.value.equals(0) & (ndim <= _MOST_DIMENSIONS), step.value * x.unit, f.index(0)))


def _copy(f: Function, source: Args) -> None:
    """Return a copy of a contiguous tensor from its record, or NULL and no exception for others."""
    copy, data = f.var(f.null), f.buffer(8, 8)
    size = call(f, "i64", "contiguous", f["record"])
    with f.if_(size.differs(0)):
        code, in_order = source.element * -1 - 1, f.index(0)
        copy.value = call(f, "ptr", "new_tensor", f["facts"], code, source.ndim, source.shape, in_order, data)
        with f.if_(f.is_null(copy.value) ^ True):
            _move(f, source.data, f.load("ptr", data), size)
    f.ret(copy.value)


def _store(f: Function, source: Args, target: Args) -> None:
    """Copy one contiguous tensor into another of the same type and shape; return 0 where that is not what they are."""
    size = call(f, "i64", "contiguous", f["source"])
    different = f.var(call(f, "i64", "contiguous", f["target"]) ^ size)
    kinds = source.flags & target.flags & IS_TENSOR ^ IS_TENSOR
    different.value = different.value | kinds | source.element ^ target.element | source.ndim ^ target.ndim
    good = f.var(f.index(0))
    with f.if_(different.value.equals(0) & size.differs(0)):
        with f.loop(0, source.ndim) as i:
            lengths = (f.load("i64", x.shape + i * 8) for x in (source, target))
            different.value = different.value | next(lengths) ^ next(lengths)
        start, end = (f.emit("i64", f"ptrtoint {x.data} to i64") for x in (source, target))
        apart = (start + size <= end) | (end + size <= start)
        with f.if_(different.value.equals(0) & apart):
            _move(f, source.data, target.data, size)
            good.value = 1
    f.ret(good.value)


def _move(f: Function, source: Value, target: Value, size: Value) -> None:
    """Copy bytes between memory that does not overlap."""
    words = size >> 3
    with f.loop(0, words) as i:
        f.store(f.load("i64", source + i * 8, align=1), target + i * 8, align=1)
    with f.loop(words * 8, size) as i:
        f.store(f.load("i8", source + i), target + i)


def _written(f: Function, torch: Args) -> None:
    """Tell autograd that a tensor was written; those of inference mode have no version."""
    x = f["x"]
    keys = f.load("i64", f.load("ptr", x + torch.tensor_at) + torch.keys_at)
    with f.if_(keys.equals(torch.plain_keys)):
        f.call_address(torch.bump, x + torch.tensor_at)


def _word(f: Function, function: Value, handle: Value, type_: str = "i64") -> Value:
    """Ask the shim for a word; 0 where it fails: PyTorch may forbid access to the memory of a tensor."""
    slot = f.buffer(8, 8)
    f.store(f.index(0), slot)
    f.result_of(function, "i32", handle, slot)
    return f.load(type_, slot)


def _number(f: Function, function: Value, handle: Value) -> Value:
    """Ask the shim for a 32-bit number."""
    slot = f.buffer(8, 8)
    f.result_of(function, "i32", handle, slot)
    return f.convert("zext", f.load("i32", slot), "i64")


def _true(f: Function, function: Value, *values: Value) -> Value:
    """Call a C++ function that returns a bool, of which only the low byte is defined."""
    return (f.result_of(function, "i8", *values) & 1).differs(0)
