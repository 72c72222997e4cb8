"""tensordot, vecdot and einsum against NumPy in float64, within bounds; what is copied."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmery as gm
from gemmery import arrays, dispatch, dtypes
from gemmery.api import products, sums_of_products
from gemmery.api.one_product import Labels, one_product, shape_of
from gemmery.problem import Problem
from operands import random

NAMES = st.sampled_from(("f64", "f32", "f16", "bf16", "complex64", "int8", "int32", "uint16"))


def wide(x):
    """The numbers of an array in a type in which products of these small shapes are exact, or nearly."""
    kind = "c" if x.dtype.kind == "c" else "i" if x.dtype.kind in "iu" else "f"
    return x.astype({"c": "c16", "i": "i8", "f": "f8"}[kind])


def check(result, expression, a, b):
    """Compare with np.einsum: integers modulo 2**bits, other types within (2 k + 2) u |A| |B| and one rounding."""
    expected = np.einsum(expression, wide(a), wide(b))
    assert result.shape == expected.shape
    assert result.dtype == np.result_type(a, b)
    if result.dtype.kind in "iu":
        assert np.array_equal(result, expected.astype(result.dtype))
        return
    terms, output = expression.split("->")
    left, right = terms.split(",")
    size = dict(zip(left.replace("...", ""), a.shape[-len(left.replace("...", "")) :], strict=False))
    k = math.prod(size[letter] for letter in set(left) & set(right) - set(output) - {"."})
    unit = dtypes.get(dtypes.get(result.dtype.name).accumulator).unit_roundoff
    rounding = dtypes.get(result.dtype.name).unit_roundoff
    magnitude = np.einsum(expression, np.abs(wide(a)), np.abs(wide(b)))
    bound = (2 * k + 2) * unit * magnitude + 2 * rounding * np.abs(expected) + k * 2.0**-24 * (unit > 2.0**-40)
    assert (np.abs(wide(np.asarray(result)) - expected) <= bound).all()


@st.composite
def products_of_letters(draw):
    """Subscripts that are one product, and the length of each letter."""
    letters = draw(st.permutations("ijklmnop"))
    batch, rest = letters[: draw(st.integers(0, 2))], letters[2:]
    rows, columns = rest[: draw(st.integers(0, 2))], rest[2 : 2 + draw(st.integers(0, 2))]
    summed = rest[4 : 4 + draw(st.integers(0 if rows and columns else 1, 2))]
    a, b = (draw(st.permutations([*batch, *own, *summed])) for own in (rows, columns))
    c = draw(st.permutations([*batch, *rows, *columns]))
    sizes = {letter: draw(st.integers(1, 5)) for letter in letters}
    return "".join(a), "".join(b), "".join(c), sizes


@st.composite
def laid_out(draw, shape, name, seed):
    """Random numbers in any order of the dimensions, sliced and reversed."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in shape]
    memory = random([shape[axis] * abs(steps[axis]) for axis in order], name, seed)
    return memory.transpose(np.argsort(order))[(..., *(slice(None, None, step) for step in steps))]


@settings(max_examples=80)
@given(data=st.data(), letters=products_of_letters(), name=NAMES)
def test_einsum(data, letters, name):
    left, right, output, sizes = letters
    a, b = (
        data.draw(laid_out([sizes[letter] for letter in own], name, seed)) for seed, own in enumerate((left, right))
    )
    expression = f"{left},{right}->{output}"
    result = gm.einsum(expression, a, b)
    check(np.asarray(result), expression, a, b)
    out = data.draw(laid_out([sizes[letter] for letter in output], name, 3))
    assert gm.einsum(expression, a, b, out=out) is out
    check(out, expression, a, b)


