"""Background work: what runs, what is refused, and how a process ends or forks meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gemmery import config, tiers
from gemmery.errors import ArgumentError

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Each test has a queue of its own, with tiers on."""
    monkeypatch.delenv("GEMMERY_TIERS", raising=False)
    monkeypatch.setattr(tiers, "_work", tiers._Work())
    yield
    tiers.wait()


class Gate:
    """A job that runs until it is opened."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()
        tiers.aside("gate", self)
        self.entered.wait()

    def __call__(self):
        self.entered.set()
        self.opened.wait()


def test_a_job_runs_in_another_thread_once_for_each_key():
    ran = []
    for key in ("one", "two", "one"):
        tiers.aside(key, lambda key=key: ran.append((key, threading.get_ident())))
    tiers.wait()
    tiers.aside("two", lambda: ran.append(("two", 0)))
    tiers.wait()
    assert [key for key, _ in ran] == ["one", "two"]
    assert threading.get_ident() not in {thread for _, thread in ran}


def test_the_thread_ends_with_its_queue_and_starts_again():
    threads = []
    for key in range(2):
        tiers.aside(key, lambda: threads.append(threading.current_thread()))
        tiers.wait()
        threads[-1].join(10)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]
    assert tiers.state() == (False, 0, 2, 0, ())


@pytest.mark.parametrize("error", [ValueError("bad tile"), SystemExit(3), KeyboardInterrupt("now")])
def test_a_failure_reaches_nobody_and_is_not_tried_again(error, capsys):
    tried = []

    def fail():
        tried.append(None)
        raise error

    tiers.aside(("packed", 3), fail)
    tiers.aside("next", lambda: tried.append("next"))
    tiers.wait()
    tiers.aside(("packed", 3), fail)
    tiers.wait()
    assert tried == [None, "next"]
    assert tiers.state().failures == (f"('packed', 3): {type(error).__name__}: {error}",)
    assert capsys.readouterr() == ("", "")


def test_a_full_queue_drops_the_newest_which_may_be_asked_for_again():
    gate, ran = Gate(), []
    for key in range(tiers.WAITING + 2):
        tiers.aside(key, lambda key=key: ran.append(key))
    assert tiers.state()[:4] == (True, tiers.WAITING, 0, 2)
    gate.opened.set()
    tiers.wait()
    assert ran == list(range(tiers.WAITING))
    tiers.aside(tiers.WAITING + 1, lambda: ran.append("again"))
    tiers.wait()
    assert ran[tiers.WAITING :] == ["again"]


def test_the_keys_of_old_jobs_are_forgotten(monkeypatch):
    monkeypatch.setattr(tiers, "REMEMBERED", 3)
    ran = []
    for key in [0, 1, 2, 3, 3, 1, 0]:
        tiers.aside(key, lambda key=key: ran.append(key))
        tiers.wait()
    assert ran == [0, 1, 2, 3, 0]


def test_a_job_may_ask_for_another_and_may_wait():
    ran = []

    def outer():
        tiers.aside("inner", lambda: ran.append("inner"))
        tiers.wait()
        ran.append("outer")

    tiers.aside("outer", outer)
    tiers.wait()
    assert ran == ["outer", "inner"]


def test_many_threads_ask_at_once():
    ran = []
    with ThreadPoolExecutor(8) as pool:
        for _ in range(40):
            pool.map(lambda key: tiers.aside(key, lambda: ran.append(key)), range(20))
    tiers.wait()
    assert sorted(ran) == list(range(20))


def test_off_means_off(monkeypatch):
    monkeypatch.setenv("GEMMERY_TIERS", "off")
    ran = []
    tiers.aside("key", lambda: ran.append(None))
    tiers.wait()
    assert not ran
    assert not tiers.enabled()


@pytest.mark.parametrize(("text", "on"), [("", True), ("on", True), (" ON ", True), ("off", False), ("Off", False)])
def test_values_of_the_variable(monkeypatch, text, on):
    monkeypatch.setenv("GEMMERY_TIERS", text)
    assert config.tiers() is tiers.enabled() is on


@pytest.mark.parametrize("text", ["no", "offf", "x" * 500])
def test_another_value_names_the_rule(monkeypatch, text):
    monkeypatch.setenv("GEMMERY_TIERS", text)
    with pytest.raises(
        ArgumentError, match=r"GEMMERY_TIERS='.{1,60}: it must be one of on, off, 1, 0; unset it for on"
    ):
        tiers.aside("key", list)


def test_where_no_thread_can_start_nothing_runs(monkeypatch):
    ran = []
    with monkeypatch.context() as patched:

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        tiers.aside("key", lambda: ran.append(None))
        tiers.wait()
    tiers.aside("key", lambda: ran.append(None))
    tiers.wait()
    assert ran == [None]


# A process with one job in progress and 20 waiting, whose job ends when the interpreter begins to end.
BUSY = """
import atexit, os, signal, sys, threading
from gemmery import tiers
entered = threading.Event()
def job():
    entered.set()
    threading.main_thread().join()
