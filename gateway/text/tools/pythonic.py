"""Tool calls written as Python: `[f(a=1), g(b="x")]` of Llama 3.2 and 4, and the ```` ```tool_code ```` of Gemma 3.

A scanner of literals reads the arguments. They are never evaluated.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.text.grammars.grammar import Fragment
from gateway.text.grammars.json_schema import ANNOTATIONS
from gateway.text.tools.calls_grammar import MarkedFormat, call_rules, repeated, text_unless
from gateway.text.tools.format import CallArguments, Tool, ToolFormat
from gateway.text.tools.literals import LiteralReader
from gateway.text.tools.reader import MAX_NAME, NAME, AnswerParser, CallParser, Steps
from gateway.text.tools.schema import ANY_VALUE, arguments_schema, definitions, refers_elsewhere, value_expression

START, END = "<|python_start|>", "<|python_end|>"
_NAMELESS = ('"', "'", "[", "{")
"""Characters that begin a value which is written without a name."""
FENCE, FENCE_END = "```tool_code", "```"
_KEYWORD_SAFE = ANNOTATIONS.union(
    ("$id", "$schema", "$defs", "definitions", "type", "properties", "additionalProperties", "required")
)
"""Keywords of schemas whose properties can be written one by one."""


class _PythonCallParser(CallParser):
    """Parser of one call, for both formats. The properties of its tool name the positional arguments."""

    def read_call(self) -> Steps[bool]:
        """Read `name(key=value, ...)`; return False if it is malformed or, before its bracket, not a call.

        Unread text remains in the source, or in the current trial.
        """
        source, message = self.source, self.message
        if not source.trying:
            source.begin_trial()
        name = yield from source.word(NAME, MAX_NAME)
        if not name or not (yield from source.accept("(")):
            return False
        if self.known is not None and name not in self.known:
            return False
        source.end_trial()
        message.begin_call(name)
        values = LiteralReader(source, message.arguments)
        yield from source.space()
        if (yield from source.accept("**")):
            if not (yield from values.read_value()):
                return False
            yield from source.space()
            whole = yield from source.accept(")")
        else:
            schema = next((tool.parameters for tool in self.tools if tool.name == name), {})
            whole = yield from self._read_arguments(values, tuple(schema.get("properties", ())))
        if whole:
            message.complete_call()
        return whole

    def _read_arguments(self, values: LiteralReader, properties: Sequence[str]) -> Steps[bool]:
        source, message = self.source, self.message
        message.arguments("{")
        separator = ""
        names = iter(properties)
        while not (yield from source.accept(")")):
            if (yield from source.peek()) in _NAMELESS:
                key = next(names, "")
                if not key:
                    return False
            else:
                source.begin_trial()
                key = yield from source.word(NAME, MAX_NAME)
                yield from source.space()
                if not key or not (yield from source.accept("=")):
                    return False
                source.end_trial()
            message.arguments(f"{separator}{json.dumps(key)}: ")
            separator = ", "
            if not (yield from values.read_value()):
                return False
            yield from source.space()
            if not (yield from source.accept(",")):
                if not (yield from source.accept(")")):
                    return False
                break
            yield from source.space()
        message.arguments("}")
        return True


class PythonicParser(AnswerParser, _PythonCallParser):
    """Parser of lists of calls."""

    mark = START

    def read_calls(self) -> Steps[None]:
        """See AnswerParser."""
        source = self.source
        while (yield from source.accept("[")):
            while (yield from self.read_call()):
                yield from source.space()
                if not (yield from source.accept(",")):
                    break
                yield from source.space()
            if source.trying:
                return
            if not (yield from source.accept("]")):
                return
            source.begin_trial()
            yield from source.space()
            if (yield from source.accept(END)):
                source.begin_trial()


class ToolCodeParser(_PythonCallParser):
    """Parser of calls in code fences. A call may be the argument of a print, or in a list."""

    def _read(self) -> Steps[None]:
        source = self.source
        while (yield from source.text_until((FENCE,), self.message.content)):
            source.begin_trial(FENCE)
            called = False
            while True:
                yield from source.space()
                if called and (yield from source.accept(FENCE_END)):
                    source.end_trial()
                    break
                wrapped = yield from source.accept_any(("print(", "["))
                if not (yield from self.read_call()):
                    break
                called = True
                source.begin_trial()
                if wrapped:
                    yield from source.accept(")" if wrapped == "print(" else "]")
                yield from source.space()
                yield from source.accept_any((",", ";"))
            self._reject()


class PythonicFormat(ToolFormat):
    """List of calls. See ToolFormat."""

    name = "pythonic"
    marks = (START, END)
    parser = PythonicParser

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        return _python_list(tools, parallel=parallel, free=False)

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        names = "|".join(re.escape(tool.name) for tool in tools)
        begins = rf"[ \t\r\n]*({re.escape(START)})?[ \t\r\n]*\[[ \t\r\n]*({names})\("
        return text_unless(begins, _python_list(tools, parallel=parallel, free=True))

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        return f"[{', '.join(render_call(name, values) for name, values in calls)}]"


class ToolCodeFormat(MarkedFormat):
    """Calls in a code fence, one per line. See ToolFormat."""

    def call_rules(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, free: bool) -> tuple[str, ...]:
        """See MarkedFormat."""
        return _rules(tools, free=free)

    def render_call(self, name: str, values: CallArguments) -> str:
        """See MarkedFormat."""
        return render_call(name, values)


def render_call(name: str, values: CallArguments) -> str:
    """Return a call as Python."""
    if isinstance(values, str):
        return f"{name}(**{values})"
    if not all(map(_is_name, values)):
        return f"{name}(**{values!r})"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def _python_list(tools: Sequence[Tool], *, parallel: bool, free: bool) -> Fragment:
    # The bracket and the name are one lexeme, because a list that begins with the bracket alone could be text.
    firsts = _rules(tools, free=free, before="[", rule="t_first")
    following = _rules(tools, free=free) if parallel else ()
    several = repeated("t_first", '", " t_call', parallel=parallel)
    return Fragment(f'{several} "]"', (*firsts, *following))


def _rules(tools: Sequence[Tool], *, free: bool, before: str = "", rule: str = "t_call") -> tuple[str, ...]:
    rules: list[str] = []

    def call(tool: Tool) -> str:
        arguments = _keyword_arguments(tool, f"{rule}_args_{len(rules)}", free=free and not tool.strict)
        rules.extend(arguments.rules)
        return f'{json.dumps(before + tool.name + "(")} {arguments.expression} ")"'

    return (*call_rules(tools, call, rule), *rules)


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def _keyword_arguments(tool: Tool, prefix: str, *, free: bool) -> Fragment:
    """Return the arguments of a tool.

    Args:
        tool: The tool.
        prefix: Prefix of the names of rules.
        free: Allow any arguments whatever the schema says.
    """
    if free:
        pair = f'{prefix}_pair: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {ANY_VALUE}'
        return Fragment(f'({prefix}_pair (", " {prefix}_pair)*)?', (pair,))
    schema = arguments_schema(tool)
    if not _can_be_keywords(schema):
        return Fragment(f'"**" {value_expression(schema, tool)}')
    required = frozenset(schema.get("required", ()))
    names = list(schema.get("properties", {}))
    shared = definitions(schema)
    rules = []
    for index, name in enumerate(names):
        value = _keyword_value(schema["properties"][name], shared, tool)
        rules.append(f"{prefix}_{index}: {json.dumps(name + '=')} {value}")
    return Fragment(f"{prefix}_first_0", (*rules, *_keyword_order(prefix, [name in required for name in names])))


def _can_be_keywords(schema: Mapping[str, Any]) -> bool:
    """Return True if each argument's schema is self-contained and only the named arguments are possible."""
    properties = schema.get("properties", {})
    return (
        schema.keys() <= _KEYWORD_SAFE
        and schema.get("additionalProperties") is False
        and all(map(_is_name, properties))
        and set(schema.get("required", ())) <= properties.keys()
        and not refers_elsewhere(schema)
    )


def _keyword_order(prefix: str, required: list[bool]) -> list[str]:
    """Return rules for arguments in the order of the schema, with optional ones left out or not."""
    rules = [f'{prefix}_first_{len(required)}: ""', f'{prefix}_next_{len(required)}: ""']
    for index, is_required in enumerate(required):
        for kind, separator in (("first", ""), ("next", '", " ')):
            body = f"{separator}{prefix}_{index} {prefix}_next_{index + 1}"
            skip = "" if is_required else f" | {prefix}_{kind}_{index + 1}"
            rules.append(f"{prefix}_{kind}_{index}: {body}{skip}")
    return rules


def _keyword_value(schema: Any, shared: Mapping[str, Any], tool: Tool) -> str:
    """Return the values of one argument: Python's constants if the schema says nothing more specific."""
    if not isinstance(schema, Mapping):
        return ANY_VALUE
    if schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema:
        return '("True" | "False")'
    return '"None"' if schema.get("type") == "null" else value_expression({**schema, **shared}, tool)


PYTHONIC = PythonicFormat()
TOOL_CODE = ToolCodeFormat(
    name="gemma", marks=(FENCE,), parser=ToolCodeParser, between="\n", frame=("\n", f"\n{FENCE_END}")
)
