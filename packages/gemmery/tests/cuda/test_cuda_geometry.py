"""What a device cannot run is refused before the launch, with number and limit; what is launched is packed right."""

from __future__ import annotations

import struct

import pytest

from gemmery.arrays import View
from gemmery.cuda import geometry, halved, launch, nvrtc
from gemmery.cuda.device import KNOWN
from gemmery.cuda.driver import find
from gemmery.cuda.geometry import Geometry, refusal
from gemmery.errors import DeviceError, RefusedError, ShapeError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find as rung
from gemmery.problem import Problem

H200, T4 = KNOWN["h200"], KNOWN["t4"]


def shape(grid=(1, 1, 1), block=(32, 1, 1), **options):
    return Geometry("some.cu", "some<float>", grid, block, **options)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (shape(block=(1025, 1, 1)), "1025 threads per block: h200 runs at most 1024"),
        (shape(block=(33, 32, 1)), "1056 threads per block: h200 runs at most 1024"),
        (shape(shared=232449), "232449 bytes of shared memory per block: h200 has 232448"),
        (shape(needs=100, instructions="tcgen05"), r"it needs sm_100 \(tcgen05\); h200 is sm_90"),
        (shape(needs=100), "it needs sm_100; h200 is sm_90"),
        (shape(grid=(2**31, 1, 1)), "2147483648 blocks in x: a grid has at most 2147483647 there"),
        (shape(grid=(1, 65536, 1)), "65536 blocks in y: a grid has at most 65535 there"),
        (shape(grid=(1, 1, 65536)), "65536 blocks in z: a grid has at most 65535 there"),
        (shape(before=(shape(block=(2048, 1, 1)),)), "2048 threads per block"),
    ],
)
def test_what_does_not_fit_is_refused_with_number_and_limit(one, words):
    with pytest.raises(RefusedError, match=words):
        raise RefusedError(refusal(one, H200))


def test_what_just_fits_is_not_refused():
    largest = shape((2**31 - 1, 65535, 65535), (32, 32, 1), shared=232448, needs=90)
    assert refusal(largest, H200) == ""
    assert refusal(shape(before=(largest,)), H200) == ""
    assert refusal(shape(shared=64 << 10), T4) == ""
    assert refusal(shape(shared=(64 << 10) + 1), T4)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("simt_linear", {"threads": 1025}, "1025 threads per block: h200 runs at most 1024"),
        ("simt_linear", {"threads": 2048}, "2048 threads per block: h200 runs at most 1024"),
        ("simt_linear", {"threads": 0}, "threads=0: it must be at least 1"),
        ("simt_naive", {"threads": 16}, "threads=16: .* use a multiple of 32"),
        ("simt_naive", {"threads": 1056}, "1056 threads per block"),
        ("simt_smem", {"tile": 33}, "1089 threads per block"),
        ("simt_smem", {"tile": 0}, "tile=0: it must be at least 1"),
        ("simt_smem_transposed", {"tile": 12}, "tile=12: .* use 8, 16 or 32"),
        ("simt_packed", {"block": 33}, "1089 threads per block"),
    ],
)
def test_a_config_that_cannot_run_is_refused(name, config, words):
    one = rung(CUDA, name)
    with pytest.raises(RefusedError, match=words):
        raise RefusedError(refusal(one.geometry(Problem(100, 100, 100, "f32", "f32"), {**one.default, **config}), H200))


def test_one_block_holds_1024_elements():
    one = rung(CUDA, "simt_single_block")
    for m, n in [(32, 32), (1, 1024), (1024, 1)]:
        problem = Problem(m, n, 5, "f32", "f32")
        assert one.refuses(problem) == ""
        assert refusal(one.geometry(problem, one.default), H200) == ""
    larger = Problem(25, 41, 5, "f32", "f32")
    assert "1025 elements" in one.refuses(larger)
    assert "1024" in one.refuses(larger)
    assert "1025 threads" in refusal(one.geometry(larger, one.default), H200)


@pytest.mark.parametrize("one", CUDA, ids=lambda one: one.name)
def test_every_config_of_a_space_is_taken_or_refused_in_words(one):
    problem = Problem(512, 512, 512, one.dtypes[0], one.dtypes[0], device="h200")
    for key, values in one.space.items():
        for value in values:
            try:
                reason = refusal(one.geometry(problem, {**one.default, key: value}), H200)
            except RefusedError as error:
                reason = str(error)
            assert reason == "" or len(reason.split()) > 3


def test_a_grid_steps_over_what_its_y_and_z_cannot_count():
    tall = Problem(9_000_000, 32, 1, "f32", "f32", batch=70_000)
    for name in ("simt_naive", "simt_uncoalesced"):
        for problem in (tall, tall.transposed()):
            one = rung(CUDA, name)
            assert refusal(one.geometry(problem, one.default), H200) == ""


def test_devices_that_are_not_there_are_said_so():
    with pytest.raises(DeviceError, match=r"gtx970.*known: cuda, cuda:N, h200"):
        find("gtx970")
    assert find("h200").arch == "sm_90a"
    assert find("t4").arch == "sm_75"


