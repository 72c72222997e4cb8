"""How a matrix times a vector is launched: which operand is the matrix, how it is shared out, what is refused."""

import re

import pytest

from gemmery.cuda import nvrtc
from gemmery.errors import RefusedError
from gemmery.ladder.gemv import GEMV
from gemmery.ladder.rung import find
from gemmery.problem import Problem

ROW = Problem(1, 1000, 128, "f16", "f16", b_layout="col")  # y = x W', W 1000 x 128 by rows
COLUMN = Problem(1000, 1, 128, "f16", "f16")  # y = W x
ACROSS = Problem(1, 1000, 128, "f16", "f16")  # y = x W, W 128 x 1000 by rows
RUNGS = [pytest.param(rung, id=rung.name) for rung in GEMV]


def launched(problem, **config):
    rung = find(GEMV, "gemv_vectorized")
    return rung.geometry(problem, {**rung.default, **config})


def parameters(geometry):
    """The arguments of the template and of its types, behind the element types and the epilogue."""
    texts = re.sub(r"\w+<|>", "", geometry.kernel).split(", ")[3:]
    return [int(text) if text.isdecimal() else text for text in texts]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("problem", [ROW, COLUMN, ROW._replace(batch=7), ROW._replace(n=1), ROW._replace(k=0)])
def test_every_result_has_its_threads(rung, problem):
    for key, values in {"": (0,), **rung.space}.items():
        for value in values:
            try:
                geometry = rung.geometry(problem, {**rung.default, **({key: value} if key else {})})
            except RefusedError:
                continue
            given = parameters(geometry)
            assert given[0] == (problem.n == 1)
            name = geometry.kernel[: geometry.kernel.index("<")]
            if name == "gemv_warp":
                each = geometry.threads // 32 * given[1]
            elif name == "gemv_vectorized":
                team, rows, threads = given[6], given[7], given[9]
                assert threads == geometry.threads
                each = threads // team * rows
            elif name == "gemv_finish":
                each = geometry.threads // given[2]
            else:
                each = geometry.threads
            assert (geometry.grid[0] - 1) * each < max(problem.m, problem.n) <= geometry.grid[0] * each
            assert geometry.grid[1] == problem.batch


@pytest.mark.parametrize("rung", RUNGS)
def test_a_matrix_of_results_is_refused_in_words(rung):
    assert "3 x 2" in rung.refuses(Problem(3, 2, 5, "f32", "f32"))
    assert not rung.refuses(ROW)
    assert not rung.refuses(COLUMN)


def test_the_contiguous_side_of_the_matrix_decides_the_kernel():
    assert launched(ROW).source == launched(COLUMN).source == "gemv_vectorized.cu"
    assert launched(ACROSS).source == launched(COLUMN._replace(a_layout="col")).source == "gemv_columns.cu"
    assert launched(ROW._replace(n=1, b_layout="row")).source == "gemv_vectorized.cu"  # one column is a vector, too


@pytest.mark.parametrize(
    ("problem", "elements"),
    [
        (ROW, 8),
        (ROW._replace(dtype="f32", out="f32"), 4),
        (ROW._replace(dtype="f64", out="f64"), 2),
        (ROW._replace(alignments=(16, 4, 16)), 2),
        (ROW._replace(alignments=(8, 16, 2)), 4),  # x is read in the same chunks
        (ROW._replace(a_layout="col"), 1),
        (COLUMN._replace(alignments=(16, 2, 16)), 8),  # of a column the kernel looks
        (COLUMN._replace(alignments=(4, 16, 16)), 2),
        (ROW._replace(alignments=(16, 2, 16)), 1),
        (ROW._replace(b_layout="any"), 1),
    ],
)
def test_a_chunk_is_what_the_matrix_alignment_allows(problem, elements):
    assert parameters(launched(problem))[4] == elements


