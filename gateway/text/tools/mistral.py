"""Mistral's tool calls.

They are `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since tokenizer v11 `[TOOL_CALLS]name[ARGS]{...}` for
each call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from gateway.text.grammars.grammar import literal
from gateway.text.tools.calls_grammar import MarkedFormat
from gateway.text.tools.format import random_id
from gateway.text.tools.json_calls import JsonCallParser, read_arguments
from gateway.text.tools.reader import MAX_NAME, NAME, Steps

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralFormat(MarkedFormat):
    """Format of Mistral. Ids of calls have nine characters, because the templates refuse others. See ToolFormat."""

    def new_call_id(self) -> str:
        """See ToolFormat."""
        return random_id(9)

    def head_expression(self, name: str, special_ids: Mapping[str, int]) -> str:
        """See MarkedFormat. Tokenizer v11 has a token for an id, and its models write one."""
        if self.frame is not None or CALL_ID not in special_ids:
            return super().head_expression(name, special_ids)
        call_id = f"({literal(CALL_ID, special_ids)} /[a-zA-Z0-9]{{9}}/)?"
        return f"{json.dumps(name)} {call_id} {literal(ARGS, special_ids)}"

    def opening(self, special_ids: Mapping[str, int]) -> str:
        """See MarkedFormat. SentencePiece tokenizers begin a word after a mark: `[TOOL_CALLS] [{`."""
        return f'" "? {super().opening(special_ids)}'


class MistralParser(JsonCallParser):
    """Parser of calls after `[TOOL_CALLS]`, in both forms."""

    def _read(self) -> Steps[None]:
        source = self.source
        while (yield from source.text_until((CALLS,), self.message.content)):
            source.begin_trial(CALLS)
            yield from source.space()
            first = yield from source.peek()
            if first == "[":
                yield from self.read_list()
            elif first == "{":
                yield from self.read_call()
            else:
                yield from self._read_named()
            self._reject()

    def _read_named(self) -> Steps[None]:
        """Read `name[ARGS]{...}`, with or without the model's own id of the call, and with or without the mark."""
        source = self.source
        name = yield from source.word(NAME, MAX_NAME)
        if not name:
            return
        if (yield from source.accept(CALL_ID)):
            yield from source.word(NAME, MAX_NAME)
        if not (yield from source.accept(ARGS)) and (yield from source.peek()) != "{":
            return
        source.end_trial()
        self.message.begin_call(name)
        yield from source.space()
        if (yield from read_arguments(source, self.message.arguments)):
            self.message.complete_call()


MISTRAL = MistralFormat(
    name="mistral",
    marks=(CALLS, ARGS, CALL_ID),
    parser=MistralParser,
    head='{"name": "NAME", "arguments": ',
    tail="}",
    between=", ",
    frame=("[", "]"),
    repeats_mark=False,
)
MISTRAL_NAMED = MistralFormat(name="mistral_named", marks=MISTRAL.marks, parser=MistralParser, head=f"NAME{ARGS}")
"""Format of tokenizers from v11: each call has its name before its arguments."""
