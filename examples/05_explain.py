"""Show which kernel runs a product, why, and how fast this machine could run it at best."""

import numpy as np

import gemmery as gm

for what, m, n, k in (
    ("square", 1024, 1024, 1024),
    ("small", 64, 64, 64),
    ("few rows", 8, 2048, 2048),
    ("vector", 2048, 1, 2048),
):
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    print(f"-- {what}")
    print(gm.explain(a, b, threads=1))
    print()
