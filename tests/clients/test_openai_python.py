"""The official Python client, sync and async, against a real gateway in typical programs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from tests.clients.answers import ANSWERS, HELLO, KEY, pace
from tests.clients.test_openai_tools import ask
from tests.fakes.prepared_server import MODEL, PreparedServer


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=ask("hello"))
    (choice,) = answer.choices
    assert choice.message.content == HELLO and choice.message.role == "assistant"
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and choice.message.refusal is None
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert abs(answer.created - time.time()) < 60
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client):
    options: dict = {"include_usage": True, "include_obfuscation": False}
    asked = {"model": MODEL, "messages": ask("hello")}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == HELLO
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage == client.chat.completions.create(**asked).usage


async def test_async_clients_side_by_side(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:

        async def stream() -> str:
            chunks = await client.chat.completions.create(model=MODEL, messages=ask("hello"), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        assert await asyncio.gather(*(stream() for _ in range(8))) == [HELLO] * 8


def test_the_stream_helper_accumulates(client):
    with client.chat.completions.stream(model=MODEL, messages=ask("hello")) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == HELLO and final.choices[0].finish_reason == "stop"


def test_logprobs_spell_the_text(client):
    answer = client.chat.completions.create(model=MODEL, messages=ask("hello"), logprobs=True, top_logprobs=1)
    content = answer.choices[0].logprobs.content
    spelled = b"".join(bytes(token.bytes or []) for token in content)
    # The token that ended the text is reported too, but is not part of it.
    assert spelled.removesuffix(b"<|im_end|>").decode() == HELLO
    assert all(token.logprob == -0.5 and len(token.top_logprobs) == 1 for token in content)
    plain = client.chat.completions.create(model=MODEL, messages=ask("hello"), logprobs=True)
    assert all(token.top_logprobs == [] for token in plain.choices[0].logprobs.content)
    pieces = client.chat.completions.create(model=MODEL, messages=ask("hello"), logprobs=True, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in pieces]
    streamed = [token for part in parts if part is not None for token in part.content]
    assert [token.token for token in streamed] == [token.token for token in plain.choices[0].logprobs.content]


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=100)
    assert answer.choices[0].text == HELLO and answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    many = client.completions.create(model=MODEL, prompt=["hello", "hello"], n=2, max_tokens=100, echo=True)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in many.choices} == {"hello" + HELLO}
    stream = client.completions.create(model=MODEL, prompt=["hello", "hello"], max_tokens=100, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [HELLO, HELLO]


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 7}, openai.BadRequestError, "temperature", None),
        ({"messages": []}, openai.BadRequestError, "messages", None),
        ({"extra_body": {"no_such": 1}}, openai.BadRequestError, "no_such", "unknown_parameter"),
        ({"messages": ask("hello " * 9000)}, openai.BadRequestError, "messages", "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_classes(client, fields, kind, param, code, stream):
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": ask("hello"), "stream": stream, **fields})
    error = raised.value
    assert error.param == param and error.type == "invalid_request_error" and error.request_id
    assert code is None or error.code == code


def test_an_unknown_key(client):
    with pytest.raises(openai.AuthenticationError) as error:
        client.with_options(api_key=KEY[:20]).chat.completions.create(model=MODEL, messages=ask("hello"))
    assert error.value.code == "invalid_api_key" and KEY not in str(error.value)


def test_an_error_of_the_engine(client):
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        client.chat.completions.create(model=MODEL, messages=ask("break"))
    text = ""
    with pytest.raises(openai.APIError, match="out of luck"):
        for chunk in client.chat.completions.create(model=MODEL, messages=ask("break"), stream=True):
            text += chunk.choices[0].delta.content or ""
            assert chunk.choices[0].finish_reason is None
    assert text == "Well"


def test_rate_limits_and_retries():
    """Two requests fill the server; the third gets 429, and a client that retries is admitted later."""
    streams: list[openai.Stream] = []
    statuses: list[int] = []

    def make_room(response: httpx.Response) -> None:
        """Free a slot once the client without retries was refused."""
        statuses.append(response.status_code)
        for stream in streams:
            stream.close()

    watched = openai.DefaultHttpxClient(event_hooks={"response": [make_room]})
    with PreparedServer(ANSWERS, flags=("--max-waiting-requests", "1"), max_num_seqs=1, pace=pace) as busy:
        options: dict[str, Any] = {"base_url": busy.url + "/v1", "api_key": "any"}
        with (
            openai.OpenAI(**options, max_retries=0) as plain,
            openai.OpenAI(**options, max_retries=8, http_client=watched) as patient,
        ):
            for _ in range(2):
                streams.append(plain.chat.completions.create(model=MODEL, messages=ask("endless"), stream=True))
                next(streams[-1])
            with pytest.raises(openai.RateLimitError) as refused:
                plain.chat.completions.create(model=MODEL, messages=ask("hello"))
            headers = refused.value.response.headers
            assert refused.value.code == "rate_limit_exceeded" and int(headers["retry-after"]) >= 1
            assert 1000 <= int(headers["retry-after-ms"]) <= 60_000
            raw = patient.chat.completions.with_raw_response.create(model=MODEL, messages=ask("hello"))
            assert raw.parse().choices[0].message.content == HELLO
            assert statuses == [429] * raw.retries_taken + [200] and raw.retries_taken >= 1
