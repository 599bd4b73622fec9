"""The default model with the real processes and typical requests."""

from __future__ import annotations

import asyncio
import random

import openai
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_sdk_streams_a_sensible_answer(server: Server) -> None:
    with server.client() as client:
        model = client.models.list().data[0].id
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=QUESTION,
                temperature=0,
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "Paris" in text
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_and_whole_answer_agree(server: Server) -> None:
    with server.client() as client:
        options = {"model": MODEL, "messages": QUESTION, "temperature": 0.8, "seed": 11, "max_tokens": 48}
        whole = client.chat.completions.create(**options).choices[0]
        stream = client.chat.completions.create(**options, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == whole.message.content


def test_seeds_decide_and_choices_differ(server: Server) -> None:
    with server.client() as client:
        options = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0}
        first = client.completions.create(**options, seed=42, n=3)
        again = client.completions.create(**options, seed=42, n=3)
        other = client.completions.create(**options, seed=43)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert other.choices[0].text not in texts


def test_echo_with_logprobs_covers_the_prompt(server: Server) -> None:
    """vllm#10234 and #27477: the first token has null, and no value is infinite."""
    prompt = "correct horse battery staple"
    body = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    status, answer = server.request("POST", "/v1/completions", body, api_key="none")
    assert status == 200, answer
    choice = answer["choices"][0]
    assert choice["text"].startswith(prompt)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(-10_000 < value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["tokens"]) == answer["usage"]["total_tokens"]


def test_a_batch_of_prompts_is_indexed(server: Server) -> None:
    """vllm#2529: index = prompt * n + choice, and usage counts each prompt once."""
    with server.client() as client:
        options = {"model": MODEL, "max_tokens": 8, "temperature": 0}
        both = client.completions.create(prompt=["The sky is", "Water boils at"], n=2, **options)
        alone = [client.completions.create(prompt=p, **options) for p in ("The sky is", "Water boils at")]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [alone[i].choices[0].text for i in (0, 0, 1, 1)]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)
    assert both.usage.completion_tokens == 32


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    text = "Hello world! Café déjà vu — 123 😊"
    status, tokens = server.request("POST", "/tokenize", {"model": MODEL, "prompt": text}, api_key="none")
    assert status == 200 and tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 8192
    status, back = server.request("POST", "/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}, api_key="none")
    assert (status, back["prompt"]) == (200, text)


def test_a_stop_string_across_tokens_is_cut(server: Server) -> None:
    with server.client() as client:
        options = {"model": MODEL, "prompt": "Count: one, two, three,", "temperature": 0, "max_tokens": 24}
        free = client.completions.create(**options).choices[0]
        stop = free.text[5:14]
        cut = client.completions.create(**options, stop=[stop]).choices[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop"


async def _complete(client: openai.AsyncOpenAI, options: dict, delay: float) -> str:
    await asyncio.sleep(delay)
    stream = await client.completions.create(**options, stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_text_is_the_same_alone_and_among_32(server: Server) -> None:
    rng = random.Random(7)
    words = [
        "river",
        "stone",
        "cloud",
        "engine",
        "paper",
        "light",
        "number",
        "garden",
        "winter",
        "music",
        "planet",
        "bridge",
    ]
    requests = []
    for index in range(32):
        prompt = " ".join(rng.choices(words, k=rng.randint(3, 60)))
        sampling = {"temperature": 0} if index % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": index}
        requests.append({"model": MODEL, "prompt": prompt, "max_tokens": 24, **sampling})
    async with server.async_client() as client:
        alone = [await _complete(client, options, 0) for options in requests]
        together = await asyncio.gather(*(_complete(client, o, rng.random()) for o in requests))
    assert list(together) == alone


def test_a_prefix_is_found_again_but_not_by_another_key(server: Server) -> None:
    text = " ".join(f"item {number} of the long list;" for number in range(150))
    options = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0}
    with server.client("sk-one") as one, server.client("sk-two") as two:
        cold = one.completions.create(**options).usage
        warm = one.completions.create(**options).usage
        foreign = two.completions.create(**options).usage
    assert cold and warm and foreign and cold.prompt_tokens_details and warm.prompt_tokens_details
    assert cold.prompt_tokens > 1000
    assert cold.prompt_tokens_details.cached_tokens == 0
    # All full pages except the one with the last prompt token, which is always computed.
    assert warm.prompt_tokens_details.cached_tokens == (cold.prompt_tokens - 1) // 16 * 16
    assert foreign.prompt_tokens_details and foreign.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"prompt": "word " * 9000, "max_tokens": 1}, ("8192",)),
        ({"prompt": "word", "max_tokens": 9000}, ("8192", "9000")),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(server: Server, body: dict, numbers: tuple[str, ...]) -> None:
    status, answer = server.request("POST", "/v1/completions", {"model": MODEL, **body}, api_key="none")
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "maximum context length" in answer["error"]["message"]
    assert all(number in answer["error"]["message"] for number in numbers), answer


def test_after_all_that_nothing_is_held(server: Server) -> None:
    server.await_idle()
    assert "Traceback" not in server.log()
    assert "sk-one" not in server.log() and "horse battery" not in server.log()
