"""Embeddings with the official Python client, sync and async, and with LangChain's OpenAIEmbeddings."""

from __future__ import annotations

import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from tests.clients.answers import KEY
from tests.fakes.prepared_server import MODEL
from tests.fakes.vectors import unit_vector

TEXTS = ["The sky is blue.", "Caf\u00e9 \U0001f44b", "a"]


def last_prompts(server, number: int) -> list[list[int]]:
    return [submit.token_ids for submit in server.worker.submits()[-number:]]


def test_texts(client, server):
    # By default the client requests base64 and decodes it.
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    prompts = last_prompts(server, 3)
    assert [one.index for one in answer.data] == [0, 1, 2] and answer.object == "list" and answer.model == MODEL
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    for one, ids in zip(answer.data, prompts, strict=True):
        np.testing.assert_allclose(one.embedding, unit_vector(ids), rtol=1e-6)
    as_floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    for one, other in zip(answer.data, as_floats.data, strict=True):
        assert np.array_equal(np.float32(one.embedding), np.float32(other.embedding))


def test_a_text_and_token_ids(client, server):
    (one,) = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=3).data
    (prompt,) = last_prompts(server, 1)
    np.testing.assert_allclose(one.embedding, unit_vector(prompt, dimensions=3), rtol=1e-6)
    (same,) = client.embeddings.create(model=MODEL, input=prompt, dimensions=3, user="me").data
    assert same.embedding == one.embedding
    both = client.embeddings.create(model=MODEL, input=[prompt, prompt[:1]]).data
    np.testing.assert_allclose(both[1].embedding, unit_vector(prompt[:1]), rtol=1e-6)


def test_errors(client):
    for fields, param in (({"input": [TEXTS[0], ""]}, "input[1]"), ({"input": "a", "dimensions": 9999}, "dimensions")):
        with pytest.raises(openai.BadRequestError) as error:
            client.embeddings.create(model=MODEL, **fields)
        assert error.value.param == param
    with pytest.raises(openai.BadRequestError) as too_long:
        client.embeddings.create(model=MODEL, input=["a", "a b " * 5000])
    assert too_long.value.code == "context_length_exceeded" and too_long.value.param == "input[1]"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


async def test_langchain(server):
    async with httpx.AsyncClient() as http_async_client:
        with httpx.Client() as http_client:
            # With its length check, it would send ids of OpenAI's tokenizer, which mean other tokens here.
            model = OpenAIEmbeddings(
                base_url=server.url + "/v1",
                api_key=SecretStr(KEY),
                model=MODEL,
                check_embedding_ctx_length=False,
                chunk_size=2,
                max_retries=0,
                http_client=http_client,
                http_async_client=http_async_client,
            )
            vectors = model.embed_documents(TEXTS)
            for vector, ids in zip(vectors, last_prompts(server, 3), strict=True):
                np.testing.assert_allclose(vector, unit_vector(ids), rtol=1e-6)
            assert model.embed_query(TEXTS[1]) == vectors[1]
        assert await model.aembed_documents(TEXTS) == vectors
        assert await model.aembed_query(TEXTS[2]) == vectors[2]
