"""The options of products: their names and types, the functions that take them, defaults, and refusals on the CPU.

A new option is a line of a `...Options` that type checkers read, a row of `OPTIONS` and a field of `Options`; a test
holds the three together. Signatures, checks and the keywords that the compiled entry knows follow from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, get_args

from gemmery.config import Float32Precision
from gemmery.tuples import NamedTuple

Activation = Literal["relu", "gelu", "silu"]
Precision = Literal[Float32Precision, "f64_normwise"]
Semiring = Literal["min_plus", "max_plus", "max_times", "or_and", "log_sum_exp"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
SEMIRINGS: tuple[str, ...] = get_args(Semiring)
PRECISIONS: tuple[str, ...] = get_args(Precision)
DTypeName = Literal[
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "f64", "f32", "f16", "bf16",
]  # fmt: skip


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    class TorchDType(Protocol):
        """An element type of PyTorch, such as torch.float32."""

        @property
        def is_floating_point(self) -> bool:
            """Return True for a floating-point type."""

    DTypeLike: TypeAlias = DTypeName | np.dtype[Any] | type[Any] | TorchDType

    class Tensor(Protocol):
        """A tensor of PyTorch."""

        def data_ptr(self) -> int:
            """Return the address of the first element."""

    class HasNamespace(Protocol):
        """An array of a library with the array API and DLPack, such as CuPy and JAX."""

        def __array_namespace__(self, *, api_version: Any = None) -> Any:
            """Return the library's functions."""

        def __dlpack__(self, *args: Any, **options: Any) -> Any:
            """Return a DLPack capsule."""

    Plain: TypeAlias = NDArray[Any] | list[Any] | tuple[Any, ...]  # operands whose product is a NumPy array
    Foreign = TypeVar("Foreign", bound=Tensor | HasNamespace)
    Out = TypeVar("Out")


class GemmOptions(TypedDict, total=False):
    """Options of gemm and gemv, to type checkers."""

    threads: int | None
    precision: Precision | None


class GroupedOptions(TypedDict, total=False):
    """Options of grouped_matmul."""

    dtype: DTypeLike | None
    bias: Any
    activation: Activation | None
    scale_a: Any
    scale_b: Any
    batch_invariant: bool


class MatmulOptions(GemmOptions, GroupedOptions, total=False):
    """Options of matmul and explain."""

    epilogue: Any
    operands: Mapping[str, Any] | None
    semiring: Semiring | None


class ContractionOptions(GemmOptions, total=False):
    """Options of tensordot, vecdot and einsum."""

    dtype: DTypeLike | None


if TYPE_CHECKING:

    class VecdotOptions(ContractionOptions, total=False):
        """Options of vecdot."""

        keepdims: bool

    class EinsumOptions(ContractionOptions, total=False):
        """Options of einsum."""

        optimize: Any
        order: str
        casting: str

    class GemvOptions(GemmOptions, total=False):
        """Options of gemv."""

        alpha: complex
        beta: complex

    class StackOptions(GroupedOptions, total=False):
        """Options of grouped_matmul with offsets."""

        gather: Any
        scatter: Any


NAMES: dict[str, frozenset[str]] = {  # of the options of a function
    "matmul": MatmulOptions.__optional_keys__,
    "explain": MatmulOptions.__optional_keys__,
    "grouped_matmul": GroupedOptions.__optional_keys__,
    **dict.fromkeys(("gemm", "gemv"), GemmOptions.__optional_keys__),
    **dict.fromkeys(("tensordot", "vecdot", "einsum"), ContractionOptions.__optional_keys__),
}
LIKE_NUMPY = ("matmul", "vecdot")  # they also take what NumPy's functions do, where it changes nothing


class Option(NamedTuple):
    """A row of the table."""

    annotation: Any = Any  # in signatures
    default: Any = None  # None or False: the compiled entry knows these two
    on_cpu: str = ""  # of an option for devices alone: what to do on the CPU instead
    values: tuple[str, ...] = ()  # of an option for devices alone: those that it may have there, if it is a word
    field: str = ""  # of a Problem, by which kernels know the option


OPTIONS = {
    "dtype": Option(),
    "bias": Option(),
    "activation": Option(Activation | None),
    "threads": Option(int | None),
    "precision": Option(Precision | None, None, "leave it out on the CPU", PRECISIONS, "precision"),
    "scale_a": Option(on_cpu="multiply a by it first on the CPU"),
    "scale_b": Option(on_cpu="multiply b by it first on the CPU"),
    "batch_invariant": Option(bool, False, field="invariant"),
    "epilogue": Option(),
    "operands": Option(),
    "semiring": Option(Semiring | None, field="semiring"),
}
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}


class Options(NamedTuple):
    """The options of a call as the caller passed them, and what gemm and gemv take besides."""

    dtype: Any = None
    bias: Any = None
    activation: str | None = None
    threads: int | None = None
    precision: str | None = None
    alpha: Any = 1
    beta: Any = 0
    old: Any = None  # the C that beta multiplies
    scale_a: Any = None
    scale_b: Any = None
    batch_invariant: Any = False
    epilogue: Any = None
    operands: Any = None
    semiring: str | None = None

    def passed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as keywords of `matmul`."""
        rows = zip(self._fields, self, NO_OPTIONS, strict=True)
        return {name: value for name, value, default in rows if value is not default}


NO_OPTIONS = Options()
FIELDS = tuple(option.field for option in OPTIONS.values() if option.field)
# Options -> the values of FIELDS; None where the Problem has its default.
for_kernel: Callable[[Options], tuple[Any, ...]] = itemgetter(
    *(Options._fields.index(name) for name, option in OPTIONS.items() if option.field)
)

F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """Show a function under its public name, and its options in its signature, in the place of `**keywords`."""
    function.__name__ = function.__qualname__ = name = function.__name__.removeprefix("_")
    own = inspect.signature(function)
    *parameters, others = own.parameters.values()
    parameters += [
        inspect.Parameter(key, others.KEYWORD_ONLY, default=option.default, annotation=option.annotation)
        for key, option in OPTIONS.items()
        if key in NAMES[name]
    ]
    parameters += [others.replace(name="options")] * (name in LIKE_NUMPY)
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def documented(function: Callable[..., Any]) -> str:
    """Return a builtin's documentation for a function: the signature first, where `help` and `inspect` look for it."""
    own = inspect.signature(function)
    bare = [parameter.replace(annotation=own.empty) for parameter in own.parameters.values()]
    text = str(own.replace(parameters=bare, return_annotation=own.empty)).replace("Ellipsis", "...")
    return f"{function.__name__}{text}\n--\n\n{function.__doc__ or ''}"
