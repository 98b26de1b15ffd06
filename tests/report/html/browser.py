"""A headless Chromium, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# What the page may not do: speak to a network, log an error, or throw one.
_WATCHED = (
    "Network.requestWillBeSent",
    "Log.entryAdded",
    "Runtime.exceptionThrown",
    "Runtime.consoleAPICalled",
)
_ANSWER_S = 60.0  # a crowded machine takes seconds for what is done in milliseconds


def find_browser() -> str | None:
    """Path of a Chromium; ``None`` where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One page of a browser, at one size and colour scheme at a time."""

    def __init__(self, sender: int, receiver: int) -> None:
        self._sender, self._receiver = sender, receiver
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Loads a file; events of earlier pages are forgotten."""
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while (
            self.evaluate("document.readyState") != "complete"
            or self.evaluate("location.href") == "about:blank"
        ):
            time.sleep(0.02)

    def show(self, width: int, scheme: str) -> None:
        """Sets the width of the window in CSS pixels, and ``light`` or ``dark``."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=1400,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise AssertionError(done["exceptionDetails"])
        return done["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as a picture."""
        height = self.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self.evaluate("innerWidth"), "height": height, "scale": 1}
        done = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(done["data"]))

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._sender, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in _WATCHED:
                self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receiver], [], [], _ANSWER_S)
            assert ready, f"the browser did not answer within {_ANSWER_S:.0f} s"
            data = os.read(self._receiver, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def browser_page(executable: str, folder: Path) -> Iterator[Page]:
    """A page of a browser that keeps everything it writes in ``folder``, and ends with the block."""
    theirs, ours = os.pipe()
    mine, other = os.pipe()
    # The browser reads descriptor 3 and writes 4: the shell puts them there, from numbers above both.
    reads, writes = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs, other))
    flags = (
        "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run "
        "--disable-background-networking --disable-component-update --remote-debugging-pipe"
    )
    line = f'exec "$0" {flags} --user-data-dir="$1" about:blank 3<&{reads} 4>&{writes}'
    process = subprocess.Popen(
        ["bash", "-c", line, executable, str(folder / "profile")],
        pass_fds=(reads, writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    for end in (theirs, other, reads, writes):
        os.close(end)
    try:
        page = Page(ours, mine)
        yield page
        page.call("Browser.close")
    finally:
        for end in (ours, mine):
            os.close(end)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
