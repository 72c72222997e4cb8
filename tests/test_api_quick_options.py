"""The fast path for products with options, with a stand-in for PyTorch and for the launches."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import gemmery as gm
from gemmery.api import quick, quick_options
from gemmery.arrays import View
from gemmery.keywords import NO_OPTIONS, Options


class OnDevice:
    """A stand-in for a tensor on a device, with what the path reads."""

    layout = "strided"

    def __init__(self, pointer, shape=(3, 3), dtype="float32", **state):
        self.pointer, self.shape, self.dtype, self.version = pointer, shape, dtype, 0
        self.requires_grad, self.neg = state.get("requires_grad", False), state.get("neg", False)

    def data_ptr(self):
        if self.pointer is None:
            raise RuntimeError("no memory")
        return self.pointer

    def get_device(self):
        return 0

    def stride(self):
        return (3, 1)[-len(self.shape) :]

    def is_neg(self):
        return self.neg

    def to(self, dtype):
        return OnDevice(self.pointer + 1, self.shape, dtype)

    def new_empty_strided(self, shape, strides, dtype):
        return OnDevice(1 << 20, shape, dtype)

    def new_empty(self, shape, dtype):
        return OnDevice(1 << 21, shape, dtype)


class Launches:
    """Launches that keep their arguments."""

    def __init__(self, workspace=0, kept=(False, False)):
        self.workspace, self.kept, self.calls = workspace, kept, []

    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setattr(quick_options, "_CALLS", {})
    c = SimpleNamespace(
        _is_tracing=lambda: False,
        _len_torch_dispatch_stack=lambda: 0,
        _are_functorch_transforms_active=lambda: False,
        _cuda_getCurrentRawStream=lambda _: 7,
    )
    graph = SimpleNamespace(increment_version=lambda x: setattr(x, "version", x.version + 1))
    return SimpleNamespace(
        _C=c,
        Tensor=OnDevice,
        nn=SimpleNamespace(Parameter=OnDevice),
        uint8="uint8",
        is_grad_enabled=lambda: True,
        autograd=SimpleNamespace(forward_ad=SimpleNamespace(_current_level=-1), graph=graph),
    )


def known(options, out=None, run=None, apart=((-36, 36),) * 5, parts=(0, 0)):
    """Let the path know a call with tensors at 1024 and 2048."""
    tensors = (OnDevice, OnDevice)
    key, used, _ = quick_options._key(OnDevice(1024), OnDevice(2048), out, options, tensors, parts)
    run = run or Launches()
    served = SimpleNamespace(countdown=0, run=run)
    count = len(used) - (out is not None)
    call = quick_options.KnownCall(served, (3, 3), (3, 1), "bfloat16", "float32", (0.5, 0.0), apart[:count])
    quick_options._CALLS[key] = call
    return run


def test_a_call_is_remembered_for_others_like_it(torch, monkeypatch):
    torch.bfloat16, torch.float32, torch.float64 = "bfloat16", "float32", "float64"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(quick, "OPTION_PATHS", {})
    monkeypatch.setattr(
        quick_options.arrays,
        "view",
        lambda z: View(z.pointer, z.shape, tuple(4 * step for step in z.stride()), "f32", "cuda:0"),
    )
    run, out = Launches(), OnDevice(4096)
    target = View(4096, (3, 3), (6, 2), "bf16", "cuda:0")
    served = SimpleNamespace(countdown=0, run=run)
    options = Options(bias=row(64), scale_b=row(96))
    for result in (None, out):
        quick_options.remember(OnDevice(1024), OnDevice(2048), result, options, target, served, (2.0, 0.0))
    assert len(quick_options._CALLS) == 2
    path = quick.OPTION_PATHS[OnDevice]
    new = path(OnDevice(8192), OnDevice(2048), None, Options(bias=row(640), scale_b=row(960)))
    assert (new.dtype, new.shape) == ("bfloat16", (3, 3))
    assert path(OnDevice(8192), OnDevice(2048), out, options) is out
    assert [call[:5] for call in run.calls] == [(8192, 2048, 1 << 20, 7, 640), (8192, 2048, 4096, 7, 64)]
    assert path(OnDevice(4096 + 16), OnDevice(2048), out, options) is None
    assert path(OnDevice(4096 + 18), OnDevice(2048), out, options) is None  # at another alignment
    quick_options.remember(OnDevice(1024), OnDevice(2048), None, Options(bias=1.0), target, served, (1.0, 0.0))
    assert len(quick_options._CALLS) == 2


def row(pointer, **fields):
    return OnDevice(pointer, (3,), **fields)


def test_matmul_asks_this_path_first(monkeypatch):
    asked = []

    def path(*arguments):
        asked.append(arguments)
        return "result"

    monkeypatch.setitem(quick.OPTION_PATHS, OnDevice, path)
    monkeypatch.setitem(quick.FAST_PATHS, OnDevice, lambda *_: None)
    a, b = OnDevice(1024), OnDevice(2048)
    assert gm.matmul(a, b, scale_a=2.0, bias=b, batch_invariant=True) == "result"
    assert asked == [(a, b, None, Options(bias=b, scale_a=2.0, batch_invariant=True))]
    assert gm.matmul(a, b, a) == "result"
    assert asked[1] == (a, b, a, NO_OPTIONS)


def test_addresses_of_bias_and_factors_reach_the_launch(torch):
    multiply = quick_options._path(torch)
    options = Options(bias=row(64), activation="relu", scale_a=row(96), scale_b=0.5)
    run = known(options)
    result = multiply(OnDevice(4096), OnDevice(8192), None, options._replace(bias=row(128), scale_a=row(160)))
    assert (result.dtype, result.shape) == ("bfloat16", (3, 3))
    assert run.calls == [(4096, 8192, 1 << 20, 7, 128, 0, (0.5, 0.0), (160, 0, 0))]
    run = known(Options(scale_b=row(96)), run=Launches(workspace=64))
    multiply(OnDevice(1024), OnDevice(2048), None, Options(scale_b=row(96)))
    assert run.calls == [(1024, 2048, 1 << 20, 7, 0, 1 << 21, (0.5, 0.0), (0, 96, 0))]


def test_a_product_without_options_is_served_too(torch):
    run = known(NO_OPTIONS)
    quick_options._path(torch)(OnDevice(1024), OnDevice(2048), None, NO_OPTIONS)
    assert run.calls == [(1024, 2048, 1 << 20, 7, 0, 0, (0.5, 0.0), ())]


@pytest.mark.parametrize("kept", [(False, True), (False, False)])
def test_addresses_of_parts_reach_the_launch_that_reads_them(torch, kept):
    options, multiply = Options(precision="f32_tensor"), quick_options._path(torch)
    run = known(options, run=Launches(kept=kept), parts=(512, 256))
    assert multiply(OnDevice(1024), OnDevice(2048), None, options) is None  # the arrays themselves
    assert multiply(OnDevice(1024), OnDevice(2048), None, options, (0, 256)) is None
    assert multiply(OnDevice(1024), OnDevice(2048), None, options, (768, 128)) is not None
    assert [call[7] for call in run.calls] == [(0, 128, 0) if any(kept) else ()]


def test_a_bias_of_another_type_is_converted_at_each_call(torch):
    options = Options(bias=row(64, dtype="bfloat16"))
    run = known(options)
    quick_options._path(torch)(OnDevice(1024), OnDevice(2048), None, options)
    assert run.calls[0][4] == 65


def test_out_is_returned_and_counted_as_written(torch):
    out, options = OnDevice(4096), Options(activation="gelu")
    run = known(options, out)
    assert quick_options._path(torch)(OnDevice(1024), OnDevice(2048), out, options) is out
    assert (out.version, run.calls[0][2]) == (1, 4096)


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "silu"},
        {"scale_b": 2.0},
        {"scale_a": OnDevice(96, (3, 1))},
        {"bias": row(64, dtype="float16")},
        {"bias": 1.0},
        {"batch_invariant": True},
        {"batch_invariant": 1},
        {"dtype": "float32"},
        {"dtype": []},
        {"precision": "tf32"},
        {"threads": 1},
        {"scale_b": "big"},
        {"bias": row(0)},
        {"bias": row(None)},
        {"bias": row(64, requires_grad=True)},
        {"scale_a": row(96, neg=True)},
    ],
)
def test_other_calls_are_left_to_the_slow_path(torch, change):
    options = Options(bias=row(64), activation="relu", scale_a=row(96), scale_b=0.5)
    run, multiply = known(options), quick_options._path(torch)
    assert multiply(OnDevice(1024), OnDevice(2048), None, options._replace(**change)) is None
    assert run.calls == []
    assert multiply(OnDevice(1024), OnDevice(2048), None, options) is not None


def test_an_out_that_overlaps_what_is_read_is_left_to_the_slow_path(torch):
    options, multiply = Options(bias=row(64)), quick_options._path(torch)
    run = known(options, OnDevice(4096))
    for a, b, bias in ((4096 + 16, 2048, 64), (1024, 4096 - 32, 64), (1024, 2048, 4096)):
        assert multiply(OnDevice(a), OnDevice(b), OnDevice(4096), Options(bias=row(bias))) is None
    assert run.calls == []
    assert multiply(OnDevice(1024), OnDevice(2048), OnDevice(4096), options) is not None


def test_arrays_that_are_no_tensors_are_left_to_the_slow_path(torch):
    known(NO_OPTIONS)
    multiply = quick_options._path(torch)
    assert multiply(OnDevice(1024), object(), None, NO_OPTIONS) is None
    assert multiply(OnDevice(1024), OnDevice(2048), object(), NO_OPTIONS) is None


def test_states_of_pytorch_are_left_to_the_slow_path(torch):
    known(NO_OPTIONS)
    torch._C._is_tracing = lambda: True
    assert quick_options._path(torch)(OnDevice(1024), OnDevice(2048), None, NO_OPTIONS) is None
