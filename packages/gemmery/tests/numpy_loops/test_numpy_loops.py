"""The loops in NumPy's ufuncs: values for every type, layout and overlap, and what `install` changes and keeps."""

from __future__ import annotations

import ctypes
import pickle
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmery as gm
import gemmery.numpy as gmn
from gemmery import numpy as installing
from gemmery import tiers, verify
from gemmery.cpu import build, layout, pool, ufunc
from gemmery.problem import Problem

if not pool.address():
    pytest.skip("gemmery.numpy needs Linux", allow_module_level=True)

EVERY = (*gmn.DEFAULT, "float32", "float64", "complex64", "complex128")
SIDES = st.one_of(st.integers(0, 9), st.integers(1, 70), st.sampled_from([96, 128, 129, 200, 800]))


@pytest.fixture(scope="module")
def every():
    with gmn.install(EVERY, wait=True):
        installing.count(True)
        yield
        installing.count(False)


@pytest.fixture
def alone():
    """No loops before the test; afterwards those that `every` has installed for the file."""
    before = gmn.installed()
    gmn.uninstall()
    yield
    gmn.uninstall()
    gmn.install(before)


def numbers(rng, shape, dtype):
    """Random numbers of a type: integers of its whole range, bools of which few are true."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.2
    if dtype.kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    real = rng.standard_normal(shape)
    return (real + 1j * rng.standard_normal(shape) if dtype.kind == "c" else real).astype(dtype)


def numpys(function, *arguments, **options):
    """Return what NumPy's own loop gives."""
    names = gmn.installed()
    gmn.uninstall()
    try:
        return function(*arguments, **options)
    finally:
        gmn.install(names)


def agrees(function, a, b, result):
    """Whether a result has NumPy's bits, or for floats is within the bound of gemmery and that of NumPy's sums."""
    if result.dtype.kind in "iub":
        return np.array_equal(result, numpys(function, a, b))
    wide = np.complex128 if result.dtype.kind == "c" else np.float64
    exact = numpys(function, a.astype(wide), b.astype(wide))
    size = numpys(function, np.abs(a).astype(np.float64), np.abs(b).astype(np.float64))
    eps = 2.0**-24 if result.dtype == np.float16 else np.finfo(result.dtype).eps / 2
    depth = a.shape[-1]
    sums = 1.5 * (2 * verify.blocked(2 * depth) + depth) * eps * size  # depth: the reference of float64 adds too
    rounding = np.finfo(result.dtype).eps * np.abs(exact) + np.finfo(result.dtype).smallest_subnormal
    return bool(np.all(np.abs(result.astype(wide) - exact) <= sums + rounding))


def served():
    return sum(row.products for row in installing.counts())


