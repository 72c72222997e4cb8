"""Rows of grouped products by an index: gathered on the way in, added in order on the way out."""

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import gemmery as gm
from gemmery.errors import ArgumentError, DTypeError, GemmeryError, LayoutError, ShapeError

TYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.float64]


def routed(dtype, tokens=23, chosen=2, groups=4, k=17, n=9, seed=0):
    """Return tokens, experts, ends, and the token of each row of the groups."""
    draw = np.random.default_rng(seed)
    a, b = draw.integers(-4, 5, (tokens, k)).astype(dtype), draw.integers(-4, 5, (groups, k, n)).astype(dtype)
    expert = draw.integers(0, groups, tokens * chosen)
    order = np.argsort(expert, kind="stable")
    return a, b, np.searchsorted(expert[order], np.arange(groups), "right"), order // chosen


def expected(a, b, ends, gather, scatter, rows):
    total, start = np.zeros((rows, b.shape[2])), 0
    for group, end in enumerate(ends):
        for i in range(start, end):
            total[scatter[i]] += a[gather[i]].astype(np.float64) @ b[group].astype(np.float64)
        start = end
    return total


@pytest.mark.parametrize("dtype", TYPES)
def test_experts_of_tokens(dtype):
    a, b, ends, token = routed(dtype)
    result = gm.grouped_matmul(a, b, offsets=ends, gather=token, scatter=token)
    wanted = expected(a, b, ends, token, token, len(a)).astype(a.dtype)
    assert result.dtype == a.dtype
    np.testing.assert_array_equal(result, wanted)
    rows = gm.grouped_matmul(a, b, offsets=ends, gather=token)
    np.testing.assert_array_equal(rows, gm.grouped_matmul(a[token], b, offsets=ends))


def test_sums_are_in_order_and_rounded_once():
    a = np.array([[1.0], [2.0**24], [1.0], [-(2.0**24)]], np.float32)
    ends, experts = [4], np.ones((1, 1, 1), np.float32)
    for order in ([0, 1, 2, 3], [1, 3, 0, 2], [1, 0, 3, 2]):
        total = np.float32(0)
        for i in order:
            total += a[i, 0]
        result = gm.grouped_matmul(a, experts, offsets=ends, gather=order, scatter=[2] * 4)
        assert result[2, 0] == total
    half = np.full((64, 1), 1 + 2.0**-10, np.float16)
    result = gm.grouped_matmul(half, np.ones((1, 1, 1), np.float16), offsets=[64], scatter=np.zeros(64, int))
    assert result[0, 0] == np.float16(64 * (1 + 2.0**-10))


def test_rows_of_no_group_and_an_out():
    a, b, ends, token = routed(np.float32)
    ends = np.minimum(ends, 30)
    out = np.full((40, 9), np.nan, np.float32)
    assert gm.grouped_matmul(a, b, offsets=ends, gather=token, scatter=token + 3, out=out) is out
    np.testing.assert_array_equal(out, expected(a, b, ends, token, token + 3, 40))


