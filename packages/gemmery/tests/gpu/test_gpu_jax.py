"""gemmery.jax on a CUDA device: values within the bound, gradients, batches, and the order of XLA's own work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import gemmery as gm
from gemmery import tiers
from gemmery.cuda import driver
from operands import random

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the device's memory
jax = pytest.importorskip("jax", reason="JAX is not installed")
# JAX leaves the last device that it starts the current one of the thread, also for PyTorch.
jax.config.update("jax_cuda_visible_devices", "0")
jnp = jax.numpy

from gemmery.jax import handler, matmul, traced  # noqa: E402 # after the skip
from gemmery.jax.handler import A_TRANSPOSED, B_TRANSPOSED  # noqa: E402 # after the skip

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
    wide = "f8" if name == "f64" else "f4"
    da, db = jax.grad(lambda x, y: (matmul(x, y).astype(wide) * w.astype(wide)).sum(), (0, 1))(x, y)
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


def test_widened_results_and_whole_numbers():
    half = jnp.ones((64, 300), jnp.bfloat16)
    assert (matmul(half, half.T, preferred_element_type="float32") == 300).all()
    assert (matmul(jnp.ones((2, 3), "int32"), jnp.ones((3, 2), "int32")) == 3).all()


def whole(shape, seed, dtype="f4"):
    """Small whole numbers, whose products are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("turned", range(4))
def test_transposed_operands_are_read_in_place_with_the_bits_of_gm_matmul(name, turned):
    x, y = jnp.asarray(random((256, 512), name, 1)), jnp.asarray(random((512, 384), name, 2))
    a = jnp.swapaxes(x, 0, 1) + 0 if turned & A_TRANSPOSED else x
    b = jnp.swapaxes(y, 0, 1) + 0 if turned & B_TRANSPOSED else y
    product = jax.jit(lambda a, b: traced._product(a, b, turned, name))
    for _ in range(3):  # by a kernel for every shape, and by the one for this shape
        result = product(a, b).block_until_ready()
        tiers.wait()
    check(result, x, y, name)
    torch = pytest.importorskip("torch")
    tensors = [torch.from_dlpack(z) for z in (a, b)]
    operands = [z.T if turned & which else z for z, which in zip(tensors, (A_TRANSPOSED, B_TRANSPOSED), strict=True)]
    for _ in range(3):
        same = gm.matmul(*operands)
        tiers.wait()
    bits = torch.from_dlpack(result)
    assert torch.equal(bits, same)


def test_integers_of_eight_bits_on_hopper():
    if driver.find("cuda:0").capability != 90:
        pytest.skip("only Hopper multiplies int8 into int32")
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-128, 128, shape, dtype="i1") for shape in ((130, 256), (256, 144)))
    result = jax.jit(lambda a, b: matmul(a, b, preferred_element_type="int32"))(a, b)
    assert result.dtype == "int32"
    assert np.array_equal(result, a.astype("i4") @ b.astype("i4"))


def test_scan_cond_and_donation():
    step, first = whole((64, 64), 1), whole((64, 64), 2)

    def body(c, x):
        c = jax.lax.cond(x % 2 == 0, lambda c: matmul(c, step), lambda c: matmul(step, c), c)
        return jnp.mod(c, 17.0), c.sum()

    run = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(12)), donate_argnums=0)
    expected, sums = np.asarray(first, "f8"), []
    for x in range(12):
        one, two = (expected, np.asarray(step)) if x % 2 == 0 else (np.asarray(step), expected)
        product = one @ two
        sums.append(product.sum())
        expected = np.mod(product, 17)
    for _ in range(3):
        donated = first + 0
        last, each = run(donated)
        assert donated.is_deleted()
        assert np.array_equal(last, expected)
        assert np.array_equal(each, sums)


def test_many_small_products_of_one_program_which_xla_might_capture():
    """From five operations on XLA replays what it can as a CUDA graph; other addresses must reach the products."""
    weights = [whole((48, 48), seed) for seed in range(16)]

    @jax.jit
    def chain(x):
        for w in weights:
            x = jnp.mod(matmul(x, w), 13.0)
        return x

    for seed in range(20, 28):
        x = whole((48, 48), seed)
        expected = np.asarray(x, "f8")
        for w in weights:
            expected = np.mod(expected @ np.asarray(w, "f8"), 13)
        assert np.array_equal(chain(x), expected)


