"""Chunks with a pre-encoded frame against the same chunks encoded whole."""

from __future__ import annotations

import tracemalloc

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.api.common.envelope import Detail, Envelope, Tally
from gateway.api.openai.chat import ChatChunks, whole_chat_response
from gateway.api.openai.completion_shapes import Choices, CompletionChunks
from gateway.flow.events import TextDelta
from gateway.http.errors import dump_json
from gateway.text.message_parser import ToolCallDelta
from shared.messages import TokenLogprobs

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


DETAIL = Detail(token_bytes=lambda token_id: bytes([token_id]))


def envelope(model, usage=False):
    return Envelope(identifier="id", created=7, model=model, fingerprint="fp", include_usage=usage)


def events(data: bytes):
    assert data.endswith(b"\n\n") or not data
    blocks = data.decode().split("\n\n")[:-1]
    assert all(block.startswith("data: ") and len(block.splitlines()) == 1 for block in blocks)
    return [orjson.loads(block.removeprefix("data: ")) for block in blocks if block != "data: [DONE]"]


STOPS = st.none() | st.integers(0, 2**31) | TEXT


def end_of(reason, stop):
    """Return the fields of a choice that say how it ended."""
    return {"finish_reason": None} if reason is None else {"finish_reason": reason, "stop_reason": stop}


@given(text=TEXT, model=TEXT, index=st.integers(0, 200), usage=st.booleans(), stop=STOPS)
def test_chat_chunks(text, model, index, usage, stop):
    chunks = ChatChunks(envelope(model, usage), Tally(1), DETAIL)
    sent = events(chunks.encode(index, 0, TextDelta(index, text, [1], finish_reason="stop", stop_reason=stop)))
    common = {**envelope(model).chunk("chat.completion.chunk")}
    deltas = [
        ({"role": "assistant", "content": ""}, None),
        *([({"content": text}, None)] if text else []),
        ({}, "stop"),
    ]
    assert sent == [
        {
            **common,
            "choices": [{"index": index, "delta": delta, "logprobs": None, **end_of(reason, stop)}],
            **({"usage": None} if usage else {}),
        }
        for delta, reason in deltas
    ]


@given(text=TEXT, reasoning=TEXT, arguments=TEXT, begins=st.booleans(), shown=st.booleans(), ids=st.booleans())
def test_every_piece_of_a_message_has_its_own_chunk(text, reasoning, arguments, begins, shown, ids):
    """Every piece of a message has a chunk of its own, in order; the first one reports on the tokens."""
    detail = Detail(token_bytes=lambda token_id: bytes([token_id]), token_ids=ids, prompts=[[9]], reasoning=shown)
    chunks = ChatChunks(envelope("m"), Tally(1), detail)
    chunks.encode(0, 0, TextDelta(0, "", []))
    call = ToolCallDelta(2, arguments, **({"id": "c", "name": "f"} if begins else {}))
    delta = TextDelta(0, text, [1, 2], reasoning=reasoning, tool_calls=[call], num_reasoning_tokens=1)
    choices = [chunk["choices"][0] for chunk in events(chunks.encode(0, 0, delta))]
    expected = [{"reasoning_content": reasoning, "reasoning": reasoning}] if reasoning and shown else []
    expected += [{"content": text}] if text else []
    if begins:
        first = {"index": 2, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
        expected.append({"tool_calls": [first]})
    if arguments:
        expected.append({"tool_calls": [{"index": 2, "function": {"arguments": arguments}}]})
    assert [choice["delta"] for choice in choices] == (expected or [{"content": ""}] * ids)
    token_ids = [choice.get("token_ids") for choice in choices]
    assert token_ids == ([[1, 2], *([None] * (len(choices) - 1))] if ids else [None] * len(choices))
    assert all(choice["finish_reason"] is None for choice in choices)


@given(text=TEXT, model=TEXT, reason=st.sampled_from([None, "length"]), usage=st.booleans(), stop=STOPS)
def test_completion_chunks(text, model, reason, usage, stop):
    chunks = CompletionChunks(envelope(model, usage), Tally(1), Choices(None, DETAIL))
    sent = events(chunks.encode(3, 1, TextDelta(1, text, [1], finish_reason=reason, stop_reason=stop)))
    if not text and reason is None:
        assert sent == []
        return
    assert sent == [
        {
            "id": "id",
            "object": "text_completion",
            "created": 7,
            "model": model,
            "system_fingerprint": "fp",
            "choices": [{"index": 3, "text": text, "logprobs": None, **end_of(reason, stop)}],
            **({"usage": None} if usage else {}),
        }
    ]


@given(TEXT)
@example("\u0085\u2028\u2029\x0b\x0c\r\n\x1c\x1d\x1e")
def test_json_has_no_line_separators(text):
    data = dump_json({"text": text})
    assert orjson.loads(data) == {"text": text}
    assert len(data.decode().splitlines()) == 1


def test_offsets_of_an_echoed_prompt_with_a_beginning_of_text_token():
    table = {0: b"<s>", 1: b" he", 2: b"llo", 3: b"!"}
    detail = Detail(token_bytes=table.__getitem__, logprobs=0, prompts=[[0, 1, 2], [1, 2]])
    choices = Choices(["hello", " hello"], detail)
    of_prompt = [TokenLogprobs(0, None, 0, [], []), *(TokenLogprobs(token, -1.0, 1, [], []) for token in (1, 2))]
    generated = [TokenLogprobs(3, -0.5, 1, [], [])]
    shown = choices.show(0, 0, TextDelta(0, "!", [3], generated, "stop", prompt_logprobs=of_prompt))
    assert shown.logprobs is not None
    assert (shown.text, shown.logprobs["tokens"]) == ("hello!", ["<s>", " he", "llo", "!"])
    assert shown.logprobs["text_offset"] == [0, 0, 2, 5]
    shown = choices.show(1, 1, TextDelta(0, "!", [3], generated, "stop", prompt_logprobs=of_prompt[1:]))
    assert shown.logprobs is not None and (shown.text, shown.logprobs["text_offset"]) == (" hello!", [0, 3, 6])


async def test_memory_of_a_whole_responses_log_probabilities():
    count = 2000

    async def tokens():
        for number in range(count):
            entry = TokenLogprobs(number % 200, -0.5, 1, [number % 200], [-0.5])
            yield 0, 0, TextDelta(0, "x", [number % 200], logprobs=[entry], finish_reason="length")

    detail = Detail(token_bytes=lambda token_id: bytes([token_id]), logprobs=1)
    tracemalloc.start()
    response = await whole_chat_response(envelope("m"), 1, tokens(), Tally(1), detail)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    told = len(dump_json(response["choices"][0]["logprobs"]))
    assert len(response["choices"][0]["logprobs"]["content"]) == count
    assert taken < 3 * told
