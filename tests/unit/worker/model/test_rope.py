"""RoPE frequencies and scalings compared with transformers, and their configuration errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker.model.rope import half_split_rows, inverse_frequencies, rope_table
from worker.model.spec import RopeSpec

CASES: list[dict[str, Any]] = [
    {"kind": "none"},
    {"kind": "linear", "factor": 2.5},
    {"kind": "llama3", "factor": 32.0, "original_max_position": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"kind": "yarn", "factor": 8.0, "original_max_position": 2048, "truncate": False},
    {"kind": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 1.0, "mscale_all_dim": 0.8},
    {"kind": "yarn", "factor": 4.0, "original_max_position": 4096, "attention_factor": 1.5},
]
THEIR_NAMES = {"kind": "rope_type", "original_max_position": "original_max_position_embeddings"}


@pytest.mark.parametrize("ours", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_table_equals_transformers(ours: dict[str, Any]) -> None:
    theirs = {THEIR_NAMES.get(name, name): "default" if value == "none" else value for name, value in ours.items()}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=16384,
        rope_parameters={**theirs, "rope_theta": 500000.0},
    )
    positions = torch.tensor([[0, 1, 77, 4095, 9000, 16383]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    table = rope_table(RopeSpec(theta=500000.0, rotary_dim=64, **ours), 16384)[positions[0]]
    # The angle at position 16,383 is accurate to 1e-3 in float32.
    torch.testing.assert_close(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1), rtol=1e-6, atol=2e-3)
    torch.testing.assert_close(table[:3], torch.cat((cos[0, :3, :32], sin[0, :3, :32]), dim=-1), rtol=1e-5, atol=1e-5)


def test_dynamic_is_unscaled_within_the_original_context() -> None:
    rope = RopeSpec(theta=1e4, rotary_dim=64, kind="dynamic", factor=4.0, original_max_position=2048)
    plain = inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=64), 2048)[0]
    assert torch.equal(inverse_frequencies(rope, 2048)[0], plain)
    assert (inverse_frequencies(rope, 4096)[0][1:] < plain[1:]).all()


def test_frequency_factors_divide() -> None:
    factors = tuple(float(i + 1) for i in range(4))
    frequencies, _ = inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=8, frequency_factors=factors), 16)
    plain, _ = inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=8), 16)
    torch.testing.assert_close(frequencies * torch.tensor(factors), plain)


def test_half_split_order() -> None:
    assert half_split_rows(2, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
