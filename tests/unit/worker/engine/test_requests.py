"""Requests from Submit to their end, as a gateway sees them."""

from __future__ import annotations

import msgspec
import pytest

from shared.messages import BundleRequest, Cancel, FinishReason, encode_message
from tests.fakes.fake_executor import VOCAB_SIZE, embed
from tests.unit.worker.engine.harness import MAX_MODEL_LEN, Worker, expected, make_submit

NAN = float("nan")


def test_welcome_describes_the_worker_and_bundle_is_sent_on_request(worker: Worker) -> None:
    client = worker.client()
    assert client.welcomes[0].facts == worker.facts
    client.send(BundleRequest("b"))
    client.send(BundleRequest("other"))
    stats = client.sync()
    assert client.bundles == [worker.bundle]
    assert stats.counters["malformed_messages_total"] == 1


def test_request_runs_and_frees_everything(worker: Worker) -> None:
    client = worker.client()
    client.complete("a", ignore_eos=True)
    worker.run_until_idle()
    stats = client.sync()
    assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
    assert stats.counters["generation_tokens_total"] == 8
    assert stats.counters["prompt_tokens_total"] == 5


def test_accepted_drafts_are_reported_by_position(worker: Worker) -> None:
    client = worker.client()
    assert client.sync().accepted_per_position == []
    worker.counters.count_verification(4, 2)
    worker.counters.count_verification(4, 1)
    stats = client.sync()
    assert stats.accepted_per_position == [2, 1]
    assert stats.counters["spec_decode_num_accepted_tokens_total"] == 3


def test_concurrent_requests_share_one_steps_message_per_step(worker: Worker) -> None:
    client = worker.client()
    submits = [client.submit(f"r{i}", [5 + i] * (i + 1), seed=i, ignore_eos=True) for i in range(8)]
    for submit in submits:
        client.check(submit)
    assert max(len(steps.outputs) for steps in client.steps) == 8
    assert len(client.steps) <= len(worker.executor.plans)


def test_pipeline_depth_is_reached_and_not_exceeded(worker: Worker) -> None:
    worker.client().complete("a", ignore_eos=True)
    assert worker.executor.max_in_flight == worker.executor.depth


def test_cached_tokens_are_reported_once_on_each_choices_first_output(worker: Worker) -> None:
    client = worker.client()
    prompt = list(range(5, 22))
    client.complete("a", prompt, num_choices=2, ignore_eos=True)
    client.complete("b", prompt, num_choices=2, ignore_eos=True)
    for request_id, cached in (("a", 0), ("b", 16)):
        for choice in range(2):
            told = [output.num_cached_tokens for output in client.outputs[request_id, choice]]
            assert told[0] is not None and set(told[1:]) == {None}
            assert choice or told[0] == cached


def test_cancel_ends_request_or_single_choice(worker: Worker) -> None:
    client = worker.client()
    submit = client.submit("a", num_choices=3, max_tokens=100, ignore_eos=True)
    worker.pump(lambda: len(client.text("a", 1)) > 3, "tokens")
    client.send(Cancel("a", 1))
    assert client.finish("a", 1).reason is FinishReason.ABORT
    client.sync()
    assert client.ended("a", 0) is None and client.ended("a", 2) is None
    client.send(Cancel("a"))
    assert client.finish("a", 0).reason is client.finish("a", 2).reason is FinishReason.ABORT
    for choice in range(3):
        text = client.text("a", choice)
        assert text == expected(submit, choice)[: len(text)]
    worker.run_until_idle()


def test_cancel_of_unknown_request_is_ignored(worker: Worker) -> None:
    client, other = worker.client(), worker.client(b"other")
    client.complete("ended")
    live = client.submit("live", max_tokens=40, ignore_eos=True)
    for message in (Cancel("never"), Cancel("ended"), Cancel("ended", 0), Cancel("live", 5)):
        client.send(message)
    # Another gateway's request with the same id is a different request.
    other.send(Cancel("live"))
    other.sync()
    assert client.sync().counters["malformed_messages_total"] == 0
    client.check(live)


def test_two_gateways_may_use_the_same_ids(worker: Worker) -> None:
    first, second = worker.client(b"first"), worker.client(b"second")
    ours = first.submit("a", seed=1, max_tokens=30)
    theirs = second.submit("a", seed=2, max_tokens=30)
    first.check(ours)
    second.check(theirs)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_duplicate_live_id_is_refused(worker: Worker, num_choices: int) -> None:
    client = worker.client()
    submit = client.submit("a", max_tokens=60, ignore_eos=True)
    client.sync()
    client.submit("a", [9, 9, 9], num_choices=num_choices)
    client.submit("a", [VOCAB_SIZE], num_choices=num_choices)
    assert client.sync().counters["malformed_messages_total"] == 2
    client.check(submit)
    assert set(client.outputs) == {("a", 0)}
    client.outputs.clear()
    client.complete("a", [9, 9, 9])


