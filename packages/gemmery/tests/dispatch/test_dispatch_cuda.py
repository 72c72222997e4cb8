"""The choice of a rung on a CUDA device by the problem and the device; no GPU is needed."""

from __future__ import annotations

import itertools

import pytest

from gemmery import dispatch
from gemmery.cuda import choose, nvrtc
from gemmery.cuda.geometry import Geometry, MapBox
from gemmery.dispatch import cuda
from gemmery.errors import RefusedError
from gemmery.problem import Problem

DEVICES = ("h200", "a100", "rtx4090", "2080ti")
NAMES = ("f64", "f32", "f16", "bf16")


def chosen(sizes, name, where="h200", **fields):
    return dispatch.choice(Problem(*sizes, name, fields.pop("out", name), device=where, **fields))


@pytest.mark.parametrize(
    ("name", "where", "rung"),
    [
        ("f32", "h200", "simt_pipelined"),
        ("f64", "h200", "mma_f64"),
        ("f64", "a100", "mma_f64"),
        ("f64", "rtx4090", "simt_pipelined"),
        ("f64", "2080ti", "simt_pipelined"),
        ("f16", "a100", "mma_pipelined"),
        ("bf16", "rtx4090", "mma_pipelined"),
        ("bf16", "2080ti", "simt_pipelined"),
    ],
)
def test_the_unit_follows_the_type_and_the_device(name, where, rung):
    found = chosen((2048, 2048, 2048), name, where)
    assert found.rung.name == rung
    assert len(found.reason.split()) > 4


def test_tf32_is_taken_only_when_it_is_allowed():
    assert chosen((2048, 2048, 2048), "f32", "a100", precision="tf32").rung.name == "mma_pipelined"
    assert chosen((2048, 2048, 2048), "f32", "h200").rung.name == "simt_pipelined"
    assert chosen((2048, 2048, 2048), "f32", "2080ti", precision="tf32").rung.name == "simt_pipelined"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(1, 6144, 4096), (4096, 1, 512), (1, 1, 512)])
def test_vectors_have_their_own_rungs(name, sizes):
    assert chosen(sizes, name).rung.name == "gemv_vectorized"


@pytest.mark.skipif("wgmma_epilogue" not in cuda._RUNGS, reason="there is no such rung")
@pytest.mark.parametrize(
    ("sizes", "fields", "rung"),
    [
        ((1, 4096, 4096), {}, "wgmma_epilogue"),
        ((1, 8192, 1024), {"epilogue": "bias"}, "wgmma_epilogue"),
        ((1, 14336, 2048), {}, "gemv_vectorized"),
        ((1, 32000, 512), {}, "gemv_vectorized"),
        ((1, 5120, 4096), {}, "gemv_vectorized"),
        ((1, 2048, 2048), {}, "gemv_vectorized"),
        ((1, 4096, 64), {}, "gemv_vectorized"),
        ((1, 4096, 4096), {"b_layout": "col"}, "gemv_vectorized"),
        ((1, 4096, 4096), {"alignments": (16, 2, 16)}, "gemv_vectorized"),
        ((1, 4096, 4096), {"where": "a100"}, "gemv_vectorized"),
    ],
)
def test_one_row_by_a_b_of_rows_takes_what_was_faster(sizes, fields, rung):
    assert chosen(sizes, "bf16", **fields).rung.name == rung


@pytest.mark.skipif("wgmma_epilogue" not in cuda._RUNGS, reason="there is no such rung")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("f16", {}),
        ("bf16", {"out": "f32", "scales": "outer"}),
        ("f32", {"precision": "tf32"}),
        ("e4m3", {"out": "bf16", "scaled": True}),
        ("e5m2", {"out": "f16", "scales": "outer", "epilogue": "bias+gelu"}),
        ("int8", {"out": "int32"}),
        ("int8", {"out": "bf16", "scales": "outer"}),
        ("f16", {"a_layout": "any", "b_layout": "any", "c_layout": "any", "alignments": (2, 2, 2)}),
        ("e4m3", {"out": "bf16", "b_layout": "row", "alignments": (1, 1, 2)}),
    ],
)
def test_hopper_multiplies_by_wgmma(name, fields):
    for sizes in ((4096, 4096, 4096), (100, 300, 500), (64, 64, 0), (8192, 7, 33)):
        assert chosen(sizes, name, invariant=True, **{"b_layout": "col", **fields}).rung.name == "wgmma_epilogue"


