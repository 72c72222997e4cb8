"""Products of PyTorch's CPU tensors that the compiled entry has met: the same results, no leak."""

import ctypes
import gc
import sys
import threading
import weakref

import numpy as np
import pytest

import gemmery as gm
from gemmery import config
from gemmery.api import repeats
from gemmery.cpu import entry, entry_layout, entry_table
from tensors import LAYOUTS, MET, meet, native, parameter, python_calls, same, torch, values

TYPES = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int8", "int32", "int64", "uint8")
PRODUCTS = {
    "matmul": lambda a, b, x, c, o: (gm.matmul(a, b), a @ b),
    "matmul_out": lambda a, b, x, c, o: (gm.matmul(a, b, out=o), a @ b),
    "matmul_vector": lambda a, b, x, c, o: (gm.matmul(a, x), a @ x),
    "vector_matmul": lambda a, b, x, c, o: (gm.matmul(x, b), x @ b),
    "vectors": lambda a, b, x, c, o: (gm.matmul(x, x), (x[None] @ x[:, None])[0, 0]),
    "batch": lambda a, b, x, c, o: (gm.matmul(torch.stack([a, b]), torch.stack([b, a])), torch.stack([a @ b, b @ a])),
    "broadcast": lambda a, b, x, c, o: (gm.matmul(torch.stack([a, b, a]), b), torch.stack([a @ b, b @ b, a @ b])),
    "gemm": lambda a, b, x, c, o: (gm.gemm(1.0, a, b), a @ b),
    "gemm_scaled": lambda a, b, x, c, o: (gm.gemm(2.0, a, b), 2 * (a @ b)),
    "gemm_c": lambda a, b, x, c, o: (gm.gemm(2, a, b, 3, c), 2 * (a @ b) + 3 * c),
    "gemm_out": lambda a, b, x, c, o: (gm.gemm(2, a, b, 3, c, out=o), 2 * (a @ b) + 3 * c),
    "gemv": lambda a, b, x, c, o: (gm.gemv(a, x), a @ x),
    "gemv_scaled": lambda a, b, x, c, o: (gm.gemv(a, x, x, alpha=2.0, beta=3.0), 2 * (a @ x) + 3 * x),
    "gemv_out": lambda a, b, x, c, o: (gm.gemv(a, x, out=o[0]), a @ x),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_entry_and_type(name, dtype):
    a, b, c, o = (values(8, 8, dtype=dtype, seed=seed) for seed in range(4))
    x = values(8, dtype=dtype, seed=4)
    product = PRODUCTS[name]
    wide = {"float16": "float64", "bfloat16": "float64"}.get(dtype, dtype)
    expected = product(*(y.to(getattr(torch, wide)) for y in (a, b, x, c, o)))[1].to(a.dtype)
    for seed in range(MET + 1):
        a.copy_(values(8, 8, dtype=dtype, seed=10 + seed))
        expected = product(*(y.to(getattr(torch, wide)) for y in (a, b, x, c, o)))[1].to(a.dtype)
        result = product(a, b, x, c, o)[0]
        assert same(result, expected)
        assert type(result) is torch.Tensor
        assert not result.requires_grad
        if "out" in name:
            assert result.data_ptr() == o.data_ptr()
        else:
            assert result.data_ptr() not in {y.data_ptr() for y in (a, b, x, c, o)}


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_every_layout(left, right):
    for seed in range(MET + 1):
        a, b = LAYOUTS[left](values(8, 8, seed=seed)), LAYOUTS[right](values(8, 8, seed=seed + 9))
        assert same(gm.matmul(a, b), a @ b)
        assert same(gm.matmul(a, b[0]), a @ b[0])
        out = torch.full((8, 16), torch.nan)
        assert same(gm.matmul(a, b, out=out[:, 1::2]), a @ b)
        assert same(out[:, 1::2], a @ b)
        assert out[:, ::2].isnan().all()
        assert same(gm.matmul(a, b, out=out[:, :8].T), a @ b)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("bias", [None, 1.5, "vector"])
def test_bias_and_activation(bias, activation):
    functions = {
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        None: lambda x: x,
    }
    for seed in range(MET + 1):
        a, b = values(8, 8, seed=seed) - 1, values(8, 8, seed=seed + 9) - 1
        row = values(8, seed=seed + 5) if bias == "vector" else bias
        expected = functions[activation](a @ b + (0 if row is None else row))
        result = gm.matmul(a, b, bias=row, activation=activation)
        assert result.shape == expected.shape
        assert float((result - expected).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    "shapes", [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((3, 0), (0,)), ((0,), (0,)), ((0, 2, 3), (3, 4))]
)
def test_products_without_elements(shapes):
    a, b = (torch.ones(shape) for shape in shapes)
    for _ in range(MET):
        assert same(gm.matmul(a, b), a @ b)


def test_products_met_before_do_not_reach_python():
    if not native():
        pytest.skip("this machine or this PyTorch has no fast path for tensors")
    a, b, c, o = (values(8, 8, seed=seed) for seed in range(4))
    x, batch = values(8), values(4, 8, 8)
    half = a.to(torch.bfloat16)
    calls = {
        "matmul": lambda: gm.matmul(a, b),
        "out": lambda: gm.matmul(a, b, out=o),
        "position": lambda: gm.matmul(a, b, o),
        "transposed": lambda: gm.matmul(a.T, b.T),
        "vector": lambda: gm.matmul(a, x),
        "dot": lambda: gm.matmul(x, x),
        "batch": lambda: gm.matmul(batch, batch),
        "bfloat16": lambda: gm.matmul(half, half),
        "gemm": lambda: gm.gemm(1.0, a, b),
        "alpha": lambda: gm.gemm(2.0, a, b),
        "beta": lambda: gm.gemm(2.0, a, b, 0.5, c),
        "beta out": lambda: gm.gemm(2.0, a, b, 0.5, c, out=c),
        "beta c out": lambda: gm.gemm(2.0, a, b, 0.5, c, out=o),
        "gemv": lambda: gm.gemv(a, x),
        "bias": lambda: gm.matmul(a, b, bias=x, activation="relu"),
    }
    for name, call in calls.items():
        meet(call)
        assert (name, python_calls(call)[1]) == (name, [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_shapes_of_tensors_are_served_by_the_kernels_for_every_shape(dtype):
    if not native() or not config.tiers():
        pytest.skip("this machine or this PyTorch has no fast path for new shapes of tensors")
    meet(lambda: gm.matmul(values(8, 8, dtype=dtype), values(8, 8, dtype=dtype)))
    for m, n, k in ((3, 5, 7), (1, 9, 4), (17, 1, 33), (12, 31, 2)):
        a, b = values(m, k, dtype=dtype), values(k, n, dtype=dtype)
        result, names = python_calls(lambda: gm.matmul(a, b))  # noqa: B023
        assert names == []
        assert type(result) is torch.Tensor
        assert same(result, (a.double() @ b.double()).to(a.dtype))


def random_tensor(random, dtype, *shape):
    """A tensor with one of several layouts."""
    x = torch.from_numpy(random.integers(0, 3, (*shape[:-1], 2 * shape[-1]))).to(dtype)
    way = random.integers(4)
    if way == 0:
        return x[..., : shape[-1]].contiguous()
    if way == 1:
        return x[..., ::2]
    if way == 2 and len(shape) > 1:
        return x[..., : shape[-1]].transpose(-1, -2).contiguous().transpose(-1, -2)
    return x[..., : shape[-1]]


@pytest.mark.parametrize("seed", range(4))
def test_random_products_in_turn(seed):
    random = np.random.default_rng(seed)
    types = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.complex64)
    for _ in range(150):
        dtype = types[random.integers(len(types))]
        m, n, k = (int(x) for x in random.integers(1, 7, 3))
        batch = ((), (2,), (3, 2))[random.integers(3)]
        a = random_tensor(random, dtype, *batch, m, k)
        b = random_tensor(random, dtype, *(batch if random.integers(2) else ()), k, n)
        wide = torch.complex128
        exact, c = a.to(wide) @ b.to(wide), random_tensor(random, dtype, *batch, m, n)
        kind = random.integers(6)
        if kind == 0:
            result = gm.matmul(a, b, out=c)
        elif kind == 1:
            result, exact = gm.gemm(2, a, b, 3, c), 2 * exact + 3 * c.to(wide)
        elif kind == 2:
            exact, out = 2 * exact + 3 * c.to(wide), random_tensor(random, dtype, *batch, m, n)
            result = gm.gemm(2, a, b, 3, c, out=out)
        elif kind == 3 and dtype != torch.bfloat16:
            result = gm.matmul(a.numpy(), b)
        elif kind == 4:
            row = random_tensor(random, dtype, n)
            result, exact = gm.matmul(a, b, bias=row), exact + row
        else:
            result = gm.matmul(a, b)
        assert type(result) is torch.Tensor
        assert result.dtype == dtype
        assert torch.equal(result.to(wide), exact)


def test_a_pytorch_of_which_too_little_is_known_is_served_by_python(monkeypatch):
    if not native():
        pytest.skip("this machine or this PyTorch has no fast path for tensors")
    a, out = values(8, 8), torch.zeros(8, 8)
    meet(lambda: gm.matmul(a, a))
    table = entry_table.address() + entry_layout.at(entry_layout.HEAD, "tensors")
    facts = ctypes.c_int64.from_address(table).value
    monkeypatch.setattr(repeats, "_known", lambda _: None)
    entry.know_tensors(0)
    try:
        for _ in range(MET):
            result, names = python_calls(lambda: gm.matmul(a, a))
            assert same(result, a @ a)
            assert names[0] == "_matmul"
            assert same(gm.gemm(2.0, a, a, 0.5, a, out=out), 2 * (a @ a) + 0.5 * a)
            assert same(gm.matmul(a, a, bias=a[0], activation="relu"), torch.relu(a @ a + a[0]))
    finally:
        entry.know_tensors(facts)
    assert python_calls(lambda: gm.matmul(a, a))[1] == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_are_multiplied_where_gradients_are_not_recorded(mode):
    weights, x = parameter(), values(8, 8)
    for _ in range(MET):
        with mode():
            result = gm.matmul(x, weights)
            assert same(result, x @ weights)
            assert type(result) is torch.Tensor
            assert result.is_inference() == (mode is torch.inference_mode)
    with pytest.raises(gm.LayoutError, match="requires grad"):
        gm.matmul(x, weights)


WRITES = {
    "matmul": lambda out, a: gm.matmul(a, a, out=out),
    "overlapping": lambda out, a: gm.matmul(out, a, out=out),
    "gemm": lambda out, a: gm.gemm(2.0, a, a, 0.5, out, out=out),
    "gemv": lambda out, a: gm.gemv(a, a[0], out=out[0]),
    "bias": lambda out, a: gm.matmul(a, a, bias=a[0], out=out),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_out_raises_its_version_by_one(write):
    a, out = values(8, 8), torch.zeros(8, 8)
    for _ in range(MET + 1):
        before = out._version, a._version
        WRITES[write](out, a)
        assert (out._version, a._version) == (before[0] + 1, before[1])
    with torch.inference_mode():
        out = torch.zeros(8, 8)
        meet(lambda: WRITES[write](out, a))


def test_an_out_that_overlaps_is_computed_as_if_it_did_not():
    a = values(8, 8)
    whole = torch.zeros(9, 8)
    meet(lambda: gm.matmul(whole[:8], a, out=torch.zeros(8, 8)))
    for _ in range(MET + 1):
        whole[:8] = values(8, 8, seed=3)
        expected = whole[:8] @ a
        assert same(gm.matmul(whole[:8], a, out=whole[1:]), expected)
        assert same(whole[1:], expected)


@pytest.mark.parametrize(
    "layout", ["rows", "columns", "strided", "other type", "overlapping", "overlapping a", "alias"]
)
def test_the_old_c_may_be_any_tensor(layout):
    a, b = values(8, 8), values(8, 8, seed=1)
    meet(lambda: gm.gemm(2.0, a, b, 3.0, values(8, 8), out=torch.zeros(8, 8)))
    for seed in range(MET):
        whole = values(9, 8, seed=seed)
        c, out = values(8, 8, seed=seed), torch.full((8, 8), torch.nan)
        if layout in LAYOUTS:
            c = LAYOUTS[layout](c)
        if layout == "other type":
            c = c.to(torch.float16)
        if layout == "overlapping":
            c, out = whole[:8], whole[1:]
        left = a
        if layout == "overlapping a":
            left, out = whole[:8], whole[1:]
        if layout == "alias":
            out = c.view(8, 8)
        expected = 2 * (left @ b) + 3 * c.to(torch.float32)
        before = out._version
        result = gm.gemm(2.0, left, b, 3.0, c, out=out)
        assert result is out
        assert same(out, expected)
        assert out._version == before + 1
        assert same(gm.gemm(2.0, a, b, 3.0, values(8, 8)), 2 * (a @ b) + 3 * values(8, 8))
        c = LAYOUTS["columns"](values(8, 8, seed=seed))
        assert same(gm.gemm(2.0, a, b, 3.0, c), 2 * (a @ b) + 3 * c)
    for shape in ((8, 4), (4, 16), (64,), (1, 8, 8)):
        with pytest.raises(gm.ShapeError, match="c has shape"):
            gm.gemm(2.0, a, b, 3.0, values(*shape), out=torch.zeros(8, 8))


def test_operands_of_two_libraries_give_a_tensor():
    a, b = values(8, 8), values(8, 8, seed=1)
    for _ in range(MET + 1):
        for left, right in ((a, b.numpy()), (a.numpy(), b)):
            result = gm.matmul(left, right)
            assert type(result) is torch.Tensor
            assert same(result, a @ b)
        assert type(gm.matmul(a.numpy(), b.numpy())) is np.ndarray
        out = np.zeros((8, 8), np.float32)
        assert gm.matmul(a, b, out=out) is out
        assert (out == (a @ b).numpy()).all()
        written = torch.zeros(8, 8)
        assert gm.matmul(a.numpy(), b.numpy(), out=written) is written
        assert same(written, a @ b)
        assert written._version == 1


def test_results_and_arguments_are_freed(collect):
    a, x, out = values(8, 8), values(8), torch.zeros(8, 8)
    calls = (
        lambda: gm.matmul(a, a),
        lambda: gm.matmul(a, x),
        lambda: gm.matmul(x, x),
        lambda: gm.matmul(a, a, out=out),
        lambda: gm.gemm(2.0, a, a, 0.5, out),
        lambda: gm.gemm(2.0, a, a, 0.5, out, out=out),
        lambda: gm.matmul(a, a, bias=x, activation="relu"),
    )
    for call in calls:
        meet(call)
    collect()
    counts = [sys.getrefcount(y) for y in (a, x, out, None)]
    live = sum(type(y) is torch.Tensor for y in gc.get_objects())
    for _ in range(1500):
        for call in calls:
            call()
    assert [sys.getrefcount(y) for y in (a, x, out)] == counts[:3]
    assert abs(sys.getrefcount(None) - counts[3]) < 500
    assert sum(type(y) is torch.Tensor for y in gc.get_objects()) <= live
    gone = weakref.ref(gm.matmul(a, a))
    assert gone() is None


def test_threads_share_the_fast_path():
    wrong = []

    def work(seed):
        for i in range(150):
            m, n, k = 1 + (seed + i) % 9, 1 + (3 * i) % 7, 1 + (5 * i + seed) % 11
            a, b = values(m, k, seed=i), values(k, n, seed=seed)
            out = torch.zeros(m, n)
            if not (same(gm.matmul(a, b), a @ b) and same(gm.matmul(a, b, out=out), a @ b)):
                wrong.append((m, n, k))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not native(), reason="there is no fast path on this machine or for this PyTorch")
def test_a_wider_result_that_comes_again_takes_no_python():
    x = torch.full((6, 6), 100, dtype=torch.int8)
    for _ in range(MET):
        gm.matmul(x, x, dtype=torch.int32)
    product, called = python_calls(lambda: gm.matmul(x, x, dtype=torch.int32))
    assert called == []
    assert product.dtype == torch.int32
    assert (product == 60_000).all()
    assert gm.matmul(x, x).dtype == torch.int8
