"""What follows a product as a Python function: gates, two results, two weights, rows of bytes with factors."""

import numpy as np

import gemmery as gm

rng = np.random.default_rng(0)
x, w = rng.standard_normal((32, 512), np.float32), rng.standard_normal((512, 128), np.float32) / 16
up, residual = rng.standard_normal((2, 32, 128), np.float32)
c = x @ w


@gm.epilogue
def gated(c, up, residual, scale):
    """The sum and three operands."""
    return residual + scale * gm.silu(c) * up


y = gm.matmul(x, w, epilogue=gated(up=up, residual=residual, scale=0.5))
print("gated:      ", np.allclose(y, residual + 0.5 * c / (1 + np.exp(-c)) * up, atol=1e-3))

bias = rng.standard_normal(128, np.float32)
y, before = gm.matmul(x, w, epilogue=lambda c, b=bias: (gm.gelu(c + b), c + b))
print("two results:", np.allclose(before, c + bias, atol=1e-3), y.shape)

y = gm.matmul(x, (w, w[:, ::-1]), epilogue=gm.swiglu)
print("two weights:", np.allclose(y, c / (1 + np.exp(-c)) * c[:, ::-1], atol=1e-3))

codes, factors = gm.matmul(x, w, epilogue=gm.quantize_rows("int8"))
print("int8 rows:  ", codes.dtype, factors.shape, f"off by {abs(codes * factors - c).max():.3f} at most")

try:
    gm.matmul(x, w, epilogue=lambda c: c if c > 0 else -c)
except gm.ArgumentError as error:
    print("refused:     it cannot", str(error).partition("cannot ")[2].partition(" (")[0])
