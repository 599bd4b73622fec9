"""Servers are shared by the tests of a module: starting one loads the default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default model in float32, where answers can be compared to the token."""
    arguments = ("--dtype", "float32", "--api-key", "sk-one", "--api-key", "sk-two", "--api-key", "none")
    with Server(arguments) as running:
        yield running
