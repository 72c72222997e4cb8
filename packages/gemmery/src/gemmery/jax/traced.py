"""matmul for JAX: its types and shapes, its gradients, its batches, and operands that several devices share.

A product has sides m, n and k and one for each batch dimension. An axis of devices that cuts m, n or the batch cuts the
result too, without communication. One that cuts k leaves each device a part of the sums, which are then added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from gemmery import dtypes
from gemmery.api.device_operands import checked
from gemmery.api.options import only_on_devices
from gemmery.api.promote import can_cast, kernel_types
from gemmery.arrange import Ints, result_shape
from gemmery.errors import ArgumentError, DTypeError, ShapeError, brief
from gemmery.jax import handler
from gemmery.jax.handler import A_TRANSPOSED, B_TRANSPOSED, StaticProduct
from gemmery.keywords import Options


@functools.partial(jax.jit, static_argnames=("preferred_element_type", "precision"))
def matmul(a: Any, b: Any, *, preferred_element_type: Any = None, precision: str | None = None) -> jax.Array:
    """Return the matrix product of two JAX arrays, with the semantics of `jax.numpy.matmul`.

    >>> import jax, jax.numpy as jnp
    >>> from gemmery.jax import matmul
    >>> matmul(jnp.ones((2, 3)), jnp.ones((3, 1)))
    Array([[3.],
           [3.]], dtype=float32)
    >>> jax.grad(lambda a, b: matmul(a, b).sum())(jnp.ones((2, 3)), jnp.ones((3, 1)))
    Array([[1., 1., 1.],
           [1., 1., 1.]], dtype=float32)

    `a` is (..., m, k) or (k,), `b` is (..., k, n) or (k,); batch dimensions broadcast, without copies. Element types
    are promoted by JAX's rules; all that `gemmery.matmul` multiplies on the same device are supported, except bool and
    8-bit floating point. With `preferred_element_type` sums are returned in a wider type: float32 for bfloat16, int32
    for int8. `precision` is that of `gemmery.matmul`, for float32 and float64 on a CUDA device; gradients have it too.
    Accuracy and determinism are those of `gemmery.matmul`, but on the CPU XLA treats subnormal numbers as zero.

    It works under `jit`, `grad` (reverse mode, of any order) and `vmap`, which makes one product of a batch. The
    gradients are products of the same kind, of operands that are not transposed in memory. Forward-mode
    differentiation (`jvp`, `jacfwd`) is refused by JAX.

    Raises ShapeError for shapes that cannot be multiplied and for dimensions unknown when JAX traces, DTypeError for
    element types that are not supported, ArgumentError for what is no array and for a precision that the product cannot
    have, and DeviceError on systems other than Linux. They are raised when JAX traces the call, apart from those for
    element types that only the CPU multiplies.
    """
    x, y = _array("a", a), _array("b", b)
    for name, z in (("a", x), ("b", y)):
        if not all(isinstance(side, int) for side in z.shape):
            raise ShapeError(f"{name} has the shape {z.shape}: gemmery.jax needs dimensions that are known when traced")
    shape = result_shape(x.shape, y.shape)
    common = jnp.promote_types(x.dtype, y.dtype)
    source, out = _types(common, preferred_element_type)
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    columns = y.reshape(-1, 1) if y.ndim == 1 else y
    kind = np.dtype(common) if source == _name(common) else _numpy(source)
    checked(precision, source, out)
    if jax.default_backend() == "cpu":
        only_on_devices(Options(precision=precision))
    operands = _of_one_kind(rows.astype(kind), columns.astype(kind))
    return _product(*operands, 0, out, precision or "").reshape(shape)


def _array(name: str, x: Any) -> jax.Array:
    """Return an operand as an array of JAX. Raises ArgumentError for what is none."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is {brief(x)}, and no array: pass one") from error


def _name(dtype: Any) -> str:
    """Return gemmery's name of an element type that kernels of the CPU multiply."""
    row = dtypes.BY_NUMPY_NAME.get(np.dtype(dtype).name)
    if row is None or row.name == "bool":
        raise DTypeError(
            f"{np.dtype(dtype).name} is not supported by gemmery.jax, which multiplies "
            f"{', '.join(dtypes.get(name).numpy for name in dtypes.NAMES)}: convert with astype first"
        )
    return row.name


def _numpy(name: str) -> np.dtype[Any]:
    return np.dtype(jnp.bfloat16 if name == "bf16" else dtypes.get(name).numpy)


def _types(common: Any, preferred: Any) -> tuple[str, str]:
    """Return the types of the operands of a kernel, and that of its result."""
    name = _name(common)
    if preferred is None:
        return name, name
    wide = _preferred(preferred)
    if not can_cast(name, wide, "safe"):
        raise DTypeError(
            f"preferred_element_type={dtypes.get(wide).numpy} cannot represent every {dtypes.get(name).numpy} value; "
            "pass a wider type, or convert the operands first"
        )
    source, _ = kernel_types(name, wide)
    return source, wide  # modulo 2**bits a result has the same bits with a sign and without


