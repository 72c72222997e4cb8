"""The subscripts of `einsum`: which letter names which dimension, and which of them no single product computes."""

from __future__ import annotations

from functools import lru_cache

from gemmery.api.one_product import DimensionLabel, Labels
from gemmery.errors import ArgumentError, ShapeError, brief

_WAY_OUT = "opt_einsum.contract computes such expressions"
_NAMES = ("first", "second")


@lru_cache(maxsize=1024)
def labels(subscripts: str, a: int, b: int) -> Labels:
    """Return the labels of operands with `a` and `b` dimensions, and those of the result.

    Dimensions of the ellipsis are -1, -2, ... from the last, so that those of both operands broadcast.

    >>> labels("ij,jk", 2, 2)
    Labels(a=('i', 'j'), b=('j', 'k'), c=('i', 'k'))
    >>> labels("...i,...i->...", 3, 2).c
    (-2, -1)

    Raises ArgumentError for subscripts that are malformed or no product, and ShapeError if they name another number of
    dimensions than an operand has.
    """
    text = subscripts.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        raise ArgumentError(
            f"{brief(subscripts)} describes {_operands(len(terms))}, and two are passed: write one comma between "
            "their letters, as in 'ij,jk->ik'"
        )
    for term in terms:
        _check_term(term, subscripts, f"a diagonal, and no product: take it first with numpy.diagonal, or {_WAY_OUT}")
    _check_term(output, subscripts, "a diagonal to write: set it afterwards with numpy.fill_diagonal")
    left, right = (_dimensions(term, count, name) for term, count, name in zip(terms, (a, b), _NAMES, strict=True))
    both = [*left, *right]
    ellipsis = tuple(sorted({label for label in both if isinstance(label, int)}))
    if arrow:
        result = _output(output, both, ellipsis, subscripts)
    else:
        result = (*ellipsis, *sorted(label for label in both if isinstance(label, str) and both.count(label) == 1))
    _check_product(left, right, result, subscripts)
    return Labels(left, right, result)


def count_refused(count: int) -> ArgumentError:
    """Return the error for another number of operands than two."""
    return ArgumentError(f"einsum of {_operands(count)}: gemmery multiplies two; {_WAY_OUT}")


def _operands(count: int) -> str:
    return f"{count} operand{'s' * (count != 1)}"


def _check_term(term: str, subscripts: str, repeated: str) -> None:
    letters = term.replace("...", "", 1)
    for letter in letters:
        if not (letter.isascii() and letter.isalpha()):
            raise ArgumentError(
                f"{letter!r} in subscripts {brief(subscripts)}: use letters, a comma between the operands, one '...' "
                "an operand and '->' before the result, as in '...ij,jk->...ik'"
            )
    for letter in letters:
        if letters.count(letter) > 1:
            raise ArgumentError(f"letter {letter!r} is repeated in {term!r}: that is {repeated}")


def _dimensions(term: str, count: int, name: str) -> tuple[DimensionLabel, ...]:
    """Return the labels of an operand's dimensions."""
    letters = len(term.replace("...", ""))
    if letters > count or ("." not in term and letters != count):
        raise ShapeError(
            f"{term!r} names {letters} dimensions, and the {name} operand has {count}; pass a letter for each, or '...'"
        )
    before, _, after = term.partition("...")
    return (*before, *range(letters - count, 0), *after)


def _output(
    term: str, inputs: list[DimensionLabel], ellipsis: tuple[int, ...], subscripts: str
) -> tuple[DimensionLabel, ...]:
    before, dots, after = term.partition("...")
    for letter in before + after:
        if letter not in inputs:
            raise ArgumentError(f"letter {letter!r} of the result is in no operand of {brief(subscripts)}")
    if ellipsis and not dots:
        raise ArgumentError(
            f"the result of {brief(subscripts)} has no '...': the dimensions of the ellipsis are not summed; write "
            f"'...' there too, or {_WAY_OUT}"
        )
    return (*before, *ellipsis, *after)


def _check_product(
    a: tuple[DimensionLabel, ...], b: tuple[DimensionLabel, ...], c: tuple[DimensionLabel, ...], subscripts: str
) -> None:
    """Raise ArgumentError for a sum over dimensions of one operand, and for products without a sum."""
    for name, own, other in (("first", a, b), ("second", b, a)):
        for label in own:
            if label not in other and label not in c:
                raise ArgumentError(
                    f"letter {label!r} of {brief(subscripts)} is only in the {name} operand and not in the result: "
                    f"sum that operand over it first, with x.sum(axis={own.index(label)}), or {_WAY_OUT}"
                )
    summed = set(a) & set(b) - set(c)
    if not summed and not (set(a) - set(b) and set(b) - set(a)):
        raise ArgumentError(
            f"{brief(subscripts)} sums over no letter and multiplies element by element: use a * b, or {_WAY_OUT}"
        )
