"""Sampling parameters of the rows: words in the device state, and the features that the host must know.

The words are uploaded with the plan that adds the row (worker/executor/step_packer.py). The sampling ops read them by
row.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from typing import TypeVar

import numpy as np
import torch

from kernels.ops.sampling.inputs import NO_CUT, ExtendInputs, Feature, PenaltyInputs, SamplingInputs
from kernels.ops.step_inputs import inputs as at
from kernels.ops.step_inputs.inputs import SAMPLING_WORDS, StepBuffers
from shared.sampling_params import SamplingParams
from worker.plan import NewRow
from worker.sampling.penalties import PenaltyTables
from worker.sampling.row_lists import Change, RowLists, Words
from worker.sampling.sampled_rows import LISTED_FEATURES, FeatureRows, Integers, SampledRows, SamplingFeature, Upload

_INTEGER_WORDS = {
    "top_k": at.TOP_K, "mirostat": at.MIROSTAT, "dry_allowed_length": at.DRY_ALLOWED_LENGTH,
    "dry_penalty_last_n": at.DRY_LAST_N,
}  # fmt: skip
_FLOAT_WORDS = {
    "temperature": at.TEMPERATURE, "repetition_penalty": at.REPETITION, "presence_penalty": at.PRESENCE,
    "frequency_penalty": at.FREQUENCY, "typical_p": at.TYPICAL_P, "top_n_sigma": at.TOP_N_SIGMA,
    "dynatemp_range": at.DYNATEMP_RANGE, "dynatemp_exponent": at.DYNATEMP_EXPONENT, "mirostat_tau": at.MIROSTAT_TAU,
    "mirostat_eta": at.MIROSTAT_ETA, "dry_multiplier": at.DRY_MULTIPLIER, "dry_base": at.DRY_BASE,
}  # fmt: skip
"""Words of a row that hold a sampling parameter unchanged, by the parameter's name."""

F = TypeVar("F", bound=enum.IntFlag)


def union(none: F, *flags: tuple[object, F]) -> F:
    """Return the union of the flags whose condition is true."""
    return functools.reduce(operator.or_, (flag for used, flag in flags if used), none)


