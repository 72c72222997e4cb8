"""A rival in its own process: both ends of the pipe.

One JSON object per line: {"prepare": {work}} -> {"note": ...} or {"refused": ...}; {"sample": [inner, warm]} ->
{"ns": ...}. The worker times its own loop, so that the time of the pipe does not count. It exits at the end of its
input, and so with the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from gemmery.bench import libraries
from gemmery.bench.timing import Contestant
from gemmery.bench.work import Work
from gemmery.errors import GemmeryError, RefusedError

_ROOT = str(Path(__file__).parents[2])  # the folder from which `gemmery` is imported, installed or not


class RivalProcess:
    """A rival library in another process; a context manager that ends the process.

    >>> with RivalProcess(libraries.find("numpy"), threads=1) as rival:
    ...     rival.prepare(Work(64, 64, 64, "f32", "f32"))
    ...     rival.sample(10, 1) > 0
    ''
    True

    Raises RefusedError if the library is not installed or the CPU cannot run it.
    """

    def __init__(self, rival: libraries.Library, threads: int) -> None:
        reason = rival.missing()
        if reason:
            raise RefusedError(f"rival {rival.name}: {reason}")
        self.name = rival.name
        self._work: Work | None = None  # the product prepared there
        self._note = ""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        start = f"import sys; sys.path.insert(0, {_ROOT!r}); from gemmery.bench.rival_process import serve"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{start}; serve({rival.name!r}, {threads})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=libraries.environment(rival, threads),
        )
        try:
            self.runs = str(self._reply()["runs"])
        except BaseException:
            self.close()
            raise

    def prepare(self, work: Work) -> str:
        """Prepare the operands of `work` there, unless they are ready; return how it differs from the request, or "".

        Raises RefusedError for a product that the library does not support.
        """
        if work != self._work:
            self._work = None
            reply = self._ask({"prepare": asdict(work)})
            if "refused" in reply:
                raise RefusedError(f"rival {self.name}: {reply['refused']}")
            self._work, self._note = work, str(reply["note"])
        return self._note

    def sample(self, inner: int, warm: int) -> int:
        """Return the nanoseconds of `inner` calls there, after `warm` untimed calls."""
        return int(self._ask({"sample": [inner, warm]})["ns"])

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    @property
    def contestant(self) -> Contestant:
        """The rival as a contestant of `timing.compare`."""
        return Contestant(self.name, self.sample)

    def close(self) -> None:
        """End the process by closing its input; kill it if it still runs a second later."""
        with contextlib.suppress(OSError):
            cast(IO[bytes], self._process.stdin).close()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        cast(IO[bytes], self._process.stdout).close()
        self._errors.close()

    def __enter__(self) -> RivalProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # `_reply` reports a dead worker
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        line = cast(IO[bytes], self._process.stdout).readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise GemmeryError(f"rival {self.name}: its process ended ({' '.join(last) or 'no message'}); leave it out")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise GemmeryError(f"rival {self.name}: {reply['error']}; leave it out")
        return reply


def serve(name: str, threads: int) -> None:
    """The worker's main loop. What a library prints goes to stderr, because the pipe is for replies only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one handles Ctrl-C
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    rival = libraries.find(name)
    rival.threads(threads)

    def answer(reply: dict[str, Any]) -> None:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()

    answer({"runs": rival.runs()})
    prepared: libraries.RivalProduct | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "prepare" in message:
                prepared = None  # frees the operands before the next are allocated
                prepared = rival.prepare(Work(**message["prepare"]))
                answer({"note": prepared.note})
            elif prepared is None:
                answer({"error": "sample before prepare"})
            else:
                answer({"ns": prepared.sample(*message["sample"])})
        except RefusedError as error:
            answer({"refused": str(error)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
