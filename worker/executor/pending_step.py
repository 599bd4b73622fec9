"""An enqueued step: its outputs on their way to the host, and their conversion to a StepResult."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.ops.logprobs.reference import LogprobTensors
from shared.messages import TokenLogprobs
from worker.executor.device import Device, Download
from worker.plan import SampledToken, StepResult
from worker.sampling.sampled_rows import Needs, SampledRows
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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Outputs of a step on the device, and host data of the rows.

    The host data is copied because the rows may belong to other requests when the step completes.

    Attributes:
        step: Number of the step.
        rows: [S] row of each sampled token, on the host.
        token_ids: [S] int64; None if S is 0.
        logprob_index: [L] indices of the sampled tokens with log-probabilities, on the host.
        num_top: [L] number of alternatives of each.
        logprobs: Log-probabilities of these L tokens.
        mirostat_index: [E] indices of the sampled tokens of rows with extended filters, on the host.
        mu: [E] mirostat's next target of these rows; None if no row uses mirostat.
        prompts: Log-probabilities of prompt tokens, in order of their positions.
        pooled: Sums for embeddings; None if the step has none.
    """

    step: int
    rows: Sequence[int]
    token_ids: torch.Tensor | None
    logprob_index: Sequence[int]
    num_top: Sequence[int]
    logprobs: LogprobTensors | None
    mirostat_index: Sequence[int]
    mu: torch.Tensor | None
    prompts: Sequence[PromptReport]
    pooled: PooledSums | None


def step_output(
    step: int,
    sampled: SampledRows,
    tokens: SampledTokens | None,
    prompts: Sequence[PromptReport],
    pooled: PooledSums | None = None,
) -> StepOutput:
    """Combine the outputs of a step with the host data of its rows."""
    logprobs = mu = None
    if tokens is not None:
        logprobs, mu = tokens.logprobs, tokens.mu
    reporting, extended = sampled.listed.get(Needs.LOGPROBS), sampled.listed.get(Needs.EXTENDED)
    return StepOutput(
        step=step,
        rows=sampled.rows.tolist(),
        token_ids=None if tokens is None else tokens.token_ids,
        logprob_index=[] if reporting is None or logprobs is None else reporting.host_index.tolist(),
        num_top=[] if sampled.num_top is None else sampled.num_top.tolist(),
        logprobs=logprobs,
        mirostat_index=[] if extended is None or mu is None else extended.host_index.tolist(),
        mu=mu,
        prompts=prompts,
        pooled=pooled,
    )


class PendingStep:
    """A step between `launch` and its result."""

    def __init__(self, output: StepOutput, device: Device) -> None:
        self._output = output
        self._download: Download | None = device.download(_tensors(output))
        self._arrived: tuple[torch.Tensor, ...] = ()
        self._result: StepResult | None = None

    def done(self) -> bool:
        """Return True if `result` would return immediately."""
        return self._download is None or self._download.done()

    def wait(self) -> None:
        """Wait until the step has finished and its buffers are free. May be called repeatedly."""
        if self._download is not None:
            self._arrived = self._download.wait()
            self._download = None

    def result(self) -> StepResult:
        """Wait for the step and return its result. May be called repeatedly."""
        self.wait()
        if self._result is None:
            self._result = _assemble(self._output, self._arrived)
            self._arrived = ()
        return self._result


def _parts(logprobs: LogprobTensors) -> tuple[torch.Tensor, ...]:
    return logprobs.token_ids, logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs


_NUM_PARTS = 5


def _tensors(output: StepOutput) -> list[torch.Tensor]:
    tensors = [] if output.token_ids is None else [output.token_ids]
    if output.logprobs is not None:
        tensors += _parts(output.logprobs)
    if output.mu is not None:
        tensors.append(output.mu)
    for prompt in output.prompts:
        tensors += _parts(prompt.logprobs)
    if output.pooled is not None:
        tensors.append(output.pooled.sums)
    return tensors


def _assemble(output: StepOutput, arrived: Sequence[torch.Tensor]) -> StepResult:
    """Convert the downloaded tensors, in the order of `_tensors`, to a result."""
    at = 0

    def take_logprobs() -> LogprobTensors:
        nonlocal at
        at += _NUM_PARTS
        return LogprobTensors(*arrived[at - _NUM_PARTS : at])

    token_ids: list[int] = []
    if output.token_ids is not None:
        token_ids = arrived[0].tolist()
        at = 1
    logprobs: dict[int, TokenLogprobs] = {}
    if output.logprobs is not None:
        logprobs = dict(zip(output.logprob_index, token_logprobs(take_logprobs(), output.num_top)))
    mu: dict[int, float] = {}
    if output.mu is not None:
        mu = dict(zip(output.mirostat_index, arrived[at].tolist()))
        at += 1
    prompts: dict[int, list[TokenLogprobs]] = {}
    for prompt in output.prompts:
        tensors = take_logprobs()
        entries = token_logprobs(tensors, [prompt.num_top] * len(tensors.token_ids))
        prompts.setdefault(prompt.row, []).extend(entries)
    pooled: dict[int, bytes] = {}
    if output.pooled is not None:
        sums = arrived[at].numpy().astype("<f8", copy=False)
        pooled = {row: values.tobytes() for row, values in zip(output.pooled.rows, sums, strict=True)}
    return StepResult(
        step=output.step,
        sampled=[
            SampledToken(row, token_id, logprobs.get(index) if token_id >= 0 else None, mu.get(index))
            for index, (row, token_id) in enumerate(zip(output.rows, token_ids, strict=True))
        ],
        prompt_logprobs=prompts,
        pooled=pooled,
    )


def token_logprobs(tensors: LogprobTensors, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Convert host tensors to messages with `num_top` alternatives each. Ties are ordered by token id."""
    entries = []
    columns = (tensors.token_ids, tensors.logprobs, tensors.ranks, tensors.top_ids, tensors.top_logprobs)
    rows = zip(*(column.tolist() for column in columns), num_top)
    for token_id, logprob, rank, top_ids, top_logprobs, count in rows:
        best = sorted(zip(top_ids, top_logprobs), key=lambda pair: (-pair[1], pair[0]))[:count]
        ids = [pair[0] for pair in best]
        entries.append(TokenLogprobs(token_id, logprob, rank, ids, [pair[1] for pair in best]))
    return entries
