"""What the commands do on a GPU, on a made-up device: NumPy computes, and times are what a rung's name says."""

import functools
import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

import gemmery
import gemmery_lab as lab
import records
from gemmery import dtypes
from gemmery.cuda import driver
from gemmery.cuda.device import KNOWN
from gemmery.errors import ArgumentError, DeviceError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung
from gemmery.limits import Bandwidth
from gemmery_lab import climb, on_cuda, suites
from gemmery_lab import session as contest
from gemmery_lab import session as sessions
from gemmery_lab import suites as shapes
from gemmery_lab.asked import ordinal
from gemmery_lab.experiments import LADDER
from gemmery_lab.measure import suite, torch_operands
from gemmery_lab.measure.cublas import Caller, Placed
from gemmery_lab.measure.timing import Contestant
from gemmery_lab.measure.torch_operands import DeviceOperands, poison
from gemmery_lab.measure.work import Work, factors, offsets, operands
from gemmery_lab.measurements import WRONG, MachineLimits
from gemmery_lab.on_cuda import NO_RIVAL, Cuda
from gemmery_lab.session import Session, Task

RATE = 1e9  # operations a second of the slowest rung


class Resident:
    """DeviceOperands where NumPy finds them."""

    def __init__(self, work):
        self.work, self.problem = work, work.problem._replace(device="cuda:0")
        self.host = tuple(x if x.ndim == 3 else x[None] for x in operands(work))
        self.sets = (DeviceOperands(*self.host), DeviceOperands(*(x.copy() for x in self.host)))
        self.stream, self.scales, self.offsets = self, (), None

    def synchronize(self):
        """Nothing is under way."""

    def poison(self):
        self.host[2].view(np.uint8).fill(poison(self.host[2].dtype))

    def result(self):
        return self.host[2]


class Monitor:
    def clock(self):
        return 1755


class MadeUp(Cuda):
    """A backend whose device is NumPy, and on which a product takes as long as its rung was told to."""

    machine, ladder, rivals = records.MACHINE, CUDA, ()

    def __init__(self, ordinal=0, rivals=(), ladder=CUDA):
        self.device, self.monitor = f"cuda:{ordinal}", Monitor()
        self.rivals, self.ladder, self.samplers = rivals, ladder, 0

    def rival(self, name, threads=0):
        for caller in self.rivals:
            if caller.name == name and caller.missing():
                raise RefusedError(caller.missing())
            if caller.name == name:
                return caller
        raise RefusedError(NO_RIVAL)

    def resident(self, work):
        return Resident(work)

    def sampler(self, put, sets):
        self.samplers += 1
        each = put.nanoseconds
        return lambda inner, warm: round(each * inner)

    def placed(self, placed, resident):
        return self.sampler(placed.put, len(resident.sets))

    def unit(self, kernel, dtype):
        return dtype, "CUDA cores"

    def limits(self, record, begin):
        return MachineLimits(60000.0, 4400.0, 4000.0)


def session(**options):
    return Session(MadeUp(**options), 1, lambda event: None)


@dataclass
class Put:
    """One product by NumPy, and how long it is said to take."""

    kernel: object
    sets: object
    nanoseconds: float

    def __call__(self, index):
        one = self.sets[index]
        self.kernel(one.a, one.b, one.c)


def rung(name, parent=None, speed=1.0, dtypes=("f32",), refuses=lambda problem: "", product=np.matmul):
    made = Rung(name, f"the idea of {name}", parent, dtypes, refuses, build=lambda problem, config: product)
    SPEEDS[name] = speed
    return made


SPEEDS = {}


@pytest.fixture(autouse=True)
def numpy_for_a_device(monkeypatch):
    real = on_cuda.build

    def build(one, config, resident):
        real(one, config, resident)  # refuses what it does not take
        return Put(one.build(resident.problem, config), resident.sets, nanoseconds(one.name, resident.work))

    monkeypatch.setattr(on_cuda, "build", build)


def nanoseconds(name, work):
    return work.problem.flops / (RATE * SPEEDS[name]) * 1e9


