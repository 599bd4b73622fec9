"""Structured output, tools, limits and log-probabilities of the default model over HTTP. Reports by number."""

from __future__ import annotations

import json
import math
import re
import time
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.server import Server, wait_until

pytestmark = pytest.mark.timeout(300)

MODEL = "SmolLM2-135M-Instruct"


class Address(BaseModel, extra="forbid"):
    street: Annotated[str, Field(max_length=16)]
    number: Annotated[int, Field(ge=1, le=999)]


class Person(BaseModel, extra="forbid"):
    name: Annotated[str, Field(max_length=16)]
    age: Annotated[int, Field(ge=0, le=120)]
    mood: Literal["glad", "sad", "tired"]
    address: Address
    tags: Annotated[list[Annotated[str, Field(max_length=8)]], Field(max_length=3)]


def person_format() -> dict[str, Any]:
    schema = Person.model_json_schema()
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


TOOLS: list = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_history")
]


def ask(text: str) -> list:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_schema(server: Server, temperature: float, stream: bool) -> None:
    """reliability 2.3 #40, 2.3 #43: a weak model does not lose itself in white space, and its keys are the schema's."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": ask("Describe a person as JSON."),
        "response_format": person_format(),
        "temperature": temperature,
        "seed": 5,
        "max_tokens": 300,
    }
    with server.client() as client:
        if stream:
            chunks = list(client.chat.completions.create(**options, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = [chunk.choices[0].finish_reason for chunk in chunks][-1]
        else:
            (choice,) = client.chat.completions.create(**options).choices
            text, reason = choice.message.content, choice.finish_reason
    assert reason == "stop", text
    Person.model_validate_json(text, strict=True)
    assert re.search(r"\s{24}|\n\s*\n", text) is None


def test_an_answer_cut_by_the_limit_says_length(server: Server) -> None:
    """reliability 2.3 #42"""
    with server.client() as client:
        for options in ({"response_format": person_format()}, {"response_format": {"type": "json_object"}}):
            (choice,) = client.chat.completions.create(
                model=MODEL, messages=ask("A person?"), max_tokens=8, temperature=0, **options
            ).choices
            assert choice.finish_reason == "length" and choice.message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,8} \d{4}"}, r"[A-Z][a-z]{2,8} \d{4}"),
        ({"choice": ["Paris", "Rome", "Z\u00fcrich"]}, "Paris|Rome|Z\u00fcrich"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{3,9}/'}, "<[a-z]{3,9}>"),
        ({"grammar": 'root ::= "yes" | "no" " " [a-z] [a-z]'}, "yes|no [a-z]{2}"),
    ],
)
def test_what_vllm_calls_structured_outputs(server: Server, extra: dict, pattern: str) -> None:
    with server.client() as client:
        chat = client.chat.completions.create(
            model=MODEL, messages=ask("Hm?"), n=2, temperature=1.5, seed=1, extra_body={"structured_outputs": extra}
        )
        plain = client.completions.create(
            model=MODEL, prompt="Well, ", temperature=1.5, seed=2, extra_body={"structured_outputs": extra}
        )
    texts = [choice.message.content for choice in chat.choices] + [plain.choices[0].text]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert {choice.finish_reason for choice in chat.choices} == {"stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_history"}}])
def test_a_forced_call_validates(server: Server, choice: Any, stream: bool) -> None:
    with server.client() as client:
        options: Any = {"model": MODEL, "messages": ask("Weather in Rome?"), "tools": TOOLS, "tool_choice": choice}
        answer: Any = client.chat.completions.create(**options, temperature=0, max_tokens=200, stream=stream)
        if stream:
            chunks = list(answer)
            deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert {delta.index for delta in deltas} == set(range(max(delta.index for delta in deltas) + 1))
            first = [delta for delta in deltas if delta.index == 0]
            name, arguments = first[0].function.name, "".join(delta.function.arguments for delta in first)
            reason = chunks[-1].choices[0].finish_reason
        else:
            (one,) = answer.choices
            name, arguments = one.message.tool_calls[0].function.name, one.message.tool_calls[0].function.arguments
            reason = one.finish_reason
    assert reason == ("tool_calls" if choice == "required" else "stop")
    assert name == "get_history" if choice != "required" else name in ("get_weather", "get_history")
    values = json.loads(arguments)
    assert set(values) <= {"city", "days", "unit"} and isinstance(values["city"], str) and values["unit"] in ("C", "F")
    assert isinstance(values.get("days", 1), int)


