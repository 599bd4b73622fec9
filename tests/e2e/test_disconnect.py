"""Clients that disconnect: pages and slots are freed in every state of the request."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, wait_until

pytestmark = pytest.mark.timeout(300, func_only=True)

MANY_TOKENS = 8000


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Two requests run at a time, so a third one waits."""
    with Server(("--max-num-seqs", "2")) as running:
        yield running


def _open(server: Server, *, stream: bool) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "Tell", "max_tokens": MANY_TOKENS, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": stream}), headers)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_running_and_waiting_requests_end_with_their_clients(small: Server, stream: bool) -> None:
    small.await_report()
    num_tokens = small.metric("generation_tokens_total")
    connections = [_open(small, stream=stream) for _ in range(4)]
    wait_until(lambda: small.metric("num_requests_running") == 2, 60, "two running")
    wait_until(lambda: small.metric("num_requests_waiting") == 2, 60, "two waiting")
    assert small.metric("kv_cache_usage_perc") > 0
    if stream:
        connections[0].getresponse().read(64)
    for connection in connections:
        connection.close()
    # The previous report had another value.
    wait_until(small.idle, 30, "idle after the clients left")
    assert small.metric("generation_tokens_total") - num_tokens < MANY_TOKENS, "one of them ran to its end"


def test_a_storm_of_disconnects_leaves_nothing(small: Server) -> None:
    for _ in range(5):
        connections = [_open(small, stream=True) for _ in range(40)]
        time.sleep(0.05)
        for connection in connections:
            connection.close()
    small.await_idle()
    status, answer = small.request("POST", "/v1/completions", {"prompt": "Hi", "model": "SmolLM2-135M-Instruct"})
    assert status == 200 and answer["usage"]["completion_tokens"] >= 1
    assert "Traceback" not in small.log()
