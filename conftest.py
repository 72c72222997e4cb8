"""An environment of the tests' own; one profile for every random test, without a deadline; interrupts as in a terminal.

Libraries read their variables when they are loaded, so the environment is cleared here, before any test file is
imported, and restored after every test.
"""

import gc
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")

# Variables that change which kernels run, on how many threads, or how a terminal looks: name or prefix.
DISTORTING = (
    "ATEN_", "BLIS_", "CUBLAS_", "DNNL_", "GEMMERY_", "GOMP_", "GOTO_", "KMP_", "MKL_", "NPY_", "NVIDIA_TF32_OVERRIDE",
    "NVPL_", "OMP_", "ONEDNN_", "OPENBLAS_", "VECLIB_",
    "CLICOLOR", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS", "TTY_", "TYPER_",
    "_TYPER_",
)  # fmt: skip

EMULATORS = ("auto", "numpy", "compiled")
ISAS = ("avx512", "avx2", "generic", "sve_512", "sve_256", "neon_mmla", "neon_dot", "neon")

# Packages that tests use where they are installed, and that `pip install '.[cuda]'` does not bring.
BEYOND_A_USERS = (
    "cupy", "dask", "distributed", "jax", "mkdocs", "mpi4py", "opt_einsum", "safetensors", "torch", "transformers",
    "yaml", "zarr",
)  # fmt: skip

# Of so many cases of a test with the marker `many`, --few runs one. A prime: others may always meet the same type.
MANY = 11
# Of a test without it that has more than LONG cases, --few runs one in SEVERAL.
LONG, SEVERAL = 40, 3

for name in [name for name in os.environ if name.startswith(DISTORTING)]:
    del os.environ[name]
os.environ["GEMMERY_TABLE"] = "off"  # a table in the home folder changes plans

