"""Two gateway processes on one port without shared state, whose limits and metrics hold across both."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server, wait_until

pytestmark = pytest.mark.timeout(300, func_only=True)

BODY = {"model": "SmolLM2-135M-Instruct", "prompt": "Tell", "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """Four requests are admitted: two run and two wait."""
    flags = "--gateway-processes 2 --max-num-seqs 2 --max-waiting-requests 2 --api-key none"
    with Server(tuple(flags.split())) as running:
        yield running


def _responses(server: Server, route: str) -> dict[str, int]:
    """Return the responses of a route by gateway, from one scrape."""
    text = wait_until(lambda: _scrape_of_both(server), 60, "both processes are in a scrape")
    pattern = rf'^pelton:http_requests_total{{gateway="(\d)",route="{re.escape(route)}",status="\d+"}} (\S+)$'
    counts: dict[str, int] = {}
    for gateway, value in re.findall(pattern, text, re.MULTILINE):
        counts[gateway] = counts.get(gateway, 0) + int(float(value))
    return counts


def _scrape_of_both(server: Server) -> str:
    """Return a scrape with both gateways, or an empty value if one did not answer its sibling in time."""
    status, text = server.request("GET", "/metrics", api_key="none")
    assert status == 200
    return str(text) if len(set(re.findall(r'gateway="(\d)"', text))) == 2 else ""


def test_one_scrape_shows_what_all_of_them_count(pair: Server) -> None:
    num_before = sum(_responses(pair, "/health").values())
    num_sent = 0

    def both_answered() -> bool:
        nonlocal num_sent
        for _ in range(8):
            assert pair.status("/health") == 200
            num_sent += 1
        return len(_responses(pair, "/health")) == 2

    # The kernel distributes connections by address.
    wait_until(both_answered, 60, "both processes get connections")
    assert sum(_responses(pair, "/health").values()) == num_before + num_sent
    text = pair.request("GET", "/metrics", api_key="none")[1]
    assert text.count("\npelton:kv_cache_num_pages{") == 1


def _ask(server: Server, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=3)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    connection.request("POST", "/v1/completions", json.dumps(BODY | body), headers)
    return connection


def _refused(server: Server) -> bool:
    """Return True if a further request gets 429; an admitted request waits and is cancelled."""
    connection = _ask(server, {"max_tokens": 1})
    try:
        return connection.getresponse().status == 429
    except (TimeoutError, http.client.RemoteDisconnected):
        return False
    finally:
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_one_limit_of_waiting_requests_and_none_outlives_its_client(pair: Server, stream: bool) -> None:
    pair.await_report()
    num_tokens = pair.metric("generation_tokens_total")
    with contextlib.ExitStack() as connections:
        for _ in range(4):
            connections.callback(_ask(pair, {"max_tokens": 8000, "stream": stream}).close)
        wait_until(lambda: pair.metric("num_requests_running") == 2, 60, "two run")
        wait_until(lambda: pair.metric("num_requests_waiting") == 2, 60, "two wait")
        # Another process may answer this scrape, with an older report.
        wait_until(lambda: pair.metric("kv_cache_usage_perc") > 0, 60, "pages are in use")
        # Either process refuses, once both have the worker's next report.
        wait_until(lambda: all(_refused(pair) for _ in range(8)), 90, "every further request is refused")
    wait_until(pair.idle, 60, "idle after the clients left")
    assert pair.metric("generation_tokens_total") - num_tokens < 8000, "one of them ran to its end"
    # The other process learns this from the worker's next report, which a refusal requests.
    body = BODY | {"max_tokens": 2}
    wait_until(
        lambda: all(pair.request("POST", "/v1/completions", body, api_key="none")[0] == 200 for _ in range(6)),
        60,
        "requests are taken again",
    )


def test_whichever_takes_a_connection_has_a_worker_once_one_is_ready(pair: Server) -> None:
    # The fixture waited for one /ready; each further connection reaches either process.
    assert {pair.status("/ready") for _ in range(32)} == {200}


def test_one_that_dies_takes_only_its_own_with_it(pair: Server) -> None:
    first, second = pair.gateway_pids()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: set(pair.gateway_pids()) - {first, second}, 60, "another is started")
    assert second in pair.gateway_pids()
    wait_until(lambda: len(_responses(pair, "/metrics")) == 2, 60, "both count again")
    status, answer = pair.request("POST", "/v1/completions", BODY | {"max_tokens": 2}, api_key="none")
    assert status == 200, answer
    assert "Traceback" not in pair.log()