@settings(max_examples=40)
@given(data=st.data(), name=st.sampled_from(("f64", "f32", "int16", "complex128")))
def test_the_letters_of_the_result_may_be_left_out(data, name):
    left, right, output, sizes = data.draw(products_of_letters())
    batch = set(left) & set(output) & set(right)
    left, right = (term.translate({ord(letter): None for letter in batch}) for term in (left, right))
    if not set(left) & set(right) and not (left and right):
        return
    a, b = (
        data.draw(laid_out([sizes[letter] for letter in own], name, seed)) for seed, own in enumerate((left, right))
    )
    expected = "".join(sorted(set(left) ^ set(right)))
    check(np.asarray(gm.einsum(f"{left}, {right}", a, b)), f"{left},{right}->{expected}", a, b)


@pytest.mark.parametrize(
    ("expression", "a", "b"),
    [
        ("...ij,...jk->...ik", (2, 3, 4, 5), (3, 5, 6)),
        ("...ij,...jk->...ik", (4, 5), (2, 3, 5, 6)),
        ("...ij,...jk->...ik", (2, 1, 4, 5), (1, 3, 5, 6)),
        ("...ij,jk->...ki", (2, 3, 4, 5), (5, 6)),
        ("i...j,j...->...i", (2, 3, 4, 5), (5, 3, 4)),
        ("...i,...i->...", (2, 3), (2, 3)),
        ("...i,...j->...ij", (4, 3), (1, 5)),
        ("ij...,jk->i...k", (2, 3), (3, 4)),
        ("bqhd,bkhd->bhqk", (2, 5, 3, 8), (2, 7, 3, 8)),
        ("bhqk,bkhd->bqhd", (2, 3, 5, 7), (2, 7, 3, 8)),
        ("bi,bj->bij", (1, 3), (4, 5)),
        ("ij,jk->ki", (70, 33), (33, 65)),
        ("ab,cd->cadb", (2, 3), (4, 5)),
        ("ij,jk->ik", (0, 3), (3, 2)),
        ("ij,jk->ki", (2, 0), (0, 3)),
        ("zij,zjk->ikz", (3, 0, 4), (3, 4, 5)),
    ],
)
def test_ellipsis_batches_and_empty_dimensions(expression, a, b):
    x, y = random(a, "f32", 1), random(b, "f32", 2)
    check(gm.einsum(expression, x, y), expression, x, y)


def test_the_implicit_result_begins_with_the_ellipsis():
    x, y = random((2, 4, 5), "f64", 1), random((5, 3), "f64", 2)
    assert np.array_equal(gm.einsum("...zj,ja", x, y), gm.einsum("...zj,ja->...az", x, y))


@settings(max_examples=80)
@given(data=st.data(), name=NAMES)
def test_tensordot(data, name):
    free = [data.draw(st.lists(st.integers(1, 5), max_size=2)) for _ in range(2)]
    summed = data.draw(st.lists(st.integers(1, 5), max_size=2))
    letters, places, operands = iter("abcdefgh"), [], []
    summed_letters = [next(letters) for _ in summed]
    for seed, own in enumerate(free):
        labeled = [*zip(own, letters, strict=False), *zip(summed, summed_letters, strict=True)]
        labeled = data.draw(st.permutations(labeled))
        shape, term = [n for n, _ in labeled], "".join(letter for _, letter in labeled)
        operands.append((term, data.draw(laid_out(shape, name, seed))))
        sign = data.draw(st.sampled_from([0, len(term)]))
        places.append([term.index(letter) - sign for letter in summed_letters])
    (left, a), (right, b) = operands
    output = "".join(letter for letter in left + right if letter not in summed_letters)
    result = gm.tensordot(a, b, axes=tuple(places))
    check(np.asarray(result), f"{left},{right}->{output}", a, b)


@pytest.mark.parametrize(
    "axes", [0, 1, 2, (1, 0), ([0, 1], [1, 0]), ((), ()), (-1, [0]), np.int64(1), np.array([[0], [1]])]
)
def test_tensordot_takes_the_axes_of_numpy(axes):
    a, b = np.arange(9.0).reshape(3, 3), np.arange(9.0, 18.0).reshape(3, 3)
    assert np.array_equal(gm.tensordot(a, b, axes), np.tensordot(a, b, axes))


