"""Groups of rows, each times a matrix of its own, on the CPU; lists of products."""

from __future__ import annotations

import array
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes
from gemmery.api import device_operands, options, products
from gemmery.api import on_device as device_products
from gemmery.api.device_call import DeviceCall, described
from gemmery.api.grouped import multiply_groups
from gemmery.arrays import View, view
from gemmery.dispatch.cuda import grouped
from gemmery.errors import ArgumentError, RefusedError
from gemmery.keywords import Options
from test_api_device import Matrix, e4m3, half

K, N = 7, 5
ENDS = {
    "none empty": [3, 4, 11],
    "an empty one first": [0, 6, 11],
    "two empty ones": [5, 5, 5],
    "rows of no group": [2, 3, 8],
    "all empty": [0, 0, 0],
}


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def operands(rng, dtype="f4"):
    return rng.integers(-4, 5, (11, K)).astype(dtype), rng.integers(-4, 5, (3, K, N)).astype(dtype)


def expected(a, b, ends):
    rows = [a[start:end] @ b[g] for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return np.concatenate(rows)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4", ml_dtypes.bfloat16])
def test_each_group_is_multiplied_by_its_matrix(rng, ends, dtype):
    a, b = operands(rng, dtype)
    result = gm.grouped_matmul(a, b, offsets=ends)
    assert (result.shape, result.dtype) == ((11, N), a.dtype)
    wide = expected(a.astype("f8"), b.astype("f8"), ends)
    assert np.array_equal(result[: ends[-1]].astype("f8"), wide)


def test_the_weights_may_have_any_strides_and_offsets_any_kind(rng):
    a, b = operands(rng)
    stored = np.ascontiguousarray(b.transpose(0, 2, 1))
    ends = ENDS["none empty"]
    kinds = (
        tuple(ends),
        np.array(ends),
        np.array(ends, "u1"),
        np.array([3, 0, 4, 0, 11], "i4")[::2],
        array.array("i", ends),
    )
    for offsets in kinds:
        result = gm.grouped_matmul(a, stored.transpose(0, 2, 1), offsets=offsets)
        assert np.array_equal(result, expected(a, b, ends))


@pytest.mark.parametrize("bias", [2.0, np.arange(5.0, dtype="f4"), np.arange(15, dtype="f4").reshape(3, 5)])
def test_bias_of_all_groups_or_of_each_and_activation(rng, bias):
    a, b = operands(rng)
    ends = ENDS["none empty"]
    result = gm.grouped_matmul(a, b, offsets=ends, bias=bias, activation="relu")
    each = np.broadcast_to(bias, (3, N)) if np.ndim(bias) < 2 else bias
    added = np.repeat(each, np.diff([0, *ends]), axis=0)
    assert np.array_equal(result, np.maximum(expected(a, b, ends) + added, 0))
    lists = gm.grouped_matmul(a.tolist(), b.tolist(), offsets=ends, bias=np.asarray(bias).tolist(), activation="relu")
    assert np.array_equal(lists, result)


def test_out_receives_the_groups_and_keeps_other_rows(rng):
    a, b = operands(rng)
    ends = ENDS["rows of no group"]
    out = np.full((11, 2 * N), 9.0, "f4")[:, ::2]
    assert gm.grouped_matmul(a, b, offsets=ends, out=out) is out
    assert np.array_equal(out[:8], expected(a, b, ends))
    assert (out[8:] == 9).all()
    wide = np.empty((11, N))
    gm.grouped_matmul(a, b, offsets=ends, out=wide)
    assert np.array_equal(wide[:8], expected(a, b, ends))


def test_out_may_overlap_an_operand(rng):
    a, b = rng.integers(-4, 5, (11, N)).astype("f4"), rng.integers(-4, 5, (3, N, N)).astype("f4")
    ends, memory = ENDS["none empty"], np.zeros((12, N), "f4")
    memory[1:] = a  # each row of the result is on the row before, which the group before reads
    gm.grouped_matmul(memory[1:], b, offsets=ends, out=memory[:11])
    assert np.array_equal(memory[:11], expected(a, b, ends))
    bias = np.arange(3 * N, dtype="f4").reshape(3, N)
    out = np.zeros((11, N), "f4")
    out[:3] = bias
    result = gm.grouped_matmul(a, b, offsets=ends, bias=bias)
    assert np.array_equal(gm.grouped_matmul(a, b, offsets=ends, bias=out[:3], out=out), result)


def test_types_and_kinds_are_those_of_matmul(rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    a, b = operands(rng)
    ends = ENDS["none empty"]
    x, y, offsets = (
        torch.from_numpy(a).bfloat16(),
        torch.from_numpy(b).bfloat16(),
        torch.tensor(ends, dtype=torch.int32),
    )
    result = gm.grouped_matmul(x, y, offsets=offsets, dtype=torch.float32)
    assert (type(result), result.dtype) == (torch.Tensor, torch.float32)
    assert np.array_equal(result.numpy(), expected(a, b, ends))
    out = torch.zeros_like(result, dtype=torch.bfloat16)
    version = out._version
    assert gm.grouped_matmul(x, y, offsets=offsets, out=out) is out
    assert out._version > version
    wide = gm.grouped_matmul(a.astype("i1"), b.astype("i1"), offsets=ends, dtype="int32")
    assert wide.dtype == np.int32
    assert np.array_equal(wide, expected(a, b, ends))
    assert isinstance(gm.grouped_matmul(memoryview(a), b, offsets=ends), memoryview)


def test_sides_of_no_length(rng):
    a, b = operands(rng)
    assert gm.grouped_matmul(a[:0], b, offsets=[0, 0, 0]).shape == (0, N)
    assert gm.grouped_matmul(a, b[:0], offsets=[]).shape == (11, N)
    assert gm.grouped_matmul(a, b[:, :, :0], offsets=[1, 2, 3]).shape == (11, 0)
    assert not gm.grouped_matmul(a[:, :0], b[:, :0], offsets=[1, 2, 11]).any()


def test_lists_have_products_of_any_shapes(rng):
    shapes = ((3, 4, 5), (0, 2, 2), (1, 9, 2))
    a = [rng.integers(-4, 5, (m, k)).astype("f4") for m, k, _ in shapes]
    b = [rng.integers(-4, 5, (k, n)).astype("f8") for _, k, n in shapes]
    bias = [1.0, None, np.arange(2.0)]
    for result, x, y, each in zip(gm.grouped_matmul(a, b, bias=bias), a, b, (1, 0, bias[2]), strict=True):
        assert result.dtype == np.float64
        assert np.array_equal(result, x @ y + each)
    out = [np.zeros((m, n)) for m, _, n in shapes]
    results = gm.grouped_matmul(a, tuple(b), out=out, activation="relu")
    assert all(x is y for x, y in zip(results, out, strict=True))
    assert np.array_equal(out[0], np.maximum(a[0] @ b[0], 0))
    assert gm.grouped_matmul([], []) == []


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"offsets": [3, 2, 11]}, gm.ArgumentError, r"offsets\[1\] is 2, and must be from 3"),
        ({"offsets": [3, 4, 12]}, gm.ArgumentError, r"offsets\[2\] is 12, .* to 11, the rows"),
        ({"offsets": [-1, 4, 11]}, gm.ArgumentError, r"offsets\[0\] is -1, and must be from 0"),
        ({"offsets": [4, 11]}, gm.ShapeError, r"offsets has shape \(2,\), and b has 3 matrices"),
        ({"offsets": 3}, gm.ShapeError, r"shape \(\)"),
        ({"offsets": [1.0, 2.0, 3.0]}, gm.DTypeError, "offsets are float64, .* pass int32"),
        ({"a": np.ones((2, 2, K), "f4")}, gm.ShapeError, r"a of shape \(rows, k\) .* pass lists"),
        ({"b": np.ones(K, "f4")}, gm.ShapeError, r"b of shape \(groups, k, n\)"),
        ({"b": np.ones((3, K + 1, N), "f4")}, gm.ShapeError, "they must be equal"),
        ({"bias": np.ones((2, N), "f4")}, gm.ShapeError, r"bias has shape \(2, 5\); .* shape \(3, 5\)"),
        ({"bias": np.ones(3, "f4")}, gm.ShapeError, r"bias has shape \(3,\)"),
        ({"bias": np.ones((3, N), "c8")}, gm.DTypeError, "bias is complex64"),
        ({"activation": "tanh"}, gm.ArgumentError, "relu, gelu, silu"),
        ({"dtype": "float16"}, gm.DTypeError, "cannot represent"),
        ({"out": np.ones((3, N), "f4")}, gm.ShapeError, r"the product \(11, 5\)"),
        ({"out": np.ones((11, N), "i4")}, gm.DTypeError, "Cannot cast"),
        ({"offsets": [0, 0, 0], "scale_a": 2.0}, gm.ArgumentError, "scale_a=2.0 applies to products on a CUDA"),
        ({"offsets": [0, 0, 0], "batch_invariant": 1}, gm.ArgumentError, "batch_invariant=1 must be True or False"),
        ({"offsets": None}, gm.ArgumentError, "a is a ndarray: without offsets"),
        ({"offsets": None, "a": [np.eye(2)]}, gm.ArgumentError, "b is a ndarray"),
        ({"offsets": None, "a": [np.eye(2)], "b": []}, gm.ShapeError, "b has 0 elements, and a has 1"),
        ({"offsets": None, "a": [np.eye(2)], "b": [np.ones(2)]}, gm.ShapeError, r"a\[0\] and b\[0\]"),
        ({"offsets": None, "a": [np.eye(2)], "b": [np.eye(3)]}, gm.ShapeError, "they must be equal"),
        ({"offsets": None, "a": [np.eye(2)], "b": [np.eye(2)], "out": np.eye(2)}, gm.ArgumentError, "list of 1 arrays"),
    ],
)
def test_an_error_names_the_value_the_rule_and_the_way_out(rng, arguments, error, words):
    a, b = operands(rng)
    out = np.full((11, N), 3.0, "f4")
    call = {
        "a": a,
        "b": b,
        "offsets": [3, 4, 11],
        "out": None if arguments.get("offsets", 0) is None else out,
        **arguments,
    }
    with pytest.raises(error, match=words):
        gm.grouped_matmul(**call)
    assert (out == 3).all()


