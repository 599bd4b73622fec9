"""How a model's text is taken apart into reasoning, content and tool calls: the seams between those who know a format,
those who run a choice, and those who shape responses.

All parsers are incremental and the same for streams and whole responses: any cutting of a text into pieces gives the
same message. Their time is linear in the text, whatever a model writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True):
    """News of one tool call.

    Attributes:
        index: its place among the choice's calls, from 0.
        arguments: what follows of its arguments, JSON text; all pieces together parse where the call is complete.
        id, name: set in the first delta of a call, None later.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ReasoningSplitter(Protocol):
    """Separates reasoning from what is said aloud, for one choice."""

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        ...

    @property
    def done(self) -> bool:
        """Whether all that follows is said aloud, so that nobody need ask any more."""
        ...

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next piece; returns what is safe to show of reasoning, and of the rest."""
        ...

    def finish(self) -> tuple[str, str]:
        """What was held back when the text ended."""
        ...


class ToolParser(Protocol):
    """Finds tool calls in what is said aloud, for one choice."""

    @property
    def num_complete(self) -> int:
        """Calls whose arguments are whole."""
        ...

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Takes the next piece; returns content that is safe to show, and news of calls."""
        ...

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """What was held back when the text ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """What a request's choices are parsed with; a new parser for each choice.

    Attributes:
        new_splitter: None: the model's text has no reasoning apart.
        new_tool_parser: None: the request has no tools, and calls are content.
        shown_ids: special tokens whose text the parsers must see although skip_special_tokens hides others; also
            where such a token ends the choice.
        named_tool: tool_choice names a function, so that the finish reason is `stop`, as OpenAI documents.
        only_calls: a grammar demands calls, so that nothing that is said aloud is content; what a limit cuts off is the
            beginning of a call.
    """

    new_splitter: Callable[[], ReasoningSplitter] | None = None
    new_tool_parser: Callable[[], ToolParser] | None = None
    shown_ids: frozenset[int] = frozenset()
    named_tool: bool = False
    only_calls: bool = False

    @property
    def parses(self) -> bool:
        """Whether anything is looked for at all."""
        return self.new_splitter is not None or self.new_tool_parser is not None
