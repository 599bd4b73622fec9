"""DecoderSpec from a folder's config.json, read without transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from shared.errors import ModelFileError
from worker.kv.geometry import KVGroupSpec
from worker.model.families import BY_MODEL_TYPE, Family
from worker.model.loading import checks
from worker.model.loading.checkpoint import QuantizedCheckpoint
from worker.model.loading.eight_bit import FP8, CompressedTensors
from worker.model.loading.fields import Fields, shown
from worker.model.loading.gptq_awq import AWQ, GPTQ
from worker.model.spec import DecoderSpec, RopeSpec

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


_METHODS: dict[str, Callable[[Fields], QuantizedCheckpoint]] = {
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "gptq": GPTQ,
}
"""Reader by `quant_method` of config.json; each checks its part of the configuration."""
_MAX_FACTOR = 1e6
_ORIGINAL = "original_max_position_embeddings"
_OPTIONAL_YARN = ("attention_factor", "mscale", "mscale_all_dim")


def quantization_of(config: Fields) -> QuantizedCheckpoint | None:
    """Return the quantization that config.json declares; None if there is none.

    Raises:
        ModelFileError: The method is not supported, or a key is missing or invalid.
    """
    if "quantization_config" not in config:
        return None
    own = config.part("quantization_config")
    method = own.text("quant_method", "unknown")
    if method not in _METHODS:
        raise config.error("quantization_config", f"says {method[:80]!r}; supported are {', '.join(_METHODS)}")
    return _METHODS[method](own)


def spec_from_config(fields: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    """Return the specification.

    Raises:
        ModelFileError: The family is not supported, or a key is missing or invalid.
    """
    family = _family(fields)
    num_layers = fields.integer("num_hidden_layers", low=1, high=checks.MAX_LAYERS)
    hidden = fields.integer("hidden_size", low=1, high=checks.MAX_HIDDEN)
    num_heads = fields.integer("num_attention_heads", low=1, high=checks.MAX_HEADS)
    head_dim = fields.integer("head_dim", hidden // num_heads, low=1, high=checks.MAX_HEAD_DIM)
    max_position = fields.integer("max_position_embeddings", low=1, high=checks.MAX_POSITION)
    activation = fields.choice("hidden_act", _ACTIVATIONS, "silu")
    bos = token_ids(fields, "bos_token_id")
    bias = not family.qkv_bias and fields.boolean("attention_bias", False)
    spec = DecoderSpec(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", low=1, high=checks.MAX_HIDDEN * 16),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads, low=1, high=num_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", low=1, high=checks.MAX_VOCAB),
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", high=1.0),
        rope=rope_from_config(fields, head_dim, max_position),
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=family.qkv_bias or bias,
        attention_output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        kv_groups=_kv_groups(fields, family, num_layers, max_position),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos[0] if bos else None,
    )
    checks.check_spec(spec, fields.where.rstrip(": "))
    return spec


def token_ids(fields: Fields, key: str) -> list[int]:
    """Return a token id or a list of them as a tuple; empty if absent."""
    value = fields.raw(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for one in values:
        if type(one) is not int or not 0 <= one < checks.MAX_VOCAB:
            raise fields.error(key, f"is {shown(value)}; a token id or a list of them is needed")
    return values


def _family(fields: Fields) -> Family:
    if "auto_map" in fields:
        raise fields.error("auto_map", "asks for code from the model's folder to be executed, which Pelton never does")
    quantization_of(fields)
    return BY_MODEL_TYPE[fields.choice("model_type", BY_MODEL_TYPE)]


def _kv_groups(fields: Fields, family: Family, num_layers: int, max_position: int) -> tuple[KVGroupSpec, ...]:
    """Return the layers with and without a sliding window. A window as long as the context does not count."""
    window = fields.optional_integer("sliding_window", low=0, high=checks.MAX_POSITION)
    uses = fields.boolean("use_sliding_window", family.window_by_default)
    if not window or not uses or window >= max_position:
        return ()
    types = fields.raw("layer_types")
    if types is None:
        # Families with the switch apply the window from layer max_window_layers upwards.
        first = 0 if family.window_by_default else fields.integer("max_window_layers", 0, high=checks.MAX_LAYERS)
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(one in known for one in types):
        raise ModelFileError(f"{fields.where}layer_types does not say full or sliding for {num_layers} layers")
    groups = []
    for name, size in (("full_attention", None), ("sliding_attention", window)):
        layers = tuple(i for i, one in enumerate(types) if one == name)
        if layers:
            groups.append(KVGroupSpec(layers=layers, window=size))
    return tuple(groups)


def rope_from_config(fields: Fields, head_dim: int, max_position: int) -> RopeSpec:
    """Return the rope of a config.json.

    Args:
        fields: Contents of config.json.
        head_dim: Dimensions of a head.
        max_position: `max_position_embeddings`; the default of a scaling's original context length.

    Raises:
        ModelFileError: The kind is not supported, or a value is missing or invalid; the error names the key.
    """
    key = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    scaling = fields.part(key)
    # A value may be in either place; the object's own takes precedence.
    theta_at = scaling if "rope_theta" in scaling else fields
    partial_at = scaling if "partial_rotary_factor" in scaling else fields
    partial = partial_at.number("partial_rotary_factor", 1.0, high=1.0)
    rope = RopeSpec(
        theta=theta_at.number("rope_theta", 10000.0, high=1e15),
        rotary_dim=min(int(head_dim * partial), checks.MAX_HEAD_DIM),
    )
    if "full_attention" in scaling or "sliding_attention" in scaling:
        raise fields.error(key, "differs between kinds of layers, which is not supported")
    kind_key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.choice(kind_key, ("default", "linear", "dynamic", "llama3", "yarn"), "default")
    if kind == "default":
        return rope
    if kind == "yarn":
        return _yarn(scaling, rope, max_position)
    rope = replace(rope, factor=scaling.number("factor", high=_MAX_FACTOR))
    if kind == "linear":
        return replace(rope, kind="linear")
    default = {"default": max_position} if kind == "dynamic" else {}
    rope = replace(rope, original_max_position=scaling.integer(_ORIGINAL, low=1, high=checks.MAX_POSITION, **default))
    if kind == "dynamic":
        return replace(rope, kind="dynamic")
    low = scaling.number("low_freq_factor", high=_MAX_FACTOR)
    high = scaling.number("high_freq_factor", high=_MAX_FACTOR)
    if high <= low:
        raise scaling.error("high_freq_factor", f"is {high}; more than low_freq_factor, {low}, is needed")
    return replace(rope, kind="llama3", low_freq_factor=low, high_freq_factor=high)


def _yarn(scaling: Fields, rope: RopeSpec, max_position: int) -> RopeSpec:
    original = scaling.integer(_ORIGINAL, max_position, low=1, high=checks.MAX_POSITION)
    fast = scaling.number("beta_fast", 32.0, high=_MAX_FACTOR)
    slow = scaling.number("beta_slow", 1.0, high=_MAX_FACTOR)
    if fast < slow:
        raise scaling.error("beta_fast", f"is {fast}; at least beta_slow, {slow}, is needed")
    # A scaling with only the original context length means the ratio of the two lengths.
    implied = {"default": max_position / original} if _ORIGINAL in scaling else {}
    optional: dict[str, Any] = {name: scaling.optional_number(name, high=_MAX_FACTOR) for name in _OPTIONAL_YARN}
    return replace(
        rope,
        kind="yarn",
        factor=scaling.number("factor", high=_MAX_FACTOR, **implied),
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=scaling.boolean("truncate", True),
        **optional,
    )
