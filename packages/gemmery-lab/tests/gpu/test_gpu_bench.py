"""What is timed on a GPU computes what it should: values, counts and words, never a speed."""

import numpy as np
import pytest

import gemmery_lab as lab
from gemmery import verify
from gemmery.cuda import driver, nvml
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.limits import device_limits
from gemmery.limits.device_limits import replays
from gemmery_lab import launches, on_cuda
from gemmery_lab.measure import cublas, record, torch_operands
from gemmery_lab.measure.torch_operands import L2_TIMES, MOST_SETS, Resident
from gemmery_lab.measure.work import Work
from gemmery_lab.on_cuda import TF32, Cuda, build, compared
from gemmery_lab.report import words
from gemmery_lab.session import Session, Task, contest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]


@pytest.fixture(scope="module")
def stream():
    return driver.Stream(0)


def able(session):
    """The rivals that can run here."""
    return [session.backend.rival(rival.name) for rival in cublas.RIVALS if not rival.missing()]


def result(resident, index):
    """The C of one of the sets."""
    c = np.empty(resident.host[2].shape, resident.host[2].dtype)
    memory = resident.sets[index].c.owner
    memory.read(c, resident.sets[index].c.pointer - memory.pointer)
    return c


@pytest.mark.parametrize("layout", ["row", "col", "strided"])
def test_every_set_holds_the_operands_and_together_they_overflow_l2(stream, layout):
    work = Work(300, 200, 100, "f32", "f32", a_layout=layout, b_layout=layout)
    resident = Resident(work, stream)
    assert resident._memory.size >= L2_TIMES * driver.device(0).l2 or len(resident.sets) == MOST_SETS
    kernel = build(find(CUDA, "simt_naive"), {"threads": 256}, resident)
    for index in (0, len(resident.sets) - 1):
        kernel(index)
        stream.synchronize()
        assert verify.check(result(resident, index), resident.host[0], resident.host[1]).ok


