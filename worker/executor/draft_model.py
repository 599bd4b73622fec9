"""The draft model's own steps: it reads the known tokens that it has not seen, then proposes one after the other.

It works on the target's rows, block tables (of the first KV group) and page ids, with keys and values of its own in
each page. What it proposes is written to the rows behind the known tokens, where its next proposal reads it and where
the target's next step writes over it; so nothing is waited for between two proposals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.ops.sampling.inputs import NOT_USABLE, NOTHING_LEFT
from kernels.ops.step_inputs.inputs import TEMPERATURE
from worker.executor.decode_graphs import DecodeGraphs, Size
from worker.executor.device import Device, Download
from worker.executor.model_runner import Model, PageStorage
from worker.executor.request_rows import RequestRows
from worker.model.forward_batch import ForwardBatch
from worker.plan import DraftedRow, DraftedTokens, ScheduledTokens, StepPlan, StepResult
from worker.sampling.sampled_rows import Listed, Needs, SampledRows
from worker.sampling.sampler import Sampler

_CHANGES_LOGITS = Needs.ADJUST | Needs.PENALTY | Needs.EXTENDED | Needs.DRY | Needs.ALLOWED | Needs.BAD_WORDS
"""Where a row has one of these the sampler writes to the logits."""


class DraftModel:
    """Executes what plans say of `drafting`; their block tables and page copies are made before.

    A proposal is sampled as the target samples: with the row's parameters and the noise of the position, so that a
    draft that knows the target's distribution draws the target's token.

    Args:
        model, kv: of the draft alone; its pages have the target's numbers.
        rows, sampler: the target's own.
        vocab_size: of the target. The draft's logits are cut to it, or filled up with minus infinity.
        draft_vocab_size: token ids that the model can read; those from there on, which no tokenizer has, are read as
            its last.
        max_len: the draft computes positions below it.
        graphs: capture passes of one token a row, where the device can.
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
        self.max_len = max_len
        self._model = model
        self._kv = kv
        self._rows = rows
        self._sampler = sampler
        self._device = device
        self._vocab_size = vocab_size
        self._draft_vocab_size = draft_vocab_size
        self._all = torch.arange(rows.max_num_seqs, device=device.torch_device)
        self._graphs: DecodeGraphs[torch.Tensor] | None = None
        if graphs and device.captures:
            self._graphs = DecodeGraphs(device, self._compute, rows.clear_inputs, max_num_seqs=rows.max_num_seqs)

    @torch.inference_mode()
    def launch(self, step: int, drafting: Sequence[DraftedRow]) -> PendingDrafts:
        """Enqueues one pass over the known tokens and one for each further proposal.

        Raises ValueError for a row with proposals and no token to read, and for positions from max_len on.
        """
        for row in drafting:
            if row.count < 1 or row.start + row.count + max(row.num_drafts - 1, 0) > self.max_len:
                raise ValueError(
                    f"row {row.row} drafts {row.num_drafts} tokens after {row.count} from position {row.start} on; "
                    f"it needs one to read, and positions below {self.max_len}"
                )
        if self._rows.distributions is not None:
            self._rows.distributions.forget(row.row for row in drafting)
        proposing = [row for row in drafting if row.num_drafts]
        wanted = [[ScheduledTokens(row.row, row.start, row.count, row.num_drafts > 0) for row in drafting]]
        for index in range(1, max((row.num_drafts for row in proposing), default=1)):
            going_on = [row for row in proposing if row.num_drafts > index]
            wanted.append([ScheduledTokens(r.row, r.start + r.count + index - 1, 1, True) for r in going_on])
        sizes = self._choose_graphs(wanted)
        passes = [self._pass(step, items, size, index) for index, (items, size) in enumerate(zip(wanted, sizes))]
        return PendingDrafts(step, proposing, passes)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """While nothing else is to do: captures one more kind of pass. False where there is none left."""
        return self._graphs is not None and self._graphs.capture_next()

    def _pass(self, step: int, items: list[ScheduledTokens], size: Size | None, num_proposed: int) -> _Pass:
        """Computes tokens of the rows and samples one more in those that want it, each after so many proposals."""
        staged = self._rows.stage(StepPlan(step=step, scheduled=items), size)
        batch, sampled = staged.batch, replace(staged.sampled, trial=True)
        if batch is None:
            raise ValueError("a step of the draft model needs rows")
        if num_proposed and Needs.PENALTY in sampled.listed:
            index = sampled.listed[Needs.PENALTY].index
            rows, positions = sampled.device_rows.index_select(0, index), sampled.positions.index_select(0, index)
            sampled = replace(sampled, proposed=self._rows.tokens_before(rows, positions, num_proposed))
        if size is not None and self._graphs is not None:
            hidden = self._graphs.replay(size)[: len(items)]
        else:
            hidden = self._hidden_states(batch)
        tensors: list[torch.Tensor] = []
        if len(sampled.rows):
            tensors += self._propose(hidden, sampled)
        passed = _Pass(self._device.download(tensors))
        self._rows.hold(passed)
        return passed

    def _choose_graphs(self, wanted: list[list[ScheduledTokens]]) -> list[Size | None]:
        """For each pass; what is captured is so before the first, and a step asks but once for a size."""
        graphs = self._graphs
        if graphs is None:
            return [None] * len(wanted)
        decodes = [all(item.count == 1 and item.sample for item in items) for items in wanted]
        chosen = {num: graphs.choose(num, 1) for num in {len(items) for items, fits in zip(wanted, decodes) if fits}}
        return [chosen[len(items)] if fits else None for items, fits in zip(wanted, decodes)]

    def _compute(self, size: Size) -> torch.Tensor:
        return self._hidden_states(self._rows.graph_batch(size))

    def _hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        if self._draft_vocab_size < self._vocab_size:
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=self._draft_vocab_size - 1))
        return self._model.hidden_states(batch, self._kv)

    def _propose(self, hidden: torch.Tensor, sampled: SampledRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples from [S, hidden] and appends to the rows; [S] int64 ids, below 0 where there is none, and [S] float32
        probabilities.
        """
        logits = self._fitted(self._model.logits(hidden))
        raw = logits.clone() if sampled.needs & _CHANGES_LOGITS else logits
        token_ids = self._sampler.sample(logits, sampled).token_ids
        self._keep_distributions(logits, sampled)
        self._rows.append(sampled, token_ids)
        return token_ids, self._probabilities(raw, token_ids, sampled)

    def _keep_distributions(self, logits: torch.Tensor, sampled: SampledRows) -> None:
        """For rejection, what the tokens were drawn from: of the logits as the sampler left them. A row that it filters
        in ways of its own keeps none, and its drafts count as found, not drawn."""
        distributions = self._rows.distributions
        if distributions is None or sampled.needs & Needs.EXTENDED:
            return
        found = self._sampler.distributions(logits, sampled)
        if found is not None:
            distributions.put(sampled.rows.tolist(), sampled.lengths.tolist(), found)

    def _fitted(self, logits: torch.Tensor) -> torch.Tensor:
        """[S, the draft's vocabulary] -> [S, vocab_size]."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size].contiguous()

    def _probabilities(self, raw: torch.Tensor, token_ids: torch.Tensor, sampled: SampledRows) -> torch.Tensor:
        """[S] of each token under softmax(raw / temperature), without filters; a greedy row's temperature counts as 1.
        NaN where the logits were not usable, 0 where masks left no token."""
        if sampled.needs & Needs.NOISE:
            every = Listed(self._all[: len(sampled.rows)], sampled.rows, sampled.rows)
            temperature = self._rows.sampling.words(sampled, every).view(torch.float32)[:, TEMPERATURE]
            raw = raw / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
        probabilities = raw.softmax(dim=1).gather(1, token_ids.clamp(min=0).unsqueeze(1)).squeeze(1)
        probabilities = torch.where(token_ids == NOTHING_LEFT, 0.0, probabilities)
        return torch.where(token_ids == NOT_USABLE, float("nan"), probabilities)


class _Pass:
    """One pass, until what it sampled has arrived.

    Attributes:
        arrived: after `wait`, ids and probabilities; nothing where nothing was sampled.
    """

    def __init__(self, download: Download) -> None:
        self._download: Download | None = download
        self.arrived: tuple[torch.Tensor, ...] = ()

    def done(self) -> bool:
        return self._download is None or self._download.done()

    def wait(self) -> None:
        """Returns when the pass is over. May be called twice."""
        if self._download is not None:
            self.arrived = self._download.wait()
            self._download = None


class PendingDrafts:
    """A step of the draft model between `launch` and its result."""

    def __init__(self, step: int, proposing: Sequence[DraftedRow], passes: Sequence[_Pass]) -> None:
        self._step = step
        self._proposing = proposing
        self._passes = passes

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._passes[-1].done()

    def wait(self) -> None:
        """Returns when the step is over. May be called twice."""
        for one in self._passes:
            one.wait()

    def result(self) -> StepResult:
        """Waits for the step. May be called twice."""
        self.wait()
        drafted = {row.row: DraftedTokens(row.row, [], []) for row in self._proposing}
        for index, one in enumerate(self._passes):
            if not one.arrived:
                continue
            token_ids, probabilities = one.arrived
            # What is no token is 0 in the row too; its probability is 0 or not finite.
            columns = token_ids.clamp(min=0).tolist(), probabilities.tolist()
            going_on = [row.row for row in self._proposing if row.num_drafts > index]
            for row, token_id, probability in zip(going_on, *columns, strict=True):
                drafted[row].token_ids.append(token_id)
                drafted[row].probabilities.append(probability)
        return StepResult(step=self._step, sampled=[], drafted=list(drafted.values()))
