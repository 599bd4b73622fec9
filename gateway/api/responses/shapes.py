"""Conversion of a generation's deltas to the events of /v1/responses and to the response object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec

from gateway.api.common.envelope import Tally
from gateway.api.common.logprobs import TokenNames, chat_logprobs
from gateway.api.common.reasoning import packed_reasoning
from gateway.api.responses.fields import ResponseFields
from gateway.api.responses.items import new_item_id
from gateway.flow.events import TextDelta
from gateway.http.errors import cached_json, dump_json
from gateway.text.message_parser import ToolCallDelta
from shared.errors import InternalError, PeltonError, RateLimitError
from shared.messages import TokenLogprobs

Event = tuple[str, dict[str, Any]]
"""Type of an event without its prefix `response.`, and its fields."""
_TEXT_KINDS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of the content of each item that has content parts."""


def response_head(fields: ResponseFields, identifier: str, created: int, tier: str | None) -> dict[str, Any]:
    """Return the initial state of a response, with the fields that it repeats from the request."""
    text, reasoning = fields.text, fields.reasoning
    return {
        "id": identifier,
        "object": "response",
        "created_at": created,
        "status": "queued" if fields.background else "in_progress",
        "background": bool(fields.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "model": fields.model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": tier or "default",
        "store": fields.store is not False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {
            "format": {"type": "text"} if text is None or text.format is None else msgspec.to_builtins(text.format)
        },
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
        "metadata": fields.metadata or {},
    }


def response_usage(tally: Tally) -> dict[str, Any]:
    """Return OpenAI's usage object. `cache_write_tokens` is 0: every prefix is cached and nothing is billed for it."""
    return {
        "input_tokens": tally.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": tally.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tally.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": tally.num_reasoning_tokens or 0},
        "total_tokens": tally.num_prompt_tokens + tally.num_completion_tokens,
    }


