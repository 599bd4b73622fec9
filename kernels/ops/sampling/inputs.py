"""What the sampling op reads besides the logits."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kernels.ops.step_inputs.inputs import KEY, TOP_P

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
        words: [E, SAMPLING_WORDS] int32, what each row asks for, as kernels/ops/step_inputs lays it out.
        position: [E] int64, as of SamplingInputs.
        mask, mask_rows: as of SamplingInputs, mask_rows [E].
    """

    rows: torch.Tensor
    features: Feature
    words: torch.Tensor
    position: torch.Tensor
    mask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None

    def float_column(self, word: int) -> torch.Tensor:
        """[E] float32, one of the words that hold such."""
        return self.words.view(torch.float32)[:, word]

    def integer_column(self, word: int) -> torch.Tensor:
        """[E] int64, one of the words that hold an integer."""
        return self.words[:, word].long()

    @property
    def top_p(self) -> torch.Tensor:
        """[E] float64; 1 keeps all."""
        return self.words.view(torch.float64)[:, TOP_P // 2]

    @property
    def key(self) -> torch.Tensor:
        """[2, E] int64, as of SamplingInputs."""
        return (self.words[:, KEY : KEY + 2].long() & 0xFFFFFFFF).t()

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
        words: [D, SAMPLING_WORDS] int32, what each row asks for; of last_n, how many of the last are looked at, below 0
            means all.
        breakers: [R, ceil(vocab / 32)] int32, bits of the tokens that no repetition goes across.
        longest: host integer, no less than any min(length, last_n).
        longest_match: host integer, no less than any allowed_length + MAX_DRY_EXPONENT.
    """

    rows: torch.Tensor
    table_rows: torch.Tensor
    token_ids: torch.Tensor
    length: torch.Tensor
    words: torch.Tensor
    breakers: torch.Tensor
    longest: int
    longest_match: int

    def part(self, start: int, end: int) -> DryInputs:
        """Of the rows from `start` to before `end` of the D."""
        return replace(self, **_sliced(self, {"token_ids", "breakers"}, start, end))


def _sliced(inputs: ExtendInputs | DryInputs, tables: set[str], start: int, end: int) -> dict[str, Any]:
    """What differs between rows, of some of them; `tables` belong to all."""
    values = ((field.name, getattr(inputs, field.name)) for field in fields(inputs) if field.name not in tables)
    return {name: value[start:end] for name, value in values if isinstance(value, torch.Tensor)}


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
