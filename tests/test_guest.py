"""What goes on around products: other threads' imports, forks, the interpreter's end, arguments that run code."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import time
import types
import zipfile
from _thread import get_ident
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery import cache, config
from gemmery.api import device_operands, opaque
from gemmery.cpu import jit
from gemmery.cpu.target import host
from gemmery_emulator.kernels import launch_checks

pytestmark = pytest.mark.sampled(3)

forks = pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no forks")
stores = pytest.mark.skipif(not jit.keeps(host()), reason="kernels are not stored here")
PACKAGE = Path(gm.__file__).parent


def run(code: str, *arguments: str, **environment: str) -> str:
    """What a new interpreter prints for `code`, which must end."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("module", ["torch", "torch.fx", "cupy", "ml_dtypes"])
def test_a_module_that_another_thread_imports_is_not_there_yet(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    a = np.arange(12.0).reshape(3, 4)
    expected = a @ a.T
    rows = a.tolist()
    results = [
        gm.matmul(rows, a.T.tolist()),
        gm.matmul(a, a.T, threads=1),
        gm.matmul(rows, a.T, bias=[0.0, 0.0, 0.0]),
        gm.gemm(1, rows, a.T),
        gm.einsum("ij,kj->ik", rows, a),
        gm.tensordot(rows, a.T, 1),
        gm.grouped_matmul(rows, a.T[None].tolist(), offsets=[3]),
        gm.matmul(rows, a.T, out=np.empty((3, 3))),
    ]
    assert all((result == expected).all() for result in results)
    assert gm.vecdot(rows, rows).tolist() == np.vecdot(a, a).tolist()
    assert gm.explain(a, a.T)
    assert launch_checks.argument(0, memoryview(a)).tolist() == rows


def test_pytorch_is_told_later_where_another_thread_imports_its_compiler(monkeypatch):
    torch = types.ModuleType("torch")
    torch._C = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    monkeypatch.setattr(opaque, "waiting", True)
    assert not opaque.settle()
    assert opaque.waiting


def test_a_precision_can_be_set_while_another_thread_imports_gemmery(monkeypatch):
    monkeypatch.setitem(sys.modules, "gemmery.api.quick", types.ModuleType("gemmery.api.quick"))
    device_operands.set_float32_precision(None)


# Each round is a process that has imported no more than the setup; its child must multiply, however the times fall.
FORKS = """
import os, random, signal, sys, threading, time
import numpy as np
setup, call, rounds, longest = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
a = np.ones((5, 6), "f4")
for i in range(rounds):
    if not (process := os.fork()):
        exec(setup)
        thread = threading.Thread(target=exec, args=(call, {"a": a}))
        thread.start()
        time.sleep(longest * i / rounds)
        if not (child := os.fork()):
            signal.alarm(60)
            exec(call, {"a": a})
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        thread.join()
        os._exit(status != 0)
    assert os.waitpid(process, 0)[1] == 0, f"the child of round {i} never ended"
"""


@pytest.mark.process
@forks
@pytest.mark.parametrize(
    ("setup", "call", "rounds", "longest"),
    [
        ("import gemmery", "import gemmery; gemmery.matmul(a, a.T)", 18, 0.02),
        ("import gemmery; gemmery.matmul(a, a.T)", "import gemmery; gemmery.einsum('ij,kj->ki', a, a)", 8, 0.003),
        ("import gemmery", "import gemmery.api.contractions", 8, 0.02),
    ],
)
def test_a_fork_during_a_first_call_leaves_a_child_that_multiplies(setup, call, rounds, longest):
    run(FORKS, setup, call, str(rounds), str(longest))


@pytest.mark.process
@forks
@pytest.mark.many
def test_a_fork_waits_for_a_first_product_that_compiles(tmp_path):
    """Its handlers are not registered yet when the fork begins."""
    code = "import gemmery; gemmery.matmul(a, a.T)"
    run(FORKS.replace("exec(setup)", "exec(setup); os.environ['GEMMERY_CACHE_DIR'] += str(i)"), "import gemmery", code,
        "2", "0.09", GEMMERY_CACHE_DIR=str(tmp_path / "cache"))  # fmt: skip


def test_a_fork_does_not_wait_for_its_own_thread_nor_for_other_packages(monkeypatch):
    own = types.SimpleNamespace(owner=get_ident())
    other = types.SimpleNamespace(owner=1)
    locks = {
        "gemmery.own": lambda: own,
        "torch": lambda: other,
        "gemmeryx": lambda: other,
        "gemmery.gone": lambda: None,
    }
    monkeypatch.setattr(gm._frozen_importlib, "_module_locks", locks)
    assert not gm._importing()
    for name in ("gemmery.other", "gemmery_emulator.other", "gemmery_lab.other"):
        with monkeypatch.context() as patch:
            patch.setitem(locks, name, lambda: other)
            assert gm._importing()


@pytest.mark.process
def test_a_product_in_a_finalizer_at_the_end_of_the_interpreter_ends(tmp_path):
    printed = run(
        "import numpy as np, gemmery as gm\n"
        "class Model:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self):\n"
        "        print(gm.matmul(np.ones((3, 7), 'f4'), np.ones((7, 9), 'f4')).sum())\n"
        "gm.matmul(np.ones((4, 4)), np.ones((4, 4))); Model()",
        GEMMERY_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert printed == "189.0\n"


@pytest.mark.process
def test_threads_that_never_begin_are_not_waited_for(tmp_path):
    """As where memory ends exactly there, or the interpreter."""
    printed = run(
        "import numpy as np, gemmery as gm\n"
        "gm.matmul\n"
        "from gemmery.cpu import jit\n"
        "jit.start_new_thread, jit.cores = lambda function, arguments: None, lambda: 4\n"
        "print(gm.matmul(np.ones((3, 7), 'f4'), np.ones((7, 9), 'f4')).sum())",
        GEMMERY_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert printed == "189.0\n"


@pytest.mark.process
@pytest.mark.parametrize("form", ["zip", "compiled"])
def test_products_need_no_source_files(tmp_path, form):
    place = tmp_path / "gemmery"
    shutil.copytree(PACKAGE, place, ignore=shutil.ignore_patterns("__pycache__", "*.cu", "*.cuh"))
    if form == "zip":
        place = tmp_path / "gemmery.zip"
        with zipfile.ZipFile(place, "w") as file:
            for path in (tmp_path / "gemmery").rglob("*.py"):
                file.write(path, path.relative_to(tmp_path))
    else:
        compileall.compile_dir(place, legacy=True, quiet=1, workers=1)
        for path in place.rglob("*.py"):
            path.unlink()
        place = tmp_path
    folder = tmp_path / "cache"
    code = (
        f"import sys; sys.path.insert(0, {str(place)!r})\n"
        "import numpy as np, gemmery as gm\n"
        f"assert gm.__file__.startswith({str(place)!r})\n"
        "print(gm.matmul(np.ones((3, 7), 'f4'), np.ones((7, 9), 'f4')).sum())\n"
        "from gemmery.cpu import jit; print(jit.reason())"
    )
    product, reason = run(code, GEMMERY_CACHE_DIR=str(folder)).splitlines()
    assert product == "189.0"
    assert "install gemmery as files" in reason if form == "zip" else reason == ""
    assert form == "zip" or not jit.keeps(host()) or cache.listing(str(folder))


@stores
def test_an_entry_under_the_name_of_another_is_a_miss(tmp_path):
    folder = str(tmp_path)
    names = [cache.key("cpu", "1", name) for name in (b"one", b"two")]
    for name in names:
        cache.write(folder, name, name.encode())
    paths = [tmp_path / name for name in names]
    paths[0].rename(tmp_path / "aside")
    paths[1].rename(paths[0])
    (tmp_path / "aside").rename(paths[1])
    assert [cache.read(folder, name) for name in names] == [None, None]
    cache.write(folder, names[0], b"payload")
    assert cache.read(folder, names[0]) == b"payload"


@pytest.mark.process
@stores
@pytest.mark.many
def test_products_are_right_where_files_of_the_cache_were_exchanged(tmp_path):
    code = (
        "import numpy as np, gemmery as gm\n"
        "for name in ('f4', 'f8'):\n"
        "    a = np.arange(35).reshape(5, 7).astype(name)\n"
        "    assert (gm.matmul(a, a.T) == a @ a.T).all()\n"
    )
    folder = tmp_path / "cache"
    run(code, GEMMERY_CACHE_DIR=str(folder))
    paths = sorted(path for path in folder.iterdir() if path.name.startswith("cpu-"))
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    run(code, GEMMERY_CACHE_DIR=str(folder))
    assert [path.read_bytes() for path in paths] == contents  # stored again


class Resizing:
    """An argument that resizes an array when it is read."""

    def __init__(self, array, value):
        self.array, self.value = array, value

    def resize(self):
        if isinstance(self.array, np.ndarray):
            self.array.resize((1,) * self.array.ndim, refcheck=False)
        else:
            self.array.untyped_storage().resize_(0)
        return self.value

    def __array__(self, dtype=None, copy=None):
        return self.resize()

    def __float__(self):
        return self.resize()

    def __complex__(self):
        return complex(self.resize())

    def __index__(self):
        return self.resize()

    def __str__(self):
        return self.resize()


N = 400
RESIZED = {
    "matmul": lambda a, b, r: gm.matmul(a, r(a, b)),
    "matmul, right": lambda a, b, r: gm.matmul(r(a, b), a),
    "bias": lambda a, b, r: gm.matmul(a, b, bias=r(a, b[0])),
    "threads": lambda a, b, r: gm.matmul(b, a, threads=r(a, 1)),
    "dtype": lambda a, b, r: gm.matmul(a, b, dtype=r(a, b.dtype.name)),
    "gemm, alpha": lambda a, b, r: gm.gemm(r(a, 2.0), a, b),
    "gemm, beta": lambda a, b, r: gm.gemm(1.0, b, b, r(a, 2.0), a),
    "gemv": lambda a, b, r: gm.gemv(a, r(a, b[0])),
    "gemv, alpha": lambda a, b, r: gm.gemv(a, b[0], alpha=r(a, 2.0)),
    "einsum": lambda a, b, r: gm.einsum("ij,jk->ki", a, r(a, b)),
    "einsum, dtype": lambda a, b, r: gm.einsum("ij,jk->ki", a, b, dtype=r(a, b.dtype.name)),
    "tensordot": lambda a, b, r: gm.tensordot(a, r(a, b), 1),
    "vecdot": lambda a, b, r: gm.vecdot(a, r(a, b)),
    "grouped, b": lambda a, b, r: gm.grouped_matmul(a, r(a, b[None]), offsets=[N]),
    "grouped, bias": lambda a, b, r: gm.grouped_matmul(a, b[None], offsets=[N], bias=r(a, b[0])),
    "grouped, offsets": lambda a, b, r: gm.grouped_matmul(a, b[None], offsets=r(a, np.array([N]))),
    "grouped, lists": lambda a, b, r: gm.grouped_matmul([a], [r(a, b)]),
    "out": lambda a, b, r: gm.matmul(b, r(a, b), out=a),
}


@pytest.mark.parametrize("kind", ["float64", "complex128", "torch"])
@pytest.mark.parametrize("name", RESIZED)
def test_an_argument_that_resizes_another_is_an_error(name, kind):
    b = np.ones((N, N), "float64" if kind == "torch" else kind)
    a = np.ones_like(b)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        a = torch.ones(N, N, dtype=torch.float64)
        if name in ("matmul, right", "grouped, lists") or "bias" in name:
            pytest.skip("the same as for NumPy")
    with pytest.raises((gm.LayoutError, gm.ShapeError)):
        RESIZED[name](a, b, Resizing)
    assert gm.matmul(b, b)[0, 0] == N


def test_the_bias_that_the_number_of_threads_resizes_is_an_error():
    b = np.ones((N, N))
    bias = np.ones(N)
    with pytest.raises(gm.LayoutError, match="bias was resized"):
        gm.matmul(b, b, bias=bias, threads=Resizing(bias, 1))


@pytest.mark.parametrize(
    "variable", ["GEMMERY_FAST_ENTRY", "GEMMERY_TIERS", "GEMMERY_ISA", "GEMMERY_FLOAT32_PRECISION"]
)
def test_values_of_variables_are_checked_in_one_way(monkeypatch, variable):
    ask = {
        "GEMMERY_FAST_ENTRY": config.fast_entry, "GEMMERY_TIERS": config.tiers,
        "GEMMERY_ISA": config.isa_limit, "GEMMERY_FLOAT32_PRECISION": config.float32_precision,
    }[variable]  # fmt: skip
    for text in ("no", "x" * 500, "2"):
        monkeypatch.setenv(variable, text)
        with pytest.raises(gm.ArgumentError, match=f"{variable}='.{{1,60}}: it must be one of .*; unset it for "):
            ask()
    monkeypatch.delenv(variable)
    default = ask()
    monkeypatch.setenv(variable, "  ")
    assert ask() == default
    if default is True:
        answers = {text: monkeypatch.setenv(variable, text) or ask() for text in ("on", "1", "OFF", "0")}
        assert answers == {"on": True, "1": True, "OFF": False, "0": False}


def test_a_relative_cache_folder_stays_where_it_was_first_used(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", f"kernels-{time.monotonic_ns()}")
    monkeypatch.chdir(tmp_path)
    first = config.cache_dir()
    assert first == str(tmp_path / os.environ["GEMMERY_CACHE_DIR"])
    monkeypatch.chdir("/")
    assert config.cache_dir() == first


@stores
def test_a_folder_on_a_full_disk_is_told_from_one_that_others_can_write(monkeypatch, tmp_path):
    def full(*entry):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    assert cache.unusable(str(tmp_path)) == "make room in the file system"
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    with pytest.raises(gm.CacheError, match="cannot be stored there: make room"):
        gm.warm("float32")


@stores
def test_a_clock_behind_the_files_is_named(monkeypatch):
    assert jit.reason() in ("", "a source of gemmery has changed since this process began: start it again")
    monkeypatch.setattr(jit.time, "time_ns", lambda: 10**18)
    assert jit.reason() == "the clock is behind the time at which gemmery's files were changed: set it"
