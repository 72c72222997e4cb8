"""Views of memory, arrays that are refused, conversion between types, and overlap."""

from __future__ import annotations

import array
import ctypes
import sys

import ml_dtypes
import numpy as np
import pytest

from gemmery import arrays, dtypes
from gemmery.arrays import dlpack, view
from gemmery.errors import DeviceError, DTypeError, LayoutError

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")


@pytest.mark.parametrize("row", dtypes.BY_NAME.values(), ids=lambda row: row.name)
def test_every_supported_type_has_its_name(row):
    x = np.zeros((2, 3), ml_dtypes.bfloat16 if row.name == "bf16" else row.numpy)
    found = view(x)
    assert found[:4] == (x.ctypes.data, (2, 3), (3 * row.size, row.size), row.name)
    assert found.writable
    assert found.owner is x


def test_strides_of_any_sign_and_broadcasting_are_kept():
    x = np.zeros((4, 6))[::-2, ::3]
    assert view(x).strides == (-96, 24)
    assert view(x).pointer == x.ctypes.data
    assert view(np.broadcast_to(np.zeros(3), (5, 3))).strides == (0, 8)


@pytest.mark.parametrize(
    ("obj", "word"),
    [
        (np.zeros((2, 2), object), "Python objects"),
        (np.zeros((2, 2), np.longdouble), "longdouble|float128"),
        (np.zeros((2, 2), np.clongdouble), "clongdouble|complex256"),
        (np.array(["a"]), "text"),
        (np.array([b"a"]), "bytes"),
        (np.zeros(2, "M8[s]"), "dates"),
        (np.zeros(2, "m8[s]"), "durations"),
        (np.zeros(2, [("x", "f4"), ("y", "f4")]), r"records with the fields x, y; pass one of them, x\['x'\]"),
        (np.zeros(2, "V3"), "3 raw bytes"),
        (np.zeros((2, 2), ml_dtypes.float8_e4m3), "float8_e4m3'"),
        (None, "an operand is a NoneType; pass an array of float64"),
        ("text", "an operand is a str; pass an array of float64"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_other_types_are_refused_with_the_way_out(obj, word):
    with pytest.raises(DTypeError, match=f"(?s)({word}).*float32.*(convert with astype|bool$)"):
        view(obj)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_types_of_eight_bits_are_refused_on_the_cpu(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for x in (np.zeros((2, 2), name), torch.zeros(2, 2).to(getattr(torch, name))):
        with pytest.raises(DTypeError, match=rf"{name} on the CPU.*capability 9\.0.*astype\(float32\).*x\.float"):
            view(x)


def test_foreign_byte_order_is_converted_and_not_written():
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    found = view(x)
    assert not found.writable
    assert np.array_equal(found.owner, x)
    assert found.owner.dtype == np.dtype("=f4")
    assert found.pointer == found.owner.ctypes.data != x.ctypes.data


def test_read_only_memory_says_so():
    x = np.zeros((2, 2))
    x.flags.writeable = False
    assert not view(x).writable
    assert not view(bytes(8)).writable
    assert view(bytearray(8)).writable


def test_a_masked_array_is_refused_and_a_matrix_is_not():
    with pytest.raises(LayoutError, match="filled"):
        view(np.ma.masked_array(np.zeros((2, 2)), mask=np.eye(2)))
    x = np.matrix([[1.0, 2.0]])
    assert view(x).pointer == x.ctypes.data


def test_a_subclass_with_its_own_arithmetic_is_refused():
    class Metres(np.ndarray):
        def __array_ufunc__(self, *args, **options):
            raise AssertionError

    with pytest.raises(LayoutError, match=r"Metres.*asarray"):
        view(np.zeros((2, 2)).view(Metres))


class Frame:
    """An array of labeled columns, such as pandas'."""

    def __array__(self, *args, **options):
        return np.zeros((2, 2))

    def __array_ufunc__(self, *args, **options):
        raise AssertionError


class Sparse:
    """A sparse matrix, such as SciPy's."""

    nnz = 1

    def toarray(self):
        raise AssertionError


class NullInterface:
    __array_interface__ = {"data": (0, False), "shape": (2, 2), "typestr": "<f4", "version": 3}  # noqa: RUF012


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (Frame(), r"Frame defines its own arithmetic.*x\.to_numpy\(\)"),
        (Sparse(), r"Sparse is sparse.*x\.toarray\(\)"),
        ([[1, 2], [3]], "NumPy cannot make an array of a list"),
        (NullInterface(), "NullInterface.*NULL"),
        ((ctypes.c_double * 3).from_address(0), "the buffer of a c_double_Array_3 has a null pointer"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_objects_that_are_not_their_memory_are_refused_by_name(obj, words):
    with pytest.raises(LayoutError, match=words):
        view(obj)


def test_no_elements_need_no_memory():
    assert view((ctypes.c_double * 0).from_address(0)).shape == (0,)


def test_a_scalar_of_numpy_is_read():
    assert view(np.float32(1.5))[1:4] == ((), (), "f32")


def test_the_buffer_protocol():
    x = array.array("d", [1.0, 2.0])
    assert view(x)[1:4] == ((2,), (8,), "f64")
    assert view(x).pointer == x.buffer_info()[0]
    assert view(b"abc")[1:4] == ((3,), (1,), "uint8")
    assert view(memoryview(np.zeros((3, 4), np.float16)))[1:4] == ((3, 4), (8, 2), "f16")
    assert view((ctypes.c_int32 * 3)())[1:4] == ((3,), (4,), "int32")


def test_lists_are_arrays_of_their_own():
    found = view([[1, 2], [3, 4]])
    assert found[1:4] == ((2, 2), (16, 8), "int64")
    assert not found.writable


class Interface:
    def __init__(self, x):
        self.owner = x
        self.__array_interface__ = x.__array_interface__


def test_the_array_interface_is_read_in_place():
    x = np.zeros((3, 4), np.float32)[:, ::2]
    assert view(Interface(x))[:4] == view(x)[:4]
    assert view(Interface(x)).writable


class Capsule:
    """An exporter of DLPack 1.0, or of the version before it."""

    def __init__(self, x, old=False, device=(1, 0)):
        self.x, self.old, self.device = x, old, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.old:
            if options:
                raise TypeError("unexpected keyword argument")
            return self.x.__dlpack__()
        return self.x.__dlpack__(**options)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64", "int8", "uint64"])
def test_dlpack_is_read_in_place(dtype):
    x = np.zeros((4, 6), dtype)[1:, ::2]
    assert view(Capsule(x))[:4] == view(x)[:4]
    assert view(Capsule(x)).writable
    assert view(Capsule(x, old=True))[:4] == view(x)[:4]


def test_dlpack_that_is_read_only_or_cannot_say_is_not_written():
    x = np.zeros((2, 3))
    assert not view(Capsule(x, old=True)).writable
    x.flags.writeable = False
    assert not view(Capsule(x)).writable


def test_the_memory_of_a_capsule_lives_as_long_as_the_view():
    found = view(Capsule(np.full((300, 300), 7.0)))
    others = [np.zeros((300, 300)) for _ in range(5)]
    assert np.all(arrays.memory(found) == 7.0)
    assert len(others) == 5


class HandMade:
    """A capsule with any fields, as a library in C makes it: with an offset, without strides."""

    def __init__(self, x, strides=None, offset=0, versioned=False, **fields):
        count = x.ndim
        self.kept = (x, strides and (ctypes.c_int64 * count)(*strides))
        tensor = dlpack.DLTensor(x.ctypes.data - offset, 1, 0, count, 2, 8 * x.itemsize, 1, None, self.kept[1], offset)
        shape = fields.pop("shape", x.shape)
        tensor.shape = shape and (ctypes.c_int64 * count)(*shape)
        for name, value in fields.items():
            setattr(tensor, name, value)
        self.managed = dlpack.ManagedTensor(tensor)
        self.name = b"dltensor"
        if versioned:
            self.managed = dlpack.ManagedTensorVersioned(versioned if versioned is not True else (1, 0), tensor=tensor)
            self.name = b"dltensor_versioned"

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self):
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(self.managed), self.name, None)


@pytest.mark.parametrize("row", dtypes.DTYPES, ids=lambda row: row.name)
def test_a_capsule_says_which_type_its_elements_have(row):
    capsule = dlpack.capsule(arrays.View(4096, (2,), (row.size,), row.name, "cuda:0"), 2, 0, versioned=True)
    tensor, _ = dlpack._tensor(capsule, "capsule")
    assert (dlpack._element(tensor), tensor.bits) == (row.numpy, 8 * row.size)


def test_the_fields_of_a_capsule():
    x = np.arange(12.0).reshape(3, 4)
    assert view(HandMade(x))[:4] == (x.ctypes.data, (3, 4), (32, 8), "f64")
    assert view(HandMade(x, strides=(1, 3), offset=16))[:4] == (x.ctypes.data, (3, 4), (8, 24), "f64")
    assert view(HandMade(x.astype(np.int16), code=4)).dtype == "bf16"
    for wrong in (HandMade(x, lanes=2), HandMade(x, code=3), HandMade(x.astype(np.int8), code=2)):
        with pytest.raises(DTypeError):
            view(wrong)


@pytest.mark.parametrize(("device", "name"), [((10, 1), "rocm"), ((99, 0), "DLPack type 99")])
def test_memory_elsewhere_is_refused_with_the_way_out(device, name):
    with pytest.raises(DeviceError, match=rf"'{name}'.*on the CPU and on CUDA devices.*x\.cpu\(\)"):
        view(Capsule(np.zeros((2, 2)), device=device))


def test_pinned_memory_is_the_cpus():
    x = np.zeros((2, 3))
    assert view(Capsule(x, device=(3, 0)))[:5] == view(x)[:5]


def test_dlpack_of_bools():
    x = np.eye(2, dtype=bool)
    assert view(Capsule(x))[:4] == view(x)[:4]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"code": 8}, "'float8_e4m3' is not supported"),
        ({"code": 10}, "float8_e4m3fn on the CPU"),
        ({"code": 12}, "float8_e5m2 on the CPU"),
        ({"code": 0, "bits": 4}, "'int4' is not supported"),
        ({"code": 6, "bits": 1}, "'bool of 1 bits' is not supported"),
        ({"code": 99}, "'DLPack code 99 of 8' is not supported"),
    ],
)
def test_dlpack_of_unsupported_types(fields, words):
    with pytest.raises(DTypeError, match=words):
        view(HandMade(np.zeros((2, 2), np.int8), **fields))


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"data": None}, LayoutError, r"HandMade, of shape \(3, 4\), has a null pointer"),
        ({"data": None, "byte_offset": 4096}, LayoutError, "null pointer"),
        ({"shape": None}, LayoutError, "2 dimensions and no shape: it needs a shape, of at most 64 dimensions"),
        ({"ndim": 1_000_000}, LayoutError, "1000000 dimensions and a shape.*at most 64"),
        ({"strides": (2**60, 1)}, LayoutError, r"a stride of less than 2\*\*63 bytes"),
        ({"ndim": -1}, LayoutError, "-1 dimensions"),
        ({"shape": (3, -4)}, LayoutError, r"shape \(3, -4\).*dimensions that are not negative"),
        ({"device_type": 2}, DeviceError, r"says \(1, 0\), and its capsule \(2, 0\)"),
    ],
)
def test_a_capsule_that_cannot_be_read_is_refused(fields, error, words, versioned):
    with pytest.raises(error, match=words):
        view(HandMade(np.zeros((3, 4)), versioned=versioned, **fields))