def on_device(shape, strides, dtype="f16", pointer=0, device="h200"):
    return View(pointer, shape, strides, dtype, device)


@pytest.mark.parametrize(
    ("x", "y", "layouts", "alignments"),
    [
        (on_device((9, 64), (128, 2)), on_device((3, 64, 16), (2048, 2, 128)), ("row", "col"), (16, 16)),
        (on_device((9, 64), (136, 2)), on_device((3, 64, 16), (2048, 32, 2), pointer=4), ("row", "row"), (8, 4)),
        (on_device((9, 64), (0, 2)), on_device((3, 64, 16), (0, 2, 128)), ("row", "col"), (1, 16)),
        (on_device((16, 64), (2, 32)), on_device((3, 64, 16), (2048, 0, 2)), ("col", "row"), (16, 1)),
        (on_device((9, 64), (-128, 2)), on_device((3, 64, 16), (-2048, 2, 128)), ("row", "col"), (1, 1)),
    ],
)
def test_how_a_kernel_sees_the_operands_on_a_device(x, y, layouts, alignments):
    """Rows and matrices that are repeated or reversed are no rows of a tensor map."""
    problem = described(DeviceCall(x, y, on_device((x.shape[0], 16), (32, 2)), grouped=True))[1]
    assert (problem.m, problem.n, problem.k, problem.batch, problem.groups) == (x.shape[0], 16, 64, 1, 3)
    assert (problem.a_layout, problem.b_layout) == layouts
    assert problem.alignments == (*alignments, 16)
    turned = described(DeviceCall(x, y, on_device((x.shape[0], 16), (2, 2 * x.shape[0])), grouped=True))[1]
    assert turned.c_layout == "any"  # C' = B' A' would have groups of columns


