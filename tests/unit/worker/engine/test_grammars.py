"""Requests with grammars through the engine's loop and a real socket."""

from __future__ import annotations

from shared.messages import Finish, FinishReason
from worker.engine import STALL_SECONDS

NINE = "mod 5 for 9"
SAMPLING = {"max_tokens": 20, "ignore_eos": True}


def test_slow_grammar_is_no_stall_and_blocks_no_other_request(worker):
    client = worker.client()
    worker.compiled = False
    client.submit("slow", [5, 6, 7], grammar=NINE, sampling=SAMPLING)
    stats = client.sync()
    assert (stats.num_running, stats.num_waiting) == (0, 1)
    for _ in range(round(2 * STALL_SECONDS / 5)):
        worker.elapse(5.0)
        client.sync()  # keeps the lease
    # The idle loop waits.
    worker.transport.waits.clear()
    for _ in range(5):
        worker.engine.step()
    assert len(worker.transport.waits) == 5
    client.submit("other", [8, 9], sampling=SAMPLING)
    assert client.finish("other").reason is FinishReason.LENGTH
    assert client.ended("slow") is None
    worker.compiled = True
    assert client.finish("slow") == Finish(FinishReason.STOP)
    assert [token % 5 for token in client.text("slow")] == [n % 5 for n in range(9)]
    worker.run_until_idle()


def test_stopping_worker_completes_compiling_requests(worker):
    client = worker.client()
    worker.compiled = False
    client.submit("a", [5, 6, 7], grammar=NINE, sampling=SAMPLING)
    client.sync()
    worker.engine.stop()
    worker.engine.step()
    worker.compiled = True
    worker.engine.run()
    worker.pump(lambda: client.ended("a") is not None, "the end")
    assert client.finish("a") == Finish(FinishReason.STOP)
