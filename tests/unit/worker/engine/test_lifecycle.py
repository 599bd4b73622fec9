"""Engine loop: waiting, stopping, failing."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared import notify
from shared.messages import FinishReason
from tests.unit.worker.engine.harness import Client, Worker
from worker import engine as engine_module
from worker.engine import BLOCKED_WAIT_SECONDS, IDLE_WAIT_SECONDS, STALL_SECONDS, StalledError
from worker.executor.executor import ExecutorError
from worker.plan import StepPlan


def submit_three(client: Client) -> list[tuple[str, int]]:
    """Submit a running request, a group of choices and a waiting request; all are live on return."""
    client.submit("long", max_tokens=100, ignore_eos=True)
    client.submit("group", max_tokens=100, ignore_eos=True, num_choices=3)
    for number in range(8):
        client.submit(f"waits{number}", max_tokens=100, ignore_eos=True)
    client.sync()
    return [("long", 0), *(("group", choice) for choice in range(3)), *((f"waits{number}", 0) for number in range(8))]


def ends(client: Client, keys: list[tuple[str, int]]) -> set[tuple[FinishReason, str | None]]:
    """Read the remaining messages and return how the choices ended."""
    pause = threading.Event()
    for _ in range(200):
        client.read()
        found = [finish for key in keys if (finish := client.ended(*key)) is not None]
        if len(found) == len(keys):
            return {(finish.reason, finish.code) for finish in found}
        pause.wait(0.05)
    raise AssertionError("a choice has not ended")


def test_only_idle_loop_blocks(worker: Worker) -> None:
    worker.engine.step()
    worker.engine.step()
    assert worker.transport.waits == [IDLE_WAIT_SECONDS] * 2
    assert worker.checks == 2
    client = worker.client()
    client.submit("a", max_tokens=60, ignore_eos=True)
    worker.pump(lambda: worker.scheduler.has_requests, "the request")
    worker.transport.waits.clear()
    while worker.scheduler.has_requests:
        worker.engine.step()
    assert worker.transport.waits == []


def test_stalled_loop_waits_briefly_and_finally_fails(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    client = worker.client()
    monkeypatch.setattr(worker.scheduler, "schedule", lambda: None)
    client.submit("a", num_choices=2)
    worker.pump(lambda: worker.scheduler.has_requests, "the request")
    worker.transport.waits.clear()
    worker.clock.now += STALL_SECONDS - 1
    client.sync()
    assert set(worker.transport.waits) == {BLOCKED_WAIT_SECONDS}
    worker.clock.now += 2
    with pytest.raises(StalledError):
        worker.engine.run()
    assert ends(client, [("a", 0), ("a", 1)]) == {(FinishReason.ERROR, "worker_lost")}


def test_suspended_process_is_not_treated_as_stalled(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check SIGSTOP and SIGCONT at any point between two clock readings."""
    client = worker.client()
    submit = client.submit("a", max_tokens=10, ignore_eos=True)
    client.sync()
    apply = worker.scheduler.apply
    stops = [2 * STALL_SECONDS]

    def late(*args: object) -> None:
        worker.clock.now += stops.pop() if stops else 0.0
        apply(*args)

    monkeypatch.setattr(worker.scheduler, "apply", late)
    client.check(submit)


@pytest.mark.parametrize("good_steps", [0, 1, 5])
def test_failed_step_ends_every_request_once_and_stops_the_loop(start, depth: int, good_steps: int) -> None:
    error = ExecutorError("rank 1 ended with status -9")
    armed: list[int] = []

    def fail(plan: StepPlan) -> Exception | None:
        return error if armed and plan.step >= armed[0] + good_steps else None

    worker: Worker = start(depth=depth, fail=fail)
    client, other = worker.client(), worker.client(b"other")
    keys = submit_three(client)
    other.submit("long", max_tokens=100, ignore_eos=True)
    other.sync()
    armed.append(len(worker.executor.plans))
    with pytest.raises(ExecutorError) as raised:
        worker.engine.run()
    assert raised.value is error
    assert ends(client, keys) == ends(other, [("long", 0)]) == {(FinishReason.ERROR, "worker_lost")}
    assert set(client.outputs) == set(keys)
    assert worker.scheduler.num_running == worker.scheduler.num_waiting == worker.kv.pages_in_use == 0
    worker.scheduler.check_integrity()