@pytest.mark.parametrize("change", [{"dtype": "f64"}, {"device": "a100"}, {"device": "b200"}])
def test_no_launch_for_all_groups_where_wgmma_does_not_multiply(change):
    x, y, c = (
        on_device(*sides, **{"dtype": "f16", **change})
        for sides in (((9, 64), (512, 8)), ((3, 64, 16), (8192, 8, 512)), ((9, 16), (128, 8)))
    )
    with pytest.raises(RefusedError, match=r"wgmma_grouped: "):
        grouped(described(DeviceCall(x, y, c, grouped=True))[1])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ({"offsets": [1, 1, 5]}, gm.ArgumentError, r"offsets\[2\] is 5"),
        ({"offsets": [1, 4]}, gm.ShapeError, "b has 3 matrices"),
        ({"b": np.ones((3, 4, 4), "f4")}, gm.DeviceError, "b on cpu"),
        ({"offsets": Matrix((3,), element=(0, 64))}, gm.DTypeError, "int64 on cuda:0, .* int32"),
        ({"offsets": Matrix((3,), element=(0, 32), device=(2, 1))}, gm.DeviceError, "offsets on cuda:1"),
        ({"activation": "tanh"}, gm.ArgumentError, "relu, gelu, silu"),
        ({"bias": Matrix((2, 4))}, gm.ShapeError, "bias has shape"),
        ({"scale_a": 2.0}, gm.DTypeError, "float32 into float32"),
        (
            {"a": half(4, 4), "b": half(3, 4, 4), "scale_a": Matrix((3,))},
            gm.ShapeError,
            r"scale_a .* \(4,\) or \(4, 1\)",
        ),
        (
            {"a": half(4, 4), "b": half(3, 4, 4), "scale_b": Matrix((4,))},
            gm.ShapeError,
            r"one for each group, .* \(3, 4\)",
        ),
        ({"a": e4m3(4, 4), "b": half(3, 4, 4)}, gm.DTypeError, "multiplied by float8 only"),
        ({"out": Matrix((4, 5))}, gm.ShapeError, "the product"),
    ],
)
def test_a_product_on_a_device_is_checked_before_it_is_touched(monkeypatch, call, error, words):
    monkeypatch.setattr(device_operands, "check_capability", lambda *given: None)
    monkeypatch.setattr(device_products.driver, "captures", lambda stream: False)
    monkeypatch.setattr(device_products, "prepare_groups", lambda call: "no kernel")
    monkeypatch.setattr(device_products, "new", lambda x, shape, dtype: on_device(shape, (16, 4)))
    monkeypatch.setattr(device_products.arrays, "allocates", lambda a: True)
    with pytest.raises(error, match=words):
        gm.grouped_matmul(**{"a": Matrix(), "b": Matrix((3, 4, 4)), "offsets": [1, 1, 4], **call})


