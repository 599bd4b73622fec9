"""Beam search over HTTP on a tiny random model, compared token for token with transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.server import Server
from tests.fakes.tiny_model import write_tiny_model
from tests.fakes.tokenizers import byte_level_json

pytestmark = pytest.mark.timeout(300, func_only=True)

PROMPTS = [[1, 50, 77, 130, 8, 8, 9], [1, 200], [1, *range(20, 60)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    (made / "tokenizer.json").write_bytes(byte_level_json())
    return made


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Server]:
    """80 tokens of cache: exactly one sequence of maximum length, so that beams run in groups."""
    flags = "--dtype float32 --num-threads 1 --num-kv-pages 5 --max-model-len 72"
    with Server(("--model", str(folder), *flags.split())) as running:
        yield running


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def found(server: Server, prompt: list[int], **fields: Any) -> list[list[int]]:
    body = {"model": "tiny", "prompt": prompt, "use_beam_search": True, "return_token_ids": True, **fields}
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 200, answer
    return [choice["token_ids"] for choice in answer["choices"]]


def expected(reference: Any, prompt: list[int], stop_ids: list[int], **options: Any) -> list[list[int]]:
    sequences = reference.generate(
        torch.tensor([prompt]), do_sample=False, eos_token_id=stop_ids, pad_token_id=0, **options
    )
    results = []
    for sequence in sequences[:, len(prompt) :].tolist():
        ends = [place for place, token in enumerate(sequence) if token in stop_ids]
        results.append(sequence[: ends[0] + 1] if ends else sequence)
    return results


@pytest.mark.parametrize(
    ("early", "penalty", "num_beams", "max_tokens"), [(False, 0.0, 5, 12), ("never", 1.5, 5, 12), (True, 1.0, 8, 40)]
)
def test_hypotheses_are_those_of_transformers(
    small: Server, reference: Any, early: Any, penalty: float, num_beams: int, max_tokens: int
) -> None:
    """Gateway and worker together; tests of the gateway alone cover more parameters."""
    stops: list[int] = []
    if max_tokens < 30:
        # Likely tokens of this model, so that hypotheses end.
        likely = [expected(reference, prompt, [2], max_new_tokens=6)[0] for prompt in PROMPTS]
        stops = sorted({token for ids in likely for token in ids[3:]})[:4]
    for prompt in PROMPTS if stops else PROMPTS[:1]:
        fields = {"length_penalty": penalty, "early_stopping": early}
        ours = found(small, prompt, n=3, best_of=num_beams, max_tokens=max_tokens, stop_token_ids=stops, **fields)
        theirs = expected(
            reference, prompt, [2, *stops], num_beams=num_beams, num_return_sequences=3, max_new_tokens=max_tokens,
            **fields,
        )  # fmt: skip
        assert ours == theirs


def test_log_probabilities_and_usage(small: Server, reference: Any) -> None:
    body = {"model": "tiny", "prompt": PROMPTS[0], "use_beam_search": True, "n": 4, "max_tokens": 8, "logprobs": 2}
    status, answer = small.request("POST", "/v1/completions", {**body, "return_token_ids": True, "echo": True})
    assert status == 200, answer
    num_prompt = len(PROMPTS[0])
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        with torch.no_grad():
            rows = torch.log_softmax(reference(torch.tensor([PROMPTS[0] + ids])).logits[0], -1)
        wanted = [float(rows[place - 1, token]) for place, token in enumerate(PROMPTS[0] + ids)][1:]
        assert choice["logprobs"]["token_logprobs"][0] is None
        shown = choice["logprobs"]["token_logprobs"][1:]
        assert shown == pytest.approx(wanted[: len(shown)], abs=1e-4) and len(shown) >= num_prompt + len(ids) - 2
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == num_prompt
    small.await_idle()
