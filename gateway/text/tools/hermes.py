"""Tool calls of Hermes, Qwen 2.5 and 3, and many others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from gateway.text.grammars.grammar import Fragment, literal
from gateway.text.message_parser import ToolParser
from gateway.text.tools.calls_grammar import (
    Arguments,
    call_rules,
    enforced_arguments,
    free_arguments,
    object_call,
    repeated,
    triggered,
)
from gateway.text.tools.format import CallArguments, Tool, ToolFormat
from gateway.text.tools.json_calls import JsonCallParser
from gateway.text.tools.reader import Steps, nowhere

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TOO_MANY = re.compile(r"[\s}]+")
"""White space, and surplus closing braces that models write."""


class HermesFormat(ToolFormat):
    """Format of Hermes. See ToolFormat."""

    name = "hermes"
    marks = (OPEN, CLOSE)

    def new_parser(self, tools: Sequence[Tool]) -> ToolParser:
        """See ToolFormat."""
        return HermesParser(self.new_call_id)

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        opening = literal(OPEN, special_ids)
        first = f"{opening} t_body"
        expression = repeated(first, f'"\\n" {first}', parallel=parallel)
        return Fragment(expression, self._rules(tools, special_ids, enforced_arguments))

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        rules = self._rules(tools, special_ids, free_arguments)
        return triggered(OPEN, special_ids, "t_body", rules, parallel=parallel)

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        objects = [json.dumps({"name": name, "arguments": values}, ensure_ascii=False) for name, values in calls]
        return "\n".join(f"{OPEN}\n{text}\n{CLOSE}" for text in objects)

    def _rules(self, tools: Sequence[Tool], special_ids: Mapping[str, int], arguments: Arguments) -> tuple[str, ...]:
        calls = call_rules(tools, lambda tool: object_call(tool, arguments(tool)))
        return (f't_body: "\\n" t_call "\\n" {literal(CLOSE, special_ids)}', *calls)


class HermesParser(JsonCallParser):
    """Parser of calls after `<tool_call>`. A call without its closing mark counts as well."""

    def _read(self) -> Steps[None]:
        while (yield from self.source.text_until((OPEN,), self.message.content)):
            self.source.begin_trial(OPEN)
            before = self.message.num_calls
            yield from self.source.space()
            while (yield from self.read_call()):
                yield from self.source.run(_TOO_MANY, nowhere)
                if (yield from self.source.peek()) != "{":
                    break
            self._reject()
            if self.message.num_calls > before:
                yield from self.source.accept(CLOSE)
