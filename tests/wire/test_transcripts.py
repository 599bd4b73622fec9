"""Complete responses, byte for byte, compared with the transcripts in this folder.

Only ids, times and variable header values are replaced. A changed transcript is a change for clients.
`PYTHONPATH=. python -m tests.wire.test_transcripts` writes the transcripts for review.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.flow.events import TextDelta
from gateway.text.formats import TOOL_FORMATS, ModelFormats
from gateway.text.message_parser import ToolCallDelta
from gateway.text.reasoning import REASONING_FORMATS
from shared.errors import WorkerLostError
from shared.messages import DraftCounts
from tests.fakes.fake_generator import MODEL, SUPPORT, FakeEntry, FakeGenerator, FakeModels, Script, facts, spell
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


def _calls(reason: str) -> FakeGenerator:
    call = ToolCallDelta(0, "{}", id="call_1", name="get_weather")
    return _speaks(TextDelta(0, "", [1], tool_calls=[call]), TextDelta(0, "", [], finish_reason=reason))


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


def _stopped(_request: Any) -> list[Any]:
    """Return a generation ended by a stop string."""
    return [
        TextDelta(0, "One", [1], num_cached_tokens=2),
        TextDelta(0, "", [2], finish_reason="stop", stop_reason="END"),
    ]


def _overloaded() -> FakeGenerator:
    generator = FakeGenerator()
    generator.submit_error = WorkerLostError("The worker died.")
    return generator


EMBEDDING = {"model": MODEL, "input": ["hi", "you"]}
RESPONSE = {"model": MODEL, "input": "hi"}
RESPONSE_TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
STREAM = {"stream": True}
CONTINUOUS = {"stream": True, "stream_options": {"continuous_usage_stats": True}}


@dataclass(frozen=True)
class Case:
    """Request and the generator that answers it."""

    method: str
    path: str
    body: dict[str, Any] | None
    generator: FakeGenerator


def _get(path: str, generator: FakeGenerator | None = None, method: str = "GET") -> Case:
    return Case(method, path, None, generator or FakeGenerator())


def _post(path: str, body: dict[str, Any], answers: Script | FakeGenerator | None = None, /, **fields: Any) -> Case:
    """Return a case with the fields added to `body`; `answers` is the generator or its script."""
    generator = answers if isinstance(answers, FakeGenerator) else FakeGenerator(answers)
    return Case("POST", path, {**body, **fields}, generator)


_chat = partial(_post, "/v1/chat/completions", CHAT)
_completion = partial(_post, "/v1/completions", COMPLETION)
_embedding = partial(_post, "/v1/embeddings", EMBEDDING)
_message = partial(_post, "/v1/messages", MESSAGE)
_response = partial(_post, "/v1/responses", RESPONSE)

CASES = {
    "chat": _chat(spell(TEXT, cached=16)),
    "chat_stream": _chat(spell(TEXT), **STREAM),
    "chat_stream_usage": _chat(spell("ab", "length"), **USAGE, n=2),
    "chat_stream_logprobs": _chat(spell("\u00e9"), **STREAM, logprobs=True, top_logprobs=1),
    "chat_stream_error": _chat(_failing, **STREAM),
    "chat_reasoning": _chat(_thinks()),
    "chat_tools": _chat(_calls("tool_calls"), tools=TOOLS),
    "chat_stream_reasoning_tools": _chat(_thinks_and_calls(), **USAGE, tools=TOOLS),
    "chat_tools_n": _chat(_calls_twice(), tools=TOOLS, n=2),
    "chat_stream_tools_n": _chat(_calls_twice(), **USAGE, tools=TOOLS, n=2),
    "chat_tool_named": _chat(_calls("stop"), **NAMED),
    "chat_tool_results": _chat(_thinks(), messages=HISTORY, tools=TOOLS),
    "chat_schema": _chat(spell('{"a": 1}'), **SCHEMA),
    "chat_stream_schema": _chat(spell('{"a"', "length"), **SCHEMA, **STREAM, logprobs=True),
    "chat_prediction": _chat(_Drafter(), **PREDICTION),
    "chat_stream_prediction": _chat(_Drafter(), **USAGE, **PREDICTION, n=2),
    "chat_error_prediction": _chat(**PREDICTION),
    "chat_error_schema": _chat(**BAD_SCHEMA),
    "chat_error_unknown": _chat(no_such=1, **STREAM),
    "chat_error_refused": _chat(functions=[{"name": "f"}]),
    "chat_error_tools": _chat(_thinks(), tools=[{"type": "web_search"}]),
    "chat_error": _chat(temperature=3),
    "chat_token_ids": _chat(
        spell("a"), return_token_ids=True, metadata={"a": "b"}, logprobs=True, return_tokens_as_token_ids=True
    ),
    "chat_stream_token_ids": _chat(spell("\u00e9", "length"), **CONTINUOUS, return_token_ids=True),
    "chat_stream_resumable": _chat(spell("ab"), stream=True, stream_options={"resumable": True}),
    "chat_render": _post("/v1/chat/completions/render", CHAT, max_tokens=5),
    "completion": _completion(spell(TEXT, cached=16), n=2),
    "completion_stream": _completion(spell(TEXT), **USAGE),
    "completion_echo_logprobs": _completion(spell("ab"), echo=True, logprobs=1),
    "completion_stream_logprobs": _completion(spell("ab"), **STREAM, logprobs=1),
    "completion_scores": _completion(
        spell("ab"), max_tokens=0, prompt_logprobs=1, return_token_ids=True, service_tier="flex"
    ),
    "completion_stream_token_ids": _completion(spell("\u00e9", "length"), **CONTINUOUS, return_token_ids=True),
    "completion_not_speculative": _completion(spell("a"), speculative={"enabled": False}),
    "completion_refused": _completion(n_probs=3),
    "completion_best_of": _completion(spell("ab"), best_of=3),
    "completion_error_suffix": _completion(suffix="."),
    "completion_render": _post("/v1/completions/render", COMPLETION, prompt=["a", "\u00e9"]),
    "completion_render_refused": _post("/v1/completions/render", COMPLETION, top_p=2),
    "embedding": _embedding(),
    "embedding_base64": _embedding(encoding_format="base64", dimensions=4, metadata={"a": "b"}),
    "embedding_error": _embedding(input=["hi", ""]),
    "message": _message(spell(TEXT, cached=16), system="Be brief."),
    "message_stream": _message(spell(TEXT, cached=16), **STREAM),
    "message_tools": _message(_thinks_and_calls(), tools=ANTHROPIC_TOOLS),
    "message_stream_tools": _message(_thinks_and_calls(), **STREAM, tools=ANTHROPIC_TOOLS),
    "message_stop_sequence": _message(_stopped, stop_sequences=["END"]),
    "message_stream_stop_sequence": _message(_stopped, stop_sequences=["END"], **STREAM),
    "message_stream_length": _message(spell("ab", "length"), **STREAM),
    "message_tool_results": _message(_thinks(), messages=ANTHROPIC_HISTORY, tools=ANTHROPIC_TOOLS),
    "message_stream_error": _message(_failing, **STREAM),
    "message_error": _message(temperature=2),
    "message_error_image": _message(messages=[{"role": "user", "content": [IMAGE]}]),
    "message_history": _message(_thinks(), **AGENT, messages=FOREIGN_HISTORY),
    "message_stream_thinking_omitted": _message(
        _thinks(), **STREAM, thinking={"type": "adaptive", "display": "omitted"}
    ),
    "message_error_thread": _message(thread={"type": "create"}),
    "message_error_context": _message(context_management={"edits": [{"type": "compact_20260112"}]}),
    "message_error_model": _message(model="nope"),
    "message_overloaded": _message(_overloaded()),
    "message_method_not_allowed": _get("/v1/messages"),
    "message_no_route": _get("/v1/messages/batches"),
    "message_count": _post("/v1/messages/count_tokens", CHAT, _thinks(), system="Be brief.", tools=ANTHROPIC_TOOLS),
    "response": _response(spell(TEXT, cached=16)),
    "response_incomplete": _response(
        spell("\u00e9", "length"), include=["message.output_text.logprobs"], top_logprobs=1, metadata={"a": "b"}
    ),
    "response_stream": _response(spell(TEXT), **STREAM),
    "response_stream_reasoning_tools": _response(_thinks_and_calls(), **STREAM, tools=RESPONSE_TOOLS),
    "response_stream_error": _response(_failing, **STREAM),
    "response_background": _response(background=True),
    "response_error": _response(conversation="c"),
    "response_error_tools": _response(tools=[{"type": "web_search"}], **STREAM),
    "response_error_previous": _response(previous_response_id="resp_00"),
    "response_input_tokens": _post("/v1/responses/input_tokens", RESPONSE, instructions="Be brief."),
    "response_unknown": _get("/v1/responses/resp_00"),
    "stream_unknown": _get("/v1/streams/chatcmpl-00"),
    "request_unknown": _get("/v1/requests/chatcmpl-00a2648f8912546fee36876baa822a7b", method="DELETE"),
    "models": _get("/v1/models"),
    "model": _get("/v1/models/org/alias"),
    "models_anthropic": _get("/v1/models?limit=1"),
    "models_anthropic_error": _get("/v1/models?after_id=nope"),
    "model_anthropic": _get("/v1/models/org%2Falias?beta=true", _thinks()),
    "model_anthropic_unknown": _get("/v1/models/nope"),
    "model_unknown": _get("/v1/models/nope"),
    "tokenize": _post("/tokenize", COMPLETION),
    "tokenize_chat": _post("/tokenize", CHAT, _thinks(), messages=HISTORY, tools=TOOLS),
    "detokenize": _post("/detokenize", {"model": MODEL, "tokens": [104, 105]}),
    "health": _get("/health"),
    "ready": _get("/ready"),
    "method_not_allowed": _get("/v1/models", method="DELETE"),
}


HEADERS = {
    name: {"anthropic-version": "2023-06-01"}
    for name in ("models_anthropic", "model_anthropic", "model_anthropic_unknown", "models_anthropic_error")
}
"""Additional headers by case."""


async def _transcript(name: str) -> str:
    case = CASES[name]
    async with run_gateway(case.generator, FakeModels(_entry(case.generator))) as gateway:
        headers = {"X-Request-Id": "the-request", **HEADERS.get(name, {})}
        async with gateway.session.request(
            case.method, gateway.url + case.path, json=case.body, headers=headers
        ) as response:
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
    return f"{case.method} {case.path}\nHTTP {response.status}\n{head}\n\n{raw}\n"


@pytest.mark.parametrize("name", CASES)
async def test_transcript(name):
    assert await _transcript(name) == (FOLDER / f"{name}.txt").read_text("utf-8")


def test_each_transcript_has_its_case():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(asyncio.run(_transcript(case)), "utf-8")
