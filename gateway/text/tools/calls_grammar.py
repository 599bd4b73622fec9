"""Parts of call grammars that several formats share. Their rules begin with `t_`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from gateway.text.grammars.grammar import Fragment, any_of, literal
from gateway.text.tools.format import MAX_PARALLEL_CALLS, Tool
from gateway.text.tools.schema import (
    ANY_OBJECT,
    arguments_expression,
    arguments_schema,
    definitions,
    refers_elsewhere,
    value_expression,
)

ANY_TEXT = r"/(?s:.*)/"

Arguments = Callable[[Tool], str]
"""Function that returns the expression of a tool's arguments."""


def enforced_arguments(tool: Tool) -> str:
    """Return arguments that follow the tool's schema."""
    return arguments_expression(tool)


def free_arguments(tool: Tool) -> str:
    """Return the arguments of a call that the model may make or not: only strict tools enforce their schemas."""
    return enforced_arguments(tool) if tool.strict else ANY_OBJECT


def object_call(tool: Tool, arguments: str, key: str = "arguments", *, before: str = "") -> str:
    """Return `{"name": ..., "arguments": ...}` with the text before it.

    llguidance takes the longest lexeme. If other text is allowed in the same place, the first lexeme of the call must
    extend to the point where the two differ.
    """
    head = f'{before}{{"name": {json.dumps(tool.name)}, {json.dumps(key)}: '
    return f'{json.dumps(head)} {arguments} "}}"'


def json_call(tool: Tool, key: str) -> str:
    """Return the same call as JSON, which llguidance can distinguish from other JSON."""
    arguments = arguments_schema(tool)
    if refers_elsewhere(arguments):
        return object_call(tool, enforced_arguments(tool), key)
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
        **definitions(arguments),
    }
    return value_expression(schema, tool, whitespace=None)


def call_rules(tools: Sequence[Tool], expression: Callable[[Tool], str], rule: str = "t_call") -> tuple[str, ...]:
    """Return a rule with this name for one call of any of the tools."""
    names = [f"{rule}_{index}" for index in range(len(tools))]
    bodies = [f"{name}: {expression(tool)}" for name, tool in zip(names, tools)]
    return (f"{rule}: {' | '.join(names)}", *bodies)


def repeated(first: str, following: str, *, parallel: bool) -> str:
    """Return one call, or several if `parallel`, where each further call has the form `following`."""
    return f"{first} ({following}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else first


def triggered(
    mark: str, special_ids: Mapping[str, int], rest: str, rules: Iterable[str], *, parallel: bool
) -> Fragment:
    """Return free text in which the mark begins calls.

    Args:
        mark: Mark before a call.
        special_ids: Id by text of each special token.
        rest: Expression after a mark.
        rules: Rules that `rest` uses.
        parallel: Several calls may follow one another, with text between them; otherwise the first call ends the
            message.
    """
    spelled = literal(mark, special_ids)
    # A lazy lexeme ends as early as possible, so free text cannot consume a mark. Special tokens are not text.
    head = f"t_head: T_TEXT {spelled}" if spelled.startswith("<[") else f"t_head[lazy]: T_TEXT {spelled}"
    body = "t_part* T_TEXT" if parallel else any_of(["t_part", "T_TEXT"])
    return Fragment(body, (f"T_TEXT: {ANY_TEXT}", head, f"t_part: t_head {rest}", *rules))


def text_unless(pattern: str, calls: Fragment) -> Fragment:
    """Return a message that consists of calls, or of text that does not begin with a match of the pattern."""
    text = f"T_TEXT: {ANY_TEXT} & ~/({pattern})(?s:.*)/"
    return Fragment(any_of(["T_TEXT", calls.expression]), (text, *calls.rules))