def rival(speed=8.0, serves=("f32", "f64")):
    SPEEDS["cublas"] = speed

    def place(resident):
        if resident.work.dtype not in serves:
            raise RefusedError(f"no product of {resident.work.dtype}")
        put = Put(functools.partial(np.matmul), resident.sets, nanoseconds("cublas", resident.work))
        return Placed(put, "torch.mm")

    return Caller("cublas", lambda: "", lambda: "cuBLAS 99", place, lambda resident: None)


WORK = Work(64, 64, 64, "f32", "f32")


def measured(*rungs, work=WORK, rivals=None, seconds=5.0):
    on = session(rivals=(rival(),) if rivals is None else rivals, ladder=rungs)
    found = sessions.Level(on, "ladder", work, 0, seconds)
    own = [found.measure(one, {}, None) for one in rungs]
    return own, found.rivals()


def test_a_rung_is_checked_and_timed_beside_its_parent_and_cublas():
    (slow, quick), (cublas,) = measured(rung("simt_a"), rung("simt_b", "simt_a", speed=4.0))
    assert slow.seconds == pytest.approx(WORK.problem.flops / RATE, rel=1e-3)
    assert quick.versus == pytest.approx({"cublas": 0.5, "simt_a": 4.0}, rel=1e-3)
    assert quick.spread["simt_a"] < 0.1  # they took turns
    assert quick.checked
    assert 0 < quick.error <= 1
    assert (quick.unit, quick.peak_gflops, quick.bandwidth_gbs, quick.copy_gbs) == ("CUDA cores", 6e4, 4400.0, 4000.0)
    assert quick.clock_mhz == 1755
    assert cublas.seconds == pytest.approx(slow.seconds / 8, rel=1e-3)
    assert cublas.note == "cuBLAS 99, torch.mm"


def test_the_rival_is_shown_as_it_ran_beside_the_quickest_rung():
    """Beside a slow one a device is cooler, and its clocks are higher."""
    three = rung("simt_a"), rung("simt_b", speed=4.0), rung("simt_c", speed=2.0)
    on, clocks = session(rivals=(rival(),), ladder=three), iter([0, 1980, 0, 1500, 0, 1700])
    on.backend.monitor.clock = lambda: next(clocks)
    found = sessions.Level(on, "ladder", WORK, 0, 5.0)
    assert [found.measure(one, {}, None).clock_mhz for one in three] == [1980, 1500, 1700]
    (cublas,) = found.rivals()
    assert cublas.clock_mhz == 1500


def test_a_wrong_product_is_recorded_as_one():
    def off(a, b, c):
        np.matmul(a, b, out=c)
        c[..., -1, -1] += 1

    (m,), _ = measured(rung("simt_off", product=off))
    assert m.error > 1


def test_an_element_that_is_not_written_is_found_though_no_sample_holds_it(monkeypatch):
    monkeypatch.setattr(on_cuda, "SAMPLED_WIDE", 1e4)
    assert 31 not in on_cuda.sample((1, 600, 600), 64, 1e4)[1]

    def lazy(a, b, c):
        held = c[0, 31, 17]
        np.matmul(a, b, out=c)
        c[0, 31, 17] = held

    (m,), _ = measured(rung("simt_lazy", product=lazy), work=replace(WORK, m=600, n=600))
    assert m.error == WRONG


def test_refusals_are_recorded_with_their_reasons():
    (types, shape), _ = measured(
        rung("mma_halves", dtypes=("f16",)), rung("simt_small", refuses=lambda problem: f"n = {problem.n}: too large")
    )
    assert types.refused == "it is written for f16, not f32"
    assert shape.refused == "n = 64: too large"
    assert not types.seconds
    assert types.unit == "CUDA cores"


def test_without_a_library_the_column_says_what_to_install():
    (m,), (cublas,) = measured(rung("simt_a"), rivals=())
    assert m.seconds
    assert m.versus == {}
    assert cublas.refused == NO_RIVAL


