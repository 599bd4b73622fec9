"""Several generations of one request: submitted one by one, cancelled together."""

from __future__ import annotations

import asyncio

import pytest

from gateway.api.common.fan_in import FanIn
from shared.errors import RateLimitError
from tests.fakes.fake_generator import FakeGenerator, spell
from tests.fakes.gateway_core import make_request

PROMPTS = [[65 + index] for index in range(8)]


def requests(**changes):
    return [make_request(ids, **changes) for ids in PROMPTS]


async def test_indices_of_several_prompts_with_several_choices():
    async with FanIn(FakeGenerator(spell("ab", cached=1)).submit, requests(n=2)) as events:
        seen = [(index, prompt_index, delta) async for index, prompt_index, delta in events]
    assert {(index, prompt_index) for index, prompt_index, _ in seen} == {(i, i // 2) for i in range(16)}
    texts = {index: "".join(delta.text for at, _, delta in seen if at == index) for index in range(16)}
    assert set(texts.values()) == {"ab"}
    assert (events.tally.num_prompt_tokens, events.tally.num_completion_tokens) == (8, 32)
    assert events.tally.num_cached_tokens == 8


async def test_a_refusal_or_a_disconnect_cancels_what_was_submitted():
    generator = FakeGenerator()

    def script(request):
        if request.prompt_token_ids == PROMPTS[5]:
            raise RateLimitError("busy", retry_after=1.0)
        return [60.0]

    generator.script = script
    with pytest.raises(RateLimitError):
        async with FanIn(generator.submit, requests()):
            pytest.fail("it was entered")
    assert len(generator.generations) == 5 and not generator.live
    assert all(generation.cancelled for generation in generator.generations)

    for number in range(1, 9):
        generator = FakeGenerator(lambda request: [60.0])

        async def run(generator):
            async with FanIn(generator.submit, requests()) as events:
                async for _ in events:
                    pass

        task = asyncio.create_task(run(generator))
        for _ in range(number):
            await asyncio.sleep(0)
        assert len(generator.live) == number, "other tasks run between the prompts"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not generator.live and all(generation.cancelled for generation in generator.generations)
