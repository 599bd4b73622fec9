"""What the sampling op reads besides the logits."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

NO_CUT = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """One entry per row of the logits, S in all; or tables of R rows, of which `rows` names one for each.

    Integers may be of 32 or 64 bits, and entries need not be adjacent.

    Attributes:
        temperature: [S] float32; 0 takes the likeliest token.
        top_k: [S] int64; 0 keeps all.
        top_p: [S] float64; 1 keeps all.
        log_min_p: [S] float32, natural logarithm of min_p; NO_CUT keeps all.
        key: [2, S] int64, the low and the high 32 bits of the seed.
        position: [S] int64, index in the sequence of the token that is sampled.
        choice: [S] int64.
        any_random, any_filter: host booleans, whether some row has a temperature, and one of the three filters.
        rows: [S], the index of each row of the logits in all of the above but `position`, which then have R entries
            instead of S; None: its own index.
        mask: [M, ceil(vocab / 32)] int32, the tokens that a grammar allows: bit `id % 32` of word `id // 32`, counted
            from the lowest, is set. None: no row has a grammar.
        mask_rows: [S], the row of `mask` of each row of the logits, below 0 where all tokens are allowed; None: its own
            index.
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
    rows: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None

    def on(self, device: torch.device) -> SamplingInputs:
        """The same on a device; strides stay."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                moved[field.name] = value.to(device)
        return replace(self, **moved)

    def gathered(self) -> SamplingInputs:
        """The same with one entry per row of the logits, in the types that the attributes name first."""
        if self.rows is None:
            return self
        rows = self.rows.long()
        return replace(
            self,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows].long(),
            top_p=self.top_p[rows],
            log_min_p=self.log_min_p[rows],
            # A table of 32 bits holds the words as signed numbers.
            key=self.key[:, rows].long() & 0xFFFFFFFF,
            choice=self.choice[rows].long(),
            rows=None,
        )


@dataclass(frozen=True, slots=True)
class AdjustInputs:
    """What is added to single logits: biases, and minus infinity for tokens that may not come yet.

    Attributes:
        ids: [R, width], token ids; a row without entries left has `until` 0.
        values: [R, width] float32. An id may occur more than once in a row.
        until: [R, width]; an entry counts while the row's position is below it.
        rows: [S], the row of these tables of each row of the logits.
        position: [S], index in the sequence of the token that is sampled.
    """

    ids: torch.Tensor
    values: torch.Tensor
    until: torch.Tensor
    rows: torch.Tensor
    position: torch.Tensor


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
