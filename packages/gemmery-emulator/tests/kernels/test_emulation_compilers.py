"""gm.emulate on PTX of other compilers; how each is launched stands in test_emulator_ptx.py."""

from pathlib import Path

import numpy as np

import gemmery as gm

PTX = Path(__file__).parents[1] / "data" / "ptx"


def test_triton_adds():
    x, y = (np.random.default_rng(seed).standard_normal(1000).astype(np.float32) for seed in (8, 9))
    out = np.zeros_like(x)
    run = gm.emulate(PTX / "triton_add.ptx", "add", 4, 128, [x, y, out, np.int32(1000), None, None])
    np.testing.assert_array_equal(out, x + y)
    assert run.findings == ()
    assert run.global_.stores.used == out.nbytes


def test_triton_multiplies_matrices():
    m, n, k = 100, 90, 72
    a, b = (np.random.default_rng(1).standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n)))
    c = np.zeros((m, n), np.float32)
    args = [a, b, c, *map(np.int32, (m, n, k, k, n, n)), None, None]
    run = gm.emulate((PTX / "triton_matmul.ptx").read_text(), "matmul", (4, 3), 128, args, shared=4096)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = (2.5 * k + 2) * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))
    assert np.max(np.abs(c - exact) / bound) <= 1
    assert run.findings == ()
    assert run.instructions["mma"] > 0


def test_triton_takes_a_softmax():
    rows, n = 5, 100
    x = np.random.default_rng(1).standard_normal((rows, n)).astype(np.float32)
    out = np.zeros_like(x)
    run = gm.emulate(PTX / "triton_softmax.ptx", "softmax", rows, 128, [x, out, n, None, None], shared=16)
    powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    assert np.max(np.abs(out / (powers / powers.sum(axis=1, keepdims=True)) - 1)) <= 1e-6
    assert run.findings == ()


def as_numba(array):
    """An array as Numba passes it: parent, meminfo, elements, itemsize, address, shape, strides."""
    return [0, 0, array.size, array.itemsize, array, *array.shape, *array.strides]


def test_numba_adds():
    x, y = (np.random.default_rng(seed).standard_normal(200).astype(np.float32) for seed in (8, 9))
    out = np.zeros_like(x)
    run = gm.emulate(PTX / "numba_add.ptx", "add", 2, 128, [*as_numba(x), *as_numba(y), *as_numba(out)])
    np.testing.assert_array_equal(out, x + y)
    assert {line.file for line in run.lines} != {"ptx"}


def test_numba_multiplies_matrices():
    a, b = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((40, 24), (24, 33)))
    c = np.zeros((40, 33), np.float32)
    args = [*as_numba(a), *as_numba(b), *as_numba(c)]
    run = gm.emulate(PTX / "numba_matmul.ptx", "matmul", (3, 3), (16, 16), args)
    bound = 24 * 2.0**-23 * (np.abs(a).astype(np.float64) @ np.abs(b))
    assert np.max(np.abs(c - a.astype(np.float64) @ b) / bound) <= 1
    assert run.findings == ()
