"""Speculation over HTTP: the real gateway and a worker that reports accepted drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.messages import DraftCounts, Submit
from tests.fakes.chat_gateway import MODEL, ask, chat_gateway
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import running_core, until
from tests.fakes.hermes import ids_of
from tests.fakes.http_gateway import Gateway, parse_events

TEXT = "The rain in Spain."
PREDICTION = {"prediction": {"type": "content", "content": "The rain in Rome."}}
DRAFTS = {"speculative_method": "auto", "drafts": lambda _: [DraftCounts(3, 2), DraftCounts(0, 1), DraftCounts(2, 0)]}


async def usage_of_stream(gateway: Gateway, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}
    events = parse_events(await gateway.stream_raw("/v1/chat/completions", {**body, **fields}))
    return events[-2]["usage"]


def details(accepted: int, rejected: int) -> dict[str, int]:
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


async def test_accepted_and_rejected_tokens_are_in_the_usage(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, TEXT, **DRAFTS) as (gateway, _):
        body = await ask(gateway)
        usage = body["usage"]
        assert body["choices"][0]["message"]["content"] == TEXT
        assert usage["completion_tokens_details"] == {**details(5, 3), "reasoning_tokens": 0}
        # Rejected tokens are in no other count.
        assert usage["completion_tokens"] == len(ids_of(TEXT))
        assert await usage_of_stream(gateway) == usage
        several = (await ask(gateway, n=3))["usage"]
        assert several["completion_tokens_details"] == {**details(15, 9), "reasoning_tokens": 0}
        assert await usage_of_stream(gateway, n=3) == several
        status, body, _ = await gateway.complete(model=MODEL, prompt=["a", "b"], n=2, max_tokens=100)
        assert status == 200 and body["usage"]["completion_tokens_details"] == details(20, 12)
        # Tokens that the response does not show were generated too.
        status, body, _ = await gateway.complete(model=MODEL, prompt="a", best_of=3, max_tokens=100)
        assert status == 200 and body["usage"]["completion_tokens_details"] == details(15, 9)


async def test_continuous_usage_has_drafts_from_the_end_of_the_choice(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, TEXT, **DRAFTS) as (gateway, _):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 100, "stream_options": {"continuous_usage_stats": True}}
        *chunks, done = parse_events(await gateway.stream_raw("/v1/completions", body))
    assert done == "[DONE]"
    shown = [chunk["usage"]["completion_tokens_details"] for chunk in chunks]
    ended = next(index for index, chunk in enumerate(chunks) if chunk["choices"][0]["finish_reason"])
    assert shown == [details(0, 0)] * ended + [details(5, 3)] * (len(chunks) - ended)


@pytest.mark.parametrize("streams", [False, True])
async def test_requests_as_the_worker_receives_them(tmp_path: Path, streams: bool) -> None:
    async with chat_gateway(tmp_path, TEXT, speculative_method="ngram") as (gateway, worker):

        async def submitted(**fields: Any) -> Submit:
            await (usage_of_stream(gateway, **fields) if streams else ask(gateway, **fields))
            return worker.submits()[-1]

        plain = await submitted()
        assert (plain.speculative, plain.prediction) == (True, [])
        assert not (await submitted(speculative={"enabled": False})).speculative
        assert (await submitted(speculative={"enabled": True})).speculative
        predicted = await submitted(**PREDICTION, n=2, logprobs=True, seed=5)
        assert predicted.speculative and predicted.prediction == ids_of("The rain in Rome.")[:-1]
        # All other fields equal those without speculation.
        assert predicted.token_ids == plain.token_ids
        parts = [{"type": "text", "text": text} for text in ("The rain", " in Rome.")]
        assert (await submitted(prediction={"type": "content", "content": parts})).prediction == predicted.prediction


async def test_speculation_requires_that_all_workers_draft(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, index=0, speculative_method="ngram"):
        async with running_core(tmp_path) as core:
            await until(lambda: core.registry.ready()[0])
            assert core.registry.model("fake").facts.speculative_method == "ngram"
            with FakeWorker(tmp_path, index=1, max_num_seqs=3):
                await until(lambda: len(core.registry.model("fake").ready_workers()) == 2)
                assert core.registry.model("fake").facts.speculative_method == "off"
            await until(lambda: len(core.registry.model("fake").workers) == 1)
            assert core.registry.model("fake").facts.speculative_method == "ngram"
