"""Runs one plan on one rank: rows, page copies, the model, the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from shared.messages import TokenLogprobs
from worker.executor.forward_batch import ForwardBatch
from worker.executor.request_rows import PromptChunk, RequestRows
from worker.sampling.logprobs import compute_logprobs, to_entries
from worker.sampling.parameters import Needs
from worker.sampling.sampler import Sampler
from worker.scheduler.plan import PageCopy, SampledToken, StepPlan, StepResult

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

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages in order."""
        ...


class ModelRunner:
    """Executes plans in order. Every rank of a group runs the same plans and samples the same ids."""

    def __init__(self, model: Model, kv: PageStorage, rows: RequestRows, sampler: Sampler) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end."""
        rows = self._rows
        rows.apply(plan)
        if plan.page_copies:
            self._kv.copy_pages(plan.page_copies)
        if not plan.scheduled:
            return StepResult(step=plan.step, sampled=[])
        batch, sampled = rows.forward_batch(plan)
        chunks = rows.prompt_chunks(plan)
        num_sampled = len(sampled.rows)
        if chunks:
            batch = replace(batch, logits_indices=_with_chunks(batch.logits_indices, chunks))
        hidden = self._model.hidden_states(batch, self._kv)
        prompt_logprobs = self._prompt_logprobs(hidden[num_sampled:], chunks)
        if not num_sampled:
            return StepResult(step=plan.step, sampled=[], prompt_logprobs=prompt_logprobs)
        token_ids, logprobs = self._sampler.sample(self._model.logits(hidden[:num_sampled]), sampled)
        rows.append(sampled, token_ids)
        needs = rows.sampling.needs[sampled.rows]
        reporting = sampled.rows[needs & Needs.LOGPROBS != 0]
        entries: list[TokenLogprobs] = []
        if logprobs is not None:
            entries = to_entries(logprobs, rows.sampling.num_logprobs[reporting].tolist())
        by_row = dict(zip(reporting.tolist(), entries))
        return StepResult(
            step=plan.step,
            sampled=[
                SampledToken(row, token_id, by_row.get(row) if token_id >= 0 else None)
                for row, token_id in zip(sampled.rows.tolist(), token_ids.tolist())
            ],
            prompt_logprobs=prompt_logprobs,
        )

    def _prompt_logprobs(self, hidden: torch.Tensor, chunks: list[PromptChunk]) -> dict[int, list[TokenLogprobs]]:
        """hidden: [P, hidden], the rows of all chunks one after the other."""
        result: dict[int, list[TokenLogprobs]] = {}
        first = 0
        for chunk in chunks:
            targets = self._rows.token_ids(chunk.row, chunk.start + 1, chunk.count)
            entries = result.setdefault(chunk.row, [])
            for begin in range(0, chunk.count, _LOGITS_ROWS):
                end = min(begin + _LOGITS_ROWS, chunk.count)
                logits = self._model.logits(hidden[first + begin : first + end])
                entries += to_entries(
                    compute_logprobs(logits, targets[begin:end], chunk.num_top), [chunk.num_top] * (end - begin)
                )
            first += chunk.count
        return result


def _with_chunks(logits_indices: torch.Tensor, chunks: list[PromptChunk]) -> torch.Tensor:
    """The sampled rows' last tokens, then every token of the chunks."""
    device = logits_indices.device
    ranges = [torch.arange(chunk.offset, chunk.offset + chunk.count, device=device) for chunk in chunks]
    return torch.cat((logits_indices, *ranges))
