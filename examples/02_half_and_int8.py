"""Half precision and integers: how sums are kept, and when to ask for a wider result."""

import numpy as np

import gemmery as gm

rng = np.random.default_rng(0)

# float16 products are summed in float32 and rounded once, at the end.
a = rng.standard_normal((256, 256)).astype(np.float16)
c = gm.matmul(a, a)
exact = a.astype(np.float64) @ a.astype(np.float64)
print("float16:            ", c.dtype, f"largest error {np.abs(c - exact).max():.3f}")
wide = gm.matmul(a, a, dtype="float32")
print("float16 -> float32: ", wide.dtype, f"largest error {np.abs(wide - exact).max():.6f}")

# Integers wrap as in NumPy; dtype= gives a wider result that does not.
x = rng.integers(-128, 128, (64, 1000), np.int8)
y = rng.integers(-128, 128, (1000, 64), np.int8)
right = x.astype(np.int64) @ y.astype(np.int64)
print("int8 wraps:         ", np.array_equal(gm.matmul(x, y), right.astype(np.int8)))
print("int8 -> int32 exact:", np.array_equal(gm.matmul(x, y, dtype="int32"), right))

try:
    gm.matmul(a, a, dtype="int32")
except gm.DTypeError as error:
    print("an error:           ", error)
