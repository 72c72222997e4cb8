"""The exhibits on a GPU: every element of every result, at every config of the space."""

import numpy as np
import pytest

import gemmery_lab as lab
from gemmery.cuda import driver
from gemmery.cuda.driver import Memory
from gemmery.ladder.exhibits import EXHIBITS, numbers, put

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

GUARD = 4096  # bytes behind y that must stay as they were


@pytest.mark.parametrize("shown", [pytest.param(one, id=one.name) for one in EXHIBITS])
def test_every_result_is_exact_and_nothing_else_is_written(shown):
    show, x = shown.show, numbers(shown.show.n)
    held = Memory(x.nbytes)
    held.write(x)
    for config in shown.configs():
        results = show.results(show.n, config)
        to = Memory(4 * results + GUARD)
        to.fill(0xFF)
        driver.synchronize()
        put(shown, config, held.pointer, to.pointer, 0)(0)
        driver.synchronize()
        y = np.empty(results + GUARD // 4, np.float32)
        to.read(y)
        assert np.array_equal(y[:results], show.expected(x, config)), config
        assert np.isnan(y[results:]).all(), config


def test_an_exhibit_is_measured_beside_its_parent():
    run = lab.exhibit("reduce_strided", seconds=0.02)
    assert len(run.measurements) == 5
    for m in run.measurements:
        assert m.checked
        assert m.error == 0
        assert m.seconds > 0
        assert set(m.versus) == {"reduce_adjacent"}
        assert "working warps" in m.note
