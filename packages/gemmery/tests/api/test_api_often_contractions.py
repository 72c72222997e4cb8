"""Contractions that come often, which the compiled entry takes: values, what stays Python's, signatures."""

from __future__ import annotations

import ctypes
import inspect
import pickle

import numpy as np
import pytest

import gemmery as gm
from gemmery.api import contractions, repeats
from gemmery.cpu import entry, entry_layout, entry_table


def random_array(shape, dtype=np.float32, seed=0):
    """Small integers, so that every sum is exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def often(call):
    """Call a function until the compiled entry may have been told of it, and return the last result."""
    for _ in range(3 * contractions._SAMPLED):
        result = call()
    return result


COMMON = {
    "matrices": ("ij,jk->ik", (5, 7), (7, 3)),
    "swapped": ("ij,jk->ki", (5, 7), (7, 3)),
    "transposed": ("ij,kj->ik", (5, 7), (3, 7)),
    "batch innermost": ("ac,abc->cb", (4, 6), (4, 5, 6)),
    "rows": ("ij,ij->i", (5, 7), (5, 7)),
    "all": ("ij,ij->", (5, 7), (5, 7)),
    "batch": ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    "heads": ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 4, 5)),
    "outer": ("i,j->ij", (4,), (5,)),
    "vectors": ("i,i->", (9,), (9,)),
    "broadcast": ("...ij,...jk->...ik", (2, 1, 3, 4), (3, 4, 5)),
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("expression", "left", "right"), COMMON.values(), ids=COMMON)
def test_a_contraction_that_comes_often_is_that_of_numpy(expression, left, right, library):
    library = pytest.importorskip(library)
    for dtype in (np.float16, np.float32, np.float64, np.int64, np.complex128):
        kinds = [np.asarray, lambda x: x[::-1][::-1], np.asfortranarray]
        for kind in kinds if library is np else kinds[:1]:
            a, b = (kind(random_array(shape, dtype, seed)) for seed, shape in enumerate((left, right)))
            x, y = (a, b) if library is np else (library.from_numpy(a), library.from_numpy(b))
            first, last = gm.einsum(expression, x, y), often(lambda x=x, y=y: gm.einsum(expression, x, y))
            exact = np.einsum(expression, a, b)
            assert type(last) is type(first)
            strides = [np.asarray(each).strides for each in (first, last)]
            assert (np.shape(last), strides[0]) == (exact.shape, strides[1])
            assert np.asarray(last).dtype == exact.dtype
            assert np.array_equal(np.asarray(last), exact)


def test_a_contraction_that_comes_often_does_not_reach_python(monkeypatch):
    gm.matmul(np.eye(2), np.eye(2))
    if not inspect.isbuiltin(gm.matmul):
        pytest.skip("no compiled entry on this interpreter")
    a, b, v = random_array((5, 7)), random_array((7, 5), seed=1), random_array(7)
    calls = {
        "einsum": lambda: gm.einsum("ij,jk->ik", a, b),
        "tensordot": lambda: gm.tensordot(a, a),
        "tensordot of one axis": lambda: gm.tensordot(a, b, 1),
        "vecdot": lambda: gm.vecdot(a, a),
        "vecdot of vectors": lambda: gm.vecdot(v, v),
    }
    before = {name: often(call) for name, call in calls.items()}
    monkeypatch.setattr(contractions.sums_of_products, "is_plain", lambda *arguments: pytest.fail("Python"))
    for name, call in calls.items():
        assert np.array_equal(call(), before[name]), name


def test_other_arguments_than_those_that_came_often_are_pythons():
    a, b = random_array((5, 5)), random_array((5, 5), seed=1)
    often(lambda: gm.einsum("ij,jk->ik", a, b))
    often(lambda: gm.tensordot(a, b, 1))
    often(lambda: gm.vecdot(a, b))
    exact = np.einsum("ij,jk->ki", a, b)
    assert np.array_equal(gm.einsum("ij,jk->ki", a, b), exact)
    assert np.array_equal(gm.einsum("".join(["ij,jk", "->ki"]), a, b), exact)
    out = np.empty_like(a)
    assert gm.einsum("ij,jk->ik", a, b, out=out) is out
    assert np.array_equal(out, a @ b)
    assert np.array_equal(gm.tensordot(a, b), np.tensordot(a, b))
    assert np.array_equal(gm.tensordot(a, b, axes=([0], [1])), np.tensordot(a, b, ([0], [1])))
    assert np.array_equal(gm.vecdot(a, b, axis=0), np.vecdot(a, b, axis=0))
    assert gm.vecdot(a, b, keepdims=True).shape == (5, 1)
    assert np.array_equal(gm.vecdot(a.astype("f8"), b), np.vecdot(a, b))
    with pytest.raises(gm.ShapeError):
        gm.einsum("ij,jk->ik", a, b[:4])
    with pytest.raises(TypeError, match=r"tensordot\(\)"):
        gm.tensordot(a)


def test_signatures_stay_when_contractions_are_compiled():
    names = ("einsum", "tensordot", "vecdot")
    python = {name: inspect.signature(getattr(contractions, f"_{name}")) for name in names}
    a = random_array((5, 5))
    often(lambda: gm.einsum("ij,jk->ik", a, a))
    for name in names:
        compiled = inspect.signature(getattr(gm, name))
        assert [*compiled.parameters] == [*python[name].parameters], name
        defaults = [[p.default for p in s.parameters.values()] for s in (compiled, python[name])]
        assert defaults[0] == defaults[1], name
        assert getattr(gm, name).__doc__ == getattr(contractions, f"_{name}").__doc__
        assert pickle.loads(pickle.dumps(getattr(gm, name))) is getattr(gm, name)


def test_texts_made_anew_for_each_call_are_not_kept():
    a, kept = random_array((3, 3)), len(entry._descriptions)
    for _ in range(300 * contractions._SAMPLED):
        gm.einsum("".join(("ij,jk", "->ik")), a, a)
    assert len(entry._descriptions) == kept


def test_a_changed_number_of_threads_brings_contractions_back():
    gm.matmul(np.eye(2), np.eye(2))
    if not inspect.isbuiltin(gm.matmul):
        pytest.skip("no compiled entry on this interpreter")
    a = random_array((6, 6))
    key = repeats.kind_of(a, a, None, "vecdot").key()
    often(lambda: gm.vecdot(a, a))
    assert entry.status(key) == entry.STORED
    entry.forget()
    assert entry.status(key) == entry.NEW
    exact = np.vecdot(a, a)
    for _ in range(3 * contractions._SAMPLED):
        assert np.array_equal(gm.vecdot(a, a), exact)
    assert entry.status(key) == entry.STORED


def test_two_threads_that_compile_the_entries_at_once_leave_those_of_python_beneath():
    gm.matmul(np.eye(2), np.eye(2))
    if not inspect.isbuiltin(gm.matmul):
        pytest.skip("no compiled entry on this interpreter")
    for _ in range(2):
        contractions._compile_entries.__wrapped__()
    at = entry_table.address() + entry_layout.at(entry_layout.HEAD, "python_einsum")
    assert ctypes.c_int64.from_address(at).value == id(contractions._einsum)


@pytest.mark.parametrize("axes", [np.array([[1], [0]]), ([1], [0]), np.int64(1), (1, 0)], ids=str)
def test_axes_of_any_form_are_taken_however_often(axes):
    a = random_array((3, 4))
    assert np.array_equal(often(lambda: gm.tensordot(a, a.T, axes)), a @ a.T)
