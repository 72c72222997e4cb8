"""The choice of a rung by the shape of the product and the caches of the machine."""

import pytest

from gemmery import dispatch
from gemmery.cpu.target import host
from gemmery.errors import RefusedError
from gemmery.problem import Problem

MIB = 1 << 20
ZEN = host()._replace(cpu="AMD EPYC", isa="avx512", l2=MIB)
ZEN_3 = ZEN._replace(isa="avx2")
XEON = host()._replace(cpu="Intel(R) Xeon(R)", isa="avx512", l2=2 * MIB)


def first(problem, target=ZEN):
    return dispatch.cpu.ranking(problem, target)[0][0]


@pytest.mark.parametrize(
    ("sizes", "rung"),
    [
        ((1, 500, 500), "gemv"),
        ((500, 1, 500), "gemv"),
        ((1, 5, 5000), "direct"),
        ((1, 300, 8), "gemv"),
        ((64, 64, 64), "direct"),
        ((256, 256, 256), "direct"),
        ((512, 512, 512), "packed"),
        ((64, 512, 512), "direct"),
        ((8, 1024, 1024), "streamed"),
        ((5, 400, 400), "streamed"),
        ((6, 400, 400), "streamed"),
        ((15, 300, 300), "direct"),
        ((6, 250, 250), "direct"),
        ((33, 400, 400), "direct"),
        ((600, 600, 48), "packed"),
        ((600, 600, 49), "direct"),
        ((5000, 60, 48), "direct"),
        ((5, 40, 4000), "direct"),
        ((160, 1024, 1024), "streamed"),
        ((161, 1024, 1024), "packed"),
        ((2048, 16, 2048), "direct"),
        ((4096, 4096, 32), "packed"),
    ],
)
def test_the_shape_decides(sizes, rung):
    assert first(Problem(*sizes, "f32", "f32")) == rung


@pytest.mark.parametrize(
    ("sizes", "rung"),
    [
        ((15, 300, 300), "streamed"),
        ((16, 300, 300), "direct"),
        ((48, 1024, 1024), "streamed"),
        ((49, 1024, 1024), "packed"),
    ],
)
def test_with_avx2_a_b_in_memory_is_streamed_earlier_and_for_fewer_rows(sizes, rung):
    assert first(Problem(*sizes, "f32", "f32"), ZEN_3) == rung


def test_a_column_major_result_is_the_product_of_the_transposes():
    rows = Problem(8, 1024, 1024, "f32", "f32")
    assert first(rows.transposed()) == first(rows) == "streamed"
    assert rows.transposed().transposed() == rows


def test_many_small_products_have_their_own_kernel_and_a_few_do_not():
    many = Problem(4, 4, 4, "f32", "f32", batch=1000)
    assert dispatch.specialized(many).rung.name == "batched"
    assert first(many) == first(many._replace(batch=2)) == "direct"
    assert dispatch.specialized(many._replace(m=40, n=40, k=40)) is None  # too large for a kernel of one shape


def test_tiny_products_have_tiles_of_their_own():
    tiny = Problem(8, 8, 8, "f64", "f64")
    plan = dispatch.specialized(tiny)
    assert plan.rung.name == "direct"
    assert plan.kernel.address != dispatch.plan(tiny).kernel.address
    assert dispatch.specialized(Problem(8, 8, 8, "int8", "int8")).rung.name == "direct"
    for other in (
        tiny._replace(k=800),
        tiny._replace(n=1),
        tiny._replace(b_layout="col"),
        Problem(8, 8, 8, "f16", "f16"),
    ):
        assert dispatch.specialized(other) is None


def test_intel_packs_sooner():
    middle = Problem(512, 512, 512, "f32", "f32")
    assert first(middle, XEON) == "packed"
    assert first(middle._replace(m=64), XEON) == "direct"


def test_a_rung_that_refuses_is_passed_over():
    transposed = Problem(64, 64, 64, "f32", "f32", b_layout="col")
    assert first(transposed) == "direct"
    plan = dispatch.plan(transposed)
    assert plan.rung.name == "packed"
    assert plan.reason
    assert dispatch.plan(Problem(32, 64, 64, "f16", "f16")).rung.name == "packed"


def test_what_no_rung_takes_is_refused_with_every_reason():
    with pytest.raises(RefusedError, match=r"direct: it loads vectors.*packed: it stores vectors of C"):
        dispatch.plan(Problem(64, 64, 64, "f32", "f32", c_layout="any"))
