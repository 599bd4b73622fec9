"""Tool calls of FunctionGemma and Gemma 4.

FunctionGemma writes `<start_function_call>call:f{a:<escape>text<escape>,b:1}<end_function_call>`; Gemma 4 uses other
marks. Enforced calls have their arguments as JSON, which the parser reads as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial

from gateway.text.tools.calls_grammar import MarkedFormat
from gateway.text.tools.format import NewId, Tool
from gateway.text.tools.literals import LiteralReader
from gateway.text.tools.reader import MAX_NAME, NAME, CallParser, Sink, Source, Steps

_CALL = "call:"
_KEY = re.compile(r"[\w.$-]+")


class GemmaParser(CallParser):
    """Parser of calls between their marks.

    Args:
        marks: Mark before a call, mark after a call, and mark before and after a text.
    """

    def __init__(self, new_id: NewId, tools: Sequence[Tool], marks: tuple[str, str, str]) -> None:
        super().__init__(new_id, tools)
        self._opening, self._closing, self._quote = marks

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


def _format(name: str, opening: str, closing: str, quote: str) -> MarkedFormat:
    marks = (opening, closing, quote)
    parser = partial(GemmaParser, marks=marks)
    return MarkedFormat(name=name, marks=marks, parser=parser, head=f"{_CALL}NAME", tail=closing)


FUNCTION_GEMMA = _format("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
