"""Reports on the text and framing of streams (docs/reliability.md), on a real gateway with prepared tokens."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from shared.messages import Finish, FinishReason
from tests.e2e.server import wait_until
from tests.fakes.hermes import END, Answer, Failure, ids_of, ids_of_bytes
from tests.fakes.http_gateway import parse_events
from tests.fakes.prepared_server import MODEL, PreparedServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STOP_SIGN = "\U0001f6d1"
CJK = "\u4f60\u597d\uff0c\u4e16\u754c"
ILL_FORMED = {
    "lone": b"a\xe5b",
    "overlong": b"a\xc0\x80b",
    "surrogate": b"a\xed\xa0\x80b",
    "beyond": b"a\xf5\x80\x80\x80b",
}
FOX = "The quick brown fox"
BROKEN = Finish(FinishReason.ERROR, message="The engine broke.")

ANSWERS: dict[str, Answer] = {
    "stop sign": ids_of_bytes(f"Here: {STOP_SIGN}!".encode()),
    "cjk": ids_of_bytes(CJK.encode()),
    **{name: ids_of_bytes(data) for name, data in ILL_FORMED.items()},
    "user": [*ids_of("Fine.\nUser")[:-1], *ids_of(":"), END],
    "fox": ids_of(FOX),
    "greek": ids_of("alpha beta gamma delta"),
    "lines": ids_of("one\ntwo\n\nthree\n"),
    "bytes of fox": ids_of_bytes(FOX.encode()),
    "broken at once": Failure("", BROKEN),
    "broken later": Failure("Well", BROKEN),
    "endless": [72] * 100_000,
}


@pytest.fixture(scope="module")
def server() -> Iterator[PreparedServer]:
    with PreparedServer(ANSWERS) as running:
        yield running


def whole(server: PreparedServer, path: str, question: str, **fields: Any) -> tuple[str, str]:
    """Return the text and the finish reason."""
    status, body = server.post(path, **{"max_tokens": 200, **_asking(path, question), **fields})
    assert status == 200, body
    (choice,) = body["choices"]
    return choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"]


def streamed(server: PreparedServer, path: str, question: str, **fields: Any) -> tuple[list[str], str]:
    """Return each piece of text, and the finish reason."""
    *chunks, done = server.stream(path, **{"max_tokens": 200, **_asking(path, question), **fields})
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = [choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    assert len(reasons) == 1
    return pieces, reasons[0]


def _asking(path: str, question: str) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": question}]}
    return {"prompt": question}


def both(server: PreparedServer, path: str, question: str, **fields: Any) -> tuple[str, str]:
    """Return the text and finish reason, which must be equal for a whole response and a stream."""
    text, reason = whole(server, path, question, **fields)
    pieces, streamed_reason = streamed(server, path, question, **fields)
    assert ("".join(pieces), streamed_reason) == (text, reason)
    return text, reason


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_code_point_over_several_tokens_comes_whole(server, path):
    """reliability 2.1 #1"""
    text, reason = both(server, path, "stop sign")
    assert (text, reason) == (f"Here: {STOP_SIGN}!", "stop")
    pieces, _ = streamed(server, path, "stop sign")
    assert any(STOP_SIGN in piece for piece in pieces) and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ILL_FORMED)
def test_ill_formed_bytes_are_replaced(server, path, name):
    """reliability 2.1 #2"""
    text, reason = both(server, path, name)
    assert (text, reason) == (ILL_FORMED[name].decode("utf-8", "replace"), "stop")
    assert text[0] == "a" and text[-1] == "b" and set(text[1:-1]) == {"\ufffd"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_a_code_point_cut_by_the_limit(server, path, num_tokens):
    """reliability 2.1 #3"""
    text, reason = both(server, path, "cjk", max_tokens=num_tokens)
    assert reason == "length" and text == CJK.encode()[:num_tokens].decode("utf-8", "replace")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("question", "stop", "left"),
    [
        ("user", ["\nUser:"], "Fine."),
        ("fox", ["own fox"], "The quick br"),
        ("bytes of fox", ["own fox"], "The quick br"),
    ],
)
def test_a_stop_string_over_tokens_leaves_nothing_of_itself(server, path, question, stop, left):
    """reliability 2.1 #5, 2.1 #9"""
    assert both(server, path, question, stop=stop) == (left, "stop")
    pieces, _ = streamed(server, path, question, stop=stop)
    assert "".join(pieces) == left


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stop_string_of_words_ends_a_stream(server, path):
    """reliability 2.1 #6"""
    assert both(server, path, "greek", stop=["beta gamma"]) == ("alpha ", "stop")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_text_held_back_for_a_stop_string_is_not_lost(server, path):
    """reliability 2.1 #7"""
    assert both(server, path, "lines", stop=["\n<|endoftext|>"]) == ("one\ntwo\n\nthree\n", "stop")


