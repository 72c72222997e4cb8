"""From IR to callable code: what an image may refer to, and what a process with a warm cache does without."""

import ast
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
from llvmlite import binding

import gemmery
from gemmery import cache
from gemmery.cpu import jit, pool_code, workspace
from gemmery.cpu.ir import Module
from gemmery.cpu.ir_types import vector
from gemmery.cpu.target import Target, host
from gemmery.errors import CompileError

pytestmark = pytest.mark.sampled(3)

# Lines that, added to batched.py, double the elements that it loads.
WRONG = """
def _load_first(f, element, at, count, genuine=_load_first):
    value = genuine(f, element, at, count)
    return value + value
def _tile(*given, genuine=_tile):
    totals = genuine(*given)
    for total in (total for row in totals for total in row):
        total.value = total.value + total.value
    return totals
"""
FLAT = host().machine in ("x86_64", "amd64") and sys.platform != "win32"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))


def entry(address, *types, result=None):
    return ctypes.CFUNCTYPE(result, *types)(address)


def test_functions_of_a_module_call_each_other_and_read_its_constants():
    def generate():
        module = Module(host())
        with module.function("inner", ("ptr", "to"), local=True) as f:
            ramp = f.emit(
                vector(8, "i32"),
                "add <8 x i32> <i32 3, i32 1, i32 4, i32 1, i32 5, i32 9, i32 2, i32 6>, zeroinitializer",
            )
            f.store(ramp, f["to"])
        with module.function("outer", ("ptr", "to")) as f:
            f.call("inner", f["to"])
        return module

    out = (ctypes.c_int32 * 8)()
    found = jit.load(host(), "test_calls", generate)
    assert set(found) == {"outer"}
    entry(found["outer"], ctypes.c_void_p)(ctypes.addressof(out))
    assert list(out) == [3, 1, 4, 1, 5, 9, 2, 6]


def test_the_hole_is_filled_with_what_the_process_gives():
    def generate():
        module = Module(host())
        with module.function("hole", returns="i64") as f:
            f.ret(f.index(jit.HOLE))
        return module

    first = jit.load(host(), "test_hole_1", generate, 0x123456789ABCDEF0)
    assert entry(first["hole"], result=ctypes.c_int64)() == 0x123456789ABCDEF0
    del jit._loaded[host(), "test_hole_1"]
    again = jit.load(host(), "test_hole_1", generate, 42)  # now from the cache
    assert entry(again["hole"], result=ctypes.c_int64)() == 42


@pytest.mark.skipif(not FLAT, reason="LLVM's own linker, used here, finds symbols of the process")
def test_a_kernel_that_needs_something_outside_is_refused_by_name():
    def generate():
        module = Module(host())
        module.declare("declare void @outside()")
        with module.function("needy") as f:
            f.line("call void @outside()")
        return module

    with pytest.raises(CompileError, match=r"'outside': a kernel may only refer to itself"):
        jit.load(host(), "test_needy", generate)


def test_ir_that_llvm_refuses_names_the_kernel():
    def generate():
        module = Module(host())
        with module.function("broken") as f:
            f.line("this is no instruction")
        return module

    with pytest.raises(CompileError, match="test_broken"):
        jit.load(host(), "test_broken", generate)


@pytest.mark.process
@pytest.mark.skipif(not FLAT, reason="kernels are cached as flat images on x86-64 alone")
def test_a_cached_product_does_without_llvm_and_generators():
    code = (
        "import sys, numpy as np, gemmery as gm\n"
        "x = np.ones((9, 9), np.float32)\n"
        "assert gm.matmul(x, x)[0, 0] == 9\n"
        "print(bool({'llvmlite', 'gemmery.cpu.ir', 'gemmery.cpu.loops', 'gemmery.cpu.pool_code'} & {*sys.modules}))"
    )
    seen = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert seen == ["True", "False"]


