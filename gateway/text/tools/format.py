"""Tools of a request, and the interface of tool-call formats."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gateway.text.grammars.grammar import Fragment
from gateway.text.message_parser import ToolParser

MAX_PARALLEL_CALLS = 64
"""Maximum number of calls that a grammar allows in one message.

Without it a weak model would repeat itself up to max_tokens.
"""

CallArguments = Mapping[str, Any] | str
"""Arguments of an earlier call: an object, or the model's text if it was not an object."""

NewId = Callable[[], str]

_ALPHANUMERICS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Function that the model may call.

    Attributes:
        name: Name of the function.
        description: Description for the model.
        parameters: JSON schema of its arguments, an object. A function without a schema takes no arguments.
        strict: Enforce the whole schema also when the model may choose whether to call; unenforceable parts are
            errors.
        place: Request field of the parameters, which errors name.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    place: str = "tools"

    def as_json(self) -> dict[str, Any]:
        """Return the tool in OpenAI's shape, which templates expect."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """Tools of a request, and which of them the model may or must call.

    Attributes:
        tools: All tools that the prompt shows.
        callable: Tools that may be called: all, those that `allowed_tools` lists, or the one that tool_choice
            names.
        choice: `none`: no calls, and no tools in the prompt; `auto`: the model decides; `required`: at least one
            call; `named`: exactly one call of the only callable tool.
        parallel: The model may make more than one call.
    """

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    choice: Literal["none", "auto", "required", "named"]
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """True if the message consists of calls only."""
        return self.choice in ("required", "named")

    @property
    def constrained(self) -> bool:
        """True if a grammar must constrain the model's output."""
        if self.choice == "none":
            return False
        free = self.choice == "auto" and self.parallel and len(self.callable) == len(self.tools)
        return not free or any(tool.strict for tool in self.callable)


class ToolFormat(Protocol):
    """Format in which a family of models writes tool calls. The base class implements what most formats share.

    Attributes:
        name: Name for `--tool-call-parser`.
        marks: Texts that the parser must see. If one is a special token of the model, that token is shown.
        parser: Factory of parsers.
    """

    name: str
    marks: tuple[str, ...] = ()
    parser: Callable[[NewId, Sequence[Tool]], ToolParser]

    def new_parser(self, tools: Sequence[Tool]) -> ToolParser:
        """Return a parser for one choice.

        After a mark, any name is a call. Where only its shape distinguishes a call from content, it is a call only if
        it names one of these tools.
        """
        return self.parser(self.new_call_id, tools)

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """Return the grammar of a message of calls only, whose arguments follow the schemas of their tools.

        Args:
            tools: Tools that may be called.
            special_ids: Id by text of each special token.
            parallel: Allow several calls; otherwise exactly one.
        """
        ...

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """Return the grammar of any text in which whatever begins like a call is one.

        Arguments of strict tools follow their schemas; those of others are any JSON object. See call_grammar for the
        arguments.
        """
        ...

    def new_call_id(self) -> str:
        """Return a new id of a call in the form that the model's template accepts; by default in OpenAI's form."""
        return "call_" + random_id(24)

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """Return calls (name and arguments) as the model would write them, for templates that cannot render them."""
        ...


def random_id(length: int) -> str:
    """Return random letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(length))
