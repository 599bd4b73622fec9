"""Models that were opened from files compute what transformers computes from the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.fakes.weights import make_batch
from tests.unit.worker.model.loading.checkpoints import opened
from tests.unit.worker.model.loading.test_hf_folder import SIZES, _tokenizer
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.loading import ModelFiles

PAGE = 16
YARN = {"rope_type": "yarn", "rope_theta": 7000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def _logits(files: ModelFiles, ids: list[int]) -> torch.Tensor:
    decoder = Decoder(files.spec, files.weights, dtype=torch.float32, device="cpu", max_model_len=len(ids))
    pages = list(range(-(-len(ids) // PAGE)))
    kv = KVStorage(files.spec, len(pages), PAGE, torch.float32, "cpu")
    return decoder.forward(make_batch([(ids, 0, pages)], PAGE), kv)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Mistral", {"rope_parameters": YARN}),
        ("Qwen2", {"rope_parameters": YARN}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_folders_that_transformers_writes(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "head_dim": 8, "eos_token_id": 1, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    _tokenizer().save(str(tmp_path / "saved" / "tokenizer.json"))
    ids = torch.randint(0, 20, (40,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    files = opened(tmp_path / "saved")
    assert files.spec.family == family.lower() and files.eos_token_ids == (1,)
    torch.testing.assert_close(_logits(files, ids), expected, atol=1e-4, rtol=1e-4)
