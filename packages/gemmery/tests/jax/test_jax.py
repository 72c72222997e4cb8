"""gemmery.jax: values within the bounds of a product, gradients, batches, what is refused, and how XLA calls it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmery as gm
from gemmery import dtypes, tiers, verify
from gemmery.cpu import xla
from gemmery.cpu.layout import JOB
from gemmery.errors import ArgumentError
from operands import random

jax = pytest.importorskip("jax", reason="JAX is not installed")
jax.config.update("jax_cuda_visible_devices", "0")
jnp = jax.numpy

from jax.extend.core import jaxprs_in_params  # noqa: E402 # after the skip

from gemmery.jax import handler, matmul, traced  # noqa: E402 # after the skip
from gemmery.jax.handler import A_TRANSPOSED, B_TRANSPOSED, StaticProduct  # noqa: E402

NAMES = ("f64", "f32", "f16", "bf16", "complex64", "int8", "int32", "uint16")
SIDES = st.one_of(st.integers(1, 9), st.integers(1, 70))


@pytest.fixture(autouse=True)
def _wide_types_on_the_cpu():
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


@pytest.mark.parametrize("name", NAMES)
def test_values_and_types(name):
    a, b = random((3, 33, 40), name, 1), random((40, 21), name, 2)
    result = matmul(jnp.asarray(a), jnp.asarray(b))
    assert isinstance(result, jax.Array)
    assert result.dtype == a.dtype
    assert verify.check(np.asarray(result), a, b).error_over_bound <= 1


@settings(max_examples=25)
@given(data=st.data(), m=SIDES, n=SIDES, k=SIDES, name=st.sampled_from(("f32", "bf16")), turned=st.integers(0, 3))
def test_random_products_in_every_layout(data, m, n, k, name, turned):
    whole = data.draw(st.lists(st.integers(1, 3), max_size=2))
    one, two = ([x if data.draw(st.booleans()) else 1 for x in whole] for _ in range(2))
    a, b = random((*one, m, k), name, 1), random((*two, k, n), name, 2)
    x, y = (
        jnp.asarray(np.swapaxes(z, -1, -2).copy() if turned & which else z)
        for z, which in ((a, A_TRANSPOSED), (b, B_TRANSPOSED))
    )
    result = traced._product(x, y, turned, name)
    assert verify.check(np.asarray(result), a, b).error_over_bound <= 1


@pytest.mark.parametrize(
    ("a", "b"), [((7,), (7,)), ((5, 7), (7,)), ((7,), (7, 3)), ((2, 5, 7), (7,)), ((7,), (2, 7, 3))]
)
def test_vectors(a, b):
    x, y = random(a, "f64", 1), random(b, "f64", 2)
    result = matmul(x, y)
    assert result.shape == np.matmul(x, y).shape
    assert np.allclose(result, np.matmul(x, y), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("a", "b"), [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((0, 2, 3), (3, 4)), ((2, 3), (3, 0))])
def test_empty_arrays(a, b):
    result = matmul(jnp.ones(a), jnp.ones(b))
    assert result.shape == np.matmul(np.ones(a), np.ones(b)).shape
    assert not result.any()


def test_types_are_promoted_by_the_rules_of_jax_and_widened():
    half, single = jnp.ones((2, 300), jnp.bfloat16), jnp.ones((300, 2), jnp.float32)
    assert matmul(half, single).dtype == jnp.float32
    assert matmul(half, half.T, preferred_element_type=jnp.float32).dtype == jnp.float32
    eight = jnp.full((2, 300), 100, jnp.int8)
    assert matmul(eight, eight.T, preferred_element_type="int32").tolist() == [[3_000_000] * 2] * 2
    assert matmul(eight, eight.T).tolist() == [[-64] * 2] * 2
    unsigned = jnp.full((2, 300), 200, jnp.uint8)
    assert matmul(unsigned, unsigned.T, preferred_element_type="int32").tolist() == [[12_000_000] * 2] * 2
    assert matmul(jnp.ones((2, 2), jnp.int32), single[:2]).dtype == jnp.float32


def numpy_of(*arrays):
    return [np.asarray(z, np.float64) for z in arrays]


@pytest.mark.parametrize(
    ("a", "b"), [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((2, 1, 5, 7), (1, 3, 7, 2)), ((7,), (2, 7, 3)), ((7,), (7,))]
)
@pytest.mark.parametrize("name", ["f64", "f32"])
def test_gradients(a, b, name):
    """Those of sum(C * W) are W B' and A' W, with the bound of a product each."""
    x, y = jnp.asarray(random(a, name, 1)), jnp.asarray(random(b, name, 2))
    w = jnp.asarray(random((x @ y).shape, name, 3))
    mine = jax.grad(lambda x, y: (matmul(x, y) * w).sum(), (0, 1))(x, y)
    theirs = jax.grad(lambda x, y: (jnp.matmul(x, y) * w).sum(), (0, 1))(*(jnp.asarray(z, "f8") for z in (x, y)))
    sizes = jax.grad(lambda x, y: (jnp.matmul(x, y) * abs(w)).sum(), (0, 1))(
        *(jnp.asarray(abs(z), "f8") for z in (x, y))
    )
    unit = {"f64": 2.0**-53, "f32": 2.0**-24}[name]
    for got, expected, size, operand in zip(mine, theirs, sizes, (x, y), strict=True):
        assert got.shape == operand.shape
        assert got.dtype == operand.dtype
        difference = np.abs(np.asarray(got, "f8") - np.asarray(expected))
        assert (difference <= 64 * unit * np.asarray(size)).all()


@pytest.mark.parametrize(("a", "b"), [((3, 0), (0, 2)), ((3, 4), (4, 0)), ((2, 3, 0), (0, 4)), ((0, 3, 4), (4, 2))])
def test_gradients_of_products_with_a_side_of_zero(a, b):
    x, y = jnp.ones(a), jnp.ones(b)
    for z, gradient in zip((x, y), jax.grad(lambda x, y: matmul(x, y).sum(), (0, 1))(x, y), strict=True):
        assert gradient.shape == z.shape
        assert not gradient.any()


@pytest.mark.parametrize("turned", [0, A_TRANSPOSED, B_TRANSPOSED, A_TRANSPOSED | B_TRANSPOSED])
def test_gradients_of_products_of_transposed_operands(turned):
    """Those that gradients of gradients need."""
    a = random((2, 7, 5) if turned & A_TRANSPOSED else (2, 5, 7), "f64", 1)
    b = random((3, 7) if turned & B_TRANSPOSED else (7, 3), "f64", 2)

    def theirs(a, b):
        return (a.mT if turned & A_TRANSPOSED else a) @ (b.mT if turned & B_TRANSPOSED else b)

    def gradients(product):
        return jax.grad(lambda a, b: (product(a, b) ** 2).sum(), (0, 1))(jnp.asarray(a), jnp.asarray(b))

    for one, other in zip(gradients(lambda a, b: traced._product(a, b, turned, "f64")), gradients(theirs), strict=True):
        assert np.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_of_narrow_types_and_of_gradients():
    a, b = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)
    da, db = jax.grad(lambda a, b: matmul(a, b, preferred_element_type="float32").sum(), (0, 1))(a, b)
    assert (da.dtype, db.dtype) == (a.dtype, b.dtype)
    assert (np.asarray(da) == 3).all()
    assert (np.asarray(db) == 4).all()
    x, y = jnp.asarray(random((4, 5), "f64", 1)), jnp.asarray(random((5, 4), "f64", 2))

    def hessian(product):
        return jax.jacrev(jax.grad(lambda x: (product(x, y) ** 3).sum()))(x)

    assert np.allclose(hessian(matmul), hessian(jnp.matmul), rtol=1e-10, atol=1e-10)


def calls(function, *operands):
    """How many custom calls a traced function makes, and on which shapes."""
    shapes = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "ffi_call":
                shapes.append(tuple(z.aval.shape for z in equation.invars))
            for inner in jaxprs_in_params(equation.params):
                walk(inner)

    walk(jax.make_jaxpr(function)(*operands).jaxpr)
    return shapes


@pytest.mark.parametrize(
    ("axes", "a", "b", "shapes"),
    [
        ((0, None), (6, 5, 7), (7, 3), ((6, 5, 7), (7, 3))),
        ((None, 0), (5, 7), (6, 7, 3), ((5, 7), (6, 7, 3))),
        ((0, 0), (6, 5, 7), (6, 7, 3), ((6, 5, 7), (6, 7, 3))),
        ((2, 1), (5, 7, 6), (7, 6, 3), ((6, 5, 7), (6, 7, 3))),
        ((0, None), (6, 5, 7), (2, 7, 3), ((6, 1, 5, 7), (2, 7, 3))),
        ((0, 0), (6, 7), (6, 7), ((6, 1, 7), (6, 7, 1))),
    ],
)
def test_vmap_makes_one_product_of_a_batch(axes, a, b, shapes):
    x, y = jnp.asarray(random(a, "f64", 1)), jnp.asarray(random(b, "f64", 2))
    assert calls(jax.vmap(matmul, axes), x, y) == [shapes]
    assert np.allclose(jax.vmap(matmul, axes)(x, y), jax.vmap(jnp.matmul, axes)(x, y), rtol=1e-12, atol=1e-12)


def test_vmap_and_grad_in_any_order():
    x, y = jnp.asarray(random((4, 3, 5, 7), "f64", 1)), jnp.asarray(random((3, 7, 2), "f64", 2))
    twice = jax.vmap(jax.vmap(matmul), (0, None))
    assert calls(twice, x, y) == [((4, 3, 5, 7), (3, 7, 2))]
    assert np.allclose(twice(x, y), x @ y, rtol=1e-12, atol=1e-12)
    for product in (matmul, jnp.matmul):
        inside = jax.vmap(jax.grad(lambda p, q, f=product: (f(p, q) ** 2).sum(), (0, 1)), (0, 0))(x[0], y)
        outside = jax.grad(lambda p, q, f=product: (jax.vmap(f)(p, q) ** 2).sum(), (0, 1))(x[0], y)
        for one, other in zip(inside, outside, strict=True):
            assert np.allclose(one, other, rtol=1e-10, atol=1e-10)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(matmul, (x, y), (x, y))


def test_loops_conditions_and_donated_arrays():
    a = jnp.asarray(random((6, 6), "f64", 1)) / 6
    power = jax.lax.scan(lambda c, _: (matmul(c, a), None), jnp.eye(6), length=5)[0]
    assert np.allclose(power, np.linalg.matrix_power(np.asarray(a), 5), rtol=1e-12, atol=1e-12)
    product = jax.jit(lambda a, b: jax.lax.cond(a.sum() > 1e9, lambda: a, lambda: matmul(a, b)), donate_argnums=0)
    assert np.allclose(product(power + 0, a), power @ a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: matmul(x, jnp.ones((4, 2))), gm.ShapeError, "last dimension of the first is 3"),
        (lambda x: matmul(x, 2.0), gm.ShapeError, "a scalar is not a matrix"),
        (lambda x: matmul(jnp.ones((2, 2, 3)), jnp.ones((3, 3, 2))), gm.ShapeError, "do not broadcast"),
        (lambda x: matmul(x > 0, x.T), None, ""),
        (lambda x: matmul(x > 0, x.T > 0), gm.DTypeError, "bool is not supported.*astype"),
        (lambda x: matmul(x.astype(jnp.float8_e4m3fn), x.T.astype(jnp.float8_e4m3fn)), gm.DTypeError, "float8_e4m3fn"),
        (
            lambda x: matmul(x, x.T, preferred_element_type="int32"),
            gm.DTypeError,
            "preferred_element_type=int32 cannot represent every float64",
        ),
        (lambda x: matmul(x, x.T, preferred_element_type="foo"), gm.DTypeError, "preferred_element_type='foo' is no"),
        (lambda x: matmul(x, x.T, preferred_element_type=3), gm.DTypeError, "preferred_element_type=3 is no element"),
        (lambda x: matmul(x, None), gm.ArgumentError, "b is None, and no array"),
        (lambda x: matmul({}, x), gm.ArgumentError, "a is {}, and no array"),
    ],
)
def test_errors_are_raised_when_jax_traces(call, error, words):
    if error is None:
        assert jax.eval_shape(call, jnp.ones((2, 3))).shape == (2, 2)
        return
    with pytest.raises(error, match=words):
        jax.eval_shape(call, jnp.ones((2, 3)))


def test_types_that_jax_does_not_compute_with_are_refused():
    with jax.enable_x64(False):
        x = jnp.ones((2, 3))
        with pytest.raises(gm.DTypeError, match=r"preferred_element_type=float64.*jax_enable_x64"):
            matmul(x, x.T, preferred_element_type="float64")


def test_dimensions_that_are_unknown_when_traced_are_refused():
    shape = jax.export.symbolic_shape("n, 4")
    with pytest.raises(gm.ShapeError, match="known when traced"):
        jax.export.export(jax.jit(matmul))(jax.ShapeDtypeStruct(shape, "f4"), jnp.ones((4, 2), "f4"))


def test_a_product_that_this_process_has_not_prepared_is_prepared_when_it_is_called(monkeypatch):
    """As in a program that JAX stored: its trace, which prepares products, was another process's."""
    a, b = jnp.asarray(random((2, 1, 9, 31), "f32", 1)), jnp.asarray(random((1, 3, 31, 11), "f32", 2))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(handler.TARGET)]
    exported = jax.export.export(jax.jit(matmul), disabled_checks=allowed)(a, b)
    handler._entries.clear()
    handler._forget()
    prepared = []
    monkeypatch.setattr(handler, "_entry", lambda job, make=handler._entry: prepared.append(job) or make(job))
    for _ in range(3):
        result = exported.call(a, b)
        assert verify.check(np.asarray(result), np.asarray(a), np.asarray(b)).error_over_bound <= 1
    assert len([job for job in prepared if len(job.offsets) > 1]) == 1


