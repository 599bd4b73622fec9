"""DeepSeek's tool calls.

V3 and R1 write the kind `function`, a separator, the name, and the arguments in a code fence. Since V3.1 a call is the
name, the separator and the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gateway.text.grammars.grammar import literal
from gateway.text.message_parser import ToolParser
from gateway.text.tools.calls_grammar import MarkedFormat, call_arguments, call_rules, repeated
from gateway.text.tools.format import CallArguments, Tool
from gateway.text.tools.json_calls import JsonCallParser, read_arguments
from gateway.text.tools.reader import MAX_NAME, Steps

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekFormat(MarkedFormat):
    """Format of DeepSeek. See ToolFormat.

    Args:
        fenced: Form of V3 and R1; otherwise the form of V3.1.
    """

    marks = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def __init__(self, *, fenced: bool) -> None:
        self.name = "deepseek_v3" if fenced else "deepseek_v31"
        self._fenced = fenced
        self._between = "\n" if fenced else ""
        self._tail = ("\n```" if fenced else "") + CALL_END

    def new_parser(self, tools: Sequence[Tool]) -> ToolParser:
        """See ToolFormat. The parser reads both forms."""
        return DeepSeekParser(self.new_call_id)

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        texts = [self._head(name) + json.dumps(values, ensure_ascii=False) + self._tail for name, values in calls]
        return CALLS_BEGIN + self._between.join(texts) + CALLS_END

    def _head(self, name: str) -> str:
        return CALL_BEGIN + (f"function{SEPARATOR}{name}\n```json\n" if self._fenced else f"{name}{SEPARATOR}")

    def after_mark(
        self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool, free: bool
    ) -> tuple[str, tuple[str, ...]]:
        """See MarkedFormat."""
        tail = literal(self._tail, special_ids)

        def call(tool: Tool) -> str:
            return f"{literal(self._head(tool.name), special_ids)} {call_arguments(tool, free=free)} {tail}"

        following = f"{json.dumps(self._between)} t_call" if self._between else "t_call"
        several = repeated("t_call", following, parallel=parallel)
        return "t_body", (f"t_body: {several} {literal(CALLS_END, special_ids)}", *call_rules(tools, call))


class DeepSeekParser(JsonCallParser):
    """Parser of calls between marks. A mark that begins no call is content."""

    def _read(self) -> Steps[None]:
        source = self.source
        while mark := (yield from source.text_until((CALLS_BEGIN, CALL_BEGIN), self.message.content)):
            source.begin_trial(mark)
            if mark == CALLS_BEGIN:
                yield from source.space()
                if not (yield from source.accept(CALL_BEGIN)):
                    self._reject()
                    continue
            while (yield from self._read_one()):
                source.begin_trial()
                yield from source.space()
                if not (yield from source.accept(CALL_BEGIN)):
                    break
            self._reject()
            yield from source.accept(CALLS_END)

    def _read_one(self) -> Steps[bool]:
        """Read a call after its opening mark, including the closing mark."""
        source = self.source
        name = yield from source.line_to(SEPARATOR, MAX_NAME)
        if name is None:
            return False
        fenced = name == "function" and (yield from source.peek()) != "{"
        if fenced:
            name = yield from source.line_to("\n", MAX_NAME)
        if not name or not name.strip():
            return False
        source.end_trial()
        self.message.begin_call(name.strip())
        yield from source.space()
        if fenced and (yield from source.accept_any(("```json", "```"))):
            yield from source.space()
        if not (yield from read_arguments(source, self.message.arguments)):
            return False
        self.message.complete_call()
        yield from source.space()
        if fenced and (yield from source.accept("```")):
            yield from source.space()
        yield from source.accept(CALL_END)
        return True