@dataclass(slots=True)
class ResponseEvents:
    """Encoder of the events of /v1/responses; see gateway.http.sse.Encoder. It also updates the response object.

    Attributes:
        response: The response, initially as response_head returns it.
        tally: Token counts of the request.
        names: Names of tokens in log-probabilities; None to omit log-probabilities.
        may_call: True if the model has tools. Trailing white space of text is then held back, because white space
            around calls belongs to no message.
        packs_reasoning: True to add `encrypted_content` to reasoning; see gateway.api.common.reasoning.
        gateway_index: Index of this process, for the ids of items.
        on_change: Callback that receives the response when it is queued, starts and ends, before the event is sent.
    """

    response: dict[str, Any]
    tally: Tally
    names: TokenNames | None
    _: KW_ONLY
    may_call: bool
    packs_reasoning: bool
    gateway_index: int
    on_change: Callable[[dict[str, Any]], None]
    _number: int = field(default=0, init=False)
    _has_started: bool = field(default=False, init=False)
    # The open item, and its content so far.
    _item: dict[str, Any] | None = field(default=None, init=False)
    _pieces: list[str] = field(default_factory=list, init=False)
    _logprobs: list[dict[str, Any]] = field(default_factory=list, init=False)
    _space: str = field(default="", init=False)
    _pending_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    _cut_off: bool = field(default=False, init=False)

    def queue(self) -> bytes:
        """Return the first events of a response in the background, which waits for the model."""
        self.on_change(self.response)
        events: list[Event] = [(kind, {"response": self.response}) for kind in ("created", "queued")]
        return b"".join([self._framed(event) for event in events])

    def encode(self, _index: int, _prompt_index: int, delta: TextDelta) -> bytes:
        """Return the framed events for a delta."""
        return b"".join([self._framed(event) for event in self._events_of(delta)])

    def end(self) -> bytes:
        """Return the events that end the last item and the response."""
        return b"".join([self._framed(event) for event in self._complete()])

    def failed(self, error: PeltonError) -> bytes:
        """Return the events that end the response with an error."""
        return self._terminate("failed", error=_error(error))

    @property
    def running(self) -> bool:
        """True between the start and the end of the response."""
        return self._has_started and self.response["status"] == "in_progress"

    def cancel(self) -> bytes:
        """Return the events that end the response as cancelled.

        OpenAI has no event for that. Clients accept `response.incomplete` as the last one, and the status of the
        response in it is `cancelled`.
        """
        return self._terminate("cancelled", kind="incomplete")

    def _terminate(self, status: str, *, kind: str | None = None, **changes: Any) -> bytes:
        # A queued response has already sent events and ends without an in_progress event.
        events = [] if self._number else [*self._start()]
        events += [*self._close("incomplete"), *self._end_response(status, kind=kind, **changes)]
        return b"".join([self._framed(event) for event in events])

    def _framed(self, event: Event) -> bytes:
        kind, fields = event
        body = dump_json({"type": f"response.{kind}", "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), body)

    def _start(self) -> Iterator[Event]:
        if self._has_started:
            return
        self._has_started = True
        if not self._number:
            yield "created", {"response": dict(self.response)}
        self.response["status"] = "in_progress"
        self.on_change(self.response)
        yield "in_progress", {"response": dict(self.response)}

    def _events_of(self, delta: TextDelta) -> Iterator[Event]:
        yield from self._start()
        if self.names is not None and delta.logprobs:
            self._pending_logprobs += delta.logprobs[delta.num_reasoning_tokens :]
        # In merged deltas, the rest of an open call precedes the text after it.
        num_continued = next((at for at, call in enumerate(delta.tool_calls) if call.name is not None), None)
        for call in delta.tool_calls[:num_continued]:
            yield from self._continue_call(call.arguments)
        if delta.reasoning:
            yield from self._add_reasoning(delta.reasoning)
        if delta.text:
            yield from self._add_text(delta.text)
        for call in [] if num_continued is None else delta.tool_calls[num_continued:]:
            yield from self._add_call(call)
        if delta.finish_reason is not None:
            self._cut_off = delta.finish_reason == "length"

    def _complete(self) -> Iterator[Event]:
        yield from self._start()
        if not self.response["output"] or (self._space and self._kind == "message"):
            yield from self._add_message_text(self._space)
        yield from self._close("incomplete" if self._cut_off else "completed")
        if self._cut_off:
            yield from self._end_response("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            yield from self._end_response("completed", completed_at=int(time.time()))

    def _end_response(self, status: str, *, kind: str | None = None, **changes: Any) -> Iterator[Event]:
        self.response |= {"status": status, "usage": response_usage(self.tally), **changes}
        self.on_change(self.response)
        yield kind or status, {"response": self.response}

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        if self._kind != "reasoning":
            yield from self._open("reasoning", {"summary": [], "content": []})
        self._pieces.append(text)
        yield "reasoning_text.delta", self._place | {"delta": text}

    def _add_text(self, text: str) -> Iterator[Event]:
        if self.may_call:
            text = self._space + text
            stripped = text.rstrip()
            self._space = text[len(stripped) :]
            text = stripped
        if text:
            yield from self._add_message_text(text)

    def _add_message_text(self, text: str) -> Iterator[Event]:
        if self._kind != "message":
            yield from self._open("message", {"role": "assistant", "content": []})
        logprobs: list[dict[str, Any]] = []
        if self.names is not None:
            logprobs = chat_logprobs(self._pending_logprobs, self.names)
            self._pending_logprobs = []
            self._logprobs += logprobs
        if text:
            self._pieces.append(text)
            yield "output_text.delta", self._place | {"delta": text, "logprobs": logprobs}

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            fields = {"call_id": call.id, "name": call.name, "arguments": ""}
            yield from self._open("function_call", fields)
        yield from self._continue_call(call.arguments)

    def _continue_call(self, arguments: str) -> Iterator[Event]:
        if self._kind != "function_call":
            raise InternalError("A tool call went on after its end.")
        if arguments:
            self._pieces.append(arguments)
            yield "function_call_arguments.delta", self._item_place | {"delta": arguments}

    @property
    def _kind(self) -> str | None:
        return None if self._item is None else str(self._item["type"])

    @property
    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self.response["output"][-1]["id"], "output_index": len(self.response["output"]) - 1}

    @property
    def _place(self) -> dict[str, Any]:
        return self._item_place | {"content_index": 0}

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        if kind != "message":
            # Drop the white space that was held back, and log-probabilities of the delimiters of calls and reasoning.
            self._space, self._pending_logprobs = "", []
        self._item = {"id": new_item_id(kind, self.gateway_index), "type": kind, "status": "in_progress", **fields}
        self.response["output"].append(self._item)
        yield "output_item.added", {"output_index": len(self.response["output"]) - 1, "item": dict(self._item)}
        if kind in _TEXT_KINDS:
            yield "content_part.added", self._place | {"part": self._part("")}

    def _close(self, status: str) -> Iterator[Event]:
        item = self._item
        if item is None:
            return
        text = "".join(self._pieces)
        if (text_kind := _TEXT_KINDS.get(item["type"])) is None:
            yield "function_call_arguments.done", self._item_place | {"name": item["name"], "arguments": text}
            item["arguments"] = text
        else:
            part = self._part(text)
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            yield f"{text_kind}.done", self._place | {"text": text, **logprobs}
            yield "content_part.done", self._place | {"part": part}
            item["content"] = [part]
            if self.packs_reasoning and item["type"] == "reasoning":
                item["encrypted_content"] = packed_reasoning(text)
        item["status"] = status
        yield "output_item.done", {"output_index": len(self.response["output"]) - 1, "item": item}
        self._item, self._pieces, self._logprobs = None, [], []

    def _part(self, text: str) -> dict[str, Any]:
        """Return the content of the open message or reasoning."""
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


def _error(error: PeltonError) -> dict[str, Any]:
    """Return the error object of a response. OpenAI has few codes, so `type` carries the code of the error."""
    if isinstance(error, RateLimitError):
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if error.status < 500 else "server_error"
    return {"code": code, "message": error.message, "param": error.param, "type": error.code or error.type}


def stream_failure(error: PeltonError, number: int) -> bytes:
    """Return the event that ends a stream after `number` events although its response may continue."""
    fields = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
    return b"event: error\ndata: %b\n\n" % dump_json({**fields, "sequence_number": number})


def stored_items(items: Iterable[dict[str, Any]]) -> bytes:
    """Encode items for storage, without duplicate data and without log-probabilities, which are not used later."""
    return cached_json([_without_redundancy(item) for item in items])


def _without_redundancy(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {name: value for name, value in item.items() if name != "encrypted_content"}
    if item["type"] != "message":
        return item
    parts = [{name: value for name, value in part.items() if name != "logprobs"} for part in item["content"]]
    return {**item, "content": parts}
