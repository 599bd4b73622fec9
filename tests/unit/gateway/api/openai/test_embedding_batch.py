"""Batch of embedding inputs over a real link to a fake worker: admission, metrics and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gateway.api.openai.embedding_batch import embed
from gateway.flow.events import GenerationRequest
from shared.errors import ContextLengthError, InternalError, RateLimitError, WorkerLostError
from shared.messages import Finish, FinishReason, Submit, WorkerStats
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import Core, collect, joined, linked, make_request, running_core, until
from tests.fakes.vectors import vector_of


def parts(prompts: Sequence[Sequence[int]], **changes: Any) -> list[GenerationRequest]:
    return [make_request([*ids], max_tokens=1, pooling="mean", **changes) for ids in prompts]


async def run(core: Core, prompts: Sequence[Sequence[int]], width: int, **changes: Any) -> list[bytes]:
    """Return the embeddings, with at most `width` sub-requests or 4 * 512 tokens in flight."""
    await until(core.registry.models)
    facts = msgspec.structs.replace(core.registry.models()[0].facts, max_num_seqs=width, max_num_batched_tokens=512)
    return await embed(core.generator, parts(prompts, **changes), facts, bytes)


def observations(core: Core, name: str) -> float:
    return core.sample(f"{name}_count", model_name="fake")


async def test_metrics_count_a_batch_as_one_request(tmp_path) -> None:
    prompts = [[5 + index, 6] for index in range(20)]
    async with linked(tmp_path) as (core, worker):
        assert await run(core, prompts, 4, salt=b"s", priority=3) == [vector_of(ids, "mean") for ids in prompts]
        submits = worker.submits()
        assert [submit.token_ids for submit in submits] == prompts
        assert {(one.pooling, one.num_choices, one.num_prompt_tokens, one.salt, one.priority) for one in submits} == {
            ("mean", 1, 2, b"s", 3)
        }
        assert len({submit.request_id for submit in submits}) == 20 and not worker.cancels()
        assert core.sample("requests_accepted_total", model_name="fake") == 1
        assert core.sample("request_success_total", model_name="fake", finished_reason="stop") == 1
        assert observations(core, "e2e_request_latency_seconds") == 1
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
            assert observations(core, name) == 0
        assert core.admission.num_requests == core.admission.num_sequences == core.admission.waiting_tokens == 0


async def test_admission_counts_the_inputs_in_flight(tmp_path) -> None:
    prompts = [[5] * (1 + index % 3) for index in range(40)]
    async with linked(tmp_path, {"max_waiting_requests": 1, "max_waiting_tokens": 10}, max_num_seqs=4) as (
        core,
        worker,
    ):
        worker.faults.stalled = True
        batch = asyncio.create_task(run(core, prompts, 4))
        await until(lambda: worker.num_running == 4)
        assert (core.admission.num_requests, core.admission.num_sequences) == (1, 4)
        assert core.admission.waiting_tokens == 4 * 3  # an idle server takes what is above its limit
        with pytest.raises(RateLimitError, match="prompt tokens"):
            core.generator.submit(make_request([5]))
        with pytest.raises(RateLimitError, match="sequences"):
            await run(core, [[5], [6]], 2)
        worker.faults.stalled = False
        assert len(await batch) == 40
        assert core.admission.num_sequences == 0


class CountingWorker(FakeWorker):
    """Worker that records the most requests and prompt tokens that it had at a time."""

    most_requests = most_tokens = 0

    def _step(self) -> None:
        self.most_requests = max(self.most_requests, len(self._running))
        self.most_tokens = max(self.most_tokens, sum(len(one.submit.token_ids) for one in self._running))
        super()._step()


@pytest.mark.parametrize(
    ("prompts", "speed", "requests", "tokens"),
    [
        ([[5, index] for index in range(300)], 1e9, 7, 14),
        ([[5] * (50 + 650 * (index % 2)) for index in range(60)], 1e9, 5, 2048),
        ([[5] * (20 + 30 * (index % 2)) for index in range(60)], 100.0, 3, 100),
        ([[5] * 100 for index in range(30)], 0.0, 5, 512),
        ([[5] * 2500, [6]] * 6, 1e9, 1, 2500),
    ],
)
async def test_inputs_in_flight_are_bounded(tmp_path, prompts, speed, requests, tokens) -> None:
    """The bounds are four steps of 512 tokens and one second, or one step while the speed is unknown."""
    worker = CountingWorker(tmp_path, stats=WorkerStats(prefill_tokens_per_second=speed))
    with worker:
        async with running_core(tmp_path) as core:
            await until(core.registry.models)
            await until(lambda: core.registry.models()[0].ready_workers()[0].stats == worker.stats)
            worker.faults.stalled = True
            batch = asyncio.create_task(run(core, prompts, 7))
            await until(lambda: worker.num_running == requests)
            await asyncio.sleep(0.02)
            assert worker.num_running == requests
            worker.faults.stalled = False
            assert await batch == [vector_of(ids, "mean") for ids in prompts]
    assert requests <= worker.most_requests <= 7 and worker.most_tokens <= tokens
    assert len(worker.submits()) == len(prompts)


async def test_an_input_may_be_as_long_as_the_context(tmp_path) -> None:
    async with linked(tmp_path, max_model_len=32, num_pages=2) as (core, _):
        assert await run(core, [[5] * 32], 4) == [vector_of([5] * 32, "mean")]
        with pytest.raises(ContextLengthError) as error:
            await run(core, [[5] * 33], 4)
        assert error.value.param == "input"


async def test_an_input_that_the_worker_refuses_cancels_the_others(tmp_path) -> None:
    def embedding(submit: Submit) -> bytes | Finish:
        if submit.token_ids == [9]:
            return Finish(FinishReason.ERROR, message="It does not fit.", code="context_length_exceeded")
        return vector_of(submit.token_ids)

    async with linked(tmp_path, embedding=embedding, delay=0.01) as (core, worker):
        with pytest.raises(ContextLengthError, match="It does not fit"):
            await run(core, [[5]] * 9 + [[9]] + [[5]] * 300, 4)
        await until(lambda: worker.num_running == 0)
        assert len(worker.submits()) < 30
        assert core.sample("request_failures_total", model_name="fake", reason="error") == 1
        assert core.sample("request_success_total", model_name="fake", finished_reason="stop") == 0
        assert core.admission.num_sequences == 0


async def test_cancellation_cancels_all_inputs_at_the_worker(tmp_path) -> None:
    async with linked(tmp_path) as (core, worker):
        worker.faults.stalled = True
        batch = asyncio.create_task(run(core, [[5]] * 50, 8))
        await until(lambda: worker.num_running == 8)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert core.admission.num_sequences == 0
        await until(lambda: worker.num_running == 0)
        assert len(worker.submits()) == 8
        assert core.sample("request_failures_total", model_name="fake", reason="abort") == 1


async def test_inputs_of_a_lost_worker_move_to_another_if_there_is_one(tmp_path) -> None:
    prompts = [[5, index] for index in range(12)]
    with FakeWorker(tmp_path) as lost, FakeWorker(tmp_path, 1) as other:
        lost.faults.stalled = other.faults.stalled = True
        async with running_core(tmp_path) as core:
            await joined(core, 2)
            batch = asyncio.create_task(run(core, prompts, 8))
            await until(lambda: lost.num_running + other.num_running == 8)
            assert lost.num_running and other.num_running
            lost.stop()
            await until(lambda: other.num_running == 8)
            other.faults.stalled = False
            assert await batch == [vector_of(ids, "mean") for ids in prompts]
            assert core.sample("request_success_total", model_name="fake", finished_reason="stop") == 1
            other.faults.stalled = True
            batch = asyncio.create_task(run(core, prompts, 8))
            await until(lambda: other.num_running == 8)
            other.stop()
            with pytest.raises(WorkerLostError):
                await batch
            assert core.sample("request_failures_total", model_name="fake", reason="worker_lost") == 1


async def test_mean_pooling_ignores_the_prefix_cache_in_routing(tmp_path) -> None:
    prompt = [5 + index for index in range(400)]
    with FakeWorker(tmp_path) as one, FakeWorker(tmp_path, 1) as two:
        workers = (one, two)
        async with running_core(tmp_path) as core:
            await joined(core, 2)

            async def places(ids: list[int], **fields: Any) -> list[int]:
                """Return how many requests each worker received."""
                before = [len(worker.submits()) for worker in workers]
                await collect(core.generator.submit(make_request(ids, max_tokens=1, **fields)))
                return [len(worker.submits()) - count for worker, count in zip(workers, before, strict=True)]

            cached = await places(prompt, pooling="last")
            busy = workers[cached.index(1)]
            busy.faults.stalled = True
            waiting = asyncio.create_task(places(prompt[:300], pooling="last"))
            await until(lambda: busy.num_running == 1)
            assert await places(prompt, pooling="mean") == [1 - count for count in cached]
            busy.faults.stalled = False
            await waiting
            # And it leaves nothing there that would draw others.
            assert await places(prompt, pooling="last") == cached


@pytest.mark.parametrize("wrong", [{"finish": None}, {"embedding": None}, {"token_ids": [5]}, {"choice": 1}])
async def test_invalid_output_of_a_worker_is_an_internal_error(tmp_path, wrong: dict[str, Any]) -> None:
    class WrongWorker(FakeWorker):
        def _embedding(self, one):
            return msgspec.structs.replace(super()._embedding(one), **wrong)

    with WrongWorker(tmp_path):
        async with running_core(tmp_path) as core:
            with pytest.raises(InternalError):
                await run(core, [[5], [6]], 2)
            assert core.admission.num_sequences == 0
