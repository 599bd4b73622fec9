"""stop_regex over HTTP: both endpoints, whole and streamed, together with stop strings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.hermes import ids_of, ids_of_bytes
from tests.fakes.prepared_server import PreparedServer

TEXT = "Total: 12 apples.\n\nUser: more\n"
ANSWERS = {"fruit": ids_of(TEXT), "bytes": ids_of_bytes(TEXT.encode()), "many": ids_of("a" * 4000)}
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"stop_regex": r"\d+"}, "Total: ", "stop"),
    ({"stop_regex": [r"\n\n\w+:", r"x+"]}, "Total: 12 apples.", "stop"),
    ({"stop_regex": r"\n+USER", "include_stop_str_in_output": True}, TEXT, "stop"),
    ({"stop_regex": r"(?i)\n+USER", "include_stop_str_in_output": True}, "Total: 12 apples.\n\nUser", "stop"),
    ({"stop_regex": r"\s+$"}, TEXT[:-1], "stop"),
    ({"stop_regex": r"apples", "stop": "12 a"}, "Total: ", "stop"),
    ({"stop_regex": r"^Total: 1"}, "", "stop"),
    ({"stop_regex": r"^12"}, TEXT, "stop"),
    ({"stop_regex": r"\d\d x", "max_tokens": 4}, "", "length"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[PreparedServer]:
    with PreparedServer(ANSWERS) as running:
        yield running


def asked(path: str, question: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": question}
    return {"messages": [{"role": "user", "content": question}]}


@pytest.mark.parametrize("question", ["fruit", "bytes"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "text", "reason"), CASES, ids=range(len(CASES)))
def test_text_ends_at_the_match(server, path, question, fields, text, reason):
    if reason == "length":
        # The text ends inside a possible match, so the held text is sent.
        fields = {**fields, "max_tokens": TEXT.index("2") + 1} if question == "bytes" else fields
        text = TEXT[: TEXT.index("2") + 1] if question == "bytes" else None
    body = {"max_tokens": 200, **asked(path, question), **fields}
    status, answer = server.post(path, **body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    whole = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    assert choice["finish_reason"] == reason and (text is None or whole == text)
    streamed, reasons = "", []
    for event in server.stream(path, **body)[:-1]:
        (choice,) = event["choices"]
        streamed += choice["text"] if path == "/v1/completions" else choice["delta"].get("content", "")
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert (streamed, reasons) == (whole, [reason])
    stop = answer["choices"][0]["stop_reason"]
    assert choice["stop_reason"] == stop and (stop is None) == (reason == "length" or whole == TEXT)
    if stop is not None:
        assert whole.endswith(stop) if fields.get("include_stop_str_in_output") else TEXT.startswith(whole + stop)


def test_hostile_expressions_are_cheap(server):
    # CVE-2025-48887, CVE-2026-55574
    for expression in ("(a+)+$", "(a|aa)+b", "a{1,200}b"):
        status, answer = server.post("/v1/completions", prompt="many", max_tokens=1200, stop_regex=expression)
        assert status == 200 and answer["choices"][0]["finish_reason"] in ("stop", "length")
    for expression in ("(x{1,1000}){1,1000}", "(unclosed", "(?<=x)a", r"(a)\1"):
        status, answer = server.post("/v1/completions", prompt="many", stop_regex=expression)
        assert status == 400 and answer["error"]["param"] == "stop_regex"
