"""Gateway and browser shared by all tests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.browser import Page, chromium, new_page
from tests.fakes.http_gateway import Gateway, run_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """Run a gateway without keys over a fake generator, and check that no generation is left at the end."""
    async with run_gateway() as running:
        yield running
        assert await running.generations_left() == 0


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return a runtime directory with a short path, because a socket's path must have fewer than 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="pelton-") as name:
        path = Path(name) / "r"
        path.mkdir(mode=0o700)
        yield path


@pytest.fixture(scope="session")
def browser() -> Iterator[str]:
    """Return the address of the browser's DevTools."""
    with chromium() as address:
        if address is None:
            pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
        yield address


@pytest.fixture
async def page(browser: str) -> AsyncIterator[Page]:
    """Open a tab with an empty profile."""
    async with new_page(browser) as tab:
        yield tab
