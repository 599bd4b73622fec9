"""Decoding of arbitrary frames: a message or a WireError, never another exception, never unbounded memory."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Bundle,
    BundleRequest,
    Cancel,
    DraftCounts,
    Finish,
    FinishReason,
    Hello,
    Output,
    Ping,
    Pong,
    Steps,
    Submit,
    TokenLogprobs,
    Welcome,
    WorkerFacts,
    WorkerStats,
    decode_gateway_message,
    decode_worker_message,
    encode_message,
)
from shared.sampling_params import SamplingParams

FACTS = WorkerFacts(
    model_names=["m"],
    max_model_len=8192,
    num_pages=10,
    page_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    vocab_size=100,
    eos_token_ids=[2],
    model_hash="h",
    bundle_hash="b",
    speculative_method="ngram",
    hidden_size=2,
    pooling="mean",
)
LOGPROBS = TokenLogprobs(1, -0.5, 1, [1, 2], [-0.5, -1.5])
SUBMIT = Submit(
    request_id="r",
    model="m",
    token_ids=[1, 2, 3],
    num_prompt_tokens=3,
    sampling=SamplingParams(logit_bias={5: 1.0}, stop_token_ids=(7,), seed=-(2**63)),
    salt=b"salt",
    deadline=1.5,
    speculative=False,
    prediction=[4, 5],
)
EMBEDDED = Submit(
    request_id="r", model="m", token_ids=[1, 2], num_prompt_tokens=2, sampling=SamplingParams(), pooling="mean"
)
GATEWAY_MESSAGES = [
    Hello(PROTOCOL_VERSION, "g"),
    SUBMIT,
    EMBEDDED,
    Cancel("r"),
    Cancel("r", 2),
    Ping(7),
    BundleRequest("b"),
]
WORKER_MESSAGES = [
    Welcome(PROTOCOL_VERSION, "0123abcd", FACTS),
    Steps(
        "0123abcd",
        1,
        [
            Output("r", 0, [1], Finish(FinishReason.STOP, 2), [LOGPROBS], 16, [LOGPROBS], DraftCounts(3, 1)),
            Output("r", 1, [], Finish(FinishReason.ERROR, message="why", code="internal_error")),
            Output("e", 0, [], Finish(FinishReason.STOP), num_cached_tokens=0, embedding=struct.pack("<2f", 0.5, -3.0)),
        ],
    ),
    Pong(
        "0123abcd",
        7,
        WorkerStats(num_running=1, counters={"prompt_tokens_total": 2.0}, accepted_per_position=[2, 1]),
    ),
    Bundle(bundle_hash="b", tokenizer_json=b"{}", special_tokens={"eos_token": "</s>"}),
]
DECODERS = [decode_gateway_message, decode_worker_message]


@pytest.mark.parametrize("message", GATEWAY_MESSAGES + WORKER_MESSAGES)
def test_messages_survive_and_are_refused_by_the_other_side(message):
    own, other = DECODERS if message in GATEWAY_MESSAGES else reversed(DECODERS)
    assert own(memoryview(encode_message(message))) == message
    with pytest.raises(WireError):
        other(encode_message(message))


def decode_or_error(decode, frame):
    """Check that decoding returns a message or raises WireError."""
    try:
        return decode(frame)
    except WireError:
        return None


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes(frame):
    for decode in DECODERS:
        decode_or_error(decode, frame)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_mutations_of_valid_messages(data):
    message = data.draw(st.sampled_from(GATEWAY_MESSAGES + WORKER_MESSAGES))
    frame = bytearray(encode_message(message))
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(frame) - 1))
        frame[position] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(0, len(frame))) :]
    for decode in DECODERS:
        decode_or_error(decode, bytes(frame))


@pytest.mark.parametrize("message", GATEWAY_MESSAGES + WORKER_MESSAGES)
def test_every_truncation_is_an_error(message):
    frame = encode_message(message)
    for decode in DECODERS:
        for end in range(len(frame)):
            assert decode_or_error(decode, frame[:end]) is None


HUGE_HEADERS = {
    "array32": b"\xdd\xff\xff\xff\xff",
    "map32": b"\xdf\xff\xff\xff\xff",
    "bin32": b"\xc6\xff\xff\xff\xff",
    "str32": b"\xdb\xff\xff\xff\xff",
    "ext32": b"\xc9\xff\xff\xff\xff\x01",
}


@pytest.mark.parametrize("name", HUGE_HEADERS)
def test_a_claimed_length_allocates_nothing(name):
    frames = [HUGE_HEADERS[name], b"\x82\xa4type\xa6submit\xa9token_ids" + HUGE_HEADERS[name] + b"\x01\x02"]
    tracemalloc.start()
    try:
        for frame in frames:
            for decode in DECODERS:
                with pytest.raises(WireError):
                    decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x82\xa4type\xa5hello\xa1x\x91"])
def test_deep_nesting(opening):
    for decode in DECODERS:
        with pytest.raises(WireError):
            decode(opening * 10_000 + b"\xc0")


def test_oversized_frame_is_not_even_read():
    with pytest.raises(WireError, match="at most"):
        decode_gateway_message(memoryview(bytearray(MAX_MESSAGE_BYTES + 1)))


def test_pickle_is_not_executed(tmp_path):
    marker = tmp_path / "marker"

    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for decode in DECODERS:
            with pytest.raises(WireError):
                decode(pickle.dumps(Touch(), protocol))
    assert not marker.exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "unknown"},
        {"type": "submit", "token_ids": [-1]},
        {"type": "submit", "token_ids": [2**31]},
        {"type": "submit", "token_ids": [1.5]},
        {"type": "submit", "num_choices": 0},
        {"type": "submit", "num_choices": 129},
        {"type": "submit", "request_id": ""},
        {"type": "submit", "request_id": "r" * 129},
        {"type": "submit", "salt": b"x" * 65},
        {"type": "submit", "priority": 2**31},
        {"type": "submit", "sampling": None},
        *({"type": "submit", "pooling": pooling} for pooling in ("first", "", 1)),
        {"type": "cancel", "choice": -1},
        {"type": "ping", "nonce": -1},
        {"type": "ping", "nonce": 2**60},
    ],
)
def test_values_out_of_range(fields):
    good = msgspec.to_builtins(SUBMIT, builtin_types=(bytes,)) if fields["type"] == "submit" else {"request_id": "r"}
    assert fields["type"] != "submit" or decode_gateway_message(msgspec.msgpack.encode(good)) == SUBMIT
    with pytest.raises(WireError):
        decode_gateway_message(msgspec.msgpack.encode({**good, **fields}))


def test_string_that_is_not_utf8():
    with pytest.raises(WireError):
        decode_gateway_message(b"\x82\xa4type\xa6cancel\xaarequest_id\xa2\xff\xfe")


def test_doubles_that_are_no_numbers_reach_validation():
    # MessagePack carries NaN; the ranges are checked by SamplingParams.validate on the worker's side too.
    frame = encode_message(msgspec.structs.replace(SUBMIT, sampling=SamplingParams(temperature=float("nan"))))
    decoded = decode_gateway_message(frame)
    assert isinstance(decoded, Submit)
    assert struct.pack(">d", decoded.sampling.temperature)[:2] == b"\x7f\xf8"
