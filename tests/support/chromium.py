"""Drive a real headless Chromium: the contents of a page, its requests, its errors and a screenshot.

Uses the DevTools protocol over its websocket. Owns one browser process and one tab, and must never connect elsewhere.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import websocket

from tests.support.reading import wait_until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium")


class Chromium:
    """Run a browser as a context manager; `open` loads a page, and the other methods inspect it."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        self._folder = folder / "chromium"
        command = [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--mute-audio"]
        command += ["--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={self._folder}"]
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen([*command, "about:blank"], stdout=log, stderr=log, process_group=0)
        self._numbers = itertools.count(1)
        self.requested: list[str] = []
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        import urllib.request

        port_file = self._folder / "DevToolsActivePort"
        port = wait_until("Chromium listens", lambda: port_file.exists() and port_file.read_text().split("\n")[0], 60)

        def page() -> str | None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                tabs = json.loads(answer.read())
            return next((tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"), None)

        self._socket = websocket.create_connection(wait_until("a tab", page, 60), timeout=60)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])

    def open(self, url: str) -> None:
        """Open the page and wait until it is loaded."""
        loader = self._call("Page.navigate", url=url)["loaderId"]

        def loaded() -> bool:
            # The browser answers for the previous page, as complete, until the new one is there.
            if self._call("Page.getFrameTree")["frameTree"]["frame"]["loaderId"] != loader:
                return False
            return bool(self.ask("document.readyState") == "complete")

        wait_until("the page is loaded", loaded, 60)

    def screen(self, width: int, height: int, scheme: str) -> None:
        """Set the window's size in CSS pixels and the reader's preference, `light` or `dark`."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def ask(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self) -> str:
        return str(self.ask("document.body?.innerText ?? ''"))  # no text while it loads

    def picture(self, path: Path) -> Path:
        taken = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))
        return path
