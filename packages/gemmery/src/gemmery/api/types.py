"""Types of the arguments and results of products, for type checkers only; products do not import this at run time."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar

from numpy.typing import NDArray

from gemmery.keywords import ContractionOptions, GemmOptions


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
