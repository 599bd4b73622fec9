"""From logits to token ids, for a batch whose rows want different things, in one pass over tensors.

Order, as users of vLLM expect it: logit_bias and the masks of min_tokens and ignore_eos on the raw logits, then the
penalties, temperature, min_p, top_k, top_p, and the token with the largest sum of logit and noise. Nothing of a row's
result depends on another row or on which row it is.
"""

from __future__ import annotations

import torch

from kernels.logprobs.tensors import LogprobTensors
from kernels.sampling.dispatch import SamplingOps
from worker.sampling.parameters import Needs, SampledRows, SamplingParameters


class Sampler:
    """Stateless apart from the parameters that it reads and the counts that it advances."""

    def __init__(self, parameters: SamplingParameters, ops: SamplingOps) -> None:
        self._parameters = parameters
        self._ops = ops

    def sample(self, logits: torch.Tensor, sampled: SampledRows) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Samples one token for each row and counts it for the penalties. Nothing is read on the host.

        Args:
            logits: [S, vocab] float32, raw; overwritten.

        Returns:
            [S] int64 token ids, -1 where the logits were not usable; and the log-probabilities of the rows that
            report them, in order, or None where there are none.
        """
        parameters, ops = self._parameters, self._ops
        penalized, slots = sampled.penalized, sampled.slots
        raw = logits.index_select(0, sampled.reporting) if sampled.reporting is not None else None
        if sampled.needs & Needs.ADJUST:
            ops.adjust(logits, parameters.adjust_inputs(sampled))
        if penalized is not None and slots is not None:
            ops.penalize(logits, parameters.penalty_inputs(sampled, penalized, slots))
        token_ids = ops.sample(logits, parameters.sampling_inputs(sampled))
        if penalized is not None and slots is not None:
            parameters.penalties.add(slots, token_ids.index_select(0, penalized))
        if raw is None or sampled.reporting is None or sampled.num_top is None:
            return token_ids, None
        return token_ids, ops.logprobs(raw, token_ids.index_select(0, sampled.reporting), int(sampled.num_top.max()))

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """Of [L] given ids under [L, vocab] float32 raw logits, and of the num_top likeliest."""
        return self._ops.logprobs(logits, token_ids, num_top)
