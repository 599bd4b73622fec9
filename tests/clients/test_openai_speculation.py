"""The official Python client against a server that drafts tokens: predicted outputs, and speculation switched off."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from shared.messages import DraftCounts
from tests.clients.answers import ANSWERS, HELLO, KEY
from tests.fakes.hermes import ids_of
from tests.fakes.prepared_server import MODEL, PreparedServer

MESSAGES: list = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[PreparedServer]:
    with PreparedServer(
        ANSWERS,
        flags=("--api-key", KEY),
        speculative_method="auto",
        drafts=lambda submit: [DraftCounts(4, 1)] if submit.speculative else [],
    ) as running:
        yield running


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as one:
        yield one


@pytest.mark.parametrize("content", [HELLO, [{"type": "text", "text": HELLO}]])
def test_predicted_outputs(client, server, content):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, prediction={"type": "content", "content": content}
    )
    assert answer.choices[0].message.content == HELLO
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 1)
    assert answer.usage.completion_tokens == len(ids_of(HELLO))
    assert server.worker.submits()[-1].prediction == ids_of(HELLO)[:-1]


def test_predicted_outputs_in_a_stream(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        prediction={"type": "content", "content": HELLO},
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    details = chunks[-1].usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 1)


def test_no_speculation_on_request(client, server):
    off = {"speculative": {"enabled": False}}
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=off)
    text = client.completions.create(model=MODEL, prompt="hello", max_tokens=100, extra_body=off)
    for answer in (chat, text):
        details = answer.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert [submit.speculative for submit in server.worker.submits()[-2:]] == [False, False]
    assert chat.choices[0].message.content == text.choices[0].text == HELLO


def test_refusals_have_their_class(client):
    prediction = {"type": "content", "content": HELLO}
    for fields, param in (
        ({"prediction": {"type": "content", "content": []}}, "prediction.content"),
        ({"prediction": prediction, "extra_body": {"speculative": {"enabled": False}}}, "prediction"),
        ({"extra_body": {"speculative": True}}, "speculative"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
        assert error.value.param == param
