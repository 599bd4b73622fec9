"""Text and end of answers, whole and streamed: code points over several tokens, stop strings and stop expressions.

Numbers refer to docs/reliability.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.chat_gateway import MODEL, chat_gateway
from tests.fakes.fake_worker import ENDLESS
from tests.fakes.gateway_core import until
from tests.fakes.hermes import END, Answer, ids_of, ids_of_bytes
from tests.fakes.http_gateway import parse_events
from tests.fakes.prepared_server import PreparedServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
STOP_SIGN = "Here: \U0001f6d1!"
CJK = "\u4f60\u597d\uff0c\u4e16\u754c"
ILL_FORMED = {
    "lone": b"a\xe5b",
    "overlong": b"a\xc0\x80b",
    "surrogate": b"a\xed\xa0\x80b",
    "beyond": b"a\xf5\x80\x80\x80b",
}
LINES = "one\ntwo\n\nthree\n"
FRUIT = "Total: 12 apples.\n\nUser: more\n"
ANSWERS: dict[str, Answer] = {
    "stop sign": ids_of_bytes(STOP_SIGN.encode()),
    "cjk": ids_of_bytes(CJK.encode()),
    **{name: ids_of_bytes(data) for name, data in ILL_FORMED.items()},
    "user": [*ids_of("Fine.\nUser")[:-1], *ids_of(":"), END],
    "fox": ids_of("The quick brown fox"),
    "bytes of fox": ids_of_bytes(b"The quick brown fox"),
    "greek": ids_of("alpha beta gamma delta"),
    "lines": ids_of(LINES),
    "fruit": ids_of(FRUIT),
    "bytes of fruit": ids_of_bytes(FRUIT.encode()),
}
REGEXES: list[tuple[dict[str, Any], str]] = [
    ({"stop_regex": r"\d+"}, "Total: "),
    ({"stop_regex": [r"\n\n\w+:", r"x+"]}, "Total: 12 apples."),
    ({"stop_regex": r"\n+USER", "include_stop_str_in_output": True}, FRUIT),
    ({"stop_regex": r"(?i)\n+USER", "include_stop_str_in_output": True}, "Total: 12 apples.\n\nUser"),
    ({"stop_regex": r"\s+$"}, FRUIT[:-1]),
    ({"stop_regex": r"apples", "stop": "12 a"}, "Total: "),
    ({"stop_regex": r"^Total: 1"}, ""),
    ({"stop_regex": r"^12"}, FRUIT),
]
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    # reliability 2.1 #1: a code point over several tokens is sent as a whole.
    ("stop sign", {}, STOP_SIGN, "stop"),
    # reliability 2.1 #2: ill-formed bytes are replaced.
    *((name, {}, data.decode("utf-8", "replace"), "stop") for name, data in ILL_FORMED.items()),
    # reliability 2.1 #3: a code point is cut by the limit.
    *(("cjk", {"max_tokens": n}, CJK.encode()[:n].decode("utf-8", "replace"), "length") for n in range(1, 8)),
    # reliability 2.1 #5, 2.1 #6, 2.1 #9: nothing of a stop string is shown, whatever tokens it spans.
    ("user", {"stop": ["\nUser:"]}, "Fine.", "stop"),
    ("fox", {"stop": ["own fox"]}, "The quick br", "stop"),
    ("bytes of fox", {"stop": ["own fox"]}, "The quick br", "stop"),
    ("greek", {"stop": ["beta gamma"]}, "alpha ", "stop"),
    # reliability 2.1 #7: text held back for a stop string is not lost.
    ("lines", {"stop": ["\n<|endoftext|>"]}, LINES, "stop"),
    *((name, fields, text, "stop") for name in ("fruit", "bytes of fruit") for fields, text in REGEXES),
    # The text ends inside a possible match, which is then sent.
    ("bytes of fruit", {"stop_regex": r"\d\d x", "max_tokens": 9}, FRUIT[:9], "length"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[PreparedServer]:
    with PreparedServer(ANSWERS) as running:
        yield running


def asking(path: str, question: str) -> dict[str, Any]:
    return {"prompt": question} if path == COMPLETIONS else {"messages": [{"role": "user", "content": question}]}


@PATHS
@pytest.mark.parametrize(("question", "fields", "text", "reason"), CASES, ids=range(len(CASES)))
def test_text_of_whole_and_streamed_answers(server, path, question, fields, text, reason):
    body = {"max_tokens": 200, **asking(path, question), **fields}
    status, answer = server.post(path, **body)
    assert status == 200, answer
    (whole,) = answer["choices"]
    assert (whole["text"] if path == COMPLETIONS else whole["message"]["content"]) == text
    assert whole["finish_reason"] == reason
    *chunks, done = server.stream(path, **body)
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = [choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "") for choice in choices]
    assert "".join(pieces) == text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [reason]
    assert choices[-1]["stop_reason"] == whole["stop_reason"]
    if question == "stop sign":
        assert not any("\ufffd" in piece for piece in pieces)
    if "stop_regex" in fields:
        stop = whole["stop_reason"]
        assert (stop is None) == (reason == "length" or text == FRUIT)
        if stop is not None:
            assert text.endswith(stop) if fields.get("include_stop_str_in_output") else FRUIT.startswith(text + stop)


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_started", [False, True])
async def test_the_loss_of_a_worker_is_never_success(directory, path, stream, has_started):
    """reliability 2.1 #22 before the first token; 2.1 #25 after it, without its end."""
    options = {**ENDLESS, "delay": 0.01}
    async with chat_gateway(directory, options.pop("script"), **options) as (gateway, worker):
        worker.faults.stalled = not has_started
        body = {"model": MODEL, **asking(path, "hi"), "max_tokens": 4000, "stream": stream}
        asked = asyncio.ensure_future(gateway.session.post(gateway.url + path, json=body))
        await until(lambda: worker.num_running == 1)
        first = await (await asked).content.readuntil(b"\n\n") if stream and has_started else b""
        await asyncio.to_thread(worker.stop)
        async with await asked as response:
            data = first + await response.read()
    if not first:
        assert response.status == 503 and set(await response.json()) == {"error"}
        return
    *chunks, error, done = parse_events(data)
    assert chunks and done == "[DONE]" and error["error"]["type"] == "service_unavailable_error"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
