"""What each row asks of the sampler: its words in the rows' state, and what the host must know of them.

The words travel to the device with the plan that brings the row (worker/executor/step_packer.py); the sampling ops
read them there by row.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels.sampling.inputs import NO_CUT, AdjustInputs, PenaltyInputs, SamplingInputs
from kernels.step_inputs.inputs import (
    ADJUSTMENT_WORDS,
    CHOICE,
    FREQUENCY,
    KEY,
    LOG_MIN_P,
    PRESENCE,
    REPETITION,
    SAMPLING_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    StepBuffers,
)
from shared.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from worker.sampling.penalties import PenaltyTables
from worker.sampling.rng import seed_words
from worker.scheduler.plan import NewRow

Words = np.ndarray[Any, np.dtype[np.int32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

MAX_ADJUSTMENTS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + 64
"""Entries of a row: biases, stop ids, and the ids that end a text."""
_FOREVER = 2**31 - 1


class Needs(enum.IntFlag):
    """What a row asks of the sampler beyond an argmax; kept on the host, so that a step looks without waiting."""

    NOISE = 1
    FILTER = 2
    ADJUST = 4
    PENALTY = 8
    LOGPROBS = 16


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of one step that get a new token, S in all.

    Attributes:
        rows: [S] int64 on the host; device_rows: [S] int32 on the device.
        positions: [S] int64 on the device, index of the new token.
        needs: of all rows together.
        reporting: [L] int64 on the device, which of the S report log-probabilities; None: none does.
        reporting_rows, num_top: [L] on the host, the rows of these, and how many alternatives each reports.
        penalized: [P] int64 on the device, which of the S have penalties; None: none has.
        slots: [P] int64 on the device, their rows in the tables of counts.
        mask: [M, ceil(vocab / 32)] int32 on the device, what grammars allow; see SamplingInputs. None: everything.
        mask_rows: [S] on the device, the row of `mask` of each, below 0 where all tokens are allowed; None: its own
            index.
    """

    rows: Integers
    device_rows: torch.Tensor
    positions: torch.Tensor
    needs: int = 0
    reporting: torch.Tensor | None = None
    reporting_rows: Integers | None = None
    num_top: Integers | None = None
    penalized: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowWords:
    """What a new row writes: [SAMPLING_WORDS] int32, and [n, ADJUSTMENT_WORDS] int32 from its first entry on."""

    sampling: Words
    adjustments: Words


