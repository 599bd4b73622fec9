"""Execution of the target model's plans on one rank: rows, page copies, model and sampler.

The runner only enqueues work; values are read back when the result of a step is requested. A decode step whose size
has been captured runs as a graph, other steps kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from kernels.ops.attention.cascade import CascadeWork
from worker.executor.device import Device
from worker.executor.graphs import DecodeGraphs, SamplerGraphs, SamplerKey
from worker.executor.pending_step import PendingStep, PooledSums, PromptReport
from worker.executor.request_rows import PooledTokens, PromptChunk, RequestRows, StagedStep
from worker.executor.shared_prefixes import SharedPrefixes
from worker.kv.storage import CopyBatch
from worker.model.forward_batch import ForwardBatch
from worker.plan import StepPlan, StepResult
from worker.sampling.sampler import SampledTokens, Sampler

# Rows of logits computed at a time for prompt log-probabilities: 256 x 49,152 float32 are 48 MiB.
_LOGITS_ROWS = 256


class Model(Protocol):
    """The part of a decoder that the runners use."""

    def hidden_states(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        """Compute a step. Return the normalized [S, hidden] states of the tokens batch.logits_indices."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [S, vocab] float32 logits of [S, hidden] states."""


class PageStorage(Protocol):
    """The part of the KV cache that the runners use."""

    def copy_pages(self, copies: CopyBatch) -> None:
        """Copy pages."""


class GraphRunner:
    """Base class of the runners of the target model and of the draft model, with the graphs of decode steps.

    Args:
        model: Decoder.
        kv: KV cache of the decoder.
        rows: State of the requests.
        sampler: Sampler on the rows.
        device: Device of the model.
        graphs: Capture decode steps if the device can.
    """

    def __init__(
        self, model: Model, kv: PageStorage, rows: RequestRows, sampler: Sampler, device: Device, *, graphs: bool = True
    ) -> None:
        self._model, self._kv, self._rows, self._sampler, self._device = model, kv, rows, sampler, device
        self._graphs: DecodeGraphs[torch.Tensor] | None = None
        if graphs and device.captures:
            self._graphs = DecodeGraphs(device, self._compute, rows.clear_inputs, max_num_seqs=rows.max_num_seqs)

    def _compute(self, size: int) -> torch.Tensor:
        return self._hidden_states(self._rows.graph_batch(size))

    def _hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model.hidden_states(batch, self._kv)