def test_a_type_that_the_library_lacks_is_said_and_the_rungs_run():
    (m,), (cublas,) = measured(rung("simt_a"), rivals=(rival(serves=("f64",)),))
    assert m.seconds
    assert cublas.refused == "no product of f32"


def test_a_rung_is_not_run_when_its_time_at_a_smaller_size_says_that_it_is_too_slow():
    slow = rung("simt_slow")
    on, half = session(rivals=(rival(),), ladder=(slow,)), replace(WORK, m=512, n=512, k=512)
    before = sessions.Level(on, "ladder", half, 0, 1.0).measure(slow, {}, None)
    work = replace(WORK, m=1024, n=1024, k=1024)
    m = sessions.Level(on, "ladder", work, 0, 1.0).measure(slow, {}, replace(before, seconds=0.5))
    assert m.refused == "predicted to take 4 s a call, above the limit of 1 s"


def test_a_product_that_leaves_a_device_idle_predicts_nothing():
    quick = rung("simt_quick", speed=8.0)
    on = session(rivals=(rival(),), ladder=(quick,))
    before = sessions.Level(on, "ladder", WORK, 0, 1.0).measure(quick, {}, None)
    work = replace(WORK, m=1024, n=1024, k=1024)
    m = sessions.Level(on, "ladder", work, 0, 1.0).measure(quick, {}, replace(before, seconds=1.0))
    assert not m.refused


def test_the_first_size_is_predicted_by_a_smaller_one():
    work = replace(WORK, m=1024, n=1024, k=1024)
    (m,), _ = measured(rung("simt_slow"), work=work, seconds=1.0)
    assert "predicted to take 2.1 s a call" in m.refused


@pytest.mark.parametrize("name", [one.name for one in CUDA])
def test_every_rung_is_shown_on_a_product_that_it_is_for(name):
    one = next(other for other in CUDA if other.name == name)
    dtype = one.dtypes[0]
    out = "bf16" if dtype in dtypes.FLOAT8 else dtype
    like = Work(1, 1, 1, dtype, out, precision="tf32" if dtype == "f32" else "")
    work = on_cuda.product_for(one, 512, like, "cuda:0")
    if name.startswith("gemv_"):
        assert (work.m, work.n, work.k, work.b_layout) == (1, 512, 512, "col")
    elif name.endswith("_batched"):
        assert (work.m, work.n, work.k, work.batch) == (16, 16, 16, 32 * 32)
    else:
        assert (work.m, work.n, work.k, work.batch) == (512, 512, 512, 1)
    assert bool(one.refuses(work.problem)) == (name == "simt_single_block")


def test_a_ladder_climbs_each_size_and_ends_it_with_its_rival(monkeypatch):
    both = rung("simt_a"), rung("simt_b", "simt_a", 2.0)
    backend, events = MadeUp(rivals=(rival(),), ladder=both), []
    monkeypatch.setattr(sessions, "open_session", lambda gpu, *options: Session(backend, *options))
    run = climb.climb(
        LADDER, climb.RungPlan([(one, {}) for one in both], (16, 32), "f32", "cuda", "cuda"), events.append
    )
    assert [(m.kernel, m.n) for m in run.measurements] == [
        (kernel, n) for n in (16, 32) for kernel in ("simt_a", "simt_b", "cublas")
    ]
    assert max(event.done for event in events) == 4


def test_rungs_of_a_suite_take_turns_with_each_other_and_the_rivals():
    three = (rung("simt_a"), rung("simt_b", "simt_a", 2.0), rung("mma_c", dtypes=("f16",)))
    on = session(rivals=(rival(),), ladder=three)
    labels = tuple(one.name for one in three)
    found = contest.contest(on, Task("mine", WORK, labels, 0, (on.backend.rival("cublas"),), 0.1))
    by_kernel = {m.kernel: m for m in found}
    assert by_kernel["simt_b"].versus == pytest.approx({"simt_a": 2.0, "cublas": 0.25}, rel=1e-3)
    assert by_kernel["simt_a"].versus == pytest.approx({"simt_b": 0.5, "cublas": 0.125}, rel=1e-3)
    assert by_kernel["cublas"].versus == pytest.approx({"simt_a": 8.0, "simt_b": 4.0}, rel=1e-3)
    assert by_kernel["mma_c"].refused == "it is written for f16, not f32"