def test_a_capsule_of_no_elements_needs_no_memory():
    assert view(HandMade(np.zeros((0, 4)), data=None)).shape == (0, 4)
    assert view(HandMade(np.zeros(()), shape=None)).shape == ()


def test_versions_of_dlpack():
    x = np.arange(12.0).reshape(3, 4)
    assert view(HandMade(x, versioned=(1, 3)))[:4] == view(x)[:4]
    with pytest.raises(LayoutError, match=r"HandMade exports DLPack 2\.0.*below 2\.0.*max_version=\(1, 0\)"):
        view(HandMade(x, versioned=(2, 0)))


def test_a_capsule_is_read_once_and_must_be_one():
    class Same:
        def __init__(self, x, capsule):
            self.x, self.capsule = x, capsule

        __dlpack_device__ = Capsule.__dlpack_device__
        device = (1, 0)

        def __dlpack__(self, **_):
            return self.capsule

    x = np.zeros((2, 3))
    for versioned in (None, (1, 0)):
        capsule = x.__dlpack__(max_version=versioned)
        np.from_dlpack(Same(x, capsule))
        with pytest.raises(LayoutError, match="capsule of Same has been consumed"):
            view(Same(x, capsule))
    with pytest.raises(LayoutError, match="returned a int, which is no DLPack capsule"):
        view(Same(x, 5))


