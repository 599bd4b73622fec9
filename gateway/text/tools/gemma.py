"""Tool calls of FunctionGemma and Gemma 4.

FunctionGemma writes `<start_function_call>call:f{a:<escape>text<escape>,b:1}<end_function_call>`; Gemma 4 uses other
marks. Enforced calls have their arguments as JSON, which the parser reads as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from gateway.text.grammars.grammar import literal
from gateway.text.message_parser import ToolParser
from gateway.text.tools.calls_grammar import MarkedFormat, call_arguments, call_rules
from gateway.text.tools.format import CallArguments, NewId, Tool
from gateway.text.tools.literals import LiteralReader
from gateway.text.tools.reader import MAX_NAME, NAME, CallParser, Sink, Source, Steps

_CALL = "call:"
_KEY = re.compile(r"[\w.$-]+")


class GemmaFormat(MarkedFormat):
    """Format of FunctionGemma and Gemma 4. See ToolFormat.

    Args:
        opening: Mark before a call.
        closing: Mark after a call.
        quote: Mark before and after a text.
    """

    separator = ""

    def __init__(self, name: str, opening: str, closing: str, quote: str) -> None:
        self.name = name
        self.marks = (opening, closing, quote)

    def new_parser(self, tools: Sequence[Tool]) -> ToolParser:
        """See ToolFormat."""
        return GemmaParser(self.new_call_id, *self.marks)

    def after_mark(
        self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool, free: bool
    ) -> tuple[str, tuple[str, ...]]:
        """See MarkedFormat."""
        calls = call_rules(tools, lambda tool: f"{json.dumps(_CALL + tool.name)} {call_arguments(tool, free=free)}")
        return "t_body", (f"t_body: t_call {literal(self.marks[1], special_ids)}", *calls)

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        opening, closing, _ = self.marks
        texts = [f"{_CALL}{name}{json.dumps(values, ensure_ascii=False)}" for name, values in calls]
        return "".join(f"{opening}{text}{closing}" for text in texts)


class GemmaParser(CallParser):
    """Parser of calls between their marks."""

    def __init__(self, new_id: NewId, opening: str, closing: str, quote: str) -> None:
        self._opening, self._closing, self._quote = opening, closing, quote
        super().__init__(new_id)

    def _read(self) -> Steps[None]:
        source, message = self.source, self.message
        while (yield from source.text_until((self._opening,), message.content)):
            source.begin_trial(self._opening)
            yield from source.accept(_CALL)
            name = yield from source.word(NAME, MAX_NAME)
            if not name or (yield from source.peek()) != "{":
                self._reject()
                continue
            source.end_trial()
            message.begin_call(name)
            if (yield from _ValueReader(source, message.arguments, self._quote).read_value()):
                message.complete_call()
            self._reject()
            yield from source.accept(self._closing)


class _ValueReader(LiteralReader):
    """Reader of values with bare keys and with texts between marks, without escapes."""

    def __init__(self, source: Source, sink: Sink, quote: str) -> None:
        super().__init__(source, sink)
        self._quote = quote

    def read_key(self) -> Steps[bool]:
        """See LiteralReader."""
        if (yield from self.source.peek()) in ('"', "'"):
            return (yield from self.read_string())
        if (yield from self.source.accept(self._quote)):
            return (yield from self._read_marked())
        self.source.begin_trial()
        key = yield from self.source.word(_KEY, MAX_NAME)
        if not key:
            return False
        self.source.end_trial()
        self.sink(json.dumps(key, ensure_ascii=False))
        return True

    def read_scalar(self) -> Steps[bool]:
        """See LiteralReader."""
        if (yield from self.source.accept(self._quote)):
            return (yield from self._read_marked())
        return (yield from super().read_scalar())

    def _read_marked(self) -> Steps[bool]:
        self.sink('"')
        if not (yield from self.source.text_until((self._quote,), self.sink_text)):
            return False
        self.sink('"')
        return True
