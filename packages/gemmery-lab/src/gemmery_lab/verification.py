"""verify(): random products on the CPU or a GPU, each compared with the reference."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import gemmery as gm
from gemmery import config
from gemmery import dtypes as element_types
from gemmery import verify as reference
from gemmery.api.epilogue_terms import with_kinds
from gemmery.cpu import target, threads
from gemmery.dtypes import Array
from gemmery.epilogues.random_epilogues import of_text
from gemmery.errors import ArgumentError, GemmeryError
from gemmery_lab import asked
from gemmery_lab.measure.record import ignore
from gemmery_lab.measure.torch_operands import tensors_in as on_gpu
from gemmery_lab.measure.work import BLOCK, numpy_dtype
from gemmery_lab.random_products import (
    PARTS,
    RINGS,
    TYPES,
    MatrixImage,
    RandomProduct,
    drawn,
    growth_in_parts,
    image,
    values,
    values_in_parts,
)

TF32 = 2.0**15 + 8  # two factors cut to 11 bits, 2^-9 together, in units of f32's 2^-24
STEP_8, CUT_8 = 32, 2.0**11  # float8: products in a step, each cut to 13 bits of fraction, in the same units
_FLOPS = 2e7  # of a comparison; of larger products it takes some rows
_MOST_WRONG = 10
_LOST = "DeviceError", "AcceleratorError"  # of a device, which no later call of the process survives
_LINE_END = "\n"

OnProduct = Callable[[int, int], None]  # how many are done, of how many
PlaceImage = Callable[[MatrixImage], tuple[Any, Callable[[], Array]]]  # to a library's array, and what reads its memory


@dataclass(frozen=True)
class WrongProduct:
    """A product that is not within its bound, or that raised an error."""

    product: str
    reason: str
    dtype: str
    seed: int  # of this product alone


@dataclass(frozen=True)
class Verification:
    """What a run compared; `worst` is the largest error over its bound among the products that passed."""

    device: str
    seed: int  # the first
    seeds: int
    products: int  # one for each seed, or the batch that it draws
    types: Mapping[str, int]  # how many products there were of each
    worst: float
    wrong: tuple[WrongProduct, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True when every product is within its bound."""
        return not self.wrong


def verify(
    products: int = 1000, device: str = "cpu", dtypes: Sequence[str] = (), seed: int = 0, on_product: OnProduct = ignore
) -> Verification:
    """Compute `products` random products and compare each with the reference, in NumPy and higher precision.

    Product number i has the seed `seed + i`, which determines its shape, layouts, alignment, element type (one of
    `dtypes`, by default all of the device and the semirings, but float32 and float64 on a GPU), options and operands.
    Half of them have small whole numbers, of which every sum is exact. C lies between guards and holds NaN before. It
    stops after 10 wrong products, and after an error of the device.

    On a GPU `dtypes` may also be precisions of float32 in parts: "f32_tensor", "f32_strict", "f32_plus". A seed then
    draws a batch of up to 200 small products, which count as so many, of numbers spread in one of ten ways.

    >>> verify(20, seed=1).ok
    True

    Raises ArgumentError for an unknown device or type and for a wrong variable; DeviceError for a GPU without PyTorch.
    """
    ordinal = asked.ordinal(device)
    kind = "cpu" if ordinal is None else "cuda"
    if products < 1 or seed < 0:
        raise ArgumentError(f"products {products}, seed {seed}: there is at least 1 product, and no seed is negative")
    types = tuple(_spelled(name, kind) for name in dtypes) or TYPES[kind]
    for variable in (threads.get, target.host, config.tiers, config.float32_precision):
        variable()  # a wrong one is reported here, not as wrong products
    place = on_host if ordinal is None else on_gpu(f"cuda:{ordinal}")
    wrong: list[WrongProduct] = []
    counts: Counter[str] = Counter()
    start, worst = time.perf_counter(), 0.0
    seeds, done = 0, 0
    while done < products:
        product = drawn(seed + seeds, types, kind)
        count = product.batch if product.spread else 1
        seeds, done = seeds + 1, done + count
        counts[product.dtype] += count
        reason, ratio = _tried(product, place)
        worst = max(worst, ratio)
        if reason:
            wrong.append(WrongProduct(str(product), reason, product.dtype, product.seed))
        on_product(min(done, products), products)
        if len(wrong) == _MOST_WRONG or reason.startswith(_LOST):
            break
    return Verification(device, seed, seeds, done, counts, worst, tuple(wrong), time.perf_counter() - start)


def _spelled(name: str, kind: str) -> str:
    """Return the name of an element type that can be drawn for a kind of device. Raises ArgumentError."""
    also = (*RINGS, *(PARTS if kind == "cuda" else ()))
    known = [each for each in TYPES[kind] if each not in also]
    known += ["f32"] if kind == "cpu" else ["f32", "tf32"]
    return asked.resolved(name, dict.fromkeys(known), also, f"products on {kind}: ")


