"""POST /v1/chat/completions: the route, and events as a whole response or as chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import orjson
from aiohttp import web

from gateway.api.common.envelope import ChunkEncoder, Detail, Envelope, Tally, shaped_prompt_logprobs
from gateway.api.common.fan_in import open_events
from gateway.api.common.fields import ChatFields, parse_fields
from gateway.api.common.logprobs import chat_logprobs
from gateway.api.common.prepare import prepare_chat
from gateway.api.common.resumable import stream
from gateway.flow.events import TextDelta
from gateway.http.body import read_json
from gateway.http.errors import cached_json, dump_json, json_response
from gateway.text.message_parser import ToolCallDelta
from shared.messages import TokenLogprobs

_PLAIN = b'},"logprobs":null,"finish_reason":null}]'


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or streamed. max_tokens defaults to what is left of the context."""
    fields = parse_fields(await read_json(request), ChatFields)
    prepared = await prepare_chat(request, fields, "chatcmpl-")
    envelope, detail = prepared.envelope, prepared.detail
    if fields.stream:
        return await stream(request, prepared, lambda tally: ChatChunks(envelope, tally, detail))
    async with open_events(request, prepared) as events:
        return json_response(await whole_chat_response(envelope, prepared.options.n, events, events.tally, detail))


class ChatChunks(ChunkEncoder):
    """Encoder of events as `chat.completion.chunk`s.

    Everything around the delta is encoded once for each choice: a token costs one string encoding and two
    concatenations. Reasoning, content and each piece of a tool call have chunks of their own, in this order.

    Args:
        envelope: Shared fields of the chunks.
        tally: Counts for the usage.
        detail: Settings on what the chunks report besides text.
    """

    __slots__ = ("_detail", "_only_text", "_prompt_shown")

    def __init__(self, envelope: Envelope, tally: Tally, detail: Detail) -> None:
        super().__init__(envelope, tally, kind="chat.completion.chunk", opening=b'"delta":{')
        self._detail = detail
        self._only_text = not detail.token_ids and detail.logprobs is None
        self._prompt_shown = not detail.token_ids

    def encode(self, index: int, prompt_index: int, delta: TextDelta) -> bytes:
        """Return the chunks of one event; empty if it has nothing to show yet."""
        has_head = index in self.heads
        head, tail = self.head(index), self.tail
        is_plain = self._only_text and delta.finish_reason is None and not delta.reasoning and not delta.tool_calls
        if has_head and delta.text and is_plain:  # most tokens of most streams
            return b"".join((head, b'"content":', dump_json(delta.text), _PLAIN, tail))
        detail = self._detail
        chunks = b"" if has_head else head + b'"role":"assistant","content":""' + _PLAIN + self._prompt_ids() + tail
        pieces = [b'"content":' + dump_json(delta.text)] if delta.text else []
        if delta.reasoning or delta.tool_calls:
            reasoning = [reasoning_delta(delta.reasoning)] if delta.reasoning and detail.reasoning else []
            pieces = [*reasoning, *pieces, *call_deltas(delta.tool_calls)]
        has_logprobs = detail.logprobs is not None and bool(delta.logprobs)
        if has_logprobs or (detail.token_ids and delta.token_ids):
            logprobs = None
            if has_logprobs:
                logprobs = {"content": chat_logprobs(delta.logprobs or (), detail.names), "refusal": None}
            first = pieces.pop(0) if pieces else b'"content":""'
            chunks += head + first + b'},"logprobs":' + dump_json(logprobs)
            chunks += b',"finish_reason":null' + self._token_ids(delta.token_ids) + b"}]" + tail
        for piece in pieces:
            chunks += head + piece + _PLAIN + tail
        if delta.finish_reason is not None:
            reason = dump_json(delta.finish_reason)
            chunks += head + b'},"logprobs":null,"finish_reason":' + reason + b',"stop_reason":'
            chunks += dump_json(delta.stop_reason) + self._token_ids([]) + b"}]" + tail
        return chunks

    def _token_ids(self, token_ids: Sequence[int]) -> bytes:
        return b',"token_ids":' + dump_json(token_ids) if self._detail.token_ids else b""

    def _prompt_ids(self) -> bytes:
        """Return the prompt's ids, if the request asks for them, for the first chunk of all."""
        if self._prompt_shown:
            return b""
        self._prompt_shown = True
        return b',"prompt_token_ids":' + dump_json(self._detail.prompts[0])


