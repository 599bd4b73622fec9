"""/openapi.json is accurate: valid and invalid requests drawn from it get the declared answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis
import jsonschema
import orjson
import pytest
import requests
import schemathesis
from hypothesis import strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import ROUTES
from gateway.http.auth import Scope
from gateway.openapi import describe
from tests.fakes.fake_generator import MODEL
from tests.fakes.http_gateway import USER_KEY, run_gateway
from tests.fakes.pairs import slow

HEADERS = {"Authorization": f"Bearer {USER_KEY}"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES = 10
"""Number of examples per operation and kind with a body; operations without a body need few."""
DOCUMENT = describe(ROUTES)
OPERATIONS = [(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods]
WITH_BODY = [(method, path) for method, path in OPERATIONS if "requestBody" in DOCUMENT["paths"][path][method]]
# Rendering takes the bodies of the requests that it renders.
WITH_OWN_BODY = [(method, path) for method, path in WITH_BODY if not path.endswith("/render")]


SMALL = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "max_tokens": 5,
    "tokens": [104],
}
BESIDES = {
    "/tokenize": ("prompt",),
    "/v1/responses": ("model", "input"),
    "/v1/responses/input_tokens": ("model", "input"),
}
"""Required values that no schema can express."""


STREAMED = DOCUMENT["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]
EVENTS = set(STREAMED["x-event-data"]["discriminator"]["mapping"])
WITH_QUERY = [
    (method, path)
    for method, path in OPERATIONS
    if any(parameter["in"] == "query" for parameter in DOCUMENT["paths"][path][method].get("parameters", ()))
]


def body_schema(path, method):
    content = DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    return DOCUMENT["components"]["schemas"][content["$ref"].rpartition("/")[2]]


def properties(path, method):
    return body_schema(path, method)["properties"]


def small_body(path, method):
    """Return a minimal body that is served."""
    names = (*body_schema(path, method).get("required", ()), *BESIDES.get(path, ()))
    return {name: SMALL[name] for name in names}


@contextmanager
def in_a_thread() -> Iterator[str]:
    """Run a gateway in a thread and yield its URL, because the drawing of requests blocks."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started, urls = threading.Event(), []

    async def serve() -> None:
        async with run_gateway(keys=True) as gateway:
            urls.append(gateway.url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(50)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def url():
    with in_a_thread() as running:
        yield running


@pytest.fixture(scope="module")
def schema(url):
    return schemathesis.openapi.from_dict(orjson.loads(orjson.dumps(DOCUMENT)))


def _with_known_model(case):
    """Replace the drawn model name, which would rarely be known and would hide all later checks."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    return case


def _draw(url, schema, method, path, mode, examples):
    @hypothesis.settings(max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=schema[path][method.upper()].as_strategy(generation_mode=mode))
    def draw(case):
        case = _with_known_model(case)
        response = case.call(base_url=url, headers=HEADERS)
        case.validate_response(response, checks=CHECKS)

    draw()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_declared(url, schema, method, path):
    _draw(url, schema, method, path, GenerationMode.POSITIVE, EXAMPLES if (method, path) in WITH_BODY else 5)


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_a_small_request_is_served_as_declared(url, schema, method, path):
    case = schema[path][method.upper()].Case(body=small_body(path, method), media_type="application/json")
    response = case.call(base_url=url, headers=HEADERS)
    assert response.status_code == 200, response.text
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize(("method", "path"), WITH_OWN_BODY)
def test_one_field_more_is_answered_as_declared(url, schema, method, path):
    """Add one field at a time, because in a fully random body some value is always out of range."""

    @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=schema[path][method.upper()].as_strategy(), data=strategies.data())
    def draw(case, data):
        fields = sorted(set(case.body) - set(small_body(path, method)))
        chosen = data.draw(strategies.sampled_from(fields)) if fields else None
        case.body = {**small_body(path, method), **({chosen: case.body[chosen]} if chosen else {})}
        response = case.call(base_url=url, headers=HEADERS)
        case.validate_response(response, checks=CHECKS)

    draw()


@pytest.mark.parametrize(
    ("method", "path"),
    # Drawing from the two largest schemas takes seconds of processor time.
    [slow(*one) if "completions" in one[1] else one for one in WITH_OWN_BODY],
)
def test_undeclared_requests_are_refused(url, schema, method, path):
    _draw(url, schema, method, path, GenerationMode.NEGATIVE, EXAMPLES)


@pytest.mark.parametrize(("method", "path"), sorted({*WITH_QUERY} - {*WITH_BODY}))
def test_wrong_queries_are_answered_as_declared(url, schema, method, path):
    """Not all queries are refused, but most name objects that do not exist."""
    checks = [check for check in CHECKS if check is not negative_data_rejection]

    @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=schema[path][method.upper()].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def draw(case):
        case.validate_response(case.call(base_url=url, headers=HEADERS), checks=checks)

    draw()


@pytest.mark.parametrize("background", [False, True])
def test_answers_about_a_stored_response_are_as_declared(url, schema, background):
    body = {"model": MODEL, "input": "hi", "background": background}
    made = requests.post(f"{url}/v1/responses", json=body, headers=HEADERS, timeout=50).json()

    def ask(method, path, status, **query):
        case = schema["/v1/responses/{id}" + path][method].Case(path_parameters={"id": made["id"]}, query=query)
        response = case.call(base_url=url, headers=HEADERS)
        assert response.status_code == status, response.text
        case.validate_response(response, checks=CHECKS)
        return response

    ask("GET", "", 200)
    if background:
        raw = ask("GET", "", 200, stream="true").content
        kinds = [block.partition(b"\n")[0].removeprefix(b"event: ").decode() for block in raw.split(b"\n\n")[:-1]]
        assert set(kinds) <= EVENTS and kinds[-1] == "response.completed"
        ask("GET", "", 204, stream="true", starting_after=len(kinds) - 1)
    assert ask("GET", "/input_items", 200, limit=1, order="asc").json()["data"]
    ask("POST", "/cancel", 200 if background else 400)
    ask("DELETE", "", 200)
    ask("DELETE", "", 404)


def test_the_document_is_valid(schema):
    schema.validate()
    for struct in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(struct)
    references = [part.partition(b'"')[0].decode() for part in orjson.dumps(DOCUMENT).split(b'"$ref":"')[1:]]
    assert references and {reference.rpartition("/")[2] for reference in references} <= set(
        DOCUMENT["components"]["schemas"]
    )


async def test_the_gateway_serves_it_without_a_key():
    async with run_gateway(keys=True) as gateway:
        status, body, headers = await gateway.get("/openapi.json")
        assert status == 200 and headers["Content-Type"] == "application/json"
        assert orjson.loads(body) == orjson.loads(orjson.dumps(DOCUMENT))


def test_every_route_is_described():
    operations = {(method.upper(), path) for method, path in OPERATIONS}
    assert operations == {(route.method, route.path.replace("{model:.+}", "{model}")) for route in ROUTES}
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.path.replace("{model:.+}", "{model}")][route.method.lower()]
        assert operation["x-scope"] == route.scope.value and (operation["security"] == []) == (
            route.scope is Scope.PUBLIC
        )
        assert ("requestBody" in operation) == (route.body is not None)
    identifiers = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(set(identifiers)) == len(identifiers)