def on_host(placed: MatrixImage) -> tuple[Array, Callable[[], Array]]:
    """Return NumPy's array of an image, and what reads its memory."""
    copy = placed.memory.copy()
    return placed.matrices(copy), lambda: copy


def _tried(product: RandomProduct, place: PlaceImage) -> tuple[str, float]:
    """Return what is wrong with a product, and the error over its bound if nothing is."""
    try:
        checked, beside = computed(product, place)
    except (GemmeryError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).partition(_LINE_END)[0]}", 0.0
    if not checked.ok:
        what = f"element {checked.worst} is {checked.got}, the reference is {checked.expected}"
        return f"{what}: {checked.error_over_bound:.3g} times the bound {checked.bound:.3g}", 0.0
    return beside, checked.error_over_bound


def computed(product: RandomProduct, place: PlaceImage) -> tuple[reference.Checked, str]:
    """Compute a product; return its comparison, and what is wrong beside the values: "" if nothing is."""
    if product.epilogue:
        return _computed_with_epilogue(product, place)
    p, draw = product, np.random.default_rng([product.seed, 2])
    each = (p.batch,) if p.batch > 1 else ()
    groups = (len(p.ends),) if p.ends and not p.deep else ()
    shapes = (*(() if p.shared[0] else each), p.m, p.k), (*groups, *(() if p.shared[1] else each), p.k, p.n)
    a, b = (
        image(values_in_parts(p, shape, i) if p.spread else values(p, shape, p.element, draw), p.layouts[i])
        for i, shape in enumerate(shapes)
    )
    matrices = (len(p.ends),) if p.deep else each
    c = image(_before(p, (*matrices, p.m, p.n), draw), p.layouts[2])
    bias = draw.standard_normal(p.n, np.float32) if p.bias else None
    if bias is not None and p.whole:
        bias = np.rint(bias)
    scale_a, scale_b = _factors(p, draw)
    old = c.matrices().copy()
    arrays = [place(x) for x in (a, b, c)]
    (x, _), (y, _), (z, memory) = arrays
    y = x.swapaxes(-1, -2) if p.symmetric else y
    # The ends of groups are an array for half of the products; the others pass a list.
    offsets = np.array(p.ends, np.int32) if p.ends and p.seed % 2 else None
    vectors = {
        name: array if array is None or isinstance(array, float) else place(_vector(array))[0]
        for name, array in (("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b), ("offsets", offsets))
    }
    _call(p, x, y, z, vectors)
    after = memory()
    untouched, rows = after.copy(), p.ends[-1] if p.ends and not p.deep else p.m
    c.matrices(untouched)[..., :rows, :] = old[..., :rows, :]
    result = c.matrices(after)
    right = a.matrices().swapaxes(-1, -2) if p.symmetric else b.matrices()
    checked = _compared(p, result, _scaled(p, a.matrices(), scale_a, 0), _scaled(p, right, scale_b, 1), old, bias)
    if not np.array_equal(untouched, c.memory):
        return checked, f"memory around C{' or a row of no group' if p.ends else ''} was written"
    empty = [group for group, (start, end) in enumerate(pairwise((0, *p.ends))) if p.deep and start == end]
    if np.any(result[empty].astype(np.complex64)):
        return checked, "a group of no k is not zeros"
    mirrored = not p.symmetric or np.array_equal(result, result.swapaxes(-1, -2))
    return checked, "" if mirrored else "A times its own transpose is not symmetric to the last bit"


def _computed_with_epilogue(p: RandomProduct, place: PlaceImage) -> tuple[reference.Checked, str]:
    """Compute a product with an epilogue, whose results are new arrays, and compare each of them."""
    draw, each = np.random.default_rng([p.seed, 2]), (p.batch,) if p.batch > 1 else ()
    shapes = [(*(() if p.shared[0] else each), p.m, p.k)]
    shapes += [(*(() if p.shared[1] else each), p.k, p.n)] * p.weights
    images = [image(values(p, shape, p.element, draw), p.layouts[i > 0]) for i, shape in enumerate(shapes)]
    a, *weights = (x.matrices() for x in images)
    x, *ys = (place(y)[0] for y in images)
    function = of_text(p.epilogue)
    kinds = {"number": (), "row": (p.n,), "column": (p.m, 1), "matrix": (*each, p.m, p.n)}
    graph = function.graph(p.weights)
    bound, operands = [], {}
    for operand in graph.operands:
        kind = str(draw.choice(list(kinds)))
        operands[operand.name] = draw.standard_normal(kinds[kind], np.float32)
        bound.append(operand._replace(kind=kind, dtype="f32"))
    graph = with_kinds(graph, bound, p.out)
    dtype = {"dtype": p.out} if p.out != p.element else {}
    multiply: Any = gm.matmul
    results = multiply(x, tuple(ys) if p.weights > 1 else ys[0], epilogue=function, operands=operands, **dtype)
    results = results if isinstance(results, tuple) else (results,)
    checks = reference.check_outputs(results, graph, a, weights, operands, growth(p))
    return max(checks, key=lambda check: check.error_over_bound), ""


def _call(p: RandomProduct, a: Any, b: Any, c: Any, vectors: Mapping[str, Any]) -> None:
    dtype = p.out if p.out != p.element and p.function != "gemm" else None
    settings = {"activation": p.activation, "dtype": dtype, "precision": p.precision, "semiring": p.semiring}
    options = {name: value for name, value in vectors.items() if value is not None}
    options |= {name: value for name, value in {**settings, "batch_invariant": p.invariant}.items() if value}
    if p.function == "gemm":
        gm.gemm(p.alpha, a, b, p.beta, c, out=c, **options)
    elif p.function == "grouped_matmul":
        if isinstance(a, np.ndarray) and not p.deep and p.seed % 3 == 0:  # the same rows by an index
            order = np.random.default_rng([p.seed, 9]).permutation(p.m)
            a, options["gather"] = a[np.argsort(order)], order
            if p.ends[-1] == p.m:
                options["scatter"] = np.arange(p.m)
        gm.grouped_matmul(a, b, out=c, **{"offsets": list(p.ends), **options})
    else:
        gm.matmul(a, b, out=c, **options)


def _before(p: RandomProduct, shape: tuple[int, ...], draw: np.random.Generator) -> Array:
    """Return what C holds before: numbers if beta multiplies them, else ones in every bit, NaN in floating types."""
    kind = numpy_dtype(p.out)
    if p.beta:
        return values(p, shape, p.out, draw)
    return np.full((*shape, kind.itemsize), 0xFF, np.uint8).view(kind)[..., 0]


def _factors(p: RandomProduct, draw: np.random.Generator) -> tuple[Any, Any]:
    """Return scale_a and scale_b: few bits, so that a factor times an element is exact in float32."""
    if not p.scales:
        return None, None
    if p.scales == "numbers":
        return float(draw.choice([0.5, 1.25])), float(draw.choice([2.0, -0.75]))
    pieces = -(-p.k // BLOCK)
    columns = (len(p.ends), p.n) if p.ends and not p.deep else (p.n,)
    shapes = ((p.m, pieces), (pieces, -(-p.n // BLOCK))) if p.scales == "blocks" else ((p.m,), columns)
    a, b = (draw.integers(1, 16, shape).astype(np.float32) / 8 for shape in shapes)
    return a, b


def _vector(array: Array) -> MatrixImage:
    """Return a contiguous array as an image."""
    whole = np.ascontiguousarray(array)
    steps = tuple(step // whole.itemsize for step in whole.strides)
    return MatrixImage(whole.reshape(-1).view(np.uint8), whole.dtype, whole.shape, steps, 0)


def _scaled(p: RandomProduct, matrices: Array, factors: Any, operand: int) -> Array:
    """Return A (0) or B (1) times its factors, in float32 where it has any."""
    if factors is None:
        return matrices
    wide = matrices.astype(np.float32)
    if isinstance(factors, float):
        return np.asarray(wide * np.float32(factors))
    if p.scales == "outer":
        return np.asarray(wide * (factors[:, None] if operand == 0 else factors[..., None, :]))
    along = np.repeat(factors, BLOCK, 1)
    return np.asarray(wide * (along[:, : p.k] if operand == 0 else np.repeat(along, BLOCK, 0)[: p.k, : p.n]))


def growth(p: RandomProduct) -> Callable[[int], float]:
    """Return f(k) of the error bound: that of the least accurate rung which may compute the product.

    Tensor cores align the products of a step and a sum to the largest of them, and cut each. Sums of small whole
    numbers are exact, except for products with factors, which are rounded as they are applied.
    """
    if p.spread:
        return growth_in_parts(p)
    factors = 8.0 if p.scales else 0.0
    if element_types.get(p.element).kind == "c":
        return lambda k: k + 2.0
    if p.whole or element_types.get(p.element).kind in "iub":
        return lambda k: (factors + k / BLOCK) * bool(p.scales)
    if p.dtype in element_types.FLOAT8:
        return lambda k: (STEP_8 + 1) * CUT_8 * -(-k // STEP_8) + k + factors
    rounding = TF32 if p.dtype == "tf32" else 0.0
    return lambda k: 2.5 * k + 2 + rounding + factors


def _compared(p: RandomProduct, result: Array, a: Array, b: Array, old: Array, bias: Array | None) -> reference.Checked:
    """Compare C with the reference; of a grouped product, every group."""
    if p.semiring:
        return reference.check_semiring(result, a, b, p.semiring, _FLOPS)
    options: dict[str, Any] = {"bias": bias, "activation": p.activation, "most_flops": _FLOPS}
    if not p.ends:
        before = old if p.beta else None
        return reference.check(result, a, b, growth(p), alpha=p.alpha, beta=p.beta, c=before, **options)
    parts = []
    for group, ends in enumerate(pairwise((0, *p.ends))):
        own = slice(*ends)
        if own.start < own.stop:
            c, x, y = (result[group], a[:, own], b[own]) if p.deep else (result[own], a[own], b[group])
            parts.append(reference.check(c, x, y, growth(p), **options))
    return max(parts, key=lambda part: part.error_over_bound)
