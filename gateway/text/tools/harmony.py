"""gpt-oss's harmony format: each message has a header that names its channel and, for a call, the recipient.

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
        <|constrain|>json<|message|>{...}<|call|>

Messages on the channel `analysis` are reasoning. Messages on `final`, and on `commentary` without a recipient, are
content. A call ends the model's turn, so there is at most one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gateway.text.grammars.grammar import Fragment, any_of, literal
from gateway.text.tools.calls_grammar import ANY_TEXT, MarkedFormat
from gateway.text.tools.format import CallArguments, Tool
from gateway.text.tools.json_calls import JsonCallParser, read_arguments
from gateway.text.tools.reader import Steps, TextSplitter

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
OPENING = START + "assistant"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
_MAX_HEADER = 512
_RECIPIENT = re.compile(r"\bto=(?!assistant\b)([\w.-]+)", re.ASCII)
"""Recipient of a call. What a model addresses to itself is not a call."""
_NAMESPACE = "functions."


class HarmonyParser(JsonCallParser):
    """Parser of messages with a recipient. The model's own functions (`browser.search`) keep their names."""

    def _read(self) -> Steps[None]:
        source = self.source
        while mark := (yield from source.text_until((OPENING, CHANNEL), self.message.content)):
            source.begin_trial(mark)
            header = yield from source.line_to(MESSAGE, _MAX_HEADER)
            recipient = _RECIPIENT.search(header or "")
            if recipient is None:
                self._reject()
                continue
            source.end_trial()
            self.message.begin_call(recipient[1].removeprefix(_NAMESPACE))
            yield from source.space()
            if (yield from source.accept_any(ENDS)):
                self.message.arguments("{}")
                self.message.complete_call()
                continue
            if (yield from read_arguments(source, self.message.arguments)):
                self.message.complete_call()
            yield from source.space()
            yield from source.accept_any(ENDS)


class HarmonyFormat(MarkedFormat):
    """Format of gpt-oss. See ToolFormat."""

    def call_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        return Fragment(_call(special_ids), self.call_rules(tools, special_ids, free=False))

    def free_grammar(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> Fragment:
        """See ToolFormat."""
        final = literal(FINAL, special_ids)
        commentary = literal(f"{CHANNEL}commentary{MESSAGE}", special_ids)
        message = f"{any_of([final, commentary])} T_TEXT {literal(END, special_ids)}"
        rules = (
            f"T_TEXT: {ANY_TEXT}",
            f"t_message: {_opened(message, special_ids)}",
            f"t_final: {_opened(f'{final} T_TEXT', special_ids)}",
            f"t_opened: {_call(special_ids)}",
        )
        body = f"t_message* {any_of(['t_final', 't_opened'])}"
        return Fragment(body, (*rules, *self.call_rules(tools, special_ids, free=True)))

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        return OPENING.join(self.render_call(name, values) + CALL for name, values in calls)


HARMONY = HarmonyFormat(
    name="harmony",
    marks=MARKS,
    parser=HarmonyParser,
    head=f"{CHANNEL}commentary to={_NAMESPACE}NAME {CONSTRAIN}json{MESSAGE}",
)


def final_message(content: Fragment, special_ids: Mapping[str, int]) -> Fragment:
    """Return a message whose content follows a grammar."""
    return Fragment(_opened(f"{literal(FINAL, special_ids)} ({content.expression})", special_ids), content.rules)


def _opened(expression: str, special_ids: Mapping[str, int]) -> str:
    """Return a message. The opening of the first one is the end of the prompt."""
    return f"({literal(OPENING, special_ids)})? {expression}"


def _call(special_ids: Mapping[str, int]) -> str:
    return f"{_opened('t_call', special_ids)} ({literal(CALL, special_ids)})?"


class HarmonySplitter(TextSplitter):
    """Splitter of messages into reasoning and visible text. See TextSplitter.

    The visible text has no headers except those of calls, which HarmonyParser reads. An empty line separates messages
    of the same kind. It is never done, because a message of any kind may follow.
    """

    def _read(self) -> Steps[None]:
        source = self.source
        parts = {True: self.in_reasoning, False: False}
        is_call = False
        mark = "" if self.in_reasoning else (yield from source.accept_any((OPENING, CHANNEL)))
        while True:
            sink = self.reasoning.append if self.in_reasoning else self.content.append
            if mark in (OPENING, CHANNEL):
                source.begin_trial(mark)
                header = yield from source.line_to(MESSAGE, _MAX_HEADER)
                if header is None and not (yield from source.peek()):
                    return  # The text ends in a header, which has no content.
                taken = source.end_trial()
                self.in_reasoning = header is not None and _is_analysis(header)
                is_call = header is None or _RECIPIENT.search(header) is not None
                sink = self.reasoning.append if self.in_reasoning else self.content.append
                if is_call:
                    sink(taken)
                elif parts[self.in_reasoning]:
                    sink("\n\n")
                parts[self.in_reasoning] = True
            mark = yield from source.text_until((OPENING, CHANNEL, *ENDS), sink)
            self.in_reasoning = False
            if is_call and mark in ENDS:
                # Inside a string of the arguments it is text; HarmonyParser distinguishes the cases.
                self.content.append(mark)
            if not mark:
                return


def _is_analysis(header: str) -> bool:
    return header.rpartition(CHANNEL)[2].startswith("analysis") and _RECIPIENT.search(header) is None
