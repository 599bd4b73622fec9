"""Embeddings through the runner: sums of hidden states against transformers and against the tokens themselves."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaModel

import tests.fakes.tiny_server
from shared.messages import FinishReason
from tests.fakes.engine_harness import make_submit
from tests.fakes.llama_config import llama_config
from tests.fakes.tiny_server import MAX_MODEL_LEN, TinyServer, tiny_spec, tiny_weights
from tests.fakes.weights import MemoryWeights
from tests.unit.worker.executor.outcomes import outcome

PROMPTS = [[3 + (7 * seed + 11 * index) % 90 for index in range(length)] for seed, length in enumerate((1, 5, 16, 40))]
WHOLE = [3 + (5 * index) % 90 for index in range(MAX_MODEL_LEN)]
TEXT = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20, "prompt_logprobs": 1}
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def reference():
    """Return a function from token ids to [T, hidden] states after the final norm, by transformers."""
    spec = tiny_spec()
    model = LlamaModel(llama_config(spec)).eval()
    tensors = tiny_weights(spec).tensors
    with torch.no_grad():
        ours = MemoryWeights.from_transformers(_Named(model)).tensors
        assert ours.keys() == tensors.keys()
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def states(token_ids):
        return model(torch.tensor([token_ids])).last_hidden_state[0]

    return states


class _Named:
    """Model without a head, with the tensor names of a model that has one."""

    def __init__(self, model):
        self._model = model

    def state_dict(self):
        return {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}


def vector(server, name):
    (output,) = server.outputs[name, 0]
    assert output.finish.reason is FinishReason.STOP and output.token_ids == []
    return torch.tensor(list(memoryview(output.embedding).cast("f")))


def pooled(states, pooling):
    return states[-1] if pooling == "last" else states.mean(dim=0)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(pooling, budget, late, reference, monkeypatch):
    server = TinyServer(monkeypatch, late=late, num_pages=120, max_num_batched_tokens=budget)
    for number, prompt in enumerate([*PROMPTS, WHOLE]):
        server.add(make_submit(f"e{number}", prompt, pooling=pooling))
    server.drain()
    for number, prompt in enumerate([*PROMPTS, WHOLE]):
        found, wanted = vector(server, f"e{number}"), pooled(reference(prompt), pooling)
        assert (found - wanted).abs().max() < TOLERANCE
    # The norm determines the length of a state.
    assert found.norm() > 2.0


@pytest.mark.parametrize("windows", [False, True], ids=["one KV group", "two KV groups"])
@pytest.mark.parametrize("num_pages", [120, 26], ids=["enough pages", "preemptions"])
def test_embeddings_are_correct_beside_captured_and_preempted_streams(num_pages, windows, monkeypatch):
    """On a late device, vectors and texts equal those of each request alone."""
    spec = tiny_spec(windows=windows)
    texts = [make_submit(f"t{number}", PROMPTS[number], sampling=TEXT) for number in range(4)]
    embedded = [
        make_submit(f"{pooling}{number}", PROMPTS[-1][number:], pooling=pooling, priority=number % 2)
        for number in range(6)
        for pooling in ("last", "mean")
    ]
    with monkeypatch.context() as patch:
        calm = TinyServer(patch, late=False, spec=spec, num_pages=120, max_num_seqs=1, max_num_batched_tokens=64)
        for submit in texts + embedded:
            calm.add(submit)
        calm.drain()
    server = TinyServer(monkeypatch, spec=spec, num_pages=num_pages, max_num_seqs=6, max_num_batched_tokens=24)
    for submit in texts:
        server.add(submit)
    for submit in embedded:
        server.add(submit)
        server.step()
    server.drain()
    seen, expected = outcome(server), outcome(calm)
    assert all(seen[submit.request_id, 0] == expected[submit.request_id, 0] for submit in texts)
    for submit in embedded:
        difference = vector(server, submit.request_id) - vector(calm, submit.request_id)
        assert difference.abs().max() < TOLERANCE
    assert server.num_captured > 0
    assert (server.scheduler.counters.num_preemptions_total > 0) == (num_pages == 26)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_non_finite_states_fail_only_their_request(late, pooling, reference, monkeypatch):
    broken = 95

    def weights(spec, seed=0):
        found = tiny_weights(spec, seed)
        found.tensors["embed.weight"][broken] = math.inf
        return found

    monkeypatch.setattr(tests.fakes.tiny_server, "tiny_weights", weights)
    server = TinyServer(monkeypatch, late=late, num_pages=120, max_num_batched_tokens=16)
    server.add(make_submit("bad", [*PROMPTS[2], broken, *PROMPTS[1]], pooling=pooling))
    server.add(make_submit("good", PROMPTS[3], pooling=pooling))
    server.drain()
    assert server.finishes["bad", 0].code == "invalid_logits"
    assert (vector(server, "good") - pooled(reference(PROMPTS[3]), pooling)).abs().max() < TOLERANCE
