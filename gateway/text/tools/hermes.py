"""Tool calls between `<tool_call>` and `</tool_call>`: Hermes' JSON, and Qwen3-Coder's tags.

Hermes, Qwen 2.5 and 3 and many others write `{"name": ..., "arguments": {...}}`. Qwen3-Coder and Qwen 3.5 write

        <function=name>
        <parameter=key>
        value
        </parameter>
        </function>

There, a value is plain text if the function's schema says that it is a string and excludes other types; otherwise it
is JSON. Enforced calls of these models are written in Hermes' form, because a grammar can enforce any schema in JSON
but only a few in this form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from gateway.text.tools.calls_grammar import MarkedFormat
from gateway.text.tools.format import Tool
from gateway.text.tools.json_calls import JsonCallParser
from gateway.text.tools.reader import MAX_NAME, Steps, nowhere

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TOO_MANY = re.compile(r"[\s}]+")
"""White space, and surplus closing braces that models write."""
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Constants in earlier calls as templates write them, and models after them."""
_TYPE_NAMES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""Names of Python's types in JSON schemas."""
_Types = frozenset[str]
_TEXT = frozenset(["string"])


class HermesParser(JsonCallParser):
    """Parser of calls after `<tool_call>`, in both forms. A call without its closing mark counts as well."""

    def _read(self) -> Steps[None]:
        source = self.source
        while (yield from source.text_until((OPEN,), self.message.content)):
            source.begin_trial(OPEN)
            before = self.message.num_calls
            yield from source.space()
            if (yield from source.accept(FUNCTION)):
                yield from self._read_function()
                yield from source.space()
            else:
                yield from self._read_objects()
            self._reject()
            if self.message.num_calls > before:
                yield from source.accept(CLOSE)

    def _read_objects(self) -> Steps[None]:
        while (yield from self.read_call()):
            yield from self.source.run(_TOO_MANY, nowhere)
            if (yield from self.source.peek()) != "{":
                return

    def _read_function(self) -> Steps[None]:
        """Read a function after its mark."""
        source, message = self.source, self.message
        name = ((yield from source.line_to(">", MAX_NAME)) or "").strip()
        if not name:
            return
        source.end_trial()
        message.begin_call(name)
        message.arguments("{")
        types = next((_types_of(tool) for tool in self.tools if tool.name == name), {})
        separator = ""
        while True:
            source.begin_trial()
            yield from source.space()
            if (yield from source.accept(FUNCTION_END)):
                break
            if not (yield from source.accept(PARAMETER)):
                return
            key = yield from source.line_to(">", MAX_NAME)
            if key is None:
                return
            source.end_trial()
            message.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._read_value(types.get(key))):
                return
        source.end_trial()
        message.arguments("}")
        message.complete_call()

    def _read_value(self, types: _Types | None) -> Steps[bool]:
        """Read a value and its end, without the line breaks around it. Text is shown as it arrives."""
        source, sink = self.source, self.message.arguments
        yield from source.accept("\n")
        if types == _TEXT:
            sink('"')
            ended = yield from source.text_until(_VALUE_ENDS, lambda text: sink(_escaped(text)))
            sink('"' if ended else "")
        else:
            pieces: list[str] = []
            ended = yield from source.text_until(_VALUE_ENDS, pieces.append)
            value = "".join(pieces)
            sink(_as_json(value, types) if ended else value)
        return ended != ""


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]


def _as_json(text: str, types: _Types | None) -> str:
    """Return a value that may be text or JSON. It is text if the JSON has none of the types and a string does."""
    stripped = text.strip()
    stripped = _CONSTANTS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _quoted(text)
    if types is not None and "string" in types and types.isdisjoint(_TYPE_NAMES[type(value)]):
        return _quoted(text)
    return stripped


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _types_of(tool: Tool) -> dict[str, _Types | None]:
    """Return the types of each argument."""
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: _types(schema) for name, schema in properties.items()}


def _types(schema: object) -> _Types | None:
    """Return the names of the types that a schema allows by itself; None for any."""
    if not isinstance(schema, Mapping):
        return None
    kinds = schema.get("type")
    if isinstance(kinds, (str, list)):
        return frozenset([kinds] if isinstance(kinds, str) else kinds)
    if isinstance(values := schema.get("enum"), list):
        return frozenset(name for value in values for name in _TYPE_NAMES[type(value)])
    choices = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(choices, list):
        return None
    found = [_types(choice) for choice in choices]
    known = [types for types in found if types is not None]
    return frozenset[str]().union(*known) if len(known) == len(found) else None


HERMES = MarkedFormat(
    name="hermes",
    marks=(OPEN, CLOSE),
    parser=HermesParser,
    head='\n{"name": "NAME", "arguments": ',
    tail=f"}}\n{CLOSE}",
    between="\n",
)
QWEN3_CODER = replace(HERMES, name="qwen3_coder")
"""Format of Qwen3-Coder and Qwen 3.5."""
