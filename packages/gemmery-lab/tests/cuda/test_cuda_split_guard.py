"""Float32 in parts: which products of two parts are exact enough, by the guard on the device; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import split_rules
from gemmery.cuda import nvrtc
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from split_products import RUNGS, multiplied, operands, same
from split_rules import enough, expected

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")


def verdicts(a, b):
    """What the guard says of each k: its launch writes that into C, where the other half of it writes nothing."""
    k = a.shape[1]
    file, line = "split.cuh", "    if (!enough) atomicOr("
    text = nvrtc.text(file)
    assert text.count(line) == 1

    def guard(problem, config):
        whole = RUNGS["split_fp16x3"].geometry(problem, config)
        kernels = [launch.kernel.split("<")[0] for launch in whole.before]
        before, last = whole.before[: kernels.index("split_simt")], whole.before[kernels.index("split_simt")]
        return replace(last, before=before, workspace=whole.workspace, maps=whole.maps)

    rung = RUNGS["split_fp16x3"]._replace(geometry=guard)
    c = np.full((1, a.shape[0], b.shape[1]), np.nan, np.float32)
    gemm = Gemm(a[None], b[None], c)
    texts = {file: text.replace(line, f"    p.c[k] = enough;\n{line}")}
    runs = run_rung(rung, problem_of(gemm, "f32", "f32", "h200"), {}, gemm, EmulationOptions(texts=texts))
    assert [str(each) for run in runs for each in run.findings] == []
    return c.ravel()[:k] == 1


def graded(spread):
    """A and B whose columns and rows of k have opposite magnitudes."""
    a, b = operands(16, 24, 200)
    powers = np.random.default_rng(spread).integers(-spread, spread + 1, 200)
    return np.ldexp(a, powers[None]), np.ldexp(b, -powers[:, None])


def at_thresholds(k):
    """Smallest elements just above, at and just below each limit, and pairs of them around that of their product."""
    a, b = operands(16, 24, k)
    a[:, 0], b[0] = 1, 1  # the largest of each row, with the others below it
    a[:, 1:], b[1:] = a[:, 1:] / 8, b[1:] / 8
    scale = 2.0**-14  # of the largest element
    edge = np.float32(scale * 2.0**-9 / k)
    near = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(1))]
    for at, value in enumerate(near):
        a[at, 3 + at], b[9 + at, at] = value, value
    draw = np.random.default_rng(k)
    for at in range(20, min(k, 120)):
        x = np.float32(scale * 2.0**-13 * draw.uniform(0.1, 1))
        y = np.float32(scale * scale * 2.0**-23 / k / x)
        for _ in range(at % 3):
            y = np.nextafter(y, np.float32(at % 2))
        a[at % 16, at], b[at, at % 24] = (-1) ** at * x, y
    return a, b


@pytest.mark.many
@pytest.mark.parametrize(
    "given",
    [
        operands(16, 24, 200),
        *map(graded, (4, 16, 30)),
        *map(at_thresholds, (128, 200, 1000 // 3)),
        tuple(np.ldexp(x, np.random.default_rng(9).integers(-130, 100, x.shape)) for x in operands(16, 24, 96)),
        tuple(x * (abs(x) > 0.5) for x in operands(16, 24, 96)),
    ],
    ids=["random", "slightly", "graded", "steeply", "128", "200", "333", "everything", "zeros"],
)
def test_the_guard(given):
    """For each k, on random, graded and adversarial operands, and at its thresholds."""
    a, b = given
    wide = a.astype(np.float64), b.astype(np.float64)
    assert np.array_equal(verdicts(a, b), enough(*wide))


def test_cases_of_the_guard_differ():
    """Both verdicts occur within a case at each threshold."""
    for k in (128, 200, 333):
        verdict = enough(*(x.astype(np.float64) for x in at_thresholds(k)))
        assert 0.1 < verdict[20:120].mean() < 0.9
        assert list(verdict[[3, 5, 9, 11]]) == [False, True, False, True]


@pytest.mark.parametrize("spread", [4, 30])
def test_the_device_chooses_by_the_guard(spread):
    a, b = graded(spread)
    wide = a.astype(np.float64), b.astype(np.float64)
    other = split_rules.three_parts(*wide)
    c = multiplied(RUNGS["split_fp16x3"], a, b)
    assert same(c, expected("split_fp16x3", a, b))
    assert same(c, other) == (spread == 30)


@pytest.mark.sampled(1)
@pytest.mark.many
@pytest.mark.parametrize(
    ("old", "new"), [("a >= 0x1p-9", "a > 0x1p-9"), ("a * b >=", "float(a * b) >="), ("v[e] != 0", "v[e] > 0")]
)
def test_a_wrong_guard_shows(old, new, monkeypatch):
    right_text, file = nvrtc.text, "split_parts.cu" if "v[e]" in old else "split.cuh"
    assert old in right_text(file)  # twice in the first
    wrong = {file: right_text(file).replace(old, new)}
    monkeypatch.setattr(nvrtc, "text", lambda name: wrong.get(name) or right_text(name))
    cases = [at_thresholds(128), at_thresholds(200), graded(30)]
    right = [enough(a.astype(np.float64), b.astype(np.float64)) for a, b in cases]
    assert any(not np.array_equal(verdicts(*case), verdict) for case, verdict in zip(cases, right, strict=True))