@st.composite
def views(draw, shape, dtype, seed):
    """An array of that shape with drawn order of axes, steps of any sign, and perhaps a stride of zero."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1, -3])) for _ in shape]
    big = [max(1, abs(steps[axis]) * shape[axis]) for axis in order]
    whole = numbers(np.random.default_rng(seed), big, dtype).transpose(np.argsort(order))
    view = whole[tuple(slice(None, None, step) for step in steps)][tuple(slice(0, side) for side in shape)]
    flat = draw(st.sampled_from([None, None, *range(len(shape))]))
    if flat is not None and shape[flat]:
        view = np.broadcast_to(view.take([0], axis=flat), shape)
    assert view.shape == tuple(shape)
    return view


BATCHES = st.sampled_from([((), ()), ((3,), ()), ((), (2,)), ((4,), (4,)), ((2, 1), (1, 3)), ((0,), ()), ((33,), (1,))])


@given(data=st.data(), m=SIDES, k=SIDES, n=SIDES, dtype=st.sampled_from(EVERY), batches=BATCHES)
def test_matmul_of_any_shape_and_strides(every, data, m, k, n, dtype, batches):
    if max(m, k, n) > 200 and batches[0] + batches[1]:
        batches = ((), ())
    a = data.draw(views((*batches[0], m, k), dtype, 1))
    b = data.draw(views((*batches[1], k, n), dtype, 2))
    assert agrees(np.matmul, a, b, a @ b)


@given(data=st.data(), m=SIDES, k=SIDES, dtype=st.sampled_from(EVERY), batches=BATCHES)
def test_products_with_vectors(every, data, m, k, dtype, batches):
    x = data.draw(views((*batches[0], k), dtype, 1))
    y = data.draw(views((*batches[1], k), dtype, 2))
    functions = [(np.vecdot, x, y)]
    if hasattr(np, "matvec"):
        a = data.draw(views((*batches[1], m, k), dtype, 3))
        b = data.draw(views((*batches[1], k, m), dtype, 4))
        functions += [(np.matvec, a, x), (np.vecmat, x, b)]
    for function, first, second in functions:
        assert agrees(function, first, second, np.asarray(function(first, second)))


@given(data=st.data(), dtype=st.sampled_from(EVERY), n=st.integers(1, 40))
def test_results_that_overlap_operands_or_have_strides(every, data, dtype, n):
    memory = numbers(np.random.default_rng(3), (3 * n, 4 * n), dtype)
    a, b = memory[:n, :n].copy(), memory[n : 2 * n, n : 2 * n].copy()
    exact = a @ b
    row, column = data.draw(st.integers(0, 2 * n)), data.draw(st.integers(0, 3 * n))
    places = {
        "overlaps": memory[row : row + n, column : column + n],
        "columns": memory[: 2 * n, : 2 * n].T[::2, ::2] if n > 1 else memory[:1, :1],
        "transposed": memory[:n, :n].T,
        "upwards": memory[n - 1 :: -1, :n] if n > 1 else memory[:1, :1],
        "an operand": memory[n : 2 * n, n : 2 * n],
    }
    out = places[data.draw(st.sampled_from(sorted(places)))]
    memory[:n, :n], memory[n : 2 * n, n : 2 * n] = a, b
    assert np.matmul(memory[:n, :n], memory[n : 2 * n, n : 2 * n], out=out) is out
    tolerance = 0 if exact.dtype.kind in "iub" else 4e-3 if dtype == "float16" else 1e-4
    assert np.allclose(out.astype(complex), exact.astype(complex), rtol=tolerance, atol=tolerance * n)


@pytest.mark.parametrize("dtype", EVERY)
def test_the_kernels_run(every, dtype):
    a = numbers(np.random.default_rng(4), (40, 900), dtype)
    before = served()
    for x, y in ((a, a.T), (a[:, ::2], a.T[::2]), (a.T[:40], a[:, :300])):
        assert agrees(np.matmul, x, y, x @ y)
    assert served() == before + 3


def test_bools_of_other_bytes_than_0_and_1(every):
    rng = np.random.default_rng(5)
    a, b = (rng.integers(0, 256, (70, 70), np.uint8) * (rng.random((70, 70)) < 0.1) for _ in range(2))
    result = a.view(bool) @ b.view(bool)
    assert np.array_equal(result, (a != 0) @ (b != 0))
    assert set(np.unique(result.view(np.uint8))) <= {0, 1}


@pytest.mark.parametrize("batch", [10_000, 1 << 16])
def test_large_batches_of_small_products(every, batch):
    a = numbers(np.random.default_rng(6), (batch, 5, 6), "int16")
    assert agrees(np.matmul, a, a.transpose(0, 2, 1), a @ a.transpose(0, 2, 1))
    huge = np.broadcast_to(np.int8(3), (1, 1 << 33))  # 8 GiB of k in one byte
    assert np.vecdot(huge[:, : 1 << 22], huge[:, : 1 << 22])[0] == np.int8(0)


def test_threads_cut_a_product_and_change_no_bit(every):
    rng = np.random.default_rng(7)
    for dtype in ("float16", "int32", "bool", "uint8"):
        for shape in ((513, 300, 700), (2000, 64, 9), (3, 900, 4000)):
            m, k, n = shape
            a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
            results = []
            for count in (1, 2, 3, 7):
                gm.set_num_threads(count)
                results.append(a @ b)
            gm.set_num_threads(None)
            assert all(np.array_equal(results[0], other) for other in results[1:])
            assert agrees(np.matmul, a, b, results[0])


def test_float16_sums_of_a_long_k(every):
    a = np.ones((70, 3000), np.float16)
    assert np.all(a @ a.T == 3000)
    with gm_threads(2):
        assert np.all(a @ a.T == 3000)
        # Sums of blocks of k take 24 MB here, more than what a workspace has to spare.
        assert np.all(np.ones((6000, 1600), np.float16) @ np.ones((1600, 1000), np.float16) == 1600)


class gm_threads:
    def __init__(self, count):
        self.count = count

    def __enter__(self):
        gm.set_num_threads(self.count)

    def __exit__(self, *error):
        gm.set_num_threads(None)


def test_no_warning_comes_from_what_a_kernel_computes_beside_the_product(every):
    a = np.zeros((40, 70), np.float16)
    a[3, 5], a[4, 6], a[5] = np.inf, np.nan, 60000
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        result = a @ np.ones((70, 33), np.float16)
    assert np.isinf(result[[3, 5]]).all()
    assert np.isnan(result[4]).all()


def test_functions_of_numpy_that_multiply_inside(every):
    a = np.arange(81).reshape(9, 9) % 7
    power = numpys(np.linalg.matrix_power, a, 5)
    assert np.array_equal(np.linalg.matrix_power(a, 5), power)
    assert np.array_equal(np.linalg.multi_dot([a, a, a]), a.dot(a).dot(a))
    assert np.array_equal(np.einsum("ij,jk->ik", a, a, optimize=True), a.dot(a))
    assert pickle.loads(pickle.dumps(np.matmul)) is np.matmul
    m = a.view(np.matrix)
    assert type(m @ m) is np.matrix
    masked = np.ma.array(a, mask=a == 3)
    assert np.array_equal((masked @ masked).filled(-1), numpys(np.matmul, masked, masked).filled(-1))


def test_install_and_uninstall_count_once(alone):
    with gmn.install("int8"):
        assert gmn.installed() == ("int8",)
        with gmn.install(["int8", "bool"]):
            assert gmn.installed() == ("int8", "bool")
        assert gmn.installed() == ("int8",)
    assert gmn.installed() == ()
    gmn.uninstall()
    gmn.install()
    assert set(gmn.installed()) == set(gmn.DEFAULT)
    gmn.uninstall()


@pytest.mark.parametrize("types", ["longdouble", ["object"], "no type", [np.datetime64], 3.5])
def test_types_without_kernels_are_refused(types):
    before = gmn.installed()
    with pytest.raises(gm.DTypeError, match="types"):
        gmn.install(types)
    assert gmn.installed() == before


def test_numpys_loop_serves_until_kernels_are_there(monkeypatch):
    letter, layout = "H", "row"
    at = installing._root() + ufunc.place(letter, f"kernels_{layout}")
    asked = at + 8 * len(ufunc.LAYOUTS)
    installing.entry_table.write(at, [0])
    installing.entry_table.write(asked, [0])
    made, release = threading.Event(), threading.Event()
    original = installing._make

    def make(*arguments):
        release.wait(20)
        original(*arguments)
        made.set()

    monkeypatch.setattr(installing, "_make", make)
    tiers._work.keys.pop(("numpy", letter, layout), None)
    a = numbers(np.random.default_rng(8), (30, 30), "uint16")
    with gmn.install("uint16"):
        installing.count(True)
        first = a @ a
        assert [row.numpys for row in installing.counts() if row.dtype == "uint16"] == [1]
        release.set()
        assert made.wait(20)
        second = a @ a
        assert [row.products for row in installing.counts() if row.dtype == "uint16"] == [1]
        installing.count(False)
    assert np.array_equal(first, second)


def test_threads_multiply_while_loops_come_and_go(alone):
    gmn.install("int32", wait=True)
    a = numbers(np.random.default_rng(9), (40, 40), "int32")
    exact = a.dot(a)
    wrong, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            if not np.array_equal(a @ a, exact):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for _ in range(300):
        gmn.uninstall()
        gmn.install("int32")
    stop.set()
    for worker in workers:
        worker.join()
    gmn.uninstall()
    assert not wrong


@pytest.mark.parametrize("shape", [(3000, 900, 1600), (300, 90, 20_000), (40, 5000, 2000)])
def test_there_is_room_for_the_sums_of_a_long_k(every, shape):
    m, n, k = shape
    size = ctypes.c_int64.from_address(pool.address() + layout.SLOTS + 16)  # of the workspace of the first caller
    needed = build.packed(Problem(m, n, k, "f16", "f16"), {}).blocks(m, n, k).workspace
    size.value = 0  # the pages before stay, unused
    with gm_threads(1):
        row, column = np.ones((1, k), np.float16), np.ones((k, 1), np.float16)
        np.broadcast_to(row, (m, k)) @ np.broadcast_to(column, (k, n))
    assert size.value >= needed > 0
