"""A headless Chromium, driven by its DevTools protocol; what it logs and asks for is kept."""

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
"""Seconds."""


class Page:
    """One tab.

    Attributes:
        problems: errors of the console, exceptions, and what the Content-Security-Policy forbade.
        urls: everything that was requested.
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
        # Of its own, like a new profile.
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
                if future.done():  # given up
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
        """The value of an expression, which may be a promise."""
        result = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = _PATIENCE) -> Any:
        """Its value once that is true."""
        end = asyncio.get_running_loop().time() + seconds
        while not (value := await self.run(expression)):
            assert asyncio.get_running_loop().time() < end, f"{expression} did not become true; {self.problems}"
            await asyncio.sleep(0.02)
        return value

    async def type(self, text: str) -> None:
        """Into what has the focus, as a keyboard does."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        extra = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common, **extra)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def scheme(self, name: str) -> None:
        """`light` or `dark`."""
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def screenshot(self, path: Path) -> None:
        data = (await self.send("Page.captureScreenshot", format="png"))["data"]
        await asyncio.to_thread(path.write_bytes, base64.b64decode(data))

    async def size(self, width: int, height: int) -> None:
        """Of the window, in pixels."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def close(self) -> None:
        """Closes the tab and forgets what it kept."""
        self._session = ""
        if self._context:
            await self.send("Target.disposeBrowserContext", browserContextId=self._context)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextmanager
def chromium() -> Iterator[str | None]:
    """The address of a browser's DevTools, for the time of the context; None where there is no browser that starts."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    # What is half installed, or a stub of another package, does not even say its version.
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
    """A tab with nothing kept from others, for the time of the context."""
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
        assert process.poll() is None, "chromium ended as soon as it was started"
        time.sleep(0.02)
    raise AssertionError("chromium does not start")
