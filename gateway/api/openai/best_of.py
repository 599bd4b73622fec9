"""best_of: of several choices of a prompt, those that the model finds likeliest."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from gateway.api.common.fan_in import FanIn
from gateway.flow.events import TextDelta
from gateway.flow.outbox import merged


async def best_choices(events: FanIn, best_of: int, n: int) -> AsyncIterator[tuple[int, int, TextDelta]]:
    """Per prompt the n choices with the highest mean log-probability of a token, best first, one event each.

    Usage counts all `best_of`, as OpenAI does: all were generated.
    """
    deltas: dict[int, list[TextDelta]] = {}
    async for index, _, delta in events:
        deltas.setdefault(index, []).append(delta)
    for prompt_index in range(len(deltas) // best_of):
        mine = range(prompt_index * best_of, (prompt_index + 1) * best_of)
        of_prompt = next((one.prompt_logprobs for index in mine for one in deltas[index] if one.prompt_logprobs), None)
        for rank, index in enumerate(sorted(mine, key=events.mean_logprob, reverse=True)[:n]):
            delta = msgspec.structs.replace(
                merged(deltas[index]), choice=rank, prompt_logprobs=None if rank else of_prompt
            )
            yield prompt_index * n + rank, prompt_index, delta
