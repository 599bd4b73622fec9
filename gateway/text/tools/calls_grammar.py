"""Parts of call grammars that several formats share. Their rules begin with `t_`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.text.grammars.grammar import Fragment, any_of, literal
from gateway.text.tools.format import MAX_PARALLEL_CALLS, Tool, ToolFormat
from gateway.text.tools.schema import (
    ANY_OBJECT,
    ANY_VALUE,
    arguments_expression,
    arguments_schema,
    definitions,
    refers_elsewhere,
    value_expression,
)

ANY_TEXT = r"/(?s:.*)/"

_KEYWORD_SAFE = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "additionalProperties",
        "definitions",
        "description",
        "examples",
        "properties",
        "required",
        "title",
        "type",
    }
)
"""Keywords of schemas whose properties can be written one by one."""


def call_arguments(tool: Tool, *, free: bool) -> str:
    """Return the expression of a tool's arguments.

    Args:
        tool: The tool.
        free: The model may choose whether to call, so only strict tools enforce their schemas.
    """
    return ANY_OBJECT if free and not tool.strict else arguments_expression(tool)


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
        return object_call(tool, call_arguments(tool, free=False), key)
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
    expression = literal(mark, special_ids)
    # A lazy lexeme ends as early as possible, so free text cannot consume a mark. Special tokens are not text.
    head = f"t_head: T_TEXT {expression}" if expression.startswith("<[") else f"t_head[lazy]: T_TEXT {expression}"
    body = "t_part* T_TEXT" if parallel else any_of(["t_part", "T_TEXT"])
    return Fragment(body, (f"T_TEXT: {ANY_TEXT}", head, f"t_part: t_head {rest}", *rules))


class MarkedFormat(ToolFormat):
    """Base class of formats in which a mark begins calls. See ToolFormat.

    Attributes:
        separator: Text between two calls with a mark each; None if one mark begins all calls.
        repeats_mark: Text and a further mark may follow in free text.
    """

    separator: str | None = None
    repeats_mark = True

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        body, rules = self.after_mark(tools, special_ids, parallel=parallel, free=False)
        call = f"{literal(self.marks[0], special_ids)} {body}"
        if self.separator is None:
            return Fragment(call, rules)
        following = f"{json.dumps(self.separator)} {call}" if self.separator else call
        return Fragment(repeated(call, following, parallel=parallel), rules)

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        body, rules = self.after_mark(tools, special_ids, parallel=parallel, free=True)
        return triggered(self.marks[0], special_ids, body, rules, parallel=parallel and self.repeats_mark)

    def after_mark(
        self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool, free: bool
    ) -> tuple[str, tuple[str, ...]]:
        """Return the expression that follows the first of `marks`, and its rules. See call_arguments for `free`."""
        raise NotImplementedError


def text_unless(pattern: str, calls: Fragment) -> Fragment:
    """Return a message that consists of calls, or of text that does not begin with a match of the pattern."""
    text = f"T_TEXT: {ANY_TEXT} & ~/({pattern})(?s:.*)/"
    return Fragment(any_of(["T_TEXT", calls.expression]), (text, *calls.rules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """Notation of arguments.

    Attributes:
        is_name: Function that tells whether a name can be written without quotes.
        sign: Text between a name and its value.
        between: Text between two arguments.
        constant: Function that returns the text of True, False and None, and None for other values, which are
            JSON.
        spread: Text that turns one JSON object into all arguments, for schemas that cannot be written one by one.
    """

    is_name: Callable[[str], bool]
    sign: str
    between: str
    constant: Callable[[object], str | None]
    spread: str


def keyword_arguments(tool: Tool, notation: Notation, prefix: str, *, free: bool) -> Fragment:
    """Return the arguments of a tool.

    Args:
        tool: The tool.
        notation: Notation of the arguments.
        prefix: Prefix of the names of rules.
        free: Allow any arguments whatever the schema says.
    """
    if free:
        pair = f"{prefix}_pair: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {json.dumps(notation.sign)} {ANY_VALUE}"
        return Fragment(f"({prefix}_pair ({json.dumps(notation.between)} {prefix}_pair)*)?", (pair,))
    schema = arguments_schema(tool)
    if not _can_be_keywords(schema, notation):
        return Fragment(f"{json.dumps(notation.spread)} {value_expression(schema, tool)}")
    required = frozenset(schema.get("required", ()))
    names = list(schema.get("properties", {}))
    shared = definitions(schema)
    rules = []
    for index, name in enumerate(names):
        value = _keyword_value(schema["properties"][name], shared, notation, tool)
        rules.append(f"{prefix}_{index}: {json.dumps(name + notation.sign)} {value}")
    return Fragment(
        f"{prefix}_first_0", (*rules, *_keyword_order(prefix, [name in required for name in names], notation))
    )


def _can_be_keywords(schema: Mapping[str, Any], notation: Notation) -> bool:
    """Return True if each argument's schema is self-contained and only the named arguments are possible."""
    properties = schema.get("properties", {})
    return (
        schema.keys() <= _KEYWORD_SAFE
        and schema.get("additionalProperties") is False
        and all(map(notation.is_name, properties))
        and set(schema.get("required", ())) <= properties.keys()
        and not refers_elsewhere(schema)
    )


def _keyword_order(prefix: str, required: list[bool], notation: Notation) -> list[str]:
    """Return rules for arguments in the order of the schema, with optional ones left out or not."""
    rules = [f'{prefix}_first_{len(required)}: ""', f'{prefix}_next_{len(required)}: ""']
    for index, is_required in enumerate(required):
        for kind, separator in (("first", ""), ("next", json.dumps(notation.between) + " ")):
            body = f"{separator}{prefix}_{index} {prefix}_next_{index + 1}"
            skip = "" if is_required else f" | {prefix}_{kind}_{index + 1}"
            rules.append(f"{prefix}_{kind}_{index}: {body}{skip}")
    return rules


def _keyword_value(schema: Any, shared: Mapping[str, Any], notation: Notation, tool: Tool) -> str:
    """Return the values of one argument.

    Constants use the notation's own words if the schema says nothing more specific.
    """
    if not isinstance(schema, Mapping):
        return ANY_VALUE
    constants: tuple[object, ...] = ()
    if schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema:
        constants = (True, False)
    elif schema.get("type") == "null":
        constants = (None,)
    texts = [text for value in constants if (text := notation.constant(value)) is not None]
    if texts:
        return any_of(map(json.dumps, texts))
    return value_expression({**schema, **shared}, tool)