@pytest.fixture
def one_by_one(monkeypatch):
    """Grouped products of NumPy arrays as if they were on a device without a kernel for groups."""

    def viewed(z):
        return view(z)._replace(device="cuda:0" if isinstance(z, np.ndarray) else "cpu")

    def multiply(a, b, out, dtype=None, scale_a=None, scale_b=None):
        scale_a, scale_b = (1 if z is None else z for z in (scale_a, scale_b))
        assert np.shape(scale_a) in ((), (1,), a.shape[:1], (len(a), 1))
        assert np.shape(scale_b) in ((), (1,), b.shape[1:])
        out[...] = (a * np.reshape(scale_a, (-1, 1))) @ (b * scale_b)

    def new(x, shape, dtype):
        return viewed(np.full(shape, 9, dtypes.get(dtype).numpy))

    for module in (device_products, device_operands, options):
        monkeypatch.setattr(module, "view", viewed)
    monkeypatch.setattr(device_operands, "check_capability", lambda *_: None)
    monkeypatch.setattr(device_products, "prepare_groups", lambda call: "no kernel")
    monkeypatch.setattr(device_products.driver, "captures", lambda _: False)
    monkeypatch.setattr(device_products, "new", new)
    monkeypatch.setattr(device_products, "copy", lambda source, target: np.copyto(target.array, source.array))
    monkeypatch.setattr(device_products.arrays, "allocates", lambda _: True)
    monkeypatch.setattr(products, "matmul", multiply)

    def run(a, b, ends, out=None, **terms):
        views, shape = (viewed(a), viewed(b), view(ends)), (len(a), b.shape[2])
        given = Options(**terms), terms, (0, 0), shape, views[2], multiply_groups
        return device_products.product("grouped_matmul", *views[:2], out, *given)

    return run


@pytest.mark.parametrize("ahead", [0, 1])
def test_out_may_overlap_an_operand_where_each_group_has_a_launch(one_by_one, rng, ahead):
    a, b = rng.integers(-4, 5, (11, N)).astype("f4"), rng.integers(-4, 5, (3, N, N)).astype("f4")
    memory = np.full((12, N), 7, "f4")
    memory[1 - ahead : 12 - ahead] = a
    out = memory[ahead : 11 + ahead]
    last = out[8:].copy()
    assert one_by_one(memory[1 - ahead : 12 - ahead], b, [3, 4, 8], out) is out
    assert np.array_equal(out[:8], expected(a, b, [3, 4, 8]))
    assert np.array_equal(out[8:], last)  # rows of no group


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((1,), (1,)), ((), ()), ((11,), (3,)), ((11, 1), (3, N)), ((1,), None), (None, (1,))]
)
def test_factors_of_all_shapes_where_each_group_has_a_launch(one_by_one, rng, a_shape, b_shape):
    a, b = operands(rng, "f2")
    factors = {
        name: None if shape is None else np.exp2(rng.integers(-2, 3, shape)).astype("f4").reshape(shape)
        for name, shape in (("scale_a", a_shape), ("scale_b", b_shape))
    }
    result = one_by_one(a, b, [3, 4, 11], dtype="float32", **factors)
    rows, columns = (1 if z is None else z for z in factors.values())
    columns = np.broadcast_to(np.reshape(columns, (-1, 1)) if np.ndim(columns) < 2 else columns, (3, N))
    assert np.array_equal(result, expected(a * np.reshape(rows, (-1, 1)), b * columns[:, None], [3, 4, 11]))