LOADED = """
import numpy as np
import gemmery.jax, jax
from jax._src import xla_bridge
from gemmery.jax.handler import StaticProduct

assert not xla_bridge.backends_are_initialized()  # jax.distributed.initialize may still be called
a, b = np.arange(6, dtype="f4").reshape(2, 3), np.ones((3, 4), "f4")
product = StaticProduct(a.shape, b.shape, "f32", "f32", 0)
call = jax.ffi.ffi_call("gemmery_matmul", jax.ShapeDtypeStruct((2, 4), "f4"))
c = call(a, b, key=np.int64(product.key), transposed=np.int64(product.form))
assert np.array_equal(c, a @ b), c
"""


@pytest.mark.process
def test_a_process_that_only_imports_the_module_runs_a_stored_program():
    """What the program does there: it calls the handler, and nothing traces `matmul`."""
    subprocess.run([sys.executable, "-c", LOADED], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_another_number_of_threads_gives_the_same_bits():
    a, b = (jnp.asarray(random((300, 300), "f32", seed)) for seed in (1, 2))
    expected = np.asarray(matmul(a, b)).tobytes()
    try:
        for count in (1, 2, 1):
            gm.set_num_threads(count)
            assert np.asarray(matmul(a, b)).tobytes() == expected
    finally:
        gm.set_num_threads(None)


def test_a_batch_of_vectors_is_one_job_on_exchanged_operands():
    """The batch is more columns, and C is column-major: the kernel computes C' = B' A'."""
    a, b = random((5, 7), "f64", 1), random((6, 7, 1), "f64", 2)
    product = StaticProduct(a.shape, b.shape, "f64", "f64", 0)
    assert handler.job(product, handler.prepared(product), 1).swapped
    assert np.allclose(matmul(a, b), a @ b, rtol=1e-13, atol=1e-13)


def test_a_kernel_for_one_shape_takes_its_place_in_the_background():
    a, b = (jnp.asarray(random((8, 8), "f32", seed)) for seed in (1, 2))
    product = StaticProduct((8, 8), (8, 8), "f32", "f32", 0)
    handler._entries.pop((product, gm.get_num_threads()), None)
    expected = gm.matmul(np.asarray(a), np.asarray(b))
    jax.clear_caches()
    assert np.array_equal(matmul(a, b), expected)
    tiers.wait()
    address = handler.know(product)
    how = handler.specialized(handler.prepared(product))
    assert how is not None
    job = ctypes.string_at(address + xla.JOB_AT, 8 * len(JOB))
    assert job == handler.job(product, how, gm.get_num_threads()).job
    assert np.array_equal(matmul(a, b), expected)


def test_a_table_without_a_free_slot_asks_python_each_time(monkeypatch):
    table = ctypes.create_string_buffer(xla.TABLE_BYTES)
    at = ctypes.addressof(table)
    keys = [5 + i * xla.SLOTS for i in range(xla.PROBES + 1)]
    for key in keys:
        handler._store(at, key, 8 * key)
    words = np.frombuffer(table, np.int64)[xla.SLOTS_AT // 8 :].reshape(-1, 2)
    assert [tuple(word) for word in words[5 : 5 + xla.PROBES]] == [(key, 8 * key) for key in keys[:-1]]
    assert not words[5 + xla.PROBES :].any()


def test_a_key_whose_slot_is_taken_is_in_one_of_the_next(monkeypatch):
    a = jnp.asarray(random((11, 19), "f32", 1))
    product = jax.jit(lambda a: matmul(a, a.T))
    expected = np.asarray(product(a))
    key = StaticProduct((11, 19), (19, 11), "f32", "f32", 0).key
    handler._forget()
    for i in range(1, xla.PROBES):
        handler._store(handler.register(), key ^ i * xla.SLOTS, 0)
    handler.know(StaticProduct((11, 19), (19, 11), "f32", "f32", 0))
    monkeypatch.setattr(handler, "know", None)
    try:
        assert np.array_equal(product(a), expected)
    finally:
        handler._forget()


def test_a_product_that_cannot_be_prepared_is_an_error_of_jax(monkeypatch, capfd):
    a = jnp.asarray(random((13, 17), "f32", 1))
    product = jax.jit(matmul)
    expected = np.asarray(product(a, a.T))

    def fail(_):
        raise MemoryError("none left")

    monkeypatch.setattr(handler, "know", fail)
    handler._forget()
    with pytest.raises(Exception, match="INTERNAL: gemmery could not prepare a product"):
        product(a, a.T).block_until_ready()
    assert "none left" in capfd.readouterr().err
    monkeypatch.undo()
    assert np.array_equal(product(a, a.T), expected)


def test_many_threads():
    a, b = (jnp.asarray(random((64, 64), "f32", seed)) for seed in (1, 2))
    expected, results = np.asarray(matmul(a, b)).tobytes(), []

    def work():
        results.extend(np.asarray(matmul(a, b)).tobytes() == expected for _ in range(20))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 80
    assert all(results)


def test_the_offsets_are_those_of_the_header():
    """Read from `c_api.h` by the sizes of C's types: every field of these structs is 8 bytes, or padded to that."""
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()

    def fields(name):
        body = text.partition(f"struct {name} {{")[2].partition("};")[0]
        lines = [line.partition("//")[0].strip() for line in body.splitlines()]
        return [line.rstrip(";").split()[-1].lstrip("*") for line in lines if line.endswith(";")]

    assert fields("XLA_FFI_CallFrame")[:8] == [
        "struct_size", "extension_start", "api", "ctx", "stage", "args", "rets", "attrs",
    ]  # fmt: skip
    for name, last, start, at in (
        ("Args", "args", 40, xla.ARGS),
        ("Rets", "rets", 80, xla.RESULTS),
        ("Attrs", "attrs", 120, xla.ATTRIBUTES),
    ):
        assert start + 8 * fields(f"XLA_FFI_{name}").index(last) == at
    buffer = fields("XLA_FFI_Buffer")
    assert [8 * buffer.index(name) for name in ("dtype", "data", "rank", "dims")] == [
        xla.BUFFER_DTYPE, xla.BUFFER_DATA, xla.BUFFER_RANK, xla.BUFFER_DIMS,
    ]  # fmt: skip
    codes = dict(re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", text))
    spelled = {"bool": "pred", "complex": "c", "uint": "u", "int": "s", "float": "f", "_": ""}
    for row in dtypes.DTYPES:
        name = row.numpy
        for ours, theirs in spelled.items():
            name = name.replace(ours, theirs)
        assert int(codes[name.upper()]) == row.xla


def test_an_array_of_ml_dtypes_is_taken():
    a = np.ones((2, 2), ml_dtypes.bfloat16)
    assert matmul(a, a).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "precision", "message"),
    [
        ("f32", "f32_tensor", "precision='f32_tensor' applies to products on a CUDA device only; leave it out"),
        ("f64", "f64_normwise", "precision='f64_normwise' applies to products on a CUDA device only"),
        ("f32", "highest", "precision='highest' of a product of float32 into float32: it can be 'tf32'"),
        ("f32", "f64_normwise", "precision='f64_normwise' of a product of float32"),
        ("bf16", "tf32", "precision='tf32' of a product of bfloat16 into bfloat16"),
        ("f32", 3, "precision=3 of a product"),
    ],
)
def test_a_precision_is_refused_on_the_cpu_and_where_no_product_has_it(name, precision, message):
    x = jnp.asarray(random((4, 4), name, 1))
    with pytest.raises(ArgumentError, match=re.escape(message)):
        matmul(x, x, precision=precision)


def test_gradients_and_batches_have_the_precision_of_the_product(monkeypatch):
    asked = []
    called = traced._called

    def recorded(a, b, transposed, out, precision):
        asked.append((transposed, precision))
        return called(a, b, transposed, out, "")

    monkeypatch.setattr(traced, "_called", recorded)
    monkeypatch.setattr(traced, "only_on_devices", lambda precision: None)
    traced._batchable.cache_clear()
    x, y = jnp.asarray(random((3, 5, 7), "f32", 1)), jnp.asarray(random((7, 4), "f32", 2))
    product = jax.vmap(lambda a, b: matmul(a, b, precision="f32_strict"), (0, None))
    jax.grad(lambda a, b: product(a, b).sum(), (0, 1))(x, y)
    traced._batchable.cache_clear()
    assert len(asked) >= 3
    assert {precision for _, precision in asked} == {"f32_strict"}