def test_rank_failure_while_idle_stops_the_loop(worker: Worker) -> None:
    def check() -> None:
        raise ExecutorError("rank 1 ended")

    worker.engine._check_executor = check
    with pytest.raises(ExecutorError, match="rank 1"):
        worker.engine.run()


def test_idle_work_is_finished_before_the_loop_waits(worker: Worker) -> None:
    waits: list[float] = []
    parts = [True, True, False, False]
    worker.engine._use_idle_time = lambda: parts.pop(0)
    worker.engine._transport.wait = waits.append  # type: ignore[method-assign, assignment]
    for _ in range(2):
        worker.engine.step()
    assert waits == []
    for _ in range(2):
        worker.engine.step()
    assert len(waits) == 2 and all(wait > 0 for wait in waits)


@pytest.mark.parametrize(("fault", "error"), [("executor", ExecutorError), ("scheduler", RuntimeError)])
def test_refused_plan_or_scheduler_fault_ends_every_request(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, fault: str, error: type[Exception]
) -> None:
    client = worker.client()
    keys = submit_three(client)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    if fault == "executor":
        worker.executor.close()
    else:
        monkeypatch.setattr(worker.scheduler, "apply", broken)
    with pytest.raises(error):
        worker.engine.run()
    assert ends(client, keys) == {(FinishReason.ERROR, "worker_lost")}


def test_integrity_is_checked_when_idle(worker: Worker) -> None:
    worker.scheduler._planner._free_rows.pop()
    worker.engine.step()
    worker.clock.now += engine_module.INTEGRITY_SECONDS + 1
    with pytest.raises(AssertionError, match="row"):
        worker.engine.step()


def test_stop_drains_running_requests_and_refuses_new_ones(worker: Worker) -> None:
    client = worker.client()
    long = client.submit("long", max_tokens=60, ignore_eos=True)
    client.sync()
    worker.engine.stop()
    client.submit("new", num_choices=2)
    for choice in (0, 1):
        finish = client.finish("new", choice)
        assert (finish.reason, finish.code) == (FinishReason.ERROR, "service_unavailable")
    worker.engine.run()
    ends(client, [("long", 0)])
    client.check(long)
    worker.run_until_idle()


def test_drain_ends_at_its_timeout(worker: Worker) -> None:
    client = worker.client()
    keys = submit_three(client)
    worker.engine.stop()
    worker.clock.now += 29
    worker.engine.step()
    assert worker.scheduler.has_requests
    worker.clock.now += 2
    worker.engine.run()
    assert ends(client, keys) == {(FinishReason.ERROR, "service_unavailable")}
    assert worker.kv.pages_in_use == 0


@pytest.mark.parametrize("how", ["twice", "now"])
def test_second_stop_ends_immediately(worker: Worker, how: str) -> None:
    client = worker.client()
    keys = submit_three(client)
    if how == "twice":
        worker.engine.stop()
    worker.engine.stop(now=how == "now")
    count = len(worker.executor.plans)
    worker.engine.run()
    assert len(worker.executor.plans) == count
    assert ends(client, keys) == {(FinishReason.ERROR, "service_unavailable")}


@contextmanager
def patient_loop(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the loop in a thread, where it waits for an hour unless something wakes it, and stop it at the end."""
    monkeypatch.setattr(engine_module, "IDLE_WAIT_SECONDS", 3600.0)
    worker.transport.patient = True
    thread = threading.Thread(target=worker.engine.run, daemon=True)
    thread.start()
    yield
    worker.engine.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_stop_wakes_an_idle_loop(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with patient_loop(worker, monkeypatch):
        while not worker.transport.waits:
            threading.Event().wait(0.001)


def test_message_at_start_of_idle_wait_wakes_the_loop(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a request sent while the loop starts to wait for an hour still wakes it."""
    clients = [worker.client(name) for name in (b"first", b"second")]
    with patient_loop(worker, monkeypatch):
        for number in range(100):
            for client in clients:
                client.submit(f"r{number}", max_tokens=1)
                threading.Event().wait(number % 20 * 20e-6)
            for client in clients:
                while client.ended(f"r{number}") is None:
                    assert client.socket.poll(10_000), f"request {number} did not wake the loop"
                    client.read()


def test_watchdog_is_notified_periodically(start, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setenv("WATCHDOG_USEC", "8000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    worker: Worker = start()
    monkeypatch.setattr(notify, "watchdog", lambda: told.append(worker.clock.now))
    for _ in range(100):
        worker.clock.now += 0.25
        worker.engine.step()
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert gaps and max(gaps) <= 4.0
    assert len(told) < 50
