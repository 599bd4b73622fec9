"""/v1/completions: events to a whole response, or to chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from gateway.api.chunk_frame import ChunkFrame
from gateway.api.fan_in import Tally
from gateway.api.logprobs import CompletionLogprobs, TokenBytes
from gateway.flow.events import TextDelta
from gateway.responses import dump_json
from shared.messages import TokenLogprobs


class Choices:
    """What each choice shows: its prompt first where echo is on, then its text, with logprobs where asked for.

    Args:
        echoes: the text of each prompt, or None without echo.
        token_bytes: where logprobs were asked for, else None.
    """

    def __init__(self, echoes: Sequence[str] | None, token_bytes: TokenBytes | None) -> None:
        self._echoes = echoes
        self._token_bytes = token_bytes
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    def show(self, index: int, prompt_index: int, delta: TextDelta) -> tuple[str, dict[str, list[Any]] | None]:
        """Text and logprobs to show for an event."""
        text = delta.text
        entries = list(delta.logprobs or ())
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = delta.prompt_logprobs
        if index not in self._begun:
            self._begun.add(index)
            if self._echoes is not None:
                text = self._echoes[prompt_index] + text
                entries = [*self._prompt_logprobs.get(prompt_index, ()), *entries]
        if self._token_bytes is None:
            return text, None
        builder = self._logprobs.setdefault(index, CompletionLogprobs(self._token_bytes))
        return text, builder.add(entries)


class CompletionChunks:
    """Encodes events as streamed `text_completion`s."""

    def __init__(
        self, response_id: str, created: int, model: str, tally: Tally, choices: Choices, *, include_usage: bool
    ) -> None:
        self._frame = ChunkFrame(
            response_id,
            created,
            model,
            tally,
            kind="text_completion",
            opening=b'"text":',
            include_usage=include_usage,
        )
        self._choices = choices
        self._text_tail = b',"logprobs":null,"finish_reason":null}]' + self._frame.tail

    def encode(self, index: int, prompt_index: int, delta: TextDelta) -> bytes:
        """The chunk of one event; empty where it has nothing to show yet."""
        text, logprobs = self._choices.show(index, prompt_index, delta)
        if not text and delta.finish_reason is None and not (logprobs and logprobs["tokens"]):
            return b""
        head = self._frame.head(index)
        if logprobs is None and delta.finish_reason is None:
            return head + dump_json(text) + self._text_tail
        reason = dump_json(delta.finish_reason)
        return (
            head
            + dump_json(text)
            + b',"logprobs":'
            + dump_json(logprobs)
            + b',"finish_reason":'
            + reason
            + b"}]"
            + self._frame.tail
        )

    def end(self) -> bytes:
        """The usage chunk, where asked for, and the end marker."""
        return self._frame.end()


async def whole_completion_response(
    response_id: str,
    created: int,
    model: str,
    num_choices: int,
    events: AsyncIterator[tuple[int, int, TextDelta]],
    tally: Tally,
    choices: Choices,
) -> dict[str, Any]:
    """Collects all events into a `text_completion`."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    logprobs: list[dict[str, list[Any]] | None] = [None] * num_choices
    reasons: list[str | None] = [None] * num_choices
    async for index, prompt_index, delta in events:
        text, more = choices.show(index, prompt_index, delta)
        texts[index].append(text)
        logprobs[index] = _joined(logprobs[index], more)
        reasons[index] = delta.finish_reason or reasons[index]
    return {
        "id": response_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "text": "".join(texts[index]),
                "logprobs": logprobs[index],
                "finish_reason": reasons[index],
            }
            for index in range(num_choices)
        ],
        "usage": tally.usage(),
    }


def _joined(first: dict[str, list[Any]] | None, second: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
    if first is None or second is None:
        return second if first is None else first
    for name, values in second.items():
        first[name].extend(values)
    return first
