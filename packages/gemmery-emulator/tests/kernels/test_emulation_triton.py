"""Kernels of Triton passed as they are: the shapes of its tutorials against NumPy, counters, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery.errors import ArgumentError, CompileError
from gemmery_emulator.kernels.kernel import emulate

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@triton.jit
def added(x, y, out, n, size: tl.constexpr):
    places = tl.program_id(0) * size + tl.arange(0, size)
    inside = places < n
    tl.store(out + places, tl.load(x + places, mask=inside) + tl.load(y + places, mask=inside), mask=inside)


@triton.jit
def softmax(out, x, x_step, out_step, rows, columns, size: tl.constexpr):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        places = tl.arange(0, size)
        values = tl.load(x + row * x_step + places, mask=places < columns, other=-float("inf"))
        powers = tl.exp(values - tl.max(values, axis=0))
        tl.store(out + row * out_step + places, powers / tl.sum(powers, axis=0), mask=places < columns)


@triton.jit
def product(a, b, c, m, n, k, a_step, b_step, c_step, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr,
            group: tl.constexpr, activation: tl.constexpr):  # fmt: skip
    across, down = tl.cdiv(n, bn), tl.cdiv(m, bm)
    number = tl.program_id(0)
    band = number // (group * across)
    height = min(down - band * group, group)
    row = band * group + (number % (group * across)) % height
    column = (number % (group * across)) // height
    i = (row * bm + tl.arange(0, bm)) % m
    j = (column * bn + tl.arange(0, bn)) % n
    step = tl.arange(0, bk)
    from_a, from_b = a + i[:, None] * a_step + step[None, :], b + step[:, None] * b_step + j[None, :]
    sums = tl.zeros((bm, bn), tl.float32)
    for start in range(tl.cdiv(k, bk)):
        x = tl.load(from_a, mask=step[None, :] < k - start * bk, other=0.0)
        y = tl.load(from_b, mask=step[:, None] < k - start * bk, other=0.0)
        sums = tl.dot(x, y, sums)
        from_a += bk
        from_b += bk * b_step
    if activation == "leaky":
        sums = tl.where(sums >= 0, sums, 0.01 * sums)
    i, j = row * bm + tl.arange(0, bm), column * bn + tl.arange(0, bn)
    tl.store(c + i[:, None] * c_step + j[None, :], sums.to(tl.float16), mask=(i[:, None] < m) & (j[None, :] < n))


@triton.jit
def dropout(x, out, n, p, seed, size: tl.constexpr):
    places = tl.program_id(0) * size + tl.arange(0, size)
    keep = tl.rand(seed, places) > p
    values = tl.load(x + places, mask=places < n)
    tl.store(out + places, tl.where(keep, values / (1 - p), 0.0), mask=places < n)


@triton.jit
def layer_norm(x, out, weight, bias, means, scales, step, n, eps, size: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((size,), tl.float32)
    for start in range(0, n, size):
        places = start + tl.arange(0, size)
        total += tl.load(x + row * step + places, mask=places < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n
    squares = tl.zeros((size,), tl.float32)
    for start in range(0, n, size):
        places = start + tl.arange(0, size)
        values = tl.load(x + row * step + places, mask=places < n, other=0.0).to(tl.float32)
        squares += tl.where(places < n, (values - mean) * (values - mean), 0.0)
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    for start in range(0, n, size):
        places = start + tl.arange(0, size)
        inside = places < n
        values = tl.load(x + row * step + places, mask=inside, other=0.0).to(tl.float32)
        w, b = tl.load(weight + places, mask=inside), tl.load(bias + places, mask=inside)
        tl.store(out + row * step + places, (values - mean) * scale * w + b, mask=inside)


@triton.jit
def weight_gradients(dy, x, means, scales, dw, db, locks, step, n, groups: tl.constexpr, size: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, size)
    inside = places < n
    g = tl.load(dy + row * step + places, mask=inside, other=0.0)
    values = (tl.load(x + row * step + places, mask=inside, other=0.0) - tl.load(means + row)) * tl.load(scales + row)
    group = row % groups
    lock, count = locks + group, locks + groups + group
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    at = group * n + places
    w, b = g * values, g
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        w += tl.load(dw + at, mask=inside)
        b += tl.load(db + at, mask=inside)
    tl.store(dw + at, w, mask=inside)
    tl.store(db + at, b, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def attention(
    q, k, v, out, length, scale, bm: tl.constexpr, bn: tl.constexpr, width: tl.constexpr, causal: tl.constexpr
):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q, k, v, out = (
        q + head * length * width,
        k + head * length * width,
        v + head * length * width,
        out + head * length * width,
    )
    rows, inner, step = block * bm + tl.arange(0, bm), tl.arange(0, width), tl.arange(0, bn)
    queries = tl.load(q + rows[:, None] * width + inner[None, :])
    largest, total = tl.full((bm,), -float("inf"), tl.float32), tl.zeros((bm,), tl.float32)
    sums = tl.zeros((bm, width), tl.float32)
    for start in range(0, (block + 1) * bm if causal else length, bn):
        keys = tl.load(k + (start + step)[None, :] * width + inner[:, None])
        scores = tl.dot(queries, keys) * (scale * 1.44269504)
        if causal:
            scores += tl.where(rows[:, None] >= (start + step)[None, :], 0, -1.0e6)
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.math.exp2(scores - larger[:, None]), tl.math.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + (start + step)[:, None] * width + inner[None, :])
        sums = tl.dot(weights.to(tl.float16), values, sums * shrink[:, None])
        largest = larger
    tl.store(out + rows[:, None] * width + inner[None, :], (sums / total[:, None]).to(tl.float16))


@pytest.mark.parametrize("n", [1, 97, 1000, 1024])
def test_a_sum(n):
    x, y = normal(2, n)
    out = np.zeros_like(x)
    run = emulate(added, (triton.cdiv(n, 256),), [x, y, out, n], size=256)
    assert (out == x + y).all()
    assert run.findings == ()
    assert run.kernel == "added"
    assert run.flops == 256 * triton.cdiv(n, 256)
    assert run.global_.loads.used == 8 * n
    assert {line.file for line in run.lines} == {"test_emulation_triton.py"}


@pytest.mark.parametrize(("rows", "columns", "warps"), [(3, 781, 4), (5, 64, 1), (2, 1000, 8)])
def test_softmax(rows, columns, warps):
    x = normal(rows, columns)
    out = np.zeros_like(x)
    size = triton.next_power_of_2(columns)
    run = emulate(softmax, 2, [out, x, columns, columns, rows, columns], num_warps=warps, num_stages=2, size=size)
    powers = np.exp(x.astype("f8") - x.max(axis=1, keepdims=True))
    assert (abs(out - powers / powers.sum(axis=1, keepdims=True)) <= 2.0**-20).all()
    assert run.findings == ()
    assert run.launch.block == (32 * warps, 1, 1)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (70, 96, 50)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_product(m, n, k, arch):
    a, b = normal(m, k, dtype=np.float16), normal(k, n, seed=1, dtype=np.float16)
    c = np.zeros((m, n), np.float16)
    tiles = {"bm": 64, "bn": 32, "bk": 32, "group": 2, "activation": "leaky"}
    grid = lambda meta: (triton.cdiv(meta["m"], meta["bm"]) * triton.cdiv(meta["n"], meta["bn"]),)  # noqa: E731
    run = emulate(product, grid, [a, b, c, m, n, k, k, n, n], arch=arch, **tiles)
    exact = a.astype("f8") @ b.astype("f8")
    exact = np.where(exact >= 0, exact, 0.01 * exact)
    sizes = abs(a).astype("f8") @ abs(b).astype("f8")
    assert (abs(c - exact) <= 2.0**-10 * abs(exact) + 2.0**-16 * sizes).all()
    assert run.findings == ()


def philox(seed, counters):
    """Ten rounds of Philox 4x32, of Salmon and others (2011), and the first word as Triton makes a uniform number."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(counters, np.uint64), *(np.zeros(len(counters), np.uint64) for _ in range(3))]
    key = [np.uint64(seed) & low, np.uint64(seed) >> np.uint64(32)]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        high = np.uint64(32)
        c = [(second >> high) ^ c[1] ^ key[0], second & low, (first >> high) ^ c[3] ^ key[1], first & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    whole = c[0].astype(np.uint32).view(np.int32).astype(np.int64)
    return np.where(whole < 0, -whole - 1, whole).astype(np.float32) * np.float32(4.6566127342e-10)


@pytest.mark.parametrize("seed", [1, 123, 2**40 + 7])
def test_dropout(seed):
    x = normal(300) + 10
    out = np.zeros_like(x)
    run = emulate(dropout, (2,), {"x": x, "out": out, "n": 300, "p": 0.25, "seed": seed, "size": 256})
    keep = philox(seed, np.arange(300)) > 0.25
    assert 180 < keep.sum() < 270
    assert (abs(out - np.where(keep, x / 0.75, 0)) <= 2.0**-21 * x).all()
    assert run.findings == ()


def test_layer_norm():
    rows, n = 3, 300
    x, weight, bias = normal(rows, n), normal(n, seed=1), normal(n, seed=2)
    out, means, scales = np.zeros_like(x), np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    run = emulate(layer_norm, (rows,), [x, out, weight, bias, means, scales, n, n, 1e-5], size=128)
    wide = x.astype("f8")
    exact = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert (abs(out - (exact * weight + bias)) <= 2.0**-18 * (1 + abs(exact * weight) + abs(bias))).all()
    assert run.findings == ()


def test_gradients_of_layer_norm_behind_locks():
    rows, n, groups = 6, 100, 2
    x, dy = normal(rows, n), normal(rows, n, seed=1)
    means, scales = x.mean(1), 1 / x.std(1)
    dw, db, locks = np.zeros((groups, n), np.float32), np.zeros((groups, n), np.float32), np.zeros(4, np.int32)
    run = emulate(weight_gradients, (rows,), [dy, x, means, scales, dw, db, locks, n, n], groups=groups, size=128)
    exact = dy.astype("f8") * (x.astype("f8") - means[:, None]) * scales[:, None]
    assert (abs(dw.sum(0) - exact.sum(0)) <= 2.0**-18 * abs(exact).sum(0) + 1e-6).all()
    assert (abs(db.sum(0) - dy.astype("f8").sum(0)) <= 2.0**-18 * abs(dy).sum(0)).all()
    assert run.findings == ()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_attention(causal, arch):
    q, k, v = normal(3, 2, 128, 32, dtype=np.float16)
    out = np.zeros_like(q)
    run = emulate(attention, (2, 2), [q, k, v, out, 128, 0.18], arch=arch, bm=64, bn=32, width=32, causal=causal)
    scores = q.astype("f8") @ k.astype("f8").transpose(0, 2, 1) * 0.18
    scores = np.where(np.tri(128, dtype=bool) | (not causal), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    exact = weights @ v.astype("f8") / weights.sum(axis=2, keepdims=True)
    assert (abs(out - exact) <= 2.0**-9 * abs(v).max()).all()  # weights and result are rounded to f16
    assert run.findings == ()


def test_a_bound_that_is_missing_is_found_with_the_line_of_python():
    @triton.jit
    def unbounded(x, size: tl.constexpr):
        places = tl.arange(0, size)
        tl.store(x + places, 1.0)

    run = emulate(unbounded, 1, [np.zeros(100, np.float32)], size=128)
    assert run.findings[0].kind == "out of bounds"
    line = unbounded.fn.__code__.co_firstlineno + 3
    assert str(run.findings[0].line) == f"test_emulation_triton.py:{line}"


def test_choices_around_a_kernel():
    choices = [triton.Config({"size": 64}, num_warps=2), triton.Config({"size": 128})]

    @triton.heuristics({"size": lambda values: 512 if values["n"] > 64 else 32})
    @triton.jit
    def by_rule(x, n, size: tl.constexpr):
        places = tl.arange(0, size)
        tl.store(x + places, size, mask=places < n)

    x = np.zeros(100, np.float32)
    emulate(by_rule, 1, [x, 100])
    assert (x == 512).all()
    tuned = pytest.importorskip("triton.runtime.autotuner")
    wrapped = object.__new__(tuned.Autotuner)  # to make one asks for a device
    wrapped.fn, wrapped.configs = added, choices
    x, y = normal(2, 64)
    out = np.zeros_like(x)
    assert emulate(wrapped, 1, [x, y, out, 64]).launch.block == (64, 1, 1)
    assert (out == x + y).all()
    assert emulate(wrapped, 1, [x, y, out, 64], num_warps=1).launch.block == (32, 1, 1)


@pytest.mark.parametrize(
    ("args", "names", "words"),
    [
        ([np.zeros(4, np.float32)] * 3, {"size": 4}, "added lacks n"),
        ([np.zeros(4, np.float32)] * 6, {}, "6 arguments"),
        ({"x": 1, "z": 2}, {}, "'z', which is no parameter"),
        ([np.zeros(4, np.float32)] * 3 + [4], {"size": 4, "warps": 2}, "warps=2"),
        ([np.zeros(4, np.float32)] * 3 + ["four"], {"size": 4}, "n is 'four'"),
        ([np.zeros(4, np.complex64)] * 3 + [4], {"size": 4}, "complex64"),
    ],
)
def test_refusals(args, names, words):
    with pytest.raises(ArgumentError, match=words):
        emulate(added, 1, args, **names)


def test_what_triton_does_not_compile():
    with pytest.raises(CompileError, match="added for sm_90"):
        emulate(added, 1, [np.zeros(4, np.float32)] * 3 + [4], size=5)
