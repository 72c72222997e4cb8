"""Checks and plans of products on a CUDA device before they touch it; the operands here have no memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import gemmery as gm
from gemmery.api import on_device, prepared
from gemmery.api.options import NO_OPTIONS, Options
from gemmery.arrange import arrange
from gemmery.arrays import View, contiguous
from gemmery.cuda import launch
from gemmery.dispatch import Plan
from test_arrays_cuda import Capsule, Interface


class Matrix(Capsule):
    """A float32 array on cuda:0."""

    def __init__(self, shape=(4, 4), device=(2, 0), pointer=4096):
        super().__init__(shape, device, pointer)


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
        (lambda a, x: gm.matmul(a, a, dtype="complex64"), gm.DTypeError, "pass float64 or float32"),
        (lambda a, x: gm.matmul(a, a, dtype="float16"), gm.DTypeError, "cannot represent every float32 value"),
        (lambda a, x: gm.matmul(a, a, activation="tanh"), gm.ArgumentError, "relu, gelu, silu"),
        (lambda a, x: gm.matmul(a, Matrix((3, 4))), gm.ShapeError, "must be equal"),
        (lambda a, x: gm.matmul(a, a, out=Matrix((4, 5))), gm.ShapeError, "out of shape"),
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


def test_types_that_only_the_cpu_multiplies(monkeypatch):
    monkeypatch.setattr(on_device.ordered, "where", lambda pointer: 0)
    whole = Interface((4, 4), "<i4")
    with pytest.raises(gm.DTypeError, match=r"int32 on cuda:0: devices multiply float64.*the CPU, which"):
        gm.matmul(whole, whole)


def test_strides_between_elements_are_refused(monkeypatch):
    monkeypatch.setattr(on_device.ordered, "where", lambda pointer: 0)
    odd = Interface((4, 4), strides=(18, 4))
    with pytest.raises(gm.LayoutError, match=r"\(18, 4\) of elements of 4 bytes.*multiples"):
        gm.matmul(odd, odd)
    assert on_device._located(View(1, (1, 4), (18, 4), "f32", "cuda:0")).strides == (18, 4)  # of one row


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
        return Plan(None, {}, Built(), "")

    monkeypatch.setattr(prepared.dispatch, "plan", plan)
    prepared.specialised.cache_clear()
    prepared.described.cache_clear()
    yield asked
    prepared.specialised.cache_clear()


def views(x_shape, y_shape, dtype="f32", x_strides=None, y_strides=None, pointer=4096):
    size = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}[dtype]
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
    x, y = views((8, 8), (8, 8))
    run, kept = Run(), []
    served = prepared.TieredLaunch(arrange(x.shape, x.strides, y.shape, y.strides, (8, 8), (32, 4), 4), run)
    monkeypatch.setattr(on_device, "_located", lambda view: view)
    monkeypatch.setattr(on_device, "_ordinal", lambda view: 0)
    monkeypatch.setattr(on_device, "_new", lambda a, shape, dtype, x: (a, y._replace(pointer=1 << 20)))
    monkeypatch.setattr(on_device, "_scratch", lambda a, size, x, stream: (object(), y._replace(pointer=1 << 21)))
    monkeypatch.setattr(on_device, "prepared", lambda *_: served)
    monkeypatch.setattr(on_device.quick, "remember", lambda *given: kept.append(given[-1]))
    on_device.product("matmul", "a", "b", x, y, None, NO_OPTIONS)
    assert run.addresses[5] == 1 << 21
    assert kept == [served]


def test_a_product_on_the_cpu_loads_nothing_for_devices():
    code = (
        "import sys, numpy as np, gemmery as gm\n"
        "x = np.eye(3, dtype='f4')\n"
        "gm.matmul(x, x); gm.gemm(2.0, x, x, 1.0, x); gm.matmul(x, x, bias=1.0)\n"
        "print(*(name for name in sys.modules if name.startswith(('gemmery.cuda', 'gemmery.ladder.cuda', 'cuda'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