class SamplingParameters:
    """The sampling state of the rows: how to read and write what `buffers` hold of it, and what the host must know."""

    def __init__(self, buffers: StepBuffers, vocab_size: int) -> None:
        layout, state = buffers.layout, buffers.state
        num_rows = layout.max_num_seqs
        self.needs: Integers = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs: Integers = np.zeros(num_rows, dtype=np.int64)
        self._num_adjustments: Integers = np.zeros(num_rows, dtype=np.int64)
        self.penalties = PenaltyTables(num_rows, vocab_size, state.device)
        self._words = layout.sampling.of(state)
        self._floats = self._words.view(torch.float32)
        self._top_p = self._words.view(torch.float64)[:, TOP_P // 2]
        self._adjustments = layout.adjustments.of(state)
        self._adjustment_values = self._adjustments.view(torch.float32)
        # On the CPU rows are gathered by numpy: six calls of torch would take a tenth of a small step.
        self._host_words = self._words.numpy() if state.device.type == "cpu" else None
        nothing = np.zeros((0, SAMPLING_WORDS), dtype=np.int32)
        self._greedy_inputs = _gathered(nothing, torch.zeros(0, dtype=torch.int64), False, False)

    def enter(self, new: NewRow) -> RowWords:
        """A request enters a row; its words are to be written there, and its tokens counted where it has penalties."""
        sampling, row = new.sampling, new.row
        needs = Needs(0)
        if not sampling.greedy:
            needs |= Needs.NOISE
            if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                needs |= Needs.FILTER
        if sampling.logprobs is not None:
            needs |= Needs.LOGPROBS
        if sampling.uses_penalties:
            needs |= Needs.PENALTY
            self.penalties.take(row)
        else:
            self.penalties.give_back(row)
        self.num_logprobs[row] = sampling.logprobs or 0
        words = np.zeros(SAMPLING_WORDS, dtype=np.int32)
        floats = words.view(np.float32)
        floats[TEMPERATURE] = 0.0 if sampling.greedy else sampling.temperature
        floats[LOG_MIN_P] = math.log(sampling.min_p) if sampling.min_p > 0 else NO_CUT
        floats[REPETITION] = sampling.repetition_penalty
        floats[PRESENCE] = sampling.presence_penalty
        floats[FREQUENCY] = sampling.frequency_penalty
        words[CHOICE] = new.choice
        words.view(np.uint32)[KEY : KEY + 2] = seed_words(sampling.seed)
        words[TOP_K] = sampling.top_k
        words.view(np.float64)[TOP_P // 2] = sampling.top_p
        adjustments = self._enter_adjustments(new)
        if self._num_adjustments[row]:
            needs |= Needs.ADJUST
        self.needs[row] = needs
        return RowWords(words, adjustments)

    def _enter_adjustments(self, new: NewRow) -> Words:
        """Its entries, then zeros over those that the request before left."""
        sampling, row = new.sampling, new.row
        entries = [(token_id, bias, _FOREVER) for token_id, bias in sampling.logit_bias.items()]
        min_end = new.num_prompt_tokens + sampling.min_tokens
        eos_end = _FOREVER if sampling.ignore_eos else min_end
        if eos_end > new.num_prompt_tokens:
            # A stop id that also ends the text stays a stop id after min_tokens, whatever ignore_eos says.
            eos_ids = set(new.eos_token_ids).difference(sampling.stop_token_ids)
            entries += [(token_id, NO_CUT, eos_end) for token_id in sorted(eos_ids)]
        if sampling.min_tokens > 0:
            entries += [(token_id, NO_CUT, min_end) for token_id in sorted(set(sampling.stop_token_ids))]
        if len(entries) > MAX_ADJUSTMENTS:
            raise ValueError(f"a request adjusts {len(entries)} logits; a row holds {MAX_ADJUSTMENTS}")
        before = int(self._num_adjustments[row])
        words = np.zeros((max(before, len(entries)), ADJUSTMENT_WORDS), dtype=np.int32)
        if entries:
            ids, values, until = zip(*entries)
            words[: len(entries), 0] = ids
            words.view(np.float32)[: len(entries), 1] = values
            words[: len(entries), 2] = until
        self._num_adjustments[row] = len(entries)
        return words

    def adjust_inputs(self, sampled: SampledRows) -> AdjustInputs:
        """What is added to single logits."""
        width = int(self._num_adjustments[sampled.rows].max())
        entries = self._adjustments[:, :width]
        return AdjustInputs(
            ids=entries[:, :, 0],
            values=self._adjustment_values[:, :width, 1],
            until=entries[:, :, 2],
            rows=sampled.device_rows,
            position=sampled.positions,
        )

    def penalty_inputs(self, sampled: SampledRows, penalized: torch.Tensor, slots: torch.Tensor) -> PenaltyInputs:
        """Factors and counts of the rows with penalties."""
        rows = sampled.device_rows.index_select(0, penalized)
        factors = self._floats[:, REPETITION : REPETITION + 3].index_select(0, rows)
        return self.penalties.inputs(penalized, slots, factors.t().contiguous())

    def sampling_inputs(self, sampled: SampledRows) -> SamplingInputs:
        """What the sampling op reads: one entry for each of the S on the CPU, the tables and their rows elsewhere."""
        random, filtered = bool(sampled.needs & Needs.NOISE), bool(sampled.needs & Needs.FILTER)
        if self._host_words is not None:
            if random:
                inputs = _gathered(self._host_words[sampled.rows], sampled.positions, random, filtered)
            else:
                inputs = self._greedy(len(sampled.rows))
            if sampled.mask is not None:
                inputs = replace(inputs, mask=sampled.mask, mask_rows=sampled.mask_rows)
            return inputs
        words, floats = self._words, self._floats
        return SamplingInputs(
            temperature=floats[:, TEMPERATURE],
            top_k=words[:, TOP_K],
            top_p=self._top_p,
            log_min_p=floats[:, LOG_MIN_P],
            key=words[:, KEY : KEY + 2].t(),
            position=sampled.positions,
            choice=words[:, CHOICE],
            any_random=random,
            any_filter=filtered,
            rows=sampled.device_rows,
            mask=sampled.mask,
            mask_rows=sampled.mask_rows,
        )

    def _greedy(self, num_sampled: int) -> SamplingInputs:
        """Of rows without noise, which look at nothing but their temperature; those of the last step are kept."""
        if len(self._greedy_inputs.temperature) != num_sampled:
            words = np.zeros((num_sampled, SAMPLING_WORDS), dtype=np.int32)
            self._greedy_inputs = _gathered(words, torch.zeros(num_sampled, dtype=torch.int64), False, False)
        return self._greedy_inputs


def _gathered(words: Words, positions: torch.Tensor, random: bool, filtered: bool) -> SamplingInputs:
    """words: [S, SAMPLING_WORDS]."""
    floats = words.view(np.float32)
    integers = words.astype(np.int64)
    key = words.view(np.uint32)[:, KEY : KEY + 2].T.astype(np.int64)
    return SamplingInputs(
        temperature=torch.from_numpy(floats[:, TEMPERATURE]),
        top_k=torch.from_numpy(integers[:, TOP_K]),
        top_p=torch.from_numpy(words.view(np.float64)[:, TOP_P // 2]),
        log_min_p=torch.from_numpy(floats[:, LOG_MIN_P]),
        key=torch.from_numpy(key),
        position=positions,
        choice=torch.from_numpy(integers[:, CHOICE]),
        any_random=random,
        any_filter=filtered,
    )
