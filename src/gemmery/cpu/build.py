"""(problem, config) to a callable kernel, for each CPU rung."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gemmery import dtypes
from gemmery.cpu import jit, loops, simple
from gemmery.cpu.epilogue import ACTIVATIONS
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.target import Target, host, tile
from gemmery.cpu.ukernel import Product, shape
from gemmery.problem import Problem

Config = Mapping[str, int]

_TEXTBOOK = {
    "scalar_naive": simple.scalar_naive,
    "scalar_reordered": simple.scalar_reordered,
    "simd_row": simple.simd_row,
    "simd_blocked": simple.simd_blocked,
}


def textbook(rung: str) -> Callable[[Problem, Config], Launch]:
    """The builder of one of the first rungs."""

    def build(problem: Problem, config: Config) -> Launch:
        target = host()
        found = jit.load(target, f"{rung}_{problem.dtype}", lambda: _TEXTBOOK[rung](target, problem.dtype))
        blocks = Blocks(kc=config.get("block", 0))
        element = dtypes.get(problem.dtype)
        return Launch(found[rung], element.llvm, element.size, lambda m, n, k: blocks)

    return build


_PACKED = {"f64": "double", "f32": "float", "f16": "float", "bf16": "float"}


def product(target: Target, problem: Problem) -> Product:
    """How a problem is packed and accumulated on a target."""
    bias, activation = epilogue(problem)
    out = dtypes.get(problem.out)
    if dtypes.get(problem.dtype).kind == "f":
        element = "double" if problem.out == "f64" else _PACKED[problem.dtype]
        if problem.dtype == "bf16" and element == "float" and target.has_bf16_dot:
            return Product("bf16", problem.out, "bfloat", "float", 2, "dot_bf16", activation, bias)
        return Product(problem.dtype, problem.out, element, element, activation=activation, bias=bias)
    element = "i16" if out.size == 1 else out.llvm
    return Product(problem.dtype, problem.out, element, element, bias=bias)


def epilogue(problem: Problem) -> tuple[bool, str]:
    """(bias, activation) of a problem's epilogue."""
    parts = problem.epilogue.split("+") if problem.epilogue else []
    return "bias" in parts, next((part for part in parts if part != "bias"), "")


def packed_refuses(problem: Problem) -> str:
    """Why the packed product cannot run a problem; "" when it can."""
    inside, out = dtypes.get(problem.dtype), dtypes.get(problem.out)
    activation = epilogue(problem)[1]
    if out.kind != inside.kind or out.size < inside.size:
        return f"its result is {inside.name} or a wider type of the same kind, not {out.name}"
    if activation and activation not in ACTIVATIONS:
        return f"its activations are {', '.join(ACTIVATIONS)}, not {activation}"
    if activation and out.kind != "f":
        return f"activations are for floating-point results, not {out.name}"
    if problem.epilogue and problem.c_layout == "col":
        return "its epilogue runs along rows of C, so C must be row-major"
    return ""


def packed(problem: Problem, config: Config) -> Launch:
    """The packed product; mc, kc and nc of the config override the target's."""
    target = host()
    made = product(target, problem)
    sizes = tile(target)
    found = jit.load(target, f"packed_{made.name}", lambda: loops.packed(target, made))
    register = shape(target, made)
    mc, kc, nc = (config.get(name, getattr(sizes, name)) for name in ("mc", "kc", "nc"))

    def blocks(m: int, n: int, k: int) -> Blocks:
        deep = even(k, kc, made.group)
        tall, wide = even(m, mc, register.mr), even(n, nc, register.nr)
        return Blocks(tall, deep, wide, loops.workspace_bytes(target, made, m, tall, deep, wide))

    return Launch(found["packed"], made.accumulator, dtypes.get(problem.out).size, blocks)


def even(total: int, block: int, unit: int) -> int:
    """The block size that splits `total` into as few blocks as `block` does, all nearly equal, in whole units.

    1025 by 512 would be 512 + 512 + 1, and the last block would pack as much as it multiplies.
    """
    count = max(1, -(-total // block))
    each = -(-total // count)
    return max(unit, -(-each // unit) * unit)
