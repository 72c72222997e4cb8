"""Products whose operands several devices share: which part each computes, and what the types of JAX say of it.

A product has sides m, n and k and one for each batch dimension. An axis of devices that cuts m, n or the batch cuts the
result too, without communication. One that cuts k leaves each device a part of the sums, which are then added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from gemmery.arrange import Ints
from gemmery.jax.static import A_TRANSPOSED, B_TRANSPOSED, StaticProduct

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


def cuts(transposed: int, mesh: Any, shapes: Any, specs: Any) -> Cuts:
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


def partitioned(multiply: Callable[..., jax.Array], transposed: int) -> Any:
    """Return `multiply(a, b, axes)`, which adds sums over axes, as a function of operands that XLA may have cut."""
    product = custom_partitioning(lambda a, b: multiply(a, b, ()))

    def rule(_: Any, operands: Any, results: Any) -> tuple[str, dict[str, MeshAxes]]:
        a, b, c = map(" ".join, _sides(transposed, [x.shape for x in (*operands, *results)]))
        return f"{a}, {b} -> {c}", {"reduction_factors": ("k",)}

    def partition(mesh: Any, operands: Any, result: Any) -> tuple[Any, ...]:
        arrays = (*operands, result)
        wishes = [getattr(x.sharding, "spec", ()) for x in arrays]  # none beside the axes of a shard_map
        *specs, axes = cuts(transposed, mesh, [x.shape for x in arrays], wishes)
        a, b, c = (NamedSharding(mesh, spec) for spec in specs)
        return mesh, lambda x, y: multiply(x, y, axes), c, (a, b)

    product.def_partition(partition, lambda *arguments: partition(*arguments)[2], sharding_rule=rule)
    return product


def typed(multiply: Callable[..., jax.Array], a: jax.Array, b: jax.Array, transposed: int) -> jax.Array:
    """Return a product; where types say how the operands are cut (explicit axes), the type of the result does too."""
    mesh = explicit(a)
    if mesh is None:
        return multiply(a, b)
    shape = StaticProduct(a.shape, b.shape, "", "", transposed).shape
    spec = cuts(transposed, mesh, (a.shape, b.shape, shape), (*(jax.typeof(x).sharding.spec for x in (a, b)), ()))[2]
    return jax.sharding.auto_axes(multiply, out_sharding=NamedSharding(mesh, spec))(a, b)


def explicit(x: jax.Array) -> Any:
    """Return the mesh by which the type of an array says how it is cut, or None."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if mesh.explicit_axes else None


def like(gradient: jax.Array, operand: jax.Array) -> jax.Array:
    """Return a gradient cut as its operand is, where the type says that."""
    return jax.sharding.reshard(gradient, jax.typeof(operand).sharding) if explicit(operand) else gradient


def varying(x: jax.Array) -> frozenset[str]:
    """Return the axes of a shard_map along which an array differs."""
    axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return axes


def together(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return operands with types of one kind. JAX adds the gradients of one that was the same on several devices."""
    mesh = explicit(a) or explicit(b)
    if mesh is not None:
        a, b = (x if explicit(x) else jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec())) for x in (a, b))
    axes = varying(a) | varying(b)
    a, b = (jax.lax.pcast(x, tuple(axes - varying(x)), to="varying") for x in (a, b))
    return a, b
