"""A browser, one for all tests, and the time that tests with processes may take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.browser import Page, chromium, new_page

_TIMEOUT = 180.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes take seconds to start, and on a slow machine that is busy many times as long."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT))


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
