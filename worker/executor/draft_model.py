"""Steps of the draft model, and the runner that dispatches plans to the target or the draft model.

In a step, the draft model first reads the known tokens that it has not processed, then proposes one token after the
other. It uses the target's rows, block tables (of the first KV group) and page ids, and has its own keys and values in
each page. Proposals are written to the rows after the known tokens, where the next pass reads them and the target's
next step overwrites them. No pass waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from worker.executor.device import Device
from worker.executor.executor import EnqueuedStep
from worker.executor.model_runner import GraphRunner, Model, ModelRunner, PageStorage
from worker.executor.pending_step import PendingTensors
from worker.executor.request_rows import RequestRows
from worker.model.forward_batch import ForwardBatch
from worker.plan import DraftedRow, DraftedTokens, ScheduledTokens, StepPlan, StepResult
from worker.sampling.sampled_rows import SampledRows, SamplingFeature
from worker.sampling.sampler import Sampler


class DraftModel(GraphRunner):
    """Runner of the draft model. Block tables and page copies of a plan must be applied before.

    Proposals are sampled like the target's tokens, with the row's parameters and the noise of the position, so a draft
    model that knows the target's distribution draws the target's token.

    Args:
        model: Draft model.
        kv: KV cache of the draft model, with the page ids of the target.
        rows: State of the requests, shared with the target.
        sampler: Sampler of the target.
        device: Device of the model.
        vocab_size: Vocabulary of the target. The draft's logits are truncated to it or padded with minus infinity.
        draft_vocab_size: Vocabulary of the draft model. Larger ids, which no tokenizer produces, are read as its last.
        max_len: Number of positions that the draft model can compute.
        graphs: Capture passes of one token per row if the device can.
    """

    def __init__(
        self,
        model: Model,
        kv: PageStorage,
        rows: RequestRows,
        sampler: Sampler,
        device: Device,
        *,
        vocab_size: int,
        draft_vocab_size: int,
        max_len: int,
        graphs: bool = True,
    ) -> None:
        super().__init__(model, kv, rows, sampler, device, graphs=graphs)
        self.max_len = max_len
        self._vocab_size = vocab_size
        self._draft_vocab_size = draft_vocab_size

    @torch.inference_mode()
    def launch(self, step: int, drafting: Sequence[DraftedRow]) -> PendingDrafts:
        """Enqueue one pass over the known tokens and one for each further proposal.

        Raises:
            ValueError: A row has no token to read, or needs positions beyond max_len.
        """
        for row in drafting:
            if row.count < 1 or row.start + row.count + max(row.num_drafts - 1, 0) > self.max_len:
                raise ValueError(
                    f"row {row.row} drafts {row.num_drafts} tokens after {row.count} tokens from position {row.start}; "
                    f"it must read at least one token and use positions below {self.max_len}"
                )
        if self._rows.distributions is not None:
            self._rows.distributions.forget(row.row for row in drafting)
        proposing = [row for row in drafting if row.num_drafts]
        wanted = [[ScheduledTokens(row.row, row.start, row.count, row.num_drafts > 0) for row in drafting]]
        for index in range(1, max((row.num_drafts for row in proposing), default=1)):
            remaining = [row for row in proposing if row.num_drafts > index]
            wanted.append([ScheduledTokens(r.row, r.start + r.count + index - 1, 1, True) for r in remaining])
        sizes = self._choose_graphs(wanted)
        passes = [self._pass(step, items, size, index) for index, (items, size) in enumerate(zip(wanted, sizes))]
        return PendingDrafts(step, proposing, passes)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more graph while the worker is idle. Return False if none is left."""
        return self._graphs is not None and self._graphs.capture_next()

    def _pass(self, step: int, items: list[ScheduledTokens], size: int | None, num_proposed: int) -> PendingTensors:
        """Compute tokens of the rows and sample one more for those that need it, after `num_proposed` proposals."""
        staged = self._rows.stage(StepPlan(step=step, scheduled=items), size)
        batch, sampled = staged.batch, replace(staged.sampled, trial=True)
        if batch is None:
            raise ValueError("a step of the draft model has no rows")
        if num_proposed and SamplingFeature.PENALTY in sampled.by_feature:
            index = sampled.by_feature[SamplingFeature.PENALTY].index
            rows, positions = sampled.device_rows.index_select(0, index), sampled.positions.index_select(0, index)
            sampled = replace(sampled, proposed=self._rows.tokens_before(rows, positions, num_proposed))
        if size is not None and self._graphs is not None:
            hidden = self._graphs.replay(size)[: len(items)]
        else:
            hidden = self._hidden_states(batch)
        proposed = [self._propose(hidden, sampled)] if len(sampled.rows) else []
        passed = PendingTensors(self._device.download(proposed))
        self._rows.reserve_until(passed)
        return passed

    def _choose_graphs(self, wanted: list[list[ScheduledTokens]]) -> list[int | None]:
        """Return the graph size of each pass. Capture before the first pass, and request each size once."""
        graphs = self._graphs
        if graphs is None:
            return [None] * len(wanted)
        decodes = [all(item.count == 1 and item.sample for item in items) for items in wanted]
        chosen = {num: graphs.choose(num) for num in {len(items) for items, fits in zip(wanted, decodes) if fits}}
        return [chosen[len(items)] if fits else None for items, fits in zip(wanted, decodes)]

    def _hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        if self._draft_vocab_size < self._vocab_size:
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=self._draft_vocab_size - 1))
        return super()._hidden_states(batch)

    def _propose(self, hidden: torch.Tensor, sampled: SampledRows) -> torch.Tensor:
        """Sample from [S, hidden] states and append to the rows. Return [S] int64 ids, negative if sampling failed."""
        logits = self._fit_vocabulary(self._model.logits(hidden))
        token_ids = self._sampler.sample(logits, sampled).token_ids
        self._store_distributions(logits, sampled)
        self._rows.append(sampled, token_ids)
        return token_ids

    def _store_distributions(self, logits: torch.Tensor, sampled: SampledRows) -> None:
        """Store the distributions for rejection sampling, computed from the logits after the sampler's changes.

        Rows with extended filters have none; their drafts are verified like drafts that were not sampled.
        """
        distributions = self._rows.distributions
        if distributions is None or sampled.features & SamplingFeature.EXTENDED:
            return
        found = self._sampler.distributions(logits, sampled)
        if found is not None:
            distributions.put(sampled.rows.tolist(), sampled.lengths.tolist(), found)

    def _fit_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert [S, draft vocabulary] logits to [S, vocab_size]."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size].contiguous()


