"""Life of a request without sockets: reported ends, moves to another worker, deadlines."""

from __future__ import annotations

import gc
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from tokenizers import Tokenizer

from gateway.cluster.client import Stream
from gateway.flow.admission import Admission
from gateway.flow.generation import Generation, Generator
from gateway.flow.routing import Router
from gateway.text.detokenizer import Detokenizer, build_token_bytes
from shared.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    PeltonError,
    RateLimitError,
    UnavailableError,
    WorkerLostError,
)
from shared.log import bind_request_id
from shared.messages import Finish, FinishReason, Output, Submit, WorkerStats
from tests.fakes.fake_generator import facts
from tests.fakes.gateway_core import collect, make_request
from tests.fakes.tokenizers import byte_level_json


class Link:
    """Replacement of WorkerLink that records its calls."""

    page_size = 16
    max_num_seqs = 8
    waiting_tokens = foreign_tokens = 0
    num_sequences = foreign_sequences = 0
    stats = WorkerStats()

    def __init__(self) -> None:
        self.refuses = False
        self.num_refreshes = 0
        self.submitted: list[Submit] = []
        self.streams: list[Stream] = []
        self.forgotten: list[tuple[str, bool]] = []
        self.cancelled: list[tuple[str, int]] = []

    def submit(self, message: Submit, stream: Stream) -> None:
        if self.refuses:
            raise UnavailableError("full")
        self.submitted.append(message)
        self.streams.append(stream)

    def refresh(self) -> None:
        self.num_refreshes += 1

    def forget(self, request_id: str, *, cancel: bool) -> None:
        self.forgotten.append((request_id, cancel))

    def cancel_choice(self, request_id: str, choice: int) -> None:
        self.cancelled.append((request_id, choice))


class World:
    """Return a generator over links of one model."""

    def __init__(self, num_links: int = 1, **options: Any) -> None:
        table = build_token_bytes(json.loads(byte_level_json()), Tokenizer.from_buffer(byte_level_json()).get_vocab())
        self.links = [Link() for _ in range(num_links)]
        pipeline = SimpleNamespace(detokenizer=lambda **options: Detokenizer(table, **options))
        entry: Any = SimpleNamespace(
            facts=facts(vocab_size=512), pipeline=pipeline, ready_workers=lambda: list(self.links)
        )
        models: Any = SimpleNamespace(model=lambda name: entry, models=lambda: [entry])
        self.admission = Admission(max_waiting_requests=9, max_waiting_tokens=9999, clock=time.monotonic)
        self.generator = Generator(
            models,
            self.admission,
            Router(),
            gateway_id="gw",
            request_timeout=options.get("request_timeout", 60.0),
            write_timeout=60.0,
        )


def output(ids: list[int], finish: Finish | None = None, choice: int = 0) -> Output:
    return Output("any", choice, ids, finish)


@pytest.mark.parametrize(
    ("finish", "kind", "code"),
    [
        (Finish(FinishReason.ABORT), UnavailableError, "service_unavailable"),
        (Finish(FinishReason.ERROR, message="boom"), InternalError, "internal_error"),
        (Finish(FinishReason.ERROR, message="x", code="invalid_logits"), InternalError, "invalid_logits"),
        (Finish(FinishReason.ERROR, message="x", code="deadline_exceeded"), UnavailableError, "deadline_exceeded"),
        (Finish(FinishReason.ERROR, message="x", code="model_not_found"), ModelNotFoundError, "model_not_found"),
        (Finish(FinishReason.ERROR, message="x", code="context_length_exceeded"), ContextLengthError, None),
        (Finish(FinishReason.ERROR, message="x", code="invalid_request", param="a"), InvalidRequestError, None),
    ],
)
async def test_unsuccessful_ends_raise_after_what_came_before(
    finish: Finish, kind: type[PeltonError], code: str | None
) -> None:
    world = World()
    async with world.generator.submit(make_request([1], n=2)) as generation:
        generation.on_output(output([70]))
        generation.on_output(output([], finish))
        generation.on_output(output([71], choice=1))
        assert (await anext(generation)).token_ids == [70]
        with pytest.raises(kind) as caught:
            await anext(generation)
        assert type(caught.value) is kind
        assert code is None or caught.value.code == code
        assert caught.value.param == finish.param
        if finish.message:
            assert caught.value.message == finish.message
    # The other choice must not run on.
    assert world.links[0].forgotten == [(world.links[0].submitted[0].request_id, True)]
    assert world.admission.num_requests == 0


async def test_a_second_end_of_a_choice_changes_nothing() -> None:
    world = World()
    stop = Finish(FinishReason.STOP, stop_token_id=2)
    async with world.generator.submit(make_request([1], n=2)) as generation:
        for _ in range(3):
            generation.on_output(output([70, 2], stop))
        generation.on_output(output([71], Finish(FinishReason.ERROR, message="late")))
        generation.on_output(output([71], Finish(FinishReason.LENGTH), choice=1))
        deltas = [delta async for delta in generation]
    assert [(delta.choice, delta.finish_reason) for delta in deltas] == [(0, "stop"), (1, "length")]
    assert world.links[0].forgotten == [(world.links[0].submitted[0].request_id, False)]