def test_calls_of_many_threads_and_results_fetched_late():
    a, b = whole((6, 96, 80), 1), whole((80, 64), 2)
    product = jax.jit(matmul)
    late, errors = {}, []

    def calls(index):
        try:
            late[index] = [product(a[index] + i, b) for i in range(40)]
        except BaseException as error:  # a thread's error would not fail the test
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for index, some in late.items():
        for i, result in enumerate(some):
            assert np.array_equal(result, (np.asarray(a[index]) + i) @ np.asarray(b))


def test_an_error_in_the_handler_is_raised_and_later_calls_run(monkeypatch):
    a, b = whole((33, 47), 1), whole((47, 29), 2)

    def fail(frame):
        raise MemoryError("no room for this product")

    product = jax.jit(matmul)
    with monkeypatch.context() as patched:
        patched.setattr(handler, "_launch", fail)
        with pytest.raises(Exception, match="MemoryError: no room for this product"):
            product(a, b).block_until_ready()
    assert np.array_equal(product(a, b), np.asarray(a) @ np.asarray(b))


def test_the_default_precision_of_float32_holds_at_the_next_call():
    if driver.find("cuda:0").capability != 90:
        pytest.skip("the precision is for Hopper")
    torch = pytest.importorskip("torch")
    a, b = jnp.asarray(random((512, 1024), "f32", 1)), jnp.asarray(random((1024, 384), "f32", 2))
    product, before = jax.jit(matmul), gm.get_float32_precision()
    tensors = [torch.from_dlpack(z) for z in (a, b)]
    try:
        for precision in ("f32_tensor", "f32_strict", "tf32", None):
            gm.set_float32_precision(precision)
            for _ in range(3):
                result, same = product(a, b).block_until_ready(), gm.matmul(*tensors)
                tiers.wait()
            assert torch.equal(torch.from_dlpack(result), same), precision
    finally:
        gm.set_float32_precision(before)


PROGRAM = """
import json, sys, os
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
from gemmery.jax import matmul
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
c = jax.jit(lambda a, b: matmul(a, b) + 1)(jnp.full((40, 24), 2.0), jnp.full((24, 56), 3.0))
print(json.dumps([float(c.min()), float(c.max()), "/jax/compilation_cache/cache_hits" in hits]))
"""


@pytest.mark.process
def test_a_program_that_jax_stored_on_disk(tmp_path):
    answers = []
    for _ in range(2):
        call = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert answers == [[145, 145, False], [145, 145, True]]


@pytest.mark.skipif(not driver.missing() and driver.device(0).capability != 90, reason="the device is no Hopper")
@pytest.mark.parametrize(
    ("name", "precision"),
    [("f32", "tf32"), ("f32", "f32_tensor"), ("f32", "f32_strict"), ("f32", "f32_plus"), ("f64", "f64_normwise")],
)
def test_a_precision_gives_the_bits_of_gm_matmul(name, precision):
    # Less would be multiplied on CUDA cores with "f32_tensor" too.
    x, y = jnp.asarray(random((1024, 2048), name, 1)), jnp.asarray(random((2048, 1536), name, 2))
    result = jax.jit(lambda a, b: matmul(a, b, precision=precision))(x, y).block_until_ready()
    expected = gm.matmul(x, y, precision=precision)
    assert np.array_equal(np.asarray(result), np.asarray(expected))
    if name == "f32":  # so that the precision has an effect
        assert not np.array_equal(np.asarray(result), np.asarray(matmul(x, y)))


def test_a_precision_that_a_product_cannot_have_is_refused_when_traced():
    with pytest.raises(gm.ArgumentError, match="precision='tf32' of a product of bfloat16"):
        matmul(jnp.ones((2, 2), jnp.bfloat16), jnp.ones((2, 2), jnp.bfloat16), precision="tf32")
