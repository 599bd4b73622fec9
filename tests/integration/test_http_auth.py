"""Keys, scopes, Host headers, CORS, and leaks of other servers across them. CVE numbers are in comments."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiohttp import web

from gateway.app import ROUTES
from gateway.http.app_keys import IDENTITY
from gateway.http.auth import Scope
from gateway.http.route import Route
from tests.fakes.fake_generator import MODEL
from tests.fakes.http_gateway import ADMIN_KEY, OTHER_KEY, USER_KEY, run_gateway


async def _whoami(request: web.Request) -> web.StreamResponse:
    return web.json_response({"tenant": request[IDENTITY].tenant})


ADMIN_ROUTE = Route("POST", "/admin/thing", _whoami, scope=Scope.ADMIN)


@pytest.fixture
async def gateway():
    async with run_gateway(keys=True, extra_routes=[ADMIN_ROUTE]) as running:
        yield running


async def status_of(gateway, method, path, **headers):
    async with gateway.session.request(method, gateway.url + path, headers=headers) as response:
        assert response.headers["x-request-id"]
        if method != "HEAD":
            assert response.content_type in ("application/json", "text/plain", "text/html", "text/javascript")
        return response.status, response.headers


@pytest.mark.parametrize("route", [*ROUTES, ADMIN_ROUTE], ids=lambda route: f"{route.method} {route.path}")
async def test_every_route_without_a_key(gateway, route):
    path = re.sub(r"\{[^}]*\}", "x", route.path.replace("{file}", "app.js"))
    for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
        status, headers = await status_of(gateway, method, path)
        if route.scope is Scope.PUBLIC:
            assert status == 200
        else:
            assert status == 401 and headers["WWW-Authenticate"].startswith("Bearer")
            # The server's load is not public.
            assert not any(name.startswith("x-ratelimit") for name in headers)


async def test_every_registered_route_declares_a_scope(gateway):
    # A route added after build_app is denied for every key.
    async with run_gateway(keys=True) as other:
        declared = {(route.method, route.path) for route in ROUTES}
        for registered in other.app.router.routes():
            assert registered.resource is not None
            method = "GET" if registered.method == "HEAD" else registered.method
            assert (method, registered.resource.canonical.replace("{model}", "{model:.+}")) in declared


async def test_unauthorized_bodies_are_not_read(gateway):
    # CVE-2026-22778; CVE-2025-69223: an endless compressed body is answered at once.
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head + b"Content-Encoding: gzip\r\nContent-Length: 1000000\r\n\r\n")
    async with asyncio.timeout(30):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_100_continue_only_after_authorization(gateway):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    body = b'{"model":"fake-model","prompt":"x"}'
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body))
    async with asyncio.timeout(30):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head + b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (USER_KEY.encode(), len(body)))
    async with asyncio.timeout(30):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(body)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize(
    "value",
    [
        "", "Bearer", "Bearer ", "Bearer  ", "Basic abc", USER_KEY, f"bearer{USER_KEY}", "Bearer ' OR '1'='1",
        f"Bearer {USER_KEY}x", f"Bearer {USER_KEY[:-1]}", "Bearer " + "x" * 16_000, f"Bearer {USER_KEY.upper()}",
        f"Token {USER_KEY}", f"Bearer {USER_KEY} {USER_KEY}",
    ],
)  # fmt: skip
async def test_invalid_keys_are_refused(gateway, value):
    # CVE-2026-42208, CVE-2026-35030, CVE-2026-59822
    status, _ = await status_of(gateway, "GET", "/v1/models", Authorization=value)
    assert status == 401


async def test_non_ascii_and_repeated_keys(gateway):
    # CVE-2025-59425: comparing non-ASCII text must not be a 500.
    for lines in (
        b"Authorization: Bearer \xc3\xa9\r\n",
        b"Authorization: Bearer \xff\xfe\r\n",
        b"Authorization: Bearer %s\r\nAuthorization: Bearer %s\r\n" % (USER_KEY.encode(), USER_KEY.encode()),
    ):
        answer = await gateway.raw(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n")
        assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400")) and b"application/json" in answer


async def test_keys_with_a_common_prefix_are_distinct(gateway):
    # CVE-2026-35030, CVE-2025-46570: another tenant has another salt.
    for key in (USER_KEY, OTHER_KEY):
        gateway.headers = {"Authorization": f"Bearer {key}"}
        assert (await gateway.chat())[0] == 200
        assert (await gateway.chat(cache_salt="s"))[0] == 200
    requests = gateway.generator.requests
    assert [request.tenant for request in requests] == ["user", "user", "other", "other"]
    assert len({request.salt for request in requests}) == 4 and b"" not in {request.salt for request in requests}


async def test_scopes(gateway):
    # CVE-2025-0628
    for key, expected in ((USER_KEY, 403), (ADMIN_KEY, 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert (await status_of(gateway, "POST", "/admin/thing", **headers))[0] == expected
        assert (await status_of(gateway, "GET", "/v1/models", **headers))[0] == 200
        assert (await status_of(gateway, "GET", "/metrics", **headers))[0] == 200


async def test_admin_routes_stay_shut_on_an_open_server():
    async with run_gateway(extra_routes=[ADMIN_ROUTE]) as gateway:
        assert (await status_of(gateway, "POST", "/admin/thing"))[0] == 403
        assert (await status_of(gateway, "GET", "/metrics"))[0] == 200


@pytest.mark.parametrize(
    "line",
    [
        b"GET http://x/v1/models HTTP/1.1\r\nHost: x",
        b"GET //v1/models HTTP/1.1\r\nHost: x",
        b"GET /V1/models HTTP/1.1\r\nHost: x",
        b"GET /v1/../v1/models HTTP/1.1\r\nHost: x",
        b"GET /%761/models HTTP/1.1\r\nHost: x",
        b"GET /v1/models/ HTTP/1.1\r\nHost: x",
        b"GET /health/../v1/models HTTP/1.1\r\nHost: x",
        b"GET /v1/models?/health HTTP/1.1\r\nHost: x",
        b"GET /v1/models HTTP/1.1\r\nHost: x/health?",
        b"GET /v1/models HTTP/1.1\r\nHost: a/b?",
        b"GET /v1/models HTTP/1.1\r\nHost: a#",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y",
        b"GET /v1/models HTTP/1.1",
        b"OPTIONS /v1/models HTTP/1.1\r\nHost: x",
        b"HEAD /v1/models HTTP/1.1\r\nHost: x",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Original-URL: /health",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-Host: health",
        b"POST /health HTTP/1.1\r\nHost: x\r\nX-HTTP-Method-Override: GET",
        b"GET /static/../../etc/passwd HTTP/1.1\r\nHost: x",
        b"GET /v1/models\x00 HTTP/1.1\r\nHost: x",
    ],
)
async def test_no_spelling_of_a_request_bypasses_the_key(gateway, line):
    # CVE-2026-48746, CVE-2024-23334
    answer = await gateway.raw(line + b"\r\nConnection: close\r\n\r\n")
    assert int(answer.split()[1]) in (400, 401, 404, 405)


async def test_foreign_hosts_are_refused_on_an_open_loopback_listener():
    # CVE-2024-28224: a page whose name was rebound to 127.0.0.1
    async with run_gateway(check_host=True) as gateway:
        for host, expected in (
            ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403), ("10.0.0.1", 403),
            ("127.0.0.1.evil.example", 403), ("a/b?", 403), ("[::1", 403), ("0.0.0.0", 403),
            ("127.0.0.1", 200), ("localhost", 200), ("LOCALHOST:99", 200), ("[::1]:8000", 200), ("127.8.9.1:1", 200),
        ):  # fmt: skip
            for path in ("/health", "/v1/models"):
                status, _ = await status_of(gateway, "GET", path, Host=host)
                assert status == expected, host


async def test_cors():
    async with run_gateway(keys=True, cors_origins=["https://chat.example"]) as gateway:
        wanted = "authorization,x-stainless-os"
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
        status, headers = await status_of_preflight(gateway, Origin="https://chat.example", **asked)
        assert status == 204 and headers["Access-Control-Allow-Origin"] == "https://chat.example"
        assert headers["Access-Control-Allow-Headers"] == wanted
        status, headers = await status_of_preflight(gateway, Origin="https://evil.example", **asked)
        assert status == 405 and "Access-Control-Allow-Origin" not in headers
        _, headers = await status_of(gateway, "GET", "/v1/models", Origin="https://chat.example")
        assert headers["Access-Control-Allow-Origin"] == "https://chat.example" and headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in headers
        _, headers = await status_of(gateway, "GET", "/v1/models", Origin="https://evil.example")
        assert "Access-Control-Allow-Origin" not in headers
    async with run_gateway() as gateway:
        _, headers = await status_of(gateway, "GET", "/v1/models", Origin="https://chat.example")
        assert "Access-Control-Allow-Origin" not in headers


async def status_of_preflight(gateway, **headers):
    async with gateway.session.options(gateway.url + "/v1/chat/completions", headers=headers) as response:
        return response.status, response.headers


async def test_neither_keys_nor_prompts_reach_the_log(capsys):
    # CVE-2024-9606
    async with run_gateway(keys=True) as gateway:
        gateway.headers = {"Authorization": f"Bearer {USER_KEY}"}
        canary = "canary-prompt-5417"
        await gateway.chat(messages=[{"role": "user", "content": canary}])
        await gateway.post("/v1/completions", {"model": MODEL, "prompt": canary, "user": canary, canary: 1})
        gateway.headers = {"Authorization": f"Bearer {USER_KEY}-wrong"}
        await gateway.chat()
    captured = capsys.readouterr()
    written = captured.out + captured.err
    assert "/v1/chat/completions" in written
    assert canary not in written and USER_KEY not in written
