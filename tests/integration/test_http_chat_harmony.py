"""gpt-oss over HTTP: each message has a header, with channels for reasoning, content and calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from shared.messages import Bundle
from tests.fakes.chat_gateway import ask, both, chat_gateway
from tests.fakes.tokenizers import byte_level_json, make_bundle

END = 2
"""The token <|im_end|>, used for <|return|>."""
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
TEMPLATE = (
    "{# <|channel|>analysis<|message|> #}"
    "{% if reasoning_effort is defined %}<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>{% endif %}"
    "{% for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{% endfor %}"
    "{% for message in messages %}"
    "{% if message.tool_calls %}<|start|>assistant<|channel|>commentary to=functions."
    "{{ message.tool_calls[0].function.name }} <|constrain|>json<|message|>"
    "{{ message.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


def tokenizer() -> Tokenizer:
    made = Tokenizer.from_str(byte_level_json().decode())
    made.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return made


def bundle() -> Bundle:
    return make_bundle(tokenizer().to_str().encode(), TEMPLATE)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


async def test_reasoning_and_a_call(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, lambda _: [*ids(THOUGHT + CALL), END], bundle=bundle()) as (gateway, _):
        answer = await both(gateway, tools=TOOLS)
    assert answer["reasoning"] == "Let me see." and answer["content"] == ""
    assert [(call["name"], json.loads(call["arguments"])) for call in answer["calls"]] == [("f", {"a": 1})]
    assert answer["finish_reason"] == "tool_calls"


async def test_grammars_hold_whole_messages(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "required": ["b"]}}}
    model = LLTokenizer(tokenizer().to_str(), eos_token=END)
    async with chat_gateway(tmp_path, lambda _: [*ids(FINAL + '{"b": 1}'), END], bundle=bundle()) as (gateway, worker):

        async def accepted(**fields: Any) -> list[bool]:
            await ask(gateway, **fields)
            grammar = worker.submits()[-1].grammar
            results = []
            for text in ('{"b": 1}', "No."):
                for before in (THOUGHT, ""):
                    matcher = LLMatcher(model, grammar, log_level=0)
                    results.append(matcher.consume_tokens(ids(before + FINAL + text)) and matcher.is_accepting())
            for before in (THOUGHT, ""):
                matcher = LLMatcher(model, grammar, log_level=0)
                results.append(matcher.consume_tokens(ids(before + CALL)) and matcher.is_accepting())
            return results

        assert await accepted(response_format=form) == [True, True, False, False, False, False]
        assert await accepted(response_format=form, tools=TOOLS) == [True, True, False, False, True, True]
        assert await accepted(tools=TOOLS, tool_choice="required") == [False, False, False, False, True, True]


async def test_effort_and_budget(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, lambda _: [*ids(FINAL + "Yes."), END], bundle=bundle()) as (gateway, worker):
        await ask(gateway, reasoning_effort="low", thinking_token_budget=9)
        submit = worker.submits()[-1]
        assert tokenizer().decode(submit.token_ids, False).startswith("<|start|>system<|message|>Reasoning: low<|end|>")
        thinking = submit.sampling.thinking
        assert thinking is not None and thinking.start_ids == tuple(ids("<|channel|>analysis<|message|>"))
        assert thinking.end_ids == tuple(ids("<|end|><|start|>assistant<|channel|>final<|message|>"))
        await ask(gateway, thinking_token_budget=9, tools=TOOLS, tool_choice="required")
        assert worker.submits()[-1].sampling.thinking.end_ids == tuple(ids("<|end|>"))