def test_how_many_elements_an_access_takes():
    for alignments, widths in [((16, 8, 4), (4, 2, 1)), ((4, 16, 2), (1, 4, 1))]:
        problem = Problem(8, 8, 8, "f32", "f32", alignments=alignments)
        assert tuple(geometry.vector(problem, operand) for operand in range(3)) == widths
    half = Problem(8, 8, 8, "f16", "f32", alignments=(16, 2, 16))
    assert [geometry.vector(half, operand) for operand in range(3)] == [8, 1, 4]
    assert geometry.vector(half, 0, most=4) == 2
    column = Problem(8, 1, 1, "f16", "f16", b_layout="col")  # A is 8 x 1: 16 bytes of it are 8 rows
    assert [geometry.vector(column, operand) for operand in range(3)] == [1, 1, 1]


FIELDS = ["a", "b", "c", "bias", "workspace"] + [f"{x}_{y}" for x in "abc" for y in ("batch", "row", "col")]
FIELDS += ["bias_row", "bias_col", "m", "n", "k", "batch", "alpha", "beta"]


def offsets(number):
    """Where the fields of Product lie, by the rules of C on a 64-bit machine, and its size."""
    formats = ["Q"] * 5 + ["q"] * 11 + ["i"] * 4 + [number] * 2
    found, at = {}, 0
    for name, form in zip(FIELDS, formats, strict=True):
        size = struct.calcsize(form)
        at = -(-at // size) * size
        found[name] = (at, form)
        at += size
    return found, -(-at // 8) * 8


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("out", "type_", "number"), [("f32", "float", "f"), ("f16", "f16", "f"), ("f64", "double", "d")]
)
def test_the_argument_is_packed_as_the_compiler_lays_it_out(monkeypatch, out, type_, number):
    where, size = offsets(number)
    asserts = [f'static_assert(__builtin_offsetof(P, {name}) == {at}, "");' for name, (at, _) in where.items()]
    source = f'#include "product.cuh"\nusing P = Product<{type_}, {type_}>;\n{"".join(asserts)}'
    source += f'static_assert(sizeof(P) == {size}, "");\ntemplate <int N> __global__ void layout(P p) {{}}'
    monkeypatch.setattr(nvrtc, "text", lambda _: source)
    nvrtc.compiled("layout.cu", "layout<0>", "sm_80")

    e = {"f16": 2, "f32": 4, "f64": 8}[out]
    a = View(11, (3, 4, 6), (24 * e, 6 * e, 1 * e), out)
    b = View(12, (3, 6, 5), (-30 * e, 5 * e, 2 * e), out)
    c = View(13, (3, 4, 5), (2**33 * e, 7 * e, 3 * e), out)
    bias = View(14, (5,), (8 if out == "f64" else 4,), "f64" if out == "f64" else "f32")
    problem = Problem(4, 5, 6, out, out, 3)
    given = launch.product_argument(problem, a, b, c, bias, alpha=2.0, beta=0.5, workspace=15)
    expected = [11, 12, 13, 14, 15, 24, 6, 1, -30, 5, 2, 2**33, 7, 3, 0, 1, 4, 5, 6, 3, 2.0, 0.5]
    assert len(given) == size
    assert [struct.unpack_from(form, given, at)[0] for at, form in where.values()] == expected

    transposed = launch.product_argument(
        problem._replace(c_layout="col"), a, b, c, bias, alpha=2.0, beta=0.5, workspace=15
    )
    expected = [12, 11, 13, 14, 15, -30, 2, 5, 24, 1, 6, 2**33, 3, 7, 1, 0, 5, 4, 6, 3, 2.0, 0.5]
    assert [struct.unpack_from(form, transposed, at)[0] for at, form in where.values()] == expected


def test_rows_that_are_apart_are_those_of_a_batch():
    a, b = View(11, (1, 16, 6), (999, 20, 2), "f16"), View(12, (1, 6, 5), (999, 2, 14), "f16")
    c = View(13, (1, 16, 5), (999, 12, 2), "f16")
    given = launch.product_argument(Problem(16, 5, 6, "f16", "f16"), a, b, c, apart=8)
    where, _ = offsets("f")
    expected = [11, 12, 13, 0, 0, 10, 80, 1, 0, 1, 7, 6, 48, 1, 0, 0, 2, 5, 6, 8, 1.0, 0.0]
    assert [struct.unpack_from(form, given, at)[0] for at, form in where.values()] == expected
    columns = (View(each.pointer, (1, *each.shape[:0:-1]), (999, *each.strides[:0:-1]), "f16") for each in (b, a, c))
    transposed = Problem(5, 16, 6, "f16", "f16", c_layout="col")
    assert launch.product_argument(transposed, *columns, apart=8) == given


def test_a_sum_of_matrices_that_differ_is_refused():
    one = View(256, (1, 4, 4), (64, 16, 4), "f32", "cuda:0")
    with pytest.raises(ShapeError, match="must be equal"):
        halved.addition(one, one._replace(shape=(1, 4, 5)), one)


def test_a_sum_takes_as_many_elements_as_all_three_allow():
    def width(**options):
        return halved.geometry_of_sum(Problem(4, 100, 0, "f16", "f16", **options), {"threads": 256}).kernel[-2]

    assert width() == "8"
    assert width(alignments=(16, 4, 16)) == "2"
    assert width(b_layout="col") == "1"
