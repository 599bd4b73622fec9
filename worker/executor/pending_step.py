"""An enqueued step: its outputs on their way to the host, and their conversion to a StepResult."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from kernels.ops.logprobs.reference import LogprobTensors
from shared.messages import TokenLogprobs
from worker.executor.device import Device, Download
from worker.plan import SampledToken, StepResult
from worker.sampling.sampled_rows import SampledRows, SamplingFeature
from worker.sampling.sampler import SampledTokens


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Log-probabilities of some prompt tokens of one row, with `num_top` alternatives each."""

    row: int
    num_top: int
    logprobs: LogprobTensors


@dataclass(frozen=True, slots=True)
class PooledSums:
    """[len(rows), hidden] float64 sums of hidden states, and their rows."""

    rows: Sequence[int]
    sums: torch.Tensor


class PendingTensors:
    """Asynchronous copy of device tensors to the host.

    Attributes:
        tensors: Copies on the host, after `wait`.
    """

    def __init__(self, download: Download) -> None:
        self._download: Download | None = download
        self.tensors: tuple[torch.Tensor, ...] = ()

    def done(self) -> bool:
        """Return True if `wait` would return immediately."""
        return self._download is None or self._download.done()

    def wait(self) -> None:
        """Wait until the step has finished and its buffers are free. May be called repeatedly."""
        if self._download is not None:
            self.tensors = self._download.wait()
            self._download = None


class PendingStep(PendingTensors):
    """A step between `launch` and its result.

    Args:
        step: Number of the step.
        sampled: The sampled rows. Their arrays on the host belong to this step.
        tokens: The sampled tokens on the device; None if there are none.
        prompts: Log-probabilities of prompt tokens, in order of their positions.
        pooled: Sums for embeddings; None if the step has none.
        device: Device that computes the step.
    """

    def __init__(
        self,
        step: int,
        sampled: SampledRows,
        tokens: SampledTokens | None,
        prompts: Sequence[PromptReport],
        pooled: PooledSums | None,
        device: Device,
    ) -> None:
        self._step, self._sampled, self._tokens, self._prompts, self._pooled = step, sampled, tokens, prompts, pooled
        self._result: StepResult | None = None
        tensors: list[torch.Tensor] = []
        if tokens is not None:
            tensors = [tokens.token_ids, *_parts(tokens.logprobs), *([] if tokens.mu is None else [tokens.mu])]
        for prompt in prompts:
            tensors += _parts(prompt.logprobs)
        if pooled is not None:
            tensors.append(pooled.sums)
        super().__init__(device.download(tensors))

    def result(self) -> StepResult:
        """Wait for the step and return its result. May be called repeatedly."""
        self.wait()
        if self._result is None:
            self._result = self._assemble()
            self.tensors = ()
        return self._result

    def _assemble(self) -> StepResult:
        """Convert the tensors, in the order in which the constructor lists them, to a result."""
        arrived = iter(self.tensors)
        by_feature, tokens = self._sampled.by_feature, self._tokens
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        mu: dict[int, float] = {}
        if tokens is not None:
            token_ids = next(arrived).tolist()
            if tokens.logprobs is not None and self._sampled.num_top is not None:
                entries = token_logprobs(_take(arrived), self._sampled.num_top.tolist())
                logprobs = dict(zip(by_feature[SamplingFeature.LOGPROBS].host_index.tolist(), entries))
            if tokens.mu is not None:
                mu = dict(zip(by_feature[SamplingFeature.EXTENDED].host_index.tolist(), next(arrived).tolist()))
        prompts: dict[int, list[TokenLogprobs]] = {}
        for prompt in self._prompts:
            tensors = _take(arrived)
            entries = token_logprobs(tensors, [prompt.num_top] * len(tensors.token_ids))
            prompts.setdefault(prompt.row, []).extend(entries)
        pooled: dict[int, bytes] = {}
        if self._pooled is not None:
            sums = next(arrived).numpy().astype("<f8", copy=False)
            pooled = {row: values.tobytes() for row, values in zip(self._pooled.rows, sums, strict=True)}
        rows = self._sampled.rows.tolist()
        return StepResult(
            step=self._step,
            sampled=[
                SampledToken(row, token_id, logprobs.get(index) if token_id >= 0 else None, mu.get(index))
                for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
            ],
            prompt_logprobs=prompts,
            pooled=pooled,
        )


def _parts(tensors: LogprobTensors | None) -> list[torch.Tensor]:
    if tensors is None:
        return []
    return [tensors.token_ids, tensors.logprobs, tensors.ranks, tensors.top_ids, tensors.top_logprobs]


def _take(arrived: Iterator[torch.Tensor]) -> LogprobTensors:
    return LogprobTensors(*islice(arrived, 5))


def token_logprobs(tensors: LogprobTensors, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Convert host tensors to messages with `num_top` alternatives each. Ties are ordered by token id."""
    entries = []
    rows = zip(*(column.tolist() for column in _parts(tensors)), num_top)
    for token_id, logprob, rank, top_ids, top_logprobs, count in rows:
        best = sorted(zip(top_ids, top_logprobs), key=lambda pair: (-pair[1], pair[0]))[:count]
        ids = [pair[0] for pair in best]
        entries.append(TokenLogprobs(token_id, logprob, rank, ids, [pair[1] for pair in best]))
    return entries