@pytest.mark.parametrize("shape", [(1, 700, 900), (1, 1, 5000), (1, 5000, 1), (300, 64, 64), (1, 3, 2)])
def test_a_sample_holds_the_first_and_the_last_and_no_more_than_asked_for(shape):
    found = on_cuda.sample(shape, 1000, 1e6)
    for some, count in zip(found, shape, strict=True):
        assert len(set(some)) == len(some)
        assert some[-1] < count
        if len(some) > 1:
            assert (some[0], some[-1]) == (0, count - 1)
    assert 2 * 1000 * np.prod([len(some) for some in found]) <= 1.1e6 or min(map(len, found[1:])) <= 2


def test_factors_of_blocks_are_part_of_the_reference():
    work = Work(40, 130, 300, "e4m3", "f32", scales="blocks")
    resident = Resident(work)
    a, b, c = resident.host
    row, column = factors(work)
    x = a[0].astype(np.float32) * np.repeat(row, 128, axis=1)[:, :300]
    y = b[0].astype(np.float32) * np.repeat(np.repeat(column, 128, axis=0)[:300], 128, axis=1)[:, :130]

    def run(scale):
        c[0] = scale * (x @ y)

    assert on_cuda.error(resident, lambda: run(1), float) <= 1
    assert on_cuda.error(resident, lambda: run(1.01), float) > 1
    assert on_cuda.error(resident, lambda: None, float) == WRONG


def test_each_group_is_compared_with_its_own_matrix():
    work = Work(50, 16, 24, "f32", "f32", groups=5)
    resident = Resident(work)
    a, b, c = resident.host
    ends = offsets(work).tolist()

    def run(wrong):
        for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            c[0, start:end] = a[0, start:end] @ b[0 if wrong else group]

    assert on_cuda.error(resident, lambda: run(False), float) <= 1
    assert on_cuda.error(resident, lambda: run(True), float) > 1


def test_integers_are_compared_though_minus_one_has_all_bits_set():
    resident = Resident(Work(32, 32, 32, "int8", "int32"))
    a, b, c = resident.host
    a[:], b[:] = 0, 0
    a[0, 0, 0], b[0, 0, 0] = 1, -1

    def run():
        c[0] = a[0].astype(np.int32) @ b[0].astype(np.int32)

    assert on_cuda.error(resident, run, float) == 0
    assert on_cuda.error(resident, lambda: None, float) == WRONG


def test_options_of_the_product_become_its_arguments():
    call = on_cuda.product(WORK, {"batch_invariant": 1, "bias": 1, "gelu": 1}, bias="a vector")
    assert call.keywords == {"bias": "a vector", "activation": "gelu", "batch_invariant": True}
    assert on_cuda.product(WORK) is gemmery.matmul
    assert on_cuda.product(replace(WORK, precision="tf32")).keywords == {"precision": "tf32"}
    grouped = on_cuda.product(replace(WORK, groups=2), offsets=[1, 2])
    assert grouped.func.__name__ == "grouped_matmul"
    assert grouped.keywords == {"offsets": [1, 2]}
    assert contest.entrant("gm.matmul bias=1 gelu=1", CUDA).config == {"bias": 1, "gelu": 1}


def test_a_small_product_is_compared_whole():
    assert [len(some) for some in on_cuda.sample((3, 20, 30), 40, 1e9)] == [3, 20, 30]