@pytest.mark.parametrize("split", [1, 4])
def test_what_a_kernel_is_told_of_the_end_of_k_holds(split):
    told = set()
    for k in [*range(1, 700, 3), *(64 << power for power in range(14))]:
        geometry = launched(ROW._replace(k=k), split=split)
        vec, cover, team, _, steps = parameters(geometry.launches[0])[4:9]
        told.add(cover)
        step = vec * team * steps * split
        assert cover == ("PARTS" if vec == 1 or k % step else "ONCE" if k == step else "WHOLE")
    assert told == {"PARTS", "ONCE", "WHOLE"}


def test_a_split_leaves_its_sums_in_a_workspace_and_adds_them_up():
    geometry = launched(ROW._replace(batch=3), split=8)
    assert geometry.source == "gemv_finish.cu"
    (first,) = geometry.before
    assert first.grid[2] == 8
    assert geometry.workspace == 8 * 3 * 1000 * 4
    assert launched(ROW._replace(out="f64"), split=8).workspace == 8 * 1000 * 8
    assert launched(ROW).workspace == 0


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("gemv_warp", {"r": 3}, "r = 3"),
        ("gemv_warp", {"r": 32}, "gemv_thread"),
        ("gemv_warp", {"threads": 48}, "whole warps"),
        ("gemv_vectorized", {"team": 24}, "power of two"),
        ("gemv_vectorized", {"rows": 4, "team": 2}, "rows = 4"),
        ("gemv_vectorized", {"team": 2048}, "1024"),
        ("gemv_vectorized", {"rows": 4, "steps": 8}, "registers"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(name, config, words):
    rung = find(GEMV, name)
    with pytest.raises(RefusedError, match=re.escape(words)):
        rung.geometry(ROW, {**rung.default, **config})


def test_along_columns_a_team_is_part_of_a_warp():
    with pytest.raises(RefusedError, match="at most 32"):
        launched(ACROSS, team=64)


def test_more_blocks_than_run_evenly_become_half_as_many_that_share_k():
    def grid(n, dtype="bf16", **fields):
        product = Problem(1, n, 4096, dtype, dtype, device="h200", alignments=(16, 16, 16), **fields)
        rung = find(GEMV, "gemv_vectorized")
        return rung.geometry(product, rung.default).launches[0].grid

    assert grid(17000) == (266, 1, 1)
    assert grid(20480) == (160, 1, 2)
    assert grid(32000) == (250, 1, 2)
    assert grid(32000, "f32") == (1000, 1, 1)
    assert grid(20480, batch=2) == (320, 2, 1)


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["f16", "f64"])
def test_nothing_spills_at_any_number_of_threads(name):
    pytest.importorskip("cuda.bindings")
    problem = ROW._replace(k=16384, dtype=name, out=name)
    for config in ({"team": 1024}, {"threads": 512}, {"rows": 1, "steps": 8}, {"rows": 2, "steps": 4}, {"split": 64}):
        geometry = launched(problem, **config)
        for one in geometry.launches:
            report = nvrtc.code(one.source, one.kernel, "sm_90a").report
            assert report.spill_stores == report.spill_loads == 0, one.kernel
            assert report.registers * one.threads <= 65536, one.kernel


@pytest.mark.parametrize(("device", "overlap", "early"), [("h200", 1, True), ("h200", 0, False), ("a100", 1, False)])
@pytest.mark.parametrize("problem", [ROW, ROW._replace(b_layout="row", n=64)])
def test_a_launch_overlaps_with_the_one_before_where_the_device_can(problem, device, overlap, early):
    rung = find(GEMV, "gemv_vectorized")
    made = rung.geometry(problem._replace(device=device), {**rung.default, "overlap": overlap})
    assert made.overlaps is early
    assert parameters(made)[3] == early


def test_a_launch_of_more_blocks_than_run_at_once_waits_its_turn():
    assert launched(ROW._replace(device="h200", n=4096)).overlaps
    assert not launched(ROW._replace(device="h200", n=4096, k=4096)).overlaps
    assert not launched(ROW._replace(device="h200", batch=10_000)).overlaps


def test_what_adds_up_parts_of_k_waits_for_them():
    rung = find(GEMV, "gemv_vectorized")
    made = rung.geometry(ROW._replace(device="h200", k=1 << 20, n=1), {**rung.default, "split": 8})
    (parts,) = made.before
    assert parts.overlaps
    assert not made.overlaps
