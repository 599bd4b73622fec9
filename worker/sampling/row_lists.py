"""Per-row token lists: logit biases, ids masked for some time, bad words, allowed ids, and DRY breakers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from kernels.ops.sampling import inputs
from kernels.ops.step_inputs.inputs import ADJUSTMENT_WORDS, BAD_WORD_WORDS, Field, StepBuffers
from shared.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from worker.plan import NewRow
from worker.sampling.sampled_rows import FeatureRows, Integers, SampledRows, SamplingFeature

Words = np.ndarray[Any, np.dtype[np.int32]]
Change = tuple[int, Words]
"""Index in the state, and words to write there."""

MAX_ADJUSTMENTS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + 64
"""Maximum number of entries of a row: biases, stop ids, and end-of-sequence ids."""
_FOREVER = 2**31 - 1


class RowLists:
    """Token lists of all rows in the state of `buffers`, and the number of entries that each row uses."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._layout = layout = buffers.layout
        state, num_rows = buffers.state, layout.max_num_seqs
        numbers: Integers = np.zeros((4, num_rows), dtype=np.int64)
        self._num_adjustments, self._num_bad_tokens, self._last_n, self._allowed_length = numbers
        self._token_ids = layout.token_ids.of(state)
        self._adjustments = layout.adjustments.of(state)
        self._adjustment_values = self._adjustments.view(torch.float32)
        self._bad_words = layout.bad_words.of(state)
        self._allowed = layout.allowed.of(state)
        self._breakers = layout.breakers.of(state)

    def enter(self, new: NewRow) -> tuple[SamplingFeature, list[Change]]:
        """Return the features of a new request that use the lists, and the changes of its row."""
        sampling, row, layout = new.sampling, new.row, self._layout
        features = SamplingFeature(0)
        changes = [self._enter_adjustments(new), self._enter_bad_words(new)]
        if self._num_adjustments[row]:
            features |= SamplingFeature.ADJUST
        if sampling.bad_words:
            features |= SamplingFeature.BAD_WORDS
        if sampling.allowed_token_ids:
            features |= SamplingFeature.ALLOWED
            allowed = (*sampling.allowed_token_ids, *new.eos_token_ids)
            changes.append(self._bits(layout.allowed, row, allowed))
        if sampling.uses_dry:
            features |= SamplingFeature.DRY
            changes.append(self._bits(layout.breakers, row, sampling.dry_breakers))
        self._last_n[row] = sampling.dry_penalty_last_n
        self._allowed_length[row] = sampling.dry_allowed_length
        return features, [change for change in changes if len(change[1])]

    def _bits(self, table: Field, row: int, ids: Iterable[int]) -> Change:
        size = table.shape[1]
        flags = np.zeros(32 * size, dtype=np.bool_)
        flags[np.fromiter(ids, dtype=np.int64)] = True
        return table.at + row * size, np.packbits(flags, bitorder="little").view(np.int32)

    def _enter_bad_words(self, new: NewRow) -> Change:
        """Return the change that enters the row's bad words."""
        bad_words = new.sampling.bad_words
        tokens = [(token_id, len(word) - index) for word in bad_words for index, token_id in enumerate(word)]
        width = self._layout.max_bad_word_tokens
        if len(tokens) > width:
            raise ValueError(f"the bad_words of a request have {len(tokens)} tokens; a row holds at most {width}")
        words = np.array(tokens, dtype=np.int32).reshape(-1, BAD_WORD_WORDS)
        return self._replace(self._layout.bad_words, new.row, words, self._num_bad_tokens)

    def _enter_adjustments(self, new: NewRow) -> Change:
        """Return the change that enters the row's adjustments."""
        sampling, row = new.sampling, new.row
        entries = [(token_id, bias, _FOREVER) for token_id, bias in sampling.logit_bias.items()]
        min_end = new.num_prompt_tokens + sampling.min_tokens
        eos_end = _FOREVER if sampling.ignore_eos else min_end
        if eos_end > new.num_prompt_tokens:
            # An end id that is also a stop id is masked only until min_tokens, even with ignore_eos.
            eos_ids = set(new.eos_token_ids).difference(sampling.stop_token_ids)
            entries += [(token_id, inputs.NO_CUT, eos_end) for token_id in sorted(eos_ids)]
        if sampling.min_tokens > 0:
            entries += [(token_id, inputs.NO_CUT, min_end) for token_id in sorted(set(sampling.stop_token_ids))]
        if len(entries) > MAX_ADJUSTMENTS:
            raise ValueError(f"a request adjusts {len(entries)} logits; a row holds at most {MAX_ADJUSTMENTS}")
        words = np.zeros((len(entries), ADJUSTMENT_WORDS), dtype=np.int32)
        if entries:
            ids, values, until = zip(*entries)
            words[:, 0] = ids
            words.view(np.float32)[:, 1] = values
            words[:, 2] = until
        return self._replace(self._layout.adjustments, row, words, self._num_adjustments)

    def _replace(self, table: Field, row: int, words: Words, lengths: Integers) -> Change:
        """Replace the row's entries, with zeros over the remaining entries of the previous request."""
        padding = max(0, int(lengths[row]) - len(words))
        lengths[row] = len(words)
        return table.at + row * math.prod(table.shape[1:]), np.pad(words, ((0, padding), (0, 0))).reshape(-1)

    def adjust_inputs(self, sampled: SampledRows) -> inputs.AdjustInputs:
        """Return the additions to single logits."""
        width = int(self._num_adjustments[sampled.rows].max())
        entries = self._adjustments[:, :width]
        return inputs.AdjustInputs(
            ids=entries[:, :, 0],
            values=self._adjustment_values[:, :width, 1],
            until=entries[:, :, 2],
            rows=sampled.device_rows,
            position=sampled.positions,
        )

    def allowed_inputs(self, sampled: SampledRows, listed: FeatureRows) -> inputs.AllowedInputs:
        """Return the allowed ids of the listed rows."""
        return inputs.AllowedInputs(listed.index, sampled.rows_of(listed), self._allowed)

    def bad_words_inputs(self, sampled: SampledRows, listed: FeatureRows) -> inputs.BadWordsInputs:
        """Return the bad words of the listed rows."""
        return inputs.BadWordsInputs(
            rows=listed.index,
            table_rows=sampled.rows_of(listed),
            words=self._bad_words,
            token_ids=self._token_ids,
            length=sampled.positions_of(listed),
            width=int(self._num_bad_tokens[listed.rows].max()),
        )

    def dry_inputs(self, sampled: SampledRows, listed: FeatureRows, words: torch.Tensor) -> inputs.DryInputs:
        """Return the DRY inputs of the listed rows.

        Args:
            sampled: Rows of the step.
            listed: Rows with DRY.
            words: [D, SAMPLING_WORDS] int32 parameters of these rows.
        """
        lengths, last_n = sampled.lengths[listed.host_index], self._last_n[listed.rows]
        return inputs.DryInputs(
            rows=listed.index,
            table_rows=sampled.rows_of(listed),
            token_ids=self._token_ids,
            length=sampled.positions_of(listed),
            words=words,
            breakers=self._breakers,
            longest=int(np.where(last_n < 0, lengths, np.minimum(last_n, lengths)).max()),
            longest_match=int(self._allowed_length[listed.rows].max()) + inputs.MAX_DRY_EXPONENT,
        )
