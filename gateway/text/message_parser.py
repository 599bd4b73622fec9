"""Interfaces for parsing a model's text into reasoning, content and tool calls.

All parsers are incremental and give the same message however the text is divided into pieces. Their time is linear in
the text, whatever the model generates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True):
    """Change of one tool call.

    Attributes:
        index: Index of the call within its choice, from 0.
        arguments: Next piece of its arguments, JSON text; the concatenated pieces parse if the call is complete.
        id: Id of the call; in its first delta only.
        name: Name of the function; in its first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ReasoningSplitter(Protocol):
    """Splitter of one choice's text into reasoning and visible text."""

    @property
    def in_reasoning(self) -> bool:
        """True if the next text is reasoning, as far as is known."""
        ...

    @property
    def done(self) -> bool:
        """True if all further text is visible text, so that the splitter is no longer needed."""
        ...

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece; return the reasoning and the visible text that are safe to show."""
        ...

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back at the end."""
        ...


class ToolParser(Protocol):
    """Parser of tool calls in the visible text of one choice."""

    @property
    def num_complete(self) -> int:
        """Number of calls whose arguments are complete."""
        ...

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Take the next piece; return the content that is safe to show, and changes of calls."""
        ...

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Return what was held back at the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """Parsers for the choices of a request; each choice gets new ones.

    Attributes:
        new_splitter: Factory of splitters; None if the model's text has no separate reasoning.
        new_tool_parser: Factory of parsers; None if the request has no tools, and calls are content.
        shown_ids: Special tokens whose text the parsers need although skip_special_tokens hides others, also at
            the end of a choice.
        named_tool: tool_choice names a function, so the finish reason is `stop`, as OpenAI documents.
        only_calls: A grammar demands calls, so no visible text is content; a call cut by a limit is the beginning
            of a call.
    """

    new_splitter: Callable[[], ReasoningSplitter] | None = None
    new_tool_parser: Callable[[], ToolParser] | None = None
    shown_ids: frozenset[int] = frozenset()
    named_tool: bool = False
    only_calls: bool = False

    @property
    def parses(self) -> bool:
        """True if the text is parsed at all."""
        return self.new_splitter is not None or self.new_tool_parser is not None
