"""The arguments of the compiled builtins: every spelling gives what Python's function gives, results and errors."""

from __future__ import annotations

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery.api import products
from gemmery.cpu import entry

PYTHON = {"matmul": products._matmul, "gemm": products._gemm, "gemv": products._gemv}
REPEATS = 3  # Python, then compiled code


@pytest.fixture(autouse=True)
def _builtins():
    gm.matmul(np.eye(2), np.eye(2))


def outcome(function, args, options):
    """The result of a call, or its error, with the bits of whatever is in `out`."""
    try:
        result = function(*args, **options)
    except Exception as error:
        return type(error), str(error)
    array = np.asarray(result)
    return type(result), array.dtype, array.shape, array.tobytes(), result is options.get("out")


def agree(name, args, options=None):
    """Call the builtin and Python's function with copies of the same arguments."""
    options = options or {}
    for _ in range(REPEATS):
        outcomes = []
        for function in (PYTHON[name], getattr(gm, name)):
            memory = {
                id(x): x.copy(order="K") for x in (*args, *options.values()) if type(x) is np.ndarray and x.base is None
            }
            fresh = [memory.get(id(x), x) for x in args], {key: memory.get(id(x), x) for key, x in options.items()}
            outcomes.append((outcome(function, *fresh), [x.tobytes() for x in memory.values()]))
        assert outcomes[0] == outcomes[1], (name, args, options)


def draw(*shape, dtype="f4", seed=0):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)


A, B, C, X, Y = draw(4, 5), draw(5, 6, seed=1), draw(4, 6, seed=2), draw(5, seed=3), draw(4, seed=4)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        ((A,), {}),
        ((A, B), {}),
        ((A, B, C), {}),
        ((A, B, None), {}),
        ((A, B, C, C), {}),
        ((A, B), {"out": C}),
        ((A, B), {"out": None}),
        ((A, B, C), {"out": C}),
        ((A, B, None), {"out": None}),
        ((A,), {"b": B}),
        ((), {"a": A, "b": B}),
        ((A, B), {"where": True}),
        ((A, B), {"c": C}),
        ((A, B), {"alpha": 1.0}),
        ((A, B), {"dtype": "f8"}),
        ((A, B), {"dtype": None, "bias": None, "activation": None, "threads": None, "precision": None, "out": None}),
        ((A, B), {"threads": 1}),
        ((A, B), {"threads": 0}),
        ((A, B), {"threads": False}),
        ((A, B), {"precision": "tf32"}),
        ((A, B), {"scale_a": None, "scale_b": 2.0}),
        ((A, B), {"batch_invariant": None}),
        ((A, B), {"batch_invariant": True}),
        ((A, B), {"where": None}),
        ((A, B), {"beta": None, "precision": None}),
        ((A, B), {"bias": B[0].copy()}),
        ((A, B), {"bias": B[0].astype("f8")}),
        ((A, B), {"bias": B[:1].copy()}),
        ((A, B), {"bias": B[::2, 0].copy()}),
        ((A, B), {"bias": np.ones(12, "f4")[::2]}),
        ((A, B), {"bias": np.ones(1, "f4")}),
        ((A, B), {"bias": np.ones((), "f4")}),
        ((A, B), {"bias": np.float32(2)}),
        ((A, B), {"bias": 2.5}),
        ((A, B), {"bias": float("nan")}),
        ((A, B), {"bias": 1e300}),
        ((A, B), {"bias": 2}),
        ((A, B), {"bias": True}),
        ((A, B), {"bias": [1.0] * 6}),
        ((A, B), {"bias": "x"}),
        ((A, B), {"activation": "relu"}),
        ((A, B), {"activation": "".join(["re", "lu"])}),
        ((A, B), {"activation": "tanh"}),
        ((A, B), {"activation": b"relu"}),
        ((A, B), {"activation": 1}),
        ((A, B, C), {"bias": B[0].copy(), "activation": "gelu"}),
        ((A, B), {"out": C, "bias": 1.0, "activation": "silu"}),
        ((A, B), {"activation": "relu", "bias": B[0].copy(), "out": C}),
        ((A, B), {"semiring": "min_plus"}),
        ((A, B, C), {"semiring": "max_plus", "threads": 1}),
        ((A, B), {"semiring": "".join(["max_", "times"]), "out": C}),
        ((A, A.T), {"semiring": "min_plus", "dtype": "f8"}),
        ((A, B.astype("f8")), {"semiring": "min_plus"}),
        ((A, B), {"semiring": "log_sum_exp"}),
        ((A, B), {"semiring": "min"}),
        ((A, B), {"semiring": "min_plus", "bias": 1.0}),
        ((A > 0, B > 0), {"semiring": "or_and"}),
        ((A.astype("i4"), B.astype("i4")), {"bias": 1.0}),
        ((A.astype("i4"), B.astype("i4")), {"bias": np.ones(6, "i4")}),
        ((A.astype("i4"), B.astype("i4")), {"activation": "relu"}),
        ((A.astype("c8"), B.astype("c8")), {"bias": 1.5}),
        ((A, B), {"".join(["o", "ut"]): C}),
    ],
)  # fmt: skip
def test_spellings_of_matmul(args, options):
    agree("matmul", args, options)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("matmul", (A, B), {"threads": None, "precision": None, "scale_a": None, "scale_b": None}),
        ("matmul", (A, B, C), {"batch_invariant": False, "bias": 1.5, "precision": None}),
        ("gemm", (2.0, A, B), {"threads": None, "precision": None, "out": C}),
        ("gemv", (A, X), {"precision": None, "alpha": 2.0, "threads": None}),
    ],
)
def test_an_option_at_its_default_does_not_leave_compiled_code(monkeypatch, name, args, options):
    if not entry.active():
        pytest.skip("this interpreter has no compiled entry")
    outcomes = [outcome(getattr(gm, name), args, options) for _ in range(REPEATS)]
    monkeypatch.setattr(products, "viewed", None)  # Python's functions begin with it
    outcomes.append(outcome(getattr(gm, name), args, options))
    assert not issubclass(outcomes[0][0], Exception)
    assert len(set(outcomes)) == 1


