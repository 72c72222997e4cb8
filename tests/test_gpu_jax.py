"""gemmery.jax on a CUDA device: values within the bound, gradients, batches, and the order of XLA's own work."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gemmery.cuda import driver
from operands import random

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the device's memory
jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from gemmery.jax import matmul  # noqa: E402 # after the skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX has no GPU"),
]

NAMES = ("f64", "f32", "f16", "bf16")
ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


@pytest.fixture(autouse=True)
def _wide_types():
    with jax.enable_x64(True):
        yield


def check(result, a, b, name):
    x, y = (np.asarray(z).astype("f8") for z in (a, b))
    expected, size = x @ y, np.abs(x) @ np.abs(y)
    sums = min(ROUNDOFF[name], ROUNDOFF["f32"])
    tolerance = 2 * (x.shape[-1] + 4) * sums * size + ROUNDOFF[name] * np.abs(expected) + 2.0**-24 * (name == "f16")
    assert "gpu" in {device.platform for device in result.devices()}
    assert result.shape == expected.shape
    assert (np.abs(np.asarray(result).astype("f8") - expected) <= tolerance).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((33, 70), (70, 45)),
        ((3, 33, 70), (70, 45)),
        ((2, 1, 8, 9), (1, 3, 9, 5)),
        ((70,), (70, 5)),
        ((256, 512), (512, 384)),
    ],
)
def test_values(a, b, name):
    x, y = random(a, name, 1), random(b, name, 2)
    for _ in range(3):
        check(matmul(jnp.asarray(x), jnp.asarray(y)), x, y, name)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_batches(name):
    x, y = jnp.asarray(random((6, 40, 24), name, 1)), jnp.asarray(random((24, 32), name, 2))
    check(jax.jit(jax.vmap(matmul, (0, None)))(x, y), x, y, name)
    w = jnp.asarray(random((6, 40, 32), name, 3))
    da, db = jax.grad(lambda x, y: (matmul(x, y).astype("f4") * w.astype("f4")).sum(), (0, 1))(x, y)
    check(da, w, y.T, name)
    rows, columns = np.asarray(x).reshape(-1, 24), np.asarray(w).reshape(-1, 32)
    check(db, rows.T, columns, name)


def test_the_order_of_other_work_on_the_stream():
    """Whole numbers, exact in float32: a product that ran too early or too late would give others."""
    step = jnp.asarray(np.random.default_rng(1).integers(-1, 2, (512, 512)).astype("f4"))

    @jax.jit
    def chain(c):
        for _ in range(8):
            c = jnp.mod(matmul(c + 1, step) * 2, 31.0)
        return c

    c = expected = np.ones((512, 512), "f4")
    for _ in range(3):
        c = chain(jnp.asarray(c))
        for _ in range(8):
            expected = np.mod((expected + 1).astype("f8") @ np.asarray(step, "f8") * 2, 31)
        assert np.array_equal(c, expected)


def test_widened_results_and_types_that_a_device_refuses():
    half = jnp.ones((64, 300), jnp.bfloat16)
    assert (matmul(half, half.T, preferred_element_type="float32") == 300).all()
    with pytest.raises(Exception, match="DTypeError: int32 on cuda"):
        matmul(jnp.ones((2, 2), "int32"), jnp.ones((2, 2), "int32")).block_until_ready()
