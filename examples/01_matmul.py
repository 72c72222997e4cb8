"""Multiply two matrices: the same call as NumPy's, with the same meaning."""

import numpy as np

import gemmery as gm

rng = np.random.default_rng(0)
a = rng.standard_normal((300, 500))
b = rng.standard_normal((500, 200))

c = gm.matmul(a, b)
print("new array:   ", c.shape, c.dtype, "close to NumPy's:", np.allclose(c, a @ b))

out = np.empty((300, 200))
print("into out=:   ", gm.matmul(a, b, out=out) is out)

print("views:       ", gm.matmul(b.T, a.T).shape, "transposed views are not copied")
print("strided:     ", np.allclose(gm.matmul(a[::2, ::-1], b), a[::2, ::-1] @ b))
print("vectors:     ", gm.matmul(a, b[:, 0]).shape, gm.matmul(a[0], b).shape)

print("same bits:   ", np.array_equal(gm.matmul(a, b, threads=1), gm.matmul(a, b, threads=2)), "on 1 and 2 threads")

try:
    gm.matmul(a, a)
except gm.ShapeError as error:
    print("an error:    ", error)
