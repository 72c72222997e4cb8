"""Float32 in parts on tensor cores: operands that are split once, not in each product, and the words of `explain`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gemmery import arrays, config
from gemmery.api import device_memory, on_device, quick
from gemmery.api.device_types import located
from gemmery.api.precision import get_float32_precision
from gemmery.api.prepared import PreparedLaunch, alone, distinct, operand_views
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered, tensormaps
from gemmery.cuda.launch import too_large
from gemmery.errors import ArgumentError, DeviceError, DTypeError, RefusedError, ShapeError, brief
from gemmery.keywords import Options
from gemmery.ladder import float32_bounds, float32_pre_pass
from gemmery.problem import Problem

_SIZE = 4  # bytes of a float32


class SplitOperand:
    """A float32 array on a CUDA device with the parts of its elements: what `gm.split` returns.

    `source` is the array, `operand` is "a" or "b", and `nbytes` is the memory of the parts, without the array's.
    """

    __slots__ = ("_owner", "nbytes", "operand", "parts", "source")

    def __init__(self, source: Any, operand: str, parts: int, nbytes: int, owner: object) -> None:
        self.source, self.operand = source, operand
        self.parts = parts  # their address; 0 where there are none
        self.nbytes = nbytes
        self._owner = owner

    def __repr__(self) -> str:
        return f"SplitOperand(shape={self.shape}, operand={self.operand!r}, nbytes={self.nbytes})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return view(self.source).shape


quick.SPLIT.add(SplitOperand)


def split(x: Any, operand: Literal["a", "b"] = "b") -> SplitOperand:
    """Split a float32 array on a CUDA device into the parts that tensor cores multiply, for many products.

    >>> weights = gm.split(torch.randn(4096, 1024, device="cuda").T)  # doctest: +SKIP
    >>> y = gm.matmul(x, weights, precision="f32_tensor")  # doctest: +SKIP

    `gm.matmul` and `gm.gemm` take the result in the place of x, as the `operand` named here: "b" is (..., k, n), the
    right one, and "a" (..., m, k). With precision "f32_tensor", "f32_strict" or "f32_plus" they split the other operand
    only, and give the bits that x itself gives. It keeps two halves and three bfloat16 of each element, because the
    device chooses between them in each product: 10 bytes for each element beside the 4 of x, where k counts as the
    next multiple of 64. x is kept, not copied, and must not be changed: CUDA cores read it where an operand has Inf or
    NaN. Products that walk the batch of x in another order, or that CUDA cores multiply, use x alone; so do all
    products on devices that are not of compute capability 9.0, for which nothing is split.

    Raises ArgumentError for an `operand` other than "a" and "b", DTypeError for other element types, ShapeError for an
    array that is no matrix or batch of matrices, LayoutError for a batch that no single stride walks, DeviceError for
    an array on the CPU, and MemoryError.
    """
    if operand not in ("a", "b"):
        raise ArgumentError(f"operand={brief(operand)} must be 'a', the left operand, or 'b', the right one")
    z = view(x)
    if z.device == "cpu":
        raise DeviceError("gm.split takes an array on a CUDA device: on the CPU float32 is multiplied as it is")
    z = located(z)
    if z.dtype != "f32":
        raise DTypeError(f"gm.split takes float32, not {z.dtype}: other types are not multiplied in parts")
    if len(z.shape) < 2:
        raise ShapeError(f"gm.split takes matrices, and the shape is {z.shape}: pass an array with two sides or more")
    batches, sides_first = distinct(z, operand), operand == "a"
    sides, depth = z.shape[-2:] if sides_first else z.shape[:-3:-1]
    if driver.find(z.device).capability != 90 or 0 in (batches[0], sides, depth):
        return SplitOperand(x, operand, 0, 0, None)
    side_step, k_step = z.strides[-2:] if sides_first else z.strides[:-3:-1]
    b = View(z.pointer, (batches[0], depth, sides), (batches[1], k_step, side_step), "f32", z.device)
    problem = Problem(1, sides, depth, "f32", "f32", batches[0], device=z.device)
    layout = "col" if k_step == _SIZE else "row" if side_step == _SIZE else "any"
    problem = problem._replace(b_layout=layout)
    if reason := too_large(problem):
        raise RefusedError(f"gm.split: {reason}")
    work = float32_pre_pass.kept_operand(problem)
    owner, its_view = device_memory.new(x, (work.nbytes,), "uint8", z)
    _fill(x, z, b, problem, work, its_view.pointer)
    return SplitOperand(x, operand, its_view.pointer, work.nbytes, owner)


def _fill(x: Any, z: View, b: View, problem: Problem, work: float32_pre_pass.KeptOperand, target: int) -> None:
    """Put the parts and what is known of them at an address: two halves, three bfloat16, the marks."""
    ordinal = device_memory.ordinal(z)
    scratch, its_view = device_memory.scratch(x, work.workspace, z, z.stream)
    at = target
    batch, depth, sides = b.shape
    a = View(0, (batch, 1, depth), (0, _SIZE * depth, _SIZE), "f32")
    c = View(0, (batch, 1, sides), (_SIZE * sides, _SIZE * sides, _SIZE), "f32")
    for launches, parts in ((work.two, 2), (work.three, 3)):
        alone(launches, problem, a, b, c)(0, b.pointer, 0, z.stream, 0, its_view.pointer)
        ordered.copy(its_view.pointer + work.parts, at, parts * work.each, z.stream, ordinal)
        at += parts * work.each
        if parts == 2:
            place = target + -(-5 * work.each // tensormaps.PACKED_APART) * tensormaps.PACKED_APART
            for start, size in work.marks:
                ordered.copy(its_view.pointer + start, place, size, z.stream, ordinal)
                place += -(-size // tensormaps.PACKED_APART) * tensormaps.PACKED_APART
    del scratch


def product(name: str, a: Any, b: Any, out: Any, options: Options) -> Any:
    """Return a product of which an operand was split, for the function `name`.

    Raises ArgumentError for an operand in the other's place, and for another precision.
    """
    for letter, z in (("a", a), ("b", b)):
        if type(z) is SplitOperand and z.operand != letter:
            raise ArgumentError(
                f"{letter} was split as operand={z.operand!r}: its parts are scaled for that place; pass "
                f"gm.split({letter}, operand={letter!r})"
            )
    precision = options.precision if options.precision is not None else get_float32_precision()
    if precision not in config.FLOAT32_PRECISIONS or precision == "tf32":
        raise ArgumentError(
            f"precision={brief(precision)} of a product with an operand from gm.split: parts are for 'f32_tensor', "
            "'f32_strict' and 'f32_plus'; pass one of them, or the array itself"
        )
    parts = tuple(z.parts if type(z) is SplitOperand else 0 for z in (a, b))
    a, b = (z.source if type(z) is SplitOperand else z for z in (a, b))
    path = quick.OPTION_PATHS.get(type(a)) if name == "matmul" else None
    done = None if path is None else path(a, b, out, options, (parts[0], parts[1]))
    if done is not None:
        return done
    x, y = view(a), view(b)
    if x.device == "cpu" or y.device == "cpu":
        arrays.together(a=x, b=y)
    return on_device.product(name, a, b, x, y, out, options, (parts[0], parts[1]))


@dataclass(frozen=True)
class Float32Scheme:
    """The method that multiplies these operands, the guard's verdict about them, and the error bound of an element."""

    name: str  # "fp16x3", "bf16x6", "paired" (bf16x6 with sums in two numbers) or "float32"
    verdict: str  # "" where no numbers decide
    formula: str  # f(k) of the bound f(k) u |A| |B|, u = 2^-24
    bound: float  # f of this k

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What `explain` prints."""
        guard = [("guard", self.verdict)] if self.verdict else []
        error = f"at most f(k) u |A| |B| in each element, u = 2^-24, f(k) = {self.formula}: {self.bound:.4g} for this k"
        return [("scheme", f"{self.name}: {_METHODS[self.name]}"), *guard, ("error", error)]


_METHODS = {
    "fp16x3": "two halves for each float32, three products on tensor cores",
    "bf16x6": "three bfloat16 for each float32, six products on tensor cores",
    "paired": "three bfloat16 for each float32, six products on tensor cores, sums in two numbers",
    "float32": "CUDA cores",
}
_FORMULAS: dict[str, tuple[Callable[[int], float], str]] = {
    "fp16x3": (float32_bounds.two_parts, "8 + 1.01 (42 + ceil(k / 64) + 0.0013 k) + 3/8 k"),
    "bf16x6": (float32_bounds.three_parts, "2.1 + 0.68 c + 1.01 ceil(k / c), c = 64, or 16 below k = 128"),
    "paired": (float32_bounds.pairs, "25 + (k / 32)^2 2^-25"),
    "float32": (float, "k"),
}
_ENOUGH = "two halves will do: no element is too small for them"
_INEXACT = "an element is too small for two halves beside the largest of its row or column: it takes three bfloat16"
_NOT_FINITE = "an operand has Inf or NaN: CUDA cores multiply"


def scheme(x: View, y: View, prepared: PreparedLaunch) -> Float32Scheme | None:
    """Return how float32 operands on a device are multiplied in parts; None where the precision asks for no parts.

    The pre-pass of the product runs on the operands, and its verdict comes back: this waits for the device.
    """
    plan, problem, form, _ = prepared
    if not problem.precision.startswith("f32_"):
        return None
    name, verdict = plan.rung.name.partition("split_")[2] or "float32", ""
    if name == "fp16x3":
        statuses = [
            judged(x.pointer + first, y.pointer + second, x.stream, prepared) for first, second, _ in form.offsets()
        ]
        if all(status == 0 for status in statuses):
            verdict = _ENOUGH
        elif any(status & float32_pre_pass.NOT_FINITE for status in statuses):
            name, verdict = "float32", _NOT_FINITE
        else:
            name, verdict = "bf16x6", _INEXACT
    bound, formula = _FORMULAS[name]
    return Float32Scheme(name, verdict, formula, bound(problem.k))


def judged(a: int, b: int, stream: int, prepared: PreparedLaunch) -> int:
    """Return what the pre-pass says of these operands: float32_pre_pass.INEXACT and NOT_FINITE, or 0."""
    _, problem, form, run = prepared
    ordinal = device_memory.ordinal(View(0, (), (), "f32", problem.device))
    launches = float32_pre_pass.judging(problem.by_rows())
    scratch = ordered.Scratch(run.workspace, stream, ordinal)
    judge = alone(launches, problem, *operand_views(form, problem, None)[:3])
    judge(a, b, 0, stream, 0, scratch.pointer)
    driver.synchronize(ordinal)
    return int.from_bytes(ordered.fetch(scratch.pointer, 4, ordinal), "little")
