"""Many products in one call, scaled products, and a network layer in one pass over its result."""

import numpy as np

import gemmery as gm

rng = np.random.default_rng(0)

# Ten thousand 4 x 4 products in one call; the loop over them is compiled.
turns = rng.standard_normal((10_000, 4, 4), np.float32)
points = rng.standard_normal((10_000, 4, 4), np.float32)
print("batch:    ", gm.matmul(turns, points).shape)
print("broadcast:", gm.matmul(turns, points[0]).shape, "one right-hand side for all")

# BLAS's gemm: alpha A B + beta C, in place.
a, b, c = rng.standard_normal((3, 64, 64))
before = c.copy()
gm.gemm(2.0, a, b, -1.0, c, out=c)
print("gemm:     ", np.allclose(c, 2.0 * (a @ b) - before))

# relu(x W + bias): bias and activation are applied to each tile of the result before it is stored.
x = rng.standard_normal((32, 512), np.float32)
weights = rng.standard_normal((512, 128), np.float32)
bias = rng.standard_normal(128, np.float32)
layer = gm.matmul(x, weights, bias=bias, activation="relu")
print(
    "layer:    ", np.allclose(layer, np.maximum(x @ weights + bias, 0), atol=1e-3), f"{(layer == 0).mean():.0%} zeros"
)
