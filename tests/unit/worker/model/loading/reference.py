"""The default model in transformers, its weights read and dequantized by the gguf package."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker.model.loading import default_model_path

_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def reference_model() -> Any:
    """LlamaForCausalLM in float32; takes some seconds and a GB."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {}
    for tensor in gguf.GGUFReader(default_model_path()).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        state[_name(tensor.name)] = _half_split(tensor.name, values)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    # Buffers of a model made on "meta" have no values; the rope table is made again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _name(name: str) -> str:
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, module, leaf = name.split(".")
    return f"model.layers.{layer}.{_MODULES[module]}.{leaf}"


def _half_split(name: str, values: torch.Tensor) -> torch.Tensor:
    """Query and key rows from GGUF's interleaved order to the half-split one."""
    heads = {"attn_q": 9, "attn_k": 3}.get(name.split(".")[2] if name.startswith("blk.") else "")
    if heads is None:
        return values
    return values.view(heads, 32, 2, -1).transpose(1, 2).reshape(values.shape)
