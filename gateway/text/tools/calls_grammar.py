"""Parts of call grammars that several formats share. Their rules begin with `t_`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.text.grammars.grammar import Fragment, any_of, literal
from gateway.text.message_parser import ToolParser
from gateway.text.tools.format import MAX_PARALLEL_CALLS, CallArguments, NewId, Tool, ToolFormat
from gateway.text.tools.schema import (
    ANY_OBJECT,
    arguments_expression,
    arguments_schema,
    definitions,
    refers_elsewhere,
    value_expression,
)

ANY_TEXT = r"/(?s:.*)/"


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


@dataclass(kw_only=True, eq=False)
class MarkedFormat(ToolFormat):
    """Format in which a mark begins calls. See ToolFormat.

    Attributes:
        head: Text before the arguments of a call, in which NAME stands for the name of the function.
        tail: Text after the arguments of a call.
        between: Text between two calls.
        frame: Texts before the first and after the last call if one mark, the first of `marks`, begins all calls;
            None if it precedes each call.
        repeats_mark: Text and a further mark may follow in free text.
    """

    name: str
    marks: tuple[str, ...]
    parser: Callable[[NewId, Sequence[Tool]], ToolParser]
    head: str = ""
    tail: str = ""
    between: str = ""
    frame: tuple[str, str] | None = None
    repeats_mark: bool = True

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        rest = self._after_mark(special_ids, parallel=parallel)
        call = f"{literal(self.marks[0], special_ids)} {rest}"
        if self.frame is None:
            call = self._repeated(call, special_ids, parallel=parallel)
        return Fragment(call, self.call_rules(tools, special_ids, free=False))

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        rest = self._after_mark(special_ids, parallel=parallel)
        rules = self.call_rules(tools, special_ids, free=True)
        return triggered(self.marks[0], special_ids, rest, rules, parallel=parallel and self.repeats_mark)

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        before, after = self.frame or ("", "")
        first, each = ("", self.marks[0]) if self.frame is None else (self.marks[0], "")
        texts = [each + self.render_call(name, values) for name, values in calls]
        return first + before + self.between.join(texts) + after

    def call_rules(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, free: bool) -> tuple[str, ...]:
        """Return the rule `t_call` of a call without its mark. See call_arguments for `free`."""

        def call(tool: Tool) -> str:
            head = self.head_expression(tool.name, special_ids)
            return f"{head} {call_arguments(tool, free=free)} {literal(self.tail, special_ids)}"

        return call_rules(tools, call)

    def render_call(self, name: str, values: CallArguments) -> str:
        """Return a call without its mark."""
        return self.head.replace("NAME", name) + json.dumps(values, ensure_ascii=False) + self.tail

    def head_expression(self, name: str, special_ids: Mapping[str, int]) -> str:
        """Return the text before the arguments of a call."""
        return literal(self.head.replace("NAME", name), special_ids)

    def opening(self, special_ids: Mapping[str, int]) -> str:
        """Return the text between the mark of all calls and the first call."""
        return literal(self.frame[0], special_ids) if self.frame else '""'

    def _after_mark(self, special_ids: Mapping[str, int], *, parallel: bool) -> str:
        if self.frame is None:
            return "t_call"
        several = self._repeated("t_call", special_ids, parallel=parallel)
        return f"{self.opening(special_ids)} {several} {literal(self.frame[1], special_ids)}"

    def _repeated(self, call: str, special_ids: Mapping[str, int], *, parallel: bool) -> str:
        following = f"{literal(self.between, special_ids)} {call}"
        return repeated(call, following, parallel=parallel)


def text_unless(pattern: str, calls: Fragment) -> Fragment:
    """Return a message that consists of calls, or of text that does not begin with a match of the pattern."""
    text = f"T_TEXT: {ANY_TEXT} & ~/({pattern})(?s:.*)/"
    return Fragment(any_of(["T_TEXT", calls.expression]), (text, *calls.rules))
