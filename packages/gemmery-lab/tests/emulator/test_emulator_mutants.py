"""The emulator tells each wrong version of a kernel from the right one: by its result, a finding, or a counter."""

from __future__ import annotations

from functools import cache

import pytest

from checked_products import problem_of, product
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from mutant import edited
from mutants_gemv import GEMV
from mutants_hopper import HOPPER
from mutants_mma import TENSOR_CORES
from mutants_simt import SIMT

pytest.importorskip("cuda.bindings")

MUTANTS = (*SIMT, *TENSOR_CORES, *HOPPER, *GEMV)


def problem(mutant):
    """The rung, the product and the config of a mutant, which others share."""
    case = problem_of(mutant.shape, mutant.name, mutant.layouts, mutant.batch)
    return mutant.rung, case._replace(out=mutant.out or case.out, epilogue=mutant.epilogue), *mutant.config.items()


@cache
def what_shows_of_the_kernel(*problem):
    """`what_shows` without an edit: once for all mutants of a problem."""
    return what_shows({}, *problem)


def what_shows(texts, name, problem, *config):
    """How a kernel is seen to be wrong; "" when it is not."""
    rung = find(CUDA, name)
    came = product(rung, problem, dict(config), texts)
    if came.findings:
        return str(came.findings[0])
    if not came.error_over_bound <= 1:
        return f"error {came.error_over_bound} times the bound"
    expected = rung.expect.get("bank_conflicts", came.bank_conflicts)
    return "" if came.bank_conflicts == expected else f"{came.bank_conflicts} bank conflicts"


@pytest.mark.many
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_killed(mutant):
    """The kernel passes, its mutant does not, unless no run can tell the two apart."""
    assert what_shows_of_the_kernel(*problem(mutant)) == ""
    shown = what_shows(edited(mutant.file, mutant.old, mutant.new), *problem(mutant))
    if mutant.survives:
        assert shown == "", "it can be told apart: take the reason out of its row"
    else:
        assert shown, "nothing shows that it is wrong"


def test_every_rung_has_mutants():
    """At least one each."""
    assert {mutant.rung for mutant in MUTANTS} == {rung.name for rung in CUDA}