def test_one_finish_reason_for_each_choice(server):
    """reliability 2.1 #12, 2.1 #14: also one role per choice, and no null in a delta."""
    *chunks, done = server.stream(CHAT, **_asking(CHAT, "fox"), n=3)
    assert done == "[DONE]"
    for index in range(3):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert not any(value is None for choice in choices for value in choice["delta"].values())
    *chunks, done = server.stream(COMPLETIONS, **_asking(COMPLETIONS, "fox"), n=3)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert reasons == ["stop"] * 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_is_the_last_chunk(server, path):
    """reliability 2.1 #16"""
    *chunks, usage, done = server.stream(path, **_asking(path, "fox"), stream_options={"include_usage": True})
    assert done == "[DONE]" and usage["choices"] == [] and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["usage"] == server.post(path, **_asking(path, "fox"))[1]["usage"]
    *plain, _ = server.stream(path, **_asking(path, "fox"))
    assert not any("usage" in chunk for chunk in plain)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_running_usage_grows_to_the_whole_or_is_refused(server, path):
    """reliability 2.1 #18"""
    options = {"include_usage": True, "continuous_usage_stats": True}
    status, body = server.post(path, **_asking(path, "fox"), stream=True, stream_options=options)
    if status == 400:
        assert body["error"]["param"] == "stream_options.continuous_usage_stats"
        return
    *chunks, done = parse_events(body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert done == "[DONE]" and counts == sorted(counts)
    assert chunks[-1]["usage"] == server.post(path, **_asking(path, "fox"))[1]["usage"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_its_status(server, path, stream):
    """reliability 2.1 #19"""
    status, body = server.post(path, **_asking(path, "broken at once"), stream=stream)
    assert status == 500 and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] == "The engine broke."


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_error_later_is_an_event_and_no_success(server, path):
    """reliability 2.1 #20"""
    *chunks, error, done = server.stream(path, **_asking(path, "broken later"))
    assert done == "[DONE]" and set(error) == {"error"} and error["error"]["message"] == "The engine broke."
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    status, body = server.post(path, **_asking(path, "broken later"))
    assert status == 500 and "choices" not in body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_started", [False, True])
def test_a_worker_that_goes_is_never_success(path, stream, has_started):
    """reliability 2.1 #22 before the first token; 2.1 #25 after it, without its end."""
    with PreparedServer(ANSWERS, delay=0.01) as server:
        server.worker.faults.stalled = not has_started
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=50)
        body = {"model": MODEL, **_asking(path, "endless"), "max_tokens": 4000, "stream": stream}
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: server.worker.num_running == 1, 50, "the worker has the request")
        begun = connection.getresponse() if stream and has_started else None
        first = b"" if begun is None else begun.readline()
        server.worker.stop()
        response = begun or connection.getresponse()
        data = first + response.read()
        connection.close()
    if begun is None:
        assert response.status in (500, 503) and set(json.loads(data)) == {"error"}
        return
    *chunks, error, done = parse_events(data)
    assert chunks and done == "[DONE]" and error["error"]["type"] in ("server_error", "service_unavailable_error")
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


def test_streams_have_only_data_and_comments():
    """reliability 2.1 #24"""
    answers: dict[str, Answer] = {"slow": ids_of_bytes(b"ab"), "slow and broken": Failure("a", BROKEN)}
    with PreparedServer(answers, flags=("--keepalive-interval", "0.1"), delay=0.6) as server:
        for path in (CHAT, COMPLETIONS):
            for question in answers:
                status, raw = server.post(path, **_asking(path, question), stream=True)
                assert status == 200
                lines = [line for line in raw.decode().split("\n") if line]
                assert any(line.startswith(":") for line in lines)
                data = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
                assert len(data) + sum(line.startswith(":") for line in lines) == len(lines)
                assert data.pop() == "[DONE]" and all(json.loads(line) for line in data)
