"""cublasLt's products of groups on a stand-in for the library, which reads its arrays as the manual says."""

import ctypes
import importlib.util
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gemmery.arrays import View
from gemmery.errors import RefusedError
from gemmery_lab.measure.work import Work, offsets, operands

FILE = Path(__file__).parents[4] / "benchmarks" / "cublaslt_groups.py"
NOT_SUPPORTED = 15

_spec = importlib.util.spec_from_file_location("cublaslt_groups", FILE)
cublaslt_groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cublaslt_groups)


class HostMemory:
    """Memory of the host in place of the device's."""

    def __init__(self, size, ordinal):
        self.ordinal, self.bytes = ordinal, np.zeros(size, np.uint8)
        self.pointer = self.bytes.ctypes.data

    def write(self, array):
        self.bytes[:] = np.frombuffer(array.tobytes(), np.uint8)


def at(pointer, count, kind):
    """The numbers at an address."""
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), kind)


class StandIn:
    """Products of float16 by columns: an object is the index of what it was created with."""

    def __init__(self, proposals=1):
        self.objects, self.settings, self.proposals = [None], {}, proposals

    def _create(self, created, *arguments):
        created._obj.value = len(self.objects)
        self.objects.append([getattr(x, "value", x) for x in arguments])
        return 0

    cublasLtCreate = cublasLtMatmulDescCreate = cublasLtMatmulPreferenceCreate = _create
    cublasLtGroupedMatrixLayoutCreate = _create

    def _set(self, owner, name, value, size):
        assert size.value == ctypes.sizeof(value._obj)
        self.settings[owner.value, name] = value._obj.value
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _set

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, b, a, c, d, preference, most, choice, count):
        self.preference = {name: value for (owner, name), value in self.settings.items() if owner == preference.value}
        count._obj.value = self.proposals
        return 0 if self.proposals else NOT_SUPPORTED

    def _matrices(self, layout, addresses):
        kind, count, *arrays = self.objects[layout.value]
        assert kind == cublaslt_groups.ELEMENTS["f16"]
        shapes = zip(*(at(array, count, np.int32).tolist() for array in arrays), strict=True)
        for (rows, columns, step), address in zip(shapes, at(addresses.value, count, np.int64).tolist(), strict=True):
            stored = at(address, max(0, step * (columns - 1) + rows) if rows and columns else 0, np.float16)
            yield np.lib.stride_tricks.as_strided(stored, (rows, columns), (2, 2 * step))

    def cublasLtMatmul(self, handle, product, alpha, b, b_as, a, a_as, beta, c, c_as, d, d_as, *rest):
        modes = {name: value for (owner, name), value in self.settings.items() if owner == product.value}
        assert modes[cublaslt_groups.SCALARS] == cublaslt_groups.ON_DEVICE
        assert modes[cublaslt_groups.ALPHA_STEP] == modes[cublaslt_groups.BETA_STEP] == 1
        triples = zip(self._matrices(b_as, b), self._matrices(a_as, a), self._matrices(d_as, d), strict=True)
        count = self.objects[b_as.value][1]
        factors = [[at(x, 1, np.float32)[0] for x in at(y.value, count, np.int64).tolist()] for y in (alpha, beta)]
        assert factors == [[1] * count, [0] * count]
        for left, right, out in triples:
            if out.size:
                factor = left.T if modes[cublaslt_groups.TRANSPOSED_A] else left
                out[:] = factor.astype(np.float32) @ right.astype(np.float32)
        return 0


@pytest.fixture
def place(monkeypatch):
    """Puts a work into the host's memory."""
    monkeypatch.setattr(cublaslt_groups, "Memory", HostMemory)
    monkeypatch.setattr(cublaslt_groups.driver, "on", lambda ordinal: nullcontext())

    def placed(work, library):
        monkeypatch.setattr(cublaslt_groups.ctypes, "CDLL", lambda name: library)
        a, b, c = (x if x.ndim == 3 else x[None] for x in operands(work))
        views = [View(x.ctypes.data, x.shape, x.strides, work.dtype) for x in (a, b, c)]
        operand_set = SimpleNamespace(a=views[0], b=views[1], c=views[2])
        stream = SimpleNamespace(ordinal=0, handle=7)
        return SimpleNamespace(work=work, sets=[operand_set], stream=stream, host=(a, b, c))

    return placed


@pytest.mark.parametrize("layout", ["row", "col"])
def test_every_group_is_multiplied_by_its_matrix(place, layout):
    work = Work(100, 24, 40, "f16", "f16", b_layout=layout, groups=7)
    library = StandIn()
    resident = place(work, library)
    cublaslt_groups.grouped(resident)(0)
    a, b, c = resident.host
    start = 0
    for end, matrix in zip(offsets(work).tolist(), b, strict=True):
        expected = a[0, start:end].astype(np.float64) @ matrix.astype(np.float64)
        np.testing.assert_allclose(c[0, start:end], expected, rtol=2e-3, atol=2e-2)
        start = end
    assert library.preference[cublaslt_groups.MEAN_COLUMNS] == 100 // 7


def test_a_library_without_groups_is_refused_with_the_versions_that_have_them(place):
    work = Work(100, 24, 40, "f16", "f16", groups=4)
    with pytest.raises(RefusedError, match=r"13\.4"):
        cublaslt_groups.grouped(place(work, SimpleNamespace()))


@pytest.mark.parametrize("work", [Work(64, 32, 48, "e4m3", "bf16", groups=4), Work(64, 32, 48, "f32", "f32", groups=4)])
def test_other_types_are_refused(place, work):
    with pytest.raises(RefusedError, match="bf16 and f16"):
        cublaslt_groups.grouped(place(work, StandIn()))


def test_a_device_without_a_kernel_is_a_refusal(place):
    with pytest.raises(RefusedError, match="status 15"):
        cublaslt_groups.grouped(place(Work(100, 24, 40, "f16", "f16", groups=4), StandIn(proposals=0)))
