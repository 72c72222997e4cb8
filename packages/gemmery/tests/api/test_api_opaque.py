"""torch.compile calls products and does not trace them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gemmery as gm
from gemmery.api import opaque

CODE = """
import numpy as np, gemmery as gm
{before}
import torch
calls = (
    lambda x, y: gm.matmul(x, y) + 1,
    lambda x, y: gm.matmul(x, y, bias=y[0]) + 1,
    lambda x, y: gm.gemm(2.0, x, y) + 1,
    lambda x, y: gm.gemv(x, y[0]) + 1,
)
x = torch.randn(8, 8)
for call in calls:
    compiled = torch.compile(call, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x, x), call(x, x))
print(torch._dynamo.utils.counters["frames"]["total"])
torch._dynamo.reset()
try:
    torch.compile(calls[2], backend="eager", fullgraph=True)(x, x)
except torch._dynamo.exc.Unsupported as error:
    assert "gemmery.gemm" in str(error), error
else:
    raise AssertionError
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "before",
    ["", "gm.matmul(np.eye(2), np.eye(2))"],
    ids=["the first product", "PyTorch after a product"],
)
def test_torch_compile_leaves_products_alone(before):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    code = CODE.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # the compiler warns of what it traces and cannot compile
    assert int(done.stdout) <= 16  # functions that it compiled: the four above, what is behind the product in each


def test_without_pytorch_functions_wait(monkeypatch):
    monkeypatch.setattr(opaque, "waiting", True)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not opaque.settle()
    assert opaque.waiting
    assert gm.matmul([[2.0]], [[3.0]]) == 6
