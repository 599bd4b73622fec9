"""The official Python client, sync and async, against a real gateway in typical programs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.clients.answers import ANSWERS, HELLO, KEY, pace
from tests.e2e.server import wait_until
from tests.fakes.prepared_server import MODEL, PreparedServer


def ask(question: str) -> list:
    return [{"role": "user", "content": question}]


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as one:
        yield one


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
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ask("hello"),
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == HELLO
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    whole = client.chat.completions.create(model=MODEL, messages=ask("hello"))
    assert chunks[-1].usage == whole.usage


async def test_async_clients_side_by_side(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:

        async def stream() -> str:
            chunks = await client.chat.completions.create(model=MODEL, messages=ask("hello"), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def whole() -> str:
            answer = await client.chat.completions.create(model=MODEL, messages=ask("hello"))
            return answer.choices[0].message.content or ""

        texts = await asyncio.gather(*(job() for _ in range(8) for job in (stream, whole)))
        assert texts == [HELLO] * 16


def test_the_stream_helper_accumulates(client):
    with client.chat.completions.stream(model=MODEL, messages=ask("hello")) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == HELLO and final.choices[0].finish_reason == "stop"


def test_choices_and_lengths(client):
    answer = client.chat.completions.create(model=MODEL, messages=ask("hello"), n=3, max_completion_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 6


def test_stop_strings(client):
    for stop in ("you", ["zzz", '"you']):
        text = client.chat.completions.create(model=MODEL, messages=ask("hello"), stop=stop).choices[0].message.content
        assert text == HELLO[: HELLO.index(stop if isinstance(stop, str) else stop[1])]


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


def test_completions_by_token_ids_and_with_logprobs(client, server):
    # Not an OpenAI route: the client has no method for it, and its path is not below /v1.
    root = client.with_options(base_url=server.url)
    ids: dict = root.post("/tokenize", cast_to=object, body={"model": MODEL, "prompt": "hello"})
    answer = client.completions.create(model=MODEL, prompt=ids["tokens"], logprobs=1, max_tokens=100)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == HELLO
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert logprobs.text_offset == sorted(logprobs.text_offset) and set(logprobs.token_logprobs) == {-0.5}


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_vllm_parameters_in_the_extra_body(client, server):
    client.chat.completions.create(
        model=MODEL,
        messages=ask("hello"),
        seed=7,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1, "stop_token_ids": [9]},
    )
    sampling = server.worker.submits()[-1].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (5, 0.1, 1.2, 1)
    assert sampling.stop_token_ids == (9,) and sampling.seed == 7


def test_raw_responses(client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ask("hello"))
    assert raw.headers["x-request-id"] == raw.request_id and raw.parse()._request_id == raw.request_id
    assert raw.http_response.status_code == 200 and raw.parse().choices[0].message.content == HELLO
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=ask("hello")) as streaming:
        assert json.loads(streaming.read())["choices"][0]["message"]["content"] == HELLO


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


def test_a_wrong_key(server):
    for key in ("sk-wrong", KEY[:20]):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=key)
        with client, pytest.raises(openai.AuthenticationError) as error:
            client.chat.completions.create(model=MODEL, messages=ask("hello"))
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


def all_cancelled(server: PreparedServer, before: int, number: int) -> bool:
    """Return True if `number` requests arrived since `before` and the worker was told to cancel each."""
    asked = {submit.request_id for submit in server.worker.submits()[before:]}
    return len(asked) == number and asked <= {cancel.request_id for cancel in server.worker.cancels()}


def test_a_timeout_cancels_in_the_worker(server):
    # A request that times out before the gateway reads it never reaches the worker: 0.4 s may be too short on a slow
    # machine.
    for timeout in (0.4, 3, 12):
        before = len(server.worker.submits())
        with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=1, timeout=timeout) as client:
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(model=MODEL, messages=ask("endless"))
        if len(server.worker.submits()) == before + 2:
            break
    wait_until(lambda: all_cancelled(server, before, 2), 30, "both tries are cancelled")


def test_leaving_a_stream_cancels_in_the_worker(client, server):
    before = len(server.worker.submits())
    with client.chat.completions.create(model=MODEL, messages=ask("endless"), stream=True) as stream:
        next(stream)
    wait_until(lambda: all_cancelled(server, before, 1), 30, "the stream is cancelled")


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
