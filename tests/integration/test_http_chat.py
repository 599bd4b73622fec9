"""POST /v1/chat/completions over HTTP. Numbers in comments are cases of the collected bug reports."""

from __future__ import annotations

import asyncio

from gateway.flow.events import TextDelta
from shared.errors import InternalError, WorkerLostError
from shared.messages import TokenLogprobs
from shared.sampling_params import SamplingParams
from tests.fakes.fake_generator import EOS, MODEL, FakeGenerator, logprob, spell
from tests.fakes.http_gateway import parse_events, run_gateway

CALL = {"id": "call_1", "type": "function", "function": {"name": "answer", "arguments": '{"of": "all"}'}}


async def test_error_before_the_first_byte_has_its_own_status(gateway):
    # 19
    script = [InternalError("It broke.")]
    gateway.generator.script = lambda _: list(script)
    for fields in ({}, {"stream": True}):
        status, body, headers = await gateway.chat(**fields)
        assert status == 500 and body["error"]["message"] == "It broke."
        assert headers["x-request-id"]
    script[0] = WorkerLostError("The worker died.", retry_after=3)
    status, body, headers = await gateway.chat(stream=True)
    assert status == 503 and body["error"]["code"] == "worker_lost" and headers["Retry-After"] == "3"


async def test_an_end_without_finish_reason_is_a_failure(gateway):
    # 25
    gateway.generator.script = lambda _: [TextDelta(0, "Hel", [1])]
    assert (await gateway.chat())[0] == 500
    events = await gateway.stream_chat()
    assert events[-1] == "[DONE]" and events[-2]["error"]["type"] == "server_error"


async def test_a_bug_is_a_500_without_internals(gateway):
    gateway.generator.script = lambda _: [ZeroDivisionError("/secret/path")]
    status, body, _ = await gateway.chat()
    assert status == 500 and "secret" not in str(body) and "Zero" not in str(body)
    assert body["error"]["type"] == "server_error"


async def test_keepalive_comments_before_and_between_events():
    gate = asyncio.Event()
    steps = [gate, *spell("ok")()]
    async with run_gateway(FakeGenerator(lambda _: list(steps)), keepalive_interval=0.05) as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            # Headers are sent before the first event.
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            gate.set()
            rest = await response.content.read()
        events = parse_events(rest)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_logprobs(gateway):
    # 47, 48
    gateway.generator.script = spell("h\U0001f600")
    _, body, _ = await gateway.chat(logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 5
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "h\U0001f600"
    assert content[0] == {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": []}
    assert content[1]["token"] == "bytes:\\xf0"
    _, body, _ = await gateway.chat(logprobs=True, top_logprobs=20)
    assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
    streamed = []
    for event in (await gateway.stream_chat(logprobs=True, top_logprobs=20))[:-1]:
        if event["choices"][0]["logprobs"]:
            streamed += event["choices"][0]["logprobs"]["content"]
    assert streamed == body["choices"][0]["logprobs"]["content"]
    for fields in (
        {"top_logprobs": 1},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
    ):
        status, body, _ = await gateway.chat(**fields)
        assert status == 400 and body["error"]["param"] == "top_logprobs"


async def test_stop_token_has_no_logprob_entry_and_infinities_are_clamped(gateway):
    # 45, 48
    steps = [
        TextDelta(0, "a", [97], logprobs=[TokenLogprobs(97, float("-inf"), 1, [98], [float("-inf")])]),
        TextDelta(0, "", [EOS], logprobs=[logprob(EOS)], finish_reason="stop"),
    ]
    gateway.generator.script = lambda _: list(steps)
    _, body, _ = await gateway.chat(logprobs=True, top_logprobs=1)
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999 and entry["top_logprobs"][0]["logprob"] == -9999
    assert body["usage"]["completion_tokens"] == 2


async def test_messages_as_the_template_gets_them(gateway):
    # 64, 67
    messages = [
        {"role": "system", "content": ""},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "again", "name": "Jo"},
        {"role": "assistant", "content": "Hm.", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "So.", "audio": None},
        {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "call_1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "refusal": "No more."},
    ]
    status, _, _ = await gateway.chat(messages=messages, chat_template_kwargs={"enable_thinking": False})
    assert status == 200
    assert gateway.models.entry.pipeline.messages == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {"role": "user", "content": "again", "name": "Jo"},
            {"role": "assistant", "content": "Hm."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**CALL, "function": {"name": "answer", "arguments": {"of": "all"}}}],
                "reasoning_content": "So.",
                "reasoning": "So.",
                "thinking": "So.",
            },
            {"role": "tool", "content": "42", "tool_call_id": "call_1", "name": "answer"},
            {"role": "assistant", "content": "No."},
            {"role": "assistant", "content": "No more."},
        ]
    ]
    assert gateway.models.entry.pipeline.template_kwargs == [{"enable_thinking": False}]


async def test_max_tokens(gateway):
    # 61: the smaller of the two limits applies; without a limit, the remaining context.
    prompt = len("user: hi\nassistant:")
    for fields, expected in (
        ({"max_completion_tokens": 10}, 10),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({}, 4096 - prompt),
        ({"max_tokens": 4096 - prompt}, 4096 - prompt),
    ):
        assert (await gateway.chat(**fields))[0] == 200
        assert gateway.generator.requests[-1].sampling.max_tokens == expected


async def test_sampling_parameters_reach_the_generator(gateway):
    # 62, 55
    status, body, _ = await gateway.chat(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, logit_bias={"5": -100, "7": 1.5}, min_tokens=2, ignore_eos=True, stop=["a", "b"],
        stop_token_ids=[9], include_stop_str_in_output=True, skip_special_tokens=False, seed=42, max_tokens=20, n=2,
        priority=-3, cache_salt="s", user="u", response_format={"type": "text"}, tools=[], tool_choice="none",
        store=None,
    )  # fmt: skip
    assert status == 200, body
    request = gateway.generator.requests[0]
    assert request.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, logit_bias={5: -100.0, 7: 1.5}, min_tokens=2, ignore_eos=True, stop_token_ids=(9,),
        seed=42, max_tokens=20,
    )  # fmt: skip
    assert request.stop == ("a", "b") and request.include_stop_str_in_output and not request.skip_special_tokens
    assert request.n == 2 and request.priority == -3
    await gateway.chat()
    await gateway.chat()
    seeds = [request.sampling.seed for request in gateway.generator.requests[1:]]
    assert seeds[0] != seeds[1]
