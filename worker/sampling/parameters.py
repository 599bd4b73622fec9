"""The sampling parameters of every row as tensors, and what a step gathers from them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling.inputs import NO_CUT, SamplingInputs
from worker.sampling.penalties import PenaltyTables
from worker.sampling.rng import seed_words
from worker.scheduler.plan import NewRow

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
        rows: [S] int64 on the host; device_rows: the same on the device.
        positions: [S] int64 on the device, index of the new token.
    """

    rows: np.ndarray
    device_rows: torch.Tensor
    positions: torch.Tensor


class SamplingParameters:
    """Owns the sampling state of `max_num_seqs` rows. The host keeps a copy of what decides which work a step needs."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.needs = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.penalties = PenaltyTables(max_num_seqs, vocab_size, device)
        self._device = device
        self._top_p = torch.ones(max_num_seqs, dtype=torch.float64, device=device)
        # [field, row]: temperature, log_min_p, repetition, presence, frequency
        self._floats = torch.zeros((5, max_num_seqs), dtype=torch.float32, device=device)
        # [field, row]: key low, key high, top_k, choice
        self._integers = torch.zeros((4, max_num_seqs), dtype=torch.int64, device=device)
        # What is added to single logits while the position is below `until`: biases, and -inf for masked ends.
        self._adjust_ids = torch.zeros((max_num_seqs, 0), dtype=torch.int64, device=device)
        self._adjust_values = torch.zeros((max_num_seqs, 0), dtype=torch.float32, device=device)
        self._adjust_until = torch.zeros((max_num_seqs, 0), dtype=torch.int64, device=device)

    def set(self, new: NewRow) -> None:
        """A request enters a row."""
        sampling, row = new.sampling, new.row
        needs = Needs(0)
        if not sampling.greedy:
            needs |= Needs.NOISE
            if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                needs |= Needs.FILTER
        if sampling.logprobs is not None:
            needs |= Needs.LOGPROBS
        self.num_logprobs[row] = sampling.logprobs or 0
        log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else NO_CUT
        floats = (
            0.0 if sampling.greedy else sampling.temperature,
            log_min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self._floats[:, row] = torch.tensor(floats, dtype=torch.float32)
        self._top_p[row] = sampling.top_p
        self._integers[:, row] = torch.tensor((*seed_words(sampling.seed), sampling.top_k, new.choice))
        if sampling.uses_penalties:
            needs |= Needs.PENALTY
            self.penalties.set(row, new.token_ids, new.num_prompt_tokens)
        else:
            self.penalties.clear(row)
        if self._set_adjustments(new):
            needs |= Needs.ADJUST
        self.needs[row] = needs

    def _set_adjustments(self, new: NewRow) -> bool:
        sampling = new.sampling
        entries = [(token_id, bias, _FOREVER) for token_id, bias in sampling.logit_bias.items()]
        min_end = new.num_prompt_tokens + sampling.min_tokens
        eos_end = _FOREVER if sampling.ignore_eos else min_end
        if eos_end > new.num_prompt_tokens:
            # A stop id that also ends the text stays a stop id after min_tokens, whatever ignore_eos says.
            eos_ids = set(new.eos_token_ids).difference(sampling.stop_token_ids)
            entries += [(token_id, NO_CUT, eos_end) for token_id in sorted(eos_ids)]
        if sampling.min_tokens > 0:
            entries += [(token_id, NO_CUT, min_end) for token_id in sorted(set(sampling.stop_token_ids))]
        if not entries:
            if self.needs[new.row] & Needs.ADJUST:
                self._adjust_until[new.row].zero_()
            return False
        self._widen(len(entries))
        ids, values, until = zip(*entries)
        self._adjust_until[new.row].zero_()
        self._adjust_ids[new.row, : len(ids)] = torch.tensor(ids)
        self._adjust_values[new.row, : len(ids)] = torch.tensor(values, dtype=torch.float32)
        self._adjust_until[new.row, : len(ids)] = torch.tensor(until)
        return True

    def _widen(self, width: int) -> None:
        more = width - self._adjust_ids.shape[1]
        if more > 0:
            more = (1 << (width - 1).bit_length()) - self._adjust_ids.shape[1]
            pad = torch.nn.functional.pad
            self._adjust_ids = pad(self._adjust_ids, (0, more))
            self._adjust_values = pad(self._adjust_values, (0, more))
            self._adjust_until = pad(self._adjust_until, (0, more))

    def adjust(self, logits: torch.Tensor, sampled: SampledRows) -> None:
        """Adds biases and masks to [S, vocab] float32 logits, in place."""
        ids = self._adjust_ids.index_select(0, sampled.device_rows)
        values = self._adjust_values.index_select(0, sampled.device_rows)
        until = self._adjust_until.index_select(0, sampled.device_rows)
        logits.scatter_add_(1, ids, torch.where(sampled.positions.unsqueeze(1) < until, values, 0.0))

    def penalty_factors(self, device_rows: torch.Tensor) -> torch.Tensor:
        """[3, P] float32: repetition, presence, frequency."""
        return self._floats[2:].index_select(1, device_rows)

    def sampling_inputs(self, sampled: SampledRows, needs: int) -> SamplingInputs:
        """What the sampling op reads; `needs` is the union over the rows."""
        temperature, log_min_p = self._floats[:2].index_select(1, sampled.device_rows).unbind(0)
        integers = self._integers.index_select(1, sampled.device_rows)
        return SamplingInputs(
            temperature=temperature,
            top_k=integers[2],
            top_p=self._top_p.index_select(0, sampled.device_rows),
            log_min_p=log_min_p,
            key=integers[:2],
            position=sampled.positions,
            choice=integers[3],
            any_random=bool(needs & Needs.NOISE),
            any_filter=bool(needs & Needs.FILTER),
        )
