"""Reasoning and tool calls over HTTP with prepared texts of a worker, streamed and whole.

Numbers in docstrings are cases of the collected bug reports.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.text.formats import TOOL_FORMATS
from tests.fakes.chat_gateway import MODEL, ask, both, chat_gateway
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import running_core, until
from tests.fakes.hermes import TEMPLATE, call_text, hermes_bundle, ids_of, tokenizer
from tests.fakes.http_gateway import parse_events
from tests.fakes.tokenizers import make_bundle

THOUGHT = "<think>\nA song? Look.\n</think>\n\n"
ARGUMENTS: dict[str, Any] = {"city": 'Z\u00fcrich "}]"', "days": [1, {"a": None}], "deep": {"b": True}}
FUNCTION = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "array"}, "deep": {"type": "object"}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = call_text("get_weather", ARGUMENTS)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
async def test_each_format_of_calls_streamed_and_whole(tmp_path: Path, name: str) -> None:
    """26 to 30, 36."""
    calls = TOOL_FORMATS[name].render_calls([("get_weather", ARGUMENTS)])
    async with chat_gateway(tmp_path, THOUGHT + calls, tool_call_parser=name) as (gateway, _):
        answer = await both(gateway, tools=TOOLS)
        assert answer["reasoning"] == answer["reasoning_content"] == "A song? Look."
        assert [call["name"] for call in answer["calls"]] == ["get_weather"]
        assert json.loads(answer["calls"][0]["arguments"]) == ARGUMENTS
        assert (answer["content"], answer["finish_reason"]) == ("", "tool_calls")


async def test_content_and_several_calls_and_choices(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, f"{THOUGHT}Let me look.\n{CALL}\n{CALL}") as (gateway, _):
        answer = await both(gateway, tools=TOOLS, n=3)
        assert answer["content"].strip() == "Let me look." and len(answer["calls"]) == 2
        body = await ask(gateway, tools=TOOLS, n=3)
        ids = [call["id"] for choice in body["choices"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == 6
        message = (await ask(gateway, tools=TOOLS))["choices"][0]["message"]
        assert list(message) == ["role", "content", "refusal", "reasoning_content", "reasoning", "tool_calls"]


async def test_without_tools_calls_are_content(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, CALL) as (gateway, worker):
        none: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}]
        for fields in none:
            answer = await both(gateway, **fields)
            assert (answer["content"], answer["calls"], answer["finish_reason"]) == (CALL, [], "stop")
        assert worker.submits()[-1].grammar == ""


async def test_reasoning_can_be_left_out_and_is_counted(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, THOUGHT + "Yes.") as (gateway, _):
        answer = await both(gateway, include_reasoning=False)
        assert (answer["content"], answer["reasoning"], answer["reasoning_content"]) == ("Yes.", "", "")
        body = await ask(gateway, include_reasoning=False)
        assert "reasoning" not in body["choices"][0]["message"]
        count = len(ids_of(THOUGHT.rstrip())) - 1
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == count
        raw = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "include_reasoning": False}
        options = {"stream_options": {"include_usage": True}}
        events = parse_events(await gateway.stream_raw("/v1/chat/completions", {**raw, **options}))
        assert events[-2]["usage"] == body["usage"]
        assert all("reasoning" not in choice["delta"] for event in events[:-1] for choice in event["choices"])


async def test_thinking_and_its_budget_reach_the_worker(tmp_path: Path) -> None:
    opening, closing = (tokenizer().token_to_id(mark) for mark in ("<think>", "</think>"))
    async with chat_gateway(tmp_path, "Yes.") as (gateway, worker):
        await ask(gateway, thinking_token_budget=7, reasoning_effort="high")
        thinking = worker.submits()[-1].sampling.thinking
        assert thinking is not None and not thinking.open and thinking.max_tokens == 7
        assert (thinking.start_ids, thinking.end_ids) == ((opening,), (closing,))
        await ask(gateway, reasoning_effort="none")
        prompt = tokenizer().decode(worker.submits()[-1].token_ids, skip_special_tokens=False)
        assert prompt.endswith("<think>\n\n</think>\n\n")
        status, body, _ = await gateway.chat(model=MODEL, thinking_token_budget=-1)
        assert status == 400 and body["error"]["param"] == "thinking_token_budget"
        for fields in (
            {"reasoning_effort": "enormous"},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        ):
            status, body, _ = await gateway.chat(model=MODEL, **fields)
            assert status == 400 and body["error"]["param"] == "reasoning_effort"


async def test_a_prompt_that_opens_the_reasoning(tmp_path: Path) -> None:
    template = TEMPLATE.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}")
    assert template != TEMPLATE
    bundle = make_bundle(tokenizer().to_str().encode(), template)
    async with chat_gateway(tmp_path, "Hm.\n</think>\nYes.", bundle=bundle) as (gateway, worker):
        answer = await both(gateway)
        assert (answer["reasoning"], answer["content"]) == ("Hm.", "Yes.")
        await ask(gateway, thinking_token_budget=3)
        assert worker.submits()[-1].sampling.thinking.open
        await ask(gateway, tools=TOOLS, tool_choice="required")
        assert worker.submits()[-1].grammar.startswith("start: (/(?s:.*)/ (<[")


async def test_structured_output_after_reasoning(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    async with chat_gateway(tmp_path, THOUGHT + '{"a": 1}') as (gateway, worker):
        answer = await both(gateway, response_format=form, tools=TOOLS)
        assert (answer["reasoning"], answer["content"]) == ("A song? Look.", '{"a": 1}')
        # One grammar covers the optional reasoning, the calls and the content.
        grammar = worker.submits()[-1].grammar
        assert '"a"' in grammar and "get_weather" in grammar
        assert f"<[{tokenizer().token_to_id('</think>')}]>" in grammar
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}]
        status, body, _ = await gateway.chat(
            model=MODEL, messages=messages, continue_final_message=True, response_format=form
        )
        assert status == 400 and body["error"]["param"] == "continue_final_message"


async def test_a_prompt_is_counted_as_chat_makes_it(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, "Yes.") as (gateway, _):
        messages = [{"role": "user", "content": "hi"}]
        for fields in ({}, {"tools": TOOLS}, {"reasoning_effort": "none"}):
            status, counted, _ = await gateway.post("/tokenize", {"model": MODEL, "messages": messages, **fields})
            assert status == 200, counted
            body = await ask(gateway, messages=messages, **fields)
            assert body["usage"]["prompt_tokens"] == counted["count"]
            status, body, _ = await gateway.post("/tokenize", {"model": MODEL, "prompt": "hi", **fields})
            assert status == (400 if fields else 200)


async def test_without_a_reasoning_format_all_is_content(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, THOUGHT + "Yes.", reasoning_parser="none") as (gateway, _):
        answer = await both(gateway)
        assert (answer["content"], answer["reasoning"]) == (THOUGHT + "Yes.", "")
        assert "reasoning_tokens" not in (await ask(gateway))["usage"]["completion_tokens_details"]
        status, body, _ = await gateway.chat(model=MODEL, thinking_token_budget=7)
        assert status == 400 and body["error"]["param"] == "thinking_token_budget"
        assert body["error"]["code"] == "unsupported_parameter"


async def test_a_model_without_a_tool_parser(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, CALL, tool_call_parser="none") as (gateway, _):
        status, body, _ = await gateway.chat(model=MODEL, tools=TOOLS)
        assert status == 400 and body["error"]["param"] == "tools"
        assert (await both(gateway, tools=TOOLS, tool_choice="none"))["content"] == CALL


async def test_the_last_message_is_continued(tmp_path: Path) -> None:
    async with chat_gateway(tmp_path, " fox.") as (gateway, worker):
        messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "The quick "}]
        answer = await both(gateway, messages=messages, continue_final_message=True)
        assert answer["content"] == " fox."
        prompt = tokenizer().decode(worker.submits()[-1].token_ids, skip_special_tokens=False)
        assert prompt.endswith("<|im_start|>assistant\nThe quick ")
        await ask(gateway, messages=messages, add_generation_prompt=False)
        prompt = tokenizer().decode(worker.submits()[-1].token_ids, skip_special_tokens=False)
        assert prompt.endswith("The quick <|im_end|>\n")
        thinking = [messages[0], {"role": "assistant", "content": "<think>\nSo"}]
        assert (await both(gateway, messages=thinking, continue_final_message=True))["reasoning"] == "fox."
        for fields in (
            {"messages": messages, "add_generation_prompt": True},
            {"messages": messages[:1]},
            {"messages": [messages[0], {"role": "assistant", "content": ""}]},
        ):
            status, body, _ = await gateway.chat(model=MODEL, continue_final_message=True, **fields)
            assert status == 400 and body["error"]["param"] == "continue_final_message"


async def test_documents_need_a_template_that_reads_them(tmp_path: Path) -> None:
    documents = [{"title": "a", "text": "b"}]
    async with chat_gateway(tmp_path, "Yes.") as (gateway, _):
        status, body, _ = await gateway.chat(model=MODEL, documents=documents)
        assert status == 400 and body["error"]["param"] == "documents"
    template = "{% for one in documents or [] %}[{{ one.title }}: {{ one.text }}]{% endfor %}" + TEMPLATE
    bundle = make_bundle(tokenizer().to_str().encode(), template)
    (tmp_path / "two").mkdir()
    async with chat_gateway(tmp_path / "two", "Yes.", bundle=bundle) as (gateway, worker):
        await ask(gateway, documents=documents)
        assert tokenizer().decode(worker.submits()[-1].token_ids).startswith("[a: b]")
        await ask(gateway)
        assert not tokenizer().decode(worker.submits()[-1].token_ids).startswith("[")


async def test_null_content_is_passed_to_templates_that_test_for_it(tmp_path: Path) -> None:
    """Some templates write a turn for empty content; others write the word None for null."""
    template = (
        "{% for message in messages %}{% if message['tool_calls'] %}[call]{% endif %}"
        "{% if message['content'] is not none %}[{{ message['role'] }}: {{ message['content'] }}]{% endif %}"
        "{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for number, (source, prompt) in enumerate(
        ((template, "[user: a][call]"), (template.replace("is not none", "is string"), "[user: a][call][assistant: ]"))
    ):
        bundle = make_bundle(tokenizer().to_str().encode(), source)
        directory = tmp_path / str(number)
        await asyncio.to_thread(directory.mkdir)
        async with chat_gateway(directory, "Yes.", bundle=bundle, tool_call_parser="hermes") as (gateway, worker):
            await ask(gateway, messages=messages)
            assert tokenizer().decode(worker.submits()[-1].token_ids) == prompt


async def test_unknown_parser_flags_exclude_a_worker(tmp_path: Path) -> None:
    for number, flag in enumerate(({"reasoning_parser": "r2"}, {"tool_call_parser": "r2"})):
        directory = tmp_path / str(number)
        directory.mkdir()
        with FakeWorker(directory, bundle=hermes_bundle(), **flag):
            async with running_core(directory) as core:
                await until(lambda core=core: "known are" in core.registry.ready()[1])
                name = next(iter(flag)).replace("_", "-")
                assert f"--{name} is 'r2'" in core.registry.ready()[1]
