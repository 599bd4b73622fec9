"""Inputs of the sampling operations besides the logits."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kernels.common.tensors import on_device
from kernels.ops.step_inputs.inputs import KEY, TOP_P

NO_CUT = float("-inf")
NOT_USABLE = -1
"""Token id of rows whose logits contain NaN or plus infinity."""
NOTHING_LEFT = -2
"""Token id of rows whose logits are all minus infinity, because masks exclude every token."""
MAX_DRY_EXPONENT = 50
"""DRY counts matches up to this many tokens beyond the allowed length."""
MAX_DRY_PENALTY = 1e30
"""Largest DRY penalty; a penalized logit stays finite at any temperature."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters, one entry per row of the logits (S in all), or tables of R rows that `rows` indexes.

    Integers may have 32 or 64 bits, and entries need not be adjacent.

    Attributes:
        temperature: [S] float32; 0 takes the likeliest token.
        top_k: [S] int64; 0 keeps all.
        top_p: [S] float64; 1 keeps all.
        log_min_p: [S] float32, natural logarithm of min_p; NO_CUT keeps all.
        key: [2, S] int64, the low and the high 32 bits of the seed.
        position: [S] int64, index in the sequence of the sampled token.
        choice: [S] int64, index among the choices of a request.
        any_random: True if some row has a temperature; known on the host.
        any_filter: True if some row has top_k, top_p or min_p; known on the host.
        rows: [S], index of each row of the logits into all of the above but `position`, which then have R entries;
            None
            if they have one entry per row.
        mask: [M, ceil(vocab / 32)] int32, tokens that a grammar allows: bit `id % 32` of word `id // 32`, counted
            from
            the lowest. None if no row has a grammar.
        mask_rows: [S], row of `mask` for each row of the logits, negative if all tokens are allowed; None if
            `mask` has
            one row per row of the logits.
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
        """Copy the inputs to a device; strides are kept."""
        return on_device(self, device)

    def gathered(self) -> SamplingInputs:
        """Return inputs with one entry per row of the logits, in the dtypes of the attributes' list."""
        if self.rows is None:
            return self
        rows = self.rows.long()
        return replace(
            self,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows].long(),
            top_p=self.top_p[rows],
            log_min_p=self.log_min_p[rows],
            # A 32-bit table holds the words as signed integers.
            key=self.key[:, rows].long() & 0xFFFFFFFF,
            choice=self.choice[rows].long(),
            rows=None,
        )


def dummy_row(device: torch.device) -> SamplingInputs:
    """Return inputs of one row, used only to compile kernels.

    The dtypes are those of the worker's tables: 32-bit integers except for positions; top_p is float64.
    """
    words = torch.zeros(1, dtype=torch.int32, device=device)
    return SamplingInputs(
        temperature=torch.ones(1, device=device),
        top_k=words,
        top_p=torch.full((1,), 0.5, dtype=torch.float64, device=device),
        log_min_p=torch.full((1,), NO_CUT, device=device),
        key=torch.zeros((2, 1), dtype=torch.int32, device=device),
        position=torch.zeros(1, dtype=torch.int64, device=device),
        choice=words,
        any_random=True,
        any_filter=True,
        rows=words,
    )


