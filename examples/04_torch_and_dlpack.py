"""Arrays of other libraries: the result is of the same kind, and operands are not copied."""

import numpy as np

import gemmery as gm

try:
    import torch
except ImportError:
    raise SystemExit("PyTorch is not installed: pip install torch") from None

a = torch.randn(128, 256, dtype=torch.bfloat16)
b = torch.randn(256, 64, dtype=torch.bfloat16)
c = gm.matmul(a, b)
print("tensors:    ", type(c).__name__, c.dtype, tuple(c.shape))

wide = gm.matmul(a, b, dtype="float32")
print("bf16 -> f32:", wide.dtype, torch.allclose(wide, a.float() @ b.float(), rtol=1e-4, atol=1e-3))

out = torch.zeros(128, 64)
view = np.asarray(out)  # a NumPy array on the same memory
gm.matmul(a.float(), b.float(), out=view)
print("shared out: ", bool((out != 0).any()))


class Lent:
    """A minimal array for gemmery: it has only the two methods of the DLPack protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


print("DLPack:     ", type(gm.matmul(Lent(np.eye(3)), np.ones((3, 2)))).__name__)