REFUSED = {
    "token id not below the vocabulary": ([5, VOCAB_SIZE], {}, "invalid_request"),
    "predicted id not below the vocabulary": ([5], {"prediction": [VOCAB_SIZE]}, "invalid_request"),
    "no tokens": ([], {}, "invalid_request"),
    "empty prompt": ([5], {"num_prompt_tokens": 0}, "invalid_request"),
    "prompt longer than the tokens": ([5], {"num_prompt_tokens": 2}, "invalid_request"),
    "another model": ([5], {"model": "other"}, "model_not_found"),
    "NaN temperature": ([5], {"temperature": NAN}, "invalid_request"),
    "infinite penalty": ([5], {"presence_penalty": float("inf")}, "invalid_request"),
    "NaN bias": ([5], {"logit_bias": {3: NAN}}, "invalid_request"),
    "bias of an unknown id": ([5], {"logit_bias": {VOCAB_SIZE: 1.0}}, "invalid_request"),
    "bias of a negative id": ([5], {"logit_bias": {-1: 1.0}}, "invalid_request"),
    "NaN deadline": ([5], {"deadline": NAN}, "invalid_request"),
    "infinite deadline": ([5], {"deadline": float("inf")}, "invalid_request"),
    "no tokens to generate": ([5], {"max_tokens": 0}, "invalid_request"),
    "a seed of 65 bits": ([5], {"seed": 2**63}, "invalid_request"),
    "an unknown stop id": ([5], {"stop_token_ids": (-1,)}, "invalid_request"),
    "prompt longer than the context": ([5] * MAX_MODEL_LEN, {}, "context_length_exceeded"),
}


@pytest.mark.parametrize(("prompt", "changes", "code"), REFUSED.values(), ids=REFUSED)
def test_invalid_request_is_answered_once_per_choice(
    worker: Worker, prompt: list[int], changes: dict, code: str
) -> None:
    client = worker.client()
    live = client.submit("live", max_tokens=30, ignore_eos=True)
    client.submit("a", prompt, choice=1, num_choices=3, **changes)
    for choice in (1, 2, 3):
        finish = client.finish("a", choice)
        assert (finish.reason, finish.code) == (FinishReason.ERROR, code)
        assert finish.message
        assert client.text("a", choice) == []
    client.check(live)
    client.complete("next")
    worker.run_until_idle()
    assert {choice for request_id, choice in client.outputs if request_id == "a"} == {1, 2, 3}
    assert client.sync().counters["rejected_requests_total"] == 1


def test_excess_choices_are_each_refused(worker: Worker) -> None:
    client = worker.client()
    client.submit("a", choice=100, num_choices=100)
    for choice in range(100, 200):
        assert client.finish("a", choice).code == "invalid_request"
    client.complete("next")


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, -1]},
        {"token_ids": "text"},
        {"salt": b"s" * 65},
        {"sampling": {"temperature": "hot"}},
        {"sampling": {"logit_bias": {"x": 1.0}}},
    ],
)
def test_submit_outside_protocol_limits_is_answered(worker: Worker, changes: dict) -> None:
    client = worker.client()
    live = client.submit("live", max_tokens=30, ignore_eos=True)
    for request_id in ("a", "live"):
        fields = msgspec.msgpack.decode(encode_message(make_submit(request_id, num_choices=2)))
        client.send_frames(msgspec.msgpack.encode(fields | changes))
    assert [client.finish("a", choice).code for choice in (0, 1)] == ["invalid_request"] * 2
    client.check(live)
    assert client.sync().counters["malformed_messages_total"] == 1
    assert ("live", 1) not in client.outputs
    client.complete("next")


def test_embedding_is_sent_once_with_its_end_beside_texts(worker: Worker) -> None:
    client = worker.client()
    text = client.submit("t", list(range(5, 24)), ignore_eos=True, max_tokens=20)
    prompt = [3 + i % 90 for i in range(MAX_MODEL_LEN)]
    for pooling in ("last", "mean"):
        client.submit(pooling, prompt, pooling=pooling, max_tokens=1)
    for pooling in ("last", "mean"):
        assert client.finish(pooling).reason is FinishReason.STOP
        (output,) = client.outputs[pooling, 0]
        assert (output.token_ids, output.num_cached_tokens) == ([], 0)
        assert output.embedding == embed(prompt, pooling)
    client.check(text)
    worker.run_until_idle()
    assert client.sync().counters["prompt_tokens_total"] == 2 * MAX_MODEL_LEN + 19
