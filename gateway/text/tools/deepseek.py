"""DeepSeek's tool calls.

V3 and R1 write the kind `function`, a separator, the name, and the arguments in a code fence. Since V3.1 a call is the
name, the separator and the arguments.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.text.tools.calls_grammar import MarkedFormat
from gateway.text.tools.json_calls import JsonCallParser, read_arguments
from gateway.text.tools.reader import MAX_NAME, Steps

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekParser(JsonCallParser):
    """Parser of calls between marks, in both forms. A mark that begins no call is content."""

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


DEEPSEEK_V3 = MarkedFormat(
    name="deepseek_v3",
    marks=(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    parser=DeepSeekParser,
    head=f"{CALL_BEGIN}function{SEPARATOR}NAME\n```json\n",
    tail=f"\n```{CALL_END}",
    between="\n",
    frame=("", CALLS_END),
)
DEEPSEEK_V31 = replace(DEEPSEEK_V3, name="deepseek_v31", head=f"{CALL_BEGIN}NAME{SEPARATOR}", tail=CALL_END, between="")
