"""Types of the arguments and results of products, for type checkers only; products do not import this at run time."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

Activation: TypeAlias = Literal["relu", "gelu", "silu"]
Precision: TypeAlias = Literal["tf32", "f32_tensor", "f32_strict", "f32_plus", "f64_normwise"]
DTypeName: TypeAlias = Literal[
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "f64", "f32", "f16", "bf16",
]  # fmt: skip


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
    """Options of gemm."""

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
    """Options of matmul."""


class ContractionOptions(GemmOptions, total=False):
    """Options of tensordot, vecdot and einsum."""

    dtype: DTypeLike | None


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