NUMBERS = [
    1, 1.0, 2, -3, 2.5, 0, 0.0, -0.0, True, None, 1j, 2 + 0j, 2.5 - 1.5j, 0j, 1 + 0j, 1e300j, complex("nan"),
    1 + 1e-60j, np.complex64(1 + 1j), np.float32("nan"), np.float64(1e300), np.float64(3),
    1e300, -1e300, 1e-60, float("inf"), float("nan"), 2**53,
    2**53 + 1, 2**62, 2**64, -(2**70), 10**400, np.float32(2), np.float64(2.5), np.int8(3), np.array(2.0),
    np.array([2.0]), "2", b"2", [2.0],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u1", "c8", "f2", "?"])
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_scalars(dtype, number):
    a, b, c, x, y = (z.astype(dtype) for z in (A, B, C, X, Y))
    agree("gemm", (number, a, b))
    agree("gemm", (2, a, b, number, c))
    agree("gemm", (2, a, b), {"beta": number, "c": c, "out": draw(4, 6).astype(dtype)})
    agree("gemv", (a, x), {"alpha": number})
    agree("gemv", (a, x, y), {"alpha": 3, "beta": number})


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((1.0, A), {}),
        ((1.0, A, B), {}),
        ((1.0, A, B, 1.0), {}),
        ((1.0, A, B, 0.0, C), {}),
        ((1.0, A, B, 0.0, C.astype("f8")), {}),
        ((1.0, A, B, 1.0, C), {}),
        ((1.0, A, B, 1.0, C.astype("f8")), {}),
        ((1.0, A, B, 1.0, C.astype("f2")), {}),
        ((1.0, A.astype("f8"), B, 1.0, C), {}),
        ((1.0, A, B, 1.0, C, C), {}),
        ((1.0, A, B, 1.0, None), {}),
        ((1.0, A, B, 1.0, C[:3]), {}),
        ((1.0, A, B, 1.0, C[0]), {}),
        ((1.0, A, B, 1.0, C.T.copy().T), {}),
        ((1.0, A, B, 1.0, C.tolist()), {}),
        ((1.0, A, B), {"beta": 1.0, "c": C}),
        ((1.0, A, B, 1.0), {"beta": 1.0, "c": C}),
        ((1.0, A, B, 1.0, C), {"c": C}),
        ((1.0, A, B), {"c": C, "out": C}),
        ((1.0, A, B), {"c": C, "out": C, "beta": 2.0}),
        ((2.0, A, B), {"out": C}),
        ((2.0, A, B), {"out": C.astype("f8")}),
        ((2.0, A, B), {"out": C.astype("i4")}),
        ((2.0, A, B, 1.0, C), {"out": np.zeros((4, 6))}),
        ((2.0, A, B, 1.0, C), {"out": np.zeros((4, 6), "f4", "F")}),
        ((2.0, A, B, 1.0, C), {"out": np.zeros((4, 12), "f4")[:, ::2]}),
        ((2.0,), {"a": A, "b": B}),
        ((), {"alpha": 2.0, "a": A, "b": B}),
        ((2.0, A, B), {"y": C}),
        ((2.0, A, B), {"bias": 1.0}),
        ((2.0, A, X), {}),
        ((2.0, draw(2, 4, 5), draw(2, 5, 6)), {}),
        ((2.0, draw(2, 4, 5), B, 1.0, draw(2, 4, 6)), {}),
        ((2.0, draw(2, 4, 5), B, 1.0, C), {}),
        ((A, 2.0, B), {}),
    ],
)  # fmt: skip
def test_spellings_of_gemm(args, options):
    agree("gemm", args, options)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((A,), {}),
        ((A, X), {}),
        ((A, X, Y), {}),
        ((A, X, Y), {"beta": 2.0}),
        ((A, X, Y), {"y": Y}),
        ((A, X), {"y": Y, "beta": 2.0, "out": Y}),
        ((A, X), {"y": Y, "out": Y}),
        ((A, X), {"beta": 2.0}),
        ((A, X, Y, 2.0), {}),
        ((A, X), {"alpha": 2.0, "out": Y}),
        ((A, X[:4]), {}),
        ((A, B), {}),
        ((X, A), {}),
        ((A, X), {"c": Y, "beta": 1.0}),
        ((A[None], X), {}),
        ((A.T, Y), {"alpha": 2}),
        ((A, np.ones(10, "f4")[::2]), {"out": np.zeros(8, "f4")[::2]}),
    ],
)  # fmt: skip
def test_spellings_of_gemv(args, options):
    agree("gemv", args, options)


