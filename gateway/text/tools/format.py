"""What the formats of tool calls have in common: the tools of a request, and the interface of a format."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gateway.text.grammars.grammar import Fragment
from gateway.text.message_parser import ToolParser

MAX_PARALLEL_CALLS = 64
"""Calls that a grammar allows in one message: a weak model would else repeat itself up to max_tokens."""

CallArguments = Mapping[str, Any] | str
"""Of a call that was made before: an object, or what a model wrote that is none."""

_ALPHANUMERICS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object. A function without one takes no arguments.
        strict: the arguments are held to the schema also where the model calls of its own accord, and to all of it:
            what a grammar cannot enforce is an error.
        place: the request field of the parameters, which errors name.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    place: str = "tools"

    def as_json(self) -> dict[str, Any]:
        """OpenAI's shape, which templates know."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """The tools of a request, and which of them the model may or must call.

    Attributes:
        tools: all that the prompt shows.
        callable: those that may be called: all, what `allowed_tools` lists, or the one that tool_choice names.
        choice: `none`: no calls, and no tools in the prompt; `auto`: as the model likes; `required`: at least one;
            `named`: exactly one, of the only callable tool.
        parallel: more than one call may be made.
    """

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    choice: Literal["none", "auto", "required", "named"]
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Whether the message is nothing but calls."""
        return self.choice in ("required", "named")

    @property
    def constrained(self) -> bool:
        """Whether what the model writes has to be held to a grammar."""
        if self.choice == "none":
            return False
        free = self.choice == "auto" and self.parallel and len(self.callable) == len(self.tools)
        return not free or any(tool.strict for tool in self.callable)


class ToolFormat(Protocol):
    """How a family of models writes tool calls. Formats inherit what most have in common.

    Attributes:
        name: as `--tool-call-parser` takes it.
        marks: texts that the parser must see; where one is a special token of the model, that token is shown.
    """

    name: str
    marks: tuple[str, ...] = ()

    def new_parser(self, tools: Sequence[Tool]) -> ToolParser:
        """A parser for one choice. Where only its shape tells a call from content (no mark does), it is a call if
        it names one of these tools; behind a mark any name is a call."""
        ...

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """One call, or one or more where `parallel`, in the model's own syntax, and nothing else.

        Args:
            tools: what may be called; arguments follow each tool's schema.
            special_ids: text of each special token -> its id.
        """
        ...

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """Any text, in which what begins like a call is one. Arguments follow the schemas of strict tools; those
        of others are any JSON object. Arguments as in call_grammar."""
        ...

    def new_call_id(self) -> str:
        """A fresh id of a call, of the form that the model's template takes; by default as OpenAI makes them."""
        return "call_" + random_id(24)

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """Calls (name and arguments) as the model would write them, for templates that cannot."""
        ...


def random_id(length: int) -> str:
    """Letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(length))


NewId = Callable[[], str]
