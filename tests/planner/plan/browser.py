"""Drives a headless Chromium through its driver's own protocol (W3C WebDriver), which is JSON over HTTP."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
WITHOUT = "needs Chromium and its driver on the PATH: apt-get install chromium chromium-driver"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
ATTEMPTS = 5
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Left": "\ue012", "Up": "\ue013", "Right": "\ue014", "Down": "\ue015"}


def driven(driver: str) -> tuple[subprocess.Popen[str], int]:
    """A driver that runs, and its port. It takes a free port of IPv6 and then the same of IPv4, which another process
    may have: it ends then, and is started again.
    """
    for _ in range(ATTEMPTS):
        process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                return process, int(found[1])
        process.communicate()
    raise RuntimeError(f"{driver} was started {ATTEMPTS} times and ended before it listened; it says why above")


class Browser:
    """One browser with one page at a time; nothing of it is shared with that of a person."""

    def __init__(self) -> None:
        assert CHROMIUM and DRIVER, WITHOUT
        self._process, port = driven(DRIVER)
        self._session = f"http://127.0.0.1:{port}/session"
        options = {"goog:chromeOptions": {"binary": CHROMIUM, "args": FLAGS}, "goog:loggingPrefs": {"browser": "ALL"}}
        opened = self._call("POST", "", {"capabilities": {"alwaysMatch": options}})
        self._session += f"/{opened['sessionId']}"

    def close(self) -> None:
        """End the browser and its driver."""
        self._call("DELETE", "")
        self._process.terminate()
        self._process.communicate()

    def open(self, page: Path, width: int, scheme: str = "light") -> None:
        """Load a page from a file in a window of a width, for people who prefer ``light`` or ``dark``."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", {"features": [feature]})
        self._call("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """What the body of a function of JavaScript returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": arguments})

    def press(self, *keys: str) -> None:
        """Press keys one after the other, by the names of :data:`KEYS`."""
        strokes = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        wide, high = self.run("const page = document.documentElement; return [page.clientWidth, page.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": wide, "height": high, "scale": 1}
        found = self._devtools("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def problems(self) -> Sequence[str]:
        """What the page complained about: errors of scripts, and requests that were refused."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._session + path, data, {"Content-Type": "application/json"}, method=method)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