class ModelRunner(GraphRunner):
    """Runner of the target model. Every rank of a group executes the same plans and samples the same ids.

    Args:
        prefixes: Detector of shared prefixes in decode steps; None to disable.
    """

    def __init__(
        self,
        model: Model,
        kv: PageStorage,
        rows: RequestRows,
        sampler: Sampler,
        device: Device,
        *,
        graphs: bool = True,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        super().__init__(model, kv, rows, sampler, device, graphs=graphs)
        self._prefixes = prefixes
        self._sampler_graphs = SamplerGraphs(device, self._compute_sampled, rows.clear_sampled)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Enqueue one step. Further plans may be launched before the result is read."""
        # On the CPU there are neither graphs nor shared prefixes, so the plan is not examined.
        is_decode = (self._graphs is not None or self._prefixes is not None) and _is_decode(plan)
        cascade = self._find_shared(plan, is_decode)
        size = None
        if is_decode and cascade is None and self._graphs is not None:
            size = self._graphs.choose(len(plan.scheduled))
        if size is not None:
            self._sampler_graphs.capture_next()
        staged = self._rows.stage(plan, size)
        if self._rows.distributions is not None:
            # The drafts of these rows are verified in this step or discarded.
            self._rows.distributions.forget(item.row for item in plan.scheduled)
        for copies in staged.copies:
            self._kv.copy_pages(copies)
        pending = self._run(plan, staged, size, cascade)
        self._rows.reserve_until(pending)
        return pending

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to completion."""
        return self.launch(plan).result()

    @property
    def can_capture(self) -> bool:
        """True if decode steps are captured."""
        return self._graphs is not None

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more graph while the worker is idle. Return False if none is left."""
        return self._graphs is not None and (self._graphs.capture_next() or self._sampler_graphs.capture_next())

    def _run(self, plan: StepPlan, staged: StagedStep, size: int | None, cascade: CascadeWork | None) -> PendingStep:
        batch, sampled, chunks = staged.batch, staged.sampled, staged.chunks
        num_sampled = len(sampled.rows)
        tokens = logits = None
        prompts: list[PromptReport] = []
        sums = None
        if size is not None and self._graphs is not None:
            # The next replay comes after the head, which therefore reads these states before they are overwritten.
            hidden, sampler_graph = self._graphs.replay(size), self._sampler_graphs.choose(size, sampled)
            if sampler_graph is not None:
                # Copied, because the next replay overwrites the ids while they are still being downloaded.
                tokens = SampledTokens(sampler_graph.replay()[:num_sampled].clone())
            else:
                logits = self._model.logits(hidden[:num_sampled])
        elif batch is not None:
            batch = batch if cascade is None else replace(batch, cascade=cascade)
            hidden = self._hidden_states(batch)
            prompts = self._prompt_logprobs(hidden[num_sampled:], chunks)
            sums = _pool(hidden[num_sampled + sum(chunk.count for chunk in chunks) :], staged.pooled)
            logits = self._model.logits(hidden[:num_sampled]) if num_sampled else None
        if logits is not None:
            tokens = self._sampler.sample(logits, sampled)
            self._rows.append(sampled, tokens.token_ids)
        return PendingStep(plan.step, sampled, tokens, prompts, sums, self._device)

    def _find_shared(self, plan: StepPlan, is_decode: bool) -> CascadeWork | None:
        if self._prefixes is None:
            return None
        for update in plan.block_tables:
            if update.group == 0:
                self._prefixes.update(update.row, update.start, update.pages)
        return self._prefixes.find(plan.scheduled) if is_decode else None

    def _compute_sampled(self, key: SamplerKey) -> torch.Tensor:
        """Sample and append the ids of all rows of a step, including padding. Return the ids."""
        if self._graphs is None:
            raise RuntimeError("a sampler graph needs the decode graph of its step")
        sampled = self._rows.graph_sampled(key.size, key.features)
        tokens = self._sampler.sample(self._model.logits(self._graphs.outputs(key.size)), sampled)
        self._rows.append(sampled, tokens.token_ids)
        return tokens.token_ids

    def _prompt_logprobs(self, hidden: torch.Tensor, chunks: list[PromptChunk]) -> list[PromptReport]:
        """Compute log-probabilities from the concatenated [P, hidden] states of all chunks."""
        reports: list[PromptReport] = []
        first = 0
        for chunk in chunks:
            targets = self._rows.token_ids(chunk.row, chunk.start + 1, chunk.count)
            for begin in range(0, chunk.count, _LOGITS_ROWS):
                end = min(begin + _LOGITS_ROWS, chunk.count)
                logits = self._model.logits(hidden[first + begin : first + end])
                logprobs = self._sampler.logprobs(logits, targets[begin:end], chunk.num_top)
                reports.append(PromptReport(chunk.row, chunk.num_top, logprobs))
            first += chunk.count
        return reports


def _pool(hidden: torch.Tensor, pooled: Sequence[PooledTokens]) -> PooledSums | None:
    """Enqueue the sums of hidden states for embeddings, so that only one vector per request reaches the host.

    Args:
        hidden: [P, hidden] concatenated states of all pooled tokens.
        pooled: Tokens of each request.

    Returns:
        Sums in float64, whose rounding to float32 does not depend on the order of summation. None without pooled
        tokens.
    """
    if not pooled:
        return None
    if len(pooled) == len(hidden):
        sums = hidden.double()
    else:
        parts = hidden.split([tokens.count for tokens in pooled])
        sums = torch.stack([part.sum(dim=0, dtype=torch.float64) for part in parts])
    return PooledSums([tokens.row for tokens in pooled], sums)


def _is_decode(plan: StepPlan) -> bool:
    """Return True if each request computes one token, is sampled, and has neither drafts nor a report on its prompt."""
    return bool(plan.scheduled) and all(
        item.count == 1 and item.sample and item.prompt_logprobs is None and not item.drafts for item in plan.scheduled
    )
