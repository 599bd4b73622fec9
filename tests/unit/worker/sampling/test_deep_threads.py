"""Threads for work that recurses deeply or does not terminate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from shared.errors import UnavailableError
from worker.sampling.deep_threads import STACK_BYTES, DeepThreads

PATIENCE = 30.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def threads():
    return DeepThreads("deep", num_threads=2, max_abandoned=2)


def test_futures_return_results_and_raise_exceptions(threads):
    assert threads.submit(lambda: 7).result(PATIENCE) == 7
    with pytest.raises(KeyError):
        threads.submit(lambda: {2: 3}[1]).result(PATIENCE)
    assert threads.submit(lambda: 8).result(PATIENCE) == 8


def test_the_number_of_working_threads_is_limited(threads):
    gates = [threading.Event() for _ in range(6)]
    futures = [threads.submit(lambda gate=gate: gate.wait(PATIENCE)) for gate in gates]
    for gate, future in zip(gates, futures):
        wait_until(future.running)
        assert sum(future.running() for future in futures) <= 2
        gate.set()
        assert future.result(PATIENCE)


def test_stacks_are_large_only_in_these_threads(threads):
    before = threading.stack_size()
    assert before < STACK_BYTES

    def depth() -> int:
        # The thread uses the stack below the address of a local array.
        with open("/proc/self/maps") as maps:
            sizes = [line.split()[0].split("-") for line in maps if "rw-p" in line]
        return max(int(end, 16) - int(begin, 16) for begin, end in sizes)

    assert threads.submit(depth).result(PATIENCE) >= STACK_BYTES
    assert threading.stack_size() == before


def test_queued_work_can_be_cancelled(threads):
    gate = threading.Event()
    busy = [threads.submit(lambda: gate.wait(PATIENCE)) for _ in range(2)]
    waiting = threads.submit(lambda: 1)
    assert waiting.cancel()
    gate.set()
    assert all(future.result(PATIENCE) for future in busy)
    assert threads.submit(lambda: 2).result(PATIENCE) == 2


def test_abandoned_threads_are_replaced_until_too_many_are_abandoned(threads):
    gates = [threading.Event() for _ in range(3)]
    begun = [threading.Event() for _ in range(3)]
    stuck = []
    for gate, begin in zip(gates[:2], begun):
        stuck.append(threads.submit(lambda gate=gate, begin=begin: begin.set() or gate.wait(PATIENCE)))
        assert begin.wait(PATIENCE)
    threads.abandon(stuck[0])
    threads.abandon(stuck[0])
    assert threads.num_abandoned == 1
    assert threads.submit(lambda: 1).result(PATIENCE) == 1
    threads.abandon(stuck[1])
    with pytest.raises(UnavailableError):
        threads.submit(lambda: 2)
    # Abandoned work that ends is no longer counted, and its result is available.
    gates[0].set()
    assert stuck[0].result(PATIENCE)
    wait_until(lambda: threads.num_abandoned == 1)
    assert threads.submit(lambda: 3).result(PATIENCE) == 3
    gates[1].set()
    assert stuck[1].result(PATIENCE)


def test_finished_work_cannot_be_abandoned(threads):
    done = threads.submit(lambda: 1)
    done.result(PATIENCE)
    wait_until(lambda: not threads._running)
    threads.abandon(done)
    assert threads.num_abandoned == 0


def test_queued_work_is_rejected_if_no_thread_can_be_started(monkeypatch):
    threads = DeepThreads("deep", num_threads=1, max_abandoned=4)
    gate, begun = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return gate.wait(PATIENCE)

    stuck = threads.submit(hang)
    assert begun.wait(PATIENCE)
    waiting = threads.submit(lambda: 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        threads.abandon(stuck)
    with pytest.raises(UnavailableError):
        waiting.result(PATIENCE)
    assert threads.submit(lambda: 2).result(PATIENCE) == 2
    gate.set()
    assert stuck.result(PATIENCE)