def test_tensors_have_the_same_bits():
    torch = pytest.importorskip("torch")
    a, b, ends, token = routed(np.float32)
    a = (a * 1.37).astype(np.float32)
    ends = np.minimum(ends, 41)
    wanted = gm.grouped_matmul(a, b, offsets=ends, gather=token, scatter=token)
    tensors = [torch.from_numpy(x) for x in (a, b, ends, token)]
    result = gm.grouped_matmul(*tensors[:2], offsets=tensors[2], gather=tensors[3], scatter=tensors[3])
    np.testing.assert_array_equal(result.numpy(), wanted)
    halves = [x.to(torch.bfloat16) for x in tensors[:2]]
    result = gm.grouped_matmul(*halves, offsets=ends.tolist(), gather=token.tolist(), scatter=tensors[3])
    assert result.dtype is torch.bfloat16
    np.testing.assert_allclose(result.float().numpy(), wanted, rtol=2e-2, atol=2)
    for name in ("int8", "uint8", "int32", "int64", "bool", "complex64"):  # which PyTorch does not add by segments
        x, y = (z.abs().to(getattr(torch, name)) for z in tensors[:2])
        result = gm.grouped_matmul(x, y, offsets=ends, gather=token, scatter=token)
        exact = gm.grouped_matmul(x.numpy(), y.numpy(), offsets=ends, gather=token, scatter=token)
        assert result.dtype is x.dtype
        np.testing.assert_array_equal(result.numpy(), exact)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gather": [0.5]}, DTypeError, "integers"),
        ({"gather": [0, 23]}, ArgumentError, "row 0 to 23, and there are 23"),
        ({"scatter": [0, -1] + [0] * 21}, ArgumentError, "row -1"),
        ({"scatter": [0, 1]}, ShapeError, r"pass \d+ row numbers"),
        ({"gather": [[0, 1]]}, ShapeError, "pass any number of row numbers"),
        ({"gather": [[0]]}, ShapeError, "has shape"),
        ({"gather": [[0], [0, 1]]}, LayoutError, "gather: "),
        ({"gather": "rows"}, DTypeError, "gather"),
        ({"gather": [0], "offsets": None}, ArgumentError, "are for offsets"),
        ({"scatter": [0] * 23, "out": np.zeros((3, 9), np.int32)}, DTypeError, "float32 to int32"),
        ({"scatter": [0] * 23, "out": np.zeros((3, 8), np.float32)}, ShapeError, "out has shape"),
        ({"scatter": [0] * 23, "out": np.array(1.0)}, ShapeError, "out has shape"),
        ({"scatter": [0] * 23, "out": np.broadcast_to(np.float32(1), (3, 9))}, LayoutError, "read-only"),
        ({"scatter": [0] * 23, "out": as_strided(np.zeros(11, np.float32), (3, 9), (4, 4))}, LayoutError, "share"),
        ({"scatter": [0] * 23, "out": "x"}, DTypeError, "str"),
        ({"gather": [0], "b": None}, DTypeError, "NoneType"),
    ],
)
def test_wrong_indices_are_refused(options, error, words):
    a, b, _, _ = routed(np.float32)
    with pytest.raises(error, match=words):
        gm.grouped_matmul(a, **{"b": b, "offsets": [1, 1, 1, 1], **options})


def test_no_rows_are_gathered_by_an_empty_list():
    a, b, _, _ = routed(np.float32)
    assert gm.grouped_matmul(a, b, offsets=[0, 0, 0, 0], gather=[]).shape == (0, 9)
    np.testing.assert_array_equal(gm.grouped_matmul(a, b, offsets=[0, 0, 0, 0], gather=[], scatter=[]), 0 * (a @ b[0]))


def test_quantized_experts_and_an_out_of_another_type():
    a, out = np.ones((3, 4), np.float32), np.zeros((2, 4))
    experts = gm.quantize(np.stack([np.eye(4, dtype=np.float32)] * 2), "int8")
    assert gm.grouped_matmul(a, experts, offsets=[1, 3], scatter=[1, 0, 0], out=out) is out
    np.testing.assert_allclose(out, [[2] * 4, [1] * 4], rtol=1e-6)


def test_overflow_of_a_sum_is_an_infinity_without_a_warning():
    a, b = np.full((2, 1), 6e4, np.float16), np.ones((1, 1, 1), np.float16)
    with np.errstate(all="raise"):
        result = gm.grouped_matmul(a, b, offsets=[2], scatter=[0, 0])
    assert np.isposinf(result[0, 0])


def test_other_arrays_are_refused():
    a, b, _, _ = routed(np.float32)
    with pytest.raises(LayoutError, match="list"):
        gm.grouped_matmul(a.tolist(), b, offsets=[1, 1, 1, 1], gather=[0])
    torch = pytest.importorskip("torch")
    for index in (torch.ones(1, requires_grad=True), torch.ones(1, device="meta"), torch.ones(1).to_sparse()):
        for array in a, torch.from_numpy(a):
            with pytest.raises(GemmeryError, match="gather"):
                gm.grouped_matmul(array, b, offsets=[1, 1, 1, 1], gather=index)
    for x, y, index in ((a, b, torch.tensor([3])), (*map(torch.from_numpy, (a, b)), np.array([3], np.uint16))):
        np.testing.assert_array_equal(gm.grouped_matmul(x, y, offsets=[1] * 4, gather=index), a[3:4] @ b[0])
    with pytest.raises(LayoutError, match="b is a Tensor and a an array of NumPy"):
        gm.grouped_matmul(a, torch.from_numpy(b), offsets=[1] * 4, scatter=[0] * 23)