class PendingDrafts:
    """A step of the draft model between `launch` and its result."""

    def __init__(self, step: int, proposing: Sequence[DraftedRow], passes: Sequence[PendingTensors]) -> None:
        self._step = step
        self._proposing = proposing
        self._passes = passes

    def done(self) -> bool:
        """Return True if `result` would return immediately."""
        return self._passes[-1].done()

    def wait(self) -> None:
        """Wait until the step has finished. May be called repeatedly."""
        for one_pass in self._passes:
            one_pass.wait()

    def result(self) -> StepResult:
        """Wait for the step and return its result. May be called repeatedly."""
        self.wait()
        drafted = {row.row: DraftedTokens(row.row, []) for row in self._proposing}
        for index, one_pass in enumerate(self._passes):
            rows = [row.row for row in self._proposing if row.num_drafts > index]
            for token_ids in one_pass.tensors:
                # Failed ids are 0 in the row too.
                for row, token_id in zip(rows, token_ids.clamp(min=0).tolist(), strict=True):
                    drafted[row].token_ids.append(token_id)
        return StepResult(step=self._step, sampled=[], drafted=list(drafted.values()))


class PlanRunner:
    """Runner of both models on one rank.

    Args:
        target: Runner of the target model.
        draft: Runner of the draft model. If None, plans must not contain draft steps.
    """

    def __init__(self, target: ModelRunner, draft: DraftModel | None = None) -> None:
        self._target = target
        self._draft = draft

    def launch(self, plan: StepPlan) -> EnqueuedStep:
        """Enqueue one step. Further plans may be launched before the result is read."""
        if not plan.drafting:
            return self._target.launch(plan)
        if self._draft is None:
            raise ValueError("the plan contains a step of the draft model, but there is no draft model")
        if plan.scheduled or plan.new_rows:
            raise ValueError("a step of the draft model must not schedule tokens or add rows")
        if plan.block_tables or plan.page_copies:
            # The target's runner mirrors the block tables, so it must see all updates.
            self._target.launch(
                StepPlan(step=plan.step, scheduled=[], block_tables=plan.block_tables, page_copies=plan.page_copies)
            )
        return self._draft.launch(plan.step, plan.drafting)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to completion."""
        return self.launch(plan).result()

    @property
    def draft_max_len(self) -> int:
        """Number of positions that the draft model can compute; 0 without a draft model."""
        return 0 if self._draft is None else self._draft.max_len

    @property
    def can_capture(self) -> bool:
        """True if decode steps are captured."""
        return self._target.can_capture

    def capture_next(self) -> bool:
        """Capture one more graph while the worker is idle. Return False if none is left."""
        return self._target.capture_next() or (self._draft is not None and self._draft.capture_next())
