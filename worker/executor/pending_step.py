"""A step that is enqueued: what is on its way to the host, and the result made of it once it has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.ops.logprobs.tensors import LogprobTensors
from shared.messages import TokenLogprobs
from worker.executor.device import Device, Download
from worker.plan import SampledToken, StepResult
from worker.sampling.logprobs import to_entries
from worker.sampling.sampled_rows import Needs, SampledRows
from worker.sampling.sampler import SampledTokens


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Log-probabilities of some prompt tokens of one row."""

    row: int
    num_top: int
    logprobs: LogprobTensors


@dataclass(frozen=True, slots=True)
class PooledSums:
    """[len(rows), hidden] float64 sums of hidden states, and whose they are."""

    rows: Sequence[int]
    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step leaves on the device.

    Attributes:
        rows: [S] the row of each sampled token, on the host; token_ids: [S] int64, None where S is 0.
        reporting: [L] which of the S have log-probabilities, on the host; num_top: [L] alternatives of each.
        logprobs: of these L.
        aiming: [E] which of the S are of rows with rarer filters, on the host; mu: [E] what mirostat aims at in them,
            None where nobody uses it.
        prompts: in the order of their positions.
        pooled: for embeddings; None where the step has none.
    """

    step: int
    rows: Sequence[int]
    token_ids: torch.Tensor | None
    reporting: Sequence[int]
    num_top: Sequence[int]
    logprobs: LogprobTensors | None
    aiming: Sequence[int]
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
    """With what the host must remember of the rows: by the time the step arrives they may hold other requests."""
    logprobs = mu = None
    if tokens is not None:
        logprobs, mu = tokens.logprobs, tokens.mu
    reporting, extended = sampled.listed.get(Needs.LOGPROBS), sampled.listed.get(Needs.EXTENDED)
    return StepOutput(
        step=step,
        rows=sampled.rows.tolist(),
        token_ids=None if tokens is None else tokens.token_ids,
        reporting=[] if reporting is None or logprobs is None else reporting.host_index.tolist(),
        num_top=[] if sampled.num_top is None else sampled.num_top.tolist(),
        logprobs=logprobs,
        aiming=[] if extended is None or mu is None else extended.host_index.tolist(),
        mu=mu,
        prompts=prompts,
        pooled=pooled,
    )


class PendingStep:
    """One step between `launch` and its result."""

    def __init__(self, output: StepOutput, device: Device) -> None:
        self._output = output
        self._download: Download | None = device.download(_tensors(output))
        self._arrived: tuple[torch.Tensor, ...] = ()
        self._result: StepResult | None = None

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._download is None or self._download.done()

    def wait(self) -> None:
        """Returns when the step is over and its buffers are free. May be called twice."""
        if self._download is not None:
            self._arrived = self._download.wait()
            self._download = None

    def result(self) -> StepResult:
        """Waits for the step. May be called twice."""
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
    at = 0

    def take_logprobs() -> LogprobTensors:
        nonlocal at
        at += _NUM_PARTS
        return LogprobTensors(*arrived[at - _NUM_PARTS : at])

    token_ids: list[int] = []
    if output.token_ids is not None:
        token_ids = arrived[0].tolist()
        at = 1
    reported: dict[int, TokenLogprobs] = {}
    if output.logprobs is not None:
        reported = dict(zip(output.reporting, to_entries(take_logprobs(), output.num_top)))
    mu: dict[int, float] = {}
    if output.mu is not None:
        mu = dict(zip(output.aiming, arrived[at].tolist()))
        at += 1
    prompts: dict[int, list[TokenLogprobs]] = {}
    for prompt in output.prompts:
        tensors = take_logprobs()
        entries = to_entries(tensors, [prompt.num_top] * len(tensors.token_ids))
        prompts.setdefault(prompt.row, []).extend(entries)
    pooled: dict[int, bytes] = {}
    if output.pooled is not None:
        sums = arrived[at].numpy().astype("<f8", copy=False)
        pooled = {row: values.tobytes() for row, values in zip(output.pooled.rows, sums, strict=True)}
    return StepResult(
        step=output.step,
        sampled=[
            SampledToken(row, token_id, reported.get(index) if token_id >= 0 else None, mu.get(index))
            for index, (row, token_id) in enumerate(zip(output.rows, token_ids, strict=True))
        ],
        prompt_logprobs=prompts,
        pooled=pooled,
    )
