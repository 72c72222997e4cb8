"""Operands: the same in every process, of the layout that was asked for."""

import numpy as np
import pytest

from gemmery import dtypes
from gemmery_lab.measure import work as work_module
from gemmery_lab.measure.work import Work, factors, numpy_dtype, offsets, operands


@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_operands_have_the_shape_and_type_and_are_reproducible(dtype):
    work = Work(3, 4, 5, dtype, dtype, batch=2)
    a, b, c = operands(work)
    assert (a.shape, b.shape, c.shape) == ((2, 3, 5), (2, 5, 4), (2, 3, 4))
    assert a.dtype == b.dtype == c.dtype == numpy_dtype(dtype)
    assert len(set(np.asarray(a, np.complex128).ravel().tolist())) > 10
    again, other = operands(work)[0], operands(Work(3, 4, 5, dtype, dtype, batch=2, seed=1))[0]
    assert a.tobytes() == again.tobytes() != other.tobytes()


@pytest.mark.parametrize(("layout", "strides"), [("row", (20, 4)), ("col", (4, 12)), ("strided", (80, 8))])
def test_a_layout_is_made_of_strides(layout, strides):
    a, _, _ = operands(Work(3, 4, 5, "f32", "f32", a_layout=layout))
    assert (a.shape, a.strides) == ((3, 5), strides)


@pytest.mark.parametrize("layout", ["row", "col", "strided"])
def test_large_operands_are_drawn_in_pieces_that_differ_and_are_reproducible(monkeypatch, layout):
    monkeypatch.setattr(work_module, "PIECE", 7)
    work = Work(16, 4, 5, "f32", "f32", a_layout=layout)
    a = operands(work)[0]
    assert a.shape == (16, 5)
    assert len(set(a.ravel().tolist())) == a.size
    assert a.tobytes() == operands(work)[0].tobytes()


def test_a_vector_is_one_dimensional_and_a_new_result_is_left_to_the_call():
    a, x, y = operands(Work(3, 1, 5, "f64", "f64", vector=True))
    assert (a.shape, x.shape, y.shape) == ((3, 5), (5,), (3,))
    assert operands(Work(3, 4, 5, "f32", "f32", call="new"))[2] is None


def test_integers_use_their_whole_range():
    a, _, _ = operands(Work(64, 1, 64, "int8", "int32"))
    assert (a.min(), a.max()) == (-128, 127)


def test_factors_are_powers_of_two_with_adjacent_rows_of_a_and_blocks_of_b():
    a, b = factors(Work(200, 300, 500, "e4m3", "bf16", scales="blocks"))
    assert (a.shape, b.shape, a.strides[0], b.strides[0]) == ((200, 4), (4, 3), 4, 4)
    assert a.dtype == b.dtype == np.float32
    assert set(np.log2(np.concatenate([a.ravel(), b.ravel()])).tolist()) == {-2, -1, 0, 1, 2}
    assert [x.shape for x in factors(Work(2, 3, 5, "e4m3", "bf16", scales="one"))] == [(1,), (1,)]


def test_groups_have_a_matrix_each_and_uneven_rows():
    work = Work(100, 8, 16, "bf16", "bf16", groups=4)
    a, b, c = operands(work)
    assert (a.shape, b.shape, c.shape) == ((100, 16), (4, 16, 8), (100, 8))
    ends = offsets(work)
    assert ends.dtype == np.int32
    assert ends[-1] == 100
    assert len(set(np.diff(ends, prepend=0).tolist())) > 1
    assert (work.problem.groups, work.problem.flops) == (4, 2 * 100 * 8 * 16)
    assert work.problem.bytes == 2 * (100 * 16 + 4 * 16 * 8 + 100 * 8)


def test_float8_has_the_types_of_ml_dtypes():
    a, _, c = operands(Work(8, 8, 8, "e4m3", "bf16", scales="one"))
    assert (a.dtype.name, c.dtype.name) == ("float8_e4m3fn", "bfloat16")
    assert numpy_dtype("e5m2").name == "float8_e5m2"


def test_a_work_says_what_it_is():
    work = Work(3, 4, 5, "int8", "int32", batch=7, a_layout="col", b_layout="strided", call="new")
    assert str(work) == "7 x 3x4x5 int8 -> int32, a transposed, b strided, allocating"
    problem = work.problem
    assert (problem.m, problem.n, problem.k, problem.batch) == (3, 4, 5, 7)
    assert (problem.a_layout, problem.b_layout) == ("col", "any")


def test_a_work_names_its_factors_and_groups():
    assert str(Work(3, 4, 5, "e4m3", "bf16", scales="blocks")) == "3x4x5 e4m3 -> bf16, factors of blocks"
    assert str(Work(3, 4, 5, "bf16", "bf16", groups=8)) == "3x4x5 bf16, 8 groups"
    assert Work(3, 4, 5, "e4m3", "bf16", scales="one").problem.scales == "outer"
