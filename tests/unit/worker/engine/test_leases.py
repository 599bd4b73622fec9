"""Gateways that fall silent, come back, or do not take what is sent to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import sockets
from shared.messages import BundleRequest, Ping
from tests.unit.worker.engine.harness import Worker, make_submit
from worker.transport import LEASE_SECONDS, MAX_MESSAGES_PER_PASS


def test_a_silent_gateway_loses_its_requests_and_another_keeps_its_own(worker: Worker) -> None:
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
    assert silent.ended("b") is None, "nothing is sent to a gateway that was given up"


def test_a_ping_renews_the_lease(worker: Worker) -> None:
    client = worker.client()
    live = client.submit("live", max_tokens=60, ignore_eos=True)
    for _ in range(5):
        worker.elapse(LEASE_SECONDS - 1)
        client.sync()
    client.check(live)


def test_time_in_which_the_loop_stood_still_is_no_silence(worker: Worker) -> None:
    """As after a SIGSTOP or a very long step: the pings of that time may not even have reached the socket."""
    client = worker.client()
    live = client.submit("live", max_tokens=60, ignore_eos=True)
    client.sync()
    for _ in range(3):
        worker.clock.now += 3 * LEASE_SECONDS
        worker.engine.step()
    client.check(live)
    worker.elapse(LEASE_SECONDS)
    assert worker.transport.num_gateways == 0


def test_a_flood_does_not_hide_the_pings_of_another(worker: Worker) -> None:
    client, flood = worker.client(), worker.client(b"flood")
    live = client.submit("live", max_tokens=100, ignore_eos=True)
    for _ in range(12):
        for nonce in range(MAX_MESSAGES_PER_PASS):
            flood.send(Ping(nonce))
        client.sync()
        worker.elapse(1)
    client.check(live)
    assert worker.transport.num_gateways == 2


def test_after_its_lease_a_gateway_must_say_hello(worker: Worker) -> None:
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


def test_hello_ends_an_earlier_life_and_counts_from_one(worker: Worker) -> None:
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


def test_hello_and_submit_of_a_new_life_survive_the_loss_of_the_old_one(worker: Worker) -> None:
    """A gateway with the same identity is back before the loop has noticed that its connection was gone."""
    old = worker.client()
    old.submit("a", max_tokens=80, ignore_eos=True)
    worker.pump(lambda: old.steps, "a step")
    worker.transport._give_up(b"gateway", "test")
    old.hello()
    old.complete("a")
    worker.run_until_idle()


def test_a_second_connection_of_the_same_identity_takes_over(worker: Worker) -> None:
    old = worker.client()
    old.submit("a", max_tokens=80, ignore_eos=True)
    worker.pump(lambda: old.steps, "a step")
    new = worker.client()
    assert worker.transport.num_gateways == 1
    new.complete("b")
    worker.run_until_idle()
    assert ("a", 0) not in new.outputs


def test_a_gateway_whose_connection_is_gone_is_dropped_at_the_next_message(worker: Worker) -> None:
    client, other = worker.client(), worker.client(b"other")
    client.submit("a", max_tokens=100, ignore_eos=True)
    client.submit("b", max_tokens=100, ignore_eos=True)
    worker.pump(lambda: client.steps, "a step")
    live = other.submit("live", max_tokens=100, ignore_eos=True)
    client.close()
    other.check(live)
    worker.run_until_idle()
    assert worker.counters.gateways_dropped_total <= 1
    # Its requests may have ended before the connection did; the next life is served in any case.
    worker.client().complete("a")


def test_a_gateway_that_reads_nothing_is_dropped(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 4)
    worker: Worker = start()
    deaf, other = worker.client(b"deaf"), worker.client(b"other")
    worker.clients.remove(deaf)
    deaf.submit("a", max_tokens=120, ignore_eos=True)
    live = other.submit("live", max_tokens=100, ignore_eos=True)
    for _ in range(40):
        if worker.counters.gateways_dropped_total:
            break
        # A megabyte each: queue and kernel buffers are soon full.
        deaf.send(BundleRequest("b"))
        other.sync()
    assert worker.counters.gateways_dropped_total == 1
    assert worker.transport.num_gateways == 1
    other.check(live)
    worker.run_until_idle()
    deaf.close()


def test_an_end_without_reader_is_not_waited_for(worker: Worker) -> None:
    client = worker.client()
    client.submit("a", max_tokens=50)
    client.sync()
    client.close()
    worker.transport.close()
    worker.transport.close()
    assert sockets.list_worker_endpoints(worker_directory(worker)) == []
    worker.transport.wake()


def worker_directory(worker: Worker) -> Path:
    return Path(worker.endpoint.removeprefix("ipc://")).parent