@pytest.mark.process
@pytest.mark.skipif(not FLAT, reason="kernels are cached as flat images on x86-64 alone")
def test_a_source_that_is_edited_during_a_run_does_not_spoil_the_cache(tmp_path):
    """A generator is imported late: what it makes must not be stored as the code of the source there was before."""
    copy = tmp_path / "gemmery"
    shutil.copytree(Path(gemmery.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    run = f"""
import pathlib
import numpy as np
import gemmery as gm
x = np.ones((3, 3), np.float32)
assert gm.matmul(x, x)[0, 0] == 3
source = pathlib.Path({str(copy / "cpu" / "batched.py")!r})
genuine = source.read_text()
if %s:
    source.write_text(genuine + {WRONG!r})
y = np.ones((9, 3, 3), np.float32)
print(gm.matmul(y, y)[0, 0, 0])
if source.read_text() != genuine:
    source.write_text(genuine)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "GEMMERY_TIERS": "off"}
    seen = [
        subprocess.run([sys.executable, "-c", run % edits], env=environment, capture_output=True, text=True, check=True)
        for edits in (True, False)
    ]
    assert [float(done.stdout) > 3 for done in seen] == [True, False]
    assert float(seen[1].stdout) == 3


def test_the_digest_of_the_sources_is_kept_until_one_changes(monkeypatch, tmp_path):
    source, now = tmp_path / "source.py", time.time_ns()
    monkeypatch.setattr(jit, "_source_files", lambda: (str(source),))
    monkeypatch.setattr(jit, "_unchanged_at_first", lambda: True)
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path / "cache"))
    wrote = []
    monkeypatch.setattr(cache, "write", lambda *given, write=cache.write: wrote.append(given) or write(*given))
    for text, writes in ((b"one", 1), (b"one", 1), (b"two", 2), (b"one", 3)):
        if not source.exists() or source.read_bytes() != text:
            source.write_bytes(text)
            os.utime(source, ns=(now, now + len(wrote)))
        assert jit._sources.__wrapped__() == cache.digest(text).hex()
        assert len(wrote) == writes
    monkeypatch.setattr(jit, "_unchanged_at_first", lambda: False)  # as if the source had changed since
    assert jit._sources.__wrapped__() == cache.digest(b"one").hex()
    assert len(wrote) == 4
    assert wrote[-1][0] is None


def test_every_module_that_shapes_code_is_in_the_digest():
    """Modules outside cpu/ that its files import are in the digest, or known not to shape the code of a kernel."""
    folder = Path(jit.__file__).parent
    names = {Path(name).relative_to(folder.parent).as_posix() for name in jit._source_files() if "llvmlite" not in name}
    imported = set()
    for path in folder.glob("*.py"):
        assert f"cpu/{path.name}" in names
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "gemmery":
                imported |= {f"gemmery.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gemmery."):
                imported.add(node.module)
    around = {
        name.removeprefix("gemmery.").replace(".", "/") + ".py"
        for name in imported
        if not name.startswith("gemmery.cpu")
    }
    assert around - names <= {"arrange.py", "arrays.py", "cache.py", "config.py", "cpu.py", "errors.py", "tuples.py"}
    assert any("llvmlite" in name for name in jit._source_files())


@pytest.mark.skipif(not FLAT, reason="elsewhere LLVM itself makes pages executable")
def test_a_system_that_forbids_compiled_code_is_told_how_to_allow_it(monkeypatch, collect):
    """As systemd's MemoryDenyWriteExecute does; the pages are given back."""
    blocks, fresh = [], workspace.fresh

    def noted(size):
        block = fresh(size)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(workspace, "fresh", noted)
    monkeypatch.setattr(jit, "_make_executable", lambda address, size: errno.EACCES)
    with pytest.raises(CompileError, match=r"Permission denied.*MemoryDenyWriteExecute=no"):
        jit._map(bytes(10))
    collect()
    assert [block() for block in blocks] == [None]


def test_pages_are_made_executable_or_the_error_is_named():
    assert jit._make_executable(1, 4096) == errno.EINVAL  # not the address of a page


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "riscv64"])
def test_the_pool_of_another_machine_is_valid(machine):
    """Its instructions for pauses and floating-point modes, where LLVM here compiles for x86-64 alone."""
    text = str(pool_code.module(Target("generic", frozenset(), machine=machine)))
    binding.parse_assembly(text).verify()
    assert ("@llvm.aarch64.get.fpcr" in text) == (machine != "riscv64")
    assert "llvm.x86" not in text


def counted(name, calls, before=None):
    """An image of a function that does nothing; notes each generation."""

    def generate():
        calls.append(name)
        if before:
            before()
        module = Module(host())
        with module.function(name):
            pass
        return module

    return name, generate


def test_threads_compile_different_modules_at_the_same_time():
    meeting, calls = threading.Barrier(2, timeout=30), []
    first, second = (counted(f"test_meeting_{i}", calls, meeting.wait) for i in range(2))
    other = threading.Thread(target=jit.load, args=(host(), *second))
    other.start()
    assert jit.load(host(), *first)["test_meeting_0"]
    other.join()
    assert jit.load(host(), *second)["test_meeting_1"]
    assert sorted(calls) == ["test_meeting_0", "test_meeting_1"]