def test_without_groups_no_kernel_runs(one_by_one, monkeypatch):
    """Its first load would be of an offset or of a matrix, and there are none."""
    monkeypatch.setattr(device_products, "prepare_groups", lambda call: pytest.fail("a launch"))
    a, b = np.ones((11, K), "f4"), np.ones((0, K, N), "f4")
    out = np.full((11, N), 3, "f4")
    assert one_by_one(a, b, [], out) is out
    assert (out == 3).all()


@pytest.mark.parametrize(
    ("second", "options", "error"),
    [
        (np.zeros((2, 3)), {}, gm.ShapeError),
        (np.zeros((2, 2), "i4"), {}, gm.DTypeError),
        (np.broadcast_to(0.0, (2, 2)), {}, gm.LayoutError),
        (np.zeros((2, 2)), {"bias": [None, np.zeros(3)]}, gm.ShapeError),
        (np.zeros((2, 2)), {"activation": "nosuch"}, gm.ArgumentError),
        (np.zeros((2, 2)), {"scale_a": [None, 1.0]}, gm.ArgumentError),
    ],
)
def test_nothing_is_written_where_a_later_product_of_a_list_is_refused(second, options, error):
    first, ones = np.zeros((2, 2)), np.ones((2, 2))
    with pytest.raises(error):
        gm.grouped_matmul([ones, ones], [ones, ones], out=[first, second], **options)
    assert not first.any()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "c8"])
@pytest.mark.parametrize("ends", [[0, 0, 17], [5, 5, 9, 17], [], [3]])
def test_groups_along_k(dtype, ends):
    rng = np.random.default_rng(len(ends))
    a, b = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((17, 6), (17, 9)))
    want = np.zeros((len(ends), 6, 9), dtype)
    for group, (start, end) in enumerate(pairwise((0, *ends))):
        want[group] = a[start:end].T @ b[start:end]
    out = np.full((len(ends), 6, 9), 99, dtype)
    assert gm.grouped_matmul(a.T, b, offsets=np.array(ends, np.int32), out=out) is out
    for result in (out, gm.grouped_matmul(np.ascontiguousarray(a.T), b, offsets=np.array(ends, np.int32))):
        assert result.dtype == want.dtype
        assert np.array_equal(result, want)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bias": np.ones(N, "f4")}, gm.ArgumentError, "bias of groups along k"),
        ({"offsets": [2, K + 1]}, gm.ArgumentError, "the columns of a"),
        ({"offsets": [[1, 2]]}, gm.ShapeError, r"the end of each group: shape \(groups,\)"),
        ({"a": np.ones((2, 2, K), "f4")}, gm.ShapeError, r"a of shape \(m, k\)"),
        ({"b": np.ones((K + 1, N), "f4")}, gm.ShapeError, "they must be equal"),
        ({"out": np.ones((2, 4, N + 1), "f4")}, gm.ShapeError, "out"),
    ],
)
def test_an_error_of_groups_along_k(arguments, error, words):
    call = {"a": np.ones((4, K), "f4"), "b": np.ones((K, N), "f4"), "offsets": [1, K]} | arguments
    with pytest.raises(error, match=words):
        gm.grouped_matmul(call.pop("a"), call.pop("b"), **call)


def test_a_group_inside_a_block_of_factors_is_refused_before_anything_is_written(monkeypatch):
    written = []
    monkeypatch.setattr(products, "matmul", lambda *operands, **options: written.append(operands))
    a, b, out = np.ones((2, 256), "f4"), np.ones((256, 3), "f4"), np.zeros((3, 2, 3), "f4")
    scales = Options(scale_a=np.ones((2, 2), "f4"), scale_b=np.ones((2, 1), "f4"))
    with pytest.raises(ArgumentError, match=r"group 2 begins at 200: .* use a multiple of 128"):
        multiply_groups(a, b, [128, 200, 256], out, scales)
    assert written == []
    multiply_groups(a, b, [128, 128, 256], out, scales)
    assert len(written) == 3
