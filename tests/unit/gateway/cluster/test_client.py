"""Worker link: full queues, and actions that are not repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from gateway.cluster.client import LinkCounters, WorkerLink
from shared import sockets
from shared.errors import ConfigurationError, UnavailableError, WorkerLostError
from shared.messages import Output, Submit
from shared.sampling_params import SamplingParams
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import FAST, until


class Recorder:
    """Stream that records its calls."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.errors: list[WorkerLostError] = []

    def on_output(self, output: Output) -> None:
        self.outputs.append(output)

    def on_lost(self, error: WorkerLostError) -> None:
        self.errors.append(error)


@asynccontextmanager
async def connected(endpoint: str, lost: list[WorkerLink]) -> AsyncIterator[WorkerLink]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = WorkerLink(
        context,
        endpoint,
        "gw",
        liveness=FAST,
        counters=LinkCounters(),
        on_welcome=lambda link: None,
        on_bundle=lambda link, bundle: None,
        on_lost=lost.append,
    )
    try:
        yield link
    finally:
        link.close()
        context.term()


def submit(number: int) -> Submit:
    return Submit(
        request_id=f"r{number}",
        model="fake",
        token_ids=[5, 6, 7],
        num_prompt_tokens=3,
        sampling=SamplingParams(max_tokens=9),
        num_choices=2,
    )


async def test_a_full_queue_refuses_requests_and_keeps_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 4)
    worker = FakeWorker(tmp_path, delay=3600)
    async with connected(worker.endpoint, []) as link:
        link.start()
        stream = Recorder()
        sent = 0
        with pytest.raises(UnavailableError, match="queue is full"):
            for _ in range(100):
                link.submit(submit(sent), stream)
                sent += 1
        assert (link.num_sequences, link.waiting_tokens) == (2 * sent, 3 * sent)
        for number in range(sent):
            link.forget(f"r{number}", cancel=True)
            link.forget(f"r{number}", cancel=True)
        assert link.counters.send_failures == 1 + sent
        assert (link.num_sequences, link.waiting_tokens) == (0, 0)
        monkeypatch.undo()
        # The worker receives all of them once it is connected.
        with worker:
            await until(lambda: len(worker.cancels()) == sent)
            assert {cancel.request_id for cancel in worker.cancels()} == {f"r{number}" for number in range(sent)}
            await until(lambda: worker.num_running == 0)


async def test_load_counts_prompts_until_their_first_output_and_ends_with_the_link(tmp_path: Path) -> None:
    lost: list[WorkerLink] = []
    with FakeWorker(tmp_path, delay=3600) as worker:
        async with connected(worker.endpoint, lost) as link:
            link.start()
            await until(lambda: link.ready)
            stream = Recorder()
            link.submit(submit(1), stream)
            assert (link.waiting_tokens, link.num_sequences) == (3, 2)
            await until(lambda: stream.outputs)
            assert (link.waiting_tokens, link.num_sequences) == (0, 2)
            link.forget("r1", cancel=True)
            assert link.num_sequences == 0
            streams = [Recorder() for _ in range(3)]
            for number, stream in enumerate(streams):
                link.submit(submit(number), stream)
            link.close()
            link.close()
            assert [len(stream.errors) for stream in streams] == [1, 1, 1]
            assert lost == [link] and not link.ready
            with pytest.raises(UnavailableError):
                link.submit(submit(9), Recorder())
            link.forget("r0", cancel=True)
            link.cancel_choice("r0", 1)


async def test_an_endpoint_that_is_none_is_refused() -> None:
    async with connected("nonsense", []) as link:
        with pytest.raises(ConfigurationError, match="cannot be used"):
            link.start()
