"""Sampling of token ids from the logits of a batch, whose rows may have different parameters.

The order of operations is that of vLLM and llama.cpp: logit_bias and the masks of min_tokens and ignore_eos on the raw
logits, allowed ids and bad words, the penalties, DRY, top_n_sigma, temperature, min_p, typical_p, top_k and top_p (or
mirostat instead), XTC, and finally the token with the largest sum of logit and noise. The result of a row depends
neither on other rows nor on its index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.backends.reference import SamplingOps, SpeculativeOps
from kernels.ops.logprobs.reference import LogprobTensors
from kernels.ops.sampling.inputs import Feature
from kernels.ops.speculative.reference import DraftInputs
from worker.sampling.parameters import SamplingParameters
from worker.sampling.sampled_rows import FeatureRows, SampledRows, SamplingFeature


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens sampled by a step, on the device.

    Attributes:
        token_ids: [S] int64; negative on failure: NOT_USABLE or NOTHING_LEFT of kernels/ops/sampling/inputs.py.
        logprobs: Log-probabilities of the rows that report them, in order; None if no row does.
        mu: [E] float32, mirostat's next target of the rows with EXTENDED; None if none of them uses mirostat.
    """

    token_ids: torch.Tensor
    logprobs: LogprobTensors | None = None
    mu: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampler of a worker. Its only state are the row parameters, whose penalty counts and mirostat targets it updates.

    Attributes:
        parameters: Sampling parameters of the rows.
        ops: Sampling kernels.
        speculative: Kernels that verify drafts; None if there are no drafts.
        rejection: True to accept drafts by rejection sampling, False to accept drafts equal to the sampled token.
    """

    parameters: SamplingParameters
    ops: SamplingOps
    speculative: SpeculativeOps | None = None
    rejection: bool = False

    def sample(self, logits: torch.Tensor, sampled: SampledRows) -> SampledTokens:
        """Sample one token per row of logits and count it for the penalties. No value is read on the host.

        Args:
            logits: [S, vocab] float32 raw logits; overwritten.
            sampled: Rows to sample.
        """
        parameters, ops, by_feature = self.parameters, self.ops, sampled.by_feature
        reporting = None if sampled.trial else by_feature.get(SamplingFeature.LOGPROBS)
        penalized = by_feature.get(SamplingFeature.PENALTY)
        raw = _rows_of(logits, reporting) if reporting is not None else None
        if sampled.features & SamplingFeature.ADJUST:
            ops.adjust(logits, parameters.lists.adjust_inputs(sampled))
        if SamplingFeature.ALLOWED in by_feature:
            ops.allow_only(logits, parameters.lists.allowed_inputs(sampled, by_feature[SamplingFeature.ALLOWED]))
        if SamplingFeature.BAD_WORDS in by_feature:
            ops.forbid_words(logits, parameters.lists.bad_words_inputs(sampled, by_feature[SamplingFeature.BAD_WORDS]))
        if penalized is not None and sampled.slots is not None:
            ops.penalize(logits, parameters.penalty_inputs(sampled, penalized, sampled.slots))
        if SamplingFeature.DRY in by_feature:
            dry = by_feature[SamplingFeature.DRY]
            ops.penalize_repetitions(logits, parameters.lists.dry_inputs(sampled, dry, parameters.words(sampled, dry)))
        mu = None
        if SamplingFeature.EXTENDED in by_feature:
            token_ids, mu = self._extend_and_sample(logits, sampled, by_feature[SamplingFeature.EXTENDED])
        else:
            token_ids = self._draw(logits, sampled)
        if penalized is not None and not sampled.trial:
            self._count(token_ids, sampled, penalized)
        if raw is None or reporting is None or sampled.num_top is None:
            return SampledTokens(token_ids, mu=mu)
        reported = token_ids.index_select(0, reporting.index)
        return SampledTokens(token_ids, ops.logprobs(raw, reported, int(sampled.num_top.max())), mu)

    def _count(self, token_ids: torch.Tensor, sampled: SampledRows, penalized: FeatureRows) -> None:
        """Count the tokens for the penalties. If drafts are verified, count only the accepted tokens."""
        penalties, slots, verification = self.parameters.penalties, sampled.slots, sampled.verification
        if slots is None:
            return
        ids = token_ids.index_select(0, penalized.index)
        if verification is None or self.speculative is None:
            penalties.add(slots, ids)
            return
        bounds = verification.cu_rows.to(torch.int32)
        accepted = self.speculative.verify(token_ids, verification.drafts, bounds).kept
        self.speculative.add_kept(penalties.output_counts, slots, ids, accepted.index_select(0, penalized.index))

    def distributions(self, logits: torch.Tensor, sampled: SampledRows) -> torch.Tensor | None:
        """Return the [S, vocab] float32 distributions that `sample` draws from, for logits without further changes.

        Return None if drafts are not accepted by rejection sampling.
        """
        if not self.rejection or self.speculative is None:
            return None
        return self.speculative.probabilities(logits, self.parameters.sampling_inputs(sampled))

    def _draw(self, logits: torch.Tensor, sampled: SampledRows) -> torch.Tensor:
        """Return [S] tokens sampled from the processed logits."""
        inputs, verification = self.parameters.sampling_inputs(sampled), sampled.verification
        if verification is None or not self.rejection or self.speculative is None:
            return self.ops.sample(logits, inputs)
        drafts = DraftInputs(verification.drafts, verification.probabilities, verification.probability_rows)
        drawn = self.speculative.reject(logits, inputs, drafts)
        if verification.drafted is None:
            return drawn
        # Requests without drafts must not be affected by the drafts of other requests.
        return torch.where(verification.drafted > 0, drawn, self.ops.sample(logits, inputs))

    def _extend_and_sample(
        self, logits: torch.Tensor, sampled: SampledRows, extended: FeatureRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parameters, ops = self.parameters, self.ops
        inputs = parameters.extend_inputs(sampled, extended)
        log_mass = ops.extend(logits, inputs)
        token_ids = self._draw(logits, sampled)
        if sampled.trial or not inputs.features & Feature.MIROSTAT:
            return token_ids, None
        mu = ops.update_mirostat_mu(logits, inputs, log_mass, token_ids)
        parameters.store_mu(sampled.rows_of(extended), mu)
        return token_ids, mu

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """Return log-probabilities of [L] ids and of the num_top likeliest under [L, vocab] float32 raw logits."""
        return self.ops.logprobs(logits, token_ids, num_top)


def _rows_of(logits: torch.Tensor, listed: FeatureRows) -> torch.Tensor:
    """Return an [n, vocab] copy of the listed rows of [S, vocab] logits."""
    if logits.device.type == "cpu":
        # torch copies even a single row with several threads, whose start takes longer than the copy.
        return torch.from_numpy(logits.numpy()[listed.host_index])
    return logits.index_select(0, listed.index)
