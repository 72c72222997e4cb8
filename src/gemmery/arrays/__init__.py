"""Views of the memory of any array, and results of the same kind as the operands.

NumPy arrays, PyTorch tensors, CuPy arrays and objects with `__dlpack__`, `__cuda_array_interface__`,
`__array_interface__` or the buffer protocol are read without a copy. Other objects that NumPy can convert (nested
lists, `__array__`) are copied. Objects whose product is not the product of their numbers are refused: sparse, masked
and nested arrays, DataFrames and others with `__array_ufunc__`, tensor subclasses with `__torch_dispatch__`. A result
has the kind of the first operand that is not a plain NumPy array or list:

| operand | result |
| --- | --- |
| NumPy array, list, buffer other than a memoryview | NumPy array |
| subclass of a NumPy array | the same subclass, by its `__array_wrap__` |
| PyTorch tensor | PyTorch tensor |
| CuPy array | CuPy array |
| memoryview | memoryview |
| `__dlpack__` and `__array_namespace__` (JAX) | an array of that library, by its `from_dlpack` |
| `__dlpack__` alone, CPU | NumPy array |
| `__dlpack__` or `__cuda_array_interface__` alone, CUDA device | `gemmery.cuda.array.DeviceArray`, which has both |
"""

from gemmery.arrays.pytorch import comparer, device_allocator, recorders, version_bump
from gemmery.arrays.reading import unchanged, view
from gemmery.arrays.results import (
    allocates,
    as_numpy,
    assign,
    astype,
    converted,
    empty,
    kind,
    numpy_dtype,
    scratch,
    store,
    wrap,
    written,
)
from gemmery.arrays.views import View, alignment, contiguous, library, overlap, reach, repeats, same, together

__all__ = [
    "View",
    "alignment",
    "allocates",
    "as_numpy",
    "assign",
    "astype",
    "comparer",
    "contiguous",
    "converted",
    "device_allocator",
    "empty",
    "kind",
    "library",
    "numpy_dtype",
    "overlap",
    "reach",
    "recorders",
    "repeats",
    "same",
    "scratch",
    "store",
    "together",
    "unchanged",
    "version_bump",
    "view",
    "wrap",
    "written",
]
