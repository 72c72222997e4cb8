"""Float32 in parts on tensor cores: operands that are split once, and not in each product."""

from typing import Any, Literal

from gemmery import config
from gemmery.api import array_libraries
from gemmery.api.device_call import distinct, located
from gemmery.api.device_operands import get_float32_precision
from gemmery.api.on_device import new, scratch
from gemmery.api.prepared import alone
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered, tensormaps
from gemmery.cuda.launch import too_large
from gemmery.errors import ArgumentError, DeviceError, DTypeError, RefusedError, ShapeError, brief, is_one
from gemmery.ladder import float32_pre_pass
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


array_libraries.SPLIT.add(SplitOperand)


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
    if not is_one(operand, ("a", "b")):
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
    memory = new(z, (work.nbytes,), "uint8")
    _fill(z, b, problem, work, memory.pointer)
    return SplitOperand(x, operand, memory.pointer, work.nbytes, memory.owner)


def _fill(z: View, b: View, problem: Problem, work: float32_pre_pass.KeptOperand, target: int) -> None:
    """Put the parts and what is known of them at an address: two halves, three bfloat16, the marks."""
    memory, at = scratch(z, work.workspace), target
    batch, depth, sides = b.shape
    a = View(0, (batch, 1, depth), (0, _SIZE * depth, _SIZE), "f32")
    c = View(0, (batch, 1, sides), (_SIZE * sides, _SIZE * sides, _SIZE), "f32")
    for launches, parts in ((work.two, 2), (work.three, 3)):
        alone(launches, problem, a, b, c)(0, b.pointer, 0, z.stream, 0, memory.pointer)
        ordered.copy(memory.pointer + work.parts, at, parts * work.each, z.stream, z.ordinal)
        at += parts * work.each
        if parts == 2:
            place = target + -(-5 * work.each // tensormaps.PACKED_APART) * tensormaps.PACKED_APART
            for start, size in work.marks:
                ordered.copy(memory.pointer + start, place, size, z.stream, z.ordinal)
                place += -(-size // tensormaps.PACKED_APART) * tensormaps.PACKED_APART


def sources(a: Any, b: Any, precision: Any) -> tuple[Any, Any, tuple[int, int]]:
    """Return the arrays of two operands, one of which was split, and the addresses of their parts, 0 for no parts.

    `precision` is the one that the call names, or None.

    Raises ArgumentError for an operand in the other's place, and for a precision without parts.
    """
    for letter, z in (("a", a), ("b", b)):
        if type(z) is SplitOperand and z.operand != letter:
            raise ArgumentError(
                f"{letter} was split as operand={z.operand!r}: its parts are scaled for that place; pass "
                f"gm.split({letter}, operand={letter!r})"
            )
    if precision is None:
        precision = get_float32_precision()
    if precision not in config.FLOAT32_PRECISIONS or precision == "tf32":
        raise ArgumentError(
            f"precision={brief(precision)} of a product with an operand from gm.split: parts are for 'f32_tensor', "
            "'f32_strict' and 'f32_plus'; pass one of them, or the array itself"
        )
    (a, p), (b, q) = ((z.source, z.parts) if type(z) is SplitOperand else (z, 0) for z in (a, b))
    return a, b, (p, q)