def test_a_full_sum_is_a_scalar_and_an_outer_product_takes_scalars():
    a = np.arange(4.0)
    assert type(gm.tensordot(a, a, 1)) is np.float64
    assert type(gm.vecdot(a, a)) is type(gm.einsum("i,i", a, a)) is np.float64
    assert np.array_equal(gm.tensordot(np.float64(2), a, 0), 2 * a)


@settings(max_examples=80)
@given(data=st.data(), name=NAMES, k=st.integers(0, 70))
def test_vecdot(data, name, k):
    whole = data.draw(st.lists(st.integers(1, 4), max_size=2))
    shapes = [[n if data.draw(st.booleans()) else 1 for n in whole][data.draw(st.integers(0, 2)) :] for _ in range(2)]
    a, b = (data.draw(laid_out([*shape, k], name, seed)) for seed, shape in enumerate(shapes))
    result = np.asarray(gm.vecdot(a, b))
    check(result, "...i,...i->...", a.conj() if name == "complex64" else a, b)
    axis = -1 - min(len(shape) for shape in shapes)
    assert np.array_equal(gm.vecdot(np.moveaxis(a, -1, axis), np.moveaxis(b, -1, axis), axis=axis), result)


def test_vecdot_as_numpy_does():
    a, b = random((3, 4, 5), "complex128", 1), random((3, 4, 5), "complex128", 2)
    for axis in (0, 1, 2, -1, -2, -3):
        assert np.allclose(gm.vecdot(a, b, axis=axis), np.vecdot(a, b, axis=axis), rtol=1e-13)
    assert gm.vecdot(a > 0, b > 0).dtype == bool


def passed(monkeypatch, call):
    """The arrays that a contraction passes to `matmul`."""
    calls, multiply = [], products.multiply

    def note(a, b, out=None, **options):
        calls.append((a, b, out))
        return multiply(a, b, out, **options)

    with monkeypatch.context() as patch:
        for name in ("matmul", "multiply"):  # the way with options, and the short one
            patch.setattr(products, name, note)
        call()
    assert len(calls) == 1
    return calls[0]


BQHD, BKHD = np.ones((2, 5, 3, 8), "f4"), np.ones((2, 7, 3, 8), "f4")


@pytest.mark.parametrize(
    ("expression", "a", "b"),
    [
        ("ij,jk->ik", BQHD[0, 0], BKHD[0, 0].T),
        ("bqhd,bkhd->bhqk", BQHD, BKHD),
        ("bqhd,bkhd->bqhk", BQHD[:, ::2], BKHD[::-1]),
        ("bhqk,bkhd->bqhd", np.ones((2, 3, 5, 7), "f4"), BKHD),
        ("iaj,ak->ijk", np.ones((4, 6, 3)), np.ones((6, 5))),  # rows that no stride walks are a batch
        ("aibj,kabl->ijkl", np.ones((4, 6, 3, 2))[:, ::2], np.ones((5, 4, 3, 2))[::2]),
        ("iabj,abk->kji", np.ones((2, 4, 6, 3)), np.ones((4, 6, 5))),
        ("abi,jab->ij", np.ones((4, 6, 3)), np.ones((5, 4, 6))),
        ("bai,abj->ij", np.ones((4, 6, 3)).transpose(1, 0, 2), np.ones((4, 6, 5))),
    ],
)
def test_operands_are_not_copied(monkeypatch, expression, a, b):
    shape = np.einsum(expression, a, b).shape
    out = np.zeros((3, *shape), a.dtype)[1].T.copy().T
    x, y, target = passed(monkeypatch, lambda: gm.einsum(expression, a, b, out=out))
    alone = "aibj" in expression  # a and b are apart by j in A: one stride cannot walk both
    assert np.shares_memory(x, a) != alone
    assert np.shares_memory(y, b)
    assert np.shares_memory(target, out)
    assert np.array_equal(out, np.einsum(expression, a, b))