# Tests that need more or fewer examples ask for a multiple of `settings().max_examples`, so that --few thins them too.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=150)
settings.register_profile("few", settings.get_profile("repeatable"), max_examples=30)
settings.load_profile("repeatable")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would its tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", action="store_true", help="run about one case in ten of tests with the marker `many`")
    parser.addoption("--user", action="store_true", help="hide packages that `pip install '.[cuda]'` does not bring")
    parser.addoption("--skipped", action="store_true", help="run the tests that the last whole run skipped")
    parser.addoption("--emulator", choices=EMULATORS, help="run the tests with GEMMERY_EMULATOR set to this")
    parser.addoption("--isa", choices=ISAS, help="run the tests with GEMMERY_ISA set to this")


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("leaks_references", "slow", "thread_unsafe", "valgrind_error"):
        config.addinivalue_line("markers", f"{mark}: of NumPy's own tests, which test_numpy_suite imports")
    if config.getoption("--user"):
        from gemmery.cuda import sass

        sass.nvdisasm = lambda: ""
        sys.modules.update(dict.fromkeys(BEYOND_A_USERS))  # each of them cannot be imported then
    paths = [*map(str, config.getini("pythonpath")), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # processes of tests import what tests share, too
    if isa := config.getoption("--isa"):
        os.environ["GEMMERY_ISA"] = isa
    if way := config.getoption("--emulator"):
        from gemmery_emulator.kernels.native.engine import engine
        from gemmery_emulator.lower import LoweredKernel

        os.environ["GEMMERY_EMULATOR"] = way
        config.addinivalue_line("filterwarnings", "ignore:GEMMERY_EMULATOR=compiled:RuntimeWarning")
        # Also kernels that a test lowers itself, below the part that knows of compiled code.
        LoweredKernel.__post_init__ = lambda self: object.__setattr__(self, "engine", engine)
    if thins(config):
        settings.load_profile("few")
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        first = int(config.workerinput["workerid"].removeprefix("gw")) % len(config.args)
        config.args = config.args[first:] + config.args[:first]


def thins(config: pytest.Config) -> bool:
    """Return True with --few, unless the command line names files or tests."""
    names = config.option.keyword or not all(Path(argument).is_dir() for argument in config.args)
    return config.getoption("--few") and not names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --few, drop most cases of tests that have many, unless the command line names files or tests.

    Each worker collects the folders from another one on, because the first to import a file rewrites its assertions and
    compiles it, which takes 12 s for all files: they share this work. Then they put the tests into one order.

    Put the emulator's tests of a rung one after the other: they share kernels, of which the latest 64 stay read.
    """
    folders = [f"{folder}/" for folder in config.getini("testpaths")]
    items.sort(key=lambda item: next((at for at, each in enumerate(folders) if item.nodeid.startswith(each)), 0))
    if thins(config):
        leave(config, items, few_of(items))
    if config.getoption("--skipped"):
        skipped = set(config.cache.get(SKIPPED, ()))
        leave(config, items, [item for item in items if not skipped.isdisjoint((item.nodeid, item.location[0]))])
    places = [at for at, item in enumerate(items) if item.path.stem == "test_emulator_ladder"]
    tests = sorted(
        (items[at] for at in places), key=lambda item: item.name.partition("[")[2].partition("-")[0].rstrip("]")
    )
    for at, test in zip(places, tests, strict=True):
        items[at] = test


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --skipped, leave out files of which the last run skipped nothing: to import them all takes 15 s."""
    if config.getoption("--skipped") and collection_path.suffix == ".py":
        files = {name.partition("::")[0] for name in config.cache.get(SKIPPED, ())}
        return True if collection_path.relative_to(config.rootpath).as_posix() not in files else None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    """With --few and no CUDA device, skip files in folders named `gpu` whole: each worker would collect their
    3,805 cases, and 2,123 would be run to be skipped.
    """
    if isinstance(collector, pytest.Module) and collector.path.parent.name == "gpu" and thins(collector.config):
        from gemmery.cuda import driver

        if reason := driver.missing():
            return pytest.CollectReport(collector.nodeid, "skipped", (str(collector.path), 0, f"Skipped: {reason}"), [])
    return None


def leave(config: pytest.Config, items: list[pytest.Item], some: list[pytest.Item]) -> None:
    """Deselect all items but some."""
    few = dict.fromkeys(some)
    config.hook.pytest_deselected(items=[item for item in items if item not in few])
    items[:] = few


SKIPPED = "gemmery/skipped"  # in pytest's cache: tests and files that the last run skipped
_skipped: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.add(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "cache") and not hasattr(config, "workerinput") and not config.getoption("--skipped"):
        config.cache.set(SKIPPED, sorted(_skipped))


def few_of(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items without most cases of the tests with the marker `many`: one in MANY is left, or one in n of
    `many(n)`, and at least one; without the marker, one in SEVERAL of more than LONG cases. Of what is left in a file
    with the marker `sampled(n)`, each n-th item remains.

    Each marked test of a file begins six cases after the one before it: tests of the same rungs then leave different
    ones, by which all rungs are left (test_few_cases.py).
    """
    tests = [(item.path, item.name.partition("[")[0]) for item in items]
    markers = [item.get_closest_marker("many") for item in items]
    marked = dict.fromkeys(test for test, marker in zip(tests, markers, strict=True) if marker)
    of_file = Counter[Path]()
    first = {}
    for file, name in marked:
        first[file, name] = 6 * of_file[file]
        of_file[file] += 1
    cases, seen = Counter(tests), Counter[tuple[Path, str]]()
    few, left = [], Counter[Path]()
    for item, test, marker in zip(items, tests, markers, strict=True):
        unmarked = SEVERAL if cases[test] > LONG else 1
        every = min(*(marker.args or (MANY,)), cases[test]) if marker else unmarked
        if (seen[test] - first.get(test, 0)) % every == 0:
            sampled = item.get_closest_marker("sampled")
            if sampled is None or left[item.path] % sampled.args[0] == 0:
                few.append(item)
            left[item.path] += sampled is not None
        seen[test] += 1
    return few


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector off while tests are collected: of 14 s it takes 3."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what lives for the whole run: without this it takes two fifths of an emulated run.

    A kernel that is read and lowered makes 50,000 objects, and each 700 of them start a collection, which walks
    hundreds of thousands of tests and modules now and then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def rough_limits() -> None:
    """Measure the machine's limits roughly: tests need any numbers, and true ones take 1 to 2 s for each type."""
    if "gemmery" in sys.modules:
        from gemmery import limits

        limits._SMALLEST = limits._LARGEST = 4 << 20  # bytes
        limits.ALONE_SECONDS, limits.TOGETHER_SECONDS = 0.0003, 0.002  # of a sample


@pytest.fixture
def collect() -> Callable[[], int]:
    """A garbage collection of what the test makes: one of all that has been made before takes 5 s late in a run."""
    gc.freeze()
    return gc.collect


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Callable[[Iterable[T], int], list[T]]:
    """A function that gives what a test goes through: with --few one in n, each case from another one on, else all."""
    first = zlib.crc32(request.node.nodeid.encode())

    def sampled(values: Iterable[T], n: int) -> list[T]:
        every = list(values)
        return every[first % min(n, len(every)) :: n] if thins(request.config) else every

    return sampled


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Undo what a test does to the environment, so that the next one starts from the same."""
    for name in ("COLUMNS", "LINES"):
        os.unsetenv(name)  # readline sets them when it is imported, where os.environ does not show them
    before, frames = dict(os.environ), sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(frames)  # mypy raises it, and an epilogue three times as deep then takes 15 s
    for name in {name for name, _ in os.environ.items() ^ before.items()} - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