def test_what_is_replayed_computes_every_set(stream):
    resident = Resident(Work(256, 256, 256, "f32", "f32"), stream)
    sample = replays(build(find(CUDA, "simt_smem"), {"tile": 16}, resident), stream, len(resident.sets))
    resident.poison()
    assert sample(2 * len(resident.sets), 0) > 0
    stream.synchronize()
    for index in {0, 1, len(resident.sets) // 2, len(resident.sets) - 1}:
        assert compared(result(resident, index), *resident.host[:2], float) <= 1


@pytest.mark.parametrize(
    "rival", [rival for rival in cublas.RIVALS if rival.name != "cublas_full"], ids=lambda rival: rival.name
)
@pytest.mark.parametrize(
    "work",
    [
        Work(96, 80, 16, "f32", "f32"),  # so shallow that TF32 would be outside the bound
        Work(96, 80, 16, "f32", "f32", b_layout="col"),
        Work(96, 80, 16, "f32", "f32", batch=3),
        Work(1, 300, 16, "f32", "f32", b_layout="col"),
        Work(300, 1, 16, "f32", "f32"),
        Work(96, 80, 64, "f64", "f64"),
        Work(96, 80, 64, "f16", "f16"),
        Work(96, 80, 64, "bf16", "bf16"),
        Work(96, 80, 64, "f32", "f32", precision="tf32"),
    ],
    ids=str,
)
def test_a_rival_computes_the_product_that_it_is_timed_with(stream, rival, work):
    if rival.missing():
        pytest.skip(rival.missing())
    if rival.name == "cublas_cupy" and (work.dtype == "bf16" or work.precision):
        pytest.skip("CuPy has no such product")
    resident = Resident(work, stream)
    resident.poison()
    placed = rival.place(resident)
    placed.put(0)
    stream.synchronize()
    bound = (lambda k: k + TF32) if work.precision else float
    assert verify.check(resident.result(), *resident.host[:2], bound).ok


@pytest.mark.parametrize(
    "work",
    [
        Work(256, 128, 512, "e4m3", "bf16", b_layout="col"),
        Work(256, 128, 512, "e4m3", "bf16", b_layout="col", scales="one"),
        Work(256, 256, 512, "e4m3", "bf16", b_layout="col", scales="blocks"),
        Work(256, 128, 512, "int8", "int32", b_layout="col"),
        Work(256, 128, 512, "bf16", "bf16", b_layout="col", groups=5),
    ],
    ids=str,
)
@pytest.mark.parametrize("rival", ["cublas", "cublas_full"])
def test_rivals_and_gemmery_agree_on_types_factors_and_groups_of_hopper(stream, rival, work):
    if driver.device(0).capability != 90:
        pytest.skip("only compute capability 9.0 multiplies float8 and int8 here")
    if cublas.find(rival).missing() or (rival == "cublas_full" and work.dtype != "e4m3"):
        pytest.skip(cublas.find(rival).missing() or "the rival is for float8")
    resident = Resident(work, stream)
    options = torch_operands.own_options(resident)
    puts = {"gemmery": torch_operands.own(resident, on_cuda.product(work, **options))}
    try:
        puts[rival] = cublas.find(rival).place(resident).put
    except RefusedError:
        if work.scales != "blocks":  # PyTorch has those only with some versions of cuBLAS
            raise
    bound = (lambda k: 2.0**8 * k) if work.dtype == "e4m3" else lambda k: 4.0 * k + 8
    for name, put in puts.items():
        if name != "gemmery" and (work.groups or work.scales == "blocks"):
            put(0)  # PyTorch allocates its result
            continue
        assert on_cuda.error(resident, lambda put=put: put(0), bound) <= 1, name


def test_tf32_is_what_the_bound_tells_apart(stream):
    """Else the test above could not see that a rival rounds."""
    rival = cublas.find("cublas")
    if rival.missing():
        pytest.skip(rival.missing())
    resident = Resident(Work(96, 80, 16, "f32", "f32", precision="tf32"), stream)
    rival.place(resident).put(0)
    stream.synchronize()
    assert not verify.check(resident.result(), *resident.host[:2], float).ok


def test_the_limits_are_positive_and_the_fingerprint_is_complete(stream):
    for (dtype, unit), row in device_limits.UNITS.items():
        if row.runs(driver.device(0).capability):
            assert device_limits.peak(dtype, unit, stream) > 0
    found = device_limits.bandwidth(stream)
    assert found.read > 0
    assert found.copy > 0
    gpu, monitor = record.gpu_machine(0).gpu, nvml.Monitor(0)
    assert gpu.name
    assert gpu.sms > 0
    if not monitor.missing:
        assert gpu.driver
        assert gpu.power_w > 0
        monitor.look()
        assert 0 < monitor.clock() <= gpu.clock_mhz
        assert monitor.clock() == 0


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16", "tf32"])
def test_the_whole_ladder_is_checked_at_a_small_size(dtype, monkeypatch):
    monkeypatch.setattr(on_cuda, "SHARE", 0.01)
    run = lab.ladder(sizes=[48], dtype=dtype, device="cuda")
    assert run.machine.gpu.name
    for m in run.measurements:
        assert words.passed(m), m
        assert bool(m.seconds) != bool(m.refused), m
    own = [m for m in run.measurements if m.kernel not in words.RIVALS]
    assert all(m.checked for m in own if not m.refused)
    assert len([m for m in own if not m.refused]) >= 10


def test_a_rung_is_predicted_from_a_smaller_product_whose_operands_are_gone_afterwards():
    run = lab.ladder(["simt_naive", "simt_smem"], sizes=[640, 768], seconds=1.0, device="cuda")
    assert [m.refused for m in run.measurements if m.kernel.startswith("simt")] == [""] * 4
    assert all(m.checked and m.error <= 1 for m in run.measurements if m.kernel.startswith("simt"))


def test_a_chain_is_right_and_stays_finite(stream):
    work = Work(201, 201, 201, "f32", "f32")  # no row but the first is aligned
    held = launches.ChainOperands(work, stream)
    run = lab.chain([201], repeats=9, seconds=0.05)
    ours = run.measurements[0]
    assert ours.kernel == "gm.matmul"
    assert 0 < ours.error <= 1
    put = launches.own(held, "cuda:0", work)[0]
    held.begin()
    for step in range(20):
        put(step)
    stream.synchronize()
    r = np.empty_like(held.a)
    held.views[0].owner.read(r, 0)  # after an even number of steps the result lies where A was
    assert np.isfinite(r).all()
    assert 0.1 < np.abs(r).mean() / np.abs(held.a).mean() < 10


@pytest.mark.parametrize(
    "work",
    [
        Work(130, 120, 110, "f32", "f32"),
        Work(130, 120, 110, "f64", "f64"),
        Work(130, 120, 110, "bf16", "bf16"),
        Work(130, 120, 110, "f32", "f32", precision="tf32"),
        Work(1, 1000, 128, "f16", "f16", b_layout="col"),
        Work(16, 16, 16, "f32", "f32", batch=50),
    ],
    ids=str,
)
def test_the_product_of_a_suite_is_checked(work):
    session = Session(Cuda(0), 1, lambda event: None)
    ours, *rivals = contest(session, Task("mine", work, (), 0, able(session), 0.05))
    assert ours.checked
    assert 0 < ours.error <= 1
    assert ours.note
    assert set(ours.versus) == {m.kernel for m in rivals if not m.refused}


def test_calls_and_compilations_are_counted():
    session = Session(Cuda(0), 1, lambda event: None)
    work, labels = Work(64, 64, 64, "f32", "f32"), ("simt_naive", "mma_f64")
    call = launches.call(session, Task("mine", work, (), 0, able(session), 0.05))
    made = launches.compilations(session, Task("mine", work, labels, 0, (), 0.05))
    assert all(m.seconds > 0 for m in call if not m.refused)
    assert not call[0].refused
    assert [(m.kernel, m.case) for m in made if not m.refused] == [("simt_naive", case) for case in launches.COMPILED]
    assert made[-1].kernel == "mma_f64"
    assert made[-1].refused


HOPPER = """
device = "cuda"
rivals = ["cublas", "cublas_full"]
rest = 0.001
sustained = 0.05

[[product]]
shapes = [[256, 128, 384]]
b = "col"
dtype = ["e4m3"]
out = "bf16"
scales = "one"

[[product]]
shapes = [[256, 128, 384]]
b = "col"
dtype = ["int8"]
out = "int32"

[[product]]
shapes = [[200, 128, 256]]
groups = [3]
b = "col"
dtype = ["bf16"]

[[product]]
name = "options"
rungs = ["gm.matmul", "gm.matmul bias=1 gelu=1", "gm.matmul batch_invariant=1", "wgmma_epilogue bm=128 bn=128 stages=4"]
rows = [128]
weights = [[256, 512]]
b = "col"
dtype = ["bf16"]
"""


def test_suites_of_hopper_are_measured(tmp_path, monkeypatch):
    if driver.device(0).capability != 90:
        pytest.skip("only compute capability 9.0 multiplies float8 and int8 here")
    monkeypatch.setattr("gemmery_lab.session.SUSTAINED_ABOVE", 0)
    file = tmp_path / "hopper.toml"
    file.write_text(HOPPER)
    rows = [m for m in lab.bench([str(file)], seconds=0.05).measurements if m.kernel not in words.RIVALS]
    assert [m.refused for m in rows] == [""] * len(rows)
    assert len(rows) == 2 * (3 + 4)  # each in turns with rests and without
    assert all(m.seconds > 0 and m.error <= 1 for m in rows)
    assert all(m.checked or "gelu" in m.kernel for m in rows)
    if not nvml.Monitor(0).missing:
        watts = {
            sustained: [m.power_w for m in rows if m.case.endswith("sustained") == sustained] for sustained in (0, 1)
        }
        assert not any(watts[0])
        assert any(watts[1])  # not all: the library may refuse a reading while other processes use the device
