"""What an assistant's message is made of, beside its content: reasoning and tool calls, in chunks and whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.flow.events import TextDelta
from gateway.http.errors import dump_json
from gateway.text.message_parser import ToolCallDelta


def reasoning_delta(text: str) -> bytes:
    """The fields of a delta for a piece of reasoning, under both names that clients know."""
    data = dump_json(text)
    return b'"reasoning_content":' + data + b',"reasoning":' + data


def call_deltas(news: list[ToolCallDelta]) -> Iterator[bytes]:
    """The field `tool_calls` of one delta each, in OpenAI's shape: a call begins with its id and name and without
    arguments; what follows has the index and more of the arguments, and nothing else."""
    for call in news:
        if call.name is not None:
            begin = {"name": call.name, "arguments": ""}
            yield _call_delta({"index": call.index, "id": call.id, "type": "function", "function": begin})
        if call.arguments:
            yield _call_delta({"index": call.index, "function": {"arguments": call.arguments}})


def _call_delta(entry: dict[str, Any]) -> bytes:
    return b'"tool_calls":[' + dump_json(entry) + b"]"


class MessageBuilder:
    """Collects the deltas of a choice into its whole message."""

    __slots__ = ("_arguments", "_calls", "_reasoning", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: TextDelta) -> None:
        """The next delta of the choice."""
        self._texts.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.name is not None:
                self._calls.append({"id": call.id, "type": "function", "function": {"name": call.name}})
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)

    def message(self, *, show_reasoning: bool) -> dict[str, Any]:
        """OpenAI's message. Its content is null where it has calls and says nothing."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        if self._reasoning and show_reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        for call, pieces in zip(self._calls, self._arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        return message
