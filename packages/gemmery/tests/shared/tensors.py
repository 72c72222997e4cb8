"""What tests of PyTorch's CPU tensors share: values, layouts, and calls that the compiled entry has met."""

import os
import sys

import numpy as np
import pytest

import gemmery as gm
from gemmery import config
from gemmery.arrays import pytorch_abi
from gemmery.cpu import pool

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
HERE = os.path.dirname(gm.__file__)
MET = 3  # calls after which a product is one that was met before


def values(*shape, dtype="float32", seed=0):
    """Small whole numbers, whose products every type holds exactly."""
    numbers = np.random.default_rng(seed).integers(0, 4, shape)
    return torch.from_numpy(numbers).to(getattr(torch, dtype))


def python_calls(call):
    """The result of a call, and the functions of gemmery that Python ran for it."""
    names = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(before)
    return result, names


def native():
    """Whether this machine and this PyTorch have the fast path."""
    return config.fast_entry() and bool(pool.address()) and pytorch_abi.abi(torch) is not None


def meet(call):
    for _ in range(MET):
        call()


def same(result, expected):
    return result.shape == expected.shape and result.dtype == expected.dtype and bool((result == expected).all())


LAYOUTS = {
    "rows": lambda a: a,
    "columns": lambda a: a.T.contiguous().T,
    "strided": lambda a: torch.cat([a, a], 1).reshape(8, 16)[:, ::2] if a.ndim == 2 else a,
    "expanded": lambda a: a[:1].expand(8, 8),
}


def parameter():
    """A tensor that requires grad."""
    return torch.nn.Parameter(torch.ones(8, 8))
