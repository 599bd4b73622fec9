"""What one does on the gateway's page in a browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from tests.fakes.browser import Page

_SHOTS = os.environ.get("PAGE_SCREENSHOTS")


class Server(Protocol):
    """What serves the page."""

    @property
    def url(self) -> str:
        """Without a path."""


async def opened(page: Page, gateway: Server) -> None:
    """Opens it, and waits until it has asked for what it shows first."""
    await page.open(gateway.url + "/")
    await page.until("document.getElementById('version').textContent")


async def say(page: Page, text: str) -> None:
    """Sends a message, as a keyboard does."""
    await page.run("document.getElementById('prompt').focus()")
    await page.type(text)
    await page.press("Enter")


async def answered(page: Page, number: int = 1) -> None:
    """Waits until as many answers are over."""
    await page.until(f"document.querySelectorAll('.assistant .figures:not(:empty)').length === {number}")


async def shot(page: Page, name: str, *, narrow: bool = False) -> None:
    """For looking at: PAGE_SCREENSHOTS names a folder."""
    if not _SHOTS:
        return
    if narrow:
        await page.size(390, 844)
    for scheme in ("light", "dark"):
        await page.scheme(scheme)
        await page.screenshot(Path(_SHOTS) / f"{name}{'-narrow' if narrow else ''}-{scheme}.png")


def no_surprises(page: Page, gateway: Server, *expected: str) -> None:
    """Fails where anything was asked of another server, or the console has an error but the expected ones."""
    assert {url.split("/")[2] for url in page.urls} == {gateway.url.split("/")[2]}
    assert [problem for problem in page.problems if not any(words in problem for words in expected)] == []
