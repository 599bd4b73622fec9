"""A browser, one for all tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes.browser import Page, chromium, new_page


@pytest.fixture(scope="session")
def browser() -> Iterator[str]:
    """The address of its DevTools."""
    with chromium() as address:
        if address is None:
            pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
        yield address


@pytest.fixture
async def page(browser: str) -> AsyncIterator[Page]:
    """A new tab with nothing kept from others."""
    async with new_page(browser) as tab:
        yield tab
