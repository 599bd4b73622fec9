"""Decoder compared with transformers, over the variants of the Llama family."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers

from kernels.backends.reference import DecoderOps
from tests.fakes.weights import MemoryWeights, make_batch
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.linear import Placement
from worker.model.loading.fields import Fields
from worker.model.loading.hf_config import spec_from_config
from worker.model.rope import half_split_rows
from worker.model.spec import DecoderSpec
from worker.quant.dense import DenseScheme

PAGE = 16
MAX_LEN = 192

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
BIASES = {"attention_bias": True, "mlp_bias": True}


@torch.no_grad()
def randomized(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.25)
        if "norm" in name:
            parameter.add_(1.0)
    return model.eval()


def make_pair(kind: str = "Llama", **changes: Any) -> tuple[Any, DecoderSpec, MemoryWeights]:
    """Return a random model of transformers, its specification and its weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(BASE | {"rope_parameters": PLAIN_ROPE} | changes))
    model = randomized(getattr(transformers, f"{kind}ForCausalLM")(config))
    return model, spec_from_config(Fields(config.to_dict(), ""), ()), MemoryWeights.from_transformers(model)


def run_chunks(decoder: Decoder, spec: DecoderSpec, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Return the logits of every position, computed in chunks over pages in arbitrary order."""
    num_pages = -(-len(ids) // PAGE)
    pages = [(7 * i + 3) % 23 for i in range(num_pages)]
    kv = KVStorage(spec, 23, PAGE, torch.float32, "cpu")
    for layer in range(spec.num_layers):
        kv.layers[layer].keys.fill_(float("nan"))
        kv.layers[layer].values.fill_(float("nan"))
    out, start = [], 0
    for chunk in chunks:
        out.append(decoder.forward(make_batch([(ids[start : start + chunk], start, pages)], PAGE), kv))
        start += chunk
    assert start == len(ids)
    return torch.cat(out)


def make_decoder(spec: DecoderSpec, weights: MemoryWeights) -> Decoder:
    return Decoder(spec, weights, dtype=torch.float32, device="cpu", max_model_len=MAX_LEN)


def token_ids(count: int, vocab: int = 131) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


@torch.no_grad()
def expected_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    scale = expected.abs().max()
    assert (actual - expected).abs().max() < 1e-4 * max(1.0, float(scale))


def check(model: Any, spec: DecoderSpec, weights: MemoryWeights, chunks: list[int]) -> None:
    """Compare the logits of a text that is computed in chunks of the given sizes."""
    ids = token_ids(sum(chunks))
    assert_close(run_chunks(make_decoder(spec, weights), spec, ids, chunks), expected_logits(model, ids))


@pytest.mark.parametrize(
    "changes",
    {
        "tied": {"tie_word_embeddings": True},
        "biases": BIASES,
        "mha": {"num_key_value_heads": 4},
        "mqa": {"num_key_value_heads": 1},
        "odd heads": {"hidden_size": 72, "head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 3},
        "wide heads": {"head_dim": 128, "num_attention_heads": 8},
        "gelu": {"hidden_act": "gelu_pytorch_tanh"},
        "query and key norm": {"kind": "Qwen3"},
    }.values(),
)
def test_variants(changes: dict[str, Any]) -> None:
    check(*make_pair(**changes), [25, 20])


def test_dynamic_rope_beyond_the_original_context() -> None:
    check(*make_pair(rope_parameters=DYNAMIC_ROPE), [MAX_LEN])


@pytest.mark.parametrize("chunks", [[1] * 100, [33, 1, 1, 40, 25], [16, 48, 36]], ids=str)
def test_chunks_and_decode_equal_the_whole(chunks: list[int]) -> None:
    check(*make_pair(), chunks)


@pytest.mark.parametrize("chunks", [[100], [33, 1, 1, 40, 25]])
def test_fallback_ops_and_weights_equal_reference(monkeypatch: pytest.MonkeyPatch, chunks: list[int]) -> None:
    """Run on the CPU the PyTorch fallbacks, including the GPU code path, that serve devices without our kernels."""
    monkeypatch.setattr("worker.model.decoder.select_ops", lambda *_, **__: DecoderOps())
    monkeypatch.setattr(
        Placement, "scheme", lambda place, raws, unrounded=False: DenseScheme(place.dtype, place.device)
    )
    check(*make_pair(**BIASES), chunks)


def test_interleaved_weights_are_permuted() -> None:
    _, spec, weights = make_pair(attention_bias=True)
    ids = token_ids(30)
    expected = run_chunks(make_decoder(spec, weights), spec, ids, [30])
    for layer in range(spec.num_layers):
        for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
            inverse = half_split_rows(heads, spec.head_dim, spec.rope.rotary_dim).argsort()
            for leaf in ("weight", "bias"):
                key = f"layers.{layer}.{name}.{leaf}"
                weights.tensors[key] = weights.tensors[key][inverse]
    interleaved = dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, interleaved=True))
    assert torch.equal(run_chunks(make_decoder(interleaved, weights), interleaved, ids, [30]), expected)


def test_requests_of_one_batch_are_independent() -> None:
    model, spec, weights = make_pair()
    decoder = make_decoder(spec, weights)
    kv = KVStorage(spec, 40, PAGE, torch.float32, "cpu")
    prompts = [token_ids(n) for n in (50, 3, 17, 33)]
    pages = [list(range(10 * i, 10 * i + 10)) for i in range(4)]
    decoder.forward(make_batch([(p[:-9] or p[:1], 0, g) for p, g in zip(prompts, pages)], PAGE), kv)
    rest = [(p[len(p[:-9] or p[:1]) :], len(p[:-9] or p[:1]), g) for p, g in zip(prompts, pages)]
    logits = decoder.forward(make_batch(rest, PAGE, logits="last"), kv)
    for row, prompt in zip(logits, prompts):
        assert_close(row, expected_logits(model, prompt)[-1])
