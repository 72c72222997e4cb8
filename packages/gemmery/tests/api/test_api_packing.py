"""gm.pack: products with a matrix that was packed once, its pickles, and what it refuses."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes, verify
from gemmery.api import packing
from gemmery.config import ISAS
from gemmery.cpu import entry
from gemmery.cpu.target import host
from operands import LAYOUTS, numpy_dtype, place, random

pytestmark = pytest.mark.sampled(3)

ROWS = (1, 2, 3, 4, 6, 7, 16, 31, 64)
SHAPES = [(1, 1), (3, 2), (5, 17), (33, 65), (64, 64), (129, 16), (300, 9), (769, 130), (1601, 33), (97, 587)]  # (k, n)
MIXED = [("f32", "f64"), ("f16", "f32"), ("bf16", "f32"), ("int8", "int32"), ("uint8", "int32"), ("int16", "int64"),
         ("int32", "int64"), ("complex64", "complex128"), ("bool", "int32")]  # fmt: skip


def operands(m, k, n, name, seed=0):
    if name == "bool":
        return tuple(random(shape, "int8", seed + at) > 60 for at, shape in enumerate(((m, k), (k, n))))
    return random((m, k), name, seed), random((k, n), name, seed + 1)


def same(x, y):
    """True for equal bytes, so also for equal NaN."""
    return x.dtype == y.dtype and x.shape == y.shape and np.ascontiguousarray(x).tobytes() == y.tobytes()


@pytest.mark.many(4)
@pytest.mark.parametrize("name", [*dtypes.NAMES, "bool"])
def test_the_bits_are_those_of_a_product_that_packs(name):
    for k, n in SHAPES:
        w = operands(1, k, n, name)[1]
        packed = gm.pack(w)
        assert packed.shape == (k, n)
        for m in ROWS:
            x = operands(m, k, n, name)[0]
            result = gm.matmul(x, packed)
            if n > 1:
                in_halves = name == "f16" and host().has_tiles and min(m, k, n) >= 48
                assert same(result, gm.matmul(x, w, batch_invariant=not in_halves)), (m, k, n)
                invariant = gm.matmul(x, packed, batch_invariant=True)
                assert same(invariant, gm.matmul(x, w, batch_invariant=True)), (m, k, n)
            if name != "bool":
                assert verify.check(result[None], x[None], w[None], verify.blocked).ok, (m, k, n)


@pytest.mark.many(4)
@pytest.mark.parametrize(("name", "wide"), MIXED)
def test_a_wider_result(name, wide):
    dtype = numpy_dtype(wide)
    for m, (k, n) in ((1, (33, 65)), (7, (129, 20)), (40, (769, 130))):
        x, w = operands(m, k, n, name)
        packed = gm.pack(w, dtype=dtype)
        assert same(gm.matmul(x, packed, dtype=dtype), gm.matmul(x, w, dtype=dtype, batch_invariant=True))
    assert dtypes.get(wide).numpy in repr(packed)


@pytest.mark.many(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_b_of_any_layout_gives_the_same_panels(layout):
    for name in ("f32", "bf16", "int8", "complex64"):
        w = place(random((1, 130, 67), name, 1), name, layout)
        packed = gm.pack(w.array[0])
        assert w.untouched()
        x = random((5, 130), name, 2)
        assert same(gm.matmul(x, packed), gm.matmul(x, np.ascontiguousarray(w.array[0]), batch_invariant=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_a_of_any_layout(layout):
    for name in ("f32", "bf16", "int8"):
        w, x = random((130, 67), name, 1), place(random((1, 9, 130), name, 2), name, layout)
        assert same(gm.matmul(x.array[0], gm.pack(w)), gm.matmul(x.array[0], w, batch_invariant=True))


@pytest.mark.many(4)
@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16"])
def test_options_of_a_product(name):
    x, w = operands(20, 800, 77, name)  # k is cut into two blocks
    packed, bias = gm.pack(w), random((77,), name, 3)
    for options in ({"bias": bias}, {"activation": "silu"}, {"bias": bias, "activation": "gelu"}, {"bias": 1.5}):
        expected = gm.matmul(x, w, **options, batch_invariant=True)
        assert same(gm.matmul(x, packed, **options), expected), options
        assert same(gm.matmul(x, packed, **options, batch_invariant=True), expected), options
    x, w, c = *operands(20, 200, 77, name), random((20, 77), name, 4)  # one block: beta C is added to one sum
    packed = gm.pack(w)
    for alpha, beta in ((1.0, 0.0), (2.0, 0.0), (0.5, -1.0), (0.0, 2.0), (0.0, 0.0)):
        expected = gm.gemm(alpha, x, w, beta, c)
        assert same(gm.gemm(alpha, x, packed, beta, c), expected), (alpha, beta)
        out = c.copy()
        assert gm.gemm(alpha, x, packed, beta, out, out=out) is out
        assert same(out, expected), (alpha, beta)


def test_few_columns_in_short_chains():
    """They are summed in blocks of 128, except before an epilogue; the fewest by `dots`, but not with a packed B."""
    for name, n in (("f32", 16), ("f32", 9), ("f32", 4), ("f32", 2), ("f64", 8), ("f64", 5), ("f64", 2)):
        x, w = operands(7, 2000, n, name)
        packed, bias = gm.pack(w), np.zeros(n)
        assert same(gm.matmul(x, packed), gm.matmul(x, w, batch_invariant=True))
        assert same(gm.matmul(x, packed, bias=bias), gm.matmul(x, w, bias=bias, batch_invariant=True))


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "complex64", "uint16"])
def test_no_number_of_threads_changes_a_bit(name):
    for m, k, n in ((1, 900, 2051), (13, 1600, 1030), (300, 900, 515)):
        x, w = operands(m, k, n, name)
        packed = gm.pack(w)
        one = gm.matmul(x, packed, threads=1)
        for threads in (2, 3, 8):
            assert same(gm.matmul(x, packed, threads=threads), one), threads


def test_sizes_of_zero():
    for m, k, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (1, 0, 1)):
        packed = gm.pack(np.ones((k, n), np.float32))
        assert same(gm.matmul(np.ones((m, k), np.float32), packed), np.zeros((m, n), np.float32))
    c = np.full((3, 4), 2.0)
    assert same(gm.gemm(1.0, np.ones((3, 0)), gm.pack(np.ones((0, 4))), 3.0, c), 3 * c)


def test_batches_and_vectors():
    x, w = random((3, 5, 7, 40), "f32", 1), random((40, 90), "f32", 2)
    packed = gm.pack(w)
    expected = gm.matmul(x.reshape(-1, 40), w, batch_invariant=True).reshape(3, 5, 7, 90)
    assert same(gm.matmul(x, packed), expected)
    assert same(gm.matmul(x[::2, :, ::3], packed), expected[::2, :, ::3])
    assert same(gm.matmul(x[0, 0, 0], packed), expected[0, 0, 0])
    out = np.empty((4, 7, 90), np.float32)
    assert gm.matmul(x[0, 0], packed, out=out) is out
    assert all(same(row, expected[0, 0]) for row in out)


def test_out_of_any_layout():
    x, w = operands(9, 60, 70, "f32")
    packed, expected = gm.pack(w), gm.matmul(*operands(9, 60, 70, "f32"))
    for out in (np.empty((70, 9), np.float32).T, np.empty((9, 140), np.float32)[:, ::2], np.empty((9, 70), np.float64),
                np.empty((18, 99), np.float32)[::-2, 3:73], np.empty((9, 70), np.complex64)):  # fmt: skip
        assert gm.matmul(x, packed, out=out) is out
        assert np.array_equal(out, expected)
        assert np.array_equal(gm.matmul(x, packed, out=out, bias=np.zeros(70)), expected)
    square = random((70, 70), "f32", 3)
    both = square.copy()
    gm.matmul(both, gm.pack(random((70, 70), "f32", 4)), out=both)  # out overlaps a
    assert same(both, gm.matmul(square, random((70, 70), "f32", 4)))


def test_narrower_operands_are_converted():
    x, w = np.arange(-60, 60, dtype=np.int8).reshape(3, 40), random((40, 9), "f32", 1)
    assert same(gm.matmul(x, gm.pack(w)), gm.matmul(x.astype(np.float32), w))
    assert same(gm.matmul(x.tolist(), gm.pack(w.astype(float))), gm.matmul(x.astype(float), w.astype(float)))


def test_the_memory_is_a_copy_that_outlives_b():
    x, w = operands(6, 500, 300, "f32")
    expected = gm.matmul(x, w)
    packed = gm.pack(w)
    w[...] = np.nan
    del w
    gc.collect()
    assert same(gm.matmul(x, packed), expected)
    kept = [gm.matmul(x, gm.pack(random((500, 300), "f32", 1))) for _ in range(3)]  # freed after each product
    assert all(same(result, expected) for result in kept)


def test_size_and_text():
    packed = gm.pack(np.ones((300, 200), np.float32))
    assert packed.dtype == packed.result == "float32"
    assert 300 * 200 * 4 <= packed.nbytes <= 300 * 256 * 4 + 8192
    assert repr(packed) == f"PackedMatrix(shape=(300, 200), dtype=float32, nbytes={packed.nbytes})"


def test_few_rows_against_a_matrix_of_many_pages():
    """Larger than the caches, in several blocks of n for each thread."""
    x, w = operands(4, 2500, 4500, "f32")
    assert same(gm.matmul(x, gm.pack(w)), gm.matmul(x, w, batch_invariant=True))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(protocol):
    for name in ("f32", "bf16", "int8", "bool"):
        x, w = operands(5, 77, 130, name)
        packed = gm.pack(w)
        again = pickle.loads(pickle.dumps(packed, protocol))
        assert (again.shape, again.dtype, again.nbytes) == (packed.shape, packed.dtype, packed.nbytes)
        assert same(gm.matmul(x, again), gm.matmul(x, packed))
    assert same(gm.matmul(x, copy.deepcopy(packed)), gm.matmul(x, packed))


def test_a_pickle_beside_its_memory():
    x, w = operands(5, 200, 130, "f32")
    packed, beside = gm.pack(w), []
    text = pickle.dumps(packed, 5, buffer_callback=beside.append)
    assert len(text) < 400
    assert same(gm.matmul(x, pickle.loads(text, buffers=beside)), gm.matmul(x, packed))


def test_a_pickle_of_another_version_or_size_is_refused(monkeypatch):
    packed = gm.pack(np.ones((3, 4)))
    text = pickle.dumps(packed, 2)
    build, (version, *rest, memory) = packed.__reduce_ex__(2)
    with pytest.raises(gm.LayoutError, match=r"has \d+ bytes and needs \d+: pack the matrix again"):
        build(version, *rest, memory[:-1])
    monkeypatch.setattr(packing, "_VERSION", 2)
    with pytest.raises(gm.LayoutError, match="version 1, and this gemmery reads version 2: pack the matrix again"):
        pickle.loads(text)


OTHER = """
import pickle, sys, gemmery as gm
try:
    print(pickle.load(open(sys.argv[1], "rb")))
