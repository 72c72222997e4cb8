"""Element types by any spelling."""

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes
from gemmery_lab import asked


@pytest.mark.parametrize("row", [dtypes.get(name) for name in dtypes.NAMES], ids=lambda row: row.name)
def test_short_and_long_names_in_any_case(row):
    for spelling in (row.name, row.numpy, row.name.upper(), row.numpy.capitalize(), f" {row.numpy} "):
        assert dtypes.resolve(spelling) == row.name


@pytest.mark.parametrize("row", dtypes.DTYPES, ids=lambda row: row.name)
def test_rows_say_of_numbers_what_numpy_does(row):
    kind = np.dtype(getattr(ml_dtypes, row.numpy, row.numpy))
    assert (kind.itemsize, np.dtype(row.stored).itemsize) == (row.size, row.size)
    if kind.kind != "V" and not hasattr(ml_dtypes, row.numpy):
        assert (row.stored, kind.kind) == (row.numpy, row.kind)
    if row.kind in "fc":
        limits = ml_dtypes.finfo(kind)
        assert (row.unit_roundoff, row.fraction) == (float(limits.eps) / 2, limits.nmant)
        assert 2.0**row.normal == float(limits.smallest_normal)


def test_short_codes_mean_what_they_mean_to_numpy():
    for code, name in dtypes._CODES.items():
        if code in ("c64", "c128"):  # none of NumPy's
            continue
        assert np.dtype(code).name == dtypes.get(name).numpy


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("i8", "'int64' or 'int8'"),
        ("u8", "'uint64' or 'uint8'"),
        ("U8", "'uint64' or 'uint8'"),
        ("i4", "'int32'"),
        ("u2", "'uint16'"),
        ("i1", "'int8'"),
        ("i16", "'int16'"),
        ("u64", "'uint64'"),
    ],
)
def test_a_code_of_bits_or_bytes_is_refused_with_both_meanings(code, names):
    x = np.ones((2, 2), np.int8)
    for call in (
        lambda: dtypes.resolve(code),
        lambda: gm.matmul(x, x, dtype=code),
        lambda: gm.warm([code]),
        lambda: asked.element_type(code, "cpu"),
    ):
        with pytest.raises(gm.GemmeryError, match=f"counts bytes in NumPy .* bits elsewhere .*: write {names}$"):
            call()


def test_numpys_names_are_printed():
    x = np.ones((2, 2), np.int8)
    assert "int8 -> int8" in str(gm.explain(x, x))
    with pytest.raises(gm.DTypeError, match=r"Supported: f64, .*, int8, int16"):
        gm.matmul(x, x, dtype="float99")


def test_only_what_is_known_resolves():
    assert dtypes.resolve("tf32", ("f32",), ("tf32",)) == "tf32"
    assert dtypes.resolve("float32", ("f32",), ("tf32",)) == "f32"
    with pytest.raises(gm.DTypeError, match="dtype 3: write the name of a type, such as 'f32'"):
        dtypes.resolve(3)
    with pytest.raises(gm.DTypeError, match="'float64' is not supported"):
        dtypes.resolve("float64", ("f32", "f16"))
    with pytest.raises(gm.DTypeError, match=r"Supported: f32, tf32$"):
        dtypes.resolve("", ("f32",), ("tf32",))


@pytest.mark.parametrize(
    ("typed", "meant"), [("flaot32", "f32"), ("fp16", "f16"), ("f33", "f32"), ("bfloat", "bf16"), ("unit8", "uint8")]
)
def test_a_misspelled_name_brings_a_suggestion(typed, meant):
    with pytest.raises(gm.DTypeError, match=f"did you mean '{meant}'"):
        dtypes.resolve(typed)


@pytest.mark.parametrize("spelling", ["f32", "F32", "float32", "f4", "<f4", np.float32, np.dtype("f4"), "single"])
def test_matmul_takes_every_spelling(spelling):
    x = np.ones((2, 2), np.int8)
    assert gm.matmul(x, x, dtype=spelling).dtype == np.float32


def test_matmul_takes_other_names():
    x = np.ones((2, 2), np.int8)
    for spelling, wanted in [
        ("f16", "float16"),
        ("complex64", "complex64"),
        ("int32", "int32"),
        ("int8", "int8"),
        ("<i8", "int64"),
        (int, "int64"),
    ]:
        assert gm.matmul(x, x, dtype=spelling).dtype == wanted
    for spelling in ("bf16", "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert gm.matmul(x, x, dtype=spelling).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("spelling", ["f33", "U5", object, "object", 3.5, [], "", "torch.quint8", "float128", "tf32"])
def test_matmul_refuses_what_is_no_element_type(spelling):
    x = np.ones((2, 2), np.int8)
    with pytest.raises(gm.DTypeError, match="not supported"):
        gm.matmul(x, x, dtype=spelling)
