"""Pieces of the grammars of calls that several formats share. Their rules begin with `t_`."""

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
"""The expression of a tool's arguments."""


def enforced_arguments(tool: Tool) -> str:
    """Arguments that follow the tool's schema."""
    return arguments_expression(tool)


def free_arguments(tool: Tool) -> str:
    """Arguments of a call that the model makes of its own accord: only strict tools hold it to their schemas."""
    return enforced_arguments(tool) if tool.strict else ANY_OBJECT


def object_call(tool: Tool, arguments: str, key: str = "arguments", *, before: str = "") -> str:
    """`{"name": ..., "arguments": ...}`, and what stands before it: llguidance takes the longest lexeme that it finds,
    so where there is another text that it may also be, its first lexeme has to reach to where they differ."""
    head = f'{before}{{"name": {json.dumps(tool.name)}, {json.dumps(key)}: '
    return f'{json.dumps(head)} {arguments} "}}"'


def json_call(tool: Tool, key: str) -> str:
    """The same as JSON, of which llguidance can tell it from other JSON."""
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
    """A rule with this name for one call of any of the tools."""
    names = [f"{rule}_{index}" for index in range(len(tools))]
    bodies = [f"{name}: {expression(tool)}" for name, tool in zip(names, tools)]
    return (f"{rule}: {' | '.join(names)}", *bodies)


def repeated(first: str, following: str, *, parallel: bool) -> str:
    """One call, or also more, each in the form of those that follow another."""
    return f"{first} ({following}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else first


def triggered(
    mark: str, special_ids: Mapping[str, int], rest: str, rules: Iterable[str], *, parallel: bool
) -> Fragment:
    """Free text in which the mark begins calls.

    Args:
        rest: the expression of what follows a mark.
        parallel: calls may stand one after another, with text between them; else the first one ends the message.
    """
    spelled = literal(mark, special_ids)
    # A lazy lexeme ends as soon as it can, so that free text cannot swallow a mark. Special tokens are no text.
    head = f"t_head: T_TEXT {spelled}" if spelled.startswith("<[") else f"t_head[lazy]: T_TEXT {spelled}"
    body = "t_part* T_TEXT" if parallel else any_of(["t_part", "T_TEXT"])
    return Fragment(body, (f"T_TEXT: {ANY_TEXT}", head, f"t_part: t_head {rest}", *rules))


def text_unless(pattern: str, calls: Fragment) -> Fragment:
    """A message that is calls, or text that does not begin with what the pattern matches."""
    text = f"T_TEXT: {ANY_TEXT} & ~/({pattern})(?s:.*)/"
    return Fragment(any_of(["T_TEXT", calls.expression]), (text, *calls.rules))