except gm.LayoutError as error:
    print(error)
"""


@pytest.mark.skipif(host().isa == ISAS[0], reason="there is no narrower instruction set")
def test_a_pickle_of_another_instruction_set_is_refused_by_name(tmp_path):
    packed, path = gm.pack(np.ones((30, 40), np.float32)), tmp_path / "packed"
    path.write_bytes(pickle.dumps(packed))
    texts = [
        subprocess.run(
            [sys.executable, "-c", OTHER, str(path)], env={**os.environ, "GEMMERY_ISA": isa}, check=True, text=True,
            capture_output=True, timeout=120,
        ).stdout.strip()
        for isa in ("generic", host().isa)
    ]  # fmt: skip
    assert texts[1] == repr(packed)
    assert texts[0].startswith("a matrix of shape (30, 40) was packed for another machine or instruction set, as (")
    assert str(packed.layout) in texts[0]
    assert texts[0].count("columns of") == 2
    assert texts[0].endswith("pack the matrix again with gm.pack")


def test_many_threads_share_one():
    x, w = operands(4, 700, 900, "f32")
    packed, expected, results = gm.pack(w), gm.matmul(x, w), []

    def work():
        results.extend(gm.matmul(x, packed) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 120
    assert all(same(result, expected) for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_shares_it():
    x, w = operands(4, 700, 900, "f32")
    packed = gm.pack(w)
    expected = gm.matmul(x, packed)
    child = os.fork()
    if not child:
        os._exit(0 if same(gm.matmul(x, packed), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(gm.matmul(x, packed), expected)


def test_refusals_in_words():
    x, w = np.ones((4, 30), np.float32), np.ones((30, 20), np.float32)
    packed = gm.pack(w)
    for call, error, words in (
        (lambda: gm.matmul(x[:, :5], packed), gm.ShapeError, "must be equal"),
        (lambda: gm.gemm(1.0, x[0], packed), gm.ShapeError, "gemm multiplies matrices"),
        (lambda: gm.pack(np.ones(3)), gm.ShapeError, "one matrix"),
        (lambda: gm.pack(np.ones((2, 3, 4))), gm.ShapeError, "one by one"),
        (lambda: gm.matmul(x.astype(float), packed), gm.DTypeError, "convert a to float32, or pack b as float64"),
        (lambda: gm.matmul(x, packed, dtype="float64"), gm.DTypeError, "pack b with dtype='float64'"),
        (lambda: gm.gemm(1.0, x, packed, 1.0, np.ones((4, 20))), gm.DTypeError, "pack b with dtype='float64'"),
        (lambda: gm.pack(w, dtype="float16"), gm.DTypeError, "cannot represent every float32"),
        (lambda: gm.pack("text"), gm.DTypeError, "b is a str"),
        (lambda: gm.matmul(packed, w), gm.LayoutError, "a: .*pass the matrix itself"),
        (lambda: gm.matmul(packed, packed), gm.LayoutError, "a: .*pass the matrix itself"),
        (lambda: gm.matmul(x, packed, scale_a=2.0), gm.ArgumentError, "CUDA device only"),
        (lambda: gm.gemv(packed, x[0]), gm.LayoutError, "pass the matrix itself"),
        (lambda: gm.einsum("ij,jk->ik", x, packed), gm.LayoutError, "pass the matrix itself"),
        (lambda: gm.pack(packed), gm.LayoutError, "pass the matrix itself"),
        (lambda: np.asarray(packed), gm.LayoutError, "pass the matrix itself"),
    ):
        with pytest.raises(error, match=words):
            call()


class OnADevice:
    """An array on a CUDA device, as far as the protocol says."""

    def __init__(self, *shape):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (4096, False), "version": 3}


def test_arrays_on_a_device_are_refused():
    packed = gm.pack(np.ones((30, 20), np.float32))
    with pytest.raises(gm.DeviceError, match="takes a matrix in CPU memory"):
        gm.pack(OnADevice(30, 20))
    with pytest.raises(gm.DeviceError, match=r"one device|no CUDA driver|no CUDA device|invalid argument"):
        gm.matmul(OnADevice(4, 30), packed)
    with pytest.raises(gm.DeviceError, match="all operands must be on one device"):
        gm.matmul(np.ones((4, 30), np.float32), packed, out=OnADevice(4, 20))


def test_a_matrix_larger_than_memory():
    with pytest.raises(MemoryError, match="no memory for a buffer"):
        gm.pack(np.broadcast_to(np.float32(1), (2**24, 2**24)))


def test_explain():
    packed = gm.pack(np.ones((300, 200), np.float32))
    explained = gm.explain(np.ones((4, 300), np.float32), packed)
    assert explained.rung == "packed"
    assert "B packed" in str(explained)
    assert "packed before" in explained.reason
    assert not explained.copies
    with pytest.raises(gm.DTypeError, match="convert a"):
        gm.explain(np.ones((4, 300)), packed)


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        x, w = (torch.randint(-9, 9, shape).to(dtype) for shape in ((5, 64), (33, 64)))
        packed = gm.pack(w.T)
        result = gm.matmul(x, packed)
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, gm.matmul(x, w.T))
    weight = torch.nn.Linear(64, 33).weight
    with pytest.raises(gm.LayoutError, match="detach"):
        gm.pack(weight)
    x = torch.ones(5, 64, requires_grad=True)
    with pytest.raises(gm.LayoutError, match="detach"):
        gm.matmul(x, gm.pack(weight.detach().T))
    with pytest.raises(gm.LayoutError, match="pass the matrix itself"):
        gm.matmul(torch.ones(5, 64), torch.ones(64, 3), bias=gm.pack(np.ones((3, 3), np.float32)))


def test_bfloat16_of_ml_dtypes():
    x, w = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((3, 40), (40, 9)))
    assert same(gm.matmul(x, gm.pack(w)), gm.matmul(x, w))


def counted(monkeypatch):
    """A list that gets an item for each product that Python computes."""
    from gemmery.api import products

    calls, product = [], products.product
    monkeypatch.setattr(products, "product", lambda *args: calls.append(1) or product(*args))
    return calls


@pytest.mark.parametrize(("name", "wide"), [("f32", ""), ("f64", ""), ("bf16", ""), ("int8", "int32"), ("f32", "f64")])
def test_the_compiled_entry_takes_packed_matrices(name, wide, monkeypatch):
    """Each way of calling goes to Python once, for all matrices of a kind."""
    options = {"dtype": numpy_dtype(wide)} if wide else {}
    gm.matmul(np.eye(2), np.eye(2))  # makes the entry
    calls, (k, n) = counted(monkeypatch), (61, 83)
    matrices = [random((k, n), name, seed) for seed in (1, 2)]
    packed = [gm.pack(w, **options) for w in matrices]
    for m in (1, 3):
        x = random((m, k), name, m)
        out = np.empty((m, n), options.get("dtype", x.dtype))
        scale = 2 if np.dtype(out.dtype).kind in "iu" else 2.0
        ways = [
            lambda p, x=x: gm.matmul(x, p, **options),
            lambda p, x=x, out=out: gm.matmul(x, p, out, **options),
            lambda p, x=x: gm.matmul(x[0], p, **options),
        ]
        if not wide:
            ways.append(lambda p, x=x, scale=scale: gm.gemm(scale, x, p))
        for way in ways:
            first = [np.array(way(p)) for p in packed]
            before = len(calls)
            for _ in range(3):
                for p, w, expected in zip(packed, matrices, first, strict=True):
                    assert same(np.array(way(p)), expected)
                    assert not same(np.array(way(p)), first[0] if w is matrices[1] else first[1])
            assert len(calls) == before or not entry.active()
        assert same(np.array(ways[0](packed[1])), gm.matmul(x, matrices[1], batch_invariant=True, **options))
    with pytest.raises(gm.errors.GemmeryError):
        gm.einsum("ij,jk->ik", x, packed[0])


def test_the_compiled_entry_converts_no_panels():
    a = np.ones((5, 7), ">f4")
    packed, codes = gm.pack(np.ones((7, 3), "f4")), gm.quantize(np.ones((8, 3), "f4"), "float8_e4m3")
    for _ in range(4):  # from the second call on the compiled entry knows the types
        assert (gm.matmul(a, packed) == 7).all()
        assert (gm.matmul(a[:, :1].repeat(8, 1), codes) == 8).all()


def test_the_compiled_entry_keeps_kinds_of_packed_matrices_apart():
    w = random((32, 48), "int8", 1)
    x = random((4, 32), "int8", 2)
    wide, narrow = gm.pack(w, dtype=np.int32), gm.pack(w)
    for _ in range(4):
        assert same(gm.matmul(x, wide, dtype=np.int32), gm.matmul(x, w, dtype=np.int32))
        assert same(gm.matmul(x, narrow), gm.matmul(x, w))
    w, y = random((32, 48), "f32", 3), random((4, 32), "f32", 4)
    wide, own = gm.pack(w, dtype=np.float64), gm.pack(w)
    for _ in range(2):
        for _ in range(3):
            assert same(gm.matmul(y, own), gm.matmul(y, w, batch_invariant=True))
        with pytest.raises(gm.errors.DTypeError):
            gm.matmul(y, wide)
        with pytest.raises(gm.errors.DTypeError):
            gm.matmul(x.astype(np.float32), narrow)
        with pytest.raises(gm.errors.ShapeError):
            gm.matmul(x[:, 1:], narrow)


def test_an_out_that_overlaps_a_is_not_written_before_a_is_read():
    memory = random((2, 40), "f32", 3)
    packed, w = gm.pack(random((40, 40), "f32", 4)), random((40, 40), "f32", 4)
    expected = gm.matmul(memory.copy(), packed)
    for _ in range(3):
        x = memory.copy()
        assert same(gm.matmul(x, packed, x), expected)
    assert same(expected, gm.matmul(memory, w, batch_invariant=True))


def test_a_packed_matrix_that_was_never_made_is_no_operand():
    x, packed = random((4, 30), "f32", 1), gm.pack(random((30, 20), "f32", 2))
    expected = gm.matmul(x, packed)
    hollow = object.__new__(gm.PackedMatrix)
    for _ in range(3):
        with pytest.raises(AttributeError):
            gm.matmul(x, hollow)
        assert same(gm.matmul(x, packed), expected)
    del packed.array
    with pytest.raises(AttributeError):
        gm.matmul(x, packed)


@pytest.mark.parametrize("shape", [(1, 2, 5), (3, 7, 5), (2, 1, 4, 5), (5,)])
@pytest.mark.parametrize(("left", "right"), [("int8", "uint8"), ("uint8", "int8")])
def test_small_batches_of_bytes_of_two_kinds(left, right, shape):
    draw = np.random.default_rng(5)
    a, b = (draw.integers(0, 256, each).astype(np.uint8) for each in (shape, (5, 9)))
    a, b = a.view(left), b.view(right)
    assert np.array_equal(gm.matmul(a, gm.pack(b)), a @ b)
    assert np.array_equal(gm.matmul(a, gm.pack(b), threads=2), a @ b)


@pytest.mark.many(4)
@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
@pytest.mark.parametrize("semiring", ["min_plus", "max_plus", "max_times", "log_sum_exp"])
def test_semirings(semiring, name, monkeypatch):
    draw = np.random.default_rng(6)
    a, b = (draw.standard_normal(shape).astype(name) for shape in ((2, 6, 40), (40, 70)))
    packed = gm.pack(b)
    if semiring == "log_sum_exp":
        with pytest.raises(gm.LayoutError, match="log_sum_exp' reads b itself: pass the matrix itself"):
            gm.matmul(a, packed, semiring=semiring)
        return
    assert np.array_equal(gm.matmul(a, packed, semiring=semiring), gm.matmul(a, b, semiring=semiring))
    layout = packing.packed_once.layout
    pairs = lambda *types: layout(*types)._replace(group=2) if types[2:] == (semiring,) else layout(*types)  # noqa: E731
    monkeypatch.setattr(packing.packed_once, "layout", pairs)
    entry.forget()  # compiled code has met the product, which was checked then
    with pytest.raises(gm.LayoutError, match="in another order"):
        gm.matmul(a, packed, semiring=semiring)
