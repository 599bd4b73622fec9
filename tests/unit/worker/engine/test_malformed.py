"""Malformed frames: each is counted and dropped without effect on other clients."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import msgspec
import pytest
import zmq

from shared import messages
from shared.messages import Cancel, Hello, Ping, Pong, Steps, Submit, WorkerStats, encode_message
from tests.unit.worker.engine.harness import EPOCH, Worker, make_submit

VALID = encode_message(make_submit("v"))
DEEP = b"\x91" * 10_000 + b"\xc0"


@pytest.fixture
def worker(start: Callable[..., Worker]) -> Worker:
    """Return a worker; what the socket receives is independent of the depth."""
    return start(depth=2)


PAYLOADS = {
    "empty": b"",
    "truncated": VALID[:-3],
    "tokens of 2^32 - 1": VALID.replace(b"\xa9token_ids\x95", b"\xa9token_ids\xdd\xff\xff\xff\xff"),
    "nested in a submit": b"\x84\xa4type\xa6submit\xaarequest_id\xa1r\xa5model\xa1m\xa1x" + DEEP,
    "unknown type": msgspec.msgpack.encode({"type": "run", "request_id": "r"}),
    "submit without choices": encode_message(make_submit("r", num_choices=0)),
    "submit of a million choices": encode_message(make_submit("r", num_choices=1_000_000)),
    "negative nonce": encode_message(Ping(-1)),
    "steps": encode_message(Steps(EPOCH, 1, [])),
    "pickle": pickle.dumps({"type": "ping", "nonce": 1}),
    "pong": encode_message(Pong(EPOCH, 1, WorkerStats())),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_malformed_frame_is_counted_and_dropped(worker: Worker, payload: bytes) -> None:
    client, stranger = worker.client(), worker.client(b"stranger", hello=False)
    live = client.submit("live", max_tokens=40, ignore_eos=True)
    client.send_frames(payload)
    stranger.send_frames(payload)
    worker.pump(lambda: worker.counters.malformed_messages_total == 2, "both counted")
    client.check(live)
    client.complete("next")
    assert client.sync().counters["malformed_messages_total"] == 2
    worker.run_until_idle()


@pytest.mark.parametrize("num_frames", [2, 3, 2**16])
def test_multi_frame_message_is_counted_once(worker: Worker, num_frames: int) -> None:
    client = worker.client()
    for frame in (b"", VALID):
        client.send_frames(*[frame] * num_frames)
    assert client.sync().counters["malformed_messages_total"] == 2
    client.complete("next")
    assert set(client.outputs) == {("next", 0)}


def test_other_socket_types_are_harmless(worker: Worker) -> None:
    client = worker.client()
    for kind in (zmq.REQ, zmq.PUSH, zmq.PUB, zmq.SUB):
        socket = worker.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(worker.endpoint)
        if kind == zmq.REQ:
            socket.send(VALID)
            worker.pump(lambda: worker.counters.malformed_messages_total == 1, "the message of the REQ socket counted")
        client.complete(f"beside {kind}")
        socket.close()
    assert client.sync().counters["malformed_messages_total"] == 1


def test_messages_before_hello_are_ignored(worker: Worker) -> None:
    stranger = worker.client(b"stranger", hello=False)
    for message in (make_submit("a"), Cancel("a"), Ping(1)):
        stranger.send(message)
    worker.pump(lambda: worker.counters.malformed_messages_total == 3, "all counted")
    assert not worker.scheduler.has_requests
    stranger.hello()
    assert stranger.stats is None and not stranger.outputs
    stranger.complete("a")


@pytest.mark.parametrize("known", [False, True])
def test_other_protocol_version_is_answered_with_ours_and_not_served(worker: Worker, known: bool) -> None:
    client, other = worker.client(), worker.client(b"other", hello=known)
    if known:
        other.submit("old", max_tokens=100, ignore_eos=True)
        other.sync()
    before = len(other.welcomes)
    other.send(Hello(2, "other"))
    other.send(make_submit("a"))
    worker.pump(lambda: len(other.welcomes) > before, "an answer")
    worker.pump(lambda: worker.counters.malformed_messages_total == 2, "both counted")
    assert other.welcomes[-1].version == 1
    client.complete("next")
    worker.run_until_idle()
    assert not other.outputs
    other.hello()
    other.complete("a")


def test_oversized_frame_is_not_decoded(start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Worker = start()
    client, large = worker.client(), worker.client(b"large")
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 1 << 20)
    live = client.submit("live", max_tokens=40, ignore_eos=True)
    large.submit("mine", max_tokens=100, ignore_eos=True)
    large.send_frames(b"x" * (messages.MAX_MESSAGE_BYTES + 1))
    worker.pump(lambda: worker.counters.malformed_messages_total == 1, "counted")
    client.check(live)


def test_extreme_numbers_are_answered_or_counted(worker: Worker) -> None:
    """Check that each message is answered or counted, and that none raises."""
    client = worker.client()
    base = msgspec.msgpack.decode(VALID)
    edges: list = [
        0,
        -1,
        2**31 - 1,
        2**31,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
        1e308,
        float("nan"),
        None,
        True,
        "",
        b"",
        [],
        {},
    ]
    names = [name for name in Submit.__struct_fields__ if name != "sampling"]
    sampling = ["temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids"]
    sampling += ["logit_bias", "logprobs", "prompt_logprobs", "repetition_penalty", "ignore_eos"]
    for name in names:
        for number, value in enumerate(edges):
            client.send_frames(msgspec.msgpack.encode(base | {"request_id": f"{name}{number}", name: value}))
        client.sync()
    for name in sampling:
        for number, value in enumerate(edges):
            changed = base["sampling"] | {name: value}
            client.send_frames(msgspec.msgpack.encode(base | {"request_id": f"{name}{number}", "sampling": changed}))
            client.sync()
    worker.run_until_idle()
    client.sync()
    for name in sampling:
        for number in range(len(edges)):
            assert client.ended(f"{name}{number}") is not None
    client.complete("next")