def test_a_block_streams_many_small_products():
    for shape, dtype, name in [
        ((8, 8, 8), "f32", "simt_batched"),
        ((7, 3, 5), "f16", "simt_batched"),
        ((32, 16, 32), "bf16", "mma_batched"),
        ((33, 16, 32), "f32", "simt_pipelined"),
        ((8, 8, 0), "f32", "simt_pipelined"),
    ]:
        assert chosen(shape, dtype, batch=1000).rung.name == name
    assert chosen((8, 8, 8), "f32", batch=2).rung.name == "simt_pipelined"


@pytest.mark.parametrize("where", DEVICES)
def test_every_problem_has_a_rung_on_every_device(where):
    layouts = list(itertools.product(("row", "col", "any"), repeat=3))
    for name, out in (*zip(NAMES, NAMES, strict=True), ("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f64")):
        for sizes in [(1, 1, 1), (5, 7, 0), (100, 101, 7), (1, 4096, 100), (4096, 4096, 4096)]:
            for a, b, c in layouts:
                problem = Problem(*sizes, name, out, 3, a, b, c, "bias+gelu", True, where, alignments=(2, 4, 16))
                found = dispatch.choice(problem)
                assert cuda.refusal(problem, found) == ""


@pytest.mark.compiler
@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("name", "out"), [("f32", "f64"), ("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64")]
)
@pytest.mark.parametrize("m", [64, 1])
def test_what_is_chosen_for_a_wider_result_compiles(name, out, m):
    pytest.importorskip("cuda.bindings")
    problem = Problem(m, 64, 64, name, out, device="h200")
    rung, config, _ = dispatch.choice(problem)
    geometry = rung.geometry(problem, config)
    for one in geometry.launches:
        assert nvrtc.compiled(one.source, one.kernel, "sm_90a").cubin


def test_a_result_in_columns_is_the_product_of_the_transposes(monkeypatch):
    rows = Problem(64, 4096, 512, "f16", "f16", device="a100", b_layout="col")
    assert dispatch.choice(rows.transposed()) == dispatch.choice(rows)
    seen = []
    rung = cuda._RUNGS["mma_pipelined"]._replace(refuses=lambda problem: seen.append(problem) or "not today")
    monkeypatch.setitem(cuda._RUNGS, "mma_pipelined", rung)
    dispatch.choice(rows.transposed())
    assert seen == [rows]


def test_rungs_that_refuse_are_passed_over(monkeypatch):
    everything = {name: rung._replace(refuses=lambda problem: "not today") for name, rung in cuda._RUNGS.items()}
    monkeypatch.setattr(cuda, "_RUNGS", {**everything, "simt_naive": cuda._RUNGS["simt_naive"]})
    assert chosen((64, 64, 64), "f16").rung.name == "simt_naive"
    monkeypatch.setattr(cuda, "_RUNGS", everything)
    with pytest.raises(RefusedError, match=r"mma_pipelined: not today.*simt_naive: not today"):
        chosen((64, 64, 64), "f16")


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(
    ("name", "precision"),
    [("f32", ""), ("f32", "tf32"), ("f64", ""), ("f16", ""), ("bf16", ""), ("e4m3", ""), ("int8", "")],
)
def test_nothing_that_orders_sums_depends_on_the_rows_of_an_invariant_problem(name, precision, where):
    if name in ("e4m3", "int8") and (where != "h200" or "wgmma_epilogue" not in cuda._RUNGS):
        pytest.skip("no rung multiplies it")
    out = {"e4m3": "bf16", "int8": "int32"}.get(name, name)
    for n, k in ((512, 2048), (1, 4096), (8, 8192)):
        rungs = set()
        for m in (1, 7, 64, 128, 1000, 4096):
            p = Problem(m, n, k, name, out, b_layout="col", device=where, precision=precision, invariant=True)
            rung, config, _ = dispatch.choice(p)
            assert rung.resolve(p, config).get("splits", 1) == 1
            rungs.add(rung.name)
        assert len(rungs) == 1
        assert not rungs & {"gemv_vectorized", "gemv_warp", "wgmma_streamk"}


