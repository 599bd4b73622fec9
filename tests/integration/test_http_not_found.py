"""Errors for missing objects name them, shortening long names."""

from __future__ import annotations

import orjson
import pytest

from tests.fakes.fake_generator import MODEL

LONG = "x" * 200
CONTINUED = {"model": MODEL, "input": "hi", "previous_response_id": "{}"}
ASKED = [
    ("GET", "/v1/responses/{}", None),
    ("DELETE", "/v1/responses/{}", None),
    ("POST", "/v1/responses/{}/cancel", None),
    ("GET", "/v1/responses/{}/input_items", None),
    ("GET", "/v1/streams/{}", None),
    ("GET", "/v1/streams/resp_{}", None),
    ("DELETE", "/v1/requests/{}", None),
    ("POST", "/v1/responses", CONTINUED),
    ("POST", "/v1/responses", {"model": MODEL, "input": [{"type": "item_reference", "id": "{}"}]}),
]


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
async def test_an_unknown_id_is_named(gateway, method, path, body):
    for identifier in ("resp_0123", LONG):
        data = None if body is None else orjson.dumps(body).replace(b"{}", identifier.encode())
        headers = {"Content-Type": "application/json"}
        url = gateway.url + path.replace("{}", identifier)
        async with gateway.session.request(method, url, data=data, headers=headers) as response:
            # OpenAI's clients look for a BadRequestError before they send the whole conversation again.
            assert response.status == (400 if body is CONTINUED else 404)
            message = orjson.loads(await response.read())["error"]["message"]
        if identifier is LONG:
            assert "xxx...'" in message and len(message) < 200
        else:
            assert f"{identifier}'" in message


async def test_an_invalid_model_name_is_quoted(gateway):
    for name in ("a\nb", "y" * 1000):
        status, body, _ = await gateway.chat(model=name)
        assert status == 404 and body["error"]["code"] == "model_not_found"
        shown = body["error"]["message"]
        assert ("'a\\nb'" in shown or "yyy...'" in shown) and len(shown) < 200
