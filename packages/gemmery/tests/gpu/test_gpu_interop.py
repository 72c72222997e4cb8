"""CUDA arrays of other libraries: CuPy, `__cuda_array_interface__`, DLPack, and mixtures of them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import gemmery as gm
from gemmery.arrays import dlpack
from gemmery.cuda import driver
from gemmery.cuda.ordered import DeviceArray

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

NAMES = ("float64", "float32", "float16")
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}


def array(shape, name="float32", seed=0):
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(name))


def check(result, a, b, alpha=1.0, beta=0.0, c=None, bias=0.0):
    """`result` is within the bound of alpha a b + beta c + bias."""
    got, x, y = (cupy.asnumpy(cupy.asarray(z)).astype("f8") for z in (result, a, b))
    name = str(cupy.asarray(result).dtype)
    expected, size = alpha * (x @ y) + bias, abs(alpha) * (np.abs(x) @ np.abs(y)) + abs(bias)
    if c is not None:
        expected, size = expected + beta * cupy.asnumpy(c), size + abs(beta) * np.abs(cupy.asnumpy(c))
    sums = min(ROUNDOFF[name], ROUNDOFF["float32"])
    tolerance = 2 * (x.shape[-1] + 4) * sums * size + ROUNDOFF[name] * np.abs(expected) + 2.0**-24 * (name == "float16")
    assert got.shape == expected.shape
    assert np.all(np.abs(got - expected) <= tolerance)


class Interface:
    """An array that offers nothing but `__cuda_array_interface__`."""

    def __init__(self, x, **changes):
        self.owner = x
        self.fields = {**x.__cuda_array_interface__, **changes}

    @property
    def __cuda_array_interface__(self):
        return self.fields


class Exporter:
    """An array that offers nothing but DLPack."""

    def __init__(self, x):
        self.x, self.streams = x, []

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        self.streams.append(options.get("stream"))
        return self.x.__dlpack__(**options)


class Namespaced(Exporter):
    """The same with a namespace of its own."""

    def __array_namespace__(self):
        class Namespace:
            from_dlpack = staticmethod(lambda x: Namespaced(cupy.from_dlpack(x)))

        return Namespace


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 1), (1, 1)),
        ((130, 70), (70, 65)),
        ((300,), (300,)),
        ((20, 3, 4), (20, 4, 5)),
        ((5, 0), (0, 3)),
        ((4, 5), (5,)),
    ],
)
def test_cupy_in_cupy_out(name, left, right):
    a, b = array(left, name, 1), array(right, name, 2)
    for _ in range(2):
        result = gm.matmul(a, b)
        assert type(result) is cupy.ndarray
        assert result.dtype == a.dtype
        check(result, a, b)
        out = cupy.full_like(result, np.nan)
        assert gm.matmul(a, b, out=out) is out
        # A kernel for the shape may take over in between: of many small products its bits are its own.
        check(out, a, b) if len(left) > 2 else np.testing.assert_array_equal(out.get(), result.get())


def test_negative_and_other_strides():
    a, b = array((60, 100), seed=1), array((100, 50), seed=2)
    for x, y in [
        (a[::-1], b),
        (a, b[::-1, ::-1]),
        (a[:, ::-1], b[::-1]),
        (a[::-2, ::2], b[::2]),
        (b.T[::-1], a.T[:, ::-1]),
    ]:
        for _ in range(2):
            check(gm.matmul(x, y), x, y)
            out = cupy.zeros((y.shape[1], x.shape[0]), "f4").T[::-1]
            gm.matmul(x, y, out=out)
            check(out, x, y)
    x = a.copy()[:, :60]
    kept = x.copy()
    gm.matmul(x, x, out=x[::-1])
    check(x[::-1], kept, kept)


def test_options_and_scalars():
    a, b, c = array((40, 30), seed=1), array((30, 20), seed=2), array((40, 20), seed=3)
    check(gm.gemm(2.0, a, b, -1.0, c), a, b, 2.0, -1.0, c)
    kept = c.copy()
    assert gm.gemm(1.0, a, b, 0.5, c, out=c) is c
    check(c, a, b, 1.0, 0.5, kept)
    bias = array((20,), seed=4)
    check(gm.matmul(a, b, bias=bias), a, b, bias=cupy.asnumpy(bias).astype("f8"))
    check(gm.matmul(a, b, bias=np.float32(1.5)), a, b, bias=1.5)
    assert gm.matmul(a.astype("f2"), b.astype("f2"), dtype="float32").dtype == np.float32
    mixed = gm.matmul(a, b.astype("f8"))
    assert mixed.dtype == np.float64
    check(mixed, a, b)
    wide = cupy.zeros((40, 20), "f8")
    gm.matmul(a, b, out=wide)
    check(wide.astype("f4"), a, b)
    assert (gm.matmul(cupy.ones((2, 3), int), cupy.ones((3, 2), int)) == 3).all()
    with pytest.raises(gm.DeviceError, match="cpu"):
        gm.matmul(a, cupy.asnumpy(b))


def test_the_current_stream_of_cupy():
    a, b = array((256, 256), seed=1), array((256, 256), seed=2)
    expected = gm.matmul(a, b)
    x = cupy.zeros_like(a)
    cupy.cuda.Device().synchronize()
    busy = cupy.RawKernel(
        'extern "C" __global__ void busy() { long long t = clock64(); while (clock64() - t < 200000000LL); }', "busy"
    )
    with cupy.cuda.Stream(non_blocking=True) as side:
        busy((1,), (1,), ())
        x[...] = a
        result = gm.matmul(x, b)
        assert not side.done
        side.synchronize()
    assert (result == expected).all()


def test_a_graph_of_cupy_captures_products():
    a, b, c = array((64, 64), seed=1), array((64, 64), seed=2), cupy.zeros((64, 64), "f4")
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        gm.matmul(a, b, out=c)
        stream.begin_capture()
        gm.matmul(a, b, out=c)
        gm.matmul(c, b, out=a)
        graph = stream.end_capture()
        kept = a.copy()
        graph.launch(stream)
        stream.synchronize()
    check(c, kept, b)
    check(a, c, b)


def test_the_cuda_array_interface():
    a, b = array((30, 40), seed=1), array((40, 50), seed=2)
    result = gm.matmul(Interface(a), Interface(b))
    assert type(result) is DeviceArray
    assert (result.shape, result.dtype, result.device) == ((30, 50), "float32", "cuda:0")
    check(result, a, b)
    turned = gm.matmul(Interface(b.T), Interface(a.T, stream=None))
    check(turned, b.T, a.T)
    out = Interface(cupy.zeros((30, 50), "f4"))
    assert gm.matmul(Interface(a), Interface(b), out=out) is out
    check(out.owner, a, b)
    with pytest.raises(gm.LayoutError, match="read-only"):
        gm.matmul(a, b, out=Interface(out.owner, data=(out.owner.data.ptr, True)))
    with pytest.raises(gm.LayoutError, match="multiples"):
        gm.matmul(Interface(a, shape=(4, 4), strides=(18, 4)), b[:4])
    mixed = gm.matmul(Interface(a.astype("f8")), Interface(b))  # a small product widens B as it loads it
    assert mixed.dtype == "float64"
    check(mixed, a, b)


def test_a_graph_captures_products_of_no_library():
    stream = driver.Stream()
    a, b, c = array((64, 48), seed=1), array((48, 32), seed=2), cupy.zeros((64, 32), "f4")
    x, y, z = (Interface(one, stream=stream.handle) for one in (a, b, c))
    cupy.cuda.Device().synchronize()
    with driver.Graph(stream) as graph:
        gm.matmul(x, y, bias=2.5, out=z)
        gm.gemm(1.0, z, Interface(b.T, stream=stream.handle), 1.0, x, out=x)
    for seed in (3, 4):
        a[...] = array((64, 48), seed=seed)
        kept = a.copy()
        cupy.cuda.Device().synchronize()
        graph.launch()
        stream.synchronize()
        check(c, kept, b, bias=2.5)
        check(a, c, b.T, 1.0, 1.0, kept)


def test_streams_of_the_interface_are_waited_for():
    b = array((256, 256), seed=2)
    a, x = array((256, 256), seed=1), cupy.zeros((256, 256), "f4")
    expected = gm.matmul(a, b)
    cupy.cuda.Device().synchronize()
    busy = cupy.RawKernel(
        'extern "C" __global__ void busy() { long long t = clock64(); while (clock64() - t < 200000000LL); }', "busy"
    )
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        busy((1,), (1,), ())
        x[...] = a
    given = Interface(x, stream=side.ptr)
    with cupy.cuda.Stream(non_blocking=True) as other:
        result = gm.matmul(b, given)
        assert not other.done
        other.synchronize()
        assert (result == gm.matmul(b, a)).all()
    again = gm.matmul(given, Interface(b))
    assert (cupy.asarray(again) == expected).all()


def test_dlpack():
    a, b = array((30, 40), seed=1), array((40, 50), seed=2)
    one = Exporter(a)
    result = gm.matmul(one, Exporter(b))
    assert one.streams == [1]
    assert type(result) is DeviceArray
    check(result, a, b)
    check(cupy.from_dlpack(result), a, b)
    named = gm.matmul(Namespaced(a), b)
    assert type(named) is Namespaced
    check(named.x, a, b)


def test_a_device_array_goes_everywhere_and_is_multiplied_again():
    a, b = array((30, 40), seed=1), array((40, 50), seed=2)
    made = gm.matmul(Interface(a), Interface(b))
    kept = cupy.asnumpy(cupy.asarray(made))
    by_dlpack = cupy.from_dlpack(made)
    again = gm.matmul(made, Interface(b.T))
    assert type(again) is DeviceArray
    check(again, kept, b.T)
    del made
    gc.collect()
    others = [gm.matmul(Interface(a), Interface(b * 0)) for _ in range(5)]
    assert np.array_equal(cupy.asnumpy(by_dlpack), kept)
    assert len(others) == 5
    torch = pytest.importorskip("torch")
    half = torch.randn(8, 8, device="cuda").to(torch.bfloat16)
    brain = gm.matmul(Exporter(half), Exporter(half))
    assert torch.from_dlpack(brain).dtype == torch.bfloat16
    with pytest.raises(gm.DTypeError, match="from_dlpack"):
        brain.__cuda_array_interface__  # noqa: B018


def test_a_device_array_may_outlive_its_stream():
    a = array((64, 64), seed=1)
    cupy.cuda.Device().synchronize()
    stream = driver.Stream()
    made = gm.matmul(Interface(a, stream=stream.handle), Interface(a, stream=stream.handle), bias=2.0)
    stream.synchronize()
    del stream
    gc.collect()
    by_dlpack = cupy.from_dlpack(made)
    check(by_dlpack, a, a, bias=2.0)
    del made, by_dlpack
    gc.collect()
    check(gm.matmul(a, a), a, a)


def test_capsules_that_nobody_reads_are_given_back():
    made = gm.matmul(Interface(array((8, 8))), Interface(array((8, 8))))
    before = len(dlpack._exports)
    for versioned in ({}, {"max_version": (1, 0)}):
        capsule = made.__dlpack__(**versioned)
        assert len(dlpack._exports) == before + 1
        del capsule
        assert len(dlpack._exports) == before
    taken = cupy.from_dlpack(made)
    assert len(dlpack._exports) == before + 1
    del taken
    gc.collect()
    assert len(dlpack._exports) == before


def test_mixtures_take_the_kind_of_the_first():
    torch = pytest.importorskip("torch")
    a, b = array((30, 40), seed=1), array((40, 50), seed=2)
    tensor = torch.as_tensor(cupy.asnumpy(b), device="cuda")
    assert type(gm.matmul(a, tensor)) is cupy.ndarray
    assert type(gm.matmul(tensor.T, a.T)) is torch.Tensor
    check(gm.matmul(a, tensor), a, b)
    out = torch.zeros(30, 50, device="cuda")
    assert gm.matmul(a, b, out=out) is out
    check(out, a, b)


def test_two_libraries_on_two_streams_wait_for_each_other():
    torch = pytest.importorskip("torch")
    a, b = array((256, 256), seed=1), array((256, 256), seed=2)
    expected = gm.matmul(a, b)
    cupy.cuda.Device().synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), cupy.cuda.Stream(non_blocking=True) as own:
        torch.cuda._sleep(200_000_000)
        tensor = torch.as_tensor(cupy.asnumpy(b)).to("cuda", non_blocking=True)
        result = gm.matmul(a, tensor)
        tensor.zero_()
        own.synchronize()
        assert (result == expected).all()
