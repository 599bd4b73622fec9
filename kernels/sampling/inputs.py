"""What the sampling op reads besides the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_CUT = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """One entry per row of the logits, S in all.

    Attributes:
        temperature: [S] float32; 0 takes the likeliest token.
        top_k: [S] int64; 0 keeps all.
        top_p: [S] float64; 1 keeps all.
        log_min_p: [S] float32, natural logarithm of min_p; NO_CUT keeps all.
        key: [2, S] int64, the low and the high 32 bits of the seed.
        position: [S] int64, index in the sequence of the token that is sampled.
        choice: [S] int64.
        any_random, any_filter: host booleans, whether some row has a temperature, and one of the three filters.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    key: torch.Tensor
    position: torch.Tensor
    choice: torch.Tensor
    any_random: bool
    any_filter: bool


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """P rows of the logits whose requests have penalties.

    Attributes:
        rows: [P] int64, rows of the logits, each at most once.
        slots: [P] int64, rows of the two tables.
        output_counts: [slots, vocab] int32, occurrences in the output.
        in_prompt: [slots, vocab] bool.
        repetition, presence, frequency: [P] float32.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    output_counts: torch.Tensor
    in_prompt: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
