"""Tool calls that are an answer of JSON.

Llama 3 writes `{"name": ..., "parameters": {...}}`. Models whose template does not mention tools are asked for a
similar form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gateway.text.grammars.grammar import Fragment, any_of, literal
from gateway.text.tools.calls_grammar import (
    call_arguments,
    call_rules,
    json_call,
    object_call,
    repeated,
    text_unless,
)
from gateway.text.tools.format import CallArguments, Tool, ToolFormat
from gateway.text.tools.json_calls import JsonCallParser
from gateway.text.tools.reader import AnswerParser, Steps

PYTHON_TAG = "<|python_tag|>"
_FENCES = ("```json", "```")
_COMMA = '", " t_call'
_SEMICOLON = '"; " t_call'
_CALL_BEGINS = (
    r'[ \t\r\n]*(```(json)?[ \t\r\n]*)?(\[[ \t\r\n]*)?\{[ \t\r\n]*"(name|type|id|index|arguments|parameters)"'
)


class PlainJsonParser(AnswerParser, JsonCallParser):
    """Parser of objects, with or without semicolons or commas between them, or of a list; in a code fence or not."""

    def read_calls(self) -> Steps[None]:
        """See AnswerParser."""
        source = self.source
        fence = yield from source.accept_any(_FENCES)
        yield from source.space()
        if (yield from source.peek()) == "[":
            yield from self.read_list()
            yield from source.space()
        else:
            while (yield from self.read_call()):
                source.begin_trial()
                yield from source.space()
                yield from source.accept_any((";", ","))
                yield from source.space()
                if (yield from source.peek()) != "{":
                    break
        self._reject()
        if fence and self.num_complete:
            yield from source.accept("```")


class LlamaJsonParser(PlainJsonParser):
    """Parser of Llama's calls."""

    mark = PYTHON_TAG


class PlainJsonFormat(ToolFormat):
    """One call or a list of calls with the names of OpenAI's API. See ToolFormat."""

    name = "json"
    parser = PlainJsonParser

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        rules = call_rules(tools, lambda tool: json_call(tool, "arguments"))
        if not parallel:
            return Fragment("t_call", rules)
        return Fragment(any_of(["t_call", f'"[" {repeated("t_call", _COMMA, parallel=True)} "]"']), rules)

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        rules = call_rules(tools, lambda tool: object_call(tool, call_arguments(tool, free=True)))
        if not parallel:
            return text_unless(_CALL_BEGINS, Fragment("t_call", rules))
        firsts = call_rules(
            tools, lambda tool: object_call(tool, call_arguments(tool, free=True), before="["), "t_first"
        )
        several = f'{repeated("t_first", _COMMA, parallel=True)} "]"'
        return text_unless(_CALL_BEGINS, Fragment(any_of(["t_call", several]), (*rules, *firsts)))

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        objects = [{"name": name, "arguments": values} for name, values in calls]
        return json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False)


class LlamaJsonFormat(ToolFormat):
    """Format of Llama 3.1 and later. See ToolFormat.

    Calls are objects with `parameters`, separated by semicolons, after `<|python_tag|>` or not.
    """

    name = "llama3_json"
    marks = (PYTHON_TAG,)
    parser = LlamaJsonParser

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        rules = call_rules(tools, lambda tool: json_call(tool, "parameters"))
        return Fragment(f"({repeated('t_call', _SEMICOLON, parallel=parallel)})", rules)

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        rules = call_rules(tools, lambda tool: object_call(tool, call_arguments(tool, free=True), "parameters"))
        calls = Fragment(f"({repeated('t_call', _SEMICOLON, parallel=parallel)})", rules)
        tagged = f"T_TEXT {literal(PYTHON_TAG, special_ids)} {calls.expression}"
        if PYTHON_TAG not in special_ids:
            return text_unless(_CALL_BEGINS, calls)
        return text_unless(_CALL_BEGINS, Fragment(any_of([calls.expression, tagged]), calls.rules))

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        return "; ".join(json.dumps({"name": name, "parameters": values}, ensure_ascii=False) for name, values in calls)


LLAMA3_JSON = LlamaJsonFormat()
FALLBACK = PlainJsonFormat()
"""Format for models whose template does not mention tools. The prompt tells them what to write; see prompting."""
