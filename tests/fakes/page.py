"""User actions on the gateway's page in a browser."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fakes.browser import Page
from tests.fakes.http_gateway import Gateway
from tests.fakes.prepared_server import PreparedServer

_SHOTS = os.environ.get("PAGE_SCREENSHOTS")


async def opened(page: Page, gateway: Gateway | PreparedServer) -> None:
    """Open the page and wait until its first requests are finished."""
    await page.open(gateway.url + "/")
    await page.until("document.getElementById('version').textContent")


async def say(page: Page, text: str) -> None:
    """Send a message with the keyboard."""
    await page.run("document.getElementById('prompt').focus()")
    await page.type(text)
    await page.press("Enter")


async def answered(page: Page, number: int = 1) -> None:
    """Wait until this number of answers is complete."""
    await page.until(f"document.querySelectorAll('.assistant .figures:not(:empty)').length === {number}")


async def shot(page: Page, name: str, *, narrow: bool = False) -> None:
    """Save a screenshot in the folder PAGE_SCREENSHOTS, if that is set."""
    if not _SHOTS:
        return
    if narrow:
        await page.size(390, 844)
    for scheme in ("light", "dark"):
        await page.scheme(scheme)
        await page.screenshot(Path(_SHOTS) / f"{name}{'-narrow' if narrow else ''}-{scheme}.png")


def no_surprises(page: Page, gateway: Gateway | PreparedServer, *expected: str) -> None:
    """Check that the page asked no other server and that the console has only expected errors."""
    assert {url.split("/")[2] for url in page.urls} == {gateway.url.split("/")[2]}
    assert [problem for problem in page.problems if not any(words in problem for words in expected)] == []
