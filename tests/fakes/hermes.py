"""Fake model with ChatML, Hermes tool calls and `<think>`: its text bundle and a worker's answers to prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.text.detokenizer import build_token_bytes
from shared.messages import Bundle, Finish, FinishReason, Submit
from tests.fakes.tokenizers import byte_level_json, make_bundle

END = 2
"""The token <|im_end|>."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

TEMPLATE = """\
{%- macro turn(role, content) %}{{ '<|im_start|>' ~ role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}{% endmacro %}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}
{%- if tools %}
    {%- set ns.system = ns.system ~ '\\n# Functions\\nYou may call these functions:\\n<tools>' %}
    {%- for tool in tools %}{% set ns.system = ns.system ~ '\\n' ~ (tool | tojson) %}{% endfor %}
    {%- set ns.system = ns.system ~ '\\n</tools>\\nA call is an object with a name and arguments between marks:\\n'
        ~ '<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>' %}
{%- endif %}
{%- if ns.system %}{{ turn('system', ns.system) }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- turn('user', '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>') }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set ns.said = message.content or '' %}
        {%- for call in message.tool_calls %}
            {%- set ns.said = ns.said ~ '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": '
                ~ (call.function.arguments | tojson) ~ '}\\n</tool_call>' %}
        {%- endfor %}
        {{- turn('assistant', ns.said) }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


@cache
def _tokenizer_json() -> bytes:
    tokenizer = Tokenizer.from_str(byte_level_json().decode())
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return tokenizer.to_str().encode()


@cache
def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of about 350 tokens; each mark is one token that is not special."""
    return Tokenizer.from_str(_tokenizer_json().decode())


def hermes_bundle() -> Bundle:
    """Return the text bundle of the model."""
    return make_bundle(_tokenizer_json(), TEMPLATE)


def ids_of_bytes(data: bytes) -> list[int]:
    """Return a token for each byte and the end token; the bytes need not be UTF-8."""
    return [*map(_byte_ids().__getitem__, data), END]


@cache
def _byte_ids() -> list[int]:
    table = build_token_bytes(json.loads(_tokenizer_json()), tokenizer().get_vocab()).table
    return [table.index(bytes([byte])) for byte in range(256)]


def ids_of(text: str) -> list[int]:
    """Return the tokens of `text` and the end token."""
    return [*tokenizer().encode(text, add_special_tokens=False).ids, END]


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


def conversation(token_ids: Sequence[int]) -> list[tuple[str, str]]:
    """Return (role, content) of each message in a prompt; results of tools have the role `tool`."""
    text = tokenizer().decode(list(token_ids), skip_special_tokens=False)
    turns: list[tuple[str, str]] = []
    for role, content in _TURN.findall(text):
        if content.startswith("<tool_response>"):
            role, content = "tool", content.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        turns.append((role, content))
    return turns


@dataclass(frozen=True)
class Failure:
    """Answer that ends with a worker error after some text."""

    text: str
    finish: Finish


Answer = str | Sequence[int] | Callable[[list[str]], str] | Failure
"""Text, token ids, a function of the tool results that follow the question, or an error."""


class Answers:
    """Answers by question; a plain prompt is itself the question. An unknown question is an error."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self._answers = answers

    def script(self, submit: Submit) -> list[int]:
        """Return the script for FakeWorker."""
        answer, results = self._find(submit)
        if callable(answer):
            answer = answer(results)
        if isinstance(answer, Failure):
            return ids_of(answer.text)[:-1]
        return ids_of(answer) if isinstance(answer, str) else list(answer)

    def failure(self, submit: Submit) -> Finish | None:
        """Return the script for FakeWorker."""
        answer, _ = self._find(submit)
        return answer.finish if isinstance(answer, Failure) else None

    def _find(self, submit: Submit) -> tuple[Answer, list[str]]:
        turns = conversation(submit.token_ids)
        if not turns:
            turns = [("user", tokenizer().decode(submit.token_ids, skip_special_tokens=False))]
        place = max(index for index, (role, _) in enumerate(turns) if role == "user")
        question = turns[place][1]
        answer = self._answers.get(question)
        if answer is None:
            answer = Failure("", Finish(FinishReason.ERROR, message=f"there is no prepared answer to {question!r}"))
        return answer, [content for role, content in turns[place:] if role == "tool"]
