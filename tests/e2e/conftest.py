"""Shared fixtures. A module's tests share a server, because loading the default model takes long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Run the default model in float32, which gives exactly comparable tokens, with steps of up to 512 tokens."""
    flags = "--dtype float32 --max-num-batched-tokens 512 --api-key sk-one --api-key sk-two --api-key none"
    with Server(tuple(flags.split())) as running:
        yield running
