"""Model families as data: names of tensors, and defaults that their configurations leave out."""

from __future__ import annotations

from dataclasses import dataclass

from worker.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        name: `model_type` in config.json.
        gguf_architecture: `general.architecture` in GGUF files; None if they use another family's.
        gguf_interleaved: GGUF files contain query and key rows permuted for rope on pairs (2i, 2i + 1).
        qkv_bias: Queries, keys and values have biases and the output has none; otherwise `attention_bias` decides
            for all.
        qk_norm: Queries and keys are normalized per head.
        window_by_default: `sliding_window` applies to all layers without `use_sliding_window`.
    """

    name: str
    gguf_architecture: str | None
    gguf_interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window_by_default: bool = False


FAMILIES = (
    Family(name="llama", gguf_architecture="llama", gguf_interleaved=True),
    Family(name="mistral", gguf_architecture=None, window_by_default=True),
    Family(name="qwen2", gguf_architecture="qwen2", qkv_bias=True),
    Family(name="qwen3", gguf_architecture="qwen3", qk_norm=True),
)
BY_MODEL_TYPE = {family.name: family for family in FAMILIES}
BY_GGUF_ARCHITECTURE = {family.gguf_architecture: family for family in FAMILIES if family.gguf_architecture}

# Canonical module name, with its name in GGUF files and in Hugging Face checkpoints.
_MODULES = {
    "embed": ("token_embd", "model.embed_tokens"),
    "norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
_LAYER_MODULES = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "q": ("attn_q", "self_attn.q_proj"),
    "k": ("attn_k", "self_attn.k_proj"),
    "v": ("attn_v", "self_attn.v_proj"),
    "o": ("attn_output", "self_attn.o_proj"),
    "q_norm": ("attn_q_norm", "self_attn.q_norm"),
    "k_norm": ("attn_k_norm", "self_attn.k_norm"),
    "mlp_norm": ("ffn_norm", "post_attention_layernorm"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
}


def _names(num_layers: int, column: int, layer_prefix: str) -> dict[str, str]:
    table = {}
    for module, names in _MODULES.items():
        table[f"{module}.weight"] = f"{names[column]}.weight"
    for i in range(num_layers):
        for module, names in _LAYER_MODULES.items():
            for kind in ("weight", "bias"):
                table[f"layers.{i}.{module}.{kind}"] = f"{layer_prefix}.{i}.{names[column]}.{kind}"
    return table


def gguf_names(num_layers: int) -> dict[str, str]:
    """Return the name in a GGUF file of every tensor that a family may have, by canonical name."""
    return _names(num_layers, 0, "blk")


def hf_names(num_layers: int) -> dict[str, str]:
    """Return the name in a Hugging Face checkpoint of every tensor that a family may have, by canonical name."""
    return _names(num_layers, 1, "model.layers")


def required_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the decoder of this specification needs, by canonical name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, hidden), "norm.weight": (hidden,)}
    if not spec.tie_word_embeddings:
        shapes["head.weight"] = (spec.vocab_size, hidden)
    matrices = {
        "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
    }  # fmt: skip
    biased = {
        "q": spec.attention_bias, "k": spec.attention_bias, "v": spec.attention_bias, "o": spec.attention_output_bias,
        "gate": spec.mlp_bias, "up": spec.mlp_bias, "down": spec.mlp_bias,
    }  # fmt: skip
    for i in range(spec.num_layers):
        shapes[f"layers.{i}.attn_norm.weight"] = shapes[f"layers.{i}.mlp_norm.weight"] = (hidden,)
        if spec.qk_norm:
            shapes[f"layers.{i}.q_norm.weight"] = shapes[f"layers.{i}.k_norm.weight"] = (spec.head_dim,)
        for module, shape in matrices.items():
            shapes[f"layers.{i}.{module}.weight"] = shape
            if biased[module]:
                shapes[f"layers.{i}.{module}.bias"] = shape[:1]
    return shapes