def test_an_exporter_that_refuses_is_quoted():
    class Closed:
        __dlpack_device__ = Capsule.__dlpack_device__
        device = (1, 0)

        def __dlpack__(self, **_):
            raise BufferError("nothing for you\nat all")

    with pytest.raises(LayoutError, match=r"Closed does not export its memory by DLPack: nothing for you$"):
        view(Closed())


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("name", [*dtypes.NAMES, "bool"])
def test_exported_memory_is_read_as_it_is(name, versioned):
    memory = view(np.zeros((3, 4), arrays.numpy_dtype(name))[:, ::2])
    found = view(Capsule(dlpack.Exported(memory), old=not versioned))
    assert found[:5] == memory[:5]
    assert found.writable == versioned
    del found
    assert dlpack._exports == {}


@pytest.mark.parametrize("target", ["f64", "f32", "f16", "bf16", "complex64", "complex128"])
@pytest.mark.parametrize("source", ["f64", "f32", "f16", "bf16", "int8", "uint64"])
def test_conversion_rounds_as_numpy_does(source, target):
    values = np.array([[0.0, 1.0, 100.0], [3.0, 77.0, 5.0]])
    if dtypes.get(source).kind == "f":
        values = np.concatenate((values, [[-0.0, 1 / 3, 2.0**-20], [np.inf, -np.inf, np.nan]]))
    x = values.astype(arrays.numpy_dtype(source))[:, ::-1]
    with np.errstate(over="ignore"):
        expected = x.astype(arrays.numpy_dtype(target))
    made = arrays.converted(view(x), target)
    assert made.strides == arrays.contiguous(x.shape, dtypes.get(target).size)
    as_numpy = arrays.memory(made).view(arrays.numpy_dtype(target))
    assert np.array_equal(as_numpy.astype(np.complex128), expected.astype(np.complex128), equal_nan=True)


