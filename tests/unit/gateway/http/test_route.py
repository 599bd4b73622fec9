"""Query parameters: types and errors."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import MultiMapping
from yarl import URL

from gateway.http import route
from gateway.http.route import NoQuery, parse_query, query_of
from shared.errors import InvalidRequestError


class Every(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="")] = 20
    order: Literal["asc", "desc"] = "desc"
    stream: Annotated[bool, msgspec.Meta(description="")] = False
    after: Annotated[str, msgspec.Meta(description="")] | msgspec.UnsetType = msgspec.UNSET
    behind: Annotated[int, msgspec.Meta(ge=-5, description="")] | msgspec.UnsetType = msgspec.UNSET
    names: str = msgspec.field(default="", name="names[]")


def parse(text: str) -> Every:
    return parse_query(URL(f"http://x/?{text}").query, Every)


def test_values_have_their_types():
    assert parse("") == Every()
    found = parse("limit=7&order=asc&stream=true&after=a%2Fb&behind=-5&names[]=x")
    assert found == Every(limit=7, order="asc", stream=True, after="a/b", behind=-5, names="x")
    assert parse("stream=false").stream is False
    assert parse("after=null").after == "null" and parse("after=").after == "" and parse("after=7").after == "7"


@pytest.mark.parametrize(
    ("text", "param", "code"),
    [
        ("limit=1&limit=2", "limit", "duplicate_parameter"),
        ("limit=1&limit=1", "limit", "duplicate_parameter"),
        ("other=1", "other", "unknown_parameter"),
        ("seed=", "seed", "unknown_parameter"),
        ("limit[]=1", "limit[]", "unknown_parameter"),
        ("LIMIT=1", "LIMIT", "unknown_parameter"),
        ("names=1", "names", "unknown_parameter"),
        ("=1", "", "unknown_parameter"),
        ("/health", "/health", "unknown_parameter"),
        ("x" * 100, "x" * 64, "unknown_parameter"),
        ("limit=0", "limit", "invalid_type"),
        ("limit=101", "limit", "invalid_type"),
        ("limit=", "limit", "invalid_type"),
        ("limit=1.0", "limit", "invalid_type"),
        ("limit=%2B1", "limit", "invalid_type"),
        ("limit=+1", "limit", "invalid_type"),
        ("limit=%D9%A1", "limit", "invalid_type"),
        ("limit=" + "9" * 5000, "limit", "invalid_type"),
        ("behind=-6", "behind", "invalid_type"),
        ("order=up", "order", "invalid_value"),
        ("stream=1", "stream", "invalid_type"),
        ("stream=True", "stream", "invalid_type"),
        ("stream", "stream", "invalid_type"),
    ],
)
def test_error_names_the_parameter(text, param, code):
    with pytest.raises(InvalidRequestError) as refused:
        parse(text)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert len(refused.value.message) < 200


def test_struct_without_fields_refuses_every_parameter():
    assert parse_query(URL("http://x/?").query, NoQuery) == NoQuery()
    with pytest.raises(InvalidRequestError, match="'a'"):
        parse_query(URL("http://x/?a=1").query, NoQuery)


def test_a_request_is_parsed_once(monkeypatch):
    parsed: list[type[msgspec.Struct]] = []

    def parse(found: MultiMapping[str], kind: type[msgspec.Struct]) -> msgspec.Struct:
        parsed.append(kind)
        return parse_query(found, kind)

    monkeypatch.setattr(route, "parse_query", parse)
    request = make_mocked_request("GET", "/?limit=7")
    first = query_of(request, Every)
    assert first.limit == 7 and query_of(request, Every) is first
    with pytest.raises(InvalidRequestError):
        query_of(request, NoQuery)
    assert parsed == [Every, NoQuery]
