"""Runs plans on one rank: rows, page copies, the model, the sampler. Enqueues; nothing is read back until it is asked.

A decode step whose size has been captured is one graph; others are enqueued kernel by kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from kernels.ops.attention.cascade import CascadeWork
from worker.executor.decode_graphs import DecodeGraphs, Size
from worker.executor.device import Device
from worker.executor.pending_step import PendingStep, PooledSums, PromptReport, step_output
from worker.executor.pooling import pool
from worker.executor.request_rows import PromptChunk, RequestRows, StagedStep
from worker.executor.shared_prefixes import SharedPrefixes
from worker.executor.tail_graphs import Tail, TailGraphs
from worker.kv.storage import CopyBatch
from worker.model.forward_batch import ForwardBatch
from worker.plan import StepPlan, StepResult
from worker.sampling.sampler import SampledTokens, Sampler

# Rows of logits that exist at a time for prompt log-probabilities: 256 x 49,152 float32 are 48 MiB.
_LOGITS_ROWS = 256


class Model(Protocol):
    """What the runner needs of a decoder."""

    def hidden_states(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        """Computes a step; [S, hidden] of the tokens batch.logits_indices, normed for the head."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab] float32."""
        ...


class PageStorage(Protocol):
    """What the runner needs of the KV cache."""

    def copy_pages(self, copies: CopyBatch) -> None:
        """Copies pages."""
        ...


class ModelRunner:
    """Executes plans in order. Every rank of a group runs the same plans and samples the same ids.

    Args:
        graphs: capture decode steps, where the device can.
        max_tokens_each: tokens per request of the largest steps that are captured.
        prefixes: finds what requests of decode steps share; None: nobody looks.
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
        max_tokens_each: int = 1,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        self._sampler = sampler
        self._device = device
        self._prefixes = prefixes
        self._graphs: DecodeGraphs[torch.Tensor] | None = None
        self._tails = TailGraphs(device, self._compute_tail, rows.clear_sampled)
        if graphs and device.captures:
            self._graphs = DecodeGraphs(
                device,
                self._compute,
                rows.clear_inputs,
                max_num_seqs=rows.max_num_seqs,
                max_tokens_each=max_tokens_each,
            )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Enqueues one step. Plans may follow each other before their results are read."""
        # Nobody asks where there are neither graphs nor shared prefixes, as on the CPU.
        decodes = (self._graphs is not None or self._prefixes is not None) and _samples_equally_many(plan)
        cascade = self._find_shared(plan, decodes)
        size = self._choose_graph(plan) if decodes and cascade is None else None
        if size is not None:
            self._tails.capture_next()
        staged = self._rows.stage(plan, size)
        if self._rows.distributions is not None:
            # What was drafted for these rows is in the step, or of no use after it.
            self._rows.distributions.forget(item.row for item in plan.scheduled)
        for copies in staged.copies:
            self._kv.copy_pages(copies)
        pending = self._run(plan, staged, size, cascade)
        self._rows.hold(pending)
        return pending

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end."""
        return self.launch(plan).result()

    @property
    def can_capture(self) -> bool:
        """Whether decode steps are captured at all."""
        return self._graphs is not None

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """While nothing else is to do: captures one more decode step. False where there is none left."""
        return self._graphs is not None and (self._graphs.capture_next() or self._tails.capture_next())

    def _run(self, plan: StepPlan, staged: StagedStep, size: Size | None, cascade: CascadeWork | None) -> PendingStep:
        batch, sampled, chunks = staged.batch, staged.sampled, staged.chunks
        num_sampled = len(sampled.rows)
        tokens = logits = None
        prompts: list[PromptReport] = []
        sums = None
        if size is not None and self._graphs is not None:
            # The next replay, which comes after the head, writes to the same states.
            hidden, tail = self._graphs.replay(size), self._tails.choose(size, sampled)
            if tail is not None:
                # The next replay writes to the same ids, which are then still on their way to the host.
                tokens = SampledTokens(tail.replay()[:num_sampled].clone())
            else:
                logits = self._model.logits(hidden[:num_sampled])
        elif batch is not None:
            batch = batch if cascade is None else replace(batch, cascade=cascade)
            hidden = self._model.hidden_states(batch, self._kv)
            prompts = self._prompt_logprobs(hidden[num_sampled:], chunks)
            sums = pool(hidden[num_sampled + sum(chunk.count for chunk in chunks) :], staged.pooled)
            logits = self._model.logits(hidden[:num_sampled]) if num_sampled else None
        if logits is not None:
            tokens = self._sampler.sample(logits, sampled)
            self._rows.append(sampled, tokens.token_ids)
        pooled = None if sums is None else PooledSums([one.row for one in staged.pooled], sums)
        output = step_output(plan.step, sampled, tokens, prompts, pooled)
        return PendingStep(output, self._device)

    def _choose_graph(self, plan: StepPlan) -> Size | None:
        return None if self._graphs is None else self._graphs.choose(len(plan.scheduled), plan.scheduled[0].count)

    def _find_shared(self, plan: StepPlan, decodes: bool) -> CascadeWork | None:
        if self._prefixes is None:
            return None
        for update in plan.block_tables:
            if update.group == 0:
                self._prefixes.update(update.row, update.start, update.pages)
        return self._prefixes.find(plan.scheduled) if decodes and plan.scheduled[0].count == 1 else None

    def _compute(self, size: Size) -> torch.Tensor:
        """Without the head: a graph keeps its outputs for good, and logits of all sizes would fill gigabytes."""
        return self._model.hidden_states(self._rows.graph_batch(size), self._kv)

    def _compute_tail(self, tail: Tail) -> torch.Tensor:
        """The ids of all rows of a step, padding among them."""
        if self._graphs is None:
            raise RuntimeError("a tail follows the graph of a decode step")
        sampled = self._rows.graph_sampled(tail.size.num_requests, tail.needs)
        tokens = self._sampler.sample(self._model.logits(self._graphs.outputs(tail.size)), sampled)
        self._rows.append(sampled, tokens.token_ids)
        return tokens.token_ids

    def _prompt_logprobs(self, hidden: torch.Tensor, chunks: list[PromptChunk]) -> list[PromptReport]:
        """hidden: [P, hidden], the rows of all chunks one after the other."""
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


def _samples_equally_many(plan: StepPlan) -> bool:
    """Whether every request samples once, after equally many tokens, and reports nothing else: what a graph holds."""
    scheduled = plan.scheduled
    if not scheduled:
        return False
    count = scheduled[0].count
    return all(
        item.count == count and item.sample and item.prompt_logprobs is None and not item.drafts for item in scheduled
    )