class Sub(np.ndarray):
    """A subclass, whose results are of its kind."""


class Convertible:
    def __array__(self, dtype=None, copy=None):
        return A.copy()


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


KINDS = {
    "array": lambda x: x,
    "subclass": lambda x: x.copy().view(Sub),
    "metadata": lambda x: x.astype(np.dtype(x.dtype, metadata={"unit": 1})),
    "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "read-only": frozen,
    "list": lambda x: x.tolist(),
    "buffer": lambda x: memoryview(x.copy()),
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "float8": lambda x: x.astype(ml_dtypes.float8_e4m3fn),
    "words": lambda x: x.astype("U3"),
    "half": lambda x: x.astype("f2"),
    "longlong": lambda x: x.astype("q"),
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "columns": np.asfortranarray,
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "no elements": lambda x: x[:0],
    "a number": lambda x: x.dtype.type(1),
    "__array__": lambda x: Convertible(),
    "None": lambda x: None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="-".join)
def test_kinds_of_operands(kinds):
    a, b = (KINDS[kind](x) for kind, x in zip(kinds, (A, B), strict=True))
    agree("matmul", (a, b))
    agree("gemm", (2.0, a, b))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_out(kind):
    for name, args in (("matmul", (A, B)), ("gemm", (2.0, A, B, 1.0, C))):
        out = KINDS[kind](C.copy())
        for _ in range(REPEATS):
            ours, theirs = (outcome(f, args, {"out": out}) for f in (getattr(gm, name), PYTHON[name]))
            assert ours == theirs


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 5), (5, 6)), ((4, 0), (0, 6)), ((4, 5), (5, 0)), ((0,), (0,)), ((0, 4, 5), (5, 6)), ((3, 0, 5), (3, 5, 6)),
        ((1,) * 20 + (4, 5), (5, 6)), ((1,) * 62 + (4, 5), (1,) * 62 + (5, 6)), ((2,) * 9 + (1, 2), (2, 1)),
        ((), (5, 6)), ((4, 5), ()), ((2, 1, 4, 5), (3, 5, 6)), ((2, 3, 4, 5), (3, 5)), ((7, 1, 2, 3), (1, 3, 3, 2)),
    ],
)  # fmt: skip
def test_shapes(first, second):
    agree("matmul", (draw(*first), draw(*second)))
    agree("gemm", (2.0, draw(*first), draw(*second)))


