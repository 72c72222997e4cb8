"""NumPy's own products by gemmery: `install()` puts its kernels behind `np.matmul`, `@` and their like.

>>> import numpy as np, gemmery.numpy
>>> with gemmery.numpy.install():
...     np.arange(4, dtype="i2").reshape(2, 2) @ np.eye(2, dtype="i2")
array([[0, 1],
       [2, 3]], dtype=int16)
"""

from gemmery.numpy.installing import DEFAULT, install, installed, uninstall

__all__ = ["DEFAULT", "install", "installed", "uninstall"]
