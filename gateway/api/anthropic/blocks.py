"""What a model says as Anthropic's content blocks: one after another, each of one kind."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gateway.api.common.reasoning import packed_reasoning, unpacked_reasoning
from gateway.flow.events import TextDelta
from shared.errors import InvalidRequestError

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
INVALID_INPUT = "INVALID_JSON"
"""The key under which a whole answer shows the arguments of a call that are no JSON object; Anthropic's own idiom."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins; it is empty."""

    index: int
    block: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grown:
    """More of a block's text, thinking, or input as JSON text."""

    index: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is whole. Thinking has a signature, since clients drop thinking without one; it proves nothing. Of
    thinking that is shown it is a digest, which nobody looks at when it comes back; else it holds the thinking."""

    index: int
    signature: str | None


BlockNews = Opened | Grown | Closed


class BlockFeed:
    """Makes blocks of the deltas of a choice.

    White space alone is no block: it is held back until more follows, and what stands between calls, or between
    reasoning and a call, is dropped with it.

    Args:
        shows_thinking: else blocks of thinking are empty, and their signatures bring it back to the model.
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
        """The index of the open block, where it is text."""
        return self._next - 1 if self._kind == TEXT else None

    def add(self, delta: TextDelta) -> Iterator[BlockNews]:
        """The news of one delta."""
        if delta.reasoning:
            if self._kind != THINKING:
                yield from self._open(THINKING, {"type": THINKING, "thinking": "", "signature": ""})
                self._digest, self._hidden = hashlib.sha256(), []
            if self._shows_thinking:
                self._digest.update(delta.reasoning.encode("utf-8", "replace"))
                yield Grown(self._next - 1, THINKING, delta.reasoning)
            else:
                self._hidden.append(delta.reasoning)
        if delta.text:
            yield from self._add_text(delta.text)
        for call in delta.tool_calls:
            if call.name is not None:
                block = {"type": TOOL_USE, "id": _tool_use_id(call.id), "name": call.name, "input": {}}
                yield from self._open(TOOL_USE, block)
            if call.arguments:
                yield Grown(self._next - 1, TOOL_USE, call.arguments)

    def close(self) -> Iterator[BlockNews]:
        """Nothing follows."""
        self._held = ""
        if self._kind is not None:
            signature = self._signature() if self._kind == THINKING else None
            self._kind = None
            yield Closed(self._next - 1, signature)

    def _signature(self) -> str:
        if self._shows_thinking:
            return base64.b64encode(self._digest.digest()).decode()
        return packed_reasoning("".join(self._hidden))

    def _add_text(self, text: str) -> Iterator[BlockNews]:
        if self._kind != TEXT:
            text = self._held + text
            if text.isspace():
                self._held = text
                return
            yield from self._open(TEXT, {"type": TEXT, "text": ""})
        yield Grown(self._next - 1, TEXT, text)

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[BlockNews]:
        yield from self.close()
        self._kind = kind
        self._next += 1
        yield Opened(self._next - 1, block)


class BlockBuilder:
    """Collects the news of a feed into whole blocks."""

    __slots__ = ("_blocks", "_pieces")

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[list[str]] = []

    def add(self, news: BlockNews) -> None:
        """The next news."""
        if isinstance(news, Opened):
            self._blocks.append(news.block)
            self._pieces.append([])
        elif isinstance(news, Grown):
            self._pieces[news.index].append(news.text)
        elif news.signature is not None:
            self._blocks[news.index]["signature"] = news.signature

    def content(self) -> list[dict[str, Any]]:
        """All blocks."""
        for block, pieces in zip(self._blocks, self._pieces, strict=True):
            text = "".join(pieces)
            if block["type"] == TOOL_USE:
                block["input"] = _input(text)
            else:
                block[block["type"]] = text
        return self._blocks


def _tool_use_id(call_id: str | None) -> str:
    """The id of a call in Anthropic's form."""
    return "toolu_" + (call_id or "").removeprefix("call_")


def hidden_thinking(signature: str) -> str:
    """The thinking that a signature of this server's holds; empty where it is of another kind, or of another server."""
    try:
        return unpacked_reasoning(signature, "signature")
    except InvalidRequestError:
        return ""


def _input(text: str) -> dict[str, Any]:
    """The arguments of a call. A model's text need not be JSON, or whole."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_INPUT: text}
