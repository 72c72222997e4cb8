"""Checks and plans of products on a CUDA device before they touch it; the operands here have no memory."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes
from gemmery.api import checked, device_operands, explanation, on_device, prepared
from gemmery.api import options as option_checks
from gemmery.api.device_call import CheckedCall, table
from gemmery.arrange import arrange
from gemmery.arrays import View, contiguous, view
from gemmery.cuda import launch
from gemmery.dispatch import Plan
from gemmery.keywords import NO_OPTIONS, Options
from gemmery.problem import Problem
from test_arrays_cuda import Capsule, Interface


class Matrix(Capsule):
    """An array on cuda:0."""

    def __init__(self, shape=(4, 4), device=(2, 0), pointer=4096, element=(2, 32)):
        super().__init__(shape, device, pointer, element=element)


def e4m3(*shape):
    return Matrix(shape or (4, 4), element=(10, 8))


def e5m2(*shape):
    return Matrix(shape or (4, 4), element=(12, 8))


def int8(*shape):
    return Matrix(shape or (4, 4), element=(0, 8))


def half(*shape):
    return Matrix(shape or (4, 4), element=(2, 16))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (gm.matmul, gm.DeviceError, "a is on cuda:0 and b on cpu"),
        (lambda a, x: gm.matmul(x, a), gm.DeviceError, "a is on cpu and b on cuda:0"),
        (lambda a, x: gm.matmul(a, [[1.0] * 4] * 4), gm.DeviceError, "b on cpu"),
        (lambda a, x: gm.matmul(a, a, out=x), gm.DeviceError, "out on cpu"),
        (lambda a, x: gm.matmul(x, x, out=a), gm.DeviceError, "a is on cpu and out on cuda:0"),
        (lambda a, x: gm.matmul(a, Matrix(device=(2, 1))), gm.DeviceError, "a is on cuda:0 and b on cuda:1"),
        (lambda a, x: gm.matmul(x, x, bias=Matrix((4,))), gm.DeviceError, "bias on cuda:0"),
        (lambda a, x: gm.matmul(a, a, bias=x[0]), gm.DeviceError, "bias on cpu"),
        (lambda a, x: gm.gemm(1.0, a, a, 1.0, x), gm.DeviceError, "c on cpu"),
        (lambda a, x: gm.gemm(1.0, x, x, 1.0, a), gm.DeviceError, "c on cuda:0"),
        (lambda a, x: gm.gemv(a, x[0]), gm.DeviceError, "b on cpu"),
        (gm.explain, gm.DeviceError, "b on cpu"),
        (lambda a, x: gm.matmul(a, a, threads=2), gm.ArgumentError, "threads=2 applies to products on the CPU"),
        (lambda a, x: gm.matmul(a, a, precision="half"), gm.ArgumentError, "precision='half'.*'tf32'"),
        (lambda a, x: gm.matmul(x, x, precision="tf32"), gm.ArgumentError, "leave it out on the CPU"),
        (lambda a, x: gm.gemm(1.0, x, x, precision="tf32"), gm.ArgumentError, "leave it out on the CPU"),
        (
            lambda a, x: gm.matmul(a, a, dtype="float64", precision="tf32"),
            gm.ArgumentError,
            "for float32 products",
        ),
        (lambda a, x: gm.matmul(a, a, dtype="int32"), gm.DTypeError, "cannot represent every float32 value"),
        (lambda a, x: gm.matmul(a, a, semiring="min_plus", precision="tf32"), gm.ArgumentError, "has no precision"),
        (lambda a, x: gm.matmul(a, a, semiring="or_and"), gm.DTypeError, "takes bools, not float32"),
        (lambda a, x: gm.matmul(a, a, semiring="max_plus", scale_a=2.0), gm.ArgumentError, "multiply the operands"),
        (lambda a, x: gm.matmul(a, a, dtype="float16"), gm.DTypeError, "cannot represent every float32 value"),
        (lambda a, x: gm.matmul(a, a, activation="tanh"), gm.ArgumentError, "relu, gelu, silu"),
        (lambda a, x: gm.matmul(a, Matrix((3, 4))), gm.ShapeError, "must be equal"),
        (lambda a, x: gm.matmul(a, a, out=Matrix((4, 5))), gm.ShapeError, "out has shape"),
        (lambda a, x: gm.matmul(a, a, out=Matrix()), gm.LayoutError, "read-only"),
        (lambda a, x: gm.matmul(a, a, bias=Matrix((3,))), gm.ShapeError, "bias has shape"),
        (lambda a, x: gm.gemm(1.0, a, a, 2.0), gm.ArgumentError, "beta=2.0 needs c"),
        (lambda a, x: gm.gemm("x", a, a), gm.ArgumentError, "alpha must be a number"),
        (lambda a, x: gm.gemm(1.0, a, a, 2.0, Matrix((4, 5))), gm.ShapeError, "c has shape"),
        (lambda a, x: gm.gemv(a, a), gm.ShapeError, "gemv multiplies a matrix and a vector"),
    ],
)
def test_refusals_come_before_the_device_is_touched(call, error, words):
    with pytest.raises(error, match=words):
        call(Matrix(), np.ones((4, 4), np.float32))


@pytest.mark.parametrize(
    "call",
    [
        lambda a: gm.matmul(a, a, activation="tanh"),
        lambda a: gm.matmul(a, a, semiring="min"),
        lambda a: gm.matmul(a, a, semiring="min_plus", activation="relu"),
        lambda a: gm.matmul(a, a, dtype="int8"),
        lambda a: gm.matmul(a, a, batch_invariant=2),
        lambda a: gm.gemm("two", a, a),
        lambda a: gm.gemm(1.0, a, a, 1.0),
        lambda a: gm.gemm(1j, a, a),
    ],
)
def test_a_wrong_call_is_refused_in_one_way_on_both(call):
    refusals = []
    for a in (Matrix(), np.ones((4, 4), np.float32)):
        with pytest.raises(gm.GemmeryError) as refused:
            call(a)
        refusals.append((refused.type, str(refused.value)))
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: gm.matmul(e4m3(), half()),
            gm.DTypeError,
            "float8_e4m3fn and b is float16.*by float8 only; convert both operands to float16",
        ),
        (lambda: gm.matmul(int8(), e5m2()), gm.DTypeError, "b is float8_e5m2.*by float8 only"),
        (lambda: gm.matmul(e4m3(), e4m3(), dtype="float64"), gm.DTypeError, "of float8_e4m3fn into float64"),
        (
            lambda: gm.matmul(e4m3(), e4m3(), dtype="float8_e4m3fn"),
            gm.DTypeError,
            "'float8_e4m3fn' is not a type of results",
        ),
        (
            lambda: gm.matmul(e4m3(), e4m3(), dtype="int32"),
            gm.DTypeError,
            "can be bfloat16, float16.*or an out of that type",
        ),
        (lambda: gm.matmul(e4m3(), e4m3(), out=Matrix(element=(2, 64))), gm.DTypeError, "into float64"),
        (lambda: gm.matmul(int8(), int8(), dtype="int32", activation="relu"), gm.DTypeError, "not int32"),
        (lambda: gm.gemm(2.5, int8(), int8()), gm.ArgumentError, "alpha must be an integer for int8"),
        (lambda: gm.matmul(int8(), int8(), bias=1.5), gm.ArgumentError, "bias must be an integer for int8"),
        (lambda: gm.matmul(int8(), int8(), dtype="uint8"), gm.DTypeError, "cannot represent every int8 value"),
        (lambda: gm.matmul(e4m3(), e4m3(), precision="tf32"), gm.ArgumentError, "for float32 products"),
        (lambda: gm.matmul(e4m3(), e4m3(), bias=Matrix((3,))), gm.ShapeError, "bias has shape"),
        (lambda: gm.explain(e4m3(), half()), gm.DTypeError, "both operands to float16"),
        (lambda: gm.matmul(half(), half(), out=e4m3()), gm.DTypeError, "from float16 to float8_e4m3fn.*out of float16"),
        (lambda: gm.matmul(half(), half(), bias=e5m2(4)), gm.DTypeError, "bias is float8_e5m2.*to float16 first"),
        (lambda: gm.gemm(1, half(), half(), 1, e4m3()), gm.DTypeError, "float8"),
    ],
)
def test_types_of_eight_bits_are_refused_with_the_way_out(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scale_a": half(6)}, gm.DTypeError, "scale_a is float16; factors are float32"),
        ({"scale_a": Matrix((5,))}, gm.ShapeError, r"scale_a of shape \(5,\).*one number or has the shape \(6,\)"),
        (
            {"scale_b": Matrix((6, 1))},
            gm.ShapeError,
            r"scale_b of shape \(6, 1\).*scale_b is one number or has the shape \(300,\)",
        ),
        ({"scale_b": Matrix((300, 1))}, gm.ShapeError, r"both have the shapes \(6, 3\) and \(3, 3\)"),
        ({"scale_a": Matrix((6, 3))}, gm.ShapeError, r"both have the shapes \(6, 3\) and \(3, 3\)"),
        ({"scale_a": Matrix((6, 3)), "scale_b": 2.0}, gm.ShapeError, r"both have the shapes \(6, 3\) and \(3, 3\)"),
        ({"scale_a": np.ones(6, np.float32)}, gm.DeviceError, "a is on cuda:0 and scale_a on cpu"),
        ({"scale_b": [1.0] * 300}, gm.DeviceError, "scale_b on cpu"),
        ({"scale_a": "big"}, gm.ArgumentError, "scale_a='big' must be a number, or an array of float32"),
        ({"batch_invariant": 1}, gm.ArgumentError, "batch_invariant=1 must be True or False"),
        ({"threads": 1, "scale_a": 2.0}, gm.ArgumentError, "threads=1"),
    ],
)
def test_factors_are_refused_with_the_way_out(options, error, words):
    for call in (gm.matmul, gm.explain):
        if call is gm.matmul or "threads" not in options:
            with pytest.raises(error, match=words):
                call(e4m3(6, 300), e4m3(300, 300), **options)


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "words"),
    [
        (Matrix(), Matrix(), {"scale_a": 2.0}, gm.DTypeError, "of a product of float32 into float32.*float8, int8"),
        (half(), half(), {"scale_a": 2.0, "dtype": "f64"}, gm.DTypeError, "of a product of float16 into float64"),
        (int8(), int8(), {"scale_a": 2.0, "dtype": "int32"}, gm.DTypeError, "of a product of int8 into int32.*dtype="),
        (
            half(6, 300),
            half(300, 300),
            {"scale_a": Matrix((6, 3)), "scale_b": Matrix((3, 3))},
            gm.DTypeError,
            r"blocks of 128 apply to float8 products, not to float16.*shape \(6,\).*shape \(300,\)",
        ),
        (e4m3(2, 6, 4), e4m3(4, 5), {"scale_a": Matrix((6,))}, gm.ShapeError, "each operand has one factor"),
        (e4m3(6, 4), e4m3(2, 4, 5), {"scale_b": Matrix((5,))}, gm.ShapeError, "each operand has one factor"),
    ],
)
def test_products_without_such_factors(a, b, options, error, words):
    with pytest.raises(error, match=words):
        gm.matmul(a, b, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale_a": 2.0}, "scale_a=2.0 applies to products on a CUDA device only; multiply a by it"),
        ({"scale_b": np.ones(4)}, r"scale_b=array.*multiply b by it first on the CPU"),
        ({"precision": "bogus"}, "precision='bogus': on a CUDA device it can be 'tf32', "),
        ({"precision": np.ones(2)}, "precision=array.*leave it out on the CPU"),
        ({"batch_invariant": "no"}, "batch_invariant='no' must be True or False"),
    ],
)
def test_options_of_devices_are_refused_on_the_cpu(options, words):
    x = np.ones((4, 4), np.float32)
    for call in (gm.matmul, gm.explain):
        for _ in range(2):
            with pytest.raises(gm.ArgumentError, match=words):
                call(x, x, **options)
    assert gm.matmul(x, x, scale_a=None, batch_invariant=False)[0, 0] == 4


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "kind", "steps"),
    [
        ((), (), "outer", (0, 0, 0, 0)),
        ((1,), None, "outer", (0, 0, 0, 0)),
        ((6,), (1, 1), "outer", (1, 0, 0, 0)),
        ((6, 1), (1, 300), "outer", (1, 0, 0, 1)),
        (None, (300,), "outer", (0, 0, 0, 1)),
        ((6, 3), (3, 3), "blocks", (3, 1, 3, 1)),
    ],
)
def test_shapes_of_factors_decide_what_they_mean(a_shape, b_shape, kind, steps):
    x, y = views((6, 300), (300, 300), "e4m3")
    options = Options(
        scale_a=a_shape if a_shape is None else Matrix(a_shape), scale_b=b_shape if b_shape is None else Matrix(b_shape)
    )
    x, y = (z._replace(device="cuda:0") for z in (x, y))
    factors = device_operands.scales(options, x, y, "e4m3", "bf16")
    assert (factors.kind, factors.factor, factors.scaling) == (kind, 1.0, (kind, *steps))
    assert (factors.a is None, factors.b is None) == (a_shape is None, b_shape is None)


def test_blocks_of_one_piece_are_factors_of_rows():
    x, y = (z._replace(device="cuda:0") for z in views((6, 100), (100, 300), "e5m2"))
    outer = device_operands.scales(Options(scale_a=Matrix((6, 1)), scale_b=Matrix((1, 300))), x, y, "e5m2", "bf16")
    assert outer.scaling == ("outer", 1, 0, 0, 1)
    blocks = device_operands.scales(Options(scale_a=Matrix((6, 1)), scale_b=Matrix((1, 3))), x, y, "e5m2", "bf16")
    assert blocks.scaling == ("blocks", 1, 0, 0, 1)


def test_factors_that_are_numbers_are_a_part_of_alpha(problems):
    x, y = views((6, 100), (100, 300), "e4m3")
    factors = device_operands.scales(Options(scale_a=0.5, scale_b=np.float32(3)), x, y, "e4m3", "bf16")
    assert (factors.kind, factors.factor, factors.scaling) == ("", 1.5, None)
    problem = planned(problems, x, y, Options(scale_a=0.5))
    assert (problem.dtype, problem.out, problem.scales, problem.scaled) == ("e4m3", "bf16", "", True)


def test_types_of_eight_bits_reach_the_problem(problems):
    x, y = views((6, 100), (100, 300), "int8")
    for name, out in (("int32", "int32"), ("float16", "f16"), ("bfloat16", "bf16"), ("float32", "f32")):
        problem = planned(problems, x, y, Options(dtype=name, batch_invariant=out == "f16"))
        assert (problem.dtype, problem.out, problem.invariant) == ("int8", out, out == "f16")
        assert problem.alignments[0] == 4
    with pytest.raises(gm.DTypeError, match=r"int8 operands on a100.*\(Hopper\).*has 8\.0; convert.*float16"):
        on_device.planned(*(z._replace(device="a100") for z in (x, y)), Options(dtype="float16"))


def test_an_explanation_names_factors_and_invariance():
    problem = Problem(128, 256, 512, "e4m3", "bf16", device="h200", scales="blocks", invariant=True)
    text = str(explanation.Explanation("wgmma", "idea", {}, "why", problem, 1, (), 0, 2e6, 4800.0, 1e6, "memory"))
    for words in ("e4m3 -> bf16", "128 x 128", "do not depend on m"):
        assert words in text


@pytest.mark.parametrize(
    ("name", "other", "options", "types"),
    [
        ("int32", "int32", {}, ("int32", "", "int32")),
        ("int8", "int8", {}, ("int8", "", "int8")),
        ("uint8", "uint8", {"dtype": "int32"}, ("uint8", "", "int32")),
        ("bool", "bool", {}, ("bool", "", "bool")),
        ("bool", "bool", {"semiring": "or_and"}, ("bool", "", "bool")),
        ("complex64", "complex64", {}, ("f32", "", "f32")),
        ("complex64", "complex64", {"precision": "f32_tensor"}, ("f32", "", "f32")),
        ("complex128", "complex128", {}, ("f64", "", "f64")),
        ("e4m3", "e5m2", {}, ("e4m3", "e5m2", "bf16")),
        ("f16", "f16", {"semiring": "log_sum_exp"}, ("f16", "", "f16")),
    ],
)
def test_every_type_reaches_the_problem(problems, name, other, options, types):
    x, y = views((512, 400), (400, 300), name)[0], views((512, 400), (400, 300), other)[1]
    problem = planned(problems, x, y, Options(**options))
    assert (problem.dtype, problem.b_dtype, problem.out) == types
    doubled = 1 + (types[0] in ("f32", "f64"))  # real products take the place of complex ones
    assert (problem.m, problem.n, problem.k) == (512, 300 * doubled, 400 * doubled)
    ring = options.get("semiring", "")
    assert problem.semiring == ("" if ring == "or_and" else ring)


def test_an_explanation_is_of_the_real_product_that_runs(problems):
    """A by columns is rewritten by rows, and B by columns stays so."""
    x, y = views((512, 400), (400, 300), "complex64", x_strides=(8, 4096), y_strides=(8, 3200), pointer=4104)
    problem = planned(problems, x, y)
    assert (problem.a_layout, problem.b_layout, problem.c_layout) == ("row", "col", "row")
    assert problem.alignments == (16, 16, 16)


def test_an_explanation_checks_a_bias_as_a_product_does():
    x, y = (z._replace(device="cuda:0") for z in views((8, 8), (8, 8)))
    with pytest.raises(gm.ShapeError, match="one for each column"):
        on_device.planned(x, y, Options(bias=Matrix((7,))))


def test_strides_between_elements_are_refused(monkeypatch):
    monkeypatch.setattr(on_device.ordered, "where", lambda pointer: 0)
    odd = Interface((4, 4), strides=(18, 4))
    with pytest.raises(gm.LayoutError, match=r"\(18, 4\) of elements of 4 bytes.*multiples"):
        gm.matmul(odd, odd)
    assert checked.located(View(4, (1, 4), (18, 4), "f32", "cuda:0")).strides == (18, 4)  # of one row


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gm.matmul(Matrix(pointer=4098), Matrix()), "address 0x1012 of elements of 4 bytes"),
        (lambda: gm.matmul(half(), Matrix(element=(2, 16), pointer=4097)), "address 0x1011 of elements of 2 bytes"),
        (lambda: gm.matmul(Matrix(), Matrix(), bias=Matrix((4,), pointer=4097)), "0x1011 of elements of 4 bytes"),
        (lambda: gm.matmul(half(), half(), scale_a=Matrix((4,), pointer=4098)), "0x1012 of elements of 4 bytes"),
        (
            lambda: gm.grouped_matmul(half(), half(3, 4, 4), offsets=Matrix((3,), element=(0, 32), pointer=4097)),
            "address 0x1011 of elements of 4 bytes",
        ),
    ],
)
def test_addresses_between_elements_are_refused(call, words):
    """A kernel that reads them ends with an error of the device, which no later call survives."""
    with pytest.raises(gm.LayoutError, match=rf"{words}.*copy the array"):
        call()
    assert checked.located(View(4098, (0, 4), (16, 4), "f32", "cuda:0")).pointer == 4098  # no element


@pytest.fixture
def problems(monkeypatch):
    """The problems for which products ask a plan, on a device that is not present."""
    asked = []

    class Built(launch.CudaLaunch):
        def __init__(self):
            pass

        def ready(self, *views):
            return views

    def plan(problem):
        asked.append(problem)
        return Plan(SimpleNamespace(one_sided=False, build=None), {}, Built(), "")

    monkeypatch.setattr(prepared.dispatch, "plan", plan)
    table.launches.clear()
    yield asked
    table.launches.clear()


def views(x_shape, y_shape, dtype="f32", x_strides=None, y_strides=None, pointer=4096):
    size = dtypes.get(dtype).size
    return (
        View(pointer, x_shape, x_strides or contiguous(x_shape, size), dtype, "h200"),
        View(4096, y_shape, y_strides or contiguous(y_shape, size), dtype, "h200"),
    )


def planned(problems, x, y, asked=NO_OPTIONS):
    on_device.planned(x, y, asked)
    return problems[-1]


def test_a_problem_says_how_its_operands_lie(problems):
    plain = planned(problems, *views((64, 32), (32, 48)))
    assert (plain.m, plain.n, plain.k, plain.batch) == (64, 48, 32, 1)
    assert (plain.a_layout, plain.b_layout, plain.c_layout) == ("row", "row", "row")
    assert plain.alignments == (16, 16, 16)
    assert plain.device == "h200"
    transposed = planned(problems, *views((64, 32), (32, 48), x_strides=(4, 256), y_strides=(8, 512)))
    assert (transposed.a_layout, transposed.b_layout) == ("col", "any")
    assert transposed.alignments == (16, 8, 16)
    batch = planned(problems, *views((5, 64, 32), (5, 32, 48)))
    assert (batch.m, batch.batch) == (64, 5)
    shared = planned(problems, *views((5, 64, 32), (32, 48)))
    assert (shared.m, shared.batch) == (320, 1)


@pytest.mark.parametrize(
    ("shape", "strides", "pointer", "bytes_"),
    [
        ((64, 33), None, 4096, 4),  # rows of 132 bytes
        ((64, 34), None, 4096, 8),
        ((64, 32), None, 4100, 4),
        ((64, 32), None, 4104, 8),
        ((64, 33), (4, 256), 4096, 16),  # columns of 256 bytes
        ((1, 33), None, 4096, 16),
        ((64, 32), (0, 4), 4096, 1),  # one row repeated: no tensor map describes it
        ((64, 32), (-128, 4), 4096, 1),  # rows reversed
        ((3, 5, 32), (-640, 128, 4), 4096, 1),
        ((3, 5, 32), (648, 128, 4), 4096, 8),  # the batch's stride counts
        ((64, 32), (4, 4), 4096, 4),  # rows one element apart
    ],
)
def test_the_alignment_is_that_of_the_pointer_and_the_strides(problems, shape, strides, pointer, bytes_):
    x, y = views(shape, (*shape[:-2], shape[-1], 48), x_strides=strides, pointer=pointer)
    assert planned(problems, x, y).alignments[0] == bytes_


def test_options_reach_the_problem(problems):
    x, y = views((8, 8), (8, 8))
    found = planned(problems, x, y, Options(bias=2.0, activation="gelu", precision="tf32"))
    assert (found.epilogue, found.precision, found.scaled) == ("bias+gelu", "tf32", False)
    wide = planned(problems, *views((8, 8), (8, 8), "f16"), Options(dtype="float32"))
    assert (wide.dtype, wide.out) == ("f16", "f32")


def test_a_shape_is_planned_once(problems):
    x, y = views((8, 8), (8, 8))
    for pointer in (4096, 8192, 65536):
        on_device.planned(x._replace(pointer=pointer), y, NO_OPTIONS)
    assert len(problems) == 1
    on_device.planned(x._replace(pointer=4100), y, NO_OPTIONS)
    assert len(problems) == 2


class Run:
    """A launch with a workspace, which does nothing."""

    workspace = 64

    def __call__(self, *addresses):
        self.addresses = addresses


def test_a_product_with_a_workspace_is_remembered(monkeypatch):
    """It was planned at every call, which took 48 us, because its scratch memory counted as a converted operand."""
    x, y = (z._replace(device="cuda:0") for z in views((8, 8), (8, 8)))
    run, kept = Run(), []
    served = prepared.TieredLaunch(arrange(x.shape, x.strides, y.shape, y.strides, (8, 8), (32, 4), 4), run)
    monkeypatch.setattr(on_device, "located", lambda view: view)
    monkeypatch.setattr(on_device, "new", lambda a, shape, dtype: y._replace(pointer=1 << 20))
    monkeypatch.setattr(on_device, "scratch", lambda a, size: y._replace(pointer=1 << 21))
    monkeypatch.setattr(on_device, "prepare", lambda call: served)
    monkeypatch.setattr(on_device.array_libraries, "remember", lambda *given: kept.append(given[-1]))
    on_device.product("matmul", x, y, None, NO_OPTIONS, {})
    assert run.addresses[5] == 1 << 21
    assert kept == [served]


@pytest.fixture
def enqueued(monkeypatch):
    """Run a product of views of (6, 300) and (300, 300) in e4m3; return the launch, copies of results and waits."""
    run, copies, waits = Run(), [], []

    def product(out, **options):
        x, y = (z._replace(device="cuda:0") for z in views((6, 300), (300, 300), "e4m3"))
        new = x._replace(pointer=1 << 20, shape=(6, 300), strides=(600, 2), dtype="bf16")
        served = prepared.TieredLaunch(arrange(x.shape, x.strides, y.shape, y.strides, (6, 300), (600, 2), 2), run)
        monkeypatch.setattr(on_device, "new", lambda a, shape, dtype: new)
        monkeypatch.setattr(on_device, "scratch", lambda a, size: y._replace(pointer=1 << 21))
        monkeypatch.setattr(device_operands, "check_capability", lambda *_: None)
        monkeypatch.setattr(on_device, "prepare", lambda call: served)
        monkeypatch.setattr(on_device, "copy", lambda *given: copies.append(given))
        monkeypatch.setattr(on_device.ordered, "wait", lambda stream, other, ordinal: waits.append((stream, other)))
        for module in (on_device, device_operands, option_checks):
            monkeypatch.setattr(module, "view", lambda z: z)
        on_device.product("matmul", x, y, out, Options(**options), options)
        return run, copies, waits

    return product


def factor(pointer, *shape, stream=0):
    return View(pointer, shape, contiguous(shape, 4), "f32", "cuda:0", stream)


def test_the_addresses_of_factors_reach_the_launch(enqueued):
    run, copies, waits = enqueued(None, scale_a=factor(64, 6), scale_b=factor(128, 1, 300, stream=5))
    assert run.addresses[2:] == (1 << 20, 0, 0, 1 << 21, (1.0, 0.0), (64, 128, 0))
    assert waits == [(0, 5), (5, 0)]
    run, copies, _ = enqueued(None, scale_a=0.5, scale_b=factor(128, 300))
    assert run.addresses[6:] == ((0.5, 0.0), (0, 128, 0))
    run, copies, _ = enqueued(None, scale_a=0.5, scale_b=4.0)
    assert run.addresses[6:] == ((2.0, 0.0), ())
    assert copies == []


@pytest.mark.parametrize(("strides", "copied"), [((600, 2), 0), ((2, 12), 1), ((1200, 4), 1)])
def test_factors_of_blocks_write_rows_and_a_copy_turns_them(enqueued, strides, copied):
    out = View(1 << 22, (6, 300), strides, "bf16", "cuda:0")
    run, copies, _ = enqueued(out, scale_a=factor(64, 6, 3), scale_b=factor(128, 3, 3))
    assert run.addresses[2] == (1 << 20 if copied else 1 << 22)
    assert len(copies) == copied
    assert run.addresses[7] == (64, 128, 0)


@pytest.mark.parametrize("streams", [(1, 1, 2, 3), (1, 2, 3, 1), (1, 1, 2, 2), (1, 1, 1, 3), (1, 2, 2, 2)])
def test_c_is_copied_between_what_the_streams_of_the_others_do(monkeypatch, streams):
    """C of another stream is copied before the product adds to it, after copies of what lies there, and C may go."""
    seen = {stream: set() for stream in streams}  # the work before the next one of each stream
    before = {}

    def put(name, stream):
        before[name] = frozenset(seen[stream])
        seen[stream].add(name)

    class Adds:
        workspace = 0

        def __call__(self, *addresses):
            put("product", addresses[3])

    def copied(source, target, size, stream, ordinal):
        put("c" if source == 1 << 20 else "b", stream)

    a, b, out, c = (
        View(place, (8, 8), (32, 4), "f32", "cuda:0", stream)
        for place, stream in zip((1 << 18, (1 << 19) + 4, 1 << 19, 1 << 20), streams, strict=True)
    )
    served = prepared.TieredLaunch(arrange(a.shape, a.strides, b.shape, b.strides, (8, 8), (32, 4), 4), Adds())
    monkeypatch.setattr(on_device, "scratch", lambda a, size: a._replace(pointer=1 << 21))
    monkeypatch.setattr(on_device.ordered, "wait", lambda stream, other, _: seen[stream].update(seen[other]))
    monkeypatch.setattr(on_device.ordered, "copy", copied)
    for stream in seen:
        put(f"earlier on {stream}", stream)
    on_device.enqueue(CheckedCall(a, b, out, Options(alpha=1.0, beta=1.0), old=c), served)
    earlier = {f"earlier on {stream}" for stream in streams}
    assert before["b"] >= {f"earlier on {streams[1]}"}
    assert before["c"] == {*earlier, "b"}  # which lies where c is copied to
    assert before["product"] == {*earlier, "b", "c"}
    assert all(seen[stream] == {*earlier, "b", "c", "product"} for stream in streams)


def test_what_is_copied_may_be_freed_on_its_stream(monkeypatch):
    waits = []
    monkeypatch.setattr(on_device.ordered, "wait", lambda stream, other, _: waits.append((stream, other)))
    monkeypatch.setattr(on_device.ordered, "copy", lambda *_: waits.append("copy"))
    source, target = (View(4096 * (i + 1), (8,), (4,), "f32", "cuda:0", i) for i in range(2))
    on_device.copy(source, target)
    assert waits == [(1, 0), "copy", (0, 1)]


def test_memory_for_a_call_is_of_the_library_of_its_first_operand():
    """Tensors on the CPU stand in for those on a device: a view has what PyTorch allocates, converts and copies by."""
    torch = pytest.importorskip("torch")
    a, out = torch.arange(6.0).reshape(2, 3), torch.empty(3, 2).t()
    x = view(a)
    target, memory, wide = on_device.new(x, (2, 4), "f16"), on_device.scratch(x, 24), on_device.converted(x, "f64")
    assert (target.shape, target.strides, target.dtype) == ((2, 4), (8, 2), "f16")
    assert (target.array.dtype, target.array.data_ptr()) == (torch.float16, target.pointer)
    assert on_device.finished(x, target) is target.array
    assert (memory.array.dtype, memory.shape, memory.array.data_ptr()) == (torch.uint8, (24,), memory.pointer)
    assert wide.array.equal(a.double())
    assert on_device.converted(x, "f32") is x
    on_device.copy(x, view(out))
    assert out.equal(a)


def test_a_view_has_the_array_that_lends_its_memory():
    a = Matrix()
    x = view(a)
    assert x.array is a
    assert (x.device, x.ordinal) == ("cuda:0", 0)
    assert view(Matrix(device=(2, 3))).ordinal == 3
    with pytest.raises(gm.LayoutError, match=r"a Matrix with strides \(16, 4\) cannot be copied into a Capsule"):
        on_device.copy(x, view(Capsule((4, 4), (2, 0), 8192, element=(2, 16))))


@pytest.mark.process
def test_a_product_on_the_cpu_loads_nothing_for_devices():
    code = (
        "import sys, numpy as np, gemmery as gm\n"
        "x = np.eye(3, dtype='f4')\n"
        "gm.matmul(x, x); gm.gemm(2.0, x, x, 1.0, x); gm.matmul(x, x, bias=1.0)\n"
        "print(*(name for name in sys.modules if name.startswith(('gemmery.cuda', 'gemmery.ladder.cuda', 'cuda'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
