"""The emulator tells each wrong version of a kernel from the right one: by its result, a finding, or a counter."""

from __future__ import annotations

import pytest

from checked_products import problem_of, product
from gemmery.cuda import nvrtc
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from mutants import MUTANTS

pytest.importorskip("cuda.bindings")


def what_shows(mutant, mutated):
    """How the mutant, or the kernel itself at the same problem, is seen to be wrong; "" when it is not."""
    rung = find(CUDA, mutant.rung)
    text = nvrtc.headers().get(mutant.file) or nvrtc.text(mutant.file)
    assert text.count(mutant.old) == 1, f"{mutant.old!r} stands {text.count(mutant.old)} times in {mutant.file}"
    texts = {mutant.file: text.replace(mutant.old, mutant.new)} if mutated else {}
    came = product(rung, problem_of(mutant.shape, mutant.name, mutant.layouts, mutant.batch), mutant.config, texts)
    if came.findings:
        return str(came.findings[0])
    if not came.error_over_bound <= 1:
        return f"error {came.error_over_bound} times the bound"
    expected = rung.expect.get("bank_conflicts", came.bank_conflicts)
    return "" if came.bank_conflicts == expected else f"{came.bank_conflicts} bank conflicts"


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_killed(mutant):
    """The kernel passes, its mutant does not, unless no run can tell the two apart."""
    assert what_shows(mutant, False) == ""
    shown = what_shows(mutant, True)
    if mutant.survives:
        assert shown == "", "it can be told apart: take the reason out of its row"
    else:
        assert shown, "nothing shows that it is wrong"


def test_every_rung_has_mutants():
    """At least one each."""
    assert {mutant.rung for mutant in MUTANTS} == {rung.name for rung in CUDA}
