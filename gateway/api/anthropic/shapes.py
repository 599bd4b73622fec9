"""Conversion of a generation's deltas to Anthropic's content blocks, and of these to a message or its events."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway.api.common.envelope import Envelope, Tally
from gateway.api.common.reasoning import packed_reasoning
from gateway.flow.events import TextDelta
from gateway.http.errors import ErrorShape, dump_json
from shared.errors import PeltonError

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
INVALID_INPUT = "INVALID_JSON"
"""Key of a call's arguments in a complete message if they are not a JSON object. Anthropic uses it, too."""
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_COMMENT = b": keep-alive\n\n"
_DELTAS = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}
"""Type of the delta of each kind of block, and the name of its text."""


Event = dict[str, Any]
"""Event of a content block, as a stream shows it."""


class BlockFeed:
    """Conversion of the deltas of a choice to a sequence of blocks, each of one kind.

    White space alone does not start a text block. It is held back until more text follows, and dropped between calls
    and between reasoning and a call.

    Args:
        shows_thinking: False to leave thinking blocks empty. Their signatures then carry the thinking, so that the
            model reads it when the client sends the blocks back.
    """

    __slots__ = ("_digest", "_held", "_hidden", "_kind", "_next", "_shows_thinking")

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._next = 0
        self._kind: str | None = None
        self._held = ""
        self._hidden: list[str] = []
        self._digest = hashlib.sha256()

    @property
    def text_index(self) -> int | None:
        """Index of the open block if it is a text block, else None."""
        return self._next - 1 if self._kind == TEXT else None

    def add(self, delta: TextDelta) -> Iterator[Event]:
        """Yield the block events for a delta."""
        if delta.reasoning:
            if self._kind != THINKING:
                yield from self._open(THINKING, {"type": THINKING, "thinking": "", "signature": ""})
                self._digest, self._hidden = hashlib.sha256(), []
            if self._shows_thinking:
                self._digest.update(delta.reasoning.encode("utf-8", "replace"))
                yield self._extended(delta.reasoning)
            else:
                self._hidden.append(delta.reasoning)
        if delta.text:
            yield from self._add_text(delta.text)
        for call in delta.tool_calls:
            if call.name is not None:
                block = {"type": TOOL_USE, "id": _tool_use_id(call.id), "name": call.name, "input": {}}
                yield from self._open(TOOL_USE, block)
            if call.arguments:
                yield self._extended(call.arguments)

    def close(self) -> Iterator[Event]:
        """Yield the end of the open block, if there is one."""
        self._held = ""
        if self._kind is not None:
            if self._kind == THINKING:
                # Clients drop thinking without a signature. It authenticates nothing: for visible thinking it is a
                # digest, which is not checked when the client sends it back; for hidden thinking it contains the
                # thinking.
                yield self._delta({"type": "signature_delta", "signature": self._signature()})
            self._kind = None
            yield {"type": "content_block_stop", "index": self._next - 1}

    def _signature(self) -> str:
        if self._shows_thinking:
            return base64.b64encode(self._digest.digest()).decode()
        return packed_reasoning("".join(self._hidden))

    def _add_text(self, text: str) -> Iterator[Event]:
        if self._kind != TEXT:
            text = self._held + text
            if text.isspace():
                self._held = text
                return
            yield from self._open(TEXT, {"type": TEXT, "text": ""})
        yield self._extended(text)

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._kind = kind
        self._next += 1
        yield {"type": "content_block_start", "index": self._next - 1, "content_block": block}

    def _extended(self, text: str) -> Event:
        kind, name = _DELTAS[self._kind or TEXT]
        return self._delta({"type": kind, name: text})

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._next - 1, "delta": delta}


