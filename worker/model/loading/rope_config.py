"""RopeSpec from config.json: `rope_scaling` with `rope_theta`, or one object `rope_parameters`."""

from __future__ import annotations

from dataclasses import replace

from worker.model.loading.checks import MAX_HEAD_DIM, MAX_POSITION
from worker.model.loading.fields import Fields
from worker.model.spec import RopeSpec

_MAX_FACTOR = 1e6
_ORIGINAL = "original_max_position_embeddings"


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
        theta=theta_at.number("rope_theta", 10000.0, high=1e15), rotary_dim=min(int(head_dim * partial), MAX_HEAD_DIM)
    )
    if "full_attention" in scaling or "sliding_attention" in scaling:
        raise fields.error(key, "differs between kinds of layers, which is not supported")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, kind="linear", factor=scaling.number("factor", high=_MAX_FACTOR))
    original = scaling.integer(_ORIGINAL, max_position, low=1, high=MAX_POSITION)
    if kind == "dynamic":
        factor = scaling.number("factor", high=_MAX_FACTOR)
        return replace(rope, kind="dynamic", factor=factor, original_max_position=original)
    if kind == "llama3":
        return _llama3(scaling, rope)
    if kind == "yarn":
        return _yarn(scaling, rope, original, max_position)
    raise scaling.error("rope_type", f"is {kind[:80]!r}; supported are default, linear, dynamic, llama3, yarn")


def _llama3(scaling: Fields, rope: RopeSpec) -> RopeSpec:
    low = scaling.number("low_freq_factor", high=_MAX_FACTOR)
    high = scaling.number("high_freq_factor", high=_MAX_FACTOR)
    if high <= low:
        raise scaling.error("high_freq_factor", f"is {high}; more than low_freq_factor, {low}, is needed")
    return replace(
        rope,
        kind="llama3",
        factor=scaling.number("factor", high=_MAX_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=scaling.integer(_ORIGINAL, low=1, high=MAX_POSITION),
    )


def _yarn(scaling: Fields, rope: RopeSpec, original: int, max_position: int) -> RopeSpec:
    fast = scaling.number("beta_fast", 32.0, high=_MAX_FACTOR)
    slow = scaling.number("beta_slow", 1.0, high=_MAX_FACTOR)
    if fast < slow:
        raise scaling.error("beta_fast", f"is {fast}; at least beta_slow, {slow}, is needed")
    # A scaling with only the original context length means the ratio of the two lengths.
    implied = {"default": max_position / original} if _ORIGINAL in scaling else {}
    return replace(
        rope,
        kind="yarn",
        factor=scaling.number("factor", high=_MAX_FACTOR, **implied),
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=scaling.optional_number("attention_factor", high=_MAX_FACTOR),
        mscale=scaling.optional_number("mscale", high=_MAX_FACTOR),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", high=_MAX_FACTOR),
        truncate=scaling.boolean("truncate", True),
    )
