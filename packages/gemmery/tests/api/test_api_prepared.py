"""What runs a product on a device: a general kernel at first, one made for the product when it comes back; no GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from gemmery import tiers
from gemmery.api import prepared
from gemmery.api.device_call import DeviceCall, table
from gemmery.arrange import Arrangement
from gemmery.arrays import contiguous
from gemmery.cuda.device import KNOWN
from gemmery.cuda.geometry import Geometry
from gemmery.dispatch.cpu import Candidate
from gemmery.errors import LayoutError
from gemmery.keywords import FIELDS, NO_OPTIONS, for_kernel
from gemmery.problem import Problem

FORM = Arrangement(0, 0, 0, 1, (0, 0, 0), (0, 0, 0), (0, 0, 0))
CALL = DeviceCall("x", "y", "c")


@pytest.fixture(autouse=True)
def _no_launch_known_from_other_tests(monkeypatch):
    monkeypatch.setattr(prepared, "copies_tensors", lambda device: False)  # no kernel shares k in a cluster
    table.launches.clear()
    yield
    table.launches.clear()


class Images:
    """Stands in for the general kernels of float32 on cuda:0, and remembers what they were asked for."""

    dtype, ordinal = "f32", 0

    def __init__(self):
        self.asked = []

    def ready(self, *given):
        self.asked.append(given)
        return "general"


def test_launches_are_replaced_after_products_that_came_often():
    begun, go_on = threading.Event(), threading.Event()

    def better(m, n):
        begun.set()
        assert go_on.wait(10)
        return f"for {m} x {n}"

    served = prepared.TieredLaunch(FORM, "general", better, (5, object()))
    assert [served.next() for _ in range(prepared.OFTEN)] == ["general"] * prepared.OFTEN
    assert begun.wait(10)
    assert served.next() == "general"  # while it is compiled
    go_on.set()
    tiers.wait()
    assert served.next().startswith("for 5 x ")
    assert served.countdown == 0


def test_a_graph_waits_for_launches_in_the_making(monkeypatch):
    begun, go_on, captured = threading.Event(), threading.Event(), []

    def better(key):
        begun.set()
        assert go_on.wait(10)
        return "specialized"

    monkeypatch.setattr(prepared.driver, "captures", lambda stream: stream == 7)
    served = prepared.TieredLaunch(FORM, "general", better, (object(),), often=1)
    assert served.next() == "general"
    assert begun.wait(10)
    capture = threading.Thread(target=lambda: captured.append(served.next(7)))
    capture.start()
    capture.join(0.05)
    assert not captured
    go_on.set()
    capture.join(10)
    assert captured == ["specialized"]
    tiers.wait()


def test_launches_that_cannot_be_made_leave_the_general_ones():
    def better(key):
        raise MemoryError("none left")

    served = prepared.TieredLaunch(FORM, "general", better, (object(),))
    for _ in range(prepared.OFTEN + 1):
        served.next()
    tiers.wait()
    assert served.next() == "general"


def test_a_graph_keeps_the_launches_made_for_the_product(monkeypatch):
    monkeypatch.setattr(prepared.driver, "captures", lambda stream: stream == 7)
    served = prepared.TieredLaunch(FORM, "general", lambda key: "specialized", (object(),))
    assert [served.next(), served.next(5), served.next(7), served.next(5)] == ["general"] * 2 + ["specialized"] * 2
    assert served.countdown == 0


def test_a_graph_takes_parts_of_float32_where_the_host_would_wait(monkeypatch):
    monkeypatch.setattr(prepared.driver, "captures", lambda stream: stream == 7)
    runs = {False: "float32", True: "parts"}
    option = FIELDS.index("invariant")
    monkeypatch.setattr(
        prepared, "specialized", lambda call: prepared.PreparedLaunch(None, None, FORM, runs[call.options[option]])
    )
    for n, expected in ((640, "parts"), (384, "float32")):
        options = {"precision": "f32_tensor", "b_layout": "col", "device": "h200"}
        problem = Problem(n, n, n, "f32", "f32", **options)
        monkeypatch.setattr(prepared, "described", lambda call, problem=problem: (FORM, problem))
        table.launches.clear()
        served = prepared.prepare(CALL)
        assert [served.next(stream) for stream in (5, 7, 0, 5)] == ["float32", expected, "float32", "float32"]


def test_a_large_product_never_waits_for_its_kernel(monkeypatch):
    side = round((prepared.LARGE / 2) ** (1 / 3))
    for n, wanted in ((side - 1, "g"), (side + 1, "s")):
        problem = Problem(n, n, n, "f32", "f32", device="cuda:0")
        monkeypatch.setattr(prepared, "described", lambda call, problem=problem: (FORM, problem))
        monkeypatch.setattr(prepared, "_general", lambda form, problem, call: "g")
        monkeypatch.setattr(prepared, "specialized", lambda call: prepared.PreparedLaunch(None, None, FORM, "s"))
        table.launches.clear()
        assert prepared.prepare(CALL).run == wanted
    images = Images()
    assert prepared.prepare_new(images, "matmul", (2048, 2048), (2048, 1), (2048, 2048), (2048, 1), 0, 0, False) is None


def test_a_product_made_for_its_shape_at_once_is_not_counted():
    served = prepared.TieredLaunch(FORM, "specialized")
    assert [served.next() for _ in range(2 * prepared.OFTEN)] == ["specialized"] * 2 * prepared.OFTEN
    assert served.countdown == 0


@pytest.mark.parametrize("on", [True, False])
def test_tiers_decide_what_runs_at_first(monkeypatch, on):
    """GEMMERY_TIERS=off plans each product for its shape at once."""
    monkeypatch.setattr(prepared.tiers, "enabled", lambda: on)
    monkeypatch.setattr(prepared, "described", lambda call: (FORM, Problem(5, 3, 7, "f32", "f32", device="cuda:0")))
    monkeypatch.setattr(prepared, "_general", lambda form, problem, call: "g")
    monkeypatch.setattr(prepared.dispatch, "plan", lambda problem: prepared.dispatch.Plan("s", {}, None, ""))
    monkeypatch.setattr(
        prepared, "_ready", lambda plan, form, problem, *_: prepared.PreparedLaunch(plan, problem, form, plan.rung)
    )
    served = prepared.prepare(CALL)
    assert (served.run, bool(served.countdown)) == (("g", True) if on else ("s", False))


PLAIN = Problem(64, 64, 64, "f16", "f16", device="h200")
LOADED, NOT_LOADED, NO_MAPS = (("a",), True), (("a",), False), ((), True)
GENERAL, SHARED = ("general", prepared.SOON), ("shared", 0)


@pytest.mark.parametrize(
    ("alike", "change", "kernel", "served"),
    [
        (True, {}, LOADED, GENERAL),
        (True, {"m": 1024, "n": 1024, "k": 1024}, LOADED, SHARED),
        (True, {"m": 1024, "n": 1024, "k": 1024}, NOT_LOADED, ("general", 1)),
        (True, {"m": 1024, "n": 1024, "k": 1024}, NO_MAPS, ("general", 1)),
        (True, {"m": 1700, "n": 1700, "k": 1700}, NOT_LOADED, SHARED),
        (False, {}, NOT_LOADED, SHARED),
        (False, {}, NO_MAPS, GENERAL),
        (True, {"epilogue": "bias+relu"}, LOADED, GENERAL),
        (True, {"epilogue": "bias+gelu"}, NOT_LOADED, SHARED),
        (True, {"epilogue": "silu"}, NOT_LOADED, SHARED),
        (True, {"scaled": True}, LOADED, GENERAL),
        (True, {"scaled": True, "epilogue": "bias"}, NOT_LOADED, SHARED),
        (True, {"k": 4096, "dtype": "bf16"}, NOT_LOADED, SHARED),  # which is split
        (True, {"k": 4096, "batch": 1000}, LOADED, SHARED),
    ],
)
def test_kernels_for_many_shapes_run_at_once_where_they_are_loaded_or_their_bits_differ(
    monkeypatch, alike, change, kernel, served
):
    problem, (maps, loaded) = PLAIN._replace(**change), kernel
    launch = Geometry("s.cu", "k", (1, 1, 1), (1, 1, 1), maps=maps)
    rung = SimpleNamespace(geometry=lambda p, config: launch)
    splits = 2 if problem.k == 4096 and problem.batch == 1 else 1
    monkeypatch.setattr(prepared, "ADDS_ALIKE", alike)
    monkeypatch.setattr(prepared, "copies_tensors", lambda device: True)
    monkeypatch.setattr(prepared, "described", lambda call: (FORM, problem))
    monkeypatch.setattr(prepared.dispatch, "choice", lambda problem: Candidate(rung, {"splits": splits}, ""))
    monkeypatch.setattr(prepared.driver, "is_loaded", lambda *names: loaded and names == ("s.cu", "k", "h200"))
    monkeypatch.setattr(prepared, "_general", lambda form, problem, call: "general")
    monkeypatch.setattr(prepared, "specialized", lambda call: prepared.PreparedLaunch(None, None, FORM, "shared"))
    launches = prepared.prepare(CALL)
    assert (launches.run, launches.countdown) == served


@pytest.mark.parametrize(("side", "general"), [(64, True), (256, False), (1200, False), (1500, False)])
def test_new_shapes_of_float32_take_the_slow_path_where_blocks_may_share_k(monkeypatch, side, general):
    monkeypatch.setattr(prepared, "copies_tensors", lambda device: device == "cuda:0")
    monkeypatch.setattr(prepared.driver, "find", lambda device: KNOWN["h200"])
    launch = prepared.prepare_new(Images(), "matmul", (side, side), (side, 1), (side, side), (side, 1), 0, 0, False)
    assert (launch is not None) == general


@pytest.mark.parametrize(("alike", "sides"), [(True, (1000, 1100)), (False, ())])
def test_new_shapes_of_types_with_shared_kernels_take_the_slow_path_where_those_may_run(monkeypatch, alike, sides):
    monkeypatch.setattr(prepared, "ADDS_ALIKE", alike)
    monkeypatch.setattr(prepared, "copies_tensors", lambda device: device == "cuda:0")
    monkeypatch.setattr(prepared.driver, "find", lambda device: KNOWN["h200"])
    images = Images()
    images.dtype = "bf16"
    served = {
        side: prepared.prepare_new(images, "matmul", (side, side), (side, 1), (side, side), (side, 1), 0, 0, False)
        for side in (64, *sides)
    }
    assert [side for side, launch in served.items() if launch is not None] == ([64, 1000] if alike else [])
    assert {launch[0].countdown for launch in served.values() if launch} == ({prepared.SOON} if alike else set())


def test_strides_that_no_map_takes_are_planned_as_unaligned(monkeypatch):
    problem = Problem(64, 64, 64, "f16", "f32", device="cuda:0")
    monkeypatch.setattr(prepared, "described", lambda call: (FORM, problem))
    monkeypatch.setattr(prepared.dispatch, "plan", lambda problem: problem)

    def ready(plan, form, problem, call):
        if problem.alignments[0] == 16:
            raise LayoutError("a stride of 2^40 bytes")
        return plan.alignments

    monkeypatch.setattr(prepared, "_ready", ready)
    assert prepared.specialized(CALL) == (2, 2, 4)


@pytest.mark.parametrize(
    ("name", "a", "a_step", "b", "b_step", "asked", "shape"),
    [
        ("matmul", (5, 3), (3, 1), (3, 7), (7, 1), (5, 7, 3, (3, 1), (7, 1), (7, 1)), (5, 7)),
        ("matmul", (3,), (2,), (3, 7), (1, 3), (1, 7, 3, (0, 2), (1, 3), (7, 1)), (7,)),
        ("matmul", (5, 3), (1, 5), (3,), (4,), (5, 1, 3, (1, 5), (4, 0), (1, 1)), (5,)),
        ("matmul", (3,), (1,), (3,), (1,), (1, 1, 3, (0, 1), (1, 0), (1, 1)), ()),
        ("gemv", (5, 3), (3, 1), (3,), (1,), (5, 1, 3, (3, 1), (1, 0), (1, 1)), (5,)),
        ("plain gemm", (5, 3), (0, 1), (3, 7), (7, 1), (5, 7, 3, (0, 1), (7, 1), (7, 1)), (5, 7)),
    ],
)
def test_new_shapes_of_matrices_and_vectors_are_prepared_at_once(name, a, a_step, b, b_step, asked, shape):
    images = Images()
    served, result, strides = prepared.prepare_new(images, name, a, a_step, b, b_step, 4096 + 8, 4096, False)
    assert images.asked == [(*asked, 4096 + 8)]
    assert (served.run, result) == ("general", shape)
    assert strides == contiguous(shape, 1)
    assert served.countdown == prepared.OFTEN


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("matmul", (5, 3), (4, 7)),  # the slow path raises the error
        ("matmul", (2, 5, 3), (3, 7)),
        ("matmul", (0, 3), (3, 7)),
        ("matmul", (5, 0), (0, 7)),
        ("matmul", (), (3, 7)),
        ("gemm", (3,), (3, 7)),
        ("plain gemm", (5, 3), (3,)),
        ("gemv", (5, 3), (3, 7)),
        ("matmul", (2_000_000_000, 3), (3, 7)),
    ],
)
def test_other_products_are_left_to_the_slow_path(name, a, b):
    images = Images()
    assert prepared.prepare_new(images, name, a, (1,) * len(a), b, (1,) * len(b), 0, 0, False) is None
    assert images.asked == []


def test_the_launches_of_a_new_shape_are_made_from_the_same_product(monkeypatch):
    """Its views have the shapes, strides in bytes and lowest address bits of the operands."""
    asked = []

    def specialized(call):
        asked.append(call)
        return prepared.PreparedLaunch(None, None, FORM, "specialized")

    monkeypatch.setattr(prepared, "specialized", specialized)
    served, _, _ = prepared.prepare_new(Images(), "gemm", (5, 3), (1, 5), (3, 7), (7, 1), 4096 + 4, 8192, True)
    served._swap()
    ((x, y, target, *options),) = asked
    assert served.next() == "specialized"
    assert (x.pointer, x.shape, x.strides, x.dtype, x.device) == (4, (5, 3), (4, 20), "f32", "cuda:0")
    assert (y.pointer, y.shape, y.strides) == (0, (3, 7), (28, 4))
    assert (target.shape, target.strides) == ((5, 7), (28, 4))
    assert options == [None, "", True, for_kernel(NO_OPTIONS), None, "", False]  # scaled
