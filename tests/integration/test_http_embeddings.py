"""POST /v1/embeddings over HTTP: a real server over a fake generator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gateway.api.openai import embedding_batch
from gateway.api.openai.embeddings import MAX_INPUTS
from gateway.flow.events import GenerationRequest, TextDelta
from shared.errors import UnavailableError
from tests.fakes.fake_generator import (
    MODEL,
    FakeEntry,
    FakeGeneration,
    FakeGenerator,
    FakeModels,
    facts,
)
from tests.fakes.http_gateway import USER_KEY, Gateway, run_gateway
from tests.fakes.vectors import HIDDEN_SIZE, decoded, unit_vector, vector_of

PATH = "/v1/embeddings"


async def post(gateway: Gateway, **fields: Any) -> tuple[int, Any]:
    status, body, _ = await gateway.post(PATH, {"model": MODEL, "input": "hi", **fields})
    return status, body


def answering(script: Any) -> FakeGenerator:
    generator = FakeGenerator()
    generator.embedding_script = script
    return generator


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "b\u20ac"], [[97], [98, 226, 130, 172]]),
        (["a"], [[97]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_every_kind_of_input(gateway, given, ids):
    status, body = await post(gateway, input=given, user="me")
    assert status == 200 and set(body) == {"object", "data", "model", "usage"}
    assert body["object"] == "list" and body["model"] == MODEL
    assert body["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    assert [(one["object"], one["index"]) for one in body["data"]] == [
        ("embedding", index) for index in range(len(ids))
    ]
    for one, prompt in zip(body["data"], ids, strict=True):
        np.testing.assert_allclose(one["embedding"], unit_vector(prompt), rtol=1e-6)
    requests = gateway.generator.requests
    assert [request.prompt_token_ids for request in requests] == ids
    assert {(request.pooling, request.n, request.sampling.max_tokens) for request in requests} == {("last", 1, 1)}
    assert len({request.request_id for request in requests}) == len(ids)
    (room,) = gateway.generator.reservations
    assert room.outcome == () and room.closed and not gateway.generator.live


async def test_numbers_are_the_shortest_forms_of_the_float32_values(gateway):
    _, as_list = await post(gateway, encoding_format="float")
    _, as_text = await post(gateway, encoding_format="base64")
    values = decoded(as_text["data"][0]["embedding"])
    numbers = as_list["data"][0]["embedding"]
    assert np.array(numbers, np.float32).tobytes() == values.tobytes() and len(values) == HIDDEN_SIZE
    assert max(len(repr(abs(number))) for number in numbers) <= 12
    assert numbers == [float(str(value)) for value in values]
    assert abs(float(np.linalg.norm(values.astype(np.float64))) - 1) < 1e-6


async def test_dimensions_are_cut_before_normalization(gateway):
    for size in (1, 3, HIDDEN_SIZE):
        _, body = await post(gateway, dimensions=size)
        np.testing.assert_allclose(body["data"][0]["embedding"], unit_vector(b"hi", "last", size), rtol=1e-6)
    _, body = await post(gateway, dimensions=3, normalize=False, encoding_format="base64")
    assert decoded(body["data"][0]["embedding"]).tobytes() == vector_of(b"hi")[:12]
    for size in (0, -1, HIDDEN_SIZE + 1):
        status, body = await post(gateway, dimensions=size)
        assert status == 400 and body["error"]["param"] == "dimensions"


async def test_pooling_defaults_to_the_workers():
    async with run_gateway(models=FakeModels(FakeEntry(facts(pooling="mean")))) as gateway:
        for given, expected in ((None, "mean"), ("last", "last"), ("mean", "mean")):
            _, body = await post(gateway, pooling=given)
            assert gateway.generator.requests[-1].pooling == expected
            np.testing.assert_allclose(body["data"][0]["embedding"], unit_vector(b"hi", expected), rtol=1e-6)


async def test_zero_vectors_stay_and_invalid_vectors_are_errors():
    def script(request: GenerationRequest) -> list[TextDelta]:
        sent = {b"0": np.zeros(8), b"s": np.full(8, 1e-30), b"l": np.full(8, 3e38), b"n": np.full(8, np.nan)}
        sent |= {b"i": np.array([np.inf] * 8), b"7": np.ones(7)}
        vector = sent[bytes(request.prompt_token_ids)].astype("<f4").tobytes()
        return [TextDelta(0, "", [], finish_reason="stop", embedding=vector)]

    async with run_gateway(answering(script)) as gateway:
        _, body = await post(gateway, input=["0", "s", "l"])
        assert body["data"][0]["embedding"] == [0.0] * 8
        for one in body["data"][1:]:
            np.testing.assert_allclose(one["embedding"], np.full(8, 8**-0.5), rtol=1e-6)
        for name in "ni7":
            status, body = await post(gateway, input=["0", name])
            assert status == 500 and body["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", ""]}, "input[1]", None),
        ({"input": [[1], []]}, "input[1]", None),
        ({"input": ["a", 1]}, "input", "invalid_type"),
        ({"input": [1, True]}, "input", "invalid_type"),
        ({"input": [[1], "a"]}, "input", "invalid_type"),
        ({"input": {"text": "a"}}, "input", "invalid_type"),
        ({"input": None}, "input", "invalid_type"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", None),
        ({"input": [[1], [258]]}, "input[1]", None),
        ({"input": [-1]}, "input", None),
        ({"input": [2**70]}, "input", None),
        ({"input": ["a", "b" * 4097]}, "input[1]", "context_length_exceeded"),
        ({"input": ["a", "b" * 100_000]}, "input[1]", "context_length_exceeded"),
        ({"input": [1] * 4097}, "input", "context_length_exceeded"),
        ({"encoding_format": "int8"}, "encoding_format", None),
        ({"pooling": "cls"}, "pooling", None),
        ({"pooling": ""}, "pooling", None),
        ({"dimensions": 2.0}, "dimensions", "invalid_type"),
        ({"normalize": 1}, "normalize", "invalid_type"),
        ({"priority": 2**31}, "priority", None),
        ({"cache_salt": ""}, "cache_salt", None),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
        ({"truncate_prompt_tokens": 4097}, "truncate_prompt_tokens", "context_length_exceeded"),
        ({"truncation_side": "left"}, "truncation_side", None),
        ({"service_tier": "gold"}, "service_tier", None),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"messages": []}, "messages", "unsupported_parameter"),
        ({"embed_dtype": "int8"}, "embed_dtype", "unknown_parameter"),
        ({"temperature": 1}, "temperature", "unknown_parameter"),
    ],
)
async def test_refused_fields_are_named(gateway, fields, param, code):
    status, body = await post(gateway, **fields)
    assert status == 400, body
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert not gateway.generator.requests and not gateway.generator.reservations


async def test_missing_fields_and_models():
    async with run_gateway() as gateway:
        status, body, _ = await gateway.post(PATH, {"model": MODEL})
        assert status == 400 and body["error"]["param"] == "input"
        assert (await post(gateway, model="other"))[0] == 404
    async with run_gateway(models=FakeModels(FakeEntry(facts(hidden_size=0)))) as gateway:
        status, body = await post(gateway)
        assert status == 400 and body["error"]["param"] == "model"


async def test_accounting_fields_arrive():
    async with run_gateway(keys=True) as gateway:
        gateway.headers = {"Authorization": f"Bearer {USER_KEY}"}
        status, body = await post(gateway, priority=5, cache_salt="s", prompt_cache_key="k", metadata={"a": "b"})
        assert status == 200 and body["metadata"] == {"a": "b"} and "service_tier" not in body
        await post(gateway, service_tier="flex", cache_salt="t")
        first, second = gateway.generator.requests
        assert (first.priority, second.priority, first.affinity) == (5, 1000, "k")
        assert first.salt != second.salt and first.tenant == second.tenant != ""
        gateway.headers = {}
        assert (await post(gateway))[0] == 401


async def test_the_maximum_number_of_inputs(gateway):
    status, body = await post(gateway, input=["a"] * MAX_INPUTS, encoding_format="base64")
    assert status == 200 and [one["index"] for one in body["data"]] == list(range(MAX_INPUTS))


class Busy(FakeGenerator):
    """Generator that has no worker for the third and later parts until it has been asked several times."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if len(self.generations) >= 2 and self.refusals:
            self.refusals -= 1
            raise UnavailableError("No worker of the model answers at the moment.")
        return super().submit(request)


async def test_an_input_that_cannot_be_sent_ends_the_others(monkeypatch):
    monkeypatch.setattr(embedding_batch, "RETRY_SECONDS", 0.001)
    generator = Busy(1000)
    generator.embedding_script = lambda _: [60.0]
    async with run_gateway(generator) as gateway:
        assert (await post(gateway, input=["a", "b", "c", "d"]))[0] == 503
        assert not generator.live and generator.reservations[0].closed
        assert generator.refusals >= 1000 - 2 * (embedding_batch.RETRIES + 1)


async def test_a_submit_is_retried_while_no_worker_answers(monkeypatch):
    monkeypatch.setattr(embedding_batch, "RETRY_SECONDS", 0.001)
    async with run_gateway(Busy(embedding_batch.RETRIES)) as gateway:
        status, body = await post(gateway, input=["a", "b", "c", "d"])
        assert status == 200 and len(body["data"]) == 4
