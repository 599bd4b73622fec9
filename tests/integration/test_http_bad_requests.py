"""Requests that killed or stalled other servers: each is a 400 that names the parameter, and the next request works.

CVE and report numbers are in comments.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.errors import RateLimitError
from tests.fakes.fake_generator import MODEL

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def gateway(gateway):
    yield gateway
    # After every case the next request is served.
    gateway.generator.submit_error = None
    assert (await gateway.chat())[0] == 200
    assert (await gateway.complete())[0] == 200


def is_named(body, param):
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None and error["param"].startswith(param), error
    assert not shows_internals(body)
    return True


def shows_internals(body):
    return any(sign in str(body) for sign in ("/home", "/work", "site-packages", "0x", "Traceback", 'File "'))


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], ["a", ""], [[1], []], None, 5, {}, [1, "a"], [True], [1.0], [None]]
)
async def test_empty_and_odd_prompts(gateway, prompt):
    # CVE-2024-8768, 57
    status, body, _ = await gateway.complete(prompt=prompt)
    assert status == 400 and is_named(body, "prompt")


@pytest.mark.parametrize("prompt", [[-1], [258], [2**31], [2**64], [[1], [9999]]])
async def test_token_ids_outside_the_vocabulary(gateway, prompt):
    # CVE-2026-71486
    status, body, _ = await gateway.complete(prompt=prompt)
    assert status == 400 and is_named(body, "prompt") and "258" in body["error"]["message"]


@pytest.mark.parametrize("value", [10**9, 129, 0, -1, 1.5, "2", True, [], 2**63, 1e30])
@pytest.mark.parametrize("name", ["n", "best_of"])
async def test_unbounded_n(gateway, name, value):
    # CVE-2026-34756
    status, body, _ = await gateway.complete(**{name: value})
    assert status == 400 and is_named(body, name)
    assert not gateway.generator.requests


async def test_too_many_choices_over_all_prompts(gateway):
    status, body, _ = await gateway.complete(prompt=["a"] * 100, n=128)
    assert status == 400 and is_named(body, "n")
    status, body, _ = await gateway.complete(prompt=["a"] * 1000)
    assert status == 400 and is_named(body, "prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("top_k", -2), ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -1),
        ("logprobs", 21), ("logprobs", True), ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"),
        ("temperature", True), ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("logit_bias", {"5": 101}), ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"258": 1}),
        ("logit_bias", {"1.0": 1}), ("logit_bias", {" 1": 1}), ("logit_bias", {"\u0661": 1}), ("logit_bias", []),
        ("logit_bias", {str(i): 0 for i in range(1025)}), ("logit_bias", {"9" * 5000: 1}),
        ("stop", ""), ("stop", [""]), ("stop", ["a"] * 17), ("stop", 5), ("stop", ["a", None]), ("stop", "x" * 1025),
        ("stop_token_ids", [258]), ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", 5),
        ("stop_token_ids", list(range(257))), ("ignore_eos", 1), ("ignore_eos", "true"), ("skip_special_tokens", 0),
        ("include_stop_str_in_output", "no"), ("stream", 1), ("stream", "true"), ("stream_options", True),
        ("stream_options", {"include_usage": True}), ("seed", 1.5), ("seed", "x"), ("cache_salt", ""),
        ("cache_salt", 5),
        ("cache_salt", "x" * 257), ("user", 5), ("echo", 1), ("model", 5), ("model", None), ("priority", 2**31),
        ("priority", -(2**31) - 1),
    ],
)  # fmt: skip
async def test_parameters_out_of_their_range(gateway, name, value):
    status, body, _ = await gateway.complete(**{name: value})
    assert status == 400 and is_named(body, name)


async def test_unsupported_stream_option(gateway):
    status, body, _ = await gateway.chat(stream=True, stream_options={"include_obfuscation": True})
    assert status == 400 and is_named(body, "stream_options.include_obfuscation")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("custom_logit_processor", "80049500"),  # CVE-2026-7304
        ("chat_template", "{% for i in range(10**9) %}x{% endfor %}"),  # CVE-2025-61620
        ("prompt_embeds", "AAAA"),  # CVE-2025-62164
        ("guided_regex", "(unclosed"),  # CVE-2025-48943
        ("api_base", "http://169.254.169.254"),  # CVE-2024-6587
        ("base_url", "http://169.254.169.254"),
        ("documents", [{"text": "a"}]),
        ("n_discard", -1),
        ("store", True),
        ("stop\u2028", 1),
        ("x" * 10_000, 1),
    ],
)
async def test_unsupported_and_unknown_parameters_are_named(gateway, name, value):
    status, body, _ = await gateway.chat(**{name: value})
    assert status == 400 and is_named(body, name[:64])
    assert body["error"]["code"] in ("unsupported_parameter", "unknown_parameter")


@pytest.mark.parametrize(
    "name",
    [
        "tokenize", "chat_template", "tools", "documents", "conversation", "continue_final_message", "padding",
        "truncation", "max_length", "return_tensors", "return_dict", "messages", "add_generation_prompt", "not a name",
        "__class__", "bos_token", "range", "loop", "enable_thinkin", "thinking",
    ],
)  # fmt: skip
async def test_template_variables_that_requests_may_not_set(gateway, name):
    # CVE-2025-62426
    status, body, _ = await gateway.chat(chat_template_kwargs={name: True})
    assert status == 400 and is_named(body, f"chat_template_kwargs.{name}")
    status, body, _ = await gateway.post(
        "/tokenize", {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {name: True}}
    )
    assert status == 400 and is_named(body, f"chat_template_kwargs.{name}")
    assert not gateway.models.entry.pipeline.messages


CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c"}
TEXT = {"type": "text", "text": "a"}


def user(content, **more):
    return {"role": "user", "content": content, **more}


def call(**changes):
    return {"role": "assistant", "content": None, "tool_calls": [{**CALL, **changes}]}


def function(**changes):
    return call(function={**CALL["function"], **changes})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "a", "name": "f"}], "messages[0].role"),
        ([user(None)], "messages[0].content"),
        ([user(5)], "messages[0].content"),
        ([user([])], "messages[0].content"),
        ([user(["x"])], "messages[0].content[0]"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user([{**TEXT, "x": 1}])], "messages[0].content[0].x"),
        ([user([{"type": "refusal", "refusal": "No."}])], "messages[0].content[0].type"),
        ([{"role": "tool", "content": [TEXT, {"type": "odd"}]}], "messages[0].content[1].type"),
        ([*MESSAGES, user("x", weight=1)], "messages[1].weight"),
        ([user("x", name=5)], "messages[0].name"),
        ([user("x", tool_calls=[CALL])], "messages[0].tool_calls"),
        ([{"role": "system", "content": ""}], "messages"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": "a", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}], "messages[0].reasoning"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "tool", "tool_call_id": "c", "content": "x"}], "messages[0].tool_call_id"),
        ([CALLED, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([CALLED, {"role": "tool", "tool_call_id": "d", "content": "x"}], "messages[1].tool_call_id"),
        ([CALLED, {**RESULT, "content": [{"type": "image_url"}]}], "messages[1].content[0].type"),
        ([CALLED, {**RESULT, "content": [TEXT, {"type": "x"}]}], "messages[1].content[1].type"),
        ([call(id=None)], "messages[0].tool_calls[0].id"),
        ([call(id="")], "messages[0].tool_calls[0].id"),
        ([call(type="custom")], "messages[0].tool_calls[0].type"),
        ([call(extra=1)], "messages[0].tool_calls[0].extra"),
        ([call(function=None)], "messages[0].tool_calls[0].function"),
        ([call(function={"name": "f"})], "messages[0].tool_calls[0].function.arguments"),
        ([function(name=5)], "messages[0].tool_calls[0].function.name"),
        ([function(arguments={})], "messages[0].tool_calls[0].function.arguments"),
        ([function(arguments="[" * 100_000)], "messages[0].tool_calls[0].function.arguments"),
        ([function(parsed=1)], "messages[0].tool_calls[0].function.parsed"),
    ],
)
async def test_malformed_messages(gateway, messages, param):
    # 38, 64, 67, CVE-2024-8768
    status, body, _ = await gateway.chat(messages=messages)
    assert status == 400 and is_named(body, param)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "http:\\\\127.0.0.1"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": None},
        {"type": ["text"]},
    ],
)
async def test_parts_other_than_text_are_refused(gateway, part):
    # CVE-2025-6242, CVE-2026-34755: the gateway has no HTTP client and never fetches a URL.
    content = [{"type": "text", "text": "look"}, part]
    status, body, _ = await gateway.chat(messages=[*MESSAGES, user(content)])
    assert status == 400 and is_named(body, "messages[1].content[1].type")


@pytest.mark.parametrize("model", ["../../etc/passwd", "a\u0000b", "/etc", "x" * 2**19, "http://h/x", ""])
async def test_invalid_model_names_are_refused(gateway, model):
    # CVE-2024-37032, CVE-2024-6587
    for path, rest in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "x"})):
        status, body, _ = await gateway.post(path, {"model": model, **rest})
        assert status == 404 and body["error"]["code"] == "model_not_found" and len(str(body)) < 500


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"5", b"null", b'"x"', b"{'a':1}", b'{"a":1,}', b"\xff", b'{"a":"\xff"}', b"\xef\xbb\xbf{}",
        b'{"model":"a","model":"b"}', b'{"model":"\\ud800"}', b'{"model":"\\udc00x"}', b"[" * 100_000,
        b'{"a":' * 100_000, b'{"a":' + b"9" * 10_000 + b"}", b'{"a":01}', b'{"a":"\n"}', b'{"a":1}{}', b"\x00",
        '{"model":"x"}'.encode("utf-16"), b'{"model":NaN}', b'{"model": "x" /* c */}',
    ],
    ids=range(24),
)  # fmt: skip
async def test_bodies_other_than_json_objects(gateway, raw):
    # CVE-2026-73555: on every route, and the answer shows no internals of the server.
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        status, body, headers = await gateway.post(path, raw)
        assert status == 400 and headers["x-request-id"]
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["code"] in ("invalid_json", "too_many_values")
        assert not shows_internals(body)


async def test_arguments_with_too_many_values(gateway):
    message = function(arguments='{"a": [' + "1," * 200_000 + "1]}")
    status, body, _ = await gateway.chat(messages=[message] * 2)
    assert status == 400 and body["error"]["code"] == "too_many_values"


@pytest.mark.parametrize("depth", [127, 500, 800])
async def test_too_deep_nesting_is_refused(gateway, depth):
    deep: object = {}
    for _ in range(depth):
        deep = {"a": deep}
    status, body, _ = await gateway.chat(chat_template_kwargs=deep)
    assert status == 400 and body["error"]["code"] == "too_deep"
    status, body, _ = await gateway.chat(messages=[*MESSAGES, function(arguments=json.dumps({"a": deep}))])
    assert status == 400 and is_named(body, "messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),  # CVE-2024-30251
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-16"}, 415),
        ({"Content-Type": "application/json; charset=UTF-8"}, 200),
        ({"Content-Type": "application/vnd.x+json"}, 200),
        ({"Content-Encoding": "gzip"}, 415),  # CVE-2025-69223
        ({"Content-Encoding": "deflate"}, 415),
        ({"Content-Encoding": "br"}, 415),
        ({"Content-Encoding": "zstd"}, 415),
        ({"Content-Encoding": "identity"}, 200),
    ],
)
async def test_media_types(gateway, headers, status):
    raw = b'{"model":"fake-model","prompt":"x"}'
    got, body, _ = await gateway.post("/v1/completions", raw, **headers)
    assert got == status
    if status == 415:
        assert body["error"]["code"] == "unsupported_media_type"


async def test_admission_limit(gateway):
    # 69
    gateway.generator.submit_error = RateLimitError("Busy.", retry_after=1.25)
    for fields in ({}, {"stream": True}):
        status, body, headers = await gateway.chat(**fields)
        assert status == 429 and body["error"]["code"] == "rate_limit_exceeded"
        assert headers["Retry-After"] == "2" and headers["retry-after-ms"] == "1250"


async def test_model_is_required(gateway):
    status, body, _ = await gateway.post("/v1/chat/completions", {"messages": MESSAGES})
    assert status == 400 and is_named(body, "model") and body["error"]["code"] == "missing_required_parameter"
    status, body, _ = await gateway.post("/v1/completions", {"model": MODEL})
    assert status == 400 and is_named(body, "prompt")
