"""What the sampling op reads besides the logits."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

NO_CUT = float("-inf")
NOT_USABLE = -1
"""Sampled where logits are NaN or plus infinity."""
NOTHING_LEFT = -2
"""Sampled where all logits are minus infinity: masks leave nothing."""
MAX_DRY_EXPONENT = 50
"""Matches of DRY count up to so many tokens more than are allowed."""
MAX_DRY_PENALTY = 1e30
"""So that a penalized logit, divided by any temperature, is finite."""


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
        extra: [P, E] int64, token ids that count as output besides what the table has: the drafts before a row that
            verifies one. Below 0: none; an id counts as often as it occurs. None: no row has any.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    output_counts: torch.Tensor
    in_prompt: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    extra: torch.Tensor | None = None


class Feature(enum.IntFlag):
    """What rows want of `extend`; known on the host, so that what none wants is left out."""

    TOP = 1
    """min_p, top_k or top_p."""
    TYPICAL = 2
    SIGMA = 4
    DYNATEMP = 8
    MIROSTAT = 16
    XTC = 32


@dataclass(frozen=True, slots=True)
class ExtendInputs:
    """E rows of the logits whose requests use one of the rarer filters. README.md has the maths.

    Attributes:
        rows: [E] int64, rows of the logits, each at most once.
        features: of all rows together.
        temperature: [E] float32, above 0.
        log_min_p: [E] float32; NO_CUT keeps all.
        top_k: [E] int64; 0 keeps all.
        top_p: [E] float64; typical_p: [E] float32; 1 keeps all.
        top_n_sigma: [E] float32; 0 keeps all.
        dynatemp_range, dynatemp_exponent: [E] float32; a range of 0 leaves the temperature.
        mirostat: [E] int64, 0, 1 or 2; mu: [E] float32, the surprise in bits that it aims at now.
        xtc_coin: [E] int64, 2**24 times the probability; log_xtc_threshold: [E] float32.
        key: [2, E] int64, position, choice: [E] int64, as of SamplingInputs.
        mask, mask_rows: as of SamplingInputs, mask_rows [E].
    """

    rows: torch.Tensor
    features: Feature
    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    typical_p: torch.Tensor
    top_n_sigma: torch.Tensor
    dynatemp_range: torch.Tensor
    dynatemp_exponent: torch.Tensor
    mirostat: torch.Tensor
    mu: torch.Tensor
    xtc_coin: torch.Tensor
    log_xtc_threshold: torch.Tensor
    key: torch.Tensor
    position: torch.Tensor
    choice: torch.Tensor
    mask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None

    def part(self, start: int, end: int) -> ExtendInputs:
        """Of the rows from `start` to before `end` of the E."""
        return replace(self, **_sliced(self, {"mask"}, start, end))


@dataclass(frozen=True, slots=True)
class DryInputs:
    """D rows of the logits whose requests avoid repetitions.

    Attributes:
        rows: [D] int64, rows of the logits, each at most once.
        table_rows: [D] int64, rows of the tables.
        token_ids: [R, stride] int32, what each request has so far.
        length: [D] int64, how many tokens that is.
        last_n: [D] int64, how many of the last are looked at; below 0: all.
        multiplier, base: [D] float32.
        allowed_length: [D] int64.
        breakers: [R, ceil(vocab / 32)] int32, bits of the tokens that no repetition goes across.
        longest: host integer, no less than any min(length, last_n).
        longest_match: host integer, no less than any allowed_length + MAX_DRY_EXPONENT.
    """

    rows: torch.Tensor
    table_rows: torch.Tensor
    token_ids: torch.Tensor
    length: torch.Tensor
    last_n: torch.Tensor
    multiplier: torch.Tensor
    base: torch.Tensor
    allowed_length: torch.Tensor
    breakers: torch.Tensor
    longest: int
    longest_match: int

    def part(self, start: int, end: int) -> DryInputs:
        """Of the rows from `start` to before `end` of the D."""
        return replace(self, **_sliced(self, {"token_ids", "breakers"}, start, end))


def _sliced(inputs: ExtendInputs | DryInputs, tables: set[str], start: int, end: int) -> dict[str, Any]:
    """What differs between rows, of some of them; `tables` belong to all."""
    values = ((field.name, getattr(inputs, field.name)) for field in fields(inputs) if field.name not in tables)
    return {name: value[..., start:end] for name, value in values if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class AllowedInputs:
    """A rows of the logits whose requests allow some tokens only.

    Attributes:
        rows: [A] int64, rows of the logits; table_rows: [A] int64.
        allowed: [R, ceil(vocab / 32)] int32, bits of the tokens that are allowed.
    """

    rows: torch.Tensor
    table_rows: torch.Tensor
    allowed: torch.Tensor


@dataclass(frozen=True, slots=True)
class BadWordsInputs:
    """B rows of the logits whose requests forbid words.

    Attributes:
        rows: [B] int64, rows of the logits; table_rows: [B] int64.
        words: [R, most, 2] int32, the tokens of a row's words one after the other: the id, and 1 for the last token of
            a word, 2 for the one before it, and so on; 0 after the last word.
        width: host integer, no less than the tokens of any of the B rows.
        token_ids: [R, stride] int32, what each request has so far.
        length: [B] int64, how many tokens that is.
    """

    rows: torch.Tensor
    table_rows: torch.Tensor
    words: torch.Tensor
    token_ids: torch.Tensor
    length: torch.Tensor
    width: int
