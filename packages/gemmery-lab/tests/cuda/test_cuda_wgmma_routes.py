"""Operands that tensor copies cannot read are packed, all others stay in place; on the emulator, no GPU is needed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from checked_products import matrices, place, run
from gemmery.arrays import View
from gemmery.cuda import nvrtc
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.launch import product_argument
from gemmery.errors import RefusedError
from gemmery.ladder import gpu
from gemmery.ladder.rung import find
from gemmery.ladder.wgmma import WGMMA
from gemmery.problem import Problem
from gemmery_emulator.arguments import memory_of
from gemmery_emulator.kernels.programs import prepared
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.run import emulated
from gemmery_lab.emulated_product import Gemm, _span, problem_of
from layouts import OTHERS, laid
from operands import random

pytestmark = pytest.mark.sampled(3)

pytest.importorskip("cuda.bindings")

UNREADABLE = ("odd", "strided", "reversed", "rows reversed", "reversed col", "one row", "padded", "padded col", "col")
PRECISION = {"f32": "tf32"}


def problem(m, n, k, name="bf16", **options):
    return Problem(m, n, k, name, name, **{"device": "h200", "precision": PRECISION.get(name, ""), **options})


def placed(values, layout, one_for_all=False):
    return laid(values, layout, one_for_all)[1]


def packed_rows(a, b, c, name, grid=0):
    """Run the packing launch alone; return the problem, and the packed A and B as (batch, sides, bytes of a pitch)."""
    case = problem_of(Gemm(a, b, c), name, name, "h200", precision=PRECISION.get(name, ""))
    pack = gpu.with_packing(Geometry("", "", (1, 1, 1), (32, 1, 1)), case)
    (launch,) = pack.before
    code = nvrtc.ptx(launch.source, launch.kernel, "sm_90a")
    program = prepared(code.text, code.entry)
    spans = {"A": _span(a), "B": _span(b), "C": _span(c)}
    memory = memory_of({x: span for x, (span, _) in spans.items()}, [program.kernel], {"workspace": pack.workspace})
    memory.bytes("workspace")[:] = 0xFF
    views = [
        View(memory.address(x) + spans[x][1], array.shape, array.strides, name)
        for x, array in zip("ABC", (a, b, c), strict=True)
    ]
    argument = product_argument(case, *views, workspace=memory.address("workspace"))
    run = emulated(program, LaunchConfig((grid or launch.grid[0], 1, 1), launch.block, argument, launch.shared), memory)
    assert [str(finding) for finding in run.findings] == []
    bits, image, row = gpu.packed(case), memory.bytes("workspace"), gpu.pitch(case)
    of_a, of_b = (case.batch if x.strides[0] else 1 for x in (a, b))
    room = of_b * case.n * row  # B comes first
    second = image[:room].reshape(of_b, case.n, row) if bits & 2 else None
    rest = image[-(-room // 256) * 256 if bits & 2 else 0 :][: of_a * case.m * row]
    return case, rest.reshape(of_a, case.m, row) if bits & 1 else None, second


def check(rows, values):
    """Rows of k hold the bits of `values` (batch, sides, k) and zeros to 16 bytes; what follows is not written."""
    size, k = values.itemsize, values.shape[2]
    written = -(-k * size // 16) * 16
    expected = np.full_like(rows, 0xFF)
    expected[:, :, :written] = 0
    expected[:, :, : k * size] = np.ascontiguousarray(values[: len(rows)]).view(np.uint8)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.many
@pytest.mark.parametrize("name", ["int8", "bf16", "f32"])
@pytest.mark.parametrize("layout", UNREADABLE)
def test_every_layout_is_copied_to_rows_of_k(name, layout):
    for m, n, k in [(5, 3, 1), (3, 70, 8), (33, 7, 63), (2, 5, 301)]:
        a, b = placed(random((2, m, k), name, 1), layout), placed(random((2, k, n), name, 2), layout)
        _, first, second = packed_rows(a, b, np.zeros((2, m, n), a.dtype), name)
        if first is not None:
            check(first, a)
        if second is not None:
            check(second, b.swapaxes(1, 2))


@pytest.mark.parametrize(("name", "k"), [("int8", 300), ("int8", 303), ("bf16", 131), ("f32", 70)])
def test_columns_are_transposed_in_tiles_and_at_their_edges(name, k):
    """Of an aligned i8 in words of 4 by 4, of others by elements; two blocks take several tiles each."""
    m, n = 150, 132
    a = placed(random((1, m, k), name, 1), "col")
    b = placed(random((1, k, n), name, 2), "strided")
    _, first, second = packed_rows(a, b, np.zeros((1, m, n), a.dtype), name, grid=2)
    check(second, b.swapaxes(1, 2))
    if first is not None:
        check(first, a)


@pytest.mark.parametrize("layouts", [("odd", "col"), ("row", "odd"), ("strided", "strided")])
def test_a_matrix_repeated_in_a_batch_is_copied_once(layouts):
    a = placed(random((3, 6, 40), "bf16", 1), layouts[0], one_for_all=True)
    b = placed(random((3, 40, 16), "bf16", 2), layouts[1])
    case, first, second = packed_rows(a, b, np.zeros((3, 6, 16), a.dtype), "bf16")
    assert gpu.packed(case) == (first is not None) + 2 * (second is not None) != 0
    if first is not None:
        assert len(first) == 1
        check(first, a)
    if second is not None:
        check(second, b.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("case", "bits"),
    [
        *((problem(64, 64, 64, a_layout=a, b_layout=b), 0) for a, b in itertools.product(("row", "col"), repeat=2)),
        *((problem(64, 64, 64, alignments=(bytes_, 16, 2)), 1) for bytes_ in (2, 4, 8)),
        (problem(64, 64, 64, alignments=(16, 8, 16)), 2),
        (problem(64, 64, 64, a_layout="col", groups=3), 1),
        (problem(64, 64, 64, groups=3), 0),
        (problem(64, 64, 64, a_layout="any", b_layout="any"), 3),
        (problem(64, 64, 1), 1),  # rows of one element, which may be anywhere
        (problem(64, 1, 64), 2),
        (problem(64, 1, 64, b_layout="col"), 0),
        *((problem(64, 64, 64, name), 2) for name in ("int8", "f32")),  # both rows: B is not k-major
        *((problem(64, 64, 64, name, b_layout="col"), 0) for name in ("int8", "f32")),
        *((problem(64, 64, 64, name, a_layout="col", b_layout="col"), 1) for name in ("int8", "f32")),
        (problem(64, 64, 0, alignments=(2, 2, 2)), 0),
    ],
    ids=str,
)
def test_only_what_tensor_copies_or_wgmma_cannot_read_is_packed(case, bits):
    assert gpu.packed(case) == bits
    read = gpu.as_read(case)
    assert gpu.packed(read) == 0 or case.k < 2
    assert read.a_layout == ("row" if bits & 1 or case.k == 0 else case.a_layout)
    assert read.b_layout == ("col" if bits & 2 or case.k == 0 else case.b_layout)
    assert read.alignments[2] == case.alignments[2]


def test_the_packing_launch_has_one_instance_for_all_shapes():
    launches = {
        gpu.with_packing(Geometry("", "", (1, 1, 1), (32, 1, 1)), case).before[0]
        for case in (
            problem(4095, 4097, 4099, alignments=(2, 2, 2)),
            problem(4099, 5000, 7777, "f16", alignments=(2, 4, 16), a_layout="col", batch=3),
        )
    }
    assert {launch.kernel for launch in launches} == {"wgmma_pack<unsigned short, 3>"}
    assert all(launch.overlaps and launch.grid[0] <= 4 * 132 for launch in launches)


def test_packed_operands_follow_each_other_in_the_workspace():
    case = problem(5, 7, 65, alignments=(2, 2, 2), batch=3)
    pack = gpu.with_packing(Geometry("", "", (1, 1, 1), (32, 1, 1)), case)
    assert gpu.pitch(case) == 256
    assert pack.workspace == 3 * 5 * 256 + 3 * 7 * 256
    assert gpu.with_packing(Geometry("", "", (1, 1, 1), (32, 1, 1)), case._replace(k=1)).workspace % 256 == 0
    with pytest.raises(RefusedError, match=r"512 bytes of scratch memory .* does not split k"):
        gpu.with_packing(Geometry("", "", (1, 1, 1), (32, 1, 1), workspace=512), case)


@pytest.mark.parametrize(("k", "bytes_"), [(4096, 256), (3000, 128), (5000, 128), (64, 256), (1000, 128)])
def test_ragged_pitches_are_fetched_by_the_line(k, bytes_):
    assert gpu.promotion(problem(64, 64, k), 0) == bytes_


# ---- products ----

LIBRARY, IN_PLACE = find(WGMMA, "wgmma_epilogue"), find(WGMMA, "wgmma_tma").geometry
TILE = {"bm": 64, "bn": 32, "stages": 2, "cm": 1, "cn": 1, "band": 4, "blocks": 3}
OUT = {"f16": "f16", "bf16": "f32", "f32": "f32", "e4m3": "bf16", "e5m2": "f16", "int8": "int32"}
STORED = itertools.cycle(("row", "odd", "padded", "col", "rows reversed", "aligned", "strided"))
READ = itertools.cycle((("odd", "odd"), ("strided", "reversed"), ("one row", "odd"), ("reversed col", "strided")))


@pytest.mark.many
@pytest.mark.parametrize("name", OUT)
def test_products_of_every_type_where_loops_over_k_begin_and_end(name):
    for k in (0, 1, 8, 63, 64, 65):
        assert run(LIBRARY, *matrices((33, 20, k), name, OUT[name], (*next(READ), next(STORED))), config=TILE), k


@pytest.mark.many(3)
@pytest.mark.parametrize("layout", OTHERS)
def test_products_of_any_layout(layout):
    """Of two tiles of rows and three of columns."""
    for name, layouts in (("bf16", (layout, "odd")), ("int8", ("odd", layout))):
        assert run(LIBRARY, *matrices((65, 70, 41), name, OUT[name], (*layouts, next(STORED))), config=TILE)


@pytest.mark.parametrize("shared", [(False, False), (True, False), (False, True), (True, True)])
def test_batches_with_repeated_matrices(shared):
    a, b, c = matrices((9, 24, 40), "bf16", "bf16", ("odd", "strided", "row"), 3, shared)
    assert run(LIBRARY, a, b, c, config=TILE)


def test_alpha_beta_and_bias_with_packed_operands_and_any_c():
    for layouts in (("odd", "odd", "odd"), ("odd", "strided", "strided"), ("odd", "odd", "col")):
        a, b, c = matrices((9, 24, 41), "f16", "f16", layouts, filled=True)
        assert run(LIBRARY, a, b, c, config=TILE, alpha=1.5, beta=-0.5)
    bias = place(random((1, 1, 24), "f32", 4), "f32")
    a, b, c = matrices((9, 24, 41), "f16", "f16", ("odd", "odd", "odd"))
    assert run(LIBRARY, a, b, c, config=TILE, bias=bias, epilogue="bias+relu")


def test_the_bits_are_those_of_operands_read_in_place():
    results = []
    for layouts in (("row", "col", "row"), ("odd", "odd", "odd"), ("col", "strided", "row")):
        a, b, c = matrices((40, 24, 128), "f32", "f32", layouts)  # tf32, to which a copy might round
        assert run(LIBRARY, a, b, c, config=TILE)
        results.append(c.array.copy().tobytes())
    assert results[0] == results[1] == results[2]


def test_the_maps_of_packed_operands_point_into_the_workspace():
    case = problem(5, 7, 65, alignments=(2, 16, 2), b_layout="any")
    a, b = gpu.library(IN_PLACE, case, TILE).maps
    assert (a.packed, a.pitch, a.box) == (7 * 256, 256, (64, 5))  # the 5 rows that there are
    assert (b.packed, b.pitch, b.box) == (0, 256, (64, 7))  # k-major, whatever it was
    only_b = gpu.library(IN_PLACE, case._replace(alignments=(16, 2, 2)), TILE)
    assert [box.packed for box in only_b.maps] == [-1, 0]
    assert [launch.kernel.partition("<")[0] for launch in only_b.launches] == ["wgmma_pack", "wgmma_tma"]
    assert only_b.launches[0].kernel.endswith(", 2>")
    empty = gpu.library(IN_PLACE, case._replace(k=0), TILE)
    assert empty.before == ()
    assert empty.workspace == 0