def test_a_rung_that_applies_no_factors_is_passed_over():
    for where, name, kind in (("a100", "f16", "outer"), ("h200", "f32", "outer"), ("h200", "f16", "blocks")):
        with pytest.raises(RefusedError, match=f"simt_pipelined: it applies no factors of kind '{kind}'"):
            chosen((64, 64, 64), name, where, scales=kind)
    assert cuda.general(Problem(64, 64, 64, "f16", "f16", device="h200", scales="outer")) is None


def test_too_large_a_side_is_refused_in_words():
    with pytest.raises(RefusedError, match="simt_naive: a side of 3000000000: kernels count to"):
        chosen((3_000_000_000, 2, 2), "f32")


def test_rungs_with_wgmma_come_first_where_the_device_has_it(monkeypatch):
    """The one that splits k where that is faster, that of blocks for factors of blocks, and one for all others."""
    one = Geometry("k.cu", "k", (1, 1, 1), (1, 1, 1), needs=90, alone=True, maps=(MapBox("a", (64, 64)),))
    known = cuda._RUNGS["mma_pipelined"]
    default = dict.fromkeys(choose.KEYS, 0)
    names = ("wgmma_epilogue", "wgmma_streamk", "wgmma_blockscaled")
    rungs = {
        name: known._replace(name=name, dtypes=("bf16", "e4m3"), default=default, geometry=lambda p, config: one)
        for name in names
    }
    monkeypatch.setattr(cuda, "_RUNGS", {**cuda._RUNGS, **rungs})
    monkeypatch.setattr(
        choose, "chosen", lambda p, device: dict.fromkeys(choose.KEYS, 4) | {"splits": 2 if p.m < 128 else 1}
    )

    def first(m, name="bf16", where="h200", **fields):
        return dispatch.choice(Problem(m, 256, 256, name, "bf16", device=where, **fields))

    assert first(256).rung.name == "wgmma_epilogue"
    assert not any(first(256).config.values())
    assert (first(64).rung.name, first(64).config["splits"]) == ("wgmma_streamk", 2)
    assert first(64).config["bm"] == 4
    assert first(256, "e4m3", scales="blocks").rung.name == "wgmma_blockscaled"
    assert first(256, scales="outer").rung.name == "wgmma_epilogue"
    assert first(256, where="a100").rung.name == "mma_pipelined"
    assert first(1).rung.name == "gemv_vectorized"


@pytest.mark.parametrize(("name", "out"), [("bf16", "bf16"), ("f16", "f32"), ("e4m3", "bf16"), ("int8", "int32")])
@pytest.mark.parametrize("aligned", [True, False])
def test_no_configuration_of_wgmma_is_chosen_that_its_rung_refuses(name, out, aligned):
    """The product would then run by an older rung, at half the speed."""
    either, sides = ("row", "col"), [*itertools.product((192, 384, 8192), (576, 3000, 6144)), (100, 72), (4096, 4096)]
    for (m, n), k, a, b, epilogue in itertools.product(sides, (64, 6144), either, either, ("", "bias")):
        if epilogue and out == "int32":
            continue
        alignments = (16, 16, 16) if aligned else (2, 2, 2)
        fields = {"a_layout": a, "b_layout": b, "epilogue": epilogue, "alignments": alignments}
        first = next(iter(cuda.candidates(problem := Problem(m, n, k, name, out, device="h200", **fields))))
        assert (first.rung.name.startswith("wgmma"), cuda.refusal(problem, first)) == (True, "")
