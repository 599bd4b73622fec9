"""From logits to token ids, for a batch whose rows want different things, in one pass over tensors.

Order, as users of vLLM expect it: logit_bias and the masks of min_tokens and ignore_eos on the raw logits, then the
penalties, temperature, min_p, top_k, top_p, and the token with the largest sum of logit and noise. Nothing of a row's
result depends on another row or on which row it is.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.sampling.dispatch import SamplingOps
from worker.sampling.logprobs import LogprobTensors, compute_logprobs
from worker.sampling.parameters import Needs, SampledRows, SamplingParameters


class Sampler:
    """Stateless apart from the parameters that it reads and the counts that it advances."""

    def __init__(self, parameters: SamplingParameters, ops: SamplingOps) -> None:
        self._parameters = parameters
        self._ops = ops

    def sample(self, logits: torch.Tensor, sampled: SampledRows) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Samples one token for each row and counts it for the penalties.

        Args:
            logits: [S, vocab] float32, raw; overwritten.

        Returns:
            [S] int64 token ids, -1 where the logits were not usable; and the log-probabilities of the rows that
            report them, in order, or None where there are none.
        """
        parameters = self._parameters
        row_needs = parameters.needs[sampled.rows]
        needs = int(np.bitwise_or.reduce(row_needs)) if len(row_needs) else 0
        raw = reporting = None
        if needs & Needs.LOGPROBS:
            reporting = _indices(row_needs, Needs.LOGPROBS, logits.device)
            raw = logits.index_select(0, reporting)
        if needs & Needs.ADJUST:
            parameters.adjust(logits, sampled)
        slots = penalized = None
        if needs & Needs.PENALTY:
            penalized = _indices(row_needs, Needs.PENALTY, logits.device)
            slots = parameters.penalties.slots(sampled.rows[row_needs & Needs.PENALTY != 0])
            factors = parameters.penalty_factors(sampled.device_rows.index_select(0, penalized))
            self._ops.penalize(logits, parameters.penalties.inputs(penalized, slots, factors))
        token_ids = self._ops.sample(logits, parameters.sampling_inputs(sampled, needs))
        if slots is not None and penalized is not None:
            parameters.penalties.add(slots, token_ids.index_select(0, penalized))
        if raw is None or reporting is None:
            return token_ids, None
        num_top = int(parameters.num_logprobs[sampled.rows].max())
        return token_ids, compute_logprobs(raw, token_ids.index_select(0, reporting), num_top)


def _indices(row_needs: np.ndarray, need: Needs, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(row_needs & need)).to(device)
