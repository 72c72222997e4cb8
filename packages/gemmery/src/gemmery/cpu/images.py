"""Element types and compiled texts (images) of the CPU's products: which of them serve a product, by what steps.

The module that generates an image is imported for it alone, since importing all of them would delay a first product.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from gemmery import dtypes
from gemmery.cpu import jit
from gemmery.cpu.jit import Image
from gemmery.cpu.target import Target, dots_columns, host
from gemmery.cpu.ukernel import STEPS, Product, arm_step
from gemmery.dtypes import SIZES
from gemmery.keywords import ACTIVATIONS
from gemmery.problem import Problem

if TYPE_CHECKING:
    from gemmery.cpu.streamed import Streams

COLUMNS = 4  # per pass where columns are contiguous: f64, 4096 x 4096, Zen 4: 3.11 ms with 4, 3.37 with 6, 3.64 with 8


def serving(dtype: str, out: str, activation: str = "") -> Iterator[Image]:
    """Yield the images that serve every product of A and B of `dtype` with C of `out`, the largest first."""
    target, problem = host(), Problem(2, 2, 2, dtype, out, epilogue=activation)
    if packed_refuses(problem):  # as for int8 by uint8
        return
    types = product(target, problem)
    yield packed_image(target, types)
    if dtype == "f16" and out != "f64" and target.has_tiles:
        yield packed_image(target, halved(types))
    own = dtypes.get(dtype)
    plain, floats = not activation and dtype == out, own.kind == "f" and own.size >= 4
    if plain and (floats or own.kind in "iu"):
        yield direct_image(target, dtype)
    if plain and floats and dots_columns(target, own.size) > 1:
        yield dots_image(target, dtype)
    yield gemv_image(target, gemv_product(problem), COLUMNS)
    if plain and floats:
        from gemmery.cpu import streamed as streams

        for depth, nv in {streams.sizes(target, m) for m in (2, 1 << 20)}:
            yield streamed_image(target, streams.Streams(dtype, depth, nv))


def load(target: Target, problem: Problem, image: Image) -> dict[str, int]:
    """Return the addresses of an image's functions; where it is missing, all images of these types are made with it."""
    return jit.load_together(target, image, lambda: serving(problem.dtype, problem.out))


def product(target: Target, problem: Problem) -> Product:
    """Return the element types and the multiply step with which a target computes a problem."""
    packed, accumulator, group, step = _arithmetic(target, problem.dtype, problem.out, problem.b_dtype)
    if problem.semiring:
        packed = accumulator = "double" if problem.out == "f64" else "float"
        group, step = 1, problem.semiring
    types = Product(
        problem.dtype, problem.out, packed, accumulator, group, step, problem.activation, b_dtype=problem.b_dtype
    )
    narrower = dtypes.get(types.dtype).size < SIZES[packed] and not types.is_complex
    slow = types.dtype == "f16" and not target.has_fma  # widened by integer arithmetic
    if problem.b_layout == "packed" and narrower and not slow:
        return types._replace(stored=types.b_dtype or types.dtype)
    return types


def _arithmetic(target: Target, dtype: str, out: str, b_dtype: str) -> tuple[str, str, int, str]:
    """Return (element of the panels, accumulator, group, step) for A and B of `dtype` and C of `out`; see `Product`."""
    inside, result = dtypes.get(dtype), dtypes.get(out)
    if out != "f64" and not b_dtype and (by := arm_step(target, dtype)):
        step, group = by
        return inside.llvm, "i32" if inside.kind in "iu" else "float", group, step
    if inside.kind in "fc":
        if dtype == "bf16" and out != "f64" and target.has_tiles:
            return "bfloat", "float", 2, STEPS[dtype]
        if dtype == "bf16" and out != "f64" and target.has_bf16_dot:
            return "bfloat", "float", 2, "dot_bf16"
        element = "double" if result.llvm == "double" else "float"
        return element, element, 1, "fma"
    if inside.size == 1 and target.has_tiles:
        return "i8", "i32", 4, STEPS[dtype + b_dtype]
    if inside.size == 1 and target.has_vnni:
        return "i8", "i32", 4, "dot_i8"
    # Signed 16-bit numbers represent bytes exactly; modulo 2**16, products of unsigned and signed ones are equal.
    if target.isa in ("avx2", "avx512") and (
        inside.size == 1 or (inside.size == 2 and (out == "int32" or result.size == 2))
    ):
        return "i16", "i32", 2, "dot_i16"
    element = result.llvm
    if inside.size == 1:  # sums over a block of k fit 32 bits
        element = "i16" if result.size <= 2 else "i32"
    return element, element, 1, "fma"


def halved(types: Product) -> Product:
    """Return how float16 is multiplied on the tile unit: as two bfloat16 that add up to it, by four products."""
    return types._replace(packed="i32", group=1, step=STEPS["bf16"])


def packed_refuses(problem: Problem) -> str:
    """Return why the packed product cannot run a problem; "" when it can."""
    inside, out = dtypes.get(problem.dtype), dtypes.get(problem.out)
    activation = problem.activation
    if problem.b_dtype and out.kind != "i":
        return f"the products of {inside.name} by {problem.b_dtype} have signs, so C must have, not {out.name}"
    if not problem.b_dtype and (out.kind != inside.kind or out.size < inside.size):
        return f"C must be {inside.name} or a wider type of the same kind, not {out.name}"
    if activation and activation not in ACTIVATIONS:
        return f"its activations are {', '.join(ACTIVATIONS)}, not {activation}"
    if activation and out.kind != "f":
        return f"{activation} needs a real floating-point result, not {out.name}: apply it after the product"
    if problem.epilogue and problem.c_layout == "col":
        return "its epilogue (bias, activation) works along rows of C, so C must be row-major"
    return ""


def _image(name: str, module: str, function: str, *arguments: object, **options: object) -> Image:
    """Return an image by the name of the function that generates it; its module is imported by the first call."""
    return name, lambda: getattr(import_module(f"gemmery.cpu.{module}"), function)(*arguments, **options)


def packed_image(target: Target, types: Product) -> Image:
    """Return the image of the packed product of these types."""
    return _image(f"packed_{types.name}", "loops", "packed", target, types)


def once_entries(types: Product) -> dict[str, int]:
    """Return the functions of `packed_once`, and the one that packs B for it."""
    return jit.load(host(), *_image(f"packed_once_{types.name}", "loops", "packed", host(), types, once=True))


def direct_image(target: Target, dtype: str, semiring: str = "") -> Image:
    """Return the image of the kernel without packing for every shape."""
    return _image(f"direct_{dtype}{semiring}", "direct", "general", target, dtype, semiring)


def dots_image(target: Target, dtype: str) -> Image:
    """Return the image of the kernel of few columns."""
    return _image(f"dots_{dtype}", "dots", "dots", target, dtype)


def gemv_product(problem: Problem) -> Product:
    """Return the element types: elements are widened when loaded, since bandwidth is the limit and not arithmetic."""
    element = dtypes.get(dtypes.get(problem.out).accumulator).llvm
    return Product(problem.dtype, problem.out, element, element, activation=problem.activation)


def gemv_image(target: Target, types: Product, columns: int) -> Image:
    """Return the image of the products with a vector of these types."""
    return _image(f"gemv{columns}_{types.name}", "gemv", "gemv", target, types, columns)


def streamed_image(target: Target, shape: Streams) -> Image:
    """Return the image of the kernel for few rows."""
    return _image(shape.name, "streamed", "streamed", target, shape)
