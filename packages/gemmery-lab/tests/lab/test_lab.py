"""What the commands do: the ladder, suites and sweeps, on small products and made-up rungs."""

import math
import pkgutil
import time
from dataclasses import replace

import numpy as np
import pytest

import gemmery_lab as lab
from gemmery import limits
from gemmery.cpu import threads
from gemmery.cuda.device import KNOWN
from gemmery.errors import ArgumentError, GemmeryError
from gemmery.ladder import cpu as ladder_cpu
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import Rung
from gemmery.limits import Bandwidth
from gemmery_lab import measurements, on_cpu, on_emulator, session, suites
from gemmery_lab import session as contest
from gemmery_lab.measure import libraries, record
from gemmery_lab.measure.work import Work
from gemmery_lab.report.tables import sheets

pytestmark = pytest.mark.sampled(3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measured limits cost a second each, and comparisons two: neither is what is tested here."""
    monkeypatch.setattr(limits, "peak", lambda dtype, threads: 100.0 * threads)
    monkeypatch.setattr(limits, "bandwidth", lambda threads: Bandwidth(20.0, 18.0))
    monkeypatch.setattr(on_cpu, "SHARE", 0.02)
    monkeypatch.setattr(on_cpu, "THREADED_SHARE", 0.02)


def made_up(name, multiply, **changes):
    """A rung whose kernel calls `multiply(a, b, c)` on NumPy arrays."""

    def build(problem, config):
        return lambda a, b, c, *, threads: multiply(a.owner, b.owner, c.owner)

    row = {"parent": None, "dtypes": ("f32",), "refuses": lambda problem: "", "build": build, **changes}
    return Rung(name=name, idea="made up", **row)


def right(a, b, c):
    np.matmul(a, b, out=c)


def listening():
    events = []
    return events, events.append


@pytest.fixture
def ladder_of(monkeypatch):
    def install(*made):
        monkeypatch.setattr(ladder_cpu, "CPU", made)

    return install


def by_kernel(run):
    return {m.kernel: m for m in run.measurements}


def test_every_rung_is_checked_and_timed_beside_numpy_and_its_parent():
    run = lab.ladder(sizes=[33])
    found = {m.kernel: m for m in run.measurements if m.case == ""}
    assert set(found) == {*(rung.name for rung in CPU), "numpy"}
    for rung in CPU:
        m = found[rung.name]
        if "f32" not in rung.dtypes:
            assert m.refused == f"it is written for {', '.join(rung.dtypes)}, not f32"
            continue
        assert m.refused == ""
        assert m.checked
        assert 0 <= m.error <= 1
        assert m.seconds > 0
        assert {"numpy"} <= set(m.versus) == set(m.spread) <= {"numpy", rung.parent}
        assert (m.suite, m.dtype) == ("ladder", "f32")
        others = {"gemv": (1, 33, 33, 1), "dots": (33, 2, 33, 1), "batched": (16, 16, 16, 4)}
        shape = others.get(rung.name, (33, 33, 33, 1))
        assert (m.m, m.n, m.k, m.batch) == shape
        assert m.peak_gflops == 100.0 * m.threads
    assert found["packed"].versus[by_name("packed").parent] > 0
    assert "NumPy" in found["numpy"].note
    assert run.machine == record.cpu_machine()


def test_rungs_that_lose_on_squares_are_shown_where_they_are_meant():
    run = lab.ladder(["packed", "direct", "streamed"], sizes=[16])
    shown = [(m.kernel, m.m, m.n, m.k) for m in run.measurements if m.case]
    assert shown == [
        ("direct", 64, 64, 64),
        ("numpy", 64, 64, 64),
        ("streamed", 8, 2048, 2048),
        ("numpy", 8, 2048, 2048),
    ]
    direct = next(m for m in run.measurements if m.kernel == "direct" and m.case)
    assert set(direct.versus) == {"numpy", "simd_tile"}
    assert direct.error <= 1
    *_, others = sheets(run, CPU)
    assert others.title == "Other shapes, f32"
    assert [row[0].text for row in others.rows] == ["direct", "NumPy", "streamed", "NumPy"]
    assert others.rows[0][others.head.index("× parent")].text.endswith("×")


def test_a_rung_for_few_columns_is_measured_with_them_once():
    run = lab.ladder(["dots"], sizes=[16])
    assert [(m.kernel, m.m, m.n, m.k) for m in run.measurements] == [("dots", 16, 2, 16), ("numpy", 16, 2, 16)]


def by_name(name):
    return next(rung for rung in CPU if rung.name == name)


def test_a_wrong_rung_is_found_out(ladder_of):
    def forgets(a, b, c):
        np.matmul(a, b, out=c)
        c[..., -1, -1] += 1

    ladder_of(made_up("right", right), made_up("forgets", forgets), made_up("idle", lambda a, b, c: None))
    found = by_kernel(lab.ladder(sizes=[16]))
    assert found["right"].error <= 1
    assert found["forgets"].error > 1
    assert found["idle"].error == measurements.WRONG  # C still holds the NaN it was filled with


def test_a_slow_rung_is_refused_with_the_time_it_would_take_and_the_way_out(ladder_of):
    def slow(a, b, c):
        time.sleep(1e-8 * a.shape[-1] ** 3)

    ladder_of(made_up("slow", slow), made_up("fast", lambda a, b, c: None))
    run = lab.ladder(sizes=[192, 640], seconds=0.5)
    slow_one, slow_two = (m for m in run.measurements if m.kernel == "slow")
    assert slow_one.seconds >= 0.07
    assert slow_two.seconds == 0.0
    assert slow_two.refused.startswith("predicted to take ")
    assert float(slow_two.refused.split()[3]) >= 2.6
    assert slow_two.refused.endswith("above the limit of 0.5 s")
    assert all(m.seconds > 0 for m in run.measurements if m.kernel == "fast")


def test_a_slow_rung_is_refused_at_its_first_size_too(ladder_of):
    calls = []

    def slow(a, b, c):
        calls.append(a.shape[-1])
        time.sleep(2e-8 * a.shape[-1] ** 3)

    ladder_of(made_up("slow", slow))
    [m] = (m for m in lab.ladder(sizes=[1024], seconds=1.0).measurements if m.kernel == "slow")
    assert m.refused
    assert set(calls) == {on_cpu.Cpu.pilot}


def test_refusals_carry_the_rungs_own_reason(ladder_of):
    ladder_of(
        made_up("never", right, refuses=lambda problem: "it takes no product at all"),
        made_up("double", right, dtypes=("f64",)),
    )
    found = by_kernel(lab.ladder(sizes=[15]))
    assert found["never"].refused == "it takes no product at all"
    assert "f64" in found["double"].refused
    assert "numpy" not in found


def test_a_rung_that_refuses_squares_is_shown_on_what_it_takes_beside_its_parent(ladder_of):
    def no_squares(problem):
        return "it takes vectors alone" if problem.m > 1 else ""

    ladder_of(made_up("plain", right), made_up("vector", right, refuses=no_squares, parent="plain"))
    found = by_kernel(lab.ladder(sizes=[24]))
    assert (found["plain"].m, found["vector"].m, found["vector"].n) == (24, 1, 24)
    assert set(found["vector"].versus) == {"numpy", "plain"}


def test_progress_says_what_runs_and_counts_to_the_end(ladder_of):
    ladder_of(made_up("one", right), made_up("two", right, parent="one"))
    events, listen = listening()
    run = lab.ladder(sizes=[8, 4], on_event=listen)
    told = [event.measurement for event in events if event.measurement]
    assert tuple(told) == run.measurements
    assert {event.total for event in events} == {4}
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert events[-1].done == 4
    assert any("one, 4x4x4 f32" in event.what for event in events)


def test_threaded_rungs_get_the_threads_and_the_others_one(ladder_of, monkeypatch):
    monkeypatch.setattr(session.timing, "IDLE_SECONDS", 0.0)
    seen = {}

    def build(name):
        return lambda problem, config: (
            lambda a, b, c, *, threads: (
                seen.setdefault(name, threads),
                right(a.owner, b.owner, c.owner),
            )
        )

    names = ("plain", "plain_threaded")
    ladder_of(*(made_up(name, right, build=build(name)) for name in names))
    run = lab.ladder(sizes=[8], threads=2)
    assert seen == {"plain": 1, "plain_threaded": 2}
    assert [(m.kernel, m.threads) for m in run.measurements if m.kernel == "numpy"] == [("numpy", 1), ("numpy", 2)]
    assert by_kernel(run)["plain_threaded"].peak_gflops == 200.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rungs": ["nope"]}, "'nope'"),
        ({"sizes": [0]}, "size 0"),
        ({"dtype": "float8"}, "'float8'"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": math.nan}, "seconds"),
    ],
)
def test_the_ladder_names_a_bad_argument(options, named):
    with pytest.raises(ArgumentError, match=named):
        lab.ladder(**{"sizes": [8], **options})


def test_a_sweep_over_sizes():
    run = lab.sweep("size", rungs=["simd_row"], sizes=[8, 16])
    assert [(m.suite, m.kernel, m.n) for m in run.measurements] == [
        ("sweep_size", "simd_row", 8),
        ("sweep_size", "numpy", 8),
        ("sweep_size", "simd_row", 16),
        ("sweep_size", "numpy", 16),
    ]


def test_a_sweep_over_blocks_varies_the_block_alone():
    run = lab.sweep("block", sizes=[40])
    sides = [m.config["block"] for m in run.measurements if m.kernel == "simd_blocked"]
    assert sides == [8, 16, 32, 64]  # up to the first that holds the whole matrix
    assert {(m.suite, m.n) for m in run.measurements} == {("sweep_block", 40)}
    assert all(m.error <= 1 for m in run.measurements)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: lab.sweep("color"), "size, block"),
        (lambda: lab.sweep("block", rungs=["simd_row"]), "simd_blocked"),
        (lambda: lab.sweep("block", sizes=[8, 16]), "one size"),
        (lambda: lab.sweep("size", rungs=["nope"]), "'nope'"),
    ],
)
def test_a_sweep_names_a_bad_argument(call, named):
    with pytest.raises(ArgumentError, match=named):
        call()


SUITE = """
rivals = ["numpy", "numpy_avx512"]
[[product]]
shapes = [[5, 6, 7]]
dtype = ["f32", "bf16"]
[[product]]
shapes = [[5, 1, 7]]
vector = true
call = ["new"]
[[product]]
square = [9]
dtype = ["int8"]
out = "int32"
batch = [3]
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(SUITE)
    return str(file)


def test_bench_checks_and_times_each_product_beside_the_rivals(mine):
    run = lab.bench([mine], rivals=["numpy"], seconds=0.02)
    ours = [m for m in run.measurements if m.kernel == contest.PRODUCT]
    assert [(m.suite, m.m, m.n, m.k, m.dtype, m.out, m.batch) for m in ours] == [
        ("mine", 5, 6, 7, "f32", "f32", 1),
        ("mine", 5, 6, 7, "bf16", "bf16", 1),
        ("mine", 5, 1, 7, "f32", "f32", 1),
        ("mine", 9, 9, 9, "int8", "int32", 3),
    ]
    assert [m.refused for m in ours] == [""] * 4
    assert all(m.checked and m.error <= 1 and m.versus["numpy"] > 0 for m in ours)
    assert ours[2].case == "allocating"
    assert sum(m.kernel == "numpy" for m in run.measurements) == 4
    assert all(m.note for m in run.measurements if m.kernel == "numpy")


def test_a_rival_that_is_left_out_is_recorded_with_the_reason(mine, monkeypatch):
    installed = [replace(rival, missing=lambda: "") for rival in libraries.RIVALS]
    monkeypatch.setattr(libraries, "RIVALS", tuple(installed))
    run = lab.bench([mine], rivals=["numpy"], seconds=0.001)
    reasons = {m.kernel: m.refused for m in run.measurements if m.refused}
    assert reasons == dict.fromkeys(("numpy_avx512", "torch", "mkl"), "not among the rivals asked for: numpy")


def test_numpy_is_not_timed_twice_when_it_runs_the_same_kernels(mine, monkeypatch):
    monkeypatch.setattr(on_cpu, "RivalProcess", SameKernels)
    run = lab.bench([mine], rivals=["numpy", "numpy_avx512"], seconds=0.02)
    [refused] = (m for m in run.measurements if m.kernel == "numpy_avx512")
    assert refused.refused.endswith("by default")
    assert all("numpy_avx512" not in m.versus for m in run.measurements)


class SameKernels(on_cpu.RivalProcess):
    """NumPy in place of each rival, for this CPU may not run the other's kernels; it says the same of itself."""

    def __init__(self, rival, threads):
        super().__init__(libraries.find("numpy"), threads)
        self.runs = "the same kernels"


def test_bench_stores_each_product_as_it_is_measured(mine, tmp_path):
    stored = []

    def look(event):
        file = record.path(tmp_path, record.cpu_machine().name)
        stored.append(len(record.read(file)[0].measurements) if file.exists() else 0)

    run = lab.bench([mine], rivals=["numpy"], seconds=0.02, store=tmp_path, on_event=look)
    assert record.read(record.path(tmp_path, run.machine.name)) == (run,)
    assert stored == sorted(stored)
    assert stored[-1] == len(run.measurements) > stored[len(stored) // 2] > 0


def test_a_product_that_is_refused_is_recorded_and_the_rest_goes_on(mine, monkeypatch):
    real = on_cpu.CpuStage.product

    def product(self, config, threads):
        if self.work.dtype == "bf16":
            raise GemmeryError("no bfloat16 today")
        return real(self, config, threads)

    monkeypatch.setattr(on_cpu.CpuStage, "product", product)
    ours = [m for m in lab.bench([mine], rivals=["numpy"], seconds=0.02).measurements if m.kernel == contest.PRODUCT]
    assert [m.refused for m in ours] == ["", "no bfloat16 today", "", ""]


def test_a_suite_for_more_cores_than_there_are_is_not_run():
    cores = suites.target.cores()
    run = lab.bench(["small"], threads=cores + 1, seconds=0.02)
    assert [m.refused for m in run.measurements] == [f"{cores + 1} threads exceed the {cores} cores of this process"]


def test_more_threads_are_also_compared_with_one(mine, monkeypatch):
    monkeypatch.setattr(session.timing, "IDLE_SECONDS", 0.0)
    before = threads.get()
    monkeypatch.setattr(suites.target, "cores", lambda: 2)
    run = lab.bench([mine], rivals=["numpy"], threads=2, seconds=0.02)
    ours = [m for m in run.measurements if m.kernel == contest.PRODUCT]
    assert all(m.threads == 2 and m.versus[contest.ONE_THREAD] > 0 for m in ours)
    assert threads.get() == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"suites": ["nope"]}, "square_f32"),
        ({"suites": ["absent.toml"]}, r"absent\.toml"),
        ({"suites": ["small"], "rivals": ["goto"]}, "'goto'"),
        ({"suites": ["small"], "seconds": 0}, "seconds"),
        ({"suites": ["emulator"], "rivals": ["numpy"]}, "rivals=numpy: suite emulator has no rivals"),
        ({"suites": ["gpu_compile"], "rivals": ["cublas"]}, "rivals=cublas: suite gpu_compile has no rivals"),
    ],
)
def test_bench_names_a_bad_argument(options, named):
    with pytest.raises(ArgumentError, match=named):
        lab.bench(**options)