async def test_a_request_without_output_moves_once() -> None:
    world = World(num_links=2)
    generation = world.generator.submit(make_request([1, 2, 3], speculative=False, prediction=[7, 8]))
    first, second = sorted(world.links, key=lambda link: -len(link.submitted))
    world.links = [second]
    generation.on_lost(WorkerLostError("gone"))
    assert second.submitted[0].token_ids == [1, 2, 3]
    assert second.submitted[0].request_id != first.submitted[0].request_id
    assert second.submitted[0].sampling == first.submitted[0].sampling
    for link in (first, second):
        assert (link.submitted[0].speculative, link.submitted[0].prediction) == (False, [7, 8])
    world.links = [Link()]
    generation.on_lost(WorkerLostError("gone"))
    with pytest.raises(WorkerLostError):
        await collect(generation)
    assert world.links[0].submitted == []
    assert world.admission.num_requests == world.admission.waiting_tokens == 0


async def test_a_request_with_output_does_not_move() -> None:
    world = World(num_links=2)
    async with world.generator.submit(make_request([1])) as generation:
        generation.on_output(output([70]))
        generation.on_lost(WorkerLostError("gone"))
        assert sum(len(link.submitted) for link in world.links) == 1
        assert (await anext(generation)).token_ids == [70]
        with pytest.raises(WorkerLostError):
            await anext(generation)


async def test_a_worker_that_refuses_is_passed_over() -> None:
    world = World(num_links=3)
    world.links[0].refuses = world.links[1].refuses = True
    world.generator.submit(make_request([1])).close()
    assert len(world.links[2].submitted) == 1
    world.links[2].refuses = True
    with pytest.raises(UnavailableError, match="full"):
        world.generator.submit(make_request([1]))
    assert world.admission.num_requests == world.admission.waiting_tokens == 0


async def test_a_refusal_for_what_other_gateways_have_asks_for_news_of_it() -> None:
    world = World(num_links=3)
    capacity = sum(link.max_num_seqs for link in world.links)
    world.links[1].foreign_sequences = capacity + 9
    with pytest.raises(RateLimitError):
        world.generator.submit(make_request([1]))
    assert [link.num_refreshes for link in world.links] == [0, 1, 0]
    world.links[1].foreign_sequences = capacity + 8
    world.generator.submit(make_request([1])).close()


async def test_deadlines_end_what_waits_and_not_what_runs() -> None:
    world = World()
    waiting = world.generator.submit(make_request([1], deadline=time.time() + 0.05))
    running = world.generator.submit(make_request([1], deadline=time.time() + 0.05))
    running.on_output(output([70]))
    with pytest.raises(UnavailableError, match="first token"):
        await collect(waiting)
    running.on_output(output([71], Finish(FinishReason.LENGTH)))
    assert (await collect(running))[-1].finish_reason == "length"
    assert world.links[0].submitted[0].deadline is not None


async def test_a_stream_that_stands_still_ends_too() -> None:
    world = World(request_timeout=0.05)
    async with world.generator.submit(make_request([1])) as generation:
        generation.on_output(output([70]))
        # The worker receives a deadline although the request has none.
        assert world.links[0].submitted[0].deadline == pytest.approx(time.time() + 0.05, abs=30)
        assert (await anext(generation)).token_ids == [70]
        with pytest.raises(UnavailableError, match="next token"):
            await anext(generation)


async def test_a_fault_of_our_own_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    bind_request_id("id-of-the-http-request")
    generation = world.generator.submit(make_request([1]))
    monkeypatch.setattr(generation, "_choices", None)
    with structlog.testing.capture_logs() as lines:
        generation.on_output(output([70]))
    with pytest.raises(InternalError):
        await collect(generation)
    assert [line["request_id"] for line in lines] == ["id-of-the-http-request"]


async def test_closing_twice_gives_back_once() -> None:
    world = World()
    generation = world.generator.submit(make_request([1], n=3))
    generation.close()
    generation.close()
    generation.on_output(output([70]))
    generation.on_lost(WorkerLostError("gone"))
    assert (world.admission.num_requests, world.admission.num_sequences) == (0, 0)
    assert len(world.links[0].forgotten) == 1
    assert [delta async for delta in generation] == []


async def test_ids_at_the_worker_are_unique_and_short() -> None:
    world = World()
    for _ in range(3):
        world.generator.submit(make_request([1], request_id="x" * 500)).close()
    ids = [submit.request_id for submit in world.links[0].submitted]
    assert len(set(ids)) == 3 and max(map(len, ids)) <= 128
    with pytest.raises(InvalidRequestError, match="empty"):
        world.generator.submit(make_request([]))


@pytest.mark.parametrize("how", ["ended", "left", "failed"])
async def test_one_that_is_over_does_not_wait_for_the_garbage_collector(how):
    """A generation refers to its prompt, which may have a million tokens that the collector does not count."""
    world = World()
    gc.collect()
    gc.disable()
    try:
        async with world.generator.submit(make_request([40, 41])) as generation:
            (stream,) = world.links[0].streams
            if how == "ended":
                stream.on_output(output([40, 2], Finish(FinishReason.STOP)))
                await collect(generation)
            elif how == "failed":
                stream.on_output(output([], Finish(FinishReason.ERROR, message="boom")))
                with pytest.raises(InternalError):
                    await collect(generation)
        world.links[0].streams.clear()
        del stream, generation
        assert not [found for found in gc.get_objects() if type(found) is Generation]
    finally:
        gc.enable()
