"""Qwen3-Coder's and Qwen 3.5's calls, which are tags with a value between them:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A value is text as it is where the function's schema says that it is a string, or no other type that it could be; else
JSON. Calls that are enforced are written as Hermes' are, in the same marks: a grammar can hold JSON to any schema, and
these values only to a few.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gateway.text.message_parser import ToolParser
from gateway.text.tools.format import NewId, Tool
from gateway.text.tools.hermes import CLOSE, OPEN, HermesFormat
from gateway.text.tools.json_calls import JsonCallParser
from gateway.text.tools.reader import MAX_NAME, Steps

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""What templates make of constants in earlier calls, and models after them."""
_TYPE_NAMES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""What JSON schemas call the types of Python's values."""
_Types = frozenset[str]
_TEXT = frozenset(["string"])


class QwenXmlFormat(HermesFormat):
    """See ToolFormat."""

    name = "qwen3_coder"

    def new_parser(self, tools: Sequence[Tool]) -> ToolParser:
        """See ToolFormat. Hermes' form is read as well."""
        return QwenXmlParser(self.new_call_id, tools)


class QwenXmlParser(JsonCallParser):
    """Finds calls behind `<tool_call>`.

    Args:
        tools: whose schemas tell which values are text. Where they say nothing, a value that is no JSON is text.
    """

    def __init__(self, new_id: NewId, tools: Sequence[Tool]) -> None:
        self._types = {tool.name: _types_of(tool) for tool in tools}
        super().__init__(new_id)

    def _read(self) -> Steps[None]:
        source = self.source
        while (yield from source.text_until((OPEN,), self.message.content)):
            source.begin_trial(OPEN)
            before = self.message.num_calls
            yield from source.space()
            if (yield from source.accept(FUNCTION)):
                yield from self._read_function()
            else:
                yield from self.read_call()
            yield from source.space()
            self._reject()
            if self.message.num_calls > before:
                yield from source.accept(CLOSE)

    def _read_function(self) -> Steps[None]:
        """A function behind its mark."""
        source, message = self.source, self.message
        name = ((yield from source.line_to(">", MAX_NAME)) or "").strip()
        if not name:
            return
        source.end_trial()
        message.begin_call(name)
        message.arguments("{")
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
            if not (yield from self._read_value(self._types.get(name, {}).get(key))):
                return
        source.end_trial()
        message.arguments("}")
        message.complete_call()

    def _read_value(self, types: _Types | None) -> Steps[bool]:
        """A value and its end, with a line break before and behind it that are not its own."""
        yield from self.source.accept("\n")
        value = _Value(self, types)
        if not (yield from self.source.text_until((PARAMETER_END,), value.add)):
            value.give_up()
            return False
        value.finish()
        return True


class _Value:
    """Makes JSON of a value: of text as it comes, else when it is whole."""

    def __init__(self, parser: QwenXmlParser, types: _Types | None) -> None:
        self._sink = parser.message.arguments
        self._types = types
        self._is_text = types == _TEXT
        self._line_break = ""
        self._pieces: list[str] = []
        if self._is_text:
            self._sink('"')

    def add(self, text: str) -> None:
        """More of the value."""
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._is_text:
            self._sink(_escaped(text))
        else:
            self._pieces.append(text)

    def finish(self) -> None:
        """It is whole."""
        self._sink('"' if self._is_text else _as_json("".join(self._pieces), self._types))

    def give_up(self) -> None:
        """It does not end."""
        self._sink(_escaped(self._line_break) if self._is_text else "".join(self._pieces) + self._line_break)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]


def _as_json(text: str, types: _Types | None) -> str:
    """A value that may be text or JSON: text where the JSON is of none of the types, and a string is."""
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
    """The types of each argument."""
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: _types(schema) for name, schema in properties.items()}


def _types(schema: object) -> _Types | None:
    """Names of the types that a schema's values have, as far as it says so by itself; None: any."""
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
