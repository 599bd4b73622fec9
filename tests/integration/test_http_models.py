"""/v1/models: the response shape follows the client's API, with Anthropic's pagination."""

from __future__ import annotations

import itertools

import msgspec
import orjson
import pytest

from gateway.api.anthropic.answers import ModelInfoAnswer, ModelPageAnswer
from gateway.api.anthropic.models import ModelsQuery, model_info, model_page
from gateway.text.formats import ModelFormats
from gateway.text.reasoning import REASONING_FORMATS
from shared.errors import InvalidRequestError
from tests.fakes.fake_generator import MODEL, FakeEntry, facts
from tests.fakes.http_gateway import USER_KEY, run_gateway

VERSION = {"anthropic-version": "2023-06-01"}
ENTRIES = [
    FakeEntry(facts(model_names=["old"], created=5)),
    FakeEntry(facts(model_names=["new", "org/new"], created=7)),
    FakeEntry(facts(model_names=["old too"], created=5)),
]
NAMES = ["new", "org/new", "old", "old too"]


def page(**query):
    return msgspec.convert(model_page(ENTRIES, ModelsQuery(**query)), ModelPageAnswer)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 1000])
@pytest.mark.parametrize("backwards", [False, True])
def test_pages_hold_every_model_once(limit, backwards):
    ids: list[str] = []
    cursor: dict[str, str] = {}
    for _ in range(6):
        found = page(limit=limit, **cursor)
        names = [model.id for model in found.data]
        assert 1 <= len(names) <= limit and (found.first_id, found.last_id) == (names[0], names[-1])
        ids = names + ids if backwards else ids + names
        if backwards and not cursor:
            # From the last model on.
            ids, cursor = [NAMES[-1]], {"before_id": NAMES[-1]}
            continue
        if not found.has_more:
            break
        cursor = {"before_id": found.first_id} if backwards else {"after_id": found.last_id}
    assert ids == NAMES


def test_an_end_is_an_empty_page():
    for cursor in ({"after_id": "old too"}, {"before_id": "new"}):
        found = page(**cursor)
        assert not found.data and found.first_id is found.last_id is None and not found.has_more
    assert model_page([], ModelsQuery())["data"] == []


def test_cursors_must_be_models():
    for query in ({"after_id": "x"}, {"before_id": "x"}, {"after_id": "old", "before_id": "new"}):
        with pytest.raises(InvalidRequestError) as refused:
            page(**query)
        assert refused.value.param in query


async def test_responses_have_the_shape_of_the_clients_api(gateway):
    for path, name in itertools.product(("/v1/models", f"/v1/models/{MODEL}", "/v1/models/nope"), (True, False)):
        status, raw, headers = await gateway.get(path, **(VERSION if name else {}))
        body = orjson.loads(raw)
        assert ("request-id" in headers) is name
        if status == 404:
            assert set(body) == ({"type", "error", "request_id"} if name else {"error"})
            assert body["error"]["type"] == ("not_found_error" if name else "invalid_request_error")
        else:
            assert ("object" in body) is not name
    status, raw, _ = await gateway.get("/v1/modelsx", **VERSION)
    assert status == 404 and set(orjson.loads(raw)) == {"error"}


@pytest.mark.parametrize(
    ("path", "version", "named"),
    [
        ("/v1/models?limit=0", "2023-06-01", "limit"),
        ("/v1/models?limit=1001", "2023-06-01", "limit"),
        ("/v1/models?limit=x", "2023-06-01", "limit"),
        ("/v1/models?after_id=nope", "2023-06-01", "after_id"),
        ("/v1/models?lifecycle%5B%5D=retired", "2023-06-01", "lifecycle[]"),
        ("/v1/models", "2023-06-02", "anthropic-version"),
        ("/v1/models/x", "", "anthropic-version"),
        (f"/v1/models/{MODEL}?limit=1", "2023-06-01", "limit"),
    ],
)
async def test_refused_fields_are_named(gateway, path, version, named):
    status, raw, _ = await gateway.get(path, **{"anthropic-version": version})
    body = orjson.loads(raw)
    assert status == 400 and body["error"]["type"] == "invalid_request_error" and named in body["error"]["message"]


async def test_pagination_requires_the_version_header(gateway):
    for name in ("limit=2", "after_id=x", "before_id=x"):
        status, raw, _ = await gateway.get(f"/v1/models?{name}")
        assert status == 400 and orjson.loads(raw)["error"]["param"] == name.partition("=")[0]
    assert (await gateway.get("/v1/models?beta=true"))[0] == 200


async def test_authentication_errors_have_the_shape_of_the_clients_api():
    async with run_gateway(keys=True) as gateway:
        status, raw, _ = await gateway.get("/v1/models", **VERSION)
        assert (status, orjson.loads(raw)["error"]["type"]) == (401, "authentication_error")
        assert (await gateway.get("/v1/models", **VERSION, **{"x-api-key": USER_KEY}))[0] == 200


def test_capabilities_match_accepted_requests():
    def types(entry):
        found = msgspec.convert(model_info(MODEL, entry), ModelInfoAnswer).capabilities
        values = found["thinking"]["types"]
        return (
            found["thinking"]["supported"],
            found["effort"]["supported"],
            [name for name, value in values.items() if value["supported"]],
        )

    plain = FakeEntry()
    plain.pipeline.template_variables = frozenset()
    assert types(plain) == (False, False, ["adaptive", "disabled", "enabled"])
    always = FakeEntry(formats=ModelFormats(reasoning=REASONING_FORMATS["think"]))
    always.pipeline.template_variables = frozenset(["reasoning_effort"])
    # The markers are not tokens, so no limit can be enforced.
    assert types(always) == (True, True, ["adaptive"])
    switched = FakeEntry(
        formats=ModelFormats(reasoning=REASONING_FORMATS["think"], added_ids={"<think>": 1, "</think>": 2})
    )
    assert types(switched) == (True, True, ["adaptive", "disabled", "enabled"])
