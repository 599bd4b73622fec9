"""Mistral's tool calls.

They are `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since tokenizer v11 `[TOOL_CALLS]name[ARGS]{...}` for
each call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gateway.text.grammars.grammar import literal
from gateway.text.message_parser import ToolParser
from gateway.text.tools.calls_grammar import MarkedFormat, call_arguments, call_rules, object_call, repeated
from gateway.text.tools.format import CallArguments, Tool, random_id
from gateway.text.tools.json_calls import JsonCallParser, read_arguments
from gateway.text.tools.reader import MAX_NAME, NAME, Steps

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralFormat(MarkedFormat):
    """Format of Mistral. Ids of calls have nine characters, because the templates refuse others. See ToolFormat.

    Args:
        named: Each call has its name before its arguments (tokenizers from v11); otherwise all calls are one list.
    """

    marks = (CALLS, ARGS, CALL_ID)

    def __init__(self, *, named: bool) -> None:
        self.name = "mistral_named" if named else "mistral"
        self._named = named
        self.separator = "" if named else None
        self.repeats_mark = named

    def new_parser(self, tools: Sequence[Tool]) -> ToolParser:
        """See ToolFormat. The parser reads both forms."""
        return MistralParser(self.new_call_id)

    def new_call_id(self) -> str:
        """See ToolFormat."""
        return random_id(9)

    def render_calls(self, calls: Sequence[tuple[str, CallArguments]]) -> str:
        """See ToolFormat."""
        if self._named:
            return "".join(f"{CALLS}{name}{ARGS}{json.dumps(values, ensure_ascii=False)}" for name, values in calls)
        objects = [{"name": name, "arguments": values} for name, values in calls]
        return CALLS + json.dumps(objects, ensure_ascii=False)

    def after_mark(
        self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool, free: bool
    ) -> tuple[str, tuple[str, ...]]:
        """See MarkedFormat."""
        if self._named:
            # Tokenizer v11 has a token for an id, and its models write one.
            call_id = f" ({literal(CALL_ID, special_ids)} /[a-zA-Z0-9]{{9}}/)?" if CALL_ID in special_ids else ""
            head = f"{call_id} {literal(ARGS, special_ids)}"
            return "t_call", call_rules(
                tools, lambda tool: f"{json.dumps(tool.name)}{head} {call_arguments(tool, free=free)}"
            )
        calls = call_rules(tools, lambda tool: object_call(tool, call_arguments(tool, free=free)))
        several = repeated("t_call", '", " t_call', parallel=parallel)
        # SentencePiece tokenizers begin a word after a mark: `[TOOL_CALLS] [{`.
        return "t_list", (f't_list: " "? "[" {several} "]"', *calls)


class MistralParser(JsonCallParser):
    """Parser of calls after `[TOOL_CALLS]`."""

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