tiers.aside("job", job)
for key in range(20):
    tiers.aside(key, lambda: print("a job ran"))
entered.wait()
atexit.register(lambda: tiers.aside("late", lambda: print("a job ran")))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("raise ValueError('the end')", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_process_ends_after_the_job_in_progress(end, code):
    done = subprocess.run([sys.executable, "-c", BUSY + end], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout == ""
    assert ("Error" in done.stderr) == (code == 1)


COMPILING = """
import os, sys, threading
import gemmery as gm, numpy as np
from gemmery import tiers
from gemmery.cpu import jit
entered, genuine = threading.Event(), jit._object
def compiling(*arguments):
    entered.set()
    return genuine(*arguments)
jit._object = compiling
for n in range(2, 12):
    x = np.ones((n, n), np.float32)
    tiers.aside(n, lambda x=x: gm.matmul(x, x))
entered.wait()
"""


FORK = """
child = os.fork()
if child == 0:
    os._exit(0 if gm.matmul(x, x)[0, 0] == n else 1)
os._exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.process
@pytest.mark.parametrize("end", ["", "os._exit(0)", pytest.param(FORK, marks=forks, id="fork")])
def test_a_process_ends_or_forks_while_llvm_compiles(end, tmp_path):
    environment = {**os.environ, "GEMMERY_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING + end],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
@forks
def test_a_forked_process_has_a_queue_of_its_own(monkeypatch):
    """What waits or is in progress at the fork may be asked for again in the child; what is finished may not."""
    monkeypatch.setattr(tiers, "_FORK_TIMEOUT", 0.01)
    tiers.aside("finished", list)
    tiers.wait()
    gate = Gate()
    tiers.aside("waiting", list)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ran = []
            before = tiers.state()
            tiers.wait()
            for key in ("finished", "gate", "waiting"):
                tiers.aside(key, lambda key=key: ran.append(key))
            tiers.wait()
            code = 0 if before == (False, 0, 0, 0, ()) and ran == ["gate", "waiting"] else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert tiers.state()[:2] == (True, 1)
    gate.opened.set()


@pytest.mark.process
@forks
def test_a_fork_waits_until_a_key_has_its_job():
    """Another thread is between the two: the child would take the key for finished, and never make it."""
    tiers.aside("first", list)  # from the first job on, forks wait
    tiers.wait()
    work, entered = tiers._work, threading.Event()

    def ask():
        with work.lock:
            work.keys["half"] = None
            entered.set()
            time.sleep(0.05)
            work.queue.append(("half", list))

    thread = threading.Thread(target=ask)
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        os._exit("half" in tiers._work.keys)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    with work.lock:
        tiers._forget(work)


@pytest.mark.process
@forks
def test_a_fork_waits_for_the_job_in_progress(monkeypatch):
    gate, ended = Gate(), []
    tiers.aside("next", lambda: None)
    genuine = tiers._work.job

    class Opening:
        """Opens the gate when the fork waits for the job."""

        def acquire(self, timeout):
            gate.opened.set()
            ended.append(genuine.acquire(timeout=60))

        release, __enter__, __exit__ = genuine.release, genuine.__enter__, genuine.__exit__

    monkeypatch.setattr(tiers._work, "job", Opening())
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ended == [True]


@pytest.mark.process
@forks
def test_a_job_that_forks():
    codes = []

    def job():
        child = os.fork()
        if child == 0:
            os._exit(0 if tiers.state()[:2] == (False, 0) else 1)
        codes.append(os.waitpid(child, 0)[1])

    tiers.aside("forks", job)
    tiers.wait()
    assert codes == [0]


@pytest.mark.process
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_started_by_other_means(method, tmp_path):
    script = tmp_path / "started.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from gemmery import tiers\n"
        "def work(number):\n"
        "    ran = []\n"
        "    tiers.aside('key', lambda: ran.append(number))\n"
        "    tiers.wait()\n"
        "    return ran\n"
        "if __name__ == '__main__':\n"
        "    tiers.aside('key', list)\n"
        "    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:\n"
        "        assert pool.map(work, [1]) == [[1]]\n"
    )
    subprocess.run([sys.executable, str(script), method], timeout=60, check=True)


@pytest.mark.process
def test_importing_starts_no_thread_and_does_not_even_load_their_module():
    code = (
        "import sys, gemmery.tiers as tiers; tiers.enabled(); print('threading' in sys.modules)\n"
        "import threading; print(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n1\n"