def reasoning_delta(text: str) -> bytes:
    """Return the fields of a delta for a piece of reasoning, under both names that clients read."""
    data = dump_json(text)
    return b'"reasoning_content":' + data + b',"reasoning":' + data


def call_deltas(calls: Sequence[ToolCallDelta]) -> Iterator[bytes]:
    """Yield the field `tool_calls` of one delta each, in OpenAI's shape.

    The first delta of a call has its id, its name and empty arguments; the others have its index and more arguments.
    """
    for call in calls:
        if call.name is not None:
            function = {"name": call.name, "arguments": ""}
            yield _call_delta({"index": call.index, "id": call.id, "type": "function", "function": function})
        if call.arguments:
            yield _call_delta({"index": call.index, "function": {"arguments": call.arguments}})


def _call_delta(entry: dict[str, Any]) -> bytes:
    return b'"tool_calls":[' + dump_json(entry) + b"]"


class MessageBuilder:
    """Builder of a choice's whole message from its deltas."""

    __slots__ = ("_arguments", "_calls", "_reasoning", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: TextDelta) -> None:
        """Add the next delta of the choice."""
        self._texts.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.name is not None:
                self._calls.append({"id": call.id, "type": "function", "function": {"name": call.name}})
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)

    def message(self, *, show_reasoning: bool) -> dict[str, Any]:
        """Return OpenAI's message. Its content is null if it has calls and no text."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        if self._reasoning and show_reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        for call, pieces in zip(self._calls, self._arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        return message


async def whole_chat_response(
    envelope: Envelope,
    num_choices: int,
    events: AsyncIterator[tuple[int, int, TextDelta]],
    tally: Tally,
    detail: Detail,
) -> dict[str, Any]:
    """Collect all events into a `chat.completion`.

    Log-probabilities are encoded as they arrive: encoding those of a long answer at its end would block other requests.
    """
    names = detail.names
    messages = [MessageBuilder() for _ in range(num_choices)]
    logprobs: list[list[orjson.Fragment]] = [[] for _ in range(num_choices)]
    reasons: list[str | None] = [None] * num_choices
    stops: list[int | str | None] = [None] * num_choices
    token_ids: list[list[int]] = [[] for _ in range(num_choices)]
    prompt_report: list[TokenLogprobs] = []
    async for index, _, delta in events:
        messages[index].add(delta)
        token_ids[index] += delta.token_ids
        prompt_report = delta.prompt_logprobs or prompt_report
        if detail.logprobs is not None and delta.logprobs:
            logprobs[index] += [orjson.Fragment(cached_json(entry)) for entry in chat_logprobs(delta.logprobs, names)]
        if delta.finish_reason is not None:
            reasons[index], stops[index] = delta.finish_reason, delta.stop_reason
    choices = [
        {
            "index": index,
            "message": messages[index].message(show_reasoning=detail.reasoning),
            "logprobs": None if detail.logprobs is None else {"content": logprobs[index], "refusal": None},
            "finish_reason": reasons[index],
            "stop_reason": stops[index],
            **({"token_ids": token_ids[index]} if detail.token_ids else {}),
        }
        for index in range(num_choices)
    ]
    response = envelope.whole("chat.completion", choices, tally.usage())
    if detail.prompt_logprobs is not None:
        response["prompt_logprobs"] = await shaped_prompt_logprobs(prompt_report, detail.prompt_logprobs, detail)
    if detail.token_ids:
        response["prompt_token_ids"] = detail.prompts[0]
    return response
