"""A real Chromium for the tests, spoken to through its DevTools protocol over a pair of pipes.

    page = chromium.page("http://127.0.0.1:7070/")
    page.wait("document.body.dataset.ready === 'yes'", seconds_max=10)
    page.shoot(Path("page.png"))

Nothing to install beside the browser: messages are JSON with a zero byte at the end (see
docs/decisions/0039). Each call has a deadline. What the page writes to its console as an error is
collected, so that a test can hold it against nothing.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CALL_SECONDS_MAX = 20.0
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


class Chromium:
    """One browser; ended with everything that it started."""

    def __init__(self, program: str) -> None:
        self._directory = tempfile.mkdtemp(prefix="ks-chromium-")
        theirs, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = [*OPTIONS, f"--user-data-dir={self._directory}"]
        if os.geteuid() == 0:
            # It refuses to make its sandbox as root; it sees no page here but ours.
            options.append("--no-sandbox")
        # The protocol is spoken on descriptors 3 and 4, which no option can change.
        wrapped = f'exec "$0" "$@" 3<&{theirs} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", wrapped, program, *options, "about:blank"],
            pass_fds=(theirs, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": self._directory},
        )
        os.close(theirs)
        os.close(theirs_out)
        self._ids = itertools.count(1)
        self._buffer = b""
        self._heard: list[dict[str, Any]] = []

    def close(self) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(5)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(5)
        finally:
            os.close(self._in)
            os.close(self._out)
            shutil.rmtree(self._directory, ignore_errors=True)

    def page(self, url: str = "about:blank", size: tuple[int, int] = (1440, 900)) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(*size)
        page.go(url)
        return page

    def call(self, method: str, session: str = "", **more: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": more}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + CALL_SECONDS_MAX
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._heard.append(answer)

    def heard(self, method: str, session: str) -> list[dict[str, Any]]:
        """What the browser told of its own accord so far."""
        found = [
            m for m in self._heard if (m.get("method"), m.get("sessionId")) == (method, session)
        ]
        return [message["params"] for message in found]

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise OSError("Chromium has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **more: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **more)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        wish = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[wish])

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait(self, holds: str, seconds_max: float) -> Any:
        """Until an expression is true in the page; its value."""
        deadline = time.monotonic() + seconds_max
        while time.monotonic() < deadline:
            try:
                if value := self.run(f"(() => {{ return ({holds}); }})()"):
                    return value
            except RuntimeError:
                pass  # The page is being loaded.
            time.sleep(0.03)
        raise TimeoutError(f"waited {seconds_max:g} s for {holds}: {self.text()[:2000]}")

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def key(self, name: str, code: int = 0) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code)

    def errors(self) -> list[str]:
        """What went wrong in the page: exceptions, refused resources, violated policies."""
        thrown = self._browser.heard("Runtime.exceptionThrown", self._session)
        logged = self._browser.heard("Log.entryAdded", self._session)
        found = [str(error["exceptionDetails"]) for error in thrown]
        entries = [entry["entry"] for entry in logged]
        return found + [f"{e['text']} {e.get('url', '')}" for e in entries if e["level"] == "error"]

    def addresses(self) -> list[str]:
        """Of everything that the page has asked for."""
        told = self._browser.heard("Network.requestWillBeSent", self._session)
        return [request["request"]["url"] for request in told]

    def shoot(self, path: Path, *, whole: bool = False) -> None:
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        taken = self.call("Page.captureScreenshot", format="png", **more)
        path.write_bytes(base64.b64decode(taken["data"]))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    """Debian's, or whichever is installed; tests that need one are skipped without."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium is installed (Debian: chromium)")
    browser = Chromium(program)
    try:
        yield browser
    finally:
        browser.close()
