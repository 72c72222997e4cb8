"""Headless Chromium, driven through its debugging pipe: pages at a width and in a color scheme."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page; `send` calls a method of the DevTools protocol and returns its result."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out, self._number, self._session = into, out, 0, ""
        self._loaded: set[str] = set()  # documents, by the ids of their loaders
        self._rest = b""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._out, 1 << 16)
            assert part, "chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        if answer.get("method") == "Page.lifecycleEvent" and answer["params"]["name"] == "load":
            self._loaded.add(answer["params"]["loaderId"])
        return answer

    def open(self, page: Path, width: int, scheme: str, height: int = 900) -> None:
        """Load a file at a width in "light" or "dark", and wait until it has loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        loader = self.send("Page.navigate", url=page.resolve().as_uri())["loaderId"]
        while loader not in self._loaded:
            self._read()

    def value(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """A PNG of what is in the window."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium, which ends with the block. Needs PROGRAM."""
    assert PROGRAM, "chromium is not installed"
    (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()

    def inherit() -> None:
        os.dup2(theirs_in, 103)  # beyond the pipes' own numbers, which may be 3 and 4
        os.dup2(theirs_out, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [PROGRAM, *options, "--remote-debugging-pipe", "about:blank"],
            preexec_fn=inherit,  # noqa: PLW1509 - calls only dup2
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(ours_in)
            os.close(ours_out)