class SamplingParameters:
    """Sampling parameters of all rows in the state of `buffers`, and their features on the host."""

    def __init__(self, buffers: StepBuffers, vocab_size: int) -> None:
        self._layout = layout = buffers.layout
        state, num_rows = buffers.state, layout.max_num_seqs
        self._row_features: Integers = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs: Integers = np.zeros(num_rows, dtype=np.int64)
        self._filters: Integers = np.zeros(num_rows, dtype=np.int64)
        self.penalties = PenaltyTables(num_rows, vocab_size, state.device)
        self.lists = RowLists(buffers)
        self._words = layout.sampling.of(state)
        self._floats = self._words.view(torch.float32)
        self._top_p = self._words.view(torch.float64)[:, at.TOP_P // 2]
        num_sampled = layout.max_sampled or num_rows
        self._own_rows = torch.arange(num_sampled, dtype=torch.int32, device=state.device)
        self._own_index = torch.arange(num_sampled, device=state.device)
        # On the CPU numpy gathers the rows: six torch calls would take a tenth of a small step.
        self._host_words = self._words.numpy() if state.device.type == "cpu" else None

    def enter(self, new: NewRow) -> list[Change]:
        """Register a new request in its row and return the changes of the state."""
        sampling, row = new.sampling, new.row
        features, changes = self.lists.enter(new)
        filters = _used_filters(sampling)
        features = union(
            features,
            (not sampling.greedy, SamplingFeature.NOISE),
            (sampling.extended, SamplingFeature.EXTENDED),
            (not sampling.greedy and not sampling.extended and filters & Feature.TOP, SamplingFeature.FILTER),
            (sampling.logprobs is not None, SamplingFeature.LOGPROBS),
            (sampling.uses_penalties, SamplingFeature.PENALTY),
        )
        if sampling.uses_penalties:
            self.penalties.allocate(row)
        else:
            self.penalties.free(row)
        self.num_logprobs[row] = sampling.logprobs or 0
        self._filters[row] = filters
        self._row_features[row] = features
        words = _row_words(sampling, new.choice, new.mu)
        return [(self._layout.sampling.at + row * SAMPLING_WORDS, words), *changes]

    def describe_rows(
        self, rows: Integers, device_rows: torch.Tensor, positions: torch.Tensor, lengths: Integers, upload: Upload
    ) -> SampledRows:
        """Describe the rows of a step for the sampler. The arguments are attributes of SampledRows."""
        row_features = self._row_features[rows]
        features = SamplingFeature(int(np.bitwise_or.reduce(row_features)) if len(rows) else 0)
        wanted = [feature for feature in LISTED_FEATURES if features & feature]
        by_feature: dict[SamplingFeature, FeatureRows] = {}
        num_top = slots = None
        if wanted:
            lists = [np.flatnonzero(row_features & feature) for feature in wanted]
            if features & SamplingFeature.PENALTY:
                lists.append(self.penalties.slots(rows[lists[wanted.index(SamplingFeature.PENALTY)]]))
            # One upload costs less host time than seven.
            uploaded = upload(np.concatenate(lists)).split([len(indices) for indices in lists])
            for feature, index, host_index in zip(wanted, uploaded, lists):
                by_feature[feature] = FeatureRows(index, rows[host_index], host_index)
            if features & SamplingFeature.PENALTY:
                slots = uploaded[-1]
            if features & SamplingFeature.LOGPROBS:
                num_top = self.num_logprobs[by_feature[SamplingFeature.LOGPROBS].rows]
        return SampledRows(
            rows=rows,
            device_rows=device_rows,
            positions=positions,
            lengths=lengths,
            features=features,
            by_feature=by_feature,
            num_top=num_top,
            slots=slots,
        )

    def words(self, sampled: SampledRows, listed: FeatureRows) -> torch.Tensor:
        """Return the [n, SAMPLING_WORDS] int32 parameters of the listed rows."""
        if self._host_words is not None:
            return torch.from_numpy(self._host_words[listed.rows])
        return self._words.index_select(0, sampled.device_rows.index_select(0, listed.index))

    def penalty_inputs(self, sampled: SampledRows, penalized: FeatureRows, slots: torch.Tensor) -> PenaltyInputs:
        """Return the factors and counts of the rows with penalties."""
        factors = self.words(sampled, penalized).view(torch.float32)[:, at.REPETITION : at.REPETITION + 3]
        repetition, presence, frequency = factors.t().contiguous().unbind(0)
        return PenaltyInputs(
            rows=penalized.index,
            slots=slots,
            output_counts=self.penalties.output_counts,
            in_prompt=self.penalties.in_prompt,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            extra=sampled.proposed if sampled.verification is None else sampled.verification.extra,
        )

    def extend_inputs(self, sampled: SampledRows, listed: FeatureRows) -> ExtendInputs:
        """Return the extended filters of the listed rows."""
        mask_rows = None
        if sampled.mask is not None:
            mask_rows = listed.index
            if sampled.mask_rows is not None:
                mask_rows = sampled.mask_rows.index_select(0, listed.index).long()
        return ExtendInputs(
            rows=listed.index,
            features=Feature(int(np.bitwise_or.reduce(self._filters[listed.rows]))),
            words=self.words(sampled, listed),
            position=sampled.positions_of(listed),
            mask=sampled.mask,
            mask_rows=mask_rows,
        )

    def store_mu(self, rows: torch.Tensor, mu: torch.Tensor) -> None:
        """Store mirostat's next targets, [E] float32, in [E] int64 rows of the state."""
        self._floats[:, at.MIROSTAT_MU].index_copy_(0, rows, mu)

    def sampling_inputs(self, sampled: SampledRows) -> SamplingInputs:
        """Return the inputs of the sampling op: one entry per token on the CPU, the tables and row indices on a GPU.

        Rows that `extend` has filtered get temperature 1 and no further filters.
        """
        random = bool(sampled.features & SamplingFeature.NOISE)
        filtered = bool(sampled.features & SamplingFeature.FILTER)
        extended = sampled.by_feature.get(SamplingFeature.EXTENDED)
        if self._host_words is not None:
            host_words = self._host_words[sampled.rows]
            if random and extended is not None:
                _disable_filters(torch.from_numpy(host_words), extended.index)
            return _gather(host_words, sampled, random, filtered)
        words, floats, top_p, rows = self._words, self._floats, self._top_p, sampled.device_rows
        if extended is not None:
            words = words.index_select(0, rows)
            _disable_filters(words, extended.index)
            floats, top_p = words.view(torch.float32), words.view(torch.float64)[:, at.TOP_P // 2]
            rows = self._own_rows[: len(rows)]
        mask_rows = sampled.mask_rows
        if sampled.mask is not None and mask_rows is None:
            mask_rows = self._own_index[: len(rows)]  # the kernels always read masks by index
        return SamplingInputs(
            temperature=floats[:, at.TEMPERATURE],
            top_k=words[:, at.TOP_K],
            top_p=top_p,
            log_min_p=floats[:, at.LOG_MIN_P],
            key=words[:, at.KEY : at.KEY + 2].t(),
            position=sampled.positions,
            choice=words[:, at.CHOICE],
            any_random=random,
            any_filter=filtered,
            rows=rows,
            mask=sampled.mask,
            mask_rows=mask_rows,
        )


def _used_filters(sampling: SamplingParams) -> Feature:
    return union(
        Feature(0),
        (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0, Feature.TOP),
        (sampling.typical_p < 1.0, Feature.TYPICAL),
        (sampling.top_n_sigma > 0.0, Feature.SIGMA),
        (sampling.dynatemp_range > 0.0, Feature.DYNATEMP),
        (sampling.mirostat > 0, Feature.MIROSTAT),
        (sampling.xtc_probability > 0.0, Feature.XTC),
    )


def seed_words(seed: int) -> tuple[int, int]:
    """Return the Philox key: low and high 32 bits of a signed 64-bit seed (docs/randomness.md)."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _row_words(sampling: SamplingParams, choice: int, mu: float | None) -> Words:
    """Return the [SAMPLING_WORDS] int32 parameters of a new row."""
    words = np.zeros(SAMPLING_WORDS, dtype=np.int32)
    floats = words.view(np.float32)
    for name, place in _INTEGER_WORDS.items():
        words[place] = getattr(sampling, name)
    for name, place in _FLOAT_WORDS.items():
        floats[place] = getattr(sampling, name)
    if sampling.greedy:
        floats[at.TEMPERATURE] = 0.0
    floats[at.LOG_MIN_P] = math.log(sampling.min_p) if sampling.min_p > 0 else NO_CUT
    floats[at.LOG_XTC_THRESHOLD] = math.log(sampling.xtc_threshold) if sampling.xtc_threshold > 0 else NO_CUT
    floats[at.MIROSTAT_MU] = 2 * sampling.mirostat_tau if mu is None else mu
    words[at.CHOICE] = choice
    words.view(np.uint32)[at.KEY : at.KEY + 2] = seed_words(sampling.seed)
    words.view(np.float64)[at.TOP_P // 2] = sampling.top_p
    # The coin is an integer w < 2**24; (w + 0.5) / 2**24 is less than the probability if w is less than this value.
    words[at.XTC_COIN] = math.ceil(sampling.xtc_probability * 2**24 - 0.5)
    return words


def _disable_filters(words: torch.Tensor, rows: torch.Tensor) -> None:
    """Set temperature 1 and no filters in the [n] int64 `rows` of [S, SAMPLING_WORDS] int32 words."""
    words.view(torch.float32)[:, at.TEMPERATURE].index_fill_(0, rows, 1.0)
    words.view(torch.float32)[:, at.LOG_MIN_P].index_fill_(0, rows, NO_CUT)
    words[:, at.TOP_K].index_fill_(0, rows, 0)
    words.view(torch.float64)[:, at.TOP_P // 2].index_fill_(0, rows, 1.0)


def _gather(words: Words, sampled: SampledRows, random: bool, filtered: bool) -> SamplingInputs:
    """Convert the [S, SAMPLING_WORDS] host words of the sampled rows to one entry per token."""
    floats = words.view(np.float32)
    integers = words[:, : at.TOP_P + 2].astype(np.int64)
    key = words.view(np.uint32)[:, at.KEY : at.KEY + 2].T.astype(np.int64)
    return SamplingInputs(
        temperature=torch.from_numpy(floats[:, at.TEMPERATURE]),
        top_k=torch.from_numpy(integers[:, at.TOP_K]),
        top_p=torch.from_numpy(words.view(np.float64)[:, at.TOP_P // 2]),
        log_min_p=torch.from_numpy(floats[:, at.LOG_MIN_P]),
        key=torch.from_numpy(key),
        position=sampled.positions,
        choice=torch.from_numpy(integers[:, at.CHOICE]),
        any_random=random,
        any_filter=filtered,
        mask=sampled.mask,
        mask_rows=sampled.mask_rows,
    )