def test_rows_and_columns_are_those_that_end_the_result():
    """Where one stride does not walk all of them: the elements of C are then adjacent in rows or in columns."""
    labels = Labels(("i", "k", "j"), ("k", "l"), ("i", "l", "j"))
    form = one_product(labels, (90, 6, 3), (144, 24, 8), (6, 5), (40, 8), (90, 5, 3))
    assert (form.a.shape, form.b.shape, form.c.shape) == ((90, 3, 6), (1, 6, 5), (90, 3, 5))
    assert form.c.axes == (0, 2, 1)


def test_the_smaller_operand_is_copied_where_one_must_be(monkeypatch):
    small, large = np.ones((3, 4, 2)), np.ones((4, 3, 50))
    x, y, _ = passed(monkeypatch, lambda: gm.tensordot(small, large, axes=([0, 1], [1, 0])))
    assert not np.shares_memory(x, small)
    assert np.shares_memory(y, large)
    x, y, _ = passed(monkeypatch, lambda: gm.tensordot(large, small, axes=([0, 1], [1, 0])))
    assert np.shares_memory(x, large)
    assert not np.shares_memory(y, small)


@settings(max_examples=80)
@given(data=st.data(), letters=products_of_letters())
def test_what_is_copied_is_what_the_plan_says(data, letters):
    left, right, output, sizes = letters
    a, b = (
        data.draw(laid_out([sizes[letter] for letter in own], "f32", seed)) for seed, own in enumerate((left, right))
    )
    labels = Labels(tuple(left), tuple(right), tuple(output))
    out = data.draw(laid_out(shape_of(labels, a.shape, b.shape), "f32", 3))
    form = one_product(labels, a.shape, a.strides, b.shape, b.strides, out.shape, out.strides)
    for name, array, turn in (("a", a, form.a), ("b", b, form.b), ("c", out, form.c)):
        assert np.shares_memory(sums_of_products.turned(array, turn), array) == (name not in form.copied)


def test_options_are_those_of_matmul():
    a = np.full((2, 300), 100, "i1")
    assert gm.vecdot(a, a, dtype="int32").tolist() == [3_000_000, 3_000_000]
    assert gm.einsum("ij,kj->ki", a, a, dtype="int32").dtype == np.int32
    assert gm.einsum("ij,kj->ki", a, a, out=np.zeros((2, 2), "f8"), threads=1).tolist() == [[-64 + 0.0] * 2] * 2
    with pytest.raises(gm.DTypeError, match="int16"):
        gm.tensordot(a.astype("i4"), a.T, 1, dtype="int16")
    with pytest.raises(gm.ArgumentError, match="threads"):
        gm.einsum("ij,kj->ki", a, a, threads=0)
    with pytest.raises(gm.DTypeError, match="Cannot cast"):
        gm.einsum("ij,kj->ki", a * 1.0, a, out=np.zeros((2, 2), "i4"))


def test_an_out_that_overlaps_an_operand():
    a = np.arange(9.0).reshape(3, 3)
    expected = (a @ a).T
    assert np.array_equal(gm.einsum("ij,jk->ki", a, a, out=a), expected)


@st.composite
def expressions(draw):
    """Subscripts of one to four operands with any letters, also repeated ones, and a length of each, some of them 1."""
    letters = "ijklm"
    terms = ["".join(draw(st.lists(st.sampled_from(letters), max_size=3))) for _ in range(draw(st.integers(1, 4)))]
    used = sorted(set("".join(terms)))
    output = "".join(draw(st.permutations(used))[: draw(st.integers(0, len(used)))])
    sizes = {letter: draw(st.integers(1, 4)) for letter in letters}
    shapes = [
        [draw(st.sampled_from([sizes[z], sizes[z], 1])) if term.count(z) == 1 else sizes[z] for z in term]
        for term in terms
    ]
    return f"{','.join(terms)}->{output}", shapes


