"""Query parameters on every route: an unknown or repeated parameter gives a 400 that names it."""

from __future__ import annotations

import aiohttp
import orjson

from gateway.app import ROUTES
from gateway.http.auth import Scope
from gateway.openapi import describe
from tests.fakes.fake_generator import MODEL
from tests.fakes.http_gateway import USER_KEY, run_gateway

DOCUMENT = describe(ROUTES)
MESSAGE = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def path_of(route):
    return route.path.replace("{model:.+}", MODEL).replace("{id}", "x").replace("{file}", "app.js")


async def test_no_route_ignores_a_parameter(gateway):
    for route in ROUTES:
        for query in ("utm_source=x", "api-version=2024-10-21", "name[]=up"):
            url = f"{gateway.url}{path_of(route)}?{query}"
            async with gateway.session.request(route.method, url, json={} if route.body else None) as response:
                body = await response.read()
            if route.path == "/":
                assert response.status == 200
                continue
            name = query.partition("=")[0]
            assert response.status == 400 and name.encode() in body, route
            if not route.path.startswith("/v1/messages"):
                error = orjson.loads(body)["error"]
                assert (error["param"], error["code"]) == (name, "unknown_parameter"), route


async def test_repeated_parameters_are_refused(gateway):
    found = 0
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.path.replace("{model:.+}", "{model}")][route.method.lower()]
        for parameter in operation.get("parameters", ()):
            if parameter["in"] != "query":
                continue
            found += 1
            assert parameter["description"] and parameter["schema"]
            query = f"{parameter['name']}=1&{parameter['name']}=1"
            async with gateway.session.request(route.method, f"{gateway.url}{path_of(route)}?{query}") as response:
                body = await response.text()
            assert response.status == 400 and "more than once" in body and parameter["name"] in body
    assert found


async def test_beta_has_no_effect_on_messages(gateway):
    for path, sent in (("/v1/messages", MESSAGE), ("/v1/messages/count_tokens", {**MESSAGE, "max_tokens": None})):
        body = {name: value for name, value in sent.items() if value is not None}
        assert (await gateway.post(f"{path}?beta=true", body))[0] == 200
        status, answer, _ = await gateway.post(f"{path}?beta=yes", body)
        assert status == 400 and answer["type"] == "error" and "beta" in answer["error"]["message"]


async def test_the_key_is_checked_before_the_query():
    async with run_gateway(keys=True) as gateway:
        for route in ROUTES:
            query = f"{gateway.url}{path_of(route)}?x=1"
            async with gateway.session.request(route.method, query) as response:
                assert (response.status == 401) == (route.scope is not Scope.PUBLIC)
        headers = {"Authorization": f"Bearer {USER_KEY}"}
        assert (await gateway.get("/v1/models?x=1", **headers))[0] == 400


async def test_preflight_requests_may_have_a_query():
    async with run_gateway(cors_origins=["https://a.example"]) as gateway:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
        async with gateway.session.options(gateway.url + "/v1/models?limit=1", headers=headers) as response:
            assert response.status == 204


async def test_an_empty_query_has_no_parameters(gateway):
    assert (await gateway.get("/health?"))[0] == 200
    async with gateway.session.head(gateway.url + "/health?x=1") as response:
        assert response.status == 400
    async with aiohttp.ClientSession() as session, session.get(gateway.url + "/nothing?x=1") as response:
        assert response.status == 404