@dataclass(frozen=True, slots=True)
class AdjustInputs:
    """Values added to single logits: biases, and minus infinity for tokens that must not come yet.

    Attributes:
        ids: [R, width], token ids. An id may occur more than once in a row.
        values: [R, width] float32.
        until: [R, width]; an entry applies while the row's position is below it, and 0 marks an unused entry.
        rows: [S], row of these tables for each row of the logits.
        position: [S], index in the sequence of the sampled token.
    """

    ids: torch.Tensor
    values: torch.Tensor
    until: torch.Tensor
    rows: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """Penalties of P rows of the logits.

    Attributes:
        rows: [P] int64, rows of the logits, each at most once.
        slots: [P] int64, rows of the two tables.
        output_counts: [slots, vocab] int32, occurrences in the output.
        in_prompt: [slots, vocab] bool, True for tokens of the prompt.
        repetition: [P] float32.
        presence: [P] float32.
        frequency: [P] float32.
        extra: [P, E] int64, token ids that count as output in addition to the table: the drafts before a row that
            verifies one. Negative ids are ignored; repeated ids count repeatedly. None if no row has any.
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
    """Filters that some rows need of `extend`, known on the host, so that unused ones are skipped."""

    TOP = 1
    """min_p, top_k or top_p."""
    TYPICAL = 2
    SIGMA = 4
    DYNATEMP = 8
    MIROSTAT = 16
    XTC = 32


@dataclass(frozen=True, slots=True)
class ExtendInputs:
    """Parameters of the E rows of the logits that use a rare filter. README.md defines the filters.

    Attributes:
        rows: [E] int64, rows of the logits, each at most once.
        features: Union of the filters of all rows.
        words: [E, SAMPLING_WORDS] int32, parameters in the layout of kernels/ops/step_inputs.
        position: [E] int64, as in SamplingInputs.
        mask: As in SamplingInputs.
        mask_rows: [E], as in SamplingInputs.
    """

    rows: torch.Tensor
    features: Feature
    words: torch.Tensor
    position: torch.Tensor
    mask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None

    def float_column(self, word: int) -> torch.Tensor:
        """Return one of the float words, [E] float32."""
        return self.words.view(torch.float32)[:, word]

    def integer_column(self, word: int) -> torch.Tensor:
        """Return one of the integer words, [E] int64."""
        return self.words[:, word].long()

    @property
    def top_p(self) -> torch.Tensor:
        """Values of top_p, [E] float64; 1 keeps all."""
        return self.words.view(torch.float64)[:, TOP_P // 2]

    @property
    def key(self) -> torch.Tensor:
        """Seeds, [2, E] int64, as in SamplingInputs."""
        return (self.words[:, KEY : KEY + 2].long() & 0xFFFFFFFF).t()

    def part(self, start: int, end: int) -> ExtendInputs:
        """Return the inputs of the rows from `start` up to, not including, `end`."""
        return replace(self, **_sliced(self, {"mask"}, start, end))


@dataclass(frozen=True, slots=True)
class DryInputs:
    """Parameters of the D rows of the logits that use DRY.

    Attributes:
        rows: [D] int64, rows of the logits, each at most once.
        table_rows: [D] int64, rows of the tables.
        token_ids: [R, stride] int32, tokens of each request so far.
        length: [D] int64, number of tokens so far.
        words: [D, SAMPLING_WORDS] int32, parameters; a negative last_n considers all tokens.
        breakers: [R, ceil(vocab / 32)] int32, bits of the tokens that end a match.
        longest: Upper bound of min(length, last_n), known on the host.
        longest_match: Upper bound of allowed_length + MAX_DRY_EXPONENT, known on the host.
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
        """Return the inputs of the rows from `start` up to, not including, `end`."""
        return replace(self, **_sliced(self, {"token_ids", "breakers"}, start, end))


def _sliced(inputs: ExtendInputs | DryInputs, tables: set[str], start: int, end: int) -> dict[str, Any]:
    """Return slices of the fields that have an entry per row; `tables` names the fields shared by all rows."""
    values = ((field.name, getattr(inputs, field.name)) for field in fields(inputs) if field.name not in tables)
    return {name: value[start:end] for name, value in values if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class AllowedInputs:
    """Parameters of the A rows of the logits that allow only some tokens.

    Attributes:
        rows: [A] int64, rows of the logits.
        table_rows: [A] int64, rows of the table.
        allowed: [R, ceil(vocab / 32)] int32, bits of the allowed tokens.
    """

    rows: torch.Tensor
    table_rows: torch.Tensor
    allowed: torch.Tensor


@dataclass(frozen=True, slots=True)
class BadWordsInputs:
    """Parameters of the B rows of the logits that forbid words.

    Attributes:
        rows: [B] int64, rows of the logits.
        table_rows: [B] int64, rows of the tables.
        words: [R, N, 2] int32, tokens of all words of a row, one after the other. Each has its id and its distance
            from
            the end of its word: 1 for the last token, 2 for the one before it, and so on; 0 after the last word.
        token_ids: [R, stride] int32, tokens of each request so far.
        length: [B] int64, number of tokens so far.
        width: Upper bound of the number of tokens of any of the B rows' words, known on the host.
    """

    rows: torch.Tensor
    table_rows: torch.Tensor
    words: torch.Tensor
    token_ids: torch.Tensor
    length: torch.Tensor
    width: int
