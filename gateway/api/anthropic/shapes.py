"""/v1/messages: events to a whole message, or to Anthropic's typed events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from gateway.api.anthropic.blocks import THINKING, TOOL_USE, BlockBuilder, BlockFeed, BlockNews, Grown, Opened
from gateway.api.common.envelope import Envelope, Tally
from gateway.flow.events import TextDelta
from gateway.http.errors import ErrorBodies, dump_json
from shared.errors import PeltonError

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_COMMENT = b": keep-alive\n\n"
_DELTAS = {THINKING: ("thinking_delta", "thinking"), TOOL_USE: ("input_json_delta", "partial_json")}


class Ending:
    """Why a message ended, in Anthropic's words.

    Args:
        beyond_context: more tokens were asked for than the context has room for.
        named_tool: the call of one tool was asked for, which chat ends with `stop`.
    """

    __slots__ = ("_beyond_context", "_named_tool", "reason", "sequence")

    def __init__(self, *, beyond_context: bool = False, named_tool: bool = False) -> None:
        self._beyond_context = beyond_context
        self._named_tool = named_tool
        self.reason: str | None = None
        self.sequence: str | None = None

    def settle(self, delta: TextDelta) -> None:
        """Takes the reason of a choice's last delta."""
        if isinstance(delta.stop_reason, str):
            self.reason, self.sequence = "stop_sequence", delta.stop_reason
        elif delta.finish_reason == "length":
            self.reason = "model_context_window_exceeded" if self._beyond_context else "max_tokens"
        else:
            called = delta.finish_reason == "tool_calls" or self._named_tool
            self.reason = "tool_use" if called else "end_turn"

    def fields(self) -> dict[str, Any]:
        """The fields of a message or of its last delta."""
        return {"stop_reason": self.reason, "stop_sequence": self.sequence}


def usage(tally: Tally) -> dict[str, Any]:
    """Anthropic's usage object: tokens found in the prefix cache are not among the input tokens."""
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
    """A message, whole or as it begins."""
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
    """Collects all events into a message."""
    builder = BlockBuilder()
    async for _, _, delta in events:
        for news in feed.add(delta):
            builder.add(news)
        if delta.finish_reason is not None:
            ending.settle(delta)
    for news in feed.close():
        builder.add(news)
    return message(envelope, builder.content(), ending, tally)


class MessageEvents:
    """Encodes events as Anthropic's; see gateway.http.sse.Encoder. While text follows text, a token costs one string
    encoding and a concatenation."""

    __slots__ = ("_begun", "_ending", "_envelope", "_errors", "_feed", "_tally", "_text_head")

    def __init__(self, envelope: Envelope, tally: Tally, ending: Ending, feed: BlockFeed, errors: ErrorBodies) -> None:
        self._envelope = envelope
        self._tally = tally
        self._ending = ending
        self._errors = errors
        self._feed = feed
        self._begun = False
        self._text_head = b""

    def encode(self, _index: int, _prompt_index: int, delta: TextDelta) -> bytes:
        """The events of one delta; empty where it has nothing to show yet."""
        if self._text_head and delta.finish_reason is None and not (delta.reasoning or delta.tool_calls):
            return b"%b%b}}\n\n" % (self._text_head, dump_json(delta.text)) if delta.text else b""
        begin = b"" if self._begun else self._begin()
        events = b"".join([_event(news) for news in self._feed.add(delta)])
        index = self._feed.text_index
        self._text_head = b"" if index is None else _text_head(index)
        if delta.finish_reason is not None:
            self._ending.settle(delta)
        return begin + events

    def _begin(self) -> bytes:
        self._begun = True
        start = message(self._envelope, [], Ending(), self._tally)
        return _framed({"type": "message_start", "message": start}) + PING

    def end(self) -> bytes:
        """The end of the last block, and why the message ended."""
        events = b"".join([_event(news) for news in self._feed.close()])
        delta = {"type": "message_delta", "delta": self._ending.fields(), "usage": usage(self._tally)}
        return events + _framed(delta) + _framed({"type": "message_stop"})

    def failed(self, error: PeltonError) -> bytes:
        """The error event, after which nothing follows."""
        return _framed(self._errors.of_error(error)[1])

    def keep_alive(self) -> bytes:
        """What fills silence: a ping, once the message has begun."""
        return PING if self._begun else _COMMENT


def _event(news: BlockNews) -> bytes:
    if isinstance(news, Opened):
        return _framed({"type": "content_block_start", "index": news.index, "content_block": news.block})
    if isinstance(news, Grown):
        if news.kind not in _DELTAS:
            return b"%b%b}}\n\n" % (_text_head(news.index), dump_json(news.text))
        kind, name = _DELTAS[news.kind]
        return _framed({"type": "content_block_delta", "index": news.index, "delta": {"type": kind, name: news.text}})
    stop = _framed({"type": "content_block_stop", "index": news.index})
    if news.signature is None:
        return stop
    delta = {"type": "signature_delta", "signature": news.signature}
    return _framed({"type": "content_block_delta", "index": news.index, "delta": delta}) + stop


def _text_head(index: int) -> bytes:
    head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
    return head % index + b'{"type":"text_delta","text":'


def _framed(value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), dump_json(value))
