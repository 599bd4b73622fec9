"""Helpers that read a text with a format's parser, and sample messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.text.formats import TOOL_FORMATS
from gateway.text.message_parser import ToolCallDelta, ToolParser
from gateway.text.tools.format import Tool, ToolFormat

NAMES = ("get_weather", "f", "search-web")
TOOLS = tuple(Tool(name=name) for name in NAMES)
FORMATS = sorted(TOOL_FORMATS)
WHOLE_ANSWERS = {"json", "llama3_json", "pythonic"}
"""Formats whose calls are no calls when text stands before them."""


@dataclass
class Found:
    """Complete message: content and calls."""

    content: str
    calls: list[tuple[str, str]]
    num_complete: int

    @property
    def values(self) -> list[tuple[str, Any]]:
        """Calls with parsed arguments."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(parser: ToolParser, pieces: Iterable[str]) -> Found:
    """Push the pieces and check that the deltas have OpenAI's shape."""
    content: list[str] = []
    deltas: list[ToolCallDelta] = []
    for piece in pieces:
        text, news = parser.push(piece)
        content.append(text)
        deltas += news
    text, news = parser.finish()
    content.append(text)
    deltas += news
    return Found("".join(content), calls_of(deltas), parser.num_complete)


def calls_of(deltas: Sequence[ToolCallDelta]) -> list[tuple[str, str]]:
    """Return the name and arguments of each call."""
    calls: list[list[str]] = []
    ids = set()
    for delta in deltas:
        if delta.id is not None:
            assert delta.name and delta.arguments == "" and delta.index == len(calls)
            assert delta.id not in ids
            ids.add(delta.id)
            calls.append([delta.name, ""])
        else:
            assert delta.name is None and delta.index == len(calls) - 1
            calls[delta.index][1] += delta.arguments
    return [(name, arguments) for name, arguments in calls]


def read_with(form: ToolFormat, *pieces: str) -> Found:
    """Read the pieces with a new parser."""
    return read(form.new_parser(TOOLS), pieces)