def test_narrowing_to_bfloat16_rounds_to_even_like_ml_dtypes():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    x = np.concatenate((bits, ties)).view(np.float32)
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    assert np.array_equal(arrays.memory(arrays.converted(view(x), "bf16")), expected.view(np.uint16))


def test_store_casts_into_any_strides_and_nowhere_else():
    x = np.zeros((5, 8), np.float16)
    arrays.store(view(np.arange(6.0).reshape(3, 2)), view(x[1:4, 1::4]))
    assert np.array_equal(x[1:4, 1::4], [[0, 1], [2, 3], [4, 5]])
    assert np.count_nonzero(x) == 5


def test_overlap_is_that_of_the_memory_spanned():
    x = np.zeros((10, 10))
    assert arrays.overlap(view(x[:5]), view(x[4:]))
    assert not arrays.overlap(view(x[:5]), view(x[5:]))
    assert arrays.overlap(view(x[::-1][:6]), view(x[4:5]))
    assert not arrays.overlap(view(x[::-1][:5]), view(x[:5]))
    assert not arrays.overlap(view(x[:0]), view(x))
    assert arrays.same(view(x), view(x))
    assert not arrays.same(view(x), view(x[:9]))


def test_repeated_elements_are_seen():
    x = np.zeros((4, 6))
    for fine in (
        x,
        x.T,
        x[::-1, ::2],
        x[:0],
        np.zeros((1, 5)),
        np.zeros((0, 3)),
        np.broadcast_to(0.0, (0, 4)),
        x.reshape(2, 2, 6).transpose(2, 0, 1),
    ):
        assert not arrays.repeats(view(fine))
    one = np.zeros((1, 6))
    for shared in (np.broadcast_to(one, (4, 6)), np.lib.stride_tricks.sliding_window_view(x, 3, axis=1)):
        assert arrays.repeats(view(shared))


def test_a_result_has_the_kind_of_the_first_operand_that_is_not_plain():
    plain, buffer, matrix = np.zeros(2), memoryview(bytes(2)), np.matrix([[1.0]])
    assert arrays.kind(plain, buffer) is buffer
    assert arrays.kind([1], plain) is not buffer
    assert arrays.kind(matrix, buffer) is matrix
    its_view = arrays.empty(buffer, (2, 3), "f32")
    made = its_view.owner
    assert its_view[1:4] == ((2, 3), (12, 4), "f32")
    assert isinstance(arrays.wrap(buffer, made), memoryview)
    assert isinstance(arrays.wrap(matrix, made), np.matrix)
    assert arrays.wrap(plain, made) is made
    assert type(arrays.wrap(plain, np.zeros((), "f4"))) is np.float32


def test_bfloat16_in_numpy_needs_ml_dtypes(monkeypatch):
    monkeypatch.delitem(sys.modules, "ml_dtypes")
    with pytest.raises(DTypeError, match="import ml_dtypes"):
        arrays.numpy_dtype("bf16")
    assert arrays.scratch((2, 2), "bf16").strides == (4, 2)


def test_an_export_can_be_freed_when_the_interpreter_ends(monkeypatch):
    address = 1 << 40
    exports = dlpack._exports
    exports[address] = (object(),)
    monkeypatch.setattr(dlpack, "_exports", None)  # what the end of the interpreter does to a module's globals
    dlpack._done(address)
    assert address not in exports