def test_records_go_to_the_users_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert record.results_folder() == tmp_path / "gemmery" / "results"


def test_without_a_home_no_folder_of_records_is_made_up(monkeypatch):
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ArgumentError, match="set HOME, or name a folder"):
        record.results_folder()


def test_without_a_home_rungs_are_predicted_without_records_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr(on_emulator, "CHECKOUT", tmp_path)
    assert list(on_emulator.recorded(KNOWN["h200"])) == []


def test_a_ladder_that_is_interrupted_keeps_what_it_has(tmp_path):
    def interrupt(event):
        if event.measurement is not None and event.measurement.kernel == "scalar_reordered":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.ladder(["scalar_naive", "scalar_reordered", "simd_row"], [8], store=tmp_path, on_event=interrupt)
    (file,) = tmp_path.iterdir()
    assert [m.kernel for m in record.read(file)[0].measurements] == ["scalar_naive", "scalar_reordered", "numpy"]


def test_load_is_measured_with_every_record(ladder_of, monkeypatch):
    ladder_of(made_up("one", right), made_up("two", right))
    loads = iter([0.1, 0.7, 0.2])
    monkeypatch.setattr(session.load.Meter, "load", lambda self: next(loads))
    events, listen = listening()
    run = lab.ladder(sizes=[8], on_event=listen)
    assert [(m.kernel, m.load) for m in run.measurements] == [("one", 0.1), ("two", 0.7), ("numpy", 0.2)]
    assert [event.measurement for event in events if event.measurement] == list(run.measurements)


def test_the_rivals_load_is_our_own():
    with session.open_session(None, 0, lambda _: None) as one:
        assert one.backend.children() == ()
        process = one.backend.rival("numpy", 1)
        assert one.backend.children() == (process.pid,)


def test_no_module_hides_a_public_name():
    """With a file lab/chain.py, `lab.chain` would be the module once something has imported it."""
    assert not {module.name for module in pkgutil.iter_modules(lab.__path__)} & set(lab.__all__)


def test_a_rival_that_prepared_another_product_since_multiplies_that_of_its_stage():
    class Rival:
        runs, prepared = "a library", None

        def prepare(self, work):
            self.prepared = work
            return ""

        def sample(self, inner, warm):
            return self.prepared.n * inner

    rival = Rival()
    stages = [on_cpu.CpuStage(Work(n, n, n, "f32", "f32")) for n in (8, 16)]
    samples = [stage.rival(rival).sampler() for stage in stages]
    assert [sample(10, 1) for sample in samples] == [80, 160]
    assert [sample(10, 1) for sample in samples] == [80, 160]
