"""Any array as a View of its memory, and results of the kind that was given.

What is read without a copy: NumPy arrays, tensors of PyTorch, arrays of CuPy, and whatever offers `__dlpack__`,
`__cuda_array_interface__`, the buffer protocol or `__array_interface__`. Everything else NumPy can make an array of
(nested lists, `__array__`) is copied. What is given back has the kind of the first operand that is not a plain NumPy
array or list:

| operand | result |
| --- | --- |
| NumPy array, list, buffer other than a memoryview | NumPy array |
| subclass of a NumPy array | what its `__array_wrap__` makes of the array |
| PyTorch tensor | PyTorch tensor |
| CuPy array | CuPy array |
| memoryview | memoryview |
| `__dlpack__` and `__array_namespace__` | that namespace's `from_dlpack` of the array |
| `__dlpack__` alone, CPU | NumPy array, which offers DLPack and the buffer protocol |
| `__dlpack__` or `__cuda_array_interface__` alone, CUDA device | `gemmery.cuda.array.DeviceArray`, which offers both |
"""

from gemmery.arrays.memory import View, alignment, contiguous, overlap, reach, repeats, same, together
from gemmery.arrays.pytorch import recorders
from gemmery.arrays.reading import view
from gemmery.arrays.results import (
    allocates,
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

__all__ = [
    "View",
    "alignment",
    "allocates",
    "assign",
    "astype",
    "contiguous",
    "converted",
    "empty",
    "kind",
    "numpy_dtype",
    "overlap",
    "reach",
    "recorders",
    "repeats",
    "same",
    "scratch",
    "store",
    "together",
    "view",
    "wrap",
    "written",
]