@pytest.mark.many
@settings(max_examples=150)
@given(data=st.data(), drawn=expressions(), name=st.sampled_from(("f64", "int32", "complex128")))
def test_any_expression_is_numpys(data, drawn, name):
    expression, shapes = drawn
    operands = [data.draw(laid_out(shape, name, seed)) for seed, shape in enumerate(shapes)]
    expected = np.einsum(expression, *operands)
    result = gm.einsum(expression, *operands, optimize=data.draw(st.sampled_from([None, True, "optimal"])))
    tolerance = 1e-12 * np.einsum(expression, *map(np.abs, operands)) if name != "int32" else 0
    assert np.shape(result) == np.shape(expected)
    assert np.asarray(result).dtype == expected.dtype
    assert (np.abs(np.asarray(result) - expected) <= tolerance).all()
    out = data.draw(laid_out(expected.shape, name, 9))
    assert gm.einsum(expression, *operands, out=(out,)) is out
    assert (np.abs(out - expected) <= tolerance).all()


def test_the_other_spellings_of_numpy():
    a, b = random((3, 4), "f64", 1), random((4, 5), "f64", 2)
    assert np.array_equal(gm.einsum(a, [0, 1], b, [1, 2], [2, 0]), (a @ b).T)
    assert np.array_equal(gm.einsum(a, [0, 1], b, [1, 27]), a @ b)
    assert np.array_equal(gm.einsum("ij,jk", a, b, optimize=True, casting="safe"), a @ b)
    assert gm.einsum("ij,jk->ki", a, b, order="F").flags.f_contiguous
    path = ["einsum_path", (1, 2), (0, 1)]
    assert np.allclose(gm.einsum("ij,jk,kl->il", a, b, b.T, optimize=path), a @ b @ b.T, rtol=1e-12)
    with pytest.raises(gm.ArgumentError, match="optimize='best' of 3 operands"):
        gm.einsum("ij,jk,kl->il", a, b, b.T, optimize="best")
    with pytest.raises(gm.ArgumentError, match="einsum has no casting='unsafe': convert"):
        gm.einsum("ij,jk", a, b, casting="unsafe")
    assert np.array_equal(gm.vecdot(a, a, keepdims=True, axis=0), np.vecdot(a, a, keepdims=True, axis=0))
    out = np.zeros((3, 1))
    assert gm.vecdot(a, a, out, keepdims=True) is out
    with pytest.raises(gm.ShapeError, match="keepdims=True its dimension 1 has length 1"):
        gm.vecdot(a, a, np.zeros(3), keepdims=True)


@pytest.mark.parametrize("name", ["f32", "f64", "int32", "uint64", "f16", "complex64"])
@pytest.mark.parametrize("expression", ["ac,abc->cb", "abc,abc->c", "abv,bdv->adv", "abv,bdv->vad", "xabv,xbdv->xavd"])
@pytest.mark.parametrize(("count", "k"), [(1, 2), (7, 3), (16, 1), (33, 300), (100, 2)])
def test_a_batch_whose_elements_are_adjacent(expression, name, count, k):
    length = {"a": 3, "b": 5, "c": count, "d": 2, "v": count, "x": 2, "a" if "c" in expression else "b": k}
    left, right = expression.split("->")[0].split(",")
    a, b = (random([length[z] for z in term], name, seed) for seed, term in enumerate((left, right)))
    check(np.asarray(gm.einsum(expression, a, b)), expression, a, b)


@pytest.mark.many(3)
@pytest.mark.parametrize("name", ["f32", "f64", "f16", "int32", "uint16", "complex64"])
def test_rows_by_the_kernel_for_their_length(name):
    for k in (3, 15, 16, 17, 37, 100, 256):
        a, b, c = random((9, k), name, 1), random((9, k), name, 2), random((9,), name, 3)
        plan = dispatch.specialized(Problem(1, 1, k, name, name, batch=9))
        assert (plan is not None) == (k <= 16 or name != "complex64")
        if plan is not None:
            plan.kernel(*(arrays.view(z) for z in (a[:, None, :], b[..., None], c[:, None, None])))
            check(c, "ij,ij->i", a, b)
