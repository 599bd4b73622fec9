"""POST /v1/chat/completions over HTTP. Numbers in comments are cases of the collected bug reports."""

from __future__ import annotations

from tests.fakes.fake_generator import FakeGenerator, spell
from tests.fakes.http_gateway import run_gateway


async def test_whole_answer():
    async with run_gateway(FakeGenerator(spell("Hello", cached=3))) as gateway:
        status, body, headers = await gateway.chat()
        assert status == 200
        assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        prompt_tokens = len("user: hi\nassistant:")
        assert body["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert headers["x-request-id"] and headers["openai-version"] and int(headers["openai-processing-ms"]) >= 0


async def test_stream_chunks():
    async with run_gateway() as gateway:
        events = await gateway.stream_chat()
        assert events[-1] == "[DONE]"
        chunks = events[:-1]
        assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {
            (chunks[0]["id"], chunks[0]["created"], "fake-model")
        }
        assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        # 14: the role in the first delta alone, and nothing null in any.
        assert deltas == [{"role": "assistant", "content": ""}, *({"content": c} for c in "Hello"), {}]
        # 12: exactly one finish reason.
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["stop"]
