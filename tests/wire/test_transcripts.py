"""Complete responses, byte for byte, compared with the transcripts in this folder.

Only ids, times and variable header values are replaced. A changed transcript is a change for clients.
`PYTHONPATH=. python -m tests.wire.test_transcripts` writes the transcripts for review.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.flow.events import TextDelta
from gateway.text.formats import TOOL_FORMATS, ModelFormats
from gateway.text.message_parser import ToolCallDelta
from gateway.text.reasoning import REASONING_FORMATS
from shared.errors import WorkerLostError
from shared.messages import DraftCounts
from tests.fakes.fake_generator import MODEL, SUPPORT, FakeEntry, FakeGenerator, FakeModels, facts, spell
from tests.fakes.http_gateway import run_gateway

FOLDER = Path(__file__).parent
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": "hi"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TEXT = 'H"\u2028\U0001f600'


def _failing(_request: Any) -> list[Any]:
    return [TextDelta(0, "Hel", [1]), WorkerLostError("The worker died.")]


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


class _Thinker(FakeGenerator):
    """Pipeline of a model with formats for reasoning and calls. The parsers have their own tests."""

    formats = ModelFormats(reasoning=REASONING_FORMATS["think"], tools=TOOL_FORMATS["hermes"], template=SUPPORT)


class _Drafter(FakeGenerator):
    """Pipeline of a server that drafts tokens."""

    def __init__(self) -> None:
        super().__init__(spell("abc", drafts=DraftCounts(2, 1)))


def _entry(generator: FakeGenerator) -> FakeEntry:
    """Return the entry of the model."""
    if isinstance(generator, _Thinker):
        return FakeEntry(formats=generator.formats)
    if isinstance(generator, _Drafter):
        return FakeEntry(facts(speculative_method="ngram"))
    return FakeEntry()


def _speaks(*deltas: TextDelta) -> FakeGenerator:
    return _Thinker(lambda _: list(deltas))


def _thinks_and_calls() -> FakeGenerator:
    return _speaks(
        TextDelta(0, "", [1], reasoning="Hm", num_reasoning_tokens=1, num_cached_tokens=0),
        TextDelta(0, "", [2], reasoning=" \U0001f600.", num_reasoning_tokens=1),
        TextDelta(0, "Let me look.", [3, 4]),
        TextDelta(0, "", [5, 6], tool_calls=[ToolCallDelta(0, '{"city": ', id="call_1", name="get_weather")]),
        TextDelta(
            0, "", [7], tool_calls=[ToolCallDelta(0, '"Bern"}'), ToolCallDelta(1, "{}", "call_2", "get_weather")]
        ),
        TextDelta(0, "", [8], finish_reason="tool_calls"),
    )


def _thinks() -> FakeGenerator:
    return _speaks(
        TextDelta(0, "", [1], reasoning="Hm.", num_reasoning_tokens=1),
        TextDelta(0, "Yes.", [2], finish_reason="stop"),
    )


def _calls() -> FakeGenerator:
    call = ToolCallDelta(0, "{}", id="call_1", name="get_weather")
    return _speaks(TextDelta(0, "", [1], tool_calls=[call]), TextDelta(0, "", [], finish_reason="tool_calls"))


def _calls_twice() -> FakeGenerator:
    """Return two choices with reasoning, text and calls."""
    deltas = [
        TextDelta(0, "", [1], reasoning="Hm.", num_reasoning_tokens=1, num_cached_tokens=16),
        TextDelta(1, "One moment.", [2], num_cached_tokens=16),
    ]
    for choice in (0, 1):
        for index in (0, 1):
            call = ToolCallDelta(index, f'{{"day": {index}}}', id=f"call_{choice}{index}", name="get_weather")
            deltas.append(TextDelta(choice, "", [3, 4], tool_calls=[call]))
        deltas.append(TextDelta(choice, "", [5], finish_reason="tool_calls"))
    return _speaks(*deltas)


def _called_by_name() -> FakeGenerator:
    call = ToolCallDelta(0, "{}", id="call_1", name="get_weather")
    return _speaks(TextDelta(0, "", [1], tool_calls=[call]), TextDelta(0, "", [], finish_reason="stop"))


NAMED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}}
BAD_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "intt"}}}}

PREDICTION = {"prediction": {"type": "content", "content": [{"type": "text", "text": "abd"}]}}

MESSAGE = {**CHAT, "max_tokens": 100}
ANTHROPIC_TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": {"type": "object"}}]
ANTHROPIC_HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "any"},
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "Rain."}]},
]
AGENT = {
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "speed": "standard",
}
FOREIGN_HISTORY = [
    {
        "role": "user",
        "content": [
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "Rain."},
                "title": "Sky",
            }
        ],
    },
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Rain."}]},
    {"role": "user", "content": "And tomorrow?"},
]
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


def _stopped() -> FakeGenerator:
    """Return a generation ended by a stop string."""
    return FakeGenerator(
        lambda _: [
            TextDelta(0, "One", [1], num_cached_tokens=2),
            TextDelta(0, "", [2], finish_reason="stop", stop_reason="END"),
        ]
    )


def _overloaded() -> FakeGenerator:
    generator = FakeGenerator()
    generator.submit_error = WorkerLostError("The worker died.")
    return generator


EMBEDDING = {"model": MODEL, "input": ["hi", "you"]}

RESPONSE = {"model": MODEL, "input": "hi"}
RESPONSE_TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]

CASES: dict[str, tuple[str, str, dict[str, Any] | None, FakeGenerator]] = {
    "chat": ("POST", "/v1/chat/completions", CHAT, FakeGenerator(spell(TEXT, cached=16))),
    "chat_stream": ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, FakeGenerator(spell(TEXT))),
    "chat_stream_usage": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, **USAGE, "n": 2},
        FakeGenerator(spell("ab", "length")),
    ),
    "chat_stream_logprobs": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 1},
        FakeGenerator(spell("\u00e9")),
    ),
    "chat_stream_error": ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, FakeGenerator(_failing)),
    "chat_reasoning": ("POST", "/v1/chat/completions", CHAT, _thinks()),
    "chat_tools": ("POST", "/v1/chat/completions", {**CHAT, "tools": TOOLS}, _calls()),
    "chat_stream_reasoning_tools": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, **USAGE, "tools": TOOLS},
        _thinks_and_calls(),
    ),
    "chat_tools_n": ("POST", "/v1/chat/completions", {**CHAT, "tools": TOOLS, "n": 2}, _calls_twice()),
    "chat_stream_tools_n": ("POST", "/v1/chat/completions", {**CHAT, **USAGE, "tools": TOOLS, "n": 2}, _calls_twice()),
    "chat_tool_named": ("POST", "/v1/chat/completions", {**CHAT, **NAMED}, _called_by_name()),
    "chat_tool_results": ("POST", "/v1/chat/completions", {**CHAT, "messages": HISTORY, "tools": TOOLS}, _thinks()),
    "chat_schema": ("POST", "/v1/chat/completions", {**CHAT, **SCHEMA}, FakeGenerator(spell('{"a": 1}'))),
    "chat_stream_schema": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, **SCHEMA, "stream": True, "logprobs": True},
        FakeGenerator(spell('{"a"', "length")),
    ),
    "chat_prediction": ("POST", "/v1/chat/completions", {**CHAT, **PREDICTION}, _Drafter()),
    "chat_stream_prediction": ("POST", "/v1/chat/completions", {**CHAT, **USAGE, **PREDICTION, "n": 2}, _Drafter()),
    "chat_error_prediction": ("POST", "/v1/chat/completions", {**CHAT, **PREDICTION}, FakeGenerator()),
    "completion_not_speculative": (
        "POST",
        "/v1/completions",
        {**COMPLETION, "speculative": {"enabled": False}},
        FakeGenerator(spell("a")),
    ),
    "chat_error_schema": ("POST", "/v1/chat/completions", {**CHAT, **BAD_SCHEMA}, FakeGenerator()),
    "chat_error_unknown": ("POST", "/v1/chat/completions", {**CHAT, "no_such": 1, "stream": True}, FakeGenerator()),
    "chat_error_refused": ("POST", "/v1/chat/completions", {**CHAT, "functions": [{"name": "f"}]}, FakeGenerator()),
    "chat_error_tools": ("POST", "/v1/chat/completions", {**CHAT, "tools": [{"type": "web_search"}]}, _thinks()),
    "chat_error": ("POST", "/v1/chat/completions", {**CHAT, "temperature": 3}, FakeGenerator()),
    "completion": ("POST", "/v1/completions", {**COMPLETION, "n": 2}, FakeGenerator(spell(TEXT, cached=16))),
    "completion_stream": ("POST", "/v1/completions", {**COMPLETION, **USAGE}, FakeGenerator(spell(TEXT))),
    "completion_echo_logprobs": (
        "POST",
        "/v1/completions",
        {**COMPLETION, "echo": True, "logprobs": 1},
        FakeGenerator(spell("ab")),
    ),
    "completion_stream_logprobs": (
        "POST",
        "/v1/completions",
        {**COMPLETION, "stream": True, "logprobs": 1},
        FakeGenerator(spell("ab")),
    ),
    "completion_scores": (
        "POST",
        "/v1/completions",
        {**COMPLETION, "max_tokens": 0, "prompt_logprobs": 1, "return_token_ids": True, "service_tier": "flex"},
        FakeGenerator(spell("ab")),
    ),
    "completion_stream_token_ids": (
        "POST",
        "/v1/completions",
        {**COMPLETION, "stream": True, "stream_options": {"continuous_usage_stats": True}, "return_token_ids": True},
        FakeGenerator(spell("\u00e9", "length")),
    ),
    "chat_token_ids": (
        "POST",
        "/v1/chat/completions",
        {
            **CHAT,
            "return_token_ids": True,
            "metadata": {"a": "b"},
            "logprobs": True,
            "return_tokens_as_token_ids": True,
        },
        FakeGenerator(spell("a")),
    ),
    "chat_stream_token_ids": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}, "return_token_ids": True},
        FakeGenerator(spell("\u00e9", "length")),
    ),
    "completion_refused": ("POST", "/v1/completions", {**COMPLETION, "n_probs": 3}, FakeGenerator()),
    "completion_best_of": ("POST", "/v1/completions", {**COMPLETION, "best_of": 3}, FakeGenerator(spell("ab"))),
    "completion_error_suffix": ("POST", "/v1/completions", {**COMPLETION, "suffix": "."}, FakeGenerator()),
    "embedding": ("POST", "/v1/embeddings", EMBEDDING, FakeGenerator()),
    "embedding_base64": (
        "POST",
        "/v1/embeddings",
        {**EMBEDDING, "encoding_format": "base64", "dimensions": 4, "metadata": {"a": "b"}},
        FakeGenerator(),
    ),
    "embedding_error": ("POST", "/v1/embeddings", {**EMBEDDING, "input": ["hi", ""]}, FakeGenerator()),
    "tokenize_chat": ("POST", "/tokenize", {"model": MODEL, "messages": HISTORY, "tools": TOOLS}, _thinks()),
    "message": ("POST", "/v1/messages", {**MESSAGE, "system": "Be brief."}, FakeGenerator(spell(TEXT, cached=16))),
    "message_stream": ("POST", "/v1/messages", {**MESSAGE, "stream": True}, FakeGenerator(spell(TEXT, cached=16))),
    "message_tools": ("POST", "/v1/messages", {**MESSAGE, "tools": ANTHROPIC_TOOLS}, _thinks_and_calls()),
    "message_stream_tools": (
        "POST",
        "/v1/messages",
        {**MESSAGE, "stream": True, "tools": ANTHROPIC_TOOLS},
        _thinks_and_calls(),
    ),
    "message_stop_sequence": ("POST", "/v1/messages", {**MESSAGE, "stop_sequences": ["END"]}, _stopped()),
    "message_stream_stop_sequence": (
        "POST",
        "/v1/messages",
        {**MESSAGE, "stop_sequences": ["END"], "stream": True},
        _stopped(),
    ),
    "message_stream_length": (
        "POST",
        "/v1/messages",
        {**MESSAGE, "stream": True},
        FakeGenerator(spell("ab", "length")),
    ),
    "message_tool_results": (
        "POST",
        "/v1/messages",
        {**MESSAGE, "messages": ANTHROPIC_HISTORY, "tools": ANTHROPIC_TOOLS},
        _thinks(),
    ),
    "message_stream_error": ("POST", "/v1/messages", {**MESSAGE, "stream": True}, FakeGenerator(_failing)),
    "message_error": ("POST", "/v1/messages", {**MESSAGE, "temperature": 2}, FakeGenerator()),
    "message_error_image": (
        "POST",
        "/v1/messages",
        {**MESSAGE, "messages": [{"role": "user", "content": [IMAGE]}]},
        FakeGenerator(),
    ),
    "message_history": ("POST", "/v1/messages", {**MESSAGE, **AGENT, "messages": FOREIGN_HISTORY}, _thinks()),
    "message_stream_thinking_omitted": (
        "POST",
        "/v1/messages",
        {**MESSAGE, "stream": True, "thinking": {"type": "adaptive", "display": "omitted"}},
        _thinks(),
    ),
    "message_error_thread": ("POST", "/v1/messages", {**MESSAGE, "thread": {"type": "create"}}, FakeGenerator()),
    "message_error_context": (
        "POST",
        "/v1/messages",
        {**MESSAGE, "context_management": {"edits": [{"type": "compact_20260112"}]}},
        FakeGenerator(),
    ),
    "message_error_model": ("POST", "/v1/messages", {**MESSAGE, "model": "nope"}, FakeGenerator()),
    "message_overloaded": ("POST", "/v1/messages", MESSAGE, _overloaded()),
    "message_method_not_allowed": ("GET", "/v1/messages", None, FakeGenerator()),
    "message_no_route": ("GET", "/v1/messages/batches", None, FakeGenerator()),
    "message_count": (
        "POST",
        "/v1/messages/count_tokens",
        {**CHAT, "system": "Be brief.", "tools": ANTHROPIC_TOOLS},
        _thinks(),
    ),
    "response": ("POST", "/v1/responses", RESPONSE, FakeGenerator(spell(TEXT, cached=16))),
    "response_incomplete": (
        "POST",
        "/v1/responses",
        {**RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 1, "metadata": {"a": "b"}},
        FakeGenerator(spell("\u00e9", "length")),
    ),
    "response_stream": ("POST", "/v1/responses", {**RESPONSE, "stream": True}, FakeGenerator(spell(TEXT))),
    "response_stream_reasoning_tools": (
        "POST",
        "/v1/responses",
        {**RESPONSE, "stream": True, "tools": RESPONSE_TOOLS},
        _thinks_and_calls(),
    ),
    "response_stream_error": ("POST", "/v1/responses", {**RESPONSE, "stream": True}, FakeGenerator(_failing)),
    "response_background": ("POST", "/v1/responses", {**RESPONSE, "background": True}, FakeGenerator()),
    "response_error": ("POST", "/v1/responses", {**RESPONSE, "conversation": "c"}, FakeGenerator()),
    "response_error_tools": (
        "POST",
        "/v1/responses",
        {**RESPONSE, "tools": [{"type": "web_search"}], "stream": True},
        FakeGenerator(),
    ),
    "response_error_previous": (
        "POST",
        "/v1/responses",
        {**RESPONSE, "previous_response_id": "resp_00"},
        FakeGenerator(),
    ),
    "response_unknown": ("GET", "/v1/responses/resp_00", None, FakeGenerator()),
    "response_input_tokens": (
        "POST",
        "/v1/responses/input_tokens",
        {**RESPONSE, "instructions": "Be brief."},
        FakeGenerator(),
    ),
    "chat_stream_resumable": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"resumable": True}},
        FakeGenerator(spell("ab")),
    ),
    "stream_unknown": ("GET", "/v1/streams/chatcmpl-00", None, FakeGenerator()),
    "chat_render": ("POST", "/v1/chat/completions/render", {**CHAT, "max_tokens": 5}, FakeGenerator()),
    "completion_render": ("POST", "/v1/completions/render", {**COMPLETION, "prompt": ["a", "\u00e9"]}, FakeGenerator()),
    "completion_render_refused": ("POST", "/v1/completions/render", {**COMPLETION, "top_p": 2}, FakeGenerator()),
    "request_unknown": ("DELETE", "/v1/requests/chatcmpl-00a2648f8912546fee36876baa822a7b", None, FakeGenerator()),
    "models": ("GET", "/v1/models", None, FakeGenerator()),
    "model": ("GET", "/v1/models/org/alias", None, FakeGenerator()),
    "models_anthropic": ("GET", "/v1/models?limit=1", None, FakeGenerator()),
    "models_anthropic_error": ("GET", "/v1/models?after_id=nope", None, FakeGenerator()),
    "model_anthropic": ("GET", "/v1/models/org%2Falias?beta=true", None, _thinks()),
    "model_anthropic_unknown": ("GET", "/v1/models/nope", None, FakeGenerator()),
    "model_unknown": ("GET", "/v1/models/nope", None, FakeGenerator()),
    "tokenize": ("POST", "/tokenize", COMPLETION, FakeGenerator()),
    "detokenize": ("POST", "/detokenize", {"model": MODEL, "tokens": [104, 105]}, FakeGenerator()),
    "health": ("GET", "/health", None, FakeGenerator()),
    "ready": ("GET", "/ready", None, FakeGenerator()),
    "method_not_allowed": ("DELETE", "/v1/models", None, FakeGenerator()),
}


HEADERS = {
    name: {"anthropic-version": "2023-06-01"}
    for name in ("models_anthropic", "model_anthropic", "model_anthropic_unknown", "models_anthropic_error")
}
"""Additional headers by case."""


async def _transcript(name: str) -> str:
    method, path, body, generator = CASES[name]
    async with run_gateway(generator, FakeModels(_entry(generator))) as gateway:
        headers = {"X-Request-Id": "the-request", **HEADERS.get(name, {})}
        async with gateway.session.request(method, gateway.url + path, json=body, headers=headers) as response:
            raw = (await response.read()).decode()
            lines = [f"{header}: {value}" for header, value in response.headers.items()]
    head = "\n".join(line for line in lines if not line.startswith("Date:"))
    head = re.sub(r"openai-processing-ms: \d+", "openai-processing-ms: 0", head)
    raw = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id":"\1-ID"', raw)
    raw = re.sub(r'"(id|item_id)":"(msg|resp|rs|fc)_[0-9a-f]{32}"', r'"\1":"\2_ID"', raw)
    raw = re.sub(r'"(created_at|completed_at)":\d+', r'"\1":0', raw)
    raw = re.sub(r'"system_fingerprint":"fp_[0-9a-f]{12}"', '"system_fingerprint":"fp_ID"', raw)
    raw = re.sub(r'"created":\d+', '"created":0', raw)
    head = re.sub(r"Content-Length: \d+", "Content-Length: 0", head)
    return f"{method} {path}\nHTTP {response.status}\n{head}\n\n{raw}\n"


@pytest.mark.parametrize("name", CASES)
async def test_transcript(name):
    assert await _transcript(name) == (FOLDER / f"{name}.txt").read_text("utf-8")


def test_each_transcript_has_its_case():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(asyncio.run(_transcript(case)), "utf-8")