def _preferred(preferred: Any) -> str:
    """Return gemmery's name of `preferred_element_type`."""
    try:
        dtype = np.dtype(preferred)
    except TypeError as error:
        raise DTypeError(
            f"preferred_element_type={brief(preferred)} is no element type; pass one such as jnp.float32"
        ) from error
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise DTypeError(
            f"preferred_element_type={dtype.name} has 64-bit numbers, which JAX does not compute with here: set "
            "jax_enable_x64, or pass a narrower type"
        )
    return _name(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(a: jax.Array, b: jax.Array, transposed: int, out: str, precision: str = "") -> jax.Array:
    """Return the product of arrays of one type, each transposed in its last two dimensions or not."""
    return _batchable(transposed, out, precision)(a, b)


def _backward(
    transposed: int, out: str, precision: str, operands: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of both operands: dA = dC B' and dB = A' dC, of A and B as they were multiplied."""
    a, b = operands
    a_turned, b_turned = bool(transposed & A_TRANSPOSED), bool(transposed & B_TRANSPOSED)
    c, x, y = (z.astype(jnp.promote_types(gradient.dtype, a.dtype)) for z in (gradient, a, b))
    name = _name(c.dtype)
    product = functools.partial(_product, out=name, precision=precision)
    if a_turned:
        da = product(y, c, A_TRANSPOSED * b_turned | B_TRANSPOSED)
    else:
        da = product(c, y, B_TRANSPOSED * (not b_turned))
    if b_turned:
        db = product(c, x, A_TRANSPOSED | B_TRANSPOSED * a_turned)
    elif b.ndim == 2 and not a_turned and (a.ndim == 2 or not _explicit(a)):  # the batch is more rows
        rows = math.prod(x.shape[:-1])  # not -1, which has no value where a side is 0
        db = product(x.reshape(rows, x.shape[-1]), c.reshape(rows, c.shape[-1]), A_TRANSPOSED)
    else:
        db = product(x, c, A_TRANSPOSED * (not a_turned))
    return _cut_like(_summed(da, a), a), _cut_like(_summed(db, b), b)


_product.defvjp(lambda a, b, *options: (_product(a, b, *options), (a, b)), _backward)


def _summed(gradient: jax.Array, operand: jax.Array) -> jax.Array:
    """Sum a gradient over the batch in which the operand was repeated, and round it to the operand's type."""
    extra = gradient.ndim - operand.ndim
    repeated = [axis for axis in range(gradient.ndim) if axis < extra or operand.shape[axis - extra] == 1]
    axes = tuple(axis for axis in repeated if axis < extra or gradient.shape[axis] != 1)
    return gradient.sum(axes).reshape(operand.shape).astype(operand.dtype)


@functools.cache
def _batchable(transposed: int, out: str, precision: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the product as a function for which `vmap` makes one product of the whole batch."""

    def added(a: jax.Array, b: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        wide = "f32" if axes and out in ("f16", "bf16") else out  # so that the sum of sums is rounded once
        return jax.lax.psum(_called(a, b, transposed, wide, precision), axes).astype(_numpy(out))

    partitioned = _partitionable(added, transposed)
    whole = functools.partial(_typed, partitioned, transposed=transposed)
    product = jax.custom_batching.custom_vmap(whole)

    def batched(_: int, which: list[bool], a: jax.Array, b: jax.Array) -> tuple[jax.Array, bool]:
        count = max(z.ndim - moves for z, moves in zip((a, b), which, strict=True))
        # Dimensions of length 1 after the first, so that `count` follow it: the others then broadcast as before.
        a, b = (
            z.reshape(z.shape[0], *[1] * (count + 1 - z.ndim), *z.shape[1:]) if moves else z
            for z, moves in zip((a, b), which, strict=True)
        )
        return product(a, b), True

    product.def_vmap(batched)
    multiply: Callable[[jax.Array, jax.Array], jax.Array] = product
    return multiply


def _called(a: jax.Array, b: jax.Array, transposed: int, out: str, precision: str) -> jax.Array:
    """Return the result of the custom call."""
    product = StaticProduct(a.shape, b.shape, _name(a.dtype), out, transposed, precision)
    shape, dtype, axes = product.shape, _numpy(out), tuple(_varying(a))
    if 0 in (*a.shape, *b.shape):
        return jax.lax.pcast(jnp.zeros(shape, dtype), axes, to="varying")
    source, kernel_out = kernel_types(product.dtype, out)
    assert source == product.dtype
    handler.register()
    if jax.default_backend() == "cpu":  # else the handler prepares what runs on the CPU all the same
        handler.know(product._replace(out=kernel_out))
    call = jax.ffi.ffi_call(handler.TARGET, jax.ShapeDtypeStruct(shape, dtype))
    key = product._replace(out=kernel_out).key
    result: jax.Array = call(a, b, key=np.int64(key), transposed=np.int64(product.form))  # by their names' order
    return jax.lax.pcast(result, axes, to="varying")


MeshAxes = tuple[str, ...]
Cuts = tuple[PartitionSpec, PartitionSpec, PartitionSpec, MeshAxes]  # of A, B and C, and the axes that cut k


def _sides(transposed: int, shapes: Any) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the sides of A, B and C. A dimension that is repeated along the batch has its own name."""
    a, b, c = shapes

    def letters_of(letter: str, shape: Ints, matrix: str) -> list[str]:
        first = len(c) - len(shape)
        batch = (f"batch{i}" if shape[i - first] == c[i] else f"{letter}{i}" for i in range(first, len(c) - 2))
        return [*batch, *matrix]

    a_matrix, b_matrix = "km" if transposed & A_TRANSPOSED else "mk", "nk" if transposed & B_TRANSPOSED else "kn"
    return letters_of("a", a, a_matrix), letters_of("b", b, b_matrix), letters_of("c", c, "mn")


def _cuts(transposed: int, mesh: Any, shapes: Any, specs: Any) -> Cuts:
    """Return how A, B and C are cut, given how they would be: each axis cuts one side, which it divides.

    Axes that cut k of both operands come first: to add the sums moves one C, and to gather both operands moves more,
    for example in the gradient of a layer's weight, whose k are the rows of the input.
    """
    names = _sides(transposed, shapes)
    sizes = {
        name: size for each, shape in zip(names, shapes, strict=True) for name, size in zip(each, shape, strict=True)
    }
    a, b, c = (dict(zip(each, spec, strict=False)) for each, spec in zip(names, specs, strict=True))
    cut: dict[str, MeshAxes] = {}
    for wish in ({"k": a.get("k") if a.get("k") == b.get("k") else None}, c, a, b):
        for name, spec in wish.items():
            axes = (spec,) if isinstance(spec, str) else tuple(spec or ())
            free = name not in cut and not any(axis in each for each in cut.values() for axis in axes)
            if axes and free and sizes[name] % math.prod(mesh.shape[axis] for axis in axes) == 0:
                cut[name] = axes
    of_a, of_b, of_c = (PartitionSpec(*map(cut.get, each)) for each in names)
    return of_a, of_b, of_c, cut.get("k", ())


def _partitionable(multiply: Callable[..., jax.Array], transposed: int) -> Any:
    """Return `multiply(a, b, axes)`, which adds sums over axes, as a function of operands that XLA may have cut."""
    product = custom_partitioning(lambda a, b: multiply(a, b, ()))

    def rule(_: Any, operands: Any, results: Any) -> tuple[str, dict[str, MeshAxes]]:
        a, b, c = map(" ".join, _sides(transposed, [x.shape for x in (*operands, *results)]))
        return f"{a}, {b} -> {c}", {"reduction_factors": ("k",)}

    def partition(mesh: Any, operands: Any, result: Any) -> tuple[Any, ...]:
        arrays = (*operands, result)
        wishes = [getattr(x.sharding, "spec", ()) for x in arrays]  # none beside the axes of a shard_map
        *specs, axes = _cuts(transposed, mesh, [x.shape for x in arrays], wishes)
        a, b, c = (NamedSharding(mesh, spec) for spec in specs)
        return mesh, lambda x, y: multiply(x, y, axes), c, (a, b)

    product.def_partition(partition, lambda *arguments: partition(*arguments)[2], sharding_rule=rule)
    return product


def _typed(multiply: Callable[..., jax.Array], a: jax.Array, b: jax.Array, transposed: int) -> jax.Array:
    """Return a product; where types say how the operands are cut (explicit axes), the type of the result does too."""
    mesh = _explicit(a)
    if mesh is None:
        return multiply(a, b)
    shape = StaticProduct(a.shape, b.shape, "", "", transposed).shape
    spec = _cuts(transposed, mesh, (a.shape, b.shape, shape), (*(jax.typeof(x).sharding.spec for x in (a, b)), ()))[2]
    return jax.sharding.auto_axes(multiply, out_sharding=NamedSharding(mesh, spec))(a, b)


def _explicit(x: jax.Array) -> Any:
    """Return the mesh by which the type of an array says how it is cut, or None."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if mesh.explicit_axes else None


def _cut_like(gradient: jax.Array, operand: jax.Array) -> jax.Array:
    """Return a gradient cut as its operand is, where the type says that."""
    return jax.sharding.reshard(gradient, jax.typeof(operand).sharding) if _explicit(operand) else gradient


def _varying(x: jax.Array) -> frozenset[str]:
    """Return the axes of a shard_map along which an array differs."""
    axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return axes


def _of_one_kind(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return operands with types of one kind. JAX adds the gradients of one that was the same on several devices."""
    mesh = _explicit(a) or _explicit(b)
    if mesh is not None:
        a, b = (x if _explicit(x) else jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec())) for x in (a, b))
    axes = _varying(a) | _varying(b)
    a, b = (jax.lax.pcast(x, tuple(axes - _varying(x)), to="varying") for x in (a, b))
    return a, b
