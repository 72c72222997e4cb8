"""Subscripts, shapes, axes and options that tensordot, vecdot and einsum refuse, with what the errors say."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm

ONES = np.ones((2, 2))


@pytest.mark.parametrize(
    ("expression", "operands", "words"),
    [
        ("ij,jk,kl->il", [ONES] * 2, "describes 3 operands, and 2 are passed"),
        ("ij;jk->ik", [ONES] * 2, "'ij;jk->ik' describes 1 operand, and 2 are passed: write a comma"),
        ("ij,jk->iik", [ONES] * 2, "letter 'i' is repeated in 'iik'.*fill_diagonal"),
        ("ij,jk->iz", [ONES] * 2, "letter 'z' of the result is in no operand"),
        ("...ij,jk->ik", [np.ones((1, 2, 2)), ONES], "has no '...'"),
        ("i1,1k->ik", [ONES] * 2, "'1' in subscripts"),
        ("ij.,jk->ik", [ONES] * 2, r"'\.' in subscripts"),
        ("ij,jk->ik->", [ONES] * 2, "'-' in subscripts"),
        ("ij,jk=>ik", [ONES] * 2, "'=' in subscripts"),
        (ONES, [ONES], "pass a string such as 'ij,jk->ik'"),
        (ONES, [[0, 52]], r"are \[0, 52\]: .* numbers from 0 to 51"),
        (ONES, [], "pass a string such as 'ij,jk->ik'"),
        ("ij,jk->ik", [], "describes 2 operands, and 0 are passed"),
        ("ij,jk- >ik", [ONES] * 2, "a space inside '->'"),
        (".. .ij->ji", [ONES], "a space inside '->' or '...'"),
        ("i...->i", [ONES], "has no '...'"),
    ],
)
def test_what_is_no_product_is_refused_in_words(expression, operands, words):
    with pytest.raises(gm.ArgumentError, match=words):
        gm.einsum(expression, *operands)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gm.einsum("ij,jk->ik", ONES, np.ones((3, 2))), r"letter 'j' has length 2.*3 in the second.*equal$"),
        (lambda: gm.einsum("ij,jk->k", np.ones((2, 2)), np.ones((3, 2))), "letter 'j' has length 2"),
        (lambda: gm.einsum("ij,ij->ij", np.ones((2, 2)), np.ones((2, 3))), "letter 'j' has length 2.*or one of them 1"),
        (lambda: gm.einsum("ii->i", np.ones((2, 3))), r"letter 'i' is repeated in an operand of shape \(2, 3\)"),
        (
            lambda: gm.einsum("ii->", np.ones((1, 3))),
            r"repeated in an operand of shape \(1, 3\), in dimensions of 1 and 3",
        ),
        (lambda: gm.einsum("ii,j->j", np.ones((3, 1)), np.ones(2)), "a diagonal needs equal lengths"),
        (lambda: gm.einsum("bij,bjk->bik", np.ones((2, 2, 2)), np.ones((3, 2, 2))), "letter 'b'.*or one of them 1"),
        (lambda: gm.einsum("...i,...i->...", ONES, np.ones((3, 2))), "dimension -1 of those that broadcast"),
        (lambda: gm.einsum("ijk,jk->i", ONES, ONES), "'ijk' names 3 dimensions, and the first operand has 2"),
        (lambda: gm.einsum("ij,jk,k->i", ONES, ONES, ONES), "'k' names 1 dimensions, and the third operand has 2"),
        (lambda: gm.einsum("ij,j...->i...", ONES, np.float64(1)), "'j...' names 1 dimensions.*second operand has 0"),
        (lambda: gm.tensordot(ONES, np.ones((3, 2)), 1), r"dimension 1 of a.*length 2.*dimension 0 of b.*length 3"),
        (lambda: gm.tensordot(ONES, ONES, 3), "axes=3.*must be 0 to 2"),
        (lambda: gm.tensordot(ONES, ONES, -1), "axes=-1.*must be 0 to 2"),
        (lambda: gm.tensordot(ONES, ONES, (2, 0)), "dimension 2, and the operand has 2"),
        (lambda: gm.vecdot(ONES, np.ones((2, 3))), "the dimension to sum over has length 2.*and 3"),
        (lambda: gm.vecdot(ONES, ONES, axis=2), "axis contains dimension 2"),
        (lambda: gm.vecdot(ONES, np.float64(1)), "axis contains dimension -1, and the operand has 0"),
        (lambda: gm.vecdot(np.ones(()), ONES), "axis contains dimension -1, and the operand has 0"),
        (
            lambda: gm.einsum("ij,jk->ki", ONES, np.ones((2, 3)), out=np.ones((2, 3))),
            r"out has shape \(2, 3\), and the result \(3, 2\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_in_words(call, words):
    with pytest.raises(gm.ShapeError, match=words):
        call()


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("ij", "which is no dimension"),
        (None, "a number of dimensions, or"),
        ((0, 1, 2), "a number of dimensions, or"),
        (([0, 1], [0]), "2 and 1 dimensions"),
        (([0, -2], [0, 1]), "names a dimension twice"),
        (([0.5], [0]), "0.5, which is no dimension"),
        ((ONES, ONES), "which is no dimension"),
        (memoryview(ONES), "a number of dimensions, or"),
    ],
)
def test_axes_of_another_form_are_refused(axes, words):
    with pytest.raises(gm.ArgumentError, match=words):
        gm.tensordot(ONES, ONES, axes)


@pytest.mark.parametrize("value", [[0], ONES, "x", pytest.param(10**5000, id="large"), None])
def test_options_of_another_kind_are_refused(value):
    """An array is compared element by element, and a list has no hash."""
    with pytest.raises((gm.ArgumentError, gm.ShapeError), match="axis contains"):
        gm.vecdot(ONES, ONES, axis=value)
    with pytest.raises(TypeError, match="keepdims="):
        gm.vecdot(ONES, ONES, keepdims=value)
    for option in "order", "casting":
        with pytest.raises(gm.ArgumentError, match=f"{option}="):
            gm.einsum("ij,jk->ik", ONES, ONES, **{option: value})


def test_an_out_that_cannot_be_written_is_refused():
    fixed = np.ones((2, 2))
    fixed.flags.writeable = False
    for out in (fixed, ONES.tolist()):
        with pytest.raises(gm.LayoutError, match="read-only"):
            gm.einsum("ij,jk->ki", ONES, ONES, out=out)
    with pytest.raises(gm.LayoutError, match="share memory"):
        gm.einsum("ij,jk->ki", ONES, ONES, out=np.lib.stride_tricks.as_strided(np.ones(2), (2, 2), (0, 8)))