@pytest.mark.parametrize(("device", "expected"), [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_device_is_named_as_in_a_view(device, expected):
    assert ordinal(device) == expected


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cudas", "cpu:0", ""])
def test_another_name_is_an_error_that_says_which_there_are(device):
    with pytest.raises(ArgumentError, match="it is cpu, cuda, or cuda:N"):
        ordinal(device)


PEAKS = {("f32", "CUDA cores"): 60.0, ("f16", "mma.sync"): 600.0, ("f16", "wgmma"): 900.0}


def test_a_backend_measures_each_limit_of_its_device_once(monkeypatch):
    monkeypatch.setattr(driver, "missing", lambda: "")
    monkeypatch.setattr(driver, "device", lambda ordinal: KNOWN["h200"])
    monkeypatch.setattr(on_cuda.record, "gpu_machine", lambda ordinal: records.MACHINE)
    monkeypatch.setattr(on_cuda, "Stream", lambda ordinal: SimpleNamespace(ordinal=ordinal))
    monkeypatch.setattr(on_cuda, "Monitor", lambda ordinal: Monitor())
    monkeypatch.setattr(on_cuda.device_limits, "peak", lambda dtype, unit, stream: PEAKS[dtype, unit])
    monkeypatch.setattr(on_cuda.device_limits, "bandwidth", lambda stream: Bandwidth(4.0, 3.0))
    cuda, halves, begun = Cuda(1), replace(WORK, dtype="f16", out="f16"), []
    rows = [cuda.blank("mine", kernel, halves) for kernel in ("simt_a", "mma_b", "cublas", "gemv_c")]
    assert [m.unit for m in rows] == ["CUDA cores", "mma.sync", "wgmma", "CUDA cores"]
    limits = [cuda.limits(m, begun.append) for m in rows]
    assert limits == [(60.0, 4.0, 3.0), (600.0, 4.0, 3.0), (900.0, 4.0, 3.0), (60.0, 4.0, 3.0)]
    peaks = [f"peak of f16 on {unit}" for unit in ("mma.sync", "wgmma")]
    assert begun == ["peak of f32 on CUDA cores", "bandwidth of the device's memory", *peaks]
    assert (cuda.device, cuda.machine, cuda.ladder, cuda.clock()) == ("cuda:1", records.MACHINE, CUDA, 1755)


without_a_gpu = pytest.mark.skipif(not driver.missing(), reason="there is a GPU")


@without_a_gpu
@pytest.mark.parametrize(
    "ask",
    [
        lambda: lab.ladder(device="cuda"),
        lab.chain,
        lambda: lab.bench(["gpu_square"]),
        lambda: lab.bench(device="cuda:1"),
    ],
)
def test_without_a_device_one_line_says_what_is_missing(ask):
    with pytest.raises(DeviceError) as error:
        ask()
    assert driver.missing() in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda: lab.ladder(["packed"], device="cuda"),
            "rung 'packed' runs on the CPU: name a rung of the GPU's ladder",
        ),
        (lambda: lab.ladder(["simt_naive"]), "rung 'simt_naive' runs on a GPU: the device must be cuda, or emulator"),
        (lambda: lab.ladder(device="cuda", dtype="f12"), "dtype 'f12'"),
        (lambda: lab.ladder(device="cuda", sizes=[0]), "size 0"),
        (lambda: lab.ladder(dtype="tf32"), "dtype 'tf32'"),
        (lambda: lab.bench(["gpu_square", "square_f32"]), "suite 'square_f32' is for cpu, not cuda"),
        (lambda: lab.bench(["gpu_square"], ["numpy"]), "rival 'numpy' is not known on a GPU; known: cublas"),
        (lambda: lab.bench(["square_f32"], device="cuda"), "suite 'square_f32' is for cpu, not cuda"),
        (lambda: lab.chain(device="cpu"), "the device must be cuda"),
        (lambda: lab.chain([0]), "size 0"),
        (lambda: lab.chain(repeats=0), "repeats 0"),
        (lambda: lab.chain(dtype="int8"), "dtype 'int8'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_device_is_asked_for(ask, words):
    with pytest.raises(ArgumentError) as error:
        ask()
    assert words in str(error.value)


@pytest.fixture
def product(monkeypatch):
    """gm.matmul on NumPy's arrays, and the time until its call returns."""
    SPEEDS["gm.matmul"] = 2.0
    chosen = SimpleNamespace(rung=rung("simt_a", dtypes=("f32", "f16")))
    monkeypatch.setattr(on_cuda.dispatch, "choice", lambda problem: chosen)

    def own(resident, function):
        return Put(np.matmul, resident.sets, nanoseconds("gm.matmul", resident.work))

    calls = []

    def own_calls(resident, function):
        def sample(inner, warm):
            calls.append(inner)
            return 5000 * inner

        return sample

    monkeypatch.setattr(torch_operands, "own", own)
    monkeypatch.setattr(torch_operands, "own_calls", own_calls)
    return calls


def records_of(tmp_path, kind, *rivals):
    """The records of a suite of one product on the made-up device, and the names of what began."""
    file, begun = tmp_path / "mine.toml", []
    file.write_text(f'device = "cuda"\n{kind}\n[[product]]\nsquare = [64]')
    on = Session(MadeUp(rivals=rivals), 1, begun.append)
    suites.run_suite(on, suite.load(file), 0, (), 0.1)
    return on.run.measurements, [event.what for event in begun if event.measurement is None]


@pytest.mark.usefixtures("product")
def test_a_suite_compares_the_product_with_what_is_installed(tmp_path):
    absent = replace(rival(), name="cublas_cupy", missing=lambda: "cupy is not installed")
    (cupy, ours, theirs), begun = records_of(tmp_path, "", rival(), absent)
    assert (cupy.kernel, cupy.refused) == ("cublas_cupy", "cupy is not installed")
    assert (ours.suite, ours.kernel, ours.note, ours.threads) == ("mine", "gm.matmul", "simt_a", 0)
    assert ours.versus == pytest.approx({"cublas": 0.25}, rel=1e-3)
    assert ours.checked
    assert 0 < ours.error <= 1
    assert (ours.unit, ours.clock_mhz, ours.copy_gbs, ours.peak_gflops) == ("CUDA cores", 1755, 4000.0, 60000.0)
    assert (theirs.kernel, theirs.note, theirs.versus) == ("cublas", "cuBLAS 99, torch.mm", {})
    assert begun[-1] == "mine: 64x64x64 f32"


def test_the_time_of_a_call_is_taken_after_one_that_compiles(tmp_path, product):
    theirs = replace(rival(), calls=lambda resident: lambda inner, warm: 20_000 * inner)
    (ours, cublas), _ = records_of(tmp_path, 'kind = "call"', theirs)
    assert product[:3] == [1, 1, 1]  # that one, and two that calibrate
    assert (ours.kernel, ours.checked, ours.seconds) == ("gm.matmul, host", False, pytest.approx(5e-6))
    assert (ours.versus, cublas.versus) == ({"cublas": pytest.approx(4.0)}, {})
    assert ours.peak_gflops == ours.bandwidth_gbs == 0.0
    assert (cublas.kernel, cublas.note) == ("cublas", "cuBLAS 99")


def test_a_product_that_the_device_has_no_room_for_is_recorded(tmp_path, monkeypatch):
    def full(self, work):
        raise RefusedError("make it smaller")

    monkeypatch.setattr(MadeUp, "resident", full)
    records, _ = records_of(tmp_path, "", rival())
    assert [(m.kernel, m.refused) for m in records] == [("gm.matmul", "make it smaller")]


def test_without_names_the_suites_of_the_cpu_are_run(monkeypatch):
    ran = []
    monkeypatch.setattr("gemmery_lab.suites.run_suite", lambda session, found, *more: ran.append(found.name))
    lab.bench(seconds=1.0)
    assert "square_f32" in ran
    assert not any(name.startswith("gpu_") for name in ran)


def test_new_shapes_on_a_gpu_are_those_of_pytorch(monkeypatch):
    asked = []

    def rows(plain, *given):
        asked.append(given)
        return [replace(plain, case="warm cache"), replace(plain, kernel="cublas", case="")]

    monkeypatch.setattr(shapes, "totals", rows)
    on = session(ordinal=1, rivals=(rival(),))
    task = Task("gpu_new_shapes", WORK, (), 0, (on.backend.rival("cublas"),), 0.1)
    found = shapes.new_shapes(on, task)
    assert asked == [(WORK, ("cublas",), 0.1, "cuda:1")]
    assert [(m.suite, m.kernel, m.unit, m.note) for m in found] == [
        ("gpu_new_shapes", "gm.matmul", "CUDA cores", ""),
        ("gpu_new_shapes", "cublas", "CUDA cores", rival().runs),
    ]
    with pytest.raises(RefusedError, match="install torch"):
        shapes.new_shapes(on, replace(task, rivals=()))


class Clock:
    """Seconds that pass while contestants work."""

    now = 0.0


def working(name, nanoseconds, clock, log):
    def sample(inner, warm):
        clock.now += inner * nanoseconds / 1e9
        log.append((name, inner))
        return round(inner * nanoseconds)

    return Contestant(name, sample)


class Meter:
    """A monitor that reads a watt more at each burst of whoever works."""

    reads_power = False

    def __init__(self, log):
        self.log, self.since = log, 0

    def forget(self):
        self.since = len(self.log)

    def power(self):
        mine = self.log[self.since :]
        self.forget()
        return 100.0 * len({name for name, _ in mine}) + (mine[-1][0] == "a")

    def clock(self):
        return 1500


def test_without_rest_the_start_of_a_turn_does_not_count():
    clock, log = Clock(), []
    contestants = [working("a", 1e6, clock, log), working("b", 2e6, clock, log)]
    meter = Meter(log)
    race = on_cuda.race(contestants, meter, turn=1.0, rounds=4, now=lambda: clock.now)
    assert race.comparison.timings["a"].seconds == pytest.approx(1e-3)
    assert race.comparison.ratios("a")["b"].median == pytest.approx(2.0)
    assert race.comparison.timings["b"].samples == 4
    assert race.watts == {"a": 101.0, "b": 100.0}  # only its own readings
    assert race.clocks == {"a": 1500, "b": 1500}
    assert clock.now == pytest.approx(9.0, rel=0.1)  # a turn to heat up, and eight
    assert not meter.reads_power


def test_the_time_of_a_suite_counts_its_races(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('device = "cuda"\nrivals = ["cublas"]\nsustained = 1.0\n[[product]]\nsquare = [64, 8192]')
    assert suites.expected([suite.load(file)], 0, 1.5) == "2 measurements, about 10 s"


def test_a_call_longer_than_a_turn_is_timed_once():
    clock, log = Clock(), []
    race = on_cuda.race([working("a", 5e9, clock, log)], Meter(log), turn=1.0, rounds=1, now=lambda: clock.now)
    assert race.comparison.timings["a"].seconds == pytest.approx(5.0)


def test_large_products_are_raced_without_rest_too(monkeypatch):
    monkeypatch.setattr(contest, "SUSTAINED_ABOVE", WORK.problem.flops - 1)
    on = session(rivals=(rival(),), ladder=(rung("quick", speed=16.0),))
    clock, log = Clock(), []
    on.backend.sustained = lambda contestants, turn: on_cuda.race(
        [working(each.name, 1e6 * (index + 1), clock, log) for index, each in enumerate(contestants)],
        Meter(log),
        turn,
        now=lambda: clock.now,
    )
    task = Task("mine", WORK, ("quick",), 0, [on.backend.rival("cublas")], 0.1, rest=0.001, sustained=0.5)
    rows = contest.contest(on, task)
    assert [(m.kernel, m.case) for m in rows] == [
        *((name, "") for name in ("quick", "cublas")),
        *((name, "sustained") for name in ("quick", "cublas")),
    ]
    assert rows[2].versus == {"cublas": pytest.approx(2.0)}
    assert rows[2].joules == pytest.approx(rows[2].power_w * 1e-3)
    assert rows[0].power_w == 0
    small = replace(task, work=replace(WORK, m=63))
    assert [m.case for m in contest.contest(on, small)] == ["", ""]