def test_pairs_of_types():
    names = [
        "?",
        "i1",
        "u1",
        "i2",
        "u2",
        "i4",
        "u4",
        "int8",
        "uint8",
        "q",
        "f2",
        "f4",
        "f8",
        "c8",
        "c16",
        ml_dtypes.bfloat16,
    ]
    for first, second in itertools.product(names, names):
        a, b = draw(3, 4).astype(first), draw(4, 2).astype(second)
        agree("matmul", (a, b))
        agree("matmul", (a, b), {"out": np.zeros((3, 2), np.result_type(np.float16, "f4"))})


def test_a_pair_of_types_is_converted_by_compiled_code_where_one_type_has_met_the_shapes():
    if not entry.active():
        pytest.skip("no compiled entry on this interpreter")
    a, b = draw(9, 8, dtype="i2"), draw(8, 7, dtype="i4")
    wide, called = a.astype("i4"), []
    for _ in range(REPEATS):
        gm.matmul(wide, b)
    for _ in range(REPEATS):
        gm.matmul(a, b)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        result = gm.matmul(a, b)
    finally:
        sys.setprofile(before)
    assert called == []
    assert (result == wide @ b).all()


def test_out_of_every_type():
    names = ["?", "i1", "u1", "i4", "i8", "f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16]
    for operand, out in itertools.product(names, names):
        a, b = draw(3, 4).astype(operand), draw(4, 2).astype(operand)
        agree("matmul", (a, b), {"out": np.ones((3, 2), out)})
        agree("gemm", (2, a, b, 1, np.ones((3, 2), operand)), {"out": np.ones((3, 2), out)})
    huge = np.full((3, 3), 1e30)
    with np.errstate(all="raise"):
        for _ in range(REPEATS):
            assert np.isinf(gm.matmul(huge, huge, out=np.zeros((3, 3), "f4"))).all()


def test_out_that_overlaps_in_every_way():
    for name, scale in (("matmul", ()), ("gemm", (2.0,))):
        for a_at, b_at, out_at in itertools.product((0, 1, 9, 30), repeat=3):
            for flip in (False, True):
                results = []
                for function in (getattr(gm, name), PYTHON[name]):
                    memory = draw(80)
                    a, b, out = (memory[at : at + 9].reshape(3, 3) for at in (a_at, b_at, out_at))
                    a, out = (a[::-1], out[:, ::-1]) if flip else (a, out)
                    function(*scale, a, b, out=out)
                    results.append(memory.tobytes())
                assert results[0] == results[1], (name, a_at, b_at, out_at, flip)


WIDER = [
    "int32",
    "i4",
    "int32",
    np.int32,
    np.dtype("i4"),
    "float64",
    float,
    np.float64,
    "complex128",
    "int8",
    "f2",
    3,
    "x",
]


@pytest.mark.parametrize("name", ["i1", "u1", "f2", "f4", "?", ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", WIDER, ids=str)
def test_dtype_of_the_result(name, wanted):
    a, b = draw(4, 5).astype(name), draw(5, 6, seed=1).astype(name)
    agree("matmul", (a, b), {"dtype": wanted})
    agree("matmul", (a[0], b), {"dtype": wanted, "out": np.zeros(6, "f8")})
    agree("matmul", (a, b, np.zeros((4, 6), "i2")), {"dtype": wanted})
    agree("matmul", (a, b), {"dtype": wanted, "bias": 1.0, "activation": "relu"})
    agree("matmul", (a, b.astype("i2")), {"dtype": wanted})


def test_objects_passed_as_dtype_are_kept_but_not_all():
    a = np.full((3, 3), 100, "i1")
    kept = []
    for i in range(400):
        wanted = "".join(["in", "t32" if i % 2 else "t64"])  # an object of its own
        for _ in range(REPEATS):
            assert gm.matmul(a, a, dtype=wanted).dtype == wanted
        kept.append(wanted if i % 3 else None)
        del wanted
    assert len(entry._dtype_objects) <= entry._MOST_OBJECTS


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("result", ["f2", "f4", "f8", "i1", "i4", "c8", ml_dtypes.bfloat16], ids=str)
def test_bias_of_every_type(result):
    a, b = draw(4, 5).astype(result), draw(5, 6, seed=1).astype(result)
    for name in ("?", "i1", "u1", "i4", "q", "f2", "f4", "f8", ">f4", "c8", "c16", ml_dtypes.bfloat16):
        for bias in (draw(6), draw(12)[::2], draw(1), draw(), draw(5), draw(1, 6)):
            agree("matmul", (a, b), {"bias": bias.astype(name)})
            agree("matmul", (a[:, :0], b[:0]), {"bias": bias.astype(name), "activation": "relu"})
            agree("matmul", (a, b.astype("f8")), {"bias": bias.astype(name)})


def test_conversions_do_not_warn():
    loud = np.array([[0x7F800001] * 3] * 3, np.uint32).view("f4")  # signaling NaN
    huge = np.full(3, 1e300)
    with np.errstate(all="raise"):
        for _ in range(REPEATS):
            assert np.isnan(gm.matmul(loud, np.eye(3))).all()
            assert np.isinf(gm.matmul(np.eye(3, dtype="f4"), np.eye(3, dtype="f4"), bias=huge)).all()


def test_names_and_duplicates_are_pythons():
    for _ in range(REPEATS):
        with pytest.raises(TypeError, match="multiple values for argument 'out'"):
            gm.matmul(A, B, C.copy(), out=C.copy())
        with pytest.raises(TypeError, match="multiple values for argument 'c'"):
            gm.gemm(1.0, A, B, 1.0, C, c=C)
        with pytest.raises(TypeError, match="multiple values"):
            gm.gemv(A, X, Y, y=Y)
        with pytest.raises(TypeError, match="unexpected keyword argument 'ouT'"):
            gm.matmul(A, B, ouT=C)


@pytest.mark.parametrize("k", [0, 2])
def test_a_result_too_large_for_an_array_is_a_shape_error_every_time(k):
    """Where the compiled entry cannot allocate, Python says why; the next call is the entry's again."""
    for _ in range(3):
        gm.matmul(np.zeros((2, k)), np.zeros((k, 4)))
        with pytest.raises(gm.ShapeError, match="too large for an array"):
            gm.matmul(np.broadcast_to(0.0, (2**40, k)), np.broadcast_to(0.0, (k, 2**20)))
        # 2**51 bytes are beyond the 47 bits of an address: fewer are granted where Linux overcommits, and then touched.
        with pytest.raises(MemoryError):
            gm.matmul(np.broadcast_to(0.0, (2**45, k)), np.broadcast_to(0.0, (k, 8)))
