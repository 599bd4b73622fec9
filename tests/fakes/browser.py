"""Headless Chromium driven by the DevTools protocol, with a record of its log and its requests."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-extensions",
    "--remote-debugging-port=0", "--window-size=1280,800", "--lang=en-US",
)  # fmt: skip
_PATIENCE = 50.0
"""Timeout of one command, in seconds."""


class Page:
    """Browser tab.

    Attributes:
        problems: Console errors, exceptions and violations of the Content-Security-Policy.
        urls: All URLs that the tab requested.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self._context = ""
        self.problems: list[str] = []
        self.urls: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def attach(self) -> None:
        # A browser context of its own, like a new profile.
        self._context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        created = await self.send("Target.createTarget", url="about:blank", browserContextId=self._context)
        target = created["targetId"]
        self._session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def send(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json({**message, "sessionId": self._session} if self._session else message)
        async with asyncio.timeout(_PATIENCE):
            return await answer

    async def _read(self) -> None:
        async for message in self._socket:
            news = message.json()
            if "id" in news:
                future = self._answers.pop(news["id"])
                if future.done():  # the caller timed out
                    continue
                if "error" in news:
                    future.set_exception(AssertionError(news["error"]))
                else:
                    future.set_result(news["result"])
            else:
                self._note(news["method"], news["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, expression: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        result = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = _PATIENCE) -> Any:
        """Wait until the expression is true and return its value."""
        end = asyncio.get_running_loop().time() + seconds
        while not (value := await self.run(expression)):
            assert asyncio.get_running_loop().time() < end, f"{expression} did not become true; {self.problems}"
            await asyncio.sleep(0.02)
        return value

    async def type(self, text: str) -> None:
        """Type text into the focused element."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        extra = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common, **extra)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def scheme(self, name: str) -> None:
        """Emulate the color scheme `light` or `dark`."""
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def screenshot(self, path: Path) -> None:
        data = (await self.send("Page.captureScreenshot", format="png"))["data"]
        await asyncio.to_thread(path.write_bytes, base64.b64decode(data))

    async def size(self, width: int, height: int) -> None:
        """Set the size of the window in pixels."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def close(self) -> None:
        """Close the tab and delete its browser context."""
        self._session = ""
        if self._context:
            await self.send("Target.disposeBrowserContext", browserContextId=self._context)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextmanager
def chromium() -> Iterator[str | None]:
    """Start a browser and yield the address of its DevTools; yield None if no working browser is installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    # A stub or a broken installation fails even for --version.
    if program is None or subprocess.run([program, "--version"], capture_output=True, check=False).returncode:
        yield None
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield _address(process, Path(profile) / "DevToolsActivePort")
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def new_page(address: str) -> AsyncIterator[Page]:
    """Open a tab with an empty profile."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=1 << 26) as socket,
    ):
        page = Page(socket)
        try:
            await page.attach()
            yield page
        finally:
            await page.close()


def _address(process: subprocess.Popen[bytes], file: Path) -> str:
    for _ in range(round(_PATIENCE / 0.02)):
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        assert process.poll() is None, "chromium exited during start"
        time.sleep(0.02)
    raise AssertionError("chromium did not start in time")
