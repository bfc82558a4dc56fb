"""A headless Chromium, spoken to by the DevTools protocol over two pipes: for looking at pages that we made.

Messages are JSON with a zero byte behind; nothing listens on a port. What the page throws or logs as an error is
kept.
Source: chromedevtools.github.io/devtools-protocol, --remote-debugging-pipe.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 60.0
# The browser reads orders from descriptor 3 and answers on 4.
# At a lower priority: it is several processes, and tests run beside it.
_EXEC = (
    "import os, sys; os.nice(10); a = sys.argv;"
    " os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
)


def find_browser() -> str | None:
    """Its path; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class BrowserError(Exception):
    """It did not do what it was asked."""


class Browser:
    """One tab."""

    def __init__(self, width: int = 1400, height: int = 1000) -> None:
        program = find_browser()
        if program is None:
            raise BrowserError("chromium is not installed")
        self._directory = tempfile.mkdtemp(prefix="bench-browser-")
        low, self._orders = os.pipe()
        self._answers, high = os.pipe()
        down, up = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (low, high))
        argv = [
            program, "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
            "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage",
            f"--user-data-dir={self._directory}", f"--window-size={width},{height}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank",
        ]  # fmt: skip
        with open(os.path.join(self._directory, "log"), "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _EXEC, str(down), str(up), *argv],
                pass_fds=(down, up),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        for each in (low, high, down, up):
            os.close(each)
        self._data = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self._origin = "file://"  # what a page may load from
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One order and its answer."""
        self._number += 1
        order: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                found: dict[str, Any] = answer["result"]
                return found

    def open(self, path: str) -> float:
        """Shows a file; returns the seconds until its script, if it has one, was done."""
        began_s = time.monotonic()
        self._origin = "file://"
        self.call("Page.navigate", url=f"file://{os.path.abspath(path)}")
        while not self._is_ready(os.path.abspath(path)):
            if time.monotonic() - began_s > DEADLINE_S or self.problems:
                raise BrowserError(f"{path} did not come up: {self.problems}")
            time.sleep(0.02)
        return time.monotonic() - began_s

    def visit(self, url: str, ready: str) -> None:
        """Shows the page of a server on this machine. Args: ready: expression that is true once it is up."""
        self.call("Page.navigate", url="about:blank")  # an earlier page may still ask its server
        self.wait("location.href === 'about:blank'")
        self.problems.clear()
        self._origin = url.partition("//")[0] + "//" + url.partition("//")[2].partition("/")[0] + "/"
        self.call("Page.navigate", url=url)
        self.wait(ready)

    def wait(self, ready: str) -> None:
        """Waits until an expression is true."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                if self.evaluate(f"Boolean({ready})") is True:
                    return
            except BrowserError:
                pass  # between two pages
            if time.monotonic() > end_s:
                raise BrowserError(f"{ready}: not within {DEADLINE_S:g} s; {self.problems}")
            time.sleep(0.02)

    def _is_ready(self, path: str) -> bool:
        try:
            is_ready = "document.documentElement.dataset.ready === 'yes'"
            has_none = "(document.readyState === 'complete' && !document.scripts.length)"
            is_there = f"location.pathname === {json.dumps(path)} && ({is_ready} || {has_none})"
            return self.evaluate(is_there) is True
        except BrowserError:
            return False  # between two pages

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def settle(self) -> None:
        """Waits until what was asked for has been drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def resize(self, width: int, height: int) -> None:
        """The window."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """What the system is said to prefer: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def place(self, name: str) -> tuple[float, float, float, float]:
        """Scrolls an element into view: its left, top, width and height."""
        left, top, width, height = self.evaluate(
            f"(() => {{ const e = document.getElementById('{name}'); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height] })()"
        )
        return left, top, width, height

    def fill(self, name: str, text: str) -> None:
        """Types into a field."""
        self.evaluate(
            f"(() => {{ const e = document.getElementById('{name}'); e.value = {json.dumps(text)};"
            " e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change')) })()"
        )

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, to what has the focus."""
        text = key if len(key) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0, **more)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """mouseMoved, mousePressed, mouseReleased, mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """With the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def shoot(self, path: str, *, whole: bool = False) -> None:
        """A picture of the window, or of the whole page, as PNG."""
        self.settle()
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more = {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
            }
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._orders)
        os.close(self._answers)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        end_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end_s - time.monotonic()))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise BrowserError("no answer from the browser")
            self._data += data
        line, _, self._data = self._data.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            (self._origin, "data:")
        ):
            self.problems.append(f"asked the network for {params['request']['url']}")
