"""Tiny random Llama model in Hugging Face's format, for tests that load a model from disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 263,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write config.json, model.safetensors and tokenizer.json, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hidden, width, vocab = 64, 128, CONFIG["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": 1 + random(hidden),
            f"{prefix}.post_attention_layernorm.weight": 1 + random(hidden),
            f"{prefix}.self_attn.q_proj.weight": random(64, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(32, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(32, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, 64),
            f"{prefix}.mlp.gate_proj.weight": random(width, hidden),
            f"{prefix}.mlp.up_proj.weight": random(width, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, width),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