def test_log_probabilities_of_a_prompt_are_finite(server: Server) -> None:
    """reliability 2.4 #45, 2.4 #50: of the raw logits, whatever top_k leaves; the first token has none."""
    with server.client() as client:
        options: dict[str, Any] = {"temperature": 1, "extra_body": {"top_k": 1}, "max_tokens": 4}
        answer = client.completions.create(
            model=MODEL, prompt="correct horse battery staple", echo=True, logprobs=1, **options
        )
    (choice,) = answer.choices
    first, *rest = choice.logprobs.token_logprobs
    assert choice.text.startswith("correct horse battery staple") and first is None
    assert choice.logprobs.top_logprobs[0] is None
    assert all(math.isfinite(value) and -9999 < value <= 0 for value in rest)
    # What was sampled is the likeliest token, and its neighbours are not told away.
    assert all(value < 0 for value in rest)


def test_many_log_probabilities_of_a_prompt_of_several_chunks(server: Server) -> None:
    """reliability 2.4 #53, 2.5 #60: more tokens than a step takes (2,048), as many alternatives as there can be; one
    more is refused."""
    prompt = "A list of words: " + "tree house " * 1050 + "tree"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    status, answer = server.request("POST", "/v1/completions", {**body, "prompt_logprobs": 20}, api_key="none")
    assert status == 200, answer
    (choice,) = answer["choices"]
    entries = choice["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"] > 2048 and entries[0] is None
    assert all(20 <= len(entry) <= 21 for entry in entries[1:])
    values = [alternative["logprob"] for entry in entries[1:] for alternative in entry.values()]
    assert all(math.isfinite(value) and value <= 0 for value in values)
    assert choice["text"].strip() and answer["usage"]["completion_tokens"] == 4
    status, answer = server.request("POST", "/v1/completions", {**body, "prompt_logprobs": 21}, api_key="none")
    assert status == 400 and answer["error"]["param"] == "prompt_logprobs"


def test_seeds_of_chat(server: Server) -> None:
    """reliability 2.4 #55"""
    with server.client() as client:

        def say(seed: int) -> str:
            options: dict[str, Any] = {"temperature": 0.7, "max_tokens": 24, "messages": ask("Tell me a story.")}
            return client.chat.completions.create(model=MODEL, seed=seed, **options).choices[0].message.content or ""

        assert say(42) == say(42)
        assert len({say(seed) for seed in range(1, 6)}) == 5


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_the_end_is_not_taken_where_it_is_to_be_ignored(server: Server, path: str) -> None:
    """reliability 2.5 #62: exactly as many tokens as were asked for."""
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 48}
    ignoring = {"extra_body": {"ignore_eos": True}}
    with server.client() as client:
        if path == "chat":
            options["messages"] = ask("What is the capital of France?")
            free = client.chat.completions.create(**options)
            assert free.choices[0].finish_reason == "stop" and free.usage.completion_tokens < 48
            answer: Any = client.chat.completions.create(**options, **ignoring)
        else:
            answer = client.completions.create(prompt="<|im_start|>user\nHi<|im_end|>\n", **options, **ignoring)
    assert answer.usage.completion_tokens == 48 and answer.choices[0].finish_reason == "length"


def test_a_prompt_far_too_long_is_no_fault_of_the_server(server: Server) -> None:
    """reliability 2.5 #59"""
    before = server.metric("request_success_total")
    with server.client() as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=ask("word " * 112_000))
    assert error.value.code == "context_length_exceeded" and "8192" in error.value.message
    assert "Traceback" not in server.log() and '"level":"error"' not in server.log()
    assert server.metric("request_success_total") == before


def test_two_systems_and_two_users_in_a_row(server: Server) -> None:
    """reliability 2.5 #64, 2.5 #67: never a 500; an empty system message is as none."""
    user = {"role": "user", "content": "Hi."}
    for messages in (
        [user, user],
        [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}, user],
        [user, {"role": "system", "content": "Be brief."}],
        [{"role": "system", "content": ""}, user],
        [{"role": "assistant", "content": "Hm."}, user],
    ):
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        status, answer = server.request("POST", "/v1/chat/completions", body, api_key="none")
        assert status == 200 or (status == 400 and answer["error"]["param"].startswith("messages")), answer


def test_after_all_that_nothing_is_held(server: Server) -> None:
    began = time.monotonic()
    wait_until(server.idle, 10, "gauges at zero")
    assert time.monotonic() - began < 10 and "Traceback" not in server.log()