def complete_blocks(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the blocks that a complete sequence of events describes."""
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            pieces = []
        elif event["type"] == "content_block_stop":
            block, text = blocks[-1], "".join(pieces)
            if block["type"] == TOOL_USE:
                block["input"] = _parse_arguments(text)
            else:
                block[block["type"]] = text
        elif event["delta"]["type"] == "signature_delta":
            blocks[-1]["signature"] = event["delta"]["signature"]
        else:
            pieces.append(event["delta"][_DELTAS[blocks[-1]["type"]][1]])
    return blocks


def _tool_use_id(call_id: str | None) -> str:
    """Return the id of a call in Anthropic's form."""
    return "toolu_" + (call_id or "").removeprefix("call_")


def _parse_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. The text of a model may be invalid or truncated JSON."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_INPUT: text}


@dataclass(slots=True, kw_only=True)
class Ending:
    """Stop reason of a message in Anthropic's terms.

    Attributes:
        beyond_context: True if max_tokens was larger than the room in the context.
        named_tool: True if the request named the tool to call. Chat then finishes with `stop`.
        reason: The stop reason; None before the end.
        sequence: The stop sequence that ended the message, if one did.
    """

    beyond_context: bool = False
    named_tool: bool = False
    reason: str | None = None
    sequence: str | None = None

    def set_reason(self, delta: TextDelta) -> None:
        """Set the stop reason from the last delta of the choice."""
        if isinstance(delta.stop_reason, str):
            self.reason, self.sequence = "stop_sequence", delta.stop_reason
        elif delta.finish_reason == "length":
            self.reason = "model_context_window_exceeded" if self.beyond_context else "max_tokens"
        else:
            called = delta.finish_reason == "tool_calls" or self.named_tool
            self.reason = "tool_use" if called else "end_turn"

    def fields(self) -> dict[str, Any]:
        """Return the fields of a message or of its last delta."""
        return {"stop_reason": self.reason, "stop_sequence": self.sequence}


def usage(tally: Tally) -> dict[str, Any]:
    """Return Anthropic's usage object. Its input tokens exclude tokens found in the prefix cache."""
    result: dict[str, Any] = {
        "input_tokens": tally.num_prompt_tokens - tally.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tally.num_cached_tokens,
        "output_tokens": tally.num_completion_tokens,
    }
    if tally.num_reasoning_tokens is not None:
        result["output_tokens_details"] = {"thinking_tokens": tally.num_reasoning_tokens}
    return result


def message(envelope: Envelope, content: list[dict[str, Any]], ending: Ending, tally: Tally) -> dict[str, Any]:
    """Return a message object."""
    return {
        "id": envelope.identifier,
        "type": "message",
        "role": "assistant",
        "model": envelope.model,
        "content": content,
        **ending.fields(),
        "usage": {**usage(tally), "service_tier": "standard"},
    }


async def whole_message(
    envelope: Envelope, events: AsyncIterator[tuple[int, int, TextDelta]], tally: Tally, ending: Ending, feed: BlockFeed
) -> dict[str, Any]:
    """Collect all events into a message."""
    block_events: list[Event] = []
    async for _, _, delta in events:
        block_events += feed.add(delta)
        if delta.finish_reason is not None:
            ending.set_reason(delta)
    block_events += feed.close()
    return message(envelope, complete_blocks(block_events), ending, tally)


@dataclass(slots=True)
class MessageEvents:
    """Encoder of Anthropic's events; see gateway.http.sse.Encoder.

    While text follows text, a token costs one string encoding and one concatenation.
    """

    envelope: Envelope
    tally: Tally
    ending: Ending
    feed: BlockFeed
    error_shape: ErrorShape
    _has_started: bool = field(default=False, init=False)
    _text_head: bytes = field(default=b"", init=False)

    def encode(self, _index: int, _prompt_index: int, delta: TextDelta) -> bytes:
        """Return the framed events for a delta; empty if there is nothing to send yet."""
        if self._text_head and delta.finish_reason is None and not (delta.reasoning or delta.tool_calls):
            return b"%b%b}}\n\n" % (self._text_head, dump_json(delta.text)) if delta.text else b""
        start = b"" if self._has_started else self._start()
        events = b"".join([_framed(event) for event in self.feed.add(delta)])
        index = self.feed.text_index
        self._text_head = b"" if index is None else _text_head(index)
        if delta.finish_reason is not None:
            self.ending.set_reason(delta)
        return start + events

    def _start(self) -> bytes:
        self._has_started = True
        first = message(self.envelope, [], Ending(), self.tally)
        return _framed({"type": "message_start", "message": first}) + PING

    def end(self) -> bytes:
        """Return the events that end the last block and the message."""
        events = b"".join([_framed(event) for event in self.feed.close()])
        delta = {"type": "message_delta", "delta": self.ending.fields(), "usage": usage(self.tally)}
        return events + _framed(delta) + _framed({"type": "message_stop"})

    def failed(self, error: PeltonError) -> bytes:
        """Return the error event that ends the stream."""
        return _framed(self.error_shape(error)[1])

    def keep_alive(self) -> bytes:
        """Return a ping once the message has started, else a comment."""
        return PING if self._has_started else _COMMENT


def _text_head(index: int) -> bytes:
    head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
    return head % index + b'{"type":"text_delta","text":'


def _framed(value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), dump_json(value))
