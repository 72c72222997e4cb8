"""A plugin of pytest: every test runs with gemmery's loops in NumPy's ufuncs; the end counts what they computed.

Products of every size are computed by gemmery here, since most in NumPy's tests are so small that they are left to it.
"""

import gemmery.numpy
from gemmery import numpy as installing

installing._LEAST = 1
gemmery.numpy.install((*gemmery.numpy.DEFAULT, "float32", "float64", "complex64", "complex128"), wait=True)
installing.count(True)


def pytest_terminal_summary(terminalreporter):
    served = sum(row.products for row in installing.counts())
    terminalreporter.write_line(f"gemmery computed {served} products, {len(gemmery.numpy.installed())} types")