def test_a_thread_waits_for_a_module_that_another_compiles():
    calls = []
    others = [threading.Thread(target=jit.load, args=(host(), "test_once", lambda: 1 / 0)) for _ in range(3)]

    def start():
        for other in others:
            other.start()

    image = counted("test_once", calls, start)
    jit.load(host(), *image)
    for other in others:
        other.join()
    assert calls == ["test_once"]


def test_missing_modules_are_made_together_and_an_error_is_that_of_its_module():
    calls = []
    images = [counted(f"test_all_{i}", calls) for i in range(5)]
    jit.at_once([partial(jit.load, host(), *image) for image in images])
    jit.load_together(host(), images[0], lambda: 1 / 0)  # nothing is missing
    assert sorted(calls) == [name for name, _ in images]

    def broken():
        raise CompileError("test_none")

    with pytest.raises(CompileError, match="test_none"):
        jit.at_once(
            [partial(jit.load, host(), "test_none", broken), partial(jit.load, host(), *counted("test_all_6", calls))]
        )
    jit.load_together(host(), counted("test_all_7", calls), lambda: [counted("test_all_8", calls)])
    assert {"test_all_7", "test_all_8"} < set(calls)
    assert not jit._active
    assert not jit._making


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_waits_for_modules_that_other_threads_compile():
    begun, calls, done = threading.Event(), [], []

    def compiling():
        begun.set()
        time.sleep(0.05)
        done.append(1)

    other = threading.Thread(target=jit.load, args=(host(), *counted("test_fork", calls, compiling)))
    other.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if done and jit.load(host(), *counted("test_fork_child", calls)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    other.join()


def test_what_was_postponed_is_done_with_the_next_modules_even_if_these_are_there():
    calls, done = [], []
    jit.postpone(lambda: done.append(1))
    jit.load_together(host(), counted("test_late_1", calls), lambda: [counted("test_late_2", calls)])
    assert sorted(calls) == ["test_late_1", "test_late_2"]
    assert set(done) == {1}
    done.clear()
    jit.postpone(lambda: done.append(2))
    jit.load_together(host(), counted("test_late_1", calls), lambda: 1 / 0)
    jit.load_together(host(), counted("test_late_1", calls), lambda: 1 / 0)
    assert len(calls) == 2
    assert set(done) == {2}
    assert jit._postponed == []


@pytest.mark.process
@pytest.mark.skipif(not FLAT, reason="elsewhere the entry is compiled when it is first named")
def test_the_entry_is_compiled_beside_the_first_product():
    """Until then builtins call Python; later products do not."""
    code = """
import sys
import numpy as np
import gemmery as gm
from gemmery.cpu import jit
x, called = np.ones((9, 9), np.float32), []
gm.matmul(x, x)
names = {name for _, name in jit._loaded}
assert {"entry", "entry_python"} <= names, names
sys.setprofile(lambda frame, event, argument: called.append(event) if event == "call" else None)
y = gm.matmul(x, x)
sys.setprofile(None)
assert (y == 9).all()
print(called)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


INTERRUPTED = """
import signal, threading
import numpy as np, gemmery as gm
from gemmery.cpu import llvm
gm.matmul(np.ones((3, 3)), np.ones((3, 3)))
seen, emitted = [], llvm.emitted
def slow(*args):
    seen.append(threading.current_thread() is threading.main_thread())
    if len(seen) == 1:
        signal.raise_signal(signal.SIGINT)  # of which the main thread hears, wherever it is
    return emitted(*args)
llvm.emitted = slow
x = np.ones((40, 40), np.int16)
try:
    gm.matmul(x, x)
    raise SystemExit("not interrupted")
except KeyboardInterrupt:
    pass
assert (gm.matmul(x, x) == 40).all()
assert not any(seen), "LLVM was called in the main thread"
"""


@pytest.mark.process
def test_an_interrupt_does_not_reach_llvm(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env={**os.environ, "GEMMERY_CACHE_DIR": str(tmp_path), "GEMMERY_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_a_module_that_an_interrupted_thread_left_is_compiled_by_another(monkeypatch):
    monkeypatch.setattr(jit, "_WAIT_LIMIT", 0.01)
    calls = []
    name, generate = counted("test_left", calls)
    monkeypatch.setattr(jit, "_making", {(host(), name)})
    assert jit.load(host(), name, generate)
    assert calls
