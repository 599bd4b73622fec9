"""/v1/chat/completions: events to a whole response, or to chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from gateway.api.common.chunk_frame import ChunkFrame
from gateway.api.common.envelope import Detail, Envelope, shaped_prompt_logprobs
from gateway.api.common.fan_in import Tally
from gateway.api.common.logprobs import chat_logprobs
from gateway.api.openai.chat_message import MessageBuilder, call_deltas, reasoning_delta
from gateway.flow.events import TextDelta
from gateway.http.errors import dump_json, kept_json
from shared.errors import PeltonError
from shared.messages import TokenLogprobs

_PLAIN = b'},"logprobs":null,"finish_reason":null}]'


class ChatChunks:
    """Encodes events as `chat.completion.chunk`s.

    All around the delta is encoded once for each choice: a token costs one string encoding and two concatenations.
    Reasoning, content and each piece of a tool call have chunks of their own, in this order.
    """

    __slots__ = ("_detail", "_frame", "_prompt_shown", "_show_reasoning", "_tells_more")

    def __init__(
        self,
        envelope: Envelope,
        tally: Tally,
        detail: Detail,
        *,
        include_usage: bool,
        continuous_usage: bool = False,
        show_reasoning: bool = True,
    ) -> None:
        self._frame = ChunkFrame(
            envelope,
            tally,
            kind="chat.completion.chunk",
            opening=b'"delta":{',
            include_usage=include_usage,
            continuous_usage=continuous_usage,
        )
        self._detail = detail
        self._tells_more = detail.token_ids or detail.logprobs is not None
        self._show_reasoning = show_reasoning
        self._prompt_shown = not detail.token_ids

    def encode(self, index: int, prompt_index: int, delta: TextDelta) -> bytes:
        """The chunks of one event; empty where it has nothing to show yet."""
        begun = index in self._frame.begun
        head, tail = self._frame.head(index), self._frame.tail
        if begun and delta.text and self._is_plain(delta):
            return b"".join((head, b'"content":', dump_json(delta.text), _PLAIN, tail))
        detail = self._detail
        chunks = b"" if begun else head + b'"role":"assistant","content":""' + _PLAIN + self._prompt_ids() + tail
        news = [b'"content":' + dump_json(delta.text)] if delta.text else []
        if delta.reasoning or delta.tool_calls:
            news = [*self._reasoning(delta), *news, *call_deltas(delta.tool_calls)]
        has_logprobs = detail.logprobs is not None and bool(delta.logprobs)
        if has_logprobs or (detail.token_ids and delta.token_ids):
            logprobs = self._logprobs(delta.logprobs or ()) if has_logprobs else None
            first = news.pop(0) if news else b'"content":""'
            chunks += head + first + b'},"logprobs":' + dump_json(logprobs)
            chunks += b',"finish_reason":null' + self._token_ids(delta.token_ids) + b"}]" + tail
        for piece in news:
            chunks += head + piece + _PLAIN + tail
        if delta.finish_reason is not None:
            reason = dump_json(delta.finish_reason)
            chunks += head + b'},"logprobs":null,"finish_reason":' + reason + b',"stop_reason":'
            chunks += dump_json(delta.stop_reason) + self._token_ids([]) + b"}]" + tail
        return chunks

    def _is_plain(self, delta: TextDelta) -> bool:
        """Whether there is nothing to show but text: most tokens of most streams."""
        if self._tells_more or delta.finish_reason is not None:
            return False
        return not delta.reasoning and not delta.tool_calls

    def _reasoning(self, delta: TextDelta) -> Sequence[bytes]:
        return (reasoning_delta(delta.reasoning),) if delta.reasoning and self._show_reasoning else ()

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(entries, self._detail.names), "refusal": None}

    def _token_ids(self, token_ids: Sequence[int]) -> bytes:
        return b',"token_ids":' + dump_json(token_ids) if self._detail.token_ids else b""

    def _prompt_ids(self) -> bytes:
        """The prompt's ids, where asked for, in the first chunk of all."""
        if self._prompt_shown:
            return b""
        self._prompt_shown = True
        return b',"prompt_token_ids":' + dump_json(self._detail.prompts[0])

    def end(self) -> bytes:
        """The usage chunk, where asked for, and the end marker."""
        return self._frame.end()

    def failed(self, error: PeltonError) -> bytes:
        """The error, and the end marker."""
        return self._frame.failed(error)


async def whole_chat_response(
    envelope: Envelope,
    num_choices: int,
    events: AsyncIterator[tuple[int, int, TextDelta]],
    tally: Tally,
    detail: Detail,
    *,
    show_reasoning: bool = True,
) -> dict[str, Any]:
    """Collects all events into a `chat.completion`.

    Log-probabilities become JSON as they come: those of a long answer, all at its end, would hold up other requests.
    """
    names = detail.names
    messages = [MessageBuilder() for _ in range(num_choices)]
    logprobs: list[list[orjson.Fragment]] = [[] for _ in range(num_choices)]
    reasons: list[str | None] = [None] * num_choices
    stops: list[int | str | None] = [None] * num_choices
    token_ids: list[list[int]] = [[] for _ in range(num_choices)]
    of_prompt: list[TokenLogprobs] = []
    async for index, _, delta in events:
        messages[index].add(delta)
        token_ids[index] += delta.token_ids
        of_prompt = delta.prompt_logprobs or of_prompt
        if detail.logprobs is not None and delta.logprobs:
            logprobs[index] += [orjson.Fragment(kept_json(entry)) for entry in chat_logprobs(delta.logprobs, names)]
        if delta.finish_reason is not None:
            reasons[index], stops[index] = delta.finish_reason, delta.stop_reason
    choices = [
        {
            "index": index,
            "message": messages[index].message(show_reasoning=show_reasoning),
            "logprobs": None if detail.logprobs is None else {"content": logprobs[index], "refusal": None},
            "finish_reason": reasons[index],
            "stop_reason": stops[index],
            **({"token_ids": token_ids[index]} if detail.token_ids else {}),
        }
        for index in range(num_choices)
    ]
    response = envelope.whole("chat.completion", choices, tally.usage())
    if detail.prompt_logprobs is not None:
        response["prompt_logprobs"] = await shaped_prompt_logprobs(of_prompt, detail.prompt_logprobs, detail)
    if detail.token_ids:
        response["prompt_token_ids"] = detail.prompts[0]
    return response
