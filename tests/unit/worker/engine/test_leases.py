"""Gateways that stop pinging, reconnect, or do not read what is sent to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import sockets
from shared.messages import BundleRequest, Ping
from tests.unit.worker.engine.harness import Worker, make_submit
from worker.transport import LEASE_SECONDS, MAX_MESSAGES_PER_PASS


def test_pings_renew_the_lease_and_its_expiry_aborts_only_that_gateways_requests(worker: Worker) -> None:
    silent, other = worker.client(b"silent"), worker.client(b"other")
    silent.submit("a", list(range(3, 40)), max_tokens=80, ignore_eos=True, num_choices=2)
    silent.submit("b", max_tokens=80, ignore_eos=True)
    silent.sync()
    live = other.submit("live", max_tokens=20, ignore_eos=True)
    for _ in range(9):
        worker.elapse(1)
        other.sync()
    assert worker.transport.num_gateways == 2 and worker.scheduler.num_running > 1
    worker.elapse(2)
    assert worker.transport.num_gateways == 1
    assert other.sync().counters["gateways_dropped_total"] == 1
    other.check(live)
    worker.run_until_idle()
    silent.read()
    assert silent.ended("b") is None, "messages were sent to a dropped gateway"


def test_paused_loop_does_not_expire_leases(worker: Worker) -> None:
    """Check a pause as after SIGSTOP or a very long step: pings of that time may not have reached the socket yet."""
    client = worker.client()
    live = client.submit("live", max_tokens=60, ignore_eos=True)
    client.sync()
    for _ in range(3):
        worker.clock.now += 3 * LEASE_SECONDS
        worker.engine.step()
    client.check(live)
    worker.elapse(LEASE_SECONDS)
    assert worker.transport.num_gateways == 0


def test_message_flood_does_not_starve_pings_of_another_gateway(worker: Worker) -> None:
    client, flood = worker.client(), worker.client(b"flood")
    live = client.submit("live", max_tokens=100, ignore_eos=True)
    for _ in range(12):
        for nonce in range(MAX_MESSAGES_PER_PASS):
            flood.send(Ping(nonce))
        client.sync()
        worker.elapse(1)
    client.check(live)
    assert worker.transport.num_gateways == 2


def test_gateway_must_send_hello_after_lease_expiry(worker: Worker) -> None:
    client = worker.client()
    client.submit("a", max_tokens=80, ignore_eos=True)
    client.sync()
    worker.elapse(LEASE_SECONDS + 1)
    assert worker.transport.num_gateways == 0
    client.send(Ping(99))
    client.send(make_submit("b"))
    worker.pump(lambda: worker.counters.malformed_messages_total == 2, "both counted")
    worker.run_until_idle()
    client.hello()
    client.complete("a")


def test_hello_ends_previous_session_and_resets_sequence_numbers(worker: Worker) -> None:
    client = worker.client()
    client.submit("a", max_tokens=80, ignore_eos=True, num_choices=2)
    worker.pump(lambda: len(client.steps) >= 3, "some steps")
    client.hello()
    assert client.steps == []
    worker.run_until_idle()
    client.sync()
    assert ("a", 0) not in client.outputs
    client.complete("a")
    assert client.steps[0].sequence == 1


@pytest.mark.parametrize("noticed", [True, False])
def test_gateway_may_return_before_or_after_its_lost_connection_is_noticed(worker: Worker, noticed: bool) -> None:
    old = worker.client()
    old.submit("a", max_tokens=80, ignore_eos=True)
    worker.pump(lambda: old.steps, "a step")
    if noticed:
        worker.transport._give_up(b"gateway", "test")
        old.hello()
        old.complete("a")
    else:
        new = worker.client()
        assert worker.transport.num_gateways == 1
        new.complete("b")
        assert ("a", 0) not in new.outputs
    worker.run_until_idle()


def test_disconnected_gateway_is_dropped_at_next_send(worker: Worker) -> None:
    client, other = worker.client(), worker.client(b"other")
    client.submit("a", max_tokens=100, ignore_eos=True)
    client.submit("b", max_tokens=100, ignore_eos=True)
    worker.pump(lambda: client.steps, "a step")
    live = other.submit("live", max_tokens=100, ignore_eos=True)
    client.close()
    other.check(live)
    worker.run_until_idle()
    assert worker.counters.gateways_dropped_total <= 1
    # Its requests may have ended before the connection did; the next session is served in either case.
    worker.client().complete("a")


def test_gateway_that_does_not_read_is_dropped(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 4)
    worker: Worker = start()
    deaf, other = worker.client(b"deaf"), worker.client(b"other")
    worker.clients.remove(deaf)
    deaf.submit("a", max_tokens=120, ignore_eos=True)
    live = other.submit("live", max_tokens=100, ignore_eos=True)
    for _ in range(40):
        if worker.counters.gateways_dropped_total:
            break
        # One megabyte each, so that the queue and the kernel buffers fill quickly.
        deaf.send(BundleRequest("b"))
        other.sync()
    assert worker.counters.gateways_dropped_total == 1
    assert worker.transport.num_gateways == 1
    other.check(live)
    worker.run_until_idle()
    deaf.close()


def test_shutdown_does_not_wait_for_undelivered_outputs(worker: Worker) -> None:
    client = worker.client()
    client.submit("a", max_tokens=50)
    client.sync()
    client.close()
    worker.transport.close()
    worker.transport.close()
    assert sockets.list_worker_endpoints(Path(worker.endpoint.removeprefix("ipc://")).parent) == []
    worker.transport.wake()
