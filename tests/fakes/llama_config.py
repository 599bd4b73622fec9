"""Transformers configuration of a decoder of the Llama family."""

from __future__ import annotations

from transformers import LlamaConfig

from worker.model.spec import DecoderSpec


def llama_config(spec: DecoderSpec) -> LlamaConfig:
    """Return a configuration with the sizes of `spec` and rotary embeddings without scaling."""
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=spec.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
    )
