"""Random products: any shape, strides, element type, alpha and beta, against the reference."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import gemmery as gm
from gemmery import dtypes, verify
from operands import numpy_dtype, random

SIDES = st.one_of(st.integers(1, 9), st.integers(1, 70), st.sampled_from([96, 97, 127, 128, 129, 200]))
STEPS = st.sampled_from([1, 1, 1, 2, 3, -1, -2])
NAMES = st.sampled_from(dtypes.NAMES)


@st.composite
def strided(draw, shape, name, seed):
    """Random numbers of that shape as a view: steps, signs and order of the axes are drawn."""
    steps = [draw(STEPS) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    big = [abs(step) * (n - 1) + 1 + draw(st.integers(0, 2)) for n, step in zip(shape, steps, strict=True)]
    memory = random([big[axis] for axis in order], name, seed)
    whole = memory.transpose(np.argsort(order))
    index = tuple(
        slice(None, abs(step) * (n - 1) + 1, step) if step > 0 else slice(abs(step) * (n - 1), None, step)
        for n, step in zip(shape, steps, strict=True)
    )
    view = whole[index]
    assert view.shape == tuple(shape)
    return view


@st.composite
def batches(draw):
    """Two batch shapes that broadcast, and what they broadcast to."""
    whole = draw(st.lists(st.integers(1, 4), max_size=3))
    one = [n if draw(st.booleans()) else 1 for n in whole]
    two = [n if draw(st.booleans()) else 1 for n in whole]
    one, two = one[draw(st.integers(0, len(whole))) :], two[draw(st.integers(0, len(whole))) :]
    return one, two, list(np.broadcast_shapes(tuple(one), tuple(two)))


def scalars(name):
    """alpha and beta that an element type can hold."""
    kind = dtypes.get(name).kind
    whole = st.integers(0, 5) if kind == "u" else st.integers(-5, 5)
    if kind in "iu":
        return whole
    real = st.one_of(whole, st.floats(-3, 3, width=16))
    return st.builds(complex, real, real) if kind == "c" else real


@given(data=st.data(), m=SIDES, n=SIDES, k=SIDES, name=NAMES, shared=batches())
def test_matmul(data, m, n, k, name, shared):
    one, two, whole = shared
    a = data.draw(strided([*one, m, k], name, 1))
    b = data.draw(strided([*two, k, n], name, 2))
    result = gm.matmul(a, b)
    assert result.shape == (*whole, m, n)
    assert verify.check(result, a, b).error_over_bound <= 1
    out = data.draw(strided([*whole, m, n], name, 3))
    assert gm.matmul(a, b, out=out) is out
    assert out.tobytes() == result.tobytes() or verify.check(out, a, b).error_over_bound <= 1


@given(data=st.data(), m=SIDES, n=SIDES, k=SIDES, name=NAMES, in_place=st.booleans())
def test_gemm(data, m, n, k, name, in_place):
    a, b, c = (data.draw(strided(shape, name, seed)) for seed, shape in enumerate([[m, k], [k, n], [m, n]], start=1))
    alpha, beta = data.draw(scalars(name)), data.draw(scalars(name))
    old = c.copy()
    result = gm.gemm(alpha, a, b, beta, c, out=c if in_place else None)
    assert (result is c) == in_place
    assert in_place or np.array_equal(c, old)
    assert verify.check(result, a, b, alpha=alpha, beta=beta, c=old).error_over_bound <= 1


@given(data=st.data(), m=SIDES, k=SIDES, name=NAMES)
def test_gemv(data, m, k, name):
    a, x = data.draw(strided([m, k], name, 1)), data.draw(strided([k], name, 2))
    y = data.draw(strided([m], name, 3))
    alpha, beta = data.draw(scalars(name)), data.draw(scalars(name))
    result = gm.gemv(a, x, y, alpha=alpha, beta=beta)
    assert result.shape == (m,)
    options = {"alpha": alpha, "beta": beta, "c": y[:, None]}
    assert verify.check(result[:, None], a, x[:, None], **options).error_over_bound <= 1


@given(data=st.data(), m=SIDES, n=SIDES, k=SIDES, one=NAMES, two=NAMES)
def test_mixed_types(data, m, n, k, one, two):
    a, b = data.draw(strided([m, k], one, 1)), data.draw(strided([k, n], two, 2))
    try:
        common = np.result_type(a, b)
    except TypeError:
        common = np.dtype(np.float32)
        a, b = a.astype(common), b.astype(common)
    result = gm.matmul(a, b)
    assert result.dtype == common
    assert verify.check(result, a.astype(common), b.astype(common)).error_over_bound <= 1


@given(data=st.data(), m=SIDES, n=SIDES, k=SIDES, name=st.sampled_from(["f64", "f32", "f16", "bf16"]))
def test_epilogues(data, m, n, k, name):
    a, b = data.draw(strided([m, k], name, 1)), data.draw(strided([k, n], name, 2))
    bias = data.draw(st.one_of(st.none(), strided([n], name, 3), strided([1], name, 4)))
    activation = data.draw(st.sampled_from([None, "relu", "gelu", "silu"]))
    result = gm.matmul(a, b, bias=bias, activation=activation)
    assert result.dtype == numpy_dtype(name)
    found = verify.check(result, a, b, bias=bias, activation=activation or "")
    assert found.error_over_bound <= 1
