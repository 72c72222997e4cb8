"""NumPy's array API namespace with gemmery's matmul, tensordot and vecdot, for `test_array_api`."""

from types import SimpleNamespace

import numpy
from numpy import *  # noqa: F403

import gemmery

__array_api_version__ = numpy.__array_api_version__
__version__ = gemmery.__version__
OURS = {name: getattr(gemmery, name) for name in ("matmul", "tensordot", "vecdot")}

bool, abs, all, any, max, min, pow, round, sum = (  # noqa: A001 # the star leaves out what hides builtins
    getattr(numpy, name) for name in ("bool", "abs", "all", "any", "max", "min", "pow", "round", "sum")
)
matmul, tensordot, vecdot = OURS.values()
linalg = SimpleNamespace(**{**vars(numpy.linalg), **OURS})
