"""Rotary position embedding: frequencies and their scaling for long contexts, as a table by position.

The arithmetic is float32, like that of the models' own training code. At position 8,000 the angle itself is accurate
only to 5e-4, so a more exact table would be further from the model.
"""

from __future__ import annotations

import math

import torch

from worker.model.spec import RopeSpec


def rope_table(rope: RopeSpec, max_positions: int) -> torch.Tensor:
    """Return [max_positions, rotary_dim] float32: cosines of rotary_dim / 2 frequencies, then their sines.

    Raises:
        ConfigurationError: The parameters of a scaling are inconsistent.
    """
    frequencies, attention_factor = inverse_frequencies(rope, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


def inverse_frequencies(rope: RopeSpec, max_positions: int) -> tuple[torch.Tensor, float]:
    """Return [rotary_dim / 2] float32 radians per position, and the factor of cosines and sines (1 except for yarn)."""
    attention_factor = 1.0
    frequencies = base = _base_frequencies(rope.theta, rope.rotary_dim)
    match rope.kind:
        case "none":
            pass
        case "linear":
            frequencies = base / rope.factor
        case "dynamic":
            frequencies = _base_frequencies(_dynamic_theta(rope, max_positions), rope.rotary_dim)
        case "llama3":
            frequencies = _llama3(base, rope)
        case "yarn":
            frequencies, attention_factor = _yarn(base, rope)
    if rope.frequency_factors:
        factors = torch.tensor(rope.frequency_factors, dtype=torch.float32)
        frequencies = frequencies / factors
    return frequencies, attention_factor


def _base_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / (theta**exponents)


def _dynamic_theta(rope: RopeSpec, max_positions: int) -> float:
    """Return the NTK-aware base for contexts of max_positions.

    It depends on the longest context that is served, not on each sequence. Cached keys therefore remain valid while a
    sequence grows, and sequences of different lengths can share a prefix.
    """
    original = rope.original_max_position
    if max_positions <= original:
        return rope.theta
    stretch = rope.factor * max_positions / original - (rope.factor - 1)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(base: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Scale as Llama 3.1: long wavelengths divided by factor, short ones unchanged, a ramp between them."""
    original = rope.original_max_position
    wavelengths = 2 * math.pi / base
    ramp = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - ramp) * base / rope.factor + ramp * base
    frequencies = torch.where(wavelengths > original / rope.low_freq_factor, base / rope.factor, blended)
    return torch.where(wavelengths < original / rope.high_freq_factor, base, frequencies)


def _yarn(base: torch.Tensor, rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """Scale as YaRN (Peng et al. 2023, equations 17 to 22): interpolate below beta_slow turns, keep above beta_fast."""
    original = rope.original_max_position

    def dimension_of(turns: float) -> float:
        return rope.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = base / rope.factor * ramp + base * (1 - ramp)
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def half_split_rows(num_heads: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Return, for each row of the half-split order, its row in the interleaved order: [num_heads * head_dim] int64.

    Interleaved weights rotate dimensions 2i and 2i + 1 of a head together; the kernels rotate i and i + rotary_dim /
    2.
    """
    rotary = torch.arange(rotary_dim).view(-1, 2).transpose(0, 1).reshape(-1)
    head = torch.cat((rotary, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(num_heads)[:, None] * head_dim + head[None, :]).reshape(-1)
